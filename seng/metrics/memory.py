"""How much memory the curvature may occupy, how much there is, and bytes in words."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from seng.metrics.curvature import Curvature


def budget(curvature: Curvature, module: nn.Module) -> int | None:
    """The memory limit in bytes; a fraction is of what is free now on the device of the parameters."""
    if curvature.memory is None or isinstance(curvature.memory, int):
        return curvature.memory
    return int(curvature.memory * free_memory(next(module.parameters()).device))


def free_memory(device: torch.device) -> int:
    """Bytes that can be had on the device now."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return (
            free
            + torch.cuda.memory_reserved(device)
            - torch.cuda.memory_allocated(device)
        )
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(
            int(line.split()[1]) * 1024
            for line in lines
            if line.startswith("MemAvailable")
        )
    except (OSError, StopIteration):
        free = 4 * 2**30  # a system that does not say
    try:  # a container may have less
        limit, used = (
            Path(f"/sys/fs/cgroup/memory.{what}").read_text().strip()
            for what in ("max", "current")
        )
        return free if limit == "max" else min(free, int(limit) - int(used))
    except (OSError, ValueError):
        return free


def size_of(count: float) -> str:
    """Bytes in words."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError
