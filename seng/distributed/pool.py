"""One U from the samples of all ranks, for the `shared` strategy.

    U = [U_1, …, U_𝓜]/√𝓜,   Y = (UV)ᵀ = Σ_i (U_i V_i)ᵀ/√𝓜

V (ϱ, k) are the leading directions of the whole Gram, cross terms between ranks included. Each
layer has a rank that owns it. Every rank sends the owner Ξ_i = ΩU_i, with Ω drawn alike on all
ranks. The owner finds V from ΞᵀΞ and sends each rank its rows V_i. Then Y is a sum over ranks, the
same on all of them. Ω only chooses the subspace. Where all columns are kept, V = I, and nothing is
lost.

Sent per refresh and layer: k·n numbers in a reduction, in half precision where the network is
trained so; and q·ϱ_i + k·ϱ numbers to and from its owner.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from seng.distributed.team import Team
from seng.linalg.implicit import Implicit
from seng.linalg.numerics import spectrum, start, widest
from seng.linalg.operators import Operator, Shape
from seng.linalg.sketch import IDENTITY, CountSketch, Omega, Sketch

EXACT = 2048  # rows beyond which our own sketch chooses the directions, and its size
ADDING = "adding up the ranks' bases"


@dataclass
class Share:
    """One layer, as one rank has it."""

    U: Operator  # of this rank's samples, columns u_i/√ϱ_i; it may have none
    counts: list[int]  # samples of every rank
    rank: int  # k
    generator: Callable[[], torch.Generator]  # the same on all ranks
    V: Tensor | None = None  # this rank's rows, (ϱ_i, k)
    Xi: Tensor = field(init=False)  # ΩU_i (q, ϱ_i), while V is being found

    @property
    def whole(self) -> bool:
        """Whether all columns are kept."""
        return self.rank >= sum(self.counts)

    def part(self, team: Team) -> Tensor:
        """This rank's part of Y (k, n)."""
        U = self.U
        if self.V is not None:
            return U.combine(self.V.to(U.dtype))
        Y = U.values.new_zeros(sum(self.counts), U.n, dtype=U.dtype)
        first = sum(self.counts[: team.rank])
        Y[first : first + U.samples] = U.explicit().U.T
        return Y


def empty(shape: Shape, dtype: torch.dtype, device: torch.device) -> Operator:
    """U of a rank without samples."""
    h, n_G, n_A = shape
    G = torch.zeros(0, h, n_G, 1, dtype=dtype, device=device)
    return Implicit(G, G.new_zeros(0, h, n_A, 1))


def pooled(
    team: Team,
    shares: Sequence[Share],
    sketch: Sketch | None,
    half: bool = False,
) -> list[Tensor]:
    """Y (k, n) of each layer, alike on all ranks; `half` sends it in half precision."""
    for share in shares:
        share.U = share.U.scaled(team.size**-0.5)
    cut = [share for share in shares if not share.whole]
    if cut:
        _find_directions(team, cut, sketch)
    parts = [share.part(team) for share in shares]
    if half and team.many:
        return _sum_in_half(team, parts)
    team.sum_(parts, ADDING)
    return parts


def _sum_in_half(team: Team, parts: Sequence[Tensor]) -> list[Tensor]:
    """The sums over ranks, sent as float16 numbers of at most 1, so that none overflows."""
    largest = [Y.abs().amax() if Y.numel() else Y.new_zeros(()) for Y in parts]
    sizes = torch.stack(largest).nan_to_num(0, 0, 0)
    team.max_(sizes, "comparing the ranks' bases")
    scales = torch.where(sizes > 0, sizes, 1)
    pairs = zip(parts, scales, strict=True)
    small = [(Y / scale).to(torch.float16) for Y, scale in pairs]
    team.sum_(small, ADDING)
    pairs = zip(small, scales, strict=True)
    return [Y.to(scale.dtype) * scale for Y, scale in pairs]


def _find_directions(
    team: Team, shares: Sequence[Share], sketch: Sketch | None
) -> None:
    """V_i of every layer. Layers are dealt out to the ranks, which find V for all."""
    dtype = max([share.U.dtype for share in shares], key=lambda t: t.itemsize)
    for share in shares:
        Xi = _omega(team, share, sketch).of(share.U).explicit().U
        share.Xi = Xi.to(dtype)
        share.rank = min(
            share.rank, len(Xi)
        )  # a sketch has no more directions
    ranks = range(team.size)
    owned = [shares[rank :: team.size] for rank in ranks]
    mine = owned[team.rank]
    none = shares[0].Xi.new_empty(0)
    sketches = [[s.Xi for s in theirs] for theirs in owned]
    sizes = [[len(s.Xi) * s.counts[rank] for s in mine] for rank in ranks]
    came = team.exchanged(
        sketches, sizes, none, "gathering the ranks' sketches"
    )
    arrived = zip(mine, *came, strict=True)
    found = [_directions(share, parts) for share, *parts in arrived]
    rows = [[V[rank] for V in found] for rank in ranks]
    sizes = [
        [s.counts[team.rank] * s.rank for s in theirs] for theirs in owned
    ]
    back = team.exchanged(rows, sizes, none, "dealing out the directions")
    for share, part in zip(chain(*owned), chain(*back), strict=True):
        share.V = part.view(-1, share.rank)
        del share.Xi


def _directions(share: Share, parts: Sequence[Tensor]) -> Any:
    """V_i (ϱ_i, k) of every rank from their Ξ_i (q, ϱ_i), which are flattened."""
    q = len(share.Xi)
    Xi = torch.cat([part.view(q, -1) for part in parts], 1)
    V = _leading(Xi, share.rank, share.generator())
    return V.split(share.counts)


def _omega(team: Team, share: Share, sketch: Sketch | None) -> Omega:
    """The user's sketch, or one of our own where the layer is large."""
    sketch = sketch or CountSketch(EXACT)
    if sketch.covers(share.U.shape):
        return IDENTITY
    add = partial(team.sum_, what="adding up row norms")
    return sketch.draw_alike(share.U, share.generator(), add)


def _leading(Xi: Tensor, k: int, generator: torch.Generator) -> Tensor:
    """V (ϱ, k): leading right singular vectors of Ξ (q, ϱ), nan where Ξ is not finite.

    They come from the smaller of its two Grams.
    """
    tall = Xi.shape[0] >= Xi.shape[1]
    K = Xi.mT @ Xi if tall else Xi @ Xi.mT
    fine = K.isfinite().all()
    K = torch.where(fine, K, 0).to(widest(Xi))[None]
    values, W = spectrum(K, k, start(K, k, generator))
    values, V = values[0], W[0]
    if not tall:
        smallest = len(Xi) * torch.finfo(Xi.dtype).eps * values[:1]
        there = values > smallest  # the others are rounding
        scale = torch.where(there, values, 1).rsqrt() * there
        V = Xi.nan_to_num(0, 0, 0).mT @ (V * scale).to(Xi.dtype)
    return torch.where(fine, V.to(Xi.dtype), torch.nan)
