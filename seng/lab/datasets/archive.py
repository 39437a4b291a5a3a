"""Unpacking an archive that nobody looked into: files and folders only, and only below the destination."""

from __future__ import annotations

import gzip
import shutil
import tarfile
import zlib
from pathlib import Path, PurePosixPath

from seng.lab.datasets.values import CHUNK, DataError, Report, silent


def _place(archive: Path, member: tarfile.TarInfo, into: Path) -> Path:
    path = PurePosixPath(member.name)
    if (
        path.is_absolute()
        or ".." in path.parts
        or "\\" in member.name
        or ":" in member.name
    ):
        raise DataError(
            f"{archive.name} would write outside of its folder ({member.name!r}): it is not to be trusted, delete it"
        )
    if not (
        member.isfile() or member.isdir()
    ):  # even a link that leads inside can make a later one lead outside
        kind = (
            "a link"
            if member.issym() or member.islnk()
            else "a device or pipe"
        )
        raise DataError(
            f"{archive.name} holds {kind} ({member.name!r}), which no dataset needs: it is not to be trusted, delete it"
        )
    return into.joinpath(*path.parts)


def extract(archive: Path, into: Path, report: Report = silent) -> None:
    """A tar archive, compressed or not; owners, modes and times are not taken over."""
    size = archive.stat().st_size
    try:
        with (
            archive.open("rb") as raw,
            tarfile.open(fileobj=raw, mode="r:*") as tar,
        ):
            for member in tar:
                place = _place(archive, member, into)
                if member.isdir():
                    place.mkdir(parents=True, exist_ok=True)
                    continue
                place.parent.mkdir(parents=True, exist_ok=True)
                source = tar.extractfile(member)
                assert source is not None  # it is a file
                with source, place.open("wb") as out:
                    shutil.copyfileobj(source, out, CHUNK)
                report(f"unpacking {archive.name}", raw.tell(), size)
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            f"{archive.name} is not a whole archive ({error}): delete it and get it again"
        ) from None


def gunzip(source: Path, out: Path) -> None:
    """One compressed file."""
    try:
        with gzip.open(source, "rb") as packed, out.open("wb") as file:
            shutil.copyfileobj(packed, file, CHUNK)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            f"{source.name} is not a whole gzip file ({error}): delete it and get it again"
        ) from None
