"""`seng bench`: what a step of SENG costs beside SGD, AdamW, Muon and K-FAC, and how near its direction is to the exact one.

`seng` is the library's default; `seng lowrank` and its forms are low rank over λI, at the settings that the options name.

In one process: all contenders start from the same weights, which SGD trained a little, and take turns, a window of steps each,
for several rounds; every round starts from those weights again. A refresh is timed as a window with one minus a window without,
and spread over T steps. Peak memory and the direction are measured before, one contender at a time. Writes a JSON per model as
it goes, and a picture of it.

With --distributed it starts several processes instead and counts what they send: `seng.lab.bench.distributed`.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch

from seng import SENG
from seng.lab.bench.arena import Arena, Entrant
from seng.lab.bench.contenders import (
    BASELINES,
    LOW_RANKS,
    MEASURED,
    LeftOutError,
    Setting,
    state_bytes,
)
from seng.lab.bench.distributed import distributed
from seng.lab.bench.exact import Watch, compare, observed
from seng.lab.bench.memory import clean, peak
from seng.lab.bench.options import Options
from seng.lab.bench.report import Screen, draw
from seng.lab.bench.rows import Row, summarise
from seng.lab.bench.tasks import Task
from seng.lab.record import provenance

CHECK_SECONDS = 20.0  # what the check of the amortised figure may take
MiB = 2**20


class Bench:
    """One model: fills the rows, phase by phase, and writes them as it goes."""

    def __init__(self, task: Task, options: Options, screen: Screen) -> None:
        self.task, self.options, self.screen = task, options, screen
        self.head = provenance(options.command(task), options.device)
        self.path = options.path(task)
        self.rows: list[Row] = []
        self.notes: list[str] = []
        self.finished = False

    def run(self) -> None:
        """Everything; interrupted, what is there is written."""
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                settings = self.options.settings(self.task)
                self.tell("data and weights")
                self.arena = Arena(self.task, self.options)
                self.train(settings[0])
                for setting in settings:
                    rows = [
                        Row(name, setting) for name in self.options.contenders
                    ]
                    self.rows += rows
                    self.directions(rows)
                    self.footprints(rows)
                    self.race(rows)
                self.finished = True
            finally:
                self.notes = list(
                    dict.fromkeys(str(w.message) for w in warned)
                )
                self.tell("done" if self.finished else "interrupted")

    def train(self, setting: Setting) -> None:
        """SGD makes the weights to start from."""
        sgd = Entrant("sgd", self.arena, setting, 1)
        sgd.batches, self.arena.unseen = iter(self.arena.unseen), []
        sgd.steps(self.task.warm)
        if not sgd.loss.isfinite():
            raise RuntimeError(
                f"SGD diverged within {self.task.warm} steps on {self.task.name}: a smaller lr is needed there"
            )
        self.arena.start = {
            name: t.clone() for name, t in sgd.model.state_dict().items()
        }

    @contextmanager
    def attempt(self, row: Row, what: str) -> Iterator[None]:
        """What one contender cannot do is noted and does not stop the others."""
        self.tell(f"{row.contender}: {what}; {row.setting}")
        try:
            yield
        except LeftOutError as why:
            row.runs, row.note = False, str(why)
        except Exception as error:
            said = (
                "out of memory"
                if isinstance(error, torch.OutOfMemoryError)
                else f"{type(error).__name__}: {error}"
            )
            row.runs = row.runs and what == "direction"
            row.note = f"{row.note} {what}: {said.splitlines()[0]}".strip()

    def directions(self, rows: Sequence[Row]) -> None:
        """d and the exact d of one batch, from one and the same backward."""
        for row in rows:
            if row.contender not in MEASURED:
                continue
            known = self.known(row, "quality")
            if known is not None:
                row.quality = known.quality
                continue
            with self.attempt(row, "direction"):
                self.direction(row)
            self.clean()

    def known(self, row: Row, what: str) -> Row | None:
        """A row of the same contender that has this already, where it is the same at every setting."""
        if row.contender not in BASELINES:
            return None
        return next(
            (
                r
                for r in self.rows
                if r.contender == row.contender
                and getattr(r, what) is not None
            ),
            None,
        )

    def direction(self, row: Row) -> None:
        """Of one contender."""
        s, model = row.setting, self.arena.model()
        model.load_state_dict(self.arena.start)
        given: dict[str, Any] = {}
        if row.contender in LOW_RANKS:
            given["damping"] = s.damping
            given["curvature"] = s.curvature(LOW_RANKS[row.contender])
        optimizer = SENG(
            model, 1.0, momentum=0, refresh_every=row.every, **given
        )
        watch = Watch(model)
        self.arena.backward(model, self.arena.pool[0])
        watch.remove()
        grads = {p: p.grad.clone() for p in watch.params if p.grad is not None}
        got = observed(optimizer, list(grads))
        want = watch.direction_of(optimizer)
        row.quality = compare(watch.sites, got, want, grads)

    def clean(self) -> None:
        """Let go of the last contender, whose model a compiled graph may hold."""
        if self.arena.compile:
            torch.compiler.reset()
        clean(self.arena.device)

    def footprints(self, rows: Sequence[Row]) -> None:
        """Peak memory over steps with a refresh among them, each contender alone on the device, and bytes of state."""
        for row in rows:
            known = self.known(row, "peak_MiB")
            if known is not None:
                row.peak_MiB, row.reserved_MiB, row.state_MiB = (
                    known.peak_MiB,
                    known.reserved_MiB,
                    known.state_MiB,
                )
            elif row.runs:
                with self.attempt(row, "memory"):
                    self.footprint(row)
                self.clean()
        sgd = next(
            (row.peak_MiB for row in rows if row.contender == "sgd"), None
        )
        for row in rows:
            row.peak_ratio_to_sgd = (
                row.peak_MiB / sgd if row.peak_MiB and sgd else None
            )

    def footprint(self, row: Row) -> None:
        """Of one contender."""
        period = min(row.every, 4)
        e = Entrant(row.contender, self.arena, row.setting, period)
        e.steps(2 * period + 1)
        row.state_MiB = state_bytes(e.optimizer) / MiB
        if self.arena.device.type == "cuda" or not self.arena.compile:
            allocated, reserved = peak(
                lambda: e.steps(period), self.arena.device, e.resident
            )
            row.peak_MiB, row.reserved_MiB = (
                allocated / MiB,
                None if reserved is None else reserved / MiB,
            )

    def race(self, rows: Sequence[Row]) -> None:
        """All contenders in turns: a window with a refresh, a window without; who begins changes from round to round."""
        window = self.task.window
        period = 1 if rows[0].setting.every == 1 else 2 * window
        entrants: list[tuple[Row, Entrant, list[tuple[float, float]]]] = []
        for row in (row for row in rows if row.runs):
            with self.attempt(row, "warming up"):
                e = Entrant(row.contender, self.arena, row.setting, period)
                e.steps(max(2 * period, 5))
                entrants.append((row, e, []))
        for i in range(self.task.rounds):
            order = (
                entrants[i % max(len(entrants), 1) :]
                + entrants[: i % max(len(entrants), 1)]
            )
            for row, e, times in order:
                with self.attempt(row, f"round {i + 1} of {self.task.rounds}"):
                    e.rewind()
                    first = e.seconds(window)
                    if period > 1 and getattr(
                        e.optimizer, "refresh_due", False
                    ):
                        row.note = "refreshes more often than asked"
                    times.append((first, e.seconds(window)))
                    row.loss = float(e.loss) if e.loss.isfinite() else None
                    row.note = row.note if row.loss is not None else "diverged"
            entrants = [entry for entry in entrants if entry[0].runs]
            summarise([(row, times) for row, _, times in entrants], window)
        self.check({row.contender: (row, e) for row, e, _ in entrants})

    def check(self, entrants: dict[str, tuple[Row, Entrant]]) -> None:
        """A whole period of T steps with its one refresh as it comes, where that is cheap; in turns with SGD."""
        if "seng" not in entrants or "sgd" not in entrants:
            return
        row, T = entrants["seng"][0], entrants["seng"][0].every
        if (
            2 * self.task.window >= T
            or row.idle_ms is None
            or 3e-3 * T * row.idle_ms > CHECK_SECONDS
        ):
            return
        with self.attempt(row, f"a whole period of {T} steps"):
            sgd, e = (
                entrants["sgd"][1],
                Entrant("seng", self.arena, row.setting, T),
            )
            e.steps(T)
            parts = [T // 5 + (i < T % 5) for i in range(5)]
            pairs = [
                (count * e.seconds(count), count * sgd.seconds(count))
                for count in parts
            ]
            ours, theirs = (sum(side) for side in zip(*pairs, strict=True))
            row.whole_period_ms, row.whole_period_ratio_to_sgd = (
                1e3 * ours / T,
                ours / theirs,
            )

    def tell(self, status: str) -> None:
        """Write what there is, and show it."""
        if self.rows:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(
                json.dumps(self.result(), indent=1, ensure_ascii=False) + "\n"
            )
        self.screen.show(self.task.name, status, self.rows)

    def result(self) -> dict[str, Any]:
        """The JSON."""
        t, cuda = self.task, self.options.device.type == "cuda"
        setting = {
            "model": t.name,
            "parameters": self.arena.parameters,
            "batch": t.batch,
            "size": t.size,
            "precision": "bfloat16 autocast" if cuda else "float32",
            "channels_last": cuda and t.convolutional,
            "compiled": self.options.which.compile,
            "preset": self.options.which.preset,
            "warm": t.warm,
            "window": t.window,
            "rounds": t.rounds,
        }
        rows = [asdict(row) for row in self.rows]
        return {
            **self.head,
            "seed": self.options.amounts.seed,
            "setting": setting,
            "finished": self.finished,
            "rows": rows,
            "notes": self.notes,
        }


def bench(options: Options) -> bool:
    """Measure each model; whether all was finished."""
    if options.device.type == "cuda":
        torch.backends.cudnn.benchmark = True
    with Screen() as screen:
        for task in options.tasks:
            run = Bench(task, options, screen)
            try:
                run.run()
            except KeyboardInterrupt:
                screen.say(f"interrupted; what was finished is in {run.path}")
                return False
            screen.keep(run.rows)
            screen.say(f"{run.path}; picture: {draw(run.path)}")
            del run
            clean(options.device)
    return True


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    try:
        import tyro
    except ImportError:
        sys.exit(
            "seng bench: tyro is missing, which reads the options: pip install 'seng[lab]'"
        )
    try:
        prefixless = (tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff)
        options = tyro.cli(
            Options,
            prog="seng bench",
            description=__doc__,
            args=arguments,
            config=prefixless,
        )
    except ValueError as wrong:
        sys.exit(f"seng bench: {wrong}")
    if options.plot is not None:
        for path in sorted(options.plot.glob("*.json")):
            if "-distributed-" not in path.name:  # those are tables only
                print(draw(path))
        return
    if not (
        distributed(options)
        if options.parallel.distributed
        else bench(options)
    ):
        sys.exit(130)


if __name__ == "__main__":
    main()
