"""`seng tune`: search for each optimizer's recipe on a task, with the same number of trials for every one of them.

A study per optimizer is kept by Optuna in a file beside the results, or in a database that many machines share. The same
command again does what is missing. What is found goes to results/<task>/tuned.json, where `seng compare` reads it. A trial
trains on nine tenths of the training set for the whole budget and is judged on the last tenth: the test set is not looked at.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from time import sleep
from typing import IO, Any

import torch
from optuna.exceptions import OptunaError
from sqlalchemy.exc import SQLAlchemyError
from tyro.conf import Positional

from seng.lab.compare import TUNED, changes, check_set, device_of, parsed
from seng.lab.datasets import Data, DataError, load
from seng.lab.tasks import task
from seng.lab.tuning.scoreboard import Scoreboard
from seng.lab.tuning.search import Kind, Plan, held_out
from seng.lab.tuning.study import (
    Campaign,
    campaign,
    connect,
    default_storage,
    shown,
    studies,
)
from seng.lab.tuning.trials import WAIT, Worker
from seng.lab.tuning.tuned import entry, write

ONE = "import sys; from seng.lab.tuning.command import worker; worker(sys.argv[1:])"


@dataclass(frozen=True)
class Search:
    """How much, and how it is searched."""

    trials: int = 16
    """Of every optimizer, in the end; the same command again does what is missing."""
    epochs: float | None = None
    """Of every trial; default: the task's."""
    batch: int | None = None
    """Default: the task's."""
    sampler: Kind = "tpe"
    """tpe: from ranges; grid: the paper's grid, or as much of it as --trials allows."""
    prune: bool = True
    """Stop trials that are below the median of those before."""
    seed: int = 100
    """Of the search and of the trainings; `seng compare` takes 0, 1, …"""
    set: tuple[str, ...] = ()
    """Fields that are given and not searched, such as refresh_every=20 for all or seng.rank=32 for one."""


@dataclass(frozen=True)
class Where:
    """On what, from where and to where."""

    jobs: int = 1
    """Processes that share the work; on a GPU, four to six share it well where networks are small."""
    storage: str | None = None
    """Such as postgresql://USER:PASSWORD@HOST/NAME, for many machines; default: the file OUT/TASK/studies.db."""
    device: str | None = None
    """cpu or cuda; default: cuda where there is one."""
    data: Path | None = None
    """The folder of the data sets; default: $SENG_DATA, or ./data."""
    out: Path = Path("results")
    """What is found goes to OUT/TASK/tuned.json."""
    label: str = ""
    """Tells these studies apart from others of the same optimizers."""


@dataclass(frozen=True)
class Tune:
    """Search for each optimizer's recipe on a task."""

    task: Positional[str]
    """digits-cnn, mnist-autoencoder, fashion-cnn, cifar10-resnet18, …"""
    optimizers: tuple[str, ...] = ("seng", "sgd", "adam", "kfac")
    """Of seng, seng-adamw, seng-lowrank, seng-muon, seng-paper, kfac, kfac-root, kfac-floor, sgd, adam, adamw, muon, soap,
    shampoo."""
    status: bool = False
    """Only say how far the studies of the task are."""
    search: Search = Search()
    where: Where = Where()

    @property
    def storage(self) -> str:
        """Where the studies are."""
        return self.where.storage or default_storage(self.where.out, self.task)

    def plans(self) -> list[Plan]:
        """One per optimizer."""
        if not self.optimizers or self.where.jobs < 1:
            raise ValueError(
                "--optimizers names at least one, and --jobs is a count of at least 1"
            )
        what, how = task(self.task), self.search
        settings: dict[str, Any] = {
            name: getattr(how, name)
            for name in (
                "trials",
                "epochs",
                "batch",
                "sampler",
                "prune",
                "seed",
            )
        }
        names = list(dict.fromkeys(self.optimizers))
        check_set(how.set, names)
        plans = [
            Plan(
                what,
                name,
                label=self.where.label,
                fixed=changes(how.set, name),
                **settings,
            )
            for name in names
        ]
        for plan in plans:
            _ = plan.first  # an optimizer that there is not is refused before anything is begun
        return plans


def prepared(options: Tune) -> tuple[list[Campaign], Data, torch.device]:
    """The studies and the data."""
    plans = options.plans()
    device = device_of(options.where.device)
    if plans[0].task.data == "imagenet":
        raise ValueError(
            f"{options.task} is streamed from its folder, and tuning holds out a part of data in memory"
        )
    data = held_out(load(plans[0].task.data, options.where.data))
    if not plans[0].task.problem.steps(data, plans[0].size):
        raise ValueError(
            f"{options.task}: a batch of {plans[0].size} is larger than nine tenths of the training set"
        )
    storage = connect(options.storage)
    return [campaign(storage, plan) for plan in plans], data, device


def worker(arguments: Sequence[str]) -> None:
    """One of --jobs processes; it ends with the one that started it."""
    options, _ = parsed(Tune, "tune", arguments)
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell's background ignores it otherwise
    parent = os.getppid()

    def watch() -> None:
        if os.getppid() != parent:
            raise KeyboardInterrupt

    try:
        campaigns, data, device = prepared(options)
        if device.type == "cpu":
            torch.set_num_threads(
                max(1, (os.cpu_count() or 1) // options.where.jobs)
            )
        Worker(data, device, watch).work(campaigns)
    except KeyboardInterrupt:
        sys.exit(130)


def together(
    arguments: Sequence[str],
    jobs: int,
    campaigns: Sequence[Campaign],
    watch: Callable[[], None],
) -> None:
    """Have worker processes do it, and look on; what one of them dies of is said when none is left to do the work."""
    with ExitStack() as stack:
        said = [
            stack.enter_context(tempfile.TemporaryFile()) for _ in range(jobs)
        ]
        quiet: dict[str, Any] = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.DEVNULL,
            "start_new_session": True,
        }
        workers = [
            subprocess.Popen(
                [sys.executable, "-c", ONE, *arguments], stderr=file, **quiet
            )
            for file in said
        ]
        try:
            while any(process.poll() is None for process in workers):
                for each in campaigns:
                    each.recover()
                watch()
                sleep(WAIT)
        finally:
            for process in workers:
                if process.poll() is None:
                    process.send_signal(signal.SIGINT)
            for process in workers:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(30)
        if not all(each.complete() for each in campaigns):
            raise ValueError(
                f"the workers ended before their work was done: {_last_words(said)}"
            )


def _last_words(said: Sequence[IO[bytes]]) -> str:
    for file in said:
        file.seek(0)
        if lines := file.read().decode(errors="replace").strip().splitlines():
            return lines[-1]
    return "they left no word"


def tune(options: Tune, arguments: Sequence[str]) -> None:
    """Do what is missing, show the standings, and write down what was found."""
    campaigns, data, device = prepared(options)
    path = options.where.out / options.task / TUNED
    written = set[str]()

    def watch() -> None:
        board.update()
        for each in campaigns:
            if each.plan.key not in written and each.complete():
                written.add(each.plan.key)
                if (found := entry(each)) is not None:
                    write(path, {each.plan.key: found})

    board = Scoreboard([each.study for each in campaigns])
    try:
        with board:
            board.say(_introduction([each.plan for each in campaigns], data))
            for each in campaigns:
                each.recover()
            if all(each.complete() for each in campaigns):
                board.say("all of these trials have been done before")
            elif options.where.jobs > 1:
                del data
                together(arguments, options.where.jobs, campaigns, watch)
            else:
                Worker(data, device, watch).work(campaigns)
            watch()
    except KeyboardInterrupt:
        board.say(
            "interrupted; the trials under way do not count, and the same command goes on from here"
        )
        sys.exit(130)
    none = [each.plan.key for each in campaigns if entry(each) is None]
    if none:
        raise ValueError(
            f"no trial of {', '.join(none)} came to its end: the lines above, or the storage, say why"
        )
    board.say(f"found: {path}; seng compare {options.task} runs with it")


def _introduction(plans: Sequence[Plan], data: Data) -> str:
    """What is about to be done, and what may surprise in it."""
    first, judges = plans[0], len(data.test.x)
    each = f"{first.trials} trials of {first.budget:g} epochs at batch {first.size} for every optimizer"
    said = [
        f"{first.task.name}: {each}, judged on {judges} of the {len(data.train.x) + judges} training samples."
    ]
    for plan in plans:
        if plan.sampler == "grid":
            some = f"{plan.asked - 1} of the {len(plan.points)} points of the paper's grid, drawn by seed {plan.seed}"
            whole = f"all {len(plan.points)} points of the paper's grid"
            said.append(
                f"{plan.optimizer}: the task's own recipe, and {some if plan.asked <= len(plan.points) else whole}."
            )
        else:
            stay = [
                f"{name} stays {getattr(plan.base, name):g}"
                for name in plan.base.space
                if name not in plan.space
            ]
            said += (
                [f"{plan.optimizer}: {', '.join(stay)}, as the task has it."]
                if stay
                else []
            )
    return "\n".join(said)


def status(options: Tune) -> None:
    """How far the studies of a task are."""
    name, where = task(options.task).name, options.storage
    missing = (
        options.where.storage is None
        and not (options.where.out / name / "studies.db").exists()
    )
    found = [] if missing else studies(connect(where), name)
    if not found:
        raise ValueError(f"there are no studies of {name} in {shown(where)}")
    board = Scoreboard(found)
    board.conclude()


def main(arguments: Sequence[str] | None = None) -> None:
    """`seng tune`."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options, _ = parsed(Tune, "tune", given)
    try:
        status(options) if options.status else tune(options, given)
    except (ValueError, DataError) as wrong:
        sys.exit(f"seng tune: {wrong}")
    except (OptunaError, SQLAlchemyError) as why:
        said = str(why).strip().splitlines()[0]
        sys.exit(
            f"seng tune: the storage {shown(options.storage)} failed ({said}); the same command goes on from here"
        )
