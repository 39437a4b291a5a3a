"""A whole step of SGD by the GPU's kernels, and the next ones like it without looking around.

Where the kernels of `seng.gpu.grouped` serve every parameter, a step that has the same gradients,
groups and curvature as the last one needs no planning: momenta, weight decay and update happen in
the launches that work out the directions.
"""

from __future__ import annotations

from operator import is_
from typing import Any

from torch import Tensor

from seng.optim.step_plan import Directions, Gradients
from seng.recipes.recipe import momentum_buffers


def readable(groups: list[dict[str, Any]]) -> bool:
    """Whether every learning rate can be read without waiting for a device."""
    rates = [group["lr"] for group in groups]
    return all(
        not isinstance(lr, Tensor) or lr.device.type == "cpu" for lr in rates
    )


class FusedStep:
    """The parameters that the kernels serve, with their momenta and groups."""

    def __init__(
        self,
        plan: Any,
        dampings: Any,
        groups: list[dict[str, Any]],
        state: Any,
    ) -> None:
        self.plan, self.dampings = plan, dampings
        self.groups, self.state = groups, state
        self.params = plan.kernels.params
        group_of = {p: i for i, g in enumerate(groups) for p in g["params"]}
        self.group_of = [group_of[p] for p in self.params]
        self.buffers: list[Tensor | None] = []
        self.checked: Any = None  # where parameters were with these buffers
        position = {p: i for i, p in enumerate(self.params)}
        solved = plan.others.copies
        self.others = [position[p] for p in solved if p in position]

    def first(self, grads: Gradients) -> Directions | None:
        """Step; directions of what the kernels do not serve."""
        out: Directions = self.plan.others.directions(grads)
        if not self.step([out.pop(p) for p in self.params]):
            return None
        return out

    def repeats(self, groups: list[dict[str, Any]]) -> bool:
        """Whether a step like the last is to be taken: then it is taken."""
        grads = [p.grad for p in self.params]
        given = sum(p.grad is not None for g in groups for p in g["params"])
        same = groups is self.groups and readable(groups)
        if not same or given != len(grads) or any(g is None for g in grads):
            return False
        if self.others:
            found = self.plan.others.replayed([grads[i] for i in self.others])
            for i, d in zip(self.others, found, strict=True):
                grads[i] = d
        return self.step(grads)

    def step(self, directions: list[Tensor]) -> bool:
        """Update the parameters in place, if momenta are of their types."""
        kernels = self.plan.kernels
        momenta = [group["momentum"] for group in self.groups]
        now = kernels.located(), momenta
        buffers = [self.state[p].get("momentum_buffer") for p in self.params]
        if now != self.checked or not all(map(is_, buffers, self.buffers)):
            buffers = [
                momentum_buffers(self.state, [p])[0] if momenta[i] else None
                for p, i in zip(self.params, self.group_of, strict=True)
            ]
            pairs = zip(self.params, buffers, strict=True)
            if any(b is not None and b.dtype != p.dtype for p, b in pairs):
                return False
            self.buffers, self.checked = buffers, now
        kernels.update(directions, buffers, self.groups, self.group_of)
        return True


class Fusion:
    """Decides whether a step is fused; on a CPU it never is."""

    last: FusedStep | None = None

    def forget(self) -> None:
        """What is kept from step to step."""
        self.last = None

    def repeat(self, optimizer: Any, dampings: Any) -> bool:
        """Take a step like the last one, by the same solvers with the same gradients."""
        last, engine = self.last, optimizer.engine
        cache = engine.cache
        same = (
            last is not None
            and cache.plan is last.plan
            and last.dampings is dampings
            and optimizer.fuses
            and cache.key is not None
            and not engine.refresh_due
        )
        if last and same and last.repeats(optimizer.param_groups):
            return True
        self.forget()
        return False

    def step(
        self, optimizer: Any, plan: Any, grads: Gradients, dampings: Any
    ) -> Directions | None:
        """Fuse this step; directions of what is left, or None where it cannot be."""
        groups = optimizer.param_groups
        if plan.kernels is None or optimizer.engine.cache.refreshed:
            return None
        if not optimizer.fuses or not readable(groups):
            return None
        fused = FusedStep(plan, dampings, groups, optimizer.state)
        rest = fused.first(grads)
        self.last = fused if rest == {} else None
        return rest
