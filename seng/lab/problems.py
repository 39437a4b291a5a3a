"""What is asked of a network: a loss to train with, and a metric on held-out data. Images and tokens stay on the device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from seng.lab.datasets import Data
from seng.lab.datasets.augment import Augment, normalise
from seng.lab.ranks import ALONE, Ranks
from seng.lab.streams import Streamed

CHUNK = 1000  # samples that are evaluated together
Batch = tuple[
    Tensor, Tensor
]  # what the network sees, and what it is asked for


class Problem(Protocol):
    """A kind of task."""

    metric: ClassVar[str]
    higher_is_better: ClassVar[bool]

    def batches(
        self,
        data: Data,
        batch: int,
        augment: Augment,
        order: Generator,
        chance: Generator,
        ranks: Ranks = ALONE,
    ) -> Iterator[Batch]:
        """One epoch, a rank's part of whole batches; `order` is the host's generator, `chance` the device's."""
        ...

    def steps(self, data: Data, batch: int) -> int:
        """Batches of an epoch."""
        ...

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Mean over samples."""
        ...

    def held_out(
        self, model: nn.Module, data: Data, ranks: Ranks = ALONE
    ) -> tuple[Tensor, Tensor]:
        """Loss and metric on the test set, which ranks share."""
        ...


def _full(out: Tensor) -> Tensor:
    """In float32 at least, where autocast computes in less."""
    return out.to(torch.promote_types(out.dtype, torch.float32))


def _held_out(data: Data, ranks: Ranks) -> Iterator[Batch]:
    in_memory = zip(
        data.test.x.split(CHUNK), data.test.y.split(CHUNK), strict=True
    )
    for x, y in (
        data.held_out(CHUNK, ranks)
        if isinstance(data, Streamed)
        else ranks.share(in_memory)
    ):
        yield normalise(x, data.mean, data.std), y


def _shuffled(
    data: Data,
    batch: int,
    augment: Augment,
    order: Generator,
    chance: Generator,
    ranks: Ranks,
) -> Iterator[Batch]:
    """Chance is drawn for the whole batch, so that an image meets the same whatever the number of ranks."""
    if isinstance(data, Streamed):
        for images, classes in data.epoch(
            batch, order.initial_seed(), 0, ranks
        ):
            seen = ranks.part(augment(ranks.among(images, batch), chance))
            yield normalise(seen, data.mean, data.std), classes
        return
    x, y = data.train.x, data.train.y
    shuffled = torch.randperm(len(y), generator=order).to(
        x.device, non_blocking=True
    )
    for rows in shuffled[: len(y) // batch * batch].split(batch):
        yield (
            normalise(
                ranks.part(augment(x[rows], chance)), data.mean, data.std
            ),
            y[ranks.part(rows)],
        )


@dataclass(frozen=True)
class Classification:
    """Cross-entropy, and the share of images that are classified right."""

    metric: ClassVar[str] = "accuracy"
    higher_is_better: ClassVar[bool] = True

    def steps(self, data: Data, batch: int) -> int:
        """Whole batches only."""
        return (
            data.images if isinstance(data, Streamed) else len(data.train.y)
        ) // batch

    def batches(
        self,
        data: Data,
        batch: int,
        augment: Augment,
        order: Generator,
        chance: Generator,
        ranks: Ranks = ALONE,
    ) -> Iterator[Batch]:
        """In another order every epoch."""
        return _shuffled(data, batch, augment, order, chance, ranks)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Cross-entropy."""
        return F.cross_entropy(model(batch[0]), batch[1])

    def held_out(
        self, model: nn.Module, data: Data, ranks: Ranks = ALONE
    ) -> tuple[Tensor, Tensor]:
        """Loss and accuracy."""
        loss = right = torch.zeros((), device=data.test.y.device)
        count = 0
        for x, y in _held_out(data, ranks):
            out = _full(model(x))
            loss = loss + F.cross_entropy(out, y, reduction="sum")
            right, count = right + (out.argmax(1) == y).sum(), count + len(y)
        return ranks.average(loss, count), ranks.average(right, count)


@dataclass(frozen=True)
class Reconstruction:
    """An autoencoder of images in [0, 1]: cross-entropy of the pixels, and an image's squared error, summed over pixels."""

    metric: ClassVar[str] = "squared error"
    higher_is_better: ClassVar[bool] = False

    def steps(self, data: Data, batch: int) -> int:
        """Whole batches only."""
        return len(data.train.y) // batch

    def batches(
        self,
        data: Data,
        batch: int,
        augment: Augment,
        order: Generator,
        chance: Generator,
        ranks: Ranks = ALONE,
    ) -> Iterator[Batch]:
        """Images flat, as they are: neither shifted nor normalised."""
        x = data.train.x
        shuffled = torch.randperm(len(x), generator=order).to(
            x.device, non_blocking=True
        )
        for rows in shuffled[: len(x) // batch * batch].split(batch):
            flat = x[ranks.part(rows)].flatten(1).float() / 255
            yield flat, flat

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Summed over pixels, as the classic experiments have it."""
        out = model(batch[0]).float()
        return F.binary_cross_entropy_with_logits(
            out, batch[1], reduction="sum"
        ) / len(out)

    def held_out(
        self, model: nn.Module, data: Data, ranks: Ranks = ALONE
    ) -> tuple[Tensor, Tensor]:
        """Loss and squared error."""
        loss = error = torch.zeros((), device=data.test.x.device)
        count = 0
        for x in ranks.share(data.test.x.split(CHUNK)):
            flat = x.flatten(1).float() / 255
            out = model(flat).float()
            loss = loss + F.binary_cross_entropy_with_logits(
                out, flat, reduction="sum"
            )
            error, count = (
                error + (out.sigmoid() - flat).square().sum(),
                count + len(x),
            )
        return ranks.average(loss, count), ranks.average(error, count)


@dataclass(frozen=True)
class Language:
    """The next token: cross-entropy in nats, which is the metric too."""

    context: int
    metric: ClassVar[str] = "nats per token"
    higher_is_better: ClassVar[bool] = False

    def steps(self, data: Data, batch: int) -> int:
        """So many that an epoch sees as many tokens as there are."""
        return len(data.train.x) // (batch * self.context)

    def batches(
        self,
        data: Data,
        batch: int,
        augment: Augment,
        order: Generator,
        chance: Generator,
        ranks: Ranks = ALONE,
    ) -> Iterator[Batch]:
        """Pieces of the text that begin anywhere."""
        steps, reach = self.steps(data, batch), torch.arange(self.context + 1)
        starts = torch.randint(
            len(data.train.x) - self.context,
            (steps, batch, 1),
            generator=order,
        )
        for rows in (starts + reach).to(
            data.train.x.device, non_blocking=True
        ):
            piece = data.train.x[ranks.part(rows)]
            yield piece[:, :-1], piece[:, 1:]

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Mean over tokens."""
        return F.cross_entropy(
            model(batch[0]).flatten(0, 1), batch[1].flatten()
        )

    def held_out(
        self, model: nn.Module, data: Data, ranks: Ranks = ALONE
    ) -> tuple[Tensor, Tensor]:
        """The whole test text, piece by piece."""
        count = (len(data.test.x) - 1) // self.context
        text = data.test.x[: count * self.context + 1]
        inputs, targets = text[:-1].view(count, -1), text[1:].view(count, -1)
        loss = torch.zeros((), device=text.device)
        tokens = 0
        for x, y in ranks.share(
            zip(inputs.split(64), targets.split(64), strict=True)
        ):
            loss = loss + F.cross_entropy(
                _full(model(x)).flatten(0, 1), y.flatten(), reduction="sum"
            )
            tokens += y.numel()
        mean = ranks.average(loss, tokens)
        return mean, mean
