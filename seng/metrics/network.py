"""One block for the whole network: M = UUᵀ with U = [U_1; …; U_L], the layers' rows below each
other.

Grams and products add up over layers, UᵀU = Σ_l U_lᵀU_l and Uᵀg = Σ_l U_lᵀg_l, so that the exact
direction, with all that is between layers, costs no more arithmetic than layer by layer:

    d_l = (g_l − U_l b)/λ,   b = (λI + Σ_l U_lᵀU_l)⁻¹ Σ_l U_lᵀg_l

Every layer keeps its own U_l in its own form, and the Gram of all. A merged basis is UV_k with one
V_k for all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from seng.distributed.team import Team
from seng.gpu.recorder import Run, directly
from seng.linalg.numerics import spectrum, start, top
from seng.linalg.operators import Merged
from seng.linalg.sketch import IDENTITY
from seng.metrics.low_rank import LowRank
from seng.metrics.metric import LayerRefresh, State
from seng.metrics.woodbury import LowRankState, factorized


class Network(LowRank):
    """UUᵀ of all layers together."""

    together = True

    def refresh(
        self, layers: Sequence[LayerRefresh], team: Team, run: Run = directly
    ) -> list[State]:
        """A state per layer, all of them with the Gram of the whole."""
        drafts = self.drafts(layers, team, run)
        if not drafts:
            return []
        _tie(drafts)
        K = drafts[0].gram
        if layers[0].plan.form == "merged" and bool(K.isfinite().all()):
            self._merge_all(drafts)
        K = drafts[0].gram
        largest = top(K[None])[0].to(K.dtype)
        relative = self.curvature.relative_damping
        return [
            LowRankState(d.U, d.omega, d.gram, largest, relative)
            for d in drafts
        ]

    def _merge_all(self, drafts: Sequence[Any]) -> None:
        """U_l becomes U_lV_k; with the old ones [√δ·U_old, √(1−δ)·U_new]W_k."""
        k, decay = drafts[0].layer.plan.rank, self.curvature.averaging
        every = k >= len(drafts[0].gram)
        _reduce(
            drafts, [d.U.explicit().U.T for d in drafts] if every else None, k
        )
        olds = [d.layer.previous for d in drafts]
        widths = {
            0 if s is None or s.form != "merged" else s.columns for s in olds
        }
        if not decay or len(widths) != 1 or 0 in widths:
            return
        stacks = []
        for d, old in zip(drafts, olds, strict=True):
            before = decay**0.5 * old.U.explicit().U.T.to(d.gram.dtype)
            now = (1 - decay) ** 0.5 * d.U.explicit().U.T
            stacks.append(torch.cat([before, now]))
            d.gram = stacks[-1] @ stacks[-1].T
        _tie(drafts)
        _reduce(drafts, stacks, k)

    def solvers(
        self,
        states: Sequence[Any],
        dampings: Sequence[float],
        run: Run = directly,
    ) -> list[Any]:
        """(λI + K)⁻¹ once for all layers."""
        given = sorted(set(dampings))
        if len(given) > 1:
            raise ValueError(
                "blocks='network' is one block, but its parameters have the dampings "
                f"{given}: give one"
            )
        first, relative = states[0], self.curvature.relative_damping
        (core,) = factorized([first.gram], [first.top], given, relative)
        return [s.solver(*core) for s in states]


def _tie(drafts: Sequence[Any]) -> None:
    """The sum of the layers' Grams becomes everybody's."""
    first = drafts[0].gram
    K = torch.stack([d.gram.to(first) for d in drafts]).sum(0)
    for d in drafts:
        d.gram = K


def _reduce(drafts: Sequence[Any], rows: list[Tensor] | None, k: int) -> None:
    """U_lV_k along the k leading directions; `rows` has U_lᵀ where it is at hand."""
    K = drafts[0].gram
    V = None
    if k < len(K):
        begin = start(K[None], k, drafts[0].layer.generator())
        V = spectrum(K[None], k, begin)[1][0].to(K.dtype)
    for i, d in enumerate(drafts):
        if rows is None:
            Y = d.U.combine(V)
        else:
            Y = rows[i] if V is None else V.T @ rows[i]
        d.U, d.omega = (
            Merged.of(Y.to(K.dtype).contiguous(), d.U.shape),
            IDENTITY,
        )
        d.gram = d.U.gram()
    _tie(drafts)
