"""Peak memory of a piece of work, on a GPU by torch's own count, on a CPU by watching every tensor that is made."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakBytes(TorchDispatchMode):
    """The most bytes of tensors made inside the block that were alive at once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live: dict[int, int] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = {
            t.untyped_storage()._cdata
            for t in tree_leaves((args, kwargs))
            if isinstance(t, Tensor)
        }
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if (
                isinstance(t, Tensor)
                and (key := t.untyped_storage()._cdata) not in given
                and key not in self.live
            ):
                storage = t.untyped_storage()
                self.live[key] = storage.nbytes()
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._free, key)
        return out

    def _free(self, key: int) -> None:
        self.now -= self.live.pop(key, 0)


def clean(device: torch.device) -> None:
    """Let go of what nobody holds."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def peak(
    work: Callable[[], None], device: torch.device, resident: Callable[[], int]
) -> tuple[int, int | None]:
    """Bytes allocated at the peak, with what was there before (on a CPU `resident` says how much), and bytes reserved."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        work()
        torch.cuda.synchronize()
        return (
            torch.cuda.max_memory_allocated(),
            torch.cuda.max_memory_reserved(),
        )
    before = resident()
    with PeakBytes() as made:
        work()
    return before + made.peak, None
