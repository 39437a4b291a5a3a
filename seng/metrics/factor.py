"""One side of a layer's Kronecker metric: C = E Σ xxᵀ over samples and positions, (h, n, n), as a
running average.

Kept as C ≈ V diag(s) Vᵀ + rest·(I − VVᵀ) with r orthonormal columns V; all of C where r = n. A
refresh turns V a little towards the leading directions of δC + (1 − δ)C_new by a range finder that
starts from V, so that nothing of size n³ is worked out, and nothing of size n² is kept.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from seng.distributed.team import ALONE, Team
from seng.linalg.numerics import OVERSAMPLE, SMALL, eigh, orthonormal, widest
from seng.linalg.operators import product, wide

# Of the mean eigenvalue, the least that counts: inputs never active would be stepped along without
# bound
FLOOR = 1e-3
UNSEEN = 1e-6  # of the largest eigenvalue: what is below was in no sample, up to rounding
FIRST, LATER = (
    6,
    2,
)  # products of a range finder: it begins at random, later ones where the last one ended
# Rows n up to which a batch's xxᵀ is worked out once, for a moment, where there are as many columns
GRAM = 8192

WHAT = "adding up a base"  # for messages
EVERY = torch.tensor(math.inf)


@dataclass(frozen=True)
class Factor:
    """C, or what is kept of it."""

    V: Tensor  # (h, n, r)
    s: Tensor  # (h, r), descending
    rest: Tensor  # (h,): the mean of the eigenvalues that V does not have
    count: Tensor = EVERY  # (): the x that it has seen

    @property
    def whole(self) -> bool:
        """Whether nothing of C is left out."""
        return self.V.shape[2] == self.V.shape[1]

    @property
    def trace(self) -> Tensor:
        _, n, r = self.V.shape
        return self.s.sum(1) + (n - r) * self.rest

    def times(self, Z: Tensor) -> Tensor:
        """CZ of Z (h, n, w)."""
        return self.rest[:, None, None] * Z + self.V @ (
            (self.s - self.rest[:, None])[:, :, None] * (self.V.mT @ Z)
        )

    @property
    def average(self) -> Tensor:
        """The mean of all eigenvalues, ()."""
        h, n, _ = self.V.shape
        return self.trace.sum() / (h * n)

    def eigenvalues(
        self, power: float, noise: float = 0.0, least: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Those of max(C, floor)^power, V's (h, r) and all others' (h,), for C of mean eigenvalue
        1; all 1 where C is zero.

        `least`: what the floor is at least. A C whose eigenvalues are all below it counts as a
        multiple of I.
        """
        h, n, _ = self.V.shape
        mean = self.average
        floor = self._floor(power, noise)
        floor = (
            floor
            if least is None
            else torch.maximum(floor, least.clamp_max(h * n))
        )
        floor = torch.where(mean > 0, floor, 1)
        mean = torch.where(mean > 0, mean, 1)
        kept, others = (
            torch.maximum(e / mean, floor) ** power
            for e in (self.s, self.rest)
        )
        return kept, others

    def powers(
        self, power: float, noise: float, least: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The same, brought to a mean of 1: so what is a multiple of I is I to the last digit."""
        kept, others = self.eigenvalues(power, noise, least)
        unit = self.mean(kept, others).mean()
        return kept / unit, others / unit

    def _floor(self, power: float, noise: float) -> Tensor:
        """The least eigenvalue that counts, above FLOOR where gradients are too noisy for that.

        Rounding leaves them ε = `noise` of their length, in all n directions alike; P⁻¹ stretches
        that by floor^{-p} on each side where both count as the floor. What they have to say lies in
        the N directions that samples had, of which P⁻¹ leaves about (N/n)^p on each side. So ε ≪
        (floor·N/n)^{2p} where few were seen; and ε ≪ floor^p, on one side, where all were.
        """
        h, n, r = self.V.shape
        least = UNSEEN * self.s.amax()
        tail = (self.count.to(least) - r).clamp(0, n - r)
        seen = (self.s > least).sum() + tail * (self.rest > least).sum()
        few = (4 * noise) ** (0.5 / power) * (h * n - seen) / seen.clamp_min(1)
        floor: Tensor = few.clamp_min(max(FLOOR, (4 * noise) ** (1 / power)))
        return floor

    def mean(self, kept: Tensor, others: Tensor) -> Tensor:
        """Of eigenvalues, V's (h, r) and all others' (h,): (h,)."""
        _, n, r = self.V.shape
        return (kept.sum(1) + (n - r) * others) / n


def noise(dtype: torch.dtype) -> float:
    """What rounding leaves of gradients that were worked out in such numbers, relative to their
    length: their own, or V's.
    """
    return max(torch.finfo(dtype).eps, 64 * torch.finfo(wide(dtype)).eps)


def relative_floor(damping: float, relative: bool, mean: Tensor) -> Tensor:
    """λ in units of the mean eigenvalue; an absolute one is above any that are 0."""
    lam = torch.full_like(mean, damping)
    if relative:
        return lam
    return torch.where(
        mean > 0, lam / torch.where(mean > 0, mean, 1), torch.inf
    )


@dataclass(frozen=True)
class Moment:
    """scale·XXᵀ of X (h, n, N), over the samples of all ranks that pool them."""

    X: Tensor
    team: Team = ALONE
    scale: float = 1.0

    @cached_property
    def totals(self) -> tuple[Tensor, Tensor]:
        """The trace (h,), and the number of columns of all ranks, ()."""
        if self._fits:
            trace = self._gram.diagonal(dim1=1, dim2=2).sum(1)
        else:
            squares = self.X.to(wide(self.X.dtype)).square()
            trace = squares.sum((1, 2)) * self.scale
        count = torch.full_like(trace[0], self.X.shape[2])
        if self.team.pools:
            self.team.sum_([trace, count], WHAT)
        return trace, count

    @property
    def trace(self) -> Tensor:
        return self.totals[0]

    @property
    def _fits(self) -> bool:
        """Whether XXᵀ is formed, in place of products with X and Xᵀ."""
        _, n, N = self.X.shape
        return n <= min(N, GRAM)

    @cached_property
    def _gram(self) -> Tensor:
        return product(self.X, self.X.mT) * self.scale

    def dense(self) -> Tensor:
        """All of it."""
        K = self._gram.clone()
        if self.team.pools:
            self.team.sum_([K], WHAT)
        return K

    def times(self, Z: Tensor) -> Tensor:
        """XXᵀZ of Z (h, n, w)."""
        if self._fits:
            out = self._gram @ Z
        elif (
            self.X.shape[1] <= GRAM
        ):  # few columns need not stay in half precision
            X = self.X.to(Z.dtype)
            out = X @ (X.mT @ Z) * self.scale
        else:
            inner = product(self.X.mT, Z.to(self.X.dtype))
            out = product(self.X, inner.to(self.X.dtype)) * self.scale
        if self.team.pools:
            self.team.sum_([out], WHAT)
        return out


def updated(
    old: Factor | None,
    seen: Moment,
    rank: int,
    decay: float,
    generator: torch.Generator,
    fine: Tensor,
) -> Factor:
    """δC + (1 − δ)XXᵀ, at most `rank` of its leading directions.

    XXᵀ itself where there is nothing yet; where it is not `fine` (h,), C stays as it is.
    """
    h, n, _ = seen.X.shape
    mix = _Mix(old, seen, decay, fine[:, None, None])
    if rank >= n and exactly(seen.X, n):
        eye = torch.eye(n, dtype=mix.new.dtype, device=seen.X.device).expand(
            h, n, n
        )
        s, V = eigh(mix(0.0 if old is None else old.times(eye), seen.dense()))
        return Factor(V, s, torch.zeros_like(s[:, 0]), mix.count)
    rank = min(rank, n)
    Z = mix.start(min(n, rank + OVERSAMPLE), generator)
    for _ in range(FIRST if old is None else LATER):
        Z = _basis(mix.times(Z))
    s, V = _ordered(Z, Z.mT @ mix.times(Z))
    s, V = s[:, :rank], V[:, :, :rank].contiguous()
    before = 0.0 if old is None else old.trace[:, None, None]
    trace = mix(before, seen.trace[:, None, None])[:, 0, 0]
    rest = ((trace - s.sum(1)) / max(1, n - rank)).clamp_min(0)
    return Factor(V, s, rest * (rank < n), mix.count)


class _Mix:
    """δC + (1 − δ)XXᵀ through its products; C alone where XXᵀ is not fine."""

    def __init__(
        self, old: Factor | None, seen: Moment, decay: float, fine: Tensor
    ) -> None:
        self.old, self.seen, self.fine = old, seen, fine
        weight = 1 - decay if old is not None else 1.0
        self.new = weight * fine.to(wide(seen.X.dtype))
        count = seen.totals[1] * fine.all()
        keeps = old is not None and decay > 0
        self.count = (
            count + old.count.to(count) if keeps and old is not None else count
        )

    def __call__(self, before: Tensor | float, now: Tensor) -> Tensor:
        return (1 - self.new) * before + self.new * torch.where(
            self.fine, now, 0
        )

    def times(self, Z: Tensor) -> Tensor:
        return self(
            0.0 if self.old is None else self.old.times(Z), self.seen.times(Z)
        )

    def start(self, width: int, generator: torch.Generator) -> Tensor:
        """Where the range finder begins: at random, or where the last one ended."""
        h, n, _ = self.seen.X.shape
        spare = width - (0 if self.old is None else self.old.V.shape[2])
        dtype, device = self.new.dtype, self.new.device
        size = h, n, spare
        Z = torch.randn(size, generator=generator, dtype=dtype, device=device)
        return Z if self.old is None else torch.cat([self.old.V, Z], 2)


def _basis(Z: Tensor) -> Tensor:
    """An orthonormal basis of the columns of each of Z (h, n, w); on a CPU by Householder's QR, for
    which a GPU would wait.
    """
    if Z.device.type != "cpu":
        return orthonormal(orthonormal(Z.to(widest(Z)))).to(Z.dtype)
    Q: Tensor = torch.linalg.qr(Z.nan_to_num(0, 0, 0)).Q
    return Q


def exactly(X: Tensor, n: int) -> bool:
    """Whether eigenvectors are worked out by `eigh`, for which the host waits for a GPU."""
    return X.dtype == torch.float64 or X.device.type == "cpu" or n <= SMALL


def _ordered(Z: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, descending, and vectors within the span of Z, S = ZᵀCZ; where nothing may wait,
    as the iteration left them.

    What it left together has nearly the same eigenvalue, and so nearly the same power of it.
    """
    if exactly(S, S.shape[-1]):
        s, W = eigh(S)
        return s, Z @ W
    s, order = (
        S.diagonal(dim1=-2, dim2=-1).clamp_min(0).sort(-1, descending=True)
    )
    return s, Z.gather(-1, order[:, None].expand_as(Z))
