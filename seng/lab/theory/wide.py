"""Theorem 2's network and its descent: two layers, of which the first is trained; the study is `seng.lab.theory.ntk`.

    f(x) = aᵀφ(Wx)/√m,   θ ← θ − αd,   d = Jᵀ(λI + JΩᵀΩJᵀ)⁻¹(f − y),   ‖f_k − y‖² ≤ ζᵏ‖f_0 − y‖²

W alone is trained, a is ±1, φ is ReLU and Ψ = ½‖f − y‖², so that ∇Ψ = Jᵀ(f − y) and U = Jᵀ (n, N) without the 1/√N. With Ω = I
and λ → 0, a step multiplies f − y by 1 − α wherever J stands still: ρ_k = ‖f_{k+1} − y‖/‖f_k − y‖ and its speed (1 − ρ_k)/α
is 1. A Gaussian Ω has (JΩᵀΩJᵀ)⁻¹ = K^{-½}W⁻¹K^{-½} with a Wishart matrix W, whose inverse has known moments: `sketched_speed`.
The direction is the library's own: its implicit form, its sketches and its low-rank state.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from seng.linalg.implicit import Implicit
from seng.linalg.numerics import top
from seng.linalg.sketch import Identity, Sketch
from seng.metrics.woodbury import LowRankState

SAMPLES, INPUTS = 40, 10  # N and m_0
DAMPING = 1e-7  # vanishes beside the kernel's smallest eigenvalue, about 0.08
DECADES = 8.0  # by which the residual is to fall
PATIENCE = 4  # times the steps that (1 − α)ᵏ would take


@dataclass(frozen=True)
class Network:
    """f(x) = aᵀφ(Wx)/√m, with the points and targets that it is to fit."""

    X: Tensor  # (N, m_0), rows of length 1
    y: Tensor  # (N,)
    W: Tensor  # (m, m_0), N(0, 1)
    a: Tensor  # (m,), ±1

    def jacobian(self, W: Tensor) -> Implicit:
        """U = Jᵀ (n, N), in closed form: the gradient of f(x_i) is G_i x_iᵀ with G_i = a ⊙ φ'(Wx_i)/√m."""
        G = torch.where(
            self.X @ W.T > 0, self.a / len(self.a) ** 0.5, 0
        )  # (N, m)
        return Implicit(G[:, None, :, None], self.X[:, None, :, None])

    def residual(self, W: Tensor, U: Implicit) -> Tensor:
        """f − y (N,); f = Jθ, since φ is homogeneous."""
        return U.rmv(W.flatten()) - self.y


def network(width: int, seed: int) -> Network:
    """As the theorem has it: points on the sphere, targets of size 1, w ~ N(0, I)."""
    generator = torch.Generator().manual_seed(seed)
    X, y, W = (
        torch.randn(*s, generator=generator, dtype=torch.float64)
        for s in ((SAMPLES, INPUTS), (SAMPLES,), (width, INPUTS))
    )
    a = torch.randint(2, (width,), generator=generator).double() * 2 - 1
    return Network(X / X.norm(dim=1, keepdim=True), y, W, a)


def direction(
    U: Implicit,
    residual: Tensor,
    sketch: Sketch | None,
    generator: torch.Generator,
    damping: float,
) -> Tensor:
    """d = (g − Ub̂)/λ of g = U(f − y), by the library (eqs. 12 and 13)."""
    omega = (
        Identity()
        if sketch is None or sketch.covers(U.shape)
        else sketch.draw(U, generator)
    )
    K = omega.of(U).gram()
    state = LowRankState(U, omega, K, top(K[None])[0], relative=False)
    return state.at(damping)(U.mv(residual)) / damping


@dataclass(frozen=True)
class Trace:
    """What one run did."""

    alpha: float
    residuals: list[float]  # ‖f_k − y‖
    eigenvalues: list[float]  # of the kernel JJᵀ at the start, ascending
    drift: float  # 3·max‖J_k − J_0‖/√λ_min(G_0): the C of the proof's Condition 2, which wants it below ½
    converged: bool
    speeds: list[float] = field(init=False)  # (1 − ρ_k)/α

    def __post_init__(self) -> None:
        pairs = zip(self.residuals, self.residuals[1:], strict=False)
        object.__setattr__(
            self,
            "speeds",
            [(1 - after / before) / self.alpha for before, after in pairs],
        )

    @property
    def worst(self) -> float:
        """The largest |(1 − ρ_k)/α − 1|."""
        return max(abs(speed - 1) for speed in self.speeds)

    @property
    def speed(self) -> float:
        """(1 − ρ)/α of the geometric mean ρ of the steps' ratios."""
        mean = math.exp(
            math.log(self.residuals[-1] / self.residuals[0]) / len(self.speeds)
        )
        return (1 - mean) / self.alpha

    @property
    def tail(self) -> float:
        """1 − ρ over the last quarter of the steps, where the slowest directions are left."""
        steps = max(1, len(self.speeds) // 4)
        return 1 - math.exp(
            math.log(self.residuals[-1] / self.residuals[-1 - steps]) / steps
        )


def descend(
    net: Network,
    alpha: float,
    sketch: Sketch | None = None,
    plain: bool = False,
    seed: int = 0,
) -> Trace:
    """Until the residual has fallen by DECADES; with a new Ω at every step. `plain` is gradient descent."""
    generator = torch.Generator().manual_seed(seed)
    start, W = net.jacobian(net.W), net.W
    eigenvalues = torch.linalg.eigvalsh(start.gram())
    gain = (
        alpha * float(eigenvalues[0]) if plain else alpha
    )  # of the slowest direction, per step
    most = math.ceil(PATIENCE * DECADES * math.log(10) / gain)
    residuals: list[float] = []
    drift = torch.zeros((), dtype=W.dtype)
    for _ in range(most):
        U = net.jacobian(W)
        r = net.residual(W, U)
        residuals.append(float(r.norm()))
        drift = torch.maximum(
            drift, top(Implicit(U.G - start.G, U.A).gram()[None])[0]
        )
        if (
            not 10.0**-DECADES * residuals[0]
            < residuals[-1]
            < 1e3 * residuals[0]
        ):
            break
        d = U.mv(r) if plain else direction(U, r, sketch, generator, DAMPING)
        W = W - alpha * d.view_as(W)
    C = (
        3 * float((drift / eigenvalues[0]).sqrt())
        if float(eigenvalues[0]) > 0
        else math.inf
    )
    return Trace(
        alpha,
        residuals,
        eigenvalues.tolist(),
        C,
        residuals[-1] <= 10.0**-DECADES * residuals[0],
    )


def straightness(trace: Trace) -> float:
    """R² of a line through log‖f_k − y‖ against k."""
    log = torch.tensor(trace.residuals, dtype=torch.float64).log()
    k = torch.arange(len(log), dtype=torch.float64)
    return float(torch.corrcoef(torch.stack([k, log]))[0, 1] ** 2)


def sketched_speed(q: int, alpha: float) -> float:
    """(1 − ρ)/α with ρ² = E‖(I − αW⁻¹)v‖² for W ~ Wishart(I/q, q) and ‖v‖ = 1: what a Gaussian Ω with q rows does."""
    N = SAMPLES
    first = q / (q - N - 1)  # E W⁻¹ = first·I
    second = (
        q**2 * (q - 1) / ((q - N) * (q - N - 1) * (q - N - 3))
    )  # E W⁻² = second·I
    return (1 - math.sqrt(1 - 2 * alpha * first + alpha**2 * second)) / alpha


def embedding_error(net: Network, sketch: Sketch) -> float:
    """η = ‖NᵀΩᵀΩN − I‖ of assumption A.1, for one Ω; N = UK^{-½} is a basis of U's span."""
    U = net.jacobian(net.W)
    values, V = torch.linalg.eigh(U.gram())
    whiten = V / values.sqrt()
    M = sketch.draw(U, torch.Generator().manual_seed(0)).of(U).gram()
    return float(
        torch.linalg.matrix_norm(
            whiten.T @ M @ whiten - torch.eye(len(M), dtype=M.dtype), 2
        )
    )
