"""A look inside an optimizer, for tests and studies: `inspect(opt)` shows each layer's plan, state
and solver.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from seng.layers.sites import Segment, Site
from seng.metrics.metric import Plan


@dataclass(frozen=True)
class LayerView:
    """One covered layer."""

    site: Site
    state: Any  # what its metric keeps; None before the first refresh
    solver: Any  # that of the last step
    plan: Plan | None
    active: tuple[Segment, ...]  # the parameters that the state was built over
    refused: str | None  # why it takes the plain gradient
    owed: bool  # whether it waits for its first refresh

    @property
    def name(self) -> str:
        return self.site.name


@dataclass(frozen=True)
class Inspection:
    """Where an optimizer, or a handle of `attach`, stands."""

    layers: tuple[LayerView, ...]
    metric: Any
    steps: int
    refreshes: int
    waiting: int  # backwards that were captured and wait for a step
    armed: bool  # whether the coming backward is captured
    missed: bool  # whether the last refresh found no samples
    uncovered: dict[str, str]
    budget: int | None  # bytes that the curvature may occupy

    @property
    def sites(self) -> list[Site]:
        """Where the covered layers' parameters lie."""
        return [view.site for view in self.layers]

    @property
    def states(self) -> dict[int, Any]:
        """The layers that have curvature, by their place."""
        kept = enumerate(view.state for view in self.layers)
        return {i: state for i, state in kept if state is not None}


def inspect(optimizer: Any) -> Inspection:
    """Of a SENG, a KFAC or the handle of `attach`."""
    engine = optimizer.engine
    layers = []
    for site, r in zip(engine.sites, engine.records, strict=True):
        view = site, r.state, r.solver, r.plan, r.active, r.refused, r.owed
        layers.append(LayerView(*view))
    return Inspection(
        layers=tuple(layers),
        metric=engine.settings.metric,
        steps=engine.clock.steps,
        refreshes=engine.clock.renewals,
        waiting=len(engine.collector.samples),
        armed=engine.collector.armed,
        missed=engine.clock.missed,
        uncovered=engine.uncovered,
        budget=engine.budget,
    )
