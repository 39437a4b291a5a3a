"""The parameters θ that are fitted, and residual functions r(θ) that can be called at any θ.

`Parameters` holds a module's trainable tensors, or a dictionary's. A `Term` is one residual
function. It is called through `torch.func.functional_call`, so that no trial changes the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from seng.linalg.numerics import widest

Residual = Callable[..., Tensor]


class Parameters(nn.Module):
    """The tensors that are fitted. θ (n,) is all of them, flattened, one after the other.

    This is a module around the user's, in which `functional_call` can replace parameters while a
    residual function sees the user's own model, and may read its attributes.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        if isinstance(model, nn.Module):
            named = self.named_parameters()
            self.tensors = {name: p for name, p in named if p.requires_grad}
        elif isinstance(model, Mapping):
            self.tensors = dict(model)
        else:
            raise TypeError(
                f"model is an nn.Module or a dictionary of tensors, not {type(model).__name__}"
            )
        for name, p in self.tensors.items():
            if not isinstance(p, Tensor) or not p.is_floating_point():
                kind = getattr(p, "dtype", type(p).__name__)
                raise TypeError(
                    f"parameter '{name}' is {kind}: what is fitted are tensors of real "
                    "floating-point numbers"
                )
        tensors = self.tensors.values()
        self.sizes = [p.numel() for p in tensors]
        if not any(self.sizes):
            raise ValueError(
                "there is nothing to fit: the model has no trainable parameters"
            )
        if len({p.device for p in tensors}) > 1:
            raise ValueError(
                "the parameters lie on several devices: move them to one"
            )

    def theta(self) -> Tensor:
        """θ (n,) as it is now, in the precision of J and of the solve: float64, if there is any."""
        rows = [p.detach().flatten() for p in self.tensors.values()]
        theta = torch.cat(rows)
        return theta.to(widest(theta))

    def values(self, theta: Tensor) -> dict[str, Tensor]:
        """θ tensor by tensor, rounded once to the precision of each parameter."""
        parts = theta.split(self.sizes)
        named = zip(self.tensors.items(), parts, strict=True)
        return {name: part.view_as(p).to(p) for (name, p), part in named}

    @torch.no_grad()
    def subtract(self, d: Tensor) -> None:
        """Write θ − d into the model."""
        for name, value in self.values(self.theta() - d).items():
            self.tensors[name].copy_(value)

    def call(self, function: Residual, theta: Tensor, batch: Any) -> Any:
        """What the function returns at this θ."""
        values = self.values(theta)
        if isinstance(self.model, nn.Module):
            return functional_call(self, values, (function, *batch))
        return function(values, *batch)

    def forward(self, function: Residual, *batch: Any) -> Any:
        return function(self.model, *batch)


@dataclass(frozen=True)
class Layout:
    """Where the residuals s (B, k) of single samples stand in their batch's: r[places] = factor·s.

    The factor is not 1 where residuals are divided by the number of samples, or by its root.
    """

    places: Tensor  # (B, k)
    factor: float
    bytes: int  # that the Jacobian of one sample allocates


@dataclass
class Term:
    """One residual function, and what was found out about it."""

    name: str
    function: Residual
    parameters: Parameters
    separate: bool | None  # whether samples separate; None: not known yet
    # Where they do, and whether vmap has been able to differentiate the function so far.
    layouts: dict[object, Layout] = field(default_factory=dict)
    batched: bool = True

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise TypeError(
                f"{self.name} is a function (model, *batch) -> vector, not {self.function!r}"
            )

    def __call__(self, theta: Tensor, batch: Any) -> Tensor:
        """r (m,), or an error that says why the function's result is no vector of residuals."""
        r = self.parameters.call(self.function, theta, batch)
        if not isinstance(r, Tensor):
            raise TypeError(
                f"{self.name} returned {type(r).__name__}: it must return a tensor, the vector of "
                "residuals"
            )
        if r.dim() != 1:
            hint = (
                "return the residuals themselves, not the sum of their squares"
            )
            if r.dim():
                hint = "use .flatten()"
            raise ValueError(
                f"{self.name} returned a tensor of shape {tuple(r.shape)}: it must return a vector "
                f"(m,); {hint}"
            )
        if not r.is_floating_point():
            raise TypeError(
                f"{self.name} returned {r.dtype}: residuals are real floating-point numbers"
            )
        if not len(r):
            raise ValueError(
                f"{self.name} returned no residuals: is its batch empty?"
            )
        return r
