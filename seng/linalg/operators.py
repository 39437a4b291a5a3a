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

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from seng.linalg.implicit import Implicit

Shape = tuple[int, int, int]  # (h, n_G, n_A)
Slabs = Iterator[tuple[tuple[Any, ...], Tensor]]

CHUNK = 2**26  # bytes of a dense slab of U that may exist at once
HALF = (torch.float16, torch.bfloat16)

# The precision of sums over numbers of a dtype.
wide = partial(torch.promote_types, torch.float32)


def product(X: Tensor, Y: Tensor) -> Tensor:
    """XY, matrix by matrix, summed up and kept in `wide` precision."""
    if X.dtype not in HALF:
        return X @ Y
    if not X.is_cuda:
        return X.float() @ Y.float()
    if X.dim() == 2:
        return torch.mm(X, Y, out_dtype=torch.float32)
    batch = X.shape[:-2]
    X = X.flatten(0, -3)
    Y = Y.flatten(0, -3)
    XY = torch.bmm(X, Y, out_dtype=torch.float32)
    return XY.unflatten(0, batch)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Operator:
    """A tall matrix U (n, ϱ) known through its products."""

    form: ClassVar[str]
    waits = False  # its products wait for the device: never recorded
    exact = True  # whether `mv` is exactly Uc
    drawn = False  # whether only some of its columns are there
    sample_dim = 0  # of its tensors
    position_dim: ClassVar[Any] = None  # where positions can be added

    main = "values"  # the name of the tensor that holds gradients: U, G or Y
    shape: ClassVar[Any]  # (h, n_G, n_A): a block's vector is a stack
    kappa: ClassVar[Any] = 1  # κ, positions per sample
    basis: ClassVar[Any] = None  # Y (ϱ, n) and scale, if U = scale·Yᵀ is kept
    factored: ClassVar[Any] = False  # whether `factors` gives any
    by_columns: ClassVar[Any] = True  # whether the Gram is made of columns

    # Of the forms with factors, Ĝ_i and Â_i side by side, or of them the columns at
    # (samples, positions):
    outputs: ClassVar[Any]  # (at) -> (h, n_G, N), with the operator's scale
    inputs: ClassVar[Any]  # (at) -> (h, n_A, N)

    @property
    def values(self) -> Tensor:
        """The tensor that holds gradients."""
        return getattr(self, self.main)  # type: ignore[no-any-return]

    @property
    def samples(self) -> int:
        """ϱ, the number of columns."""
        return int(getattr(self, self.main).shape[self.sample_dim])

    @property
    def n(self) -> int:
        """The number of rows, h·n_G·n_A."""
        return math.prod(self.shape)

    @property
    def dtype(self) -> torch.dtype:
        """The precision of the products."""
        return wide(getattr(self, self.main).dtype)

    def slabs(self, dtype: torch.dtype) -> Slabs:
        """U in parts, of about CHUNK bytes each if they have to be made: where a part lies in the
        stack (h, n_G, n_A), as an index, and U's numbers there, sample by sample (ϱ, …).
        """
        return self.explicit().slabs(dtype)

    def columns(self) -> Iterator[Tensor]:
        """Blocks of columns of U, (n, b) each."""
        yield self.explicit().U

    def factors(self) -> Implicit | None:
        """The factors Ĝ_i and Â_i in full, where u_i has any."""
        return None

    def summand(self, positions: int) -> Implicit | None:
        """Factors to be added to others, of so many positions; None where columns do better."""
        return self.factors()

    def smaller(self) -> Operator:
        """The same U, as factors or as columns, whichever is smaller."""
        return self

    def through(self, change: Callable[[Operator], Operator]) -> Operator:
        """The same with a linear map applied to its columns, as an operator."""
        return change(self)

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Operator:
        """The same with every column changed; `change` takes columns as rows (ϱ, n)."""
        rows = self.explicit().U.T
        return Explicit(change(rows.to(self.dtype)).T, self.shape)

    def weighted(self, weights: Tensor) -> Operator:
        """diag(weights) U."""
        return self.mapped(lambda rows: rows * weights)

    def rmv(self, z: Tensor) -> Tensor:
        """Uᵀz (ϱ,) of z (n,)."""
        out = self._empty(self.samples).zero_()
        z = z.view(self.shape)
        for place, X in self.slabs(z.dtype):
            out += X.flatten(1) @ z[place].flatten()
        return out

    def mv(self, c: Tensor) -> Tensor:
        """Uc (n,) of c (ϱ,)."""
        return self.combine(c[:, None])[0]

    def subtracted(self, d: Tensor, c: Tensor) -> Tensor:
        """d − Uc."""
        return d - self.mv(c)

    def gram(self) -> Tensor:
        """UᵀU (ϱ, ϱ)."""
        out = self._empty(self.samples, self.samples).zero_()
        for _, X in self.slabs(self.values.dtype):
            X = X.flatten(1)
            out += product(X, X.T)
        return out

    def combine(self, V: Tensor) -> Tensor:
        """(UV)ᵀ (k, n) of V (ϱ, k), in `wide` precision throughout.

        What is lost here is lost of d, a small difference of large numbers.
        """
        Y = self._empty(V.shape[1], *self.shape)
        for place, X in self.slabs(self.dtype):
            W = V.T @ X.flatten(1)
            Y[:, *place] = W.unflatten(1, X.shape[1:])
        return Y.flatten(1)

    def row_norms(self) -> Tensor:
        """The squared norms (n,) of the rows of U."""
        out = self._empty(*self.shape)
        for place, X in self.slabs(self.dtype):
            out[place] = X.square().sum(0)
        return out.flatten()

    def explicit(self) -> Explicit:
        """The same U, column by column."""
        slabs = self.slabs(self.dtype)
        place, U = next(slabs)
        if U.shape[1:] != self.shape:  # not all of it
            X, U = U, self._empty(self.samples, *self.shape)
            U[:, *place] = X
            for place, X in slabs:
                U[:, *place] = X
        return Explicit(U.flatten(1).T, self.shape)

    def scaled(self, scale: float | Tensor) -> Self:
        """scale · U."""
        values = self.values
        return self._each(lambda t: t * scale if t is values else t)

    def first(self, samples: int) -> Self:
        """The first columns."""
        return self.part(0, samples)

    def copied(self) -> Self:
        """The same without the memory of what it was a part of."""
        return self._each(torch.clone)

    def part(self, start: int, samples: int) -> Self:
        """So many columns, or all that are left, from one on."""
        dim = self.sample_dim
        every = self.samples
        count = min(samples, every - start)
        if count == every:
            return self
        return self._each(
            lambda t: t.narrow(dim, start, count) if t.dim() else t
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
        found = {}
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                found[name] = value
        return found

    def tensors(self) -> list[Tensor]:
        """What is stored."""
        return list(self.named().values())

    @property
    def bytes(self) -> int:
        """Memory of what is stored."""
        return sum(t.nbytes for t in self.tensors())

    def _each(self, change: Callable[[Tensor], Tensor]) -> Self:
        """The same operator with every tensor changed."""
        changed = self.named()
        for name, t in changed.items():
            changed[name] = change(t)
        return replace(self, **changed)

    def _empty(self, *size: int) -> Tensor:
        return self.values.new_empty(size, dtype=self.dtype)


@dataclass(frozen=True)
class Explicit(Operator):
    """The columns themselves."""

    form = "explicit"
    main = "U"
    sample_dim = 1

    U: Tensor  # (n, ϱ)
    layout: Shape

    @property
    def shape(self) -> Shape:
        return self.layout

    @property
    def basis(self) -> tuple[Tensor, Tensor]:
        return self.U.T, self._empty().fill_(1)

    def slabs(self, dtype: torch.dtype) -> Slabs:
        rows = self.U.T.unflatten(1, self.layout)
        yield (...,), rows.to(dtype)

    def rmv(self, z: Tensor) -> Tensor:
        return self.U.T @ z

    def mv(self, c: Tensor) -> Tensor:
        return self.U @ c

    def explicit(self) -> Explicit:
        return self


@dataclass(frozen=True)
class Merged(Operator):
    """U ≈ scale·Yᵀ: combinations of the columns that span what matters of them (the merged form,
    ours).

    In half precision Y has mean square 1: float16 then rounds by 2⁻¹². bfloat16 would round by 2⁻⁹,
    which is too much for d = g − Ub, a small difference of large numbers.
    """

    form = "merged"
    main = "Y"

    Y: Tensor  # (k, n)
    scale: Tensor  # ()
    layout: Shape

    @property
    def shape(self) -> Shape:
        return self.layout

    @property
    def dtype(self) -> torch.dtype:
        return self.scale.dtype

    @property
    def basis(self) -> tuple[Tensor, Tensor]:
        return self.Y, self.scale

    @classmethod
    def of(cls, Y: Tensor, layout: Shape, half: bool = False) -> Self:
        """UUᵀ = YᵀY for Y (k, n)."""
        if not half:
            return cls(Y, Y.new_ones(()), layout)
        length = torch.linalg.vector_norm(Y)
        smallest = torch.finfo(Y.dtype).tiny
        scale = length.clamp_min_(smallest) / max(1, Y.numel()) ** 0.5
        halved = torch.empty_like(Y, dtype=torch.float16)
        torch.div(Y, scale, out=halved)
        return cls(halved, scale, layout)

    def explicit(self) -> Explicit:
        Y = self.Y.to(self.dtype) * self.scale
        return Explicit(Y.T, self.layout)

    def gram(self) -> Tensor:
        return self.across(self)

    def rmv(self, z: Tensor) -> Tensor:
        return self.scale * (self.Y.to(z.dtype) @ z)

    def mv(self, c: Tensor) -> Tensor:
        return (self.scale * c) @ self.Y.to(c.dtype)

    def subtracted(self, d: Tensor, c: Tensor) -> Tensor:
        Y = self.Y.to(c.dtype)
        return torch.addmv(d, Y.T, self.scale * c, alpha=-1)

    def scaled(self, scale: float | Tensor) -> Self:
        return replace(self, scale=self.scale * scale)

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Self:
        Y = change(self.Y.to(self.dtype))
        half = self.Y.dtype in HALF
        return self.of(Y, self.layout, half).scaled(self.scale)

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
        k = self.samples
        dtype = other.Y.dtype
        # Orthonormal combinations of numbers of size 1 do not overflow.
        scale = torch.maximum(self.scale, other.scale)
        ours = W[:k] * (self.scale / scale)
        theirs = W[k:] * (other.scale / scale)
        Y = ours.T.to(dtype) @ self.Y.to(dtype)
        Y.addmm_(theirs.T.to(dtype), other.Y)
        return replace(self, Y=Y, scale=scale)


@dataclass(frozen=True)
class Drawn(Operator):
    """The first columns of a U of factors, and of all its factors some that were drawn.

    E GGᵀ and E AAᵀ are their second moments over all samples and positions.
    """

    drawn = True

    U: Any  # the first samples
    G: Tensor  # (h, n_G, ·)
    A: Tensor  # (h, n_A, ·)
    count: int  # all samples

    @property
    def form(self) -> str:  # type: ignore[override]
        return str(self.U.form)

    @property
    def values(self) -> Any:
        return self.U.values

    @property
    def shape(self) -> Any:
        return self.U.shape

    @property
    def kappa(self) -> Any:
        return self.U.kappa

    @property
    def samples(self) -> int:
        return self.count

    def first(self, samples: int) -> Any:
        return self.U.first(samples)

    def scaled(self, scale: float | Tensor) -> Self:
        return replace(self, U=self.U.scaled(scale), G=self.G * scale)

    def to(self, dtype: torch.dtype) -> Self:
        G = self.G.to(dtype)
        A = self.A.to(dtype)
        return replace(self, U=self.U.to(dtype), G=G, A=A)


def _joined(parts: Sequence[Drawn], first: Operator, count: int) -> Drawn:
    """These as one, with these first samples."""
    G = torch.cat([U.G for U in parts], 2)
    A = torch.cat([U.A for U in parts], 2)
    return Drawn(first, G, A, count)


def added(U: Operator, V: Operator) -> Operator:
    """U + V: one layer used twice in a backward, or two that share a weight."""
    parts: list[Any] = [U, V]
    if U.drawn:
        first = added(parts[0].U, parts[1].U)
        return _joined(parts, first, U.samples)
    if U.position_dim is None or not _alike(parts):
        positions = U.kappa + V.kappa
        parts = [X.summand(positions) for X in parts]
    if not all(parts):
        columns = U.explicit().U + V.explicit().U
        return Explicit(columns, U.shape)
    return _concatenated(parts, parts[0].position_dim)


def stacked(parts: Sequence[Operator]) -> Operator:
    """[U_1, U_2, …]: micro-batches of one step."""
    if len(parts) == 1:
        return parts[0]
    if parts[0].drawn:
        drawn: Any = parts
        first = stacked([U.U for U in drawn])
        return _joined(drawn, first, sum(U.samples for U in parts))
    if not _alike(parts):
        parts = [U.factors() or U for U in parts]
    if not _alike(parts):
        parts = [U.explicit() for U in parts]
    if parts[0].position_dim is not None:
        most = max(U.kappa for U in parts)
        parts = [_widened(U, most) for U in parts]
    return _concatenated(parts, parts[0].sample_dim)


def _alike(parts: Sequence[Operator]) -> bool:
    """Whether their tensors can be joined."""
    return len({getattr(U, "family", U.form) for U in parts}) == 1


def _concatenated(parts: Sequence[Operator], dim: int) -> Operator:
    """The parts' tensors, one behind the other along `dim`."""
    joined = {}
    for name in parts[0].named():
        joined[name] = torch.cat([getattr(U, name) for U in parts], dim)
    return replace(parts[0], **joined)


def _widened(U: Operator, kappa: int) -> Operator:
    """The same with so many positions per sample; those that are missing are zeros."""

    def padded(t: Tensor) -> Tensor:
        after = [0, 0] * (t.dim() - 1 - U.position_dim)
        return F.pad(t, [*after, 0, kappa - U.kappa])  # the last one first

    return U if U.kappa == kappa else U._each(padded)
