"""What the experiments train: data, a network, a loss, a metric with its target, and a budget, as one frozen value per task."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from torch import nn

from seng.lab import models
from seng.lab.datasets.augment import Augment
from seng.lab.problems import Classification, Language, Problem, Reconstruction

PLAIN = Augment()


@dataclass(frozen=True)
class Task:
    """One of them."""

    name: str
    data: str  # as `seng data` names it
    build: Callable[[int], nn.Module]  # from the number of classes, or of different tokens
    target: float  # of the metric, on the test set
    epochs: float
    problem: Problem = field(default_factory=Classification)
    batch: int = 256
    augment: Augment = PLAIN
    convolutional: bool = True  # whether channels_last applies
    recipes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # optimizer -> fields that differ from its defaults
    evaluations: int = 1  # per epoch


SHIFTED = Augment(crop=4, flip=True)
PAPER_RESNET18 = {"damping": 1.0, "schedule": "exp", "rate": 5.0, "schedule_epochs": 75.0}  # from the middle of its grids
PAPER_VGG16 = {"damping": 2.0, "schedule": "exp", "rate": 5.0, "schedule_epochs": 75.0}
IMAGENET = {"lr": 0.145 / 0.17, "damping": 0.17, "schedule": "exp", "rate": 6.0, "schedule_epochs": 60.0, "warmup": 5.0}


def _paper(name: str, data: str, build: Callable[[int], nn.Module], target: float, augment: Augment, paper: Any) -> Task:
    """One of the six tasks of the paper's table."""
    return Task(name, data, build, target, 75.0, augment=augment, recipes={"seng-paper": paper})


TASKS = {
    task.name: task
    for task in (
        Task("digits-cnn", "digits", lambda classes: models.digits_cnn(), 0.98, 12, batch=64, evaluations=2),
        Task(
            *("mnist-autoencoder", "mnist", lambda classes: models.autoencoder(), 8.0, 10),
            problem=Reconstruction(),
            convolutional=False,
            evaluations=2,
        ),
        Task("fashion-cnn", "fashion-mnist", models.fashion_cnn, 0.91, 10, batch=128),
        _paper("cifar10-resnet18", "cifar10", models.resnet18, 0.94, SHIFTED, PAPER_RESNET18),
        _paper("cifar10-vgg16bn", "cifar10", models.vgg16_bn, 0.92, SHIFTED, PAPER_VGG16),
        _paper("cifar100-resnet18", "cifar100", models.resnet18, 0.76, SHIFTED, PAPER_RESNET18),
        _paper("cifar100-vgg16bn", "cifar100", models.vgg16_bn, 0.70, SHIFTED, PAPER_VGG16),
        _paper("svhn-resnet18", "svhn", models.resnet18, 0.96, Augment(crop=4), PAPER_RESNET18),
        _paper("svhn-vgg16bn", "svhn", models.vgg16_bn, 0.95, Augment(crop=4), PAPER_VGG16),
        Task(
            *("imagenet-resnet50", "imagenet", models.resnet50, 0.759, 76),
            augment=Augment(flip=True),  # the crop is made while decoding
            recipes={"seng-paper": IMAGENET, "sgd": {"warmup": 5.0, "weight_decay": 1e-4}, "kfac": {"warmup": 5.0}},
        ),
        Task(
            *("imagenette-resnet50", "imagenette", models.resnet50, 0.88, 16),
            batch=128,
            augment=Augment(flip=True, resized=True),
        ),
        Task(
            *("shakespeare-gpt", "shakespeare", lambda tokens: models.gpt2(4, 128, 4, tokens, 128), 1.65, 8),
            problem=Language(context=128),
            batch=32,
            convolutional=False,
            recipes={name: {"weight_decay": 0.0} for name in ("seng", "seng-paper", "sgd", "kfac", "shampoo")},
        ),
    )
}


def task(name: str) -> Task:
    """By its name; where there is none, what may have been meant."""
    if name in TASKS:
        return TASKS[name]
    near = get_close_matches(name, TASKS, 2, 0.4)
    meant = f" did you mean {' or '.join(near)}?" if near else ""
    raise ValueError(f"there is no task {name!r}:{meant} there are {', '.join(TASKS)}")
