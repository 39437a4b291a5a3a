"""What a search for a recipe looks at: the values it may try, in which order, and the data it may see.

The first trial of every search is the task's own recipe. After that either TPE draws from the ranges of the recipe
(`Recipe.space`), or the points of the paper's grids come one by one. The test set is never looked at: a tenth of the training
set stands in for it.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil, log
from typing import Any, Literal

import optuna
import torch
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
)
from optuna.trial import FrozenTrial, Trial

from seng.lab import paper
from seng.lab.datasets import Arrays, Data
from seng.lab.recipe import Between, OneOf, Recipe, Space
from seng.lab.results import PLAIN
from seng.lab.tasks import LENGTHS, Task

STARTUP = 4  # trials before TPE models, and before anything is pruned
EDGE = 0.05  # of a range: a best value that close to its end may lie beyond it
Kind = Literal["tpe", "grid"]


def held_out(data: Data) -> Data:
    """The training set alone: its last tenth, of a fixed order, is the test set. A text is cut as it is."""
    x, y = data.train.x, data.train.y
    cut = len(x) - len(x) // 10
    note = f"{data.note} A tenth of the training set stands in for the test set.".strip()
    if x.dim() == 1:
        return replace(
            data,
            train=Arrays(x[:cut], y[:cut]),
            test=Arrays(x[cut:], y[cut:]),
            note=note,
        )
    order = torch.randperm(
        len(x), generator=torch.Generator().manual_seed(0)
    ).to(x.device)
    rows = order[:cut].sort().values, order[cut:].sort().values
    train, test = (Arrays(x[part], y[part]) for part in rows)
    return replace(data, train=train, test=test, note=note)


@dataclass(frozen=True)
class Plan:
    """The search for one optimizer's recipe on a task."""

    task: Task
    optimizer: str
    trials: int = 16
    epochs: float | None = None  # None: the task's
    batch: int | None = None
    sampler: Kind = "tpe"
    prune: bool = True
    seed: int = 100  # of the sampler and of every training
    label: str = ""
    fixed: Mapping[str, Any] = field(
        default_factory=dict
    )  # fields that are given, and not searched

    def __post_init__(self) -> None:
        if self.trials < 1:
            raise ValueError(
                f"--trials is a count of at least 1, not {self.trials}"
            )
        if self.budget <= 0 or self.size < 1:
            raise ValueError(
                f"--epochs and --batch are positive, not {self.budget:g} and {self.size}"
            )
        if self.label and not PLAIN.fullmatch(self.label):
            raise ValueError(
                f"the label {self.label!r} names a study: it may have letters, digits and . = + - _ only"
            )
        if self.sampler == "grid" and self.fixed:
            raise ValueError(
                "--set goes with --sampler tpe: the paper's grid has its own values"
            )
        if self.sampler == "grid" and not self.grids:
            known = sorted(
                {f"{name} (…-{network})" for name, network in paper.GRIDS}
            )
            raise ValueError(
                f"the paper has no grid for {self.optimizer} on {self.task.name}, only for {', '.join(known)}"
            )

    @property
    def budget(self) -> float:
        """Epochs."""
        return float(self.task.epochs if self.epochs is None else self.epochs)

    @property
    def size(self) -> int:
        """Of a batch."""
        return self.task.batch if self.batch is None else self.batch

    @property
    def key(self) -> str:
        """optimizer[-label]"""
        return self.optimizer + (f"-{self.label}" if self.label else "")

    @property
    def name(self) -> str:
        """Of the study."""
        return f"{self.task.name}-{self.key}"

    @property
    def direction(self) -> Literal["maximize", "minimize"]:
        """As Optuna calls it."""
        return "maximize" if self.task.problem.higher_is_better else "minimize"

    @property
    def settings(self) -> dict[str, Any]:
        """What all trials of a study have in common, so that they can be compared."""
        return {
            **{
                "task": self.task.name,
                "optimizer": self.optimizer,
                "label": self.label,
                "epochs": self.budget,
            },
            **{
                "batch": self.size,
                "sampler": self.sampler,
                "prune": self.prune,
                "seed": self.seed,
            },
            **{
                "metric": self.task.problem.metric,
                "direction": self.direction,
            },
            **({"set": self.given} if self.fixed else {}),
            "first": {**self.first, **self.lengths},
        }

    @property
    def lengths(self) -> dict[str, Any]:
        """The fields in epochs that the budget shortens or lengthens."""
        return self.task.lengths(self.optimizer, self.budget)

    @cached_property
    def base(self) -> Recipe:
        """The task's own recipe, in this budget, with what is given: the first trial."""
        return self.task.recipe(self.optimizer, self.budget).with_(self.fixed)

    @property
    def given(self) -> dict[str, Any]:
        """What `--set` gave, in the types of the recipe."""
        return {name: getattr(self.base, name) for name in self.fixed}

    @property
    def grids(self) -> tuple[paper.Grid, ...]:
        """The paper's for this optimizer and network."""
        return paper.grids(self.optimizer, self.task.name)

    @cached_property
    def points(self) -> list[dict[str, Any]]:
        """Of the grids, in the order of the seed, and each with every field that is in any of them."""
        fields = dict.fromkeys(name for grid in self.grids for name in grid)
        default = {name: getattr(self.base, name) for name in fields}
        found = []
        for point in (
            point for grid in self.grids for point in paper.points(grid)
        ):
            if self.optimizer == "kfac":
                point = paper.in_sgd_units(point)
            point = {
                **point,
                **{
                    name: self.task.length(name, point[name], self.budget)
                    for name in LENGTHS
                    if point.get(name)
                },
            }
            found.append({**default, **point})
        random.Random(self.seed).shuffle(found)
        return [point for point in found if point != default]

    @cached_property
    def space(self) -> Space:
        """What is searched. A range of scales moves along with the task's own value; where that is 0, it stays 0."""
        if self.sampler == "grid":
            fields = self.points[0] if self.points else {}
            columns = {
                name: [
                    getattr(self.base, name),
                    *(point[name] for point in self.points),
                ]
                for name in fields
            }
            return {
                name: OneOf(tuple(dict.fromkeys(column)))
                for name, column in columns.items()
            }
        usual = type(self.base)()
        allowed = [
            (name, range_)
            for name, range_ in self.base.space.items()
            if name not in self.fixed
        ]
        space = {
            name: _around(
                range_, getattr(self.base, name), getattr(usual, name)
            )
            for name, range_ in allowed
        }
        return {
            name: allowed
            for name, allowed in space.items()
            if allowed is not None
        }

    @property
    def first(self) -> dict[str, Any]:
        """The task's own values of the searched fields."""
        return {name: getattr(self.base, name) for name in self.space}

    @property
    def asked(self) -> int:
        """Trials that there are to be: a small grid has fewer points than allowed."""
        return (
            min(self.trials, 1 + len(self.points))
            if self.sampler == "grid"
            else self.trials
        )

    def suggest(self, trial: Trial) -> Recipe:
        """The recipe of a trial."""
        return self.base.with_(
            {
                name: _suggest(trial, name, allowed)
                for name, allowed in self.space.items()
            }
        )

    def pruner(self) -> optuna.pruners.BasePruner:
        """Stops what is below the median of the trials before, after a third of the budget."""
        if not self.prune:
            return optuna.pruners.NopPruner()
        evaluations = max(1, round(self.budget * self.task.evaluations))
        return optuna.pruners.MedianPruner(
            n_startup_trials=STARTUP, n_warmup_steps=ceil(evaluations / 3)
        )


def _around(
    allowed: Between | OneOf, own: Any, usual: Any
) -> Between | OneOf | None:
    if not isinstance(own, str) and own <= 0:
        return None
    if isinstance(allowed, OneOf):
        return (
            allowed if own in allowed.values else OneOf((own, *allowed.values))
        )
    if not allowed.log or usual <= 0:  # as the library's weight decay is
        return replace(
            allowed, low=min(allowed.low, own), high=max(allowed.high, own)
        )
    return replace(
        allowed, low=allowed.low * own / usual, high=allowed.high * own / usual
    )


def _suggest(trial: Trial, name: str, allowed: Between | OneOf) -> Any:
    if isinstance(allowed, OneOf):
        return trial.suggest_categorical(name, allowed.values)
    return trial.suggest_float(
        name, allowed.low, allowed.high, log=allowed.log
    )


class Seeded(optuna.samplers.BaseSampler):
    """TPE with chance of its own for every trial: the same search again, however many machines and interruptions there are."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.current: tuple[int, optuna.samplers.TPESampler] | None = None

    def _of(self, trial: FrozenTrial) -> optuna.samplers.TPESampler:
        if self.current is None or self.current[0] != trial.number:
            seed = (1_000_003 * self.seed + trial.number) % 2**32
            tpe = optuna.samplers.TPESampler(
                n_startup_trials=STARTUP,
                seed=seed,
                multivariate=True,
                constant_liar=True,
            )
            self.current = trial.number, tpe
        return self.current[1]

    def infer_relative_search_space(
        self, study: optuna.Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """What is drawn together."""
        return self._of(trial).infer_relative_search_space(study, trial)

    def sample_relative(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        search_space: dict[str, BaseDistribution],
    ) -> dict[str, Any]:
        """All of it."""
        return self._of(trial).sample_relative(study, trial, search_space)

    def sample_independent(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        """One by one, as in the first trials."""
        return self._of(trial).sample_independent(
            study, trial, param_name, param_distribution
        )


def at_the_edge(
    values: Mapping[str, Any], ranges: Mapping[str, BaseDistribution]
) -> list[str]:
    """The fields whose value lies at an end of its range: there may be a better one beyond."""
    return [
        name
        for name, allowed in ranges.items()
        if name in values and _at_edge(values[name], allowed)
    ]


def _at_edge(value: Any, allowed: BaseDistribution) -> bool:
    if isinstance(allowed, FloatDistribution):
        scale = log if allowed.log else float
        low, high, at = scale(allowed.low), scale(allowed.high), scale(value)
        return min(at - low, high - at) <= EDGE * (high - low)
    numbers = (
        _numbers(allowed.choices)
        if isinstance(allowed, CategoricalDistribution)
        else []
    )
    return len(numbers) > 2 and value in (
        min(numbers),
        max(numbers),
    )  # of two, both would be


def _numbers(choices: Sequence[Any]) -> list[float]:
    return [
        choice
        for choice in choices
        if isinstance(choice, int | float) and not isinstance(choice, bool)
    ]
