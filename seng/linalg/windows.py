"""U of a convolution, or of a linear layer as one of width 1, with Â_i left inside the layer's
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

from seng.linalg.implicit import Implicit, by_factors, smaller
from seng.linalg.operators import (
    HALF,
    SLAB,
    Explicit,
    Operator,
    Shape,
    product,
)

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
