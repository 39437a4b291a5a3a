"""From what a user asks for to an engine's settings; what ranks cannot do is refused here."""

from __future__ import annotations

from torch import nn

from seng.checks import check_period
from seng.distributed.team import Team, team_of
from seng.layers.dtensors import is_sharded
from seng.metrics.choose import metric_of
from seng.metrics.curvature import Curvature
from seng.metrics.metric import Metric
from seng.optim.settings import Settings
from seng.recipes.recipe import RECIPES

# Why these two: docs/tuning.md. On digits no other value is better beyond the noise of the seeds.
DAMPING = 0.01  # of each layer's largest eigenvalue, or of P's mean one
REFRESH_EVERY = 20


def settings_of(
    curvature: Curvature | Metric,
    module: nn.Module | None,
    *,
    refresh_every: int,
    units: str,
    strategy: str | None,
    strict: bool,
) -> Settings:
    """Settings of an engine, checked."""
    check_period(refresh_every)
    if units not in RECIPES:
        known = ", ".join(map(repr, RECIPES))
        raise ValueError(f"unknown units {units!r}; use one of {known}")
    common = {
        "refresh_every": refresh_every,
        "units": units,
        "strategy": strategy,
        "strict": strict,
    }
    if isinstance(curvature, Metric):
        return Settings(curvature, **common)  # type: ignore[arg-type]
    if not isinstance(curvature, Curvature):
        raise TypeError(f"curvature is a seng.Curvature, not {curvature!r}")
    _check_units(curvature, units)
    spread = module is not None and any(map(is_sharded, module.parameters()))
    _check_ranks(curvature, team_of(strategy, module), spread)
    exact = curvature.form == "explicit" or curvature.blocks == "network"
    return Settings(
        metric_of(curvature),
        **common,  # type: ignore[arg-type]
        samples=curvature.samples,
        fisher=curvature.fisher,
        loss=curvature.assumed,
        memory=curvature.memory,
        half=not exact,
        relative=curvature.relative_damping,
    )


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
