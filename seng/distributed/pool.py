"""One U from the samples of all ranks, for the `shared` strategy.

    U = [U_1, …, U_𝓜]/√𝓜,   Y = (UV)ᵀ = Σ_i (U_i V_i)ᵀ/√𝓜

V (ϱ, k) are the leading directions of the whole Gram, cross terms between ranks included. Each
layer has a rank that owns it. Every rank sends the owner Ξ_i = ΩU_i, with Ω drawn alike on all
ranks. The owner finds V from ΞᵀΞ and sends it to all, which take their rows V_i. Then Y is a sum
over ranks, the same on all of them. Ω only chooses the subspace. Where all columns are kept, V = I, and nothing is
lost.

Sent per refresh and layer: k·n numbers in a reduction, in half precision where the network is
trained so; k·ϱ numbers of V in another; and q·ϱ_i numbers to the owner.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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
    V: Any = None  # of all ranks, (ϱ, k); None: all columns are kept
    Xi: Any = None  # ΩU_i (q, ϱ_i), while V is being found

    def part(self, rank: int) -> Tensor:
        """What this rank, the rank-th, has of Y (k, n)."""
        U = self.U
        first = sum(self.counts[:rank])
        own = slice(first, first + U.samples)
        if self.V is not None:
            return U.combine(self.V[own].to(U.dtype))
        Y: Tensor = U.values.new_zeros(sum(self.counts), U.n, dtype=U.dtype)
        Y[own] = U.explicit().U.T
        return Y


def empty(shape: Shape, dtype: torch.dtype, device: torch.device) -> Operator:
    """U of a rank without samples."""
    h, n_G, n_A = shape
    G = torch.zeros(0, h, n_G, 1, dtype=dtype, device=device)
    return Implicit(G, G.new_zeros(0, h, n_A, 1))


def pooled(
    team: Team, shares: list[Share], sketch: Sketch | None, half: bool
) -> list[Tensor]:
    """Y (k, n) of each layer, alike on all ranks.

    `half` sends it as float16 numbers whose sum is at most 1, so that none overflows.
    """
    for share in shares:
        share.U = share.U.scaled(team.size**-0.5)
    cut = [share for share in shares if share.rank < sum(share.counts)]
    if cut:
        _find_directions(team, cut, sketch)
    parts = [share.part(team.rank) for share in shares]
    if not half or not team.many:
        team.sum_(parts, ADDING)
        return parts
    largest = [Y.abs().amax() for Y in parts]
    sizes = torch.stack(largest).nan_to_num(0, 0, 0)
    team.sum_([sizes], "comparing the ranks' bases")
    scales = torch.where(sizes > 0, sizes, 1).unbind()
    small = [Y.div(c).half() for Y, c in zip(parts, scales, strict=True)]
    team.sum_(small, ADDING)
    return [Y.to(c.dtype) * c for Y, c in zip(small, scales, strict=True)]


def _find_directions(
    team: Team, shares: list[Share], sketch: Sketch | None
) -> None:
    """V_i of every layer. Layers are dealt out to the ranks, which find V for all."""
    for s in shares:
        s.Xi = _omega(team, s, sketch).of(s.U).explicit().U
        s.rank = min(s.rank, len(s.Xi))  # a sketch has no more directions
    ranks = range(team.size)
    owned = [shares[rank :: team.size] for rank in ranks]
    mine = owned[team.rank]
    sent = torch.cat([s.Xi.flatten() for s in chain(*owned)])
    to = [sum(_sizes(theirs, team.rank)) for theirs in owned]
    due = [_sizes(mine, rank) for rank in ranks]
    came = team.exchanged(sent, to, [*map(sum, due)], "gathering sketches")
    parts = came.split([*chain(*due)])
    for s in shares:
        s.V = sent.new_zeros(sum(s.counts), s.rank)
    for i, s in enumerate(mine):
        received = parts[i :: len(mine)]  # Ξ_i of each rank
        rows = [part.view(len(s.Xi), -1) for part in received]
        s.V = _leading(torch.cat(rows, 1), s.rank, s.generator())
    team.sum_([s.V for s in shares], "dealing out the directions")


def _sizes(shares: list[Share], rank: int) -> list[int]:
    """How many numbers the Ξ_i of a rank have."""
    return [len(s.Xi) * s.counts[rank] for s in shares]


def _omega(team: Team, share: Share, sketch: Sketch | None) -> Omega:
    """The user's sketch, or one of our own where the layer is large."""
    sketch = sketch or CountSketch(EXACT)
    if sketch.covers(share.U.shape):
        return IDENTITY
    add = partial(team.sum_, what="adding up row norms")
    return sketch.draw(share.U, share.generator(), add)


def _leading(Xi: Tensor, k: int, generator: torch.Generator) -> Tensor:
    """V (ϱ, k): leading right singular vectors of Ξ (q, ϱ), nan where Ξ is not finite.

    They come from the smaller of its two Grams.
    """
    tall = Xi.shape[0] >= Xi.shape[1]
    X = Xi if tall else Xi.mT
    K = X.mT @ X
    fine = K.isfinite().all()
    K = torch.where(fine, K, 0)
    K = K.to(widest(Xi))[None]
    (values,), (V,) = spectrum(K, k, start(K, k, generator))
    if not tall:
        eps = torch.finfo(Xi.dtype).eps
        smallest = len(Xi) * eps * values[:1]
        there = values > smallest  # the others are rounding
        scale = torch.where(there, values, 1).rsqrt() * there
        V = X @ (V * scale).to(Xi.dtype)
    return torch.where(fine, V.to(Xi.dtype), torch.nan)
