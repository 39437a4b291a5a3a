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
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from seng.distributed.team import Team
from seng.gpu.recorder import Run, directly
from seng.layers.sites import Site
from seng.linalg.memory import size_of
from seng.linalg.operators import Operator, Shape
from seng.metrics.curvature import Curvature

# 𝒯: Table 1 keeps cases I to III (n ≤ 524,288) explicit, IV to VI (n ≥ 1,048,576) implicit.
THRESHOLD = 10**6

Base = Literal["identity", "kronecker", "diagonal"]


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
    base: Base = "identity"  # the metric in whose coordinates U is kept
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

    def based(self, rank: int) -> Dims:
        """The same layer with a Kronecker base, or a diagonal one without factors."""
        if self.factored:
            return replace(self, base="kronecker", base_rank=rank)
        return replace(self, base="diagonal")

    def factors(self, rank: int) -> int:
        """Numbers kept of one sample's factors; with a base, of columns if those are fewer."""
        reduced = self.sides * min(rank, self.kappa)
        if self.base == "identity":
            return reduced
        return self.n if self.base == "diagonal" else min(reduced, self.n)

    def base_numbers(self, beside_U: bool) -> int:
        """Numbers kept of P."""
        if self.base == "identity":
            return 0
        weights = 1 if beside_U else 0  # P^{-½}, beside C or v itself
        if self.base == "diagonal":
            return (1 + weights) * self.n
        h, n_G, n_A = self.shape
        r_G, r_A = min(self.base_rank, n_G), min(self.base_rank, n_A)
        vectors = n_G * r_G + n_A * r_A
        return h * (vectors + (1 + weights) * (r_G + r_A) + 2 + weights) + 2


@dataclass(frozen=True)
class Plan:
    """The form of one layer, and why."""

    dims: Dims
    form: str  # explicit, implicit, lookup, merged, plain, or a metric's own
    rank: int
    why: str

    @property
    def base(self) -> Base:
        """What stands in the place of I."""
        return self.dims.base

    @property
    def base_rank(self) -> int:
        """Directions kept of each Kronecker factor."""
        return self.dims.base_rank

    @property
    def bytes(self) -> int:
        """Memory of U and P between refreshes."""
        d = self.dims
        numbers = {
            "explicit": d.n * d.samples,
            "implicit": d.factors(self.rank) * d.samples,
            "lookup": d.samples * d.kappa * (d.n_A + 8 // d.itemsize),
            "merged": d.n * self.rank,
        }.get(self.form, 0)
        halved = d.half and self.form != "lookup" and d.own is None
        if self.form == "implicit":
            halved = halved and (self.rank >= d.kappa or d.base != "identity")
        itemsize = 2 if halved else d.itemsize
        return numbers * itemsize + d.base_numbers(self.rank > 0) * d.itemsize

    @property
    def flops(self) -> int:
        """Operations of one solve: Uᵀg and Ub, and P^{-½} before and after, or P⁻¹."""
        d = self.dims
        sides = min(d.base_rank, d.shape[1]) + min(d.base_rank, d.shape[2])
        base = {"identity": 0, "kronecker": 4 * sides + 1, "diagonal": 1}[
            d.base
        ]
        if self.form == "lookup":
            products = 4 * d.samples * d.kappa * d.n_A
        else:
            columns = {
                "explicit": d.samples,
                "implicit": d.samples * min(self.rank, d.kappa),
                "merged": self.rank,
            }.get(self.form, 0)
            products = 4 * d.n * columns
        return products + base * d.n * (2 if self.rank else 1)


def paper_form(d: Dims) -> tuple[str, str]:
    """Algorithm 1: implicit if the layer is large and its factors are the smaller."""
    if d.n < THRESHOLD:
        return "explicit", f"n < 𝒯 = {THRESHOLD:,}"
    if d.n <= d.sides * d.kappa:
        why = "n ≤ (n_G + n_A)κ: the factors would be larger than the gradient"
        return "explicit", why
    return "implicit", f"n ≥ 𝒯 and n > (n_G + n_A)κ = {d.sides * d.kappa:,}"


def plan(
    dims: Sequence[Dims],
    curvature: Curvature,
    budget: int | None = None,
    pooled: bool = False,
) -> list[Plan]:
    """One plan per layer; `pooled` where all ranks share one basis.

    Refused where the curvature needs more than `budget` bytes, with what would fit.
    """
    choose = _network_plans if curvature.blocks == "network" else _layer_plans
    plans = choose(dims, curvature, pooled)
    needed = sum(p.bytes for p in plans)
    if budget is None or needed <= budget:
        return plans
    raise ValueError(
        f"the curvature needs {size_of(needed)} where memory={curvature.memory!r} "
        f"allows {size_of(budget)}: {_what_fits(dims, curvature, budget, pooled, choose)}"
    )


Choose = Callable[[Sequence[Dims], Curvature, bool], list[Plan]]


def _what_fits(
    dims: Sequence[Dims],
    c: Curvature,
    budget: int,
    pooled: bool,
    choose: Choose,
) -> str:
    """The largest halving of the ranks that fits, in words."""
    based = c.base != "identity"
    while c.rank > 1 or (based and c.base_rank > 1):
        rank = max(1, c.rank // 2) if c.rank else 0
        base_rank = max(1, c.base_rank // 2) if based else c.base_rank
        c = replace(c, rank=rank, base_rank=base_rank)
        if sum(p.bytes for p in choose(dims, c, pooled)) <= budget:
            smaller = [f"rank={c.rank}"] if c.rank else []
            smaller += [f"base_rank={c.base_rank}"] if based else []
            return f"{' and '.join(smaller)} would fit"
    return "use fewer samples, another form or more memory"


def _layer_plans(
    dims: Sequence[Dims], c: Curvature, pooled: bool
) -> list[Plan]:
    if c.base != "identity":
        dims = [d.based(c.base_rank) for d in dims]
    return [_in_base(_layer_plan(d, c, pooled)) for d in dims]


def _layer_plan(d: Dims, c: Curvature, pooled: bool) -> Plan:
    if c.rank == 0:
        return Plan(d, "merged", 0, "the base alone")
    width = min(c.rank, d.n)  # of a merged basis
    width = width if c.averaging else min(width, d.samples)
    if pooled:
        width = min(d.samples, d.n) if c.form == "explicit" else width
        return Plan(
            d,
            "merged",
            width,
            f"k = {width} directions, the same on all ranks",
        )
    if d.own is not None:
        return _own_plan(d, d.own, c)
    if c.form != "auto":
        return Plan(
            d, c.form, width if c.form == "merged" else c.rank, "asked for"
        )
    if c.averaging:
        why = f"curvature is accumulated (decay={c.averaging})"
        return Plan(d, "merged", width, why)
    form, why = paper_form(d)
    if c.combine == "independent":
        return Plan(d, form, c.rank, why)
    if c.rank < d.samples:
        why = f"k = {width} directions instead of ϱ = {d.samples} samples"
        return Plan(d, "merged", width, why)
    return Plan(
        d, form, c.rank, f"ϱ = {d.samples} ≤ rank: nothing to merge; {why}"
    )


def _own_plan(d: Dims, own: str, c: Curvature) -> Plan:
    """Norms and embeddings stay exact, and are merged only to be accumulated."""
    kept = {
        "explicit": "no factors: its columns as they are",
        "lookup": "embedding: the rows that were looked up",
    }[own]
    if not c.averaging:
        return Plan(d, own, d.samples, kept)
    width = min(max(c.rank, d.samples), d.n)
    if own == "explicit" or d.n * width <= THRESHOLD:
        why = f"no factors; curvature is accumulated (decay={c.averaging})"
        return Plan(d, "merged", width, why)
    why = f"{kept}, replaced at each refresh since a basis would be too large"
    return Plan(d, own, d.samples, why)


def _in_base(p: Plan) -> Plan:
    """In the coordinates of P, factors may be no fewer numbers than columns."""
    d = p.dims
    if d.base == "identity" or p.form != "implicit" or d.factors(p.rank) < d.n:
        return p
    why = (
        f"{p.why}; as columns, since a {d.base} base leaves no smaller factors"
    )
    return replace(p, form="explicit", why=why)


def _network_plans(
    dims: Sequence[Dims], c: Curvature, pooled: bool
) -> list[Plan]:
    """One block: all layers merged with one k, or each with all its columns."""
    samples = max((d.samples for d in dims), default=1)
    k = min(c.rank, sum(d.n for d in dims))
    k = k if c.averaging else min(k, samples)
    merges = c.form == "auto" and (c.averaging > 0 or k < samples)
    if c.form == "merged" or merges:
        why = f"k = {k} directions of the whole network"
        return [Plan(d, "merged", k, why) for d in dims]
    plans = []
    for d in dims:
        asked = paper_form(d)[0] if c.form == "auto" else c.form
        rank = max(c.rank, d.kappa) if c.form == "auto" else c.rank
        plans.append(
            Plan(d, d.own or asked, rank, "all samples of the whole network")
        )
    return plans


def site_dims(
    site: Site, kappa: int, samples: int, half: bool = False
) -> Dims:
    """What the plan needs to know of a site."""
    shape = site.shape(site.active() or site.segments)
    itemsize = site.dtype.itemsize
    own = site.own_form
    return Dims(
        site.name, shape, kappa, samples, own, itemsize, half, site.matrix
    )


Solver = Callable[[Tensor], Tensor]  # g (n,) -> d (n,)
TRUE = torch.ones((), dtype=torch.bool, device="cpu")
Draw = Callable[..., torch.Generator]


UNSAVED = {"saved": False}  # metadata of fields that checkpoints leave out


@dataclass(frozen=True)
class LayerRefresh:
    """One layer on a refresh: what was captured of it, and what there was before."""

    plan: Plan
    U: Operator  # this rank's samples, columns u_i/√ϱ
    samples: int  # ϱ of this rank's step
    positions: int  # over all samples
    counts: list[int]  # samples on every rank
    previous: State | None  # over the same parameters
    damping: float
    precision: torch.dtype  # the least in which gradients were computed
    half: bool  # whether a basis may be kept in half precision
    generator: Draw  # the same on all ranks
    timer: AbstractContextManager[None]
    basis: Callable[
        [Tensor], Operator
    ]  # Y (k, n) -> U = Yᵀ, spread as the layer is


STATES: dict[str, type[State]] = {}  # by name, as checkpoints have them


class State(ABC):
    """What a layer keeps between refreshes: a frozen dataclass of tensors."""

    form = "state"  # of U
    base = "identity"  # what stands in the place of I
    columns = 0  # of U
    sketch_error: Tensor | float | None = 0.0
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
        found = [
            t.isfinite().all() for t in self.tensors() if t.is_floating_point()
        ]
        return torch.stack(found).all() if found else TRUE

    def spectrum(self, damping: float | None) -> tuple[Any, Any, Any]:
        """Largest eigenvalue and trace of the curvature, and λ; None where unknown."""
        return None, None, None

    def tensors(self) -> list[Tensor]:
        """All that is kept."""
        return tensors_of(self)

    @property
    def dtype(self) -> torch.dtype | None:
        """The precision that it solves in; None: in any."""
        floats = [t.dtype for t in self.tensors() if t.is_floating_point()]
        return floats[0] if floats else None

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors())


class Metric(ABC):
    """Which curvature layers keep."""

    captures = True  # whether it needs per-sample gradients at all
    per_sample = True  # whether dimension 0 has to be the sample
    reduces = False  # whether `keep` does anything
    together = False  # whether all layers share one solve
    makes: type[State] | None = (
        None  # what `init` gives; None: nothing is loaded
    )

    def __repr__(self) -> str:
        """The same on all ranks, which compare what they build."""
        return f"{type(self).__name__}()"

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
        return [Plan(d, "own", 0, type(self).__name__) for d in dims]

    def keep(self, U: Operator, dims: Dims, generator: Draw) -> Operator:
        """What of a capture waits from the backward until step()."""
        return U

    def sides(self, chosen: Plan) -> int | None:
        """The rank of two-sided corrections, which eq. 23 has; None for all others."""
        return None

    def remark(self, chosen: Plan) -> str | None:
        """What users should know of a layer's plan, if anything."""
        return None

    def accepts(self, state: Any, shape: Shape) -> State | None:
        """A loaded state as this metric has them; None where it is another's."""
        return state if self.makes and isinstance(state, self.makes) else None

    @abstractmethod
    def init(self, layer: LayerRefresh, team: Team) -> State:
        """The state of one layer."""

    def refresh(
        self, layers: Sequence[LayerRefresh], team: Team, run: Run = directly
    ) -> list[State]:
        """The states of all layers."""
        out = []
        for layer in layers:
            with layer.timer:
                out.append(self.init(layer, team))
        return out

    def solvers(
        self,
        states: Sequence[Any],
        dampings: Sequence[float],
        run: Run = directly,
    ) -> list[Solver]:
        """The solvers of several layers, each with its damping."""
        return [
            s.at(damping) for s, damping in zip(states, dampings, strict=True)
        ]


@dataclass(frozen=True)
class PowerSolver:
    """d = P⁻¹g, as long as g where it is grafted."""

    inverse: Solver
    graft: bool

    def __call__(self, g: Tensor) -> Tensor:
        d = self.inverse(g)
        return grafted(d, g) if self.graft else d


def tensors_of(*values: Any) -> list[Tensor]:
    """The tensors in nested dataclasses, each once."""
    found: dict[int, Tensor] = {}

    def walk(value: Any) -> None:
        if isinstance(value, Tensor):
            found[id(value)] = value
        elif is_dataclass(value):
            for f in fields(value):
                walk(getattr(value, f.name))

    for value in values:
        walk(value)
    return list(found.values())


def grafted(d: Tensor, g: Tensor) -> Tensor:
    """d at the length of g, so that SGD's learning rate carries over."""
    length = torch.linalg.vector_norm(d).clamp_min(torch.finfo(d.dtype).tiny)
    out: Tensor = d * (torch.linalg.vector_norm(g) / length)
    return out
