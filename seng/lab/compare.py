"""`seng train` and `seng compare`: one optimizer or several on a task, seed after seed, with the standings as they come.

What is finished is not run again, what was interrupted goes on where it was. Recipes are those that `seng tune` found, where
it has been run (results/<task>/tuned.json), and the task's own otherwise; `--set seng.lr=0.2` changes one for all seeds.
Under torchrun all ranks train each run together (docs/distributed.md).
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from rich.console import Console
from tyro.conf import Positional

from seng.lab.checkpoint import Checkpoint
from seng.lab.datasets import DataError
from seng.lab.ranks import ALONE, Ranks
from seng.lab.recipe import Recipe
from seng.lab.recipes import RECIPES, recipe
from seng.lab.run import Run
from seng.lab.standings import Standings
from seng.lab.streams import open_data
from seng.lab.tasks import LENGTHS, Task, task
from seng.lab.train import Training, train, warm_up

TUNED = "tuned.json"  # beside a task's results: what `seng tune` found


@dataclass(frozen=True)
class Amounts:
    """How much of it."""

    epochs: float | None = None
    """The budget; default: the task's."""
    batch: int | None = None
    """Default: the task's."""
    stop: bool = True
    """At the target, as the paper does; --no-stop trains to the end of the budget."""


@dataclass(frozen=True)
class Where:
    """On what, from where and to where."""

    device: str | None = None
    """cpu or cuda; default: cuda where there is one."""
    data: Path | None = None
    """The folder of the data sets; default: $SENG_DATA, or ./data."""
    out: Path = Path("results")
    """Results go to OUT/TASK/OPTIMIZER-SEED.jsonl."""
    tensorboard: Path | None = None
    """Draw there too, for TensorBoard."""


@dataclass(frozen=True)
class How:
    """Details."""

    label: str = ""
    """Tells these runs apart from others of the same optimizer, such as T20."""
    set: tuple[str, ...] = ()
    """Fields of the recipes, such as lr=0.1 for all or seng.damping=0.01 for one."""
    compile: bool = False
    """Compile the network."""
    graph: bool = True
    """Replay forward and backward as a CUDA graph; --no-graph launches them one by one, as a plain loop does."""
    tuned: str = ""
    """Take what `seng tune` found under this label; default: under --label or, where there is nothing, without one."""
    untuned: bool = False
    """Leave aside what `seng tune` found."""
    again: bool = False
    """Run again what is finished."""
    shared: bool = False
    """Other work runs on the machine meanwhile: the results say so, and no report counts their seconds."""
    checkpoint: float = 60.0
    """Seconds between checkpoints, which are written after evaluations."""
    timeout: float = 600.0
    """Under torchrun: seconds that a rank waits for the others before it gives up."""


def changes(given: Sequence[str], optimizer: str) -> dict[str, Any]:
    """What `--set` says of one optimizer: its own fields before those for all."""
    found: dict[str, Any] = {}
    for own in (False, True):
        for text in given:
            key, equals, value = text.partition("=")
            if not equals:
                raise ValueError(
                    f"--set takes field=value, such as lr=0.1 or seng.lr=0.1, not {text!r}"
                )
            name, dot, field = key.rpartition(".")
            if dot and name not in RECIPES:
                recipe(name)  # says what there is
            if bool(dot) == own and (not dot or name == optimizer):
                found[field] = value
    return found


def check_set(given: Sequence[str], optimizers: Sequence[str]) -> None:
    """Refuse what `--set` says of an optimizer that does not run."""
    for text in given:
        if (
            "." in (key := text.partition("=")[0])
            and key.rpartition(".")[0] not in optimizers
        ):
            recipe(key.rpartition(".")[0])  # says what there is
            raise ValueError(
                f"--set {text} is for an optimizer that does not run here: there are {', '.join(optimizers)}"
            )


def chosen(
    what: Task,
    optimizer: str,
    how: How,
    out: Path,
    epochs: float | None = None,
) -> tuple[Recipe, dict[str, Any] | None]:
    """The recipe, and how it was tuned; what was tuned under the same label comes first."""
    path = out / what.name / TUNED
    budget = what.epochs if epochs is None else epochs
    try:
        known = (
            json.loads(path.read_text())
            if path.exists() and not how.untuned
            else {}
        )
    except ValueError as wrong:
        raise ValueError(
            f"{path} cannot be read ({wrong}): run seng tune again, which writes it, or give --untuned"
        ) from None
    if how.tuned and how.untuned:
        raise ValueError(
            "--tuned takes what seng tune found and --untuned leaves it aside: give one of them"
        )
    if how.tuned and f"{optimizer}-{how.tuned}" not in known:
        command = f"seng tune {what.name} --optimizers {optimizer} --label {how.tuned}"
        raise ValueError(
            f"{path} has nothing for {optimizer} under {how.tuned!r}: {command} finds it"
        )
    tuned = known.get(f"{optimizer}-{how.tuned or how.label}") or known.get(
        optimizer
    )
    base = what.recipe(optimizer, budget)
    if tuned is not None:
        scale = budget / tuned.get(
            "epochs", budget
        )  # a schedule that was searched in a shorter run
        base = base.with_(
            {
                k: v * scale if k in LENGTHS and v else v
                for k, v in tuned["recipe"].items()
            }
        )
    given = changes(how.set, optimizer)
    kept = ("trials", "study", "epochs", "batch")
    return base.with_(given), {
        name: tuned.get(name) for name in kept
    } if tuned and not given else None


def runs(
    what: Task,
    optimizers: Sequence[str],
    seeds: Sequence[int],
    amounts: Amounts,
    how: How,
    out: Path,
    ranks: int = 1,
) -> list[Run]:
    """Everything that is to be run, seed after seed."""
    check_set(how.set, optimizers)
    recipes = {
        name: chosen(what, name, how, out, amounts.epochs)
        for name in optimizers
    }
    common: dict[str, Any] = {
        name: getattr(how, name)
        for name in ("label", "compile", "graph", "shared")
    }
    common["stop"] = amounts.stop
    return [
        Run(
            what,
            recipes[name][0],
            seed,
            amounts.epochs,
            amounts.batch,
            tuning=recipes[name][1],
            ranks=ranks,
            **common,
        )
        for seed in seeds
        for name in optimizers
    ]


def device_of(name: str | None) -> torch.device:
    """By its name, ready for timing; where none is given, a GPU if there is one."""
    kind = name or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind.split(":")[0] not in ("cpu", "cuda") or (
        kind.startswith("cuda") and not torch.cuda.is_available()
    ):
        raise ValueError(
            f"--device is cpu or cuda, and cuda needs a GPU that torch sees; given: {kind}"
        )
    torch.backends.cudnn.benchmark = kind.startswith("cuda")
    return torch.device(kind)


def carried_out(
    todo: Sequence[Run],
    where: Where,
    how: How,
    command: str,
    device: torch.device,
    ranks: Ranks,
) -> Iterator[tuple[Run, dict[str, Any]]]:
    """Each line of each run as it comes."""
    data = open_data(todo[0].task.data, where.data)
    for run in (
        {run.name: run for run in todo}.values() if ranks.count > 1 else ()
    ):
        try:
            run.recipe.optimizer(
                run.task.build(data.classes)
            )  # before the others have trained for hours
        except RuntimeError as why:
            raise ValueError(
                f"{run.name} does not run on {ranks.count} ranks: {why}"
            ) from why
    warm: set[str] = set()
    for run in todo:
        if device.type == "cuda" and run.recipe.name not in warm:
            warm_up(run, data, device, ranks)
            warm.add(run.recipe.name)
        training = Training(run, data, device, command, ranks)
        place = (
            where.out
            / run.task.name
            / "checkpoints"
            / f"{run.path(where.out).stem}.pt"
        )
        writer = _writer(where.tensorboard if ranks.first else None, run)
        checkpoint = (
            Checkpoint(place, how.checkpoint, ranks)
            if run.recipe.resumable
            else None
        )
        for line in train(training, where.out, checkpoint, how.again):
            for name in ("train_loss", "loss", "metric") if writer else ():
                if line[name] is not None:
                    writer.add_scalar(
                        name, line[name], line["step"], line["seconds"]
                    )
            yield run, line
        if writer:
            writer.close()
        del training  # before the next one needs its memory


def _writer(folder: Path | None, run: Run) -> Any:
    if folder is None:
        return None
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(folder / run.task.name / f"{run.name}-{run.seed}")


def go(
    todo: Sequence[Run],
    where: Where,
    how: How,
    command: str,
    device: torch.device,
    ranks: Ranks,
) -> None:
    """Run, and show the standings."""
    silent = Console(quiet=True, force_terminal=False)
    with Standings(todo, None if ranks.first else silent) as standings:
        for name, run in {run.name: run for run in todo}.items():
            tuned = run.tuning or {}
            for what, value in (("epochs", run.budget), ("batch", run.size)):
                if tuned.get(what) not in (None, value):
                    standings.say(
                        f"{name}: its recipe was tuned with {what} {tuned[what]:g} and now runs with {value:g}"
                    )
        budgets = {
            run.name: (run.tuning or {}).get("trials", 0) for run in todo
        }
        if len(set(budgets.values())) > 1:
            told = ", ".join(
                f"{name} {trials}" for name, trials in budgets.items()
            )
            standings.say(
                f"these recipes were chosen by different numbers of trials: {told}"
            )
        try:
            for run, line in carried_out(
                todo, where, how, command, device, ranks
            ):
                standings.tell(run, line)
        except KeyboardInterrupt:
            standings.say(
                f"interrupted; the same command goes on from here: {command.replace(' --again', '')}"
            )
            sys.exit(130)
        except (DataError, OSError) as wrong:
            sys.exit(f"seng{ranks.said}: {wrong}")
    standings.say(
        f"results: {where.out / todo[0].task.name}; seng report {where.out} draws them"
    )


def command_of(words: Sequence[str], arguments: Sequence[str]) -> str:
    """What makes the results again."""
    return shlex.join(["seng", *words, *arguments])


def parsed(
    kind: type[Any], words: str, arguments: Sequence[str] | None
) -> tuple[Any, str]:
    """The options of a command, and the command itself as text."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    config = (tyro.conf.OmitArgPrefixes,)
    options = tyro.cli(
        kind,
        prog=f"seng {words}",
        description=kind.__doc__,
        args=given,
        config=config,
    )
    return options, command_of([words], given)


@dataclass(frozen=True)
class Train:
    """Train one optimizer on a task."""

    task: Positional[str]
    """digits-cnn, mnist-autoencoder, fashion-cnn, cifar10-resnet18, …"""
    optimizer: Positional[str] = "seng"
    """seng, seng-adamw, seng-lowrank, seng-muon, seng-paper, kfac, kfac-root, kfac-floor, sgd, adam, adamw, muon, soap or
    shampoo."""
    seed: int = 0
    amounts: Amounts = Amounts()
    how: How = How()
    where: Where = Where()


@dataclass(frozen=True)
class Compare:
    """Train several optimizers on a task, each with several seeds."""

    task: Positional[str]
    """digits-cnn, mnist-autoencoder, fashion-cnn, cifar10-resnet18, …"""
    optimizers: tuple[str, ...] = ("seng", "sgd", "adam", "kfac")
    """Of seng, seng-adamw, seng-lowrank, seng-muon, seng-paper, kfac, kfac-root, kfac-floor, sgd, adam, adamw, muon, soap,
    shampoo."""
    seeds: int = 3
    """How many: 0, 1, …"""
    amounts: Amounts = Amounts()
    how: How = How()
    where: Where = Where()


def start(
    options: Train | Compare,
    word: str,
    command: str,
    optimizers: Sequence[str],
    seeds: Sequence[int],
) -> None:
    """One process, or what torchrun started; what is wrong is said in a sentence, by every rank for which it is."""
    ranks, how, where = ALONE, options.how, options.where
    try:
        ranks = Ranks.present()
        if how.again and ranks.restarts:
            raise ValueError(
                "--again would begin anew after every restart: leave it out, or leave out --max-restarts"
            )
        todo = runs(
            task(options.task),
            optimizers,
            seeds,
            options.amounts,
            how,
            where.out,
            ranks.count,
        )
        device = ranks.device(device_of(where.device))
        with ranks.joined(device, how.timeout):
            go(todo, where, how, ranks.launcher + command, device, ranks)
    except ValueError as wrong:
        sys.exit(f"seng {word}{ranks.said}: {wrong}")


def main_train(arguments: Sequence[str] | None = None) -> None:
    """`seng train`."""
    options, command = parsed(Train, "train", arguments)
    start(options, "train", command, [options.optimizer], [options.seed])


def main(arguments: Sequence[str] | None = None) -> None:
    """`seng compare`."""
    options, command = parsed(Compare, "compare", arguments)
    if options.seeds < 1 or not options.optimizers:
        sys.exit(
            "seng compare: --seeds is a count of at least 1, and --optimizers names at least one"
        )
    start(
        options,
        "compare",
        command,
        list(dict.fromkeys(options.optimizers)),
        range(options.seeds),
    )
