"""Per-sample gradients about their mean: Ū = UH, so that ŪŪᵀ is the covariance of the samples.

    ŪŪᵀ = UUᵀ − (Us)(Us)ᵀ,   H = I − γssᵀ,   γ = (1 − √(1 − ‖s‖²))/‖s‖²

U's columns are √w_i·u_i and s_i = √w_i, so that Us is the mean Σ w_i u_i. Weights that do not add
up to 1 are those of a layer that some samples have not reached: their columns are zeros, which
count in the mean. H is symmetric and H² = I − ssᵀ.

A Gram in float32 would lose the spread beside the mean. So columns are centred before their Gram
is taken, and a Gram of factors is taken and centred in float64. What is left of it below rounding
is no curvature: it becomes exactly 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor

from seng.linalg.numerics import widest
from seng.linalg.operators import Explicit, Operator, Slabs, product

# What is left of U's trace below 10·ε·ϱ is a Gram's rounding, and below (10·ε)² that of samples,
# with the ε of each.
ROUNDING = 10
WHOLE = 1e-6  # what ‖s‖² may differ from 1 by rounding


def _inside(name: str) -> Any:
    """What the operator inside has of that name."""
    return property(lambda self: getattr(self.U, name))


@dataclass(frozen=True)
class Centred(Operator):
    """UH of another operator U."""

    form = _inside("form")
    waits = _inside("waits")
    values = _inside("values")
    shape = _inside("shape")
    kappa = _inside("kappa")
    samples = _inside("samples")
    dtype = _inside("dtype")
    factored = _inside("factored")
    by_columns = _inside("by_columns")

    U: Operator
    s: Tensor = field(metadata={"cast": False})  # (ϱ,), as precise as can be

    def tensors(self) -> list[Tensor]:
        return [*self.U.tensors(), self.s]

    def through(self, change: Callable[[Operator], Operator]) -> Self:
        return replace(self, U=change(self.U))

    def about_mean(self, V: Tensor) -> Tensor:
        """HV of V (ϱ, …), in the precision of V."""
        return about_mean(V, self.s)

    def slabs(self, dtype: torch.dtype) -> Slabs:
        for place, X in self.U.slabs(dtype):
            yield place, self.about_mean(X)

    def rmv(self, z: Tensor) -> Tensor:
        return self.about_mean(self.U.rmv(z))

    def mv(self, c: Tensor) -> Tensor:
        return self.U.mv(self.about_mean(c))

    def combine(self, V: Tensor) -> Tensor:
        return self.U.combine(self.about_mean(V))

    def weighted(self, weights: Tensor) -> Operator:
        return self.through(lambda U: U.weighted(weights))

    def explicit(self) -> Explicit:
        """The centred columns; zeros where they do not differ from their mean."""
        rows = self.U.explicit().U.T.to(self.dtype)
        return Explicit(differing(rows, self.s).T, self.shape)

    def gram(self) -> Tensor:
        """HUᵀUH; zeros where columns do not differ from their mean."""
        if not self.U.by_columns:
            K = self.U.to(widest(self.s)).gram()
            centred = self.about_mean(self.about_mean(K).T)
            fine = differs(K.trace(), centred.trace(), len(K), self.dtype)
            return (centred * fine).to(self.dtype)
        out = self._empty(self.samples, self.samples).zero_()
        for _, X in self.U.slabs(self.dtype):
            X = differing(X.flatten(1), self.s)
            out += product(X, X.T)
        return out


def differing(rows: Tensor, s: Tensor) -> Tensor:
    """HUᵀ of Uᵀ (ϱ, n); zeros where rows do not differ from their mean by more than rounding."""
    centred = about_mean(rows, s)
    lengths = torch.stack(torch._foreach_norm([rows, centred]))
    whole, left = lengths.square()
    fine = differs(whole, left, len(rows), rows.dtype)
    known = fine.is_cpu and bool(fine)  # a GPU is not waited for
    return centred if known else centred.mul_(fine)


def about_mean(V: Tensor, s: Tensor) -> Tensor:
    """HV of V (ϱ, …) for roots s (ϱ,) of weights."""
    square = s @ s
    missing = 1 - square
    missing = torch.where(missing > WHOLE, missing, 0)  # not by rounding
    gamma = (1 - missing.sqrt()) / square
    s = s.to(V.dtype)
    rows = V.reshape(len(V), -1)
    mean = s @ rows
    return torch.addr(rows, s, gamma.to(V.dtype) * mean, alpha=-1).view(
        V.shape
    )


def differs(
    whole: Tensor, centred: Tensor, samples: int, dtype: torch.dtype
) -> Tensor:
    """Whether samples differ from their mean by more than rounding; from both Grams' traces."""
    of_gram = ROUNDING * torch.finfo(widest(whole)).eps * samples
    of_samples = (ROUNDING * torch.finfo(dtype).eps) ** 2
    return centred > max(of_gram, of_samples) * whole


def centred(U: Operator, s: Tensor) -> Operator:
    """Ū, as columns where U is kept so."""
    out = Centred(U, s)
    return out.explicit() if U.form == "explicit" else out
