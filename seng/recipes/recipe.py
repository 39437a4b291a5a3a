"""A recipe takes directions to new weights; whose learning rate and weight decay a user brings.

A recipe of your own is a class with `step`, known by the name that `units` asks for:

    @recipe("sign")
    class Sign(Recipe):
        def step(self, state, group, params, directions):
            for p in params:
                p.sub_(directions[p].sign(), alpha=group["lr"])

    seng.SENG(model, 0.01, units="sign")
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from seng.layers.sites import Site

RECIPES: dict[str, type[Recipe]] = {}


class Recipe(ABC):
    """One step of a param group."""

    fuses = False  # whether the GPU's fused step of SGD does the same
    relative = True  # whether the damping may be relative to each layer
    grafts = True  # whether directions may be scaled to the gradient's length

    def __init__(self, sites: Sequence[Site]) -> None:
        self.sites = sites

    def scaled(
        self,
        group: Mapping[str, Any],
        params: list[nn.Parameter],
        directions: dict[nn.Parameter, Tensor],
    ) -> dict[nn.Parameter, Tensor]:
        """Directions in the recipe's own units."""
        return directions

    @abstractmethod
    def step(
        self,
        state: Any,
        group: Mapping[str, Any],
        params: list[nn.Parameter],
        directions: dict[nn.Parameter, Tensor],
    ) -> None:
        """Update these parameters of the group in place."""


def recipe(name: str) -> Callable[[type[Recipe]], type[Recipe]]:
    """Register a recipe by its name."""

    def register(kind: type[Recipe]) -> type[Recipe]:
        RECIPES[name] = kind
        return kind

    return register
