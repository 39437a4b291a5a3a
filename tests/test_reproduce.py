"""The paper's numbers against its source, and `seng reproduce` on made-up runs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import pytest

from seng.lab import paper, reproduce
from seng.lab.recipes import recipe
from seng.lab.results import append, path_of
from seng.lab.tasks import TASKS

TEX = Path(__file__).parents[2] / "shared" / "paper" / "seng.tex"
needs_tex = pytest.mark.skipif(
    not TEX.exists(), reason="the paper's source is not at hand"
)
MACHINE = "A made-up GPU"


def cells(label: str) -> list[list[str]]:
    """The cells of the table that ends with this label, without its dress."""
    text = TEX.read_text()
    end = text.index(rf"\label{{{label}}}")
    body = text[text.rindex(r"\begin{tabular}", 0, end) : end]
    body = re.sub(r"(?m)(?<!\\)%.*$", "", body)  # comments
    body = re.sub(
        r"\\(hline|toprule|midrule|bottomrule|textbf|multicolumn\{\d\}\{c\})",
        "",
        body,
    )
    body = (
        re.sub(r"[{}$]", "", body)
        .replace(r"\_", "_")
        .replace(r"\%", "%")
        .replace(r"\#", "#")
        .replace("\t", " ")
    )
    rows = [
        [cell.strip() for cell in line.split("&")]
        for line in body.split(r"\\")
    ]
    return [row for row in rows if len(row) > 1]


def numbers(*cells: str) -> list[float]:
    """27, 190 s is one number."""
    return [
        float(n)
        for cell in cells
        for n in re.findall(
            r"\d+(?:\.\d+)?", re.sub(r"(\d), (\d)", r"\1\2", cell)
        )
    ]


@needs_tex
def test_tasks_are_the_paper_s() -> None:
    rows = cells(paper.SOURCES["tasks"].label)
    network, found = "", []
    for first, second in pairwise(rows):
        if any("VGG16" in cell or "ResNet18" in cell for cell in first):
            network = "vgg16bn" if "VGG16" in first[1] else "resnet18"
        if match := re.match(r"(\w+) TimeTo(\d+)%", first[0]):
            attempts = []
            for cell, epoch in zip(first[1:], second[1:], strict=True):
                (value,) = numbers(cell)
                missed = cell.startswith("N/")
                attempts.append(
                    (
                        None if missed else value,
                        float(epoch),
                        value / 100 if missed else None,
                    )
                )
            found.append(
                (
                    f"{match[1].lower()}-{network}",
                    int(match[2]) / 100,
                    attempts,
                )
            )
    assert [row[0] for row in found] == [task.name for task in paper.TASKS]
    for (_, target, attempts), task in zip(found, paper.TASKS, strict=True):
        assert task.target == target
        ours = [
            (a.seconds, a.epoch_seconds, a.best)
            for a in task.attempts.values()
        ]
        assert ours == [
            (s, e, None if b is None else pytest.approx(b))
            for s, e, b in attempts
        ], task.name


@needs_tex
def test_variants_are_the_paper_s() -> None:
    rows = cells(paper.SOURCES["imagenet"].label)[1:]
    assert [
        [v.epochs, v.seconds, v.epoch_seconds] for v in paper.IMAGENET
    ] == [numbers(*row[1:]) for row in rows]
    assert [v.name for v in paper.IMAGENET] == [row[0] for row in rows]
    columns = list(
        zip(
            *(
                numbers(*row[1:])
                for row in cells(paper.SOURCES["frequency"].label)
            ),
            strict=True,
        )
    )
    assert [
        (v.refresh_every, v.epochs, v.seconds, v.epoch_seconds)
        for v in paper.FREQUENCY
    ] == columns


@needs_tex
def test_batch_sizes_are_the_paper_s() -> None:
    rows = [numbers(*row) for row in cells(paper.SOURCES["batch"].label)[1:]]
    fields = (
        "batch",
        "gpus",
        "epochs",
        "minutes",
        "efficiency",
        "epoch_seconds",
        "epoch_efficiency",
    )
    assert [
        [getattr(b, name) for name in fields] for b in paper.BATCHES
    ] == rows
    rows = [
        numbers(*row) for row in cells(paper.SOURCES["large-batch"].label)[1:]
    ]
    fields = (
        "batch",
        "warmup_lr",
        "lr",
        "rate",
        "schedule_epochs",
        "damping",
        "damping_gamma",
    )
    assert [
        [*(getattr(b, name) for name in fields), 10]
        for b in paper.LARGE_BATCHES
    ] == rows


def test_numbers_spelled_out() -> None:
    first, last = paper.TASKS[0], paper.TASKS[-1]
    assert (
        first.name,
        first.target,
        first.seng.seconds,
        first.kfac.epoch_seconds,
    ) == (
        "cifar10-vgg16bn",
        0.92,
        943.12,
        113.37,
    )
    assert (last.name, last.sgd, last.adam.best) == (
        "svhn-resnet18",
        paper.Attempt(1091.78, 19.88),
        0.947,
    )
    assert (
        paper.TASKS[2].adam.best == 0.9497
        and paper.TASKS[2].adam.epochs is None
    )
    assert first.seng.epochs == pytest.approx(53.92, abs=0.01)
    assert paper.IMAGENET[1].epochs == 76 and paper.BATCHES[-1].minutes == 49.7
    assert paper.LARGE_BATCHES[-1].recipe == {
        **{
            "warmup_lr": 0.2,
            "lr": 2.2,
            "rate": 5,
            "schedule_epochs": 55,
            "damping": 0.3,
            "damping_gamma": 0.7,
        },
        **{"schedule": "exp", "warmup": 5.0},
    }


def test_the_paper_s_times_agree_with_each_other() -> None:
    for v in {*paper.IMAGENET, *paper.FREQUENCY}:
        epochs = 41 if v.name == "KFAC-800" else v.epochs  # the one slip
        assert v.seconds / v.epoch_seconds == pytest.approx(
            epochs, rel=1e-3
        ), v.name
    first = paper.BATCHES[0]
    for b in paper.BATCHES:
        assert b.efficiency == pytest.approx(
            512 / b.batch * first.minutes / b.minutes, abs=0.006
        )
        assert b.epoch_efficiency == pytest.approx(
            512 / b.batch * first.epoch_seconds / b.epoch_seconds, abs=0.006
        )


def test_targets_are_those_of_our_tasks() -> None:
    assert {task.name: task.target for task in paper.TASKS} == {
        task.name: TASKS[task.name].target for task in paper.TASKS
    }
    assert TASKS[paper.IMAGENET_TASK].target == paper.IMAGENET_TARGET


@pytest.mark.parametrize(
    ("key", "sizes"),
    [(("adam", "vgg16bn"), [120]), (("sgd", "resnet18"), [30, 135])],
)
def test_grids_have_the_paper_s_sizes(
    key: tuple[str, str], sizes: list[int]
) -> None:
    assert [
        sum(1 for _ in paper.points(grid)) for grid in paper.GRIDS[key]
    ] == sizes
    assert sizes == [
        prod(map(len, grid.values())) for grid in paper.GRIDS[key]
    ]


def test_grids_are_recipes() -> None:
    for (optimizer, network), grids in paper.GRIDS.items():
        assert paper.grids(optimizer, f"cifar10-{network}") == grids
        for grid in grids:
            for point in paper.points(
                {key: values[-1:] for key, values in grid.items()}
            ):
                assert (
                    recipe(optimizer, point).values().items() >= point.items()
                )
    assert [
        grid["damping"] for grid in paper.grids("kfac", "svhn-vgg16bn")
    ] == [(1.5, 2.0, 2.5)] * 2
    assert [
        grid["damping"] for grid in paper.grids("seng-paper", "svhn-resnet18")
    ] == [(0.8, 1.0, 1.2)] * 2
    assert (
        paper.grids("muon", "cifar10-resnet18")
        == paper.grids("sgd", "digits-cnn")
        == ()
    )
    assert all(
        recipe("seng-paper", b.recipe).lr == b.lr for b in paper.LARGE_BATCHES
    )


def test_units_of_a_point() -> None:
    point = paper.in_sgd_units(
        {"lr": 0.145, "damping": 0.17, "weight_decay": 5e-4, "rate": 6.0}
    )
    assert point == {
        "lr": 0.145 / 0.17,
        "damping": 0.17,
        "weight_decay": 5e-4 * 0.17,
        "rate": 6.0,
    }


def write(
    folder: Path,
    task: str,
    name: str,
    seed: int,
    metrics: Sequence[float],
    pace: float,
    **other: Any,
) -> None:
    """A run with an evaluation per epoch of so many seconds; the last one ends it."""
    label = other.pop("label", "")
    target = other.pop("target", 0.94)
    reached = metrics[-1] >= target
    for i, metric in enumerate(metrics):
        over = i == len(metrics) - 1
        line = {
            **{
                "task": task,
                "optimizer": name,
                "label": label,
                "seed": seed,
                "recipe": {"lr": 0.25, "schedule": "cosine"},
            },
            **{
                "run": {"epochs": 30.0, "batch": 256, "amp": True},
                "target": target,
                "metric_name": "accuracy",
            },
            **{
                "higher_is_better": True,
                "step": 195 * (i + 1),
                "epoch": i + 1.0,
                "seconds": pace * (i + 1),
            },
            **{
                "train_loss": 0.5,
                "loss": 0.5,
                "metric": metric,
                "tuning": None,
            },
            **{
                "provenance": {"machine": MACHINE},
                "state": ("target" if reached else "finished")
                if over
                else "running",
            },
        }
        append(
            path_of(folder, task, name, label, seed),
            line | (other if over else {}),
        )


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    reproduce.main(arguments)
    return capsys.readouterr().out


def row(text: str, task: str, method: str) -> str:
    """A method's row below the name of its task."""
    lines = text[text.index(f"\n {task} ") :].splitlines()
    return " ".join(
        next(line for line in lines if f" {method} " in line)
        .partition(f" {method} ")[2]
        .split()
    )


def test_tasks_with_ours_beside_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = "cifar10-resnet18"
    for seed, epochs in enumerate((9, 10, 11)):
        write(tmp_path, task, "sgd", seed, [0.5] * (epochs - 1) + [0.945], 2.0)
        write(tmp_path, task, "seng", seed, [0.5] * 4 + [0.94], 3.0)
    write(tmp_path, task, "seng-paper", 0, [0.5] * 7 + [0.95], 2.5)
    write(tmp_path, task, "seng-paper", 1, [0.5, 0.93], 2.5)
    write(tmp_path, task, "adam", 0, [0.9, 0.9123], 2.0)
    write(
        tmp_path, task, "seng", 9, [0.95], 1.0, label="T20"
    )  # another method
    text = printed(capsys, "tasks", "--results", str(tmp_path))
    #             s to target: paper, ours, seeds; ÷ sgd; epochs; s/epoch; ÷ sgd
    assert (
        row(text, task, "sgd")
        == "1083.60 20.0 ± 5.0 3/3 1.00 1.00 72.0 10.0 ± 2.5 15.04 2.00 1.00 1.00"
    )
    assert (
        row(text, task, "seng")
        == "– 15.0 ± 0.0 3/3 – 0.75 – 5.00 ± 0.00 – 3.00 – 1.50"
    )
    assert (
        row(text, task, "seng-paper")
        == "940.72 20.0 1/2 0.87 1.00 57.1 8.00 16.48 2.50 1.10 1.25"
    )
    assert (
        row(text, task, "adam")
        == "N/91.3% N/91.23% 0/1 – – – – 15.39 2.00 1.02 1.00"
    )
    assert (
        row(text, task, "kfac") == "1040.24 – – 0.96 – 52.9 – 19.67 – 1.31 –"
    )
    assert (
        row(text, "cifar100-resnet18", "sgd")
        == "N/75.0% – – – – – – 14.99 – 1.00 –"
    )
    assert (
        MACHINE in text
        and "V100" in text
        and "not comparable" in text
        and "95 % interval" in text
    )
    assert (
        f"seng compare {task} --optimizers seng-lowrank kfac --seeds 3"
        in text.splitlines()
    )
    every = "--optimizers seng-paper seng seng-lowrank sgd adam kfac --seeds 3"
    assert f"seng compare cifar10-vgg16bn {every}" in text.splitlines()
    assert (
        f"seng compare cifar100-vgg16bn {every}   # needs CIFAR-100: seng data cifar100"
        in text.splitlines()
    )
    assert "rebuilt" not in text


def test_what_cannot_be_compared_is_left_out_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, "svhn-resnet18", "sgd", 0, [0.5, 0.97], 2.0, target=0.96)
    write(
        tmp_path,
        "svhn-resnet18",
        "seng",
        1,
        [0.5, 0.6],
        2.0,
        target=0.96,
        state="running",
    )
    write(tmp_path, "svhn-resnet18", "kfac", 2, [0.5, 0.6], 2.0, target=0.5)
    write(
        tmp_path,
        "svhn-resnet18",
        "adam",
        3,
        [0.5, 0.6],
        2.0,
        target=0.96,
        state="diverged",
        metric=float("nan"),
    )
    path = path_of(tmp_path, "svhn-resnet18", "sgd", "", 0)
    path.write_text(path.read_text() + '{"format": 1, "task": "svh')
    text = printed(capsys, "tasks", "--results", str(tmp_path))
    assert row(text, "svhn-resnet18", "sgd").startswith("1091.78 4.00 1/1 ")
    assert row(text, "svhn-resnet18", "adam").startswith(
        "N/94.7% N/50.0% 0/1 "
    )
    assert row(text, "svhn-resnet18", "seng").startswith("– – – ")
    assert row(text, "svhn-resnet18", "kfac").startswith("1103.17 – – ")
    assert (
        "seng on svhn-resnet18, seed 1, which is not finished (step 390)"
        in text
    )
    assert (
        "kfac on svhn-resnet18, seed 2, whose target is 0.5, not 0.96" in text
    )
    assert "cut in half" in text and "rebuilt" in text


def test_imagenet_by_refresh_period(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = "imagenet-resnet50"
    write(tmp_path, task, "sgd", 0, [0.5, 0.76], 100.0, target=0.759)
    write(
        tmp_path,
        task,
        "seng-paper",
        0,
        [0.76],
        120.0,
        target=0.759,
        label="T800",
    )
    text = printed(capsys, "imagenet", "--results", str(tmp_path))
    assert (
        row(text, task, "SENG-800")
        == "27190.00 120.0 1/1 0.62 0.60 41.0 1.00 663.17 120.00 1.15 1.20"
    )
    assert row(text, task, "SGD").startswith("43707.00 200.0 1/1 ")
    assert (
        row(text, task, "KFAC-200")
        == "42307.00 – – 0.97 – 42.0 – 1007.31 – 1.75 –"
    )
    last = "seng compare imagenet-resnet50 --optimizers kfac --seeds 3 --label T200 --set refresh_every=200"
    assert (
        f"{last}   # needs ImageNet-1k: seng data imagenet"
        in text.splitlines()
    )
    assert (
        "--label T800 --set refresh_every=800" in text
        and "--optimizers seng-paper --seeds 3 --label T800" not in text
    )


def test_studies_come_from_labels_and_are_of_another_task(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for period, pace in ((20, 3.0), (100, 2.4), (800, 2.0)):
        write(
            tmp_path,
            "cifar10-resnet18",
            "seng",
            0,
            [0.5, 0.95],
            pace,
            label=f"T{period}",
        )
    write(
        tmp_path, "cifar10-resnet18", "sgd", 0, [0.5, 0.93], 1.0, label="b1024"
    )
    write(
        tmp_path,
        "cifar10-vgg16bn",
        "seng",
        0,
        [0.95],
        1.0,
        label="T20",
        target=0.92,
    )
    write(tmp_path, "cifar10-resnet18", "seng", 0, [0.95], 1.0, label="T20x")
    text = printed(capsys, "frequency", "--results", str(tmp_path))
    lines = [line.split() for line in text.splitlines()]
    assert ["100", "40", "38586", "964.65", "1.45"] in lines
    ours = [
        line for line in lines if line[:1] == ["seng"] and line[1] != "compare"
    ]
    assert ours == [
        ["seng", "20", "6.00", "2.00", "1/1", "95.00", "3.00", "1.50"],
        ["seng", "100", "4.80", "2.00", "1/1", "95.00", "2.40", "1.20"],
        ["seng", "800", "4.00", "2.00", "1/1", "95.00", "2.00", "1.00"],
    ]
    assert (
        "another task than the paper's" in text
        and "neither times nor epochs are comparable" in text
    )
    missing = [
        (line.split("--seeds")[0].split()[4:], line.split("=")[-1])
        for line in text.splitlines()
        if line.startswith("seng compare")
    ]
    both, one = ["seng", "seng-lowrank"], ["seng-lowrank"]
    periods = ("20", "100", "200", "500", "800")
    assert missing == [
        (both if period in ("200", "500") else one, period)
        for period in periods
    ]
    assert "Left out" not in text
    text = printed(capsys, "batch", "--results", str(tmp_path))
    lines = [line.split() for line in text.splitlines()]
    assert ["4096", "32", "41", "49.7", "0.93", "72.66", "0.93"] in lines
    assert [
        "sgd",
        "1024",
        "N/93.0%",
        "–",
        "0/1",
        "93.00",
        "1.00",
        "–",
    ] in lines
    assert (
        "seng compare cifar10-resnet18 --optimizers seng seng-lowrank muon --seeds 3 --batch 1024 --label b1024 --no-stop"
        in text
    )
    text = printed(capsys, "large-batch", "--results", str(tmp_path))
    assert ["sgd", "1024", "0.25", "–", "cosine", *["–"] * 6] in [
        line.split() for line in text.splitlines()
    ]
    assert "0.17 · 0.9^(epoch/10)" in text


def test_runs_without_a_label_stand_for_what_they_ran_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = "cifar10-resnet18"
    for name in ("seng", "seng-lowrank", "sgd", "muon"):
        write(
            tmp_path,
            task,
            name,
            0,
            [0.5, 0.93],
            2.0,
            recipe={"refresh_every": 50} if "seng" in name else {},
        )
        write(tmp_path, task, name, 0, [0.5, 0.92], 1.0, label="b1024")
    write(tmp_path, task, "seng", 0, [0.5, 0.93], 1.6, label="T800")
    write(tmp_path, task, "adam", 0, [0.5, 0.93], 2.0)

    def ours(table: str) -> list[list[str]]:
        lines = [
            line.split()
            for line in printed(
                capsys, table, "--results", str(tmp_path)
            ).splitlines()
        ]
        return [
            [*line[:2], *line[-2:]]
            for line in lines
            if line[:1] in (["seng"], ["seng-lowrank"], ["sgd"])
            and line[1] != "compare"
        ]

    both = [["256", "2.00", "1.00"], ["1024", "1.00", "0.50"]]
    assert ours("batch") == [
        [name, *numbers]
        for name in ("seng", "seng-lowrank", "sgd")
        for numbers in both
    ]
    assert ours("frequency") == [
        ["seng", "50", "2.00", "1.25"],
        ["seng", "800", "1.60", "1.00"],
        ["seng-lowrank", "50", "2.00", "–"],
    ]
    text = printed(capsys, "batch", "--results", str(tmp_path))
    assert (
        "b256" not in text and "adam" not in text and "--label b4096" in text
    )

    write(
        tmp_path, task, "sgd", 0, [0.5, 0.91], 4.0, label="b256"
    )  # has said so itself
    assert ours("batch")[4:] == [
        ["sgd", "256", "4.00", "1.00"],
        ["sgd", "1024", "1.00", "0.25"],
    ]
    write(tmp_path, task, "seng", 0, [0.5, 0.93], 2.0, run={"batch": 512})
    assert ours("batch")[:2] == [
        ["seng", "512", "2.00", "–"],
        ["seng", "1024", "1.00", "–"],
    ]


@pytest.mark.parametrize("table", reproduce.TABLES)
def test_without_results_the_paper_s_numbers_stand_alone(
    table: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = printed(capsys, table, "--results", str(tmp_path / "none"))
    assert (
        "There is no folder" in text
        and "no runs yet" in text
        and "Not run yet:" in text
        and "–" in text
    )
    assert max(map(len, text.splitlines())) < 200
    assert paper.SOURCES[table].label in " ".join(text.split())


def test_tables_are_listed_and_near_names_are_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = printed(capsys)
    assert all(name in text for name in paper.SOURCES) and list(
        paper.SOURCES
    ) == list(reproduce.TABLES)
    with pytest.raises(
        SystemExit,
        match="no table 'task': did you mean tasks.*\\? there are tasks, imagenet",
    ):
        reproduce.main(["task"])
    with pytest.raises(SystemExit, match="no table 'xyz': there are tasks"):
        reproduce.main(["xyz"])
