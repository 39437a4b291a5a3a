"""One side of a layer's Kronecker metric: C = E Σ xxᵀ over samples and positions, (h, n, n), as a
running average.

Kept as C ≈ V diag(s) Vᵀ + rest·(I − VVᵀ) with r orthonormal columns V; all of C where r = n. A
refresh turns V a little towards the leading directions of δC + (1 − δ)C_new by a range finder that
starts from V, so that nothing of size n³ is worked out, and nothing of size n² is kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from seng.distributed.team import ALONE, Team
from seng.linalg.numerics import OVERSAMPLE, SMALL, eigh, orthonormal, widest
from seng.linalg.operators import product, wide

UNSEEN = 1e-6  # of the largest eigenvalue: what is below was in no sample, up to rounding
FIRST = 6  # products of a range finder that begins at random,
LATER = 1  # and of one that begins where the last one ended
# Rows n up to which a batch's xxᵀ is worked out once, where there are as many columns: beyond it
# the products of a range finder are cheaper
GRAM = 256

WHAT = "adding up a base"  # for messages
EVERY = torch.tensor(torch.inf)


@dataclass(frozen=True)
class Factor:
    """C, or what is kept of it."""

    V: Tensor  # (h, n, r)
    s: Tensor  # (h, r), descending
    rest: Tensor  # (h,): the mean of the eigenvalues that V does not have
    count: Tensor = EVERY  # (): the x that it has seen

    @property
    def trace(self) -> Tensor:
        """Of each group, (h,)."""
        _, n, r = self.V.shape
        return self.s.sum(1) + (n - r) * self.rest

    def powers(
        self, power: float, floor: float, noise: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        """Eigenvalues of max(C, floor)^power, V's and the one that all others have (h, r + 1), and
        their mean (h,).

        C is brought to mean eigenvalue 1 before; a C of zeros counts as a multiple of I.
        """
        h, n, r = self.V.shape
        mean = self.trace.mean() / n
        others = self.rest if r < n else mean.expand_as(self.rest)
        e = torch.cat([self.s, others[:, None]], 1)
        e = e / torch.where(mean > 0, mean, 1)
        if (4 * noise) ** (0.5 / power) * h * n > floor:
            e = torch.maximum(e, self._floor(power, floor, noise))
        e = e.clamp_min(floor) ** power
        trace = e.sum(1) + (n - r - 1) * e[:, -1]
        return e, trace / n

    def _floor(self, power: float, asked: float, noise: float) -> Tensor:
        """The least eigenvalue that counts, above `asked` where gradients are too noisy for that.

        Rounding leaves them ε = `noise` of their length, in all n directions alike; P⁻¹ stretches
        that by floor^{-p} on each side where both count as the floor. What they have to say lies in
        the N directions that samples had, of which P⁻¹ leaves about (N/n)^p on each side. So ε ≪
        (floor·N/n)^{2p} where few were seen; and ε ≪ floor^p, on one side, where all were.
        """
        h, n, r = self.V.shape
        least = UNSEEN * self.s.amax()
        tail = (self.count.to(least) - r).clamp(0, n - r)
        within = (self.s > least).sum()
        outside = tail * (self.rest > least).sum()
        seen = within + outside
        unseen = h * n - seen
        bound = 4 * noise
        few = bound ** (0.5 / power) * unseen / seen.clamp_min(1)
        every = bound ** (1 / power)
        return few.clamp_min(max(asked, every))  # type: ignore[no-any-return]


def noise(dtype: torch.dtype) -> float:
    """What rounding leaves of gradients that were worked out in such numbers, relative to their
    length: their own, or V's.
    """
    own = torch.finfo(dtype).eps
    of_V = torch.finfo(wide(dtype)).eps
    return max(own, 64 * of_V)


class Moment:
    """scale·XXᵀ of X (h, n, N), summed over the ranks."""

    def __init__(
        self, X: Tensor, team: Team = ALONE, scale: float = 1.0
    ) -> None:
        _, n, N = X.shape
        self.X = X
        self.team = team
        self.scale = scale
        self.gram: Tensor | None = None  # where that is cheaper than X
        if n <= min(N, GRAM):
            self.gram = product(X, X.mT) * scale
        else:
            self.X = X.to(wide(X.dtype))
        norm = torch.linalg.vector_norm
        length = norm(X, dim=(1, 2), dtype=wide(X.dtype))
        self.trace = length.square() * scale
        self.count = torch.full_like(self.trace[0], N)
        team.sum_([self.trace, self.count], WHAT)

    def times(self, Z: Tensor) -> Tensor:
        """XXᵀZ of Z (h, n, w)."""
        if self.gram is not None:
            out = self.gram @ Z
        else:
            out = self.X @ (self.X.mT @ Z) * self.scale
        if self.team.many:
            self.team.sum_([out], WHAT)
        return out


def updated(
    old: Factor | None,
    seen: Moment,
    rank: int,
    decay: float,
    generator: torch.Generator,
) -> Factor:
    """δC + (1 − δ)XXᵀ, its leading directions.

    XXᵀ itself where there is nothing like it yet. What is not finite stays in s and `rest`.
    """
    h, n, _ = seen.X.shape
    rank = directions(n, rank)
    C = old if old and old.V.shape == (h, n, rank) else _nothing(seen)
    new = 1 - decay if C is old else 1.0
    rest = C.rest[:, None, None]
    above = C.s[:, :, None] - rest

    def times(Z: Tensor) -> Tensor:
        within = C.V @ (above * (C.V.mT @ Z))
        before = rest * Z + within
        return before.lerp(seen.times(Z), new)

    if rank == n and exactly(seen.X, n):
        s, V = eigh(times(C.V.new_ones(h, n).diag_embed()))
    else:
        # A random beginning, or where the last one ended.
        spare = min(n, rank + OVERSAMPLE) - C.V.shape[2]
        Z = C.V.new_empty(h, n, spare).normal_(generator=generator)
        Z = torch.cat([C.V, Z], 2)
        for _ in range(LATER if C is old else FIRST):
            Z = _basis(times(Z))
        s, V = _ordered(Z, Z.mT @ times(Z))
    s = s[:, :rank]
    trace = C.trace.lerp(seen.trace, new)
    outside = trace - s.sum(1)
    others = (outside / max(1, n - rank)).clamp_min(0)
    before = C.count.to(seen.count) if new < 1 else 0  # all others are gone
    return Factor(
        V[:, :, :rank].contiguous(),
        s,
        others * (rank < n),
        before + seen.count,
    )


def directions(n: int, rank: int) -> int:
    """How many a side keeps: all n where that is as cheap, since V diag(w) Vᵀ is one product."""
    return n if n <= 2 * rank else rank


def _nothing(seen: Moment) -> Factor:
    """C before anything was seen."""
    zero = torch.zeros_like(seen.trace)
    V = zero.new_zeros(*seen.X.shape[:2], 0)
    return Factor(V, V[:, 0], zero, zero[0])


def _basis(Z: Tensor) -> Tensor:
    """An orthonormal basis of the columns of each of Z (h, n, w); on a CPU by Householder's QR, for
    which a GPU would wait.
    """
    if Z.is_cpu:
        return torch.linalg.qr(Z.nan_to_num(0, 0, 0)).Q  # type: ignore[no-any-return]
    return orthonormal(orthonormal(Z.to(widest(Z)))).to(Z.dtype)


def exactly(X: Tensor, n: int) -> bool:
    """Whether eigenvectors are worked out by `eigh`, for which the host waits for a GPU."""
    return X.dtype == torch.float64 or X.is_cpu or n <= SMALL


def _ordered(Z: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, descending, and vectors within the span of Z, S = ZᵀCZ; where nothing may wait,
    as the iteration left them.

    What it left together has nearly the same eigenvalue, and so nearly the same power of it.
    """
    if exactly(S, S.shape[-1]):
        s, W = eigh(S)
        return s, Z @ W
    s = S.diagonal(dim1=-2, dim2=-1).clamp_min(0)
    s, order = s.sort(-1, descending=True)
    return s, Z.gather(-1, order[:, None].expand_as(Z))
