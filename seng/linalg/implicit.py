"""U as factors, u_i = G_i A_iᵀ: the paper's implicit form (eqs. 15 to 23)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from seng.linalg import operators
from seng.linalg.operators import HALF, Explicit, Operator, Shape, product


def by_factors(U: Operator) -> bool:
    """Whether UᵀU costs less by factors, ϱ²κ²(n_G + n_A), than by columns, ϱ(ϱ + κ)n_G·n_A."""
    _, n_G, n_A = U.shape
    pairs = U.samples * U.kappa**2 * (n_G + n_A)
    return pairs <= (U.samples + U.kappa) * n_G * n_A


@dataclass(frozen=True)
class Implicit(Operator):
    """u_i = Σ_h vec(G_ih A_ihᵀ): the factors alone (eqs. 15 and 16)."""

    form = "implicit"
    position_dim = 3

    G: Tensor  # (ϱ, h, n_G, r)
    A: Tensor  # (ϱ, h, n_A, r)

    @property
    def values(self) -> Tensor:
        return self.G

    @property
    def shape(self) -> Shape:
        return self.G.shape[1], self.G.shape[2], self.A.shape[2]

    @property
    def rank(self) -> int:
        """r, the number of columns of each factor (κ before any reduction)."""
        return self.G.shape[3]

    @property
    def kappa(self) -> int:
        return self.rank

    def factors(self) -> Implicit:
        return self

    def smaller(self) -> Operator:
        return smaller(self)

    def outputs(self) -> Tensor:
        """G̃ (h, n_G, ϱr) of eq. 16."""
        return self.G.permute(1, 2, 0, 3).flatten(2)

    def inputs(self, taken: slice = slice(None)) -> Tensor:
        """Ã (h, n_A, ϱr) of eq. 16."""
        return self.A[taken].permute(1, 2, 0, 3).flatten(2)

    def rows(self) -> Iterator[tuple[slice, Tensor]]:
        h, n_G, n_A = self.shape
        step = max(
            1, operators.CHUNK // max(1, self.samples * n_A)
        )  # rows of G_i
        groups = max(1, step // n_G)
        height = (
            n_G if step >= n_G else step // 8 * 8 or 8
        )  # so that GPUs read aligned
        for i in range(0, h, groups):
            A = self.A[:, i : i + groups]
            for j in range(0, n_G, height):
                G = self.G[:, i : i + groups, j : j + height]
                X = (G @ A.mT).flatten(1)
                start = (i * n_G + j) * n_A
                yield slice(start, start + X.shape[1]), X

    def rmv(self, z: Tensor) -> Tensor:
        """Σ_j g_ijᵀ mat(z) a_ij (eq. 18), one product of size n_G × n_A × ϱr."""
        A = self.inputs()
        G_of_z = product(z.view(self.shape).to(A.dtype), A)
        each = (G_of_z * self.outputs()).sum((0, 1))
        return each.view(self.samples, self.rank).sum(1)

    def mv(self, c: Tensor) -> Tensor:
        """Σ_i c_i vec(G_i A_iᵀ), one product of size n_G × ϱr × n_A (eq. 22)."""
        weighted = self.outputs() * c.repeat_interleave(self.rank)
        return split_product(weighted, self.inputs().mT).flatten()

    def combine(self, V: Tensor) -> Tensor:
        """(UV)ᵀ; with one position per sample the columns need not be formed."""
        if self.rank > 1:
            return super().combine(V)
        weighted = self.outputs()[:, None] * V.T[:, None]  # (h, k, n_G, ϱ)
        W = split_product(weighted.flatten(1, 2), self.inputs().mT)
        return W.unflatten(1, (V.shape[1], -1)).transpose(0, 1).flatten(1)  # type: ignore[no-any-return]

    def explicit(self) -> Explicit:
        return Explicit(product(self.G, self.A.mT).flatten(1).T, self.shape)

    def gram(self) -> Tensor:
        """UᵀU by the cheaper of the two contractions."""
        return self.gram_by_factors() if by_factors(self) else super().gram()

    def gram_by_factors(self) -> Tensor:
        """elesum((A_iᵀA_j) ⊙ (G_iᵀG_j)) for every pair (eqs. 20 and 21)."""
        G, A = self.outputs(), self.inputs()
        h, r, samples = len(G), self.rank, self.samples
        step = max(1, operators.CHUNK // max(1, h * r * r * samples))
        out = self._zeros(samples, samples)
        for i in range(0, samples, step):
            part = slice(i * r, (i + step) * r)
            of_A, of_G = (product(X[..., part].mT, X) for X in (A, G))
            pairs = of_A.mul_(of_G)  # (h, step·r, ϱr)
            out[i : i + step] = pairs.view(h, -1, r, samples, r).sum((0, 2, 4))
        return out


def split_product(X: Tensor, Y: Tensor) -> Tensor:
    """XY for X in `wide` precision.

    With Y in half precision X is taken as two halves, whose sum has twice the digits.
    """
    if Y.dtype not in HALF or not Y.is_cuda:
        return X @ Y.to(X.dtype)
    head = X.to(Y.dtype)
    return product(head, Y) + product((X - head).to(Y.dtype), Y)


def smaller(U: Operator) -> Operator:
    """U as columns, where these are fewer bytes than its factors.

    On a GPU factors in half precision stay: they are small, and launches in a backward hold it up.
    """
    stays = U.values.dtype in HALF and U.values.is_cuda
    columns = U.n * U.samples * U.dtype.itemsize
    return U if stays or columns > U.bytes else U.explicit()


class Independent(Implicit):
    """The implicit form with the paper's cheap Uc, which takes G_i and A_i as independent (eq.

    23).
    """

    form = "independent"
    exact = False

    def mv(self, c: Tensor) -> Tensor:
        """C_U(c) = (Σ_i √|c_i| G_i)(Σ_i c_i A_i / Σ_j √|c_j|)ᵀ, and 0 where every c_i is 0."""
        G, A = self.sides(c)
        return (G @ A.mT).flatten()

    def sides(self, c: Tensor) -> tuple[Tensor, Tensor]:
        """Gᶜ (h, n_G, r) and Aᶜ (h, n_A, r), whose product it is.

        Over several ranks, the direction is the product of their means.
        """
        root = c.abs().sqrt()
        total = root.sum()
        weight = c / torch.where(total > 0, total, 1)
        G = torch.einsum("i,ihgr->hgr", root, self.G.to(c.dtype))
        A = torch.einsum("i,ihar->har", weight, self.A.to(c.dtype))
        return G, A
