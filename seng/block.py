"""One layer's curvature: `build` (expensive, on refresh) and `solve` (cheap, every step).

    d = (g − Ub)/λ,   (λI + ΞᵀΞ) b = Ξᵀξ,   Ξ = ΩU, ξ = Ωg                    (eqs. 8, 9, 12, 13 and 24)

`solve` gives λd = g − Ub, which is g itself for λ → ∞. The system is solved as (I + K/λ) b = Ξᵀξ/λ with K = ΞᵀΞ: it is well
scaled for every λ, and its smallest eigenvalue is 1.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from seng.curvature import Curvature
from seng.numerics import averaged, cholesky, eigh, finite, leading, reduced, wide
from seng.operators import Implicit, Independent, Merged, Operator
from seng.plan import Plan
from seng.sketch import Identity, Omega


@dataclass
class Block:
    """M = UUᵀ, ready to be solved with."""

    U: Operator
    omega: Omega
    gram: Tensor  # K = (ΩU)ᵀΩU, (ϱ, ϱ)
    top: Tensor  # its largest eigenvalue, ()
    relative: bool  # whether damping is in units of `top`
    failures: Tensor = field(init=False)  # solves that fell back to the plain gradient; on the device, so that no step waits
    sketch_error: Tensor | None = field(init=False, default=None)  # of a merged basis: see `numerics.deviation`
    core: tuple[float, Tensor, Tensor] | None = field(init=False, default=None)  # (damping, λ, (λI + K)⁻¹)

    def __post_init__(self) -> None:
        self.Xi = self.omega.of(self.U)
        self.failures = torch.zeros((), dtype=torch.int64, device=self.gram.device)

    def damping(self, damping: float) -> Tensor:
        """λ of this block; where there is no curvature any positive number will do."""
        if not self.relative:
            return torch.full_like(self.top, damping)
        return torch.where(self.top > 0, damping * self.top, 1)

    def solve(self, g: Tensor, damping: float) -> Tensor:
        """λ(M + λI)⁻¹g."""
        return self.direction(g, *self.factor(damping))

    def direction(self, g: Tensor, lam: Tensor, inverse: Tensor) -> Tensor:
        """The same with the factorization at hand; where it failed, the plain gradient, and that is counted."""
        d, fine = self.attempt(g, lam, inverse)
        self.failures += ~fine
        return d

    def attempt(self, g: Tensor, lam: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
        """g − Ub, and whether b is finite; in float64 refined once: g lies nearly in the span of U, the difference cancels."""
        correction, fine = self._correction(g, inverse)
        d = g - correction
        if g.dtype == torch.float64 and not isinstance(self.U, Independent):
            residual = g - d - self.U.mv(self.Xi.rmv(self.omega(d)) / lam)  # of (I + UΞᵀΩ/λ) d = g
            residual = torch.where(fine & residual.isfinite().all(), residual, 0)
            d = d + residual - self._correction(residual, inverse)[0]
        return d, fine

    def _correction(self, g: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
        """Ub, and whether b is finite; where it is not, zero."""
        rhs = self.Xi.rmv(self.omega(g)).to(inverse.dtype)
        b = inverse * rhs if inverse.dim() == 1 else inverse @ rhs
        fine = b.isfinite().all()
        return self.U.mv(torch.where(fine, b, 0).to(g.dtype)), fine

    def factor(self, damping: float) -> tuple[Tensor, Tensor]:
        """λ and (λI + K)⁻¹, kept until λ changes; a vector where K is diagonal; not a number where no factorization was found.

        In float64 whatever the precision of U: the error of b enters d times λ_max/λ.
        """
        if self.core is None or self.core[0] != damping:
            lam = self.damping(damping)
            if isinstance(self.U, Merged):
                self.core = damping, lam, 1 / (self.U.eigenvalues + lam)
            else:
                K = self.gram.to(wide(self.gram))
                L, found = cholesky(torch.eye(len(K), dtype=K.dtype, device=K.device) + K / lam)
                self.core = damping, lam, torch.where(found, torch.cholesky_inverse(L) / lam, torch.nan)
        return self.core[1], self.core[2]


def build(U: Operator, plan: Plan, curvature: Curvature, generator: torch.Generator, previous: Block | None) -> Block | None:
    """The block of U in its planned form, or None where U has no columns or numbers that are not finite."""
    if U.samples == 0 or not finite(*U.tensors()):
        return None
    if plan.form == "explicit":
        U = U.explicit()
    elif isinstance(U, Implicit) and plan.form == "implicit":
        U = reduced(U, plan.rank, generator)
        U = Independent(U.G, U.A) if curvature.combine == "independent" else U

    sketch = curvature.sketch if plan.dims.own is None else None  # layers without factors stay exact
    omega = Identity() if sketch is None or sketch.covers(U.shape) else sketch.draw(U, generator)
    error = None
    if plan.form == "merged":
        (U, error), omega = leading(U, omega.of(U), plan.rank), Identity()
        if curvature.averaging and previous is not None and isinstance(previous.U, Merged):
            U = averaged(previous.U, U, curvature.averaging, plan.rank)
    gram = omega.of(U).gram()
    top = U.eigenvalues[0] if isinstance(U, Merged) else eigh(gram)[0][0]
    if not finite(top, *U.tensors()):
        return None
    block = Block(U, omega, gram, top, curvature.relative_damping)
    block.sketch_error = error
    return block
