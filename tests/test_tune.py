"""The search for recipes: what it may see, how many trials each optimizer gets, and that it goes on where it was."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from math import log
from pathlib import Path
from time import sleep
from typing import Any

import optuna
import pytest
import torch
from optuna.distributions import CategoricalDistribution, FloatDistribution
from optuna.trial import TrialState
from sqlalchemy.exc import IntegrityError
from torch import Tensor

from seng.lab import paper, recipes
from seng.lab.compare import How, chosen
from seng.lab.datasets import Arrays, Data
from seng.lab.problems import Language, Reconstruction
from seng.lab.recipe import Between, OneOf
from seng.lab.tasks import TASKS
from seng.lab.train import Training
from seng.lab.tuning import command as tune
from seng.lab.tuning import study, trials
from seng.lab.tuning.search import Plan, Seeded, at_the_edge, held_out
from seng.lab.tuning.study import (
    Campaign,
    again,
    best,
    campaign,
    connect,
    counted,
    running,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore:Heartbeat of storage:UserWarning"
)  # trials that are begun by hand
DIGITS = TASKS["digits-cnn"]


class Untouchable(Tensor):
    """A test set that nobody may look at."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise AssertionError(f"the test set was used by {func}")


def images(count: int = 600) -> Data:
    """Bright and dark ones in three classes, which a network learns in a few steps; the test set cannot be used."""
    chance = torch.Generator().manual_seed(3)
    y = torch.randint(3, (count,), generator=chance)
    x = (
        torch.randint(40, (count, 1, 8, 8), generator=chance)
        + 80 * y[:, None, None, None]
    ).to(torch.uint8)
    secret = Tensor._make_subclass(
        Untouchable, torch.zeros(7, dtype=torch.int64)
    )
    return Data(
        "digits", Arrays(x, y), Arrays(secret, secret), 10, (0.5,), (0.3,)
    )


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As a user runs it, in float32, on few images and without waiting."""
    torch.set_default_dtype(torch.float32)
    monkeypatch.setattr(tune, "load", lambda name, folder: images())
    monkeypatch.setattr(trials, "WAIT", 0.05)
    monkeypatch.setenv("SENG_COMMIT", "tested")  # git takes its time
    yield
    torch.set_default_dtype(torch.float64)


def words(
    out: Path,
    *more: str,
    optimizers: tuple[str, ...] = ("sgd",),
    number: int = 3,
) -> list[str]:
    short = [
        "--epochs",
        "1",
        "--batch",
        "256",
        "--trials",
        str(number),
        "--out",
        str(out),
        "--device",
        "cpu",
    ]
    return ["digits-cnn", "--optimizers", *optimizers, *short, *more]


def opened(
    out: Path | None, optimizer: str = "sgd", **changes: Any
) -> Campaign:
    """The study of `words`; without a folder one in memory."""
    settings: dict[str, Any] = {
        "trials": 3,
        "epochs": 1.0,
        "batch": 256,
    } | changes
    storage = (
        connect(study.default_storage(out, "digits-cnn"))
        if out
        else optuna.storages.InMemoryStorage()
    )
    return campaign(storage, Plan(DIGITS, optimizer, **settings))


def tuned(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        (out / "digits-cnn" / "tuned.json").read_text()
    )
    return found


def dead_process() -> int:
    process = subprocess.Popen([sys.executable, "-S", "-c", ""])
    process.wait()
    return process.pid


# What it may see


def test_held_out_is_a_tenth_of_the_training_set_and_leaves_the_test_set_alone() -> (
    None
):
    x = torch.arange(103, dtype=torch.uint8).view(-1, 1, 1, 1)
    secret = Tensor._make_subclass(Untouchable, torch.zeros(5))
    data = Data(
        "rows",
        Arrays(x, x.flatten().long()),
        Arrays(secret, secret),
        10,
        (0.5,),
        (0.5,),
    )
    got = held_out(data)
    assert len(got.train.x) == 93 and len(got.test.x) == 10
    assert sorted([*got.train.y.tolist(), *got.test.y.tolist()]) == list(
        range(103)
    )
    assert all(
        torch.equal(part.x.flatten().long(), part.y)
        for part in (got.train, got.test)
    )  # an image keeps its class
    assert got.test.y.tolist() != list(range(93, 103)), (
        "sorted data must not lose its last class"
    )
    assert torch.equal(held_out(data).test.y, got.test.y)
    assert "tenth" in got.note and got.classes == 10


def test_held_out_of_a_text_is_its_end() -> None:
    text, none = torch.arange(205), torch.empty(0, dtype=torch.int64)
    got = held_out(
        Data(
            "text",
            Arrays(text, none),
            Arrays(torch.arange(9), none),
            205,
            (),
            (),
        )
    )
    assert got.train.x.tolist() == list(
        range(185)
    ) and got.test.x.tolist() == list(range(185, 205))
    assert not len(got.train.y) and not len(got.test.y)


def test_the_trap_works(small: None) -> None:
    with pytest.raises(AssertionError, match="the test set was used"):
        Training(
            trials.Run(DIGITS, recipes.recipe("sgd"), batch=256),
            images(),
            torch.device("cpu"),
        ).advance()


# What it tries


def test_the_first_trial_is_the_tasks_own_recipe_and_in_the_space() -> None:
    for task in TASKS.values():
        for name in recipes.RECIPES:
            plan = Plan(task, name)
            own = recipes.recipe(name, dict(task.recipes.get(name, {})))
            assert plan.base.with_(plan.first).values() == plan.base.values()
            assert [
                plan.base.lr_at(epoch, task.epochs) for epoch in (0, 3, 8)
            ] == [own.lr_at(e, task.epochs) for e in (0, 3, 8)]
            for field, allowed in plan.space.items():
                value = plan.first[field]
                assert (
                    value in allowed.values
                    if isinstance(allowed, OneOf)
                    else allowed.low <= value <= allowed.high
                )


def test_a_range_moves_along_with_the_tasks_own_value() -> None:
    task = replace(
        DIGITS,
        recipes={
            "sgd": {"lr": 0.3, "weight_decay": 0.0},
            "seng-paper": {"damping": 2.0, "schedule": "linear"},
        },
    )
    (field, allowed), *rest = Plan(task, "sgd").space.items()
    assert field == "lr" and not rest  # a log range has no 0: the task's stays
    assert (allowed.low, allowed.high) == pytest.approx((3e-2, 3.0))
    space = Plan(task, "seng-paper").space
    assert (space["damping"].low, space["damping"].high) == pytest.approx(
        (1.0, 4.0)
    )
    assert (
        isinstance(space["schedule"], OneOf)
        and space["schedule"].values[0] == "linear"
    )
    momentum = Plan(TASKS["shakespeare-gpt"], "muon").space[
        "momentum"
    ]  # its own is 0.9: 1 would be beyond all sense
    assert isinstance(momentum, Between) and (momentum.low, momentum.high) == (
        0.6,
        0.97,
    )
    far = Plan(
        replace(DIGITS, recipes={"muon": {"momentum": 0.99}}), "muon"
    ).space["momentum"]
    assert isinstance(far, Between) and (far.low, far.high) == (0.6, 0.99)


def test_a_weight_decay_that_a_task_brings_is_searched() -> None:
    """The library's own is 0, by which no range can move."""
    space = Plan(DIGITS, "seng").space
    assert space["weight_decay"] == recipes.SENG.space["weight_decay"]
    none = replace(DIGITS, recipes={"seng": {"weight_decay": 0.0}})
    assert "weight_decay" not in Plan(none, "seng").space


def test_schedules_shrink_with_the_budget() -> None:
    short = Plan(TASKS["imagenet-resnet50"], "seng-paper", epochs=7.6)
    assert short.lengths == pytest.approx(
        {"schedule_epochs": 6.0, "warmup": 0.5}
    )
    whole = Plan(TASKS["cifar10-resnet18"], "seng-paper", epochs=15).lengths
    assert whole == {
        "schedule_epochs": None,
        "warmup": 3.0,
    }  # a schedule as long as the run


def test_a_task_that_begins_elsewhere_is_another_search(
    tmp_path: Path,
) -> None:
    storage = connect(f"sqlite:///{tmp_path}/studies.db")
    first = campaign(storage, Plan(DIGITS, "sgd"))
    moved = replace(DIGITS, recipes={"sgd": {"lr": 0.02}})
    with pytest.raises(
        ValueError,
        match=r"was made with first .*'lr': 0.1.*, not with first .*'lr': 0.02",
    ):
        campaign(storage, Plan(moved, "sgd"))
    kept = {
        key: value
        for key, value in first.study.user_attrs["settings"].items()
        if key != "first"
    }
    first.study.set_user_attr("settings", kept)  # as studies were before
    campaign(storage, Plan(moved, "sgd"))


def test_what_is_set_is_not_searched_and_stays_with_what_is_found(
    small: None, tmp_path: Path
) -> None:
    given = ["--set", "seng.refresh_every=3", "damping=0.2"]
    tune.main(words(tmp_path, *given, optimizers=("seng",), number=1))
    found = json.loads((tmp_path / "digits-cnn/tuned.json").read_text())[
        "seng"
    ]["recipe"]
    assert (found["refresh_every"], found["damping"]) == (3, 0.2) and {
        "lr",
        "weight_decay",
    } < set(found)
    plan = Plan(DIGITS, "seng", fixed={"damping": "0.2"})
    assert (
        "damping" not in plan.space
        and "lr" in plan.space
        and plan.base.values()["damping"] == 0.2
    )
    for changed, said in (
        (["--set", "damping=0.3"], "was made with set"),
        ([], "was made with"),
        (["--set", "sgd.lr=1"], "does not run here"),
        (["--set", "dampin=1"], "did you mean damping"),
        (
            ["--set", "lr=1", "--sampler", "grid"],
            "--set goes with --sampler tpe",
        ),
    ):
        with pytest.raises(SystemExit, match=said):
            tune.main(
                words(tmp_path, *changed, optimizers=("seng",), number=1)
            )


@pytest.mark.parametrize("name", ["seng-paper", "kfac"])
def test_the_papers_grids_come_in_an_order_of_the_seed_each_point_once(
    name: str,
) -> None:
    """Of SENG as they are printed, of K-FAC in SGD's units."""
    plan = Plan(TASKS["cifar10-resnet18"], name, sampler="grid", trials=10_000)
    grid = [
        paper.in_sgd_units(point) if name == "kfac" else point
        for grid in plan.grids
        for point in paper.points(grid)
    ]
    keys = {json.dumps(point, sort_keys=True) for point in plan.points}
    assert len(keys) == len(plan.points) and len(grid) - 1 <= len(
        plan.points
    ) <= len(grid)
    assert plan.asked == 1 + len(plan.points)
    for field in ("lr", "damping", "weight_decay"):
        assert {point[field] for point in plan.points} <= {
            point[field] for point in grid
        }
    lengths = {point["schedule_epochs"] for point in plan.points}
    assert lengths == {85.0, 90.0, 70.0, None, 80.0}, (
        "75 is the run's own length"
    )
    assert (
        replace(plan, trials=5).points
        == plan.points
        != replace(plan, seed=1).points
    )


def test_chance_is_of_the_trial_and_not_of_the_process() -> None:
    def drawn(stops: int) -> list[dict[str, Any]]:
        storage = optuna.storages.InMemoryStorage()
        name = optuna.create_study(
            storage=storage, sampler=Seeded(7)
        ).study_name
        for _ in range(stops):
            again = optuna.load_study(
                study_name=name, storage=storage, sampler=Seeded(7)
            )
            again.optimize(
                lambda trial: (
                    trial.suggest_float("a", 1e-3, 1, log=True)
                    + trial.suggest_float("b", 0, 1)
                ),
                n_trials=8 // stops,
            )
        return [trial.params for trial in again.trials]

    whole = drawn(1)
    assert whole == drawn(4) and len({trial["a"] for trial in whole}) == 8
    assert all(
        log(trial["a"]) / log(1e-3) != pytest.approx(1 - trial["b"])
        for trial in whole
    )  # fields are not drawn alike


@pytest.mark.parametrize(
    ("value", "allowed", "edge"),
    [
        (1.09e-3, FloatDistribution(1e-3, 1.0, log=True), True),
        (0.96, FloatDistribution(1e-3, 1.0, log=True), True),
        (2e-3, FloatDistribution(1e-3, 1.0, log=True), False),
        (0.94, FloatDistribution(0.0, 1.0), False),
        (0.951, FloatDistribution(0.0, 1.0), True),
        (3, CategoricalDistribution((2, 3, 1)), True),
        (2, CategoricalDistribution((2, 3, 1)), False),
        (2, CategoricalDistribution((2, 3)), False),
        (
            "cosine",
            CategoricalDistribution(("cosine", "exp", "linear")),
            False,
        ),
        (0.5, CategoricalDistribution((None, 0.1, 0.5, 0.9)), False),
    ],
)
def test_edges(value: Any, allowed: Any, edge: bool) -> None:
    assert at_the_edge({"field": value}, {"field": allowed}) == (
        ["field"] if edge else []
    )


# The search


def test_every_optimizer_gets_the_same_trials_and_compare_reads_what_was_found(
    small: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("sgd", "adam", "seng")
    tune.main(words(tmp_path, optimizers=names))
    said = capsys.readouterr().out
    assert (
        "sgd: trial 3 of 3: accuracy" in said
        and "judged on 60 of the 600 training samples" in said
    )
    for name in names:
        there = opened(tmp_path, name)
        assert len(counted(there.trials())) == len(there.trials()) == 3
        assert there.trials()[0].params == there.plan.first
        top = best(there.study)
        assert top is not None
        assert {
            "recipe",
            "curve",
            "seconds",
            "machine",
            "commit",
            "versions",
        } <= set(top.user_attrs)
        assert (
            "command" not in top.user_attrs
            and len(top.user_attrs["curve"]) == 2
        )
        assert top.value == top.user_attrs["curve"][-1]["metric"]
        found = tuned(tmp_path)[name]
        assert found["recipe"] == top.params and found["value"] == top.value
        assert {
            "trials": 3,
            "epochs": 1.0,
            "batch": 256,
            "sampler": "tpe",
        }.items() <= found.items()
        recipe, tuning = chosen(DIGITS, name, How(), tmp_path)
        assert tuning == {
            "trials": 3,
            "study": f"digits-cnn-{name}",
            "epochs": 1.0,
            "batch": 256,
        }
        assert recipe.values() == top.user_attrs["recipe"]
    before = tuned(tmp_path)
    tune.main(words(tmp_path, optimizers=names))
    assert (
        "have been done before" in capsys.readouterr().out
        and tuned(tmp_path) == before
    )
    tune.main(words(tmp_path, number=4))
    assert (
        len(opened(tmp_path, trials=4).trials()) == 4
        and tuned(tmp_path)["sgd"]["trials"] == 4
    )
    assert tuned(tmp_path)["adam"] == before["adam"]
    capsys.readouterr()
    tune.main(["digits-cnn", "--status", "--out", str(tmp_path)])
    said = capsys.readouterr().out
    assert (
        "4/4" in said
        and "3/3" in said
        and "do not have the same number of trials" in said
    )


def test_an_interrupted_trial_does_not_count_and_is_done_again(
    small: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    calls, advance = list[int](), Training.advance

    def interrupted(self: Training) -> dict[str, Any]:
        calls.append(1)
        if len(calls) == 4:  # in the middle of the second trial
            raise KeyboardInterrupt
        return advance(self)

    monkeypatch.setattr(Training, "advance", interrupted)
    with pytest.raises(SystemExit) as stopped:
        tune.main(words(tmp_path))
    said = capsys.readouterr().out
    assert (
        stopped.value.code == 130
        and "the same command goes on" in said
        and "unfinished: 1 of 3" in said
    )
    assert not (tmp_path / "digits-cnn" / "tuned.json").exists(), (
        "half a study is no result"
    )
    tune.main(["digits-cnn", "--status", "--out", str(tmp_path)])
    assert "unfinished: 1 of 3" in capsys.readouterr().out
    tune.main(words(tmp_path))
    there = opened(tmp_path).trials()
    assert [trial.state for trial in there].count(
        TrialState.FAIL
    ) == 1 and len(counted(there)) == 3
    assert (
        there[2].params == there[1].params
        and there[1].state == TrialState.FAIL
    )
    assert tuned(tmp_path)["sgd"]["trials"] == 3


def test_what_a_killed_process_left_is_done_again(
    small: None, tmp_path: Path
) -> None:
    killed = opened(tmp_path)
    trial = killed.study.ask()
    recipe = killed.plan.suggest(trial)
    trial.set_user_attr("worker", study.worker_id() | {"pid": dead_process()})
    alive = opened(tmp_path, "adam")
    other = alive.study.ask()
    other.set_user_attr("worker", study.worker_id())
    alive.recover()
    assert len(running(alive.trials())) == 1 and not counted(alive.trials()), (
        "a living process keeps its trial"
    )
    tune.main(words(tmp_path))
    there = killed.trials()
    assert (
        there[0].state == TrialState.FAIL
        and len(there) == 4
        and len(counted(there)) == 3
    )
    assert (
        there[1].user_attrs["recipe"] == recipe.values()
        and there[1].user_attrs["again"] == 0
    )


def test_what_a_silent_machine_left_is_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study, "BEAT", 1)
    monkeypatch.setattr(study, "GRACE", 1)
    there = opened(tmp_path)
    trial = there.study.ask()
    trial.set_user_attr("worker", {"host": "elsewhere", "pid": 1})
    there.study._storage.record_heartbeat(trial._trial_id)  # type: ignore[attr-defined]
    there.recover()
    assert there.trials()[0].state == TrialState.RUNNING
    sleep(2.2)
    there.recover()
    there.recover()
    assert [each.state for each in there.trials()] == [
        TrialState.FAIL,
        TrialState.WAITING,
    ] and not counted(there.trials())


def test_a_worker_too_many_steps_back(small: None) -> None:
    """Two that began the last trial together: the one with the higher number gives way, and the queue keeps its point."""
    there = opened(None, trials=1)
    first = there.study.ask()
    worker = trials.Worker(
        held_out(images()), torch.device("cpu"), lambda: None
    )
    worker.one(there)
    assert (
        there.trials()[1].user_attrs["superfluous"]
        and not counted(there.trials())
        and there.begun() == 1
    )
    there.study.tell(first, 0.5)
    assert there.complete() and len(counted(there.trials())) == 1
    again(there.study, there.trials()[0])
    worker.one(there)
    waiting = [
        trial for trial in there.trials() if trial.state == TrialState.WAITING
    ]
    assert (
        len(counted(there.trials())) == 1
        and waiting[-1].system_attrs["fixed_params"] == there.plan.first
    )


def test_a_trial_that_others_took_for_dead_is_theirs(small: None) -> None:
    there = opened(None)
    taken = list[int]()

    def watch() -> None:
        if not taken:
            taken.append(1)
            there.study.tell(0, state=TrialState.FAIL)
            again(there.study, there.trials()[0])

    trials.Worker(held_out(images()), torch.device("cpu"), watch).work([there])
    assert (
        len(counted(there.trials())) == 3
        and there.trials()[0].state == TrialState.FAIL
    )


def test_divergence_is_a_result_and_an_error_of_torch_a_failure_that_counts(
    small: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    calls, advance = list[int](), Training.advance

    def broken(self: Training) -> dict[str, Any]:
        calls.append(1)
        if len(calls) == 1:
            with torch.no_grad():
                next(iter(self.model.parameters())).fill_(float("nan"))
        if len(calls) == 2:
            raise torch.linalg.LinAlgError("the input is not finite")  # type: ignore[attr-defined]
        if len(calls) == 3:
            raise RuntimeError("CUDA out of memory\nand more")
        return advance(self)

    monkeypatch.setattr(Training, "advance", broken)
    tune.main(words(tmp_path, number=4))
    there = opened(tmp_path, trials=4).trials()
    assert [trial.value for trial in there[:3]] == [0.0, 0.0, None]
    assert [trial.state for trial in there[2:]] == [
        TrialState.FAIL,
        TrialState.COMPLETE,
    ]
    assert there[2].user_attrs["failed"] == "RuntimeError: CUDA out of memory"
    said = capsys.readouterr().out
    assert (
        "it diverged" in said
        and "failed, RuntimeError: CUDA out of memory (" in said
    )
    assert (
        tuned(tmp_path)["sgd"]["trials"] == 4
        and tuned(tmp_path)["sgd"]["value"] == there[3].value
    )


def test_a_study_whose_trials_all_fail_finds_nothing(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Training) -> dict[str, Any]:
        raise RuntimeError("no")

    monkeypatch.setattr(Training, "advance", broken)
    with pytest.raises(SystemExit, match="no trial of sgd came to its end"):
        tune.main(words(tmp_path))
    assert not (tmp_path / "digits-cnn" / "tuned.json").exists()


@pytest.mark.parametrize(
    ("problem", "value"),
    [(Language(8), trials.WORST), (Reconstruction(), trials.WORST)],
)
def test_the_worst_value_of_an_error_is_large(
    problem: Any, value: float
) -> None:
    plan = Plan(replace(DIGITS, problem=problem), "sgd")
    trial = optuna.create_study().ask()
    assert (
        plan.direction == "minimize" and trials._diverged(plan, trial) == value
    )


def test_a_trial_goes_on_beyond_the_target(small: None) -> None:
    easy = Plan(
        replace(DIGITS, target=0.0), "sgd", trials=1, epochs=1.0, batch=256
    )
    there = campaign(optuna.storages.InMemoryStorage(), easy)
    trials.Worker(held_out(images()), torch.device("cpu"), lambda: None).one(
        there
    )
    assert there.trials()[0].user_attrs["curve"][-1]["epoch"] == 1.0


@pytest.mark.parametrize("prune", [True, False])
def test_what_is_below_the_median_is_pruned(
    small: None, monkeypatch: pytest.MonkeyPatch, prune: bool
) -> None:
    def scripted(self: Training) -> dict[str, Any]:
        """Trials get worse from one to the next, and every one better with time."""
        self.step += 1
        self.state = "finished" if self.step == 6 else "running"
        metric = 0.9 - 0.1 * len(there.trials()) + 0.01 * self.step
        return dict.fromkeys(
            ("step", "epoch", "seconds", "train_loss", "loss"), self.step
        ) | {
            "metric": metric,
            "provenance": {},
        }

    monkeypatch.setattr(Training, "advance", scripted)
    there = opened(None, epochs=3.0, trials=6, prune=prune)
    trials.Worker(held_out(images()), torch.device("cpu"), lambda: None).work(
        [there]
    )
    states = [trial.state for trial in there.trials()]
    assert states[:4] == [TrialState.COMPLETE] * 4
    assert (
        states[4:] == [TrialState.PRUNED if prune else TrialState.COMPLETE] * 2
    )
    if prune:
        assert len(there.trials()[4].intermediate_values) == 2, (
            "a third of six evaluations is let be"
        )
        assert len(there.trials()[4].user_attrs["curve"]) == 2
    assert (
        len(counted(there.trials())) == 6
        and best(there.study) == there.trials()[0]
    )


def test_the_grid_is_tried_point_by_point(
    small: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    grids = (
        {"schedule": ("cosine",), "lr": (0.01, 0.02)},
        {"schedule": ("exp",), "lr": (0.03,), "rate": (4.0, 6.0)},
    )
    monkeypatch.setattr(paper, "GRIDS", {("sgd", "cnn"): grids})
    tune.main(words(tmp_path, "--sampler", "grid"))
    assert (
        "sgd: the task's own recipe, and 2 of the 4 points of the paper's grid, drawn by seed 100"
        in capsys.readouterr().out
    )
    assert (
        tuned(tmp_path)["sgd"]["trials"] == 3
        and tuned(tmp_path)["sgd"]["sampler"] == "grid"
    )
    tune.main(words(tmp_path, "--sampler", "grid", number=9))
    assert "all 4 points" in capsys.readouterr().out
    there = [
        trial.params
        for trial in opened(tmp_path, sampler="grid", trials=9).trials()
    ]
    tried = sorted(
        (point["schedule"], point["lr"], point["rate"]) for point in there
    )
    assert tried == [
        ("cosine", 0.01, 5.0),
        ("cosine", 0.02, 5.0),
        ("cosine", 0.1, 5.0),
        ("exp", 0.03, 4.0),
        ("exp", 0.03, 6.0),
    ]
    assert tuned(tmp_path)["sgd"]["trials"] == 5


def test_workers_share_a_study(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tune.main(
        words(tmp_path, "--jobs", "2", optimizers=("sgd", "adam"), number=4)
    )
    for name in ("sgd", "adam"):
        there = opened(tmp_path, name, trials=4).trials()
        assert (
            len(counted(there)) == 4
            and not running(there)
            and tuned(tmp_path)[name]["trials"] == 4
        )
        assert len({trial.params["lr"] for trial in counted(there)}) == 4
    assert "adam: trial 4 of 4" in capsys.readouterr().out


def test_of_equals_the_lowest_loss_is_the_best() -> None:
    there = opened(None)
    for loss in (None, 0.3, 0.2, 0.4):
        trial = there.study.ask()
        trial.set_user_attr("curve", [{"loss": loss}])
        there.study.tell(trial, 0.9)
    there.study.tell(there.study.ask(), 0.8)
    top = best(there.study)
    assert top is not None and top.number == 2


# What is refused


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (["--trials", "0"], "--trials is a count"),
        (["--batch", "599"], "a batch of 599 is larger than nine tenths"),
        (["--optimizers", "sdg"], "did you mean sgd"),
        (["--label", "a/b"], "the label 'a/b'"),
        (["--sampler", "grid"], "the paper has no grid for sgd on digits-cnn"),
        (["--jobs", "0"], "--jobs is a count"),
        (["--storage", "nothing"], "the storage nothing cannot be opened"),
        (["--storage", "none://x"], "the storage none://x needs a driver"),
        (["--storage", "sqlite:////proc/no/where.db"], "cannot be opened"),
        (
            ["--storage", f"sqlite:///{__file__}"],
            "cannot be opened (file is not a database)",
        ),
    ],
)
def test_bad_input_is_one_sentence(
    small: None, tmp_path: Path, changed: list[str], said: str
) -> None:
    with pytest.raises(SystemExit, match=re.escape(said)) as stopped:
        tune.main(words(tmp_path) + changed)
    assert "\n" not in str(stopped.value.code) and not list(tmp_path.iterdir())


def test_a_study_of_another_kind_is_refused(
    small: None, tmp_path: Path
) -> None:
    opened(tmp_path)
    for changed, said in (
        (
            ["--epochs", "2"],
            "made with epochs 1.0, not with epochs 2.0: give this one a --label",
        ),
        (
            ["--batch", "64", "--no-prune"],
            "made with batch 256, prune True, not with batch 64, prune False",
        ),
        (["--seed", "5"], "seed 100, not with seed 5"),
    ):
        with pytest.raises(SystemExit, match=said):
            tune.main(words(tmp_path) + changed)
    assert [trial.state for trial in opened(tmp_path).trials()] == [
        TrialState.WAITING
    ]


@pytest.mark.parametrize(
    ("driver", "package"),
    [("psycopg2", "psycopg2-binary"), ("psycopg", "'psycopg[binary]'")],
)
def test_a_database_without_its_driver_is_named_without_its_password(
    monkeypatch: pytest.MonkeyPatch, driver: str, package: str
) -> None:
    monkeypatch.setitem(sys.modules, driver, None)
    with pytest.raises(
        ValueError, match=re.escape(f"pip install {package}")
    ) as refused:
        connect(f"postgresql+{driver}://me:secret@host/db")
    assert "secret" not in str(refused.value) and "host/db" in str(
        refused.value
    )


def test_tables_that_another_machine_makes_at_the_same_time_are_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = list[int]()

    def storage(*given: Any, **options: Any) -> Any:
        made.append(1)
        if len(made) < 3:
            raise IntegrityError(
                "CREATE TABLE", {}, Exception("duplicate key")
            )
        return "the storage"

    monkeypatch.setattr(study, "sleep", lambda seconds: None)
    monkeypatch.setattr(optuna.storages, "RDBStorage", storage)
    assert connect("sqlite:///:memory:") == "the storage" and len(made) == 3


def test_the_studies_of_others_are_left_alone(
    small: None, tmp_path: Path
) -> None:
    storage = connect(study.default_storage(tmp_path, "digits-cnn"))
    own = optuna.create_study(
        storage=storage, study_name="digits-cnn-sgd", direction="maximize"
    )
    own.tell(own.ask(), 1.0)
    with pytest.raises(SystemExit, match="was not made by seng tune"):
        tune.main(words(tmp_path))
    with pytest.raises(SystemExit, match="there are no studies of digits-cnn"):
        tune.main(["digits-cnn", "--status", "--out", str(tmp_path / "none")])
    assert not (tmp_path / "none").exists(), "to look is not to make"
