"""One forward hook per layer: on refresh steps it hands over the layer's input a and the gradient g
of its output.

The hook passes the output through an autograd function that marks it dirty and returns it: no copy,
safe with in-place activations, and released with the graph. When disarmed, it does nothing at all.
Copies of a module (deepcopy, pickle, averaged models) carry hooks that do nothing, and the hooks go
when the capture goes.

Under torch.compile the hook is traced along with its layer, in one graph: there the backward hands
over through an operator of our own, `seng::receive`, which the compiler takes as it is. Armed and
disarmed are two graphs; the compiler's guards choose.

A hook that does nothing still takes a few microseconds per layer and step. So once a refresh has
gone through without a compiler, hooks are there only while armed, but for the first layer's: if
that is ever traced, all come back, and stay.
"""

from __future__ import annotations

import itertools
import sys
import traceback
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.autograd import forward_ad
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.utils.checkpoint import CheckpointFunction
from torch.utils.hooks import RemovableHandle


class Capture:
    """Hooks on `layers`; `receive` is called inside the backward, once per call of a layer."""

    receive: ClassVar[Any]  # (layer, training, aside, task, a, g) -> None

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self.armed = False  # whether backwards now are captured
        self.eager = False  # whether it has captured without a compiler
        self.compiled = False  # whether a compiler was ever seen
        self.aside = False  # whether forwards now feed only the curvature
        # Looked at while tracing, so that a graph from before there were more layers is not taken.
        self.size = f"{len(layers)} layers"
        key = next(_NUMBERS)
        _CAPTURES[key] = self
        capture = weakref.ref(self)
        self.hooks = [
            _Hook(capture, layer, key, i) for i, layer in enumerate(layers)
        ]
        self.handles: list[RemovableHandle] = []
        self.remove = weakref.finalize(self, _remove, self.handles, 0)
        self.remove.atexit = False
        self.attach()

    def watch(self, armed: bool) -> None:
        """From now on capture backwards, or let them pass."""
        self.armed = armed
        if armed:
            self.attach()
        elif self.eager and not self.compiled:
            _remove(self.handles, 1)

    def attach(self) -> None:
        """All hooks that are not there; before those of others, which may change the output."""
        if not self.remove.alive:
            return
        for hook in self.hooks[len(self.handles) :]:
            layer = hook.layer()
            if layer is not None:
                handle = layer.register_forward_hook(
                    hook, with_kwargs=True, prepend=True
                )
                self.handles.append(handle)


def _remove(handles: list[RemovableHandle], keep: int) -> None:
    for handle in handles[keep:]:
        handle.remove()
    del handles[keep:]


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _traced(key: int) -> bool:
    """Called when a hook is traced, not when the graph runs: from now on all hooks stay."""
    capture = _CAPTURES.get(key)
    if capture is not None:
        capture.compiled = True
        capture.attach()
    return True


_NUMBERS = itertools.count()
# By number, for compiled graphs.
_CAPTURES: weakref.WeakValueDictionary[int, Capture] = (
    weakref.WeakValueDictionary()
)


class Inert:
    """A hook that does nothing: what ours become in a copy of their module."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Do nothing."""

    def __reduce__(self) -> tuple[type[Inert], tuple[()]]:
        return Inert, ()


class _Hook(Inert):
    def __init__(
        self,
        capture: weakref.ref[Capture],
        layer: nn.Module,
        key: int,
        index: int,
    ) -> None:
        self.capture = capture
        self.layer = weakref.ref(layer)
        self.key = key
        self.index = index
        # A tensor, so that one compiled graph serves all equal layers.
        self.where = torch.tensor([key, index], device="cpu")

    def __call__(
        self,
        layer: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
    ) -> Any:
        compiling = torch.compiler.is_compiling()
        if compiling and torch.compiler.is_dynamo_compiling():
            _traced(self.key)
        elif compiling and torch.compiler.is_exporting():
            return None
        # Before `armed` is looked at, which would be guarded: evaluation needs one graph, not two.
        if compiling and not torch.is_grad_enabled():
            return None
        capture = self.capture()
        if capture is None or not capture.armed or layer is not self.layer():
            return None
        # Also where nothing is captured: a backward that starts inside belongs to it.
        outer = -1 if compiling else _outermost()
        a = _input(layer, (*args, *kwargs.values()), out)
        if a is None:
            return None
        mode = layer.training, capture.aside
        if compiling and capture.size:
            where = self.where, *mode, _call_number()
            return _CompiledTap.apply(out, a.detach(), *where)  # type: ignore[no-untyped-call]
        if transformed():
            return None
        capture.eager = True
        # What is not made by this forward may be written to before the step, as a buffer for
        # batches.
        given = a.grad_fn is None
        receive = partial(capture.receive, self.index, *mode)
        # A layer may have saved its output, which stays as it is.
        with _unsafe_preserve_version_counter(out):
            how = given, receive, outer
            tapped = _Tap.apply(out, a.detach(), *how)  # type: ignore[no-untyped-call]
        # A view makes it only now; torch's register_hook would crash before.
        _ = tapped.grad_fn
        return tapped


def _input(
    layer: nn.Module, given: tuple[Any, ...], out: Any
) -> Tensor | None:
    """The first tensor that a layer was given, if there is a gradient to capture."""
    if not torch.is_grad_enabled():
        return None
    if not (isinstance(out, Tensor) and out.requires_grad):
        return None
    params = layer._parameters.values()
    if not [p for p in params if p is not None and p.requires_grad]:
        return None
    for x in given:
        if isinstance(x, Tensor):
            return x
    return None


def transformed() -> bool:
    """Inside torch.func, forward-mode differentiation or torch.jit.trace, which are no training
    backwards.
    """
    return (
        torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
    )


def _outermost() -> int:
    """The outermost backward that this forward runs in, or -1: reentrant checkpointing nests them,
    and their samples belong together.

    The outermost checkpoint remembers it. A layer runs directly inside of it before one does
    further in, where the backward that runs is another.
    """
    task: int = torch._C._current_graph_task_id()
    if task == -1:
        return -1
    code = CheckpointFunction.backward.__code__
    stack = traceback.walk_stack(sys._getframe())
    nested = [frame for frame, _ in stack if frame.f_code is code]
    if not nested:
        return -1
    checkpoint = nested[-1].f_locals["ctx"]
    if len(nested) == 1 or not hasattr(checkpoint, "outermost"):
        checkpoint.outermost = task
    return checkpoint.outermost  # type: ignore[no-any-return]


def _task(outer: int) -> int:
    """The backward that runs, or the one around it."""
    return torch._C._current_graph_task_id() if outer == -1 else outer


class _Tap(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, out: Tensor, a: Tensor, given: bool, receive: Any, outer: int
    ) -> Tensor:
        ctx.mark_dirty(out)
        ctx.save_for_backward(a)
        ctx.given = given
        ctx.receive = receive
        ctx.outer = outer
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (a,) = ctx.saved_tensors
        a = a.clone() if ctx.given else a
        ctx.receive(_task(ctx.outer), a, g)
        return g, None, None, None, None


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _call_number() -> int:
    """Another number for every call that is traced: two calls alike in all else must not be merged
    into one.
    """
    return next(_NUMBERS)


class _CompiledTap(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, out: Tensor, a: Tensor, where: Tensor, *call: Any
    ) -> Tensor:
        ctx.save_for_backward(a, _outer(out), where)
        ctx.call = call  # whether in training, of an own batch, its number
        return out.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        a, outer, where = ctx.saved_tensors
        # The gradient goes on through the operator's result, so that no compiler drops the call.
        zero = _receive(a, g, outer, where, *ctx.call)
        return g + zero, *[None] * 5


# Python does the work of these operators, which a CUDA graph would record once and not repeat.
_UNSAFE = getattr(torch.Tag, "cudagraph_unsafe", None)
_TAGS = () if _UNSAFE is None else (_UNSAFE,)


@torch.library.custom_op("seng::outer", mutates_args=(), tags=_TAGS)
def _outer(out: Tensor) -> Tensor:
    """The backward that this forward runs in, or -1; asked when the graph runs, not when traced."""
    return torch.tensor(_outermost())


@_outer.register_fake
def _(out: Tensor) -> Tensor:
    return torch.empty((), dtype=torch.int64)


@torch.library.custom_op("seng::receive", mutates_args=(), tags=_TAGS)
def _receive(
    a: Tensor,
    g: Tensor,
    outer: Tensor,
    where: Tensor,
    training: bool,
    own: bool,
    call: int,
) -> Tensor:
    """Hand over copies, since the compiler reuses the memory of a and g; a zero comes back."""
    key, index = where.tolist()
    capture = _CAPTURES.get(key)
    if capture is not None:
        task = _task(int(outer))
        # An operator excludes it.
        autograd = torch._C.DispatchKey.AutogradFunctionality
        with torch._C._SetExcludeDispatchKeyGuard(autograd, False):
            capture.receive(index, training, own, task, a.clone(), g.clone())
    return g.new_zeros(())


@_receive.register_fake
def _(a: Tensor, g: Tensor, *_: Any) -> Tensor:
    return g.new_zeros(())


def accumulates(p: Tensor) -> bool:
    """Whether the running backward reaches p; it does not where only inputs' gradients are asked
    for.
    """
    if not p.requires_grad:
        return False
    try:
        node = torch.autograd.graph.get_gradient_edge(p).node
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        # torch.autograd.grad of parameters does not say which.
        return True


def loss_scale() -> float:
    """The scale of the GradScaler whose step() runs this one.

    By then the gradients are unscaled; the captures are not.
    """
    for frame, _ in traceback.walk_stack(sys._getframe()):
        if frame.f_code.co_name == "step":
            caller = frame.f_locals.get("self")
            if isinstance(caller, GradScaler):
                return float(caller.get_scale())
    return 1.0
