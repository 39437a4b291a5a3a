"""U of an embedding, u_i = Σ_t e_{token(i,t)} g_{it}ᵀ: the rows that were looked up, and nothing
else.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from seng.linalg import operators
from seng.linalg.implicit import Implicit
from seng.linalg.operators import Operator, Shape, Slabs


@dataclass(frozen=True)
class Lookup(Operator):
    """The gradient g_it of every token of every sample, and its row of the table."""

    form = "lookup"
    main = "G"
    waits = True  # to know which rows occur
    by_columns = False
    position_dim = 1

    tokens: Tensor  # (ϱ, κ)
    G: Tensor  # (ϱ, κ, n_A)
    vocabulary: int  # n_G

    @property
    def shape(self) -> Shape:
        return 1, self.vocabulary, self.G.shape[2]

    @property
    def kappa(self) -> int:
        return self.tokens.shape[1]

    def weighted(self, weights: Tensor) -> Operator:
        rows = weights.view(self.shape)[0][self.tokens]
        return replace(self, G=(self.G * rows).to(self.G.dtype))

    def slabs(self, dtype: torch.dtype) -> Slabs:
        column = dtype.itemsize * max(1, self.samples * self.vocabulary)
        width = max(1, operators.CHUNK // column)
        for i in range(0, self.G.shape[2], width):
            G = self.G[..., i : i + width].to(dtype)
            X = G.new_zeros(self.samples, self.vocabulary, G.shape[2])
            X.scatter_add_(1, self.tokens[..., None].expand_as(G), G)
            yield (..., slice(i, i + width)), X[:, None]

    def gram(self) -> Tensor:
        """UᵀU over the rows that occur; the others are zero."""
        used, tokens = torch.unique(self.tokens, return_inverse=True)
        occurring = replace(self, tokens=tokens, vocabulary=used.numel())
        return Operator.gram(occurring)

    def rmv(self, z: Tensor) -> Tensor:
        table = z.view(self.shape)[0]
        return (table[self.tokens] * self.G).sum((1, 2))

    def mv(self, c: Tensor) -> Tensor:
        out = self._empty(self.vocabulary, self.G.shape[2]).zero_()
        weighted = (self.G * c[:, None, None]).flatten(0, 1)
        out.index_add_(0, self.tokens.flatten(), weighted)
        return out.flatten()

    def summand(self, positions: int) -> Implicit | None:
        """Ĝ_i has one-hot columns, as a linear layer has that shares the weight."""
        if positions >= self.G.shape[2]:  # larger than U itself
            return None
        one_hot = self._empty(*self.tokens.shape, self.vocabulary).zero_()
        one_hot.scatter_(2, self.tokens[..., None], 1)
        return Implicit(one_hot.mT[:, None], self.G.mT[:, None])
