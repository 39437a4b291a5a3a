"""U as a linear operator: the three products `gram` (UᵀU), `rmv` (Uᵀz) and `mv` (Uc) of the paper's
section 3.

U is (n, ϱ); its columns are the per-sample gradients of one block. A block's vector z of length n
is a stack of h matrices (n_G, n_A), row by row (h > 1 for grouped convolutions only), so u_i = Ĝ_i
Â_iᵀ flattened. The paper's vec stacks columns instead, which only swaps the two sides of its
Kronecker products.

The forms differ in how they keep U:

    Explicit   the columns themselves                                   ϱ·n numbers
    Implicit   u_i = G_i A_iᵀ, the factors alone (eqs. 15 to 23)        ϱ·r·(n_G + n_A)
    Windows    the same, with Â_i left inside the layer's input         ϱ·(κ·n_G + the input's)
    Lookup     embeddings: G_i and the row that each column belongs to  ϱ·κ·(n_A + 1)
    Merged     k combinations of the columns, the leading directions    k·n

Factors that were captured in half precision stay so; their products are summed up in float32.

Operators put together: U + V, column by column, and [U_1, U_2, …], sample after sample.

Where two operators keep U in the same way, their tensors are joined. Else factors are worked out in
full, and where these do not exist, or would be larger than U itself, columns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from seng.linalg.implicit import Implicit

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
        return torch.mm(X, Y, out_dtype=torch.float32)
    batch = X.shape[:-2]
    X, Y = X.flatten(0, -3), Y.flatten(0, -3)
    XY = torch.bmm(X, Y, out_dtype=torch.float32)
    return XY.unflatten(0, batch)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Operator(ABC):
    """A tall matrix U (n, ϱ) known through its products."""

    form: ClassVar[str]
    waits: ClassVar[bool] = (
        False  # its products wait for the device: never recorded
    )
    exact: ClassVar[bool] = True  # whether `mv` is exactly Uc
    sample_dim: ClassVar[int] = 0  # of its tensors
    position_dim: ClassVar[int | None] = (
        None  # the same, where positions can be added
    )

    @property
    @abstractmethod
    def shape(self) -> Shape:
        """(h, n_G, n_A): how a vector of this block is a stack of matrices."""

    @abstractmethod
    def rows(self) -> Iterator[tuple[slice, Tensor]]:
        """Slabs of U: a slice of rows and U[slice]ᵀ (ϱ, m), of at most about CHUNK numbers each."""

    @property
    def samples(self) -> int:
        """ϱ, the number of columns."""
        return self.values.shape[self.sample_dim]

    @property
    def kappa(self) -> int:
        """κ, positions per sample."""
        return 1

    @property
    def n(self) -> int:
        """The number of rows, h·n_G·n_A."""
        h, n_G, n_A = self.shape
        return h * n_G * n_A

    def factors(self) -> Implicit | None:
        """The factors Ĝ_i and Â_i in full, where u_i has any."""
        return None

    def summand(self, positions: int) -> Implicit | None:
        """Factors to be added to others, of so many positions in all; None where columns do better."""
        return self.factors()

    @property
    def family(self) -> Hashable:
        """What two operators must agree in for their tensors to be joined."""
        return self.form

    @property
    def basis(self) -> tuple[Tensor, Tensor] | None:
        """Y (ϱ, n) and scale of U = scale·Yᵀ, where U is kept so."""
        return None

    def smaller(self) -> Operator:
        """The same U, as factors or as columns, whichever is smaller."""
        return self

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Operator:
        """The same with every column changed; `change` takes columns as rows (ϱ, n)."""
        rows = self.explicit().U.T
        return Explicit(change(rows.to(self.dtype)).T, self.shape)

    def weighted(self, weights: Tensor) -> Operator:
        """diag(weights) U."""
        return self.mapped(lambda rows: rows * weights)

    def outputs(self) -> Tensor:
        """Ĝ_i side by side, with the operator's scale: (h, n_G, N)."""
        raise TypeError(f"the {self.form} form has no factors")

    def inputs(self, taken: slice = slice(None)) -> Tensor:
        """Â_i of some samples side by side: (h, n_A, N)."""
        raise TypeError(f"the {self.form} form has no factors")

    def columns(self) -> Iterator[Tensor]:
        """Blocks of columns of U, (n, b) each."""
        yield self.explicit().U

    def rmv(self, z: Tensor) -> Tensor:
        """Uᵀz (ϱ,) of z (n,)."""
        parts = (X.to(z.dtype) @ z[rows] for rows, X in self.rows())
        return sum(parts, start=self._zeros(self.samples))

    def mv(self, c: Tensor) -> Tensor:
        """Uc (n,) of c (ϱ,)."""
        return self.combine(c[:, None])[0]

    def gram(self) -> Tensor:
        """UᵀU (ϱ, ϱ)."""
        parts = (product(X, X.T) for _, X in self.rows())
        return sum(parts, start=self._zeros(self.samples, self.samples))

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

    def scaled(self, scale: float | Tensor) -> Self:
        """scale · U."""
        values = self.values
        return self._each(lambda t: t * scale if t is values else t)

    def first(self, samples: int) -> Self:
        """The first columns."""
        if samples >= self.samples:
            return self
        dim = self.sample_dim
        return self._each(
            lambda t: t.narrow(dim, 0, samples) if t.dim() else t
        )

    def to(self, dtype: torch.dtype) -> Self:
        """The same operator in another precision; integer tensors stay as they are."""
        if self.values.dtype == dtype:
            return self
        return self._each(
            lambda t: t.to(dtype) if t.is_floating_point() else t
        )

    def named(self) -> dict[str, Tensor]:
        """What is stored, by its name."""
        fields = vars(self).items()
        return {name: t for name, t in fields if isinstance(t, Tensor)}

    def tensors(self) -> list[Tensor]:
        """What is stored."""
        return list(self.named().values())

    @property
    @abstractmethod
    def values(self) -> Tensor:
        """The tensor that holds gradients: U, G or Y."""

    @property
    def dtype(self) -> torch.dtype:
        """The precision of the products."""
        return wide(self.values.dtype)

    @property
    def bytes(self) -> int:
        """Memory of what is stored."""
        return sum(t.nbytes for t in self.tensors())

    def _each(self, change: Callable[[Tensor], Tensor]) -> Self:
        """The same operator with every tensor changed."""
        return replace(
            self, **{name: change(t) for name, t in self.named().items()}
        )

    def _zeros(self, *size: int) -> Tensor:
        return self.values.new_zeros(size, dtype=self.dtype)


@dataclass(frozen=True)
class Explicit(Operator):
    """The columns themselves."""

    form = "explicit"
    sample_dim = 1

    U: Tensor  # (n, ϱ)
    layout: Shape

    @property
    def values(self) -> Tensor:
        return self.U

    @property
    def shape(self) -> Shape:
        return self.layout

    def rows(self) -> Iterator[tuple[slice, Tensor]]:
        yield slice(0, self.n), self.U.T

    def gram(self) -> Tensor:
        return product(self.U.T, self.U)

    def rmv(self, z: Tensor) -> Tensor:
        return self.U.T @ z

    def mv(self, c: Tensor) -> Tensor:
        return self.U @ c

    def explicit(self) -> Explicit:
        return self

    @property
    def basis(self) -> tuple[Tensor, Tensor]:
        return self.U.T, torch.ones((), dtype=self.dtype, device=self.U.device)


@dataclass(frozen=True)
class Merged(Operator):
    """U ≈ scale·Yᵀ: combinations of the columns that span what matters of them (the merged form,
    ours).

    In half precision Y has mean square 1: float16 then rounds by 2⁻¹². bfloat16 would round by 2⁻⁹,
    which is too much for d = g − Ub, a small difference of large numbers.
    """

    form = "merged"

    Y: Tensor  # (k, n)
    scale: Tensor  # ()
    layout: Shape

    @property
    def values(self) -> Tensor:
        return self.Y

    @classmethod
    def of(
        cls,
        Y: Tensor,
        layout: Shape,
        half: bool = False,
        length: Tensor | None = None,
    ) -> Self:
        """UUᵀ = YᵀY for Y (k, n), whose length, the root of the sum of its squares, may be known."""
        if not half:
            return cls(
                Y, torch.ones((), dtype=Y.dtype, device=Y.device), layout
            )
        if length is None:
            smallest = torch.finfo(Y.dtype).tiny
            length = torch.linalg.vector_norm(Y).clamp_min_(smallest)
        scale = length / max(1, Y.numel()) ** 0.5
        halved = torch.div(
            Y, scale, out=torch.empty_like(Y, dtype=torch.float16)
        )
        return cls(halved, scale, layout)

    @property
    def shape(self) -> Shape:
        return self.layout

    @property
    def dtype(self) -> torch.dtype:
        return self.scale.dtype

    def rows(self) -> Iterator[tuple[slice, Tensor]]:
        step = max(1, CHUNK // max(1, self.samples))
        for i in range(0, self.n, step):
            part = slice(i, min(i + step, self.n))
            yield part, self.Y[:, part].to(self.dtype) * self.scale

    def gram(self) -> Tensor:
        return product(self.Y, self.Y.T) * self.scale.square()

    def combine(self, V: Tensor) -> Tensor:
        return product(V.T.to(self.Y.dtype).contiguous(), self.Y) * self.scale

    def rmv(self, z: Tensor) -> Tensor:
        return self.scale * (self.Y.to(z.dtype) @ z)

    def mv(self, c: Tensor) -> Tensor:
        return (self.scale * c) @ self.Y.to(c.dtype)

    def to(self, dtype: torch.dtype) -> Self:
        """Of a basis in half precision, only the products change."""
        Y = self.Y if self.Y.dtype in HALF else self.Y.to(dtype)
        return replace(self, Y=Y, scale=self.scale.to(dtype))

    def scaled(self, scale: float | Tensor) -> Self:
        return replace(self, scale=self.scale * scale)

    @property
    def basis(self) -> tuple[Tensor, Tensor]:
        return self.Y, self.scale

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Self:
        Y = change(self.Y.to(self.dtype))
        return self.of(Y, self.layout, self.Y.dtype in HALF).scaled(self.scale)

    def halved(self) -> Self:
        """The same in half precision."""
        if self.Y.dtype in HALF:
            return self
        return self.of(self.Y, self.layout, True).scaled(self.scale)

    def across(self, other: Self) -> Tensor:
        """UᵀV (k, k) of another V."""
        Y = product(self.Y.to(other.Y.dtype), other.Y.T)
        return Y * (self.scale * other.scale)

    def mixed(self, other: Self, W: Tensor) -> Self:
        """[U, V]W of another V, in the precision of V."""
        k, W = self.samples, W.to(self.dtype)
        if other.Y.dtype not in HALF:
            Y = self.combine(W[:k]) + other.combine(W[k:])
            return self.of(Y, self.layout)
        scale = torch.maximum(self.scale, other.scale)
        ours = (W[:k] * (self.scale / scale)).T.to(torch.float16).contiguous()
        theirs = (
            (W[k:] * (other.scale / scale)).T.to(torch.float16).contiguous()
        )
        Y = torch.mm(ours, self.Y.to(torch.float16))
        # Orthonormal combinations of numbers of size 1 do not overflow.
        return replace(self, Y=Y.addmm_(theirs, other.Y), scale=scale)


def added(U: Operator, V: Operator) -> Operator:
    """U + V: one layer used twice in a backward, or two that share a weight."""
    left: Operator | None = U
    right: Operator | None = V
    if U.position_dim is None or not _alike([U, V]):
        positions = U.kappa + V.kappa
        left, right = U.summand(positions), V.summand(positions)
    if left is None or right is None:
        return Explicit(U.explicit().U + V.explicit().U, U.shape)
    assert left.position_dim is not None
    return _concatenated([left, right], left.position_dim)


def stacked(parts: Sequence[Operator]) -> Operator:
    """[U_1, U_2, …]: micro-batches of one step."""
    if len(parts) == 1:
        return parts[0]
    if not _alike(parts):
        parts = [U.factors() or U for U in parts]
    if not _alike(parts):
        parts = [U.explicit() for U in parts]
    return _concatenated(parts, parts[0].sample_dim)


def _alike(parts: Sequence[Operator]) -> bool:
    """Whether their tensors can be joined."""
    return len({U.family for U in parts}) == 1


def _concatenated(parts: Sequence[Operator], dim: int) -> Operator:
    """The parts' tensors, one behind the other along `dim`; missing positions are zeros."""
    first = parts[0]
    joined: dict[str, Tensor] = {}
    for name in first.named():
        tensors = [U.named()[name] for U in parts]
        if first.position_dim is not None and first.position_dim != dim:
            tensors = _padded(tensors, first.position_dim)
        joined[name] = torch.cat(tensors, dim)
    return replace(first, **joined)


def _padded(tensors: Sequence[Tensor], dim: int) -> list[Tensor]:
    """All as wide along `dim` as the widest."""
    width = max(t.shape[dim] for t in tensors)
    after = [0, 0] * (
        tensors[0].dim() - 1 - dim
    )  # F.pad begins with the last one
    return [F.pad(t, [*after, 0, width - t.shape[dim]]) for t in tensors]
