"""A refresh of one layer from a given U, without a network: what tests of the metrics start from."""

from typing import Any

import torch

from seng.distributed.team import ALONE
from seng.linalg.operators import Merged, Operator
from seng.metrics.curvature import Curvature
from seng.metrics.low_rank import LowRank
from seng.metrics.metric import Dims, LayerRefresh, Plan


def planned(U: Operator, form: str, rank: int) -> Plan:
    """A plan of a layer that has this U."""
    dims = Dims("layer", U.shape, U.kappa, U.samples, None, U.dtype.itemsize)
    return Plan(dims, form, rank, "")


def layer_refresh(
    U: Operator,
    plan: Plan,
    *,
    half: bool = False,
    previous: Any = None,
    seed: int = 0,
) -> LayerRefresh:
    return LayerRefresh(
        plan=plan,
        U=U,
        samples=U.samples,
        positions=U.samples * U.kappa,
        counts=[U.samples],
        totals=[U.samples],
        previous=previous,
        damping=1.0,
        precision=U.dtype,
        half=half,
        generator=lambda *_: torch.Generator().manual_seed(seed),
        basis=lambda Y: Merged.of(Y, U.shape),
    )


def low_rank(
    U: Operator, curvature: Curvature, rank: int = 1000, **given: Any
) -> Any:
    """The state of a layer that has this U, in the curvature's form."""
    form = "merged" if curvature.form == "auto" else curvature.form
    layer = layer_refresh(U, planned(U, form, rank), **given)
    (state,) = LowRank(curvature).refresh([layer], ALONE)
    return state
