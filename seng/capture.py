"""One forward hook per layer: on refresh steps it hands over the layer's input a and the gradient g of its output.

The hook passes the output through an autograd function that marks it dirty and returns it: no copy, safe with in-place
activations, and released with the graph. When disarmed, it does nothing at all. Copies of a module (deepcopy, pickle, averaged
models) carry hooks that do nothing, and the hooks go when the capture goes.

Under torch.compile the hook is traced along with its layer, in one graph: there the backward hands over through an operator of
our own, `seng::receive`, which the compiler takes as it is. Armed and disarmed are two graphs; the compiler's guards choose.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.autograd import forward_ad
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.utils.hooks import RemovableHandle

Receive = Callable[[int, int, bool, Tensor, Tensor], None]  # (the backward, the layer, its mode in the forward, a, g)


class Capture:
    """Hooks on `layers`; `receive` is called inside the backward, once per call of a layer."""

    def __init__(self, layers: Sequence[nn.Module], receive: Receive) -> None:
        self.armed = False
        self.receive = receive
        self.key = next(_NUMBERS)
        _CAPTURES[self.key] = self
        handles = [
            layer.register_forward_hook(
                _Hook(weakref.ref(self), weakref.ref(layer), self.key, i), with_kwargs=True, prepend=True
            )
            for i, layer in enumerate(layers)  # before the hooks of others, which may change the output
        ]
        self.remove = weakref.finalize(self, _remove, handles)
        self.remove.atexit = False


def _remove(handles: Sequence[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


_NUMBERS = itertools.count()
_CAPTURES: weakref.WeakValueDictionary[int, Capture] = weakref.WeakValueDictionary()  # by number, for compiled graphs


class _Hook:
    def __init__(self, capture: weakref.ref[Capture], layer: weakref.ref[nn.Module], key: int, index: int) -> None:
        self.capture, self.layer, self.index = capture, layer, index
        self.where = torch.tensor([key, index], device="cpu")  # a tensor, so that one compiled graph serves all equal layers

    def __call__(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
        if not torch.is_grad_enabled() or torch.compiler.is_exporting():
            return None
        capture = self.capture()
        if capture is None or not capture.armed or layer is not self.layer():
            return None
        trained = any(p.requires_grad for p in layer._parameters.values() if p is not None)
        if not (trained and isinstance(out, Tensor) and out.requires_grad):
            return None
        a = next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        if torch.compiler.is_compiling():
            return _CompiledTap.apply(out, a.detach(), self.where, layer.training, _call_number())  # type: ignore[no-untyped-call]
        if _transformed():
            return None
        # Inside a backward this is a recomputation (reentrant checkpointing), which belongs to that backward.
        outer = torch._C._current_graph_task_id()
        with _unsafe_preserve_version_counter(out):  # a layer may have saved its output, which stays as it is
            return _Tap.apply(out, a.detach(), capture.receive, self.index, layer.training, outer)  # type: ignore[no-untyped-call]

    def __reduce__(self) -> tuple[Callable[[], Any], tuple[()]]:
        return _inert, ()


def _transformed() -> bool:
    """Inside torch.func or forward-mode differentiation, which is not a training backward."""
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def _nothing(*_: Any) -> None:
    return None


def _inert() -> Callable[..., None]:
    """What a hook becomes in a copy of its module."""
    return _nothing


class _Tap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, a: Tensor, receive: Receive, index: int, training: bool, outer: int) -> Tensor:
        ctx.mark_dirty(out)
        ctx.save_for_backward(a)
        ctx.receive, ctx.index, ctx.training, ctx.outer = receive, index, training, outer
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (a,) = ctx.saved_tensors
        task = torch._C._current_graph_task_id() if ctx.outer == -1 else ctx.outer
        with torch.no_grad(), torch.autocast(g.device.type, enabled=False):
            ctx.receive(task, ctx.index, ctx.training, a, g)
        return g, None, None, None, None, None


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _call_number() -> int:
    """Another number for every call that is traced: two calls alike in all else must not be merged into one."""
    return next(_NUMBERS)


class _CompiledTap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, a: Tensor, where: Tensor, training: bool, call: int) -> Tensor:
        ctx.save_for_backward(a, _outer(out), where)
        ctx.training, ctx.call = training, call
        return out.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        a, outer, where = ctx.saved_tensors
        # The gradient goes on through the operator's result, so that no compiler drops the call.
        return g + _receive(a, g, outer, where, ctx.training, ctx.call), None, None, None, None


# Python does the work of these operators, which a CUDA graph would record once and not repeat.
_TAGS = tuple(tag for tag in (getattr(torch.Tag, "cudagraph_unsafe", None),) if tag is not None)


@torch.library.custom_op("seng::outer", mutates_args=(), tags=_TAGS)
def _outer(out: Tensor) -> Tensor:
    """The backward that this forward runs in, or -1, when the graph runs and not when it is traced."""
    return torch.tensor(torch._C._current_graph_task_id())


@_outer.register_fake
def _(out: Tensor) -> Tensor:
    return torch.empty((), dtype=torch.int64)


@torch.library.custom_op("seng::receive", mutates_args=(), tags=_TAGS)
def _receive(a: Tensor, g: Tensor, outer: Tensor, where: Tensor, training: bool, call: int) -> Tensor:
    """Hand over copies, since the compiler reuses the memory of a and g; a zero comes back."""
    key, index = where.tolist()
    capture = _CAPTURES.get(key)
    if capture is not None:
        task = torch._C._current_graph_task_id() if outer == -1 else int(outer)
        visible = torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False)  # inside it is not
        with visible, torch.no_grad(), torch.autocast(g.device.type, enabled=False):
            capture.receive(task, index, training, a.clone(), g.clone())
    return g.new_zeros(())


@_receive.register_fake
def _(a: Tensor, g: Tensor, outer: Tensor, where: Tensor, training: bool, call: int) -> Tensor:
    return g.new_zeros(())


def loss_scale() -> float:
    """The scale of the GradScaler whose step() runs this one: the gradients are unscaled by now, the captures are not."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_name == "step" and isinstance(frame.f_locals.get("self"), GradScaler):
            return float(frame.f_locals["self"].get_scale())
    return 1.0
