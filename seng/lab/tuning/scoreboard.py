"""What is shown of a search: a line per study, the best first, read from the storage that all workers share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import monotonic
from types import TracebackType
from typing import Any, Self

import optuna
from optuna.trial import FrozenTrial, TrialState
from rich.console import Console
from rich.live import Live
from rich.table import Table

from seng.lab.tuning.search import at_the_edge
from seng.lab.tuning.study import best, counted, running


class Scoreboard:
    """A live table of studies; where the output is no terminal, a line per trial."""

    def __init__(
        self, studies: Sequence[optuna.Study], console: Console | None = None
    ) -> None:
        self.studies, self.console = list(studies), console or Console()
        self.seen = {
            study.study_name: {trial.number for trial in _finished(study)}
            for study in self.studies
        }
        self.live = Live(
            console=self.console, refresh_per_second=4, transient=True
        )
        self.drawn = 0.0

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self.live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.console.is_terminal:
            self.live.stop()
        self.conclude()

    def say(self, text: str) -> None:
        """A sentence below."""
        self.console.print(text, highlight=False, soft_wrap=True)

    def update(self) -> None:
        """Look at the storage again, though not more often than a reader does."""
        if monotonic() - self.drawn < 0.5:
            return
        if self.console.is_terminal:
            self.live.update(self.table())
        else:
            self._report()
        self.drawn = monotonic()

    def _report(self) -> None:
        for study in self.studies:
            trials = _finished(study)
            for place, trial in enumerate(trials, 1):
                if trial.number not in self.seen[study.study_name]:
                    self.seen[study.study_name].add(trial.number)
                    done = f"{study.study_name}: trial {place} of {study.user_attrs['trials']}"
                    self.say(
                        f"{done}: {_outcome(study, trial)} ({_fields(trial.params)})"
                    )

    def conclude(self) -> None:
        """The table, and what must be said about it."""
        if not self.console.is_terminal:
            self._report()
        self.console.print(self.table())
        counts = {
            study.study_name: len(_finished(study)) for study in self.studies
        }
        for study in self.studies:
            settings, done, asked = (
                study.user_attrs["settings"],
                counts[study.study_name],
                study.user_attrs["trials"],
            )
            if done < asked:
                self.say(
                    f"{study.study_name} is unfinished: {done} of {asked} trials"
                )
            top = best(study)
            for name in (
                at_the_edge(top.params, top.distributions) if top else ()
            ):
                where = f"the best {name}, {_value(top.params[name])}, lies at the edge of what was tried"  # type: ignore[union-attr]
                self.say(
                    f"{study.study_name}: {where}; {settings['optimizer']} may do better beyond it"
                )
        if (
            all(
                counts[study.study_name] >= study.user_attrs["trials"]
                for study in self.studies
            )
            and len(set(counts.values())) > 1
        ):
            uneven = ", ".join(
                f"{count} of {name}" for name, count in counts.items()
            )
            self.say(f"these do not have the same number of trials: {uneven}")

    def table(self) -> Table:
        """One row per study."""
        settings = self.studies[0].user_attrs["settings"]
        title = f"{settings['task']}: {settings['metric']} on a tenth of the training set"
        out = Table(title=title, title_justify="left")
        for header, side in (
            ("optimizer", "left"),
            ("trials", "right"),
            ("of them", "left"),
            ("best", "right"),
            ("with", "left"),
        ):
            out.add_column(header, justify=side, no_wrap=side == "right")  # type: ignore[arg-type]
        for study in sorted(self.studies, key=_order):
            out.add_row(*_row(study))
        return out


def _finished(study: optuna.Study) -> list[FrozenTrial]:
    trials = counted(study.get_trials(deepcopy=False))
    return sorted(
        trials,
        key=lambda trial: (
            trial.datetime_complete.timestamp()
            if trial.datetime_complete
            else 0.0
        ),
    )


def _order(study: optuna.Study) -> float:
    top = best(study)
    sign = -1 if study.direction == optuna.study.StudyDirection.MAXIMIZE else 1
    return (
        float("inf") if top is None or top.value is None else sign * top.value
    )


def _row(study: optuna.Study) -> list[str]:
    done, top, settings = (
        _finished(study),
        best(study),
        study.user_attrs["settings"],
    )
    kinds = {
        "running": len(running(study.get_trials(deepcopy=False))),
        "pruned": sum(trial.state == TrialState.PRUNED for trial in done),
        "diverged": sum("diverged" in trial.user_attrs for trial in done),
        "failed": sum(trial.state == TrialState.FAIL for trial in done),
    }
    return [
        settings["optimizer"]
        + (f"-{settings['label']}" if settings["label"] else ""),
        f"{len(done)}/{study.user_attrs['trials']}",
        ", ".join(f"{count} {kind}" for kind, count in kinds.items() if count),
        "–" if top is None else f"{top.value:.4f}",
        "" if top is None else _fields(top.params),
    ]


def _outcome(study: optuna.Study, trial: FrozenTrial) -> str:
    metric = study.user_attrs["settings"]["metric"]
    if trial.state == TrialState.FAIL:
        return f"failed, {trial.user_attrs.get('failed', 'its process died')}"
    if "diverged" in trial.user_attrs:
        return "it diverged"
    return f"{'pruned at ' if trial.state == TrialState.PRUNED else ''}{metric} {trial.value:.4f}"


def _fields(values: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name} {_value(value)}" for name, value in values.items()
    )


def _value(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
