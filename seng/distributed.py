"""Which processes share the curvature. So far there is one strategy, a process on its own."""

from __future__ import annotations

import torch.distributed as dist


def check_strategy(strategy: str | None) -> None:
    """None and "local" mean one process; several are refused: each would follow a curvature of its own."""
    if strategy not in (None, "local"):
        raise ValueError(f"unknown strategy {strategy!r}; this version has 'local', one process")
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise RuntimeError(
            f"SENG runs in one process in this version, and the process group has {dist.get_world_size()}: "
            "ranks with curvatures of their own would drift apart"
        )
