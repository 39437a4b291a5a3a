"""Small tables on their way to a device that is never waited for.

Copies from ordinary memory make the host wait, and so does asking for page-locked memory: so a few
page-locked buffers are kept and used in turn, each when its last copy has gone through.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import cycle

import torch
from torch import Tensor

SLOTS = 32  # buffers of a device, which are used in turn
LEAST = 2**14  # bytes of a buffer


class _Slot:
    """A page-locked buffer, and the event that says that its last copy has gone through."""

    def __init__(self) -> None:
        self.buffer = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.gone = torch.cuda.Event()

    def send(
        self, numbers: Tensor, device: torch.device, to: Tensor | None
    ) -> Tensor:
        self.gone.synchronize()
        size = numbers.nbytes
        if size > self.buffer.numel():
            self.buffer = torch.empty(
                max(LEAST, 2 ** size.bit_length()),
                dtype=torch.uint8,
                device="cpu",
                pin_memory=True,
            )
        flat = self.buffer[:size].view(numbers.dtype)
        staged = flat.view(numbers.shape)
        staged.copy_(numbers)
        if to is None or to.shape != staged.shape:
            to = torch.empty_like(staged, device=device)
        to.copy_(staged, non_blocking=True)
        self.gone.record(torch.cuda.current_stream(device))
        return to


_SLOTS: defaultdict[torch.device, Iterator[_Slot]] = defaultdict(
    lambda: cycle([_Slot() for _ in range(SLOTS)])
)


def send(
    numbers: Tensor, device: torch.device, to: Tensor | None = None
) -> Tensor:
    """`numbers` of the host on `device`, in the tensor `to` if it has room for them."""
    if device.type != "cuda":
        return numbers.to(device)
    return next(_SLOTS[device]).send(numbers.contiguous(), device, to)
