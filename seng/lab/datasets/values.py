"""What the other files hand to each other: arrays, datasets, checksums, and the one error that a user sees."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

Report = Callable[
    [str, int, int | None], None
]  # what is being done, how much of it is, and of how much if that is known
CHUNK = 1 << 20


def silent(what: str, done: int, total: int | None) -> None:
    """Progress that nobody watches."""


class DataError(Exception):
    """One sentence: what was found, what was expected, what to do."""


@dataclass(frozen=True)
class Arrays:
    """Images (N, C, H, W) as uint8 and their classes (N,) as int64; of a text, tokens (N,) as int64 and no classes."""

    x: Tensor
    y: Tensor


@dataclass(frozen=True)
class Data:
    """A dataset in memory. `mean` and `std` are those of the training pixels over 255, per channel; a text has none."""

    name: str
    train: Arrays
    test: Arrays
    classes: int  # of a text: different tokens
    mean: tuple[float, ...]
    std: tuple[float, ...]
    note: str = ""  # what must be said beside any figure


@dataclass(frozen=True)
class Check:
    """A checksum; `skip` leading bytes do not count."""

    algorithm: str
    digest: str
    skip: int = 0
    note: str = ""  # about the data, where this is the checksum that fits

    def of(self, path: Path) -> str:
        """The digest that the file has."""
        found = hashlib.new(self.algorithm, usedforsecurity=False)
        with path.open("rb") as file:
            file.seek(self.skip)
            while chunk := file.read(CHUNK):
                found.update(chunk)
        return found.hexdigest()

    def __str__(self) -> str:
        return f"{self.algorithm} {self.digest}"


def md5(digest: str) -> Check:
    """The usual one of published datasets."""
    return Check("md5", digest)


def sha256(digest: str, skip: int = 0, note: str = "") -> Check:
    """Where we computed it."""
    return Check("sha256", digest, skip, note)


def verify(path: Path, checks: tuple[Check, ...]) -> Check:
    """The check that fits the file; a DataError says what was expected and what was found."""
    found = []
    for check in checks:
        found.append(replace(check, digest=check.of(path)))
        if found[-1].digest == check.digest:
            return check
    expected, got = (" or ".join(map(str, which)) for which in (checks, found))
    raise DataError(
        f"{path.name} is not what it should be: expected {expected}, found {got}"
    )


@dataclass(frozen=True)
class File:
    """One that is kept, and the checksums that it may have; none: made here, and its own checksum is noted then."""

    name: str
    checks: tuple[Check, ...] = ()
