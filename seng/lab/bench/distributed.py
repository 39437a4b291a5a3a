"""`seng bench --distributed`: what SENG's strategies send beside DistributedDataParallel with SGD, their cost and scaling.

"seng shared" is SENG as it comes, "seng lowrank …" low rank over λI with each strategy.

Each strategy at each number of ranks has processes of its own, so that one that fails or hangs takes nobody along. In them SGD
and the strategy take turns, a window of steps with a refresh and one without, as in the rest of the benchmark; the bytes of
both are counted before (`seng.lab.bench.traffic`), means over the ranks:

    between refreshes  B₀, per step;   of a refresh  B₁, what a step with one sends more
    beyond SGD         (B₀ + B₁/T − B_SGD) / (bytes of all gradients), in gradients per step
    efficiency         samples per second of N ranks / (N/N₀ × those of N₀ ranks), N₀ the smallest number asked, every rank with
                       a batch of the same size

Ranks that share cores slow each other, whatever they send: the table says where that is so. A ratio to SGD is taken within
processes; an efficiency compares processes that ran one after the other, so what else the machine does is in it.
"""

from __future__ import annotations

import gc
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import (
    ProcessExitedException,
    ProcessRaisedException,
    spawn,
)
from torch.nn.parallel import DistributedDataParallel

import seng
from seng.lab.bench import rows
from seng.lab.bench.arena import Arena, Entrant
from seng.lab.bench.contenders import Setting, contender
from seng.lab.bench.options import STRATEGIES, Options
from seng.lab.bench.report import Screen
from seng.lab.bench.tasks import Task
from seng.lab.bench.traffic import Traffic
from seng.lab.record import provenance

TIMEOUT = timedelta(
    minutes=5
)  # of a collective: a rank that waits longer waits for one that has failed
ON_CPU = {
    "batch": 32,
    "warm": 4,
    "window": 3,
    "rounds": 3,
}  # unless told otherwise
MiB = 2**20


@dataclass
class Row:
    """What was measured of one contender at one number of ranks; None: not, or not applicable."""

    contender: str
    ranks: int
    gradient_bytes: int | None = None  # of all gradients, once
    idle_bytes: float | None = None  # per step between refreshes
    refresh_bytes: float | None = None  # what a step with a refresh sends more
    extra_gradients: float | None = (
        None  # per step, beyond SGD's, a refresh spread over T steps
    )
    idle_by_kind: dict[str, float] = field(default_factory=dict)
    refresh_by_kind: dict[str, float] = field(
        default_factory=dict
    )  # of the whole step with a refresh
    idle_messages: float | None = None
    step_ms: float | None = None  # a refresh spread over T steps included
    idle_ms: float | None = None
    refresh_ms: float | None = None
    ratio_to_sgd: float | None = None  # of the same processes
    samples_per_second: float | None = None  # of all ranks together
    efficiency: float | None = None
    shares_cores: bool = False
    note: str = ""


def kind_of(name: str) -> str:
    """sgd; seng, as it comes, for "seng shared"; seng lowrank for "seng lowrank shared"."""
    if name == "sgd":
        return name
    return "seng lowrank" if name.startswith("seng lowrank") else "seng"


class Ranked(Entrant):
    """One contender with a model of its own, which DistributedDataParallel keeps alike on all ranks."""

    def __init__(
        self,
        name: str,
        arena: Arena,
        setting: Setting,
        refresh_every: int,
    ) -> None:
        self.arena, self.period = arena, refresh_every
        self.model, task = arena.model(), arena.task
        ids = (
            [torch.cuda.current_device()]
            if arena.device.type == "cuda"
            else None
        )
        self.forward = DistributedDataParallel(self.model, device_ids=ids)
        if name == "sgd":
            self.optimizer = contender(
                "sgd", self.model, setting, refresh_every, task.lr
            )
        else:
            given: dict[str, Any] = {}
            if kind_of(name) == "seng lowrank":
                given["damping"] = setting.damping
                given["curvature"] = setting.curvature("auto")
            self.optimizer = seng.SENG(
                self.forward,
                task.lr,
                weight_decay=5e-4,
                refresh_every=refresh_every,
                strategy=name.removeprefix(kind_of(name)).strip(),
                **given,
            )
        self.batches = cycle(arena.pool)
        self.loss = torch.zeros(())

    def seconds(self, count: int) -> float:
        """As an entrant's, all ranks beginning at once."""
        dist.barrier()
        return super().seconds(count)

    def counted(self, steps: int) -> dict[str, Any]:
        """Per step of a few: bytes by kind and messages, means over the ranks."""
        with Traffic() as traffic:
            self.steps(steps)
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(
            found, (dict(traffic.by_kind), traffic.messages.total())
        )
        share = 1 / (steps * len(found))
        kinds = sorted({kind for by_kind, _ in found for kind in by_kind})
        by_kind = {
            kind: share * sum(each.get(kind, 0) for each, _ in found)
            for kind in kinds
        }
        return {
            "by_kind": by_kind,
            "bytes": sum(by_kind.values()),
            "messages": share * sum(count for _, count in found),
        }


def measure(
    rank: int,
    row: Row,
    task: Task,
    setting: Setting,
    options: Options,
    folder: str,
) -> None:
    """One rank of one row; the first one writes the row."""
    torch.set_num_threads(1)
    cuda = options.device.type == "cuda"
    if cuda:
        torch.cuda.set_device(rank)
    meeting = f"file://{folder}/rendezvous"
    dist.init_process_group(
        "nccl" if cuda else "gloo", meeting, TIMEOUT, row.ranks, rank
    )
    _raced(rank, row, task, setting, options)
    if rank == 0:
        Path(folder, "row.json").write_text(json.dumps(asdict(row)))
    dist.barrier()
    gc.collect()  # networks first: gloo waits for a thread, and that for Python, where DDP is the last to hold the group
    dist.destroy_process_group()


def _raced(
    rank: int, row: Row, task: Task, setting: Setting, options: Options
) -> None:
    arena = Arena(task, options)
    arena.unseen = []
    arena.pool = task.batches(
        arena.seed + 1 + rank, arena.device, task.pool
    )  # every rank has its own samples
    name = row.contender
    every = setting.period(kind_of(name))
    period = 1 if every == 1 else 2 * task.window
    entrants = [Ranked("sgd", arena, setting, period)]
    if name != "sgd":
        entrants.append(Ranked(name, arena, setting, period))
    for e in entrants:
        e.steps(max(task.warm, 3))
    count(row, entrants, every, task.window)
    race(row, entrants, setting, task)
    if not all(bool(e.loss.isfinite()) for e in entrants):
        row.note = "diverged"


def count(
    row: Row, entrants: Sequence[Ranked], every: int, window: int
) -> None:
    """The bytes of the last entrant, beyond those of the first."""
    sgd, e = entrants[0], entrants[-1]
    plain = sgd.counted(window)
    e.rewind()
    busy = e.counted(1)
    between = every > 1 or e is sgd  # else every step is a refresh
    idle = e.counted(window) if between else plain
    row.gradient_bytes = sum(
        p.numel() * p.element_size()
        for p in e.model.parameters()
        if p.requires_grad
    )
    if between:
        row.idle_bytes, row.idle_by_kind, row.idle_messages = (
            idle["bytes"],
            idle["by_kind"],
            idle["messages"],
        )
    if e is not sgd:
        row.refresh_bytes, row.refresh_by_kind = (
            busy["bytes"] - idle["bytes"],
            busy["by_kind"],
        )
    spread = idle["bytes"] + (busy["bytes"] - idle["bytes"]) / every
    row.extra_gradients = (spread - plain["bytes"]) / row.gradient_bytes


def race(
    row: Row, entrants: Sequence[Ranked], setting: Setting, task: Task
) -> None:
    """In turns: a window with a refresh, a window without; who begins changes from round to round."""
    timed: list[tuple[rows.Row, list[tuple[float, float]]]] = [
        (rows.Row(kind, setting), [])
        for kind, _ in zip(
            ("sgd", kind_of(row.contender)), entrants, strict=False
        )
    ]
    for i in range(task.rounds):
        for j in range(len(entrants)):
            at = (i + j) % len(entrants)
            entrants[at].rewind()
            timed[at][1].append(
                (
                    entrants[at].seconds(task.window),
                    entrants[at].seconds(task.window),
                )
            )
    rows.summarise(timed, task.window)
    found = timed[-1][0]
    row.step_ms, row.idle_ms, row.refresh_ms = (
        found.step_ms,
        found.idle_ms,
        found.refresh_ms,
    )
    row.ratio_to_sgd = found.ratio_to_sgd
    row.samples_per_second = (
        1e3 * row.ranks * task.batch / found.step_ms if found.step_ms else None
    )


@contextmanager
def one_thread() -> Iterator[None]:
    """For the processes that are started inside."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before


def measured(row: Row, task: Task, setting: Setting, options: Options) -> Row:
    """The row, from processes of its own; where they fail, it says why."""
    if options.device.type == "cuda" and row.ranks > torch.cuda.device_count():
        return replace(
            row,
            note=f"needs {row.ranks} GPUs, and there are {torch.cuda.device_count()}",
        )
    with tempfile.TemporaryDirectory() as folder, one_thread():
        try:
            spawn(measure, (row, task, setting, options, folder), row.ranks)
        except (ProcessRaisedException, ProcessExitedException) as failed:
            lines = [line for line in str(failed).splitlines() if line.strip()]
            errors = [
                line
                for line in lines
                if not line.startswith((" ", "-")) and ": " in line
            ]
            return replace(row, note=(errors or lines)[-1])
        return Row(**json.loads(Path(folder, "row.json").read_text()))


def cores() -> int:
    """That this process may use."""
    return (
        len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1
    )


def scaled(found: Sequence[Row]) -> None:
    """Efficiencies, from each contender's row with the fewest ranks."""
    for row in found:
        known = [
            r
            for r in found
            if r.contender == row.contender and r.samples_per_second
        ]
        if row.samples_per_second and known:
            least = min(known, key=lambda r: r.ranks)
            row.efficiency = (
                row.samples_per_second  # type: ignore[operator]
                / least.samples_per_second
                * least.ranks
                / row.ranks
            )


def quick(task: Task, options: Options) -> Task:
    """On a CPU, few and small steps unless told otherwise."""
    unsaid: dict[str, Any] = {
        name: value
        for name, value in ON_CPU.items()
        if getattr(options.amounts, name) is None
    }
    return replace(task, **unsaid) if options.device.type == "cpu" else task


def number(value: float | None, digits: int) -> str:
    """Empty where there is none."""
    return "" if value is None else f"{value:.{digits}f}"


COLUMNS: dict[str, Callable[[Row], str]] = {
    "ranks": lambda r: f"{r.ranks}{'*' * r.shares_cores}",
    "contender": lambda r: r.contender,
    "MiB per step\nbetween refreshes": lambda r: number(
        r.idle_bytes and r.idle_bytes / MiB, 3
    ),
    "messages\nper step": lambda r: number(r.idle_messages, 0),
    "MiB per\nrefresh": lambda r: number(
        r.refresh_bytes and r.refresh_bytes / MiB, 3
    ),
    "gradients per step\nbeyond SGD": lambda r: number(r.extra_gradients, 4),
    "ms per\nstep": lambda r: number(r.step_ms, 1),
    "step\n/ SGD": lambda r: number(r.ratio_to_sgd, 3),
    "samples\nper s": lambda r: number(r.samples_per_second, 0),
    "efficiency": lambda r: number(r.efficiency, 2),
}


def show(screen: Screen, title: str, found: Sequence[Row]) -> None:
    """The table, to stay, with what it has no room for."""
    remarks = [
        f"  {row.ranks} ranks, {row.contender}: {row.note}"
        for row in found
        if row.note
    ]
    if any(row.shares_cores for row in found):
        remarks.insert(
            0,
            f"  * more ranks than the {cores()} cores: times, ratios and efficiencies there are of ranks waiting for a core",
        )
    cells = [[show(row) for show in COLUMNS.values()] for row in found]
    if screen.console is None:
        print(
            title,
            *(
                "  ".join(line)
                for line in [
                    [name.replace("\n", " ") for name in COLUMNS],
                    *cells,
                ]
            ),
            *remarks,
            sep="\n",
        )
        return
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(
        title=title,
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    for name in COLUMNS:
        table.add_column(
            name,
            justify="left" if name == "contender" else "right",
            no_wrap=True,
        )
    for row, line in zip(found, cells, strict=True):
        table.add_row(
            *line,
            end_section=row is [r for r in found if r.ranks == row.ranks][-1],
        )
    screen.console.print(table, *remarks, sep="\n", highlight=False)


class Comparison:
    """One model: a row for each contender at each number of ranks, written as they come."""

    def __init__(self, task: Task, options: Options) -> None:
        self.task, self.options = quick(task, options), options
        self.setting = options.settings(self.task)[0]
        self.head = provenance(options.command(task), options.device)
        self.path = options.path(task)
        self.found: list[Row] = []

    def run(self, screen: Screen) -> None:
        """Every row."""
        asked, cpu = self.options.parallel, self.options.device.type == "cpu"
        chosen = [
            name
            for name in STRATEGIES
            if name in (asked.strategies or STRATEGIES)
        ]
        # As it comes it pools its curvature.
        default = ["seng shared"] if "shared" in chosen else []
        strategies = default + [f"seng lowrank {name}" for name in chosen]
        for ranks in sorted(set(asked.ranks or (1, 2, 4))):
            for name in ("sgd", *strategies):
                screen.show(
                    self.task.name,
                    f"{name}, {ranks} rank{'s' * (ranks > 1)}",
                    [],
                )
                row = Row(name, ranks, shares_cores=cpu and ranks > cores())
                self.found.append(
                    measured(row, self.task, self.setting, self.options)
                )
                scaled(self.found)
                self.write(finished=False)
        self.write(finished=True)

    def write(self, finished: bool) -> None:
        """The JSON, as far as it goes."""
        setting = {
            "model": self.task.name,
            "batch_per_rank": self.task.batch,
            "backend": "gloo" if self.options.device.type == "cpu" else "nccl",
            "cores": cores(),
            "threads_per_rank": 1,
            **asdict(self.setting),
            **{
                name: getattr(self.task, name)
                for name in ("warm", "window", "rounds")
            },
        }
        result = {
            **self.head,
            "seed": self.options.amounts.seed,
            "setting": setting,
            "finished": finished,
        }
        result["rows"] = [asdict(row) for row in self.found]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(
            json.dumps(result, indent=1, ensure_ascii=False) + "\n"
        )


def distributed(options: Options) -> bool:
    """Measure each model; whether all was finished."""
    with Screen() as screen:
        for task in options.tasks:
            comparison = Comparison(task, options)
            try:
                comparison.run(screen)
            except KeyboardInterrupt:
                screen.say(
                    f"interrupted; what was finished is in {comparison.path}"
                )
                return False
            screen.say(str(comparison.path))
            title = f"{task.name}, {comparison.task.batch} samples per rank; {comparison.setting}"
            show(screen, title, comparison.found)
    return True
