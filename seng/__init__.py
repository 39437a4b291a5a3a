"""SENG: sketchy empirical natural gradient descent for PyTorch."""

from seng import layers, presets, schedules, sketch
from seng.attach import Attachment, attach
from seng.curvature import Curvature
from seng.diagnostics import TensorBoard
from seng.explanation import Explanation, explain
from seng.kfac import KFAC
from seng.least_squares import LeastSquares
from seng.optimizer import SENG
from seng.state import expect_curvature
from seng.version import __version__

__all__ = [
    "KFAC",
    "SENG",
    "Attachment",
    "Curvature",
    "Explanation",
    "LeastSquares",
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
