"""What users are told, each thing once: which parameters take the plain gradient and why, and what
went wrong on the way.
"""

from __future__ import annotations

import sys
import traceback
import warnings
from collections import defaultdict
from collections.abc import Mapping

MOST = 5  # names, or reasons, in a list


class Notices:
    """Warnings that are given once; with `strict`, what leaves a parameter to the plain gradient is
    an error.
    """

    def __init__(self, strict: bool) -> None:
        self.strict = strict
        self.given: set[str] = set()

    def uncovered(self, reasons: Mapping[str, str], others: str) -> None:
        """Parameters without curvature, what they take instead, and why."""
        if reasons:
            listing = listed(reasons)
            self.refuse(
                "uncovered",
                f"these parameters take {others}: {listing}",
            )

    def plain(self, layer: str, why: str) -> None:
        self.refuse(layer, f"layer '{layer}' takes the plain gradient: {why}")

    def dropped(self, layer: str) -> None:
        self.once(
            f"{layer} dropped",
            f"layer '{layer}': a refresh was dropped, its captures are not finite (see "
            "diagnostics())",
        )

    def failed(self, layer: str, solves: int) -> None:
        self.once(
            f"{layer} failed",
            f"layer '{layer}': {solves} solves failed and took the plain gradient (see "
            "diagnostics())",
        )

    def partial(self, layer: str, cosine: float) -> None:
        """The samples do not add up to the gradient."""
        self.once(
            f"{layer} sum",
            f"the captured samples of layer '{layer}' do not add up to its gradient (cosine "
            f"{cosine:.2f}): its weight is used outside of it, a hook changes its output, the loss "
            "has a penalty on its weight, or the gradient was changed after the backward; its "
            "curvature is that of the captured part",
        )

    def renewed(self) -> None:
        """Ranks that cannot go on with what each of them loaded."""
        self.once(
            "loaded",
            "the loaded curvature is left aside, since the ranks loaded different ones, or each "
            "has its own: the next step refreshes it",
        )

    def refuse(self, key: str, message: str) -> None:
        if self.strict:
            raise ValueError(f"strict=True: {message}")
        self.once(key, message)

    def once(self, key: str, message: str) -> None:
        """Warn, the first time of this key."""
        if key not in self.given:
            self.given.add(key)
            warn(message)


def not_captured(layer: str) -> RuntimeError:
    """A gradient without a capture: the curvature would be another batch's, or nobody's."""
    return RuntimeError(
        f"layer '{layer}' has a gradient but was not captured on this refresh step. Its forward "
        "must run after the optimizer is built (and before torch.compile traces it), through the "
        "module itself. torch.compile may have taken the graph of an equal layer without hooks: "
        "torch._dynamo.config.skip_nnmodule_hook_guards = False makes it look. If its weight is "
        "used in another way, leave it out with seng.layers.arrange(layer, None)"
    )


def not_observed(layer: str, fisher: str) -> RuntimeError:
    """The same where captures come from the module's output."""
    return RuntimeError(
        f"layer '{layer}' has a gradient but no curvature: fisher={fisher!r} starts from the "
        "output of the module that the optimizer was given, so on a refresh step that module has "
        "to be called as a whole, and not under torch.compile (there, call the module itself on a "
        "batch inside `with opt.curvature_batch():`)"
    )


def listed(reasons: Mapping[str, str]) -> str:
    """Each reason once, with the parameters that it holds for."""
    by_reason: defaultdict[str, list[str]] = defaultdict(list)
    for name, why in reasons.items():
        by_reason[why].append(name)
    lines = []
    for why, names in by_reason.items():
        if len(names) > MOST:
            names[MOST:] = ["…"]
        lines.append(f"{', '.join(names)} ({why})")
    more = len(lines) - MOST
    if more > 0:
        lines[MOST:] = [f"and {more} more reasons, see seng.explain"]
    return "; ".join(lines)


def warn(message: str) -> None:
    """A warning that points to the user's own line, past ours and torch's."""
    level = 0
    for frame, _ in traceback.walk_stack(sys._getframe()):
        level += 1
        package, *_ = frame.f_globals.get("__name__", "").split(".")
        if package not in ("seng", "torch"):
            break
    warnings.warn(f"seng: {message}", stacklevel=level)
