"""Theorem 1's problem and its descent: a network whose every assumption can be checked; the study is `seng.lab.theory.descent`.

    Ψ(θ) = 1/N Σ ½ log(1 + ‖A tanh(Wx_i + b) − y_i‖²),   θ = (W, b),   θ ← θ − α_k d̂_k

The loss forgives outliers and is not convex, nor is the network. A is orthogonal and fixed, the inputs are white with mean 0:
1/N Σ x̃x̃ᵀ = I for x̃ = (x, 1). Then |ρ''| ≤ 1, ‖ρ'‖ ≤ ½, |tanh'| ≤ 1 and |tanh''| ≤ 4/(3√3) bound the Hessian everywhere, so that
L_Ψ = 1 + 2/(3√3) and B.1 holds. g_k is the mean of |S_k| samples drawn with replacement: unbiased, with σ_k² = σ²/|S_k| (B.3).
The curvature has samples of its own, by `SENG.curvature_batch`. B_k ≽ 0, so h_1 = λ (B.2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

import seng
from seng.linalg.sketch import Rows
from seng.tell.inspection import inspect

SAMPLES, INPUTS, HIDDEN = 512, 31, 8  # n = 8·32 = 256
NOISE = 0.2  # of the targets, so that no network fits them and σ stays
FIRST = 8  # |S_0|
SLOW = 20  # steps after which batches and step sizes begin to follow their powers of k
LIPSCHITZ = 1 + 2 / (3 * math.sqrt(3))  # L_Ψ


@dataclass(frozen=True)
class Problem:
    """Points, targets and the fixed last layer."""

    X: Tensor  # (N, m_0), white
    y: Tensor  # (N, h)
    A: Tensor  # (h, h), orthogonal
    start: Tensor  # (h, m_0 + 1): W and b to begin with

    def losses(self, f: Tensor, y: Tensor) -> Tensor:
        """ψ of each sample."""
        return 0.5 * (f - y).square().sum(1).log1p()

    def loss(self, theta: Tensor) -> Tensor:
        """Ψ of θ (h, m_0 + 1)."""
        return self.losses(
            torch.tanh(self.X @ theta[:, :-1].T + theta[:, -1]) @ self.A.T,
            self.y,
        ).mean()

    def gradient(self, theta: Tensor) -> Tensor:
        """∇Ψ (n,) in closed form: the study looks at it in every step."""
        phi = torch.tanh(self.X @ theta[:, :-1].T + theta[:, -1])
        error = phi @ self.A.T - self.y
        slope = error / (1 + error.square().sum(1, keepdim=True))  # (N, h)
        back = (slope @ self.A) * (1 - phi.square()) / len(phi)
        return torch.cat([back.T @ self.X, back.sum(0)[:, None]], 1).flatten()

    def curvature(self, theta: Tensor) -> Tensor:
        """The eigenvalues of ∇²Ψ (n,), ascending."""
        H = torch.func.hessian(lambda z: self.loss(z.view_as(theta)))(
            theta.flatten()
        )
        values: Tensor = torch.linalg.eigvalsh(H)
        return values


def problem(seed: int) -> Problem:
    """A network's own outputs with noise, and another network to begin with."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    X = normal(SAMPLES, INPUTS)
    X = X - X.mean(0)
    X = torch.linalg.solve_triangular(
        torch.linalg.cholesky(X.T @ X / SAMPLES), X.T, upper=False
    ).T
    A = torch.linalg.qr(normal(HIDDEN, HIDDEN))[0]
    teacher = normal(HIDDEN, INPUTS + 1) / INPUTS**0.5
    y = torch.tanh(
        X @ teacher[:, :-1].T + teacher[:, -1]
    ) @ A.T + NOISE * normal(SAMPLES, HIDDEN)
    return Problem(X, y, A, 0.3 * normal(HIDDEN, INPUTS + 1) / INPUTS**0.5)


@dataclass(frozen=True)
class Rule:
    """α_k ∝ k^(−p) and |S_k| ∝ k^s, after SLOW steps; the theorem asks p ≤ 1 and p + s > 1."""

    words: str
    p: float
    s: float
    damping: float  # λ
    alpha: float  # α_0
    rows: int  # q of Ω
    samples: int  # ϱ, of S̃_k

    def step_size(self, k: int) -> float:
        """α_k."""
        return self.alpha * math.pow(1 + k / SLOW, -self.p)

    def batch(self, k: int) -> int:
        """|S_k|."""
        return math.ceil(FIRST * math.pow(1 + k / SLOW, self.s))

    @property
    def summable(self) -> bool:
        """Σα = ∞ and Σασ² < ∞."""
        return self.p <= 1 < self.p + self.s

    @property
    def slope(self) -> float:
        """Of log‖∇Ψ‖ against log k where noise and descent are in balance: ‖∇Ψ‖² ∝ α_kσ_k²."""
        return -(self.p + self.s) / 2


@dataclass(frozen=True)
class Path:
    """What was seen, step by step."""

    norms: list[float] = field(default_factory=list)  # ‖∇Ψ(θ_k)‖
    sums: list[float] = field(default_factory=list)  # Σα‖∇Ψ‖² so far
    descents: list[float] = field(
        default_factory=list
    )  # ⟨∇Ψ, Ĥ_k∇Ψ⟩/‖∇Ψ‖², where d̂_k = Ĥ_k g_k
    tops: list[float] = field(default_factory=list)  # ‖B_k‖
    etas: list[float] = field(default_factory=list)  # of A.1
    epsilons: list[float] = field(
        default_factory=list
    )  # √ε of A.2, for v = ∇Ψ
    end: list[Tensor] = field(default_factory=list)  # the last θ


def network(given: Problem) -> tuple[nn.Sequential, nn.Linear]:
    """The trained layer, tanh and the fixed one; and the trained one by itself."""
    first, last = (
        nn.Linear(INPUTS, HIDDEN, dtype=torch.float64),
        nn.Linear(HIDDEN, HIDDEN, bias=False, dtype=torch.float64),
    )
    with torch.no_grad():
        first.weight.copy_(given.start[:, :-1])
        first.bias.copy_(given.start[:, -1])
        last.weight.copy_(given.A)
    last.requires_grad_(False)
    return nn.Sequential(first, nn.Tanh(), last), first


def _theta(layer: nn.Linear) -> Tensor:
    """θ (h, m_0 + 1): the bias is the last column."""
    return torch.cat([layer.weight, layer.bias[:, None]], 1).detach()


def walk(given: Problem, rule: Rule, steps: int, seed: int) -> Path:
    """So many steps of the paper's SENG, in its own units, with a new U and a new Ω at each."""
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(
        devices=[]
    ):  # from whose seed the sketches are drawn
        torch.manual_seed(seed)
        model, trained = network(given)
        curvature = seng.Curvature(
            form="explicit",
            base=None,
            centred=False,
            samples=None,
            sketch=Rows(rule.rows),
            decay=0,
            relative_damping=False,
        )
        optimizer = seng.SENG(
            model,
            momentum=0,
            damping=rule.damping,
            refresh_every=1,
            recipe="paper",
            curvature=curvature,
            strict=True,
        )
    path, total = Path(), 0.0
    for k in range(steps):
        g = given.gradient(_theta(trained))
        alpha = optimizer.param_groups[0]["lr"] = rule.step_size(k)
        own = torch.randint(SAMPLES, (rule.samples,), generator=generator)
        with optimizer.curvature_batch():
            given.losses(model(given.X[own]), given.y[own]).mean().backward()
        # A batch as large as thousands of the 512 samples, drawn with replacement, is how often each of them is in it.
        chosen = torch.randint(SAMPLES, (rule.batch(k),), generator=generator)
        weights = torch.bincount(chosen, minlength=SAMPLES).double() / len(
            chosen
        )
        optimizer.zero_grad()
        (weights @ given.losses(model(given.X), given.y)).backward()
        optimizer.step()
        total += alpha * float(g @ g)
        path.norms.append(float(g.norm()))
        path.sums.append(total)
        _look(path, optimizer, g, rule)
    path.end.append(_theta(trained))
    return path


def _look(path: Path, optimizer: seng.SENG, g: Tensor, rule: Rule) -> None:
    """At the curvature that the step was made with."""
    (block,) = inspect(optimizer).states.values()
    basis, R = torch.linalg.qr(block.U.explicit().U)  # N (n, ϱ), of U's span
    sketched = block.omega(basis)
    error = sketched.T @ sketched - torch.eye(basis.shape[1], dtype=g.dtype)
    solve = block.at(rule.damping)
    path.descents.append(float(g @ solve(g) / rule.damping / (g @ g)))
    path.tops.append(float(torch.linalg.matrix_norm(R, 2)) ** 2)
    path.etas.append(float(torch.linalg.matrix_norm(error, 2)))
    path.epsilons.append(
        float((sketched.T @ block.omega(g) - basis.T @ g).norm() / g.norm())
    )
