"""The demo, end to end in its smallest configuration, and the networks of the lab."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

import seng
from seng.lab import demo, models
from seng.tell.inspection import inspect

RESNET18 = (
    (3 * 9 * 64 + 2 * 64)  # stem: 3×3 convolution, norm
    + 2
    * (
        2 * 64 * 9 * 64 + 4 * 64
    )  # two blocks of two 3×3 convolutions, each with a norm
    + sum(
        (
            w // 2 * 9 * w + 3 * w * 9 * w + 8 * w
        )  # four convolutions, the first of which doubles the width
        + (w // 2 * w + 2 * w)  # the projection of the shortcut
        for w in (128, 256, 512)
    )
    + (512 * 10 + 10)
)
VGG_WIDTHS = (3, 64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512)
VGG16_BN = (
    sum(
        a * 9 * b + b + 2 * b for a, b in pairwise(VGG_WIDTHS)
    )  # weight, bias, norm
    + (25088 * 4096 + 4096)
    + (4096 * 4096 + 4096)
    + (4096 * 10 + 10)
)
DIGITS = (
    (9 * 32 + 64) + (32 * 9 * 32 + 64) + (32 * 9 * 48 + 96) + (768 * 10 + 10)
)


@pytest.fixture(autouse=True)
def as_a_user_runs_it() -> Iterator[None]:
    """In float32, where the rest of the suite is in float64; the demo's single thread is not left behind."""
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    torch.set_default_dtype(torch.float32)
    yield
    torch.set_default_dtype(dtype)
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("build", "image", "classes", "parameters"),
    [
        (models.resnet18, (3, 32, 32), 10, RESNET18),
        (models.resnet50, (3, 64, 64), 1000, 25_557_032),
        (models.vgg16_bn, (3, 32, 32), 10, VGG16_BN),
        (models.digits_cnn, (1, 8, 8), 10, DIGITS),
    ],
)
def test_models_have_the_published_size(
    build: Callable[[], nn.Module],
    image: tuple[int, ...],
    classes: int,
    parameters: int,
) -> None:
    model = build()
    assert sum(p.numel() for p in model.parameters()) == parameters
    with torch.no_grad():
        assert model(torch.zeros(2, *image)).shape == (2, classes)


def test_only_the_3x3_of_a_bottleneck_strides() -> None:
    strides = [
        layer.stride
        for layer in models.bottleneck(8, 4, 2).branch
        if isinstance(layer, nn.Conv2d)
    ]
    assert strides == [(1, 1), (2, 2), (1, 1)]


def test_demo_prints_its_table_and_draws_its_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new folder" / "demo.png"
    demo.main(["--epochs", "1", "--seeds", "1", "--out", str(out)])
    printed = capsys.readouterr().out
    for recipe in demo.RECIPES:
        assert any(
            recipe.name in line and f"{recipe.lr:g}" in line
            for line in printed.splitlines()
        ), recipe.name
    assert str(out) in printed
    assert out.read_bytes().startswith(b"\x89PNG")


def test_every_optimizer_starts_alike_and_sees_the_same_batches() -> None:
    first, *others = [
        demo.Run(recipe, 0, demo.digits(), 1) for recipe in demo.RECIPES
    ]
    for run in others:
        assert torch.equal(run.batches, first.batches)
        for p, q in zip(
            run.model.parameters(), first.model.parameters(), strict=True
        ):
            assert torch.equal(p, q)


def test_every_learning_rate_is_inside_its_grid_and_every_grid_has_the_same_size() -> (
    None
):
    assert [recipe.name for recipe in demo.RECIPES] == [
        "SGD",
        "SENG (SGD)",
        "AdamW",
        "SENG (AdamW)",
        "K-FAC",
    ]
    for recipe in demo.RECIPES:
        assert recipe.lr in recipe.grid[1:-1], (
            recipe.name
        )  # at the edge the search would not be over
        assert [b / a for a, b in pairwise(recipe.grid)] == pytest.approx(
            [2] * 4
        ), recipe.name
    rates = [recipe.lr for recipe in demo.RECIPES]
    assert rates[0] == rates[1] and rates[2] == rates[3]


def test_the_lines_can_be_told_apart() -> None:
    assert (
        len({recipe.colour for recipe in demo.RECIPES})
        == len({recipe.line for recipe in demo.RECIPES})
        == 5
    )


def test_kfac_covers_every_layer_but_the_norms_and_does_not_warn() -> (
    None
):  # our warnings are errors here
    run = demo.Run(demo.RECIPES[-1], 0, demo.digits(), 1)
    with torch.no_grad():
        before = [p.clone() for p in run.model.parameters()]
    run.lap()
    assert isinstance(run.optimizer, seng.KFAC)
    kinds = (nn.Conv2d, nn.Linear)
    covered = {
        layer.weight
        for layer in run.model.modules()
        if isinstance(layer, kinds)
    }
    layers = inspect(run.optimizer).layers
    with_factors = {
        layer.site.lead for layer in layers if layer.state is not None
    }
    assert with_factors == covered
    assert all(
        not torch.equal(p, old)
        for p, old in zip(run.model.parameters(), before, strict=True)
    )


@pytest.mark.parametrize(
    "arguments", [["--epochs", "0"], ["--seeds", "0"], ["--epoch-count", "3"]]
)
def test_options_that_make_no_sense_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit):
        demo.main(arguments)
