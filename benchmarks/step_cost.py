"""What a step of the default costs beside SGD's and AdamW's, refreshes included: process time on one CPU thread.

    python benchmarks/step_cost.py --out results/step_cost.json        # five minutes with nothing beside it

The contenders take turns, a whole period of T steps each, so that what else the machine does hits all alike. A figure is the
median over the rounds of (this contender's time / SGD's time in the same round); memory is not measured here (`seng bench`).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from races import CHARACTERS, CONTEXT, residual_network
from record import write
from torch import Tensor, nn

import seng
from seng.checks import periods_of
from seng.lab.models import ViT, gpt2
from seng.recipes.recipe import SGD

Batch = tuple[Tensor, Tensor]
LR = 0.01


def mlp(*widths: int) -> nn.Module:
    """Linear layers with ReLU between them."""
    layers: list[nn.Module] = []
    for sizes in pairwise(widths):
        layers += [nn.Linear(*sizes), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def images() -> Batch:
    return torch.randn(128, 3, 32, 32), torch.randint(10, (128,))


def rows(width: int) -> Batch:
    return torch.randn(256, width), torch.randint(10, (256,))


def text() -> Batch:
    tokens = torch.randint(CHARACTERS, (32, CONTEXT + 1))
    return tokens[:, :-1], tokens[:, 1:]


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Batch]]] = {
    "small CNN": (residual_network, images),
    "MLP 784-128-128-10": (lambda: mlp(784, 128, 128, 10), lambda: rows(784)),
    "MLP 64-128-128-10": (lambda: mlp(64, 128, 128, 10), lambda: rows(64)),
    "GPT, 3 layers of 96": (
        lambda: gpt2(3, 96, 4, CHARACTERS, CONTEXT),
        text,
    ),
    "ViT, 3 layers of 96": (
        lambda: ViT(3, 96, 4, 4, 32, 10),
        lambda: (torch.randn(64, 3, 32, 32), torch.randint(10, (64,))),
    ),
}
PERIODS = periods_of(SGD.refresh_every)
T = max(PERIODS.values())  # what the library's period grows to
NEVER = {"refresh_every": 10**9}
CONTENDERS: dict[str, Callable[[nn.Module], Any]] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), LR, momentum=0.9),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), 1e-3, foreach=True),
    "muon": lambda m: seng.Muon(m, LR),
    "seng": lambda m: seng.SENG(m, LR, refresh_every=T),
    "seng between refreshes": lambda m: seng.SENG(m, LR, **NEVER),
    "seng adamw": lambda m: seng.SENG(
        m, 1e-3, recipe="adamw", refresh_every=T
    ),
    "seng adamw between refreshes": lambda m: seng.SENG(
        m, 1e-3, recipe="adamw", **NEVER
    ),
    "seng muon": lambda m: seng.SENG(m, LR, recipe="muon", refresh_every=T),
    "kfac": lambda m: seng.KFAC(m, LR, refresh_every=T),
    "low rank over λI": lambda m: seng.SENG(
        m, LR, refresh_every=T, curvature=seng.Curvature(base=None)
    ),
}


def stepper(model: str, contender: str) -> Callable[[], None]:
    """One training step on a fixed batch."""
    torch.manual_seed(0)
    build, draw = MODELS[model]
    network = build()
    x, y = draw()
    optimizer = CONTENDERS[contender](network)

    def step() -> None:
        optimizer.zero_grad()
        loss = F.cross_entropy(network(x).flatten(0, -2), y.flatten())
        loss.backward()
        optimizer.step()

    return step


def period(step: Callable[[], None], count: int) -> float:
    """Process seconds of so many steps."""
    start = time.process_time()
    for _ in range(count):
        step()
    return time.process_time() - start


def costs(model: str, rounds: int) -> list[dict[str, Any]]:
    """A row for each contender: milliseconds a step, and the ratio to SGD."""
    steps = {name: stepper(model, name) for name in CONTENDERS}
    for step in steps.values():
        period(step, T + 1)  # the first refreshes are dearer
    times: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for _ in range(rounds):
        for name, step in steps.items():
            times[name].append(period(step, T))
    found = []
    for name, own in times.items():
        ratios = to("sgd", own, times)
        row = {
            "model": model,
            "contender": name,
            "ms": round(1e3 * median(own) / T, 3),
            "to_sgd": round(median(ratios), 3),
            "to_adamw": round(median(to("adamw", own, times)), 3),
            "range": [round(ratios[0], 3), round(ratios[-1], 3)],
        }
        print(row, flush=True)
        found.append(row)
    for steps in (300, 900):
        ratio = whole_run(times, steps)
        row = {
            "model": model,
            "contender": f"seng adamw, its first {steps} steps",
            "to_adamw": round(ratio, 3),
        }
        print(row, flush=True)
        found.append(row)
    return found


def to(rival: str, own: list[float], times: dict[str, list[float]]) -> Any:
    """Ratios of each round, in order."""
    pairs = zip(own, times[rival], strict=True)
    return sorted(ours / theirs for ours, theirs in pairs)


def whole_run(times: dict[str, list[float]], steps: int) -> float:
    """SENG's time in AdamW's recipe to AdamW's, where the period grows as it does by default."""
    opt = seng.SENG(mlp(2, 2), recipe="adamw")
    refreshes = sum(opt.settings.refreshes(i) for i in range(steps))
    between = times["seng adamw between refreshes"]
    pairs = zip(times["seng adamw"], between, strict=True)
    refresh = median(a - b for a, b in pairs)  # one in T steps
    whole = median(between) / T * steps + refresh * refreshes
    return whole / (median(times["adamw"]) / T * steps)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--models", nargs="+", default=[*MODELS])
    parser.add_argument("--out", type=Path, default=Path("step_cost.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    setting = (
        f"T = {T}, {options.rounds} rounds in turns, process time, one thread"
    )
    found = [costs(model, options.rounds) for model in options.models]
    write(options.out, setting, [row for each in found for row in each])


if __name__ == "__main__":
    main()
