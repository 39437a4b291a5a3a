"""Results as they are written and read, and what is said of those that cannot be read."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from seng.lab import results
from seng.lab.results import append, path_of, read


def line(step: int = 10, **changes: Any) -> dict[str, Any]:
    return {
        "format": 1,
        "task": "digits-cnn",
        "optimizer": "seng",
        "label": "",
        "seed": 0,
        "recipe": {"lr": 0.1},
        "run": {"epochs": 2.0, "batch": 64},
        "target": 0.9,
        "metric_name": "accuracy",
        "higher_is_better": True,
        "step": step,
        "epoch": step / 10,
        "seconds": step / 100,
        "train_loss": 1.0,
        "loss": 1.1,
        "metric": step / 40,
        "state": "running",
        "provenance": {
            "command": "seng train",
            "commit": "abc",
            "machine": "a CPU",
            "versions": {"torch": "2.13"},
        },
        "tuning": None,
        **changes,
    }


def write(folder: Path, *lines: dict[str, Any], name: str = "seng-0") -> Path:
    path = folder / "digits-cnn" / f"{name}.jsonl"
    for each in lines:
        append(path, each)
    return path


def test_what_was_written_is_read(tmp_path: Path) -> None:
    path = path_of(tmp_path, "digits-cnn", "seng", "", 0)
    for each in (
        line(10),
        line(20),
        line(40, state="finished", metric=0.95),
        line(50, metric=0.93),
    ):
        append(path, each)
    (run,), skipped = read(tmp_path)
    assert skipped == []
    assert (run.task, run.name, run.seed, run.recipe, run.tuning) == (
        "digits-cnn",
        "seng",
        0,
        {"lr": 0.1},
        None,
    )
    assert [point.step for point in run.points] == [10, 20, 40, 50]
    assert run.to_target and run.to_target.step == 40
    assert (run.best.step, run.final.step, run.final.metric) == (40, 50, 0.93)


def test_paths_tell_optimizers_labels_and_seeds_apart(tmp_path: Path) -> None:
    assert (
        path_of(tmp_path, "digits-cnn", "sgd", "b1024", 2)
        == tmp_path / "digits-cnn" / "sgd-b1024-2.jsonl"
    )
    assert path_of(tmp_path, "digits-cnn", "sgd", "", 2).name == "sgd-2.jsonl"
    for task, optimizer, label in (
        ("../x", "sgd", ""),
        ("x", "", ""),
        ("x", "sgd", "a/b"),
    ):
        with pytest.raises(ValueError, match="names a file"):
            path_of(tmp_path, task, optimizer, label, 0)


def test_lower_can_be_better(tmp_path: Path) -> None:
    write(
        tmp_path,
        *(
            line(step, target=0.3, higher_is_better=False, metric=1 / step)
            for step in (2, 3, 4, 5)
        ),
    )
    run = read(tmp_path)[0][0]
    assert run.to_target and run.to_target.step == 4
    assert run.best.step == 5


def test_what_is_not_finite_is_written_as_null_and_read_as_none(
    tmp_path: Path,
) -> None:
    path = write(
        tmp_path,
        line(10),
        line(20, loss=float("nan"), metric=float("inf"), state="diverged"),
    )
    assert "NaN" not in path.read_text() and "Infinity" not in path.read_text()
    run = read(tmp_path)[0][0]
    assert (run.final.loss, run.final.metric, run.final.state) == (
        None,
        None,
        "diverged",
    )
    assert run.best.step == 10 and run.to_target is None
    with path.open("a") as file:  # as another writer may
        file.write(json.dumps(line(30, metric=float("nan"))) + "\n")
    assert read(tmp_path)[0][0].final.metric is None


def test_a_line_cut_in_half_is_skipped_and_does_not_take_the_next_with_it(
    tmp_path: Path,
) -> None:
    path = write(tmp_path, line(10), line(20))
    path.write_bytes(path.read_bytes()[:-40])
    runs, skipped = read(tmp_path)
    assert [point.step for point in runs[0].points] == [10]
    assert skipped == [f"{path}, line 2: cut in half or not JSON; skipped."]
    append(path, line(20))
    runs, skipped = read(tmp_path)
    assert [point.step for point in runs[0].points] == [10, 20] and len(
        skipped
    ) == 1


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (
            {"format": 99},
            "written in format 99 by another version of seng, this one reads format 1",
        ),
        ({"step": "ten"}, "step is 'ten', which is not int"),
        ({"seed": True}, "seed is 'True', which is not int"),
        (
            {"state": "tired"},
            "state is 'tired', which is none of running, target, finished, diverged",
        ),
        ({"seconds": None}, "seconds is 'None', which is not int or float"),
    ],
)
def test_lines_that_are_not_understood_are_named(
    tmp_path: Path, wrong: dict[str, Any], words: str
) -> None:
    path = write(
        tmp_path, {**line(10), **wrong}, {**line(20), **wrong}, line(30)
    )
    runs, skipped = read(tmp_path)
    assert skipped == [f"{path}, lines 1 to 2: {words}; skipped."]
    assert [point.step for point in runs[0].points] == [30]


def test_missing_fields_other_json_and_empty_files(tmp_path: Path) -> None:
    path = tmp_path / "digits-cnn" / "seng-0.jsonl"
    path.parent.mkdir()
    without = line()
    del without["recipe"]
    path.write_text(f"[1, 2]\n\n{json.dumps(without)}\n")
    (path.parent / "empty-0.jsonl").write_text("")
    runs, skipped = read(tmp_path)
    assert runs == []
    assert [
        sentence.partition(path.parent.name + "/")[2] for sentence in skipped
    ] == [
        "empty-0.jsonl: empty, skipped.",
        "seng-0.jsonl, line 1: not a line of results (it has no format number); skipped.",
        "seng-0.jsonl, line 3: recipe is missing; skipped.",
    ]


def test_a_resumed_run_replaces_what_it_ran_again(tmp_path: Path) -> None:
    moved = {**line()["provenance"], "machine": "another CPU"}
    again = (
        line(20, metric=0.6, provenance=moved),
        line(40, metric=0.7, provenance=moved),
    )
    write(tmp_path, line(10), line(20), line(30), *again)
    run = read(tmp_path)[0][0]
    assert [(point.step, point.metric) for point in run.points] == [
        (10, 0.25),
        (20, 0.6),
        (40, 0.7),
    ]
    assert run.provenance == moved and [
        where["machine"] for where in run.earlier
    ] == ["a CPU"]


def test_lines_of_another_recipe_and_the_same_run_twice_are_skipped(
    tmp_path: Path,
) -> None:
    write(tmp_path, line(10, recipe={"lr": 0.5}), line(20))
    append(tmp_path / "digits-cnn-old" / "seng-0.jsonl", line(70))
    runs, skipped = read(tmp_path)
    assert [[point.step for point in run.points] for run in runs] == [[20]]
    assert (
        "line 1: not of the run or the recipe that the file ends with; skipped."
        in skipped[0]
    )
    assert "is the same run (seng on digits-cnn, seed 0)" in skipped[1]


def test_other_files_of_the_folder_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "resnet18.json").write_text("{")
    (tmp_path / "loose.jsonl").write_text("{")
    assert read(tmp_path) == ([], []) == read(tmp_path / "nowhere")


def test_a_full_disk_leaves_whole_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, line(10))

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        append(path, line(20))
    monkeypatch.undo()
    assert [point.step for point in read(tmp_path)[0][0].points] == [10]


def test_a_metric_that_equals_the_target_reaches_it():
    for higher in (True, False):
        assert results.reaches(0.94, 0.94, higher) and not results.reaches(
            None, 0.94, higher
        )
        assert (
            results.reaches(0.95, 0.94, higher) == higher
            and results.reaches(0.93, 0.94, higher) != higher
        )
        assert not results.reaches(0.94, None, higher)
        assert all(
            results.reaches(
                torch.tensor(level, dtype=torch.float32).item(), level, higher
            )
            for level in (0.94, 0.93)
        )
        assert (
            results.reaches(0.9399, 0.94, higher) != higher
            and results.reaches(0.9401, 0.94, higher) == higher
        )
