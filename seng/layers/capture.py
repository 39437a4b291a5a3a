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
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.autograd import forward_ad
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.utils.checkpoint import CheckpointFunction
from torch.utils.hooks import RemovableHandle

# (the backward, the layer, whether in training, whether of an own batch, a, g)
Receive = Callable[[int, int, bool, bool, Tensor, Tensor], None]


class Capture:
    """Hooks on `layers`; `receive` is called inside the backward, once per call of a layer."""

    def __init__(self, layers: Sequence[nn.Module], receive: Receive) -> None:
        self._armed = False
        self.eager = False  # whether it has captured without a compiler
        self.compiled = False  # whether a compiler was ever seen
        self.own = False  # whether forwards now feed only the curvature
        self.receive = receive
        # Looked at while tracing, so that a graph from before there were more layers is not taken.
        self.size = f"{len(layers)} layers"
        self.key = next(_NUMBERS)
        _CAPTURES[self.key] = self
        self.hooks = [
            _Hook(weakref.ref(self), weakref.ref(layer), self.key, i)
            for i, layer in enumerate(layers)
        ]
        self.handles: list[RemovableHandle] = []
        self.remove = weakref.finalize(self, _remove, self.handles, 0)
        self.remove.atexit = False
        self._attach()

    @property
    def armed(self) -> bool:
        """Whether backwards now are captured."""
        return self._armed

    @armed.setter
    def armed(self, armed: bool) -> None:
        self._armed = armed
        if not self.remove.alive or self.compiled or not self.eager:
            return
        if armed:
            self._attach()
        else:
            _remove(self.handles, 1)

    def _attach(self) -> None:
        """All hooks that are not there; before those of others, which may change the output."""
        for hook in self.hooks[len(self.handles) :]:
            layer = hook.layer()
            if layer is not None:
                self.handles.append(
                    layer.register_forward_hook(
                        hook, with_kwargs=True, prepend=True
                    )
                )


def _remove(handles: list[RemovableHandle], keep: int) -> None:
    for handle in handles[keep:]:
        handle.remove()
    del handles[keep:]


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _traced(key: int) -> bool:
    """Called when a hook is traced, not when the graph runs: from now on all hooks stay."""
    capture = _CAPTURES.get(key)
    if capture is not None and not capture.compiled:
        capture.compiled = True
        if capture.remove.alive:
            capture._attach()
    return True


_NUMBERS = itertools.count()
# By number, for compiled graphs.
_CAPTURES: weakref.WeakValueDictionary[int, Capture] = (
    weakref.WeakValueDictionary()
)


class _Hook:
    def __init__(
        self,
        capture: weakref.ref[Capture],
        layer: weakref.ref[nn.Module],
        key: int,
        index: int,
    ) -> None:
        self.capture, self.layer, self.key, self.index = (
            capture,
            layer,
            key,
            index,
        )
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
        traced = compiling and torch.compiler.is_dynamo_compiling()
        if traced:
            _traced(self.key)
        elif compiling and torch.compiler.is_exporting():
            return None
        # Before `armed` is looked at, which would be guarded: evaluation needs one graph, not two.
        if compiling and not torch.is_grad_enabled():
            return None
        capture = self.capture()
        if capture is None or not capture.armed or layer is not self.layer():
            return None
        if not compiling:
            _root()  # also where nothing is captured: a backward that starts inside belongs to it
        a = _input(layer, (*args, *kwargs.values()), out)
        if a is None:
            return None
        mode = layer.training, capture.own
        if compiling and capture.size:
            where = self.where, *mode, _call_number()
            return _CompiledTap.apply(out, a.detach(), *where)  # type: ignore[no-untyped-call]
        if transformed():
            return None
        capture.eager = True
        # What is not made by this forward may be written to before the step, as a buffer for
        # batches.
        kept = a.detach().clone() if a.grad_fn is None else a.detach()
        # A layer may have saved its output, which stays as it is.
        with _unsafe_preserve_version_counter(out):
            tapped = _Tap.apply(out, kept, capture.receive, self.index, *mode)  # type: ignore[no-untyped-call]
        _ = (
            tapped.grad_fn
        )  # a view makes it only now; torch's register_hook would crash before
        return tapped

    def __reduce__(self) -> tuple[Callable[[], Any], tuple[()]]:
        return inert, ()


def _input(
    layer: nn.Module, given: tuple[Any, ...], out: Any
) -> Tensor | None:
    """The first tensor that a layer was given, if there is a gradient to capture."""
    params = [p for p in layer._parameters.values() if p is not None]
    trained = torch.is_grad_enabled() and any(p.requires_grad for p in params)
    if not (trained and isinstance(out, Tensor) and out.requires_grad):
        return None
    return next((x for x in given if isinstance(x, Tensor)), None)


def transformed() -> bool:
    """Inside torch.func, forward-mode differentiation or torch.jit.trace, which are no training
    backwards.
    """
    return (
        torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
    )


def _nothing(*_: Any) -> None:
    return None


def inert() -> Callable[..., None]:
    """What a hook becomes in a copy of its module."""
    return _nothing


class _Running(threading.local):
    def __init__(self) -> None:
        self.tasks: list[
            int
        ] = []  # backwards of this thread, the outermost first


_RUNNING = _Running()
_ROOTS: dict[
    int, int
] = {}  # a backward that runs -> the outermost one around it


def _root() -> int:
    """The outermost backward that runs here, or -1: reentrant checkpointing nests them, and their
    samples belong together.
    """
    task = torch._C._current_graph_task_id()
    if task == -1:
        return -1
    if task not in _ROOTS:
        tasks = _RUNNING.tasks
        while tasks and (tasks[-1] not in _ROOTS or not _recomputing()):
            _close(tasks.pop())
        _ROOTS[task] = _ROOTS[tasks[-1]] if tasks else task
        tasks.append(task)
        torch.autograd.Variable._execution_engine.queue_callback(
            partial(_close, task)
        )
    return _ROOTS[task]


def _close(task: int) -> None:
    _ROOTS.pop(task, None)


def _recomputing() -> bool:
    """Whether a reentrant checkpoint is on the stack; without one, an older backward was left by an
    exception.
    """
    code = CheckpointFunction.backward.__code__
    return any(frame.f_code is code for frame in _frames())


def _frames() -> Iterator[FrameType]:
    """The callers of this function's caller, the nearest first."""
    frame = sys._getframe().f_back
    while frame is not None:
        yield frame
        frame = frame.f_back


def _without_autocast(device: str) -> AbstractContextManager[Any]:
    """Nothing to do in a backward outside of it, and saying so takes a while."""
    if not torch.is_autocast_enabled(device):
        return nullcontext()
    return torch.autocast(device, enabled=False)


class _Tap(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        out: Tensor,
        a: Tensor,
        receive: Receive,
        index: int,
        training: bool,
        own: bool,
    ) -> Tensor:
        ctx.mark_dirty(out)
        ctx.save_for_backward(a)
        ctx.receive, ctx.index, ctx.mode = receive, index, (training, own)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (a,) = ctx.saved_tensors
        with torch.no_grad(), _without_autocast(g.device.type):
            ctx.receive(_root(), ctx.index, *ctx.mode, a, g)
        return g, *[None] * 5


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _call_number() -> int:
    """Another number for every call that is traced: two calls alike in all else must not be merged
    into one.
    """
    return next(_NUMBERS)


class _CompiledTap(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        out: Tensor,
        a: Tensor,
        where: Tensor,
        training: bool,
        own: bool,
        call: int,
    ) -> Tensor:
        ctx.save_for_backward(a, _outer(out), where)
        ctx.mode, ctx.call = (training, own), call
        return out.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        a, outer, where = ctx.saved_tensors
        # The gradient goes on through the operator's result, so that no compiler drops the call.
        zero = _receive(a, g, outer, where, *ctx.mode, ctx.call)
        return g + zero, *[None] * 5


# Python does the work of these operators, which a CUDA graph would record once and not repeat.
_UNSAFE = getattr(torch.Tag, "cudagraph_unsafe", None)
_TAGS = () if _UNSAFE is None else (_UNSAFE,)


@torch.library.custom_op("seng::outer", mutates_args=(), tags=_TAGS)
def _outer(out: Tensor) -> Tensor:
    """The backward that this forward runs in, or -1, when the graph runs and not when it is traced."""
    return torch.tensor(_root())


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
        task = _root() if outer == -1 else int(outer)
        autograd = (
            torch._C.DispatchKey.AutogradFunctionality
        )  # an operator excludes it
        visible = torch._C._SetExcludeDispatchKeyGuard(autograd, False)
        with visible, torch.no_grad(), _without_autocast(g.device.type):
            capture.receive(task, index, training, own, a.clone(), g.clone())
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
    except (
        RuntimeError
    ):  # torch.autograd.grad of parameters does not say which
        return True


def loss_scale() -> float:
    """The scale of the GradScaler whose step() runs this one.

    By then the gradients are unscaled; the captures are not.
    """
    for frame in _frames():
        caller = (
            frame.f_locals.get("self")
            if frame.f_code.co_name == "step"
            else None
        )
        if isinstance(caller, GradScaler):
            return float(caller.get_scale())
    return 1.0
