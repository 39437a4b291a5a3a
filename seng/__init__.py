"""SENG: sketchy empirical natural gradient descent for PyTorch."""

import sys

from seng import layers
from seng.linalg import sketch
from seng.metrics.curvature import Curvature, Kronecker
from seng.optim import presets, schedules
from seng.optim.attach import Attachment, attach
from seng.optim.kfac import KFAC
from seng.optim.muon import Muon
from seng.optim.optimizer import SENG
from seng.residuals.least_squares import LeastSquares
from seng.tell.diagnostics import TensorBoard
from seng.tell.explanation import Explanation, explain
from seng.tell.state import expect_curvature
from seng.version import __version__

for _public in (
    presets,
    schedules,
    sketch,
):  # `from seng.schedules import …` works as `seng.schedules` does
    sys.modules[f"seng.{_public.__name__.split('.')[-1]}"] = _public

__all__ = [
    "KFAC",
    "SENG",
    "Attachment",
    "Curvature",
    "Explanation",
    "Kronecker",
    "LeastSquares",
    "Muon",
    "TensorBoard",
    "__version__",
    "attach",
    "expect_curvature",
    "explain",
    "layers",
    "presets",
    "schedules",
    "sketch",
]
