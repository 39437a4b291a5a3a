"""What the contenders of a benchmark share, and one contender with a model of its own."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from seng.lab.bench.contenders import Setting, contender, state_bytes
from seng.lab.bench.options import Options
from seng.lab.bench.tasks import Batch, Task, memory_format


class Arena:
    """What all contenders share: the task, the pool of batches, the weights to start from."""

    def __init__(self, task: Task, options: Options) -> None:
        self.task, self.device = task, options.device
        self.compile, self.seed = options.which.compile, options.amounts.seed
        batches = task.batches(self.seed, self.device, task.pool + task.warm)
        self.pool, self.unseen = batches[: task.pool], batches[task.pool :]
        model = self.model()
        self.parameters = sum(p.numel() for p in model.parameters())
        self.start = {
            name: t.clone() for name, t in model.state_dict().items()
        }

    def model(self) -> nn.Module:
        """As it is initialised, always alike."""
        torch.manual_seed(self.seed)
        with self.device:
            model = self.task.build()
        return model.to(memory_format=memory_format(self.task, self.device))  # type: ignore[call-overload, no-any-return]

    def backward(self, forward: Any, batch: Batch) -> Tensor:
        """The loss; its gradients are left with the parameters."""
        with torch.autocast(
            self.device.type,
            torch.bfloat16,
            enabled=self.device.type == "cuda",
        ):
            loss = self.task.loss(forward(batch[0]), batch[1])
        loss.backward()
        return loss.detach()

    def wait(self) -> None:
        """Until the device has done all that it was told."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()


class Entrant:
    """One contender with a model of its own."""

    def __init__(
        self, name: str, arena: Arena, setting: Setting, refresh_every: int
    ) -> None:
        self.arena, self.period = arena, refresh_every
        self.model = arena.model()
        self.model.load_state_dict(arena.start)
        self.optimizer = contender(
            name, self.model, setting, refresh_every, arena.task.lr
        )
        self.forward = compiled(self.model) if arena.compile else self.model
        self.batches: Iterator[Batch] = cycle(arena.pool)
        self.loss = torch.zeros(())

    def steps(self, count: int) -> None:
        """Training steps, as anyone writes them."""
        for _ in range(count):
            self.optimizer.zero_grad()
            self.loss = self.arena.backward(self.forward, next(self.batches))
            self.optimizer.step()

    def seconds(self, count: int) -> float:
        """Per step, over a window that is waited for before and after but not inside."""
        self.arena.wait()
        start = perf_counter()
        self.steps(count)
        self.arena.wait()
        return (perf_counter() - start) / count

    def rewind(self) -> None:
        """To the weights of the start, with a refresh due where there are refreshes."""
        for _ in range(self.period):
            if getattr(self.optimizer, "refresh_due", True):
                break
            self.steps(1)
        self.model.load_state_dict(self.arena.start)

    def resident(self) -> int:
        """Bytes that are there between steps, gradients left aside."""
        tensors = [
            *self.model.parameters(),
            *self.model.buffers(),
            *(t for batch in self.arena.pool for t in batch),
        ]
        return sum(
            t.numel() * t.element_size() for t in tensors
        ) + state_bytes(self.optimizer)


def compiled(model: nn.Module) -> Any:
    """torch.compile, which keeps what it compiled by code object and does not look at hooks: so each model gets its own."""

    def forward(x: Tensor) -> Tensor:
        out: Tensor = model(x)
        return out

    forward.__code__ = forward.__code__.replace()
    return torch.compile(forward, fullgraph=True)
