"""One U from the samples of all ranks, for the `shared` strategy: U = [U_1, …, U_𝓜]/√𝓜, as k combinations of its columns.

Of each layer, every rank sends Ξ_i = ΩU_i to the layer's owner, Ω drawn alike on all ranks. The owner finds the leading
directions V of the whole Gram ΞᵀΞ, cross terms between ranks included, and sends each rank its rows V_i. The sum of U_iV_i over
ranks is then Y = UV, the same on all of them. Ω only chooses the subspace. Where all columns are kept, V = I: nothing is lost.

Sent per refresh: k·n numbers of a layer in a reduction, in half precision where the network is trained so; and q·ϱ_i + k·ϱ
numbers to and from its owner.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from seng.distributed.team import Team
from seng.linalg.implicit import Implicit
from seng.linalg.numerics import spectrum, start, widest
from seng.linalg.operators import Operator, Shape
from seng.linalg.sketch import CountSketch, Identity, LeverageRows, Omega, Sketch

EXACT = 2048  # rows up to which a layer is not sketched to choose its directions, and to which it is


@dataclass
class Share:
    """One layer, as one rank has it."""

    U: Operator  # of this rank's samples, columns u_i/√ϱ_i; it may have none
    counts: list[int]  # samples of every rank
    rank: int  # k
    generator: Callable[[], torch.Generator]  # the same on all ranks
    V: Tensor | None = None  # this rank's rows, (ϱ_i, k)

    @property
    def samples(self) -> int:
        return sum(self.counts)

    @property
    def whole(self) -> bool:
        """Whether all columns are kept."""
        return self.rank >= self.samples

    def part(self, team: Team) -> Tensor:
        """This rank's part of Y (k, n)."""
        if not self.whole:
            assert self.V is not None
            return self.U.combine(self.V.to(self.U.dtype))
        Y = torch.zeros(
            self.samples,
            self.U.n,
            dtype=self.U.dtype,
            device=self.U.tensors()[0].device,
        )
        first = sum(self.counts[: team.rank])
        Y[first : first + self.U.samples] = self.U.explicit().U.T
        return Y


def empty(shape: Shape, dtype: torch.dtype, device: torch.device) -> Operator:
    """U of a rank without samples."""
    h, n_G, n_A = shape
    return Implicit(
        *(torch.zeros(0, h, n, 1, dtype=dtype, device=device) for n in (n_G, n_A))
    )


def pooled(
    team: Team, shares: Sequence[Share], sketch: Sketch | None, half: bool = False
) -> list[Tensor]:
    """Y (k, n) of each layer, alike on all ranks; `half` sends it in half precision."""
    for share in shares:
        share.U = share.U.scaled(team.size**-0.5)
    _find_directions(team, [share for share in shares if not share.whole], sketch)
    out = [share.part(team) for share in shares]
    if not half or not team.many:
        team.sum_(out, "adding up the ranks' bases")
        return out
    sizes = torch.stack(
        [Y.abs().amax() if Y.numel() else Y.new_zeros(()) for Y in out]
    ).nan_to_num(0, 0, 0)
    team.max_(sizes, "comparing the ranks' bases")
    scales = torch.where(sizes > 0, sizes, 1).unbind()
    small = [
        (Y / scale).to(torch.float16) for Y, scale in zip(out, scales, strict=True)
    ]  # of at most 1, so that no sum overflows
    team.sum_(small, "adding up the ranks' bases")
    return [Y.to(scale.dtype) * scale for Y, scale in zip(small, scales, strict=True)]


def _find_directions(
    team: Team, shares: Sequence[Share], sketch: Sketch | None
) -> None:
    """V_i of every layer: layers are dealt out to the ranks, which work them out for all."""
    if not shares:
        return
    like = shares[0].U.tensors()[0]
    dtype = torch.promote_types(
        max((s.U.dtype for s in shares), key=lambda t: t.itemsize), torch.float32
    )
    owned = [shares[rank :: team.size] for rank in range(team.size)]
    seen = {id(s): _seen(team, s, sketch).to(dtype) for s in shares}  # Ξ_i (q, ϱ_i)
    for share in shares:
        share.rank = min(
            share.rank, len(seen[id(share)])
        )  # no more directions than a sketch has rows
    flat = [_joined([seen[id(s)] for s in theirs], like, dtype) for theirs in owned]
    mine = owned[team.rank]
    sizes = [
        sum(seen[id(s)].shape[0] * s.counts[rank] for s in mine)
        for rank in range(team.size)
    ]
    came = [
        _cut(part, [(len(seen[id(s)]), s.counts[rank]) for s in mine])
        for rank, part in enumerate(
            team.exchanged(flat, sizes, "gathering the ranks' sketches")
        )
    ]
    found = [  # V (ϱ, k), from Ξ (q, ϱ), cut into the rows of each rank
        _leading(torch.cat(Xi, 1), share.rank, share.generator).split(share.counts)
        for share, *Xi in zip(mine, *came, strict=True)
    ]
    rows = [_joined([V[rank] for V in found], like, dtype) for rank in range(team.size)]
    sizes = [sum(s.counts[team.rank] * s.rank for s in theirs) for theirs in owned]
    back = team.exchanged(rows, sizes, "dealing out the directions")
    for theirs, part in zip(owned, back, strict=True):
        for share, V in zip(
            theirs,
            _cut(part, [(s.counts[team.rank], s.rank) for s in theirs]),
            strict=True,
        ):
            share.V = V


def _seen(team: Team, share: Share, sketch: Sketch | None) -> Tensor:
    """Ξ_i = ΩU_i (q, ϱ_i)."""
    return _omega(team, share, sketch).of(share.U).explicit().U


def _omega(team: Team, share: Share, sketch: Sketch | None) -> Omega:
    """The user's sketch, or one of our own where the layer is large."""
    U = share.U
    sketch = CountSketch(EXACT) if sketch is None else sketch
    if sketch.covers(U.shape):
        return Identity()
    if not isinstance(sketch, LeverageRows):
        return sketch.draw(U, share.generator())
    norms = U.row_norms()
    team.sum_([norms], "adding up row norms")
    return sketch.draw(_WithNorms(U, norms), share.generator())  # type: ignore[arg-type]


class _WithNorms:
    """An operator whose rows have the norms of all ranks'."""

    def __init__(self, U: Operator, norms: Tensor) -> None:
        self.U, self.norms = U, norms

    def row_norms(self) -> Tensor:
        return self.norms

    def __getattr__(self, name: str) -> Any:
        return getattr(self.U, name)


def _leading(Xi: Tensor, k: int, generator: Callable[[], torch.Generator]) -> Tensor:
    """V (ϱ, k): leading right singular vectors of Ξ (q, ϱ), by the smaller of its two Grams; not finite where Ξ is not."""
    tall = Xi.shape[0] >= Xi.shape[1]
    K = (Xi.mT @ Xi if tall else Xi @ Xi.mT).to(widest(Xi))
    fine = K.isfinite().all()
    K = torch.where(fine, K, 0)[None]
    k = min(k, K.shape[-1])
    values, W = spectrum(K, k, start(K, k, generator()))
    V = W[0].to(Xi.dtype)
    if not tall:
        there = (
            values[0] > len(Xi) * torch.finfo(Xi.dtype).eps * values[0, :1]
        )  # the others are rounding
        scale = torch.where(there, values[0], 1).rsqrt() * there
        V = Xi.nan_to_num(0, 0, 0).mT @ (W[0] * scale).to(Xi.dtype)
    return torch.where(fine, V, torch.nan)


def _joined(parts: Sequence[Tensor], like: Tensor, dtype: torch.dtype) -> Tensor:
    return (
        torch.cat([part.reshape(-1) for part in parts])
        if parts
        else like.new_empty(0, dtype=dtype)
    )


def _cut(flat: Tensor, shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
    parts = flat.split([rows * columns for rows, columns in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
