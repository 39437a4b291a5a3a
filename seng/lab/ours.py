"""What `seng reproduce` shows of a method, the paper's and ours: `Side`; and `Found`, the runs that ours are taken from."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from seng.lab import paper
from seng.lab.report.summary import Estimate, estimate, provenances
from seng.lab.results import Trajectory

NONE = "–"
STUDY = next(
    task for task in paper.TASKS if task.name == "cifar10-resnet18"
)  # where we vary refresh period and batch size
SVHN = "Ours on SVHN: unless the official files were at hand, crops rebuilt from the photographs and boxes, not the same pixels."


@dataclass(frozen=True)
class Side:
    """One method on one task; where nothing is known, dashes."""

    to_target: str = NONE  # seconds, or N/accuracy as the paper writes of a method that missed it
    epochs: str = NONE  # to the target
    seeds: str = NONE  # how many reached it
    final: str = NONE  # accuracy, %
    seconds: float | None = None  # to the target, for ratios
    epoch_seconds: float | None = None  # refreshes of the curvature included


def theirs(attempt: paper.Attempt | None, epochs: float | None = None) -> Side:
    """The paper's; where it does not print the epochs, its two times say them."""
    if attempt is None:
        return Side()
    epochs = attempt.epochs if epochs is None else epochs
    to_target = (
        _missed(attempt.best)
        if attempt.seconds is None
        else f"{attempt.seconds:.2f}"
    )
    said = NONE if epochs is None else f"{epochs:.1f}"
    return Side(
        to_target,
        said,
        seconds=attempt.seconds,
        epoch_seconds=attempt.epoch_seconds,
    )


def ours(runs: Sequence[Trajectory]) -> Side:
    """Means over the seeds; to the target, over those that reached it."""
    if not runs:
        return Side()
    there = [point for run in runs if (point := run.to_target)]
    seconds = estimate(
        point.seconds for run in runs if run.timed and (point := run.to_target)
    )
    best = estimate(run.best.metric for run in runs)
    epoch = estimate(
        run.final.seconds / run.final.epoch
        for run in runs
        if run.timed and run.final.epoch > 0
    )
    return Side(
        _written(seconds)
        if seconds
        else "untimed"
        if there
        else _missed(best.mean if best else None),
        _written(estimate(point.epoch for point in there)),
        f"{len(there)}/{len(runs)}",
        _written(estimate(run.final.metric for run in runs), 100),
        seconds.mean if seconds else None,
        epoch.mean if epoch else None,
    )


def ratio(value: float | None, base: float | None) -> str:
    """Of two times."""
    return NONE if value is None or not base else f"{value / base:.2f}"


def _missed(best: float | None) -> str:
    return (
        "N" if best is None else f"N/{f'{100 * best:.2f}'.removesuffix('0')}%"
    )


def _written(value: Estimate | None, scale: float = 1.0) -> str:
    """45.2 ± 1.3"""
    if value is None:
        return NONE
    places = 1 if scale == 1 and value.mean >= 10 else 2
    half = "" if value.half is None else f" ± {scale * value.half:.{places}f}"
    return f"{scale * value.mean:.{places}f}{half}"


Study = dict[
    tuple[int, str], list[Trajectory]
]  # by the number in the label, and the optimizer


@dataclass
class Found:
    """The runs of a folder; it remembers which were taken, and which were left out and why."""

    trajectories: Sequence[Trajectory]
    taken: list[Trajectory] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def runs(self, task: str, name: str, target: float) -> list[Trajectory]:
        """Of optimizer[-label] on a task: those that have come to their end, and with this target."""
        kept = []
        for run in self.trajectories:
            if (run.task, run.name) != (task, name):
                continue
            who = f"{name} on {task}, seed {run.seed}"
            if run.target != target:
                self.left_out.append(
                    f"Left out: {who}, whose target is {run.target}, not {target}."
                )
            elif run.final.state == "running":
                self.left_out.append(
                    f"Left out: {who}, which is not finished (step {run.final.step:,})."
                )
            else:
                kept.append(run)
        self.taken += kept
        return kept

    def study(self, prefix: str) -> Study:
        """Runs whose label is the prefix and a number."""
        labels = [
            (run.optimizer, re.fullmatch(rf"{prefix}(\d+)", run.label))
            for run in self.trajectories
        ]
        keys = sorted(
            {
                (optimizer, int(number[1]))
                for optimizer, number in labels
                if number
            }
        )
        runs = {
            (n, who): self.runs(STUDY.name, f"{who}-{prefix}{n}", STUDY.target)
            for who, n in keys
        }
        return {key: group for key, group in runs.items() if group}

    def remarks(self, machine: str, compares: str) -> Iterator[str]:
        """On which machine and how ours were made, and what of them compares with the paper's."""
        if not self.taken:
            yield "Ours: no runs yet."
        else:
            machines = dict.fromkeys(
                str(p.get("machine", "unknown"))
                for run in self.taken
                for p in provenances(run)
            )
            keys = dict.fromkeys(
                (
                    run.run.get("batch"),
                    run.run.get("epochs"),
                    run.run.get("amp"),
                )
                for run in self.taken
            )
            settings = (
                f"batch {b}, at most {e} epochs{', mixed precision' if amp else ''}"
                for b, e, amp in keys
            )
            yield f"Machines: the paper's {machine}; ours {'; '.join(machines)}. {compares}"
            yield f"Ours: {'; '.join(settings)}. ± is a 95 % interval over seeds, to the target over those that reached it."
        if any(run.task.startswith("svhn") for run in self.taken):
            yield SVHN
        yield from self.left_out
