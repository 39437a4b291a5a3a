"""What a step solves with: the layers that have curvature, each with its solver.

    d = solver(g) for every layer, d = g for all other parameters

Layers that share Uᵀg, over ranks or over the network, are solved together (`pool`). On a GPU
`seng.optim.gpu_plan` runs the same solvers with few launches. A `LayerRecord` holds what is known
of a layer from refresh to refresh.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from seng.distributed.sharded import holders
from seng.distributed.team import ALONE
from seng.gpu.recorder import settle
from seng.layers.sites import Segments, Site
from seng.metrics.metric import Metric, State, grafted
from seng.metrics.woodbury import LowRankSolver, Pool, together

Gradients = Mapping[nn.Parameter, Tensor]
Dampings = Mapping[nn.Parameter, float]
Directions = dict[nn.Parameter, Tensor]


class StepPlan:
    """The solves of one step, one after the other."""

    def __init__(
        self, solves: Sequence[LayerRecord], pool: Pool | None = None
    ) -> None:
        self.solves, self.pool = list(solves), pool
        self.solvers = [s.solver for s in solves]
        low_rank = [isinstance(s, LowRankSolver) for s in self.solvers]
        self.together = all(low_rank)

    def solver(self, index: int) -> Any:
        """The solver of a layer, if it has one."""
        return next((s.solver for s in self.solves if s.index == index), None)

    def holds(self, solves: Sequence[LayerRecord], grads: Gradients) -> bool:
        """Whether it serves these too: the same solvers, rewritten in place."""
        return False

    def directions(self, grads: Gradients) -> Directions:
        """d for every gradient."""
        out = dict(grads)
        if self.solves:
            device = self.solves[0].site.lead.device.type
            with torch.autocast(device, enabled=False):
                self._solve(grads, out)
        return out

    def graft(self, grads: Gradients, ds: Directions) -> None:
        """Bring directions over P to the length of their layer's gradient."""
        for s in self.solves:
            if getattr(s.solver, "base", None) is not None:
                d = grafted(s.gather(ds), s.gather(grads))
                s.scatter(d, grads, ds)

    def _solve(self, grads: Gradients, out: Directions) -> None:
        gs = [s.gather(grads) for s in self.solves]
        if self.pool is not None:
            ds = _pooled(self.solvers, gs, self.pool)
        elif self.together:
            ds = together(self.solvers, gs)
        else:
            pairs = zip(self.solvers, gs, strict=True)
            ds = [solver(g) for solver, g in pairs]
        for s, d in zip(self.solves, ds, strict=True):
            s.scatter(d, grads, out)


# Messages are not compiled.
_pooled: Any = torch.compiler.disable(together)


def over_ranks(solves: Sequence[LayerRecord]) -> Pool:
    """Uᵀg of parameters that are spread over ranks, in one message per team."""
    teams = [s.solver.U.team if s.site.sharded else ALONE for s in solves]

    def pool(parts: list[list[Tensor]]) -> list[list[Tensor]]:
        for team in dict.fromkeys(teams):
            own = [i for i, other in enumerate(teams) if other == team]
            sums = [t for i in own for t in parts[i]]
            team.sum_(sums, "Uᵀg of spread parameters")
        return parts

    return pool


def over_layers(parts: list[list[Tensor]]) -> list[list[Tensor]]:
    """Uᵀg of a whole network, the sum of its layers'."""
    cs = [c for (c,) in parts]
    return [[torch.stack(cs).sum(0)]] * len(cs)


def plan_of(
    solves: Sequence[LayerRecord],
    grads: Gradients,
    metric: Metric,
    updates: bool,
    traced: bool,
) -> StepPlan:
    """How a step's layers are solved; `updates`: kernels update all parameters too."""
    if solves and metric.together:
        return StepPlan(solves, over_layers)
    if any(solve.site.sharded for solve in solves):
        return StepPlan(solves, over_ranks(solves))
    devices = {solve.site.lead.device for solve in solves}
    if traced or len(devices) != 1 or devices.pop().type != "cuda":
        return StepPlan(solves)
    from seng.optim.gpu_plan import GpuPlan

    return GpuPlan(solves, grads, updates)


class Timer:
    """The seconds of `with timer:`; on a GPU by events, so that only reading them waits."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"

    def _now(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def __enter__(self) -> None:
        self.start = self._now()

    def __exit__(self, *_: object) -> None:
        self.end = self._now()

    @property
    def seconds(self) -> float:
        if not self.cuda:
            return float(self.end - self.start)
        self.end.synchronize()
        return float(self.start.elapsed_time(self.end)) / 1000


@dataclass(frozen=True)
class Refresh:
    """What one refresh of one layer leaves for the record."""

    step: int
    timer: Timer  # of all layers
    compared: Tensor  # cos(g, d) and ‖d‖/‖g‖ at that step


def compare(g: Tensor, d: Tensor, site: Site) -> Tensor:
    """cos(g, d) and ‖d‖/‖g‖; 1 and 1 for a gradient of zeros."""
    products = torch.stack([g @ g, d @ d, g @ d])
    if site.sharded:  # each rank has a part
        holders(site.lead).sum_([products], "comparing directions")
    size, length = products[:2].sqrt()
    tiny = torch.finfo(g.dtype).tiny
    cosine = products[2] / (size * length).clamp_min(tiny)
    ratio = length / size.clamp_min(tiny)
    return torch.where(size == 0, 1, torch.stack([cosine, ratio]))


@dataclass
class LayerRecord:
    """One layer: its state and solver, or why it has none."""

    index: int
    site: Site
    state: Any = None
    active: Segments = ()  # what the state was built over
    plan: Any = None  # the last one
    refused: str | None = None  # why it takes the plain gradient by decision
    owed: bool = False  # in use, and no curvature yet
    refresh: Refresh | None = None  # the last one
    checked: bool = False  # whether its samples add up to the gradient
    dropped: int = 0  # refreshes that were not finite
    failed: int = 0  # solves of earlier states that fell back to the gradient
    solver: Any = None  # g (n,) -> d (n,)
    solved: Any = None  # the state and the damping that the solver is for
    dtype: Any = None  # of the solver, whatever the parameters have become
    other: bool = False  # whether what was loaded is of another kind

    @property
    def params(self) -> list[nn.Parameter]:
        return [segment.param for segment in self.active]

    def gather(self, grads: Gradients) -> Tensor:
        """g (n,)."""
        return self.site.gather(self.active, grads, self.dtype)

    def scatter(self, d: Tensor, grads: Gradients, out: Directions) -> None:
        """d (n,) into `out`, for the parameters that have a gradient."""
        for p, part in self.site.scatter(self.active, d).items():
            if p in grads:
                out[p] = part.to(p.dtype)

    def uses(self, grads: Gradients) -> bool:
        """Whether it has a state and a gradient to solve with."""
        if self.state is None:
            return False
        return not grads.keys().isdisjoint(self.params)

    def install(self, state: State, active: Segments, on_gpu: bool) -> None:
        """A new state; on a GPU at the old one's place, where recordings read."""
        old = self.state
        if on_gpu and self.active == active:
            self.state = None  # interrupted, it leaves nothing half-written
            state = settle(old, state)
        if state is not old:  # a solver of before has tensors of its own
            self.solver = None
        self.state, self.active = state, active
        self.owed, self.refused, self.solved = False, None, None

    def previous(self, active: Segments) -> State | None:
        """The state of before, if it is one of the same parameters and precision."""
        if self.state is None or self.active != active:
            return None
        alike = self.state.dtype in (self.site.dtype, None)
        return self.state if alike else None
