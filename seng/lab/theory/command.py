"""`seng theory`: run the studies, print a verdict for every claim, and leave numbers and a picture of each behind.

A study that was finished at this commit is not run again, so that an interrupted command goes on where it was.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from tyro.conf import Positional

from seng.lab.compare import parsed
from seng.lab.names import unknown
from seng.lab.record import commit, provenance
from seng.lab.theory.study import Claim, Outcome, Study

STUDIES = (
    "embedding",
    "lemma",
    "descent",
    "ntk",
    "costs",
    "pdes",
)  # each in a module of its name, as STUDY


@dataclass(frozen=True)
class Options:
    """The paper's theory, run: sketching error, convergence, the linear rate of wide networks, cost, and least squares."""

    studies: Positional[tuple[str, ...]] = ()
    """Of embedding, lemma, descent, ntk, costs, pdes; default: all of them."""
    quick: bool = False
    """A look in seconds, with fewer sizes and looser claims; nothing is kept."""
    again: bool = False
    """Run again what was finished at this commit."""
    out: Path = Path("results/theory")
    """Numbers go to OUT/STUDY.json."""
    figures: Path = Path("docs/figures")
    """Pictures go to FIGURES/theory-STUDY.png."""
    threads: int = 1
    """Of torch; times of one thread are steadier."""


def study(name: str) -> Study:
    """By its name; where there is none, what may have been meant."""
    if name not in STUDIES:
        raise ValueError(unknown("there is no study", name, STUDIES))
    found = import_module(f"seng.lab.theory.{name}").STUDY
    assert isinstance(found, Study)
    return found


def carried_out(
    one: Study, options: Options, command: str, console: Console
) -> tuple[Claim, ...]:
    """Run a study and keep what it found; or read what is there."""
    path = options.out / f"{one.name}.json"
    known = _known(path)
    if known is not None and not options.again and not options.quick:
        console.print(
            f"{one.name}: from {path}, made at this commit; --again runs it again",
            highlight=False,
        )
        return known
    begun = perf_counter()
    with console.status(one.name) as status:
        outcome = one.run(
            lambda text: status.update(f"{one.name}: {text}"), options.quick
        )
    seconds = perf_counter() - begun
    if not options.quick:
        _write(path, _kept(one, outcome, seconds, command))
        _draw(one, outcome, options.figures / f"theory-{one.name}.png")
    for remark in outcome.remarks:
        console.print(f"{one.name}: {remark}", highlight=False)
    return outcome.claims


def _known(path: Path) -> tuple[Claim, ...] | None:
    """The claims of a study that was finished at this commit."""
    try:
        held = json.loads(path.read_text())
        same = held["provenance"][
            "commit"
        ] == commit() and not commit().endswith(("dirty", "unknown"))
        return (
            tuple(Claim(**claim) for claim in held["claims"]) if same else None
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _kept(
    one: Study, outcome: Outcome, seconds: float, command: str
) -> dict[str, Any]:
    return {
        **{
            "study": one.name,
            "title": one.title,
            "seconds": round(seconds, 1),
        },
        "claims": [vars(claim) for claim in outcome.claims],
        "remarks": list(outcome.remarks),
        "numbers": outcome.numbers,
        "provenance": provenance(command, torch.device("cpu")),
    }


def _write(path: Path, held: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_suffix(".half")
    lines = (
        f"{json.dumps(key)}: {json.dumps(_short(value), ensure_ascii=False)}"
        for key, value in held.items()
    )
    half.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    os.replace(half, path)


def _short(value: Any) -> Any:
    """Numbers with six digits."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {str(key): _short(item) for key, item in value.items()}
    return (
        [_short(item) for item in value]
        if isinstance(value, list | tuple)
        else value
    )


def _draw(one: Study, outcome: Outcome, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=one.size, layout="constrained")
    outcome.draw(figure)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def table(one: Study, claims: Sequence[Claim]) -> Table:
    """What was claimed, and what was seen."""
    out = Table(
        title=f"{one.name}: {one.title}", title_justify="left", show_lines=True
    )
    out.add_column("claim", ratio=5)
    out.add_column("measured", ratio=5)
    out.add_column("holds")
    for claim in claims:
        out.add_row(
            claim.words,
            claim.measured,
            "yes" if claim.holds else "NO",
            style=None if claim.holds else "bold red",
        )
    return out


def main(arguments: Sequence[str] | None = None) -> None:
    """`seng theory`."""
    options, command = parsed(Options, "theory", arguments)
    console = Console()
    if not console.is_terminal:
        console.width = 140
    try:
        if options.threads < 1:
            raise ValueError(
                f"--threads is a count of at least 1, not {options.threads}"
            )
        chosen = [
            study(name) for name in dict.fromkeys(options.studies or STUDIES)
        ]
    except ValueError as wrong:
        sys.exit(f"seng theory: {wrong}")
    torch.set_num_threads(options.threads)
    commit()  # of the code that is loaded now, which may have changed when a study ends
    failed = []
    try:
        for one in chosen:
            claims = carried_out(one, options, command, console)
            console.print(table(one, claims))
            failed += [one.name for claim in claims if not claim.holds]
    except KeyboardInterrupt:
        sys.exit(
            "seng theory: interrupted; the same command goes on with the study that it was in"
        )
    if failed:
        sys.exit(
            f"seng theory: claims that do not hold, in {', '.join(dict.fromkeys(failed))}: see above"
        )
    if not options.quick:
        console.print(
            f"numbers: {options.out}; pictures: {options.figures}/theory-*.png",
            highlight=False,
        )
