"""What a step solves with: the layers that have curvature, each with its solver.

    d = solver(g) for every layer, d = g for all other parameters

Layers that share Uᵀg, over ranks or over the network, are solved together (`pool`). On a GPU
`seng.optim.gpu_plan` runs the same solvers with few launches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from seng.distributed.team import ALONE
from seng.layers.sites import Segment, Site
from seng.metrics.metric import Solver
from seng.metrics.woodbury import Pool, woodbury

Gradients = Mapping[nn.Parameter, Tensor]
Dampings = Mapping[nn.Parameter, float]


@dataclass(frozen=True)
class LayerSolve:
    """One layer at one step."""

    index: int
    site: Site
    active: tuple[Segment, ...]  # what its state was built over
    solver: Solver
    dtype: torch.dtype  # of the solver, whatever the parameters have become

    @property
    def params(self) -> list[nn.Parameter]:
        return [segment.param for segment in self.active]

    def gather(self, grads: Gradients) -> Tensor:
        """g (n,)."""
        return self.site.gather(self.active, grads, self.dtype)

    def scatter(
        self, d: Tensor, grads: Gradients, out: dict[Any, Tensor]
    ) -> None:
        """d (n,) into `out`, for the parameters that have a gradient."""
        for p, part in self.site.scatter(self.active, d).items():
            if p in grads:
                out[p] = part.to(p.dtype)


class StepPlan:
    """The solves of one step, one after the other."""

    def __init__(
        self, solves: Sequence[LayerSolve], pool: Pool | None = None
    ) -> None:
        self.solves, self.pool = list(solves), pool

    def solver(self, index: int) -> Solver | None:
        """That of a layer."""
        found = [s.solver for s in self.solves if s.index == index]
        return found[0] if found else None

    def holds(self, solves: Sequence[LayerSolve], grads: Gradients) -> bool:
        """Whether it serves these too: the same solvers, rewritten in place."""
        return False

    def directions(self, grads: Gradients) -> dict[nn.Parameter, Tensor]:
        """d for every gradient."""
        out = dict(grads)
        if self.solves:
            with torch.autocast(
                self.solves[0].site.lead.device.type, enabled=False
            ):
                self._solve(grads, out)
        return out

    def _solve(
        self, grads: Gradients, out: dict[nn.Parameter, Tensor]
    ) -> None:
        if self.pool is not None:
            self._solve_together(grads, out, self.pool)
            return
        for s in self.solves:
            d = s.solver(s.site.gather(s.active, grads, s.dtype))
            for p, part in s.site.scatter(s.active, d).items():
                if p in grads:
                    out[p] = part.to(p.dtype)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _solve_together(
        self, grads: Gradients, out: dict[nn.Parameter, Tensor], pool: Pool
    ) -> None:
        solvers: list[Any] = [solve.solver for solve in self.solves]
        ds = woodbury(
            solvers, [solve.gather(grads) for solve in self.solves], pool
        )
        for solve, d in zip(self.solves, ds, strict=True):
            solve.scatter(d, grads, out)


def over_ranks(solves: Sequence[LayerSolve]) -> Pool:
    """Uᵀg of parameters that are spread over ranks, in one message per team."""
    teams = []
    for solve in solves:
        solver: Any = solve.solver
        teams.append(solver.U.team if solve.site.sharded else ALONE)

    def pool(cs: list[Tensor]) -> list[Tensor]:
        for team in dict.fromkeys(teams):
            own = [
                c for c, other in zip(cs, teams, strict=True) if other == team
            ]
            team.sum_(own, "Uᵀg of spread parameters")
        return cs

    return pool


def over_layers(cs: list[Tensor]) -> list[Tensor]:
    """Uᵀg of a whole network, the sum of its layers'."""
    return [torch.stack(cs).sum(0)] * len(cs)
