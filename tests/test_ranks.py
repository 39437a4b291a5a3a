"""Training under torchrun: as one process would train, on every number of ranks, after a kill too, and never hanging.

`torchrun tests/test_ranks.py COMMAND + COMMAND …` runs commands of `seng` on tasks of this file; {rank} and {other} in a word
become the rank and the other one of two.
"""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from time import monotonic, sleep

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from seng.lab import compare, results
from seng.lab.datasets import Arrays, Data, DataError, load
from seng.lab.datasets.augment import Augment
from seng.lab.problems import Classification, Language, Reconstruction
from seng.lab.ranks import ALONE, Ranks
from seng.lab.recipes import recipe
from seng.lab.run import Run
from seng.lab.streams import open_data
from seng.lab.tasks import TASKS
from seng.lab.train import Training

HERE = Path(__file__)
CPU = torch.device("cpu")
AUGMENT = Augment(crop=1, flip=True)


class Double(nn.Sequential):
    """In float64, whatever it is given."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.double())


def smooth(classes: int) -> nn.Module:
    return Double(
        nn.Conv2d(1, 6, 3, padding=1),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(6 * 64, classes),
    ).double()


def random(classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(4 * 36, classes),
    )


DIGITS = replace(TASKS["digits-cnn"], epochs=2, target=2.0, augment=AUGMENT)
OWN = {
    "smooth": replace(DIGITS, name="smooth", build=smooth),
    "random": replace(DIGITS, name="random", build=random),
}


def worker(words: list[str]) -> None:
    """What each rank runs."""
    from seng.lab import cli

    TASKS.update(OWN)
    rank, advance = int(os.environ.get("RANK", 0)), Training.advance
    commands = " ".join(words).format(rank=rank, other=1 - rank).split(" + ")
    for first, *rest in (command.split() for command in commands):
        steps = []

        def interrupted(self: Training, steps: list[int] = steps) -> dict:
            steps.append(1)
            if len(steps) == 3:
                raise KeyboardInterrupt
            return advance(self)

        def missing(*_: object) -> Data:
            if rank == 1:
                raise DataError("the data are not on this machine")
            return load("digits")

        Training.advance = interrupted if first == "interrupted" else advance  # type: ignore[method-assign]
        if first == "missing":
            compare.open_data = missing
        try:
            cli.main(
                rest if first in ("interrupted", "missing") else [first, *rest]
            )
        except SystemExit as left:
            if first == "missing":
                raise
            print(left.code, flush=True)


def environment() -> dict[str, str]:
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(HERE.parents[1]),
    }


def torchrun(ranks: int, *words: str | Path) -> subprocess.Popen:
    start = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
    ]
    pipes = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.STDOUT,
        "text": True,
        "start_new_session": True,
    }
    return subprocess.Popen(
        [*start, *map(str, words)], env=environment(), **pipes
    )


def said(process: subprocess.Popen, seconds: float = 300) -> str:
    try:
        return process.communicate(timeout=seconds)[0]
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the ranks too


def curve(folder: Path, task: str, name: str) -> list[tuple]:
    (run,) = (
        run
        for run in results.read(folder)[0]
        if (run.task, run.name) == (task, name)
    )
    return [
        (p.step, p.train_loss, p.loss, p.metric, p.state) for p in run.points
    ]


REAL = "train digits-cnn seng --set refresh_every=7 --epochs 6 --no-stop"


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> tuple[Path, str]:
    """Several commands on two ranks, one after another, and what they said."""
    out = tmp_path_factory.mktemp("two")
    cut = "--label cut --checkpoint 0 --out"
    commands = [
        f"compare smooth --optimizers sgd adamw --seeds 1 --out {out}",
        f"train random adamw --out {out} --tensorboard {out}/board",
        f"interrupted train random adamw {cut} {out}/{{rank}}",
        f"train random adamw {cut} {out}/{{other}}",  # rank 1 has the checkpoint
        f"train random adamw {cut} {out}/{{rank}}",  # rank 0 has it
        f"train random adamw --out {out} --set lr=0.5",
        f"{REAL} --out {out}",
    ]
    return out, said(torchrun(2, HERE, " + ".join(commands)))


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_train_as_one_process(ranks, two, tmp_path, monkeypatch):
    torch.set_default_dtype(torch.float32)
    for name, task in OWN.items():
        monkeypatch.setitem(TASKS, name, task)
    words = ["smooth", "--optimizers", "sgd", "adamw", "--seeds", "1", "--out"]
    compare.main([*words, str(tmp_path / "1")])
    folder = two[0]
    if ranks == 4:
        folder = tmp_path / "4"
        assert "the budget is spent" in said(
            torchrun(4, HERE, "compare", *words, folder)
        )
    for name in ("sgd", "adamw"):
        one, several = (
            curve(place, "smooth", name) for place in (tmp_path / "1", folder)
        )
        assert len(one) == 4 and one[0][1] != one[1][1]
        for a, b in zip(one, several, strict=True):
            assert a[0] == b[0] and a[1:4] == pytest.approx(
                b[1:4], rel=1e-9, abs=1e-9
            )
    (ours,) = (
        run
        for run in results.read(folder)[0]
        if (run.task, run.name) == ("smooth", "sgd")
    )
    assert ours.run["ranks"] == ranks
    assert ours.provenance["command"].startswith(
        f"torchrun --nproc-per-node={ranks} -m seng compare smooth"
    )
    assert all(
        "ranks" not in run.run for run in results.read(tmp_path / "1")[0]
    )


def test_only_rank_0_speaks_and_writes(two):
    out, text = two
    assert text.count("smooth: sgd, seed 0: epoch 0.5") == 1
    assert len((out / "smooth" / "sgd-0.jsonl").read_text().splitlines()) == 4
    assert len(list((out / "board").rglob("events*"))) == 1
    assert not list((out / "1").rglob("*"))  # rank 1's folder


def test_an_interrupted_run_goes_on_from_the_checkpoint_of_rank_0(two):
    out, text = two
    assert (
        "interrupted; the same command goes on from here: torchrun --nproc-per-node=2 -m seng train random"
        in text
    )
    assert curve(out / "0", "random", "adamw-cut") == curve(
        out, "random", "adamw"
    )
    assert not list((out / "0").rglob("*.pt"))


def test_a_checkpoint_that_rank_0_cannot_see_is_refused_by_all(two):
    for rank in (0, 1):
        assert (
            f"seng train, rank {rank} of 2: rank 1 has the checkpoint"
            in two[1]
        )
    assert "--out is to be a folder that all nodes share" in two[1]


def test_a_file_of_another_run_is_refused_by_all(two):
    for rank in (0, 1):
        assert (
            f"seng train, rank {rank} of 2: {two[0]}/random/adamw-0.jsonl has a run with another recipe"
            in two[1]
        )


def children(parent: int) -> Iterator[tuple[int, int]]:
    """Rank and process of what torchrun started."""
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if (
                int((place / "stat").read_text().rpartition(")")[2].split()[1])
                == parent
            ):
                variables = dict(
                    v.split("=", 1)
                    for v in (place / "environ").read_text().split("\0")
                    if "=" in v
                )
                yield int(variables["RANK"]), int(place.name)
        except (OSError, KeyError):
            continue


@pytest.mark.skipif(
    not Path("/proc/self/environ").exists(),
    reason="looks for processes where Linux shows them",
)
def test_a_rank_that_is_killed_comes_back_and_the_curve_is_the_same(
    two, tmp_path
):
    path = tmp_path / "digits-cnn" / "seng-0.jsonl"
    words = [
        *REAL.split(),
        "--out",
        str(tmp_path),
        "--checkpoint",
        "0",
        "--timeout",
        "200",
    ]
    process, end = (
        torchrun(2, "--max-restarts=3", "-m", "seng", *words),
        monotonic() + 200,
    )
    while monotonic() < end and not (
        path.exists() and path.read_text().count("\n") >= 2
    ):
        sleep(0.01)
    os.kill(dict(children(process.pid))[1], signal.SIGKILL)
    text = said(process)
    assert process.returncode == 0 and text.count("seed 0: epoch 0.5") == 2, (
        text
    )
    assert curve(tmp_path, "digits-cnn", "seng") == curve(
        two[0], "digits-cnn", "seng"
    )


def test_a_rank_that_raises_ends_all(tmp_path):
    process, start = (
        torchrun(2, HERE, f"missing train digits-cnn sgd --out {tmp_path}"),
        monotonic(),
    )
    text = said(process)
    assert (
        process.returncode
        and "seng, rank 1 of 2: the data are not on this machine" in text
    )
    assert monotonic() - start < 240  # and not the ten minutes of --timeout


def free_port() -> str:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return str(one.getsockname()[1])


@pytest.mark.parametrize(
    ("variables", "words", "wrong"),
    [
        (
            {"WORLD_SIZE": "3"},
            [],
            "rank 0 of 3: a batch of 64 does not divide into 3 equal parts.* such as 63",
        ),
        (
            {"WORLD_SIZE": "128"},
            [],
            "a batch of 64 does not divide into 128 equal parts.* such as 128",
        ),
        (
            {"RANK": ""},
            [],
            "the environment's RANK is '', while torchrun sets it",
        ),
        ({"WORLD_SIZE": "two"}, [], "the environment's WORLD_SIZE is 'two'"),
        (
            {"TORCHELASTIC_MAX_RESTARTS": "3"},
            ["--again"],
            "--again would begin anew after every restart",
        ),
        (
            {},
            ["--timeout", "0"],
            "--timeout is a number of seconds, more than 0, not 0",
        ),
        (
            {},
            ["--timeout", "1"],
            "rank 0 of 2: the 2 ranks did not find one another within 1 s",
        ),
    ],
)
def test_what_is_wrong_under_torchrun(
    variables, words, wrong, tmp_path, monkeypatch
):
    usual = {
        "WORLD_SIZE": "2",
        "RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
    }
    for name, value in {**usual, **variables}.items():
        monkeypatch.setenv(name, value)
    start = monotonic()
    with pytest.raises(SystemExit, match=wrong):
        compare.main_train(
            ["digits-cnn", "sgd", "--out", str(tmp_path), *words]
        )
    assert monotonic() - start < 60 and not list(tmp_path.rglob("*.jsonl"))


def test_a_run_says_on_how_many_ranks_it_was():
    one, two = (
        Run(TASKS["digits-cnn"], recipe("sgd"), ranks=ranks)
        for ranks in (1, 2)
    )
    assert (
        "ranks" not in one.head(CPU)["run"]
        and two.head(CPU)["run"]["ranks"] == 2
    )
    cuda = torch.device("cuda")
    assert one.replays(cuda) and not two.replays(cuda)
    with pytest.raises(
        ValueError, match="the run is for 2 ranks, and there are 1"
    ):
        Training(two, load("digits"), CPU)


def test_the_variables_of_torchrun():
    variables = {
        "WORLD_SIZE": "8",
        "RANK": "5",
        "LOCAL_WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
    }
    ranks = Ranks.present(variables)
    assert (
        ranks == Ranks(8, 5, 4, 1)
        and not ranks.first
        and ranks.launcher == "torchrun --nnodes=2 --nproc-per-node=4 -m "
    )
    assert (
        Ranks.present({})
        == Ranks.present({"WORLD_SIZE": "1", "RANK": "0"})
        == ALONE
        and ALONE.launcher == ""
    )
    with pytest.raises(ValueError, match="would give all ranks one GPU"):
        ranks.device(torch.device("cuda:1"))


def batches(problem, data: Data, ranks: Ranks) -> list[tuple[Tensor, Tensor]]:
    return list(
        problem.batches(
            data,
            8,
            AUGMENT,
            torch.Generator().manual_seed(1),
            torch.Generator().manual_seed(2),
            ranks,
        )
    )


@pytest.mark.parametrize("kind", ["images", "autoencoder", "text", "folder"])
def test_parts_of_all_ranks_are_the_batch(kind, tmp_path):
    problem = {"autoencoder": Reconstruction(), "text": Language(5)}.get(
        kind, Classification()
    )
    data = load("digits")
    if kind == "text":
        text = torch.arange(400) % 7
        data = Data(
            "count", Arrays(text, text[:0]), Arrays(text, text[:0]), 7, (), ()
        )
    elif kind == "folder":
        for split, name, i in (
            (s, n, i)
            for s in ("train", "val")
            for n in ("a", "b")
            for i in range(9)
        ):
            place = tmp_path / "imagenet" / split / name
            place.mkdir(parents=True, exist_ok=True)
            Image.linear_gradient("L").rotate(20 * i).resize(
                (40, 40 + i)
            ).convert("RGB").save(place / f"{i}.JPEG")
        data = open_data("imagenet", tmp_path)
    whole, parts = (
        batches(problem, data, ALONE),
        [batches(problem, data, Ranks(2, rank)) for rank in (0, 1)],
    )
    assert len(whole) > 1 and len(whole[0][0]) == 8
    for one, *both in zip(whole, *parts, strict=True):
        for i in (0, 1):
            assert torch.equal(one[i], torch.cat([part[i] for part in both]))
    if kind == "folder":
        held_out = [
            [y for _, y in data.held_out(4, Ranks(2, rank))] for rank in (0, 1)
        ]
        assert [len(each) for each in held_out] == [3, 2]
        assert (
            sorted(torch.cat([*chain(*held_out)]).tolist())
            == [0] * 9 + [1] * 9
        )


def test_ranks_draw_their_own_numbers_and_the_same_ones_again():
    drawn = []
    for rank, step in ((0, 0), (1, 0), (0, 1), (0, 0)):
        Ranks(2, rank).own_chance(3, step)
        drawn.append(float(torch.rand(())))
    assert drawn[0] == drawn[3] and len(set(drawn)) == 3
    before = torch.get_rng_state()
    ALONE.own_chance(3, 0)
    assert torch.equal(torch.get_rng_state(), before)


if __name__ == "__main__":
    worker(sys.argv[1:])
