"""Where does the time of a step go? Host time of `opt.step()`, launches and GPU time, with and without a refresh, beside SGD.

    python benchmarks/profile_step.py [--model resnet18] [--out results/bench]

Writes profile-<model>-<device>.txt: what docs/performance.md says of where the time goes. On a CPU there are no launches to
count, and the kernels listed are the CPU's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from record import command
from torch import nn
from torch.profiler import ProfilerActivity, profile

import seng
from seng.lab.record import provenance
from seng.lab.tasks import TASKS, Task, memory_format


def backward(task: Task, model: nn.Module, opt: torch.optim.Optimizer, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    opt.zero_grad()
    with torch.autocast("cuda", torch.bfloat16, enabled=batch[0].is_cuda):
        loss = task.loss(model(batch[0]), batch[1])
    loss.backward()


def host_microseconds(prepare: Callable[[], None], step: Callable[[], object], wait: Callable[[], None]) -> float:
    times = []
    for _ in range(10):
        prepare()
        wait()
        start = time.perf_counter()
        step()
        times.append(1e6 * (time.perf_counter() - start))
        wait()
    return statistics.median(times)


def profiled(work: Callable[[], None], wait: Callable[[], None], cuda: bool) -> list[str]:
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    wait()
    with profile(activities=activities) as seen:
        work()
        wait()
    device = torch.autograd.DeviceType.CUDA if cuda else torch.autograd.DeviceType.CPU
    key = "self_device_time_total" if cuda else "self_cpu_time_total"
    events = [e for e in seen.key_averages() if e.device_type == device and "#" not in e.key]
    events.sort(key=lambda e: -getattr(e, key))
    launches = sum(e.count for e in seen.key_averages() if "LaunchKernel" in e.key)
    lines = [f"{sum(getattr(e, key) for e in events) / 1e3:.2f} ms busy, {launches} launches"]
    return lines + [f"  {getattr(e, key) / 1e3:8.3f} ms ×{e.count:5d}  {e.key[:90]}" for e in events[:24]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(TASKS), default="resnet18" if torch.cuda.is_available() else "small_cnn")
    parser.add_argument("--out", type=Path, default=Path("results/bench"))
    options = parser.parse_args()
    task, device = TASKS[options.model], torch.device("cuda" if torch.cuda.is_available() else "cpu")
    batches = task.batches(0, device, task.pool)
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    lines = [json.dumps(provenance(command(), device))]
    for name in ("sgd", "seng"):
        torch.manual_seed(0)
        model = task.build().to(device, memory_format=memory_format(task, device))
        opt: torch.optim.Optimizer
        if name == "sgd":
            opt = torch.optim.SGD(model.parameters(), task.lr, momentum=0.9, fused=device.type == "cuda" or None)
        else:
            opt = seng.SENG(model, task.lr, refresh_every=10, curvature=seng.Curvature(rank=None, decay=0.0))
        steps = iter(range(10**9))

        def prepare(model: nn.Module = model, opt: torch.optim.Optimizer = opt, steps=steps) -> None:
            backward(task, model, opt, batches[next(steps) % len(batches)])

        def whole(prepare: Callable[[], None] = prepare, opt: torch.optim.Optimizer = opt) -> None:
            prepare()
            opt.step()

        for _ in range(20):  # two refreshes, and the graphs of the second
            whole()
        lines += [f"{name}, a step with a refresh", *profiled(whole, wait, device.type == "cuda")] if name == "seng" else []
        for _ in range(4 if name == "seng" else 0):
            whole()
        lines += [f"{name}, a step without", *profiled(whole, wait, device.type == "cuda")]
        if name == "seng":
            opt.preconditioner.refresh_every = 10**9
        lines.append(f"{name}, host time of opt.step(): {host_microseconds(prepare, opt.step, wait):.0f} µs")
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"profile-{task.name}-{device.type}.txt").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
