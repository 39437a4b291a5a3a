"""The table and the picture of a benchmark. rich and matplotlib make them better and may be missing."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, Self

from seng.lab.bench.rows import Row

COLUMNS: dict[str, Callable[[Row], str]] = {
    "contender": lambda r: r.contender,
    "ms per\nstep": lambda r: _number(r.step_ms, 2),
    "step\n/ SGD": lambda r: _number(r.ratio_to_sgd, 3),
    "step\n/ AdamW": lambda r: _number(r.ratio_to_adamw, 3),
    "refresh\nms": lambda r: _number(r.refresh_ms, 1),
    "peak\nMiB": lambda r: _number(r.peak_MiB, 0),
    "peak\n/ SGD": lambda r: _number(r.peak_ratio_to_sgd, 2),
    "state\nMiB": lambda r: _number(r.state_MiB, 1),
    "error": lambda r: _small(r.of_quality("error")),
    "worst\nlayer": lambda r: _small(r.of_quality("worst_error")),
    "cosine": lambda r: _number(r.of_quality("cosine"), 5),
    "cos(g, d)": lambda r: _number(r.of_quality("cosine_to_gradient"), 3),
    "|d| / |g|": lambda r: _number(r.of_quality("norm_to_gradient"), 3),
}


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _small(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}"


def sections(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """The rows of each setting."""
    return [
        (str(s), [row for row in rows if row.setting == s])
        for s in dict.fromkeys(row.setting for row in rows)
    ]


def remarks(rows: Sequence[Row]) -> list[str]:
    """What a table has no room for."""
    said = [f"{row.contender}: {row.note}" for row in rows if row.note]
    for row in rows:
        if row.whole_period_ms is not None:
            whole = f"{row.whole_period_ms:.2f} ms per step, {row.whole_period_ratio_to_sgd:.3f} of SGD's"
            said.append(
                f"{row.contender}: {row.every} steps timed in one go: {whole}"
            )
    return said


def plain(rows: Sequence[Row]) -> str:
    """As text."""
    lines: list[str] = []
    for setting, part in sections(rows):
        cells = [
            [name.replace("\n", " ") for name in COLUMNS],
            *([show(row) for show in COLUMNS.values()] for row in part),
        ]
        widths = [
            max(len(line[i]) for line in cells) for i in range(len(COLUMNS))
        ]
        lines += [
            setting,
            *(
                "  ".join(
                    cell.rjust(width)
                    for cell, width in zip(line, widths, strict=True)
                )
                for line in cells
            ),
        ]
        lines += [f"  {remark}" for remark in remarks(part)]
    return "\n".join(lines)


def pretty(rows: Sequence[Row]) -> Any:
    """For rich."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Group
    from rich.table import Table

    parts: list[Any] = []
    for setting, part in sections(rows):
        table = Table(
            title=setting,
            title_justify="left",
            box=SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
            pad_edge=False,
        )
        for name in COLUMNS:
            table.add_column(
                name,
                justify="left" if name == "contender" else "right",
                no_wrap=True,
            )
        for row in part:
            table.add_row(*(show(row) for show in COLUMNS.values()))
        parts += [table, *(f"  {remark}" for remark in remarks(part))]
    return Group(*parts)


class Screen:
    """Live in a terminal that rich can draw on, else a line for each piece of work."""

    def __init__(self) -> None:
        self.console: Any = None
        self.start = perf_counter()
        try:
            from rich.console import Console
            from rich.live import Live
        except ImportError:
            return
        found = Console()
        self.console = (
            found if found.is_terminal else Console(width=150)
        )  # a file has room
        self.live = Live(
            console=self.console, auto_refresh=False
        )  # no thread beside what is timed

    @property
    def _alive(self) -> bool:
        return self.console is not None and bool(self.console.is_terminal)

    def __enter__(self) -> Self:
        if self._alive:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._alive:
            self.live.update("")
            self.live.stop()

    def show(self, model: str, status: str, rows: Sequence[Row]) -> None:
        """What is there and what is being done."""
        now = f"{perf_counter() - self.start:5.0f} s  {model}, {status}"
        if self._alive:
            from rich.console import Group

            self.live.update(Group(pretty(rows), now), refresh=True)
        else:
            print(now, flush=True)

    def keep(self, rows: Sequence[Row]) -> None:
        """The table, to stay."""
        if self.console is None:
            print(plain(rows), flush=True)
        else:
            self.console.print(pretty(rows))

    def say(self, text: str) -> None:
        """One line, to stay."""
        if self.console is None:
            print(text, flush=True)
        else:
            self.console.print(text, highlight=False, soft_wrap=True)


PANELS: tuple[
    tuple[str, Callable[[dict[str, Any]], float | None], float | None], ...
] = (
    ("time per step / SGD's", lambda row: row["ratio_to_sgd"], 1.0),
    ("peak memory / SGD's", lambda row: row["peak_ratio_to_sgd"], 1.0),
    ("refresh, ms", lambda row: row["refresh_ms"], None),
    (
        "relative error of the direction",
        lambda row: row["quality"] and row["quality"]["error"],
        0.05,
    ),
)
COLOURS = ("#D55E00", "#0072B2", "#009E73")  # of Okabe and Ito's palette


def draw(path: Path) -> str:
    """The picture of a result, beside it; in words why there is none."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return f"none, matplotlib is missing; later: seng bench --plot {path.parent}"
    result = json.loads(path.read_text())
    names = list(dict.fromkeys(row["contender"] for row in result["rows"]))
    settings = list(
        dict.fromkeys(json.dumps(row["setting"]) for row in result["rows"])
    )
    figure = Figure(
        figsize=(13, 1.6 + 0.42 * len(names)), layout="constrained"
    )
    s = result["setting"]
    title = f"{s['model']}, batch {s['batch']}, {s['precision']}{', compiled' if s['compiled'] else ''}"
    figure.suptitle(f"{title}\n", fontsize=13)
    figure.text(
        0.5,
        0.93,
        f"{result['machine']}, torch {result['versions']['torch']}",
        ha="center",
        fontsize=8,
        color="0.35",
    )
    axes = figure.subplots(1, len(PANELS), sharey=True)
    height = 0.8 / len(settings)
    for ax, (label, value, line) in zip(axes, PANELS, strict=True):
        for i, setting in enumerate(settings):
            rows = [
                row
                for row in result["rows"]
                if json.dumps(row["setting"]) == setting
                and value(row) is not None
            ]
            at = [
                names.index(row["contender"])
                + (i - (len(settings) - 1) / 2) * height
                for row in rows
            ]
            given = json.loads(setting)
            kind = "relative" if given["relative_damping"] else "absolute"
            bars = ax.barh(
                at,
                [value(row) for row in rows],
                height,
                color=COLOURS[i % len(COLOURS)],
                label=f"T = {given['every']}, {kind} λ = {given['damping']:g}",
            )
            ax.bar_label(bars, fmt="%.3g", fontsize=7, padding=2)
        if line is not None:
            ax.axvline(line, color="0.4", linewidth=0.9, linestyle=":")
        if "error" in label:
            ax.set_xscale("log")
        ax.set_title(label, fontsize=9)
        ax.spines[["top", "right"]].set_visible(False)
        ax.margins(x=0.18)
    axes[0].set_yticks(range(len(names)), names)
    axes[0].invert_yaxis()
    axes[-1].legend(frameon=False, fontsize=8, loc="best")
    picture = path.with_suffix(".png")
    figure.savefig(picture, dpi=130)
    return str(picture)
