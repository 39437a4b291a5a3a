"""Small tables on their way to a device that is never waited for.

Copies from ordinary memory make the host wait, and so does asking for page-locked memory: so a few page-locked buffers are kept
and used in turn, each when its last copy has gone through.
"""

from __future__ import annotations

import torch
from torch import Tensor

SLOTS = 32


class _Slot:
    def __init__(self) -> None:
        self.buffer = torch.empty(2**14, dtype=torch.uint8, device="cpu", pin_memory=True)
        self.gone = torch.cuda.Event()

    def send(self, numbers: Tensor, device: torch.device, to: Tensor | None) -> Tensor:
        self.gone.synchronize()
        size = numbers.numel() * numbers.element_size()
        if size > self.buffer.numel():
            self.buffer = torch.empty(2 ** size.bit_length(), dtype=torch.uint8, device="cpu", pin_memory=True)
        staged = self.buffer[:size].view(numbers.dtype).view(numbers.shape).copy_(numbers)
        fits = to is not None and to.shape == staged.shape
        out = to.copy_(staged, non_blocking=True) if to is not None and fits else staged.to(device, non_blocking=True)
        self.gone.record(torch.cuda.current_stream(device))
        return out


_SLOTS: list[_Slot] = []
_turn = 0


def send(numbers: Tensor, device: torch.device, to: Tensor | None = None) -> Tensor:
    """`numbers` of the host on `device`, in the tensor `to` if it has room for them."""
    if device.type != "cuda":
        return numbers.to(device)
    global _turn
    _turn = (_turn + 1) % SLOTS
    while len(_SLOTS) <= _turn:
        _SLOTS.append(_Slot())
    return _SLOTS[_turn].send(numbers.contiguous(), device, to)
