"""Data sets that are too large to hold: folders of images, decoded while the device trains."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from seng.lab.datasets import Arrays, Data, load, stream
from seng.lab.datasets.folders import listing
from seng.lab.ranks import ALONE, Ranks

MEAN, STD = (
    (0.485, 0.456, 0.406),
    (0.229, 0.224, 0.225),
)  # the usual ones of ImageNet


@dataclass(frozen=True)
class Streamed(Data):
    """Its arrays are empty: epochs come from the folder."""

    folder: Path = Path()
    images: int = 0  # to train with

    def epoch(
        self, batch: int, seed: int, epoch: int, ranks: Ranks = ALONE
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Training images (B, 3, 224, 224) as uint8, each a window of its own, and classes; a rank's part of whole batches,
        on the device."""
        whole = stream(
            self.folder,
            "train",
            batch,
            workers=_workers(ranks),
            seed=seed,
            epoch=epoch,
        )
        for x, y in (
            whole
            if ranks.count == 1
            else _only(whole, lambda batches: map(ranks.part, batches))
        ):
            if len(y) == batch // ranks.count:
                yield self._moved(x), self._moved(y)

    def held_out(
        self, batch: int, ranks: Ranks = ALONE
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """The middles of the validation images; a rank's share of them."""
        whole = stream(
            self.folder, "val", batch, workers=_workers(ranks), train=False
        )
        for x, y in whole if ranks.count == 1 else _only(whole, ranks.share):
            yield self._moved(x), self._moved(y)

    def _moved(self, x: Tensor) -> Tensor:
        return x.to(self.train.y.device, non_blocking=True)


Rows = Iterable[list[int]]  # the images of each batch


class _Chosen(Sampler[list[int]]):
    """What is left of a loader's batches, so that a rank decodes nothing for others."""

    def __init__(self, batches: Rows, choose: Callable[[Rows], Rows]) -> None:
        self.batches, self.choose = batches, choose

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.choose(self.batches))


def _only(
    whole: DataLoader[Any], choose: Callable[[Rows], Rows]
) -> DataLoader[Any]:
    """The same batches in the same order, which the generator decides, but for what is left out of them."""
    return DataLoader(
        whole.dataset,
        batch_sampler=_Chosen(whole.batch_sampler, choose),  # type: ignore[arg-type]
        num_workers=whole.num_workers,
        generator=whole.generator,
        pin_memory=whole.pin_memory,
    )


def _workers(ranks: Ranks) -> int | None:
    """The ranks of a machine share its cores; None: as many as there are."""
    return (
        None
        if ranks.count == 1
        else max(1, min(16, (os.cpu_count() or 1) // ranks.local_count))
    )


def open_data(name: str, folder: Path | None) -> Data:
    """A data set in memory, or ImageNet as a stream."""
    if name != "imagenet":
        return load(name, folder)
    place = Path(folder or os.environ.get("SENG_DATA", "data")) / name
    found = listing(place, "train")
    empty = Arrays(
        torch.empty(0, 3, 0, 0, dtype=torch.uint8),
        torch.empty(0, dtype=torch.int64),
    )
    return Streamed(
        name,
        empty,
        empty,
        len(found.classes),
        MEAN,
        STD,
        folder=place,
        images=len(found.paths),
    )
