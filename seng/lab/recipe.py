"""How an optimizer is run: every hyperparameter is a field of a frozen value, so that a typo is an error, and a result that
carries its recipe can be made again. `seng.lab.recipes` has one kind per optimizer.

lr and damping follow the paper's schedules (seng.schedules): linear warm-up, then constant, cosine, exp or a line to 0.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import (
    Any,
    ClassVar,
    Literal,
    Protocol,
    Self,
    get_args,
    get_type_hints,
)

from torch import nn

from seng.lab.names import unknown
from seng.optim import schedules

Shape = Literal["constant", "cosine", "exp", "linear"]


class Steps(Protocol):
    """What training asks of an optimizer."""

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...
    def step(self) -> Any: ...
    def zero_grad(self) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any], /) -> None: ...


@dataclass(frozen=True)
class Between:
    """A range that a search draws from."""

    low: float
    high: float
    log: bool = True


@dataclass(frozen=True)
class OneOf:
    """A few values that a search chooses among."""

    values: tuple[Any, ...]


Space = Mapping[str, Between | OneOf]


@dataclass(frozen=True)
class Recipe(ABC):
    """What all have in common."""

    lr: float = 0.1
    weight_decay: float = 5e-4
    schedule: Shape = "cosine"
    schedule_epochs: float | None = (
        None  # the paper's max_epoch; None: the run's own length
    )
    rate: float = 5.0  # of exp
    floor: float = 0.0  # where cosine ends; the paper's is 0.001
    warmup: float = 0.0  # epochs
    warmup_lr: float = 0.0  # where the warm-up starts
    name: ClassVar[str]
    space: ClassVar[Space] = {}
    resumable: ClassVar[bool] = (
        True  # whether its state is tensors and numbers, which a checkpoint holds
    )

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for f in fields(self):
            object.__setattr__(
                self,
                f.name,
                _checked(self, f.name, getattr(self, f.name), hints[f.name]),
            )

    def lr_at(self, epoch: float, epochs: float) -> float:
        """The learning rate at an epoch (a fraction too) of a run of so many."""
        if epoch < self.warmup:
            return schedules.warmup(
                epoch, self.lr, self.warmup, self.warmup_lr
            )
        epoch, epochs = (
            epoch - self.warmup,
            (self.schedule_epochs or epochs) - self.warmup,
        )
        if self.schedule == "constant" or epochs <= 0:
            return self.lr
        if self.schedule == "cosine":
            return schedules.cosine(
                epoch, self.lr, epochs, min(self.floor, self.lr)
            )
        return schedules.exp(
            epoch,
            self.lr,
            epochs,
            self.rate if self.schedule == "exp" else 1.0,
        )

    def damping_at(self, epoch: float) -> float | None:
        """λ of an epoch, where there is one."""
        return None

    def follow(
        self, groups: list[dict[str, Any]], epoch: float, epochs: float
    ) -> None:
        """Write lr and λ of an epoch where an optimizer reads them; λ changes from epoch to epoch, lr within one."""
        lam = self.damping_at(math.floor(epoch))
        for group in groups:
            group["lr"] = self.lr_at(epoch, epochs)
            if lam is not None:
                group["damping"] = lam

    @abstractmethod
    def optimizer(self, model: nn.Module) -> Steps:
        """A new one for the parameters of a model."""

    def with_(self, changes: Mapping[str, Any]) -> Self:
        """The same with other values; a field that does not exist is refused, with what may have been meant."""
        known = [f.name for f in fields(self)]
        for key in changes:
            if key not in known:
                raise ValueError(
                    unknown(
                        f"the recipe of {self.name} has no field", key, known
                    )
                )
        return replace(self, **changes)

    def values(self) -> dict[str, Any]:
        """Every hyperparameter, for a result."""
        return asdict(self)


def _checked(recipe: Recipe, name: str, value: Any, hint: Any) -> Any:
    """The value in the type of its field; from text too, as a command line gives it."""
    choices = get_args(hint)
    said = f"the recipe of {recipe.name}: {name} is {{}}, not {value!r}"
    if choices and all(isinstance(choice, str) for choice in choices):
        if value not in choices:
            raise ValueError(said.format("one of " + ", ".join(choices)))
        return value
    kinds = choices or (hint,)
    if type(None) in kinds and value in (None, "None", "none"):
        return None
    if bool in kinds:
        words = {"true": True, "false": False}
        if isinstance(value, str) and value.lower() in words:
            return words[value.lower()]
        if not isinstance(value, bool):
            raise ValueError(said.format("true or false"))
        return value
    kind = float if float in kinds else int
    try:
        number = kind(value)
    except (TypeError, ValueError):
        raise ValueError(
            said.format("a number" if kind is float else "a whole number")
        ) from None
    if (
        isinstance(value, bool)
        or not math.isfinite(number)
        or (kind is int and number != float(value))
    ):
        raise ValueError(
            said.format("a number" if kind is float else "a whole number")
        )
    if number < 0:
        raise ValueError(said.format("not negative"))
    return number
