"""What each layer's curvature looks like, from its last refresh; docs/diagnostics.md says how to
read it.

opt.register_step_post_hook(seng.TensorBoard(writer))      # one line, and every refresh is drawn
"""

from __future__ import annotations

from typing import Any, Protocol

from torch.optim.optimizer import Optimizer

from seng.metrics.metric import State

KEYS = (
    *("form", "base", "columns", "bytes", "refreshed_at", "refresh_seconds"),
    *("top_eigenvalue", "effective_rank", "damping", "cosine", "norm_ratio"),
    *("sketch_error", "solves_failed"),
)


def describe(
    state: State | None,
    damping: float | None,
    last: Any,
    failed: int,
) -> dict[str, Any]:
    """One layer's numbers.

    None where they are not known: without curvature, or after a checkpoint until the next refresh.
    `failed`: solves that fell back to the gradient before this state.
    """
    if state is None:
        return dict.fromkeys(KEYS) | {"form": "plain"}
    largest, trace, lam = state.spectrum(damping)
    rank = None if largest is None else trace / largest if largest > 0 else 0.0
    error = state.sketch_error
    out = {
        "form": state.form,
        "base": state.base,
        "columns": state.columns,
        "bytes": state.bytes,
        "refreshed_at": None,
        "refresh_seconds": None,
        "top_eigenvalue": largest,
        "effective_rank": rank,
        "damping": lam,
        "cosine": None,
        "norm_ratio": None,
        "sketch_error": None if error is None else float(error),
        "solves_failed": failed + int(state.failures),
    }
    if last is not None:
        out["refreshed_at"], out["refresh_seconds"] = (
            last.step,
            last.timer.seconds,
        )
        out["cosine"], out["norm_ratio"] = map(float, last.compared)
    return out


class Source(Protocol):
    """A SENG or the handle of `attach`."""

    @property
    def last_refresh(self) -> int | None: ...
    def diagnostics(self) -> dict[str, dict[str, Any]]: ...


class TensorBoard:
    """A step hook that writes `diagnostics()` after each refresh, as `seng/<number>/<layer>` at the
    optimizer's step count.

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
                    self.writer.add_scalar(
                        f"seng/{key}/{layer}", value, self.written
                    )
