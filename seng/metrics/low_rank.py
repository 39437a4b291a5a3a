"""SENG's metric: ŪŪᵀ from per-sample gradients about their mean, over a Kronecker metric λP or λI.

On a refresh U is captured, brought into its planned form, sketched and factorized:

    explicit   the columns themselves                     implicit   factors G_i, A_i of rank r
    merged     Y = UV_k, V_k the leading directions of the Gram K = ΞᵀΞ, Ξ = ΩU

In the merged form Ω only chooses the subspace, so that the eigenvalues of λ(YYᵀ + λI)⁻¹ lie in [0,
1] for every sketch; and bases are averaged over refreshes by stacking them,

    δM_old + (1 − δ)M = [√δ·U_old, √(1−δ)·U][…]ᵀ, truncated to its k leading directions.

Over P all of that happens in whitened coordinates, Ỹ = P^{-½}ŪV. What is kept is Z = P^{-½}Ỹ, from
which Ỹ_old = P_new^{-½}P_old Z_old at the next refresh.

What is as large as a layer is done layer by layer; what is as small as ϱ × ϱ for all layers at
once. Each step solves by `seng.metrics.woodbury`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from seng.distributed.pool import Share, pooled
from seng.distributed.team import Team
from seng.gpu.recorder import Run, directly
from seng.linalg.centred import centred
from seng.linalg.implicit import Independent
from seng.linalg.numerics import (
    deviation,
    one_by_one,
    reduced,
    spectrum,
    start,
    top,
)
from seng.linalg.operators import HALF, Merged, Operator, wide
from seng.linalg.sketch import IDENTITY, Omega
from seng.metrics.curvature import Curvature
from seng.metrics.kronecker import Kronecker
from seng.metrics.metric import (
    Dims,
    Draw,
    LayerRefresh,
    Metric,
    Plan,
    State,
    plan,
)
from seng.metrics.woodbury import LowRankState, by_size, solvers_of


@dataclass(frozen=True)
class Draft:
    """A layer's state in the making; each stage of a refresh makes a new one."""

    layer: LayerRefresh
    P: Any  # the base; None: I
    root: Any  # P^{-½} of what this rank has of a vector
    U: Any  # an operator, over the base
    omega: Omega = IDENTITY
    gram: Any = None  # of ΩU, (m, m)
    top: Tensor | None = None  # its largest eigenvalue, (); None: not known
    error: Any = None  # of a sketch that chose the basis
    old: Any = None  # the last basis, to be averaged with this one

    @property
    def sketched(self) -> bool:
        return self.omega != IDENTITY

    @property
    def last(self) -> Any:
        """The last state, where it keeps a basis of the same kind."""
        last: Any = self.layer.previous
        form = self.U.form
        if last is None or form not in ("merged", "sharded"):
            return None
        base = getattr(self.P, "base", "identity")
        return last if (last.form, last.base) == (form, base) else None

    @property
    def width(self) -> int:
        """How many directions a basis of U keeps; 0 where U stays as it is."""
        plan = self.layer.plan
        m = len(self.gram)
        if plan.form == "merged" and self.U.form != "sharded":
            return min(plan.rank, m)
        # In half precision columns are kept as a basis.
        columns = plan.form == "explicit" and self.layer.half
        exact = columns and (self.sketched or plan.dims.own is not None)
        return m if columns and not exact else 0


class LowRank(Metric):
    """UUᵀ over λI, or over λP."""

    curvature: Curvature
    makes = LowRankState

    def __init__(self, curvature: Curvature) -> None:
        self.curvature = curvature
        base = curvature.base
        self.base = None if base is None else Kronecker(base)
        self.pools = base is not None

    def plan(
        self,
        dims: Sequence[Dims],
        budget: int | None = None,
        pooled: bool = False,
    ) -> list[Plan]:
        return plan(dims, self.curvature, budget, pooled)

    def keeps_less(self, first: bool) -> bool:
        return self.base is None or not (
            first or self.curvature.columns is None
        )

    def keep(self, U: Operator, dims: Dims, generator: Draw) -> Operator:
        """The smaller of columns and factors, or reduced factors if asked for.

        Over a base the first samples, and what P is made of.
        """
        if self.base is not None:
            samples = self.curvature.columns or U.samples
            return self.base.keep(U, dims, generator, samples)
        (chosen,) = self.plan([dims])
        if chosen.form != "implicit":
            return U.smaller()
        rank = chosen.rank
        return U if rank >= U.kappa else reduced_factors(U, rank, generator)

    def sides(self, chosen: Plan) -> int | None:
        if self.curvature.combine == "exact" or chosen.form != "implicit":
            return None
        return min(chosen.rank, chosen.dims.kappa)

    def remark(self, chosen: Plan) -> str | None:
        """A sketch that is larger than what it sketches."""
        d = chosen.dims
        sketch = self._sketch(chosen)
        if sketch is None or not sketch.exceeds(d.shape):
            return None
        what = "it" if sketch.covers(d.shape) else "that side of it"
        layer = f"{sketch} is larger than layer '{d.name}' {d.shape[1:]}"
        return f"{layer}: {what} is then taken exactly"

    def accepts(self, state: Any, convolution: bool = False) -> State | None:
        known: Any = super().accepts(state)
        P = getattr(known, "P", None)
        if self.base is not None:
            P = self.base.accepts(P, convolution)
        if known is None or (P is None) != (self.base is None):
            return None
        relative = self.curvature.relative_damping
        return replace(known, relative=relative, P=P)  # type: ignore[no-any-return]

    def init(self, layer: LayerRefresh, team: Team) -> State:
        return self.refresh([layer], team)[0]

    def refresh(
        self, layers: Iterable[LayerRefresh], team: Team, run: Run = directly
    ) -> list[State]:
        """Grams, their leading directions, averages with the last bases, states."""
        drafts = self.drafts(layers, team, run)
        self.truncate(drafts, run)
        if self.curvature.decay:
            self.average(drafts, run)
        return self.states(drafts)

    def drafts(
        self, layers: Iterable[LayerRefresh], team: Team, run: Run
    ) -> list[Draft]:
        """Each Ū over its base and in its planned form, with the Gram of ΩŪ."""
        found = []
        for layer in layers:
            d = self._whitened(layer, team)
            found.append(d if team.pools else self._sketched(d, run))
        return self._pooled(found, team) if team.pools else found

    def _whitened(self, layer: LayerRefresh, team: Team) -> Draft:
        """P renewed from what was captured, and P^{-½}Ū of `samples` of it."""
        P: Any = None
        if self.base is not None:
            before = getattr(layer.previous, "P", None)
            P = self.base.init(replace(layer, previous=before), team)
        layer = layer.sampled(self.curvature.columns, team.size)
        U: Operator = layer.U
        if layer.plan.form == "implicit":
            U = reduced_factors(U, layer.plan.rank, layer.generator)
        if self.curvature.centres and not team.pools:
            U = centred(U, layer.roots(U))
        root: Any = None
        if P is not None:
            whole = P.to_power(-0.5)
            U = whole.of(U)
            if layer.plan.form != "implicit" and U.by_columns:
                U = U.explicit()  # once, for the Gram and the basis
            root = P.spread(whole)
        # What was captured is let go of before the next layer is taken.
        return Draft(replace(layer, U=None), P, root, U)

    def _sketch(self, chosen: Plan) -> Any:
        """The one for a layer of this plan; those without factors stay exact."""
        c = self.curvature
        if chosen.dims.own is not None:
            return None
        own = c.implicit_sketch if chosen.form == "implicit" else None
        return own or c.sketch

    def _sketched(self, d: Draft, run: Run) -> Draft:
        """U in its form, and the Gram of ΩU."""
        U = d.U
        c = self.curvature
        chosen = d.layer.plan
        sketch = self._sketch(chosen)
        if chosen.form == "explicit":
            U = U.explicit()
        elif c.combine == "independent" and U.form == "implicit":
            U = Independent(U.G, U.A)
        if sketch is None or sketch.covers(U.shape):
            (gram,) = run(_gram, U)
            return replace(d, U=U, gram=gram)
        U = U.through(lambda X: X.factors() or X)
        omega = sketch.draw(U, d.layer.generator())
        gram = omega.of(U).gram()
        return replace(d, U=U, omega=omega, gram=gram)

    def _pooled(self, drafts: Sequence[Draft], team: Team) -> list[Draft]:
        """One basis per layer from the samples of all ranks."""
        shares = []
        for d in drafts:
            layer = d.layer
            rank = layer.plan.rank
            roots = layer.roots(d.U) if self.curvature.centres else None
            kept = d.U, layer.counts, rank, layer.generator
            shares.append(Share(*kept, roots))
        out = []
        half = any(d.layer.precision in HALF for d in drafts)
        bases = pooled(team, shares, self.curvature.sketch, half)
        for d, Y in zip(drafts, bases, strict=True):
            U = d.layer.basis(Y)
            out.append(replace(d, U=U, gram=U.gram()))
        return out

    def leading(
        self, drafts: Sequence[Draft], widths: Sequence[int], run: Run
    ) -> list[Sequence[Tensor]]:
        """Of each Gram the largest eigenvalue, and so many leading ones with their directions.

        Grams of one size are worked on at once.
        """
        found: list[Any] = [None] * len(drafts)
        for same, K in by_size([d.gram for d in drafts]):
            width = max(widths[i] for i in same)
            generator = drafts[same[0]].layer.generator()
            begin = start(K, width, generator)
            small = directly if one_by_one(K) else run
            parts = small(_leading, K, begin, width=width)
            for i, largest, values, V in zip(same, *parts, strict=True):
                k = widths[i]
                found[i] = largest, values[:k], V[:, :k]
        return found

    def truncate(self, drafts: list[Draft], run: Run) -> None:
        """Largest eigenvalues, and UV_k in place of U where a basis is kept."""
        kept = [d.width for d in drafts]
        cut = zip(kept, drafts, strict=True)
        widths = [k if k < len(d.gram) else 0 for k, d in cut]
        leading = self.leading(drafts, widths, run)
        for i, (largest, values, V) in enumerate(leading):
            d = replace(drafts[i], top=largest)
            # Each U is let go of as soon as its basis is there.
            drafts[i] = _basis(d, values, V, run) if kept[i] else d

    def averaging(self, drafts: Sequence[Draft]) -> list[int]:
        """The places of those with a last basis to be averaged with."""
        return [i for i, d in enumerate(drafts) if d.last is not None]

    def average(self, drafts: list[Draft], run: Run) -> None:
        """δM_old + (1 − δ)M_new, at most `rank` directions."""
        places = self.averaging(drafts)
        stacks = [self._stacked(drafts[i]) for i in places]
        widths = [d.layer.plan.rank for d in stacks]
        leading = self.leading(stacks, widths, run)
        for i, d, found in zip(places, stacks, leading, strict=True):
            largest, _, V = found
            U = d.old.mixed(d.U, V)
            drafts[i] = replace(d, U=U, gram=U.gram(), top=largest)

    def _stacked(self, d: Draft) -> Draft:
        """√δ·U_old, in the coordinates of the new P, beside √(1−δ)·U; the Gram of both."""
        decay = self.curvature.decay
        last = d.last
        old = last.U
        K = last.gram
        if d.P is not None:
            back = last.P.to_local_power(1.0)
            old = old.mapped(lambda Y: d.root.rows(back.rows(Y)))
        if d.P is not None or self.together:
            K = old.gram()
        if d.layer.half:
            old = old.halved()
        old = old.scaled(decay**0.5)
        new = d.U.scaled((1 - decay) ** 0.5)
        across = old.across(new)
        above = torch.cat([decay * K, across], 1)
        below = torch.cat([across.T, (1 - decay) * d.gram], 1)
        gram = torch.cat([above, below])
        return replace(d, U=new, gram=gram, old=old)

    def states(self, drafts: Sequence[Draft]) -> list[State]:
        relative = self.curvature.relative_damping
        out: list[State] = []
        for d in drafts:
            U, K, largest = d.U, d.gram, d.top
            if largest is None:
                largest = top(K[None])[0].to(K.dtype)
            if d.P is not None:
                U = d.root.of(U)
            kept = U, d.omega, K, largest, relative, d.P, d.error
            out.append(LowRankState(*kept))
        return out

    solvers = staticmethod(solvers_of)


def _gram(U: Operator) -> tuple[Tensor]:
    return (U.gram(),)


def _combined(U: Operator, V: Tensor) -> tuple[Tensor]:
    return (U.combine(V.to(U.dtype)),)


def _leading(
    K: Tensor, begin: Tensor, *, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Of each K (L, m, m) the largest eigenvalue, and the leading ones and directions.

    They are not numbers where K is not finite.
    """
    if not width:
        largest = top(K).to(K.dtype)
        return largest, K[:, 0, :0], K[:, :, :0]
    values, V = spectrum(K, width, begin)
    largest = values[:, 0] if one_by_one(K) else top(K)
    none = largest[:, None, None] == 0  # rounding is all there is
    V = torch.where(none, 0, V)
    return largest.to(K.dtype), values, V.to(K.dtype)


def _basis(d: Draft, values: Tensor, V: Tensor, run: Run) -> Draft:
    """UV in place of U, exact in what it keeps; all of U where no directions were chosen."""
    error: Any = 0.0
    if not V.shape[1]:
        Y = d.U.explicit().U.T.to(d.U.dtype)
    else:
        with coarser(d.layer.half and V.is_cuda):
            (Y,) = run(_combined, d.U, V)
        if d.sketched:
            error = deviation(Y, values.to(Y.dtype))
    largest = None if d.sketched else d.top
    U = Merged.of(Y, d.U.shape, d.layer.half)
    return replace(
        d, U=U, omega=IDENTITY, gram=U.gram(), top=largest, error=error
    )


def reduced_factors(U: Operator, rank: int, generator: Draw) -> Operator:
    """U by factors of rank r, where it has any.

    Half precision is enough for them, not for the products that they come from.
    """
    factors = U.factors()
    if factors is None or rank >= factors.kappa:
        return factors or U
    dtype = factors.values.dtype
    return reduced(factors.to(wide(dtype)), rank, generator()).to(dtype)


@contextmanager
def coarser(allowed: bool) -> Iterator[None]:
    """Products of float32 numbers in TF32, whose digits a basis in float16 keeps."""
    matmul = torch.backends.cuda.matmul
    if not (
        allowed and hasattr(matmul, "fp32_precision")
    ):  # not before torch 2.9
        yield
        return
    before = matmul.fp32_precision
    matmul.fp32_precision = "tf32"
    try:
        yield
    finally:
        matmul.fp32_precision = before
