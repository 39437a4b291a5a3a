"""How much memory a device has free, and bytes in words: what budgets are made of."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import torch
from torch import nn


def memory_budget(memory: int | float | None, module: nn.Module) -> int | None:
    """A limit in bytes; a fraction is of what is free now where the parameters are."""
    if memory is None or isinstance(memory, int):
        return memory
    device = next(module.parameters()).device
    return int(memory * free_memory(device))


def free_memory(device: torch.device) -> int:
    """The number of bytes that can still be allocated on this device."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device)
        return free + cached - torch.cuda.memory_allocated(device)
    free = 4 * 2**30  # of a system that does not say
    with suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        entry = next(line for line in lines if line.startswith("MemAvailable"))
        free = int(entry.split()[1]) * 1024
    with suppress(OSError, ValueError):  # a container may have less; or "max"
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        free = min(free, limit - used)
    return free


def size_of(count: float) -> str:
    """A number of bytes in words, such as "1.5 MiB"."""
    unit, digits = "B", 0
    for larger in ("KiB", "MiB", "GiB"):
        if count < 1024:
            break
        count /= 1024
        unit, digits = larger, 1
    return f"{count:.{digits}f} {unit}"
