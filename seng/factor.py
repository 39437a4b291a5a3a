"""One side of a layer's Kronecker metric: C = E Σ xxᵀ over samples and positions, (h, n, n), as a running average.

Kept as C ≈ V diag(s) Vᵀ + rest·(I − VVᵀ) with r orthonormal columns V; all of C where r = n. A refresh turns V a little towards
the leading directions of δC + (1 − δ)C_new by a range finder that starts from V, so that nothing of size n³ is worked out, and
nothing of size n² is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from seng.numerics import OVERSAMPLE, SMALL, eigh, orthonormal, widest
from seng.operators import product, wide

FLOOR = 1e-3  # of the mean eigenvalue, the least that counts: inputs never active would be stepped along without bound
FIRST, LATER = 6, 2  # products of a range finder: it begins at random, later ones where the last one ended
GRAM = 8192  # rows n up to which a batch's xxᵀ is worked out once, for a moment, in place of twice an iteration

Total = Callable[[Sequence[Tensor]], None]  # adds up over ranks, in place


@dataclass(frozen=True)
class Factor:
    """C, or what is kept of it."""

    V: Tensor  # (h, n, r)
    s: Tensor  # (h, r), descending
    rest: Tensor  # (h,): the mean of the eigenvalues that V does not have

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
        return self.rest[:, None, None] * Z + self.V @ ((self.s - self.rest[:, None])[:, :, None] * (self.V.mT @ Z))

    def eigenvalues(self, power: float) -> tuple[Tensor, Tensor]:
        """Those of max(C, floor)^power, V's (h, r) and all others' (h,), with mean 1; all of them 1 where C is zero."""
        _, n, r = self.V.shape
        mean = self.trace[:, None] / n
        mean = torch.where(mean > 0, mean, 1)
        kept, others = (e.clamp_min(FLOOR) ** power for e in (self.s / mean, self.rest / mean[:, 0]))
        scale = (kept.sum(1) + (n - r) * others) / n
        return kept / scale[:, None], others / scale


@dataclass(frozen=True)
class Moment:
    """scale·XXᵀ of X (h, n, N), over the samples of all ranks."""

    X: Tensor
    total: Total
    scale: float = 1.0

    @cached_property
    def trace(self) -> Tensor:
        small = self.X.shape[1] <= GRAM
        squares = self._local.diagonal(dim1=1, dim2=2) if small else self.X.to(wide(self.X.dtype)).square().sum(2) * self.scale
        trace = squares.sum(1)
        self.total([trace])
        return trace

    @cached_property
    def _local(self) -> Tensor:
        return product(self.X, self.X.mT) * self.scale

    def dense(self) -> Tensor:
        """All of it."""
        K = self._local.clone()
        self.total([K])
        return K

    def times(self, Z: Tensor) -> Tensor:
        """XXᵀZ of Z (h, n, w)."""
        if self.X.shape[1] <= GRAM:
            out = self._local @ Z
        else:
            out = product(self.X, product(self.X.mT, Z.to(self.X.dtype)).to(self.X.dtype)) * self.scale
        self.total([out])
        return out


def updated(
    old: Factor | None, seen: Moment, rank: int, decay: float, generator: torch.Generator, fine: Tensor | None = None
) -> Factor:
    """δC + (1 − δ)XXᵀ, at most `rank` of its leading directions; XXᵀ itself where there is nothing yet.

    Where XXᵀ is not finite, or not `fine` (h,), C stays as it is.
    """
    dtype, device = wide(seen.X.dtype), seen.X.device
    h, n, _ = seen.X.shape
    fine = (seen.trace.isfinite() if fine is None else fine)[:, None, None]
    new = (1 - decay if old is not None else 1.0) * fine.to(dtype)
    keep = 1 - new

    def mixed(before: Tensor | float, now: Tensor) -> Tensor:
        return keep * before + new * torch.where(fine, now, 0)

    def times(Z: Tensor) -> Tensor:
        return mixed(0.0 if old is None else old.times(Z), seen.times(Z))

    if rank >= n and exactly(seen.X, n):
        eye = torch.eye(n, dtype=dtype, device=device).expand(h, n, n)
        s, V = eigh(mixed(0.0 if old is None else old.times(eye), seen.dense()))
        return Factor(V, s, torch.zeros_like(s[:, 0]))
    rank = min(rank, n)
    spare = min(n, rank + OVERSAMPLE) - (0 if old is None else old.V.shape[2])
    Z = torch.randn(h, n, spare, generator=generator, dtype=dtype, device=device)
    Z = Z if old is None else torch.cat([old.V, Z], 2)
    for _ in range(FIRST if old is None else LATER):
        Z = _basis(times(Z))
    s, V = _ordered(Z, Z.mT @ times(Z))
    s, V = s[:, :rank], V[:, :, :rank].contiguous()
    trace = mixed(0.0 if old is None else old.trace[:, None, None], seen.trace[:, None, None])[:, 0, 0]
    return Factor(V, s, ((trace - s.sum(1)) / max(1, n - rank)).clamp_min(0) * (rank < n))


def _basis(Z: Tensor) -> Tensor:
    """An orthonormal basis of the columns of each of Z (h, n, w); on a CPU by Householder's QR, for which a GPU would wait."""
    if Z.device.type != "cpu":
        return orthonormal(orthonormal(Z.to(widest(Z)))).to(Z.dtype)
    Q: Tensor = torch.linalg.qr(Z.nan_to_num(0, 0, 0)).Q
    return Q


def exactly(X: Tensor, n: int) -> bool:
    """Whether eigenvectors are worked out by `eigh`, for which the host waits for a GPU."""
    return X.dtype == torch.float64 or X.device.type == "cpu" or n <= SMALL


def _ordered(Z: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, descending, and vectors within the span of Z, S = ZᵀCZ; where nothing may wait, as the iteration left them.

    What it left together has nearly the same eigenvalue, and so nearly the same power of it.
    """
    if exactly(S, S.shape[-1]):
        s, W = eigh(S)
        return s, Z @ W
    s, order = S.diagonal(dim1=-2, dim2=-1).clamp_min(0).sort(-1, descending=True)
    return s, Z.gather(-1, order[:, None].expand_as(Z))
