"""Ω for a layer by name, how well it keeps the span of U, and what the mean of A.2's error is by formula.

With N an orthonormal basis of span U (ρ columns), leverage scores ℓ_i = ‖N_i‖² and S = ΩᵀΩ, ε = ‖NᵀSv − Nᵀv‖²/‖v‖² has the mean

    Gaussian      (ρ‖v‖² + ‖Nᵀv‖²)/q                  rows by p     (Σ ℓ_i v_i²/p_i − ‖Nᵀv‖²)/q
    CountSketch   (ρ‖v‖² + ‖Nᵀv‖² − 2Σ ℓ_i v_i²)/q    without replacement, the same with p = 1/n, times (n − q)/(n − 1)

all over ‖v‖²: fourth moments for the first two, the variance of a mean for the others.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from seng.lab.theory.trained import Layer
from seng.linalg.operators import Explicit
from seng.linalg.sketch import (
    CountSketch,
    Gaussian,
    KroneckerRows,
    LeverageRows,
    Omega,
    Rows,
)

OBLIVIOUS = ("Gaussian", "CountSketch")
BOTH = "KroneckerRows, both sides"
KINDS = (
    *OBLIVIOUS,
    "Rows",
    "LeverageRows",
    "rows by leverage",
    "KroneckerRows",
    BOTH,
)
DAMPING = 0.01  # of the largest eigenvalue: the library's default


def drawn(
    kind: str, layer: Layer, q: int, generator: torch.Generator
) -> Omega:
    """Ω of about q rows. Kronecker sketches leave the small side whole, as the paper has it, or take a like share of both."""
    U, n_G = layer.U, layer.U.shape[1]
    if (
        kind == "rows by leverage"
    ):  # the row norms of N are the leverage scores of U
        return LeverageRows(q).draw(Explicit(layer.N, U.shape), generator)
    if kind.startswith("KroneckerRows"):
        q_G = (
            n_G
            if kind == "KroneckerRows"
            else max(1, round(n_G * (q / U.n) ** 0.5))
        )
        return KroneckerRows(q_G, max(1, q // q_G)).draw(U, generator)
    flat = {
        "Gaussian": Gaussian(q),
        "CountSketch": CountSketch(q),
        "Rows": Rows(q),
        "LeverageRows": LeverageRows(q),
    }
    return flat[kind].draw(U, generator)


def expected(kind: str, layer: Layer, v: Tensor, q: int) -> float | None:
    """E ε by the formulas above, where there is one."""
    n, size = layer.U.n, v.square().sum()
    products = layer.leverage * v.square() / size  # (n,)
    along = float((layer.N.T @ v).square().sum() / size)
    if kind in OBLIVIOUS:
        return (
            layer.rank
            + along
            - (2 * float(products.sum()) if kind == "CountSketch" else 0)
        ) / q
    if kind == "Rows":
        return (n * float(products.sum()) - along) * (n - q) / (n - 1) / q
    p = {
        "LeverageRows": layer.row_norms,
        "rows by leverage": layer.leverage / layer.rank,
    }.get(kind)
    return (
        None
        if p is None
        else (float((products[p > 0] / p[p > 0]).sum()) - along) / q
    )


@dataclass(frozen=True)
class Errors:
    """Of one draw, or of many as tensors."""

    eta: float  # ‖NᵀSN − I‖₂
    epsilon: float  # ‖NᵀSv − Nᵀv‖²/‖v‖²
    gram: float  # ‖UᵀSU − UᵀU‖₂/‖UᵀU‖₂
    damped: float  # ‖H^(−½)(UᵀSU − UᵀU)H^(−½)‖₂, H = UᵀU + λI: all that a solve with λ asks of A.1; at most η
    energy: float  # ‖ΩU‖_F²/‖U‖_F², whose mean is 1
    rows: float  # of Ω


def errors(layer: Layer, v: Tensor, omega: Omega) -> Errors:
    """How well Ω keeps N and v."""
    sketched = omega(
        torch.cat([layer.N, v[:, None]], 1)
    )  # (q, ρ + 1), in one pass
    X, x = sketched[:, :-1], sketched[:, -1]
    off = X.T @ X - torch.eye(layer.rank, dtype=X.dtype)
    squares = layer.sigma.square()
    weights = (
        torch.ones_like(squares),
        squares / squares[0],
        squares / (squares + DAMPING * squares[0]),
    )
    eta, gram, damped = (
        norm(w.sqrt()[:, None] * off * w.sqrt()) for w in weights
    )
    epsilon = float(
        (X.T @ x - layer.N.T @ v).square().sum() / v.square().sum()
    )
    energy = 1 + float(squares @ off.diagonal() / squares.sum())
    return Errors(eta, epsilon, gram, damped, energy, len(X))


def norm(symmetric: Tensor) -> float:
    """‖·‖₂ of a symmetric matrix."""
    return float(torch.linalg.eigvalsh(symmetric).abs().max())
