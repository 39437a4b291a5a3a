"""What the experiments train: data, a network, a loss, a metric with its target, and a budget, as one frozen value per task."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from seng.lab import models
from seng.lab.datasets.augment import Augment
from seng.lab.names import unknown
from seng.lab.problems import Classification, Language, Problem, Reconstruction
from seng.lab.recipe import Recipe
from seng.lab.recipes import RECIPES, SGD, AdamW, recipe

PLAIN = Augment()
LENGTHS = ("schedule_epochs", "warmup")  # fields of recipes that are in epochs

# The library's own weight decay is 0: on a task ours get what their rivals have, an SGD recipe or a Muon recipe.
_SGD = {"weight_decay": SGD.weight_decay, "nesterov": SGD.nesterov}
BROUGHT: dict[str, dict[str, Any]] = {
    "seng": _SGD,
    "seng-lowrank": _SGD,
    "kfac-root": _SGD,
    "kfac-floor": _SGD,
    "seng-paper": {"weight_decay": SGD.weight_decay},
    "seng-adamw": {"weight_decay": AdamW.weight_decay},
    "seng-muon": {"weight_decay": 0.1},
}


@dataclass(frozen=True)
class Task:
    """One of them."""

    name: str
    data: str  # as `seng data` names it
    build: Callable[
        [int], nn.Module
    ]  # from the number of classes, or of different tokens
    target: float  # of the metric, on the test set
    epochs: float
    problem: Problem = field(default_factory=Classification)
    batch: int = 256
    augment: Augment = PLAIN
    convolutional: bool = True  # whether channels_last applies
    recipes: Mapping[str, Mapping[str, Any]] = field(
        default_factory=dict
    )  # optimizer -> fields that differ from its defaults
    evaluations: int = 1  # per epoch

    def recipe(self, optimizer: str, epochs: float) -> Recipe:
        """An optimizer's recipe for this task, in a budget of so many epochs."""
        own = {**BROUGHT.get(optimizer, {}), **self.recipes.get(optimizer, {})}
        return recipe(optimizer, own).with_(self.lengths(optimizer, epochs))

    def lengths(self, optimizer: str, epochs: float) -> dict[str, Any]:
        """Its fields that are in epochs: another budget than the task's shortens or lengthens them."""
        known = self.recipes.get(optimizer, {})
        return {
            name: self.length(name, known[name], epochs)
            for name in LENGTHS
            if known.get(name)
        }

    def length(self, name: str, length: float, epochs: float) -> float | None:
        """One of them; None where a schedule is as long as the run."""
        scaled = length * epochs / self.epochs
        return (
            None if name == "schedule_epochs" and scaled == epochs else scaled
        )


SHIFTED = Augment(crop=4, flip=True)
# Of "seng-paper", as the paper prints them: from within its grids.
EXP: dict[str, Any] = {"schedule": "exp", "rate": 5.0, "schedule_epochs": 75.0}
PAPER_RESNET18 = {"lr": 0.1, "weight_decay": 5e-4, "damping": 1.0, **EXP}
PAPER_VGG16 = {"lr": 0.1, "weight_decay": 5e-4, "damping": 2.0, **EXP}
IMAGENET = {  # batch 256; the paper gives the rate and the length for batch 512
    **{"lr": 0.145, "weight_decay": 5e-4, "damping": 0.17},
    **{"schedule": "exp", "rate": 6.0, "schedule_epochs": 60.0, "warmup": 5.0},
}


AUTOENCODER: dict[
    str, dict[str, Any]
] = {  # its loss is a sum over pixels, so its gradients are large
    "seng": {"lr": 0.003},
    "seng-lowrank": {"lr": 0.003, "damping": 0.1},
    "seng-adamw": {"lr": 0.002},
    "seng-muon": {},  # whose steps have one length, whatever the loss
    "kfac-root": {"lr": 0.003},
    "kfac-floor": {"lr": 0.003},
    "seng-paper": {"lr": 0.003},
    "sgd": {"lr": 0.003},
    "adam": {"lr": 0.002},
    "adamw": {"lr": 0.002},
    "kfac": {"lr": 0.003, "damping": 3.0},
    "muon": {},  # for the weight decay of 0 that all get
    "soap": {},
    "shampoo": {"lr": 0.003},
}


NO_DECAY: dict[str, dict[str, Any]] = {
    name: {"weight_decay": 0.0}
    for name in (
        "seng",
        "seng-lowrank",
        "seng-paper",
        "kfac-root",
        "kfac-floor",
        "sgd",
        "kfac",
        "shampoo",
    )
}
GPT = NO_DECAY | {  # where searches ended
    "muon": {"lr": 0.012, "weight_decay": 0.16, "momentum": 0.9},
    "adamw": {"lr": 1.5e-3, "weight_decay": 1e-2},
    "seng-adamw": {"lr": 1.5e-3, "weight_decay": 1e-2},
    "soap": {"lr": 3e-3, "weight_decay": 1e-3},
}


def _paper(
    name: str,
    data: str,
    build: Callable[[int], nn.Module],
    target: float,
    augment: Augment,
    paper: Any,
) -> Task:
    """One of the six tasks of the paper's table."""
    often = {"refresh_every": 50}
    own = {
        "seng-paper": paper,
        "seng-lowrank": often,
        "kfac-root": often,
        "kfac-floor": often,
        "kfac": {"refresh_every": 100, "average": 0.8},
    }
    return Task(
        name,
        data,
        build,
        target,
        75.0,
        augment=augment,
        recipes=_warmed(15.0, own),
    )


def _warmed(
    warmup: float, own: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """A warm-up for every optimizer: without one, SGD does not recover from its first steps on these networks."""
    return {name: {"warmup": warmup, **own.get(name, {})} for name in RECIPES}


TASKS = {
    task.name: task
    for task in (
        Task(
            "digits-cnn",
            "digits",
            lambda classes: models.digits_cnn(),
            0.98,
            12,
            batch=64,
            evaluations=2,
        ),
        Task(
            *(
                "mnist-autoencoder",
                "mnist",
                lambda classes: models.autoencoder(),
                25.0,
                10,
            ),
            problem=Reconstruction(),
            convolutional=False,
            evaluations=2,
            recipes={
                name: {"weight_decay": 0.0, **fields}
                for name, fields in AUTOENCODER.items()
            },
        ),
        Task(
            "fashion-cnn",
            "fashion-mnist",
            models.fashion_cnn,
            0.91,
            10,
            batch=128,
        ),
        _paper(
            "cifar10-resnet18",
            "cifar10",
            models.resnet18,
            0.94,
            SHIFTED,
            PAPER_RESNET18,
        ),
        _paper(
            "cifar10-vgg16bn",
            "cifar10",
            models.vgg16_bn,
            0.92,
            SHIFTED,
            PAPER_VGG16,
        ),
        _paper(
            "cifar100-resnet18",
            "cifar100",
            models.resnet18,
            0.76,
            SHIFTED,
            PAPER_RESNET18,
        ),
        _paper(
            "cifar100-vgg16bn",
            "cifar100",
            models.vgg16_bn,
            0.70,
            SHIFTED,
            PAPER_VGG16,
        ),
        _paper(
            "svhn-resnet18",
            "svhn",
            models.resnet18,
            0.96,
            Augment(crop=4),
            PAPER_RESNET18,
        ),
        _paper(
            "svhn-vgg16bn",
            "svhn",
            models.vgg16_bn,
            0.95,
            Augment(crop=4),
            PAPER_VGG16,
        ),
        Task(
            *("imagenet-resnet50", "imagenet", models.resnet50, 0.759, 76),
            augment=Augment(flip=True),  # the crop is made while decoding
            recipes={
                "seng-paper": IMAGENET,
                "sgd": {"warmup": 5.0, "weight_decay": 1e-4},
                "kfac": {"warmup": 5.0},
            },
        ),
        Task(
            *("imagenette-resnet50", "imagenette", models.resnet50, 0.88, 16),
            batch=128,
            augment=Augment(flip=True, resized=True),
            recipes=_warmed(3.0, {"seng-lowrank": {"refresh_every": 50}}),
        ),
        Task(
            *(
                "shakespeare-gpt",
                "shakespeare",
                lambda tokens: models.gpt2(4, 128, 4, tokens, 128),
                1.65,
                8,
            ),
            problem=Language(context=128),
            batch=32,
            convolutional=False,
            recipes=_warmed(0.4, GPT),
        ),
    )
}


def task(name: str) -> Task:
    """By its name; where there is none, what may have been meant."""
    if name in TASKS:
        return TASKS[name]
    raise ValueError(unknown("there is no task", name, TASKS))
