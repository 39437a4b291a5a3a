"""U as a linear operator: the three products `gram` (UᵀU), `rmv` (Uᵀz) and `mv` (Uc) of the paper's section 3.

U is (n, ϱ); its columns are the per-sample gradients of one block. A block's vector z of length n is a stack of h
matrices (n_G, n_A), row by row (h > 1 for grouped convolutions only), so u_i = Ĝ_i Â_iᵀ flattened. The paper's vec
stacks columns instead, which only swaps the two sides of its Kronecker products.

The forms differ in how they keep U:

    Explicit   the columns themselves                                      ϱ·n numbers
    Implicit   u_i = G_i A_iᵀ, the factors alone (eqs. 15 to 23)           ϱ·r·(n_G + n_A)
    Windows    the same, with Â_i left inside the layer's input            ϱ·(κ·n_G + the input's)     (`seng.windows`)
    Lookup     embeddings: G_i and the row that each column belongs to     ϱ·κ·(n_A + 1)
    Merged     k combinations of the columns, the leading directions       k·n

Factors that were captured in half precision stay so; their products are summed up in float32.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

Shape = tuple[int, int, int]  # (h, n_G, n_A)

CHUNK = 2**24  # numbers of a dense slab of U that may exist at once
SLAB = 2**26  # the same for slabs in half precision
HALF = (torch.float16, torch.bfloat16)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The precision of sums over numbers of `dtype`."""
    return torch.float32 if dtype in HALF else dtype


def product(X: Tensor, Y: Tensor) -> Tensor:
    """XY, matrix by matrix, summed up and kept in `wide` precision."""
    if X.dtype not in HALF:
        return X @ Y
    if not X.is_cuda:
        return X.float() @ Y.float()
    if X.dim() == 2:
        out: Tensor = torch.mm(X, Y, out_dtype=torch.float32)
        return out
    return torch.bmm(X.flatten(0, -3), Y.flatten(0, -3), out_dtype=torch.float32).unflatten(0, X.shape[:-2])  # type: ignore[no-any-return]


def windows(x: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> Tensor:
    """What each output position of a convolution sees of x (ϱ, C, …): (ϱ, C·∏kernel, κ)."""
    d = len(kernel)
    for i in range(d):
        x = x.unfold(2 + i, dilation[i] * (kernel[i] - 1) + 1, stride[i])[..., :: dilation[i]]
    x = x.permute(0, 1, *range(2 + d, 2 + 2 * d), *range(2, 2 + d))  # (ϱ, C, *kernel, *out)
    return x.flatten(2 + d).flatten(1, 1 + d)


@dataclass(frozen=True)
class Operator(ABC):
    """A tall matrix U (n, ϱ) known through its products."""

    waits: ClassVar[bool] = False  # whether its products wait for the device, so that they cannot be recorded

    @property
    @abstractmethod
    def shape(self) -> Shape:
        """(h, n_G, n_A): how a vector of this block is a stack of matrices."""

    @property
    @abstractmethod
    def samples(self) -> int:
        """ϱ, the number of columns."""

    @property
    def n(self) -> int:
        """The number of rows, h·n_G·n_A."""
        h, n_G, n_A = self.shape
        return h * n_G * n_A

    @abstractmethod
    def rows(self) -> Iterator[tuple[slice, Tensor]]:
        """Slabs of U: a slice of rows and U[slice]ᵀ (ϱ, m), of at most about CHUNK numbers each."""

    @abstractmethod
    def rmv(self, z: Tensor) -> Tensor:
        """Uᵀz (ϱ,) of z (n,)."""

    @abstractmethod
    def mv(self, c: Tensor) -> Tensor:
        """Uc (n,) of c (ϱ,)."""

    @abstractmethod
    def scaled(self, scale: float | Tensor) -> Self:
        """scale · U."""

    @abstractmethod
    def first(self, samples: int) -> Self:
        """The first columns."""

    def gram(self) -> Tensor:
        """UᵀU (ϱ, ϱ)."""
        return sum((product(X, X.T) for _, X in self.rows()), start=self._zeros(self.samples, self.samples))

    def combine(self, V: Tensor) -> Tensor:
        """(UV)ᵀ (k, n) of V (ϱ, k)."""
        Y = self._zeros(V.shape[1], self.n)
        for rows, X in self.rows():
            Y[:, rows] = product(V.T.to(X.dtype), X)
        return Y

    def row_norms(self) -> Tensor:
        """The squared norms (n,) of the rows of U."""
        out = self._zeros(self.n)
        for rows, X in self.rows():
            out[rows] = X.to(out.dtype).square().sum(0)
        return out

    def explicit(self) -> Explicit:
        """The same U, column by column."""
        U = self._zeros(self.samples, self.n)
        for rows, X in self.rows():
            U[:, rows] = X
        return Explicit(U.T, self.shape)

    def tensors(self) -> list[Tensor]:
        """What is stored."""
        return [value for value in vars(self).values() if isinstance(value, Tensor)]

    def to(self, dtype: torch.dtype) -> Self:
        """The same operator in another precision; integer tensors stay as they are."""
        cast = {k: v.to(dtype) for k, v in vars(self).items() if isinstance(v, Tensor) and v.is_floating_point()}
        return replace(self, **cast)

    @property
    def bytes(self) -> int:
        """Memory of what is stored."""
        return sum(t.numel() * t.element_size() for t in self.tensors())

    def _zeros(self, *size: int) -> Tensor:
        like = next(t for t in self.tensors() if t.is_floating_point())
        return like.new_zeros(size, dtype=self.dtype)

    @property
    def dtype(self) -> torch.dtype:
        """The precision of the products."""
        return wide(next(t.dtype for t in self.tensors() if t.is_floating_point()))


@dataclass(frozen=True)
class Explicit(Operator):
    """The columns themselves."""

    U: Tensor  # (n, ϱ)
    layout: Shape

    @property
    def shape(self) -> Shape:
        return self.layout

    @property
    def samples(self) -> int:
        return self.U.shape[1]

    def rows(self) -> Iterator[tuple[slice, Tensor]]:
        yield slice(0, self.n), self.U.T

    def gram(self) -> Tensor:
        return product(self.U.T, self.U)

    def rmv(self, z: Tensor) -> Tensor:
        return self.U.T @ z

    def mv(self, c: Tensor) -> Tensor:
        return self.U @ c

    def scaled(self, scale: float | Tensor) -> Self:
        return replace(self, U=self.U * scale)

    def first(self, samples: int) -> Self:
        return replace(self, U=self.U[:, :samples])

    def explicit(self) -> Explicit:
        return self


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
        if self.samples * group <= CHUNK:  # several groups at once
            step = max(1, CHUNK // max(1, self.samples * group))
            for i in range(0, h, step):
                X = self.G[:, i : i + step] @ self.A[:, i : i + step].mT
                yield slice(i * group, min(i + step, h) * group), X.flatten(1)
            return
        step = max(1, CHUNK // (self.samples * n_A)) // 8 * 8 or 8  # in eights, so that GPUs read aligned
        for i in range(h):
            for j in range(0, n_G, step):
                X = self.G[:, i, j : j + step] @ self.A[:, i].mT
                yield slice(i * group + j * n_A, i * group + min(j + step, n_G) * n_A), X.flatten(1)

    def rmv(self, z: Tensor) -> Tensor:
        """Σ_j g_ijᵀ mat(z) a_ij (eq. 18), one product of size n_G × n_A × ϱr."""
        G, A = self._side_by_side()
        return (product(z.view(self.shape).to(A.dtype), A) * G).sum((0, 1)).view(self.samples, self.rank).sum(1)

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
        return self.G.permute(1, 2, 0, 3).flatten(2), self.A.permute(1, 2, 0, 3).flatten(2)

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
        step = max(1, CHUNK // max(1, h * r * r * self.samples))
        out = self._zeros(self.samples, self.samples)
        for i in range(0, self.samples, step):
            part = slice(i * r, (i + step) * r)
            pairs = product(A[..., part].mT, A) * product(G[..., part].mT, G)  # (h, step·r, ϱr)
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
        root = c.abs().sqrt()
        total = root.sum()
        weight = c / torch.where(total > 0, total, 1)
        G = torch.einsum("i,ihgr->hgr", root, self.G.to(c.dtype))
        A = torch.einsum("i,ihar->har", weight, self.A.to(c.dtype))
        return (G @ A.mT).flatten()


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
        step = max(1, CHUNK // max(1, self.samples * width))
        sample = torch.arange(self.samples, device=tokens.device)[:, None].expand_as(tokens)
        for i in range(0, vocabulary, step):
            stop = min(i + step, vocabulary)
            inside = (tokens >= i) & (tokens < stop)
            X = self._zeros(self.samples, stop - i, width)
            X.index_put_((sample[inside], tokens[inside] - i), self.G[inside], accumulate=True)
            yield slice(i * width, stop * width), X.flatten(1)

    def rows(self) -> Iterator[tuple[slice, Tensor]]:
        return self._slabs(self.tokens, self.vocabulary)

    def gram(self) -> Tensor:
        """UᵀU over the rows that occur; the others are zero."""
        used, tokens = torch.unique(self.tokens, return_inverse=True)
        slabs = self._slabs(tokens, used.numel())
        return sum((product(X, X.T) for _, X in slabs), start=self._zeros(self.samples, self.samples))

    def rmv(self, z: Tensor) -> Tensor:
        return (z.view(self.shape)[0][self.tokens] * self.G).sum((1, 2))

    def mv(self, c: Tensor) -> Tensor:
        out = self._zeros(self.vocabulary, self.G.shape[2])
        out.index_add_(0, self.tokens.flatten(), (self.G * c[:, None, None]).flatten(0, 1))
        return out.flatten()

    def scaled(self, scale: float | Tensor) -> Self:
        return replace(self, G=self.G * scale)

    def first(self, samples: int) -> Self:
        return replace(self, tokens=self.tokens[:samples], G=self.G[:samples])

    def implicit(self) -> Implicit:
        """The same U with the rows as one-hot columns, for weights that an embedding shares with a linear layer."""
        one_hot = self._zeros(*self.tokens.shape, self.vocabulary).scatter_(2, self.tokens[..., None], 1)
        return Implicit(one_hot.mT[:, None], self.G.mT[:, None])


@dataclass(frozen=True)
class Merged(Operator):
    """U ≈ scale·Yᵀ: combinations of the columns that span what matters of them (DESIGN: the merged form, ours).

    In half precision Y has mean square 1: float16 then rounds by 2⁻¹², where bfloat16 would round by 2⁻⁹, which is too much for
    d = g − Ub, a small difference of large numbers.
    """

    Y: Tensor  # (k, n)
    scale: Tensor  # ()
    layout: Shape

    @classmethod
    def of(cls, Y: Tensor, layout: Shape, half: bool = False, length: Tensor | None = None) -> Self:
        """UUᵀ = YᵀY for Y (k, n), whose length, the root of the sum of its squares, may be known."""
        if not half:
            return cls(Y, torch.ones((), dtype=Y.dtype, device=Y.device), layout)
        length = torch.linalg.vector_norm(Y).clamp_min_(torch.finfo(Y.dtype).tiny) if length is None else length
        scale = length / max(1, Y.numel()) ** 0.5
        return cls(torch.div(Y, scale, out=torch.empty_like(Y, dtype=torch.float16)), scale, layout)

    @property
    def shape(self) -> Shape:
        return self.layout

    @property
    def samples(self) -> int:
        return self.Y.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        return self.scale.dtype

    def rows(self) -> Iterator[tuple[slice, Tensor]]:
        step = max(1, CHUNK // max(1, self.samples))
        for i in range(0, self.n, step):
            yield slice(i, min(i + step, self.n)), self.Y[:, i : i + step].to(self.dtype) * self.scale

    def gram(self) -> Tensor:
        return product(self.Y, self.Y.T) * self.scale.square()

    def combine(self, V: Tensor) -> Tensor:
        return product(V.T.to(self.Y.dtype).contiguous(), self.Y) * self.scale

    def rmv(self, z: Tensor) -> Tensor:
        return self.scale * (self.Y.to(z.dtype) @ z)

    def mv(self, c: Tensor) -> Tensor:
        return (self.scale * c) @ self.Y.to(c.dtype)

    def to(self, dtype: torch.dtype) -> Self:
        return replace(self, Y=self.Y if self.Y.dtype in HALF else self.Y.to(dtype), scale=self.scale.to(dtype))

    def scaled(self, scale: float | Tensor) -> Self:
        return replace(self, scale=self.scale * scale)

    def first(self, samples: int) -> Self:
        return replace(self, Y=self.Y[:samples])
