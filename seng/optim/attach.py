"""`attach`: SENG's directions for any torch optimizer, just before each of its steps."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from seng.checks import Periods, check_number
from seng.metrics.curvature import Curvature
from seng.metrics.metric import Metric
from seng.optim.engine import Engine
from seng.optim.preconditioned import Preconditioned
from seng.optim.settings import settings_of
from seng.recipes.recipe import SGD


class Attachment:
    """The handle that `attach` returns."""

    def __init__(
        self, optimizer: Optimizer, engine: Engine, damping: float
    ) -> None:
        self.engine = engine
        self.damping = (
            damping  # may be changed at any time; acts at the next step
        )
        self._optimizer = optimizer
        self._hook = optimizer.register_step_pre_hook(self._before_step)

    def _before_step(
        self,
        optimizer: Optimizer,
        args: Any,
        kwargs: Any,
    ) -> Any:
        # args[0] is the optimizer
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._apply()
            return None

        def preconditioned() -> Any:
            loss = closure()
            self._apply()
            return loss

        kwargs.pop("closure", None)
        return (args[0], preconditioned, *args[2:]), kwargs

    @torch.no_grad()
    def _apply(self) -> None:
        engine = self.engine
        params = _params(self._optimizer)
        if len(params) != len(engine.trained):  # add_param_group
            engine.cover(params)
        # A fused optimizer is called for a step that it then skips.
        found_inf = getattr(self._optimizer, "found_inf", None)
        if found_inf is not None and found_inf.any():
            engine.collector.drop()
            return
        check_number("damping", self.damping, positive=True)
        grads = {p: p.grad for p in params if p.grad is not None}
        if not grads:
            return
        dampings = dict.fromkeys(params, float(self.damping))
        plan = engine.ready(grads, dampings, updates=False, traced=False)
        for p, d in engine.directions(plan, grads, dampings).items():
            if d is not p.grad:
                grads[p].copy_(d)
        engine.advance(dampings)

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError(
            "a handle of seng.attach belongs to its optimizer and module and cannot be "
            "copied: attach again to the copies, and load its state_dict"
        )

    def remove(self) -> None:
        """Leave the optimizer and the module as they were."""
        self._hook.remove()
        self.engine.collector.remove()

    @property
    def last_refresh(self) -> int | None:
        """The step count at the last refresh, or None."""
        return self.engine.clock.last_refresh

    def curvature_batch(self) -> AbstractContextManager[None]:
        """As `SENG.curvature_batch`."""
        return self.engine.curvature_batch()

    def diagnostics(self) -> dict[str, dict[str, Any]]:
        """Per layer, from the last refresh."""
        return self.engine.diagnostics()

    def state_dict(self) -> dict[str, Any]:
        """Damping and curvature; the optimizer saves its own state."""
        state = self.engine.state()
        layers = {site.name: state[site.lead] for site in self.engine.sites}
        return {"damping": self.damping, "layers": layers}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from `state_dict()`."""
        self.damping = state_dict["damping"]
        layers = state_dict["layers"]
        sites = self.engine.sites
        self.engine.load_state(
            {site.lead: layers.get(site.name, {}) for site in sites}
        )


def attach(
    optimizer: Optimizer,
    module: nn.Module,
    *,
    damping: float = SGD.damping,
    refresh_every: Periods | None = None,
    curvature: Curvature | Metric | None = None,
    strategy: str | None = None,
    strict: bool = False,
) -> Attachment:
    """Precondition the gradients of any torch optimizer, in place, before its steps."""
    if isinstance(optimizer, Preconditioned):
        name = type(optimizer).__name__
        raise TypeError(
            f"{name} preconditions its own gradients: attach is for other optimizers"
        )
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            "attach takes a torch optimizer first and the module second, not "
            f"{type(optimizer).__name__}"
        )
    check_number("damping", damping, positive=True)
    settings = settings_of(
        curvature,
        module,
        refresh_every=refresh_every,
        strategy=strategy,
        strict=strict,
    )
    engine = Engine(module, _params(optimizer), settings)
    return Attachment(optimizer, engine, damping)


def _params(optimizer: Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]
