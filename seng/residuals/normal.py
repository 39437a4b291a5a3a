"""The damped normal equations (JᵀJ + λI)d = Jᵀr of a Gauss–Newton step, with U = Jᵀ (n, m): its
columns are the gradients of single residuals (eq. 5).

    m ≤ n       d = U(UᵀU + λI)⁻¹r        eqs. 7 to 9 for g = Ur, by Woodbury's formula
    m > n       d = (UUᵀ + λI)⁻¹Ur        the same d, through the smaller Gram
    sketched    d = U(ΞᵀΞ + λI)⁻¹r        eqs. 11 to 13 with Ξ = ΩU, for g = Ur

The paper prints d = (g − Ub)/λ with b = (UᵀU + λI)⁻¹Uᵀg. For g = Ur this is the first line, since
b = r − λ(UᵀU + λI)⁻¹r. As λ falls, the printed difference cancels; here nothing is divided by λ.

U is kept as a matrix where it fits into the memory budget. Otherwise a `Linearization` is itself
the operator U: it makes blocks of J again for each Gram, and products by differentiating r.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from seng.linalg.memory import size_of
from seng.linalg.operators import Explicit, Operator, Shape, Slabs
from seng.linalg.sketch import Sketch
from seng.residuals.jacobian import COPIES, TermJacobian, pieces
from seng.residuals.terms import Term

BLOCK = 128  # rows of a Gram at a time
GRAMS = 3  # the Gram, its factor, and one in the making
CHUNK = 2**29  # bytes for a chunk of J: more is no faster
GPU_CHUNK = 2**32


def linearize(terms: list[Term], batches: Any, memory: int) -> Linearization:
    """All terms at the present θ, each on its batch, within this many bytes."""
    theta = terms[0].parameters.theta()
    room = min(memory // 4, GPU_CHUNK if theta.is_cuda else CHUNK)
    parts = []
    for term, batch in zip(terms, batches, strict=True):
        if not isinstance(batch, (tuple, list)):
            batch = (batch,)
        parts.append(TermJacobian(term, batch, theta, room))
    r = torch.cat([part.r for part in parts])
    return Linearization(r, parts, memory)


@dataclass(frozen=True)
class Linearization(Operator):
    """The residuals r at θ, and U = Jᵀ without keeping it: blocks of J are made when needed."""

    r: Tensor  # (m,)
    parts: list[TermJacobian]  # their residuals follow each other in r
    memory: int  # bytes
    width: int = 1  # columns of J that are made at a time

    @property
    def values(self) -> Tensor:
        return self.r

    @property
    def shape(self) -> Shape:
        return (1, len(self.parts[0].theta), 1)

    def residuals(self, step: Tensor) -> Tensor:
        """r (m,) at θ − step."""
        return torch.cat([part.residuals(step) for part in self.parts])

    def jacobian(self, columns: slice) -> Tensor:
        """J[:, columns] (m, w)."""
        J = self.r.new_empty(self.samples, columns.stop - columns.start)
        for part, own in self._by_part(J):
            for rows, X in part.chunks(columns):
                own[rows] = X
        return J

    def operator(self) -> Operator:
        """U as a matrix where it fits into the budget, else this object."""
        n = self.n
        m = self.samples
        gram = GRAMS * min(m, n) ** 2 * self.r.element_size()
        left = self.memory - gram
        # A half more is for chunks in the making.
        if left >= 1.5 * n * self.r.nbytes:
            return Explicit(self.jacobian(slice(0, n)).T, self.shape)
        width = left // (COPIES * self.r.nbytes)
        if width < 1:
            raise MemoryError(
                f"{m} residuals and {n} parameters: the smaller of JJᵀ and JᵀJ needs "
                f"{size_of(gram)} with its factor, and some columns of J beside it; the budget is "
                f"{size_of(self.memory)}. Give fewer samples at a time, or more bytes "
                "(LeastSquares(memory=…))"
            )
        return replace(self, width=width)

    def slabs(self, dtype: torch.dtype) -> Slabs:
        for columns in pieces(self.n, self.width):
            yield (0, columns, 0), self.jacobian(columns)

    def columns(self) -> Iterator[Tensor]:
        for part in self.parts:
            for _, X in part.chunks(slice(0, self.n)):
                yield X.T

    def rmv(self, z: Tensor) -> Tensor:
        return torch.cat([part.push(z) for part in self.parts])

    def mv(self, c: Tensor) -> Tensor:
        pulled = [part.pull(own) for part, own in self._by_part(c)]
        return torch.stack(pulled).sum(0)

    def explicit(self) -> Explicit:
        raise MemoryError(
            "this sketch needs the whole Jacobian, which does not fit: use CountSketch, or give "
            "more memory"
        )

    def _by_part(self, rows: Tensor) -> Iterator[tuple[TermJacobian, Tensor]]:
        """Each term with its own of the m rows."""
        sizes = [len(part.r) for part in self.parts]
        return zip(self.parts, rows.split(sizes), strict=True)


class NormalEquations:
    """The equations of one step: the Gram is made once, and they are solved at any number of λ."""

    def __init__(
        self, U: Operator, sketch: Sketch | None = None, generator: Any = None
    ) -> None:
        self.U = self.Xi = U
        self.by_samples = U.samples <= U.n
        # A sketch as large as U is left out.
        if sketch and not sketch.covers(U.shape):
            self.Xi = sketch.draw(U, generator).of(U)
            self.by_samples = True
        if self.by_samples:
            size = U.samples
            slabs = self.Xi.slabs(U.dtype)
            blocks: Any = (X.flatten(1) for _, X in slabs)
        else:
            size = U.n
            blocks = U.columns()
        self.gram = U.values.new_zeros(size, size)
        for X in blocks:
            add_lower_gram(self.gram, X)
        # The mean of the Gram's eigenvalues.
        self.mean = float(self.gram.diagonal().mean())

    def at(self, lam: float) -> Any:
        """r -> d at this λ; None where Cholesky fails, which a larger λ mends."""
        shifted = self.gram.clone()
        shifted.diagonal().add_(lam)
        L, info = torch.linalg.cholesky_ex(shifted)
        if info.item():
            return None

        def inverse(z: Tensor) -> Tensor:
            return torch.cholesky_solve(z[:, None], L)[:, 0]

        def solve(r: Tensor) -> Tensor:
            """Refined once with J itself, since the Gram squares J's condition.

            At λ/λ_max = 1e-12 this takes the error from 2e-5 to 1e-9 (Björck's corrected
            seminormal equations).
            """
            U = self.U
            Xi = self.Xi
            if self.by_samples:
                b = inverse(r)
                rest = r - Xi.rmv(Xi.mv(b)) - lam * b
                return U.mv(b + inverse(rest))
            d = inverse(U.mv(r))
            rest = U.mv(r - U.rmv(d)) - lam * d
            return d + inverse(rest)

        return solve


def add_lower_gram(K: Tensor, X: Tensor) -> None:
    """K += XXᵀ in the lower half, which is all that Cholesky reads, in about half the time."""
    for rows in pieces(len(K), BLOCK):
        upto = slice(0, rows.stop)
        K[rows, upto].addmm_(X[rows], X[upto].T)
