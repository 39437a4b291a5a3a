"""What an optimizer tells its engine, and where the engine stands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from seng.layers.fisher import Fisher, Loss
from seng.metrics.metric import Metric
from seng.optim.step_plan import StepPlan


@dataclass(frozen=True)
class Settings:
    """What an optimizer tells its engine, alike on all ranks."""

    metric: Metric
    refresh_every: int
    units: str = "sgd"
    strategy: str | None = None
    strict: bool = False
    samples: int | None = None  # ϱ, over all ranks
    fisher: Fisher = "empirical"
    loss: Loss = "squares"
    memory: int | float | None = None
    half: bool = True  # whether bases may be kept in half precision
    relative: bool = True  # whether the damping is relative
    name: str = "SENG"  # of the optimizer, for messages


@dataclass
class Clock:
    """Where the engine stands."""

    seed: int  # of the sketches
    steps: int = 0
    renewals: int = 0  # refreshes so far
    due: bool = False  # whether the coming step refreshes
    owed: bool = False  # whether a layer in use has no curvature yet
    missed: bool = False  # whether the last refresh found no samples at all
    loaded: bool = False  # whether a loaded state dropped what was captured
    last_refresh: int | None = None  # the step of it


@dataclass
class StepCache:
    """What the last step solved with, and under which dampings and gradients."""

    key: Any = None
    plan: StepPlan | None = None
    refreshed: Sequence[int] = ()  # layers whose directions are to be compared

    def keep(
        self,
        key: Any,
        plan: StepPlan,
        refreshed: Sequence[int],
        complete: bool,
    ) -> None:
        """An incomplete one, with layers that still want curvature, is not reused."""
        self.key = key if complete else None
        self.plan, self.refreshed = plan, refreshed
