"""SGD's recipe, and the paper's: weight decay, momentum and update of torch's SGD, with directions
for gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.sgd import sgd

from seng.recipes.recipe import Recipe, recipe

Directions = dict[nn.Parameter, Tensor]
OPTIONS = ("weight_decay", "momentum", "lr", "nesterov", "maximize")


@recipe("sgd")
class SGD(Recipe):
    """θ ← θ − lr·m,  m ← μm + d + weight_decay·θ."""

    fuses = True

    def step(
        self,
        state: Any,
        group: Mapping[str, Any],
        params: list[nn.Parameter],
        directions: Directions,
    ) -> None:
        if not params:
            return
        given = [directions[p] for p in params]
        has_momentum = bool(group["momentum"])
        buffers: list[Tensor | None] = [None] * len(params)
        if has_momentum:
            buffers = [state[p].get("momentum_buffer") for p in params]
        options = {name: group[name] for name in OPTIONS}
        sgd([*params], given, buffers, dampening=0.0, **options)
        if has_momentum:
            for p, buffer in zip(params, buffers, strict=True):
                state[p]["momentum_buffer"] = buffer


@recipe("paper")
class Paper(SGD):
    """The same along (M + λI)⁻¹g, as printed: λ(M + λI)⁻¹g over λ."""

    fuses = False
    relative = False
    grafts = False

    def scaled(
        self,
        group: Mapping[str, Any],
        params: list[nn.Parameter],
        directions: Directions,
    ) -> Directions:
        return {p: directions[p] / float(group["damping"]) for p in params}


def momentum_buffer(state: dict[str, Any], p: nn.Parameter) -> Tensor:
    """The momentum of a parameter, laid out in memory as the parameter is."""
    buffer: Tensor | None = state.get("momentum_buffer")
    if buffer is None or buffer.stride() != p.stride():
        if buffer is None:
            buffer = torch.zeros_like(p)
        else:
            buffer = torch.empty_like(p).copy_(buffer)
        state["momentum_buffer"] = buffer
    return buffer
