"""Peak memory of a training process beside SGD's: resident bytes above what the imports take, one CPU thread.

    python benchmarks/peak_memory.py --out results/peak_memory.json        # a minute

Each figure is the median over fresh processes, of 41 steps each: that is three refreshes of the default.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from statistics import median

import torch
from record import write
from step_cost import CONTENDERS, MODELS, period, stepper

STEPS = 41


def resident() -> int:
    """The largest resident size so far, in bytes."""
    return 1024 * getrusage(RUSAGE_SELF).ru_maxrss


def measured(model: str, contender: str) -> int:
    """In this process: bytes above what it has now."""
    torch.set_num_threads(1)
    before = resident()
    period(stepper(model, contender), STEPS)
    return resident() - before


def apart(model: str, contender: str) -> int:
    """In a process of its own."""
    one = [sys.executable, __file__, "--one", model, contender]
    run = subprocess.run(one, check=True, capture_output=True, text=True)
    return int(run.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--processes", type=int, default=5, help="of each")
    parser.add_argument("--models", nargs="+", default=["small CNN"])
    parser.add_argument("--one", nargs=2, metavar=("MODEL", "CONTENDER"))
    parser.add_argument("--out", type=Path, default=Path("peak_memory.json"))
    options = parser.parse_args()
    if options.one:
        print(measured(*options.one))
        return
    rows = []
    for model in options.models or MODELS:
        sgd = 0.0
        for contender in CONTENDERS:
            count = range(options.processes)
            peaks = [apart(model, contender) for _ in count]
            peak = median(peaks)
            sgd = sgd or peak
            row = {
                "model": model,
                "contender": contender,
                "MB": round(peak / 1e6, 1),
                "to_sgd": round(peak / sgd, 3),
                "range": [round(p / sgd, 3) for p in sorted(peaks)],
            }
            print(row, flush=True)
            rows.append(row)
    setting = f"{STEPS} steps, {options.processes} processes each, one thread"
    write(options.out, setting, rows)


if __name__ == "__main__":
    main()
