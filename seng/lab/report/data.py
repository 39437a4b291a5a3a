"""What the page's script draws: plain numbers, a few digits each, so that hundreds of runs make a page of a few megabytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from seng.lab.report.curves import AXES, band, thin
from seng.lab.report.looks import Look, is_share, metric_label, plus_minus
from seng.lab.report.summary import Estimate, Standing, Task
from seng.lab.results import Trajectory

QUANTITIES = ("metric", "train_loss", "loss")
BAND_POINTS = (
    300  # of a mean over seeds: nine of them go into the page for each method
)


def task_data(task: Task, looks: dict[str, Look]) -> dict[str, Any]:
    """Everything that is drawn of a task."""
    scale = 100 if is_share(task) else 1
    return {
        "name": task.stem,
        "label": metric_label(task),
        "target": None if task.target is None else short(scale * task.target),
        "range": metric_range(task, scale),
        "axes": AXES,
        "methods": [
            _method(s, task, looks[s.name], scale) for s in task.standings
        ],
        "bars": {
            "seconds": _bars(task.standings, lambda s: s.seconds, "s", True),
            "epochs": _bars(
                task.standings, lambda s: s.epochs, "epochs", True
            ),
            "step_ms": _bars(task.standings, lambda s: s.step_ms, "ms", False),
        },
    }


def metric_range(task: Task, scale: int) -> tuple[float, float] | None:
    """What the picture of the metric opens with: the last quarter of the way to the target, and every method's best in it."""
    values = [
        scale * point.metric
        for run in task.runs
        for point in run.points
        if point.metric is not None
    ]
    bests = [scale * s.best.mean for s in task.standings if s.best]
    if task.target is None or not bests:
        return None
    goal, sign = scale * task.target, 1 if task.higher_is_better else -1
    worst = min(sign * value for value in values)
    low = min(
        sign * goal - (sign * goal - worst) / 4,
        *(sign * best for best in bests),
    )
    high = max(sign * goal, *(sign * value for value in values))
    if high <= low:
        return None
    edges = sorted(
        (
            sign * (low - 0.04 * (high - low)),
            sign * (high + 0.06 * (high - low)),
        )
    )
    return edges[0], edges[1]


def _method(s: Standing, task: Task, look: Look, scale: int) -> dict[str, Any]:
    runs = task.methods[s.name]
    means: dict[str, dict[str, Any]] = {}
    for axis in AXES if len(runs) > 1 else ():
        means[axis] = {}
        for quantity in QUANTITIES:
            found = band(runs, axis, quantity, BAND_POINTS)
            factor = scale if quantity == "metric" else 1
            means[axis][quantity] = found and {
                "x": rounded(found.x),
                "mean": rounded(factor * found.mean),
                "low": rounded(factor * found.low),
                "high": rounded(factor * found.high),
            }
    seeds = [_seed(run, scale) for run in runs]
    return {"name": s.name, **vars(look), "seeds": seeds, "means": means}


def _seed(run: Trajectory, scale: int) -> dict[str, Any]:
    points = [run.points[i] for i in thin(len(run.points))]
    there = run.to_target
    out: dict[str, Any] = {
        "seed": run.seed,
        "target": there
        and {axis: short(getattr(there, axis)) for axis in AXES},
    }
    if there and there.metric is not None:
        out["target"]["metric"] = short(scale * there.metric)
    for axis in AXES:
        out[axis] = rounded(getattr(point, axis) for point in points)
    if not run.timed:
        out["seconds"] = [None] * len(points)
        if there:
            out["target"]["seconds"] = None
    for quantity in QUANTITIES:
        factor = scale if quantity == "metric" else 1
        values = [getattr(point, quantity) for point in points]
        out[quantity] = [
            None if value is None else short(factor * value)
            for value in values
        ]
    return out


def _bars(
    standings: Sequence[Standing],
    value: Callable[[Standing], Estimate | None],
    unit: str,
    to_target: bool,
) -> list[dict[str, Any]]:
    """A bar each; a method without a value keeps its place and says why."""
    out = []
    for s in standings:
        e = value(s)
        share = f"{s.share} seeds" if to_target else ""
        said = plus_minus(
            e, "not reached" if to_target and not s.reached else "untimed"
        )
        text = f"{said} ({s.share})" if to_target else said
        hover = ", ".join(
            filter(None, (f"{said} {unit}" if e else said, share))
        )
        out.append(
            {
                "name": s.name,
                "mean": e and e.mean,
                "half": e and e.half,
                "text": text,
                "hover": hover,
            }
        )
    return out


def rounded(values: Iterable[float]) -> list[float | int]:
    """All of them `short`."""
    return [short(value) for value in values]


def short(value: float) -> float | int:
    """With six digits; a whole number as it is."""
    return int(value) if value == int(value) else float(f"{value:.6g}")
