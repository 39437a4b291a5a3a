"""Where a block lives: the layers that share parameters, and how those parameters lie side by side as one (h, n_G, n_A).

Weight and bias of a layer are one matrix: the bias is one more column, and a row of ones is appended to Â. Layers that share a
parameter are one site; each of them fills its own columns and leaves the others' at zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from seng.distributed.sharded import (
    Sharded,
    from_parts,
    holders,
    is_sharded,
    like,
    local,
)
from seng.layers import norms as norms  # registers its kinds
from seng.layers.kinds import ARRANGEMENTS, Kind, kind_of
from seng.linalg.implicit import Implicit
from seng.linalg.lookup import Lookup
from seng.linalg.operators import HALF, Explicit, Operator, Shape, wide


@dataclass(frozen=True, eq=False)
class Member:
    """One layer of a site."""

    name: str
    module: nn.Module
    kind: Kind
    params: frozenset[nn.Parameter] = (
        frozenset()
    )  # its own, as they were when the optimizer was built

    def holds(self, param: nn.Parameter, name: str) -> bool:
        """Whether the parameter is its own by that name; FSDP2 puts another in its place while a backward runs."""
        if is_sharded(param):
            return param in self.params and name in self.module._parameters
        return getattr(self.module, name, None) is param

    def matrix(self, param: str, tensor: Tensor) -> Tensor:
        """A tensor of the parameter's shape as (h, n_G, width)."""
        return self.kind.layout[0](self.module, param, tensor)

    def sample_first(self, a: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """Input and output (or its gradient) with the sample as dimension 0."""
        how = ARRANGEMENTS.get(self.module)
        if how is not None:
            return how(a), how(g)
        if a.dim() <= self.kind.features(
            self.module
        ):  # one sample, without a dimension for it
            return a[None], g[None]
        return a, g


@dataclass(frozen=True, eq=False)
class Segment:
    """The columns of one parameter."""

    param: nn.Parameter
    owner: Member
    name: str
    shape: Shape  # (h, n_G, width)

    @property
    def used(self) -> Tensor:
        """What the layer uses in its place at the moment: FSDP2 has it whole while a backward runs."""
        return (
            getattr(self.owner.module, self.name, self.param)
            if is_sharded(self.param)
            else self.param
        )


@dataclass(frozen=True, eq=False)
class Site:
    """One block's layers and parameters."""

    members: tuple[Member, ...]
    segments: tuple[Segment, ...]

    @property
    def name(self) -> str:
        return " + ".join(
            member.name or type(member.module).__name__ for member in self.members
        )

    @property
    def lead(self) -> nn.Parameter:
        """The parameter whose group gives the damping: the weight."""
        return self.segments[0].param

    @property
    def dtype(self) -> torch.dtype:
        """The precision of its small matrices and of its directions."""
        return torch.float64 if self.lead.dtype == torch.float64 else torch.float32

    @property
    def factored(self) -> bool:
        return any(member.kind.factored for member in self.members)

    @property
    def matrix(self) -> bool:
        """Whether every one of its layers has factors, so that it is one matrix with two sides, or a stack of them."""
        return all(member.kind.factored for member in self.members)

    @property
    def own_form(self) -> Literal["explicit", "lookup"] | None:
        """The form that a site without factors keeps."""
        if self.factored:
            return None
        return (
            "lookup"
            if any(isinstance(member.module, nn.Embedding) for member in self.members)
            else "explicit"
        )

    def active(self) -> tuple[Segment, ...]:
        """The segments that are trained now."""
        return tuple(
            segment for segment in self.segments if segment.param.requires_grad
        )

    @property
    def sharded(self) -> bool:
        """Whether its parameters are spread over ranks."""
        return is_sharded(self.lead)

    def in_use(self, grads: Mapping[nn.Parameter, Tensor]) -> bool:
        """Whether a gradient has reached it; of a spread one, whether any rank's part of it has been reached."""
        reached = any(
            s.param in grads and bool(local(grads[s.param]).any())
            for s in self.active()
        )
        if not self.sharded:
            return reached
        return any(
            row[0]
            for row in holders(self.lead).gathered(
                [int(reached)], self.lead.device, "looking at gradients"
            )
        )

    def damping(self, dampings: Mapping[nn.Parameter, float]) -> float:
        """Its parameters' one damping."""
        values = {dampings[s.param] for s in self.segments}
        if len(values) > 1:
            raise ValueError(
                f"layer '{self.name}' is one block but its parameters have the dampings {sorted(values)}: give them one"
            )
        return values.pop()

    def shape(self, active: tuple[Segment, ...]) -> Shape:
        h, n_G, _ = active[0].shape
        return h, n_G, sum(segment.shape[2] for segment in active)

    def gather(
        self,
        active: tuple[Segment, ...],
        tensors: Mapping[nn.Parameter, Tensor],
        dtype: torch.dtype,
    ) -> Tensor:
        """One tensor per parameter -> z (n,), or this rank's part of it; a missing one counts as zero."""
        if self.sharded:
            found = [
                local(
                    tensors[s.param]
                    if s.param in tensors
                    else torch.zeros_like(s.param)
                )
                for s in active
            ]
            return torch.cat([t.reshape(-1).to(dtype) for t in found])
        parts = [
            s.owner.matrix(s.name, tensors[s.param]).to(dtype)
            if s.param in tensors
            else torch.zeros(s.shape, dtype=dtype, device=s.param.device)
            for s in active
        ]
        return (parts[0] if len(parts) == 1 else torch.cat(parts, 2)).reshape(-1)

    def scatter(
        self, active: tuple[Segment, ...], d: Tensor
    ) -> dict[nn.Parameter, Tensor]:
        """d (n,) -> one tensor per parameter."""
        if self.sharded:
            pieces = d.split([local(s.param).numel() for s in active])
            return {
                s.param: like(t.view_as(local(s.param)), s.param)
                for s, t in zip(active, pieces, strict=True)
            }
        return self._scattered(active, d)

    def spread(self, active: tuple[Segment, ...], Y: Tensor) -> Sharded:
        """A basis Y (k, n) of the whole -> this rank's part."""
        found = [self._scattered(active, y) for y in Y]
        parts = [torch.stack([one[s.param] for one in found], -1) for s in active]
        return from_parts(parts, [s.param for s in active], Y.dtype)

    def _scattered(
        self, active: tuple[Segment, ...], d: Tensor
    ) -> dict[nn.Parameter, Tensor]:
        parts = d.view(self.shape(active)).split([s.shape[2] for s in active], 2)
        return {
            s.param: s.owner.kind.layout[1](s.owner.module, s.name, part)
            for s, part in zip(active, parts, strict=True)
        }

    def operator(
        self, active: tuple[Segment, ...], member: Member, a: Tensor, g: Tensor
    ) -> Operator:
        """U of one call of one layer, unscaled: its columns are the captured per-sample gradients."""
        own = {s.param: s.name for s in active if member.holds(s.param, s.name)}
        if (
            not (member.kind.factored or member.kind.any_precision)
            and a.is_floating_point()
        ):
            a, g = a.to(wide(a.dtype)), g.to(wide(g.dtype))
        elif g.dtype in HALF and a.is_floating_point():
            a = a.to(g.dtype)  # as the layer itself took it
        if member.kind.unfolded_later is not None and [
            own.get(s.param) for s in active
        ] in (["weight"], ["weight", "bias"]):
            later = member.kind.unfolded_later(member.module, a, g, len(active) - 1)
            if later is not None:
                return later
        seen = member.kind.rule(member.module, a, g)
        if isinstance(seen, Lookup):
            widened = [
                seen.G
                if s.param in own
                else seen.G.new_zeros(*seen.G.shape[:2], s.shape[2])
                for s in active
            ]
            return Lookup(seen.tokens, torch.cat(widened, 2), seen.vocabulary)
        if isinstance(
            seen, Tensor
        ):  # (ϱ, 2C): a weight and a bias of C numbers each, side by side
            if [own.get(s.param) for s in active] == ["weight", "bias"]:
                return Explicit(seen.T, self.shape(active))
            seen = dict(zip(("weight", "bias"), seen.chunk(2, 1), strict=True))
        if isinstance(seen, dict):
            U = [
                seen[own[s.param]].flatten(1)
                if s.param in own
                else g.new_zeros(g.shape[0], s.shape[2])
                for s in active
            ]
            return Explicit(torch.cat(U, 1).T, self.shape(active))
        h = self.segments[0].shape[0]
        G, A = (x if x.dim() == 3 else x[..., None] for x in seen)
        G, A = (
            x.unflatten(1, (h, x.shape[1] // h)) for x in (G, A)
        )  # (ϱ, h, n_G, κ), (ϱ, h, n_A, κ)
        fill = {
            "weight": lambda width: A,
            "bias": lambda width: A.new_ones(*A.shape[:2], width, A.shape[3]),
        }
        rows = [
            fill[own[s.param]](s.shape[2])
            if s.param in own
            else A.new_zeros(*A.shape[:2], s.shape[2], A.shape[3])
            for s in active
        ]
        A = rows[0] if len(rows) == 1 else torch.cat(rows, 2)
        return Implicit(
            G.to(torch.promote_types(G.dtype, A.dtype)),
            A.to(torch.promote_types(G.dtype, A.dtype)),
        )


def differs(count: int, samples: int) -> str:
    """Why a layer's dimension 0 is not taken as the sample."""
    return (
        f"dimension 0 of its input is {count} where the other layers have {samples} samples "
        "(seng.layers.arrange can say how the sample comes first)"
    )


def survey(
    module: nn.Module, params: Iterable[nn.Parameter]
) -> tuple[list[Site], dict[str, str]]:
    """The sites of a module, and for every other parameter of `params` inside it the reason why it has none."""
    owned = set(params)
    attention = {  # these run without calling their children's forward, so nothing can be captured there
        child: name
        for name, parent in module.named_modules()
        if isinstance(parent, nn.MultiheadAttention)
        for child in parent.modules()
        if child is not parent
    }
    clusters: list[tuple[set[nn.Parameter], list[tuple[str, nn.Module]]]] = []
    for name, layer in module.named_modules():
        mine = {p for p in layer._parameters.values() if p is not None and p in owned}
        if not mine:
            continue
        touching = [cluster for cluster in clusters if cluster[0] & mine]
        clusters = [cluster for cluster in clusters if not cluster[0] & mine]
        layers = [entry for _, entries in touching for entry in entries] + [
            (name, layer)
        ]
        clusters.append((mine.union(*(shared for shared, _ in touching)), layers))

    sites: list[Site] = []
    reasons: dict[str, str] = {}
    for shared, entries in clusters:
        found = _site(shared, entries, attention)
        if isinstance(found, Site):
            sites.append(found)
            continue
        for name, layer in entries:
            for key, p in layer._parameters.items():
                if p is not None and p in owned:
                    reasons[f"{name}.{key}" if name else key] = found
    return sites, reasons


def _site(
    shared: set[nn.Parameter],
    entries: list[tuple[str, nn.Module]],
    attention: Mapping[nn.Module, str],
) -> Site | str:
    members: list[Member] = []
    for name, layer in entries:
        kind = kind_of(layer)
        if layer in attention:
            kind = f"nn.MultiheadAttention '{attention[layer]}' does not call it as a module"
        if isinstance(kind, str):
            return (
                kind
                if len(entries) == 1
                else f"{kind} (and they share a parameter: {', '.join(n for n, _ in entries)})"
            )
        members.append(
            Member(
                name,
                layer,
                kind,
                frozenset(p for p in layer._parameters.values() if p is not None),
            )
        )

    segments: dict[nn.Parameter, Segment] = {}
    for member in members:
        for key, p in member.module._parameters.items():
            if p is None or p not in shared:
                continue
            if p.is_complex():
                return "complex parameters are not supported"
            if member.kind.factored and key not in ("weight", "bias"):
                return (
                    f"a rule with factors knows a weight and a bias; '{key}' is neither"
                )
            rows = member.matrix(
                key,
                torch.empty(p.shape, device="meta") if is_sharded(p) else p.detach(),
            )
            shape = (rows.shape[0], rows.shape[1], rows.shape[2])
            segment = segments.setdefault(p, Segment(p, member, key, shape))
            first = next(iter(segments.values())).shape
            if segment.shape != shape or shape[:2] != first[:2]:
                return "it shares a parameter with a layer that lays it out differently"
    if len({is_sharded(p) for p in segments}) > 1:
        return "some of its parameters are spread over ranks and others are not"
    weights_first = sorted(
        segments.values(), key=lambda segment: segment.name != "weight"
    )
    return Site(tuple(members), tuple(weights_first))
