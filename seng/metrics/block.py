"""One layer's curvature, between refreshes: M = UUᵀ, ready to be solved with at every step.

    d = (g − Ub)/λ,   (λI + ΞᵀΞ) b = Ξᵀξ,   Ξ = ΩU, ξ = Ωg                    (eqs. 8, 9, 12, 13 and 24)

With a base P in place of I (`seng.metrics.base`), all of it is in whitened coordinates: U stands for P^{-½}U, g for P^{-½}g.

`solve` gives λd = g − Ub, which is g itself for λ → ∞. The system is solved as (I + K/λ) b = Ξᵀξ/λ with K = ΞᵀΞ: it is well
scaled for every λ, and its smallest eigenvalue is 1.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from seng.gpu.replay import directly, signature, write
from seng.gpu.staging import send
from seng.linalg.implicit import Independent
from seng.linalg.numerics import inverse, widest
from seng.linalg.operators import Operator
from seng.linalg.sketch import Identity, Omega
from seng.metrics.base import Base, Diagonal, Kronecker


@dataclass
class Block:
    """M = UUᵀ, ready to be solved with."""

    U: Operator
    omega: Omega
    gram: Tensor  # K = (ΩU)ᵀΩU, (ϱ, ϱ)
    top: Tensor  # its largest eigenvalue, ()
    relative: bool  # whether damping is in units of `top`
    patience: int = 0  # refreshes until it is asked again whether few directions do, where they did not
    base: Kronecker | Diagonal | None = None  # P; None: I
    graft: bool = False  # whether directions are scaled to the length of the gradient
    failures: Tensor = field(
        init=False
    )  # solves that fell back to the plain gradient; on the device, so that no step waits
    sketch_error: Tensor | None = field(
        init=False, default=None
    )  # of a merged basis: see `numerics.deviation`
    core: tuple[float, Tensor, Tensor] | None = field(
        init=False, default=None
    )  # (damping, λ, (λI + K)⁻¹)
    bound: float | None = field(
        init=False, default=None
    )  # the damping that bounds a P that is alone; None: to be done

    def __post_init__(self) -> None:
        self.Xi = self.omega.of(self.U)
        self.failures = torch.zeros((), dtype=torch.int64, device=self.gram.device)

    def renewed(
        self,
        U: Operator,
        omega: Omega,
        gram: Tensor,
        top: Tensor,
        relative: bool,
        base: Base | None = None,
    ) -> list[tuple[Tensor, Tensor]] | None:
        """What to copy into which of its tensors to make it that of another U; None where their shapes are others.

        And on a CPU, where nothing is recorded that would have to find them in their places.
        """
        if not gram.is_cuda:
            return None
        alike = (
            isinstance(omega, Identity)
            and isinstance(self.omega, Identity)
            and signature(U) == signature(self.U)
        )
        ours, theirs = ([] if b is None else b.tensors() for b in (self.base, base))
        alike = (
            alike
            and _kind(self.base) == _kind(base)
            and [t.shape for t in ours] == [t.shape for t in theirs]
        )
        if not alike or (gram.shape, gram.dtype, relative) != (
            self.gram.shape,
            self.gram.dtype,
            self.relative,
        ):
            return None
        self.core = (
            None if self.core is None else (math.nan, *self.core[1:])
        )  # to be written to as well
        self.bound = None
        own, new = (
            [*self.U.tensors(), self.gram, self.top, *ours],
            [*U.tensors(), gram, top, *theirs],
        )
        return [(to, t) for to, t in zip(own, new, strict=True) if to is not t]

    def bind(self, damping: float) -> None:
        """Bound a P that is alone from below by λ, in place on a GPU, where steps are recorded."""
        if self.base is None or self.U.samples or self.bound == damping:
            return
        bounded = replace(self.base, least=damping, relative=self.relative)
        if self.gram.is_cuda:
            pairs = zip(self.base.tensors(), bounded.tensors(), strict=True)
            write([(to, t) for to, t in pairs if to is not t])
        else:
            self.base = bounded
            bounded.tensors()  # now: a compiler that traces the step would trace this too
        self.bound = damping

    def solve(self, g: Tensor, damping: float) -> Tensor:
        """λ(M + λP)⁻¹g."""
        return self.direction(g, *self.factor(damping))

    def direction(self, g: Tensor, lam: Tensor, inverse: Tensor) -> Tensor:
        """The same with the factorization at hand; where it failed, P⁻¹g, and that is counted."""
        d = self._based(g, lam, inverse)
        if not self.graft:
            return d
        length = torch.linalg.vector_norm(d).clamp_min(torch.finfo(d.dtype).tiny)
        grafted: Tensor = d * (torch.linalg.vector_norm(g) / length)
        return grafted

    def _based(self, g: Tensor, lam: Tensor, inverse: Tensor) -> Tensor:
        if self.base is not None and not self.U.samples:
            return self.base.vector(g, self.U.shape, -1.0)
        z = g if self.base is None else self.base.vector(g, self.U.shape, -0.5)
        d, fine = self.attempt(z, lam, inverse)
        self.failures += ~fine
        return d if self.base is None else self.base.vector(d, self.U.shape, -0.5)

    def attempt(self, g: Tensor, lam: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
        """g − Ub, and whether b is finite; in float64 refined once: g lies nearly in the span of U, the difference cancels."""
        correction, fine = self._correction(g, inverse)
        d = g - correction
        if g.dtype == torch.float64 and not isinstance(self.U, Independent):
            residual = (
                g - d - self.U.mv(self.Xi.rmv(self.omega(d)) / lam)
            )  # of (I + UΞᵀΩ/λ) d = g
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


def _kind(base: Base | None) -> tuple[object, ...]:
    """What of P is no tensor, and so not written to."""
    return type(base), getattr(base, "power", None), getattr(base, "noise", None)


def factorize(
    dampings: Sequence[tuple[Block, float]], run: Callable[..., list[Tensor]] = directly
) -> None:
    """(λI + K)⁻¹ for every block whose λ has changed, those of one size at once."""
    stale: defaultdict[
        tuple[int, torch.dtype, torch.device], list[tuple[Block, float]]
    ] = defaultdict(list)
    for block, damping in dampings:
        if block.core is None or block.core[0] != damping:
            stale[len(block.gram), block.gram.dtype, block.gram.device].append(
                (block, damping)
            )
    for same in stale.values():
        K = torch.stack([block.gram for block, _ in same])
        lam = send(
            torch.tensor([damping for _, damping in same], dtype=K.dtype, device="cpu"),
            K.device,
        )
        relative = send(
            torch.tensor([block.relative for block, _ in same], device="cpu"), K.device
        )
        tops = torch.stack([block.top for block, _ in same])
        lam, cores = run(_inverses, K, lam, relative, tops)
        pairs: list[tuple[Tensor, Tensor]] = []
        for (block, damping), one, core in zip(
            same, lam.unbind(), cores.unbind(), strict=True
        ):
            if block.core is not None and math.isnan(
                block.core[0]
            ):  # what is there is to be written to
                pairs += (block.core[1], one), (block.core[2], core)
                block.core = damping, *block.core[1:]
            else:
                block.core = (
                    damping,
                    one.clone(),
                    core.clone(),
                )  # without those of the others
        write(pairs)


def _inverses(
    K: Tensor, lam: Tensor, relative: Tensor, tops: Tensor
) -> tuple[Tensor, Tensor]:
    """λ and (λI + K)⁻¹; in float64 whatever the precision of U: the error of b enters d times λ_max/λ."""
    lam = torch.where(relative, torch.where(tops > 0, lam * tops, 1), lam)
    K, scale = K.to(widest(K)), lam.to(widest(K))[:, None, None]
    cores = inverse(torch.eye(K.shape[-1], dtype=K.dtype, device=K.device) + K / scale)
    return lam, cores / scale
