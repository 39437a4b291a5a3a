"""The metric that a user's values describe."""

from __future__ import annotations

from dataclasses import replace

from seng.metrics import kronecker
from seng.metrics.curvature import Curvature, Kronecker
from seng.metrics.low_rank import LowRank
from seng.metrics.metric import Metric
from seng.metrics.network import Network


def metric_of(
    asked: Curvature | Kronecker, power: float | None = None
) -> Metric:
    """Per-sample gradients over a base, or the Kronecker metric alone; `power`: of one without."""
    if isinstance(asked, Kronecker):
        if asked.damp == "tikhonov":
            return kronecker.Tikhonov(asked.decay)
        return kronecker.Kronecker(asked.or_power(power))
    kind = Network if asked.blocks == "network" else LowRank
    if asked.base is not None:
        asked = replace(asked, base=asked.base.or_power(power))
    return kind(asked)
