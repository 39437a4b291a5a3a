"""A metric of one's own, the identity: directions are gradients, and each layer counts its refreshes."""

from dataclasses import dataclass

from torch import Tensor

from seng.distributed.team import Team
from seng.metrics.metric import LayerRefresh, Metric, Solver, State


def itself(g: Tensor) -> Tensor:
    return g


@dataclass(frozen=True)
class Counted(State):
    """How often a layer was refreshed."""

    refreshes: int

    form = "identity"

    def at(self, damping: float) -> Solver:
        return itself


class Identity(Metric):
    """d = g."""

    makes = Counted

    def init(self, layer: LayerRefresh, team: Team) -> Counted:
        before = layer.previous
        return Counted(
            before.refreshes + 1 if isinstance(before, Counted) else 1
        )
