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
from dataclasses import replace
from typing import Any

from torch import Tensor

from seng.gpu.recorder import Run, directly
from seng.metrics.low_rank import Draft, LowRank
from seng.metrics.metric import State


class Network(LowRank):
    """UUᵀ of all layers together."""

    together = True

    def leading(
        self, drafts: Sequence[Draft], widths: Sequence[int], run: Run
    ) -> list[Sequence[Tensor]]:
        """Those of the whole, the same for all layers."""
        one = super().leading(_tied(drafts)[:1], widths[:1], run)
        return one * len(drafts)

    def averaging(self, drafts: Sequence[Draft]) -> list[int]:
        """All, or none where a layer has no last basis, or one of another width."""
        places = super().averaging(drafts)
        alike = len({drafts[i].last.columns for i in places}) == 1
        return places if alike and len(places) == len(drafts) else []

    def states(self, drafts: Sequence[Draft]) -> list[State]:
        """A state per layer, all of them with the Gram of the whole."""
        tied = [replace(d, error=None) for d in _tied(drafts)]
        return super().states(tied)

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
        first = states[0].at(given[0])
        return [s.solver(first.lam, first.inverse) for s in states]


def _tied(drafts: Sequence[Draft]) -> list[Draft]:
    """The sum of the layers' Grams becomes everybody's."""
    K = sum(d.gram for d in drafts)
    return [replace(d, gram=K) for d in drafts]
