"""SENG: sketchy empirical natural gradient descent for PyTorch."""

from seng import layers, schedules, sketch
from seng.curvature import Curvature
from seng.optimizer import SENG, Attachment, attach
from seng.plan import Explanation, explain

__version__ = "0.1.0"
__all__ = ["SENG", "Attachment", "Curvature", "Explanation", "attach", "explain", "layers", "schedules", "sketch"]
