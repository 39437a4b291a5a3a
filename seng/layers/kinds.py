"""Module kind -> per-sample gradients from what a layer saw: its input a and the gradient g of its output (eq. 3).

One small function per kind. A kind with factors returns Ĝ (ϱ, n_G, κ) and Â (ϱ, n_A, κ), so that u_i = Ĝ_i Â_iᵀ; the
positions between the sample and the features are the κ columns, and the row of ones that makes weight and bias one matrix
is appended elsewhere. A kind without factors returns the per-sample gradient of each of its parameters.

A kind of your own:

    @seng.layers.factors(MyLinear)                       # y = a Wᵀ + b
    def _(layer, a, g):
        return seng.layers.positions(g).mT, seng.layers.positions(a).mT

    @seng.layers.columns(Scale)                          # y = w ⊙ a
    def _(layer, a, g):
        return {"weight": seng.layers.positions(g * a).sum(1)}

A dimension 0 of samples is always there, and factors of one position may come as (ϱ, n_G) and (ϱ, n_A).

A subclass is served by its parent's function as long as it keeps its parent's forward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils.parametrize import ParametrizationList

from seng.linalg.lookup import Lookup
from seng.linalg.windows import Windows, windows

Factors = tuple[Tensor, Tensor]
Columns = dict[str, Tensor]
Layout = tuple[
    Callable[[Any, str, Tensor], Tensor], Callable[[Any, str, Tensor], Tensor]
]


@dataclass(frozen=True)
class Kind:
    """How one kind of layer gives its per-sample gradients, and how its parameters lie in the block's (h, n_G, n_A)."""

    type: type[nn.Module]
    rule: Callable[[Any, Tensor, Tensor], Factors | Columns | Tensor | Lookup]
    factored: bool
    whole_batch: (
        bool  # the rule needs every sample even where only the first ϱ are wanted
    )
    features: Callable[
        [Any], int
    ]  # trailing dimensions of the input that are features; no more means one sample
    layout: Layout
    unfolded_later: Callable[[Any, Tensor, Tensor, int], Windows | None] | None = (
        None  # the factors, where they can wait
    )
    any_precision: bool = (
        False  # a rule without factors that takes half precision as it is
    )


KINDS: dict[type[nn.Module], Kind] = {}


def _last(layer: nn.Module) -> int:
    return 1


def _as_rows(layer: Any, name: str, p: Tensor) -> Tensor:
    """weight (n_G, …) and bias (n_G,) -> (h, n_G/h, …)."""
    h = getattr(layer, "groups", 1)
    return p.reshape(h, p.shape[0] // h, -1)


def _from_rows(layer: Any, name: str, d: Tensor) -> Tensor:
    return d.reshape(getattr(layer, name).shape)


def _as_row(layer: Any, name: str, p: Tensor) -> Tensor:
    """Any parameter -> (1, 1, numel)."""
    return p.reshape(1, 1, -1)


ROWS = (
    _as_rows,
    _as_row,
)  # the layouts in which a parameter's own order is the block's

Rule = Callable[[Any, Tensor, Tensor], Any]


def factors(
    kind: type[nn.Module],
    features: Callable[[Any], int] = _last,
    layout: Layout = (_as_rows, _from_rows),
    unfolded_later: Callable[[Any, Tensor, Tensor, int], Windows | None] | None = None,
) -> Callable[[Rule], Rule]:
    """Register a kind whose function gives (Ĝ, Â); the weight's rows are the output features."""

    def register(rule: Rule) -> Rule:
        KINDS[kind] = Kind(kind, rule, True, False, features, layout, unfolded_later)
        return rule

    return register


def columns(
    kind: type[nn.Module],
    features: Callable[[Any], int] = _last,
    whole_batch: bool = False,
    any_precision: bool = False,
) -> Callable[[Rule], Rule]:
    """Register a kind whose function gives the per-sample gradient (ϱ, *shape) of each parameter by name."""

    def register(rule: Rule) -> Rule:
        KINDS[kind] = Kind(
            kind,
            rule,
            False,
            whole_batch,
            features,
            (_as_row, _from_rows),
            None,
            any_precision,
        )
        return rule

    return register


ARRANGEMENTS: WeakKeyDictionary[nn.Module, Callable[[Tensor], Tensor] | None] = (
    WeakKeyDictionary()
)


ON_REQUEST = "left out on request, by seng.layers.arrange(layer, None)"


def arrange(layer: nn.Module, how: Callable[[Tensor], Tensor] | None) -> None:
    """Say how a layer's input and output bring the sample to dimension 0; None leaves the layer to the plain gradient.

    Time first:  seng.layers.arrange(layer, lambda x: x.transpose(0, 1))
    Flattened:   seng.layers.arrange(layer, lambda x: x.unflatten(0, (-1, length)))

    To be called before the optimizer is built.
    """
    ARRANGEMENTS[layer] = how


WITHOUT: dict[type[nn.Module], str] = {  # where no rule could help, and why
    nn.RNNBase: "a recurrent layer runs its time steps inside one operation, where nothing can be captured",
    nn.RNNCellBase: "a recurrent cell computes its gates inside one operation, where nothing can be captured",
    nn.MultiheadAttention: "nn.MultiheadAttention calls no layers: nn.Linear and scaled_dot_product_attention can be covered",
    ParametrizationList: "a layer's weight is computed from it (a parametrization)",
}


def kind_of(layer: nn.Module) -> Kind | str:
    """The layer's kind, or in words why it has none."""
    found = next((KINDS[t] for t in type(layer).__mro__ if t in KINDS), None)
    name = type(layer).__name__
    if found is None:
        other = f"no rule for {name}: register one with seng.layers.factors or seng.layers.columns"
        return next(
            (why for kind, why in WITHOUT.items() if isinstance(layer, kind)), other
        )
    if isinstance(layer, LazyModuleMixin):
        return "its lazy parameters have no shape yet: run one forward pass before building the optimizer"
    if type(layer).forward is not found.type.forward or "forward" in vars(layer):
        return f"{name} has a forward of its own, so the rule of {found.type.__name__} may not hold: register a rule for it"
    if layer in ARRANGEMENTS and ARRANGEMENTS[layer] is None:
        return ON_REQUEST
    builtin = found.type.__module__.startswith("torch.")
    if (found.factored or builtin) and "weight" not in layer._parameters:
        return "its weight is computed from other tensors (a parametrization): they take the plain gradient"
    if isinstance(layer, nn.Embedding) and (layer.sparse or layer.scale_grad_by_freq):
        return (
            "embeddings with sparse gradients or scale_grad_by_freq are not supported"
        )
    return found


def positions(x: Tensor) -> Tensor:
    """(ϱ, …, features) -> (ϱ, κ, features)."""
    return x[:, None] if x.dim() == 2 else x.flatten(1, -2)


def _linear_windows(
    layer: nn.Linear, a: Tensor, g: Tensor, bias: int
) -> Windows | None:
    """The same as a convolution of width 1 over the positions."""
    return (
        Windows(positions(g).mT, positions(a).mT, (1,), (1,), (0,), (1,), bias)
        if g.numel()
        else None
    )


@factors(nn.Linear, unfolded_later=_linear_windows)
def _linear(layer: nn.Linear, a: Tensor, g: Tensor) -> Factors:
    return positions(g).mT, positions(a).mT


def _padding(layer: _ConvNd) -> list[int]:
    """The amounts for F.pad, last dimension first."""
    out: list[int] = []
    for i in reversed(range(len(layer.kernel_size))):
        if layer.padding == "same":
            total = layer.dilation[i] * (layer.kernel_size[i] - 1)
            out += [total // 2, total - total // 2]
        else:
            amount = 0 if layer.padding == "valid" else int(layer.padding[i])
            out += [amount, amount]
    return out


def _conv(layer: _ConvNd, a: Tensor, g: Tensor) -> Factors:
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    a = F.pad(a, _padding(layer), mode=mode)
    return g.flatten(2), windows(a, layer.kernel_size, layer.stride, layer.dilation)


def _conv_windows(layer: _ConvNd, a: Tensor, g: Tensor, bias: int) -> Windows | None:
    """The same, to be unfolded later; None for what `Windows` does not know: groups, and padding that is uneven or not zero."""
    pad = _padding(layer)
    if (
        not g.numel()
        or layer.groups > 1
        or (layer.padding_mode != "zeros" and any(pad))
        or pad[::2] != pad[1::2]
    ):
        return None
    return Windows(
        g, a, layer.kernel_size, layer.stride, tuple(pad[::-2]), layer.dilation, bias
    )


def _conv_transpose(layer: _ConvTransposeNd, a: Tensor, g: Tensor) -> Factors:
    """A transposed convolution is a convolution of the zero-stuffed input with the flipped kernel."""
    pad: list[int] = []
    for i, k in enumerate(layer.kernel_size):
        stride, reach = layer.stride[i], layer.dilation[i] * (k - 1)
        length = a.shape[2 + i]
        stuffed = a.new_zeros(*a.shape[: 2 + i], length, stride, *a.shape[3 + i :])
        stuffed.select(3 + i, 0).copy_(a)
        a = stuffed.flatten(2 + i, 3 + i).narrow(2 + i, 0, (length - 1) * stride + 1)
        left = reach - int(layer.padding[i])
        pad = [left, g.shape[2 + i] + reach - a.shape[2 + i] - left, *pad]
    return g.flatten(2), windows(
        F.pad(a, pad), layer.kernel_size, (1,) * len(layer.kernel_size), layer.dilation
    )


def _transposed_rows(layer: _ConvTransposeNd, name: str, p: Tensor) -> Tensor:
    """weight (in, out/h, *kernel) -> (h, out/h, in/h·∏kernel), the kernel flipped."""
    if name == "bias":
        return _as_rows(layer, name, p)
    d = len(layer.kernel_size)
    p = p.unflatten(0, (layer.groups, -1)).flip(
        tuple(range(3, 3 + d))
    )  # (h, in/h, out/h, *kernel)
    return p.transpose(1, 2).flatten(2)


def _from_transposed_rows(layer: _ConvTransposeNd, name: str, d: Tensor) -> Tensor:
    if name == "bias":
        return _from_rows(layer, name, d)
    kernel = layer.kernel_size
    d = d.unflatten(2, (layer.in_channels // layer.groups, *kernel)).transpose(1, 2)
    return d.flip(tuple(range(3, 3 + len(kernel)))).flatten(0, 1)


def _channels_and_space(layer: _ConvNd) -> int:
    return 1 + len(layer.kernel_size)


for _kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d):
    factors(_kind, _channels_and_space, unfolded_later=_conv_windows)(_conv)
for _transposed in (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d):
    factors(
        _transposed, _channels_and_space, (_transposed_rows, _from_transposed_rows)
    )(_conv_transpose)


def _embedding(layer: nn.Embedding, a: Tensor, g: Tensor) -> Lookup:
    tokens = a[:, None] if a.dim() == 1 else a.flatten(1)
    g = positions(g)
    if layer.padding_idx is not None:
        g = g.masked_fill((tokens == layer.padding_idx)[..., None], 0)
    return Lookup(tokens.long(), g, layer.num_embeddings)


KINDS[nn.Embedding] = Kind(
    nn.Embedding, _embedding, False, False, lambda layer: 0, (_as_rows, _from_rows)
)
