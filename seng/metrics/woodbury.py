"""Woodbury's formula, the paper's step: λ(UUᵀ + λI)⁻¹g without a matrix of size n.

    d = g − Ub,   (λI + ΞᵀΞ) b = Ξᵀξ,   Ξ = ΩU, ξ = Ωg                    (eqs. 8, 9, 12, 13 and 24)

d is g itself for λ → ∞. With a base P in place of I it takes one product with P⁻¹,

    λ(UUᵀ + λP)⁻¹g = P⁻¹g − Zb,   (λI + K) b = Zᵀg,   Z = P⁻¹U, K = UᵀP⁻¹U

and d is scaled to the length of g, so that the learning rate carries over.

The system is solved as (I + K/λ)b = Ξᵀξ/λ with K = ΞᵀΞ: it is well scaled for every λ.

What SENG keeps of a layer between refreshes: U, its Gram, and the base P that it lies over.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from seng.gpu.recorder import Run, directly, send
from seng.linalg.centred import Centred
from seng.linalg.numerics import deviation, eigh, inverse, widest
from seng.linalg.operators import Operator, Shape
from seng.linalg.sketch import IDENTITY, Omega
from seng.metrics.metric import (
    UNSAVED,
    State,
    ratio,
    tensors_of,
)

# What each layer has of a sum (Uᵀg first) -> the sums, over all that share b
Pool = Callable[[list[list[Tensor]]], list[list[Tensor]]]


@dataclass(frozen=True)
class LowRankSolver:
    """λ(UUᵀ + λP)⁻¹g for one layer at one λ."""

    U: Operator
    omega: Omega
    Xi: Operator  # ΩU
    lam: Tensor  # ()
    inverse: Tensor  # (λI + K)⁻¹; not a number where there is none
    base: Any  # P⁻¹; None: I
    failures: Tensor  # counts the solves that fell back to the plain gradient
    # Whether d is scaled to g here: over P, but for a mean over ranks.
    grafts: bool
    beside: Any = None  # P⁻¹ and U in one pass, where they share products

    def __call__(self, g: Tensor) -> Tensor:
        (d,) = together([self], [g])
        return d

    @property
    def basis(self) -> tuple[Tensor, Tensor] | None:
        """Y and scale of U = scale·Yᵀ, where d = g − Ub is all there is to do."""
        plain = self.omega == IDENTITY and self.base is None
        return self.U.basis if plain else None

    def project(self, z: Tensor) -> Tensor:
        """Ξᵀξ."""
        return self.Xi.rmv(self.omega(z))

    def sums(self, g: Tensor) -> list[Tensor]:
        """Ξᵀξ, and what P⁻¹g needs of it or of other ranks."""
        if self.beside is not None:
            return self.beside.sums(g)  # type: ignore[no-any-return]
        of_base = getattr(self.base, "sums", None)  # of spread parameters
        c = self.project(g)
        return [c] if of_base is None else [c, *of_base(g)]

    def corrected(self, g: Tensor, b: Tensor, rest: list[Tensor]) -> Tensor:
        """P⁻¹g − Ub, with what `sums` gave beside Ξᵀξ."""
        if self.beside is not None:
            return self.beside(g, b, *rest)  # type: ignore[no-any-return]
        d = g if self.base is None else self.base(g, *rest)
        return self.U.subtracted(d, b)

    def coefficients(self, c: Tensor) -> Tensor:
        """b from c = Ξᵀξ; 0 where it is not finite."""
        return coefficients(self.inverse, c)[0]


def coefficients(inverse: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """b from c = Ξᵀξ (…, ϱ), 0 where it is not finite, and where that is (…)."""
    b = (inverse @ c.to(inverse.dtype)[..., None])[..., 0]
    failed = ~b.isfinite().all(-1)
    return b.masked_fill(failed[..., None], 0).to(c.dtype), failed


def together(
    solvers: Sequence[LowRankSolver],
    gs: Sequence[Tensor],
    pool: Pool = list,
) -> list[Tensor]:
    """P⁻¹g − Zb of each layer; P⁻¹g where b is not finite, which is counted.

    Over P as long as g, unless that waits for a mean over ranks. In float64 over λI refined once:
    g may lie nearly in the span of U, and the difference cancels.
    """
    ds, failed = _corrected(solvers, gs, pool)
    double = gs[0].dtype == torch.float64
    if double and all(s.U.exact and s.base is None for s in solvers):
        rests = []
        pairs = zip(solvers, ds, strict=True)
        cs = pool([[s.project(d)] for s, d in pairs])
        for s, g, d, (c,), bad in zip(
            solvers, gs, ds, cs, failed, strict=True
        ):
            rest = g - d - s.U.mv(c / s.lam)  # of (I + UΞᵀΩ/λ) d = g
            # An inverse of zeros: no curvature.
            fine = rest.isfinite().all() & s.inverse.any()
            rests.append(torch.where(fine & ~bad, rest, 0))
        more, _ = _corrected(solvers, rests, pool)
        ds = [d + m for d, m in zip(ds, more, strict=True)]
    torch._foreach_add_([s.failures for s in solvers], failed)
    if solvers[0].grafts:  # as all do
        _graft(ds, gs, pool)
    return ds


def _graft(ds: list[Tensor], gs: Sequence[Tensor], pool: Pool) -> None:
    """Each d becomes as long as its g."""
    lengths = torch.stack(torch._foreach_norm([*ds, *gs]))
    if pool is not list:  # some are spread over ranks
        # In a precision where none underflows.
        squares = lengths.to(widest(lengths)).square().view(2, -1)
        sums = pool([[pair] for pair in squares.unbind(1)])
        added = torch.stack([pair for (pair,) in sums], 1)
        lengths = added.sqrt().to(lengths.dtype)
    scales = ratio(*lengths.view(2, -1))
    torch._foreach_mul_(ds, scales.unbind())


def _corrected(
    solvers: Sequence[LowRankSolver], gs: Sequence[Tensor], pool: Pool
) -> tuple[list[Tensor], list[Tensor]]:
    """P⁻¹g − Ub of each layer, and whether b is not finite."""
    ds = list(gs)
    failed = list(gs)
    sums = pool([s.sums(g) for s, g in zip(solvers, gs, strict=True)])
    for same, cores in by_size([s.inverse for s in solvers]):
        c = torch.stack([sums[i][0] for i in same])
        for i, b, bad in zip(same, *coefficients(cores, c), strict=True):
            g = gs[i]
            ds[i] = solvers[i].corrected(g, b.to(g.dtype), sums[i][1:])
            failed[i] = bad
    return ds, failed


def by_size(matrices: Sequence[Tensor]) -> Iterator[tuple[list[int], Tensor]]:
    """Those that can be worked on at once: their places, and all of them (L, m, m)."""
    alike: defaultdict[object, list[int]] = defaultdict(list)
    for i, K in enumerate(matrices):
        alike[len(K), K.dtype, K.device].append(i)
    for places in alike.values():
        yield places, torch.stack([matrices[i] for i in places])


def solvers_of(
    states: Sequence[Any], dampings: Sequence[float], run: Run = directly
) -> list[LowRankSolver]:
    """The solver of each state at its λ; Grams of one size are factorized at once."""
    found: list[Any] = [None] * len(states)
    for same, K in by_size([state.gram for state in states]):
        top = torch.stack([states[i].top for i in same])
        given = [dampings[i] for i in same]
        numbers = torch.tensor(given, dtype=K.dtype, device="cpu")
        lam = send(numbers, K.device)
        relative = states[same[0]].relative
        parts = run(inverses, K, lam, top, relative=relative)
        for i, one, core in zip(same, *parts, strict=True):
            # Without the memory of the others.
            found[i] = states[i].solver(one.clone(), core.clone())
    return found


def inverses(
    K: Tensor, lam: Tensor, tops: Tensor, *, relative: bool
) -> tuple[Tensor, Tensor]:
    """λ and (λI + K)⁻¹, in float64: the error of b enters d times λ_max/λ."""
    if relative:
        lam = torch.where(tops > 0, lam * tops, 1)
    dtype = widest(K)
    K = K.to(dtype)
    scale = lam.to(dtype)[:, None, None]
    eye = torch.eye(K.shape[-1], dtype=dtype, device=K.device)
    found = inverse(eye + K / scale) / scale
    none = (tops == 0)[:, None, None]  # no curvature: what U has is rounding
    return lam, torch.where(none, 0, found)


# Directions that the sketch error of a form without a basis looks at.
LEADING = 16


@dataclass(frozen=True)
class LowRankState(State):
    """U, ready to be solved with at any λ."""

    U: Operator  # over a base: Z = P⁻¹U
    omega: Omega
    gram: Tensor  # K = ΞᵀΞ, (ϱ, ϱ)
    top: Tensor  # its largest eigenvalue, ()
    relative: bool  # whether the damping is in units of `top`
    P: Any = None  # the state of the base; None: I
    merge_error: Any = field(
        default=None, metadata=UNSAVED
    )  # of a sketch that chose a basis
    Xi: Operator = field(init=False)
    inverse: Any = field(init=False)  # P⁻¹
    failures: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.follow()

    def follow(self) -> None:
        inverse = self.P and self.P.to_local_power(-1.0)
        count = torch.zeros((), dtype=torch.int64, device=self.gram.device)
        # In its fields, though it is frozen.
        vars(self).update(
            Xi=self.omega.of(self.U), inverse=inverse, failures=count
        )

    @property
    def form(self) -> str:  # type: ignore[override]
        return self.U.form

    @property
    def base(self) -> str:  # type: ignore[override]
        return "identity" if self.P is None else str(self.P.base)

    @property
    def bytes(self) -> int:
        kept = tensors_of(self.U, self.P, self.inverse)
        return sum(t.nbytes for t in kept)

    @property
    def dtype(self) -> torch.dtype:
        return self.gram.dtype

    @property
    def columns(self) -> int:  # type: ignore[override]
        return self.U.samples

    def fits(self, shape: Shape) -> bool:
        return self.form == "sharded" or self.U.shape == shape

    def tensors(self) -> list[Tensor]:
        """Those that all others are made from."""
        return tensors_of(self.U, self.omega, self.gram, self.top, self.P)

    def fine(self) -> Tensor:
        found = self.top.isfinite() & self.gram.isfinite().all()
        return found if self.P is None else found & self.P.fine()

    def at(self, damping: float) -> LowRankSolver:
        return solvers_of([self], [damping])[0]

    def solver(self, lam: Tensor, inverse: Tensor) -> LowRankSolver:
        """At a λ whose factorization is at hand."""
        U, Xi = self.U, self.Xi
        if isinstance(U, Centred) and self.P is not None:
            # H goes into the small matrix, once for all steps.
            inverse = U.about_mean(U.about_mean(inverse).T)
            U = Xi = U.U
        shared = getattr(self.inverse, "beside", None)
        beside = shared and shared(U)
        found = inverse, self.inverse, self.failures, self.P is not None
        return LowRankSolver(U, self.omega, Xi, lam, *found, beside)

    def spectrum(
        self, damping: float | None
    ) -> tuple[float, float, float | None]:
        largest = float(self.top)
        lam = damping
        if self.relative and damping is not None:
            lam = damping * largest if largest > 0 else 1.0
        trace = float(self.gram.trace())
        return largest, trace, lam

    @property
    def sketch_error(self) -> Any:
        """‖e − ê‖/‖e‖ of the leading energies and what the sketch sees of them."""
        if self.form == "merged":
            return self.merge_error
        if self.omega == IDENTITY:
            return 0.0
        values, V = eigh(self.gram)
        Y = self.U.combine(V[:, :LEADING])
        return deviation(Y, values[:LEADING])
