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

Batch = tuple[Any, ...]
Values = dict[str, Tensor]
Residual = Callable[..., Tensor]


class Parameters:
    """The tensors that are fitted. θ (n,) is all of them, flattened, one after the other."""

    def __init__(self, model: nn.Module | Mapping[str, Tensor]) -> None:
        self.module = model if isinstance(model, nn.Module) else None
        if self.module is not None:
            named = self.module.named_parameters()
            self.tensors: Values = {
                name: p for name, p in named if p.requires_grad
            }
        elif isinstance(model, Mapping):
            self.tensors = dict(model)
        else:
            raise TypeError(
                f"model is an nn.Module or a dictionary of tensors, not {type(model).__name__}"
            )
        for name, p in self.tensors.items():
            _check_tensor(name, p)
        self.n = sum(p.numel() for p in self.tensors.values())
        self.all = slice(0, self.n)
        if not self.n:
            raise ValueError(
                "there is nothing to fit: the model has no trainable parameters"
            )
        if len({p.device for p in self.tensors.values()}) > 1:
            raise ValueError(
                "the parameters lie on several devices: move them to one"
            )

    @property
    def device(self) -> torch.device:
        return next(iter(self.tensors.values())).device

    @property
    def dtype(self) -> torch.dtype:
        """The precision of J and of the solve: float64 for any model, where the device has it."""
        return widest(next(iter(self.tensors.values())))

    def theta(self) -> Tensor:
        """θ (n,) as it is now."""
        rows = [p.detach().flatten() for p in self.tensors.values()]
        return torch.cat(rows).to(self.dtype)

    def places(self, entries: slice) -> dict[str, slice]:
        """Where these entries of θ stand: in which tensors, and which of each tensor's own."""
        places = {}
        start = 0
        for name, p in self.tensors.items():
            first = max(entries.start - start, 0)
            last = min(entries.stop - start, p.numel())
            if first < last:
                places[name] = slice(first, last)
            start += p.numel()
        return places

    def values(self, entries: slice, given: Tensor) -> Values:
        """All parameters: these entries of θ as given, the others as they are now."""
        values = {name: p.detach() for name, p in self.tensors.items()}
        places = self.places(entries)
        parts = given.split(
            [place.stop - place.start for place in places.values()]
        )
        for (name, place), part in zip(places.items(), parts, strict=True):
            p = values[name]
            if len(part) < p.numel():
                row = p.flatten().to(given)
                part = row.slice_scatter(part, 0, place.start, place.stop)
            values[name] = part.view_as(p).to(p)
        return values

    def minus(self, d: Tensor | float) -> Values:
        """θ − d for d (n,), rounded once to the precision of each parameter."""
        return self.values(self.all, self.theta() - d)

    @torch.no_grad()
    def subtract(self, d: Tensor) -> None:
        """Write θ − d into the model."""
        for name, value in self.minus(d).items():
            self.tensors[name].copy_(value)


def _check_tensor(name: str, p: object) -> None:
    if not isinstance(p, Tensor) or not p.is_floating_point():
        kind = p.dtype if isinstance(p, Tensor) else type(p).__name__
        raise TypeError(
            f"parameter '{name}' is {kind}: what is fitted are tensors of real floating-point numbers"
        )


class _Bound(nn.Module):
    """The residual as a module around the model, whose parameters `functional_call` can replace.

    The residual function then sees the user's own model, and may read its attributes.
    """

    def __init__(self, model: nn.Module, function: Residual) -> None:
        super().__init__()
        self.model = model
        self.function = function

    def forward(self, *batch: Any) -> Tensor:
        return self.function(self.model, *batch)


@dataclass(frozen=True)
class Layout:
    """Where the residuals s (B, k) of single samples stand in their batch's: r[places] = factor·s.

    The factor is not 1 where residuals are divided by the number of samples, or by its root.
    """

    places: Tensor  # (B, k)
    factor: float
    bytes: int  # that the gradient of one sample allocates


@dataclass
class Term:
    """One residual function, and what was found out about it."""

    name: str
    function: Residual
    parameters: Parameters
    separate: bool | None  # whether samples separate; None: not known yet
    layouts: dict[object, Layout] = field(
        default_factory=dict
    )  # where they do
    batched: bool = (
        True  # whether vmap has been able to differentiate it so far
    )

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise TypeError(
                f"{self.name} is a function (model, *batch) -> vector, not {self.function!r}"
            )
        module = self.parameters.module
        self.bound = None if module is None else _Bound(module, self.function)

    @property
    def modes(self) -> tuple[bool, ...]:
        """Which modules are in training mode: a BatchNorm then mixes samples."""
        modules = [] if self.bound is None else self.bound.modules()
        return tuple(module.training for module in modules)

    def call(self, values: Values, batch: Batch) -> Tensor:
        """What the function returns at these values of the parameters."""
        if self.bound is None:
            return self.function(dict(values), *batch)
        swapped = {f"model.{name}": value for name, value in values.items()}
        r: Tensor = functional_call(self.bound, swapped, batch)
        return r

    def __call__(self, values: Values, batch: Batch) -> Tensor:
        """r (m,), or an error that says why the function's result is no vector of residuals."""
        r: object = self.call(values, batch)
        if not isinstance(r, Tensor):
            raise TypeError(
                f"{self.name} returned {type(r).__name__}: it must return a tensor, the vector of residuals"
            )
        if r.dim() != 1:
            hint = "use .flatten()"
            if r.dim() == 0:
                hint = "return the residuals themselves, not the sum of their squares"
            raise ValueError(
                f"{self.name} returned a tensor of shape {tuple(r.shape)}: it must return a vector (m,); {hint}"
            )
        if not r.is_floating_point():
            raise TypeError(
                f"{self.name} returned {r.dtype}: residuals are real floating-point numbers"
            )
        if not r.numel():
            raise ValueError(
                f"{self.name} returned no residuals: is its batch empty?"
            )
        return r


def has_samples(x: object) -> bool:
    """Whether dimension 0 counts samples. Numbers and 0-d tensors are the same for all samples."""
    return isinstance(x, Tensor) and x.dim() > 0
