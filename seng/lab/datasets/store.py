"""Getting a dataset into a folder, and reading it from there.

    FOLDER/NAME/…                 the files that are kept, and `verified.json`, which says that they were checked
    FOLDER/.NAME.parts/           an unfinished download, which the next attempt goes on with
    FOLDER/.NAME.stage/, .lock    while it is got, by one process at a time

A dataset is made whole in its stage, verified, and then renamed, so that there never is half of one.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from filelock import FileLock, Timeout  # torch brings it

from seng.lab.datasets import folders
from seng.lab.datasets.download import FULL
from seng.lab.datasets.registry import Dataset, dataset
from seng.lab.datasets.sources import Local, Source
from seng.lab.datasets.values import (
    Check,
    Data,
    DataError,
    File,
    Report,
    silent,
    verify,
)

STAMP = "verified.json"


def where(folder: Path | str | None) -> Path:
    """The folder that is meant: this one, else the environment's SENG_DATA, else ./data."""
    return Path(folder or os.environ.get("SENG_DATA") or "data")


@dataclass(frozen=True)
class Seal:
    """That a file of this size and time had this checksum."""

    size: int
    time: int
    algorithm: str
    digest: str
    skip: int
    note: str

    @property
    def check(self) -> Check:
        """The checksum."""
        return Check(self.algorithm, self.digest, self.skip, self.note)


def _sealed(path: Path, file: File) -> Seal:
    """By its checksum; a file that is made here gets one now."""
    own = Check("sha256", "")
    check = (
        verify(path, file.checks)
        if file.checks
        else replace(own, digest=own.of(path))
    )
    return Seal(path.stat().st_size, path.stat().st_mtime_ns, **asdict(check))


def _read_stamp(home: Path) -> dict[str, Seal]:
    try:
        return {
            name: Seal(**seal)
            for name, seal in json.loads((home / STAMP).read_text()).items()
        }
    except (OSError, ValueError, TypeError, AttributeError):
        return {}  # never written, or not by us: everything is checked again


def _write_stamp(home: Path, seals: dict[str, Seal]) -> None:
    beside = home / f".{STAMP}.{os.getpid()}"
    beside.write_text(
        json.dumps(
            {name: asdict(seal) for name, seal in seals.items()}, indent=1
        )
        + "\n"
    )
    os.replace(beside, home / STAMP)


def check(home: Path, kept: Dataset) -> str:
    """That every file is there and what it should be, by the stamp where that still fits; returns the notes about the data."""
    again = f"`seng data {kept.name}` gets it again"
    missing = [
        file.name for file in kept.files if not (home / file.name).is_file()
    ]
    if missing:
        raise DataError(f"{home} lacks {', '.join(missing)}: {again}")
    old = _read_stamp(home)
    seals = {}
    for file in kept.files:
        path, seal = home / file.name, old.get(file.name)
        if not file.checks:
            if seal is None:
                raise DataError(
                    f"{path} was not made by a finished `seng data {kept.name}`: {again}"
                )
            file = replace(file, checks=(seal.check,))
        state = path.stat()
        if (
            seal
            and seal.check in file.checks
            and (seal.size, seal.time) == (state.st_size, state.st_mtime_ns)
        ):
            seals[file.name] = seal
            continue
        try:
            seals[file.name] = _sealed(path, file)
        except DataError as wrong:
            raise DataError(f"in {home}, {wrong}: {again}") from None
    if seals != old:
        with suppress(
            OSError
        ):  # in a folder that others own it is checked every time
            _write_stamp(home, seals)
    return "; ".join(
        dict.fromkeys(seal.note for seal in seals.values() if seal.note)
    )


@contextmanager
def _alone(path: Path, report: Report) -> Iterator[None]:
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        report("waiting for another process that gets it", 0, None)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _stage(
    folder: Path, name: str, report: Report
) -> Iterator[tuple[Path, Path]]:
    """Two folders for this process alone: one that is gone afterwards whatever happens, one that stays until all went well."""
    folder.mkdir(parents=True, exist_ok=True)
    stage, parts = folder / f".{name}.stage", folder / f".{name}.parts"
    with _alone(folder / f".{name}.lock", report):
        shutil.rmtree(
            stage, ignore_errors=True
        )  # of a process that was killed
        stage.mkdir()
        parts.mkdir(exist_ok=True)
        try:
            yield stage, parts
            shutil.rmtree(parts, ignore_errors=True)
        except OSError as error:
            if error.errno in FULL:
                shutil.rmtree(parts, ignore_errors=True)
                raise DataError(
                    f"the disk of {folder} is full: nothing was kept; make space and try again"
                ) from None
            raise DataError(
                f"{error.filename or folder} cannot be used ({error.strerror or error})"
            ) from None
        finally:
            shutil.rmtree(stage, ignore_errors=True)
            with suppress(OSError):
                parts.rmdir()  # where nothing is in it


def _publish(made: Path, home: Path, kept: Dataset) -> None:
    """All at once; where a folder is there already, file by file, so that nothing else in it is lost."""
    if not home.exists():
        os.replace(made, home)
        return
    (home / STAMP).unlink(missing_ok=True)
    for name in (*(file.name for file in kept.files), STAMP):
        os.replace(made / name, home / name)


def _from(
    source: Source,
    kept: Dataset,
    stage: Path,
    parts: Path,
    home: Path,
    report: Report,
) -> None:
    raw, made = stage / "raw", stage / "made"
    for path in (raw, made):
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
    given = source.provide(raw, parts, report)
    assert kept.assemble is not None  # it has files
    kept.assemble(given, made, report)
    report("checking", 0, None)
    _write_stamp(
        made,
        {file.name: _sealed(made / file.name, file) for file in kept.files},
    )
    _publish(made, home, kept)


def _link(kept: Dataset, home: Path, source: Path | None) -> str:
    """A dataset that stays where it is: its folder is looked through and pointed to."""
    if source is None:
        if home.is_dir():
            return _described(home)
        raise DataError(
            f"{kept.name} cannot be downloaded: give the folder that you have, seng data {kept.name} --from FOLDER"
        )
    said = _described(source)
    home.parent.mkdir(parents=True, exist_ok=True)
    if home.exists() and not home.is_symlink():
        raise DataError(
            f"{home} is there already and is a folder of its own: remove it first, or use it as it is"
        )
    beside = home.parent / f".{kept.name}.{os.getpid()}"
    beside.unlink(missing_ok=True)
    beside.symlink_to(source.resolve(), target_is_directory=True)
    os.replace(beside, home)
    return said


def _described(folder: Path) -> str:
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder}")
    train, val = (folders.listing(folder, split) for split in ("train", "val"))
    return f"{len(train.classes)} classes, {len(train.paths):,} / {len(val.paths):,} images"


def get(
    name: str,
    folder: Path | str | None = None,
    source: Path | str | None = None,
    report: Report = silent,
) -> str:
    """See to it that the dataset is in the folder; returns a sentence about what was done.

    Only from the folder `source` where it is given. Where all sources fail, a DataError says why each did.
    """
    kept, folder = dataset(name), where(folder)
    home = folder / kept.name
    if kept.name == "digits":
        return "digits comes with scikit-learn: there is nothing to get"
    if not kept.files:
        return f"{kept.name} is in {home}: {_link(kept, home, Path(source) if source else None)}"
    failures = []
    with _stage(folder, kept.name, report) as (stage, parts):
        if not source and present(kept, home):
            return f"{kept.name} is in {home} already, and whole"
        for origin in (
            (Local(Path(source)),)
            if source
            else (Local(folder), *kept.sources)
        ):
            try:
                _from(origin, kept, stage, parts, home, report)
                return f"{kept.name} is in {home}, from {origin}, and verified"
            except DataError as failure:
                said = str(failure)
                failures.append(
                    said
                    if said.startswith(str(origin))
                    else f"{origin}: {said}"
                )
        hint = (
            ""
            if source
            else f"; where you have its files, seng data {kept.name} --from FOLDER takes them"
        )
        raise DataError(
            f"{kept.name} could not be had: {'; '.join(failures)}{hint}"
        )


def present(kept: Dataset, home: Path) -> bool:
    """Whether it is there and whole."""
    try:
        check(home, kept)
    except DataError:
        return False
    return True


def load(name: str, folder: Path | str | None = None) -> Data:
    """A dataset that is on disk, verified. Nothing is ever downloaded here: `seng data NAME` does that."""
    kept, folder = dataset(name), where(folder)
    home = folder / kept.name
    note = ""
    if kept.files:
        if not folder.is_dir():
            raise DataError(
                f"there is no folder {folder}, where {kept.name} should be: `seng data {kept.name}` gets it"
            )
        if not home.is_dir():
            raise DataError(
                f"there is no {kept.name} in {folder}: `seng data {kept.name}` gets it"
            )
        note = check(home, kept)
    train, test = kept.read(home)
    return Data(
        kept.name, train, test, kept.classes, kept.mean, kept.std, note
    )
