"""What matters in a race? One knob at a time around three settings of the lab's `seng-orthogonal`, on a task of the lab.

python benchmarks/ablation.py --jobs 5 --out results/ablation.json                     # CIFAR-10, ResNet18, three epochs, a GPU
python benchmarks/ablation.py --task digits-cnn --epochs 2 --jobs 2 --out some.json    # to see it run

    orthogonal   Muon's step of gradients, the preset; with SENG's directions or a base before it
    kronecker    the base alone, steps as long as gradients
    low rank     over λI, `Curvature()`

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

SGD_LIKE = {
    "orthogonal": False,
    "form": "auto",
    "momentum": 0.9,
    "weight_decay": 5e-4,
    "refresh_every": 50,
}
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, list[Any]]]] = {
    "orthogonal": (
        {"lr": 0.06, "weight_decay": 0.05, "momentum": 0.85},
        {
            "lr": [0.03, 0.12],
            "weight_decay": [0.005, 0.1],
            "momentum": [0.6, 0.95],
            "nesterov": [False],
            "warmup": [0.0],
            "curvature": [
                {"form": "auto", "rank": 16, "refresh_every": 50},
                {
                    "form": "auto",
                    "rank": 16,
                    "refresh_every": 50,
                    "damping": 0.1,
                },
                {
                    "form": "auto",
                    "rank": 0,
                    "refresh_every": 50,
                    "base": "kronecker",
                    "power": 0.25,
                },
            ],
        },
    ),
    "kronecker": (
        {**SGD_LIKE, "lr": 0.3, "rank": 0, "base": "kronecker"},
        {
            "lr": [0.1],
            "power": [0.25, 1.0],
            "base_rank": [32],
            "refresh_every": [200],
            "average": [0.0],
            "samples": [64],
            "graft": [False],
            "rank": [16],
        },
    ),
    "low rank": (
        {**SGD_LIKE, "lr": 0.4},
        {
            "rank": [64],
            "damping": [0.001, 0.1],
            "refresh_every": [200],
            "average": [0.0],
            "samples": [64],
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
                fields = {
                    **base,
                    **(value if isinstance(value, dict) else {knob: value}),
                }
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
        [run["task"], run["epochs"], run["fields"], run["seed"]],
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
        recipe = what.recipe("seng-orthogonal", options.epochs).with_(
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
        description="one knob at a time around three settings"
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
            f"{row['metric']:.4f}  {row['loss']:.4f}  {row['train_loss']:.4f}  {row['setting']:10} {row['knob']} {value}"
        )


if __name__ == "__main__":
    main()
