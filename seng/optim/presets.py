"""Settings by name, as keyword arguments: `seng.SENG(model, lr, **seng.presets.paper())`."""

from __future__ import annotations

from typing import Any

from seng.linalg.sketch import Sketch
from seng.metrics.curvature import Curvature


def paper(
    damping: float = 1.0,
    refresh_every: int = 200,
    sketch: Sketch | None = None,
) -> dict[str, Any]:
    """The paper's method: over λI with an absolute λ, uncentred, each refresh replaces U, eq. 23
    for large layers, planned by its threshold, and its own units (M + λI)⁻¹g.

    Its λ on CIFAR and SVHN lies between 0.5 and 2, T is 200. Its sketch is
    `seng.sketch.LeverageRows`.
    """
    curvature = Curvature(
        base=None,
        samples=None,
        centred=False,
        combine="independent",
        decay=0.0,
        relative_damping=False,
        sketch=sketch,
    )
    return {
        "recipe": "paper",
        "damping": damping,
        "refresh_every": refresh_every,
        "curvature": curvature,
    }
