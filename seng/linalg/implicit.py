"""U as factors, u_i = G_i A_iᵀ: the paper's implicit form (eqs. 15 to 23)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from seng.linalg import operators
from seng.linalg.operators import HALF, Explicit, Operator, Shape, product


@dataclass(frozen=True)
class Implicit(Operator):
    """u_i = Σ_h vec(G_ih A_ihᵀ): the factors alone (eqs. 15 and 16)."""

    G: Tensor  # (ϱ, h, n_G, r)
    A: Tensor  # (ϱ, h, n_A, r)

    @property
    def shape(self) -> Shape:
        return self.G.shape[1], self.G.shape[2], self.A.shape[2]

    @property
    def samples(self) -> int:
        return self.G.shape[0]

    @property
    def rank(self) -> int:
        """r, the number of columns of each factor (κ before any reduction)."""
        return self.G.shape[3]

    def rows(self) -> Iterator[tuple[slice, Tensor]]:
        h, n_G, n_A = self.shape
        group = n_G * n_A
        if self.samples * group <= operators.CHUNK:  # several groups at once
            step = max(1, operators.CHUNK // max(1, self.samples * group))
            for i in range(0, h, step):
                X = self.G[:, i : i + step] @ self.A[:, i : i + step].mT
                yield slice(i * group, min(i + step, h) * group), X.flatten(1)
            return
        step = (
            max(1, operators.CHUNK // (self.samples * n_A)) // 8 * 8 or 8
        )  # in eights, so that GPUs read aligned
        for i in range(h):
            for j in range(0, n_G, step):
                X = self.G[:, i, j : j + step] @ self.A[:, i].mT
                yield (
                    slice(i * group + j * n_A, i * group + min(j + step, n_G) * n_A),
                    X.flatten(1),
                )

    def rmv(self, z: Tensor) -> Tensor:
        """Σ_j g_ijᵀ mat(z) a_ij (eq. 18), one product of size n_G × n_A × ϱr."""
        G, A = self._side_by_side()
        return (
            (product(z.view(self.shape).to(A.dtype), A) * G)
            .sum((0, 1))
            .view(self.samples, self.rank)
            .sum(1)
        )

    def mv(self, c: Tensor) -> Tensor:
        """Σ_i c_i vec(G_i A_iᵀ), one product of size n_G × ϱr × n_A (eq. 22)."""
        G, A = self._side_by_side()
        return split_product(G * c.repeat_interleave(self.rank), A.mT).flatten()

    def combine(self, V: Tensor) -> Tensor:
        """(UV)ᵀ; with one position per sample the columns need not be formed."""
        if self.rank > 1:
            return super().combine(V)
        G, A = self._side_by_side()
        X = (G[:, None] * V.T[:, None]).flatten(1, 2)  # (h, k·n_G, ϱ)
        W: Tensor = split_product(X, A.mT).unflatten(1, (V.shape[1], -1))
        return W.transpose(0, 1).flatten(1)

    def explicit(self) -> Explicit:
        return Explicit(product(self.G, self.A.mT).flatten(1).T, self.shape)

    def _side_by_side(self) -> tuple[Tensor, Tensor]:
        """G̃ (h, n_G, ϱr) and Ã (h, n_A, ϱr) (eq. 16)."""
        return self.G.permute(1, 2, 0, 3).flatten(2), self.A.permute(
            1, 2, 0, 3
        ).flatten(2)

    def gram(self) -> Tensor:
        """UᵀU by the cheaper of the two contractions."""
        _, n_G, n_A = self.shape
        by_factors = self.samples * self.rank**2 * (n_G + n_A)
        by_columns = (self.samples + self.rank) * n_G * n_A
        return self.gram_by_factors() if by_factors <= by_columns else super().gram()

    def gram_by_factors(self) -> Tensor:
        """elesum((A_iᵀA_j) ⊙ (G_iᵀG_j)) for every pair (eqs. 20 and 21)."""
        G, A = self._side_by_side()
        h, r = G.shape[0], self.rank
        step = max(1, operators.CHUNK // max(1, h * r * r * self.samples))
        out = self._zeros(self.samples, self.samples)
        for i in range(0, self.samples, step):
            part = slice(i * r, (i + step) * r)
            pairs = product(A[..., part].mT, A) * product(
                G[..., part].mT, G
            )  # (h, step·r, ϱr)
            count = min(step, self.samples - i)
            out[i : i + step] = pairs.view(h, count, r, self.samples, r).sum((0, 2, 4))
        return out

    def scaled(self, scale: float | Tensor) -> Self:
        return replace(self, G=self.G * scale)

    def first(self, samples: int) -> Self:
        return replace(self, G=self.G[:samples], A=self.A[:samples])


def split_product(X: Tensor, Y: Tensor) -> Tensor:
    """XY for X in `wide` precision; with Y in half precision as two halves of X, whose sum has twice the digits."""
    if Y.dtype not in HALF or not Y.is_cuda:
        return X @ Y.to(X.dtype)
    head = X.to(Y.dtype)
    return product(head, Y) + product((X - head).to(Y.dtype), Y)


class Independent(Implicit):
    """The implicit form with the paper's cheap Uc, which takes G_i and A_i as independent (eq. 23)."""

    def mv(self, c: Tensor) -> Tensor:
        """C_U(c) = (Σ_i √|c_i| G_i)(Σ_i c_i A_i / Σ_j √|c_j|)ᵀ, and 0 where every c_i is 0."""
        G, A = self.sides(c)
        return (G @ A.mT).flatten()

    def sides(self, c: Tensor) -> tuple[Tensor, Tensor]:
        """Gᶜ (h, n_G, r) and Aᶜ (h, n_A, r), whose product it is: of several ranks, the product of the means."""
        root = c.abs().sqrt()
        total = root.sum()
        weight = c / torch.where(total > 0, total, 1)
        G = torch.einsum("i,ihgr->hgr", root, self.G.to(c.dtype))
        A = torch.einsum("i,ihar->har", weight, self.A.to(c.dtype))
        return G, A
