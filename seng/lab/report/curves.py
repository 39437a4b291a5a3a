"""A method's curve over its seeds: the mean, the lowest and the highest, where every seed has values.

Seeds that stop at the target stop at different times, and a mean over whoever is left would jump; so it ends with the first
that ends. The single seeds are drawn beside it, whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from seng.lab.results import Trajectory

MOST = 1000  # points of one curve; a screen shows no more
AXES = {
    "seconds": "seconds of training",
    "step": "steps",
    "epoch": "epochs",
}  # a Point's field, and what it is called
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Band:
    """Mean, lowest and highest over seeds, at x."""

    x: Array
    mean: Array
    low: Array
    high: Array


def series(run: Trajectory, x: str, y: str) -> tuple[Array, Array]:
    """One run: a Point's field y against its field x, without what is not finite or not timed, thinned to MOST points."""
    if x == "seconds" and not run.timed:
        return np.empty(0), np.empty(0)
    pairs = [
        (getattr(point, x), getattr(point, y))
        for point in run.points
        if getattr(point, y) is not None
    ]
    both = np.array(pairs, dtype=np.float64).reshape(-1, 2)[thin(len(pairs))]
    return both[:, 0], both[:, 1]


def thin(count: int, most: int = MOST) -> NDArray[np.int64]:
    """Which of `count` points to keep: evenly spread, with the first and the last."""
    return np.unique(
        np.linspace(0, max(count - 1, 0), min(count, most))
        .round()
        .astype(np.int64)
    )


def band(
    runs: Sequence[Trajectory], x: str, y: str, most: int = MOST
) -> Band | None:
    """Over the seeds, by linear interpolation; None where there is no x that all of them have."""
    each = [series(run, x, y) for run in runs if run.timed or x != "seconds"]
    if not each or any(len(xs) == 0 for xs, _ in each):
        return None
    first, last = max(xs[0] for xs, _ in each), min(xs[-1] for xs, _ in each)
    grid = np.unique(
        np.concatenate([xs for xs, _ in each] + [np.array([first, last])])
    )
    grid = grid[(grid >= first) & (grid <= last)]
    if len(grid) == 0:
        return None
    grid = grid[thin(len(grid), most)]
    values = np.stack([np.interp(grid, xs, ys) for xs, ys in each])
    return Band(grid, values.mean(0), values.min(0), values.max(0))
