"""How methods and numbers look, the same on the page, in the figures and in the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor, log10

from seng.lab.report.summary import Estimate, Standing, Task, natural

# Okabe and Ito's palette, which colour-blind readers can tell apart, for a light and for a dark ground. Its yellow is darkened
# on white, its black lightened on black, and grey joins as the ninth. Forms of SENG and K-FAC have shades beside them.
COLOURS = {
    "seng": ("#D55E00", "#F07A1F"),
    "seng-lowrank": ("#8C2D04", "#FFA066"),
    "seng-adamw": ("#B5367A", "#F28BBF"),
    "seng-muon": ("#7A1F5C", "#E58BC4"),
    "seng-orthogonal": ("#B15928", "#D9A066"),  # of an earlier edition
    "seng-paper": ("#E69F00", "#F2B632"),
    "sgd": ("#0072B2", "#3D9BD6"),
    "adam": ("#009E73", "#1FC296"),
    "adamw": ("#56B4E9", "#8CCDF2"),
    "kfac": ("#CC79A7", "#E09CC2"),
    "kfac-root": ("#6A3D9A", "#B79BDD"),
    "kfac-floor": ("#9E9AC8", "#D0CDEB"),
    "muon": ("#000000", "#F5F5F5"),
    "soap": ("#A89B00", "#F0E442"),
    "shampoo": ("#7F7F7F", "#A6A6A6"),
}
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
MARKERS = ("circle", "square", "diamond", "triangle-up", "x", "cross")


@dataclass(frozen=True)
class Look:
    """Of a method: the colour is its optimizer's, dash and marker tell its labels apart."""

    light: str
    dark: str
    dash: str
    marker: str


def looks(tasks: Sequence[Task]) -> list[dict[str, Look]]:
    """Of each task by method: colours are the same for all tasks, dashes and markers start anew in each."""
    optimizers = sorted(
        {s.optimizer for task in tasks for s in task.standings}
    )
    spare = [
        pair for name, pair in COLOURS.items() if name not in optimizers
    ] or list(COLOURS.values())
    palette = dict(COLOURS)
    for optimizer in optimizers:
        taken = sum(name not in COLOURS for name in palette)
        palette.setdefault(optimizer, spare[taken % len(spare)])
    return [_looks(task, palette) for task in tasks]


def _looks(task: Task, palette: dict[str, tuple[str, str]]) -> dict[str, Look]:
    found: dict[str, Look] = {}
    for optimizer, colours in palette.items():
        labels = sorted(
            (s for s in task.standings if s.optimizer == optimizer),
            key=lambda s: natural(s.label),
        )
        for i, s in enumerate(labels):
            found[s.name] = Look(
                *colours, DASHES[i % len(DASHES)], MARKERS[i % len(MARKERS)]
            )
    return found


def is_share(task: Task) -> bool:
    """Whether the metric is shown in percent."""
    return task.metric_name == "accuracy"


def number(value: float) -> str:
    """1234 · 123 · 12.3 · 1.23 · 0.123 · 1.2e-05"""
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return (
        f"{value:.{decimals(value)}f}"
        if abs(value) >= 1e-3
        else f"{value:.1e}"
    )


def decimals(value: float) -> int:
    """As many as make three digits."""
    return min(max(2 - floor(log10(abs(value))), 0), 5) if value else 0


def plus_minus(e: Estimate | None, nothing: str = "–") -> str:
    """41.2 ± 3.1"""
    if e is None:
        return nothing
    if e.half is None or abs(e.mean) < 1e-3:
        return number(e.mean) + (
            "" if e.half is None else f" ± {number(e.half)}"
        )
    places = decimals(e.mean)
    return f"{e.mean:,.{places}f} ± {e.half:,.{places}f}"


def of_metric(e: Estimate | None, task: Task) -> str:
    """A metric's mean and interval: an accuracy in percent with two decimals, anything else with four digits."""
    if e is None or (not is_share(task) and abs(e.mean) < 1e-3):
        return plus_minus(e)
    scale, places = (100, 2) if is_share(task) else (1, decimals(e.mean) + 1)
    return f"{scale * e.mean:.{places}f}" + (
        "" if e.half is None else f" ± {scale * e.half:.{places}f}"
    )


def metric_label(task: Task) -> str:
    """accuracy, %"""
    return task.metric_name.replace("_", " ") + (
        ", %" if is_share(task) else ""
    )


def target_words(task: Task) -> str:
    """accuracy of at least 94 %"""
    if task.target is None:
        return "no target"
    value = (
        f"{100 * task.target:g} %" if is_share(task) else f"{task.target:g}"
    )
    return f"{task.metric_name.replace('_', ' ')} of at {'least' if task.higher_is_better else 'most'} {value}"


COLUMNS = (
    "method",
    "reached",
    "time to target, s",
    "epochs to target",
    "final {}",
    "best {}",
    "ms per step",
    "tuning trials",
)


def headings(task: Task) -> list[str]:
    """Of the table of standings."""
    return [column.format(metric_label(task)) for column in COLUMNS]


def cells(s: Standing, task: Task) -> list[str]:
    """A row of it."""
    return [
        s.name,
        s.share if task.target is not None else "–",
        plus_minus(s.seconds),
        plus_minus(s.epochs),
        of_metric(s.final, task),
        of_metric(s.best, task),
        plus_minus(s.step_ms),
        "none" if s.trials is None else str(s.trials),
    ]
