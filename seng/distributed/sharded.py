"""Parameters that are spread over ranks (DTensor, as FSDP2 and HSDP make them), and a basis that is spread as they are.

A site's vector is then cut up as its parameters are: each rank has its own rows of U, the products with them are added up over
ranks, and a step sends k numbers per layer: Uᵀg. d = g − Ub needs nothing more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from seng.distributed.team import Team
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
    """A part that lies as this rank's part of p does, with some more dimensions at the end, as what all ranks have together."""
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


def check_placements(
    module: nn.Module, params: Iterable[Tensor], strategy: str | None
) -> None:
    """Shards and replicas are served; tensor parallelism is not, and the paper's strategies need whole gradients."""
    sharded = [p for p in params if is_sharded(p)]
    if sharded and strategy in ("block", "lagged"):
        raise ValueError(
            f"strategy={strategy!r} averages whole directions, and the parameters are DTensors, spread over ranks (FSDP2): "
            "leave strategy out, which shares one basis that is spread as they are"
        )
    if sharded:
        from torch.distributed.fsdp import FSDPModule

        if not any(isinstance(layer, FSDPModule) for layer in module.modules()):
            raise RuntimeError(
                "the parameters are DTensors that no fully_shard has made (tensor parallelism?): their layers do not see whole "
                "gradients, and SENG works with FSDP2 and HSDP"
            )
    for p in sharded:
        kinds = {type(placement).__name__ for placement in p.placements}  # type: ignore[attr-defined]
        if not kinds <= {"Shard", "Replicate"}:
            raise RuntimeError(
                f"a parameter lies on its device mesh as {sorted(kinds)} (tensor parallelism?): SENG works with parameters "
                "that are sharded or replicated, as FSDP2 and HSDP make them"
            )


def holders(p: Tensor) -> Team:
    """The ranks that have the other parts of p."""
    mesh: Any = p.device_mesh  # type: ignore[attr-defined]
    spread_over = [
        i
        for i, placement in enumerate(p.placements)  # type: ignore[attr-defined]
        if type(placement).__name__ == "Shard"
    ]
    if not spread_over:
        return Team("shared")
    if len(spread_over) > 1:
        raise RuntimeError(
            "a parameter is sharded along two dimensions of its device mesh: SENG works with one"
        )
    group = mesh.get_group(spread_over[0])
    return Team("shared", dist.get_world_size(group), dist.get_rank(group), group)


@dataclass(frozen=True)
class Sharded(Operator):
    """U ≈ Yᵀ, of which each rank has its own columns of Y."""

    Y: Tensor  # (k, n of this rank)
    team: Team  # the ranks that have the others

    @property
    def shape(self) -> Shape:
        return 1, 1, self.Y.shape[1]

    @property
    def samples(self) -> int:
        return self.Y.shape[0]

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
        c = self.Y @ z
        self.team.sum_([c], "Uᵀg of spread parameters")
        return c

    def mv(self, c: Tensor) -> Tensor:
        return c @ self.Y

    def combine(self, V: Tensor) -> Tensor:
        return V.T @ self.Y

    def scaled(self, scale: float | Tensor) -> Self:
        return replace(self, Y=self.Y * scale)

    def first(self, samples: int) -> Self:
        return replace(self, Y=self.Y[:samples])


def parts_of(U: Sharded, params: Sequence[Tensor]) -> list[Tensor]:
    """A basis as one DTensor (*shape, k) per parameter, which checkpoints can spread over other ranks."""
    counts = [local(p).numel() for p in params]
    pieces = U.Y.split(counts, 1)
    return [
        like(Y.T.reshape(*local(p).shape, U.samples).contiguous(), p, U.samples)
        for Y, p in zip(pieces, params, strict=True)
    ]


def from_parts(
    parts: Sequence[Tensor], params: Sequence[Tensor], dtype: torch.dtype
) -> Sharded:
    """And back; parts that are whole are spread."""
    own = [
        local(t) if is_sharded(t) else spread(t.to(p.device), p)
        for t, p in zip(parts, params, strict=True)
    ]
    k = parts[0].shape[-1]
    return Sharded(
        torch.cat([t.reshape(-1, k) for t in own]).T.to(dtype).contiguous(),
        holders(params[0]),
    )
