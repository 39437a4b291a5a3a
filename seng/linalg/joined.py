"""Operators put together: U + V, column by column, and [U_1, U_2, …], sample after sample.

Where two operators keep U in the same way, their tensors are joined. Else factors are worked out in
full, and where these do not exist, or would be larger than U itself, columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from seng.linalg.operators import Explicit, Operator


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
