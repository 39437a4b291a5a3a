"""U of an embedding, u_i = Σ_t e_{token(i,t)} g_{it}ᵀ: the rows that were looked up, and nothing
else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from seng.linalg import operators
from seng.linalg.implicit import Implicit
from seng.linalg.operators import Operator, Shape


@dataclass(frozen=True)
class Lookup(Operator):
    """The gradient g_it of every token of every sample, and which row of the table it belongs to."""

    form = "lookup"
    waits = True  # to know which rows occur
    position_dim = 1

    tokens: Tensor  # (ϱ, κ)
    G: Tensor  # (ϱ, κ, n_A)
    vocabulary: int  # n_G

    @property
    def values(self) -> Tensor:
        return self.G

    @property
    def shape(self) -> Shape:
        return 1, self.vocabulary, self.G.shape[2]

    @property
    def kappa(self) -> int:
        return self.tokens.shape[1]

    def weighted(self, weights: Tensor) -> Operator:
        rows = weights.view(self.shape)[0][self.tokens]
        return replace(self, G=(self.G * rows).to(self.G.dtype))

    def rows(self) -> Iterator[tuple[slice, Tensor]]:
        width = self.G.shape[2]
        step = max(1, operators.CHUNK // max(1, self.samples * width))
        numbers = torch.arange(self.samples, device=self.tokens.device)
        sample = numbers[:, None].expand_as(self.tokens)
        for i in range(0, self.vocabulary, step):
            stop = min(i + step, self.vocabulary)
            inside = (self.tokens >= i) & (self.tokens < stop)
            place = sample[inside], self.tokens[inside] - i
            X = self._zeros(self.samples, stop - i, width)
            X.index_put_(place, self.G[inside], accumulate=True)
            yield slice(i * width, stop * width), X.flatten(1)

    def gram(self) -> Tensor:
        """UᵀU over the rows that occur; the others are zero."""
        used, tokens = torch.unique(self.tokens, return_inverse=True)
        occurring = replace(self, tokens=tokens, vocabulary=used.numel())
        return Operator.gram(occurring)

    def rmv(self, z: Tensor) -> Tensor:
        return (z.view(self.shape)[0][self.tokens] * self.G).sum((1, 2))

    def mv(self, c: Tensor) -> Tensor:
        out = self._zeros(self.vocabulary, self.G.shape[2])
        weighted = (self.G * c[:, None, None]).flatten(0, 1)
        return out.index_add_(0, self.tokens.flatten(), weighted).flatten()

    def summand(self, positions: int) -> Implicit | None:
        larger = positions >= self.G.shape[2]  # one-hot columns than U itself
        return None if larger else self.one_hot()

    def one_hot(self) -> Implicit:
        """The same U as factors: Ĝ_i has one-hot columns, as a linear layer has that shares the
        weight.
        """
        one_hot = self._zeros(*self.tokens.shape, self.vocabulary)
        one_hot.scatter_(2, self.tokens[..., None], 1)
        return Implicit(one_hot.mT[:, None], self.G.mT[:, None])
