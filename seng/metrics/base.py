"""P, the metric that takes the place of I: (UUᵀ + λP)⁻¹ where the paper has (UUᵀ + λI)⁻¹.

Low rank plus λI treats all that lies outside the span of U alike. P tells it apart, from the same captures:

    Kronecker   P = P_G ⊗ P_A (X ↦ P_G X P_A), P_G = C_G^p, P_A = C_A^p with C_A = E Σ aaᵀ, C_G = E Σ ggᵀ     (`factor`)
    Diagonal    P = diag(v)^p with v = E u², the second moment of the per-sample gradients

p = 1 is K-FAC's metric, p = 1/2 its square root (of the diagonal: Adam's). P is normalised to mean eigenvalue 1. All of
`seng.metrics.block` happens in whitened coordinates, Ũ = P^{-½}U and g̃ = P^{-½}g:

    λ(UUᵀ + λP)⁻¹g = P^{-½} λ(ŨŨᵀ + λI)⁻¹ g̃

so that λ is relative to the top eigenvalue there, and λ → ∞ leaves P⁻¹g.

P alone (`rank=0`) has no U for λ to act on. There λ bounds C from below, much as K-FAC's damping does: eigenvalues of C_G and
C_A below √λ of their mean count as that (of v: below λ). So λ → ∞ leaves P = I, which is SGD.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar, cast

import torch
from torch import Tensor

from seng.linalg.implicit import Implicit
from seng.linalg.lookup import Lookup
from seng.linalg.operators import HALF, Explicit, Merged, Operator, Shape, wide
from seng.linalg.windows import Windows
from seng.metrics.curvature import Metric
from seng.metrics.factor import FLOOR, Factor, Moment, Total, noise, updated

EXPONENTS = (-1.0, -0.5, 0.5)
ALONE = EXPONENTS[:1]  # what P alone needs
T = TypeVar("T", "Kronecker", "Diagonal")

COLUMNS = 2  # of C_A's X for each of its rows, where there are more,
SAMPLES = 16  # and of at least so many samples


Weights = dict[
    float, tuple[Tensor, ...]
]  # what P^e takes for each exponent that is kept


class Base(ABC):
    """P, through its powers."""

    power: float
    alone: bool
    weights: Weights

    @property
    def exponents(self) -> tuple[float, ...]:
        """Those that are kept."""
        return ALONE if self.alone else EXPONENTS

    @abstractmethod
    def times(self, X: Tensor, exponent: float) -> Tensor:
        """P^exponent X of X (…, h, n_G, n_A), for one of EXPONENTS."""

    @abstractmethod
    def tensors(self) -> list[Tensor]:
        """All that is kept."""

    @abstractmethod
    def white(self, U: Operator, rank: int | None = None) -> Operator:
        """P^{-½}U; `rank`: of the factors that are kept of it, where not all are."""

    @abstractmethod
    def spectrum(self) -> tuple[float, float, float]:
        """Of C itself, or v: the largest eigenvalue, the trace and the mean."""

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors())

    def vector(self, z: Tensor, shape: Shape, exponent: float) -> Tensor:
        """P^exponent z of z (n,)."""
        return self.times(z.view(shape), exponent).reshape(-1)

    def moved(self, U: Merged, old: Base) -> Merged:
        """A basis from the coordinates of an earlier P, in the precision that it has."""
        if not U.samples:  # P was alone, and has no such powers
            return U
        Y = self.times(
            old.times(U.Y.to(U.dtype).unflatten(1, U.shape), 0.5), -0.5
        ).flatten(1)
        return Merged.of(Y, U.shape, U.Y.dtype in HALF).scaled(U.scale)


@dataclass(frozen=True)
class Kronecker(Base):
    """P_G ⊗ P_A."""

    G: Factor
    A: Factor
    power: float
    noise: float = 0.0  # of gradients, by rounding
    least: float = 0.0  # what counts at least, of the eigenvalues of C_G ⊗ C_A
    relative: bool = True  # whether that is in units of their mean
    alone: bool = False  # whether there is no U beside it

    @cached_property
    def weights(self) -> Weights:  # type: ignore[override]
        """P_G^e = c_G(I + V_G diag(w_G) V_Gᵀ) and so for A: w_G (h, r, 1), w_A (h, 1, r) and c = c_G·c_A (h, 1, 1)."""
        least = (
            _least(self.least, self.relative, self.G.average * self.A.average) ** 0.5
        )
        sides = [
            (f, *f.powers(self.power, self.noise, least)) for f in (self.G, self.A)
        ]
        of_G, of_A = (f.mean(kept, others) for f, kept, others in sides)
        mean = (of_G * of_A).mean()  # P's, over all groups

        def of(exponent: float) -> tuple[Tensor, ...]:
            (w_G, c_G), (w_A, c_A) = (
                _relative(f, kept**exponent, others**exponent)
                for f, kept, others in sides
            )
            return (
                w_G[:, :, None],
                w_A[:, None, :],
                (c_G * c_A / mean**exponent)[:, None, None],
            )

        return {exponent: of(exponent) for exponent in self.exponents}

    def times(self, X: Tensor, exponent: float) -> Tensor:
        (w_G, w_A, c), V_G, V_A = self.weights[exponent], self.G.V, self.A.V
        if X.dim() == 3:  # at every step: as few calls as possible
            X = torch.baddbmm(X, V_G, torch.bmm(V_G.mT, X).mul_(w_G))
            return torch.baddbmm(X, torch.bmm(X, V_A).mul_(w_A), V_A.mT).mul_(c)
        X = X + V_G @ (w_G * (V_G.mT @ X))
        return c * (X + ((X @ V_A) * w_A) @ V_A.mT)

    def tensors(self) -> list[Tensor]:
        kept = [t for f in (self.G, self.A) for t in (f.V, f.s, f.rest, f.count)]
        return kept + [t for exponent in self.exponents for t in self.weights[exponent]]

    def spectrum(self) -> tuple[float, float, float]:
        trace = float((self.G.trace * self.A.trace).sum())
        largest = float((self.G.s.amax(1) * self.A.s.amax(1)).max())
        return largest, trace, float(self.G.average * self.A.average)

    def white(self, U: Operator, rank: int | None = None) -> Operator:
        """Of factors G_i → P_G^{-½}G_i and A_i → P_A^{-½}A_i; column by column where these are fewer numbers."""
        _, n_G, n_A = U.shape
        if (
            isinstance(U, Implicit | Windows)
            and min(U.rank, rank or U.rank) * (n_G + n_A) < n_G * n_A
        ):
            factors = U.implicit() if isinstance(U, Windows) else U
            w_G, w_A, c = self.weights[-0.5]
            G = _along(factors.G, self.G.V, w_G, c)
            return Implicit(G, _along(factors.A, self.A.V, w_A.mT, torch.ones_like(c)))
        return _columns(self, U)


@dataclass(frozen=True)
class Diagonal(Base):
    """diag(v)^p, normalised."""

    v: Tensor  # (n,)
    power: float
    least: float = 0.0  # as Kronecker's, of v
    relative: bool = True
    alone: bool = False

    @cached_property
    def weights(self) -> Weights:  # type: ignore[override]
        """P^e."""
        mean = self.v.mean()
        least = _least(self.least, self.relative, mean).clamp(FLOOR, self.v.numel())
        P = torch.maximum(self.v / torch.where(mean > 0, mean, 1), least) ** self.power
        P = P / P.mean()
        return {exponent: (P**exponent,) for exponent in self.exponents}

    def times(self, X: Tensor, exponent: float) -> Tensor:
        return X * self.weights[exponent][0].view(X.shape[-3:])

    def tensors(self) -> list[Tensor]:
        return [self.v, *(self.weights[exponent][0] for exponent in self.exponents)]

    def spectrum(self) -> tuple[float, float, float]:
        return float(self.v.max()), float(self.v.sum()), float(self.v.mean())

    def white(self, U: Operator, rank: int | None = None) -> Operator:
        if not isinstance(U, Lookup):
            return _columns(self, U)
        rows = self.weights[-0.5][0].view(U.shape)[0][U.tokens]
        return replace(U, G=(U.G * rows).to(U.G.dtype))


def _least(damping: float, relative: bool, mean: Tensor) -> Tensor:
    """λ in units of the mean eigenvalue; an absolute one is above any that are 0."""
    lam = torch.full_like(mean, damping)
    return (
        lam
        if relative
        else torch.where(mean > 0, lam / torch.where(mean > 0, mean, 1), torch.inf)
    )


def _relative(factor: Factor, kept: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """w and c of c(I + V diag(w) Vᵀ); of a whole V there are no others, and c is 1."""
    others = torch.ones_like(others) if factor.whole else others
    return kept / others[:, None] - 1, others


def _along(X: Tensor, V: Tensor, w: Tensor, c: Tensor) -> Tensor:
    """c(I + V diag(w) Vᵀ) along dimension 2 of X (ϱ, h, n, r), in X's precision."""
    rows = X.permute(1, 2, 0, 3).flatten(2).to(V.dtype)  # (h, n, ϱr)
    rows = c * (rows + V @ (w * (V.mT @ rows)))
    out: Tensor = (
        rows.unflatten(2, (X.shape[0], X.shape[3])).permute(2, 0, 1, 3).to(X.dtype)
    )
    return out


def _columns(base: Base, U: Operator) -> Operator:
    X = U.explicit().U.T  # (ϱ, n)
    return Explicit(
        base.times(X.to(wide(X.dtype)).unflatten(1, U.shape), -0.5).flatten(1).T,
        U.shape,
    )


def renewed(
    old: Base | None,
    U: Operator,
    *,
    kronecker: bool,
    power: float,
    rank: int,
    decay: float,
    precision: torch.dtype,
    generator: torch.Generator,
    total: Total,
    ranks: int,
    alone: bool,
) -> tuple[Kronecker | Diagonal, Tensor]:
    """P after another refresh, from the captured U of this rank, and whether that was finite; `total` adds up over the ranks.

    `precision` is the least that gradients were worked out in. What ranks have captured is averaged, as their gradients are.
    """
    if not kronecker:
        v = U.row_norms() / ranks
        total([v])
        known = isinstance(old, Diagonal) and old.v.shape == v.shape
        before = cast(Diagonal, old).v if known else v
        fine = v.isfinite().all()
        P = Diagonal(
            torch.where(fine, decay * before + (1 - decay) * v, before if known else 0),
            power,
            alone=alone,
        )
        return _ready(P), fine
    assert isinstance(U, Implicit | Windows)
    seen = _outputs(U, total, ranks), _inputs(U, total, ranks, generator.initial_seed())
    fine = seen[0].trace.isfinite() & seen[1].trace.isfinite()  # both sides or none

    def factor(side: Moment, before: Factor | None) -> Factor:
        alike = before is not None and before.V.shape == (
            *side.X.shape[:2],
            min(rank, side.X.shape[1]),
        )
        return updated(before if alike else None, side, rank, decay, generator, fine)

    G, A = (old.G, old.A) if isinstance(old, Kronecker) else (None, None)
    return _ready(
        Kronecker(
            factor(seen[0], G), factor(seen[1], A), power, noise(precision), alone=alone
        )
    ), fine.all()


def _ready(P: T) -> T:
    """On a GPU all of P is worked out now, and not first inside a recording, which would use that memory again."""
    if (P.v if isinstance(P, Diagonal) else P.G.V).is_cuda:
        P.tensors()
    return P


def _outputs(U: Implicit | Windows, total: Total, ranks: int = 1) -> Moment:
    """C_G of all that was captured; G_i carries 1/√ϱ."""
    G = U.G if isinstance(U, Implicit) else (U.G * U.scale).flatten(2)[:, None]
    return Moment(_side_by_side(G), total, 1 / ranks)


def _inputs(
    U: Implicit | Windows, total: Total, ranks: int = 1, seed: int = 0
) -> Moment:
    """C_A of so many samples, evenly spread, that it has COLUMNS for each row; in float64 of all.

    Positions of an image are many and alike, and their second moment would cost more than the layer itself. It is samples that
    are left out: of positions, those at the border would no longer have their share. The seed says which is the first.
    """
    spare = (
        1 if U.dtype == torch.float64 else U.samples * U.rank // (COLUMNS * U.shape[2])
    )
    every = max(1, min(spare, U.samples // SAMPLES))
    taken = slice(seed % every, None, every)
    X = _side_by_side(U.A[taken]) if isinstance(U, Implicit) else U.inputs(taken)[None]
    return Moment(
        X, total, U.rank / max(1, X.shape[2]) / ranks
    )  # Σ over positions, mean over samples


def _side_by_side(X: Tensor) -> Tensor:
    """(ϱ, h, n, κ) -> (h, n, ϱκ)."""
    return X.permute(1, 2, 0, 3).flatten(2)


def numbers(shape: Shape, metric: Metric, rank: int, alone: bool) -> int:
    """How many are kept of one layer's P."""
    h, n_G, n_A = shape
    r_G, r_A = min(rank, n_G), min(rank, n_A)
    exponents = len(ALONE if alone else EXPONENTS)
    each = 1 + exponents
    kronecker = h * (n_G * r_G + n_A * r_A + each * (r_G + r_A) + 2 + exponents) + 2
    return {"identity": 0, "kronecker": kronecker, "diagonal": each * math.prod(shape)}[
        metric
    ]


def kept(base: Base | None, metric: str, power: float) -> bool:
    """Whether what was loaded is what is asked for now."""
    if base is None or metric == "identity":
        return base is None and metric == "identity"
    return (metric == "kronecker" or isinstance(base, Diagonal)) and base.power == power
