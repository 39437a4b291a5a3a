"""One layer's curvature, between refreshes: M = UUᵀ, ready to be solved with at every step.

    d = (g − Ub)/λ,   (λI + ΞᵀΞ) b = Ξᵀξ,   Ξ = ΩU, ξ = Ωg                    (eqs. 8, 9, 12, 13 and 24)

`solve` gives λd = g − Ub, which is g itself for λ → ∞. The system is solved as (I + K/λ) b = Ξᵀξ/λ with K = ΞᵀΞ: it is well
scaled for every λ, and its smallest eigenvalue is 1.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from seng.numerics import inverse, widest
from seng.operators import Independent, Operator
from seng.sketch import Omega
from seng.staging import send


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
        b = inverse @ self.Xi.rmv(self.omega(g)).to(inverse.dtype)
        fine = b.isfinite().all()
        return self.U.mv(torch.where(fine, b, 0).to(g.dtype)), fine

    def factor(self, damping: float) -> tuple[Tensor, Tensor]:
        """λ and (λI + K)⁻¹, kept until λ changes; not a number where no factorization was found."""
        factorize([(self, damping)])
        assert self.core is not None
        return self.core[1], self.core[2]


def factorize(dampings: Sequence[tuple[Block, float]]) -> None:
    """(λI + K)⁻¹ for every block whose λ has changed, those of one size at once.

    In float64 whatever the precision of U: the error of b enters d times λ_max/λ.
    """
    stale: defaultdict[tuple[int, torch.dtype, torch.device], list[tuple[Block, float]]] = defaultdict(list)
    for block, damping in dampings:
        if block.core is None or block.core[0] != damping:
            stale[len(block.gram), block.gram.dtype, block.gram.device].append((block, damping))
    for same in stale.values():
        K = torch.stack([block.gram for block, _ in same])
        lam = send(torch.tensor([damping for _, damping in same], dtype=K.dtype, device="cpu"), K.device)
        relative = send(torch.tensor([block.relative for block, _ in same], device="cpu"), K.device)
        tops = torch.stack([block.top for block, _ in same])
        lam = torch.where(relative, torch.where(tops > 0, lam * tops, 1), lam)
        K, scale = K.to(widest(K)), lam.to(widest(K))[:, None, None]
        cores = inverse(torch.eye(K.shape[-1], dtype=K.dtype, device=K.device) + K / scale)
        for (block, damping), one, core in zip(same, lam.unbind(), (cores / scale).unbind(), strict=True):
            block.core = damping, one, core
