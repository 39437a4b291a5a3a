"""U of a convolution, or of a linear layer as one of width 1: factors that stay inside the layer's input.

Â_i is what each output position sees of the input, ∏kernel times the input's numbers. It is never kept, and hardly ever made:
Uᵀz and Uc are the layer's own forward and weight gradient, and a slab of columns is one product per place of the kernel,
between the gradient and the input moved by as much.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from seng.linalg.implicit import Implicit, split_product
from seng.linalg.operators import HALF, SLAB, Explicit, Operator, Shape, product

MANY = 16  # channels from which moving the input is better than cutting it into windows


def unfolded(
    x: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> Tensor:
    """What each output position of a convolution sees of x (ϱ, C, …), without a copy: (ϱ, C, *out, *kernel)."""
    for i in range(len(kernel)):
        x = x.unfold(2 + i, dilation[i] * (kernel[i] - 1) + 1, stride[i])[
            ..., :: dilation[i]
        ]
    return x


def windows(
    x: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> Tensor:
    """The same, sample by sample: (ϱ, C·∏kernel, κ)."""
    d = len(kernel)
    x = unfolded(x, kernel, stride, dilation)
    x = x.permute(
        0, 1, *range(2 + d, 2 + 2 * d), *range(2, 2 + d)
    )  # (ϱ, C, *kernel, *out)
    return x.flatten(2 + d).flatten(1, 1 + d)


@dataclass(frozen=True)
class Windows(Operator):
    """u_i = scale·vec(Ĝ_i Â_iᵀ), the columns of Â_i windows of the input; a bias adds a row of ones to Â_i."""

    G: Tensor  # (ϱ, n_G, *out)
    a: Tensor  # (ϱ, C, *space)
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    bias: int  # 1 where a row of ones follows Â, else 0
    scale: float = 1.0

    @property
    def shape(self) -> Shape:
        return 1, self.G.shape[1], self.a.shape[1] * math.prod(self.kernel) + self.bias

    @property
    def samples(self) -> int:
        return self.G.shape[0]

    @property
    def rank(self) -> int:
        """κ."""
        return self.G.shape[2:].numel()

    @property
    def pointwise(self) -> bool:
        """Whether every position of the input is its own window."""
        simple = [self.kernel, self.stride, self.padding] == [
            (1,) * len(self.kernel)
        ] * 2 + [(0,) * len(self.kernel)]
        return simple and self.a.shape[2:] == self.G.shape[2:]

    def implicit(self) -> Implicit:
        """The same with Â in full."""
        pad = [amount for side in reversed(self.padding) for amount in (side, side)]
        A = windows(F.pad(self.a, pad), self.kernel, self.stride, self.dilation)
        A = torch.cat([A, A.new_ones(A.shape[0], 1, A.shape[2])], 1) if self.bias else A
        G = self.G if self.scale == 1 else self.G * self.scale
        return Implicit(G.flatten(2)[:, None], A[:, None])

    def inputs(self, taken: slice = slice(None)) -> Tensor:
        """Â_i side by side (n_A, N), of some samples."""
        d, a = len(self.kernel), self.a[taken]
        pad = [amount for side in reversed(self.padding) for amount in (side, side)]
        x = unfolded(
            F.pad(a, pad) if any(pad) else a, self.kernel, self.stride, self.dilation
        )
        x = x.permute(
            1, *range(2 + d, 2 + 2 * d), 0, *range(2, 2 + d)
        )  # (C, *kernel, ϱ, *out)
        A = x.reshape(self.shape[2] - self.bias, -1)
        return torch.cat([A, A.new_ones(1, A.shape[1])]) if self.bias else A

    def _sides(self) -> tuple[Tensor, Tensor]:
        """Ĝᵀ (ϱ, κ, n_G) and Âᵀ (ϱ, κ, ∏kernel·C), kernel first and channels last."""
        pad = [amount for side in reversed(self.padding) for amount in (side, side)]
        x = self.a.movedim(1, -1)
        x = F.pad(x, [0, 0, *pad]) if any(pad) else x
        d = len(self.kernel)
        for i in range(d):
            x = x.unfold(
                1 + i, self.dilation[i] * (self.kernel[i] - 1) + 1, self.stride[i]
            )[..., :: self.dilation[i]]
        return self.G.movedim(1, -1).flatten(1, d), x.movedim(1 + d, -1).flatten(
            1 + d
        ).flatten(1, d)

    def _moved(self) -> Iterator[tuple[Tensor, Tensor]]:
        """For each place of the kernel Ĝᵀ (ϱ, p, n_G) and what of the input lies there, (ϱ, p, C): parts of one tensor.

        The p positions are those of the padded input, in the order of memory; between its rows Ĝ is zero.
        """
        d, out = len(self.kernel), self.G.shape[2:]
        sizes = [
            size + 2 * pad
            for size, pad in zip(self.a.shape[2:], self.padding, strict=True)
        ]
        pad = [amount for side in reversed(self.padding) for amount in (side, side)]
        pad[-1] += 1  # the last place reaches beyond the last row
        x = F.pad(self.a.movedim(1, -1), [0, 0, *pad]).flatten(1, d)
        rows = [size - o for size, o in zip(sizes[1:], out[1:], strict=True)]
        G = F.pad(
            self.G.movedim(1, -1),
            [0, 0, *itertools.chain(*((0, extra) for extra in reversed(rows)))],
        ).flatten(1, d)
        strides = [math.prod(sizes[i + 1 :]) for i in range(d)]
        for place in itertools.product(*map(range, self.kernel)):
            start = sum(
                k * by * s
                for k, by, s in zip(place, self.dilation, strides, strict=True)
            )
            yield G, x[:, start : start + G.shape[1]]

    def _movable(self, dtype: torch.dtype) -> bool:
        """Whether columns are formed by moving the input, place after place."""
        C = self.a.shape[1]
        small = self.samples * C * self.G.shape[1] * dtype.itemsize <= 4 * SLAB
        return (
            C >= MANY
            and math.prod(self.kernel) > 1
            and set(self.stride) == {1}
            and small
        )

    def _slabs(self, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
        """Parts of U without its scale: a slice of ∏kernel·C, kernel first, and the columns there (ϱ, c, n_G), in `dtype`."""
        C = self.a.shape[1]
        if self._movable(dtype):
            for i, (G, A) in enumerate(self._moved()):
                yield slice(i * C, (i + 1) * C), _columns(A, G, dtype)
            return
        G, A = self._sides()
        n_G, G = G.shape[2], _aligned(G)
        step = (
            max(1, SLAB * 2 // dtype.itemsize // max(1, self.samples * n_G)) // 8 * 8
            or 8
        )
        for i in range(0, A.shape[2], step):
            yield (
                slice(i, min(i + step, A.shape[2])),
                _columns(A[..., i : i + step], G, dtype)[..., :n_G],
            )

    def _of_bias(self) -> Tensor:
        """Σ_positions Ĝ (ϱ, n_G)."""
        return self.G.flatten(2).sum(2, dtype=self.dtype)

    def _in_order(self, W: Tensor, bias: Tensor | None) -> Tensor:
        """W (…, ∏kernel·C, n_G), kernel first, and the bias (…, n_G) -> (…, n)."""
        W = (
            W.unflatten(-2, (math.prod(self.kernel), -1)).movedim(-1, -3).mT.flatten(-2)
        )  # (…, n_G, C·∏kernel)
        return (W if bias is None else torch.cat([W, bias[..., None]], -1)).flatten(-2)

    def rows(self) -> Iterator[tuple[slice, Tensor]]:
        return self.implicit().rows()

    def gram(self) -> Tensor:
        """UᵀU by the cheaper of the two contractions, as in `Implicit`; the order of rows is all the same to it."""
        m, kappa, (_, n_G, n_A) = self.samples, self.rank, self.shape
        ones = self._of_bias() if self.bias else None
        out = self._zeros(m, m) if ones is None else ones @ ones.T
        if m * kappa**2 * (n_G + n_A) <= (m + kappa) * n_G * n_A:
            left, right = (side.flatten(0, 1) for side in self._sides())
            step = max(1, SLAB // 2 // max(1, kappa * kappa * m))
            for i in range(0, m, step):
                part = slice(i * kappa, (i + step) * kappa)
                pairs = product(right[part], right.T).mul_(product(left[part], left.T))
                out[i : i + step] += pairs.view(-1, kappa, m, kappa).sum((1, 3))
        else:
            for _, X in self._slabs(self.G.dtype):
                out += product(X.flatten(1), X.flatten(1).T)
        return out.mul_(self.scale**2)

    def combine(self, V: Tensor) -> Tensor:
        """(UV)ᵀ (k, n), in `wide` precision throughout: what is lost here is lost of d, a small difference of large numbers."""
        V = V * self.scale
        bias = V.T @ self._of_bias() if self.bias else None
        if self.rank == 1:  # the columns need not be formed
            G, A = self._sides()
            weighted = (G * V[:, :, None]).flatten(1)  # (ϱ, k·n_G)
            W = split_product(weighted.T, A[:, 0]).unflatten(0, (V.shape[1], -1)).mT
            return self._in_order(W, bias)
        W = self.G.new_empty(
            V.shape[1], self.shape[2] - self.bias, self.G.shape[1], dtype=self.dtype
        )
        for part, X in self._slabs(self.dtype):
            W[:, part] = (V.T @ X.flatten(1)).unflatten(1, X.shape[1:])
        return self._in_order(W, bias)

    def explicit(self) -> Explicit:
        """Column by column."""
        n_G, C, places = self.G.shape[1], self.a.shape[1], math.prod(self.kernel)
        if places == 1 or self._movable(self.dtype):
            out = self.G.new_empty(
                self.samples, n_G, C * places + self.bias, dtype=self.dtype
            )
            weight = out[..., : C * places].unflatten(-1, (C, places))
            for i, (G, A) in enumerate(
                [self._sides()] if places == 1 else self._moved()
            ):
                torch.mul(
                    _columns(_aligned(G), A, self.dtype)[:, :n_G],
                    self.scale,
                    out=weight[..., i],
                )
            if self.bias:
                torch.mul(self._of_bias(), self.scale, out=out[..., -1])
            return Explicit(out.flatten(1).T, self.shape)
        W = self.G.new_empty(
            self.samples, self.shape[2] - self.bias, self.G.shape[1], dtype=self.dtype
        )
        for part, X in self._slabs(self.dtype):
            torch.mul(X, self.scale, out=W[:, part])
        return Explicit(
            self._in_order(W, self._of_bias() * self.scale if self.bias else None).T,
            self.shape,
        )

    def _geometry(
        self,
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], bool, list[int], int]:
        return (
            self.stride,
            self.padding,
            self.dilation,
            False,
            [0] * len(self.kernel),
            1,
        )

    def against(self, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Uᵀz: ⟨g_i, conv(a_i; z)⟩ for z as the layer's own weight (n_G, C, *kernel) and bias (n_G,)."""
        if self.pointwise:
            G, A = self._sides()
            out = product(A.flatten(0, 1), weight.flatten(1).T.to(A.dtype)).view(
                G.shape
            )
            out = out if bias is None else out + bias
            return (out * G).sum((1, 2)) * self.scale
        out = torch.convolution(
            self.a, weight.to(self.a.dtype), None, *self._geometry()
        ).to(self.dtype)
        out = out if bias is None else out + bias.view(-1, *[1] * len(self.kernel))
        return (out * self.G).flatten(1).sum(1) * self.scale

    def combined(
        self, c: Tensor, minus: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Uc as a weight (n_G, C·∏kernel) and a bias: the weight gradient of Σ_i c_i ⟨g_i, conv(a_i; W)⟩.

        With `minus`, what is left of that weight when Uc is taken away.
        """
        G = self.G.to(self.dtype) * (c * self.scale).view(-1, *[1] * (self.G.dim() - 1))
        bias = G.flatten(2).sum((0, 2)) if self.bias else None
        if self.pointwise:
            A = self.a.movedim(1, -1).flatten(0, -2)
            X = G.movedim(1, -1).flatten(0, -2).T
            return split_product(X, A) if minus is None else _less_product(
                minus, X, A
            ), bias
        W = G.new_empty(G.shape[1], self.a.shape[1], *self.kernel)
        a = self.a.to(self.dtype)
        dW: Tensor = torch.ops.aten.convolution_backward(
            G, a, W, None, *self._geometry(), [False, True, False]
        )[1]
        dW = dW.flatten(1)
        return dW if minus is None else minus - dW, bias

    def rmv(self, z: Tensor) -> Tensor:
        Z = z.view(self.shape)[0]
        W = Z[:, : Z.shape[1] - self.bias].unflatten(1, (self.a.shape[1], *self.kernel))
        return self.against(W, Z[:, -1] if self.bias else None)

    def mv(self, c: Tensor) -> Tensor:
        W, bias = self.combined(c)
        return (W if bias is None else torch.cat([W, bias[:, None]], 1)).flatten()

    def scaled(self, scale: float | Tensor) -> Self:
        return (
            replace(self, G=self.G * scale)
            if isinstance(scale, Tensor)
            else replace(self, scale=self.scale * scale)
        )

    def first(self, samples: int) -> Self:
        return replace(self, G=self.G[:samples], a=self.a[:samples])


def _aligned(G: Tensor) -> Tensor:
    """With zeros behind each row, where rows that are not aligned take a GPU several times as long."""
    return (
        F.pad(G, (0, -G.shape[-1] % 8))
        if G.dtype in HALF and G.is_cuda and G.shape[-1] % 8
        else G
    )


def _columns(A: Tensor, G: Tensor, dtype: torch.dtype) -> Tensor:
    """AᵀG, sample by sample, in `dtype`."""
    return A.mT @ G if dtype == G.dtype else product(A.mT, G)


def _less_product(Z: Tensor, X: Tensor, Y: Tensor) -> Tensor:
    """Z − XY; with Y in half precision X is two halves, whose sum has twice the digits."""
    if Y.dtype not in HALF or not Y.is_cuda:
        return torch.addmm(Z, X, Y.to(X.dtype), alpha=-1)
    head = X.to(Y.dtype)
    tail = (X - head).to(Y.dtype)
    if Z.numel() < 2 * Y.numel():
        Z = torch.addmm(Z, head, Y, out_dtype=torch.float32, alpha=-1)
        return torch.addmm(Z, tail, Y, out_dtype=torch.float32, alpha=-1)
    return torch.addmm(
        Z,
        torch.cat([head, tail], 1),
        torch.cat([Y, Y]),
        out_dtype=torch.float32,
        alpha=-1,
    )  # one pass over Z
