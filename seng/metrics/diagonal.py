"""The diagonal metric of layers without factors: P = diag(v)^p, v = E u² over per-sample gradients.

p = 1/2 is Adam's root. P is normalised to mean 1; v below `FLOOR` of its mean counts as that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from seng.linalg.operators import Operator, Shape
from seng.metrics.factor import FLOOR, relative_floor
from seng.metrics.metric import TRUE, UNSAVED, PowerSolver, State


@dataclass(frozen=True)
class DiagonalPower:
    """P^e, one number per parameter."""

    weights: Tensor  # (n,)

    def __call__(self, z: Tensor) -> Tensor:
        return z * self.weights

    rows = __call__

    def of(self, U: Operator, rank: int) -> Operator:
        """P^e U."""
        return U.weighted(self.weights)


@dataclass(frozen=True)
class DiagonalState(State):
    """v, and how P is made from it."""

    v: Tensor  # (n,)
    power: float
    relative: bool = True
    graft: bool = False
    finite: Tensor = field(
        default=TRUE, metadata=UNSAVED
    )  # whether the last captures were

    form = "merged"
    base = "diagonal"

    def fits(self, shape: Shape) -> bool:
        return self.v.numel() == math.prod(shape)

    def to_power(self, exponent: float, damping: float = 0.0) -> DiagonalPower:
        """P^exponent; entries of v below `damping` count as that."""
        mean = self.v.mean()
        least = relative_floor(damping, self.relative, mean).clamp(
            FLOOR, self.v.numel()
        )
        unit = torch.where(mean > 0, mean, 1)
        P = torch.maximum(self.v / unit, least) ** self.power
        P = P / P.mean()
        return DiagonalPower(P**exponent)

    def at(self, damping: float) -> PowerSolver:
        return PowerSolver(self.to_power(-1.0, damping), self.graft)

    def fine(self) -> Tensor:
        return self.finite

    def spectrum(
        self, damping: float | None
    ) -> tuple[float, float, float | None]:
        mean = float(self.v.mean()) if self.relative else 1.0
        lam = None if damping is None else damping * mean
        return float(self.v.max()), float(self.v.sum()), lam
