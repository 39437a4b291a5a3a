"""Powers of a base where a layer's parameters are spread over ranks (FSDP2, HSDP).

    P^e X = c(I + V_G diag(w_G) V_Gᵀ) X (I + V_A diag(w_A) V_Aᵀ)

The factors are whole on every rank. A rank that has rows of X applies those of the inputs to them,
and of the outputs it needs V_Gᵀ X, r_G × n_A numbers that the ranks add up. Ranks that have other
parts of X (transposed and grouped convolutions) put X together from them.

`sums` of z (…, n of this rank) gives what is to be added up, so that one message serves all layers;
a call takes z and what was added up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from seng.distributed.sharded import Place
from seng.distributed.team import Team
from seng.linalg.operators import Operator

ADDING = "a product with a base of spread parameters"


@dataclass(frozen=True)
class ShardedPower:
    """P^e of this rank's part of a vector."""

    power: Any  # P^e of whole vectors
    team: Team  # the ranks that have the other parts

    def rows(self: Any, Y: Tensor) -> Tensor:
        """P^e of each row of Y (k, n of this rank)."""
        sums = self.sums(Y)
        self.team.sum_(sums, ADDING)
        return self(Y, *sums)  # type: ignore[no-any-return]

    def of(self, U: Operator) -> Operator:
        """P^e U of a spread U."""
        return U.mapped(self.rows)


@dataclass(frozen=True)
class RowsPower(ShardedPower):
    """Of a rank that has m rows of X (n_G, n_A)."""

    V_G: Tensor  # its rows of V_G, (m, r_G)
    widths: list[int]  # columns of each parameter

    def _matrix(self, z: Tensor) -> Tensor:
        """Rows (…, m, n_A) of z, where one parameter comes after the other."""
        m = len(self.V_G)
        parts = z.split([m * width for width in self.widths], -1)
        pairs = zip(parts, self.widths, strict=True)
        rows = [part.unflatten(-1, (m, width)) for part, width in pairs]
        return torch.cat(rows, -1)

    def sums(self, z: Tensor) -> list[Tensor]:
        return [self.V_G.T @ self._matrix(z)]

    def __call__(self, z: Tensor, added: Tensor) -> Tensor:
        P = self.power
        V_A = P.V_A[0]
        X = self._matrix(z)
        X = X + self.V_G @ (P.w_G[0] * added)
        X = X + ((X @ V_A) * P.w_A[0]) @ V_A.T
        parts = (P.c[0] * X).split(self.widths, -1)
        return torch.cat([part.flatten(-2) for part in parts], -1)


@dataclass(frozen=True)
class GatheredPower(ShardedPower):
    """Of a rank that has any numbers of X: the ranks put X together."""

    index: Tensor  # where its numbers are, (n of this rank,)
    n: int

    def sums(self, z: Tensor) -> list[Tensor]:
        X = z.new_zeros(*z.shape[:-1], self.n)
        X[..., self.index] = z
        return [X]

    def __call__(self, z: Tensor, added: Tensor) -> Tensor:
        many = added.view(-1, self.n)
        found: Tensor = self.power.rows(many)[:, self.index]
        return found.view_as(z)


def sharded(power: Any, place: Place) -> ShardedPower:
    """A Kronecker power of whole vectors, where these are spread."""
    if place.by_rows:
        V_G = place.rows(power.V_G[0])
        return RowsPower(power, place.team, V_G, place.widths)
    h, n_G, _ = power.V_G.shape
    n = h * n_G * power.V_A.shape[1]
    index = place.cut(torch.arange(n, device=power.c.device))
    return GatheredPower(power, place.team, index, n)
