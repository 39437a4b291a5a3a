"""From the files that are kept to arrays. Nothing that a file says is ever run."""

from __future__ import annotations

import io
import pickle
import struct
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from seng.lab.datasets.values import Arrays, DataError

Pair = tuple[Arrays, Arrays]  # to train on, to test with
HARMLESS = {  # all that a pickled array needs, by the names of today's and of earlier numpy
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy._core.numeric", "_frombuffer"),
    ("numpy.core.numeric", "_frombuffer"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),
}


class _Plain(pickle.Unpickler):
    """Lists, dictionaries, numbers, strings and arrays; anything else is refused before it is looked up."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in HARMLESS:
            raise DataError(
                f"a pickled batch asks for {module}.{name}, which no dataset needs: it is not to be trusted, delete it"
            )
        return super().find_class(module, name)


def unpickle(path: Path) -> dict[bytes, Any]:
    """A pickled batch of CIFAR, whose keys are bytes."""
    try:
        batch = _Plain(io.BytesIO(path.read_bytes()), encoding="bytes").load()
    except (
        pickle.UnpicklingError,
        EOFError,
        ValueError,
        TypeError,
        AttributeError,
        IndexError,
        KeyError,
    ) as error:
        raise DataError(
            f"{path.name} is not a pickled batch ({error})"
        ) from None
    if not isinstance(batch, dict) or b"data" not in batch:
        raise DataError(
            f"{path.name} is not a batch of CIFAR: it holds no data"
        )
    return batch


def _arrays(
    x: np.ndarray[Any, Any], y: np.ndarray[Any, Any], classes: int, path: Path
) -> Arrays:
    """Own memory, checked: as many classes as images, and none that does not exist."""
    if len(x) != len(y):
        raise DataError(
            f"{path.name} belongs to {len(x)} images but there are {len(y)} classes"
        )
    if len(y) and not 0 <= int(y.min()) <= int(y.max()) < classes:
        raise DataError(
            f"{path.name} has classes from {y.min()} to {y.max()}, not from 0 to {classes - 1}"
        )
    return Arrays(
        torch.from_numpy(np.array(x, np.uint8, order="C")),
        torch.from_numpy(y.astype(np.int64)),
    )


def cifar_binary(paths: tuple[Path, ...], classes: int = 10) -> Arrays:
    """Rows of a class and 3 × 32 × 32 pixels, 3073 bytes each."""
    parts = []
    for path in paths:
        raw = np.fromfile(path, np.uint8)
        if len(raw) % 3073:
            raise DataError(
                f"{path.name} has {len(raw)} bytes, which is no multiple of 3073"
            )
        parts.append(raw.reshape(-1, 3073))
    rows = np.concatenate(parts)
    return _arrays(
        rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0], classes, paths[0]
    )


def cifar_pickle(path: Path, classes: int = 100) -> Arrays:
    """A dictionary with `data` (N, 3072) and `labels` or, of CIFAR-100, `fine_labels`."""
    batch = unpickle(path)
    labels = batch.get(b"fine_labels", batch.get(b"labels"))
    if labels is None:
        raise DataError(
            f"{path.name} is not a batch of CIFAR: it holds no labels"
        )
    return _arrays(
        np.asarray(batch[b"data"], np.uint8).reshape(-1, 3, 32, 32),
        np.asarray(labels),
        classes,
        path,
    )


def idx(path: Path) -> Tensor:
    """An IDX file of bytes: 0, 0, 8, the number of axes, their lengths as big-endian integers, and the values."""
    raw = path.read_bytes()
    if len(raw) < 4 or raw[:3] != b"\0\0\x08":
        raise DataError(
            f"{path.name} is not an IDX file of bytes: it begins with {raw[:4].hex(' ') or 'nothing'}"
        )
    axes = raw[3]
    if len(raw) < 4 + 4 * axes:
        raise DataError(f"{path.name} ends inside its header")
    shape = struct.unpack(f">{axes}I", raw[4 : 4 + 4 * axes])
    values = np.frombuffer(raw, np.uint8, offset=4 + 4 * axes)
    if len(values) != int(np.prod(shape)):
        raise DataError(
            f"{path.name} announces {' × '.join(map(str, shape))} values and holds {len(values)}"
        )
    return torch.from_numpy(values.reshape(shape).copy())


def idx_pair(images: Path, labels: Path, classes: int = 10) -> Arrays:
    """Images (N, 28, 28) and their classes."""
    return _arrays(
        idx(images).unsqueeze(1).numpy(), idx(labels).numpy(), classes, images
    )


IDX = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


def idx_folder(folder: Path) -> Pair:
    """MNIST and what looks like it."""
    train_images, train_labels, test_images, test_labels = (
        folder / name for name in IDX
    )
    return idx_pair(train_images, train_labels), idx_pair(
        test_images, test_labels
    )


def digits(folder: Path) -> Pair:
    """scikit-learn's, split as the demo does; its 17 shades times 15, so that white is nearly 255."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    x, y = (
        torch.tensor(bunch.images * 15, dtype=torch.uint8).unsqueeze(1),
        torch.tensor(bunch.target, dtype=torch.int64),
    )
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    train, test = order[: len(y) * 4 // 5], order[len(y) * 4 // 5 :]
    return Arrays(x[train], y[train]), Arrays(x[test], y[test])


def svhn(path: Path) -> Arrays:
    """MATLAB's format: X (32, 32, 3, N) and y (N, 1), where 10 stands for the digit 0."""
    try:
        held = import_module("scipy.io").loadmat(path)
        x, y = held["X"], held["y"]
    except (
        ValueError,
        KeyError,
        TypeError,
        NotImplementedError,
        struct.error,
        EOFError,
    ) as error:
        raise DataError(
            f"{path.name} is not a MATLAB file with X and y ({error})"
        ) from None
    return _arrays(x.transpose(3, 2, 0, 1), y[:, 0] % 10, 10, path)


def decoded(images: Path, labels: Path, classes: int = 10) -> Arrays:
    """What folders.decode wrote."""
    return _arrays(np.load(images), np.load(labels), classes, images)


def characters(path: Path) -> Pair:
    """A text as the ranks of its characters: the first nine tenths to train on, the last to test with."""
    text = path.read_text(encoding="utf-8")
    rank = {character: i for i, character in enumerate(sorted(set(text)))}
    tokens = torch.tensor([rank[character] for character in text])
    none = torch.empty(0, dtype=torch.int64)
    cut = len(tokens) * 9 // 10
    return Arrays(tokens[:cut].clone(), none), Arrays(
        tokens[cut:].clone(), none
    )
