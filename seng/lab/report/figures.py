"""The page's figures for a paper, as PNG and SVG; the same runs give the same bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from seng.lab.report.curves import AXES, band, series
from seng.lab.report.data import metric_range
from seng.lab.report.looks import (
    Look,
    is_share,
    looks,
    metric_label,
    plus_minus,
    target_words,
)
from seng.lab.report.summary import Estimate, Standing, Task

DASHES: dict[str, Any] = {
    "solid": "-",
    "dash": (0, (4, 2)),
    "dot": (0, (1, 1.5)),
    "dashdot": (0, (4, 1.5, 1, 1.5)),
    "longdash": (0, (8, 2)),
    "longdashdot": (0, (8, 2, 1, 2)),
}
MARKERS = {
    "circle": "o",
    "square": "s",
    "diamond": "D",
    "triangle-up": "^",
    "x": "X",
    "cross": "P",
}
HATCHES = {
    "solid": "",
    "dash": "//",
    "dot": "..",
    "dashdot": "xx",
    "longdash": "--",
    "longdashdot": "++",
}
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "seng",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "hatch.linewidth": 0.5,
}


def draw(tasks: Sequence[Task], folder: Path) -> list[Path]:
    """<task>[-<study>]-curves, -time-to-target and -step-time, each as .png and .svg; what was written."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    with rc_context(STYLE):
        for task, look in zip(tasks, looks(tasks), strict=True):
            pictures = {
                "curves": curves(task, look),
                "time-to-target": bars(
                    task,
                    look,
                    (
                        ("time to the target, seconds", lambda s: s.seconds),
                        ("epochs to the target", lambda s: s.epochs),
                    ),
                    share=True,
                ),
                "step-time": bars(
                    task,
                    look,
                    (("milliseconds per step", lambda s: s.step_ms),),
                    share=False,
                ),
            }
            for name, figure in pictures.items():
                path = folder / f"{task.stem}-{name}.png"
                figure.savefig(path, dpi=160, metadata={"Software": None})
                figure.savefig(
                    path.with_suffix(".svg"),
                    metadata={"Date": None, "Creator": None},
                )
                written += [path, path.with_suffix(".svg")]
    return written


def curves(task: Task, look: dict[str, Look]) -> Figure:
    """The metric and the training loss, against seconds, steps and epochs."""
    figure = Figure(figsize=(11, 6.4), layout="constrained")
    axes = figure.subplots(2, len(AXES), sharex="col", sharey="row")
    scale = 100 if is_share(task) else 1
    for column, axis in enumerate(AXES):
        for row, (quantity, factor) in enumerate(
            (("metric", scale), ("train_loss", 1))
        ):
            for name in task.methods:
                _curve(
                    axes[row, column],
                    task,
                    name,
                    look[name],
                    axis,
                    quantity,
                    factor,
                )
        axes[1, column].set(xlabel=AXES[axis])
        axes[1, column].set_xlim(left=0)
    span = metric_range(task, scale)
    if task.target is not None:
        for ax in axes[0]:
            ax.axhline(
                scale * task.target, color="0.3", linewidth=0.9, linestyle=":"
            )
    if span:
        axes[0, 0].set_ylim(*span)
    losses = [
        point.train_loss
        for run in task.runs
        for point in run.points
        if point.train_loss is not None
    ]
    axes[0, 0].set(ylabel=f"held-out {metric_label(task)}")
    axes[1, 0].set(
        ylabel="training loss",
        yscale="log" if losses and min(losses) > 0 else "linear",
    )
    for ax in axes.flat:
        ax.grid(alpha=0.25)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    length = 4 if task.study else 2  # so that a long dash is seen to end
    columns = min(len(labels), 6) or 1
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=columns,
        handlelength=length,
        frameon=False,
    )
    figure.suptitle(f"{task.title}; target: {target_words(task)}", fontsize=11)
    return figure


def _curve(
    ax: Any,
    task: Task,
    name: str,
    look: Look,
    axis: str,
    quantity: str,
    factor: int,
) -> None:
    """One method: the mean and the range as far as all seeds go, the single seeds thin, a mark where one reached the target."""
    runs = task.methods[name]
    bold = {
        "color": look.light,
        "linewidth": 1.8,
        "linestyle": DASHES[look.dash],
    }
    mean = band(runs, axis, quantity) if len(runs) > 1 else None
    if mean is not None:
        ax.fill_between(
            mean.x,
            factor * mean.low,
            factor * mean.high,
            color=look.light,
            alpha=0.15,
            linewidth=0,
        )
        ax.plot(mean.x, factor * mean.mean, label=name, **bold)
    for i, run in enumerate(runs):
        x, y = series(run, axis, quantity)
        style = (
            {"color": look.light, "linewidth": 0.5, "alpha": 0.5}
            if mean is not None
            else bold
        )
        ax.plot(
            x,
            factor * y,
            label=name if mean is None and i == 0 else None,
            **style,
        )
        there = run.to_target
        if (
            quantity == "metric"
            and there
            and there.metric is not None
            and len(x)
        ):
            place = [getattr(there, axis)], [factor * there.metric]
            ax.plot(
                *place,
                MARKERS[look.marker],
                color=look.light,
                markersize=5,
                markeredgecolor="white",
                markeredgewidth=0.6,
            )


def bars(
    task: Task,
    look: dict[str, Look],
    panels: Sequence[tuple[str, Callable[[Standing], Estimate | None]]],
    share: bool,
) -> Figure:
    """A bar for each method, with its interval; `share`: how many seeds reached the target stands beside it."""
    figure = Figure(
        figsize=(5.5 * len(panels), 0.9 + 0.36 * len(task.standings)),
        layout="constrained",
    )
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for ax, (label, value) in zip(axes, panels, strict=True):
        farthest = 0.0
        for i, s in enumerate(task.standings):
            e, paint = value(s), look[s.name]
            mean, half = (e.mean, e.half or 0.0) if e else (0.0, 0.0)
            pale = {
                "facecolor": (paint.light, 0.45),
                "edgecolor": paint.light,
            }  # so that the interval is seen on every colour
            ax.barh(
                i, mean, 0.62, hatch=HATCHES[paint.dash], linewidth=1, **pale
            )
            if half:
                ax.errorbar(
                    mean, i, xerr=half, color="0.15", capsize=3, linewidth=1.1
                )
            said = plus_minus(
                e, "not reached" if share and not s.reached else "untimed"
            ) + (f" ({s.share})" if share else "")
            ax.annotate(
                said,
                (mean + half, i),
                (4, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
            )
            farthest = max(farthest, mean + half)
        ax.set(xlabel=label, xlim=(0, 1.5 * farthest or 1))
        ax.grid(axis="x", alpha=0.25)
        ax.set_axisbelow(True)
    axes[0].set_yticks(
        range(len(task.standings)), [s.name for s in task.standings]
    )
    axes[0].invert_yaxis()
    figure.suptitle(
        f"{task.title}; target: {target_words(task)}" if share else task.title,
        fontsize=10,
    )
    return figure
