"""What a metric is: it plans from shapes, is initialised on a refresh, and gives a solver for every
step.

    Metric.plan(dims, budget) -> [Plan]          which form each layer keeps, and why
    Metric.refresh(layers, team) -> [State]      expensive, on refresh steps
    State.at(damping) -> Solver                  when the damping or the state changes
    Solver(g) -> d                               cheap, pure tensors, at every step

A metric of your own needs `init`, one layer's state from its per-sample gradients:

    class Mine(Metric):
        makes = MyState  # a frozen dataclass, so that checkpoints are taken up again

        def init(self, layer, team):
            return MyState(...)

    seng.SENG(model, curvature=Mine())

Which form each layer keeps, from its shape and the number of samples, with the reason in words.

The paper stores U explicitly for small layers and G_i, A_i for large ones (its Table 1 and
threshold 𝒯). `paper_form` is that rule. The merged form, where it may be used, needs fewer numbers
than either.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from seng.distributed.team import Team
from seng.gpu.recorder import Run, directly
from seng.layers.sites import Site
from seng.linalg.memory import size_of
from seng.linalg.numerics import widest
from seng.linalg.operators import Operator, Shape
from seng.metrics.curvature import Curvature, Kronecker
from seng.metrics.factor import directions

# Numbers of a basis up to which norms and embeddings are merged, to be accumulated.
SMALL = 10**6
# Columns that each moment of a Kronecker metric is made of, or as many as it has rows.
LEAST = 512


@dataclass(frozen=True)
class Dims:
    """What a plan knows of a layer."""

    name: str
    shape: Shape  # (h, n_G, n_A)
    kappa: int  # positions per sample
    samples: int  # ϱ
    own: str | None  # the form of a layer without factors: explicit or lookup
    itemsize: int = 4
    half: bool = False  # whether factors and bases are kept in half precision
    factored: bool = True  # whether it can have a Kronecker metric
    convolution: bool = False
    base: str = "identity"  # what stands in the place of I
    base_rank: int = 0  # directions kept of each Kronecker factor

    @property
    def n(self) -> int:
        """Parameters."""
        return math.prod(self.shape)

    @property
    def n_G(self) -> int:
        """Output features, over all groups."""
        return self.shape[0] * self.shape[1]

    @property
    def n_A(self) -> int:
        """Inputs of one output feature, the bias counted."""
        return self.shape[2]

    @property
    def sides(self) -> int:
        """h·(n_G + n_A): the numbers of one column of the factors."""
        return self.shape[0] * (self.shape[1] + self.shape[2])

    @property
    def kept(self) -> tuple[int, int]:
        """Directions of each Kronecker factor."""
        _, n_G, n_A = self.shape
        rank = self.base_rank
        return directions(n_G, rank), directions(n_A, rank)

    def based(self, rank: int) -> Dims:
        """The same layer with a Kronecker base, or a diagonal one without factors."""
        if self.factored:
            return replace(self, base="kronecker", base_rank=rank)
        return replace(self, base="diagonal")


@dataclass(frozen=True)
class Plan:
    """The form of one layer, and why."""

    dims: Dims
    form: str  # explicit, implicit, lookup, merged, or a metric's own
    rank: int
    why: str
    centred: bool = False  # by roots of samples' weights, beside factors

    @property
    def columns(self) -> tuple[int, int]:
        """How many columns U is kept by, those of factors counted, and the numbers of each."""
        d = self.dims
        of_factors = d.samples * min(self.rank, d.kappa)
        return {
            "explicit": (d.samples, d.n),
            "implicit": (of_factors, d.sides),
            "lookup": (d.samples * d.kappa, d.n_A + 8 // d.itemsize),
            "merged": (self.rank, d.n),
        }.get(self.form, (0, 0))

    @property
    def bytes(self) -> int:
        """Memory of U and P between refreshes."""
        d = self.dims
        h, n_G, n_A = d.shape
        count, size = self.columns
        itemsize = 2 if d.half and d.own is None else d.itemsize
        of_base = 0
        if d.base == "diagonal":
            of_base = 2 * d.n  # v, and P⁻¹
        elif d.base == "kronecker":
            r_G, r_A = d.kept
            # Beside V of a side that is kept whole stands V diag(w) Vᵀ.
            vectors = n_G * r_G * (1 + (r_G == n_G))
            vectors += n_A * r_A * (1 + (r_A == n_A))
            of_base = h * (vectors + 2 * (r_G + r_A) + 3) + 2
        of_roots = 0  # columns are centred themselves
        if self.centred and self.form in ("implicit", "lookup"):
            of_roots = 8 * d.samples
        return count * size * itemsize + of_base * d.itemsize + of_roots

    @property
    def of_base(self) -> int:
        """Operations of one product with a power of P."""
        d = self.dims
        if d.base != "kronecker":
            return 0 if d.base == "identity" else d.n
        products = 1
        for r, n in zip(d.kept, d.shape[1:], strict=True):
            each = 4 if r < n else 2
            products += each * r
        return products * d.n

    @property
    def flops(self) -> int:
        """Operations of one solve: Uᵀg and Ub, and the powers of P."""
        count, _ = self.columns
        size = self.dims.n_A if self.form == "lookup" else self.dims.n
        return 4 * count * size + self.of_base

    @property
    def refresh_flops(self) -> int:
        """Operations of a refresh, roughly: U's columns, its Gram and basis, and P's factors."""
        d = self.dims
        k = self.rank if self.form == "merged" else 0
        of_U = 2 * d.samples * (d.kappa + d.samples + k) * d.n
        of_P = 4 * LEAST * d.base_rank * d.sides
        return of_U + of_P + (d.samples + k) * self.of_base


def plan(
    dims: Sequence[Dims],
    curvature: Curvature,
    budget: int | None = None,
    pooled: bool = False,
) -> list[Plan]:
    """One plan per layer; `pooled` where all ranks share one basis.

    Refused where the curvature needs more than `budget` bytes, with what would fit.
    """
    plans = _plans(dims, curvature, pooled)
    if budget is None:
        return plans
    needed = sum(p.bytes for p in plans)
    if needed <= budget:
        return plans
    raise ValueError(
        f"the curvature needs {size_of(needed)} where memory={curvature.memory!r} "
        f"allows {size_of(budget)}: {_what_fits(dims, curvature, budget, pooled)}"
    )


def _what_fits(
    dims: Sequence[Dims], c: Curvature, budget: int, pooled: bool
) -> str:
    """The largest halving of the ranks that fits, in words."""
    of_U = 1 if c.form == "explicit" else c.rank  # that keeps every column
    of_P = max(p.dims.base_rank for p in _plans(dims, c, pooled))
    while max(of_U, of_P) > 1:
        of_U = max(1, of_U // 2)
        of_P = max(1, of_P // 2)
        words = []
        if c.form != "explicit":
            c = replace(c, rank=of_U)
            words.append(f"rank={of_U}")
        if c.base is not None:
            c = replace(c, base=replace(c.base, rank=of_P))
            words.append(f"base=Kronecker(rank={of_P})")
        plans = _plans(dims, c, pooled)
        if sum(p.bytes for p in plans) <= budget:
            return f"{' and '.join(words)} would fit"
    return "use fewer samples, another form or more memory"


def _plans(dims: Sequence[Dims], c: Curvature, pooled: bool) -> list[Plan]:
    if c.blocks == "network":
        return _network_plans(dims, c)
    return [_layer_plan(d, c, pooled) for d in dims]


def _layer_plan(d: Dims, c: Curvature, pooled: bool) -> Plan:
    most = c.columns
    if most is not None:
        d = replace(d, samples=min(d.samples, most))
    form, rank, why = _form(d, c, pooled)
    if c.base is None:
        return Plan(d, form, rank, why, c.centres)
    d = d.based(c.base.of(d.convolution).rank)
    # In the coordinates of P, factors may be no fewer numbers than columns.
    shrinks = d.factored and d.sides * min(rank, d.kappa) < d.n
    if form == "implicit" and not shrinks:
        form = "explicit"
        why = f"{why}; as columns, since a {d.base} base leaves no smaller factors"
    return Plan(d, form, rank, why, c.centres)


def _form(d: Dims, c: Curvature, pooled: bool) -> tuple[str, int, str]:
    """The form of one layer, its rank, and why."""
    width = min(c.rank, d.n)  # of a merged basis
    width = width if c.decay else min(width, d.samples)
    if pooled:
        width = min(d.samples, d.n) if c.form == "explicit" else width
        why = f"k = {width} directions, the same on all ranks"
        return "merged", width, why
    if d.own is not None:
        return _own_form(d, d.own, c)
    if c.form != "auto":
        rank = width if c.form == "merged" else c.rank
        return c.form, rank, "asked for"
    if c.decay:
        why = f"curvature is accumulated (decay={c.decay})"
        return "merged", width, why
    exact = c.base is not None and not c.sketches  # over P, of these alone
    if exact and d.factored and d.kappa == 1:
        why = f"κ = 1: factors of all ϱ = {d.samples} samples are small"
        return "implicit", 1, why
    if c.base is not None or (c.combine == "exact" and c.rank < d.samples):
        why = f"k = {width} directions of ϱ = {d.samples} samples"
        return "merged", width, why
    form, why = paper_form(d, c.threshold)
    if c.combine == "exact":
        why = f"ϱ = {d.samples} ≤ rank: nothing to merge; {why}"
    return form, c.rank, why


def _own_form(d: Dims, own: str, c: Curvature) -> tuple[str, int, str]:
    """Norms and embeddings stay exact, and are merged only to be accumulated."""
    why = {
        "explicit": "no factors: its columns as they are",
        "lookup": "embedding: the rows that were looked up",
    }[own]
    if c.decay:
        columns = max(c.rank, d.samples)
        width = min(columns, d.n)
        if own == "explicit" or d.n * width <= SMALL:
            why = f"no factors; curvature is accumulated (decay={c.decay})"
            return "merged", width, why
        why += ", replaced at each refresh since a basis would be too large"
    return own, d.samples, why


def paper_form(d: Dims, threshold: int) -> tuple[str, str]:
    """Algorithm 1: implicit if the layer is large and its factors are the smaller."""
    if d.n < threshold:
        return "explicit", f"n < 𝒯 = {threshold:,}"
    factors = d.sides * d.kappa
    if d.n <= factors:
        why = "n ≤ (n_G + n_A)κ: the factors would be larger than the gradient"
        return "explicit", why
    why = f"n ≥ 𝒯 = {threshold:,} and n > (n_G + n_A)κ = {factors:,}"
    return "implicit", why


def _network_plans(dims: Sequence[Dims], c: Curvature) -> list[Plan]:
    """One block: all layers merged with one k, or each with all its columns."""
    auto = c.form == "auto"
    n = sum(d.n for d in dims)
    k = min(c.rank, n)
    samples = max((d.samples for d in dims), default=1)
    if not c.decay:
        k = min(k, samples)
    shrinks = auto and k < samples
    if c.form == "merged" or c.decay or shrinks:
        why = f"k = {k} directions of the whole network"
        return [Plan(d, "merged", k, why) for d in dims]
    plans = []
    for d in dims:
        form = paper_form(d, c.threshold)[0] if auto else c.form
        rank = max(c.rank, d.kappa) if auto else c.rank
        why = "all samples of the whole network"
        plans.append(Plan(d, d.own or form, rank, why, c.centres))
    return plans


def site_dims(
    site: Site, kappa: int, samples: int, half: bool = False
) -> Dims:
    """What the plan needs to know of a site."""
    shape = site.shape(site.active() or site.segments)
    return Dims(
        site.name,
        shape,
        kappa,
        samples,
        site.own_form,
        site.dtype.itemsize,
        half,
        site.matrix,
        site.convolution,
    )


Solver = Callable[[Tensor], Tensor]  # g (n,) -> d (n,)
TRUE = torch.ones((), dtype=torch.bool, device="cpu")
Draw = Callable[..., torch.Generator]


UNSAVED = {"saved": False}  # metadata of fields that checkpoints leave out


@dataclass(frozen=True)
class LayerRefresh:
    """One layer on a refresh: what was captured of it, and what there was before."""

    plan: Plan
    U: Any  # an operator: this rank's samples, columns u_i/√ϱ
    samples: int  # ϱ of this rank's step
    positions: int  # over all samples
    counts: list[int]  # samples on every rank
    totals: list[int]  # ϱ of every rank's step
    previous: State | None  # over the same parameters
    damping: float
    precision: torch.dtype  # the least in which gradients were computed
    half: bool  # whether a basis may be kept in half precision
    generator: Draw  # the same on all ranks
    # Y (k, n) -> U = Yᵀ, spread as the layer is
    basis: Callable[[Tensor], Operator]
    place: Any = None  # where a spread layer's numbers lie

    def sampled(self, samples: int | None, ranks: int) -> LayerRefresh:
        """With at most so many samples of all ranks, of each its first."""
        if samples is None:
            return self
        most = -(-samples // ranks)
        kept = min(most, self.samples)
        count = _share(self.U.samples, kept, self.samples)
        U = self.U.first(count)
        if kept < self.samples:
            U = U.scaled((self.samples / kept) ** 0.5)
        totals = [min(most, total) for total in self.totals]
        sizes = zip(self.counts, totals, self.totals, strict=True)
        counts = [_share(*size) for size in sizes]
        return replace(self, U=U, samples=kept, counts=counts, totals=totals)

    def roots(self, U: Operator) -> Tensor:
        """The roots of the weights of U's columns, 1/√ϱ each; of several ranks' columns, each
        rank having the same weight.
        """
        values: Tensor = U.values
        ranks = len(self.counts)
        parts = []
        for count, total in zip(self.counts, self.totals, strict=True):
            root = (ranks * max(1, total)) ** -0.5
            part = values.new_full((count,), root, dtype=widest(values))
            parts.append(part)
        return torch.cat(parts)


def _share(count: int, kept: int, total: int) -> int:
    """Of a layer's columns, as many as are kept of the step's samples."""
    return -(-count * kept // max(1, total))


STATES: dict[str, type[State]] = {}  # by name, as checkpoints have them


class State(ABC):
    """What a layer keeps between refreshes: a frozen dataclass of tensors."""

    form = "state"  # of U
    base = "identity"  # what stands in the place of I
    columns = 0  # of U
    sketch_error: Any = 0.0
    failures: Tensor | int = 0  # solves that fell back to the plain gradient

    def __init_subclass__(cls) -> None:
        STATES[cls.__name__] = cls

    @abstractmethod
    def at(self, damping: float) -> Solver:
        """The solver at this λ."""

    def fits(self, shape: Shape) -> bool:
        """Whether it is that of a layer of this shape."""
        return True

    def fine(self) -> Tensor:
        """Whether all of it is finite, (); a refresh that is not is dropped."""
        found = [t.isfinite().all() for t in self.tensors()]
        return torch.stack(found).all() if found else TRUE

    def spectrum(self, damping: float | None) -> tuple[Any, Any, Any]:
        """Largest eigenvalue and trace of the curvature, and λ; None where unknown."""
        return None, None, None

    def tensors(self) -> list[Tensor]:
        """All that is kept."""
        return tensors_of(self)

    def follow(self) -> None:
        """Make what comes of its tensors anew: they have been written to."""
        return

    @property
    def dtype(self) -> torch.dtype | None:
        """The precision that it solves in; None: in any."""
        for t in self.tensors():
            if t.is_floating_point():
                return t.dtype
        return None

    @property
    def bytes(self) -> int:
        return sum(t.nbytes for t in self.tensors())


class Metric(ABC):
    """Which curvature layers keep."""

    per_sample = True  # whether dimension 0 has to be the sample
    together = False  # whether all layers share one solve
    pools = False  # whether ranks with a U of their own pool the rest
    makes: type[State] | None = None  # by `init`; None: nothing is loaded
    # What plans follow, if any.
    curvature: Curvature | Kronecker | None = None

    def __repr__(self) -> str:
        """The same on all ranks, which compare what they build."""
        return f"{type(self).__name__}({self.curvature or ''})"

    def refuses(self, site: Site) -> str | None:
        """Why a layer takes the plain gradient, in words; None where it is covered."""
        return None

    def plan(
        self,
        dims: Sequence[Dims],
        budget: int | None = None,
        pooled: bool = False,
    ) -> list[Plan]:
        """One plan per layer; `pooled` where all ranks share one curvature."""
        return [self.plan_of(d) for d in dims]

    def plan_of(self, d: Dims) -> Plan:
        """One layer's, where each is planned by itself."""
        return Plan(d, "own", 0, type(self).__name__)

    def keeps_less(self, first: bool) -> bool:
        """Whether `keep` does anything.

        On a layer's first refresh it is seen whether all samples add up to the gradient.
        """
        return False

    def keep(self, U: Operator, dims: Dims, generator: Draw) -> Operator:
        """What of a capture waits from the backward until step()."""
        return U

    def sides(self, chosen: Plan) -> int | None:
        """The rank of two-sided corrections, which eq. 23 has; None for all others."""
        return None

    def remark(self, chosen: Plan) -> str | None:
        """What users should know of a layer's plan, if anything."""
        return None

    def accepts(self, state: Any, convolution: bool = False) -> State | None:
        """A loaded state as this metric has them; None where it is another's."""
        return state if self.makes and isinstance(state, self.makes) else None

    @abstractmethod
    def init(self, layer: LayerRefresh, team: Team) -> State:
        """The state of one layer."""

    def refresh(
        self, layers: Iterable[LayerRefresh], team: Team, run: Run = directly
    ) -> list[State]:
        """The states of all layers, which come one after the other."""
        return [self.init(layer, team) for layer in layers]

    def solvers(
        self,
        states: Sequence[Any],
        dampings: Sequence[float],
        run: Run = directly,
    ) -> Sequence[Solver]:
        """The solvers of several layers, each with its damping."""
        pairs = zip(states, dampings, strict=True)
        return [state.at(damping) for state, damping in pairs]


@dataclass(frozen=True)
class PowerSolver:
    """d = P⁻¹g, as long as g."""

    inverse: Solver

    def __call__(self, g: Tensor) -> Tensor:
        return grafted(self.inverse(g), g)


def tensors_of(*values: Any) -> list[Tensor]:
    """The tensors in nested dataclasses, each once."""
    found: dict[int, Tensor] = {}
    waiting = list(values)
    while waiting:
        value = waiting.pop(0)
        if isinstance(value, Tensor):
            found[id(value)] = value
        elif is_dataclass(value):
            waiting[:0] = vars(value).values()
    return list(found.values())


def grafted(d: Tensor, g: Tensor) -> Tensor:
    """d at the length of g, so that SGD's learning rate carries over."""
    norm = torch.linalg.vector_norm
    return d * ratio(norm(d), norm(g))


def ratio(of_d: Tensor, of_g: Tensor) -> Tensor:
    """The scale that brings d to the length of g."""
    tiny = torch.finfo(of_d.dtype).tiny
    return of_g / of_d.clamp_min(tiny)
