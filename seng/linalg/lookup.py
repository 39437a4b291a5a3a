"""U of an embedding: the rows that were looked up, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from seng.linalg import operators
from seng.linalg.implicit import Implicit
from seng.linalg.operators import Operator, Shape, product


@dataclass(frozen=True)
class Lookup(Operator):
    """Embeddings: u_i = Σ_t e_{token(i,t)} g_{it}ᵀ, so that only the rows that were looked up are kept."""

    waits: ClassVar[bool] = True  # to know which rows occur

    tokens: Tensor  # (ϱ, κ)
    G: Tensor  # (ϱ, κ, n_A)
    vocabulary: int  # n_G

    @property
    def shape(self) -> Shape:
        return 1, self.vocabulary, self.G.shape[2]

    @property
    def samples(self) -> int:
        return self.G.shape[0]

    def _slabs(self, tokens: Tensor, vocabulary: int) -> Iterator[tuple[slice, Tensor]]:
        width = self.G.shape[2]
        step = max(1, operators.CHUNK // max(1, self.samples * width))
        sample = torch.arange(self.samples, device=tokens.device)[:, None].expand_as(
            tokens
        )
        for i in range(0, vocabulary, step):
            stop = min(i + step, vocabulary)
            inside = (tokens >= i) & (tokens < stop)
            X = self._zeros(self.samples, stop - i, width)
            X.index_put_(
                (sample[inside], tokens[inside] - i), self.G[inside], accumulate=True
            )
            yield slice(i * width, stop * width), X.flatten(1)

    def rows(self) -> Iterator[tuple[slice, Tensor]]:
        return self._slabs(self.tokens, self.vocabulary)

    def gram(self) -> Tensor:
        """UᵀU over the rows that occur; the others are zero."""
        used, tokens = torch.unique(self.tokens, return_inverse=True)
        slabs = self._slabs(tokens, used.numel())
        return sum(
            (product(X, X.T) for _, X in slabs),
            start=self._zeros(self.samples, self.samples),
        )

    def rmv(self, z: Tensor) -> Tensor:
        return (z.view(self.shape)[0][self.tokens] * self.G).sum((1, 2))

    def mv(self, c: Tensor) -> Tensor:
        out = self._zeros(self.vocabulary, self.G.shape[2])
        out.index_add_(
            0, self.tokens.flatten(), (self.G * c[:, None, None]).flatten(0, 1)
        )
        return out.flatten()

    def scaled(self, scale: float | Tensor) -> Self:
        return replace(self, G=self.G * scale)

    def first(self, samples: int) -> Self:
        return replace(self, tokens=self.tokens[:samples], G=self.G[:samples])

    def implicit(self) -> Implicit:
        """The same U with the rows as one-hot columns, for weights that an embedding shares with a linear layer."""
        one_hot = self._zeros(*self.tokens.shape, self.vocabulary).scatter_(
            2, self.tokens[..., None], 1
        )
        return Implicit(one_hot.mT[:, None], self.G.mT[:, None])
