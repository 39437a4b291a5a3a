"""`python -m seng.lab.demo`: SENG beside SGD in SGD's recipe, beside AdamW in AdamW's, and K-FAC, on scikit-learn's digits.

SENG runs with its defaults and with the learning rate of the optimizer whose recipe it takes. Within a seed all start from
the same weights and see the same batches. They take turns, a lap of a few steps each, so that whatever else the machine does
slows all of them alike. Evaluation is not timed. Nothing is downloaded.

SGD, AdamW and K-FAC had the same search: their learning rate, five values a factor of two apart, three seeds. All else is at
its default, but for SGD's Nesterov momentum of 0.9, which SENG takes over; no schedule is used, and no weight decay but
AdamW's own. The value with the best validation accuracy, mean over all evaluations of a run and over the seeds, won. A fifth
of the training images was held out for this; neither the test images nor the demo's seeds enter the search, which `--tune`
repeats, for SENG too.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import nan
from pathlib import Path
from statistics import fmean, stdev
from typing import NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, Progress, TimeElapsedColumn
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, AdamW, Optimizer

from seng import KFAC, SENG
from seng.lab.models import digits_cnn
from seng.layers.kinds import arrange

BATCH = 64
LAP = 4  # steps between evaluations
TARGET = 0.98  # test accuracy
TUNING_SEEDS = (100, 101, 102)
GRID = (0.0125, 0.025, 0.05, 0.1, 0.2)
FOLLOW = 0.3  # of BatchNorm's running statistics, torch's being 0.1: else, after the 22 steps of an epoch, a tenth of what the
# test accuracy is measured with is still the initial 0 and 1, and hides what has been learned


@dataclass(frozen=True)
class Recipe:
    """An optimizer, the learning rates that were tried and the one that won."""

    name: str
    build: Callable[[nn.Module, float], Optimizer]
    grid: tuple[float, ...]
    lr: float
    colour: str  # of Okabe and Ito's palette, which colour-blind readers can tell apart
    line: str


def kfac(model: nn.Module, lr: float) -> Optimizer:
    """It has no factors for norms, which take the plain gradient; asking for that spares the warning."""
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            arrange(layer, None)
    return KFAC(model, lr, damp="tikhonov", refresh_every=10)


ADAM_GRID = (0.00125, 0.0025, 0.005, 0.01, 0.02)
RECIPES = (
    Recipe(
        "SGD",
        lambda m, lr: SGD(m.parameters(), lr, momentum=0.9, nesterov=True),
        GRID,
        0.025,
        "#0072B2",
        "--",
    ),
    Recipe(
        "SENG (SGD)",
        lambda m, lr: SENG(m, lr=lr, nesterov=True),
        GRID,
        0.025,
        "#E69F00",
        ".-",
    ),
    Recipe(
        "AdamW",
        lambda m, lr: AdamW(m.parameters(), lr),
        ADAM_GRID,
        0.005,
        "#009E73",
        "-.",
    ),
    Recipe(
        "SENG (AdamW)",
        lambda m, lr: SENG(m, lr=lr, recipe="adamw", weight_decay=0.01),
        ADAM_GRID,
        0.005,
        "#D55E00",
        "-",
    ),
    Recipe("K-FAC", kfac, (0.05, 0.1, 0.2, 0.4, 0.8), 0.1, "#CC79A7", ":"),
)


class Data(NamedTuple):
    """Images (N, 1, 8, 8) in [0, 1] and their labels, to train on and to hold out."""

    x: Tensor
    y: Tensor
    x_held: Tensor
    y_held: Tensor


def split(x: Tensor, y: Tensor) -> Data:
    """Four fifths to train on, one to hold out; always the same ones."""
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    train, held = order[: len(y) * 4 // 5], order[len(y) * 4 // 5 :]
    return Data(x[train], y[train], x[held], y[held])


def digits() -> Data:
    """1,437 images to train on and 360 to test with."""
    bunch = load_digits()
    return split(
        torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / 16,
        torch.tensor(bunch.target),
    )


@dataclass
class Run:
    """One optimizer with one seed; the lists grow by one entry per lap."""

    recipe: Recipe
    seed: int
    data: Data
    epochs: int
    losses: list[float] = field(default_factory=list)  # mean over the lap
    accuracies: list[float] = field(default_factory=list)
    seconds: list[float] = field(
        default_factory=list
    )  # since the start, training only

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        self.model = digits_cnn()
        for layer in self.model.modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.momentum = FOLLOW
        self.optimizer = self.recipe.build(self.model, self.recipe.lr)
        order = torch.Generator().manual_seed(self.seed)
        count = len(self.data.y)
        epochs = [
            torch.randperm(count, generator=order)[: count - count % BATCH]
            for _ in range(self.epochs)
        ]
        self.batches = torch.cat(epochs).view(-1, BATCH)
        self.laps = len(self.batches) // LAP

    def lap(self) -> None:
        """LAP steps, timed, and an evaluation, not timed."""
        done = len(self.losses) * LAP
        losses = []
        self.model.train()
        start = time.perf_counter()
        for batch in self.batches[done : done + LAP]:
            self.optimizer.zero_grad()
            loss = cross_entropy(
                self.model(self.data.x[batch]), self.data.y[batch]
            )
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
        self.seconds.append(
            (self.seconds[-1] if self.seconds else 0.0)
            + time.perf_counter()
            - start
        )
        self.losses.append(fmean(losses))
        self.model.eval()
        with torch.no_grad():
            right = self.model(self.data.x_held).argmax(1) == self.data.y_held
        self.accuracies.append(right.float().mean().item())

    @property
    def laps_to_target(self) -> int | None:
        """The first evaluation that reaches the target."""
        return next(
            (
                i + 1
                for i, accuracy in enumerate(self.accuracies)
                if accuracy >= TARGET
            ),
            None,
        )

    @property
    def step_seconds(self) -> float:
        """Mean over all steps, refreshes of the curvature included."""
        return self.seconds[-1] / (len(self.seconds) * LAP)


Runs = dict[str, list[Run]]  # by optimizer, one per seed


def race(
    data: Data, epochs: int, seeds: Sequence[int], console: Console
) -> Runs:
    """All optimizers and seeds, lap by lap in turns; who begins a round changes from round to round."""
    for recipe in RECIPES:  # what the first steps of a process cost should not count for whoever begins
        Run(recipe, 0, data, 1).lap()
    runs: Runs = {recipe.name: [] for recipe in RECIPES}
    columns = (
        "{task.description:13}",
        BarColumn(28),
        "{task.fields[now]}",
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        bars = {
            recipe.name: progress.add_task(recipe.name, total=None, now="")
            for recipe in RECIPES
        }
        for seed in seeds:
            entrants = [Run(recipe, seed, data, epochs) for recipe in RECIPES]
            for run in entrants:
                runs[run.recipe.name].append(run)
            for i in range(entrants[0].laps):
                for run in (
                    entrants[i % len(entrants) :]
                    + entrants[: i % len(entrants)]
                ):
                    run.lap()
                    now = f"seed {seed}  loss {run.losses[-1]:.4f}  test {run.accuracies[-1]:.1%}"
                    progress.update(
                        bars[run.recipe.name],
                        total=run.laps * len(seeds),
                        advance=1,
                        now=now,
                    )
    return runs


def table(runs: Runs) -> Table:
    """What came out, means over the seeds; the time to the target is of the runs that reached it, whose number is given."""
    out = Table(
        title=f"Digits, {len(runs['SGD'])} seed(s); target: {TARGET:.0%} test accuracy",
        title_justify="left",
    )
    out.add_column("optimizer", no_wrap=True)
    for header in (
        "lr",
        "final test\naccuracy, %",
        "steps to\ntarget",
        "seconds\nto it",
        "ms per\nstep",
        "step /\nSGD's",
    ):
        out.add_column(header, justify="right")
    sgd = fmean(run.step_seconds for run in runs["SGD"])
    for name, group in runs.items():
        final = [100 * run.accuracies[-1] for run in group]
        there = [
            (laps, run.seconds[laps - 1])
            for run in group
            if (laps := run.laps_to_target)
        ]
        steps, seconds = (
            (
                fmean(laps for laps, _ in there) * LAP,
                fmean(s for _, s in there),
            )
            if there
            else (nan, nan)
        )
        step = fmean(run.step_seconds for run in group)
        out.add_row(
            name,
            f"{group[0].recipe.lr:g}",
            f"{fmean(final):.2f}"
            + (f" ± {stdev(final):.2f}" if len(final) > 1 else ""),
            f"{steps:.0f} ({len(there)}/{len(group)})",
            f"{seconds:.3f}",
            f"{1000 * step:.1f}",
            f"{step / sgd:.2f}",
        )
    return out


def picture(runs: Runs, facts: str, path: Path) -> None:
    """Training loss and test accuracy, against steps and against seconds: mean over the seeds and the range between them."""
    figure = Figure(figsize=(11, 7.5), layout="constrained")
    figure.suptitle(
        f"Digits: training a small CNN, batch {BATCH}\n", fontsize=14
    )
    figure.text(0.5, 0.945, facts, ha="center", fontsize=8.5, color="0.35")
    axes = figure.subplots(2, 2, sharex="col", sharey="row")
    for name, group in runs.items():
        recipe = group[0].recipe
        losses, accuracies = (
            np.array([run.losses for run in group]),
            100 * np.array([run.accuracies for run in group]),
        )
        steps = LAP * np.arange(1, losses.shape[1] + 1)
        for column, x in enumerate(
            (steps, np.mean([run.seconds for run in group], 0))
        ):
            for ax, y in (
                (axes[0, column], losses),
                (axes[1, column], accuracies),
            ):
                ax.plot(
                    x,
                    y.mean(0),
                    recipe.line,
                    color=recipe.colour,
                    label=f"{name}, lr {recipe.lr:g}",
                    linewidth=1.8,
                )
                ax.fill_between(
                    x,
                    y.min(0),
                    y.max(0),
                    color=recipe.colour,
                    alpha=0.15,
                    linewidth=0,
                )
    for ax in axes.flat:
        ax.grid(alpha=0.25)
        ax.spines[["top", "right"]].set_visible(False)
        ax.set_xlim(left=0)
    for ax in axes[1]:
        ax.axhline(100 * TARGET, color="0.4", linewidth=0.9, linestyle=":")
        ax.annotate(
            f"target {TARGET:.0%}",
            (0.99, 100 * TARGET),
            xycoords=("axes fraction", "data"),
            ha="right",
            va="top",
            fontsize=8,
        )
    axes[0, 0].set(
        yscale="log",
        ylabel=f"training loss, mean of {LAP} steps",
        title="per step",
    )
    axes[0, 1].set_title("per second of training")
    axes[1, 0].set(ylim=(85, 100.2), ylabel="test accuracy, %", xlabel="steps")
    axes[1, 1].set_xlabel("seconds, without evaluation")
    axes[0, 0].legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)


def tune(epochs: int, console: Console) -> Table:
    """The search behind each recipe's `lr`."""
    train = digits()
    data = split(train.x, train.y)
    out = Table(
        title="Validation accuracy, mean over the run, %", title_justify="left"
    )
    for header in (
        "optimizer",
        "lr",
        *(f"seed {seed}" for seed in TUNING_SEEDS),
        "mean",
        "",
    ):
        out.add_column(
            header, justify="left" if header in ("optimizer", "") else "right"
        )
    for recipe in RECIPES:
        found: dict[float, list[float]] = {}
        for lr in recipe.grid:
            runs = [
                Run(replace(recipe, lr=lr), seed, data, epochs)
                for seed in TUNING_SEEDS
            ]
            with console.status(f"{recipe.name}, lr {lr:g}"):
                for run in runs * runs[0].laps:
                    run.lap()
            found[lr] = [100 * fmean(run.accuracies) for run in runs]
        best = max(found, key=lambda lr: fmean(found[lr]))
        for lr, each in found.items():
            marks = " ".join(
                ("best",) * (lr == best) + ("used",) * (lr == recipe.lr)
            )
            out.add_row(
                recipe.name,
                f"{lr:g}",
                *(f"{value:.2f}" for value in (*each, fmean(each))),
                marks,
            )
        out.add_section()
    return out


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m seng.lab.demo",
        description="SENG beside SGD and beside AdamW in their recipes, and K-FAC, on digits",
    )
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument(
        "--seeds", type=int, default=3, help="how many: 0, 1, …"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("demo.png"),
        help="where the picture goes",
    )
    parser.add_argument(
        "--tune",
        action="store_true",
        help="repeat the search for the learning rates instead",
    )
    options = parser.parse_args(arguments)
    if options.epochs < 1 or options.seeds < 1:
        parser.error("--epochs and --seeds must be at least 1")
    torch.set_num_threads(
        1
    )  # layers this small gain little from more, and on a busy machine threads wait for each other
    console = Console()
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs, 1 thread, torch {torch.__version__}"
    if options.tune:
        console.print(
            f"python -m seng.lab.demo --tune --epochs {options.epochs}\n{machine}",
            highlight=False,
            soft_wrap=True,
        )
        return console.print(tune(options.epochs, console))
    seeds = range(options.seeds)
    facts = f"{machine}, seeds {', '.join(map(str, seeds))}"
    command = f"python -m seng.lab.demo --epochs {options.epochs} --seeds {options.seeds} --out {options.out}"
    console.print(f"{command}\n{facts}", highlight=False, soft_wrap=True)
    runs = race(digits(), options.epochs, seeds, console)
    console.print(table(runs))
    picture(runs, f"{facts}; line: mean, band: lowest to highest", options.out)
    console.print(
        f"picture: {options.out.resolve()}", highlight=False, soft_wrap=True
    )


if __name__ == "__main__":
    main()
