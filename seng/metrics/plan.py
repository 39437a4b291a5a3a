"""Which form for which layer, from its shape, the number of samples and the memory budget, with the reason in words.

The paper stores U explicitly for small layers and G_i, A_i for large ones (its Table 1 and threshold 𝒯). Both fix the rule that
`paper_form` states; the merged form, where it may be used, needs fewer numbers than either.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from seng.layers.sites import Site
from seng.linalg.operators import Shape
from seng.metrics.base import numbers
from seng.metrics.curvature import Curvature, Metric
from seng.metrics.memory import size_of

BALANCE = 64  # positions of a batch per direction, at which a basis takes a GPU as long as the factors, or thereabouts
THRESHOLD = (
    10**6
)  # 𝒯: Table 1 keeps cases I to III (n ≤ 524,288) explicit and IV to VI (n ≥ 1,048,576) implicit

Kept = Literal["explicit", "implicit", "lookup", "merged", "plain"]


@dataclass(frozen=True)
class Dims:
    """What the plan knows of a layer."""

    name: str
    shape: Shape  # (h, n_G, n_A)
    kappa: int
    samples: int  # ϱ
    own: Literal["explicit", "lookup"] | None  # the form of a layer without factors
    itemsize: int = 4
    half: bool = False  # whether factors and bases are kept in half precision
    inputs: int = 0  # where the factors stay inside the layer's input: numbers per sample of input and output
    factored: bool = True  # whether every one of its layers has factors, so that it can have a Kronecker metric
    base: Metric = "identity"  # P, in whose coordinates U is kept
    base_rank: int = 0  # of a Kronecker metric

    @property
    def n(self) -> int:
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
    def raw(self) -> int:
        """The numbers of one sample's factors, the windows of a convolution left inside its input."""
        return self.inputs or self.sides * self.kappa

    @property
    def sides(self) -> int:
        """h·(n_G + n_A): the numbers of one column of the factors."""
        return self.shape[0] * (self.shape[1] + self.shape[2])

    def factors(self, rank: int) -> int:
        """The numbers of one sample's factors as they are kept; with a base, of its columns where no factors are smaller."""
        reduced = self.sides * min(rank, self.kappa)
        if self.base == "identity":
            return self.raw if rank >= self.kappa else reduced
        return self.n if self.base == "diagonal" else min(reduced, self.n)


Planner = Callable[[Sequence[Dims], Curvature, int | None], list["Plan"]]
NO_CURVATURE = "form='plain': no curvature"


@dataclass(frozen=True)
class Plan:
    """The form of one layer, and why."""

    dims: Dims
    form: Kept
    rank: int
    why: str
    otherwise: Literal["explicit", "implicit"] | None = (
        None  # what a merged layer keeps where `rank` directions are too few
    )
    asks: bool = True  # whether it is tried with `rank` directions at all

    @property
    def base(self) -> Metric:
        """P."""
        return self.dims.base

    @property
    def base_rank(self) -> int:
        """Of a Kronecker metric."""
        return self.dims.base_rank

    @property
    def bytes(self) -> int:
        """Memory of U and P between refreshes, at most."""
        base = numbers(self.dims.shape, self.base, self.base_rank, not self.rank)
        return (
            max(self._bytes(self.form), self._bytes(self.otherwise or "plain"))
            + base * self.dims.itemsize
        )

    def _bytes(self, form: Kept) -> int:
        d = self.dims
        numbers = {
            "explicit": d.n * d.samples,
            "implicit": d.factors(d.kappa if self.otherwise else self.rank) * d.samples,
            "lookup": d.samples * d.kappa * (d.shape[2] + 8 // d.itemsize),
            "merged": d.n * self.rank,
            "plain": 0,
        }
        reduced = (
            form == "implicit"
            and not self.otherwise
            and self.rank < d.kappa
            and d.base == "identity"
        )
        whole = (
            form == "lookup" or (form == "explicit" and d.own is not None) or reduced
        )  # they stay in full precision
        return numbers[form] * (d.itemsize if whole or not d.half else 2)

    @property
    def flops(self) -> int:
        """Operations of one solve: Uᵀg and Ub, and P^{-½} before and after, or P⁻¹."""
        d = self.dims
        sides = min(self.base_rank, d.shape[1]) + min(self.base_rank, d.shape[2])
        white = (
            {"identity": 0, "kronecker": 4 * sides + 1, "diagonal": 1}[self.base]
            * d.n
            * (2 if self.rank else 1)
        )
        columns = {
            "explicit": d.samples,
            "implicit": d.samples * min(self.rank, d.kappa),
            "lookup": 0,
            "merged": self.rank,
            "plain": 0,
        }
        looked_up = 4 * d.samples * d.kappa * d.shape[2] if self.form == "lookup" else 0
        return 4 * d.n * columns[self.form] + looked_up + white


def paper_form(d: Dims) -> tuple[Kept, str]:
    """Algorithm 1's rule: implicit where the layer is large and its factors are smaller than its gradient."""
    if d.n < THRESHOLD:
        return "explicit", f"n < 𝒯 = {THRESHOLD:,}"
    if d.n <= d.sides * d.kappa:
        return (
            "explicit",
            "n ≤ (n_G + n_A)κ: the factors would be larger than the gradient",
        )
    return "implicit", f"n ≥ 𝒯 and n > (n_G + n_A)κ = {d.sides * d.kappa:,}"


def plan(
    dims: Sequence[Dims],
    curvature: Curvature,
    budget: int | None = None,
    every: int | None = None,
) -> list[Plan]:
    """One form per layer. Where memory is short, the rank is halved; then the largest layer keeps factors, or nothing.

    `every` is the number of steps between refreshes, if it is known: a basis has to pay off within them.
    """
    if curvature.none:
        return [Plan(d, "plain", 0, NO_CURVATURE) for d in dims]
    if curvature.base != "identity":
        return _with_base(
            dims,
            curvature,
            budget,
            lambda dims, rest, room: plan(dims, rest, room, every),
        )
    if curvature.blocks == "network":
        return _of_network(dims, curvature, budget)
    asked = curvature.rank or max((d.samples for d in dims), default=1)
    plans = [_first_choice(d, curvature, curvature.rank) for d in dims]
    if every is not None and every < SOON:
        plans = [
            p
            if p.otherwise is None
            else replace(
                p, asks=False, why=f"{p.otherwise}: no basis pays off in {every} steps"
            )
            for p in plans
        ]
    needed = sum(p.bytes for p in plans)
    if budget is None or needed <= budget:
        return plans
    if (
        curvature.rank is None
    ):  # exact factors are smaller than a basis, only slower: the largest layers first
        for i in sorted(range(len(plans)), key=lambda i: -plans[i].bytes):
            if sum(p.bytes for p in plans) > budget and plans[i].otherwise is not None:
                factors = Plan(
                    dims[i],
                    "implicit",
                    dims[i].kappa,
                    f"factors as they are, to fit into {size_of(budget)}",
                )
                plans[i] = min(plans[i], factors, key=lambda p: p.bytes)
        if sum(p.bytes for p in plans) <= budget:
            return plans
    if curvature.form == "explicit":
        raise ValueError(
            f"form='explicit' needs {size_of(needed)} where memory={curvature.memory!r} allows {size_of(budget)}: "
            "use form='auto', fewer samples or more memory"
        )
    demoted: dict[str, Kept] = {}  # layers that are too large for their first choice
    while True:
        rank = asked
        while rank >= 1:
            plans = [
                _within(d, curvature, rank, budget, demoted.get(d.name)) for d in dims
            ]
            if sum(p.bytes for p in plans) <= budget:
                return plans
            rank //= 2
        largest = max(
            (p for p in plans if p.form != "plain"), key=lambda p: p.bytes
        )  # of others nothing more can go
        factors = Plan(largest.dims, "implicit", 1, "")
        smaller = (
            largest.form == "merged"
            and largest.dims.own is None
            and factors.bytes < largest.bytes
        )
        demoted[largest.dims.name] = "implicit" if smaller else "plain"


def _with_base(
    dims: Sequence[Dims], curvature: Curvature, budget: int | None, others: Planner
) -> list[Plan]:
    """P takes at most half of the memory, its rank halved until it does; the rest is U's. Alone, it may take all of it."""

    def based(rank: int) -> list[Dims]:
        kronecker = [d.factored and curvature.base == "kronecker" for d in dims]
        return [
            replace(d, base="kronecker", base_rank=rank)
            if k
            else replace(d, base="diagonal")
            for d, k in zip(dims, kronecker, strict=True)
        ]

    def taken(rank: int) -> int:
        return sum(Plan(d, "plain", 0, "").bytes for d in based(rank))

    rank = curvature.base_rank
    while (
        budget is not None
        and rank > 1
        and taken(rank) > budget / (2 if curvature.rank != 0 else 1)
    ):
        rank //= 2
    if budget is not None and taken(rank) > budget:
        raise ValueError(
            f"base={curvature.base!r} needs {size_of(taken(rank))} where memory={curvature.memory!r} allows {size_of(budget)}: "
            "use base='identity' or more memory"
        )
    if curvature.rank == 0:
        plans = [Plan(d, "merged", 0, "the base alone") for d in based(rank)]
    else:
        plans = [
            _in_base(p)
            for p in others(based(rank), replace(curvature, base="identity"), budget)
        ]
    halved = f"; base_rank {rank} to fit memory" if rank < curvature.base_rank else ""
    return [replace(p, why=p.why + halved * (p.base == "kronecker")) for p in plans]


def _in_base(p: Plan) -> Plan:
    """What becomes of it in the coordinates of P, where factors may be no fewer numbers than columns."""
    if p.form == "plain":
        return replace(p, form="merged", rank=0, why=f"the base alone: U {p.why}")
    if p.form == "implicit" and p.dims.factors(p.rank) == p.dims.n:
        return replace(
            p,
            form="explicit",
            why=f"{p.why}; as columns, since a {p.base} base leaves no smaller factors",
        )
    return p


def _of_network(
    dims: Sequence[Dims], curvature: Curvature, budget: int | None
) -> list[Plan]:
    """One block for all layers: all of them merged with one number of directions, or each with all its columns."""
    samples = max((d.samples for d in dims), default=1)
    k = min(curvature.rank or samples, sum(d.n for d in dims))
    k = k if curvature.averaging else min(k, samples)
    if curvature.form == "merged" or (
        curvature.form == "auto" and (curvature.averaging or k < samples)
    ):
        while (
            budget is not None
            and k > 1
            and sum(Plan(d, "merged", k, "").bytes for d in dims) > budget
        ):
            k //= 2
        plans = [
            Plan(d, "merged", k, f"k = {k} directions of the whole network")
            for d in dims
        ]
    else:
        form = None if curvature.form == "auto" else curvature.form
        rank = {
            d: max(curvature.rank or d.kappa, d.kappa if form is None else 1)
            for d in dims
        }
        plans = [
            Plan(
                d,
                d.own or form or paper_form(d)[0],
                rank[d],
                "all samples of the whole network",
            )
            for d in dims
        ]
    needed = sum(p.bytes for p in plans)
    if budget is not None and needed > budget:
        raise ValueError(
            f"blocks='network' needs {size_of(needed)} where memory={curvature.memory!r} allows {size_of(budget)}: "
            "use fewer samples, a smaller rank or more memory"
        )
    return plans


def pooled_plan(
    dims: Sequence[Dims],
    curvature: Curvature,
    budget: int | None = None,
    every: int | None = None,
) -> list[Plan]:
    """One basis per layer, held by all ranks; where memory is short, the rank is halved, then the largest goes without."""
    if curvature.base != "identity":
        return _with_base(
            dims,
            curvature,
            budget,
            lambda dims, rest, room: pooled_plan(dims, rest, room, every),
        )
    rank = curvature.rank or WIDEST
    if curvature.form == "explicit":
        rank = max((d.samples for d in dims), default=1)
    why = "the same on all ranks"
    if (
        curvature.traffic is not None
        and every is not None
        and rank > curvature.traffic * every
    ):
        rank = max(1, int(curvature.traffic * every))
        why += f", {rank / every:.2g} gradients per step at T = {every}"
    left = list(dims)
    while True:
        widths = {
            d.name: min(rank, d.n) if curvature.averaging else min(rank, d.n, d.samples)
            for d in left
        }
        plans = [
            Plan(
                d,
                "merged",
                widths[d.name],
                f"k = {widths[d.name]} directions, {why}",
                asks=False,
            )
            if d.name in widths
            else Plan(
                d, "plain", 0, f"does not fit into {size_of(budget or 0)} of memory"
            )
            for d in dims
        ]
        if budget is None or sum(p.bytes for p in plans) <= budget:
            return plans
        if rank > 1:
            rank //= 2
        else:
            left.remove(max(left, key=lambda d: d.n))


def _within(
    d: Dims, curvature: Curvature, rank: int, budget: int, demoted: Kept | None
) -> Plan:
    if demoted == "plain":
        return Plan(d, "plain", 0, f"does not fit into {size_of(budget)} of memory")
    if demoted == "implicit":
        return Plan(
            d,
            "implicit",
            rank,
            f"a basis does not fit into {size_of(budget)}: factors, replaced at each refresh",
        )
    choice = _first_choice(d, curvature, rank)
    shrunk = (curvature.rank is None or rank < curvature.rank) and choice.rank == rank
    return (
        replace(choice, why=f"{choice.why}; rank {rank} to fit memory")
        if shrunk
        else choice
    )


def _first_choice(d: Dims, curvature: Curvature, rank: int | None) -> Plan:
    if rank is None:
        if (
            d.own is None
            and curvature.form == "auto"
            and not curvature.averaging
            and curvature.combine == "exact"
        ):
            return _by_tolerance(d)
        rank = (
            d.samples
            if curvature.averaging or curvature.form == "merged"
            else max(d.samples, d.kappa)
        )
    if d.own is not None:
        return _own_form(d, curvature, rank)
    width = (
        min(rank, d.n) if curvature.averaging else min(rank, d.n, d.samples)
    )  # of a merged basis
    if curvature.form != "auto":
        return Plan(
            d,
            curvature.form,
            width if curvature.form == "merged" else rank,
            "asked for",
        )
    if curvature.averaging:
        return Plan(
            d,
            "merged",
            width,
            f"curvature is accumulated (decay={curvature.averaging})",
        )
    form, why = paper_form(d)
    if curvature.combine == "independent":
        return Plan(d, form, rank, why)
    if rank < d.samples:
        return Plan(
            d,
            "merged",
            width,
            f"k = {width} directions instead of ϱ = {d.samples} samples",
        )
    return Plan(d, form, rank, f"ϱ = {d.samples} ≤ rank: nothing to merge; {why}")


WIDEST = 64  # directions; where more are needed, the exact forms are the cheaper ones
FEW = 64  # positions up to which ϱκ products per number take a GPU about as long as reading ϱ numbers
SOON = 8  # steps between refreshes in which no basis pays off
LARGE = 2**16  # numbers from which a layer is worth launches of its own


def _by_tolerance(d: Dims) -> Plan:
    """As few directions as do, or U as it is."""
    few = (
        FEW if d.half else FEW // 8
    )  # products in full precision take a GPU, and a CPU, the longer
    cheaper = d.kappa <= few and d.factors(d.kappa) < d.n and d.n >= LARGE
    exact: Literal["explicit", "implicit"] = "implicit" if cheaper else "explicit"
    if d.itemsize == 8 or d.samples <= 1:
        return Plan(d, exact, max(d.samples, d.kappa), "exact in float64")
    k = min(WIDEST, d.samples - 1, d.n)
    k = min(k, max(1, d.samples * d.kappa // BALANCE)) if exact == "implicit" else k
    return Plan(
        d,
        "merged",
        k,
        f"as many directions as needed, at most {k}; else {exact}",
        exact,
    )


def _own_form(d: Dims, curvature: Curvature, rank: int) -> Plan:
    """Norms and embeddings have no factors; they stay exact, and are merged only to be accumulated."""
    assert d.own is not None
    kept = {
        "explicit": "no factors: its columns as they are",
        "lookup": "embedding: the rows that were looked up",
    }[d.own]
    if not curvature.averaging:
        return Plan(d, d.own, d.samples, kept)
    width = min(max(rank, d.samples), d.n)
    if d.own == "explicit" or d.n * width <= THRESHOLD:
        return Plan(
            d,
            "merged",
            width,
            f"no factors; curvature is accumulated (decay={curvature.averaging})",
        )
    return Plan(
        d,
        d.own,
        d.samples,
        f"{kept}, replaced at each refresh since a basis would be too large",
    )


def site_dims(
    site: Site, kappa: int, samples: int, inputs: int = 0, half: bool = False
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
        inputs,
        site.matrix,
    )
