"""Results of the first edition in the names of this one: scripts/migrate_results.py on made-up folders and on the committed one."""

from __future__ import annotations

import json
import runpy
import sqlite3
from pathlib import Path
from typing import Any

import optuna
import pytest

from seng.lab.recipes import RECIPES, recipe
from seng.lab.report.summary import summarise
from seng.lab.results import append, read

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "migrate_results.py"
migrate = runpy.run_path(str(SCRIPT))["main"]

COMMON = {
    "lr": 0.2,
    "weight_decay": 4e-4,
    "schedule": "cosine",
    "schedule_epochs": None,
    "rate": 5.0,
    "floor": 0.001,
    "warmup": 0.0,
    "warmup_lr": 0.05,
    "momentum": 0.9,
    "nesterov": True,
    "damping": 0.25,
    "damping_gamma": 1.0,
    "refresh_every": 50,
    "relative_damping": True,
    "samples": None,
    "rank": 16,
    "average": 0.8,
    "combine": "exact",
    "form": "auto",
}
KRONECKER = {**COMMON, "rank": 0, "power": 0.5, "base_rank": 24}
PAPER = {
    **COMMON,
    "relative_damping": False,
    "average": 0.0,
    "combine": "independent",
}
ORTHOGONAL = {**COMMON, "form": "plain", "orthogonal": True}
WAS = {
    "seng": COMMON,
    "seng-kronecker": KRONECKER,
    "seng-paper": PAPER,
    "seng-orthogonal": ORTHOGONAL,
}


def line(optimizer: str, values: dict[str, Any], label: str) -> dict[str, Any]:
    study = "-".join(filter(None, ("digits-cnn", optimizer, label)))
    return {
        "task": "digits-cnn",
        "optimizer": optimizer,
        "label": label,
        "seed": 0,
        "recipe": values,
        "run": {"epochs": 1.0, "batch": 64},
        "target": 0.9,
        "metric_name": "accuracy",
        "higher_is_better": True,
        "step": 10,
        "epoch": 1.0,
        "seconds": 2.5,
        "train_loss": 0.125,
        "loss": 0.25,
        "metric": 0.875,
        "state": "finished",
        "provenance": {
            "command": f"seng train digits-cnn {optimizer}",
            "commit": "abc1234",
        },
        "tuning": {"trials": 3, "study": study},
    }


def study(path: Path, optimizer: str, values: dict[str, Any]) -> None:
    """One trial, as `seng tune` of the first edition left it."""
    made = optuna.create_study(
        storage=f"sqlite:///{path}", study_name=f"digits-cnn-{optimizer}"
    )
    settings = {"task": "digits-cnn", "optimizer": optimizer, "label": ""}
    made.set_user_attr("settings", settings)
    trial = made.ask()
    trial.suggest_float("lr", 0.01, 1.0)
    trial.set_user_attr("recipe", values)
    made.tell(trial, 0.5)


def folder(place: Path) -> Path:
    """A run, an entry and a study of each, an SGD beside them, and a benchmark."""
    task = place / "digits-cnn"
    task.mkdir(parents=True)
    entries = {}
    for name, values in {**WAS, "sgd": recipe("sgd").values()}.items():
        for label in ("", "T20"):
            file = f"{'-'.join(filter(None, (name, label)))}-0.jsonl"
            append(task / file, line(name, values, label))
        searched = {k: values[k] for k in ("lr", "weight_decay")}
        if "damping" in values:
            searched["damping"] = values["damping"]
        entries[name] = {"recipe": searched, "study": f"digits-cnn-{name}"}
        study(task / "studies.db", name, values)
    (task / "tuned.json").write_text(json.dumps(entries))
    names = ("sgd", "seng", "seng merged", "seng kronecker", "seng orthogonal")
    rows = [{"contender": name, "step_ms": 1.5} for name in names]
    (place / "bench").mkdir()
    (place / "bench" / "tiny-cpu.json").write_text(
        json.dumps({"setting": {"every": 20}, "rows": rows})
    )
    return place


def content(place: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(place)): path.read_bytes()
        for path in place.rglob("*")
        if path.is_file()
    }


def test_runs_have_todays_names_and_recipes_and_keep_what_made_them(
    tmp_path: Path,
) -> None:
    migrate(folder(tmp_path))
    trajectories, skipped = read(tmp_path)
    assert not skipped
    found = {run.name: run for run in trajectories}
    assert set(found) == {
        name + label
        for name in (
            "seng-lowrank",
            "kfac-root",
            "seng-paper",
            "seng-orthogonal",
            "sgd",
        )
        for label in ("", "-T20")
    }
    for name, was in (
        ("seng-lowrank", "seng"),
        ("kfac-root", "seng-kronecker"),
        ("seng-paper", "seng-paper"),
        ("seng-orthogonal", "seng-orthogonal"),
    ):
        run = found[name]
        assert run.recorded_as == was
        assert run.provenance == {
            "command": f"seng train digits-cnn {was}",
            "commit": "abc1234",
        }
        assert (run.final.seconds, run.final.metric) == (2.5, 0.875)
        if name in RECIPES:  # so that `seng compare` recognises the run
            assert recipe(name, run.recipe).values() == run.recipe
    assert found["sgd"].recorded_as is None
    low_rank = recipe("seng-lowrank", found["seng-lowrank"].recipe)
    assert low_rank.curvature.base is None and not low_rank.curvature.centres
    root = found["kfac-root"].recipe
    assert root["kronecker_floor"] == 0.5  # √λ
    assert (root["kronecker_rank"], root["kronecker_decay"]) == (24, 0.8)
    paper = found["seng-paper"].recipe
    assert paper["lr"] == 0.2 * 0.25 and paper["weight_decay"] == 4e-4 / 0.25
    assert paper["warmup_lr"] == 0.05 * 0.25 and paper["floor"] == 0.00025
    assert found["seng-orthogonal"].recipe == ORTHOGONAL


def test_what_searches_found_goes_along(tmp_path: Path) -> None:
    migrate(folder(tmp_path))
    task = tmp_path / "digits-cnn"
    entries = json.loads((task / "tuned.json").read_text())
    assert set(entries) == {
        "seng-lowrank",
        "kfac-root",
        "seng-paper",
        "seng-orthogonal",
        "sgd",
    }
    assert entries["seng-lowrank"]["recipe"]["lr"] == 0.2
    assert entries["seng-paper"]["recipe"]["lr"] == 0.05
    storage = f"sqlite:///{task / 'studies.db'}"
    names = set(optuna.get_all_study_names(storage))
    assert names == {entry["study"] for entry in entries.values()}
    assert "digits-cnn-seng-paper-edition1" in names  # other units
    made = optuna.load_study(
        study_name="digits-cnn-seng-lowrank", storage=storage
    )
    assert made.user_attrs["settings"]["optimizer"] == "seng-lowrank"
    assert made.trials[0].user_attrs["recipe"]["centred"] is False
    runs, _ = read(tmp_path)
    unlabelled = [run for run in runs if not run.label]
    told = {run.tuning["study"] for run in unlabelled if run.tuning}
    assert told == names


def test_benchmarks_have_todays_contenders(tmp_path: Path) -> None:
    migrate(folder(tmp_path))
    result = json.loads((tmp_path / "bench" / "tiny-cpu.json").read_text())
    assert [row["contender"] for row in result["rows"]] == [
        "sgd",
        "seng lowrank",
        "seng lowrank merged",
        "kfac root",
        "seng orthogonal",
    ]


def test_it_may_run_again_beside_runs_of_today(tmp_path: Path) -> None:
    place = folder(tmp_path)
    migrate(place)
    now = {**line("seng", recipe("seng").values(), ""), "tuning": None}
    append(place / "digits-cnn" / "seng-0.jsonl", now)
    before = content(place)
    migrate(place)
    assert content(place) == before


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("digits-cnn/notes.md", "what?", "a file that I do not know"),
        ("mystery.json", "{}", "a file that I do not know"),
        (
            "digits-cnn/senk-0.jsonl",
            json.dumps({"format": 1, **line("senk", COMMON, "")}),
            "an unknown optimizer, senk",
        ),
        (
            "digits-cnn/seng-9.jsonl",
            json.dumps(
                {"format": 1, **line("seng", {**COMMON, "graft": True}, "")}
            ),
            "no field 'graft'",
        ),
        (
            "digits-cnn/seng-9.jsonl",
            json.dumps({"format": 7, **line("seng", COMMON, "")}),
            "is not of format 1",
        ),
        ("digits-cnn/seng-9.jsonl", "{half", "cannot be read"),
    ],
)
def test_what_it_does_not_know_stops_it_before_anything_is_written(
    tmp_path: Path, file: str, text: str, said: str
) -> None:
    place = folder(tmp_path)
    (place / file).write_text(text + "\n")
    before = content(place)
    with pytest.raises(SystemExit, match=said):
        migrate(place)
    assert content(place) == before


def test_reports_show_runs_whose_recipe_is_gone(tmp_path: Path) -> None:
    migrate(folder(tmp_path))
    (task, _) = summarise(read(tmp_path)[0])
    assert "seng-orthogonal" in [s.name for s in task.standings]
    assert [r for r in task.remarks if "earlier edition" in r] == [
        f"{name}: of an earlier edition, {words}."
        for name, words in sorted(
            {
                "seng-lowrank": "which called it seng, as its commands do",
                "kfac-root": "which called it seng-kronecker, as its commands do",
                "seng-orthogonal": "and this one has it no more",
                "seng-paper": "in other units: its lr and weight decay are translated here",
            }.items()
        )
    ]


def test_the_committed_results_are_translated() -> None:
    runs, skipped = read(ROOT / "results")
    assert runs and not skipped
    for run in runs:
        known = run.optimizer in RECIPES
        assert known or run.recorded_as == run.optimizer == "seng-orthogonal"
        if known:
            recipe(run.optimizer, run.recipe)  # every field is one
    for path in (ROOT / "results").rglob("studies.db"):
        with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as base:
            names = base.execute("SELECT study_name FROM studies").fetchall()
        base.close()
        tuned = json.loads(path.with_name("tuned.json").read_text())
        assert {entry["study"] for entry in tuned.values()} <= {
            name for (name,) in names
        }
