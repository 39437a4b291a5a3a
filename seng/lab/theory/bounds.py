"""Bounds on ‖b − b̂‖ and ‖d − d̂‖: those of the lemma behind Theorem 1 (appendix, diffbhatb), and a sharper one.

With S = ΩᵀΩ, H = UᵀU + λI, η of A.1, ε of A.2 for v = g⊥, h₁ ≤ B + λI ≤ h₂ and t = (√ε + η)/(1 − η), the paper has

    stated    ‖b − b̂‖ ≤ √h₁ · t‖g‖           in the lemma; b has the units of g/U and h₁ those of U², so it cannot always hold
    proven    ‖b − b̂‖ ≤ t‖g‖/√h₁             at the end of its proof, and this one is what Theorem 1 goes on with
    used      ‖d − d̂‖ ≤ √(h₂/h₁) · t‖g‖/λ    eq. diff-esti

Proven is stated/h₁: where h₁ ≥ 1 the statement follows, and below it need not. A loss in other units (c times U and g, c² times
λ) changes neither η, ε nor ‖b − b̂‖/proven, so every draw with b̂ ≠ b breaks the statement in some units.

More can be had from the same assumptions. With r = g − Ub = λd, for which λb = Uᵀr, the proof's identity has one term,

    (λI + UᵀSU)(b̂ − b) = Uᵀ(S − I)r,    and as ‖UH^(−½)‖ ≤ 1,    ‖d − d̂‖ ≤ √ε_r/(1 − η) · ‖d‖                       (ours)

with ε_r of A.2 for v = r. It is at most `used`, is relative to d, and has no λ, h₁ or h₂. The same lines hold with what H
leaves of both errors, η_λ = ‖H^(−½)Uᵀ(S − I)UH^(−½)‖ ≤ η and ε_λ = ‖H^(−½)Uᵀ(S − I)r‖²/‖r‖² ≤ ε_r (`damped`): there η may
be above 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from seng.lab.theory.sketched import norm
from seng.lab.theory.trained import Layer
from seng.linalg.operators import Explicit, Operator
from seng.linalg.sketch import Dense, Identity, Omega
from seng.metrics.woodbury import LowRankState


@dataclass(frozen=True)
class Draw:
    """One Ω at one λ. A bound is None where the η that it needs is not below 1."""

    damping: float  # λ, which is h₁: U has fewer columns than rows
    eta: float
    b: float  # ‖b − b̂‖
    d: float  # ‖d − d̂‖
    size: float  # ‖d‖
    stated: float | None
    proven: float | None
    used: float | None
    ours: float | None
    damped: float | None
    identities: float  # how far the proof's identity and ours are from equalities, relative


def compared(
    layer: Layer, omega: Omega, dampings: Sequence[float]
) -> list[Draw]:
    """b̂ and d̂ by the library, with Ω and without, and what the bounds say."""
    U, N, g, perpendicular = layer.U, layer.N, layer.g, layer.perpendicular
    exact, sketched = (_state(U, o) for o in (Identity(), omega))
    X, squares = omega(N), layer.sigma.square()
    off = X.T @ X - torch.eye(layer.rank, dtype=X.dtype)  # NᵀSN − I
    eta, side = norm(off), X.T @ omega(perpendicular)  # NᵀSg⊥
    epsilon = _square(side) / max(_square(perpendicular), 1e-300)
    t = (epsilon**0.5 + eta) / (1 - eta) * float(g.norm()) if eta < 1 else None
    out = []
    for damping in dampings:
        solvers = exact.at(damping), sketched.at(damping)
        b, b_hat = (s.coefficients(s.project(g)) for s in solvers)
        d, d_hat = (s(g) / damping for s in solvers)
        r = g - U.mv(b)
        missed = X.T @ omega(r) - N.T @ r  # Nᵀ(S − I)r
        w = (
            squares / (squares + damping)
        ).sqrt()  # H^(−½)Uᵀ is Nᵀ with these weights, up to a rotation
        eta_damped, epsilon_damped = (
            norm(w[:, None] * off * w),
            _square(w * missed) / _square(r),
        )
        size, h_1, h_2 = float(d.norm()), damping, damping + float(squares[0])
        draw = Draw(
            damping=damping,
            eta=eta,
            b=float((b - b_hat).norm()),
            d=float((d - d_hat).norm()),
            size=size,
            stated=None if t is None else t * h_1**0.5,
            proven=None if t is None else t / h_1**0.5,
            used=None if t is None else t * (h_2 / h_1) ** 0.5 / damping,
            ours=(_square(missed) / _square(r)) ** 0.5 / (1 - eta) * size
            if eta < 1
            else None,
            damped=epsilon_damped**0.5 / (1 - eta_damped) * size
            if eta_damped < 1
            else None,
            identities=_identities(
                layer, sketched.gram, damping, b_hat - b, side, missed
            ),
        )
        out.append(draw)
    return out


def _state(U: Operator, omega: Omega) -> LowRankState:
    one = torch.ones((), dtype=torch.float64)
    return LowRankState(U, omega, omega.of(U).gram(), one, relative=False)


def _square(x: Tensor) -> float:
    return float(x.square().sum())


def _identities(
    layer: Layer,
    gram: Tensor,
    damping: float,
    off: Tensor,
    side: Tensor,
    missed: Tensor,
) -> float:
    """(λI + UᵀSU)(b̂ − b) against UᵀSg⊥ + λ(UᵀSU − UᵀU)H⁻¹U⁺g (the proof), and against Uᵀ(S − I)r (ours)."""
    U, V, sigma = layer.U, layer.V, layer.sigma
    left = damping * off + gram @ off
    inside = V.T @ (
        (layer.N.T @ layer.g) / sigma / (sigma.square() + damping)
    )  # H⁻¹U⁺g (ϱ,)
    theirs = V.T @ (sigma * side) + damping * (
        gram @ inside - U.rmv(U.mv(inside))
    )
    mine = V.T @ (sigma * missed)
    return max(
        float((left - right).norm() / right.norm()) for right in (theirs, mine)
    )


def by_hand(damping: float, t: float) -> Draw:
    """U = (√λ, 0)ᵀ, g = (0, 1)ᵀ, Ω = (1, t): η = 0, ε = t², b = 0, b̂ = t/(2√λ): half of what is proven, 1/(2λ) of stated."""
    one = torch.eye(2, dtype=torch.float64)
    U = Explicit(one[:, :1] * damping**0.5, (1, 2, 1))
    return compared(
        Layer("by hand", U, one[0], one[1]),
        Dense(torch.tensor([[1.0, t]], dtype=torch.float64)),
        [damping],
    )[0]
