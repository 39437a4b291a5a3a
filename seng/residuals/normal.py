"""The damped normal equations (JᵀJ + λI)d = Jᵀr of a Gauss–Newton step, with U = Jᵀ (n, m).

    m ≤ n       d = U(UᵀU + λI)⁻¹r        eqs. 7 to 9 for g = Ur, by Woodbury's formula
    m > n       d = (UUᵀ + λI)⁻¹Ur        the same d, through the smaller Gram
    sketched    d = U(ΞᵀΞ + λI)⁻¹r        eqs. 11 to 13 with Ξ = ΩU, for g = Ur

The paper prints d = (g − Ub)/λ with b = (UᵀU + λI)⁻¹Uᵀg. For g = Ur this is the first line, since
b = r − λ(UᵀU + λI)⁻¹r. As λ falls, the printed difference cancels; here nothing is divided by λ.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from seng.linalg.operators import Operator
from seng.linalg.sketch import Sketch
from seng.residuals.jacobian import pieces

Solve = Callable[[Tensor], Tensor]  # r (m,) -> d (n,)

BLOCK = 128  # rows of a Gram at a time


class NormalEquations:
    """The equations of one step: the Gram is made once, and they are solved at any number of λ."""

    def __init__(
        self,
        U: Operator,
        Xi: Operator | None = None,
    ) -> None:
        self.U = U
        self.Xi = Xi or U
        self.by_samples = Xi is not None or U.samples <= U.n
        size = U.n
        blocks = U.columns()
        if self.by_samples:
            size = U.samples
            blocks = (X for _, X in self.Xi.rows())
        self.gram = U.tensors()[0].new_zeros(size, size)
        for X in blocks:
            add_lower_gram(self.gram, X)
        self.mean = float(
            self.gram.diagonal().mean()
        )  # of the Gram's eigenvalues

    def at(self, lam: float) -> Solve | None:
        """r -> d at this λ; None where Cholesky fails, which a larger λ mends."""
        shifted = self.gram.clone()
        shifted.diagonal().add_(lam)
        L, info = torch.linalg.cholesky_ex(shifted)
        if info.item():
            return None

        def inverse(z: Tensor) -> Tensor:
            return torch.cholesky_solve(z[:, None], L)[:, 0]

        # Both refine once with J itself, since the Gram squares J's condition: at λ/λ_max = 1e-12
        # the error falls from 2e-5 to 1e-9 (Björck's corrected seminormal equations).
        def by_samples(r: Tensor) -> Tensor:
            b = inverse(r)
            left = r - self.Xi.rmv(self.Xi.mv(b)) - lam * b
            return self.U.mv(b + inverse(left))

        def by_parameters(r: Tensor) -> Tensor:
            d = inverse(self.U.mv(r))
            left = self.U.mv(r - self.U.rmv(d)) - lam * d
            return d + inverse(left)

        return by_samples if self.by_samples else by_parameters


def normal_equations(
    U: Operator,
    sketch: Sketch | None,
    generator: torch.Generator,
) -> NormalEquations:
    """The equations of U, sketched on request; a sketch as large as U is left out."""
    if sketch is None or sketch.covers(U.shape):
        return NormalEquations(U)
    omega = sketch.draw(U, generator)
    try:
        return NormalEquations(U, omega.of(U))
    except MemoryError:
        raise MemoryError(
            f"{sketch} needs the whole Jacobian, which does not fit: use CountSketch, or give more memory"
        ) from None


def add_lower_gram(K: Tensor, X: Tensor) -> None:
    """K += XXᵀ in the lower half, which is all that Cholesky reads, in about half the time."""
    for rows in pieces(len(K), BLOCK):
        upto = slice(0, rows.stop)
        K[rows, upto].addmm_(X[rows], X[upto].T)
