"""What beats Muon? Bases and steps of SENG beside SGD and Muon on a small CIFAR-10, on one CPU thread.

python benchmarks/small_race.py --out results/small_race.json                 # every contender, half an hour
python benchmarks/small_race.py sgd muon --out some.json                      # these alone

10,000 training and 5,000 test images, shifted and mirrored; six convolutions with BatchNorm (one residual block) and a linear
layer; batch 128, four epochs, 15 % warm-up, then cosine. Each contender's lr is the best of three by training loss with seed
100; its row is then the mean over two other seeds. Runs are kept as they come: the same command goes on after an interruption.
"""

import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from record import write
from torch import nn

import seng
from seng import Curvature
from seng.lab.datasets.augment import Augment
from seng.lab.datasets.store import load
from seng.lab.datasets.values import Arrays
from seng.lab.models import basic, conv_norm, initialised
from seng.lab.muon import MuonAndAdamW
from seng.lab.problems import Classification
from seng.metrics.curvature import BASE_RANK

EPOCHS, BATCH, WARMUP = 4, 128, 0.15
SEEDS, TUNED_WITH = (
    (10, 11),
    100,
)  # the step's length was chosen by looks at 100 and 0: the rows are of seeds nobody looked at
SGD_LRS, MUON_LRS = (0.1, 0.3, 1.0), (0.02, 0.05, 0.1)
KRONECKER = Curvature(
    base="kronecker", rank=0, base_rank=BASE_RANK
)  # what SENG takes by itself


def ours(
    lrs: tuple[float, ...] = SGD_LRS,
    curvature: Curvature | None = None,
    **options: Any,
) -> tuple[Any, tuple[float, ...]]:
    shared = {
        "nesterov": True,
        "weight_decay": 5e-4,
        "refresh_every": 20,
        "curvature": curvature,
        **options,
    }
    return (lambda model, lr: seng.SENG(model, lr, **shared)), lrs


CONTENDERS: dict[
    str, tuple[Callable[[nn.Module, float], Any], tuple[float, ...]]
] = {
    "sgd": (
        lambda m, lr: torch.optim.SGD(
            m.parameters(), lr, 0.9, nesterov=True, weight_decay=5e-4
        ),
        SGD_LRS,
    ),
    "muon": (lambda m, lr: MuonAndAdamW(m, lr, 0.01, 0.95), MUON_LRS),
    "muon, momentum 0.8": (
        lambda m, lr: MuonAndAdamW(m, lr, 0.01, 0.8),
        MUON_LRS,
    ),
    "muon, momentum 0.8, decay 0.003": (
        lambda m, lr: MuonAndAdamW(m, lr, 0.003, 0.8),
        MUON_LRS,
    ),
    "seng, low rank": ours(curvature=Curvature()),
    "seng": ours(),
    "seng without Nesterov": ours(nesterov=False),
    "seng, 128 directions": ours(curvature=replace(KRONECKER, base_rank=128)),
    "seng, power 1": ours(curvature=replace(KRONECKER, power=1.0)),
    "seng, kronecker and low rank": ours(
        curvature=replace(KRONECKER, rank=16)
    ),
    "orthogonal, no curvature": ours(
        orthogonal=True, momentum=0.8, curvature=Curvature(form="plain")
    ),
    "orthogonal low rank": ours(
        orthogonal=True, momentum=0.8, curvature=Curvature()
    ),
    "orthogonal kronecker": ours(
        orthogonal=True, momentum=0.8, curvature=KRONECKER
    ),
}


def network() -> nn.Module:
    layers = [
        *conv_norm(3, 32, 3, 2),
        nn.ReLU(),
        *conv_norm(32, 64, 3, 2),
        nn.ReLU(),
        basic(64, 64, 1),
        *conv_norm(64, 128, 3, 2),
    ]
    return initialised(
        nn.Sequential(
            *layers,
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(128, 10),
        )
    )


def train(
    make: Callable[[nn.Module, float], Any], lr: float, seed: int, data: Any
) -> dict[str, float]:
    """Accuracy, the last epoch's training loss and seconds of one run; a loss that is not finite ends it."""
    torch.manual_seed(seed)
    model, task = network(), Classification()
    opt = make(model, lr)
    order, chance = (torch.Generator().manual_seed(seed + i) for i in (1, 2))
    total = EPOCHS * task.steps(data, BATCH)
    step, start = 0, time.perf_counter()
    for _ in range(EPOCHS):
        losses = []
        for batch in task.batches(
            data, BATCH, Augment(crop=4, flip=True), order, chance
        ):
            done = step / total
            now = (
                (step + 1) / (WARMUP * total)
                if done < WARMUP
                else (1 + math.cos(math.pi * (done - WARMUP) / (1 - WARMUP)))
                / 2
            )
            for group in opt.param_groups:
                group["lr"] = lr * now
            opt.zero_grad()
            loss = task.loss(model, batch)
            loss.backward()
            opt.step()
            losses.append(loss.item())
            step += 1
            if not math.isfinite(losses[-1]):
                return {
                    "accuracy": 0.1,
                    "loss": math.inf,
                    "seconds": time.perf_counter() - start,
                }
    seconds = time.perf_counter() - start
    model.eval()
    with torch.no_grad():
        accuracy = task.held_out(model, data)[1].item()
    return {
        "accuracy": accuracy,
        "loss": sum(losses) / len(losses),
        "seconds": seconds,
    }


def main(names: list[str], out: Path) -> None:
    if unknown := [name for name in names if name not in CONTENDERS]:
        sys.exit(
            f"small_race: there is no contender {unknown[0]!r}; there are {', '.join(CONTENDERS)}"
        )
    torch.set_num_threads(1)
    whole = load("cifar10")
    train_set, test_set = (
        Arrays(whole.train.x[:10_000], whole.train.y[:10_000]),
        Arrays(whole.test.x[:5000], whole.test.y[:5000]),
    )
    data = replace(whole, train=train_set, test=test_set)
    partial = out.with_suffix(".part.jsonl")
    known = (
        {
            tuple(row["key"]): row
            for row in map(json.loads, partial.read_text().splitlines())
        }
        if partial.exists()
        else {}
    )

    def run(name: str, lr: float, seed: int) -> dict[str, Any]:
        key = name, lr, seed
        if key not in known:
            known[key] = {
                "key": key,
                **train(CONTENDERS[name][0], lr, seed, data),
            }
            with partial.open("a") as file:
                print(json.dumps(known[key]), file=file)
            print(known[key], flush=True)
        return known[key]

    rows = []
    for name in names:
        lr = min(
            CONTENDERS[name][1],
            key=lambda lr: run(name, lr, TUNED_WITH)["loss"],
        )
        seeds = [run(name, lr, seed) for seed in SEEDS]
        means = {
            key: sum(row[key] for row in seeds) / len(seeds)
            for key in ("accuracy", "loss", "seconds")
        }
        rows.append(
            {
                "contender": name,
                "lr": lr,
                **means,
                "seeds": [
                    {k: v for k, v in row.items() if k != "key"}
                    for row in seeds
                ],
            }
        )
    rows.sort(key=lambda row: row["loss"])
    write(
        out,
        f"{EPOCHS} epochs, batch {BATCH}, seeds {SEEDS}, lr of three with seed {TUNED_WITH}",
        rows,
    )
    partial.unlink(missing_ok=True)


if __name__ == "__main__":
    words = sys.argv[1:]
    at = words.index("--out") if "--out" in words else len(words)
    asked = words[:at] + words[at + 2 :]
    main(
        asked or list(CONTENDERS),
        Path(words[at + 1]) if at < len(words) else Path("small_race.json"),
    )
