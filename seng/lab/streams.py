"""Data sets that are too large to hold: folders of images, decoded while the device trains."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from seng.lab.datasets import Arrays, Data, load, stream
from seng.lab.datasets.folders import listing

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # the usual ones of ImageNet


@dataclass(frozen=True)
class Streamed(Data):
    """Its arrays are empty: epochs come from the folder."""

    folder: Path = Path()
    images: int = 0  # to train with

    def epoch(self, batch: int, seed: int, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Training images (B, 3, 224, 224) as uint8, each a window of its own, and classes; whole batches on the device."""
        for x, y in stream(self.folder, "train", batch, seed=seed, epoch=epoch):
            if len(y) == batch:
                yield self._moved(x), self._moved(y)

    def held_out(self, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The middles of the validation images."""
        for x, y in stream(self.folder, "val", batch, train=False):
            yield self._moved(x), self._moved(y)

    def _moved(self, x: Tensor) -> Tensor:
        return x.to(self.train.y.device, non_blocking=True)


def open_data(name: str, folder: Path | None) -> Data:
    """A data set in memory, or ImageNet as a stream."""
    if name != "imagenet":
        return load(name, folder)
    place = Path(folder or os.environ.get("SENG_DATA", "data")) / name
    found = listing(place, "train")
    empty = Arrays(torch.empty(0, 3, 0, 0, dtype=torch.uint8), torch.empty(0, dtype=torch.int64))
    return Streamed(name, empty, empty, len(found.classes), MEAN, STD, folder=place, images=len(found.paths))
