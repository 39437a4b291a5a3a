"""What `seng bench` is asked for."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from seng.lab.bench.contenders import CONTENDERS, GROWN, Setting
from seng.lab.bench.tasks import TASKS, Task, chosen

STRATEGIES = ("shared", "block", "lagged")


@dataclass(frozen=True)
class Preset:
    """A way to run low rank over λI, at each of several dampings."""

    every: (
        int | None
    )  # T, of what runs as it comes too; None: the task's, and the library's
    rank: int
    decay: float
    samples: int | None = None
    dampings: tuple[tuple[float, bool], ...] = (
        (0.01, True),
        (1.0, False),
    )  # ours, relative; the paper's, absolute


RANK = 16
PRESETS = {
    "default": Preset(None, RANK, 0.0),
    "strong": Preset(20, 128, 0.8),
    "every-step": Preset(1, RANK, 0.0, 64),
}


@dataclass(frozen=True)
class Which:
    """What is measured."""

    models: tuple[str, ...] = ()
    """resnet18, vgg16_bn, resnet50, gpt2, vit_s16, small_cnn. Default: on a GPU the first five, on a CPU small_cnn."""
    contenders: tuple[str, ...] = ()
    """sgd, adamw, muon, kfac, kfac-root, seng (as it comes), seng-lowrank (over λI, uncentred), seng-lowrank-merged,
    seng-lowrank-implicit, seng-lowrank-explicit. Default: all. Figures are ratios to sgd."""
    preset: str = "default"
    """Of low rank: default (T = 200, rank 16, decay 0), strong (T = 20, rank 128, decay 0.8) or every-step (T = 1, rank 16,
    64 samples); each at the relative damping 0.01 and at the paper's absolute λ = 1."""
    compile: bool = False
    """Compile the model; the optimizers step eagerly."""


@dataclass(frozen=True)
class Changes:
    """What differs from the preset."""

    every: int | None = None
    """T of all: the steps over which a refresh is spread."""
    damping: float | None = None
    """Of low rank, this one alone, relative to each layer's largest eigenvalue."""
    absolute: bool = False
    """--damping is the paper's absolute λ."""
    rank: int | None = None
    decay: float | None = None
    samples: int | None = None


@dataclass(frozen=True)
class Amounts:
    """How it is measured; the defaults are the model's."""

    batch: int | None = None
    warm: int | None = None
    """Steps of SGD that make the weights to start from; 0 measures at initialisation."""
    window: int | None = None
    """Steps that are timed together."""
    rounds: int | None = None
    seed: int = 0
    device: str | None = None
    """cpu or cuda."""


@dataclass(frozen=True)
class Parallel:
    """Several processes, started here: what they send each other, beside DistributedDataParallel with SGD."""

    distributed: bool = False
    """Measure this instead: bytes, step times and scaling of SGD and of SENG with each strategy. --batch is then a rank's."""
    ranks: tuple[int, ...] = ()
    """How many processes (gloo) or GPUs (nccl). Default: 1 2 4."""
    strategies: tuple[str, ...] = ()
    """Of shared, block, lagged. Default: all."""

    def __post_init__(self) -> None:
        if not self.distributed and (self.ranks or self.strategies):
            raise ValueError(
                "--ranks and --strategies say how --distributed measures: give it too"
            )
        for name in self.strategies:
            chosen("strategy", name, list(STRATEGIES))
        if any(count < 1 for count in self.ranks):
            raise ValueError(
                f"--ranks are counts of at least 1, not {' '.join(map(str, self.ranks))}"
            )


@dataclass(frozen=True)
class Options:
    """Time, memory and quality of a SENG step beside SGD, AdamW, Muon and K-FAC."""

    which: Which = field(default_factory=Which)
    changes: Changes = field(default_factory=Changes)
    amounts: Amounts = field(default_factory=Amounts)
    out: Path = Path("results/bench")
    """Where the results go."""
    plot: Path | None = None
    """Measure nothing; draw the results of this folder."""
    parallel: Parallel = field(default_factory=Parallel)

    def __post_init__(self) -> None:
        chosen("preset", self.which.preset, list(PRESETS))
        for name in self.which.models:
            chosen("model", name, list(TASKS))
        for name in self.which.contenders:
            chosen("contender", name.replace("-", " "), list(CONTENDERS))
        if self.changes.absolute and self.changes.damping is None:
            raise ValueError(
                "--absolute says how --damping is meant: give both"
            )
        if self.parallel.distributed and (
            self.which.contenders or self.which.compile
        ):
            raise ValueError(
                "--distributed measures sgd and SENG's --strategies, not compiled: leave --contenders and --compile out"
            )
        counts = {
            "window": self.amounts.window,
            "rounds": self.amounts.rounds,
            "batch": self.amounts.batch,
        }
        for name, value in {**counts, "every": self.changes.every}.items():
            if value is not None and value < 1:
                raise ValueError(
                    f"--{name} is a count of at least 1, not {value}"
                )

    @property
    def device(self) -> torch.device:
        return torch.device(
            self.amounts.device
            or ("cuda" if torch.cuda.is_available() else "cpu")
        )

    @property
    def tasks(self) -> list[Task]:
        default = (
            [name for name in TASKS if name != "small_cnn"]
            if self.device.type == "cuda"
            else ["small_cnn"]
        )
        return [
            self.measured(TASKS[name]) for name in self.which.models or default
        ]

    @property
    def contenders(self) -> list[str]:
        asked = {
            name.replace("-", " ") for name in self.which.contenders
        } or CONTENDERS
        return [name for name in CONTENDERS if name in asked]

    def measured(self, task: Task) -> Task:
        """With the amounts that were asked for."""
        asked = {
            name: getattr(self.amounts, name)
            for name in ("batch", "warm", "window", "rounds")
        }
        return replace(
            task,
            **{
                name: value
                for name, value in asked.items()
                if value is not None
            },
        )

    def settings(self, task: Task) -> list[Setting]:
        """One for each damping."""
        preset, c = PRESETS[self.which.preset], self.changes
        dampings = (
            preset.dampings
            if c.damping is None
            else ((c.damping, not c.absolute),)
        )
        given = c.every or preset.every
        every = given or task.every
        default_every = given or GROWN
        rank = preset.rank if c.rank is None else c.rank
        decay = preset.decay if c.decay is None else c.decay
        samples = preset.samples if c.samples is None else c.samples
        return [
            Setting(
                every, damping, relative, rank, decay, samples, default_every
            )
            for damping, relative in dampings
        ]

    def _given(self, *groups: Any) -> dict[str, Any]:
        return {
            name: value
            for group in groups
            for name, value in vars(group).items()
            if value != getattr(type(group), name, None)
        }

    def path(self, task: Task) -> Path:
        """<model>[-compiled][-<preset>][-<what differs from it>]-<device>.json"""
        amounts = {
            k: v
            for k, v in self._given(self.amounts).items()
            if k not in ("device", "rounds", "window")
        }
        parts = [task.name]
        parts += ["distributed"] * self.parallel.distributed
        parts += ["compiled"] * self.which.compile
        parts += [self.which.preset] * (self.which.preset != "default")
        parts += [
            k if v is True else f"{k}{v:g}"
            for k, v in {**self._given(self.changes), **amounts}.items()
        ]
        return self.out / ("-".join([*parts, self.device.type]) + ".json")

    def command(self, task: Task) -> str:
        """What makes the result of one model again."""
        words = ["seng", "bench"]
        which = replace(self.which, models=(task.name,))
        for name, value in self._given(
            which, self.changes, self.amounts, self.parallel
        ).items():
            words += [
                f"--{name}",
                *(
                    []
                    if value is True
                    else map(str, value)
                    if isinstance(value, tuple)
                    else [str(value)]
                ),
            ]
        return shlex.join(words)
