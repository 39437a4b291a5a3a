"""What do steps of Newton–Schulz on S = YYᵀ alone save? `opt.step()` of the orthogonal step with them, and with all from Y.

    python benchmarks/newton_schulz.py [--out results/bench/newton-schulz-cpu.json]

On a GPU where there is one, else on one thread of a CPU; the two are timed in turns.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median

import record
import torch

import seng
from seng.lab import models
from seng.recipes import polar

MODELS = {
    "resnet18": lambda: models.resnet18(10),
    "autoencoder": models.autoencoder,
    "gpt": lambda: models.gpt2(4, 128, 4, 65, 128),
}
WAYS = {"from Y each time": (1,) * sum(polar.STEPS), "on S alone": polar.STEPS}


def milliseconds(
    build: str, rounds: int, device: torch.device
) -> dict[str, float]:
    optimizers, wait = (
        {},
        torch.cuda.synchronize if device.type == "cuda" else lambda: None,
    )
    for way, steps in WAYS.items():
        torch.manual_seed(0)
        model = MODELS[build]().to(device)
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        polar.STEPS = steps
        optimizers[way] = seng.SENG(model, **seng.presets.orthogonal())
        for _ in range(4):  # on a GPU, the recording is among them
            optimizers[way].step()
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way, steps in WAYS.items():
            polar.STEPS = steps
            wait()
            start = time.perf_counter()
            optimizers[way].step()
            wait()
            times[way].append(1e3 * (time.perf_counter() - start))
    return {way: median(each) for way, each in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--rounds", type=int, default=100 if device.type == "cuda" else 7
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(f"results/bench/newton-schulz-{device.type}.json"),
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for build in MODELS:
        row = milliseconds(build, options.rounds, device)
        rows.append(
            {
                "model": build,
                **row,
                "ratio": row["on S alone"] / row["from Y each time"],
            }
        )
    record.write(
        options.out,
        f"milliseconds of opt.step(), medians of {options.rounds} in turns",
        rows,
    )


if __name__ == "__main__":
    main()
