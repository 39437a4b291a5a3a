"""Ω: random maps from n to q ≪ n numbers that keep inner products, Ξ = ΩU and ξ = Ωg (eqs. 11 to 14 and 17).

Every sketch here has E ΩᵀΩ = I, which assumption A.1 of the paper needs; the e_i/p_i of its eq. 14 does not have it.
For uniform rows the printed scale is n where √(n/q) is right: the sketched Gram comes out q·n times too large, which
divides the λ inside b̂ (not the outer 1/λ) by q·n. To translate a λ found with the printed scale, divide it by q·n.

What a user writes is a plan (`Rows(256)`); `draw` makes it an Ω for one operator, with a generator that the caller owns.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from seng.linalg.implicit import Implicit
from seng.linalg.operators import CHUNK, Explicit, Operator, Shape


class Omega(Protocol):
    """A drawn sketch."""

    def __call__(self, z: Tensor) -> Tensor:
        """Ωz (q, …) of z (n, …)."""

    def of(self, U: Operator) -> Operator:
        """ΩU."""


@dataclass(frozen=True)
class Identity:
    """No sketch: Ω = I."""

    def __call__(self, z: Tensor) -> Tensor:
        return z

    def of(self, U: Operator) -> Operator:
        return U


@dataclass(frozen=True)
class RowSample:
    """Ω = diag(scale) · (chosen rows of I)."""

    index: Tensor  # (q,)
    scale: Tensor  # (q,)

    def __call__(self, z: Tensor) -> Tensor:
        return _rowwise(self.scale, z[self.index])

    def of(self, U: Operator) -> Operator:
        q = self.index.numel()
        if not isinstance(U, Implicit):
            return Explicit(self(U.explicit().U), (1, q, 1))
        _, n_G, n_A = U.shape
        rows, a = self.index // n_A, self.index % n_A
        group, g = rows // n_G, rows % n_G
        step = max(1, CHUNK // max(1, q * U.rank))
        parts = [  # (ϱ, q): the chosen entries of G_i A_iᵀ, sample by sample
            (U.G[i : i + step, group, g] * U.A[i : i + step, group, a]).sum(2)
            for i in range(0, U.samples, step)
        ]
        return Explicit((torch.cat(parts) * self.scale).T, (1, q, 1))


@dataclass(frozen=True)
class KroneckerSample:
    """Ω = I_h ⊗ Ω_G ⊗ Ω_A on row-major matrices, the paper's Ω_A ⊗ Ω_G (eq. 17)."""

    G: RowSample | Identity
    A: RowSample | Identity
    layout: Shape

    def __call__(self, z: Tensor) -> Tensor:
        """Ξ_z = Ω_G mat(z) Ω_Aᵀ, flattened."""
        Z = z.reshape(*self.layout, -1).permute(1, 2, 0, 3)  # (n_G, n_A, h, …)
        Xi = self.A(self.G(Z).transpose(0, 1)).transpose(0, 1)  # (q_G, q_A, h, …)
        out = Xi.permute(2, 0, 1, 3).flatten(0, 2)
        return out.reshape(out.shape[0], *z.shape[1:])

    def of(self, U: Operator) -> Operator:
        if isinstance(U, Implicit):
            G = self.G(U.G.permute(2, 0, 1, 3)).permute(1, 2, 0, 3)
            A = self.A(U.A.permute(2, 0, 1, 3)).permute(1, 2, 0, 3)
            return Implicit(G, A)
        Xi = self(U.explicit().U)
        return Explicit(Xi, (1, Xi.shape[0], 1))


@dataclass(frozen=True)
class Dense:
    """Ω as a matrix (q, n)."""

    matrix: Tensor

    def __call__(self, z: Tensor) -> Tensor:
        return self.matrix @ z

    def of(self, U: Operator) -> Operator:
        q = self.matrix.shape[0]
        Xi = self.matrix.new_zeros(q, U.samples)
        for rows, X in U.rows():
            Xi += self.matrix[:, rows] @ X.T
        return Explicit(Xi, (1, q, 1))


@dataclass(frozen=True)
class Buckets:
    """Row i of z is added, with a random sign, to bucket[i]."""

    bucket: Tensor  # (n,)
    sign: Tensor  # (n,)
    q: int

    def __call__(self, z: Tensor) -> Tensor:
        return z.new_zeros(self.q, *z.shape[1:]).index_add_(
            0, self.bucket, _rowwise(self.sign, z)
        )

    def of(self, U: Operator) -> Operator:
        Xi = self.sign.new_zeros(self.q, U.samples)
        for rows, X in U.rows():
            Xi.index_add_(0, self.bucket[rows], (X * self.sign[rows]).T)
        return Explicit(Xi, (1, self.q, 1))


class Sketch(ABC):
    """A plan for Ω."""

    @abstractmethod
    def covers(self, shape: Shape) -> bool:
        """Whether it is as large as what it sketches: then U is taken as it is."""

    @abstractmethod
    def exceeds(self, shape: Shape) -> bool:
        """Whether more was asked for than there is."""

    @abstractmethod
    def draw(self, U: Operator, generator: torch.Generator) -> Omega:
        """Ω for U, from the generator alone."""


@dataclass(frozen=True)
class _Flat(Sketch):
    """A sketch of all n rows at once."""

    q: int

    def __post_init__(self) -> None:
        _check_size(type(self).__name__, "q", self.q)

    def covers(self, shape: Shape) -> bool:
        return self.q >= math.prod(shape)

    def exceeds(self, shape: Shape) -> bool:
        return self.q > math.prod(shape)


@dataclass(frozen=True)
class Rows(_Flat):
    """q rows, uniformly, without replacement unless asked: Ω = √(n/q) · (q rows of I)."""

    replacement: bool = False

    def draw(self, U: Operator, generator: torch.Generator) -> Omega:
        return _uniform_rows(U.n, self.q, self.replacement, U, generator)


@dataclass(frozen=True)
class LeverageRows(_Flat):
    """q rows with replacement, p_i ∝ ‖U_i‖²: Ω's rows are e_i/√(q·p_i).

    The paper calls this leverage-score sampling; by its formula it is row-norm sampling. E ΩᵀΩ = I on the rows with p_i > 0.
    """

    def draw(self, U: Operator, generator: torch.Generator) -> Omega:
        p = U.row_norms().double()
        p = torch.where(p.sum() > 0, p, 1.0)
        p = p / p.sum()
        at = torch.rand(self.q, generator=generator, device=p.device, dtype=p.dtype)
        # torch.multinomial stops at 2²⁴ rows; the last row with p > 0 catches what rounding leaves above the total.
        index = torch.searchsorted(p.cumsum(0), at, right=True).clamp_max(U.n - 1)
        index = torch.where(p[index] > 0, index, p.argmax())
        return RowSample(index, (self.q * p[index]).rsqrt().to(_dtype(U)))


@dataclass(frozen=True)
class KroneckerRows(Sketch):
    """q_G rows of every G_i and q_A rows of every A_i, uniformly without replacement: Ω_A ⊗ Ω_G (eq. 17)."""

    q_G: int
    q_A: int

    def __post_init__(self) -> None:
        _check_size("KroneckerRows", "q_G", self.q_G)
        _check_size("KroneckerRows", "q_A", self.q_A)

    def covers(self, shape: Shape) -> bool:
        return self.q_G >= shape[1] and self.q_A >= shape[2]

    def exceeds(self, shape: Shape) -> bool:
        return self.q_G > shape[1] or self.q_A > shape[2]

    def draw(self, U: Operator, generator: torch.Generator) -> Omega:
        _, n_G, n_A = U.shape
        G = (
            Identity()
            if self.q_G >= n_G
            else _uniform_rows(n_G, self.q_G, False, U, generator)
        )
        A = (
            Identity()
            if self.q_A >= n_A
            else _uniform_rows(n_A, self.q_A, False, U, generator)
        )
        return KroneckerSample(G, A, U.shape)


@dataclass(frozen=True)
class Gaussian(_Flat):
    """Ω_ij ~ N(0, 1/q). Keeps q·n numbers: for small layers and for tests of the theory."""

    def draw(self, U: Operator, generator: torch.Generator) -> Omega:
        matrix = torch.randn(
            self.q, U.n, generator=generator, device=generator.device, dtype=_dtype(U)
        )
        return Dense(matrix / self.q**0.5)


@dataclass(frozen=True)
class CountSketch(_Flat):
    """Each row goes to one of q buckets with a random sign: one pass over U, whatever q."""

    def draw(self, U: Operator, generator: torch.Generator) -> Omega:
        bucket = torch.randint(
            self.q, (U.n,), generator=generator, device=generator.device
        )
        sign = (
            torch.randint(2, (U.n,), generator=generator, device=generator.device).to(
                _dtype(U)
            )
            * 2
            - 1
        )
        return Buckets(bucket, sign, self.q)


def _rowwise(weights: Tensor, z: Tensor) -> Tensor:
    """diag(weights) z."""
    return weights.view(-1, *[1] * (z.dim() - 1)) * z


def _uniform_rows(
    n: int, q: int, replacement: bool, U: Operator, generator: torch.Generator
) -> RowSample:
    device = generator.device
    if replacement:
        index = torch.randint(n, (q,), generator=generator, device=device)
    else:
        index = torch.randperm(n, generator=generator, device=device)[:q]
    return RowSample(
        index, torch.full((q,), (n / q) ** 0.5, device=device, dtype=_dtype(U))
    )


def _dtype(U: Operator) -> torch.dtype:
    return next(t.dtype for t in U.tensors() if t.is_floating_point())


def _check_size(kind: str, name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(
            f"{kind}: {name} is the number of rows to keep, an integer of at least 1, not {value!r}"
        )
