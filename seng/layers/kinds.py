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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.modules.utils import _reverse_repeat_tuple
from torch.nn.utils.parametrize import ParametrizationList

from seng.linalg.implicit import Implicit, Windows
from seng.linalg.lookup import Lookup
from seng.linalg.operators import HALF, Explicit, Operator, Shape, wide

Columns = dict[str, Tensor]
# (layer, a, g) -> factors, as a pair or as Windows; or columns by name; or a Lookup
Rule = Callable[[Any, Tensor, Tensor], Any]
# (layer, a parameter's name, a tensor) -> the tensor laid out otherwise
Move = Callable[[Any, str, Tensor], Tensor]
Features = int | Callable[[Any], int]
# A block's parameters: the name of a layer's own, or None for another layer's, and its number of
# columns.
Parts = Sequence[tuple[str | None, int]]


@dataclass(frozen=True)
class Kind:
    """How one kind of layer gives per-sample gradients, and how its parameters lie in a block."""

    type: type[nn.Module]
    rule: Rule
    build: Callable[[Any, Parts, Shape], Operator]  # of what the rule returns
    features: Features  # trailing dimensions; no more means one sample
    rows: Move  # to the block's (h, n_G, width)
    back: Move | None = None  # None: a parameter's order is the block's
    form: str | None = None  # that a kind without factors keeps
    whole_batch: bool = False  # the rule needs all samples, even of few

    @property
    def factored(self) -> bool:
        return self.form is None

    def gradients(self, layer: nn.Module, a: Tensor, g: Tensor) -> Any:
        """What the rule makes of one call of a layer, in the precision that it needs."""
        if self.form is None and g.dtype in HALF:
            a = a.to(g.dtype)  # as the layer itself took it
        elif self.form == "explicit":  # sums over many numbers
            a = a.to(wide(a.dtype))
            g = g.to(wide(g.dtype))
        return self.rule(layer, a, g)


KINDS: dict[type[nn.Module], Kind] = {}


def _joined(parts: Parts, own: Mapping[str, Tensor], dim: int) -> Tensor:
    """A layer's own columns side by side along `dim`, with zeros for other layers' parameters."""
    some = next(iter(own.values()))
    pieces = []
    for name, width in parts:
        if name is None:
            size = list(some.shape)
            size[dim] = width
            pieces.append(some.new_zeros(size))
        else:
            pieces.append(own[name])
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


def _from_factors(found: Any, parts: Parts, shape: Shape) -> Operator:
    """Ĝ and Â as (ϱ, h, …, κ); Â's rows for a bias are ones.

    Windows stay as they are where they can: of one group, with a weight that comes first.
    """
    h = shape[0]
    if isinstance(found, Windows):
        names = [name for name, _ in parts]
        known = names in (["weight"], ["weight", "bias"])
        if known and h == 1 and found.G.numel():
            return replace(found, bias=len(names) - 1)
        found = [X[:, 0] for X in found.factors().tensors()]
    G, A = (X if X.dim() == 3 else X[..., None] for X in found)
    G = G.unflatten(1, (h, -1))
    A = A.unflatten(1, (h, -1))
    own = {"weight": A, "bias": torch.ones_like(A[:, :, :1])}
    A = _joined(parts, own, 2)
    dtype = torch.promote_types(G.dtype, A.dtype)
    return Implicit(G.to(dtype), A.to(dtype))


def _from_columns(found: Columns, parts: Parts, shape: Shape) -> Explicit:
    """The parameters' gradients side by side."""
    own = {name: u.flatten(1) for name, u in found.items()}
    return Explicit(_joined(parts, own, 1).T, shape)


def _from_lookup(found: Lookup, parts: Parts, shape: Shape) -> Lookup:
    """The same, row by row."""
    return replace(found, G=_joined(parts, {"weight": found.G}, 2))


def _as_rows(layer: Any, name: str, p: Tensor) -> Tensor:
    """weight (n_G, …) and bias (n_G,) -> (h, n_G/h, …)."""
    h = getattr(layer, "groups", 1)
    return p.reshape(h, p.shape[0] // h, -1)


def _as_row(layer: Any, name: str, p: Tensor) -> Tensor:
    """Any parameter -> (1, 1, numel)."""
    return p.reshape(1, 1, -1)


def _registered(kind: type[nn.Module], *how: Any) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        KINDS[kind] = Kind(kind, rule, *how)
        return rule

    return register


def factors(
    kind: type[nn.Module],
    features: Features = 1,
    layout: tuple[Move, Move | None] = (_as_rows, None),
) -> Callable[[Rule], Rule]:
    """Register a kind whose function gives (Ĝ, Â); the weight's rows are the output features.

    `layout` brings a parameter into rows (h, n_G, n_A), and back.
    """
    return _registered(kind, _from_factors, features, *layout)


def columns(
    kind: type[nn.Module], features: Features = 1, whole_batch: bool = False
) -> Callable[[Rule], Rule]:
    """Register a kind whose function gives the per-sample gradient (ϱ, *shape) of each parameter by
    name.
    """
    how = _from_columns, features, _as_row, None, "explicit"
    return _registered(kind, *how, whole_batch)


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
    nn.RNNBase: "a recurrent layer runs its time steps inside one operation, where nothing can be "
    "captured",
    nn.RNNCellBase: "a recurrent cell computes its gates inside one operation, where nothing can "
    "be captured",
    nn.MultiheadAttention: "nn.MultiheadAttention calls no layers: nn.Linear and "
    "scaled_dot_product_attention can be covered",
    ParametrizationList: "a layer's weight is computed from it (a parametrization)",
}


def kind_of(layer: nn.Module) -> Kind | str:
    """The layer's kind, or in words why it has none."""
    name = type(layer).__name__
    known = WITHOUT | KINDS
    found = [known[t] for t in type(layer).__mro__ if t in known]
    if not found:
        return f"no rule for {name}: register one with seng.layers.factors or seng.layers.columns"
    kind = found[0]
    if isinstance(kind, str):
        return kind
    if isinstance(layer, LazyModuleMixin):
        return (
            "its lazy parameters have no shape yet: run one forward pass before building the "
            "optimizer"
        )
    if getattr(layer.forward, "__func__", None) is not kind.type.forward:
        return (
            f"{name} has a forward of its own, so the rule of {kind.type.__name__} may not hold: "
            "register a rule for it"
        )
    if layer in ARRANGEMENTS and ARRANGEMENTS[layer] is None:
        return ON_REQUEST
    builtin = kind.type.__module__.startswith("torch.")
    if (kind.factored or builtin) and "weight" not in layer._parameters:
        return (
            "its weight is computed from other tensors (a parametrization): they take the plain "
            "gradient"
        )
    if isinstance(layer, nn.Embedding) and (
        layer.sparse or layer.scale_grad_by_freq
    ):
        return "embeddings with sparse gradients or scale_grad_by_freq are not supported"
    return kind


def positions(x: Tensor) -> Tensor:
    """(ϱ, …, features) -> (ϱ, κ, features)."""
    return x[:, None] if x.dim() == 2 else x.flatten(1, -2)


@factors(nn.Linear)
def _linear(layer: nn.Linear, a: Tensor, g: Tensor) -> Any:
    """The same as a convolution of width 1 over the positions, if there are any."""
    G = positions(g).mT
    A = positions(a).mT
    if not g.numel():
        return G, A
    one = (1,)
    return Windows(G, A, one, one, (0, 0), one)


def _conv(layer: _ConvNd, a: Tensor, g: Tensor) -> Windows:
    """`Windows` pads with zeros: other padding is done here."""
    if isinstance(layer.padding, str):
        padding = tuple(layer._reversed_padding_repeated_twice)
    else:
        padding = _reverse_repeat_tuple(layer.padding, 2)
    if layer.padding_mode != "zeros":
        a = F.pad(a, padding, mode=layer.padding_mode)
        padding = (0,) * len(padding)
    how = layer.kernel_size, layer.stride, padding, layer.dilation
    return Windows(g, a, *how)


def _conv_transpose(layer: _ConvTransposeNd, a: Tensor, g: Tensor) -> Windows:
    """A transposed convolution is one of the zero-stuffed input with the flipped kernel."""
    shape = list(a.shape[:2])
    pad: list[int] = []
    for i, k in enumerate(layer.kernel_size):
        length = (a.shape[2 + i] - 1) * layer.stride[i] + 1
        reach = layer.dilation[i] * (k - 1)
        left = reach - int(layer.padding[i])
        shape.append(length)
        right = g.shape[2 + i] + reach - length - left
        pad = [left, right, *pad]
    stuffed = a.new_zeros(shape)
    places: Any = [slice(None, None, m) for m in layer.stride]
    stuffed[:, :, *places] = a
    ones = (1,) * len(layer.kernel_size)
    zeros = (0,) * len(pad)
    how = layer.kernel_size, ones, zeros, layer.dilation
    return Windows(g, F.pad(stuffed, pad), *how)


def _transposed_rows(layer: _ConvTransposeNd, name: str, p: Tensor) -> Tensor:
    """weight (in, out/h, *kernel) -> (h, out/h, in/h·∏kernel), the kernel flipped."""
    if name == "bias":
        return _as_rows(layer, name, p)
    p = p.unflatten(0, (layer.groups, -1))  # (h, in/h, out/h, *kernel)
    kernel = [*range(3, p.dim())]
    return p.flip(kernel).transpose(1, 2).flatten(2)


def _from_transposed_rows(
    layer: _ConvTransposeNd, name: str, d: Tensor
) -> Tensor:
    if name == "bias":
        return d.flatten()
    inputs = layer.in_channels // layer.groups
    d = d.unflatten(2, (inputs, *layer.kernel_size)).transpose(1, 2)
    kernel = [*range(3, d.dim())]
    return d.flip(kernel).flatten(0, 1)


@_registered(nn.Embedding, _from_lookup, 0, _as_rows, None, "lookup")
def _embedding(layer: nn.Embedding, a: Tensor, g: Tensor) -> Lookup:
    tokens = a[:, None] if a.dim() == 1 else a.flatten(1)
    g = positions(g)
    if layer.padding_idx is not None:
        padded = tokens == layer.padding_idx
        g = g.masked_fill(padded[..., None], 0)
    return Lookup(tokens.long(), g, layer.num_embeddings)


def _affine(x_hat: Tensor, g: Tensor, keep: Sequence[int]) -> Columns:
    """y = w ⊙ x̂ + b: sum g ⊙ x̂ and g over every dimension but the sample and `keep`.

    The product takes the place of x̂, which is as large as the layer's output.
    """
    summed = [i for i in range(1, g.dim()) if i not in keep]
    weight = x_hat.mul_(g) if g.dtype == x_hat.dtype else x_hat * g
    if not summed:
        return {"weight": weight, "bias": g}
    return {"weight": weight.sum(summed), "bias": g.sum(summed)}


def _normalized(layer: Any) -> int:
    return len(layer.normalized_shape)


def _shaped(
    norm: Callable[..., Tensor], layer: Any, a: Tensor, g: Tensor
) -> Columns:
    x_hat = norm(a, layer.normalized_shape, eps=layer.eps)
    first = a.dim() - _normalized(layer)
    return _affine(x_hat, g, range(first, a.dim()))


columns(nn.LayerNorm, _normalized)(partial(_shaped, F.layer_norm))
columns(nn.RMSNorm, _normalized)(partial(_shaped, F.rms_norm))


@columns(nn.GroupNorm)
def _group_norm(layer: nn.GroupNorm, a: Tensor, g: Tensor) -> Columns:
    x_hat = F.group_norm(a, layer.num_groups, eps=layer.eps)
    return _affine(x_hat, g, (1,))


def _channels(
    norm: Callable[..., Tensor], layer: Any, a: Tensor, g: Tensor
) -> Columns:
    """A norm of each channel.

    In training the batch's statistics are taken as given, so that the mean of u_i is the gradient.
    """
    now = layer.training or layer.running_mean is None
    known = (None, None) if now else (layer.running_mean, layer.running_var)
    x_hat = norm(a, *known, None, None, now, eps=layer.eps)
    return _affine(x_hat, g, (1,))


@columns(nn.PReLU, lambda layer: int(layer.num_parameters > 1))
def _prelu(layer: nn.PReLU, a: Tensor, g: Tensor) -> Columns:
    """y = max(a, 0) + w min(a, 0), one w or one per channel."""
    keep = () if layer.num_parameters == 1 else (1,)
    u = _affine(a.clamp_max(0), g, keep)["weight"]
    return {"weight": u.view(len(u), layer.num_parameters)}


for _d in (1, 2, 3):
    factors(getattr(nn, f"Conv{_d}d"), 1 + _d)(_conv)
    _transposed = _transposed_rows, _from_transposed_rows
    factors(getattr(nn, f"ConvTranspose{_d}d"), 1 + _d, _transposed)(
        _conv_transpose
    )
    columns(getattr(nn, f"BatchNorm{_d}d"), whole_batch=True)(
        partial(_channels, F.batch_norm)
    )
    columns(getattr(nn, f"InstanceNorm{_d}d"), 1 + _d)(
        partial(_channels, F.instance_norm)
    )
