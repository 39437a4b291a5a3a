"""What is run: a task, a recipe, a seed and how long. A value, so that a run that is there already can be recognised."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from seng.lab import results
from seng.lab.recipe import Recipe
from seng.lab.recipes import RECIPES
from seng.lab.tasks import Task


@dataclass(frozen=True)
class Run:
    """What is trained, and how."""

    task: Task
    recipe: Recipe
    seed: int = 0
    epochs: float | None = None  # None: the task's
    batch: int | None = None
    label: str = ""  # tells apart runs of one optimizer, such as T20 or b1024
    compile: bool = False
    graph: bool = (
        True  # forward and backward as a CUDA graph, where there is a GPU
    )
    stop: bool = True  # at the target
    tuning: dict[str, Any] | None = (
        None  # how many trials chose the recipe, and in which study
    )
    ranks: int = 1  # processes that share every batch
    shared: bool = (
        False  # with other work on the same machine: its times mean nothing
    )

    def __post_init__(self) -> None:
        if self.budget <= 0 or self.size < 1:
            raise ValueError(
                f"--epochs and --batch are positive, not {self.budget:g} and {self.size}"
            )
        if self.size % self.ranks:
            raise ValueError(
                f"a batch of {self.size} does not divide into {self.ranks} equal parts, one for each rank: "
                f"give a --batch that does, such as {max(1, self.size // self.ranks) * self.ranks}"
            )
        if self.label and self.name in RECIPES:
            raise ValueError(
                f"the label {self.label!r} would make {self.name} of it, which is another optimizer: use another label"
            )

    @property
    def budget(self) -> float:
        """Epochs."""
        return self.task.epochs if self.epochs is None else self.epochs

    @property
    def size(self) -> int:
        """Of a batch."""
        return self.task.batch if self.batch is None else self.batch

    @property
    def name(self) -> str:
        """The optimizer's, with the label."""
        return self.recipe.name + (f"-{self.label}" if self.label else "")

    def replays(self, device: torch.device) -> bool:
        """Whether forward and backward are recorded and replayed: not where they are compiled, nor on several ranks."""
        return (
            self.graph
            and not self.compile
            and device.type == "cuda"
            and self.ranks == 1
        )

    def path(self, folder: Path) -> Path:
        """Where its results go."""
        return results.path_of(
            folder, self.task.name, self.recipe.name, self.label, self.seed
        )

    def head(self, device: torch.device) -> dict[str, Any]:
        """What says which run it is: all that decides its numbers but for the machine."""
        problem = self.task.problem
        settings = {
            "epochs": float(self.budget),
            "batch": self.size,
            "amp": device.type == "cuda",
            "compile": self.compile,
            "channels_last": self.task.convolutional and device.type == "cuda",
            "stop": self.stop,
            **({"graph": True} if self.replays(device) else {}),
            **({"ranks": self.ranks} if self.ranks > 1 else {}),
            **({"shared": True} if self.shared else {}),
        }
        return {
            "format": results.FORMAT,
            "task": self.task.name,
            "optimizer": self.recipe.name,
            "label": self.label,
            "seed": self.seed,
            "recipe": self.recipe.values(),
            "run": settings,
            "target": self.task.target,
            "metric_name": problem.metric,
            "higher_is_better": problem.higher_is_better,
        }
