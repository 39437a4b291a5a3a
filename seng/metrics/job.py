"""One layer's refresh: from the U that was captured to the block that the steps solve with.

The merged form keeps Y = UV_k, where V_k are leading directions of the Gram K = ΞᵀΞ: Ω may only choose the subspace, so that
the eigenvalues of λ(YYᵀ + λI)⁻¹ lie in [0, 1] for every sketch. `refresh` leads all layers through this, step by step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from seng.distributed.sharded import Sharded
from seng.gpu.replay import Function, Task
from seng.linalg.implicit import Implicit, Independent
from seng.linalg.numerics import deviation, reduced, top
from seng.linalg.operators import HALF, Merged, Operator, product, wide
from seng.linalg.sketch import Identity, Omega
from seng.linalg.windows import Windows
from seng.metrics.base import Diagonal, Kronecker
from seng.metrics.block import Block
from seng.metrics.curvature import Curvature
from seng.metrics.plan import Plan

TOLERANCE = 0.03  # relative error of the direction that dropping directions may cause
PATIENCE = 3  # refreshes for which an exact form stays before it is asked again whether few directions do


@dataclass
class Job:
    """One layer to be refreshed."""

    U: Operator  # as it was captured
    plan: Plan
    damping: float
    half: bool  # whether bases may be kept in half precision
    previous: (
        Block | None
    )  # of the same parameters: averaged with, and written to where the shapes stay
    seed: Callable[[], torch.Generator]
    timer: AbstractContextManager[None]
    known: Tensor | None = None  # UᵀU, where it was worked out during the backward
    base: Kronecker | Diagonal | None = None  # P, in whose coordinates U is; None: I
    graft: bool = False
    omega: Omega = field(init=False)
    gram: Tensor = field(init=False)
    top: Tensor = field(init=False)  # its largest eigenvalue
    values: Tensor = field(init=False)  # its leading eigenvalues
    V: Tensor = field(init=False)  # and directions
    lengths: Tensor = field(init=False)  # of UV_k for every k, and of U at the end
    stacked: tuple[Merged, Merged] = field(init=False)  # the old basis and the new one
    unstacked: Sharded = field(
        init=False
    )  # the new one, where each rank has a part of it
    fresh: tuple[Tensor, Tensor] = field(
        init=False
    )  # Gram and largest eigenvalue of the new one
    error: Tensor | None = field(init=False, default=None)
    failed: int = field(init=False, default=0)  # solves with the previous block
    patience: int = field(init=False, default=0)
    writes: bool = field(
        init=False, default=False
    )  # to the previous block, of which only a part may be new as yet

    @cached_property
    def generator(self) -> torch.Generator:
        """Its own stream, made when it is needed: making one takes time."""
        return self.seed()

    @property
    def averaged(self) -> bool:
        """Whether there is a basis to average with."""
        if self.previous is None or type(self.base) is not type(self.previous.base):
            return False
        return type(self.U) is type(self.previous.U) and isinstance(
            self.U, Merged | Sharded
        )

    def prepare(self, curvature: Curvature) -> None:
        """U in its planned form, Ω and the Gram of ΩU."""
        stays = self.plan.otherwise == "explicit" and (
            self.left > 0 or not self.plan.asks
        )
        if self.plan.form == "explicit" or (
            stays and not self.half
        ):  # not to form them twice
            self.U = self.U.explicit()
        elif self.plan.form == "implicit" and isinstance(self.U, Implicit | Windows):
            self.U = _factors(self.U, self.plan.rank, curvature, self.generator)
        sketch = (
            curvature.sketch if self.plan.dims.own is None else None
        )  # layers without factors stay exact
        plain = sketch is None or sketch.covers(self.U.shape)
        seen = (
            self.U.implicit() if isinstance(self.U, Windows) and not plain else self.U
        )
        self.omega = (
            Identity() if plain or sketch is None else sketch.draw(seen, self.generator)
        )
        if self.plan.form != "merged":
            self.U = seen
        if not (plain and isinstance(seen, Windows) and seen.G.is_cuda):
            self.gram = self.omega.of(seen).gram()
        elif (
            self.known is not None
        ):  # else it is worked out along with others, in `build`
            self.gram = self.known

    @property
    def left(self) -> int:
        """Refreshes for which things stay as they were."""
        return 0 if self.previous is None else self.previous.patience

    @property
    def before(self) -> int:
        """How many directions the previous basis has, if it is one."""
        return (
            0
            if self.previous is None
            or not isinstance(self.previous.U, Merged | Sharded)
            else self.previous.U.samples
        )

    @property
    def most(self) -> int:
        """The number of directions that is asked about; all of them where U stays as it is."""
        settled = (
            not self.plan.asks
            or self.plan.form != "merged"
            or (self.plan.otherwise is not None and self.left > 0)
        )
        return len(self.gram) if settled else min(self.plan.rank, len(self.gram))

    @property
    def tolerance(self) -> float:
        """Less where U was kept as it is: what is at the edge would change its form all the time."""
        exact = self.previous is not None and self.previous.U.samples == len(self.gram)
        return TOLERANCE / 2 if exact else TOLERANCE

    def steady(self, k: int) -> int:
        """As many directions as there were, where so many are needed that this is no great waste: the shapes stay then."""
        most = min(2 * k, self.most)
        return (
            self.before
            if k < self.before <= most and self.before < len(self.gram)
            else k
        )

    def settle(self, k: int, averaging: bool) -> Task | None:
        """Keep UV_k, or U as it is; what of it is a function of tensors alone, to be run along with others."""
        if (
            self.plan.form == "explicit"
            and self.half
            and self.plan.dims.own is None
            and isinstance(self.omega, Identity)
        ):
            return self._keep(_whole, self.U.samples, self.U, self.lengths[-1])
        if self.plan.form != "merged" or isinstance(self.U, Sharded):
            return None
        self.error = torch.zeros((), device="cpu")
        sketched, every = not isinstance(self.omega, Identity), k >= len(self.gram)
        if self.plan.otherwise is not None:
            self.patience = (self.left - 1 if self.left else PATIENCE) if every else 0
        if every and self.plan.otherwise == "implicit":
            self.U = (
                self.U.implicit()
                if sketched and isinstance(self.U, Windows)
                else self.U
            )
        elif (
            every
            and self.plan.otherwise == "explicit"
            and not (self.half and not sketched)
        ):
            self.U = self.U.explicit()
        elif sketched:
            Y = (
                self.U.explicit().U.T
                if every
                else self.U.combine(self.V[:, :k].to(self.U.dtype))
            )
            self.error = (
                self.error if every else deviation(Y, self.values[:k].to(Y.dtype))
            )
            self.U = Merged.of(Y, self.U.shape, self.half)
            self.gram, self.omega = self.U.gram(), Identity()
            self.top = top(self.gram[None])[0].to(self.gram.dtype)
        elif every:
            return self._keep(
                _whole, self.U.samples, self.U, self.lengths[-1], averaging=averaging
            )
        else:
            return self._keep(
                _basis,
                k,
                self.U,
                self.V[:, :k],
                self.lengths[k - 1],
                averaging=averaging,
            )
        return None

    def stack(self, decay: float) -> Task | None:
        """U becomes [√δ·U_old, √(1−δ)·U], whose Gram is put together from its parts."""
        if (
            self.previous is not None
            and isinstance(self.previous.U, Sharded)
            and isinstance(self.U, Sharded)
        ):
            self._stack_parts(self.previous.U, self.U, self.previous.gram, decay)
            return None
        assert (
            self.previous is not None
            and isinstance(self.previous.U, Merged)
            and isinstance(self.U, Merged)
        )
        before, gram = self.previous.U, self.previous.gram
        if (
            self.base is not None and self.previous.base is not None
        ):  # P has moved, and with it the coordinates
            before = self.base.moved(before, self.previous.base)
            gram = torch.where(
                gram.isfinite().all(), before.gram(), torch.nan
            )  # what was half written stays unusable
        if self.half and before.Y.dtype not in HALF:
            before = Merged.of(before.Y, before.shape, True).scaled(before.scale)
        self.fresh = self.gram, self.top
        self.stacked = before.scaled(decay**0.5), self.U.scaled((1 - decay) ** 0.5)
        both = before, self.U, gram, self.gram
        return Task(
            _gram_of_both, both, {"decay": decay}, self._stacked, self.timer, (None,)
        )

    def _stacked(self, gram: Tensor) -> None:
        self.gram = gram

    def _stack_parts(
        self, old: Sharded, new: Sharded, K_old: Tensor, decay: float
    ) -> None:
        """The same where each rank has a part of both."""
        self.fresh = self.gram, self.top
        across = old.across(new) * (decay * (1 - decay)) ** 0.5
        self.gram = torch.cat(
            [
                torch.cat([decay * K_old, across], 1),
                torch.cat([across.T, (1 - decay) * self.gram], 1),
            ]
        )
        self.unstacked = new
        self.U = replace(
            new, Y=torch.cat([decay**0.5 * old.Y, (1 - decay) ** 0.5 * new.Y])
        )

    def begin_anew(self) -> None:
        """Without what was stacked: the new one alone."""
        self.gram, self.top = self.fresh
        if isinstance(self.U, Sharded):
            self.U = self.unstacked

    def truncate(self, k: int) -> Task | None:
        """The stack becomes what its k leading directions keep of it."""
        if isinstance(self.U, Sharded):
            V = self.V[:, :k]
            self.U, self.gram = (
                replace(self.U, Y=self.U.combine(V)),
                V.T @ self.gram @ V,
            )
            return None
        return self._keep(_truncated, k, *self.stacked, self.V[:, :k])

    def _keep(
        self,
        function: Function,
        k: int,
        *args: Tensor | Operator,
        averaging: bool = False,
    ) -> Task:
        """U becomes a basis of k directions, where the last one was if that is not needed any more."""
        before = (
            None
            if self.previous is None or averaging or not self.gram.is_cuda
            else self.previous.U
        )
        self.writes = isinstance(before, Merged)
        rooms = (
            (before.Y, before.scale, None)
            if isinstance(before, Merged)
            else (None, None, None)
        )
        size = k * self.U.n * (2 if self.half else self.gram.element_size())
        return Task(
            function, args, {"half": self.half}, self._kept, self.timer, rooms, size
        )

    def _kept(self, Y: Tensor, scale: Tensor, gram: Tensor) -> None:
        self.U, self.gram = Merged(Y, scale, self.U.shape), gram

    def block(self, relative: bool) -> tuple[Block, list[tuple[Tensor, Tensor]]]:
        """The finished block, and what has to be copied into which of its tensors."""
        new = self.U, self.omega, self.gram, self.top, relative
        pairs = (
            None if self.previous is None else self.previous.renewed(*new, self.base)
        )
        if self.previous is not None and pairs is not None:
            block = self.previous
        else:
            block = Block(
                _own(self.U),
                self.omega,
                self.gram.clone(),
                self.top.clone(),
                relative,
                base=self.base,
                graft=self.graft,
            )
        block.sketch_error, block.patience = self.error, self.patience
        return block, pairs or []


def _basis(
    U: Operator, V: Tensor, length: Tensor, *, half: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Y, its scale and its Gram for UV, whose length is known."""
    with coarser(half and V.is_cuda):
        Y = U.combine(V.to(U.dtype))
    return _parts(Merged.of(Y, U.shape, half, length))


@contextmanager
def coarser(allowed: bool) -> Iterator[None]:
    """Products of float32 numbers with the digits that float16 has (TF32), which is what a basis in half precision keeps."""
    if not (
        allowed and hasattr(torch.backends.cuda.matmul, "fp32_precision")
    ):  # not so before torch 2.9
        yield
        return
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def _whole(U: Operator, length: Tensor, *, half: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The same for U itself."""
    return _parts(Merged.of(U.explicit().U.T, U.shape, half, length))


def _gram_of_both(
    old: Merged, new: Merged, K_old: Tensor, K_new: Tensor, *, decay: float
) -> tuple[Tensor]:
    """The Gram of [√δ·U_old, √(1−δ)·U_new]."""
    across = product(old.Y.to(new.Y.dtype), new.Y.T) * (
        old.scale * new.scale * (decay * (1 - decay)) ** 0.5
    )
    return (
        torch.cat(
            [
                torch.cat([decay * K_old, across], 1),
                torch.cat([across.T, (1 - decay) * K_new], 1),
            ]
        ),
    )


def _truncated(
    old: Merged, new: Merged, W: Tensor, *, half: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """[U_old, U_new]W as a basis."""
    W = W.to(old.dtype)
    if not half:
        return _parts(
            Merged.of(
                old.combine(W[: old.samples]) + new.combine(W[old.samples :]), old.shape
            )
        )
    scale = torch.maximum(old.scale, new.scale)
    W = torch.cat(
        [W[: old.samples] * (old.scale / scale), W[old.samples :] * (new.scale / scale)]
    ).T.to(torch.float16)
    Y = torch.mm(W[:, : old.samples].contiguous(), old.Y.to(torch.float16))
    Y.addmm_(
        W[:, old.samples :].contiguous(), new.Y
    )  # orthonormal combinations of numbers of size 1: no overflow
    return _parts(Merged(Y, scale, old.shape))


def _parts(U: Merged) -> tuple[Tensor, Tensor, Tensor]:
    return U.Y, U.scale, U.gram()


def _own(U: Operator) -> Operator:
    """Factors without the rest of a batch of which they are a part; on a GPU, where they are written to, none of others."""
    if not isinstance(U, Implicit | Windows):
        return U
    whole: dict[str, Any] = {
        name: t for name, t in vars(U).items() if isinstance(t, Tensor)
    }
    return replace(
        U,
        **{
            name: t.clone()
            for name, t in whole.items()
            if t.is_cuda or t.untyped_storage().nbytes() > t.nbytes
        },
    )


def _factors(
    U: Implicit | Windows, rank: int, curvature: Curvature, generator: torch.Generator
) -> Operator:
    """The implicit form: rank-r factors, or all of them where they are no more."""
    if curvature.combine == "exact" and rank >= U.rank:
        return U
    factors = U.implicit() if isinstance(U, Windows) else U
    precision = factors.G.dtype  # half is enough for factors, not for their products
    factors = reduced(factors.to(wide(precision)), rank, generator).to(precision)
    return (
        Independent(factors.G, factors.A)
        if curvature.combine == "independent"
        else factors
    )
