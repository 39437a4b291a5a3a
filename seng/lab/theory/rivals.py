"""Tuned Adam and L-BFGS, which are given the same network, first weights, points and seconds as least squares.

They minimize ½‖r‖² of the same residuals, and get what is good for them: a weight of the boundary of their own, for Adam a
learning rate that falls to zero just as its seconds end and fresh points at every step, for L-BFGS a restart when it stalls.
Their lowest error counts, at whatever time they had it, where least squares is judged by its last.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from time import process_time
from typing import Any, Protocol

import torch
from torch import Tensor, nn

MARKS = 25  # errors of a curve
SCALE = 1e8  # of the loss for L-BFGS: torch's keeps no pair with yᵀs below 1e-10, and small losses would leave it without any
STALLS = 3  # restarts of L-BFGS in a row that did not help
RATES = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)  # Adam's
HISTORIES = (10, 50, 100)  # of L-BFGS
LENGTHS = (0.5, 0.1)  # of its first trial in a line search, beside 1
FACTORS = (0.1, 10.0)  # on the weight of the boundary, beside 1


class Task(Protocol):
    """What is fitted."""

    @property
    def model(self) -> nn.Module: ...

    def residuals(self, factor: float, fresh: bool) -> Tensor:
        """r (m,), the boundary's part with `factor` times its weight in ½‖r‖²; at new points, or at those of the start."""
        ...

    def error(self) -> float: ...


@dataclass
class Curve:
    """What a method did: its loss and error against steps and seconds."""

    steps: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)

    def add(
        self, step: int, seconds: float, loss: float, error: float
    ) -> None:
        self.steps.append(step)
        self.seconds.append(seconds)
        self.losses.append(loss)
        self.errors.append(error)

    @property
    def lowest(self) -> float:
        """The error at its best; a method that has none is infinitely far off."""
        return min(
            (e for e in self.errors if math.isfinite(e)), default=math.inf
        )

    def passed(self, error: float) -> float:
        """When it was first below another's error."""
        return next(
            (
                s
                for s, e in zip(self.seconds, self.errors, strict=True)
                if e < error
            ),
            math.inf,
        )


class Watch:
    """Processor seconds of this process, between `go` and `hold`: neither errors nor other people's work are counted."""

    def __init__(self) -> None:
        self.seconds, self._since = 0.0, 0.0

    def go(self) -> None:
        self._since = process_time()

    def now(self) -> float:
        return self.seconds + process_time() - self._since

    def hold(self) -> None:
        self.seconds = self.now()


@dataclass(frozen=True)
class Rival:
    """One method with its settings."""

    method: str  # Adam or L-BFGS
    lr: float
    history: int = 0  # pairs that L-BFGS keeps
    factor: float = 1.0  # on the weight of the boundary
    fresh: bool = False  # points

    def fit(self, task: Task, seconds: float) -> Curve:
        return (adam if self.method == "Adam" else lbfgs)(self, task, seconds)

    def words(self) -> str:
        history = f", history {self.history}" if self.history else ""
        return f"lr {self.lr:g}{history}, boundary ×{self.factor:g}{', fresh points' if self.fresh else ''}"


def adam(rival: Rival, task: Task, seconds: float) -> Curve:
    """Adam with a cosine from lr to 0 over its seconds."""
    optimizer = torch.optim.Adam(
        task.model.parameters(), lr=rival.lr, fused=True
    )
    curve, watch, steps = Curve(), Watch(), 0
    watch.go()
    for mark in range(1, MARKS + 1):
        loss = math.nan
        while (now := watch.now()) < seconds * mark / MARKS:
            optimizer.param_groups[0]["lr"] = (
                rival.lr * 0.5 * (1 + math.cos(math.pi * now / seconds))
            )
            r = task.residuals(rival.factor, rival.fresh)
            value = 0.5 * r @ r
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            loss, steps = value.item(), steps + 1
        watch.hold()
        curve.add(steps, watch.seconds, loss, task.error())
        watch.go()
    return curve


def lbfgs(rival: Rival, task: Task, seconds: float) -> Curve:
    """L-BFGS with a strong Wolfe line search; its memory is emptied where it makes no more progress."""
    parameters = list(task.model.parameters())
    steps = 0

    def closure() -> float:
        nonlocal steps
        r = task.residuals(rival.factor, False)
        value = SCALE * 0.5 * r @ r
        for p in parameters:
            p.grad = None
        value.backward()
        steps += 1
        return value.item()

    def started() -> torch.optim.LBFGS:
        limits: dict[str, Any] = {
            "max_iter": 10,
            "max_eval": 50,
            "tolerance_grad": 0.0,
            "tolerance_change": 0.0,
        }
        return torch.optim.LBFGS(
            parameters,
            rival.lr,
            history_size=rival.history,
            line_search_fn="strong_wolfe",
            **limits,
        )

    curve, watch, optimizer = Curve(), Watch(), started()
    best, kept, stalls = math.inf, [p.detach().clone() for p in parameters], 0
    watch.go()
    for mark in range(1, MARKS + 1):
        while stalls < STALLS and watch.now() < seconds * mark / MARKS:
            here = [p.detach().clone() for p in parameters]
            loss = float(
                optimizer.step(closure)
            )  # ½‖r‖² here, before the iterations
            if loss < best:
                best, kept, stalls = loss, here, 0
                continue
            stalls, optimizer = stalls + 1, started()
            if not math.isfinite(loss):
                with torch.no_grad():
                    for p, k in zip(parameters, kept, strict=True):
                        p.copy_(k)
        watch.hold()
        curve.add(steps, watch.seconds, best / SCALE, task.error())
        watch.go()
    return curve


def rounds(method: str) -> list[Callable[[Rival], list[Rival]]]:
    """What is tried, each round beginning with the best of all before it."""
    weights: list[Callable[[Rival], list[Rival]]] = [
        lambda best: [replace(best, factor=factor) for factor in FACTORS],
        lambda best: (
            [replace(best, factor=best.factor**2)] if best.factor != 1 else []
        ),  # on, where the end of the range won
    ]
    if method == "Adam":
        rates: Callable[[Rival], list[Rival]] = lambda best: [  # noqa: E731
            replace(best, lr=lr) for lr in RATES
        ]
        return [rates, *weights, lambda best: [replace(best, fresh=True)]]
    return [
        lambda best: [replace(best, history=history) for history in HISTORIES],
        lambda best: [replace(best, lr=length) for length in LENGTHS],
        *weights,
    ]


def tuned(
    method: str, measure: Callable[[list[Rival]], Iterable[Curve]]
) -> tuple[Rival, Curve, list[dict[str, Any]]]:
    """The settings of the lowest error, its curve, and all that was tried."""
    best, curve = Rival(method, lr=1.0), Curve()
    tries = []
    for proposed in rounds(method):
        candidates = proposed(best)
        for rival, found in zip(candidates, measure(candidates), strict=True):
            tries.append({"settings": rival.words(), "error": found.lowest})
            if found.lowest < curve.lowest:
                best, curve = rival, found
    return best, curve, tries
