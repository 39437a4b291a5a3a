"""Metrics of one block per layer that need no U: the Kronecker metric, and K-FAC's.

The Kronecker metric is P = P_G ⊗ P_A (X ↦ P_G X P_A) from the second moments of what a layer saw.

    P_G = C_G^p, P_A = C_A^p     C_A = E Σ aaᵀ, C_G = E Σ ggᵀ     (`seng.metrics.factor`)

p = 1 is K-FAC's metric, p = 1/2 its square root. Layers without factors have a diagonal one,

    P = diag(v)^p                v = E u² over per-sample gradients

whose p = 1/2 is Adam's root. Eigenvalues count as at least `floor` of their mean, on each side; v
as at least floor² of its. P is normalised to mean eigenvalue 1. By itself it gives d = P⁻¹g, as
long as g. As the base of `seng.metrics.low_rank` it whitens U by P^{-½}.

    d = (G + √λ/π I)⁻¹ g (A + π√λ I)⁻¹,  π² = (tr A / n_A) / (tr G / n_G)

is K-FAC itself (Martens & Grosse 2015; for convolutions Grosse & Martens 2016) with dense factors,
A = C_A and G the mean of ggᵀ over samples and positions.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.conv import _ConvTransposeNd

from seng.distributed.sharded import Place
from seng.distributed.team import Team
from seng.layers.sites import Site
from seng.linalg.implicit import Implicit
from seng.linalg.operators import Drawn, Operator, Shape, product
from seng.metrics.curvature import Kronecker as Options
from seng.metrics.factor import WHAT, Factor, Moment, noise, updated
from seng.metrics.metric import (
    LEAST,
    UNSAVED,
    Dims,
    Draw,
    LayerRefresh,
    Metric,
    Plan,
    PowerSolver,
    State,
)
from seng.metrics.sharded_power import sharded

SHIFTS = 6  # that a factorization tries


@dataclass(frozen=True, kw_only=True)
class PowerState(State):
    """C, and how P = C^p is made from it."""

    power: float
    floor: float
    # Where a spread layer's numbers lie; None: each rank has all.
    place: Any = field(default=None, metadata=UNSAVED)

    form = "power"

    @abstractmethod
    def to_power(self, exponent: float) -> Any:
        """P^exponent of whole vectors."""

    def to_local_power(self, exponent: float) -> Any:
        """P^exponent of what this rank has of a vector."""
        return self.spread(self.to_power(exponent))

    def spread(self, power: Any) -> Any:
        """A power of whole vectors as one of what this rank has of them."""
        return power if self.place is None else power.spread(self.place)

    @abstractmethod
    def summary(self) -> tuple[Tensor, Tensor]:
        """C's largest eigenvalue, and its trace."""

    def at(self, damping: float) -> PowerSolver:
        return PowerSolver(self.to_power(-1.0))

    def fine(self) -> Tensor:
        _, trace = self.summary()
        return trace.isfinite()

    def spectrum(self, damping: float | None) -> tuple[Any, Any, Any]:
        largest, trace = self.summary()
        return float(largest), float(trace), None


@dataclass(frozen=True)
class DiagonalPower:
    """P^e, one number per parameter."""

    weights: Tensor  # (n,)

    def __call__(self, z: Tensor) -> Tensor:
        return z * self.weights

    rows = __call__

    def spread(self, place: Place) -> DiagonalPower:
        """The same of this rank's numbers."""
        return DiagonalPower(place.cut(self.weights))

    def of(self, U: Operator) -> Operator:
        """P^e U."""
        return U.weighted(self.weights)


@dataclass(frozen=True)
class DiagonalState(PowerState):
    """v in the place of C."""

    v: Tensor  # (n,)

    base = "diagonal"

    def fits(self, shape: Shape) -> bool:
        return self.v.numel() == math.prod(shape)

    def summary(self) -> tuple[Tensor, Tensor]:
        return self.v.max(), self.v.sum()

    def to_power(self, exponent: float) -> DiagonalPower:
        mean = self.v.mean()
        C = self.v / torch.where(mean > 0, mean, 1)
        P = C.clamp_min(self.floor**2) ** self.power
        return DiagonalPower((P / P.mean()) ** exponent)


@dataclass(frozen=True)
class KroneckerPower:
    """P^e = c(I + V_G diag(w_G) V_Gᵀ) ⊗ (I + V_A diag(w_A) V_Aᵀ)."""

    V_G: Tensor  # (h, n_G, r_G)
    V_A: Tensor  # (h, n_A, r_A)
    w_G: Tensor  # (h, r_G, 1)
    w_A: Tensor  # (h, 1, r_A)
    c: Tensor  # (h, 1, 1)
    # V diag(w) Vᵀ (h, n, n) of sides that are kept whole.
    D_G: Tensor | None = None
    D_A: Tensor | None = None

    def __call__(self, z: Tensor) -> Tensor:
        """P^e z (n,); at every step, so with as few calls as possible."""
        h, n_G, _ = self.V_G.shape
        X = z.view(h, n_G, -1)
        X = _before(X, self.V_G, self.w_G, self.D_G)
        return self._by_inputs(X).mul_(self.c).reshape(-1)

    def _by_inputs(self, X: Tensor) -> Tensor:
        """Rows of X (h, N, n_A) times I + V_A diag(w_A) V_Aᵀ."""
        return _along(X, self.V_A, self.w_A, self.D_A)

    spread = sharded  # the same of this rank's numbers

    def beside(self, Z: Operator) -> Beside | None:
        """P^e z − Zb by products that both share, for a Z of factors."""
        if Z.form != "implicit" or Z.values.dtype != self.V_G.dtype:
            return None
        right = torch.cat([self.V_A, Z.inputs()], 2)
        down = (self.V_G * self.w_G.mT).mT.contiguous()
        outputs = Z.outputs().contiguous()
        scaled = self.w_A * self.c
        return Beside(self.V_G, down, right, outputs, scaled, self.c, Z.kappa)

    def rows(self, Y: Tensor) -> Tensor:
        """P^e of each row of Y (k, n)."""
        h, n_G, _ = self.V_G.shape
        X = Y.view(len(Y) * h, n_G, -1)
        outputs = self.V_G, self.w_G, self.D_G
        X = _before(X, *[_repeated(t, len(Y)) for t in outputs])
        X = X.view(len(Y), h, n_G, -1).transpose(0, 1).flatten(1, 2)
        X = self._by_inputs(X).mul_(self.c)
        return X.view(h, len(Y), -1).transpose(0, 1).flatten(1)

    def of(self, U: Operator) -> Operator:
        """P^e U: of factors where those are fewer numbers than columns."""
        _, n_G, n_A = U.shape
        fewer = U.kappa * (n_G + n_A) < n_G * n_A
        if not (fewer and U.factored):
            return U.mapped(self.rows)
        return U.through(self._of_factors)

    def _of_factors(self, U: Operator) -> Operator:
        factors: Any = U.factors()
        G = _along_factors(factors.G, self.V_G, self.w_G.mT, self.D_G)
        A = _along_factors(factors.A, self.V_A, self.w_A, self.D_A)
        return Implicit(G * self.c[None].to(G.dtype), A)


@dataclass(frozen=True)
class Beside:
    """P^e z and Zᵀz, then P^e z − Zb, for u_i = G_i A_iᵀ in Z: two products with all columns

    [V_A, A] in place of four with each.
    """

    V_G: Tensor  # (h, n_G, r_G)
    down: Tensor  # diag(w_G) V_Gᵀ, (h, r_G, n_G)
    right: Tensor  # [V_A, A], (h, n_A, r_A + ϱκ)
    G: Tensor  # (h, n_G, ϱκ)
    scaled: Tensor  # c·w_A, (h, 1, r_A)
    c: Tensor  # (h, 1, 1)
    kappa: int

    def sums(self, z: Tensor) -> list[Tensor]:
        """Zᵀz (ϱ,), and z[V_A, A]."""
        h, n_G, _ = self.G.shape
        R = torch.bmm(z.view(h, n_G, -1), self.right)
        columns = R[..., self.scaled.shape[2] :]
        each = torch.linalg.vecdot(columns, self.G, dim=1).sum(0)
        if self.kappa > 1:
            each = each.view(-1, self.kappa).sum(1)
        return [each, R]

    def __call__(self, z: Tensor, b: Tensor, R: Tensor) -> Tensor:
        """P^e z − Zb."""
        X = z.view(len(R), R.shape[1], -1)
        X = torch.baddbmm(X, self.V_G, torch.bmm(self.down, X)).mul_(self.c)
        S = R[..., : self.scaled.shape[2]]
        S = torch.baddbmm(S, self.V_G, torch.bmm(self.down, S))
        if self.kappa > 1:
            b = b.repeat_interleave(self.kappa)
        weights = torch.cat([S.mul_(self.scaled), self.G * -b], 2)
        return X.baddbmm_(weights, self.right.mT).view(-1)


def _before(X: Tensor, V: Any, w: Any, D: Any) -> Tensor:
    """I + V diag(w) Vᵀ = I + D times X (h, n, N)."""
    if D is None:
        return torch.baddbmm(X, V, torch.bmm(V.mT, X).mul_(w))
    return torch.baddbmm(X, D, X)


def _along(X: Tensor, V: Tensor, w: Tensor, D: Tensor | None) -> Tensor:
    """Rows of X (h, N, n) times I + V diag(w) Vᵀ = I + D."""
    if D is None:
        return torch.baddbmm(X, torch.bmm(X, V).mul_(w), V.mT)
    return torch.baddbmm(X, X, D)


def _along_factors(
    X: Tensor, V: Tensor, w: Tensor, D: Tensor | None
) -> Tensor:
    """The same along dimension 2 of X (ϱ, h, n, r), in X's precision."""
    samples, h, n, r = X.shape
    rows = X.permute(1, 0, 3, 2).reshape(h, -1, n)
    rows = _along(rows.to(V.dtype), V, w, D).to(X.dtype)
    return rows.view(h, samples, r, n).permute(1, 0, 3, 2)


def _repeated(X: Any, count: int) -> Any:
    """X (h, …) so many times, one after the other."""
    if X is None:
        return None
    return X.expand(count, *X.shape).flatten(0, 1)


@dataclass(frozen=True)
class KroneckerState(PowerState):
    """C = C_G ⊗ C_A."""

    G: Factor
    A: Factor
    noise: float = 0.0  # relative rounding error of gradients

    base = "kronecker"

    def fits(self, shape: Shape) -> bool:
        own = *self.G.V.shape[:2], self.A.V.shape[1]
        return own == shape

    def summary(self) -> tuple[Tensor, Tensor]:
        largest = self.G.s.amax(1) * self.A.s.amax(1)  # of each group
        trace = self.G.trace * self.A.trace
        return largest.max(), trace.sum()

    def to_power(self, exponent: float) -> KroneckerPower:
        how = self.power, self.floor, self.noise
        G, mean_G = self.G.powers(*how)
        A, mean_A = self.A.powers(*how)
        mean = (mean_G * mean_A).mean()  # P's, over all groups
        w_G, c_G = _relative(G**exponent)
        w_A, c_A = _relative(A**exponent)
        c = c_G * c_A / mean**exponent
        V_G, V_A = self.G.V, self.A.V
        whole = _whole(V_G, w_G), _whole(V_A, w_A)
        return KroneckerPower(V_G, V_A, w_G.mT, w_A, c, *whole)


def _whole(V: Tensor, w: Tensor) -> Tensor | None:
    """V diag(w) Vᵀ where V has all directions: one product with it does for two with V."""
    return (V * w) @ V.mT if V.shape[1] == V.shape[2] else None


def _relative(e: Tensor) -> tuple[Tensor, Tensor]:
    """w and c of c(I + V diag(w) Vᵀ), from V's eigenvalues and the one of all others (h, r + 1)."""
    kept = e[:, None, :-1]
    c = e[:, None, -1:]
    return kept / c - 1, c


class Kronecker(Metric):
    """P alone, or the base of low rank.

    `rank` leading directions are kept of each factor, all others being one constant.
    """

    curvature: Options
    makes = PowerState

    def __init__(self, asked: Options) -> None:
        self.curvature = asked

    def plan_of(self, d: Dims) -> Plan:
        d = d.based(self.curvature.of(d.convolution).rank)
        return Plan(d, "power", 0, "its Kronecker factors alone")

    def keeps_less(self, first: bool) -> bool:
        return not first

    def keep(
        self, U: Operator, dims: Dims, generator: Draw, samples: int = 1
    ) -> Operator:
        """Drawn columns of all factors, and the first samples."""
        if not (dims.factored and U.factored):
            return U
        return drawn(U, samples, generator("base"))

    def accepts(self, state: Any, convolution: bool = False) -> State | None:
        known: Any = super().accepts(state)
        if known is None:
            return None
        asked = self.curvature.of(convolution)
        if known.power != asked.power:
            return None
        return replace(known, floor=asked.floor)  # type: ignore[no-any-return]

    def init(self, layer: LayerRefresh, team: Team) -> State:
        """δC + (1 − δ)C_new from the captures of all ranks."""
        d = layer.plan.dims
        c = self.curvature.of(d.convolution)
        options: Any = {
            "power": c.power,
            "floor": c.floor,
            "place": layer.place,
        }
        old = layer.previous
        decay = c.decay
        if d.base == "diagonal":
            v = layer.U.row_norms() / team.size
            team.sum_([v], WHAT)
            before = getattr(old, "v", None)
            if before is not None:
                v = before.lerp(v, 1 - decay)
            return DiagonalState(v, **options)
        draw = layer.generator("base")
        seen_G, seen_A = moments(layer.U, team, draw)
        G = updated(getattr(old, "G", None), seen_G, c.rank, decay, draw)
        A = updated(getattr(old, "A", None), seen_A, c.rank, decay, draw)
        return KroneckerState(G, A, noise(layer.precision), **options)


def moments(
    U: Any, team: Team, draw: torch.Generator
) -> tuple[Moment, Moment]:
    """Σ_positions E ggᵀ and E aaᵀ."""
    if not U.drawn:
        U = drawn(U, 0, draw)
    # U's columns are u_i/√ϱ: the mean over samples is in G, that of A is taken here.
    samples = max(1, U.samples)
    share = 1 / team.size
    return Moment(U.G, team, share), Moment(U.A, team, share / samples)


def drawn(U: Any, first: int, draw: torch.Generator) -> Drawn:
    """The first samples, and of the factors a column for each row; in float64 all of them.

    Positions of an image are many and alike, and their second moment would cost more than the layer
    itself. The columns are drawn from all samples and positions alike, so that those at the border
    keep their share.
    """
    samples, kappa = U.samples, U.kappa
    N = samples * kappa
    _, n_G, n_A = U.shape
    sides = []
    for side, n in ((U.outputs, n_G), (U.inputs, n_A)):
        enough = max(LEAST, n)
        if enough >= N or U.dtype == torch.float64:
            sides.append(side())
            continue
        device = U.values.device
        places = torch.randint(N, (enough,), generator=draw, device=device)
        X = side((places // kappa, places % kappa))
        sides.append(X * (N / enough) ** 0.5)
    G, A = sides
    return Drawn(U.first(first).copied(), G, A, samples)


@dataclass(frozen=True)
class KroneckerInverse:
    """d = G⁻¹ g A⁻¹."""

    G: Tensor  # (n_G, n_G)
    A: Tensor  # (n_A, n_A)

    def __call__(self, g: Tensor) -> Tensor:
        X = g.view(-1, len(self.A))
        return (self.G @ X @ self.A).reshape(-1)


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
        mean_G = self.G.diagonal().mean()
        mean_A = self.A.diagonal().mean()
        pi = (mean_A / mean_G).sqrt()
        usable = pi.isfinite() & (pi > 0)  # no gradients, no inputs
        pi = torch.where(usable, pi, 1.0)
        root = damping**0.5
        return KroneckerInverse(
            shifted_inverse(self.G, root / pi),
            shifted_inverse(self.A, root * pi),
        )


def shifted_inverse(M: Tensor, shift: Tensor) -> Tensor:
    """(M + shift·I)⁻¹; a shift lost in rounding grows until a factorization exists."""
    eye = torch.ones_like(M[0]).diag()
    for _ in range(SHIFTS):
        L, info = torch.linalg.cholesky_ex(M + shift * eye)
        if not info:
            inverse = torch.cholesky_inverse(L)
            if inverse.isfinite().all():
                return inverse
        least = torch.finfo(M.dtype).eps * M.trace()
        shift = torch.maximum(10 * shift, least)
    return eye / shift


@dataclass(frozen=True)
class Tikhonov(Metric):
    """K-FAC's metric, of single layers with one group."""

    decay: float = 0.95

    per_sample = False
    makes = TikhonovState

    def plan_of(self, d: Dims) -> Plan:
        return Plan(d.based(max(d.shape)), "merged", 0, "dense factors")

    def refuses(self, site: Site) -> str | None:
        module = site.members[0].module
        if len(site.members) > 1:
            return "layers that share a parameter"
        if not site.factored or isinstance(module, _ConvTransposeNd):
            return type(module).__name__
        groups = site.segments[0].shape[0]
        return "grouped convolution" if groups > 1 else None

    def init(self, layer: LayerRefresh, team: Team) -> State:
        """K-FAC's moments: A is summed over positions, G is their mean."""
        old: Any = layer.previous
        X = layer.U.inputs()[0]  # (n_A, N)
        Y = layer.U.outputs()[0]  # (n_G, N)
        # Float32, though a GPU keeps captures of autocast in bfloat16.
        A = product(X, X.T) / layer.samples
        scale = layer.samples / max(1, layer.positions)
        G = product(Y, Y.T) * scale
        if old is not None:
            new = 1 - self.decay
            G = old.G.lerp(G, new)
            A = old.A.lerp(A, new)
        return TikhonovState(G, A)
