"""What an optimizer tells its engine, and where the engine stands.

From what a user asks for to an engine's settings; what ranks cannot do is refused here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from seng.checks import check_period
from seng.distributed.team import Team, team_of
from seng.layers.sites import is_sharded
from seng.metrics.choose import metric_of, usual
from seng.metrics.curvature import Curvature
from seng.metrics.metric import Metric
from seng.optim.step_plan import StepPlan
from seng.recipes.recipe import RECIPES

ANY = Curvature()  # beside a metric that needs none


@dataclass(frozen=True)
class Settings:
    """What an optimizer tells its engine, alike on all ranks."""

    metric: Metric
    refresh_every: int
    units: str = "sgd"
    strategy: str | None = None
    strict: bool = False
    curvature: Curvature = ANY
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


# Why these two: docs/tuning.md. On digits no other value is better beyond the noise of the seeds.
DAMPING = 0.01  # of each layer's largest eigenvalue, or of P's mean one
REFRESH_EVERY = 20


def settings_of(
    curvature: Curvature | Metric | None,
    module: nn.Module | None,
    orthogonal: bool = False,
    **common: Any,
) -> Settings:
    """Settings of an engine, checked; `common` are those of any curvature."""
    check_period(common["refresh_every"])
    units, strategy = common["units"], common["strategy"]
    if units not in RECIPES:
        known = ", ".join(map(repr, RECIPES))
        raise ValueError(f"unknown units {units!r}; use one of {known}")
    team = team_of(strategy, module)
    if curvature is None:
        curvature = usual(module, strategy, orthogonal)
    if isinstance(curvature, Metric):
        return Settings(curvature, **common)
    if not isinstance(curvature, Curvature):
        raise TypeError(f"curvature is a seng.Curvature, not {curvature!r}")
    _check_units(curvature, units)
    spread = module is not None and any(map(is_sharded, module.parameters()))
    _check_ranks(curvature, team, spread)
    return Settings(metric_of(curvature), **common, curvature=curvature)


def _check_units(c: Curvature, units: str) -> None:
    recipe = RECIPES[units]
    if c.relative_damping and not recipe.relative:
        raise ValueError(
            f"units={units!r} divides by one λ for all layers, so the damping cannot be "
            "relative: use Curvature(relative_damping=False) or units='sgd'"
        )
    if c.grafts and not recipe.grafts:
        raise ValueError(
            f"units={units!r} gives directions their own length: use "
            "Curvature(graft=False) or units='sgd'"
        )


def _check_ranks(c: Curvature, team: Team, spread: bool) -> None:
    """What needs whole layers, or one process."""
    alone = c.fisher != "empirical" or c.blocks == "network"
    if alone and (team.many or spread):
        raise ValueError(
            f"fisher={c.fisher!r}, blocks={c.blocks!r}: on several ranks only "
            "fisher='empirical' with blocks='layer' runs"
        )
    based = c.base != "identity"
    if (based or c.grafts) and (team.averages or spread):
        asked = f"base={c.base!r}" if based else "graft=True"
        raise ValueError(
            f"{asked} needs whole layers and one curvature for all ranks: use "
            "strategy='shared' with whole parameters, or base='identity' without graft"
        )
    independent = c.combine == "independent"
    if team.pools and (c.form == "implicit" or independent):
        asked = "combine='independent'" if independent else "form='implicit'"
        raise ValueError(
            f"Curvature({asked}) keeps each sample's factors, and ranks that share "
            "their curvature keep one basis: leave it out, or use strategy='block', "
            "where each rank has its own"
        )
