"""`seng report`: the standings of every task in a results folder, and one page for a browser that needs no network.

Runs are <folder>/<task>/<optimizer>[-<label>]-<seed>.jsonl, as `seng train` and `seng compare` write them. A line that
cannot be read is skipped, and said so; everything else in the folder is left alone.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from seng.lab.names import unknown
from seng.lab.report.figures import draw
from seng.lab.report.looks import cells, headings, target_words
from seng.lab.report.page import page
from seng.lab.report.summary import Task, summarise
from seng.lab.results import read


@dataclass(frozen=True)
class Options:
    """What is reported, and where it goes."""

    folder: Annotated[Path, tyro.conf.Positional] = Path("results")
    """Where the results are."""
    out: Path = Path("report.html")
    """The page."""
    figures: Path | None = None
    """A folder for the figures as PNG and SVG."""
    tasks: tuple[str, ...] = ()
    """These alone. Default: all."""


def report(options: Options, console: Console) -> None:
    """Read, say how the methods stand, and write the page."""
    if not options.folder.is_dir():
        raise ValueError(
            f"there is no folder {options.folder}: give the one that `seng compare` wrote to"
        )
    trajectories, skipped = read(options.folder)
    for sentence in skipped:
        console.print(
            f"skipped: {sentence}",
            style="yellow",
            highlight=False,
            soft_wrap=True,
            markup=False,
        )
    tasks = summarise(trajectories)
    if not tasks:
        inside = (
            f"; try {options.folder.resolve().parent}"
            if any(options.folder.glob("*.jsonl"))
            else ""
        )
        raise ValueError(
            f"no results in {options.folder}: runs are expected in {options.folder}/<task>/*.jsonl{inside}"
        )
    tasks = chosen(tasks, options.tasks)
    for task in tasks:
        console.print(
            table(task),
            *(f"  {remark}" for remark in task.remarks),
            sep="\n",
            highlight=False,
            markup=False,
        )
    text = page(tasks, skipped, str(options.folder))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    part = options.out.with_name(options.out.name + ".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, options.out)
    if options.figures:
        written = draw(tasks, options.figures)
        console.print(
            f"figures: {len(written)} files in {options.figures}",
            highlight=False,
            soft_wrap=True,
            markup=False,
        )
    console.print(
        f"page: {options.out.resolve()}",
        highlight=False,
        soft_wrap=True,
        markup=False,
    )


def chosen(tasks: list[Task], names: Sequence[str]) -> list[Task]:
    """The tasks asked for, with their studies; all where none is."""
    known = list(dict.fromkeys(task.name for task in tasks))
    for name in names:
        if name not in known:
            raise ValueError(unknown("no results for the task", name, known))
    return [task for task in tasks if not names or task.name in names]


def table(task: Task) -> Table:
    """The standings, for a terminal."""
    title = f"{task.title}; target: {target_words(task)}"
    out = Table(
        title=title,
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    for i, word in enumerate(headings(task)):
        out.add_column(word, justify="right" if i else "left")
    for s in task.standings:
        out.add_row(*cells(s, task))
    return out


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    config: tuple[Any, ...] = (tyro.conf.FlagCreatePairsOff,)
    options = tyro.cli(
        Options,
        prog="seng report",
        description=__doc__,
        args=arguments,
        config=config,
    )
    console = Console()
    try:
        report(
            options, console if console.is_terminal else Console(width=150)
        )  # a file has room
    except (OSError, ValueError) as wrong:
        sys.exit(f"seng report: {wrong}")


if __name__ == "__main__":
    main()
