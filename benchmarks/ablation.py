"""What matters in a race? One knob at a time around four recipes of the lab, on a task of the lab.

python benchmarks/ablation.py --jobs 5 --out results/ablation.json                     # CIFAR-10, ResNet18, three epochs, a GPU
python benchmarks/ablation.py --task digits-cnn --epochs 2 --jobs 2 --out some.json    # to see it run

    seng          as it comes: centred per-sample gradients over a Kronecker metric
    seng-muon     the same before Muon's step
    kfac-root     the metric alone, steps as long as gradients
    seng-lowrank  over λI, uncentred

Each run trains on nine tenths of the training set and is judged on the last tenth, as in `seng tune`: the test set is not
looked at. Several share the machine, so there are no times. Runs are kept as they come: the same command goes on after an
interruption.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from record import write

from seng.lab.datasets import load
from seng.lab.run import Run
from seng.lab.tasks import task
from seng.lab.train import Training, on
from seng.lab.tuning.search import held_out

SGD_LIKE = {"momentum": 0.9, "weight_decay": 5e-4}
# By recipe: its fields, and what is tried of each.
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, list[Any]]]] = {
    "seng": (
        {**SGD_LIKE, "lr": 0.3},
        {
            "lr": [0.1],
            "damping": [0.03, 0.3, 1.0],
            "samples": [32, 128],
            "rank": [4, 64],
            "centred": [False],
            "average": [0.0],
            "refresh_every": [5, 50, 200],
            "kronecker_power": [0.25, 1.0],
            "kronecker_rank": [128],
            "kronecker_floor": [0.03, 0.3],
        },
    ),
    "seng-muon": (
        {"lr": 0.05, "weight_decay": 0.05},
        {
            "lr": [0.02, 0.1],
            "weight_decay": [0.005, 0.1],
            "momentum": [0.85],
            "damping": [1.0],
            "refresh_every": [50],
        },
    ),
    "kfac-root": (
        {**SGD_LIKE, "lr": 0.3},
        {
            "lr": [0.1],
            "kronecker_rank": [128],
            "kronecker_floor": [0.03, 0.3],
            "kronecker_decay": [0.0],
            "refresh_every": [50, 200],
        },
    ),
    "seng-lowrank": (
        {**SGD_LIKE, "lr": 0.4, "damping": 0.01, "refresh_every": 50},
        {
            "rank": [64],
            "damping": [0.001, 0.1],
            "refresh_every": [200],
            "average": [0.0],
            "samples": [64],
            "centred": [True],
        },
    ),
}


def runs(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every setting as it is, and with one knob changed."""
    found: list[dict[str, Any]] = []
    for name, (base, knobs) in SETTINGS.items():
        found.append(
            {"setting": name, "knob": "", "value": None, "fields": base}
        )
        for knob, values in knobs.items():
            for value in values:
                fields = {**base, knob: value}
                found.append(
                    {
                        "setting": name,
                        "knob": knob,
                        "value": value,
                        "fields": fields,
                    }
                )
    common = {"task": options.task, "epochs": options.epochs}
    return [
        {**common, **run, "seed": 300 + seed}
        for seed in range(options.seeds)
        for run in found
    ]


def key(run: dict[str, Any]) -> str:
    return json.dumps(
        [run[k] for k in ("task", "epochs", "setting", "fields", "seed")],
        sort_keys=True,
    )


def work(options: argparse.Namespace, part: int) -> None:
    """One process's share of what is not there yet."""
    what = task(options.task)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = on(device, held_out(load(what.data, None)))
    known = {key(run) for run in done(options)}
    for run in runs(options)[part :: options.jobs]:
        if key(run) in known:
            continue
        recipe = what.recipe(run["setting"], options.epochs).with_(
            run["fields"]
        )
        training = Training(
            Run(
                what,
                recipe,
                run["seed"],
                options.epochs,
                stop=False,
                shared=True,
            ),
            data,
            device,
        )
        line: dict[str, Any] = {}
        while training.state == "running":
            line = training.advance()
        found = {
            name: line[name]
            for name in ("metric", "loss", "train_loss", "state")
        }
        with parts(options).open("a") as file:
            print(json.dumps({**run, **found}), file=file)


def parts(options: argparse.Namespace) -> Path:
    return Path(options.out).with_suffix(".part.jsonl")


def done(options: argparse.Namespace) -> list[dict[str, Any]]:
    return (
        [json.loads(text) for text in parts(options).read_text().splitlines()]
        if parts(options).exists()
        else []
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description="one knob at a time around four settings"
    )
    parser.add_argument("--task", default="cifar10-resnet18")
    parser.add_argument("--epochs", type=float, default=3)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", default="ablation.json")
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part is not None:
        return work(options, options.part)
    workers = [
        subprocess.Popen([sys.executable, *sys.argv, "--part", str(i)])
        for i in range(options.jobs)
    ]
    ends = [worker.wait() for worker in workers]
    found = {key(run): run for run in done(options)}
    asked = [key(run) for run in runs(options)]
    if any(ends) or not found.keys() >= set(asked):
        sys.exit(
            "ablation: a worker ended before its work was done; the same command goes on from here"
        )
    rows = [found[each] for each in asked]
    setting = f"{options.task}, {options.epochs:g} epochs, seeds from 300, judged on a tenth of the training set"
    write(Path(options.out), setting, rows)
    parts(options).unlink()
    for row in rows:
        value = "" if row["value"] is None else json.dumps(row["value"])
        print(
            f"{row['metric']:.4f}  {row['loss']:.4f}  {row['train_loss']:.4f}  {row['setting']:12} {row['knob']} {value}"
        )


if __name__ == "__main__":
    main()
