"""Parameters that are spread over ranks: DTensors, as FSDP2 and HSDP make them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def is_sharded(t: Any) -> bool:
    """Whether it is a DTensor."""
    return hasattr(t, "device_mesh") and hasattr(t, "to_local")


def local(t: Tensor) -> Tensor:
    """This rank's part of it."""
    return t.to_local() if is_sharded(t) else t  # type: ignore[attr-defined]


def whole(t: Tensor) -> Tensor:
    """All of it, on every rank."""
    return t.full_tensor() if is_sharded(t) else t  # type: ignore[attr-defined]


def like(part: Tensor, p: Tensor, *more: int) -> Tensor:
    """A DTensor of which `part` is this rank's part, spread as p is.

    It has p's shape, with `more` dimensions at the end.
    """
    from torch.distributed.tensor import DTensor

    shape = torch.Size([*p.shape, *more])
    stride = torch.empty(shape, device="meta").stride()
    mesh, placements = p.device_mesh, p.placements  # type: ignore[attr-defined]
    out: Tensor = DTensor.from_local(
        part, mesh, placements, run_check=False, shape=shape, stride=stride
    )
    return out


def spread(t: Tensor, p: Tensor) -> Tensor:
    """This rank's part of a whole tensor whose first dimensions are those of p."""
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = p.device_mesh, p.placements  # type: ignore[attr-defined]
    return local(distribute_tensor(t, mesh, placements, src_data_rank=None))
