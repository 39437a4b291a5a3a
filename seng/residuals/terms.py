"""Residuals r(θ) as functions of their parameters: what is fitted, how a user's function is called with other values of it.

`Parameters` is θ, a module's trainable tensors or a dictionary's; `Term` is one residual function, called through
`torch.func.functional_call`, so that no trial ever touches the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
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
    """What is fitted; θ (n,) is all of it in a row."""

    def __init__(self, model: nn.Module | Mapping[str, Tensor]) -> None:
        self.module = model if isinstance(model, nn.Module) else None
        if isinstance(model, nn.Module):
            self.tensors: Values = {
                name: p for name, p in model.named_parameters() if p.requires_grad
            }
        elif isinstance(model, Mapping):
            self.tensors = dict(model)
        else:
            raise TypeError(
                f"model is an nn.Module or a dictionary of tensors, not {type(model).__name__}"
            )
        for name, p in self.tensors.items():
            if not isinstance(p, Tensor) or not p.is_floating_point():
                kind = p.dtype if isinstance(p, Tensor) else type(p).__name__
                raise TypeError(
                    f"parameter '{name}' is {kind}: what is fitted are tensors of real floating-point numbers"
                )
        if not self.n:
            raise ValueError(
                "there is nothing to fit: the model has no trainable parameters"
            )
        if len({p.device for p in self.tensors.values()}) > 1:
            raise ValueError("the parameters lie on several devices: move them to one")

    @property
    def sizes(self) -> list[int]:
        return [p.numel() for p in self.tensors.values()]

    @property
    def n(self) -> int:
        return sum(self.sizes)

    @property
    def device(self) -> torch.device:
        return next(iter(self.tensors.values())).device

    @property
    def dtype(self) -> torch.dtype:
        """Of J and of the solve: float64, whatever the model has, where the device has it."""
        return widest(next(iter(self.tensors.values())))

    def values(self) -> Values:
        """θ as it is, apart from any graph."""
        return {name: p.detach() for name, p in self.tensors.items()}

    def moved(self, d: Tensor) -> Values:
        """θ − d, rounded once."""
        parts = self.split(d)
        return {
            name: (p.detach().to(d.dtype) - parts[name]).to(p.dtype)
            for name, p in self.tensors.items()
        }

    def split(self, z: Tensor) -> Values:
        """z (n,) as one tensor for each parameter."""
        return {
            name: part.view_as(p)
            for (name, p), part in zip(
                self.tensors.items(), z.split(self.sizes), strict=True
            )
        }

    @torch.no_grad()
    def set(self, values: Values) -> None:
        for name, p in self.tensors.items():
            p.copy_(values[name])

    def row(self, parts: Iterable[Tensor | None]) -> Tensor:
        """The way back, one tensor for each parameter or None, which is zero."""
        pairs = zip(self.tensors.values(), parts, strict=True)
        return torch.cat(
            [
                (torch.zeros_like(p) if part is None else part)
                .detach()
                .flatten()
                .to(self.dtype)
                for p, part in pairs
            ]
        )

    def within(self, columns: slice) -> list[tuple[str, slice, slice]]:
        """The tensors that columns of J belong to: name, entries of the tensor, columns counted from the first of them."""
        found, start = [], 0
        for name, size in zip(self.tensors, self.sizes, strict=True):
            first, last = max(columns.start, start), min(columns.stop, start + size)
            if first < last:
                found.append(
                    (
                        name,
                        slice(first - start, last - start),
                        slice(first - columns.start, last - columns.start),
                    )
                )
            start += size
        return found


class _Bound(nn.Module):
    """The residual as a module around the model: `functional_call` swaps its parameters, and the residual sees a real model."""

    def __init__(self, model: nn.Module, function: Residual) -> None:
        super().__init__()
        self.model = model
        self.function = function

    def forward(self, *batch: Any) -> Tensor:
        return self.function(self.model, *batch)


@dataclass(frozen=True)
class Order:
    """How a batch's residuals come from those s (B, k) of its samples: r = factor · s, by rows or, `by_output`, by columns.

    The factor is 1, or what residuals have that are divided by the number of samples or its root.
    """

    factor: float
    by_output: bool
    bytes: int  # that a gradient of one sample allocates


@dataclass
class Term:
    """One residual function, and what was found out about it."""

    name: str
    function: Residual
    parameters: Parameters
    separate: bool | None  # None: to be found out
    orders: dict[object, Order] = field(
        default_factory=dict
    )  # by shapes and modes, where the samples separate
    batched: bool = True  # whether several products of its graph can be taken at once

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
        module = self.parameters.module
        return (
            () if module is None else tuple(part.training for part in module.modules())
        )

    def __call__(self, values: Values, batch: Batch) -> Tensor:
        """r (m,)."""
        r: object = self._call(values, batch)
        if not isinstance(r, Tensor):
            raise TypeError(
                f"{self.name} returned {type(r).__name__}: it must return a tensor, the vector of residuals"
            )
        if r.dim() != 1:
            hint = (
                "return the residuals themselves, not the sum of their squares"
                if r.dim() == 0
                else "use .flatten()"
            )
            raise ValueError(
                f"{self.name} returned a tensor of shape {tuple(r.shape)}: it must return a vector (m,); {hint}"
            )
        if not r.is_floating_point():
            raise TypeError(
                f"{self.name} returned {r.dtype}: residuals are real floating-point numbers"
            )
        if not r.numel():
            raise ValueError(f"{self.name} returned no residuals: is its batch empty?")
        return r

    def one(self, values: Values, batch: Batch) -> Callable[..., Tensor]:
        """(some of the values, *sample) -> the residuals (k,) of one sample, or (), where `squeeze` made a number of them."""
        has = [has_samples(x) for x in batch]

        def alone(chosen: Values, *sample: Any) -> Tensor:
            return self._call(
                {**values, **chosen},
                tuple(x[None] if h else x for x, h in zip(sample, has, strict=True)),
            ).flatten()

        return alone

    def _call(self, values: Values, batch: Batch) -> Tensor:
        if self.bound is None:
            return self.function(dict(values), *batch)
        r: Tensor = functional_call(
            self.bound,
            {f"model.{name}": value for name, value in values.items()},
            batch,
        )
        return r


def has_samples(x: object) -> bool:
    """Whether its first dimension counts samples; numbers and tensors without dimensions are the same for all."""
    return isinstance(x, Tensor) and x.dim() > 0


def samples_of(batch: Batch) -> int | None:
    """B, where all tensors agree on it."""
    sizes = {len(x) for x in batch if has_samples(x)}
    return sizes.pop() if len(sizes) == 1 else None


def some(batch: Batch, index: Tensor | slice) -> Batch:
    """Samples of a batch; what is the same for all stays."""
    return tuple(x[index].detach() if has_samples(x) else x for x in batch)


def dims(batch: Batch) -> tuple[int | None, ...]:
    """What `vmap` goes over."""
    return tuple(0 if has_samples(x) else None for x in batch)
