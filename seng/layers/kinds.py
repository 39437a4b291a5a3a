"""Module kind -> per-sample gradients from what a layer saw: its input a and the gradient g of its
output (eq. 3).

One small function per kind. A kind with factors returns Ĝ (ϱ, n_G, κ) and Â (ϱ, n_A, κ), so that
u_i = Ĝ_i Â_iᵀ; the positions between the sample and the features are the κ columns, and the row of
ones that makes weight and bias one matrix is appended elsewhere. A kind without factors returns the
per-sample gradient of each of its parameters.

A kind of your own:

    @seng.layers.factors(MyLinear)                       # y = a Wᵀ + b
    def _(layer, a, g):
        return seng.layers.positions(g).mT, seng.layers.positions(a).mT

    @seng.layers.columns(Scale)                          # y = w ⊙ a
    def _(layer, a, g):
        return {"weight": seng.layers.positions(g * a).sum(1)}

A dimension 0 of samples is always there, and factors of one position may come as (ϱ, n_G) and (ϱ,
n_A).

A subclass is served by its parent's function as long as it keeps its parent's forward.

Per-sample gradients of the layers without factors: norms, y = w ⊙ x̂ + b, and PReLU.

See `seng.layers`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils.parametrize import ParametrizationList

from seng.linalg.implicit import Implicit, Windows, windows
from seng.linalg.lookup import Lookup
from seng.linalg.operators import HALF, Explicit, Operator, Shape, wide

Factors = tuple[Tensor, Tensor]
Columns = dict[str, Tensor]
Rule = Callable[
    [Any, Tensor, Tensor], Any
]  # (layer, a, g) -> Factors or Columns
Later = Callable[[Any, Tensor, Tensor, int], Windows | None]
Move = Callable[
    [Any, str, Tensor], Tensor
]  # (layer, a parameter's name, a tensor)
Layout = tuple[Move, Move]  # to the block's (h, n_G, width), and back


# A block's parameters: the name of a layer's own, or None for another layer's, and its number of
# columns.
Parts = Sequence[tuple[str | None, int]]
Build = Callable[[Any, Parts, Shape], Operator]


@dataclass(frozen=True)
class Kind:
    """How one kind of layer gives its per-sample gradients, and how its parameters lie in a block."""

    type: type[nn.Module]
    rule: Rule
    build: Build  # an operator from what the rule returns
    features: Callable[
        [Any], int
    ]  # trailing dimensions; no more means one sample
    layout: Layout
    factored: bool = False
    whole_batch: bool = (
        False  # the rule needs all samples, even if few are wanted
    )
    any_precision: bool = (
        False  # a rule without factors takes half precision as it is
    )
    unfolded_later: Later | None = None  # the factors, where they can wait

    def operator(
        self,
        layer: nn.Module,
        parts: Parts,
        shape: Shape,
        a: Tensor,
        g: Tensor,
    ) -> Operator:
        """U of one call of a layer, unscaled: its columns are the captured per-sample gradients."""
        if a.is_floating_point():
            if not (self.factored or self.any_precision):
                a, g = a.to(wide(a.dtype)), g.to(wide(g.dtype))
            elif g.dtype in HALF:
                a = a.to(g.dtype)  # as the layer itself took it
        names = [name for name, _ in parts]
        if self.unfolded_later and names in (["weight"], ["weight", "bias"]):
            later = self.unfolded_later(layer, a, g, len(names) - 1)
            if later is not None:
                return later
        return self.build(self.rule(layer, a, g), parts, shape)


KINDS: dict[type[nn.Module], Kind] = {}


def _from_factors(found: Factors, parts: Parts, shape: Shape) -> Implicit:
    """Ĝ and Â as (ϱ, h, …, κ); Â's rows for a bias are ones, those for other layers' parameters
    zeros.
    """
    G, A = (x if x.dim() == 3 else x[..., None] for x in found)
    G, A = (x.unflatten(1, (shape[0], -1)) for x in (G, A))
    h, _, kappa = A.shape[1:]
    rows = [
        A
        if name == "weight"
        else A.new_full((len(A), h, width, kappa), name == "bias")
        for name, width in parts
    ]
    A = rows[0] if len(rows) == 1 else torch.cat(rows, 2)
    dtype = torch.promote_types(G.dtype, A.dtype)
    return Implicit(G.to(dtype), A.to(dtype))


def _from_columns(found: Columns, parts: Parts, shape: Shape) -> Explicit:
    """The parameters' gradients side by side."""
    some = next(iter(found.values()))
    U = [
        found[name].flatten(1) if name else some.new_zeros(len(some), width)
        for name, width in parts
    ]
    return Explicit(torch.cat(U, 1).T, shape)


def _from_lookup(found: Lookup, parts: Parts, shape: Shape) -> Lookup:
    """The same, row by row."""
    G = found.G
    wider = [
        G if name else G.new_zeros(*G.shape[:2], width)
        for name, width in parts
    ]
    return replace(found, G=torch.cat(wider, 2))


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
)  # layouts in which a parameter's own order is the block's


def factors(
    kind: type[nn.Module],
    features: Callable[[Any], int] = _last,
    layout: Layout = (_as_rows, _from_rows),
    unfolded_later: Later | None = None,
) -> Callable[[Rule], Rule]:
    """Register a kind whose function gives (Ĝ, Â); the weight's rows are the output features."""
    how = {"factored": True, "unfolded_later": unfolded_later}
    return _registered(kind, _from_factors, features, layout, **how)


def columns(
    kind: type[nn.Module],
    features: Callable[[Any], int] = _last,
    whole_batch: bool = False,
    any_precision: bool = False,
) -> Callable[[Rule], Rule]:
    """Register a kind whose function gives the per-sample gradient (ϱ, *shape) of each parameter by
    name.
    """
    how = {"whole_batch": whole_batch, "any_precision": any_precision}
    return _registered(
        kind, _from_columns, features, (_as_row, _from_rows), **how
    )


def _registered(
    kind: type[nn.Module], *how: Any, **more: Any
) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        KINDS[kind] = Kind(kind, rule, *how, **more)
        return rule

    return register


Arrange = Callable[[Tensor], Tensor]
ARRANGEMENTS: WeakKeyDictionary[nn.Module, Arrange | None] = (
    WeakKeyDictionary()
)


ON_REQUEST = "left out on request, by seng.layers.arrange(layer, None)"


def arrange(layer: nn.Module, how: Arrange | None) -> None:
    """Say how a layer's input and output bring the sample to dimension 0.

    None leaves the layer to the plain gradient.

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
        for kind, why in WITHOUT.items():
            if isinstance(layer, kind):
                return why
        return f"no rule for {name}: register one with seng.layers.factors or seng.layers.columns"
    if isinstance(layer, LazyModuleMixin):
        return "its lazy parameters have no shape yet: run one forward pass before building the optimizer"
    if type(layer).forward is not found.type.forward or "forward" in vars(
        layer
    ):
        return f"{name} has a forward of its own, so the rule of {found.type.__name__} may not hold: register a rule for it"
    if layer in ARRANGEMENTS and ARRANGEMENTS[layer] is None:
        return ON_REQUEST
    builtin = found.type.__module__.startswith("torch.")
    if (found.factored or builtin) and "weight" not in layer._parameters:
        return "its weight is computed from other tensors (a parametrization): they take the plain gradient"
    if isinstance(layer, nn.Embedding) and (
        layer.sparse or layer.scale_grad_by_freq
    ):
        return "embeddings with sparse gradients or scale_grad_by_freq are not supported"
    return found


def positions(x: Tensor) -> Tensor:
    """(ϱ, …, features) -> (ϱ, κ, features)."""
    return x[:, None] if x.dim() == 2 else x.flatten(1, -2)


def _linear_windows(
    layer: nn.Linear, a: Tensor, g: Tensor, bias: int
) -> Windows | None:
    """The same as a convolution of width 1 over the positions."""
    if not g.numel():
        return None
    G, A = _linear(layer, a, g)
    return Windows(G, A, (1,), (1,), (0, 0), (1,), bias)


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
    return g.flatten(2), windows(
        a, layer.kernel_size, layer.stride, layer.dilation
    )


def _conv_windows(
    layer: _ConvNd, a: Tensor, g: Tensor, bias: int
) -> Windows | None:
    """The same, to be unfolded later.

    None for what `Windows` does not know: groups, and padding that is not zero.
    """
    pad = tuple(_padding(layer))
    unknown = layer.padding_mode != "zeros" and any(pad)
    if not g.numel() or layer.groups > 1 or unknown:
        return None
    return Windows(
        g, a, layer.kernel_size, layer.stride, pad, layer.dilation, bias
    )


def _conv_transpose(layer: _ConvTransposeNd, a: Tensor, g: Tensor) -> Factors:
    """A transposed convolution is a convolution of the zero-stuffed input with the flipped kernel."""
    pad: list[int] = []
    for i, k in enumerate(layer.kernel_size):
        stride, reach = layer.stride[i], layer.dilation[i] * (k - 1)
        length = a.shape[2 + i]
        stuffed = a.new_zeros(
            *a.shape[: 2 + i], length, stride, *a.shape[3 + i :]
        )
        stuffed.select(3 + i, 0).copy_(a)
        a = stuffed.flatten(2 + i, 3 + i).narrow(
            2 + i, 0, (length - 1) * stride + 1
        )
        left = reach - int(layer.padding[i])
        pad = [left, g.shape[2 + i] + reach - a.shape[2 + i] - left, *pad]
    a = F.pad(a, pad)
    ones = (1,) * len(layer.kernel_size)
    return g.flatten(2), windows(a, layer.kernel_size, ones, layer.dilation)


def _transposed_rows(layer: _ConvTransposeNd, name: str, p: Tensor) -> Tensor:
    """weight (in, out/h, *kernel) -> (h, out/h, in/h·∏kernel), the kernel flipped."""
    if name == "bias":
        return _as_rows(layer, name, p)
    p = p.unflatten(0, (layer.groups, -1))  # (h, in/h, out/h, *kernel)
    return p.flip(_kernel_dims(layer)).transpose(1, 2).flatten(2)


def _from_transposed_rows(
    layer: _ConvTransposeNd, name: str, d: Tensor
) -> Tensor:
    if name == "bias":
        return _from_rows(layer, name, d)
    inputs = layer.in_channels // layer.groups
    d = d.unflatten(2, (inputs, *layer.kernel_size)).transpose(1, 2)
    return d.flip(_kernel_dims(layer)).flatten(0, 1)


def _kernel_dims(layer: _ConvTransposeNd) -> list[int]:
    return [3 + i for i in range(len(layer.kernel_size))]


def _channels_and_space(layer: _ConvNd) -> int:
    return 1 + len(layer.kernel_size)


for _kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d):
    factors(_kind, _channels_and_space, unfolded_later=_conv_windows)(_conv)
_transposed = _transposed_rows, _from_transposed_rows
for _kind_transposed in (
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
):
    factors(_kind_transposed, _channels_and_space, _transposed)(
        _conv_transpose
    )


def _embedding(layer: nn.Embedding, a: Tensor, g: Tensor) -> Lookup:
    tokens = a[:, None] if a.dim() == 1 else a.flatten(1)
    g = positions(g)
    if layer.padding_idx is not None:
        padded = tokens == layer.padding_idx
        g = g.masked_fill(padded[..., None], 0)
    return Lookup(tokens.long(), g, layer.num_embeddings)


_rows = _as_rows, _from_rows
_registered(nn.Embedding, _from_lookup, lambda layer: 0, _rows)(_embedding)


# Faster ways to BatchNorm's sums, which a device's package appends; None where one does not serve.
ACCELERATORS: list[Callable[[_BatchNorm, Tensor, Tensor], Columns | None]] = []


def _affine(x_hat: Tensor, g: Tensor, keep: tuple[int, ...]) -> Columns:
    """y = w ⊙ x̂ + b: sum g ⊙ x̂ and g over every dimension but the sample and `keep`."""
    summed = [i for i in range(1, g.dim()) if i not in keep]
    both = {"weight": g * x_hat, "bias": g}
    return (
        {name: u.sum(summed) for name, u in both.items()} if summed else both
    )


def _normalized(layer: nn.LayerNorm | nn.RMSNorm) -> int:
    return len(layer.normalized_shape)


def _shaped(
    norm: Callable[..., Tensor], layer: Any, a: Tensor, g: Tensor
) -> Columns:
    x_hat = norm(a, layer.normalized_shape, eps=layer.eps)
    return _affine(
        x_hat, g, tuple(range(a.dim() - _normalized(layer), a.dim()))
    )


columns(nn.LayerNorm, _normalized)(partial(_shaped, F.layer_norm))
columns(nn.RMSNorm, _normalized)(partial(_shaped, F.rms_norm))


@columns(nn.GroupNorm)
def _group_norm(layer: nn.GroupNorm, a: Tensor, g: Tensor) -> Columns:
    return _affine(F.group_norm(a, layer.num_groups, eps=layer.eps), g, (1,))


def of_the_batch(layer: _BatchNorm | _InstanceNorm) -> bool:
    """Whether the layer normalises by what it sees now, and not by running statistics."""
    return layer.training or layer.running_mean is None


def _batch_norm(layer: _BatchNorm, a: Tensor, g: Tensor) -> Columns:
    """u_i = g_i ⊙ x̂_i.

    In training the batch's statistics are taken as given, so that the mean of u_i is the gradient.
    """
    for accelerated in ACCELERATORS:
        found = accelerated(layer, a, g)
        if found is not None:
            return found
    a, g = a.to(wide(a.dtype)), g.to(wide(g.dtype))
    now = of_the_batch(layer)
    statistics = (
        (None, None) if now else (layer.running_mean, layer.running_var)
    )
    x_hat = F.batch_norm(a, *statistics, training=now, eps=layer.eps)
    return _affine(x_hat, g, (1,))


for _norm in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
    columns(_norm, whole_batch=True, any_precision=True)(_batch_norm)


def _instance_norm(layer: _InstanceNorm, a: Tensor, g: Tensor) -> Columns:
    now = of_the_batch(layer)
    statistics = (
        (None, None) if now else (layer.running_mean, layer.running_var)
    )
    x_hat = F.instance_norm(a, *statistics, use_input_stats=now, eps=layer.eps)
    return _affine(x_hat, g, (1,))


def _instance_features(layer: _InstanceNorm) -> int:
    return layer._get_no_batch_dim()  # type: ignore[no-any-return]


for _instance in (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d):
    columns(_instance, _instance_features)(_instance_norm)


@columns(nn.PReLU, lambda layer: int(layer.num_parameters > 1))
def _prelu(layer: nn.PReLU, a: Tensor, g: Tensor) -> Columns:
    """y = max(a, 0) + w min(a, 0), one w or one per channel."""
    single = layer.num_parameters == 1
    u = _affine(a.clamp_max(0), g, () if single else (1,))["weight"]
    return {"weight": u[:, None] if single else u}
