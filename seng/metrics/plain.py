"""No curvature: directions are gradients, and nothing is captured."""

from __future__ import annotations

from collections.abc import Sequence

from seng.distributed.team import Team
from seng.metrics.metric import LayerRefresh, Metric, State
from seng.metrics.plan import Dims, Plan

NO_CURVATURE = "form='plain': no curvature"


class Plain(Metric):
    """The gradient itself."""

    captures = False

    def plan(
        self,
        dims: Sequence[Dims],
        budget: int | None = None,
        pooled: bool = False,
    ) -> list[Plan]:
        return [Plan(d, "plain", 0, NO_CURVATURE) for d in dims]

    def init(self, layer: LayerRefresh, team: Team) -> State:
        raise AssertionError("nothing is captured")
