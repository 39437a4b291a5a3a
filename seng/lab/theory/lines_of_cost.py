"""One line of the table of costs: an operation against one variable, its times, counts and bytes, and their exponents."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import linear_regression

from seng.lab.theory.operations_of_cost import multiply_adds, times
from seng.lab.theory.rows_of_cost import Row, Sweep

THRESHOLD = 3e-4  # seconds; below, what a call takes beside its products shows
TOLERANCE = 0.15  # of exponents of time
LOOSE = 0.5  # the same in a quick run, which takes each time only once and judges no claim by it
LEAST = 3  # sizes through which a line is laid


@dataclass(frozen=True)
class Line:
    """One variable of one operation: what was measured, and the exponents."""

    operation: str
    cost: str  # our formula
    table: str | None  # the paper's
    variable: str
    values: tuple[int, ...]
    fixed: dict[str, int]
    seconds: tuple[float, ...]
    counted: tuple[float, ...]  # multiply-adds
    bytes: tuple[int, ...]
    count_error: float  # the largest, relative to the formula
    byte_error: int  # the same, in bytes
    predicted: float  # exponents: by our formula,
    of_table: float | None  # by the paper's,
    of_count: float  # of what was counted,
    of_time: float | None  # of the time, where there are sizes enough
    bytes_predicted: float
    of_bytes: float
    bytes_of_table: float | None
    verdict: str
    words: str

    @property
    def span(self) -> str:
        """The variable and its range."""
        return f"{self.variable} {self.values[0]:,}–{self.values[-1]:,}"


def exponent(x: Sequence[float], y: Sequence[float]) -> float:
    """The slope of log y over log x."""
    slope = linear_regression(
        [math.log(v) for v in x], [math.log(v) for v in y]
    ).slope
    return round(slope, 12) + 0.0  # no −0


def judged(
    seconds: Sequence[float],
    costs: Sequence[float],
    found: float,
    predicted: float,
    tolerance: float,
) -> tuple[str, str]:
    """The verdict on an exponent of time, and what there is to say about it."""
    fit = fitted(seconds)
    out = len(seconds) - len(fit)
    short = f"{out} of {len(seconds)} sizes under {1e3 * THRESHOLD:g} ms"
    if len(fit) < LEAST:
        return (
            "too small to measure",
            f"{short}: too short to tell from what the calls themselves take",
        )
    first, last = (1e-9 * costs[i] / seconds[i] for i in (fit[0], fit[-1]))
    rate = f"{first:.2g} → {last:.2g} G/s"
    left = f"{short}, left out; " if out else ""
    if abs(found - predicted) <= tolerance:
        return "within", f"{left}{rate}"
    why = (
        "the rate still rises with the size"
        if last > first
        else "larger sizes run slower, as beyond a cache"
    )
    return "outside", f"{left}{why}: {rate}"


def fitted(seconds: Sequence[float]) -> list[int]:
    """Which sizes take long enough."""
    return [i for i, taken in enumerate(seconds) if taken >= THRESHOLD]


def measure(row: Row, sweep: Sweep, quick: bool) -> Line:
    """One variable of one operation."""
    sizes = list(sweep.sizes())
    ready = [row.prepare(s) for s in sizes]
    operations, held = (
        [operation for operation, _ in ready],
        [size for _, size in ready],
    )
    counted = [multiply_adds(operation) for operation in operations]
    seconds = times(operations, 1, 0) if quick else times(operations, 6, 10e-3)
    costs, stored = ([formula(s) for s in sizes] for formula in row.ours)
    long = fitted(seconds)
    enough = len(long) >= LEAST

    def slope(y: Sequence[float]) -> float:
        over = (
            long if enough else range(len(sizes))
        )  # the same sizes for everything, so that exponents compare
        return exponent([sweep.values[i] for i in over], [y[i] for i in over])

    found, predicted = slope(seconds), slope(costs)
    verdict, words = judged(
        seconds, costs, found, predicted, LOOSE if quick else TOLERANCE
    )
    table = [
        None if formula is None else slope([formula(s) for s in sizes])
        for formula in row.paper or (None, None)
    ]
    return Line(
        row.name,
        row.ours[0].text,
        row.paper[0].text if row.paper else None,
        sweep.symbol,
        sweep.values,
        sweep.fixed,
        tuple(seconds),
        tuple(counted),
        tuple(held),
        max(
            abs(count / cost - 1)
            for count, cost in zip(counted, costs, strict=True)
        ),
        int(max(abs(a - b) for a, b in zip(held, stored, strict=True))),
        predicted,
        table[0],
        slope(counted),
        found if enough else None,
        slope(stored),
        slope(held),
        table[1],
        verdict,
        words,
    )
