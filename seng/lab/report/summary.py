"""From runs to numbers: for each task and method the time and the epochs to the target, with 95 % intervals over the seeds.

The interval is Student's, mean ± t(0.975, k − 1)·s/√k over k seeds; one seed has none. A seed that missed the target has no
time to it: the mean is over those that reached it, and how many did is always said beside it.

A task's runs without a label are compared with each other. Those with one belong to a study, the letters that their labels
begin with (b1024 and b4096: b), which stands by itself, beside its optimizers' runs without a label.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from math import inf, sqrt
from statistics import fmean, median, stdev
from typing import Any

from scipy.special import stdtrit  # type: ignore[import-untyped]  # scikit-learn brings it

from seng.lab.recipes import RECIPES
from seng.lab.results import Trajectory

CONFIDENCE = 0.95
OTHER = "other"  # the study of labels that begin with no letter


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds, and half the width of its confidence interval; one seed has none."""

    mean: float
    half: float | None
    count: int


def estimate(values: Iterable[float | None]) -> Estimate | None:
    """Of the values that are there."""
    there = [value for value in values if value is not None]
    if not there:
        return None
    k = len(there)
    half = (
        float(stdtrit(k - 1, (1 + CONFIDENCE) / 2)) * stdev(there) / sqrt(k)
        if k > 1
        else None
    )
    return Estimate(fmean(there), half, k)


@dataclass(frozen=True)
class Standing:
    """One method on one task."""

    name: str
    optimizer: str
    label: str
    seeds: tuple[int, ...]
    reached: int  # how many of them reached the target
    seconds: (
        Estimate | None
    )  # to the target, over those that had the machine to themselves
    epochs: Estimate | None
    final: Estimate | None  # the metric, over all seeds that have one
    best: Estimate | None
    step_ms: Estimate | None
    trials: int | None  # that chose the recipe; None: not tuned
    study: str

    @property
    def share(self) -> str:
        """2/3: reached the target, of all seeds."""
        return f"{self.reached}/{len(self.seeds)}"


@dataclass(frozen=True)
class Task:
    """What is known of one task, or of a study on it: its runs by method, and how the methods stand, the best first."""

    name: str
    study: str  # empty: the runs without a label
    metric_name: str
    higher_is_better: bool
    target: float | None
    methods: dict[str, tuple[Trajectory, ...]]  # by seed
    standings: tuple[Standing, ...]
    remarks: tuple[str, ...]

    @property
    def title(self) -> str:
        """cifar10-resnet18, runs labelled b…"""
        words = (
            "other labels"
            if self.study == OTHER
            else f"runs labelled {self.study}…"
        )
        return f"{self.name}, {words}" if self.study else self.name

    @property
    def stem(self) -> str:
        """cifar10-resnet18-b: what the names of its pictures begin with."""
        return f"{self.name}-{self.study}" if self.study else self.name

    @property
    def runs(self) -> tuple[Trajectory, ...]:
        """All of them."""
        return tuple(run for runs in self.methods.values() for run in runs)


def step_ms(run: Trajectory) -> float | None:
    """Milliseconds per step: the median between one evaluation and the next, which a slow start does not move."""
    pairs = list(zip(run.points, run.points[1:], strict=False))
    spans = [(b.seconds - a.seconds, b.step - a.step) for a, b in pairs] or [
        (run.final.seconds, run.final.step)
    ]
    each = [
        1e3 * seconds / steps
        for seconds, steps in spans
        if steps > 0 and seconds >= 0
    ]
    return median(each) if each else None


def standing(runs: Sequence[Trajectory]) -> Standing:
    """Of the runs of one method on one task, one for each seed."""
    first = runs[0]
    reached = [point for run in runs if (point := run.to_target)]
    tuning = [run.tuning for run in runs if run.tuning]
    return Standing(
        name=first.name,
        optimizer=first.optimizer,
        label=first.label,
        seeds=tuple(run.seed for run in runs),
        reached=len(reached),
        seconds=estimate(
            point.seconds
            for run in runs
            if run.timed and (point := run.to_target)
        ),
        epochs=estimate(point.epoch for point in reached),
        final=estimate(run.final.metric for run in runs),
        best=estimate(run.best.metric for run in runs),
        step_ms=estimate(step_ms(run) for run in runs if run.timed),
        trials=max((int(t.get("trials") or 0) for t in tuning), default=None),
        study=", ".join(
            dict.fromkeys(str(t["study"]) for t in tuning if t.get("study"))
        ),
    )


def summarise(trajectories: Sequence[Trajectory]) -> list[Task]:
    """The tasks, by name, each followed by its studies."""
    ordered = sorted(
        trajectories,
        key=lambda t: (t.task, t.optimizer, natural(t.label), t.seed),
    )
    found = []
    for task, study in sorted(
        {(run.task, study_of(run.label)) for run in ordered}
    ):
        runs = [
            run
            for run in ordered
            if run.task == task and study_of(run.label) in ("", study)
        ]
        optimizers = {
            run.optimizer for run in runs if study_of(run.label) == study
        }
        methods: dict[str, list[Trajectory]] = {}
        for run in runs:
            if run.optimizer in optimizers:
                methods.setdefault(run.name, []).append(run)
        found.append(_task(task, study, methods))
    return found


def study_of(label: str) -> str:
    """b of b1024; none of no label."""
    return label and ("".join(takewhile(str.isalpha, label)) or OTHER)


def natural(label: str) -> list[tuple[int, str]]:
    """So that T20 stands before T100."""
    digits = "".join(c if c.isdigit() else " " for c in label).split()
    return [(int(digits[0]) if digits else 0, label)]


def _task(name: str, study: str, methods: dict[str, list[Trajectory]]) -> Task:
    first = next(iter(methods.values()))[0]
    sign = -1 if first.higher_is_better else 1

    def place(s: Standing) -> tuple[float, float, float]:
        """Who reached the target with more seeds, then sooner, then who came nearer."""
        return (
            -s.reached / len(s.seeds),
            s.seconds.mean if s.seconds else inf,
            sign * s.best.mean if s.best else inf,
        )

    standings = tuple(
        sorted((standing(runs) for runs in methods.values()), key=place)
    )
    runs = {s.name: tuple(methods[s.name]) for s in standings}
    remarks = (*_unfinished(runs), *_recorded(runs), *_mixed(runs))
    return Task(
        name,
        study,
        first.metric_name,
        first.higher_is_better,
        first.target,
        runs,
        standings,
        remarks,
    )


def _unfinished(methods: dict[str, tuple[Trajectory, ...]]) -> list[str]:
    """Runs that have not come to their end, or came to a bad one."""
    said = []
    for name, runs in methods.items():
        for state, words in (
            ("running", "not finished"),
            ("diverged", "diverged"),
        ):
            these = [
                f"seed {run.seed} at step {run.final.step:,}"
                for run in runs
                if run.final.state == state
            ]
            if these:
                said.append(f"{name}: {words} ({', '.join(these)}).")
    return said


def _recorded(methods: dict[str, tuple[Trajectory, ...]]) -> list[str]:
    """Optimizers whose runs are of an earlier edition: their commands speak its names, at their commits."""
    known: dict[str, str] = {}
    for runs in methods.values():
        for run in runs:
            if run.recorded_as is not None:
                known[run.optimizer] = run.recorded_as
    said = []
    for name, was in known.items():
        words = f"which called it {was}, as its commands do"
        if name not in RECIPES:
            words = "and this one has it no more"
        elif was == name:
            words = (
                "in other units: its lr and weight decay are translated here"
            )
        said.append(f"{name}: of an earlier edition, {words}.")
    return said


def _mixed(methods: dict[str, tuple[Trajectory, ...]]) -> list[str]:
    """What differs between runs that are compared, and should not."""
    said = []
    of_run: dict[str, Callable[[Trajectory], list[Any]]] = {
        "Machines differ, so times do not compare": lambda run: [
            p.get("machine") for p in provenances(run)
        ],
        "Commits differ": lambda run: [
            p.get("commit") for p in provenances(run)
        ],
        "Versions of torch differ": lambda run: [
            (p.get("versions") or {}).get("torch") for p in provenances(run)
        ],
        "Targets differ": lambda run: [run.target],
        "Metrics differ": lambda run: [run.metric_name],
    }
    of_run |= {
        f"The runs' setting {key} differs": lambda run, key=key: [
            run.run.get(key)
        ]  # type: ignore[misc]
        for key in dict.fromkeys(
            key for runs in methods.values() for run in runs for key in run.run
        )
        if key != "parameters"
    }
    for words, values in of_run.items():
        groups: dict[str, dict[str, None]] = {}
        for name, runs in methods.items():
            for run in runs:
                for value in values(run):
                    groups.setdefault(
                        "unknown" if value is None else str(value), {}
                    )[name] = None
        if len(groups) > 1:
            said.append(
                f"{words}: {'; '.join(f'{value} ({_few(names)})' for value, names in groups.items())}."
            )
    for name, runs in methods.items():
        keys = dict.fromkeys(key for run in runs for key in run.recipe)
        differing = [
            key
            for key in keys
            if any(
                run.recipe.get(key) != runs[0].recipe.get(key) for run in runs
            )
        ]
        if differing:
            said.append(
                f"{name}: its seeds have different recipes ({', '.join(differing)})."
            )
    trials = {
        name: {(run.tuning or {}).get("trials") for run in runs}
        for name, runs in methods.items()
    }
    if len(set().union(*trials.values())) > 1:
        each = (
            f"{name} {', '.join(str(n or 'none') for n in counts)}"
            for name, counts in trials.items()
        )
        said.append(f"Tuning budgets differ (trials): {'; '.join(each)}.")
    return said


def provenances(run: Trajectory) -> tuple[dict[str, Any], ...]:
    """Where it ran, all of it: a resumed run may have moved."""
    return *run.earlier, run.provenance


def _few(names: Iterable[str]) -> str:
    every = list(names)
    return ", ".join(every[:6]) + (
        f" and {len(every) - 6} more" if len(every) > 6 else ""
    )
