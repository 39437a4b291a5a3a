"""Parameters that are spread over ranks (DTensor, as FSDP2 and HSDP make them), and a basis that is
spread alike.

A site's vector is cut up as its parameters are. Each rank has its own rows of U, and the products
with them are added up over ranks. A step sends k numbers per layer, Uᵀg; d = g − Ub needs nothing
more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from seng.distributed.team import Team
from seng.layers.sites import (
    Segments,
    Site,
    is_sharded,
    like,
    local,
    spread,
)
from seng.linalg.operators import Merged, Operator


def check_placements(
    module: nn.Module, params: Sequence[Tensor], strategy: str | None
) -> None:
    """Refuse tensor parallelism, and spread parameters under the paper's strategies."""
    sharded: list[Any] = [p for p in params if is_sharded(p)]
    if not sharded:
        return
    from torch.distributed.fsdp import FSDPModule

    if strategy in ("block", "lagged"):
        raise ValueError(
            f"strategy={strategy!r} averages whole directions, and the parameters are DTensors, "
            "spread over ranks (FSDP2): leave strategy out, which shares one basis, spread alike"
        )
    kinds = {type(kind).__name__ for p in sharded for kind in p.placements}
    fsdp = any(isinstance(layer, FSDPModule) for layer in module.modules())
    if not fsdp or not kinds <= {"Shard", "Replicate"}:
        raise RuntimeError(
            "the parameters are DTensors that no fully_shard has made (tensor parallelism?); they "
            f"lie on their device mesh as {sorted(kinds)}, and their layers do not see whole "
            "gradients: SENG works with what FSDP2 and HSDP have sharded or replicated"
        )


def holders(p: Any) -> Team:
    """The ranks that have the other parts of a DTensor p."""
    placements = enumerate(p.placements)
    cut = [dim for dim, placement in placements if placement.is_shard()]
    if not cut:
        return Team("shared")
    if len(cut) > 1:
        raise RuntimeError(
            "a parameter is sharded along two dimensions of its device mesh: SENG works with one"
        )
    group = p.device_mesh.get_group(cut[0])
    size = dist.get_world_size(group)
    rank = dist.get_rank(group)
    return Team("shared", size, rank, group)


@dataclass(frozen=True)
class Sharded(Merged):
    """A basis Y (k, n of this rank), of which each rank has its own columns.

    `rmv` is this rank's part of Uᵀz: the sum over ranks is sent for all layers at once.
    """

    form = "sharded"
    # To refine a solve would take a second message at every step.
    exact = False

    team: Team  # the ranks that have the other rows

    def across(self, other: Sharded) -> Tensor:
        """UᵀV of another V."""
        out = super().across(other)
        self.team.sum_([out], "a Gram of spread parameters")
        return out

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Sharded:
        return replace(self, Y=change(self.Y))

    def halved(self) -> Sharded:
        return self


def parts_of(U: Sharded, params: Sequence[Tensor]) -> list[Tensor]:
    """A basis as one DTensor (*shape, k) per parameter: checkpoints can spread them anew."""
    k = U.samples
    own = [local(p) for p in params]
    out = []
    basis = U.explicit().U
    pieces = basis.split([part.numel() for part in own])
    for rows, part, p in zip(pieces, own, params, strict=True):
        out.append(like(rows.reshape(*part.shape, k), p, k))
    return out


def from_parts(
    parts: Sequence[Tensor], params: Sequence[Tensor], dtype: torch.dtype
) -> Sharded:
    """A basis from one tensor (*shape, k) per parameter; whole tensors are spread."""
    rows = []
    for t, p in zip(parts, params, strict=True):
        if is_sharded(t):
            own = local(t)
        else:
            own = spread(t.to(p.device), p)
        rows.append(own.reshape(-1, t.shape[-1]))
    Y = torch.cat(rows).to(dtype).T.contiguous()
    layout = 1, 1, Y.shape[1]
    return Sharded(Y, Y.new_ones(()), layout, holders(params[0]))


def in_use(site: Site, grads: Any) -> bool:
    """Whether a gradient has reached a site, on any rank that has a part of it."""
    reached = site.in_use(grads)
    if not site.sharded:
        return reached
    lead = site.lead
    what = "looking at gradients"
    return [1] in holders(lead).gathered([reached], lead.device, what)


def spread_basis(site: Site, active: Segments, Y: Tensor) -> Operator:
    """U = Yᵀ (k, n) of a site; of a spread one, this rank's part of it."""
    Y = Y.to(site.dtype)
    if not site.sharded:
        return Merged.of(Y, site.shape(active))
    return _cut(site, active, Y)


def _cut(site: Site, active: Segments, Y: Tensor) -> Sharded:
    taken_apart = partial(site.scatter_whole, active)
    parts = torch.vmap(taken_apart, out_dims=-1)(Y)  # (*shape, k) each
    return from_parts(list(parts.values()), list(parts), Y.dtype)


class Place:
    """Which numbers of a spread layer lie on this rank."""

    def __init__(self, site: Site, active: Segments) -> None:
        self.site = site
        self.active = active
        self.team = holders(site.lead)  # the ranks that have the others
        self.widths = [s.shape[2] for s in active]

    @property
    def by_rows(self) -> bool:
        """Whether they are whole rows of the layer's one matrix."""
        h, n_G, _ = self.site.shape(self.active)
        for s in self.active:
            placements: Any = s.param.placements  # type: ignore[attr-defined]
            dims = {kind.dim for kind in placements if kind.is_shard()}
            if dims - {0} or not s.in_order or s.param.shape[0] != n_G:
                return False
        return h == 1

    def rows(self, V: Tensor) -> Tensor:
        """This rank's rows of V (n_G, r), where it has whole rows."""
        return spread(V, self.active[0].param)

    def cut(self, z: Tensor) -> Tensor:
        """This rank's numbers of z (n,)."""
        return _cut(self.site, self.active, z[None]).Y[0]
