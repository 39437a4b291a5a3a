"""Which metric a user gets: the default curvature, and the metric that a curvature describes."""

from __future__ import annotations

from torch import nn

from seng.distributed.team import team_of
from seng.layers.sites import is_sharded
from seng.metrics.curvature import BASE_RANK, Curvature
from seng.metrics.kronecker import Kronecker, Plain
from seng.metrics.low_rank import LowRank
from seng.metrics.metric import Metric
from seng.metrics.network import Network


def usual(
    module: nn.Module | None,
    strategy: str | None = None,
    orthogonal: bool = False,
) -> Curvature:
    """The default: the Kronecker metric alone (docs/race.md, docs/tuning.md).

    Low rank over λI for the polar step, and where there are no whole layers, or no one curvature
    for all ranks, to make a Kronecker metric from.
    """
    spread = module is not None and any(map(is_sharded, module.parameters()))
    if orthogonal or spread or team_of(strategy, module).averages:
        return Curvature()
    return Curvature(base="kronecker", rank=0, base_rank=BASE_RANK)


def metric_of(curvature: Curvature) -> Metric:
    """The metric that a curvature describes."""
    c = curvature
    if c.form == "plain":
        return Plain()
    if c.blocks == "network":
        return Network(c)
    if c.rank == 0:
        return Kronecker(c)
    return LowRank(c)
