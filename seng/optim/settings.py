"""What an optimizer tells its engine, and where the engine stands.

From what a user asks for to an engine's settings; what ranks cannot do is refused here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from seng.checks import Periods, check_period, periods_of
from seng.distributed.team import Team, team_of
from seng.layers.sites import is_sharded
from seng.metrics.choose import metric_of
from seng.metrics.curvature import Curvature
from seng.metrics.metric import Metric
from seng.optim.step_plan import StepPlan
from seng.recipes.recipe import Recipe, recipe_of

ANY = Curvature(samples=None)  # beside a metric that needs none


@dataclass(frozen=True)
class Settings:
    """What an optimizer tells its engine, alike on all ranks."""

    metric: Metric
    refresh_every: Periods
    recipe: str = "sgd"
    strategy: str | None = None
    sample_dim: int = 0
    strict: bool = False
    curvature: Curvature = ANY
    name: str = "SENG"  # of the optimizer, for messages

    def refreshes(self, step: int) -> bool:
        """Whether a step is one of those that refresh."""
        periods = periods_of(self.refresh_every)
        start = max(s for s in periods if s <= step)
        return (step - start) % periods[start] == 0


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

    def stream(self, call: int) -> int:
        """The seed of one call of the module since the last step."""
        return hash((self.seed, self.steps, call)) % 2**63


@dataclass
class StepCache:
    """What the last step solved with, and under which dampings and gradients."""

    key: Any = None
    plan: StepPlan | None = None
    refreshed: Sequence[int] = ()  # layers whose directions are to be compared


def settings_of(
    curvature: Curvature | Metric | None,
    module: nn.Module | None,
    recipe: str = "sgd",
    refresh_every: Periods | None = None,
    **common: Any,
) -> Settings:
    """Settings of an engine, checked; `common` are those of any metric."""
    if refresh_every is None:
        refresh_every = recipe_of(recipe).refresh_every
    common |= {"recipe": recipe, "refresh_every": refresh_every}
    if isinstance(curvature, Metric):
        settings = Settings(curvature, **common)
        _check_common(settings, module)
        return settings
    curvature = Curvature() if curvature is None else curvature
    if not isinstance(curvature, Curvature):
        raise TypeError(f"curvature is a seng.Curvature, not {curvature!r}")
    metric = metric_of(curvature, recipe_of(recipe).power)
    settings = Settings(metric, **common, curvature=curvature)
    _check_common(settings, module)
    _check_units(curvature, recipe_of(settings.recipe))
    _check_ranks(curvature, team_of(settings.strategy, module), module)
    return settings


def _check_common(s: Settings, module: nn.Module | None) -> None:
    """What holds for every metric."""
    check_period(s.refresh_every)
    if type(s.sample_dim) is not int or s.sample_dim < 0:
        raise ValueError(
            "sample_dim is the dimension of the samples, 0 or more, not "
            f"{s.sample_dim!r}"
        )
    what = "parameters spread over ranks (FSDP2)"
    lagged = team_of(s.strategy, module).strategy == "lagged"
    if lagged:
        what = "strategy='lagged'"
    kind = recipe_of(s.recipe)
    if (kind.prompt and lagged) or (kind.whole and _is_spread(module)):
        on = "whole matrices" if kind.whole else "gradients"
        raise ValueError(
            f"recipe={s.recipe!r} works on {on} of this step: it does not run with "
            f"{what}; use recipe='sgd'"
        )


def _is_spread(module: nn.Module | None) -> bool:
    return module is not None and any(map(is_sharded, module.parameters()))


def _check_units(c: Curvature, recipe: type[Recipe]) -> None:
    if recipe.paper and (c.relative_damping or c.base is not None):
        raise ValueError(
            f"recipe={recipe.name!r} divides by one λ for all layers, over λI: write "
            "SENG(model, **seng.presets.paper()), or give "
            "Curvature(base=None, relative_damping=False)"
        )


def _check_ranks(c: Curvature, team: Team, module: nn.Module | None) -> None:
    """What needs whole layers, or one process."""
    spread = _is_spread(module)
    alone = c.fisher != "empirical" or c.blocks == "network"
    if alone and (team.many or spread):
        raise ValueError(
            f"fisher={c.fisher!r}, blocks={c.blocks!r}: on several ranks only "
            "fisher='empirical' with blocks='layer' runs"
        )
    lagged = team.strategy == "lagged" and not spread  # which none has
    if c.base is not None and lagged:
        raise ValueError(
            "strategy='lagged' has no Kronecker base, whose length needs this step's "
            "gradient: give curvature=seng.Curvature(base=None)"
        )
    independent = c.combine == "independent"
    if team.pools and (c.form == "implicit" or independent):
        asked = "combine='independent'" if independent else "form='implicit'"
        raise ValueError(
            f"Curvature({asked}) keeps each sample's factors, and ranks that share "
            "their curvature keep one basis: leave it out, or use strategy='block', "
            "where each rank has its own"
        )
