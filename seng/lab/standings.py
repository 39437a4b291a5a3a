"""What is shown while optimizers are compared: a line per run, the best first, and a bar."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from seng.lab.results import reaches
from seng.lab.run import Run


class Standings:
    """A live table of a comparison; where the output is no terminal, a line per evaluation."""

    def __init__(
        self, todo: Sequence[Run], console: Console | None = None
    ) -> None:
        self.todo, self.console = list(todo), console or Console()
        if not self.console.is_terminal:
            self.console.width = 120
        self.lines: dict[tuple[str, int], list[dict[str, Any]]] = {}
        columns = (
            TextColumn("{task.description}"),
            BarColumn(40),
            TextColumn("{task.percentage:.0f} %"),
            TimeElapsedColumn(),
        )
        self.progress = Progress(*columns, console=self.console)
        self.bar = self.progress.add_task(
            todo[0].task.name, total=sum(run.budget for run in todo)
        )
        self.live = Live(
            console=self.console, refresh_per_second=4, transient=True
        )

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self.live.start()
            self._draw()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.console.is_terminal:
            self.live.stop()
        if self.lines:
            self.console.print(self.table())

    def tell(self, run: Run, line: dict[str, Any]) -> None:
        """One evaluation."""
        self.lines.setdefault((run.name, run.seed), []).append(line)
        done = sum(
            run.budget if self._over(run) else self._epoch(run)
            for run in self.todo
        )
        self.progress.update(
            self.bar,
            completed=done,
            description=f"{run.task.name}: {run.name}, seed {run.seed}",
        )
        if self.console.is_terminal:
            self._draw()
        else:
            loss, metric = (
                _number(line[name]) for name in ("train_loss", "metric")
            )
            seconds = f"epoch {line['epoch']:.1f}, {line['seconds']:.1f} s"
            said = f"{run.task.name}: {run.name}, seed {run.seed}: {seconds}, loss {loss}, {line['metric_name']} {metric}"
            self.say(
                said
                + (
                    ""
                    if line["state"] == "running"
                    else f"; {_ENDS[line['state']]}"
                )
            )

    def say(self, text: str) -> None:
        """A sentence below."""
        self.console.print(text, highlight=False, soft_wrap=True)

    def _epoch(self, run: Run) -> float:
        lines = self.lines.get((run.name, run.seed))
        return float(lines[-1]["epoch"]) if lines else 0.0

    def _over(self, run: Run) -> bool:
        lines = self.lines.get((run.name, run.seed))
        return bool(lines) and lines[-1]["state"] != "running"  # type: ignore[index]

    def _draw(self) -> None:
        self.live.update(Group(self.table(), self.progress))

    def table(self) -> Table:
        """By method: means over the seeds that there are; the time to the target is of the runs that reached it."""
        first = self.todo[0].task
        title = f"{first.name}: {first.problem.metric} {first.target:g} on the test set is the target"
        out = Table(title=title, title_justify="left")
        for header in (
            "optimizer",
            "seeds",
            "epoch",
            "training\nloss",
            first.problem.metric,
            "best",
            "ms per\nstep",
        ):
            out.add_column(
                header, justify="left" if header == "optimizer" else "right"
            )
        for header in ("epochs\nto target", "seconds\nto target", "reached"):
            out.add_column(header, justify="right")
        methods = list(dict.fromkeys(run.name for run in self.todo))
        for row in sorted(
            (self._row(name) for name in methods), key=lambda row: row[0]
        ):
            out.add_row(*row[1])
        return out

    def _row(self, name: str) -> tuple[tuple[float, float], list[str]]:
        histories = [
            lines
            for (method, _), lines in self.lines.items()
            if method == name
        ]
        if not histories:
            return (0.0, math.inf), [name, "0", *["–"] * 8]
        problem = self.todo[0].task.problem
        best = max if problem.higher_is_better else min
        metrics = [
            [line["metric"] for line in lines if line["metric"] is not None]
            or [float("nan")]
            for lines in histories
        ]
        goal = self.todo[0].task.target, problem.higher_is_better
        hits = [
            next(
                (line for line in lines if reaches(line["metric"], *goal)),
                None,
            )
            for lines in histories
        ]
        there = [hit for hit in hits if hit is not None]
        last = [lines[-1] for lines in histories]
        losses = [
            line["train_loss"]
            for line in last
            if line["train_loss"] is not None
        ]
        values = [
            name,
            str(len(histories)),
            f"{fmean(line['epoch'] for line in last):.1f}",
            _number(fmean(losses) if losses else None),
            _number(fmean(each[-1] for each in metrics)),
            _number(fmean(best(each) for each in metrics)),
            f"{1000 * fmean(line['seconds'] / line['step'] for line in last):.1f}",
            f"{fmean(hit['epoch'] for hit in there):.1f}" if there else "–",
            f"{fmean(hit['seconds'] for hit in there):.1f}" if there else "–",
            f"{len(there)}/{len(histories)}",
        ]
        order = (
            fmean(hit["seconds"] for hit in there)
            if there
            else (-1 if problem.higher_is_better else 1) * metrics[0][-1]
        )
        return (-len(there) / len(histories), order), values


_ENDS = {
    "target": "the target is reached",
    "finished": "the budget is spent",
    "diverged": "it diverged",
}


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"
