"""A clock for what one layer's refresh costs."""

from __future__ import annotations

import time
from typing import Any

import torch


class Timer:
    """Seconds spent inside `with timer:`, added up; inside of itself it does nothing.

    On a GPU by events, so that nothing waits until they are read.
    """

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.marks: list[tuple[Any, Any]] = []
        self.depth = 0

    def _now(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def __enter__(self) -> None:
        self.depth += 1
        if self.depth == 1:
            self.start = self._now()

    def __exit__(self, *_: object) -> None:
        self.depth -= 1
        if self.depth == 0:
            self.marks.append((self.start, self._now()))

    @property
    def seconds(self) -> float:
        if not self.cuda:
            return float(sum(end - start for start, end in self.marks))
        for _, end in self.marks:
            end.synchronize()
        return (
            float(sum(start.elapsed_time(end) for start, end in self.marks))
            / 1000
        )
