"""From whatever a source gave (archives, pickles, pictures) to the files that are kept, which are the same from every source.

Each function takes the folder with the raw files and an empty one to write into. What it wrote is verified afterwards, so that
here it is enough to find and to convert.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from PIL import Image

from seng.lab.datasets import folders
from seng.lab.datasets.archive import extract, gunzip
from seng.lab.datasets.formats import unpickle
from seng.lab.datasets.values import Check, DataError, Report, verify

Assemble = Callable[[Path, Path, Report], None]


def _find(raw: Path, places: tuple[str, ...], *names: str) -> Path | None:
    """The first that exists; never a search through all folders, as a folder of data can be vast."""
    paths = (raw / place / name for name in names for place in ("", *places))
    return next((path for path in paths if path.is_file()), None)


def _lacks(what: str) -> DataError:
    return DataError(f"it has no {what}")


@contextmanager
def _unpacked(
    raw: Path,
    out: Path,
    places: tuple[str, ...],
    archives: tuple[tuple[str, Check], ...],
    report: Report,
) -> Iterator[list[Path]]:
    """`raw`, and beside it what is in the first of the archives that lies there, verified."""
    for name, check in archives:
        if archive := _find(raw, places, name):
            verify(archive, (check,))
            with TemporaryDirectory(dir=out.parent) as folder:
                extract(archive, Path(folder), report)
                yield [Path(folder), raw]
            return
    yield [raw]


@dataclass(frozen=True)
class Copies:
    """Files that are kept as they come, or decompressed; each has a few names that it goes by."""

    files: tuple[
        tuple[str, ...], ...
    ]  # the first name is the one that it is kept under
    places: tuple[str, ...] = ()  # folders that other libraries keep them in
    archives: tuple[tuple[str, Check], ...] = ()

    def __call__(self, raw: Path, out: Path, report: Report) -> None:
        """All or an error that names the first that is not there."""
        with _unpacked(raw, out, self.places, self.archives, report) as roots:
            for names in self.files:
                names = (*names, *(f"{name}.gz" for name in names))
                found = next(
                    filter(
                        None,
                        (_find(root, self.places, *names) for root in roots),
                    ),
                    None,
                )
                if found is None:
                    raise _lacks(
                        " or ".join(
                            [
                                names[0],
                                names[len(names) // 2],
                                *(name for name, _ in self.archives),
                            ]
                        )
                    )
                if found.suffix == ".gz":
                    gunzip(found, out / names[0])
                else:
                    shutil.copyfile(found, out / names[0])


def _from_pictures(picture: Path, classes: Path, batch: int, to: Path) -> None:
    """One row of 1024 RGB pixels per image; the binary format has the class and then one colour after the other."""
    try:
        with Image.open(picture) as image:
            pixels = np.asarray(image.convert("RGB"))
        labels = np.asarray(
            json.loads(classes.read_text())[
                batch * len(pixels) : (batch + 1) * len(pixels)
            ],
            np.uint8,
        )
    except (OSError, SyntaxError, ValueError, TypeError) as error:
        raise DataError(
            f"{picture.name} or {classes.name} is damaged ({error})"
        ) from None
    if pixels.shape[1:] != (1024, 3) or len(labels) != len(pixels):
        raise DataError(
            f"{picture.name} has {pixels.shape[1]} × {pixels.shape[0]} pixels for {len(labels)} classes"
        )
    planes = pixels.transpose(0, 2, 1).reshape(len(pixels), 3072)
    to.write_bytes(np.concatenate([labels[:, None], planes], 1).tobytes())


def _from_pickle(batch: Path, to: Path) -> None:
    held = unpickle(batch)
    if b"labels" not in held:
        raise DataError(
            f"{batch.name} is not a batch of CIFAR-10: it holds no labels"
        )
    labels = np.asarray(held[b"labels"], np.uint8)[:, None]
    to.write_bytes(
        np.concatenate(
            [labels, np.asarray(held[b"data"], np.uint8)], 1
        ).tobytes()
    )


@dataclass(frozen=True)
class Cifar10:
    """The official binary batches: as they are, from the pickled ones, or from pictures of 10,000 × 1024 pixels."""

    names: tuple[str, ...]
    archives: tuple[tuple[str, Check], ...]
    places: tuple[str, ...] = (
        "cifar10",
        "cifar-10-batches-bin",
        "cifar-10-batches-py",
        "package",
    )

    def __call__(self, raw: Path, out: Path, report: Report) -> None:
        """All batches."""
        with _unpacked(raw, out, self.places, self.archives, report) as roots:
            for i, name in enumerate(self.names):
                if not any(self._batch(root, name, out) for root in roots):
                    raise _lacks(
                        " or ".join(
                            [
                                f"{name}.bin",
                                name,
                                f"{name}.png",
                                *(a for a, _ in self.archives),
                            ]
                        )
                    )
                report("converting", i + 1, len(self.names))

    def _batch(self, raw: Path, name: str, out: Path) -> bool:
        to = out / f"{name}.bin"
        if binary := _find(raw, self.places, f"{name}.bin"):
            shutil.copyfile(binary, to)
        elif pickled := _find(raw, self.places, name):
            _from_pickle(pickled, to)
        elif picture := _find(raw, self.places, f"{name}.png"):
            test = name.startswith("test")
            labels = _find(
                raw,
                self.places,
                "test_lables.json" if test else "train_lables.json",
            )  # as the package spells it
            if labels is None:
                raise _lacks(
                    "test_lables.json or train_lables.json, the classes of its pictures"
                )
            _from_pictures(
                picture,
                labels,
                0 if test else int(name.rsplit("_", 1)[1]) - 1,
                to,
            )
        else:
            return False
        return True


@dataclass(frozen=True)
class Decoded:
    """An ImageNet-style folder, decoded into arrays of `size` × `size` pixels."""

    classes: int
    size: int
    places: tuple[str, ...]
    archives: tuple[tuple[str, Check], ...]

    def __call__(self, raw: Path, out: Path, report: Report) -> None:
        """Both splits."""
        with _unpacked(raw, out, (), self.archives, report) as roots:
            candidates = [
                root / place for root in roots for place in ("", *self.places)
            ]
            folder = next(
                (path for path in candidates if (path / "train").is_dir()),
                None,
            )
            if folder is None:
                raise _lacks(
                    " or ".join(
                        [
                            "train/CLASS/*.JPEG and val/CLASS/*.JPEG",
                            *(name for name, _ in self.archives),
                        ]
                    )
                )
            found = len(folders.listing(folder, "train").classes)
            if found != self.classes:
                raise DataError(
                    f"{folder} has {found} classes, not {self.classes}"
                )
            for split, name in (("train", "train"), ("val", "test")):
                folders.decode(
                    folder,
                    split,
                    out / f"{name}-images.npy",
                    out / f"{name}-labels.npy",
                    self.size,
                    report,
                )
