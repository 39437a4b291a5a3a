"""Which processes share the curvature. So far there is one strategy, a process on its own."""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist
from torch import Tensor


def check_strategy(strategy: str | None) -> None:
    """None and "local" mean one process; several are refused: each would follow a curvature of its own."""
    if strategy not in (None, "local"):
        raise ValueError(f"unknown strategy {strategy!r}; this version has 'local', one process")
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise RuntimeError(
            f"SENG runs in one process in this version, and the process group has {dist.get_world_size()}: "
            "ranks with curvatures of their own would drift apart"
        )


def check_whole(params: Iterable[Tensor]) -> None:
    """Parameters that are spread over a device mesh (DTensor) are refused."""
    if any(hasattr(p, "device_mesh") for p in params):
        raise RuntimeError(
            "the parameters are DTensors, spread over a device mesh (FSDP2, tensor parallelism): in this version SENG works on "
            "whole parameters"
        )
