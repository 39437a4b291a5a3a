"""A whole step of SGD by the GPU's kernels, and the next ones like it without looking around.

Where the kernels of `seng.gpu.grouped` serve every parameter, a step that has the same gradients,
groups and curvature as the last one needs no planning: momenta, weight decay and update happen in
the launches that work out the directions.
"""

from __future__ import annotations

from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from seng.gpu.grouped import Hyper
from seng.optim.gpu_plan import GpuPlan
from seng.optim.step_plan import Gradients
from seng.recipes.recipe import momentum_buffer


def readable(groups: list[dict[str, Any]]) -> bool:
    """Whether every learning rate can be read without waiting for a device."""
    rates = [group["lr"] for group in groups]
    return all(
        not isinstance(lr, Tensor) or lr.device.type == "cpu" for lr in rates
    )


class FusedStep:
    """The parameters that the kernels serve, with their momenta and groups."""

    def __init__(
        self, plan: GpuPlan, groups: list[dict[str, Any]], state: Any
    ) -> None:
        self.plan, self.groups = plan, groups
        group_of = {p: i for i, g in enumerate(groups) for p in g["params"]}
        self.group_of = [group_of[p] for p in plan.params]
        self.states = [state[p] for p in plan.params]
        self.entries: list[int] = []  # the optimizer's states, by identity
        self.buffers: list[Tensor | None] = []
        self.at: list[int] | None = (
            None  # where parameters were with these buffers,
        )
        self.momenta: list[float] = []  # and their momenta
        position = {p: i for i, p in enumerate(plan.params)}
        others = plan.others.params
        self.places = [position[p] for p in others if p in position]

    def first(
        self, grads: Gradients, state: Any
    ) -> tuple[dict[nn.Parameter, Tensor], bool]:
        """Step; directions of what the kernels do not serve; whether there is none."""
        others = self.plan.others.directions(grads)
        inside = set(self.plan.params)
        self.step([others[p] for p in self.plan.params])
        self.entries = [*map(id, state.values())]
        rest = {p: others[p] for p in grads if p not in inside}
        return rest, not rest

    def repeats(self, groups: list[dict[str, Any]], state: Any) -> bool:
        """Whether a step like the last is to be taken: then it is taken."""
        grads = [p.grad for p in self.plan.params]
        given = sum(p.grad is not None for g in groups for p in g["params"])
        same = (
            groups is self.groups and readable(groups) and given == len(grads)
        )
        same = same and [*map(id, state.values())] == self.entries
        if not same or any(g is None for g in grads):
            return False
        found: list[Tensor] = list(grads)  # type: ignore[arg-type]
        if self.places:
            directions = self._others([found[i] for i in self.places])
            for i, d in zip(self.places, directions, strict=True):
                found[i] = d
        self.step(found)
        return True

    def _others(self, grads: list[Tensor]) -> list[Tensor]:
        others = self.plan.others
        if others.graph is not None and len(grads) == len(others.params):
            return others.replayed(grads)
        params = [self.plan.params[i] for i in self.places]
        out = others.directions(dict(zip(params, grads, strict=True)))
        return [out[p] for p in params]

    def step(self, directions: list[Tensor]) -> None:
        """Update the parameters in place."""
        kernels = self.plan.kernels
        assert kernels is not None
        names = "momentum", "weight_decay", "nesterov", "maximize"
        hyper = [
            Hyper(float(g["lr"]), *(g[n] for n in names)) for g in self.groups
        ]
        buffers = [state.get("momentum_buffer") for state in self.states]
        at, momenta = kernels.located(), [h.momentum for h in hyper]
        known = at is self.at and momenta == self.momenta
        known = known and all(map(is_, buffers, self.buffers))
        if any(momenta) and not known:
            entries = zip(
                self.states, self.plan.params, self.group_of, strict=True
            )
            buffers = self.buffers = [
                momentum_buffer(state, p) if hyper[i].momentum else None
                for state, p, i in entries
            ]
            self.at, self.momenta = at, momenta
        kernels.update(directions, buffers, hyper, self.group_of, located=True)


class Fusion:
    """Decides whether a step is fused; on a CPU it never is."""

    def __init__(self) -> None:
        self.last: FusedStep | None = None
        self.key: Any = None

    def forget(self) -> None:
        """What is kept from step to step."""
        self.last = self.key = None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def repeat(self, optimizer: Any, dampings: Any) -> bool:
        """Take a step like the last one, by the same solvers with the same gradients."""
        last, engine = self.last, optimizer.engine
        if last is None:
            return False
        cache = engine.cache
        same = (
            cache.plan is last.plan
            and self.key is dampings
            and optimizer.fuses
        )
        same = same and cache.key is not None and not engine.refresh_due
        if same and last.repeats(optimizer.param_groups, optimizer.state):
            return True
        self.forget()
        return False

    def step(
        self, optimizer: Any, plan: Any, grads: Gradients, dampings: Any
    ) -> dict[nn.Parameter, Tensor] | None:
        """Fuse this step; directions of what is left, or None where it cannot be."""
        if (
            getattr(plan, "kernels", None) is None
            or optimizer.engine.cache.refreshed
        ):
            return None
        if not optimizer.fuses or not readable(optimizer.param_groups):
            return None
        fused = FusedStep(plan, optimizer.param_groups, optimizer.state)
        rest, whole = fused.first(grads, optimizer.state)
        self.last, self.key = (fused, dampings) if whole else (None, None)
        return rest
