"""What `seng bench` answers with: a row for each contender at each setting, and how times become its numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median, quantiles

from seng.lab.bench.contenders import REFRESHING, Setting
from seng.lab.bench.exact import Quality

Times = Sequence[
    tuple[float, float]
]  # seconds per step of a window with a refresh and of one without, round by round


@dataclass
class Row:
    """What was measured of one contender at one setting; None: not, or not applicable."""

    contender: str
    setting: Setting
    step_ms: float | None = None  # a refresh spread over T steps included
    idle_ms: float | None = None  # between refreshes
    refresh_ms: float | None = None  # what a step with one costs more
    ratio_to_sgd: float | None = (
        None  # median over the rounds, each with its own SGD
    )
    ratio_quartiles: list[float] | None = None
    ratio_to_adamw: float | None = None
    whole_period_ms: float | None = (
        None  # T steps with their one refresh timed as they are, as a check of step_ms
    )
    whole_period_ratio_to_sgd: float | None = None
    peak_MiB: float | None = None
    reserved_MiB: float | None = None
    peak_ratio_to_sgd: float | None = None
    state_MiB: float | None = None
    loss: float | None = None  # after the last round
    quality: Quality | None = None
    note: str = ""
    runs: bool = True

    @property
    def every(self) -> int:
        """T, over which its refresh is spread."""
        return self.setting.period(self.contender)

    def of_quality(self, name: str) -> float | None:
        """One of its numbers, where the direction was measured."""
        return (
            None
            if self.quality is None
            else float(getattr(self.quality, name))
        )


def summarise(timed: Sequence[tuple[Row, Times]], window: int) -> None:
    """Medians over the rounds; ratios round by round, since whatever slows a round slows all of it."""
    step = {
        row.contender: amortised(row, times, window) for row, times in timed
    }
    for row, times in timed:
        mine = step[row.contender]
        row.step_ms = row.idle_ms = 1e3 * median(mine)
        if row.contender in REFRESHING:
            row.idle_ms = row.refresh_ms = None
            if row.every > 1:
                row.idle_ms = 1e3 * median(idle for _, idle in times)
                row.refresh_ms = 1e3 * median(
                    window * (busy - idle) for busy, idle in times
                )
        if "sgd" in step:
            ratios = [a / b for a, b in zip(mine, step["sgd"], strict=True)]
            row.ratio_to_sgd = median(ratios)
            row.ratio_quartiles = (
                quantiles(ratios, n=4)[::2] if len(ratios) > 1 else None
            )
        if "adamw" in step:
            row.ratio_to_adamw = median(
                a / b for a, b in zip(mine, step["adamw"], strict=True)
            )


def amortised(row: Row, times: Times, window: int) -> list[float]:
    """Seconds per step in each round, with a refresh spread over T steps."""
    if row.contender in REFRESHING and row.every > 1:
        return [
            idle + window * (busy - idle) / row.every for busy, idle in times
        ]
    return [fmean(pair) for pair in times]
