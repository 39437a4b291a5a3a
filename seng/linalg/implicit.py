"""U as factors, u_i = G_i A_iᵀ: the paper's implicit form (eqs. 15 to 23).

U of a convolution, or of a linear layer as one of width 1, with Â_i left inside the layer's
input.

u_i = scale·vec(Ĝ_i Â_iᵀ), where column t of Â_i is what output position t sees of the input: a
window. All windows together are ∏kernel times as many numbers as the input, so they wait as the
input, and most products never make them. A slab of columns is one product per place of the kernel,
between the gradient and the input moved by as much.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from seng.linalg import operators
from seng.linalg.operators import (
    HALF,
    SLAB,
    Explicit,
    Operator,
    Shape,
    product,
)


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


Pair = tuple[
    int, int, Tensor, Tensor
]  # a start, a step, Ĝᵀ (ϱ, p, n_G), Âᵀ (ϱ, p, c)
MANY = 16  # channels from which moving the input is better than cutting it into windows


def windows(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    """What each output position of a convolution sees of x (ϱ, C, …): (ϱ, C·∏kernel, κ)."""
    d = len(kernel)
    for i, (size, step, gap) in enumerate(
        zip(kernel, stride, dilation, strict=True)
    ):
        x = x.unfold(2 + i, gap * (size - 1) + 1, step)[..., ::gap]
    out, places = range(2, 2 + d), range(2 + d, 2 + 2 * d)
    x = x.permute(0, 1, *places, *out)
    return x.flatten(2 + d).flatten(1, 1 + d)


@dataclass(frozen=True)
class Windows(Operator):
    """The gradient of a layer's output and its input; a bias adds a row of ones to Â_i."""

    form = "implicit"

    G: Tensor  # (ϱ, n_G, *out)
    a: Tensor  # (ϱ, C, *space)
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    bias: int  # 1 where a row of ones follows Â, else 0
    scale: float = 1.0

    @property
    def values(self) -> Tensor:
        return self.G

    @property
    def shape(self) -> Shape:
        C = self.a.shape[1]
        return 1, self.G.shape[1], C * math.prod(self.kernel) + self.bias

    @property
    def kappa(self) -> int:
        return self.G.shape[2:].numel()

    @property
    def family(self) -> Hashable:
        return "windows", self.a.shape[1:]

    def smaller(self) -> Operator:
        return smaller(self)

    def factors(self) -> Implicit:
        G, A = self._weight().tensors()
        if self.bias:
            ones = A.new_ones(len(A), 1, 1, self.kappa)
            A = torch.cat([A, ones], 2)
        return Implicit(G if self.scale == 1 else G * self.scale, A)

    def outputs(self) -> Tensor:
        G = (self.G * self.scale).flatten(2)
        return G.transpose(0, 1).flatten(1)[None]

    def inputs(self, taken: slice = slice(None)) -> Tensor:
        return self._each(lambda t: t[taken]).factors().inputs()

    def rows(self) -> Iterator[tuple[slice, Tensor]]:
        return self.factors().rows()

    def gram(self) -> Tensor:
        """UᵀU by the cheaper of the two contractions, as in `Implicit`."""
        out = self._zeros(self.samples, self.samples)
        if self.bias:
            ones = self._of_bias()
            out += ones @ ones.T
        if by_factors(self):
            out += self._weight().gram_by_factors()
        else:
            for _, X in self._slabs(self.G.dtype):
                X = X.flatten(1)
                out += product(X, X.T)
        return out.mul_(self.scale**2)

    def combine(self, V: Tensor) -> Tensor:
        """(UV)ᵀ (k, n), in `wide` precision throughout.

        What is lost here is lost of d, a small difference of large numbers.
        """
        V = V * self.scale
        out = self._empty(V.shape[1])
        if self.kappa == 1:  # the columns need not be formed
            W = self._weight().combine(V)
            out[..., : out.shape[2] - self.bias] = W.unflatten(
                1, (out.shape[1], -1)
            )
        else:
            for part, X in self._slabs(self.dtype):
                W = V.T @ X.flatten(1)
                out[..., part] = W.unflatten(1, X.shape[1:])
        if self.bias:
            out[..., -1] = V.T @ self._of_bias()
        return out.flatten(1)

    def explicit(self) -> Explicit:
        out = self._empty(self.samples)
        for part, X in self._slabs(self.dtype):
            torch.mul(X, self.scale, out=out[..., part])
        if self.bias:
            out[..., -1] = self._of_bias() * self.scale
        return Explicit(out.flatten(1).T, self.shape)

    def scaled(self, scale: float | Tensor) -> Self:
        """The scale is kept beside G, which half precision would round."""
        return replace(self, scale=self.scale * float(scale))

    def _empty(self, k: int) -> Tensor:
        """Room for k vectors: (k, n_G, n_A)."""
        return self.G.new_empty(k, *self.shape[1:], dtype=self.dtype)

    def _of_bias(self) -> Tensor:
        """Σ_positions Ĝ (ϱ, n_G)."""
        return self.G.flatten(2).sum(2, dtype=self.dtype)

    def _margins(self) -> list[int]:
        """The padding for F.pad, which begins with the last dimension."""
        return [
            amount
            for side in reversed(self.padding)
            for amount in (side, side)
        ]

    def _weight(self) -> Implicit:
        """The factors without the row of ones and the scale."""
        x = F.pad(self.a, self._margins()) if any(self.padding) else self.a
        A = windows(x, self.kernel, self.stride, self.dilation)
        return Implicit(self.G.flatten(2)[:, None], A[:, None])

    def _slabs(self, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
        """Parts of the weight's columns, without the scale.

        Each is a slice of n_A and the numbers there, (ϱ, n_G, c), in `dtype`.
        """
        numbers = SLAB * 2 // dtype.itemsize
        step = numbers // max(1, self.samples * self.G.shape[1])
        step = step // 8 * 8 or 8  # so that GPUs read aligned
        for first, every, G, A in self._pairs():
            for i in range(0, A.shape[2], step):
                X = _columns(G, A[..., i : i + step], dtype)
                start = first + i * every
                yield slice(start, start + X.shape[2] * every, every), X

    def _pairs(self) -> Iterator[Pair]:
        """The weight's factors, or parts of them, with Âᵀ's place in n_A."""
        places = math.prod(self.kernel)
        if self.a.shape[1] >= MANY and places > 1 and set(self.stride) == {1}:
            yield from self._moved(places)
        else:
            G, A = (X[:, 0].mT for X in self._weight().tensors())
            yield 0, 1, G, A

    def _moved(self, places: int) -> Iterator[Pair]:
        """Of each place of the kernel, Ĝ and what of the input lies there: a part of one tensor.

        The p positions are those of the padded input, in the order of memory; between its rows Ĝ is
        zero.
        """
        d = len(self.kernel)
        margins = self._margins()
        margins[-1] += 1  # the last place reaches beyond the last row
        x = F.pad(self.a.movedim(1, -1), [0, 0, *margins])  # (ϱ, *space, C)
        behind = [0, 0]
        for i in range(d, 1, -1):
            behind += [0, x.shape[i] - self.G.shape[1 + i]]
        G = F.pad(self.G.movedim(1, -1), behind).flatten(1, d)
        apart = torch.empty(x.shape[1:-1], device="meta").stride()  # positions
        x = x.flatten(1, d)
        for i, place in enumerate(itertools.product(*map(range, self.kernel))):
            steps = zip(place, self.dilation, apart, strict=True)
            start = sum(math.prod(step) for step in steps)
            yield i, places, G, x[:, start : start + G.shape[1]]


def _columns(G: Tensor, A: Tensor, dtype: torch.dtype) -> Tensor:
    """GᵀA, sample by sample, in `dtype`."""
    X, Y = _aligned(G).mT, _aligned(A)
    out = X @ Y if dtype == G.dtype else product(X, Y)
    return out[:, : G.shape[2], : A.shape[2]]


def _aligned(X: Tensor) -> Tensor:
    """With zeros behind each row, where a GPU is several times slower on rows that are not aligned."""
    aligned = max(X.stride()[1:]) % 8 == 0
    if aligned or X.dtype not in HALF or not X.is_cuda:
        return X
    return F.pad(X, (0, -X.shape[2] % 8)).contiguous()
