"""Parameters that are spread over ranks (DTensor, as FSDP2 and HSDP make them), and a basis that is
spread alike.

A site's vector is cut up as its parameters are. Each rank has its own rows of U, and the products
with them are added up over ranks. A step sends k numbers per layer, Uᵀg; d = g − Ub needs nothing
more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from seng.distributed.team import Team
from seng.layers.sites import Segments, Site, is_sharded, like, local, spread
from seng.linalg.operators import Operator, Shape


def check_placements(
    module: nn.Module, params: Iterable[Tensor], strategy: str | None
) -> None:
    """Refuse tensor parallelism, and spread parameters under the paper's strategies."""
    sharded: list[Any] = [p for p in params if is_sharded(p)]
    if not sharded:
        return
    from torch.distributed.fsdp import FSDPModule

    if strategy in ("block", "lagged"):
        raise ValueError(
            f"strategy={strategy!r} averages whole directions, and the parameters are "
            "DTensors, spread over ranks (FSDP2): leave strategy out, which shares one "
            "basis that is spread as they are"
        )
    if not any(isinstance(layer, FSDPModule) for layer in module.modules()):
        raise RuntimeError(
            "the parameters are DTensors that no fully_shard has made (tensor "
            "parallelism?): their layers do not see whole gradients, and SENG works "
            "with FSDP2 and HSDP"
        )
    for p in sharded:
        kinds = {type(placement).__name__ for placement in p.placements}
        if not kinds <= {"Shard", "Replicate"}:
            raise RuntimeError(
                f"a parameter lies on its device mesh as {sorted(kinds)} (tensor "
                "parallelism?): SENG works with parameters that are sharded or "
                "replicated, as FSDP2 and HSDP make them"
            )


def holders(p: Any) -> Team:
    """The ranks that have the other parts of a DTensor p."""
    placements = enumerate(p.placements)
    cut = [dim for dim, placement in placements if placement.is_shard()]
    if not cut:
        return Team("shared")
    if len(cut) > 1:
        raise RuntimeError(
            "a parameter is sharded along two dimensions of its device mesh: SENG works "
            "with one"
        )
    group = p.device_mesh.get_group(cut[0])
    return Team(
        "shared", dist.get_world_size(group), dist.get_rank(group), group
    )


@dataclass(frozen=True)
class Sharded(Operator):
    """U ≈ Yᵀ, of which each rank has its own columns of Y."""

    form = "sharded"
    exact = (
        False  # to refine a solve would take a second message at every step
    )

    Y: Tensor  # (k, n of this rank)
    team: Team  # the ranks that have the others

    @property
    def shape(self) -> Shape:
        return 1, 1, self.Y.shape[1]

    @property
    def values(self) -> Tensor:
        return self.Y

    def rows(self) -> Iterator[tuple[slice, Tensor]]:
        yield slice(0, self.n), self.Y

    def across(self, other: Sharded) -> Tensor:
        """YZᵀ of another."""
        out = self.Y @ other.Y.T
        self.team.sum_([out], "a Gram of spread parameters")
        return out

    def gram(self) -> Tensor:
        return self.across(self)

    def rmv(self, z: Tensor) -> Tensor:
        """This rank's part of Uᵀz: the sum over ranks is sent for all layers at once."""
        return self.Y @ z

    def mixed(self, other: Sharded, W: Tensor) -> Sharded:
        """[U, V]W of another V."""
        return replace(self, Y=W.T @ torch.cat([self.Y, other.Y]))

    def halved(self) -> Sharded:
        return self

    def mv(self, c: Tensor) -> Tensor:
        return c @ self.Y

    def combine(self, V: Tensor) -> Tensor:
        return V.T @ self.Y


def parts_of(U: Sharded, params: Sequence[Tensor]) -> list[Tensor]:
    """A basis as one DTensor (*shape, k) per parameter: checkpoints can spread them anew."""
    k = U.samples
    own = [local(p) for p in params]
    pieces = U.Y.split([part.numel() for part in own], 1)
    out = []
    for Y, part, p in zip(pieces, own, params, strict=True):
        columns = Y.T.reshape(*part.shape, k)
        out.append(like(columns.contiguous(), p, k))
    return out


def from_parts(
    parts: Sequence[Tensor], params: Sequence[Tensor], dtype: torch.dtype
) -> Sharded:
    """A basis from one tensor (*shape, k) per parameter; whole tensors are spread."""
    k = parts[0].shape[-1]
    rows = []
    for t, p in zip(parts, params, strict=True):
        own = local(t) if is_sharded(t) else spread(t.to(p.device), p)
        rows.append(own.reshape(-1, k))
    Y = torch.cat(rows).T.to(dtype)
    return Sharded(Y.contiguous(), holders(params[0]))


def in_use(site: Site, grads: Mapping[nn.Parameter, Tensor]) -> bool:
    """Whether a gradient has reached any rank's part of a spread site."""
    lead, reached = site.lead, int(site.in_use(grads))
    rows = holders(lead).gathered(
        [reached], lead.device, "looking at gradients"
    )
    return [1] in rows


def spread_basis(site: Site, active: Segments, Y: Tensor) -> Sharded:
    """This rank's part of a basis Y (k, n) of a whole site."""
    params = [s.param for s in active]
    found = [site.scatter_whole(active, y) for y in Y]
    parts = [torch.stack([one[p] for one in found], -1) for p in params]
    return from_parts(parts, params, Y.dtype)
