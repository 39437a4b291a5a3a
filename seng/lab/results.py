"""What a training run leaves behind: results/<task>/<optimizer>[-<label>]-<seed>.jsonl, one JSON object for each evaluation.

Every line is complete: whoever has one knows the task, the recipe, the machine and the commit. So a file that was cut in half
loses only its last line, and a resumed run only goes on appending. `append` writes, `read` reads; what cannot be read is
skipped, and a sentence says so.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, fields
from math import isfinite
from pathlib import Path
from typing import Any

FORMAT = 1
ROUNDING = 1e-7  # of a metric in float32, relative
STATES = ("running", "target", "finished", "diverged")
PLAIN = re.compile(r"[\w.=+-]+")  # what a file's name can hold everywhere


@dataclass(frozen=True)
class Point:
    """One evaluation. None: not a finite number, as after a divergence."""

    step: int
    epoch: float
    seconds: float  # of training since the start, without evaluation
    train_loss: float | None
    loss: float | None  # held out, as is the metric
    metric: float | None
    state: str  # one of STATES


@dataclass(frozen=True)
class Trajectory:
    """One run: an optimizer with a recipe and a seed on a task, evaluation by evaluation."""

    task: str
    optimizer: str
    label: str
    seed: int
    recipe: dict[str, Any]
    run: dict[str, Any]
    target: float | None
    metric_name: str
    higher_is_better: bool
    provenance: dict[str, Any]
    tuning: dict[str, Any] | None
    points: tuple[Point, ...]  # by step, at least one
    earlier: tuple[
        dict[str, Any], ...
    ] = ()  # the provenance of a resumed run's earlier parts, where it is another
    recorded_as: str | None = (
        None  # what its commit calls the optimizer, where an earlier edition made it
    )

    @property
    def name(self) -> str:
        """optimizer[-label]"""
        return (
            f"{self.optimizer}-{self.label}" if self.label else self.optimizer
        )

    @property
    def timed(self) -> bool:
        """Whether its seconds mean something: it had the machine to itself."""
        return not self.run.get("shared")

    @property
    def to_target(self) -> Point | None:
        """The first evaluation that reaches the target."""
        return next(
            (
                p
                for p in self.points
                if reaches(p.metric, self.target, self.higher_is_better)
            ),
            None,
        )

    @property
    def final(self) -> Point:
        """The last evaluation."""
        return self.points[-1]

    @property
    def best(self) -> Point:
        """The evaluation with the best metric, the first of equals."""
        known = [point for point in self.points if point.metric is not None]
        sign = -1 if self.higher_is_better else 1
        return min(
            known,
            key=lambda point: sign * (point.metric or 0.0),
            default=self.final,
        )


def reaches(
    metric: float | None, target: float | None, higher_is_better: bool
) -> bool:
    """Whether a metric is as good as its target; 9,400 of 10,000 are 94 %, also where float32 has 0.93999999."""
    if metric is None or target is None:
        return False
    close = ROUNDING * abs(target)
    return (
        metric >= target - close
        if higher_is_better
        else metric <= target + close
    )


def path_of(
    folder: Path, task: str, optimizer: str, label: str, seed: int
) -> Path:
    """The file of a run."""
    for what, word in (
        ("task", task),
        ("optimizer", optimizer),
        ("label", label),
    ):
        if (word or what != "label") and not PLAIN.fullmatch(word):
            raise ValueError(
                f"the {what} {word!r} names a file: it may have letters, digits and . = + - _ only"
            )
    return (
        folder
        / task
        / f"{optimizer}{'-' if label else ''}{label}-{seed}.jsonl"
    )


def append(path: Path, line: dict[str, Any]) -> None:
    """Write one evaluation, whole or not at all, and have it on the disk; what is not finite is written as null."""
    text = (
        json.dumps(
            _finite({"format": FORMAT, **line}),
            ensure_ascii=False,
            allow_nan=False,
        )
        + "\n"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+", buffering=0) as file:
        length = file.seek(0, os.SEEK_END)
        if (
            length
        ):  # a line that was cut in half must not take this one with it
            file.seek(length - 1)
            text = text if file.read(1) == b"\n" else "\n" + text
        data = text.encode()
        try:
            if file.write(data) != len(data):
                raise OSError(
                    errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)
                )
            os.fsync(file.fileno())
        except OSError:
            file.truncate(length)
            raise


def read(folder: Path) -> tuple[list[Trajectory], list[str]]:
    """The runs in <folder>/<task>/*.jsonl, and a sentence for whatever in them was skipped. Other files are left alone."""
    runs: dict[tuple[str, str, int], tuple[Path, Trajectory]] = {}
    skipped: list[str] = []
    for path in sorted(folder.glob("*/*.jsonl")):
        trajectory = _read_file(path, skipped)
        if trajectory is None:
            continue
        key = trajectory.task, trajectory.name, trajectory.seed
        if key in runs:
            task, name, seed = key
            skipped.append(
                f"{path}: skipped, since {runs[key][0]} is the same run ({name} on {task}, seed {seed})."
            )
        else:
            runs[key] = path, trajectory
    return [trajectory for _, trajectory in runs.values()], skipped


def _read_file(path: Path, skipped: list[str]) -> Trajectory | None:
    why: dict[str, list[int]] = {}  # the reason -> the numbers of its lines
    lines: dict[int, dict[str, Any]] = {}
    try:
        content = path.read_bytes()
    except OSError as error:
        skipped.append(f"{path}: cannot be read ({error.strerror}), skipped.")
        return None
    for number, text in enumerate(content.split(b"\n"), 1):
        if text.strip():
            line, wrong = _parse(text)
            if wrong:
                why.setdefault(wrong, []).append(number)
            else:
                lines[number] = line
    last = lines[max(lines)] if lines else {}
    kept = []
    for number, line in lines.items():
        if any(
            line[key] != last[key]
            for key in ("task", "optimizer", "label", "seed", "recipe")
        ):
            why.setdefault(
                "not of the run or the recipe that the file ends with", []
            ).append(number)
        else:
            kept.append(line)
    skipped += [
        f"{path}, {_lines(numbers)}: {reason}; skipped."
        for reason, numbers in why.items()
    ]
    if not content.strip():
        skipped.append(f"{path}: empty, skipped.")
    return _trajectory(kept) if kept else None


def _parse(text: bytes) -> tuple[dict[str, Any], str]:
    """A line, and what is wrong with it."""
    try:
        line = json.loads(text)
    except ValueError:  # also what is not UTF-8
        return {}, "cut in half or not JSON"
    if not isinstance(line, dict) or "format" not in line:
        return {}, "not a line of results (it has no format number)"
    if line["format"] != FORMAT:
        return (
            {},
            f"written in format {line['format']} by another version of seng, this one reads format {FORMAT}",
        )
    line = _finite(line)
    for kinds, names in FIELDS.items():
        for name in names:
            if name not in line:
                return {}, f"{name} is missing"
            if not isinstance(line[name], kinds) or (
                isinstance(line[name], bool) and bool not in kinds
            ):
                return (
                    {},
                    f"{name} is {str(line[name])[:40]!r}, which is not {' or '.join(k.__name__ for k in kinds)}",
                )
    if line["state"] not in STATES:
        return (
            {},
            f"state is {line['state'][:40]!r}, which is none of {', '.join(STATES)}",
        )
    return line, ""


FIELDS: dict[tuple[type, ...], tuple[str, ...]] = {
    (str,): ("task", "optimizer", "label", "metric_name", "state"),
    (int,): ("seed", "step"),
    (int, float): ("epoch", "seconds"),
    (int, float, type(None)): ("target", "train_loss", "loss", "metric"),
    (bool,): ("higher_is_better",),
    (dict,): ("recipe", "run", "provenance"),
    (dict, type(None)): ("tuning",),
}
OF_POINT = tuple(field.name for field in fields(Point))
HEAD = tuple(
    field.name
    for field in fields(Trajectory)
    if field.name not in ("points", "earlier", "recorded_as")
)


def _trajectory(lines: list[dict[str, Any]]) -> Trajectory:
    points: list[Point] = []
    for line in lines:
        point = Point(*(line[name] for name in OF_POINT))
        while (
            points and points[-1].step >= point.step
        ):  # resumed from before it: that part was run again
            points.pop()
        points.append(point)
    last = lines[-1]
    earlier: list[dict[str, Any]] = []
    for line in lines:
        if (
            line["provenance"] != last["provenance"]
            and line["provenance"] not in earlier
        ):
            earlier.append(line["provenance"])
    shared = {name: last[name] for name in HEAD}
    return Trajectory(
        **shared,
        points=tuple(points),
        earlier=tuple(earlier),
        recorded_as=last.get("recorded_as"),
    )


def _lines(numbers: Iterable[int]) -> str:
    """line 3 · lines 1 to 4, 7"""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    said = ", ".join(" to ".join(map(str, part)) for part in parts)
    return f"line {said}" if said.isdigit() else f"lines {said}"


def _finite(value: Any) -> Any:
    """With None in place of what is not finite."""
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
