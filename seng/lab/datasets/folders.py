"""ImageNet-style folders: SPLIT/CLASS/*.JPEG. Small ones are decoded once into an array, large ones while training."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from seng.lab.datasets.values import DataError, Report, silent

ENDINGS = (".jpeg", ".jpg", ".png")
AHEAD = 256  # images in flight while decoding
Box = tuple[float, float, float, float]


@dataclass(frozen=True)
class Listing:
    """The images of a split in a fixed order: by class, then by name."""

    paths: tuple[str, ...]
    labels: tuple[int, ...]
    classes: tuple[str, ...]


@lru_cache(maxsize=8)
def _listed(split: Path) -> Listing:
    classes = tuple(
        sorted(entry.name for entry in os.scandir(split) if entry.is_dir())
    )
    paths: list[str] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        with os.scandir(split / name) as entries:
            found = sorted(
                entry.path
                for entry in entries
                if entry.name.lower().endswith(ENDINGS)
            )
        if not found:
            raise DataError(
                f"{split / name} holds no image ({', '.join(ENDINGS)}): remove the folder or fill it"
            )
        paths += found
        labels += [label] * len(found)
    if not classes:
        raise DataError(
            f"{split} holds no folder of a class: expected {split.name}/CLASS/*.JPEG"
        )
    return Listing(tuple(paths), tuple(labels), classes)


def listing(folder: Path, split: str) -> Listing:
    """Both splits must have the same classes, as a class is a place in their order."""
    for name in ("train", "val"):
        if not (folder / name).is_dir():
            raise DataError(
                f"{folder} has no folder {name}: expected train/CLASS/*.JPEG and val/CLASS/*.JPEG"
            )
    if split not in ("train", "val"):
        raise DataError(
            f"there is no split {split!r}: there are train and val"
        )
    train, val = (
        _listed((folder / name).resolve()) for name in ("train", "val")
    )
    if odd := sorted(set(train.classes) ^ set(val.classes)):
        raise DataError(
            f"train and val of {folder} differ in {len(odd)} of their classes, {odd[0]} for one"
        )
    return train if split == "train" else val


def _opened(
    path: str, size: tuple[int, int], choose: Callable[[int, int], Box]
) -> np.ndarray[Any, Any]:
    """The chosen box of an image, resized; a JPEG is decoded no larger than that needs."""
    try:
        with Image.open(path) as image:
            width, height = image.size
            box = choose(width, height)
            needed = (
                math.ceil(width * size[0] / (box[2] - box[0])),
                math.ceil(height * size[1] / (box[3] - box[1])),
            )
            image.draft(
                "RGB", needed
            )  # a power of two smaller where that is still enough; of a PNG, nothing
            across, down = image.size[0] / width, image.size[1] / height
            pixels = image.convert("RGB")
    except (UnidentifiedImageError, OSError, SyntaxError) as error:
        raise DataError(
            f"{path} is not a whole image ({error}): replace it or remove it"
        ) from None
    inside = (
        box[0] * across,
        box[1] * down,
        min(box[2] * across, pixels.width),
        min(box[3] * down, pixels.height),
    )
    return np.asarray(
        pixels.resize(size, Image.Resampling.BILINEAR, inside)
    ).transpose(2, 0, 1)


def centre(share: float) -> Callable[[int, int], Box]:
    """The square in the middle, `share` of the shorter side wide."""

    def choose(width: int, height: int) -> Box:
        side = share * min(width, height)
        return (
            (width - side) / 2,
            (height - side) / 2,
            (width + side) / 2,
            (height + side) / 2,
        )

    return choose


def random_window(chance: random.Random) -> Callable[[int, int], Box]:
    """8 % to all of the area, 3:4 to 4:3 in shape; after ten that do not fit, the square in the middle."""

    def choose(width: int, height: int) -> Box:
        for _ in range(10):
            area = width * height * chance.uniform(0.08, 1)
            shape = math.exp(chance.uniform(math.log(3 / 4), math.log(4 / 3)))
            wide, high = math.sqrt(area * shape), math.sqrt(area / shape)
            if wide <= width and high <= height:
                left, top = (
                    chance.uniform(0, width - wide),
                    chance.uniform(0, height - high),
                )
                return left, top, left + wide, top + high
        return centre(1)(width, height)

    return choose


def decode(
    folder: Path,
    split: str,
    images: Path,
    labels: Path,
    size: int,
    report: Report = silent,
) -> None:
    """A whole split into two .npy files: the middle squares (N, 3, size, size) and the classes (N,)."""
    found = listing(folder, split)
    count = len(found.paths)

    def square(path: str) -> bytes:
        return _opened(path, (size, size), centre(1)).tobytes()

    with (
        ThreadPoolExecutor(os.cpu_count()) as pool,
        images.open("wb") as out,
    ):  # Pillow lets go of the interpreter
        header = {
            "descr": "|u1",
            "fortran_order": False,
            "shape": (count, 3, size, size),
        }
        np.lib.format.write_array_header_1_0(out, header)
        for start in range(
            0, count, AHEAD
        ):  # written in order, where a memory map would crash on a full disk
            for i, pixels in enumerate(
                pool.map(square, found.paths[start : start + AHEAD]), start + 1
            ):
                out.write(pixels)
                report(f"decoding {split}", i, count)
    np.save(labels, np.asarray(found.labels, np.int64))


class _Decoded(Dataset[tuple[Tensor, int]]):
    """An image of a listing, decoded when it is asked for; its window depends on the seed, the epoch and its place alone."""

    def __init__(
        self, found: Listing, size: int, train: bool, seed: str
    ) -> None:
        self.found, self.size, self.train, self.seed = found, size, train, seed

    def __len__(self) -> int:
        return len(self.found.paths)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        choose = (
            random_window(random.Random(f"{self.seed} {i}"))
            if self.train
            else centre(224 / 256)
        )
        pixels = _opened(self.found.paths[i], (self.size, self.size), choose)
        return torch.from_numpy(
            np.ascontiguousarray(pixels)
        ), self.found.labels[i]


def stream(
    folder: Path | str,
    split: str = "train",
    batch: int = 256,
    size: int = 224,
    workers: int | None = None,
    seed: int = 0,
    train: bool = True,
    epoch: int = 0,
) -> DataLoader[tuple[Tensor, int]]:
    """One epoch of batches: uint8 (N, 3, size, size) and int64 (N,); `len` says how many.

    With `train`, in an order and with windows that follow from seed and epoch alone, and whole batches only; mirroring and
    normalising are left to the device. Otherwise in order, the middle as usual: 224 of 256 parts of the shorter side. As many
    workers as there are cores, up to 16, where none are given; 0: this process decodes.
    """
    workers = min(16, os.cpu_count() or 1) if workers is None else workers
    if batch < 1 or size < 1 or workers < 0:
        raise ValueError(
            f"batch and size are at least 1 and workers at least 0, not {batch}, {size} and {workers}"
        )
    images = _Decoded(
        listing(Path(folder), split), size, train, f"{seed} {epoch}"
    )
    if train and len(images) < batch:
        raise DataError(
            f"{folder} has {len(images)} images in {split}, which is less than one batch of {batch}"
        )
    order = torch.Generator().manual_seed(
        random.Random(f"{seed} {epoch}").getrandbits(63)
    )
    return DataLoader(
        images,
        batch,
        shuffle=train,
        drop_last=train,
        num_workers=workers,
        generator=order,
        pin_memory=torch.cuda.is_available(),
    )
