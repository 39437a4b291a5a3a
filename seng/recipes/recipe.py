"""A recipe takes directions to new weights: whose learning rate and weight decay a user brings.

A recipe of your own is a class with `step`, known by its name; `options` are the keys of its param
groups beside lr, weight_decay, damping and maximize:

    @recipe("sign")
    class Sign(Recipe):
        def step(self, state, group, params, directions):
            for p in params:
                p.sub_(directions[p].sign(), alpha=group["lr"])

    seng.SENG(model, 0.01, recipe="sign")

SGD's recipe, and the paper's: weight decay, momentum and update of torch's SGD, with directions
for gradients.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim.sgd import sgd

from seng.checks import Periods
from seng.layers.sites import Site

Group = Mapping[str, Any]
Params = list[nn.Parameter]
Directions = dict[nn.Parameter, Tensor]
Layers = Sequence[tuple[Site, Params]]  # that have curvature in this step
Solve = Callable[[Directions], Directions]
RECIPES: dict[str, type[Recipe]] = {}


class Recipe(ABC):
    """One step of a param group."""

    name: ClassVar[str]  # as users ask for it
    # Where none are given: why these, docs/tuning.md.
    lr: ClassVar[float] = 0.1
    damping: ClassVar[float] = 0.01  # of each layer's largest eigenvalue
    refresh_every: ClassVar[Periods] = {0: 2, 50: 5, 300: 20}
    power: ClassVar[float | None] = None  # as seng.Kronecker has it
    options: ClassVar[dict[str, Any]] = {}
    others: ClassVar[str] = "the plain gradient"  # of all other parameters
    fuses = False  # whether the GPU's fused step of SGD does the same
    whole = False  # whether it works on whole matrices of this step
    prompt = False  # whether it works on gradients of this step
    paper = (
        False  # whether directions are the paper's own, over an absolute λI
    )

    def __init__(
        self, sites: Sequence[Site], module: nn.Module | None = None
    ) -> None:
        self.sites = sites

    @classmethod
    def refuses(cls, site: Site, module: nn.Module) -> str | None:
        """Why it has no use for a layer's direction, in words; None where it has."""
        return None

    @staticmethod
    def check(group: Group) -> None:
        """Refuse options of its own outside their range."""

    def directions(
        self,
        state: Any,
        groups: Sequence[Group],
        grads: Directions,
        layers: Layers,
        solve: Solve,
    ) -> Directions:
        """What `solve` makes of the gradients."""
        return solve(grads)

    @abstractmethod
    def step(
        self,
        state: Any,
        group: Group,
        params: Params,
        directions: Directions,
    ) -> None:
        """Update these parameters of the group in place."""


def recipe(name: str) -> Callable[[type[Recipe]], type[Recipe]]:
    """Register a recipe by its name."""

    def register(kind: type[Recipe]) -> type[Recipe]:
        kind.name = name
        RECIPES[name] = kind
        return kind

    return register


def recipe_of(name: object) -> type[Recipe]:
    """The recipe of a name."""
    if not isinstance(name, str) or name not in RECIPES:
        known = ", ".join(map(repr, RECIPES))
        raise ValueError(f"unknown recipe {name!r}; use one of {known}")
    return RECIPES[name]


OPTIONS = ("weight_decay", "momentum", "lr", "nesterov", "maximize")


@recipe("sgd")
class SGD(Recipe):
    """θ ← θ − lr·m,  m ← μm + d + weight_decay·θ."""

    options: ClassVar[dict[str, Any]] = {"momentum": 0.9, "nesterov": False}
    fuses = True

    @staticmethod
    def check(group: Group) -> None:
        if group["nesterov"] and group["momentum"] <= 0:
            raise ValueError("nesterov needs a momentum above 0")

    def step(
        self,
        state: Any,
        group: Group,
        params: Params,
        directions: Directions,
    ) -> None:
        options = {name: group[name] for name in OPTIONS}
        # Without momentum torch asks for no buffers.
        moving = params if group["momentum"] else []
        buffers = momentum_buffers(state, moving)
        given = [directions[p] for p in params]
        sgd([*params], given, buffers, dampening=0.0, **options)


@recipe("paper")
class Paper(SGD):
    """The same along (M + λI)⁻¹g, as printed: λ(M + λI)⁻¹g over λ."""

    lr = 0.05
    fuses = False
    paper = True

    def step(
        self,
        state: Any,
        group: Group,
        params: Params,
        directions: Directions,
    ) -> None:
        lam = float(group["damping"])
        printed = {p: directions[p] / lam for p in params}
        super().step(state, group, params, printed)


def momentum_buffers(state: Any, params: Params) -> list[Any]:
    """Momenta, laid out in memory as the parameters are."""
    buffers = []
    for p in params:
        buffer = state[p].get("momentum_buffer")
        if buffer is None:
            buffer = torch.zeros_like(p)
        elif buffer.stride() != p.stride():
            buffer = torch.empty_like(p).copy_(buffer)
        state[p]["momentum_buffer"] = buffer
        buffers.append(buffer)
    return buffers
