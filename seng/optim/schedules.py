"""The paper's schedules: plain functions of the epoch, and helpers that make torch schedulers of
them.

cosine   α = 0.001 + (α₀ − 0.001)(1 + cos(π·epoch/epochs))/2
exp      α = α₀(1 − epoch/epochs)^rate
warm-up  α = start + (α₀ − start)·epoch/warmup in the first epochs
damping  λ = λ₀·γ^(epoch/10)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

FLOOR = 0.001  # where the paper's cosine ends


def cosine(
    epoch: float, lr: float, epochs: float, floor: float = FLOOR
) -> float:
    """From lr at 0 to the floor at `epochs`, and the floor from there on."""
    angle = math.pi * min(epoch / epochs, 1.0)
    return floor + 0.5 * (lr - floor) * (1 + math.cos(angle))


def exp(epoch: float, lr: float, epochs: float, rate: float) -> float:
    """lr·(1 − epoch/epochs)^rate, the paper's "exp" scheme, and 0 from `epochs` on."""
    return lr * math.pow(max(0.0, 1 - epoch / epochs), rate)


def warmup(
    epoch: float, lr: float, epochs: float, start: float = 0.0
) -> float:
    """Linear from `start` to lr in the first `epochs`, and lr from there on."""
    return (
        start + (lr - start) * min(epoch / epochs, 1.0) if epochs > 0 else lr
    )


def damping(epoch: float, initial: float, gamma: float) -> float:
    """λ₀·γ^(epoch/10)."""
    return initial * math.pow(gamma, epoch / 10)


def schedule_lr(
    optimizer: Optimizer,
    of_epoch: Callable[[float, float], float],
    steps_per_epoch: int = 1,
) -> LambdaLR:
    """A torch scheduler that sets lr = of_epoch(epoch, initial lr), to be stepped `steps_per_epoch`
    times an epoch.

    schedule_lr(opt, lambda epoch, lr: exp(epoch, lr, epochs=75, rate=5),
    steps_per_epoch=len(loader))
    """

    def factor(initial: float, step: int) -> float:
        return of_epoch(step / steps_per_epoch, initial) / (initial or 1.0)

    groups = optimizer.param_groups
    initials = [float(g.get("initial_lr", g["lr"])) for g in groups]
    return LambdaLR(optimizer, [partial(factor, lr) for lr in initials])


class DampingSchedule:
    """Sets every group's damping to of_epoch(epoch, its initial damping) at each `step()`.

    schedule = DampingSchedule(opt, lambda epoch, lam: damping(epoch, lam, gamma=0.9),
    steps_per_epoch=len(loader))
    """

    def __init__(
        self,
        optimizer: Optimizer,
        of_epoch: Callable[[float, float], float],
        steps_per_epoch: int = 1,
    ) -> None:
        self.optimizer = optimizer
        self.of_epoch = of_epoch
        self.steps_per_epoch = steps_per_epoch
        groups = optimizer.param_groups
        self.initial = [float(group["damping"]) for group in groups]
        self._set(0)

    def _set(self, steps: int) -> None:
        self.steps = steps
        epoch = steps / self.steps_per_epoch
        groups = self.optimizer.param_groups  # others after load_state_dict
        for group, initial in zip(groups, self.initial, strict=True):
            group["damping"] = self.of_epoch(epoch, initial)

    def step(self) -> None:
        """To be called after each optimizer step (or epoch)."""
        self._set(self.steps + 1)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "initial": self.initial}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from `state_dict()`."""
        self.initial = [*state_dict["initial"]]
        self._set(state_dict["steps"])
