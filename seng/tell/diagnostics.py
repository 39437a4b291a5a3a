"""What each layer's curvature looks like, from its last refresh; docs/diagnostics.md says how to read it.

opt.register_step_post_hook(seng.TensorBoard(writer))      # one line, and every refresh is drawn
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from seng.linalg.numerics import deviation, eigh
from seng.linalg.operators import Merged
from seng.linalg.sketch import Identity
from seng.linalg.windows import Windows
from seng.metrics.block import Block

LEADING = 16  # directions that the sketch error of a form without a basis looks at


class Timer:
    """Seconds between the first `with timer:` and the end of it, added up; inside of itself it does nothing.

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
        return float(sum(start.elapsed_time(end) for start, end in self.marks)) / 1000


@dataclass(frozen=True)
class Refresh:
    """What one refresh of one layer leaves for the record, to be worked out when it is asked for."""

    step: int
    timer: Timer
    compared: Callable[
        [], tuple[Tensor, Tensor]
    ]  # cos(g, d) and ‖d‖/‖g‖ at that step, d in SGD's units


def compare(g: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
    """cos(g, d) and ‖d‖/‖g‖; 1 and 1 for a gradient of zeros."""
    return cosine_of(g @ g, d @ d, g @ d)


def cosine_of(g_g: Tensor, d_d: Tensor, g_d: Tensor) -> tuple[Tensor, Tensor]:
    """The same from the three products, which may be sums over ranks."""
    tiny = torch.finfo(g_g.dtype).tiny
    size, length = g_g.sqrt(), d_d.sqrt()
    zero = size == 0
    return torch.where(zero, 1, g_d / (size * length).clamp_min(tiny)), torch.where(
        zero, 1, length / size.clamp_min(tiny)
    )


def compare_energies(
    g: Tensor, b: Tensor, c: Tensor, lam: Tensor
) -> tuple[Tensor, Tensor]:
    """The same from g·g, b and c = Uᵀg: g·d = g·g − b·c and d·d = g·d − λb·b, since (λI + UᵀU)b = c."""
    g, b, c = g.double(), b.double(), c.double()
    along = (g - b @ c).clamp_min(0)
    length = (along - lam * (b @ b)).clamp_min(0).sqrt()
    size = g.sqrt()
    tiny = torch.finfo(g.dtype).tiny
    zero = size == 0
    return torch.where(zero, 1, along / (size * length).clamp_min(tiny)), torch.where(
        zero, 1, length / size.clamp_min(tiny)
    )


def _spectrum(block: Block) -> tuple[float, float, float | None]:
    """The largest eigenvalue and the trace of M, and λ; of a P that is alone, of C."""
    if block.base is not None and not block.U.samples:
        largest, trace, mean = block.base.spectrum()
        return (
            largest,
            trace,
            None
            if block.bound is None
            else block.bound * (mean if block.relative else 1),
        )
    values, _ = eigh(block.gram)
    return (
        float(block.top),
        float(values.sum()),
        None if block.core is None else float(block.core[1]),
    )


KEYS = (
    *(
        "form",
        "base",
        "columns",
        "bytes",
        "refreshed_at",
        "refresh_seconds",
        "top_eigenvalue",
        "effective_rank",
        "damping",
    ),
    *("cosine", "norm_ratio", "sketch_error", "solves_failed"),
)


def describe(block: Block | None, last: Refresh | None) -> dict[str, Any]:
    """One layer's numbers; None where they are not known: without curvature, or after a checkpoint until the next refresh."""
    if block is None:
        return dict.fromkeys(KEYS) | {"form": "plain"}
    largest, trace, damping = _spectrum(block)
    cosine, norm_ratio = (None, None) if last is None else map(float, last.compared())
    return {
        "form": "implicit"
        if isinstance(block.U, Windows)
        else type(block.U).__name__.lower(),
        "base": "identity" if block.base is None else type(block.base).__name__.lower(),
        "columns": block.U.samples,
        "bytes": block.U.bytes + (0 if block.base is None else block.base.bytes),
        "refreshed_at": None if last is None else last.step,
        "refresh_seconds": None if last is None else last.timer.seconds,
        "top_eigenvalue": largest,
        "effective_rank": trace / largest if largest > 0 else 0.0,
        "damping": damping,
        "cosine": cosine,
        "norm_ratio": norm_ratio,
        "sketch_error": _sketch_error(block),
        "solves_failed": int(block.failures),
    }


def _sketch_error(block: Block) -> float | None:
    if not block.U.samples:
        return 0.0
    if isinstance(block.U, Merged):
        return None if block.sketch_error is None else float(block.sketch_error)
    if isinstance(block.omega, Identity):
        return 0.0
    values, V = eigh(block.gram)
    return float(deviation(block.U.combine(V[:, :LEADING]), values[:LEADING]))


class Source(Protocol):
    """A SENG or the handle of `attach`."""

    @property
    def last_refresh(self) -> int | None: ...
    def diagnostics(self) -> dict[str, dict[str, Any]]: ...


class TensorBoard:
    """A step hook that writes `diagnostics()` after each refresh, as `seng/<number>/<layer>` at the optimizer's step count.

    opt.register_step_post_hook(seng.TensorBoard(writer))
    adamw.register_step_post_hook(seng.TensorBoard(writer, handle))     # with seng.attach

    `writer` is a torch.utils.tensorboard.SummaryWriter, or anything with its add_scalar.
    """

    def __init__(self, writer: Any, source: Source | None = None) -> None:
        if not callable(getattr(writer, "add_scalar", None)):
            raise TypeError(
                f"TensorBoard takes a SummaryWriter, or anything else with add_scalar, not {type(writer).__name__}"
            )
        self.writer, self.source = writer, source
        self.written: int | None = None

    def __call__(self, optimizer: Optimizer, *_: object) -> None:
        source: Any = self.source or optimizer
        if not hasattr(source, "last_refresh"):
            raise TypeError(
                f"{type(source).__name__} has no curvature; with seng.attach write TensorBoard(writer, handle)"
            )
        if source.last_refresh is None or source.last_refresh == self.written:
            return
        self.written = source.last_refresh
        for layer, entry in source.diagnostics().items():
            for key, value in entry.items():
                if isinstance(value, int | float) and key != "refreshed_at":
                    self.writer.add_scalar(f"seng/{key}/{layer}", value, self.written)
