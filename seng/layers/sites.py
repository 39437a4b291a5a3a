"""Where a block lives: the layers that share parameters, and how those parameters lie side by side
as one (h, n_G, n_A).

Weight and bias of a layer are one matrix: the bias is one more column, and a row of ones is
appended to Â. Layers that share a parameter are one site; each of them fills its own columns and
leaves the others' at zero.

Parameters that are spread over ranks: DTensors, as FSDP2 and HSDP make them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from seng.layers.capture import accumulates
from seng.layers.kinds import ARRANGEMENTS, Kind, kind_of
from seng.linalg.operators import Operator, Shape


def is_sharded(t: Any) -> bool:
    """Whether it is a DTensor."""
    return hasattr(t, "device_mesh") and hasattr(t, "to_local")


def local(t: Tensor) -> Tensor:
    """This rank's part of it."""
    return t.to_local() if is_sharded(t) else t  # type: ignore[attr-defined]


def whole(t: Tensor) -> Tensor:
    """All of it, on every rank."""
    return t.full_tensor() if is_sharded(t) else t  # type: ignore[attr-defined]


def like(part: Tensor, p: Tensor, *more: int) -> Tensor:
    """A DTensor of which `part` is this rank's part, spread as p is.

    It has p's shape, with `more` dimensions at the end.
    """
    from torch.distributed.tensor import DTensor

    shape = torch.Size([*p.shape, *more])
    stride = torch.empty(shape, device="meta").stride()
    mesh, placements = p.device_mesh, p.placements  # type: ignore[attr-defined]
    out: Tensor = DTensor.from_local(
        part, mesh, placements, run_check=False, shape=shape, stride=stride
    )
    return out


def spread(t: Tensor, p: Tensor) -> Tensor:
    """This rank's part of a whole tensor whose first dimensions are those of p."""
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = p.device_mesh, p.placements  # type: ignore[attr-defined]
    return local(distribute_tensor(t, mesh, placements, src_data_rank=None))


Tensors = Mapping[nn.Parameter, Tensor]


@dataclass(frozen=True, eq=False)
class Member:
    """One layer of a site."""

    name: str
    module: nn.Module
    kind: Kind
    names: Mapping[nn.Parameter, str]  # its parameters, as they were found
    # Of its input, where there are so many before the features.
    sample_dim: int = 0

    def sample_first(self, a: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """Input and output (or its gradient) with the sample as dimension 0."""
        how = ARRANGEMENTS.get(self.module)
        if how is not None:
            return how(a), how(g)
        features = self.kind.features
        if callable(features):
            features = features(self.module)
        if a.dim() <= features:  # one sample, not a batch of one
            return a[None], g[None]
        dim = self.sample_dim
        if 0 < dim < a.dim() - features:
            return a.movedim(dim, 0), g.movedim(dim, 0)
        return a, g


@dataclass(frozen=True, eq=False)
class Segment:
    """The columns of one parameter."""

    param: nn.Parameter
    owner: Member
    name: str
    shape: Shape  # (h, n_G, width)
    in_order: bool  # whether its numbers lie as the matrix's rows do

    def rows(self, tensor: Tensor) -> Tensor:
        """A tensor of the parameter's shape as (h, n_G, width)."""
        return self.owner.kind.rows(self.owner.module, self.name, tensor)

    def back(self, rows: Tensor) -> Tensor:
        """And back."""
        back = self.owner.kind.back
        if back is None:
            return rows.reshape(self.param.shape)
        return back(self.owner.module, self.name, rows)


Segments = tuple[Segment, ...]


class Site:
    """One block's layers and parameters."""

    def __init__(self, members: Sequence[Member], segments: Segments) -> None:
        self.members = tuple(members)
        self.segments = segments
        # The weight, whose group gives the damping.
        self.lead = segments[0].param
        # Whether its parameters are spread over ranks.
        self.sharded = is_sharded(self.lead)
        names = [m.name or type(m.module).__name__ for m in members]
        self.name = " + ".join(names)
        forms: list[Any] = [member.kind.form for member in members]
        # Whether one of its layers has factors.
        self.factored = None in forms
        # Whether all have: it is a matrix, or a stack.
        self.matrix = not any(forms)
        self.convolution = all(
            hasattr(m.module, "kernel_size") for m in members
        )
        # That a site without factors keeps: "lookup" rather than "explicit".
        self.own_form = None if self.factored else max(forms)

    @property
    def parameter_names(self) -> list[str]:
        """As the module has them."""
        names = [f"{s.owner.name}.{s.name}" for s in self.segments]
        return [name.lstrip(".") for name in names]

    @property
    def dtype(self) -> torch.dtype:
        """The precision of its small matrices and of its directions."""
        return torch.promote_types(self.lead.dtype, torch.float32)

    def active(self) -> Segments:
        """The segments that are trained now."""
        return tuple([s for s in self.segments if s.param.requires_grad])

    def reached(self, active: Segments) -> bool:
        """Whether the running backward reaches one of its parameters.

        FSDP2 puts a whole tensor in a spread one's place while a backward runs.
        """
        for s in active:
            used: Tensor = s.param
            if self.sharded:
                used = getattr(s.owner.module, s.name, used)
            if accumulates(used):
                return True
        return False

    def in_use(self, grads: Tensors) -> bool:
        """Whether a gradient has reached it; of a spread one, this rank's part of it."""
        params = [s.param for s in self.active() if s.param in grads]
        return any(local(grads[p]).any() for p in params)

    def damping(self, dampings: Mapping[nn.Parameter, float]) -> float:
        """That of its weight's group."""
        return dampings[self.lead]

    def shape(self, active: Segments) -> Shape:
        h, n_G, width = active[0].shape
        for s in active[1:]:
            width += s.shape[2]
        return h, n_G, width

    def gather(
        self, active: Segments, tensors: Tensors, dtype: torch.dtype
    ) -> Tensor:
        """One tensor per parameter -> z (n,), or this rank's part of it; a missing one counts as
        zero.
        """
        parts = []  # this happens at every step: few calls
        for s in active:
            t = tensors.get(s.param)
            if t is None:
                t = torch.zeros_like(s.param)
            if self.sharded:
                t = local(t).reshape(1, 1, -1)
            else:
                t = t.reshape(s.shape) if s.in_order else s.rows(t)
            parts.append(t.to(dtype))
        z = parts[0] if len(parts) == 1 else torch.cat(parts, 2)
        return z.reshape(-1)

    def scatter(
        self, active: Segments, d: Tensor
    ) -> dict[nn.Parameter, Tensor]:
        """d (n,), or this rank's part of it -> one tensor per parameter."""
        if not self.sharded:
            return self.scatter_whole(active, d)
        own = [local(s.param) for s in active]
        parts = d.split([part.numel() for part in own])
        return {
            s.param: like(part.view_as(p), s.param)
            for s, p, part in zip(active, own, parts, strict=True)
        }

    def scatter_whole(
        self, active: Segments, d: Tensor
    ) -> dict[nn.Parameter, Tensor]:
        """d (n,) -> one whole tensor per parameter, spread or not."""
        h, n_G, _ = active[0].shape
        widths = [s.shape[2] for s in active]
        parts = d.view(h, n_G, -1).split(widths, 2)
        out = {}  # this happens at every step: few calls
        for s, part in zip(active, parts, strict=True):
            p = s.param
            out[p] = part.reshape(p.shape) if s.in_order else s.back(part)
        return out

    def operator(
        self, active: Segments, member: Member, a: Tensor, g: Tensor
    ) -> Operator:
        """U of one call of one layer, unscaled: its columns are the per-sample gradients."""
        kind = member.kind
        parts = [(member.names.get(s.param), s.shape[2]) for s in active]
        found = kind.gradients(member.module, a, g)
        return kind.build(found, parts, self.shape(active))


def differs(count: int, samples: int) -> str:
    """Why a layer's dimension 0 is not taken as the sample."""
    return (
        f"dimension 0 of its input is {count} where the other layers have {samples} samples "
        "(seng.layers.arrange can say how the sample comes first)"
    )


def survey(
    module: nn.Module, params: Iterable[nn.Parameter], sample_dim: int = 0
) -> tuple[list[Site], dict[str, str]]:
    """The sites of a module, and for every other parameter of `params` in it the reason why it has
    none.
    """
    owned = set(params)
    # An attention does not call its children's forward: nothing is captured there.
    inside = {
        child: f"nn.MultiheadAttention '{name}' does not call it as a module"
        for name, parent in module.named_modules()
        if isinstance(parent, nn.MultiheadAttention)
        for child in parent.children()
    }
    sites: list[Site] = []
    reasons: dict[str, str] = {}
    for layers in _clusters(module, owned):
        try:
            members = []
            for name, layer in layers:
                kind = inside.get(layer) or kind_of(layer)
                if not isinstance(kind, Kind):
                    raise NoSiteError(kind)
                own = layer.named_parameters(recurse=False)
                names = {p: key for key, p in own}
                members.append(Member(name, layer, kind, names, sample_dim))
            sites.append(Site(members, _segments(members, owned)))
        except NoSiteError as error:
            why = str(error)
            if len(layers) > 1:
                shared = ", ".join(name for name, _ in layers)
                why += f" (and they share a parameter: {shared})"
            for name, layer in layers:
                named = layer.named_parameters(name, recurse=False)
                reasons |= {key: why for key, p in named if p in owned}
    return sites, reasons


class NoSiteError(Exception):
    """Why layers are left to the plain gradient."""


def _clusters(
    module: nn.Module, owned: set[nn.Parameter]
) -> list[list[tuple[str, nn.Module]]]:
    """Layers that share parameters."""
    clusters: list[Any] = []
    for name, layer in module.named_modules():
        params = owned.intersection(layer.parameters(recurse=False))
        if not params:
            continue
        layers = []
        others = []
        for cluster in clusters:
            if params.isdisjoint(cluster[0]):
                others.append(cluster)
            else:
                params |= cluster[0]
                layers += cluster[1]
        layers.append((name, layer))
        clusters = [*others, (params, layers)]
    return [layers for _, layers in clusters]


def _segments(members: Sequence[Member], owned: set[nn.Parameter]) -> Segments:
    """The parameters side by side, weights first."""
    found: dict[nn.Parameter, Segment] = {}
    for member in members:
        kind = member.kind
        for p, key in member.names.items():
            if p not in owned:
                continue
            if p.is_complex():
                raise NoSiteError("complex parameters are not supported")
            if kind.factored and key not in ("weight", "bias"):
                raise NoSiteError(
                    f"a rule with factors knows a weight and a bias; '{key}' is neither"
                )
            empty = torch.empty(p.shape, device="meta")
            rows = kind.rows(member.module, key, empty)
            shape: Any = tuple(rows.shape)
            segment = Segment(p, member, key, shape, kind.back is None)
            known = found.setdefault(p, segment)
            first = next(iter(found.values()))
            alike = known.owner.kind.rows is kind.rows and known.shape == shape
            if not alike or first.shape[:2] != shape[:2]:
                raise NoSiteError(
                    "it shares a parameter with a layer that lays it out differently"
                )
    if len({is_sharded(p) for p in found}) > 1:
        raise NoSiteError(
            "some of its parameters are spread over ranks and others are not"
        )
    return tuple(sorted(found.values(), key=lambda s: s.name != "weight"))
