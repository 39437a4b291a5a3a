"""How many epochs of a task does each optimizer train in a time? For races of equal time: what is printed goes to --epochs.

python benchmarks/epochs_in.py mnist-autoencoder 4 --optimizers seng adam kfac

It times what `seng compare` times, training without evaluations, with the task's own recipes, alone on the machine, for half of
that time.
"""

from __future__ import annotations

import argparse
from time import perf_counter

from seng.lab.compare import device_of
from seng.lab.datasets import load
from seng.lab.run import Run
from seng.lab.tasks import task
from seng.lab.train import Training

FIRST = 40  # steps, among them recordings and first refreshes


def seconds_per_step(training: Training, seconds: float) -> float:
    """On average over so many seconds, refreshes included."""
    for _ in range(FIRST):
        training._step()
    training._wait()
    start, steps = perf_counter(), 0
    while perf_counter() - start < seconds:
        for _ in range(10):
            training._step()
        steps += 10
        training._wait()  # a GPU is far behind otherwise
    return (perf_counter() - start) / steps


def main() -> None:
    parser = argparse.ArgumentParser(
        description="epochs of each optimizer in a time"
    )
    parser.add_argument("task")
    parser.add_argument("seconds", type=float)
    parser.add_argument(
        "--optimizers", nargs="+", default=["seng", "sgd", "adam"]
    )
    parser.add_argument("--device")
    options = parser.parse_args()
    what, device = task(options.task), device_of(options.device)
    data = load(what.data, None)
    for name in options.optimizers:
        training = Training(
            Run(what, what.recipe(name, what.epochs), stop=False), data, device
        )
        each = seconds_per_step(training, options.seconds / 2)
        epochs = options.seconds / (each * training.per_epoch)
        print(
            f"{name:16} {epochs:8.3g} epochs of {1e3 * each:.2f} ms a step",
            flush=True,
        )


if __name__ == "__main__":
    main()
