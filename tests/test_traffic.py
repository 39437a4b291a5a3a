"""Bytes at the process group, on two gloo ranks, against sizes worked out by hand; and the benchmark that counts them."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

from seng.lab import cli
from seng.lab.bench import distributed
from seng.lab.bench.traffic import Traffic
from seng.lab.models import small_cnn
from seng.lab.projection import Compute, Link, Method, Projection, layers

RANKS = 2
TEN = torch.Size((10,))  # float32: 40 bytes


def network() -> nn.Sequential:
    """6·5 + 5 + 5·3 numbers, of which 15 are frozen: 35 gradients."""
    model = nn.Sequential(
        nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3, bias=False)
    )
    model[2].requires_grad_(False)
    return model


def backward(model: nn.Module) -> None:
    model(torch.ones(4, 6)).sum().backward()


def parts(*numbers: int) -> list[torch.Tensor]:
    return [torch.ones(n) for n in numbers]


def plain(rank: int) -> dict[str, Callable[[], Any]]:
    """A name, and what it does; all of TEN numbers or said otherwise."""
    return {
        "all_reduce": lambda: dist.all_reduce(torch.ones(TEN)),
        "all_reduce float64": lambda: dist.all_reduce(
            torch.ones(TEN, dtype=torch.float64)
        ),
        "all_reduce later": lambda: dist.all_reduce(
            torch.ones(TEN), async_op=True
        ).wait(),
        "all_gather": lambda: dist.all_gather(parts(10, 10), torch.ones(TEN)),
        "all_gather in one": lambda: dist.group.WORLD._allgather_base(
            torch.ones(20), torch.ones(TEN)
        ).wait(),
        "broadcast": lambda: dist.broadcast(torch.ones(TEN), 0),
        "reduce": lambda: dist.reduce(torch.ones(TEN), 0),
        "gather": lambda: dist.gather(
            torch.ones(TEN), parts(10, 10) if rank == 0 else None
        ),
        "scatter": lambda: dist.scatter(
            torch.ones(TEN), parts(10, 10) if rank == 0 else None
        ),
        "reduce_scatter": lambda: dist.group.WORLD._reduce_scatter_base(
            torch.ones(TEN), torch.ones(20)
        ).wait(),
        "all_to_all": lambda: dist.all_to_all(parts(10, 10), parts(10, 10)),
        "all_to_all in one": lambda: dist.all_to_all_single(
            torch.ones(TEN), torch.ones(TEN)
        ),
        "all_to_all uneven": lambda: dist.all_to_all_single(
            *(torch.ones(n) for n in ((3, 7) if rank == 0 else (9, 5))),
            *(([1, 2], [1, 6]) if rank == 0 else ([6, 3], [2, 3])),
        ),
        "send": lambda: (
            dist.send(torch.ones(TEN), 1)
            if rank == 0
            else dist.recv(torch.ones(TEN), 0)
        ),
        "functional": lambda: (
            functional.all_reduce(torch.ones(TEN), "sum", dist.group.WORLD) + 1
        ),
        "barrier": dist.barrier,
        "nothing": lambda: torch.ones(TEN) + 1,
    }


WANT = {  # what the two ranks give
    "all_reduce": ({"all_reduce": 40},) * 2,
    "all_reduce float64": ({"all_reduce": 80},) * 2,
    "all_reduce later": ({"all_reduce": 40},) * 2,
    "all_gather": ({"all_gather": 40},) * 2,
    "all_gather in one": ({"all_gather": 40},) * 2,
    "broadcast": ({"broadcast": 40},) * 2,
    "reduce": ({"reduce": 40},) * 2,
    "gather": ({"gather": 40},) * 2,
    "scatter": ({"scatter": 40}, {"scatter": 0}),
    "reduce_scatter": ({"reduce_scatter": 80},) * 2,
    "all_to_all": ({"all_to_all": 40},) * 2,
    "all_to_all in one": ({"all_to_all": 20},) * 2,
    "all_to_all uneven": ({"all_to_all": 24}, {"all_to_all": 8}),
    "send": ({"send": 40}, {}),
    "functional": ({"all_reduce": 40},) * 2,
    "barrier": ({},) * 2,
    "nothing": ({},) * 2,
    "DistributedDataParallel": ({"all_reduce": 4 * 35},) * 2,
    "three buckets": ({"all_reduce": 4 * 3 * 2500},) * 2,
    "communication hook": ({"all_reduce": 2 * 35},) * 2,
    "no_sync": ({},) * 2,
    "buffers": ({"broadcast": 4 * 2 * 5 + 8, "all_reduce": 4 * 10},) * 2,
    "fully_shard": ({"all_gather": 4 * 20, "reduce_scatter": 4 * 40},) * 2,
    "DTensor": ({"all_gather": 4 * 20},) * 2,
}


def wrapped() -> dict[str, Callable[[], Any]]:
    """What wrappers send by themselves, once they have settled."""
    ddp = DistributedDataParallel(network())
    deep = nn.Sequential(*(nn.Linear(50, 50, bias=False) for _ in range(3)))
    buckets = DistributedDataParallel(deep, bucket_cap_mb=0.005)
    halved = DistributedDataParallel(network())
    halved.register_comm_hook(None, half)
    norm = DistributedDataParallel(nn.BatchNorm1d(5))
    sharded = fully_shard(nn.Linear(5, 8, bias=False))
    mesh = init_device_mesh("cpu", (RANKS,))
    rows = distribute_tensor(torch.ones(8, 5), mesh, [Shard(0)])
    return {
        "DistributedDataParallel": lambda: backward(ddp),
        "three buckets": lambda: buckets(torch.ones(2, 50)).sum().backward(),
        "communication hook": lambda: backward(halved),
        "no_sync": lambda: silent(ddp),
        "buffers": lambda: norm(torch.ones(4, 5)).sum().backward(),
        "fully_shard": lambda: sharded(torch.ones(2, 5)).sum().backward(),
        "DTensor": lambda: rows.redistribute(mesh, [Replicate()]),
    }


def silent(model: DistributedDataParallel) -> None:
    with model.no_sync():
        backward(model)


def half(_, bucket):
    """Gradients travel in half precision."""
    future = dist.all_reduce(
        bucket.buffer().to(torch.float16), async_op=True
    ).get_future()
    return future.then(lambda done: done.value()[0].to(torch.float32))


def count(rank: int, folder: str) -> None:
    """On one rank: what Traffic says of each."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=RANKS,
    )
    said = {}
    for name, work in {**plain(rank), **wrapped()}.items():
        if name not in plain(rank):
            for _ in range(
                2
            ):  # DistributedDataParallel settles its buckets after the first backward
                work()
        with Traffic() as traffic:
            work()
        assert traffic.bytes == sum(traffic.by_kind.values())
        said[name] = traffic.by_kind, traffic.messages
    Path(folder, f"{rank}.json").write_text(json.dumps(said))
    del work
    gc.collect()  # networks first: where DDP is the last to hold the group, gloo's thread and Python wait for each other
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def counted(
    tmp_path_factory: pytest.TempPathFactory,
) -> list[dict[str, list[dict[str, int]]]]:
    """Everything on two ranks, once."""
    folder = tmp_path_factory.mktemp("ranks")
    spawn(count, (str(folder),), RANKS)
    return [
        json.loads((folder / f"{rank}.json").read_text())
        for rank in range(RANKS)
    ]


@pytest.mark.parametrize("name", WANT)
def test_bytes_are_those_of_the_tensors_that_a_rank_gives(
    counted, name: str
) -> None:
    assert tuple(said[name][0] for said in counted) == WANT[name]


def test_everything_was_counted_and_messages_are_told_apart(counted) -> None:
    assert set(counted[0]) == set(WANT)
    assert counted[0]["DistributedDataParallel"][1] == {
        "all_reduce": 1
    } and counted[0]["three buckets"][1] == {"all_reduce": 3}
    assert counted[0]["send"][1] == {"send": 1} and counted[1]["send"][1] == {}


def test_an_operator_without_a_rule_is_refused() -> None:
    class Operator:
        namespace = "c10d"
        _schema = SimpleNamespace(name="c10d::teleport_")

        def __str__(self) -> str:
            return "c10d.teleport_.default"

    with pytest.raises(NotImplementedError, match="teleport"):
        Traffic().__torch_dispatch__(Operator(), ())


def test_bench_counts_what_each_strategy_sends_and_says_why_one_does_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setattr(
        distributed, "STRATEGIES", ("shared", "block", "lagged", "none such")
    )
    monkeypatch.setattr(distributed, "cores", lambda: 1)
    words = "bench --distributed --models small_cnn --ranks 2 --batch 4 --rank 4 --window 2 --rounds 1 --device cpu --out"
    cli.main([*words.split(), str(tmp_path)])
    (path,) = tmp_path.glob("*.json")
    assert path.name == "small_cnn-distributed-rank4-batch4-cpu.json"
    result = json.loads(path.read_text())
    assert result["finished"] and {
        "command",
        "commit",
        "machine",
        "versions",
        "seed",
    } <= set(result)
    assert (
        "--distributed" in result["command"]
        and "--ranks 2" in result["command"]
    )
    assert (
        result["setting"]["batch_per_rank"] == 4
        and result["setting"]["backend"] == "gloo"
    )
    sgd, *ours, failed = result["rows"]
    told = Projection(
        layers(small_cnn()),
        Compute(1.0),
        Link(),
        Method(k=4, samples=4, basis_bytes=4),
    )  # of `seng scale`
    buffers = sum(
        t.numel() * t.element_size()
        for t in small_cnn().to(torch.float32).buffers()
    )
    assert sgd["contender"] == "sgd" and sgd["gradient_bytes"] == told.gradient
    assert sgd["idle_by_kind"] == {
        "all_reduce": told.gradient,
        "broadcast": buffers,
    }
    assert (
        sgd["extra_gradients"] == 0
        and sgd["ratio_to_sgd"] == sgd["efficiency"] == 1
        and sgd["shares_cores"]
    )
    assert (
        failed["contender"] == "seng lowrank none such"
        and failed["step_ms"] is None
        and "none such" in failed["note"]
    )
    assert [row["note"] for row in ours] == [""] * 4 and all(
        row["step_ms"] > 0 for row in ours
    )
    default, shared, block, lagged = ours
    assert default["contender"] == "seng shared"
    # Between refreshes it sends nothing of its own, on a refresh its factors too.
    assert default["idle_by_kind"] == sgd["idle_by_kind"]
    assert default["refresh_bytes"] > shared["refresh_bytes"]
    assert (
        shared["idle_by_kind"] == sgd["idle_by_kind"]
        and shared["extra_gradients"] > 0
    )
    assert (
        block["idle_bytes"]
        == lagged["idle_bytes"]
        == sgd["idle_bytes"] + told.gradient
    )
    assert (
        block["idle_messages"]
        > lagged["idle_messages"]
        == shared["idle_messages"]
        == sgd["idle_messages"]
    )
    assert (
        shared["refresh_by_kind"]["all_reduce"] == told.gradient + told.basis
    )
    assert (
        shared["refresh_by_kind"]["all_to_all"]
        == (told.sketches + told.directions) / 2
    )  # half of it is for the other rank
    printed = capsys.readouterr().out
    assert (
        "more ranks than the 1 cores" in printed
        and "2 ranks, seng lowrank none such: ValueError" in printed
    )
    cli.main(
        ["bench", "--plot", str(tmp_path)]
    )  # draws nothing, and does not stumble
    assert not capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--ranks", "2"], ["--distributed"]),
        (["--distributed", "--ranks", "0"], ["at least 1"]),
        (["--distributed", "--strategies", "sharde"], ["did you mean shared"]),
        (
            ["--distributed", "--compile"],
            ["leave --contenders and --compile out"],
        ),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    arguments: list[str], said: list[str], capsys
) -> None:
    with pytest.raises(SystemExit):
        cli.main(["bench", *arguments])
    printed = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert all(word in printed for word in said), printed


def test_efficiency_is_throughput_beside_that_of_the_fewest_ranks() -> None:
    rows = [
        distributed.Row("sgd", 2, samples_per_second=100.0),
        distributed.Row("sgd", 8, samples_per_second=300.0),
    ]
    rows.append(distributed.Row("seng shared", 8, note="failed"))
    distributed.scaled(rows)
    assert [row.efficiency for row in rows] == [1.0, 0.75, None]
