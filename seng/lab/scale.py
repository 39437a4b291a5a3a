"""`seng scale MODEL`: how long a step would take on 8 to 4096 GPUs, and how well it would scale. Projections, no measurements.

The formulae are in `seng.lab.projection`, of low rank over λI; the default also sends its Kronecker factors. The paper's values
are those of its table ImageNet-BS (section 6.3), in both columns
of scaling efficiency, of total time and of time per epoch: SENG and ResNet50 with 128 samples on each Tesla V100. Other GPUs
and another link than ours, so they are a mark to look at, not one to meet. Not modelled: stragglers, input, the start of each
bucket of DistributedDataParallel, and layers' refresh work that the ranks divide.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import tyro
from rich import box
from rich.console import Console
from rich.table import Table
from tyro.conf import Positional

from seng.lab import paper
from seng.lab.bench.arena import Arena, Entrant
from seng.lab.bench.contenders import Setting
from seng.lab.bench.options import Amounts as BenchAmounts
from seng.lab.bench.options import Options as BenchOptions
from seng.lab.bench.rows import Row, summarise
from seng.lab.bench.tasks import TASKS, chosen
from seng.lab.projection import Compute, Link, Method, Projection, layers

GPUS = tuple(2**i for i in range(3, 13))
METHODS = ("SGD", "shared", "block", "lagged")
COLOURS = (
    "#000000",
    "#D55E00",
    "#0072B2",
    "#009E73",
)  # of Okabe and Ito's palette
RESULTS = Path("results/bench")
LOW_RANK = "seng lowrank"  # what the formulae are of


@dataclass(frozen=True)
class Step:
    """What one GPU's step takes. Default: as in results/bench/<model>-cuda.json, which `seng bench` writes."""

    step_ms: float | None = None
    """C, given."""
    solve_ms: float | None = None
    """S, given: what SENG adds to a step."""
    refresh_ms: float | None = None
    """R, given: what a step with a refresh takes more."""
    measure: bool = False
    """Measure all three here, in one process."""
    batch: int | None = None
    """Samples per step when it is measured; default: the model's."""
    device: str | None = None
    """cpu or cuda, when it is measured."""

    def __post_init__(self) -> None:
        for name in ("step_ms", "solve_ms", "refresh_ms"):
            value = getattr(self, name)
            if value is not None and not (
                0 <= value < math.inf and (value or name != "step_ms")
            ):
                raise ValueError(
                    f"--{name.replace('_', '-')} is a time in milliseconds, not {value:g}"
                )
        if self.measure and any(
            x is not None
            for x in (self.step_ms, self.solve_ms, self.refresh_ms)
        ):
            raise ValueError(
                "--measure finds what --step-ms, --solve-ms and --refresh-ms give: choose one"
            )
        if not self.measure and (
            self.batch is not None or self.device is not None
        ):
            raise ValueError(
                "--batch and --device say how --measure measures: give it too"
            )
        if self.step_ms is None and (
            self.solve_ms is not None or self.refresh_ms is not None
        ):
            raise ValueError(
                "--solve-ms and --refresh-ms go with --step-ms: give it too"
            )


@dataclass(frozen=True)
class Options:
    """How a step would scale to 8–4096 GPUs: a projection from one GPU's step, bytes, latency and bandwidth."""

    model: Positional[str] = "resnet50"
    """resnet18, vgg16_bn, resnet50, gpt2, vit_s16 or small_cnn."""
    step: Step = Step()
    link: Link = field(default_factory=Link)
    method: Method = field(default_factory=Method)
    base: int = 4
    """Efficiencies are relative to so many GPUs; 4 as the paper's."""
    out: Path | None = None
    """The picture; default: results/bench/scale-<model>.png."""

    def __post_init__(self) -> None:
        chosen("model", self.model, list(TASKS))
        if self.base < 1:
            raise ValueError(
                f"--base is a number of GPUs, at least 1, not {self.base}"
            )


def recorded(model: str) -> Compute:
    """From what `seng bench` has measured, at its first setting."""
    path = RESULTS / f"{model}-cuda.json"
    if not path.is_file():
        raise ValueError(
            f"there is no {path} to take a step's time from: give --step-ms, or --measure it here"
        )
    result = json.loads(path.read_text())
    found = {row["contender"]: row for row in reversed(result["rows"])}
    if "sgd" not in found or LOW_RANK not in found:
        raise ValueError(
            f"{path} has no rows of both sgd and {LOW_RANK}: give --step-ms, or --measure it here"
        )
    sgd, ours = found["sgd"], found[LOW_RANK]
    solve = max(ours["idle_ms"] - sgd["step_ms"], 0)
    source = f"from {path}: {result['machine'].partition(',')[0]}, batch {result['setting']['batch']}"
    return Compute(
        1e-3 * sgd["step_ms"], 1e-3 * solve, 1e-3 * ours["refresh_ms"], source
    )


def measured(model: str, step: Step, method: Method) -> Compute:
    """SGD and low rank in turns, in this process."""
    options = BenchOptions(
        amounts=BenchAmounts(batch=step.batch, device=step.device)
    )
    task = replace(
        options.measured(TASKS[model]), warm=0
    )  # the weights do not matter to the time
    setting = Setting(method.every, 0.01, True, method.k, 0.0, None)
    arena, window, rounds = Arena(task, options), 3, 3
    entrants = [
        Entrant(name, arena, setting, 2 * window) for name in ("sgd", LOW_RANK)
    ]
    timed: list[tuple[Row, list[tuple[float, float]]]] = [
        (Row(name, setting), []) for name in ("sgd", LOW_RANK)
    ]
    for e in entrants:
        e.steps(3)
    for _ in range(rounds):
        for e, (_, times) in zip(entrants, timed, strict=True):
            e.rewind()
            times.append((e.seconds(window), e.seconds(window)))
    summarise(timed, window)
    sgd, ours = (row for row, _ in timed)
    solve, refresh = (
        max((ours.idle_ms or 0) - (sgd.step_ms or 0), 0),
        max(ours.refresh_ms or 0, 0),
    )
    source = f"measured here, on {arena.device.type}, batch {task.batch}"
    return Compute(
        1e-3 * (sgd.step_ms or 0), 1e-3 * solve, 1e-3 * refresh, source
    )


def compute(options: Options) -> Compute:
    """By whichever way was asked for."""
    s = options.step
    if s.measure:
        return measured(options.model, s, options.method)
    if s.step_ms is None:
        return recorded(options.model)
    return Compute(
        1e-3 * s.step_ms, 1e-3 * (s.solve_ms or 0), 1e-3 * (s.refresh_ms or 0)
    )


def said(p: Projection) -> list[str]:
    """What the projection rests on, in words."""
    c, link, m, MB = p.compute, p.link, p.method, 1e6
    steps = f"{1e3 * c.step:.2f} ms a step, {1e3 * c.solve:.2f} more for SENG, {1e3 * c.refresh:.1f} a refresh"
    wires = f"{link.reduction}, {link.latency_us:g} µs, {link.bandwidth_gbs:g} GB/s, {m.overlap:.0%} of the gradient's hidden"
    sizes = f"k = {m.k}, T = {m.every}, ϱ = {m.samples}, q = {m.sketch_rows}"
    exchanged = (
        f"{(p.sketches + p.directions) / MB:.1f} MB to and from layers' owners"
    )
    basis = (
        f"refresh of shared: {p.basis / MB:.1f} MB all-reduced and {exchanged}"
    )
    extra = ", ".join(
        f"{name} {p.per_step(name) / p.gradient - 1:.3f}"
        for name in METHODS[1:]
    )
    return [
        f"compute ({c.source}): {steps}",
        f"all-reduce: {wires}; {sizes}",
        f"gradient: {p.gradient / MB:.1f} MB; {basis}",
        f"gradients per step beyond SGD's: {extra}",
    ]


def table(title: str, p: Projection, base: int) -> Table:
    """Milliseconds and efficiency, for each number of GPUs."""
    out = Table(
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    theirs = {b.gpus: b.epoch_efficiency for b in paper.BATCHES}
    for name in (
        "GPUs",
        *(f"{m}\nms" for m in METHODS),
        *(f"{m}\nefficiency" for m in METHODS),
        "the paper's,\nmeasured",
    ):
        out.add_column(name, justify="right")
    for gpus in GPUS:
        times = (f"{1e3 * p.seconds(m, gpus):.2f}" for m in METHODS)
        rates = (f"{p.efficiency(m, gpus, base):.3f}" for m in METHODS)
        out.add_row(
            str(gpus),
            *times,
            *rates,
            f"{theirs[gpus]:.2f}" if gpus in theirs else "",
        )
    return out


def draw(path: Path, title: str, p: Projection, base: int) -> None:
    """The efficiencies, and the paper's."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5.2), layout="constrained")
    ax = figure.subplots()
    for name, colour in zip(METHODS, COLOURS, strict=True):
        ax.plot(
            GPUS,
            [p.efficiency(name, n, base) for n in GPUS],
            "o-",
            color=colour,
            markersize=4,
            label=f"{name}, projected",
        )
    theirs = [b for b in paper.BATCHES if b.gpus >= GPUS[0]]
    label = "the paper's SENG, ResNet50, measured on V100s"
    ax.plot(
        [b.gpus for b in theirs],
        [b.epoch_efficiency for b in theirs],
        "k*",
        markersize=11,
        linestyle="none",
        label=label,
    )
    ax.set_xscale("log", base=2)
    ax.set_xticks(GPUS, [str(n) for n in GPUS])
    ax.set_ylim(0, 1.05)
    ax.set(xlabel="GPUs", ylabel=f"efficiency beside {base} GPUs")
    ax.set_title(title, fontsize=10)
    ax.grid(alpha=0.25)
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False, fontsize=8, loc="lower left")
    figure.supxlabel("\n".join(said(p)), fontsize=6.5, color="0.35")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def main(arguments: Sequence[str] | None = None) -> None:
    """`seng scale MODEL`."""
    config: tuple[Any, ...] = (
        tyro.conf.OmitArgPrefixes,
        tyro.conf.FlagCreatePairsOff,
    )
    options = tyro.cli(
        Options,
        prog="seng scale",
        description=Options.__doc__,
        args=arguments,
        config=config,
    )
    try:
        found = compute(options)
    except ValueError as wrong:
        sys.exit(f"seng scale: {wrong}")
    with torch.device("meta"):
        sizes = layers(TASKS[options.model].build())
    p = Projection(sizes, found, options.link, options.method)
    title = f"{options.model}, a projection, not a measurement; efficiency beside the same method on {options.base} GPUs"
    Console(width=max(130, Console().width)).print(
        table(title, p, options.base)
    )
    print(*said(p), sep="\n")
    print(
        "the paper's: SENG on ResNet50, table ImageNet-BS, scaling efficiency by total time and by time per epoch, to 4 GPUs"
    )
    path = options.out or RESULTS / f"scale-{options.model}.png"
    draw(path, title, p, options.base)
    print(f"picture: {path}")
