"""The damped normal equations (JᵀJ + λI)d = Jᵀr of a Gauss–Newton step, with U = Jᵀ (n, m) and g = Jᵀr = Ur.

    m ≤ n       d = U(UᵀU + λI)⁻¹r        eqs. 7 to 9: since g = Ur, b = r − λ(UᵀU + λI)⁻¹r, and (g − Ub)/λ is this
    m > n       d = (UUᵀ + λI)⁻¹Ur        the same d, through the smaller Gram
    sketched    d = U(ΞᵀΞ + λI)⁻¹r        eqs. 11 to 13 with Ξ = ΩU, for the same reason

Written so, nothing is divided by λ: the difference in the printed (g − Ub̂)/λ cancels as λ falls.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from seng.linalg.operators import Explicit, Operator
from seng.linalg.sketch import Omega, RowSample, Sketch
from seng.residuals.linearization import Streamed

Solve = Callable[[Tensor], Tensor]  # r (m,) -> d (n,)

BLOCK = 128  # rows of a Gram at a time


class Normal:
    """A step's equations: the Gram is made once, and they are solved at any number of λ."""

    def __init__(self, U: Operator, omega: Omega | None = None) -> None:
        self.U = U
        self.Xi = U if omega is None else omega.of(U)
        self.by_samples = omega is not None or U.samples <= U.n
        self.gram = _gram(self.Xi, self.by_samples)
        self.mean = float(self.gram.diagonal().mean())  # of its eigenvalues

    def at(self, lam: float) -> Solve | None:
        """r -> d at this λ; None where no factorization was found, which a larger λ mends."""
        shifted = self.gram.clone()
        shifted.diagonal().add_(lam)
        L, info = torch.linalg.cholesky_ex(shifted)
        if info.item():
            return None

        def inverse(z: Tensor) -> Tensor:
            return torch.cholesky_solve(z[:, None], L)[:, 0]

        # Each refines once, with J itself, since the Gram has the square of its condition: at λ/λ_max = 1e-12 the error falls
        # from 2e-5 to 1e-9 (Björck's corrected seminormal equations).
        def by_samples(r: Tensor) -> Tensor:
            b = inverse(r)
            return self.U.mv(b + inverse(r - self.Xi.rmv(self.Xi.mv(b)) - lam * b))

        def by_parameters(r: Tensor) -> Tensor:
            d = inverse(self.U.mv(r))
            return d + inverse(self.U.mv(r - self.U.rmv(d)) - lam * d)

        return by_samples if self.by_samples else by_parameters


def normal_equations(
    U: Operator, sketch: Sketch | None, generator: torch.Generator
) -> Normal:
    """Those of U, sketched where asked for; a sketch as large as what it sketches is none."""
    if sketch is None or sketch.covers(U.shape):
        return Normal(U)
    omega = sketch.draw(U, generator)
    if isinstance(U, Streamed) and isinstance(omega, RowSample):
        raise MemoryError(
            f"{sketch} needs the whole Jacobian, which does not fit: use CountSketch, or give more memory"
        )
    return Normal(U, omega)


def _gram(U: Operator, by_samples: bool) -> Tensor:
    """UᵀU or UUᵀ; of what is held only the lower half, all that Cholesky reads, in little more than half the time."""
    if isinstance(U, Streamed):
        return U.gram() if by_samples else U.outer()
    assert isinstance(U, Explicit)
    X = U.U.T if by_samples else U.U
    K = X.new_zeros(len(X), len(X))
    for i in range(0, len(X), BLOCK):
        K[i : i + BLOCK, : i + BLOCK] = X[i : i + BLOCK] @ X[: i + BLOCK].T
    return K
