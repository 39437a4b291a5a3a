"""What SENG keeps of a layer between refreshes: U, its Gram, and the base P that it lies over."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from seng.linalg.numerics import deviation, eigh
from seng.linalg.operators import Operator, Shape
from seng.linalg.sketch import IDENTITY, Omega
from seng.metrics.metric import UNSAVED, State, tensors_of
from seng.metrics.woodbury import LowRankSolver, factorized

LEADING = (
    16  # directions that the sketch error of a form without a basis looks at
)


@dataclass(frozen=True)
class LowRankState(State):
    """U, ready to be solved with at any λ."""

    U: Operator
    omega: Omega
    gram: Tensor  # K = ΞᵀΞ, (ϱ, ϱ)
    top: Tensor  # its largest eigenvalue, ()
    relative: bool  # whether the damping is in units of `top`
    P: Any = None  # the state of the base; None: I
    graft: bool = False
    merge_error: Tensor | None = field(
        default=None, metadata=UNSAVED
    )  # of a sketch that chose a basis
    Xi: Operator = field(init=False)
    white: Any = field(init=False)  # P^{-½}
    failures: Tensor = field(init=False)

    def __post_init__(self) -> None:
        white = None if self.P is None else self.P.to_power(-0.5)
        count = torch.zeros((), dtype=torch.int64, device=self.gram.device)
        object.__setattr__(self, "Xi", self.omega.of(self.U))
        object.__setattr__(self, "white", white)
        object.__setattr__(self, "failures", count)

    @property
    def form(self) -> str:  # type: ignore[override]
        return self.U.form

    @property
    def base(self) -> str:  # type: ignore[override]
        return "identity" if self.P is None else str(self.P.base)

    @property
    def bytes(self) -> int:
        kept = tensors_of(self.U, self.P, self.white)
        return sum(t.numel() * t.element_size() for t in kept)

    @property
    def dtype(self) -> torch.dtype:
        return self.gram.dtype

    @property
    def columns(self) -> int:  # type: ignore[override]
        return self.U.samples

    def fits(self, shape: Shape) -> bool:
        return self.form == "sharded" or self.U.shape == shape

    def fine(self) -> Tensor:
        return self.top.isfinite() & self.gram.isfinite().all()

    def at(self, damping: float) -> LowRankSolver:
        (core,) = factorized([self.gram], [self.top], [damping], self.relative)
        return self.solver(*core)

    def solver(self, lam: Tensor, inverse: Tensor) -> LowRankSolver:
        """At a λ whose factorization is at hand."""
        parts = self.U, self.omega, self.Xi
        return LowRankSolver(
            *parts, lam, inverse, self.white, self.graft, self.failures
        )

    def spectrum(
        self, damping: float | None
    ) -> tuple[float, float, float | None]:
        largest, trace = float(self.top), float(eigh(self.gram)[0].sum())
        unit = largest if self.relative else 1.0
        if self.relative and largest <= 0 and damping is not None:
            return largest, trace, 1.0
        return largest, trace, None if damping is None else damping * unit

    @property
    def sketch_error(self) -> Tensor | float | None:  # type: ignore[override]
        """‖e − ê‖/‖e‖ of the leading energies and what the sketch sees of them."""
        if self.form == "merged":
            return self.merge_error
        if self.omega == IDENTITY:
            return 0.0
        values, V = eigh(self.gram)
        return deviation(self.U.combine(V[:, :LEADING]), values[:LEADING])
