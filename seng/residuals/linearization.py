"""r(θ) and U = Jᵀ (n, m), whose columns are the gradients of single residuals (the paper's eq. 5), within a memory budget.

`Explicit` where J fits, else `Streamed`, which makes the rows of U again whenever they are asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from seng.linalg.operators import Explicit, Operator, Shape
from seng.metrics.memory import size_of
from seng.residuals.jacobian import COPIES, Part
from seng.residuals.terms import Batch, Parameters, Term, Values

GRAMS = 3  # the Gram, its factor, and one in the making
CHUNK = {
    "cpu": 2**29,
    "cuda": 2**32,
}  # bytes of a chunk of J and of what it is made from: more is no faster


class Linear:
    """All terms at θ."""

    def __init__(
        self,
        parameters: Parameters,
        terms: list[Term],
        batches: list[Batch],
        memory: int,
    ) -> None:
        self.parameters, self.memory = parameters, memory
        room = min(memory // 4, CHUNK.get(parameters.device.type, 2**29))
        values = parameters.values()
        self.parts = [
            Part(term, batch, values, room)
            for term, batch in zip(terms, batches, strict=True)
        ]
        self.sizes = [part.m for part in self.parts]
        self.r = torch.cat([part.r for part in self.parts])  # (m,)

    @property
    def m(self) -> int:
        return len(self.r)

    def residuals(self, values: Values) -> Tensor:
        """r (m,) at other parameters."""
        return torch.cat([part.residuals(values) for part in self.parts])

    def chunks(self, columns: slice) -> Iterator[tuple[slice, Tensor]]:
        """J[rows, columns], some rows after the other."""
        start = 0
        for part in self.parts:
            for X in part.chunks(columns):
                yield slice(start, start + len(X)), X
                start += len(X)

    def slab(self, columns: slice) -> Tensor:
        """J[:, columns] (m, w)."""
        out = self.r.new_empty(self.m, columns.stop - columns.start)
        for rows, X in self.chunks(columns):
            out[rows] = X
        return out

    def pull(self, c: Tensor) -> Tensor:
        """Jᵀc (n,)."""
        total = self.r.new_zeros(self.parameters.n)
        for part, own in zip(self.parts, c.split(self.sizes), strict=True):
            total += part.pull(own)
        return total

    def push(self, z: Tensor) -> Tensor:
        """Jz (m,)."""
        return torch.cat([part.push(z).to(self.r.dtype) for part in self.parts])

    def operator(self) -> Operator:
        """U = Jᵀ: held where it fits."""
        n, m, size = self.parameters.n, self.m, self.r.element_size()
        gram = GRAMS * min(m, n) ** 2 * size
        left = self.memory - gram
        if left >= 1.5 * m * n * size:  # a half more for chunks in the making
            return Explicit(self.slab(slice(0, n)).T, (1, n, 1))
        width = left // (COPIES * m * size)
        if width < 1:
            raise MemoryError(
                f"{m} residuals and {n} parameters: the smaller of JJᵀ and JᵀJ needs {size_of(gram)} with its factor, and some "
                f"columns of J beside it; the budget is {size_of(self.memory)}. Give fewer samples at a time, or more bytes "
                "(LeastSquares(memory=…))"
            )
        return Streamed(self.r.new_empty(0), self, width)


@dataclass(frozen=True)
class Streamed(Operator):
    """U = Jᵀ that is never held: some of its rows at a time, made again for each pass."""

    like: Tensor  # of the precision of the products
    linear: Linear
    width: int  # rows of U at a time

    @property
    def shape(self) -> Shape:
        return (1, self.linear.parameters.n, 1)

    @property
    def samples(self) -> int:
        return self.linear.m

    def rows(self) -> Iterator[tuple[slice, Tensor]]:
        for start in range(0, self.n, self.width):
            columns = slice(start, min(start + self.width, self.n))
            yield columns, self.linear.slab(columns)

    def rmv(self, z: Tensor) -> Tensor:
        return self.linear.push(z)

    def mv(self, c: Tensor) -> Tensor:
        return self.linear.pull(c)

    def outer(self) -> Tensor:
        """UUᵀ = JᵀJ (n, n), in one pass over the residuals."""
        total = self.like.new_zeros(self.n, self.n)
        for _, X in self.linear.chunks(slice(0, self.n)):
            total.addmm_(X.T, X)
        return total

    def scaled(self, scale: float | Tensor) -> Self:
        raise NotImplementedError(
            "a Jacobian that is not held cannot be scaled: scale the residuals"
        )

    def first(self, samples: int) -> Self:
        raise NotImplementedError(
            "a Jacobian that is not held cannot be cut: give fewer samples"
        )
