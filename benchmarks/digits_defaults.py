"""Which defaults? One knob at a time around them, on the demo's task: validation accuracy, mean over a run, and step time.

python benchmarks/digits_defaults.py               # four minutes on a CPU; prints a table, writes results/digits_defaults.json
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import record
import torch

import seng
from seng.lab.demo import TUNING_SEEDS, Recipe, Run, digits, split
from seng.metrics.choose import usual

LR = 0.05  # near SENG's best on this task, which is level between it and twice as much
KNOBS: dict[str, list[Any]] = {
    "nesterov": [False, True],
    "damping": [1e-4, 1e-3, 0.01, 0.1, 1.0, 100.0],
    "refresh_every": [5, 10, 20, 50, 100],
    "base_rank": [8, 16, 32, 64, 128],
    "power": [0.25, 0.5, 0.75, 1.0],
    "decay": [0.0, 0.5, 0.8, 0.95],
    "samples": [16, 32, None],
    "graft": [True, False],
    "base": ["identity", "kronecker"],
    "rank": [0, 16],
}


def build(
    model: torch.nn.Module, lr: float, knob: str, value: Any
) -> seng.SENG:
    if knob in ("nesterov", "damping", "refresh_every"):
        return seng.SENG(model, lr=lr, **{knob: value})
    if value == "identity":
        return seng.SENG(
            model, lr=2 * lr, curvature=seng.Curvature()
        )  # low rank over λI, at its own best lr
    return seng.SENG(
        model, lr=lr, curvature=replace(usual(model), **{knob: value})
    )


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
