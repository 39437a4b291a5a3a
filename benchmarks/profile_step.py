"""Where does the time of a step go? Host time, launches and GPU time, with and without a refresh, beside SGD and Muon.

`seng` is the default, `seng lowrank` low rank over λI as `seng bench --preset` has it.

    python benchmarks/profile_step.py [--model resnet18] [--preset strong] [--out results/bench]

Writes profile-<model>[-<preset>]-<device>.txt: what docs/performance.md says of where the time goes. On a CPU there are no
launches to count, and the kernels listed are the CPU's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from record import command
from torch import nn
from torch.profiler import ProfilerActivity, profile

import seng
from seng.lab.bench.options import PRESETS
from seng.lab.bench.tasks import TASKS, Task, memory_format
from seng.lab.record import provenance
from seng.layers import capture, samples
from seng.metrics.low_rank import LowRank
from seng.optim import engine
from seng.optim.preconditioned import Preconditioned


def backward(
    task: Task,
    model: nn.Module,
    opt: torch.optim.Optimizer,
    batch: tuple[torch.Tensor, torch.Tensor],
) -> None:
    opt.zero_grad()
    with torch.autocast("cuda", torch.bfloat16, enabled=batch[0].is_cuda):
        loss = task.loss(model(batch[0]), batch[1])
    loss.backward()


def host_microseconds(
    prepare: Callable[[], None],
    step: Callable[[], object],
    wait: Callable[[], None],
) -> float:
    times = []
    for _ in range(10):
        prepare()
        wait()
        start = time.perf_counter()
        step()
        times.append(1e6 * (time.perf_counter() - start))
        wait()
    return statistics.median(times)


PARTS = {  # of a step with a refresh: where the host spends its time, each with what it calls
    "hooks of the forward": (capture._Hook, "__call__"),
    "captures in the backward": (samples.Collector, "receive"),
    "refresh": (engine.Engine, "refresh"),
    "  its wait for the device": (engine, "install"),
    "  Grams": (LowRank, "drafts"),
    "  bases": (LowRank, "truncate"),
    "  averages": (LowRank, "average"),
    "factorization": (engine.Engine, "_solve_anew"),
    "directions": (engine.Engine, "directions"),
    "update": (Preconditioned, "_update"),
}


def host_parts(
    name: str,
    whole: Callable[[], None],
    opt: seng.SENG,
    wait: Callable[[], None],
) -> list[str]:
    """Median milliseconds of each part over five steps with a refresh."""
    spent: dict[str, list[float]] = {name: [] for name in PARTS}
    totals = []

    def timed(
        function: Callable[..., object], name: str
    ) -> Callable[..., object]:
        def run(*args: object, **options: object) -> object:
            start = time.perf_counter()
            try:
                return function(*args, **options)
            finally:
                spent[name][-1] += 1e3 * (time.perf_counter() - start)

        return run

    with patches() as patch:
        for name, (owner, attribute) in PARTS.items():
            patch(owner, attribute, timed(getattr(owner, attribute), name))
        collector = opt.engine.collector
        patch(collector, "receive", collector.receive)
        for _ in range(5):
            for times in spent.values():
                times.append(0.0)
            while not opt.refresh_due:
                whole()
            for times in spent.values():
                times[-1] = 0.0
            wait()
            start = time.perf_counter()
            whole()
            wait()
            totals.append(1e3 * (time.perf_counter() - start))
    lines = [
        f"{name}, a step with a refresh, on the host: {statistics.median(totals):.1f} ms in all"
    ]
    return lines + [
        f"  {statistics.median(times):8.2f} ms  {name}"
        for name, times in spent.items()
    ]


@contextmanager
def patches() -> Iterator[Callable[[object, str, object], None]]:
    with ExitStack() as undo:

        def patch(owner: object, attribute: str, value: object) -> None:
            undo.callback(setattr, owner, attribute, getattr(owner, attribute))
            setattr(owner, attribute, value)

        yield patch


def profiled(
    work: Callable[[], None], wait: Callable[[], None], cuda: bool
) -> list[str]:
    activities = [
        ProfilerActivity.CPU,
        *([ProfilerActivity.CUDA] if cuda else []),
    ]
    wait()
    with profile(activities=activities) as seen:
        work()
        wait()
    device = (
        torch.autograd.DeviceType.CUDA
        if cuda
        else torch.autograd.DeviceType.CPU
    )
    key = "self_device_time_total" if cuda else "self_cpu_time_total"
    events = [
        e
        for e in seen.key_averages()
        if e.device_type == device and "#" not in e.key
    ]
    events.sort(key=lambda e: -getattr(e, key))
    launches = sum(
        e.count
        for e in seen.key_averages()
        if "LaunchKernel" in e.key or "GraphLaunch" in e.key
    )
    lines = [
        f"{sum(getattr(e, key) for e in events) / 1e3:.2f} ms busy, {launches} launches"
    ]
    return lines + [
        f"  {getattr(e, key) / 1e3:8.3f} ms ×{e.count:5d}  {e.key[:90]}"
        for e in events[:15]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model",
        choices=list(TASKS),
        default="resnet18" if torch.cuda.is_available() else "small_cnn",
    )
    parser.add_argument(
        "--preset",
        choices=list(PRESETS),
        default="default",
        help="as of seng bench; T is at most 10 here",
    )
    parser.add_argument("--out", type=Path, default=Path("results/bench"))
    options = parser.parse_args()
    task, device = (
        TASKS[options.model],
        torch.device("cuda" if torch.cuda.is_available() else "cpu"),
    )
    batches = task.batches(0, device, task.pool)
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    preset = PRESETS[options.preset]
    lines = [json.dumps(provenance(command(), device))]
    for name in ("sgd", "muon", "seng", "seng lowrank"):
        refreshes = name.startswith("seng")
        torch.manual_seed(0)
        model = task.build().to(
            device, memory_format=memory_format(task, device)
        )
        opt: torch.optim.Optimizer
        if name == "sgd":
            opt = torch.optim.SGD(
                model.parameters(),
                task.lr,
                momentum=0.9,
                fused=device.type == "cuda" or None,
            )
        elif name == "muon":
            opt = seng.Muon(model, task.lr)
        elif name == "seng":
            opt = seng.SENG(model, task.lr, refresh_every=10)
        else:
            curvature = seng.Curvature(
                base=None,
                centred=False,
                rank=preset.rank,
                decay=preset.decay,
                samples=preset.samples,
            )
            opt = seng.SENG(
                model,
                task.lr,
                refresh_every=min(preset.every or 10, 10),
                curvature=curvature,
            )
        steps = iter(range(10**9))

        def prepare(
            model: nn.Module = model,
            opt: torch.optim.Optimizer = opt,
            steps=steps,
        ) -> None:
            backward(task, model, opt, batches[next(steps) % len(batches)])

        def whole(
            prepare: Callable[[], None] = prepare,
            opt: torch.optim.Optimizer = opt,
        ) -> None:
            prepare()
            opt.step()

        for _ in range(
            40
        ):  # four refreshes, with the recordings that they make
            whole()
        lines += (
            [
                f"{name}, a step with a refresh",
                *profiled(whole, wait, device.type == "cuda"),
            ]
            if refreshes
            else []
        )
        for _ in range(4 if refreshes else 0):
            whole()
        lines += [
            f"{name}, a step without",
            *profiled(whole, wait, device.type == "cuda"),
        ]
        if refreshes:
            lines += host_parts(name, whole, opt, wait)
            opt.engine.settings = replace(
                opt.engine.settings, refresh_every=10**9
            )
            whole()
        prepare()
        lines += [
            f"{name}, opt.step() alone",
            *profiled(opt.step, wait, device.type == "cuda"),
        ]
        lines.append(
            f"{name}, host time of opt.step(): {host_microseconds(prepare, opt.step, wait):.0f} µs"
        )
    options.out.mkdir(parents=True, exist_ok=True)
    named = [task.name] + [options.preset] * (options.preset != "default")
    (options.out / f"profile-{'-'.join(named)}-{device.type}.txt").write_text(
        "\n".join(lines) + "\n"
    )
    print("\n".join(lines))


if __name__ == "__main__":
    main()
