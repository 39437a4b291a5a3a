"""Where a block lives: the layers that share parameters, and how those parameters lie side by side
as one (h, n_G, n_A).

Weight and bias of a layer are one matrix: the bias is one more column, and a row of ones is
appended to Â. Layers that share a parameter are one site; each of them fills its own columns and
leaves the others' at zero.

Parameters that are spread over ranks: DTensors, as FSDP2 and HSDP make them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from seng.layers.kinds import ARRANGEMENTS, ROWS, Kind, kind_of
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
    params: frozenset[nn.Parameter] = frozenset()  # as they were at the survey

    def holds(self, param: nn.Parameter, name: str) -> bool:
        """Whether the parameter is its own by that name.

        FSDP2 puts another tensor in a spread parameter's place while a backward runs.
        """
        if is_sharded(param):
            return param in self.params and name in self.module._parameters
        return getattr(self.module, name, None) is param

    def sample_first(self, a: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """Input and output (or its gradient) with the sample as dimension 0."""
        how = ARRANGEMENTS.get(self.module)
        if how is not None:
            return how(a), how(g)
        if a.dim() <= self.kind.features(
            self.module
        ):  # one sample, not a batch of one
            return a[None], g[None]
        return a, g


@dataclass(frozen=True, eq=False)
class Segment:
    """The columns of one parameter."""

    param: nn.Parameter
    owner: Member
    name: str
    shape: Shape  # (h, n_G, width)
    in_order: bool = False  # whether its numbers lie as the matrix's rows do

    @property
    def used(self) -> Tensor:
        """What the layer uses in its place now: FSDP2 has it whole while a backward runs."""
        if not is_sharded(self.param):
            return self.param
        return getattr(self.owner.module, self.name, self.param)

    def rows(self, tensor: Tensor) -> Tensor:
        """A tensor of the parameter's shape as (h, n_G, width)."""
        return self.owner.kind.layout[0](self.owner.module, self.name, tensor)

    def back(self, rows: Tensor) -> Tensor:
        """And back."""
        return self.owner.kind.layout[1](self.owner.module, self.name, rows)


Segments = tuple[Segment, ...]


@dataclass(frozen=True, eq=False)
class Site:
    """One block's layers and parameters."""

    members: tuple[Member, ...]
    segments: Segments
    lead: nn.Parameter = field(
        init=False
    )  # the weight, whose group gives the damping
    sharded: bool = field(
        init=False
    )  # whether its parameters are spread over ranks
    name: str = field(init=False)
    factored: bool = field(init=False)  # whether one of its layers has factors
    matrix: bool = field(
        init=False
    )  # whether all have: it is a matrix, or a stack
    own_form: str | None = field(
        init=False
    )  # that a site without factors keeps

    def __post_init__(self) -> None:
        lead = self.segments[0].param
        names = [m.name or type(m.module).__name__ for m in self.members]
        has = [m.kind.factored for m in self.members]
        table = any(isinstance(m.module, nn.Embedding) for m in self.members)
        own = {
            "lead": lead,
            "sharded": is_sharded(lead),
            "name": " + ".join(names),
            "factored": any(has),
            "matrix": all(has),
            "own_form": None
            if any(has)
            else "lookup"
            if table
            else "explicit",
        }
        for name, value in own.items():
            object.__setattr__(self, name, value)

    @property
    def dtype(self) -> torch.dtype:
        """The precision of its small matrices and of its directions."""
        return (
            torch.float64
            if self.lead.dtype == torch.float64
            else torch.float32
        )

    def active(self) -> Segments:
        """The segments that are trained now."""
        return tuple([s for s in self.segments if s.param.requires_grad])

    def in_use(self, grads: Tensors) -> bool:
        """Whether a gradient has reached it; of a spread one, this rank's part of it."""
        found = [
            local(grads[s.param]) for s in self.active() if s.param in grads
        ]
        return any(bool(g.any()) for g in found)

    def damping(self, dampings: Mapping[nn.Parameter, float]) -> float:
        """Its parameters' one damping."""
        values = {dampings[s.param] for s in self.segments}
        if len(values) > 1:
            raise ValueError(
                f"layer '{self.name}' is one block but its parameters have the dampings {sorted(values)}: give them one"
            )
        return values.pop()

    def shape(self, active: Segments) -> Shape:
        h, n_G, _ = active[0].shape
        return h, n_G, sum([segment.shape[2] for segment in active])

    def gather(
        self, active: Segments, tensors: Tensors, dtype: torch.dtype
    ) -> Tensor:
        """One tensor per parameter -> z (n,), or this rank's part of it; a missing one counts as
        zero.
        """
        parts = []  # this happens at every step: few calls
        for s in active:
            t = (
                tensors[s.param]
                if s.param in tensors
                else torch.zeros_like(s.param)
            )
            if self.sharded:
                t = local(t).reshape(1, 1, -1)
            else:
                t = t.reshape(s.shape) if s.in_order else s.rows(t)
            parts.append(t.to(dtype))
        return (parts[0] if len(parts) == 1 else torch.cat(parts, 2)).reshape(
            -1
        )

    def scatter(
        self, active: Segments, d: Tensor
    ) -> dict[nn.Parameter, Tensor]:
        """d (n,), or this rank's part of it -> one tensor per parameter."""
        if not self.sharded:
            return self.scatter_whole(active, d)
        out, start = {}, 0
        for s in active:
            own = local(s.param)
            piece = d[start : start + own.numel()]
            out[s.param] = like(piece.view_as(own), s.param)
            start += own.numel()
        return out

    def scatter_whole(
        self, active: Segments, d: Tensor
    ) -> dict[nn.Parameter, Tensor]:
        """d (n,) -> one whole tensor per parameter, spread or not."""
        h, n_G, _ = active[0].shape
        D, out, start = d.view(h, n_G, -1), {}, 0
        for s in active:
            part = D[:, :, start : start + s.shape[2]]
            out[s.param] = (
                part.reshape(s.param.shape) if s.in_order else s.back(part)
            )
            start += s.shape[2]
        return out

    def operator(
        self, active: Segments, member: Member, a: Tensor, g: Tensor
    ) -> Operator:
        """U of one call of one layer, unscaled: its columns are the captured per-sample gradients."""
        parts = [
            (s.name if member.holds(s.param, s.name) else None, s.shape[2])
            for s in active
        ]
        return member.kind.operator(
            member.module, parts, self.shape(active), a, g
        )


def differs(count: int, samples: int) -> str:
    """Why a layer's dimension 0 is not taken as the sample."""
    return (
        f"dimension 0 of its input is {count} where the other layers have {samples} samples "
        "(seng.layers.arrange can say how the sample comes first)"
    )


Named = tuple[str, nn.Module]


def survey(
    module: nn.Module, params: Iterable[nn.Parameter]
) -> tuple[list[Site], dict[str, str]]:
    """The sites of a module, and for every other parameter of `params` in it the reason why it has
    none.
    """
    owned = set(params)
    inside = {  # an attention does not call its children's forward: nothing is captured there
        child: name
        for name, parent in module.named_modules()
        if isinstance(parent, nn.MultiheadAttention)
        for child in parent.modules()
        if child is not parent
    }
    sites: list[Site] = []
    reasons: dict[str, str] = {}
    for shared, layers in _clusters(module, owned):
        try:
            members = [_member(*layer, layers, inside) for layer in layers]
            sites.append(Site(tuple(members), _segments(members, shared)))
        except NoSiteError as why:
            for name, layer in layers:
                own = layer.named_parameters(name, recurse=False)
                reasons |= {key: str(why) for key, p in own if p in owned}
    return sites, reasons


class NoSiteError(Exception):
    """Why layers are left to the plain gradient."""


def _clusters(
    module: nn.Module, owned: set[nn.Parameter]
) -> list[tuple[set[nn.Parameter], list[Named]]]:
    """Layers that share parameters, and these parameters."""
    clusters: list[tuple[set[nn.Parameter], list[Named]]] = []
    for name, layer in module.named_modules():
        shared = owned.intersection(layer.parameters(recurse=False))
        if not shared:
            continue
        touching = [cluster for cluster in clusters if cluster[0] & shared]
        clusters = [cluster for cluster in clusters if not cluster[0] & shared]
        layers = [layer for _, layers in touching for layer in layers]
        params = shared.union(*(params for params, _ in touching))
        clusters.append((params, [*layers, (name, layer)]))
    return clusters


def _member(
    name: str,
    layer: nn.Module,
    layers: Sequence[Named],
    inside: Mapping[nn.Module, str],
) -> Member:
    kind = kind_of(layer)
    if layer in inside:
        kind = f"nn.MultiheadAttention '{inside[layer]}' does not call it as a module"
    if isinstance(kind, Kind):
        return Member(
            name, layer, kind, frozenset(layer.parameters(recurse=False))
        )
    if len(layers) > 1:
        names = ", ".join(name for name, _ in layers)
        kind = f"{kind} (and they share a parameter: {names})"
    raise NoSiteError(kind)


def _segments(
    members: Sequence[Member], shared: set[nn.Parameter]
) -> Segments:
    """The parameters side by side, weights first."""
    found: dict[nn.Parameter, Segment] = {}
    for member in members:
        for key, p in member.module.named_parameters(recurse=False):
            if p not in shared:
                continue
            if p.is_complex():
                raise NoSiteError("complex parameters are not supported")
            if member.kind.factored and key not in ("weight", "bias"):
                raise NoSiteError(
                    f"a rule with factors knows a weight and a bias; '{key}' is neither"
                )
            layout = member.kind.layout[0]
            rows = layout(
                member.module, key, torch.empty(p.shape, device="meta")
            )
            shape = (len(rows), *rows.shape[1:])
            segment = Segment(p, member, key, shape, layout in ROWS)
            known = found.setdefault(p, segment)
            first = next(iter(found.values()))
            if (
                known.shape != segment.shape
                or first.shape[:2] != segment.shape[:2]
            ):
                raise NoSiteError(
                    "it shares a parameter with a layer that lays it out differently"
                )
    if len({is_sharded(p) for p in found}) > 1:
        raise NoSiteError(
            "some of its parameters are spread over ranks and others are not"
        )
    return tuple(sorted(found.values(), key=lambda s: s.name != "weight"))
