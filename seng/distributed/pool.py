"""One U from the samples of all ranks, for the `shared` strategy.

    U = [U_1, …, U_𝓜]/√𝓜,   Y = (UV)ᵀ = Σ_i (U_i V_i)ᵀ/√𝓜

V (ϱ, k) are the leading directions of the whole Gram, cross terms between ranks included. Of
samples about the mean of all ranks the Gram is HUᵀUH, and V has H before it
(`seng.linalg.centred`). Each layer has a rank that owns it. Every rank sends the owner Ξ_i = ΩU_i,
with Ω drawn alike on all ranks. The owner finds V from ΞᵀΞ and sends each rank its rows V_i. Then Y
is a sum over ranks, the same on all of them. Ω only chooses the subspace. Where all columns are
kept, V = I, and nothing is lost.

Sent per refresh and layer: k·n numbers in a reduction, in half precision where the network is
trained so; and q·ϱ_i + k·ϱ numbers to and from its owner.
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
from seng.linalg.centred import about_mean, differing
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
    roots: Tensor | None = None  # of all samples' weights, to be centred
    V: Any = None  # this rank's rows, (ϱ_i, k); None: all columns are kept
    Xi: Any = None  # ΩU_i (q, ϱ_i), while V is being found

    def part(self, rank: int) -> Tensor:
        """What this rank, the rank-th, has of Y (k, n)."""
        U = self.U
        if self.V is not None:
            return U.combine(self.V.to(U.dtype))
        first = sum(self.counts[:rank])
        Y: Tensor = U.values.new_zeros(sum(self.counts), U.n, dtype=U.dtype)
        Y[first : first + U.samples] = U.explicit().U.T
        return Y


def empty(
    shape: Shape, dtype: torch.dtype, device: torch.device, columns: int = 0
) -> Operator:
    """U of a rank without samples: no columns, or zeros."""
    h, n_G, n_A = shape
    G = torch.zeros(columns, h, n_G, 1, dtype=dtype, device=device)
    return Implicit(G, G.new_zeros(columns, h, n_A, 1))


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
    if half and team.many:
        largest = [Y.abs().amax() for Y in parts]
        sizes = torch.stack(largest).nan_to_num(0, 0, 0)
        team.sum_([sizes], "comparing the ranks' bases")
        scales = torch.where(sizes > 0, sizes, 1).unbind()
        small = [Y.div(c).half() for Y, c in zip(parts, scales, strict=True)]
        team.sum_(small, ADDING)
        parts = [Y.to(c.dtype) * c for Y, c in zip(small, scales, strict=True)]
    else:
        team.sum_(parts, ADDING)
    for i, share in enumerate(shares):
        if share.V is None and share.roots is not None:  # all columns are kept
            parts[i] = differing(parts[i], share.roots)
    return parts


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
    sketches = [[s.Xi for s in theirs] for theirs in owned]
    sizes = [[len(s.Xi) * s.counts[rank] for s in mine] for rank in ranks]
    widest_of = max([s.Xi for s in shares], key=lambda Xi: Xi.itemsize)
    none = widest_of.new_empty(0)  # for ranks that have nothing to send
    came = _exchange(team, sketches, sizes, none, "gathering sketches")
    found = []
    for s, *parts in zip(mine, *came, strict=True):
        rows = [part.view(len(s.Xi), -1) for part in parts]
        Xi = torch.cat(rows, 1)
        if s.roots is not None:
            Xi = differing(Xi.T, s.roots).T
        V = _leading(Xi, s.rank, s.generator())
        if s.roots is not None:
            V = about_mean(V, s.roots) * Xi.any()
        found.append(V.split(s.counts))
    of_ranks = [[V[rank] for V in found] for rank in ranks]
    count = [s.counts[team.rank] for s in shares]
    own = [n * s.rank for n, s in zip(count, shares, strict=True)]
    sizes = [own[rank :: team.size] for rank in ranks]
    came = _exchange(team, of_ranks, sizes, none, "dealing out the directions")
    for s, V in zip(chain(*owned), chain(*came), strict=True):
        s.V = V.view(-1, s.rank)


def _exchange(
    team: Team,
    parts: list[list[Any]],
    sizes: list[list[int]],
    none: Tensor,
    what: str,
) -> list[list[Tensor]]:
    """Send parts[i] to rank i; from rank i come tensors of sizes[i] numbers."""
    to = [sum(t.numel() for t in part) for part in parts]
    due = [sum(numbers) for numbers in sizes]
    flat = [t.flatten() for t in chain(*parts)]
    sent = torch.cat([none, *flat])
    came = team.exchanged(sent, to, due, what)
    both = zip(came.split(due), sizes, strict=True)
    return [list(numbers.split(some)) for numbers, some in both]


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
