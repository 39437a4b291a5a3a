"""Ω: random maps from n to q ≪ n numbers that keep inner products, Ξ = ΩU and ξ = Ωg (eqs.

11 to 14 and 17).

Every sketch here has E ΩᵀΩ = I, which assumption A.1 of the paper needs; the e_i/p_i of its eq. 14
does not have it. For uniform rows the printed scale is n where √(n/q) is right: the sketched Gram
comes out q·n times too large, which divides the λ inside b̂ (not the outer 1/λ) by q·n. To
translate a λ found with the printed scale, divide it by q·n.

What a user writes is a plan (`Rows(256)`); `draw` makes it an Ω for one operator, with a generator
that the caller owns.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor

from seng.linalg import operators
from seng.linalg.implicit import Implicit
from seng.linalg.operators import Explicit, Operator, Shape


class Omega(ABC):
    """A drawn sketch."""

    @abstractmethod
    def __call__(self, z: Tensor) -> Tensor:
        """Ωz (q, …) of z (n, …)."""

    def of(self, U: Operator) -> Operator:
        """ΩU."""
        return U.through(self._of)

    def _of(self, U: Operator) -> Operator:
        return _columns(self(U.explicit().U))


@dataclass(frozen=True)
class Identity(Omega):
    """No sketch: Ω = I."""

    def __call__(self, z: Tensor) -> Tensor:
        return z

    def of(self, U: Operator) -> Operator:
        return U


IDENTITY = Identity()


@dataclass(frozen=True)
class RowSample(Omega):
    """Ω = diag(scale) · (chosen rows of I)."""

    index: Tensor  # (q,)
    scale: Tensor  # (q,)

    def __call__(self, z: Tensor) -> Tensor:
        return torch.einsum("q,q...->q...", self.scale, z[self.index])

    def _of(self, U: Operator) -> Operator:
        """Of factors, the chosen entries of G_i A_iᵀ alone, some samples at a time."""
        factors = U.factors()
        if factors is None:
            return super()._of(U)
        group, g, a = torch.unravel_index(self.index, U.shape)
        entry = U.dtype.itemsize * max(1, len(g) * U.kappa)
        step = max(1, operators.CHUNK // entry)
        of_G = factors.G.split(step)
        of_A = factors.A.split(step)
        parts = zip(of_G, of_A, strict=True)
        entries = [(G[:, group, g] * A[:, group, a]).sum(2) for G, A in parts]
        return _columns((torch.cat(entries) * self.scale).T)  # from (ϱ, q)


@dataclass(frozen=True)
class KroneckerSample(Omega):
    """Ω = I_h ⊗ Ω_G ⊗ Ω_A on row-major matrices, the paper's Ω_A ⊗ Ω_G (eq. 17)."""

    G: Omega
    A: Omega
    layout: Shape

    def __call__(self, z: Tensor) -> Tensor:
        """Ξ_z = Ω_G mat(z) Ω_Aᵀ, flattened."""
        Z = z.unflatten(0, self.layout)  # (h, n_G, n_A, …)
        Z = _along(self.G, Z, 1)
        Z = _along(self.A, Z, 2)
        return Z.flatten(0, 2)

    def _of(self, U: Operator) -> Operator:
        factors = U.factors()
        if factors is None:
            return super()._of(U)
        return Implicit(
            _along(self.G, factors.G, 2), _along(self.A, factors.A, 2)
        )


@dataclass(frozen=True)
class Dense(Omega):
    """Ω as a matrix (q, n)."""

    matrix: Tensor

    def __call__(self, z: Tensor) -> Tensor:
        return self.matrix @ z


@dataclass(frozen=True)
class Buckets(Omega):
    """Row i of z is added, with a random sign, to bucket[i]."""

    bucket: Tensor  # (n,)
    sign: Tensor  # (n,)
    q: int

    def __call__(self, z: Tensor) -> Tensor:
        out = z.new_zeros(self.q, *z.shape[1:])
        signed = torch.einsum("n,n...->n...", self.sign, z)
        return out.index_add_(0, self.bucket, signed)

    def _of(self, U: Operator) -> Operator:
        """Slab by slab, as U may be larger than memory."""
        Xi = self.sign.new_zeros(self.q, U.samples)
        bucket = self.bucket.view(U.shape)
        sign = self.sign.view(U.shape)
        for place, X in U.slabs(U.dtype):
            signed = (X * sign[place]).flatten(1).T
            Xi.index_add_(0, bucket[place].flatten(), signed)
        return _columns(Xi)


class Sketch(ABC):
    """A plan for Ω; the fields that begin with q are numbers of rows to keep."""

    def __post_init__(self) -> None:
        for name, q in vars(self).items():
            if name.startswith("q") and (type(q) is not int or q < 1):
                raise ValueError(
                    f"{type(self).__name__}: {name} is the number of rows to keep, "
                    f"an integer of at least 1, not {q!r}"
                )

    @abstractmethod
    def sizes(self, shape: Shape) -> list[tuple[int, int]]:
        """The rows that are kept, and the rows that there are, of each thing that is sketched."""

    @abstractmethod
    def draw(
        self, U: Operator, generator: Generator, add: Any = None
    ) -> Omega:
        """Ω for U, from the generator alone.

        Of several ranks, one Ω for [U_1, U_2, …]: `add` sums tensors over them in place.
        """

    def covers(self, shape: Shape) -> bool:
        """Whether it is as large as what it sketches: then U is taken as it is."""
        return all(q >= n for q, n in self.sizes(shape))

    def exceeds(self, shape: Shape) -> bool:
        """Whether more was asked for than there is."""
        return any(q > n for q, n in self.sizes(shape))


@dataclass(frozen=True)
class _Flat(Sketch):
    """A sketch of all n rows at once."""

    q: int

    def sizes(self, shape: Shape) -> list[tuple[int, int]]:
        return [(self.q, math.prod(shape))]


@dataclass(frozen=True)
class Rows(_Flat):
    """q rows, uniformly, without replacement unless asked: Ω = √(n/q) · (q rows of I)."""

    replacement: bool = False

    def draw(
        self, U: Operator, generator: Generator, add: Any = None
    ) -> Omega:
        return _uniform(self.q, U.n, U, generator, self.replacement)


@dataclass(frozen=True)
class LeverageRows(_Flat):
    """q rows with replacement, p_i ∝ ‖U_i‖²: Ω's rows are e_i/√(q·p_i).

    The paper calls this leverage-score sampling; by its formula it is row-norm sampling. E ΩᵀΩ = I
    on the rows with p_i > 0.
    """

    def draw(
        self, U: Operator, generator: Generator, add: Any = None
    ) -> Omega:
        norms = U.row_norms()
        if add is not None:
            add([norms])
        p = norms.double()
        p = torch.where(p.sum() > 0, p, 1.0)
        upto = p.cumsum(0)
        total = upto[-1]
        at = p.new_empty(self.q).uniform_(generator=generator)
        # torch.multinomial stops at 2²⁴ rows. A GPU's cumulative sum may rise by rounding where
        # p is 0: the largest row catches it.
        index = torch.searchsorted(upto, at * total, right=True)
        index = torch.where(p[index] > 0, index, p.argmax())
        scale = (total / (self.q * p[index])).sqrt()
        return RowSample(index, scale.to(U.values.dtype))


@dataclass(frozen=True)
class KroneckerRows(Sketch):
    """q_G rows of every G_i and q_A rows of every A_i, uniformly without replacement: Ω_A ⊗ Ω_G
    (eq. 17).
    """

    q_G: int
    q_A: int

    def sizes(self, shape: Shape) -> list[tuple[int, int]]:
        return [(self.q_G, shape[1]), (self.q_A, shape[2])]

    def draw(
        self, U: Operator, generator: Generator, add: Any = None
    ) -> Omega:
        G, A = (
            IDENTITY if q >= n else _uniform(q, n, U, generator)
            for q, n in self.sizes(U.shape)
        )
        return KroneckerSample(G, A, U.shape)


@dataclass(frozen=True)
class Gaussian(_Flat):
    """Ω_ij ~ N(0, 1/q). Keeps q·n numbers: for small layers and for tests of the theory."""

    def draw(
        self, U: Operator, generator: Generator, add: Any = None
    ) -> Omega:
        matrix = U.values.new_empty(self.q, U.n)
        matrix.normal_(0, self.q**-0.5, generator=generator)
        return Dense(matrix)


@dataclass(frozen=True)
class CountSketch(_Flat):
    """Each row goes to one of q buckets with a random sign: one pass over U, whatever q."""

    def draw(
        self, U: Operator, generator: Generator, add: Any = None
    ) -> Omega:
        bucket = _integers(self.q, U.n, generator)
        sign = _integers(2, U.n, generator).to(U.values.dtype) * 2 - 1
        return Buckets(bucket, sign, self.q)


def _columns(Xi: Tensor) -> Explicit:
    return Explicit(Xi, (1, len(Xi), 1))


def _along(omega: Omega, X: Tensor, dim: int) -> Tensor:
    """Ω along one dimension of X."""
    return omega(X.movedim(dim, 0)).movedim(0, dim)


def _integers(below: int, count: int, generator: Generator) -> Tensor:
    device = generator.device
    return torch.randint(below, (count,), generator=generator, device=device)


def _uniform(
    q: int,
    n: int,
    U: Operator,
    generator: Generator,
    replacement: bool = False,
) -> RowSample:
    """q rows, drawn uniformly of n."""
    if replacement:
        index = _integers(n, q, generator)
    else:
        device = generator.device
        index = torch.randperm(n, generator=generator, device=device)[:q]
    scale = (n / len(index)) ** 0.5
    return RowSample(index, U.values.new_full(index.shape, scale))
