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
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from seng.linalg import operators
from seng.linalg.operators import HALF, Operator, Slabs, product

At = tuple[Tensor, Tensor]  # samples (N,) and positions (N,)

# A first column, a step, Ĝᵀ (ϱ, h, p, n_G) and Âᵀ (ϱ, h, p, c) of p positions.
Pairs = Iterator[tuple[int, int, Tensor, Tensor]]


class Factored(Operator):
    """u_i = Ĝ_i Â_iᵀ in parts: pairs of Ĝ and of some columns of Âᵀ, one after another."""

    form = "implicit"
    main = "G"
    factored = True

    pairs: ClassVar[Any]  # () -> Pairs, of U/scale
    scale: float = 1.0

    def slabs(self, dtype: torch.dtype) -> Slabs:
        h, n_G, _ = self.shape
        height = dtype.itemsize * max(1, self.samples * h * n_G)
        width = operators.CHUNK // height // 8 * 8 or 8  # GPUs read aligned
        for first, step, G, A in self.pairs():
            for i in range(0, A.shape[3], width):
                X = _columns(G, A[..., i : i + width], dtype)
                start = first + i * step
                stop = start + X.shape[3] * step
                X = X if self.scale == 1 else X.mul_(self.scale)
                yield (..., slice(start, stop, step)), X

    def smaller(self) -> Operator:
        """As columns, where these are fewer bytes than the factors.

        On a GPU factors in half precision stay: they are small, and launches hold a backward up.
        """
        G = self.values
        stays = G.dtype in HALF and G.is_cuda
        columns = self.n * self.samples * self.dtype.itemsize
        return self if stays or columns > self.bytes else self.explicit()

    @property
    def by_columns(self) -> bool:
        """Whether that is the cheaper contraction: ϱ²κ²(n_G + n_A) or ϱ(ϱ + κ)n_G·n_A."""
        _, n_G, n_A = self.shape
        samples, kappa = self.samples, self.kappa
        pairs = samples * kappa**2 * (n_G + n_A)
        return bool(pairs > (samples + kappa) * n_G * n_A)

    def gram(self) -> Tensor:
        """UᵀU by the cheaper of two contractions."""
        return super().gram() if self.by_columns else self.gram_by_factors()

    def gram_by_factors(self) -> Tensor:
        """elesum((A_iᵀA_j) ⊙ (G_iᵀG_j)) for every pair (eqs. 20 and 21)."""
        G = self.outputs()  # (h, n_G, ϱr)
        A = self.inputs().contiguous()  # (h, n_A, ϱr)
        h, r, samples = len(G), self.kappa, self.samples
        numbers = operators.CHUNK // self.dtype.itemsize
        step = max(1, numbers // max(1, h * r * r * samples))
        out = self._empty(samples, samples)
        for i in range(0, samples, step):
            part = slice(i * r, (i + step) * r)
            of_A = product(A[..., part].mT, A)
            of_G = product(G[..., part].mT, G)
            pairs = of_A.mul_(of_G)  # (h, step·r, ϱr)
            rows = out[i : i + step]
            blocks = pairs.view(h, len(rows), r, samples, r)
            rows[:] = blocks.sum((0, 2, 4))
        return out

    def combine(self, V: Tensor) -> Tensor:
        """(UV)ᵀ; with one position per sample the columns need not be formed."""
        if self.kappa > 1:
            return super().combine(V)
        k = V.shape[1]
        Y = self._empty(k, *self.shape)
        for first, step, G, A in self.pairs():
            weighted = torch.einsum("ik,ihpg->hkgi", V, G.to(V.dtype))
            W = split_product(
                weighted.flatten(1, 2), A[:, :, 0].transpose(0, 1)
            )
            stop = first + step * A.shape[3]
            part = W.unflatten(1, (k, -1)).transpose(0, 1)
            Y[..., first:stop:step] = part
        return Y.flatten(1)


@dataclass(frozen=True)
class Implicit(Factored):
    """u_i = Σ_h vec(G_ih A_ihᵀ): the factors alone (eqs. 15 and 16)."""

    position_dim = 3

    G: Tensor  # (ϱ, h, n_G, r)
    A: Tensor  # (ϱ, h, n_A, r)

    @property
    def shape(self) -> Any:
        return *self.G.shape[1:3], self.A.shape[2]

    @property
    def kappa(self) -> int:
        """r, the number of columns of each factor (κ before any reduction)."""
        return self.G.shape[3]

    def factors(self) -> Implicit:
        return self

    def outputs(self, at: At | None = None) -> Tensor:
        """G̃ (h, n_G, ϱr) of eq. 16."""
        return _beside(self.G, at)

    def inputs(self, at: At | None = None) -> Tensor:
        """Ã (h, n_A, ϱr) of eq. 16."""
        return _beside(self.A, at)

    def pairs(self) -> Pairs:
        yield 0, 1, self.G.mT, self.A.mT

    def rmv(self, z: Tensor) -> Tensor:
        """Σ_j g_ijᵀ mat(z) a_ij (eq. 18), one product of size n_G × n_A × ϱr."""
        A = self.inputs()
        G_of_z = product(z.view(self.shape).to(A.dtype), A)
        each = (G_of_z * self.outputs()).sum((0, 1))
        return each.view(self.samples, -1).sum(1)

    def mv(self, c: Tensor) -> Tensor:
        """Σ_i c_i vec(G_i A_iᵀ), one product of size n_G × ϱr × n_A (eq. 22)."""
        weighted = self.outputs() * c.repeat_interleave(self.kappa)
        return split_product(weighted, self.inputs().mT).flatten()


def _beside(X: Tensor, at: At | None = None) -> Tensor:
    """Factors (ϱ, h, n, r) side by side, (h, n, ϱr), or of them the columns at these places."""
    if at is None:
        return X.permute(1, 2, 0, 3).flatten(2)
    samples, positions = at
    return X[samples, :, :, positions].permute(1, 2, 0)


def split_product(X: Tensor, Y: Tensor) -> Tensor:
    """XY for X in `wide` precision.

    With Y in half precision X is taken as two halves, whose sum has twice the digits.
    """
    if Y.dtype not in HALF or not Y.is_cuda:
        return X @ Y.to(X.dtype)
    head = X.to(Y.dtype)
    of_head = product(head, Y)
    return of_head + product((X - head).to(Y.dtype), Y)


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


MANY = 16  # channels from which moving the input is better than cutting it into windows


@dataclass(frozen=True)
class Windows(Factored):
    """The gradient of a layer's output and its input; a bias adds a row of ones to Â_i."""

    G: Tensor  # (ϱ, n_G, *out)
    a: Tensor  # (ϱ, C, *space)
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]  # as F.pad takes it
    dilation: tuple[int, ...]
    bias: int = 0  # 1 where a row of ones follows Â, else 0
    scale: float = 1.0  # beside G, which half precision would round

    @property
    def shape(self) -> Any:
        C = self.a.shape[1]
        n_A = C * math.prod(self.kernel) + self.bias
        return 1, self.G.shape[1], n_A

    @property
    def kappa(self) -> int:
        return self.G.shape[2:].numel()

    @property
    def family(self) -> Any:
        """What two of them must agree in for their tensors to be joined."""
        return "windows", self.a.shape[1:]

    def factors(self) -> Implicit:
        G = self.G.flatten(2)[:, None]
        return Implicit(G * self.scale, self._windows())

    def outputs(self, at: At | None = None) -> Tensor:
        G = self.G.flatten(2)[:, None]
        return _beside(G, at) * self.scale

    def inputs(self, at: At | None = None) -> Tensor:
        if at is None:
            return _beside(self._windows())
        x = self._seen(*at)  # (N, *kernel, C)
        rows = x.movedim(-1, 1).flatten(1)
        if self.bias:
            rows = torch.cat([rows, torch.ones_like(rows[:, :1])], 1)
        return rows.T[None]

    def _seen(self, samples: Tensor, positions: Tensor) -> Tensor:
        """What these output positions see of the input (N, *kernel, C): no padded copy is made."""
        d = len(self.kernel)
        places = torch.unravel_index(positions, self.G.shape[2:])
        index: list[Any] = [samples.view(-1, *[1] * d), slice(None)]
        inside = torch.ones_like(index[0], dtype=torch.bool)
        for i, place in enumerate(places):
            before = self.padding[2 * (d - 1 - i)]  # the last one first
            steps = torch.arange(self.kernel[i], device=place.device)
            first = (place * self.stride[i] - before)[:, None]
            along = first + steps * self.dilation[i]
            sizes = [-1] + [1] * d
            sizes[1 + i] = self.kernel[i]
            along = along.view(sizes)
            size = self.a.shape[2 + i]
            inside = inside & (along >= 0) & (along < size)
            index.append(along.clamp(0, size - 1))
        found: Tensor = self.a[tuple(index)]
        return found * inside[..., None]

    def _unfolded(self) -> Tensor:
        """What each output position sees of the input (ϱ, C, *out, *kernel), a view."""
        x = self.a
        if any(self.padding):
            x = F.pad(x, self.padding)
        sides = zip(self.kernel, self.stride, self.dilation, strict=True)
        for i, (size, step, gap) in enumerate(sides, 2):
            span = gap * (size - 1) + 1
            x = x.unfold(i, span, step)[..., ::gap]
        return x

    def _windows(self) -> Tensor:
        """Â (ϱ, 1, n_A, κ)."""
        d = len(self.kernel)
        out = range(2, 2 + d)
        places = range(2 + d, 2 + 2 * d)
        x = self._unfolded().permute(0, 1, *places, *out)
        A = x.flatten(2 + d).flatten(1, 1 + d)[:, None]
        return F.pad(A, (0, 0, 0, 1), value=1.0) if self.bias else A

    def scaled(self, scale: float | Tensor) -> Self:
        return replace(self, scale=self.scale * float(scale))

    def gram(self) -> Tensor:
        unscaled = replace(self, scale=1.0)
        return Factored.gram(unscaled).mul_(self.scale**2)

    def combine(self, V: Tensor) -> Tensor:
        unscaled = replace(self, scale=1.0)
        return Factored.combine(unscaled, V * self.scale)

    def pairs(self) -> Pairs:
        """The weight's factors, as a whole or place by place of the kernel, and the bias's."""
        places = math.prod(self.kernel)
        G = self.G.flatten(2)[:, None].mT
        unstrided = set(self.stride) == {1}
        if not (self.a.shape[1] >= MANY and places > 1 and unstrided):
            yield 0, 1, G, self._windows().mT
            return
        yield from self._moved(places)
        if self.bias:
            last = self.shape[2] - 1
            yield last, 1, G, torch.ones_like(G[..., :1])

    def _moved(self, places: int) -> Pairs:
        """Of each place of the kernel, Ĝ and what of the input lies there: a part of one tensor.

        The p positions are those of the padded input, in the order of memory; between its rows Ĝ is
        zero.
        """
        d = len(self.kernel)
        margins = [0, 0, *self.padding]
        margins[-1] += 1  # the last place reaches beyond the last row
        x = F.pad(self.a.movedim(1, -1), margins)  # (ϱ, *space, C)
        behind = [0, 0]
        for i in range(d, 1, -1):
            behind += [0, x.shape[i] - self.G.shape[1 + i]]
        G = F.pad(self.G.movedim(1, -1), behind)
        G = G.flatten(1, d)[:, None]
        apart = torch.empty(x.shape[1:-1], device="meta").stride()  # positions
        x = x.flatten(1, d)[:, None]
        for i, place in enumerate(itertools.product(*map(range, self.kernel))):
            steps = zip(place, self.dilation, apart, strict=True)
            start = sum(math.prod(step) for step in steps)
            stop = start + G.shape[2]
            yield i, places, G, x[:, :, start:stop]


def _columns(G: Tensor, A: Tensor, dtype: torch.dtype) -> Tensor:
    """GᵀA, sample by sample, in `dtype`."""
    X = _aligned(G).mT
    Y = _aligned(A)
    out = X @ Y if dtype == G.dtype else product(X, Y)
    return out[..., : G.shape[3], : A.shape[3]]


def _aligned(X: Tensor) -> Tensor:
    """With zeros behind each row: a GPU is several times slower on rows that are not aligned."""
    aligned = max(X.stride()[1:]) % 8 == 0
    if aligned or X.dtype not in HALF or not X.is_cuda:
        return X
    missing = -X.shape[3] % 8
    return F.pad(X, (0, missing)).contiguous()
