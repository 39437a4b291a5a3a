"""`attach`: SENG's preconditioning for any torch optimizer, just before each of its steps."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from seng.checks import check_number, check_options
from seng.distributed.ranks import usual
from seng.metrics.curvature import Curvature, Units
from seng.optim.optimizer import SENG
from seng.optim.preconditioner import DAMPING, REFRESH_EVERY, Preconditioner
from seng.tell.state import nested


class Attachment:
    """The handle that `attach` returns."""

    def __init__(
        self, optimizer: Optimizer, preconditioner: Preconditioner, damping: float
    ) -> None:
        self.preconditioner = preconditioner
        self.damping = damping  # may be changed at any time; acts at the next step
        self._optimizer = optimizer
        self._hook = optimizer.register_step_pre_hook(self._before_step)

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        closure = (
            args[1] if len(args) > 1 else kwargs.get("closure")
        )  # args[0] is the optimizer
        if closure is None:
            self._apply()
            return None

        def preconditioned() -> Any:
            loss = closure()
            self._apply()
            return loss

        return (args[0], preconditioned, *args[2:]), {
            k: v for k, v in kwargs.items() if k != "closure"
        }

    @torch.no_grad()
    def _apply(self) -> None:
        params = _params(self._optimizer)
        if len(params) != len(self.preconditioner.trained):  # add_param_group
            self.preconditioner.cover(params)
        found_inf = getattr(
            self._optimizer, "found_inf", None
        )  # a fused optimizer is called for a step that it then skips
        if found_inf is not None and found_inf.any():
            self.preconditioner.drop()
            return
        grads = {p: p.grad for p in params if p.grad is not None}
        check_number("damping", self.damping, positive=True)
        if not grads:
            return
        damping = dict.fromkeys(params, float(self.damping))
        ready = self.preconditioner.ready(grads, damping)
        for p, d in self.preconditioner.directions(grads, damping, ready).items():
            if d is not p.grad:
                grads[p].copy_(d)
        self.preconditioner.advance()

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError(
            "a handle of seng.attach belongs to its optimizer and module and cannot be copied: attach again to the copies, and "
            "load its state_dict"
        )

    def remove(self) -> None:
        """Leave the optimizer and the module as they were."""
        self._hook.remove()
        self.preconditioner.capture.remove()

    @property
    def last_refresh(self) -> int | None:
        """The step count at the last refresh, or None."""
        return self.preconditioner.last_refresh

    def curvature_batch(self) -> AbstractContextManager[None]:
        """As `SENG.curvature_batch`."""
        return self.preconditioner.curvature_batch()

    def diagnostics(self) -> dict[str, dict[str, Any]]:
        """Per layer, from the last refresh."""
        return self.preconditioner.diagnostics()

    def state_dict(self) -> dict[str, Any]:
        """Damping and curvature; the optimizer's own state is saved through the optimizer."""
        sites, state = self.preconditioner.sites, self.preconditioner.state()
        return {
            "damping": self.damping,
            "layers": {site.name: state[site.lead] for site in sites},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from `state_dict()`."""
        self.damping = state_dict["damping"]
        layers = {name: nested(entry) for name, entry in state_dict["layers"].items()}
        layers = {name: entry.get("seng", entry) for name, entry in layers.items()}
        self.preconditioner.load_state(
            {
                s.lead: layers[s.name]
                for s in self.preconditioner.sites
                if s.name in layers
            }
        )


def attach(
    optimizer: Optimizer,
    module: nn.Module,
    *,
    damping: float = DAMPING,
    refresh_every: int = REFRESH_EVERY,
    curvature: Curvature | None = None,
    units: Units = "sgd",
    strategy: str | None = None,
    strict: bool = False,
) -> Attachment:
    """Precondition the gradients of any torch optimizer, in place, just before each of its steps."""
    if isinstance(optimizer, SENG):
        raise TypeError(
            "SENG preconditions its own gradients: attach is for other optimizers"
        )
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"attach takes a torch optimizer first and the module second, not {type(optimizer).__name__}"
        )
    curvature = usual(module, strategy) if curvature is None else curvature
    check_options(curvature, refresh_every, units)
    if curvature.none:
        raise ValueError(
            "attach: Curvature(form='plain') keeps no curvature, so there would be nothing to attach"
        )
    check_number("damping", damping, positive=True)
    preconditioner = Preconditioner(
        module,
        _params(optimizer),
        curvature=curvature,
        refresh_every=refresh_every,
        units=units,
        strict=strict,
        strategy=strategy,
    )
    return Attachment(optimizer, preconditioner, damping)


def _params(optimizer: Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]
