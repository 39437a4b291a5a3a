"""`seng reproduce TABLE`: a table of the paper with ours beside it, from the runs in a folder; `seng reproduce` lists them.

The machines differ, so seconds do not compare between the paper and us; ratios to SGD and epochs do. What we have not run is
"–", and the command that would run it stands below.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from seng.lab import paper
from seng.lab.names import unknown
from seng.lab.ours import NONE, STUDY, Found, Side, Study, ours, ratio, theirs
from seng.lab.results import Trajectory, read

METHODS = (
    "seng-paper",
    "seng",
    "seng-lowrank",
    "sgd",
    "adam",
    "kfac",
)  # the paper's; our default and low rank beside its setting
PERIODS, SIZES = (20, 100, 200, 500, 800), (256, 1024, 4096)
REFRESHED = ("seng", "seng-lowrank")  # whose refresh period we vary
SIZED = ("seng", "seng-lowrank", "sgd", "muon")  # whose batch size we vary
NEEDS = {
    "cifar100": "CIFAR-100",
    "imagenet": "ImageNet-1k",
}  # data that do not come with a package
COMPARES = "Absolute times are not comparable between them; ratios to SGD and epochs are."
OTHER = f"Ours, on {STUDY.name} to {STUDY.target:.0%}: another task than the paper's"
OTHER_COMPARES = "On another task neither times nor epochs are comparable, only how they change down a table."

Row = tuple[str, Side, Side]  # a method, the paper's side and ours
Page = tuple[
    list[Table], list[str], str
]  # the tables, the commands for what is missing, and what compares


def command(task: str, optimizers: Sequence[str], *more: str) -> str:
    """What would make the missing runs, and the data that it needs where they do not come by themselves."""
    line = shlex.join(
        [
            "seng",
            "compare",
            task,
            "--optimizers",
            *optimizers,
            "--seeds",
            "3",
            *more,
        ]
    )
    data = task.partition("-")[0]
    return (
        f"{line}   # needs {NEEDS[data]}: seng data {data}"
        if data in NEEDS
        else line
    )


def table(title: str, *headers: str) -> Table:
    """Numbers to the right, words to the left."""
    out = Table(
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for header in headers:
        out.add_column(
            header,
            justify="left"
            if header in ("task", "method", "optimizer")
            else "right",
        )
    return out


def compared(
    title: str, sections: Sequence[tuple[str, str, Sequence[Row]]]
) -> Table:
    """The paper's and ours, quantity by quantity, side by side; ratios are to the SGD of the same section."""
    to_target, epochs = (
        ("s to target\npaper", "\nours", "\nseeds"),
        ("epochs\npaper", "\nours"),
    )
    rates, per_epoch = ("÷ sgd\npaper", "\nours"), ("s/epoch\npaper", "\nours")
    out = table(
        title,
        "task",
        "method",
        *to_target,
        *rates,
        *epochs,
        *per_epoch,
        *rates,
    )
    for task, target, rows in sections:
        sgds = next(
            (sides for method, *sides in rows if method.lower() == "sgd"),
            [Side(), Side()],
        )
        for i, (method, *sides) in enumerate(rows):
            out.add_row(
                task if i == 0 else f"  {target}" if i == 1 else "",
                method,
                *(side.to_target for side in sides),
                sides[1].seeds,
                *(
                    ratio(side.seconds, sgd.seconds)
                    for side, sgd in zip(sides, sgds, strict=True)
                ),
                *(side.epochs for side in sides),
                *(
                    NONE
                    if side.epoch_seconds is None
                    else f"{side.epoch_seconds:.2f}"
                    for side in sides
                ),
                *(
                    ratio(side.epoch_seconds, sgd.epoch_seconds)
                    for side, sgd in zip(sides, sgds, strict=True)
                ),
            )
        out.add_section()
    return out


def tasks(found: Found, title: str) -> Page:
    """The six tasks."""
    sections, missing = [], []
    for task in paper.TASKS:
        rows = [
            (
                m,
                theirs(task.attempts.get(m)),
                ours(found.runs(task.name, m, task.target)),
            )
            for m in METHODS
        ]
        sections.append((task.name, f"to {task.target:.0%}", rows))
        if lacking := [method for method, _, side in rows if side == Side()]:
            missing.append(command(task.name, lacking))
    return (
        [compared(title, sections)],
        missing,
        f"{COMPARES} The paper's epochs are its two times, one over the other.",
    )


def imagenet(found: Found, title: str) -> Page:
    """ResNet50: SGD, SENG and K-FAC by refresh period (ours: labelled T200, T800), our default and low rank."""
    task, target = paper.IMAGENET_TASK, paper.IMAGENET_TARGET
    rows, missing = [], []
    for v in paper.IMAGENET:
        label = f"T{v.refresh_every}" if v.refresh_every else ""
        side = ours(
            found.runs(task, f"{v.optimizer}-{label}".rstrip("-"), target)
        )
        rows.append(
            (
                v.name,
                theirs(paper.Attempt(v.seconds, v.epoch_seconds), v.epochs),
                side,
            )
        )
        if side == Side():
            more = (
                ("--label", label, "--set", f"refresh_every={v.refresh_every}")
                if label
                else ()
            )
            missing.append(command(task, [v.optimizer], *more))
    lacking = []
    for method in REFRESHED:
        side = ours(found.runs(task, method, target))
        rows.append((method, Side(), side))
        if side == Side():
            lacking.append(method)
    if lacking:
        missing.append(command(task, lacking))
    return (
        [compared(title, [(task, f"to {target:.1%}", rows)])],
        missing,
        COMPARES,
    )


def frequency(found: Found, title: str) -> Page:
    """The refresh period."""
    out = table(title, "T", "epochs", "total, s", "s/epoch", "÷ T = 800's")
    for v in paper.FREQUENCY:
        slower = ratio(v.epoch_seconds, paper.FREQUENCY[-1].epoch_seconds)
        out.add_row(
            str(v.refresh_every),
            str(v.epochs),
            f"{v.seconds:.0f}",
            f"{v.epoch_seconds:.2f}",
            slower,
        )
    study = completed(
        found, "T", REFRESHED, lambda run: run.recipe.get("refresh_every")
    )
    lacking = {
        period: [name for name in REFRESHED if (period, name) not in study]
        for period in PERIODS
    }
    missing = [
        command(
            STUDY.name,
            names,
            "--label",
            f"T{period}",
            "--set",
            f"refresh_every={period}",
        )
        for period, names in lacking.items()
        if names
    ]
    return [out, changing(study, "T", max(PERIODS))], missing, OTHER_COMPARES


def batch(found: Found, title: str) -> Page:
    """The batch size."""
    out = table(
        title,
        "batch",
        "GPUs",
        "epochs",
        "total, min",
        "efficiency",
        "s/epoch",
        "efficiency",
    )
    for b in paper.BATCHES:
        times = (
            f"{b.minutes:.1f}",
            f"{b.efficiency:.2f}",
            f"{b.epoch_seconds:.2f}",
            f"{b.epoch_efficiency:.2f}",
        )
        out.add_row(str(b.batch), str(b.gpus), str(b.epochs), *times)
    study = sizes(found)
    return (
        [out, changing(study, "batch", min(SIZES))],
        missing_sizes(study),
        OTHER_COMPARES,
    )


def sizes(found: Found) -> Study:
    """By batch size."""
    return completed(found, "b", SIZED, lambda run: run.run.get("batch"))


def completed(
    found: Found,
    prefix: str,
    optimizers: Sequence[str],
    number: Callable[[Trajectory], Any],
) -> Study:
    """A study by label, and of these optimizers the runs without a label where no label has the number that they ran with."""
    study = found.study(prefix)
    for who in optimizers:
        numbers = {
            number(run)
            for run in found.trajectories
            if (run.task, run.name) == (STUDY.name, who)
        }
        n = numbers.pop() if len(numbers) == 1 else None
        if (
            isinstance(n, int)
            and (n, who) not in study
            and (runs := found.runs(STUDY.name, who, STUDY.target))
        ):
            study[n, who] = runs
    return dict(sorted(study.items(), key=lambda item: item[0][::-1]))


def changing(study: Study, header: str, base: int) -> Table:
    """Ours, by optimizer and number; the time per epoch also as a ratio to that of one of the numbers."""
    quantities = (
        "s to target",
        "epochs",
        "seeds",
        "final accuracy, %",
        "s/epoch",
        f"÷ {header} = {base}'s",
    )
    out = table(OTHER, "optimizer", header, *quantities)
    sides = {key: ours(runs) for key, runs in study.items()}
    for (number, optimizer), side in sides.items():
        seconds, of_base = (
            side.epoch_seconds,
            sides.get((base, optimizer), Side()).epoch_seconds,
        )
        said = NONE if seconds is None else f"{seconds:.2f}"
        out.add_row(
            optimizer,
            str(number),
            side.to_target,
            side.epochs,
            side.seeds,
            side.final,
            said,
            ratio(seconds, of_base),
        )
    return out if sides else dashes(out)


def large_batch(found: Found, title: str) -> Page:
    """The hyperparameters of the batch sizes; ours are those of the first seed."""
    out = table(
        title,
        "batch",
        "α warm-up",
        "α₀",
        "decay rate",
        "max_epoch",
        "damping λ",
    )
    for b in paper.LARGE_BATCHES:
        numbers = (
            f"{x:g}"
            for x in (b.batch, b.warmup_lr, b.lr, b.rate, b.schedule_epochs)
        )
        out.add_row(
            *numbers, f"{b.damping:g} · {b.damping_gamma:g}^(epoch/10)"
        )
    keys = (
        "lr",
        "weight_decay",
        "schedule",
        "rate",
        "schedule_epochs",
        "warmup",
        "warmup_lr",
        "damping",
        "damping_gamma",
    )
    recipes = table(OTHER, "optimizer", "batch", *keys)
    study = sizes(found)
    for (size, optimizer), (first, *_) in study.items():
        recipes.add_row(
            optimizer,
            str(size),
            *(written(first.recipe.get(key)) for key in keys),
        )
    units = "The paper's α₀ is that of seng-paper; beside SGD's lr it is α₀/λ, with the λ of the moment."
    return (
        [out, recipes if study else dashes(recipes)],
        missing_sizes(study),
        f"{OTHER_COMPARES} {units}",
    )


def missing_sizes(study: Study) -> list[str]:
    """Commands for the batch sizes of our study; at equal epochs, so to the end of the budget."""
    lacking = {
        size: [name for name in SIZED if (size, name) not in study]
        for size in SIZES
    }
    more = {
        size: ("--batch", str(size), "--label", f"b{size}", "--no-stop")
        for size in SIZES
    }
    return [
        command(STUDY.name, names, *more[size])
        for size, names in lacking.items()
        if names
    ]


def written(value: Any) -> str:
    """Of a recipe."""
    return (
        NONE
        if value is None
        else f"{value:g}"
        if isinstance(value, float)
        else str(value)
    )


def dashes(empty: Table) -> Table:
    """In place of what there is not."""
    empty.add_row(*[NONE] * len(empty.columns))
    return empty


TABLES: dict[str, Callable[[Found, str], Page]] = {
    "tasks": tasks,
    "imagenet": imagenet,
    "frequency": frequency,
    "batch": batch,
    "large-batch": large_batch,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """`seng reproduce [TABLE] [--results FOLDER]`."""
    parser = argparse.ArgumentParser(
        prog="seng reproduce",
        description="A table of the paper, with ours beside it.",
    )
    parser.add_argument(
        "table",
        nargs="?",
        metavar="TABLE",
        help=", ".join(TABLES) + "; none: say what they are about",
    )
    parser.add_argument(
        "--results",
        type=Path,
        default=Path("results"),
        metavar="FOLDER",
        help="of our runs; default: results",
    )
    options = parser.parse_args(arguments)
    if options.table is None:
        print(
            "seng reproduce TABLE prints a table of the paper, with ours beside it:\n"
        )
        return print(
            "\n".join(
                f"  {name:12} {s.about} (section {s.section}, {s.label})"
                for name, s in paper.SOURCES.items()
            )
        )
    if options.table not in TABLES:
        sys.exit(
            unknown("seng reproduce: there is no table", options.table, TABLES)
        )
    if not options.results.is_dir():
        print(
            f"There is no folder {options.results}, so there is nothing of ours; --results names another."
        )
    trajectories, skipped = read(options.results)
    found = Found(trajectories)
    source = paper.SOURCES[options.table]
    title = f"{source.about} (the paper's section {source.section}, {source.label})"
    tables, missing, compares = TABLES[options.table](found, title)
    wide = Console(
        width=max(200, Console().width)
    )  # a line too long for the terminal rather than numbers cut short
    wide.print(*tables)
    print(*found.remarks(source.machine, compares), *skipped, sep="\n")
    print(*(["", "Not run yet:"] if missing else []), *missing, sep="\n")
