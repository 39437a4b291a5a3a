"""Training runs: resumed exactly, stopped at the target, timed without evaluation, and honest about what went wrong."""

import errno
import json
import os
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import nn

from seng.lab import compare, results, train
from seng.lab.checkpoint import Checkpoint
from seng.lab.datasets import Arrays, Data, load
from seng.lab.problems import Language, Reconstruction
from seng.lab.recipes import recipe
from seng.lab.run import Run
from seng.lab.tasks import TASKS, Task, task
from seng.lab.train import Training

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def float32():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    yield
    torch.set_default_dtype(before)


def small(classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(4 * 64, classes),
    )


QUICK = replace(TASKS["digits-cnn"], build=small, epochs=3, target=2.0)


def run_of(name: str = "seng", **options) -> Run:
    return Run(
        options.pop("what", QUICK),
        recipe(
            name, {"lr": 0.02, "refresh_every": 5} if name == "seng" else {}
        ),
        **options,
    )


def lines_of(
    run: Run,
    folder: Path,
    seconds: float | None = None,
    most: int = 10**9,
    **options,
) -> list[dict]:
    checkpoint = (
        None
        if seconds is None
        else Checkpoint(folder / "checkpoint.pt", seconds)
    )
    out = []
    for line in train.train(
        Training(run, load("digits"), CPU, "a command"),
        folder,
        checkpoint,
        **options,
    ):
        out.append(line)
        if len(out) == most:
            break
    return out


def test_again_begins_anew_even_where_it_was_interrupted(tmp_path):
    whole = lines_of(run_of(), tmp_path / "whole")
    lines_of(run_of(), tmp_path, 0.0, 4)
    lines_of(
        run_of(), tmp_path, 1e9, 1, again=True
    )  # interrupted before it saved anything
    assert numbers(lines_of(run_of(), tmp_path, 0.0)) == numbers(whole)


def numbers(lines):
    return [
        (
            line["step"],
            line["epoch"],
            line["train_loss"],
            line["loss"],
            line["metric"],
            line["state"],
        )
        for line in lines
    ]


@pytest.mark.parametrize("name", ["seng", "sgd", "adamw"])
def test_an_interrupted_run_goes_on_exactly(tmp_path, name):
    whole = lines_of(run_of(name), tmp_path / "whole")
    assert [line["state"] for line in whole] == ["running"] * 5 + [
        "finished"
    ] and len(whole) == 6  # twice an epoch
    for most in (1, 2, 3):
        lines_of(run_of(name), tmp_path / str(most), 0.0, most)
        torch.manual_seed(123)  # another process
        rest = lines_of(run_of(name), tmp_path / str(most), 0.0)
        assert numbers(rest) == numbers(whole)
        assert all(
            a["seconds"] < b["seconds"] for a, b in pairwise(rest)
        )  # the clock goes on as well
        (seen,), skipped = results.read(tmp_path / str(most))
        assert [p.step for p in seen.points] == [
            line["step"] for line in whole
        ] and not skipped
        assert not (tmp_path / str(most) / "checkpoint.pt").exists()


def test_without_a_checkpoint_it_begins_anew(tmp_path):
    whole = lines_of(run_of(), tmp_path / "whole")
    lines_of(run_of(), tmp_path, 1e9, 3)
    assert numbers(lines_of(run_of(), tmp_path, 1e9)) == numbers(whole)
    (seen, *_), _ = results.read(tmp_path)
    assert len(seen.points) == 6


def test_what_is_finished_is_not_run_again(tmp_path, monkeypatch):
    first = lines_of(run_of(), tmp_path)
    monkeypatch.setattr(
        Training, "advance", lambda self: pytest.fail("it ran again")
    )
    assert numbers(lines_of(run_of(), tmp_path)) == numbers(first)
    monkeypatch.undo()
    assert len(lines_of(run_of(), tmp_path, again=True)) == 6
    (path,) = tmp_path.glob("*/*.jsonl")
    assert len(path.read_text().splitlines()) == 6


def test_every_line_says_all_about_its_run(tmp_path):
    (line, *_) = lines_of(run_of(label="T5", seed=2), tmp_path)
    (path,) = tmp_path.glob("*/*.jsonl")
    assert (
        path.name == "seng-T5-2.jsonl"
        and json.loads(path.read_text().splitlines()[0]) == line
    )
    assert (
        line["recipe"]
        == recipe("seng", {"lr": 0.02, "refresh_every": 5}).values()
    )
    assert (
        line["run"]["batch"] == 64
        and line["run"]["epochs"] == 3
        and line["seed"] == 2
    )
    assert (
        line["provenance"]["command"] == "a command"
        and "torch" in line["provenance"]["versions"]
    )


def test_optimizers_see_the_same_batches_and_seeds_do_not():
    seen = {}
    for name, seed in (("seng", 0), ("sgd", 0), ("sgd", 1)):
        training = Training(run_of(name, seed=seed), load("digits"), CPU)
        seen[name, seed] = [y for _, y in training._epoch()]
    assert all(
        torch.equal(a, b)
        for a, b in zip(seen["seng", 0], seen["sgd", 0], strict=True)
    )
    assert not all(
        torch.equal(a, b)
        for a, b in zip(seen["sgd", 0], seen["sgd", 1], strict=True)
    )


def test_compiled_runs_after_one_another_train_as_others_do(
    tmp_path, monkeypatch
):
    real = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda model: real(model, backend="aot_eager")
    )
    plain = replace(
        QUICK,
        build=lambda classes: nn.Sequential(
            nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, classes)
        ),
    )
    short = replace(plain, epochs=0.5)
    for name in ("sgd", "seng", "seng"):
        eager, compiled = (
            lines_of(
                run_of(name, what=short, compile=each, label=f"{each}"),
                tmp_path,
                again=True,
            )
            for each in (False, True)
        )
        assert compiled[-1]["train_loss"] == pytest.approx(
            eager[-1]["train_loss"], rel=1e-4
        )


def test_it_stops_at_the_target_unless_told_otherwise(tmp_path):
    easy = replace(QUICK, target=0.2)
    assert lines_of(run_of(what=easy), tmp_path)[-1]["state"] == "target"
    with pytest.raises(
        ValueError, match="another run"
    ):  # what stopped at the target is not a whole run
        lines_of(run_of(what=easy, stop=False), tmp_path)
    assert (
        lines_of(run_of(what=easy, stop=False, label="whole"), tmp_path)[-1][
            "state"
        ]
        == "finished"
    )


def test_evaluation_and_checkpoints_are_not_timed(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(train, "perf_counter", lambda: now[0])
    evaluate, step = Training._evaluate, Training._step

    def slow(self):
        now[0] += 100.0
        return evaluate(self)

    def timed(self):
        now[0] += 1.0
        return step(self)

    monkeypatch.setattr(Training, "_evaluate", slow)
    monkeypatch.setattr(Training, "_step", timed)
    saved = Training.saved

    def slowly(self):
        now[0] += 1000.0
        return saved(self)

    monkeypatch.setattr(Training, "saved", slowly)
    lines = lines_of(run_of(), tmp_path, 0.0)
    assert all(line["seconds"] == line["step"] for line in lines)


def test_a_run_that_diverges_says_so_and_ends(tmp_path):
    wild = Run(QUICK, recipe("sgd", {"lr": 1e30}))
    lines = lines_of(wild, tmp_path)
    assert (
        lines[-1]["state"] == "diverged"
        and len(lines) < 6
        and lines[-1]["loss"] is None
    )
    (seen,), _ = results.read(tmp_path)
    assert seen.final.state == "diverged"


def test_a_full_disk_leaves_the_last_checkpoint(tmp_path, monkeypatch):
    path = tmp_path / "c.pt"
    checkpoint = Checkpoint(path, 0)
    assert checkpoint.save(lambda: {"head": {}, "x": torch.ones(3)})

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    real = torch.save
    for broken in (
        "save",
        "fsync",
    ):  # torch's writer raises a RuntimeError, the system an OSError

        def cut(*args):
            real(*args)
            raise RuntimeError(
                "[enforce fail at inline_container.cc:664] . unexpected pos 768 vs 662"
            )

        monkeypatch.setattr(
            torch, "save", cut
        ) if broken == "save" else monkeypatch.setattr(os, "fsync", full)
        with pytest.warns(
            UserWarning, match="could not be written .*; the one before stays"
        ):
            assert not checkpoint.save(
                lambda: {"head": {}, "x": torch.zeros(3)}
            )
        monkeypatch.undo()
    monkeypatch.setattr(os, "fsync", full)
    with pytest.warns(
        UserWarning,
        match="could not be written .*No space left on device.*the one before stays",
    ):
        assert not checkpoint.save(lambda: {"head": {}, "x": torch.zeros(3)})
    monkeypatch.undo()
    assert checkpoint.load({})["x"].sum() == 3
    assert [p.name for p in tmp_path.iterdir()] == ["c.pt"]


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    lines_of(run_of(), tmp_path, 0.0, 2)
    with pytest.raises(ValueError, match="another recipe"):
        lines_of(
            run_of("seng").__class__(QUICK, recipe("seng", {"lr": 0.5})),
            tmp_path,
            0.0,
        )
    (path,) = tmp_path.glob("*/*.jsonl")
    path.unlink()
    with pytest.raises(
        ValueError, match="checkpoint.pt is of a run with another recipe"
    ):
        lines_of(Run(QUICK, recipe("seng", {"lr": 0.5})), tmp_path, 0.0)
    (tmp_path / "checkpoint.pt").write_bytes(b"half")
    with pytest.raises(ValueError, match="cannot be read"):
        lines_of(run_of(), tmp_path, 0.0)


def test_a_line_that_was_cut_is_left_aside(tmp_path):
    lines_of(run_of(), tmp_path, 0.0, 3)
    (path,) = tmp_path.glob("*/*.jsonl")
    path.write_bytes(path.read_bytes()[:-20])
    assert len(lines_of(run_of(), tmp_path, 0.0)) >= 5
    (seen,), skipped = results.read(tmp_path)
    assert (
        seen.final.state == "finished"
        and len(skipped) == 1
        and "cut in half" in skipped[0]
    )


def test_a_batch_larger_than_the_data_is_refused():
    with pytest.raises(
        ValueError, match="a batch of 5000 is larger than the training set"
    ):
        Training(run_of(batch=5000), load("digits"), CPU)


@pytest.mark.parametrize(
    "problem", [Reconstruction(), Language(16)], ids=lambda p: type(p).__name__
)
def test_autoencoders_and_languages_learn(problem, tmp_path):
    torch.manual_seed(0)
    if isinstance(problem, Language):
        text = torch.arange(4000) % 7
        data = Data(
            "count",
            Arrays(text, text[:0]),
            Arrays(text[:500], text[:0]),
            7,
            (),
            (),
        )

        class Next(nn.Module):
            def __init__(self):
                super().__init__()
                self.table, self.out = nn.Embedding(7, 8), nn.Linear(8, 7)

            def forward(self, x):
                return self.out(self.table(x))

        what = Task(
            "count",
            "count",
            lambda tokens: Next(),
            0.0,
            3,
            problem,
            8,
            convolutional=False,
        )
    else:
        data = load("digits")
        build = lambda classes: nn.Sequential(  # noqa: E731
            nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 64)
        )
        what = Task(
            "auto", "digits", build, 0.0, 3, problem, 64, convolutional=False
        )
    lines = list(
        train.train(
            Training(Run(what, recipe("adam", {"lr": 0.01})), data, CPU),
            tmp_path,
        )
    )
    assert (
        lines[-1]["metric"] < lines[0]["metric"]
        and not lines[0]["higher_is_better"]
    )


def test_imagenet_is_trained_from_its_folder(tmp_path, monkeypatch):
    """Two classes of single-coloured JPEGs, in the folders that ImageNet comes in."""
    for split, count in (("train", 12), ("val", 4)):
        for name, colour in (("n01", (200, 30, 30)), ("n02", (30, 30, 200))):
            (tmp_path / "imagenet" / split / name).mkdir(parents=True)
            for i in range(count):
                Image.new("RGB", (40 + i, 36), colour).save(
                    tmp_path / "imagenet" / split / name / f"{i}.JPEG"
                )
    build = lambda classes: nn.Sequential(  # noqa: E731
        nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(48, classes)
    )
    monkeypatch.setitem(
        TASKS,
        "imagenet-resnet50",
        replace(TASKS["imagenet-resnet50"], build=build),
    )
    words = [
        "imagenet-resnet50",
        "sgd",
        "--epochs",
        "3",
        "--batch",
        "8",
        "--data",
        str(tmp_path),
        "--out",
        str(tmp_path / "r"),
    ]
    compare.main_train([*words, "--set", "warmup=0"])
    (seen,), _ = results.read(tmp_path / "r")
    assert seen.best.metric == 1.0 and seen.points[0].step == 3


def test_missing_data_are_named_with_what_gets_them(tmp_path):
    with pytest.raises(SystemExit) as left:
        compare.main_train(
            [
                "cifar10-resnet18",
                "--data",
                str(tmp_path / "none"),
                "--out",
                str(tmp_path),
            ]
        )
    assert "seng data cifar10" in str(left.value.code)


def test_compare_from_the_command_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(TASKS, "digits-cnn", QUICK)
    words = [
        "digits-cnn",
        "--optimizers",
        "sgd",
        "adam",
        "--seeds",
        "2",
        "--epochs",
        "1",
        "--out",
        str(tmp_path),
    ]
    compare.main([*words, "--set", "adam.lr=0.003"])
    said = capsys.readouterr().out
    assert (
        "sgd, seed 1" in said
        and "the budget is spent" in said
        and "adam" in said
        and "seng report" in said
    )
    runs, _ = results.read(tmp_path)
    assert {(run.name, run.seed) for run in runs} == {
        ("sgd", 0),
        ("sgd", 1),
        ("adam", 0),
        ("adam", 1),
    }
    assert {run.recipe["lr"] for run in runs if run.optimizer == "adam"} == {
        0.003
    }
    assert (
        runs[0]
        .provenance["command"]
        .startswith("seng compare digits-cnn --optimizers sgd adam")
    )


def test_train_from_the_command_line_with_tensorboard(tmp_path, monkeypatch):
    monkeypatch.setitem(TASKS, "digits-cnn", QUICK)
    words = [
        "digits-cnn",
        "sgd",
        "--epochs",
        "1",
        "--out",
        str(tmp_path),
        "--tensorboard",
        str(tmp_path / "tb"),
    ]
    compare.main_train(words)
    assert list((tmp_path / "tb").rglob("events*"))


def test_ctrl_c_ends_with_how_to_go_on(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(TASKS, "digits-cnn", QUICK)
    advance, words = (
        Training.advance,
        ["digits-cnn", "seng", "--out", str(tmp_path), "--checkpoint", "0"],
    )
    count = []

    def interrupted(self):
        count.append(1)
        if len(count) == 3:
            raise KeyboardInterrupt
        return advance(self)

    monkeypatch.setattr(Training, "advance", interrupted)
    with pytest.raises(SystemExit) as left:
        compare.main_train(words)
    assert (
        left.value.code == 130
        and "the same command goes on from here: seng train digits-cnn"
        in capsys.readouterr().out
    )
    compare.main_train(words)
    (seen,), _ = results.read(tmp_path)
    assert seen.final.state == "finished" and len(seen.points) == 6


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["digits-cn"],
            "there is no task 'digits-cn': did you mean digits-cnn",
        ),
        (
            ["digits-cnn", "sdg"],
            "there is no optimizer 'sdg': did you mean sgd",
        ),
        (
            ["digits-cnn", "--set", "lrr=1"],
            "has no field 'lrr': did you mean lr",
        ),
        (["digits-cnn", "--set", "lr"], "--set takes field=value"),
        (["digits-cnn", "--set", "sdg.lr=1"], "there is no optimizer 'sdg'"),
        (["digits-cnn", "--label", "a/b"], "the label 'a/b'"),
        (["digits-cnn", "--label", "paper"], "would make seng-paper of it"),
        (
            ["digits-cnn", "--batch", "0"],
            "--epochs and --batch are positive, not 12 and 0",
        ),
        (
            ["digits-cnn", "--epochs", "-1"],
            "--epochs and --batch are positive",
        ),
        (["digits-cnn", "--set", "lr=inf"], "lr is a number, not 'inf'"),
        (
            ["digits-cnn", "--set", "adam.lr=1"],
            "is for an optimizer that does not run here",
        ),
        (["digits-cnn", "--device", "cud"], "--device is cpu or cuda"),
    ],
)
def test_what_is_wrong_on_the_command_line(words, said, tmp_path):
    with pytest.raises(SystemExit) as left:
        compare.main_train([*words, "--out", str(tmp_path)])
    assert said in str(left.value.code)


def test_a_tuned_recipe_is_taken_and_counted(tmp_path):
    (tmp_path / "digits-cnn").mkdir()
    tuned = {
        "seng": {
            "recipe": {"lr": 0.07},
            "trials": 24,
            "study": "digits-cnn-seng",
        }
    }
    (tmp_path / "digits-cnn" / "tuned.json").write_text(json.dumps(tuned))
    made, tuning = compare.chosen(QUICK, "seng", compare.How(), tmp_path)
    assert made.lr == 0.07 and tuning == {
        "trials": 24,
        "study": "digits-cnn-seng",
        "epochs": None,
        "batch": None,
    }
    made, tuning = compare.chosen(
        QUICK, "seng", compare.How(set=("damping=0.5",)), tmp_path
    )
    assert (
        made.lr == 0.07 and made.damping == 0.5 and tuning is None
    )  # it is not what was tuned any more
    tuned["seng-T5"] = {
        **tuned["seng"],
        "recipe": {"lr": 0.09},
        "epochs": 5.0,
        "batch": 64,
    }
    (tmp_path / "digits-cnn" / "tuned.json").write_text(json.dumps(tuned))
    assert (
        compare.chosen(QUICK, "seng", compare.How(label="T5"), tmp_path)[0].lr
        == 0.09
    )
    made, tuning = compare.chosen(
        QUICK, "seng", compare.How(label="long", tuned="T5"), tmp_path
    )
    assert made.lr == 0.09 and tuning["epochs"] == 5.0
    with pytest.raises(
        ValueError,
        match="nothing for sgd under 'T5': seng tune digits-cnn --optimizers sgd --label T5 finds it",
    ):
        compare.chosen(QUICK, "sgd", compare.How(tuned="T5"), tmp_path)
    with pytest.raises(ValueError, match="give one of them"):
        compare.chosen(
            QUICK, "seng", compare.How(tuned="T5", untuned=True), tmp_path
        )
    tuned["sgd"] = {
        **tuned["seng"],
        "recipe": {"schedule": "exp", "schedule_epochs": 2.0},
        "epochs": 1.5,
    }
    (tmp_path / "digits-cnn" / "tuned.json").write_text(json.dumps(tuned))
    assert (
        compare.chosen(QUICK, "sgd", compare.How(), tmp_path)[
            0
        ].schedule_epochs
        == 4.0
    )  # 3 epochs instead of 1.5
    (tmp_path / "digits-cnn" / "tuned.json").write_text('{"seng": {"rec')
    with pytest.raises(ValueError, match="tuned.json cannot be read"):
        compare.chosen(QUICK, "seng", compare.How(), tmp_path)
    made, tuning = compare.chosen(
        QUICK, "seng", compare.How(untuned=True), tmp_path
    )
    assert made.lr == 0.1 and tuning is None


def test_schedules_in_epochs_shrink_with_the_budget():
    whole, short = (
        task("imagenet-resnet50").recipe("seng-paper", epochs)
        for epochs in (76, 7.6)
    )
    assert (whole.schedule_epochs, whole.warmup) == (60, 5) and (
        short.schedule_epochs,
        short.warmup,
    ) == pytest.approx((6, 0.5))
    assert whole.lr_at(30, 76) == pytest.approx(short.lr_at(3, 7.6))


@pytest.mark.parametrize("name", TASKS)
def test_every_task_is_whole(name):
    what = task(name)
    for optimizer, fields in what.recipes.items():
        recipe(optimizer, dict(fields))
    assert what.name == name and what.epochs > 0 and what.batch > 0
    classes = {"cifar100-resnet18": 100, "cifar100-vgg16bn": 100}.get(
        name, 65 if name == "shakespeare-gpt" else 10
    )
    with torch.device("meta"):
        assert (
            sum(p.numel() for p in what.build(classes).parameters()) > 10_000
        )
