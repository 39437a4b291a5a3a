"""What each layer's curvature looks like, from its last refresh; docs/diagnostics.md says how to
read it.

opt.register_step_post_hook(seng.TensorBoard(writer))      # one line, and every refresh is drawn
"""

from __future__ import annotations

from typing import Any

KEYS = (
    "form",
    "base",
    "columns",
    "bytes",
    "refreshed_at",
    "refresh_seconds",
    "top_eigenvalue",
    "effective_rank",
    "damping",
    "cosine",
    "norm_ratio",
    "sketch_error",
    "solves_failed",
)


def describe(record: Any) -> dict[str, Any]:
    """One layer's numbers, from its `LayerRecord`.

    None where they are not known: without curvature, or after a checkpoint until the next refresh.
    """
    state, last = record.state, record.refresh
    planned = None if record.plan is None else record.plan.why
    out: dict[str, Any] = dict.fromkeys(KEYS)
    out["refreshes_dropped"] = record.dropped
    out["why"] = record.refused or planned
    if state is None:
        return out | {"form": "plain"}
    damping = None if record.solved is None else record.solved[1]
    largest, trace, lam = state.spectrum(damping)
    if largest is not None:
        out["effective_rank"] = trace / largest if largest > 0 else 0.0
    error = state.sketch_error
    out |= {
        "form": state.form,
        "base": state.base,
        "columns": state.columns,
        "bytes": state.bytes,
        "top_eigenvalue": largest,
        "damping": lam,
        "sketch_error": None if error is None else float(error),
        "solves_failed": record.failed + int(state.failures),
    }
    if last is not None:
        out["refreshed_at"] = last.step
        out["refresh_seconds"] = last.timer.seconds
        out["cosine"], out["norm_ratio"] = last.compared.tolist()
    return out


class TensorBoard:
    """A step hook that writes `diagnostics()` after each refresh, as `seng/<number>/<layer>` at the
    optimizer's step count.

    opt.register_step_post_hook(seng.TensorBoard(writer))
    adamw.register_step_post_hook(seng.TensorBoard(writer, handle))     # with seng.attach

    `writer` is a torch.utils.tensorboard.SummaryWriter, or anything with its add_scalar; `source` a
    SENG or the handle of `attach`.
    """

    def __init__(self, writer: Any, source: Any = None) -> None:
        if not callable(getattr(writer, "add_scalar", None)):
            raise TypeError(
                "TensorBoard takes a SummaryWriter, or anything else with add_scalar, not "
                f"{type(writer).__name__}"
            )
        self.writer = writer
        self.source = source
        self.written: int | None = None

    def __call__(self, optimizer: Any, *_: object) -> None:
        source = self.source or optimizer
        if not hasattr(source, "last_refresh"):
            raise TypeError(
                f"{type(source).__name__} has no curvature; with seng.attach write "
                "TensorBoard(writer, handle)"
            )
        step = source.last_refresh
        if step in (None, self.written):
            return
        self.written = step
        for layer, entry in source.diagnostics().items():
            del entry["refreshed_at"]  # which is the step
            for key, value in entry.items():
                if isinstance(value, int | float):
                    self.writer.add_scalar(f"seng/{key}/{layer}", value, step)
