"""U as a linear operator: the three products `gram` (UᵀU), `rmv` (Uᵀz) and `mv` (Uc) of the paper's section 3.

U is (n, ϱ); its columns are the per-sample gradients of one block. A block's vector z of length n is a stack of h
matrices (n_G, n_A), row by row (h > 1 for grouped convolutions only), so u_i = Ĝ_i Â_iᵀ flattened. The paper's vec
stacks columns instead, which only swaps the two sides of its Kronecker products.

The forms differ in how they keep U:

    Explicit   the columns themselves                                      ϱ·n numbers
    Implicit   u_i = G_i A_iᵀ, the factors alone (eqs. 15 to 23)           ϱ·r·(n_G + n_A)             (`seng.linalg.implicit`)
    Windows    the same, with Â_i left inside the layer's input            ϱ·(κ·n_G + the input's)     (`seng.linalg.windows`)
    Lookup     embeddings: G_i and the row that each column belongs to     ϱ·κ·(n_A + 1)               (`seng.linalg.lookup`)
    Merged     k combinations of the columns, the leading directions       k·n

Factors that were captured in half precision stay so; their products are summed up in float32.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
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
    return torch.bmm(  # type: ignore[no-any-return]
        X.flatten(0, -3), Y.flatten(0, -3), out_dtype=torch.float32
    ).unflatten(0, X.shape[:-2])


@dataclass(frozen=True)
class Operator(ABC):
    """A tall matrix U (n, ϱ) known through its products."""

    waits: ClassVar[bool] = (
        False  # whether its products wait for the device, so that they cannot be recorded
    )

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
        return sum(
            (product(X, X.T) for _, X in self.rows()),
            start=self._zeros(self.samples, self.samples),
        )

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
        cast = {
            k: v.to(dtype)
            for k, v in vars(self).items()
            if isinstance(v, Tensor) and v.is_floating_point()
        }
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
class Merged(Operator):
    """U ≈ scale·Yᵀ: combinations of the columns that span what matters of them (DESIGN: the merged form, ours).

    In half precision Y has mean square 1: float16 then rounds by 2⁻¹², where bfloat16 would round by 2⁻⁹, which is too much for
    d = g − Ub, a small difference of large numbers.
    """

    Y: Tensor  # (k, n)
    scale: Tensor  # ()
    layout: Shape

    @classmethod
    def of(
        cls, Y: Tensor, layout: Shape, half: bool = False, length: Tensor | None = None
    ) -> Self:
        """UUᵀ = YᵀY for Y (k, n), whose length, the root of the sum of its squares, may be known."""
        if not half:
            return cls(Y, torch.ones((), dtype=Y.dtype, device=Y.device), layout)
        length = (
            torch.linalg.vector_norm(Y).clamp_min_(torch.finfo(Y.dtype).tiny)
            if length is None
            else length
        )
        scale = length / max(1, Y.numel()) ** 0.5
        return cls(
            torch.div(Y, scale, out=torch.empty_like(Y, dtype=torch.float16)),
            scale,
            layout,
        )

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
            yield (
                slice(i, min(i + step, self.n)),
                self.Y[:, i : i + step].to(self.dtype) * self.scale,
            )

    def gram(self) -> Tensor:
        return product(self.Y, self.Y.T) * self.scale.square()

    def combine(self, V: Tensor) -> Tensor:
        return product(V.T.to(self.Y.dtype).contiguous(), self.Y) * self.scale

    def rmv(self, z: Tensor) -> Tensor:
        return self.scale * (self.Y.to(z.dtype) @ z)

    def mv(self, c: Tensor) -> Tensor:
        return (self.scale * c) @ self.Y.to(c.dtype)

    def to(self, dtype: torch.dtype) -> Self:
        return replace(
            self,
            Y=self.Y if self.Y.dtype in HALF else self.Y.to(dtype),
            scale=self.scale.to(dtype),
        )

    def scaled(self, scale: float | Tensor) -> Self:
        return replace(self, scale=self.scale * scale)

    def first(self, samples: int) -> Self:
        return replace(self, Y=self.Y[:samples])
