"""r(θ) of all terms, and U = Jᵀ (n, m): its columns are the gradients of single residuals (eq. 5).

U is kept as a matrix where it fits into the memory budget. Otherwise a `Linearization` is itself
the operator U: it makes blocks of J again for each Gram, and products by differentiating r.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from seng.linalg.memory import size_of
from seng.linalg.operators import Explicit, Operator, Shape
from seng.residuals.jacobian import COPIES, TermJacobian, pieces
from seng.residuals.terms import Batch, Term, Values

GRAMS = 3  # the Gram, its factor, and one in the making
CHUNK, GPU_CHUNK = 2**29, 2**32  # bytes for a chunk of J: more is no faster


def linearize(
    terms: list[Term],
    batches: list[Batch],
    memory: int,
) -> Linearization:
    """All terms at the present θ, each on its batch, within this many bytes."""
    parameters = terms[0].parameters
    on_gpu = parameters.device.type == "cuda"
    room = min(memory // 4, GPU_CHUNK if on_gpu else CHUNK)
    now = parameters.minus(0.0)
    pairs = zip(terms, batches, strict=True)
    parts = [TermJacobian(term, batch, now, room) for term, batch in pairs]
    r = torch.cat([part.r for part in parts])
    return Linearization(r, parts, memory)


@dataclass(frozen=True)
class Linearization(Operator):
    """The residuals r at θ, and U = Jᵀ without keeping it: blocks of J are made when needed."""

    r: Tensor  # (m,)
    parts: list[
        TermJacobian
    ]  # one per term; their residuals follow each other in r
    memory: int  # bytes
    width: int = 1  # columns of J that are made at a time

    @property
    def values(self) -> Tensor:
        return self.r

    @property
    def shape(self) -> Shape:
        return (1, self.parts[0].parameters.n, 1)

    @property
    def samples(self) -> int:
        """m: a column of U is the gradient of one residual."""
        return len(self.r)

    def residuals(self, values: Values) -> Tensor:
        """r (m,) at other values of the parameters."""
        return torch.cat([part.residuals(values) for part in self.parts])

    def jacobian(self, columns: slice) -> Tensor:
        """J[:, columns] (m, w)."""
        J = self.r.new_empty(self.samples, columns.stop - columns.start)
        for part, own in self._by_part(J):
            for rows, X in part.chunks(columns):
                own[rows] = X
        return J

    def operator(self) -> Operator:
        """U as a matrix where it fits into the budget, else this object."""
        n, m = self.n, self.samples
        gram = GRAMS * min(m, n) ** 2 * self.r.element_size()
        left = self.memory - gram
        if (
            left >= 1.5 * n * self.r.nbytes
        ):  # a half more for chunks in the making
            return Explicit(self.jacobian(slice(0, n)).T, self.shape)
        width = left // (COPIES * self.r.nbytes)
        if width < 1:
            raise MemoryError(
                f"{m} residuals and {n} parameters: the smaller of JJᵀ and JᵀJ needs {size_of(gram)} with its factor, and some "
                f"columns of J beside it; the budget is {size_of(self.memory)}. Give fewer samples at a time, or more bytes "
                "(LeastSquares(memory=…))"
            )
        return replace(self, width=width)

    def rows(self) -> Iterator[tuple[slice, Tensor]]:
        for columns in pieces(self.n, self.width):
            yield columns, self.jacobian(columns)

    def columns(self) -> Iterator[Tensor]:
        for part in self.parts:
            for _, X in part.chunks(slice(0, self.n)):
                yield X.T

    def rmv(self, z: Tensor) -> Tensor:
        return torch.cat([part.push(z) for part in self.parts])

    def mv(self, c: Tensor) -> Tensor:
        pulled = [part.pull(own) for part, own in self._by_part(c)]
        return torch.stack(pulled).sum(0)

    def explicit(self) -> Explicit:
        raise MemoryError("the Jacobian does not fit into the memory budget")

    def scaled(self, scale: float | Tensor) -> Self:
        raise NotImplementedError(
            "a Jacobian that is not held cannot be scaled: scale the residuals"
        )

    def first(self, samples: int) -> Self:
        raise NotImplementedError(
            "a Jacobian that is not held cannot be cut: give fewer samples"
        )

    def _by_part(self, rows: Tensor) -> Iterator[tuple[TermJacobian, Tensor]]:
        """Each term with its own of the m rows."""
        sizes = [len(part.r) for part in self.parts]
        return zip(self.parts, rows.split(sizes), strict=True)
