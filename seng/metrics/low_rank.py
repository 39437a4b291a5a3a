"""SENG's metric: M = UUᵀ from per-sample gradients, over λI or over a Kronecker metric P.

On a refresh U is captured, brought into its planned form, sketched and factorized:

    explicit   the columns themselves                     implicit   factors G_i, A_i of rank r
    merged     Y = UV_k, V_k the leading directions of the Gram K = ΞᵀΞ, Ξ = ΩU

In the merged form Ω only chooses the subspace, so that the eigenvalues of λ(YYᵀ + λI)⁻¹ lie in [0,
1] for every sketch; and bases are averaged over refreshes by stacking them,

    δM_old + (1 − δ)M = [√δ·U_old, √(1−δ)·U][…]ᵀ, truncated to its k leading directions.

What is as large as a layer is done layer by layer; what is as small as ϱ × ϱ for all layers at
once. Each step solves by `seng.metrics.woodbury`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from seng.distributed.pool import Share, pooled
from seng.distributed.team import Team
from seng.gpu.recorder import Run, directly
from seng.linalg.implicit import Independent
from seng.linalg.numerics import (
    deviation,
    one_by_one,
    reduced,
    spectrum,
    start,
    top,
)
from seng.linalg.operators import HALF, Merged, Operator, Shape, wide
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
from seng.metrics.woodbury import LowRankState, factorized


@dataclass
class _Draft:
    """A layer's state in the making."""

    layer: LayerRefresh
    P: Any
    U: Operator
    omega: Omega
    gram: Tensor
    top: Tensor = field(init=False)
    error: Tensor | None = None

    @property
    def merges(self) -> bool:
        """Whether a basis is to be made of U."""
        return self.layer.plan.form == "merged" and self.U.form != "sharded"

    @property
    def width(self) -> int:
        """How many directions are kept; all of them where U stays as it is."""
        m = len(self.gram)
        return min(self.layer.plan.rank, m) if self.merges else m

    def keep(self, U: Operator) -> None:
        """U becomes a basis, exact in what it keeps."""
        self.U, self.omega, self.gram = U, IDENTITY, U.gram()


class LowRank(Metric):
    """UUᵀ over λI, or over λP."""

    def __init__(self, curvature: Curvature) -> None:
        self.curvature = curvature
        based = curvature.base == "kronecker"
        self.base = Kronecker(curvature) if based else None
        self.reduces = (
            self.base is None
        )  # a base is made from all of the factors

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.curvature})"

    def plan(
        self,
        dims: Sequence[Dims],
        budget: int | None = None,
        pooled: bool = False,
    ) -> list[Plan]:
        return plan(dims, self.curvature, budget, pooled)

    def keep(self, U: Operator, dims: Dims, generator: Draw) -> Operator:
        """The smaller of columns and factors, or reduced factors if asked for."""
        c = self.curvature
        (chosen,) = self.plan([dims])
        if chosen.form == "implicit":
            whole = chosen.rank >= U.kappa and c.combine == "exact"
            factors = None if whole else U.factors()
            return (
                U
                if factors is None
                else _reduced(factors, chosen.rank, generator)
            )
        return U.smaller()

    def sides(self, chosen: Plan) -> int | None:
        independent = self.curvature.combine == "independent"
        if chosen.form != "implicit" or not independent:
            return None
        return min(chosen.rank, chosen.dims.kappa)

    def remark(self, chosen: Plan) -> str | None:
        """A sketch that is larger than what it sketches."""
        d, sketch = chosen.dims, self.curvature.sketch
        if sketch is None or d.own is not None or not sketch.exceeds(d.shape):
            return None
        what = "it" if sketch.covers(d.shape) else "that side of it"
        layer = f"{sketch} is larger than layer '{d.name}' {d.shape[1:]}"
        return f"{layer}: {what} is then taken exactly"

    def accepts(self, state: Any, shape: Shape) -> State | None:
        c = self.curvature
        if not isinstance(state, LowRankState) or not state.fits(shape):
            return None
        based = state.P is not None
        if based != (self.base is not None) or (
            based and state.P.power != c.power
        ):
            return None
        return replace(state, relative=c.relative_damping, graft=c.grafts)

    def init(self, layer: LayerRefresh, team: Team) -> State:
        return self.refresh([layer], team)[0]

    def refresh(
        self, layers: Sequence[LayerRefresh], team: Team, run: Run = directly
    ) -> list[State]:
        """The states of all layers, from captures to factors."""
        drafts = self.drafts(layers, team, run)
        self._merge(drafts, run)
        if self.curvature.averaging:
            self._average([d for d in drafts if _averages(d)], run)
        relative, graft = (
            self.curvature.relative_damping,
            self.curvature.grafts,
        )
        return [
            LowRankState(
                d.U, d.omega, d.gram, d.top, relative, d.P, graft, d.error
            )
            for d in drafts
        ]

    def drafts(
        self, layers: Sequence[LayerRefresh], team: Team, run: Run
    ) -> list[_Draft]:
        """Each U in its planned form, sketched, with its Gram."""
        white: list[tuple[LayerRefresh, Any, Operator]] = []
        for layer in layers:
            with layer.timer:
                white.append((layer, *self._whitened(layer, team)))
        if team.pools:
            return self._pooled(white, team)
        out = []
        for layer, P, U in white:
            with layer.timer:
                out.append(self._draft(layer, P, U, run))
        return out

    def _whitened(
        self, layer: LayerRefresh, team: Team
    ) -> tuple[Any, Operator]:
        """P renewed from what was captured, and P^{-½}U."""
        if self.base is None:
            return None, layer.U
        previous: Any = layer.previous
        before = None if previous is None else previous.P
        P: Any = self.base.init(replace(layer, previous=before), team)
        rank = (
            layer.plan.rank if layer.plan.form == "implicit" else layer.U.kappa
        )
        return P, P.to_power(-0.5).of(layer.U, rank)

    def _draft(
        self, layer: LayerRefresh, P: Any, U: Operator, run: Run
    ) -> _Draft:
        c, chosen = self.curvature, layer.plan
        if chosen.form == "explicit":
            U = U.explicit()
        elif chosen.form == "implicit":
            U = self._factors(U, chosen.rank, layer.generator)
        sketch = (
            c.sketch if chosen.dims.own is None else None
        )  # others stay exact
        if sketch is None or sketch.covers(U.shape):
            (gram,) = run(_gram, U)
            return _Draft(layer, P, U, IDENTITY, gram)
        seen = U.factors() or U
        omega = sketch.draw(seen, layer.generator())
        return _Draft(layer, P, seen, omega, omega.of(seen).gram())

    def _factors(self, U: Operator, rank: int, generator: Draw) -> Operator:
        """The implicit form: factors of rank r, or all of them if they are no more."""
        factors = U.factors()
        if factors is None:
            return U
        independent = self.curvature.combine == "independent"
        if rank < factors.kappa or independent:
            factors = _reduced(factors, rank, generator)
        return Independent(factors.G, factors.A) if independent else factors

    def _pooled(
        self, white: Sequence[tuple[LayerRefresh, Any, Operator]], team: Team
    ) -> list[_Draft]:
        """One basis per layer from the samples of all ranks."""
        shares = [
            Share(U, layer.counts, layer.plan.rank, layer.generator)
            for layer, _, U in white
        ]
        half = any(layer.precision in HALF for layer, _, _ in white)
        bases = pooled(team, shares, self.curvature.sketch, half)
        out = []
        for (layer, P, _), Y in zip(white, bases, strict=True):
            U = layer.basis(Y)
            out.append(_Draft(layer, P, U, IDENTITY, U.gram()))
        return out

    def _merge(self, drafts: Sequence[_Draft], run: Run) -> None:
        """Largest eigenvalues, and UV_k where a basis is to be kept."""
        for same in _by_size(drafts):
            K = torch.stack([d.gram for d in same])
            kept = [d.width for d in same if d.width < K.shape[-1]]
            width = max(kept, default=0)
            draw = same[0].layer.generator() if width else None
            small = directly if one_by_one(K) else run
            tops, values, V = small(
                _leading, K, start(K, width, draw), width=width
            )
            for i, d in enumerate(same):
                d.top = tops[i]
                with d.layer.timer:
                    self._keep(d, values[i], V[i], run)

    def _keep(self, d: _Draft, values: Tensor, V: Tensor, run: Run) -> None:
        k, m, half = d.width, len(d.gram), d.layer.half
        halves = half and d.omega == IDENTITY and d.layer.plan.dims.own is None
        if not d.merges and not (halves and d.layer.plan.form == "explicit"):
            return
        d.error = torch.zeros((), device="cpu")
        sketched = d.omega != IDENTITY
        if k >= m:
            Y = d.U.explicit().U.T
        else:
            with coarser(half and V.is_cuda):
                (Y,) = run(_combined, d.U, V[:, :k])
            if sketched:
                d.error = deviation(Y, values[:k].to(Y.dtype))
        d.keep(Merged.of(Y, d.U.shape, half))
        if sketched:
            d.top = top(d.gram[None])[0].to(d.gram.dtype)

    def _average(self, drafts: Sequence[_Draft], run: Run) -> None:
        """δM_old + (1 − δ)M_new, at most `rank` directions."""
        decay = self.curvature.averaging
        olds: dict[int, Any] = {}
        for d in drafts:
            with d.layer.timer:
                old, K_old = _carried_over(d)
                across = old.across(d.U) * (decay * (1 - decay)) ** 0.5
                above = torch.cat([decay * K_old, across], 1)
                below = torch.cat([across.T, (1 - decay) * d.gram], 1)
                d.gram = torch.cat([above, below])
                olds[id(d)] = old.scaled(decay**0.5)
        for same in _by_size(drafts):
            K = torch.stack([d.gram for d in same])
            width = max(d.layer.plan.rank for d in same)
            begin = start(K, width, same[0].layer.generator())
            small = directly if one_by_one(K) else run
            tops, _, V = small(_leading, K, begin, width=width)
            for i, d in enumerate(same):
                with d.layer.timer:
                    new = d.U.scaled((1 - decay) ** 0.5)
                    W = V[i][:, : d.layer.plan.rank]
                    d.keep(olds[id(d)].mixed(new, W))
                d.top = tops[i]

    def solvers(
        self,
        states: Sequence[Any],
        dampings: Sequence[float],
        run: Run = directly,
    ) -> list[Any]:
        relative = self.curvature.relative_damping
        grams, tops = [s.gram for s in states], [s.top for s in states]
        cores = factorized(grams, tops, dampings, relative, run)
        return [s.solver(*core) for s, core in zip(states, cores, strict=True)]


def _gram(U: Operator) -> tuple[Tensor]:
    return (U.gram(),)


def _combined(U: Operator, V: Tensor) -> tuple[Tensor]:
    return (U.combine(V.to(U.dtype)),)


def _leading(
    K: Tensor, begin: Tensor, *, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Of each K (L, m, m) the largest eigenvalue, and the leading ones and directions.

    The largest is not a number where K is not finite.
    """
    fine = K.isfinite().all(2).all(1)
    K = torch.where(fine[:, None, None], K, 0)
    if width:
        values, V = spectrum(K, width, begin)
    else:
        values, V = K[:, :0, 0], K[:, :, :0]
    tops = values[:, 0] if width and one_by_one(K) else top(K)
    tops = torch.where(fine, tops, torch.nan)
    return tops.to(K.dtype), values, V.to(K.dtype)


def _by_size(drafts: Sequence[_Draft]) -> list[list[_Draft]]:
    groups: defaultdict[object, list[_Draft]] = defaultdict(list)
    for d in drafts:
        groups[len(d.gram), d.gram.dtype, d.gram.device].append(d)
    return list(groups.values())


def _averages(d: _Draft) -> bool:
    """Whether there is a basis of the same kind to average with."""
    previous: Any = d.layer.previous
    if previous is None or d.U.form not in ("merged", "sharded"):
        return False
    base = "identity" if d.P is None else d.P.base
    return bool(previous.form == d.U.form and previous.base == base)


def _carried_over(d: _Draft) -> tuple[Any, Tensor]:
    """The previous basis in the coordinates of the new P, and its Gram."""
    previous: Any = d.layer.previous
    old, gram = previous.U, previous.gram
    if d.P is not None:
        back, forth = previous.P.to_power(0.5), d.P.to_power(-0.5)
        old = old.mapped(lambda Y: forth.rows(back.rows(Y)))
        gram = old.gram()
    return (old.halved() if d.layer.half else old), gram


def _reduced(factors: Any, rank: int, generator: Draw) -> Any:
    """Factors of rank r; half precision is enough for them, not for their products."""
    precision = factors.G.dtype
    return reduced(factors.to(wide(precision)), rank, generator()).to(
        precision
    )


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
