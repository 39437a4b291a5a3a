"""What the benchmark trains: a network, and made-up data of which there is something to learn.

Images are a smooth random prototype of their class, faint in noise, and one label in four is drawn at random. Tokens follow a
fixed random Markov chain over a Zipf distribution. Both come from a seed, on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from seng.lab import models
from seng.lab.names import unknown

Batch = tuple[Tensor, Tensor]  # inputs, targets
FAINT = 0.3  # of the prototypes in noise of 1


@dataclass(frozen=True)
class Task:
    """A network, its data, and how it is trained and measured unless told otherwise."""

    name: str
    build: Callable[[], nn.Module]
    data: Callable[[Task, Generator, int], list[Batch]]
    batch: int
    size: int  # of the images' sides, or the context
    classes: int  # or the vocabulary
    convolutional: bool = False  # whether channels_last applies
    lr: float = 0.02  # of SGD and SENG
    pool: int = 8  # batches that the steps go around in
    every: int = 200  # T
    warm: int = 20  # steps of SGD before anything is measured
    window: int = 5  # steps that are timed together
    rounds: int = 7

    def loss(self, out: Tensor, target: Tensor) -> Tensor:
        """Mean over samples and positions."""
        return F.cross_entropy(out.flatten(0, -2), target.flatten())

    def batches(
        self, seed: int, device: torch.device, count: int
    ) -> list[Batch]:
        """So many, always the same."""
        return self.data(self, Generator(device).manual_seed(seed), count)


def images(task: Task, generator: Generator, count: int) -> list[Batch]:
    """(B, 3, size, size) in float32 and labels (B,)."""
    like: dict[str, Any] = {"generator": generator, "device": generator.device}
    prototypes = torch.randn(
        task.classes, 3, 4, 4, **like, dtype=torch.float32
    )
    out = []
    for _ in range(count):
        y, other = torch.randint(task.classes, (2, task.batch), **like)
        x = F.interpolate(
            FAINT * prototypes[y], (task.size, task.size), mode="bilinear"
        )
        x += torch.randn(x.shape, **like, dtype=x.dtype)
        y = torch.where(torch.rand(task.batch, **like) < 0.25, other, y)
        out.append(
            (x.to(memory_format=memory_format(task, generator.device)), y)
        )
    return out


def tokens(task: Task, generator: Generator, count: int) -> list[Batch]:
    """(B, size) tokens and the token that follows each."""
    like: dict[str, Any] = {"generator": generator, "device": generator.device}
    zipf = 1 / torch.arange(3, task.classes + 3, device=generator.device)
    follows = torch.multinomial(
        zipf, 4 * task.classes, True, generator=generator
    ).view(-1, 4)
    rows, length = count * task.batch, task.size + 1
    new = torch.multinomial(
        zipf, rows * length, True, generator=generator
    ).view(rows, length)
    which = torch.multinomial(
        torch.tensor([8.0, 4.0, 2.0, 1.0]).to(zipf),
        rows * length,
        True,
        generator=generator,
    )
    which, stays = (
        which.view(rows, length),
        torch.rand(rows, length, **like) < 0.8,
    )
    text = [new[:, 0]]
    for t in range(1, length):
        text.append(
            torch.where(stays[:, t], follows[text[-1], which[:, t]], new[:, t])
        )
    chunks = torch.stack(text, 1).split(task.batch)
    return [
        (chunk[:, :-1].contiguous(), chunk[:, 1:].contiguous())
        for chunk in chunks
    ]


def memory_format(task: Task, device: torch.device) -> torch.memory_format:
    """channels_last where it applies."""
    return (
        torch.channels_last
        if task.convolutional and device.type == "cuda"
        else torch.contiguous_format
    )


TASKS = {
    task.name: task
    for task in (
        Task(
            "resnet18",
            models.resnet18,
            images,
            256,
            32,
            10,
            True,
            lr=0.01,
            warm=50,
            window=10,
            rounds=15,
        ),
        Task(
            "vgg16_bn",
            models.vgg16_bn,
            images,
            256,
            32,
            10,
            True,
            lr=0.003,
            warm=50,
            window=10,
            rounds=15,
        ),
        Task(
            "resnet50", models.resnet50, images, 256, 224, 1000, True, pool=4
        ),
        Task("gpt2", models.gpt2, tokens, 16, 1024, 50257),
        Task(
            "vit_s16", models.vit_s16, images, 256, 224, 1000, lr=0.01, pool=4
        ),
        Task(
            "small_cnn",
            models.small_cnn,
            images,
            128,
            32,
            10,
            True,
            lr=0.005,
            every=50,
            warm=50,
            rounds=11,
        ),
    )
}


def chosen(what: str, name: str, known: list[str]) -> str:
    """`name`, if there is one; else an error in one sentence, with what may have been meant."""
    if name in known:
        return name
    raise ValueError(unknown(f"unknown {what}", name, known))
