"""The metric that a user's values describe."""

from __future__ import annotations

from seng.metrics import kronecker
from seng.metrics.curvature import Curvature, Kronecker
from seng.metrics.low_rank import LowRank
from seng.metrics.metric import Metric
from seng.metrics.network import Network


def metric_of(asked: Curvature | Kronecker) -> Metric:
    """Per-sample gradients over a base, or the Kronecker metric alone."""
    if isinstance(asked, Kronecker):
        if asked.damp == "tikhonov":
            return kronecker.Tikhonov(asked.decay)
        return kronecker.Kronecker(asked)
    kind = Network if asked.blocks == "network" else LowRank
    return kind(asked)
