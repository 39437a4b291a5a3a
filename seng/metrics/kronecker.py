"""The Kronecker metric: P = P_G ⊗ P_A (X ↦ P_G X P_A) from the second moments of what a layer saw.

    P_G = C_G^p, P_A = C_A^p     C_A = E Σ aaᵀ, C_G = E Σ ggᵀ     (`seng.metrics.factor`)

p = 1 is K-FAC's metric, p = 1/2 its square root. P is normalised to mean eigenvalue 1. By itself it
gives d = P⁻¹g; the damping then bounds its eigenvalues from below, by √λ of the mean on each side,
so that λ → ∞ is P = I. As the base of `seng.metrics.low_rank` it whitens U and g by P^{-½}.

    damp="tikhonov"    d = (G + √λ/π I)⁻¹ g (A + π√λ I)⁻¹,  π² = (tr A / n_A) / (tr G / n_G)

is K-FAC itself (Martens & Grosse 2015; for convolutions Grosse & Martens 2016) with dense factors,
A = C_A and G the mean of ggᵀ over samples and positions. Layers without factors have a diagonal
metric (`seng.metrics.kronecker`).

The diagonal metric of layers without factors: P = diag(v)^p, v = E u² over per-sample gradients.

p = 1/2 is Adam's root. P is normalised to mean 1; v below `FLOOR` of its mean counts as that.

No curvature: directions are gradients, and nothing is captured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.modules.conv import _ConvTransposeNd

from seng.distributed.team import Team
from seng.layers.sites import Site
from seng.linalg.implicit import Implicit
from seng.linalg.operators import Operator, Shape, product
from seng.metrics.curvature import Curvature
from seng.metrics.factor import (
    FLOOR,
    Factor,
    Moment,
    noise,
    relative_floor,
    updated,
)
from seng.metrics.metric import (
    TRUE,
    UNSAVED,
    Dims,
    LayerRefresh,
    Metric,
    Plan,
    PowerSolver,
    State,
    plan,
)


@dataclass(frozen=True)
class DiagonalPower:
    """P^e, one number per parameter."""

    weights: Tensor  # (n,)

    def __call__(self, z: Tensor) -> Tensor:
        return z * self.weights

    rows = __call__

    def of(self, U: Operator, rank: int) -> Operator:
        """P^e U."""
        return U.weighted(self.weights)


@dataclass(frozen=True)
class DiagonalState(State):
    """v, and how P is made from it."""

    v: Tensor  # (n,)
    power: float
    relative: bool = True
    graft: bool = False
    finite: Tensor = field(
        default=TRUE, metadata=UNSAVED
    )  # whether the last captures were

    form = "merged"
    base = "diagonal"

    def fits(self, shape: Shape) -> bool:
        return self.v.numel() == math.prod(shape)

    def to_power(self, exponent: float, damping: float = 0.0) -> DiagonalPower:
        """P^exponent; entries of v below `damping` count as that."""
        mean = self.v.mean()
        least = relative_floor(damping, self.relative, mean).clamp(
            FLOOR, self.v.numel()
        )
        unit = torch.where(mean > 0, mean, 1)
        P = torch.maximum(self.v / unit, least) ** self.power
        P = P / P.mean()
        return DiagonalPower(P**exponent)

    def at(self, damping: float) -> PowerSolver:
        return PowerSolver(self.to_power(-1.0, damping), self.graft)

    def fine(self) -> Tensor:
        return self.finite

    def spectrum(
        self, damping: float | None
    ) -> tuple[float, float, float | None]:
        mean = float(self.v.mean()) if self.relative else 1.0
        lam = None if damping is None else damping * mean
        return float(self.v.max()), float(self.v.sum()), lam


COLUMNS = 2  # of C_A's X for each of its rows, where there are more,
SAMPLES = 16  # and of at least so many samples
SHIFTS = 6  # that a factorization tries

Damp = Literal["floor", "tikhonov"]


@dataclass(frozen=True)
class KroneckerPower:
    """P^e = c(I + V_G diag(w_G) V_Gᵀ) ⊗ (I + V_A diag(w_A) V_Aᵀ)."""

    V_G: Tensor  # (h, n_G, r_G)
    V_A: Tensor  # (h, n_A, r_A)
    w_G: Tensor  # (h, r_G, 1)
    w_A: Tensor  # (h, 1, r_A)
    c: Tensor  # (h, 1, 1)

    @property
    def shape(self) -> Shape:
        """(h, n_G, n_A)."""
        return self.V_G.shape[0], self.V_G.shape[1], self.V_A.shape[1]

    def __call__(self, z: Tensor) -> Tensor:
        """P^e z (n,); at every step, so with as few calls as possible."""
        X = z.view(self.V_G.shape[0], self.V_G.shape[1], -1)
        X = torch.baddbmm(
            X, self.V_G, torch.bmm(self.V_G.mT, X).mul_(self.w_G)
        )
        X = torch.baddbmm(
            X, torch.bmm(X, self.V_A).mul_(self.w_A), self.V_A.mT
        )
        return X.mul_(self.c).reshape(-1)

    def rows(self, Y: Tensor) -> Tensor:
        """P^e of each row of Y (k, n)."""
        X = Y.unflatten(1, self.shape)
        X = X + self.V_G @ (self.w_G * (self.V_G.mT @ X))
        X = X + ((X @ self.V_A) * self.w_A) @ self.V_A.mT
        out: Tensor = (self.c * X).flatten(1)
        return out

    def of(self, U: Operator, rank: int) -> Operator:
        """P^e U: of factors where those of this rank are fewer numbers than columns."""
        _, n_G, n_A = self.shape
        factors = None
        if min(U.kappa, rank) * (n_G + n_A) < n_G * n_A:
            factors = U.factors()
        if factors is None:
            return U.mapped(self.rows)
        G = _along(factors.G, self.V_G, self.w_G, self.c)
        A = _along(factors.A, self.V_A, self.w_A.mT, torch.ones_like(self.c))
        return Implicit(G, A)


def _along(X: Tensor, V: Tensor, w: Tensor, c: Tensor) -> Tensor:
    """c(I + V diag(w) Vᵀ) along dimension 2 of X (ϱ, h, n, r), in X's precision."""
    rows = X.permute(1, 2, 0, 3).flatten(2).to(V.dtype)  # (h, n, ϱr)
    rows = c * (rows + V @ (w * (V.mT @ rows)))
    back: Tensor = rows.unflatten(2, (X.shape[0], X.shape[3])).permute(
        2, 0, 1, 3
    )
    return back.to(X.dtype)


@dataclass(frozen=True)
class KroneckerState(State):
    """C_G and C_A, and how P is made from them."""

    G: Factor
    A: Factor
    power: float
    noise: float = 0.0  # relative rounding error of gradients
    relative: bool = True  # whether λ is in units of the mean eigenvalue
    graft: bool = False
    finite: Tensor = field(
        default=TRUE, metadata=UNSAVED
    )  # whether the last captures were

    form = "merged"
    base = "kronecker"

    def fits(self, shape: Shape) -> bool:
        return (*self.G.V.shape[:2], self.A.V.shape[1]) == shape

    def to_power(
        self, exponent: float, damping: float = 0.0
    ) -> KroneckerPower:
        """P^exponent, eigenvalues of C_G ⊗ C_A below `damping` counting as that."""
        average = self.G.average * self.A.average
        least = relative_floor(damping, self.relative, average) ** 0.5
        kept_G, others_G = self.G.powers(self.power, self.noise, least)
        kept_A, others_A = self.A.powers(self.power, self.noise, least)
        of_G = self.G.mean(kept_G, others_G)
        of_A = self.A.mean(kept_A, others_A)
        mean = (of_G * of_A).mean()  # P's, over all groups
        w_G, c_G = _relative(self.G, kept_G**exponent, others_G**exponent)
        w_A, c_A = _relative(self.A, kept_A**exponent, others_A**exponent)
        c = (c_G * c_A / mean**exponent)[:, None, None]
        return KroneckerPower(
            self.G.V, self.A.V, w_G[:, :, None], w_A[:, None, :], c
        )

    def at(self, damping: float) -> PowerSolver:
        return PowerSolver(self.to_power(-1.0, damping), self.graft)

    def fine(self) -> Tensor:
        return self.finite

    def spectrum(
        self, damping: float | None
    ) -> tuple[float, float, float | None]:
        trace = float((self.G.trace * self.A.trace).sum())
        largest = float((self.G.s.amax(1) * self.A.s.amax(1)).max())
        mean = float(self.G.average * self.A.average) if self.relative else 1.0
        return largest, trace, None if damping is None else damping * mean


def _relative(
    factor: Factor, kept: Tensor, others: Tensor
) -> tuple[Tensor, Tensor]:
    """w and c of c(I + V diag(w) Vᵀ); where V is square there are no others: c = 1."""
    others = torch.ones_like(others) if factor.whole else others
    return kept / others[:, None] - 1, others


@dataclass(frozen=True)
class KroneckerInverse:
    """d = G⁻¹ g A⁻¹."""

    G: Tensor  # (n_G, n_G)
    A: Tensor  # (n_A, n_A)

    def __call__(self, g: Tensor) -> Tensor:
        return (self.G @ g.view(len(self.G), len(self.A)) @ self.A).reshape(-1)


@dataclass(frozen=True)
class TikhonovState(State):
    """K-FAC's dense factors."""

    G: Tensor  # (n_G, n_G)
    A: Tensor  # (n_A, n_A)

    form = "merged"
    base = "kronecker"

    def fits(self, shape: Shape) -> bool:
        return (1, len(self.G), len(self.A)) == shape

    def at(self, damping: float) -> KroneckerInverse:
        """(G + √λ/π I)⁻¹ and (A + π√λ I)⁻¹."""
        mean_G, mean_A = self.G.diagonal().mean(), self.A.diagonal().mean()
        pi = (mean_A / mean_G).sqrt()
        pi = torch.where(
            pi.isfinite() & (pi > 0), pi, 1.0
        )  # no gradients, no inputs
        root = damping**0.5
        return KroneckerInverse(
            shifted_inverse(self.G, root / pi),
            shifted_inverse(self.A, root * pi),
        )


def shifted_inverse(M: Tensor, shift: Tensor) -> Tensor:
    """(M + shift·I)⁻¹; a shift lost in rounding grows until a factorization exists."""
    eye = torch.eye(len(M), dtype=M.dtype, device=M.device)
    for _ in range(SHIFTS):
        L, info = torch.linalg.cholesky_ex(M + shift * eye)
        if not info:
            inverse = torch.cholesky_inverse(L)
            if bool(inverse.isfinite().all()):
                return inverse
        shift = torch.maximum(10 * shift, torch.finfo(M.dtype).eps * M.trace())
    return eye / shift


@dataclass(frozen=True)
class Kronecker(Metric):
    """P alone, or the base of low rank.

    `rank` leading directions are kept of each factor, all others being one constant.
    """

    power: float = 0.5
    rank: int = 128
    decay: float = 0.8
    relative: bool = True
    graft: bool = True
    damp: Damp = "floor"

    curvature: Curvature | None = None  # that it was made from

    @classmethod
    def of(cls, c: Curvature) -> Kronecker:
        """The metric alone that a curvature of rank 0 describes."""
        own = (
            float(c.power),
            c.base_rank,
            c.averaging,
            c.relative_damping,
            c.grafts,
        )
        return cls(*own, curvature=c)

    def plan(
        self,
        dims: Sequence[Dims],
        budget: int | None = None,
        pooled: bool = False,
    ) -> list[Plan]:
        if self.curvature is None:
            return [
                Plan(d.based(self.rank), "merged", 0, "dense factors")
                for d in dims
            ]
        return plan(dims, self.curvature, budget, pooled)

    @property
    def per_sample(self) -> bool:  # type: ignore[override]
        return self.damp == "floor"

    def refuses(self, site: Site) -> str | None:
        """Dense factors are for single layers with one group."""
        if self.damp == "floor":
            return None
        module = site.members[0].module
        if len(site.members) > 1:
            return "layers that share a parameter"
        if not site.factored or isinstance(module, _ConvTransposeNd):
            return type(module).__name__
        return "grouped convolution" if site.segments[0].shape[0] > 1 else None

    def accepts(self, state: Any, shape: Shape) -> State | None:
        dense = self.damp == "tikhonov"
        kinds = (TikhonovState,) if dense else (KroneckerState, DiagonalState)
        if not isinstance(state, kinds) or not state.fits(shape):
            return None
        if isinstance(state, TikhonovState):
            return state
        if state.power != self.power:
            return None
        return replace(state, relative=self.relative, graft=self.graft)

    def init(self, layer: LayerRefresh, team: Team) -> State:
        """δC + (1 − δ)C_new from the captures of all ranks."""
        old = layer.previous
        if self.damp == "tikhonov":
            return self._dense(layer, old)
        if layer.plan.base == "diagonal":
            return self._diagonal(layer, old, team)
        return self._factored(layer, old, team)

    def _factored(
        self, layer: LayerRefresh, old: Any, team: Team
    ) -> KroneckerState:
        seen_G = outputs(layer.U, team)
        draw = layer.generator("base")
        seen_A = inputs(layer.U, team, draw.initial_seed())
        fine = (
            seen_G.trace.isfinite() & seen_A.trace.isfinite()
        )  # both sides or none
        known = old is not None and old.base == "kronecker"
        G = self._side(seen_G, old.G if known else None, draw, fine)
        A = self._side(seen_A, old.A if known else None, draw, fine)
        precision = noise(layer.precision)
        options = self.power, precision, self.relative, self.graft
        return KroneckerState(G, A, *options, fine.all())

    def _side(
        self,
        seen: Moment,
        old: Factor | None,
        draw: torch.Generator,
        fine: Tensor,
    ) -> Factor:
        h, n, _ = seen.X.shape
        alike = old is not None and old.V.shape == (h, n, min(self.rank, n))
        before = old if alike else None
        return updated(before, seen, self.rank, self.decay, draw, fine)

    def _diagonal(
        self, layer: LayerRefresh, old: Any, team: Team
    ) -> DiagonalState:
        v = layer.U.row_norms() / _pooled(team)
        if team.pools:
            team.sum_([v], "adding up a base")
        known = (
            old is not None
            and old.base == "diagonal"
            and old.v.shape == v.shape
        )
        fine = v.isfinite().all()
        before = old.v if known else v
        mixed = self.decay * before + (1 - self.decay) * v
        v = torch.where(fine, mixed, before if known else 0)
        return DiagonalState(v, self.power, self.relative, self.graft, fine)

    def _dense(self, layer: LayerRefresh, old: Any) -> TikhonovState:
        """K-FAC's moments: A is summed over positions, G is their mean."""
        X, Y = layer.U.inputs()[0], layer.U.outputs()[0]  # (n_A, N), (n_G, N)
        # Float32, though a GPU keeps captures of autocast in bfloat16.
        A = product(X, X.T) / layer.samples
        G = product(Y, Y.T) * (layer.samples / max(1, layer.positions))
        if old is not None:
            G, A = old.G.lerp(G, 1 - self.decay), old.A.lerp(A, 1 - self.decay)
        return TikhonovState(G, A)


def _pooled(team: Team) -> int:
    """How many ranks' samples become one curvature."""
    return team.size if team.pools else 1


def outputs(U: Operator, team: Team) -> Moment:
    """C_G of all that was captured; G_i carries 1/√ϱ."""
    return Moment(U.outputs(), team, 1 / _pooled(team))


def inputs(U: Operator, team: Team, seed: int = 0) -> Moment:
    """C_A of so many samples, evenly spread, that it has COLUMNS for each row.

    Positions of an image are many and alike, and their second moment would cost more than the layer
    itself. Samples are left out rather than positions, of which those at the border would lose
    their share. The seed says which sample is the first; in float64 all are taken.
    """
    exact = U.dtype == torch.float64
    spare = 1 if exact else U.samples * U.kappa // (COLUMNS * U.shape[2])
    every = max(1, min(spare, U.samples // SAMPLES))
    X = U.inputs(slice(seed % every, None, every))
    scale = U.kappa / max(1, X.shape[2])  # Σ over positions, mean over samples
    return Moment(X, team, scale / _pooled(team))


NO_CURVATURE = "form='plain': no curvature"


class Plain(Metric):
    """The gradient itself."""

    captures = False

    def plan(
        self,
        dims: Sequence[Dims],
        budget: int | None = None,
        pooled: bool = False,
    ) -> list[Plan]:
        return [Plan(d, "plain", 0, NO_CURVATURE) for d in dims]

    def init(self, layer: LayerRefresh, team: Team) -> State:
        raise AssertionError("nothing is captured")
