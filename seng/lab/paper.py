"""The paper's tables and tuning grids as values (Yang et al., arXiv 2006.05924), as printed.

The names are ours: "seng-paper" is the paper's SENG, tasks are <data>-<network>, and the keys of a grid are the fields of a
recipe (seng.lab.recipe). What the paper does not say is left out, so a recipe's own default stands there: Nesterov or not, the
schedule of Adam, the rate and length of ResNet50's schedule at batch 256. One slip is the paper's own: KFAC-800's total time
is 41 epochs of its time per epoch, not the 42 beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import product
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class Source:
    """Where a table stands in the paper and what it is about."""

    label: str  # in the paper's source
    section: str
    about: str
    machine: str = "Tesla V100 GPUs"


SOURCES: Mapping[str, Source] = MappingProxyType(
    {
        "tasks": Source(
            "statistics-resnetvgg",
            "6.1",
            "six tasks: time to a test accuracy, seconds per epoch",
            "one Tesla V100",
        ),
        "imagenet": Source(
            "ImageNet-stat",
            "6.2",
            "ResNet50 on ImageNet-1k to 75.9 %, batch 256",
        ),
        "frequency": Source(
            "ImageNet-freq-stat",
            "B",
            "how often the curvature is refreshed; ResNet50 on ImageNet-1k to 75.9 %",
        ),
        "batch": Source(
            "ImageNet-BS",
            "6.3",
            "batch sizes and GPUs; SENG, ResNet50 on ImageNet-1k to 75.9 %",
        ),
        "large-batch": Source(
            "large-bs-table", "A", "the hyperparameters behind the batch sizes"
        ),
    }
)


@dataclass(frozen=True)
class Attempt:
    """A method on a task; without `seconds` it did not attain the target, and `best` is the accuracy that it attained."""

    seconds: float | None
    epoch_seconds: float
    best: float | None = None

    @property
    def epochs(self) -> float | None:
        """To the target; not printed, but the two times say it."""
        return (
            None if self.seconds is None else self.seconds / self.epoch_seconds
        )


@dataclass(frozen=True)
class Task:
    """One of the six; means over three runs. The batch size is not said."""

    name: str
    target: float
    seng: Attempt
    sgd: Attempt
    adam: Attempt
    kfac: Attempt

    @property
    def attempts(self) -> dict[str, Attempt]:
        """By our name of the method."""
        return {
            "seng-paper": self.seng,
            "sgd": self.sgd,
            "adam": self.adam,
            "kfac": self.kfac,
        }


def missed(best: float, epoch_seconds: float) -> Attempt:
    """The table's N/best."""
    return Attempt(None, epoch_seconds, best)


# fmt: off
TASKS = (
    Task("cifar10-vgg16bn", 0.92,
         Attempt(943.12, 17.49), Attempt(1034.82, 14.58), missed(0.894, 16.13), Attempt(6009.86, 113.37)),
    Task("cifar100-vgg16bn", 0.70,
         Attempt(1088.16, 18.14), Attempt(1168.49, 15.16), missed(0.630, 16.50), Attempt(5652.81, 113.13)),
    Task("svhn-vgg16bn", 0.95,
         Attempt(515.06, 24.43), missed(0.755, 20.30), missed(0.9497, 22.56), Attempt(7321.62, 162.57)),
    Task("cifar10-resnet18", 0.94,
         Attempt(940.72, 16.48), Attempt(1083.60, 15.04), missed(0.913, 15.39), Attempt(1040.24, 19.67)),
    Task("cifar100-resnet18", 0.76,
         Attempt(952.26, 16.70), missed(0.750, 14.99), missed(0.684, 15.14), Attempt(1001.44, 19.27)),
    Task("svhn-resnet18", 0.96,
         Attempt(685.29, 22.90), Attempt(1091.78, 19.88), missed(0.947, 20.21), Attempt(1103.17, 25.65)),
)
# fmt: on


@dataclass(frozen=True)
class Variant:
    """A method with a refresh period on ImageNet."""

    name: str
    optimizer: str
    refresh_every: int | None
    epochs: int
    seconds: float
    epoch_seconds: float


IMAGENET_TASK, IMAGENET_TARGET = "imagenet-resnet50", 0.759
IMAGENET = (
    Variant("SENG-800", "seng-paper", 800, 41, 27190, 663.17),
    Variant("SGD", "sgd", None, 76, 43707, 575.09),
    Variant("SENG-200", "seng-paper", 200, 41, 31224, 761.56),
    Variant("KFAC-800", "kfac", 800, 42, 29204, 712.29),
    Variant("KFAC-200", "kfac", 200, 42, 42307, 1007.31),
)
FREQUENCY = (
    Variant("SENG-100", "seng-paper", 100, 40, 38586, 964.65),
    Variant("SENG-200", "seng-paper", 200, 41, 31224, 761.56),
    Variant("SENG-500", "seng-paper", 500, 42, 29332, 698.38),
    Variant("SENG-800", "seng-paper", 800, 41, 27190, 663.17),
)


@dataclass(frozen=True)
class Batch:
    """A batch size; an efficiency is 512/batch times the 512's time over this one's."""

    batch: int
    gpus: int
    epochs: int
    minutes: float
    efficiency: float
    epoch_seconds: float
    epoch_efficiency: float


BATCHES = (
    Batch(512, 4, 41, 371.5, 1.0, 542.22, 1.0),
    Batch(1024, 8, 41, 202.4, 0.92, 296.12, 0.92),
    Batch(2048, 16, 41, 103.2, 0.90, 151.07, 0.90),
    Batch(4096, 32, 41, 49.7, 0.93, 72.66, 0.93),
)


@dataclass(frozen=True)
class LargeBatch:
    """Hyperparameters of a batch size: exp after a warm-up of 5 epochs, λ = damping·damping_gamma^(epoch/10)."""

    batch: int
    warmup_lr: float
    lr: float
    rate: float
    schedule_epochs: float
    damping: float
    damping_gamma: float

    @property
    def recipe(self) -> dict[str, Any]:
        """The fields of a recipe of "seng-paper"."""
        values = {
            key: value for key, value in asdict(self).items() if key != "batch"
        }
        return {**values, "schedule": "exp", "warmup": 5.0}


LARGE_BATCHES = (
    LargeBatch(512, 0.01, 0.3, 6, 60, 0.17, 0.9),
    LargeBatch(1024, 0.01, 0.6, 6, 60, 0.17, 0.9),
    LargeBatch(2048, 0.2, 1.2, 6, 60, 0.3, 0.7),
    LargeBatch(4096, 0.2, 2.2, 5, 55, 0.3, 0.7),
)

Grid = Mapping[
    str, tuple[Any, ...]
]  # a field of the recipe -> what is tried; every combination is

_RATES = (1e-3, 5e-3, 1e-2, 5e-2, 1e-1)
_DECAYS = (5e-4, 2e-4, 1e-4)
_ADAM = {
    "lr": (1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 1e-1),
    "beta1": (0.9, 0.99),
    "beta2": (0.99, 0.999),
    "weight_decay": _DECAYS,
    "eps": (1e-8,),
}
_COSINE = {
    "schedule": ("cosine",),
    "floor": (0.001,),
    "lr": _RATES,
    "schedule_epochs": (85.0, 90.0),
    "weight_decay": _DECAYS,
    "momentum": (0.9,),
}
_EXP = {
    "schedule": ("exp",),
    "lr": _RATES,
    "schedule_epochs": (70.0, 75.0, 80.0),
    "rate": (4.0, 5.0, 6.0),
    "weight_decay": _DECAYS,
    "momentum": (0.9,),
}
_IMAGENET_EXP = {
    "schedule": ("exp",),
    "warmup": (5.0,),
    "weight_decay": (5e-4, 3e-4, 2e-4, 1e-4),
}


def _damped(*dampings: float) -> tuple[Grid, ...]:
    """SGD's grids times a few λ, refreshed every 200 iterations."""
    return tuple(
        {**grid, "damping": dampings, "refresh_every": (200,)}
        for grid in (_COSINE, _EXP)
    )


GRIDS: Mapping[tuple[str, str], tuple[Grid, ...]] = (
    MappingProxyType(  # of the appendix: (optimizer, network) -> its grids
        {
            ("adam", "resnet18"): (_ADAM,),
            ("adam", "vgg16bn"): (_ADAM,),
            ("sgd", "resnet18"): (_COSINE, _EXP),
            ("sgd", "vgg16bn"): (_COSINE, _EXP),
            ("kfac", "resnet18"): _damped(0.8, 1.0, 1.2),
            ("kfac", "vgg16bn"): _damped(1.5, 2.0, 2.5),
            ("seng-paper", "resnet18"): _damped(0.8, 1.0, 1.2),
            ("seng-paper", "vgg16bn"): _damped(1.5, 2.0, 2.5),
            ("sgd", "resnet50"): (
                {"schedule": ("cosine",), "warmup": (5.0,)},
            ),  # "well-tuned", from a page that it links to
            ("kfac", "resnet50"): (
                {
                    **_IMAGENET_EXP,
                    "lr": (0.05, 0.1, 0.15),
                    "damping": (0.05, 0.1, 0.15),
                },
            ),
            ("seng-paper", "resnet50"): (
                {**_IMAGENET_EXP, "lr": (0.145,), "damping": (0.17,)},
            ),
        }
    )
)


def grids(optimizer: str, task: str) -> tuple[Grid, ...]:
    """The paper's grids for an optimizer on a task; none where it has none."""
    return GRIDS.get((optimizer, task.partition("-")[2]), ())


def points(grid: Grid) -> Iterator[dict[str, Any]]:
    """Every combination of a grid."""
    return (
        dict(zip(grid, values, strict=True))
        for values in product(*grid.values())
    )


def in_sgd_units(point: Mapping[str, Any]) -> dict[str, Any]:
    """A point of K-FAC's grids in the units of our recipe, SGD's, instead of the paper's: lr/λ and λ·weight_decay."""
    damping = point["damping"]
    return {
        **point,
        "lr": point["lr"] / damping,
        "weight_decay": point["weight_decay"] * damping,
    }
