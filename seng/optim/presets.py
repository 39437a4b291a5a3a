"""Settings by name, as keyword arguments: `seng.SENG(model, lr, **seng.presets.paper())`.

What is to differ is told to the preset: `**seng.presets.orthogonal(weight_decay=0.02)`.
"""

from __future__ import annotations

from typing import Any

from seng.linalg.sketch import Sketch
from seng.metrics.curvature import Curvature


def paper(
    damping: float = 1.0,
    refresh_every: int = 200,
    sketch: Sketch | None = None,
) -> dict[str, Any]:
    """The paper's method: λI with an absolute λ, each refresh replaces U, eq. 23 for large layers,
    planned by its threshold.

    Its λ on CIFAR and SVHN lies between 0.5 and 2, T is 200; its lr there is in its own units,
    which `units="paper"` gives. In SGD's units, as here, lr is the paper's lr/λ and weight decay
    the paper's times λ. Its sketch is `seng.sketch.LeverageRows`.
    """
    curvature = Curvature(
        base="identity",
        combine="independent",
        decay=0.0,
        relative_damping=False,
        sketch=sketch,
    )
    return {
        "damping": damping,
        "refresh_every": refresh_every,
        "curvature": curvature,
    }


def orthogonal(
    momentum: float = 0.85,
    weight_decay: float = 0.05,
    curvature: Curvature | None = None,
) -> dict[str, Any]:
    """Muon's step, by default of gradients: about level with Muon in our races, and faster
    (docs/race.md).

    Steps have one length: let a schedule end at 0. Weight decay is decoupled: lr·weight_decay of a
    weight is taken per step.
    """
    curvature = curvature or Curvature(form="plain")
    return {
        "momentum": momentum,
        "nesterov": True,
        "weight_decay": weight_decay,
        "orthogonal": True,
        "curvature": curvature,
    }
