"""Which defaults? One knob at a time around them, on the demo's task: validation accuracy, mean over a run, and step time.

python benchmarks/digits_defaults.py               # four minutes on a CPU; prints a table, writes results/digits_defaults.json
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import record
import torch

import seng
from seng.lab.demo import TUNING_SEEDS, Recipe, Run, digits, split

LR = 0.05
KNOBS: dict[str, list[Any]] = {
    "nesterov": [False, True],
    "damping": [1e-4, 1e-3, 0.01, 0.1, 1.0, 100.0],
    "refresh_every": [5, 10, 20, 50, 100],
    "rank": [4, 8, 16, 32],
    "samples": [16, 32, None],
    "decay": [0.0, 0.5, 0.8, 0.95],
    "centred": [False, True],
    "base.power": [0.25, 0.5, 0.75, 1.0],
    "base.rank": [8, 16, 32, 64, 128],
    "base.floor": [0.01, 0.1, 0.3],
    "base.decay": [0.0, 0.5, 0.8, 0.95],
    "what": ["low rank", "low rank, centred", "kfac-root", "kfac-floor"],
}
LOW_RANK = {"base": None, "samples": None}
OTHERS: dict[str, Callable[[torch.nn.Module, float], Any]] = {
    "low rank": lambda m, lr: seng.SENG(
        m, lr, curvature=seng.Curvature(**LOW_RANK, centred=False)
    ),
    "low rank, centred": lambda m, lr: seng.SENG(
        m, lr, curvature=seng.Curvature(**LOW_RANK)
    ),
    "kfac-root": lambda m, lr: seng.KFAC(m, lr, power=0.5),
    "kfac-floor": lambda m, lr: seng.KFAC(m, lr, power=1.0),
}


def build(model: torch.nn.Module, lr: float, knob: str, value: Any) -> Any:
    if knob == "what":
        return OTHERS[value](model, lr)
    if knob in ("nesterov", "damping", "refresh_every"):
        return seng.SENG(model, lr, **{knob: value})
    if knob.startswith("base."):
        name = knob.removeprefix("base.")
        base = replace(seng.Kronecker(), **{name: value})
        changed = {"base": base}
    else:
        changed = {knob: value}
    return seng.SENG(model, lr, curvature=seng.Curvature(**changed))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--out", type=Path, default=Path("results"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    whole = digits()
    data = split(whole.x, whole.y)  # the test images take no part
    rows = []
    for knob, values in KNOBS.items():
        for value in values:
            recipe = Recipe(
                "SENG",
                lambda m, lr, k=knob, v=value: build(m, lr, k, v),
                (),
                LR,
                "",
                "",
            )
            runs = [
                Run(recipe, seed, data, options.epochs)
                for seed in TUNING_SEEDS
            ]
            for run in runs:
                for _ in range(run.laps):
                    run.lap()
            accuracies = [100 * fmean(run.accuracies) for run in runs]
            row = {
                "knob": knob,
                "value": value,
                "accuracy": fmean(accuracies),
                "deviation": stdev(accuracies),
                "final_loss": fmean(run.losses[-1] for run in runs),
                "ms_per_step": 1e3 * fmean(run.step_seconds for run in runs),
            }
            rows.append(row)
            text = f"{row['accuracy']:.2f} ± {row['deviation']:.2f} %  loss {row['final_loss']:.5f}  {row['ms_per_step']:.1f} ms"
            print(f"{knob:14} {value!s:9} {text}", flush=True)
    setting = f"digits_cnn, lr {LR}, {options.epochs} epochs of batch 64, seeds {TUNING_SEEDS}, defaults but for the knob"
    record.write(options.out / "digits_defaults.json", setting, rows)


if __name__ == "__main__":
    main()
