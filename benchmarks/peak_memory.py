"""Peak memory of a training process beside SGD's, one CPU thread.

    python benchmarks/peak_memory.py --out results/peak_memory.json        # three minutes

"torch" is the largest sum of torch's live allocations, as torch's profiler has them. It is the same in every run.
"resident" is the process's largest resident size above what the imports take: code and libraries loaded later count too.
It is the median over fresh processes. Both are of 41 steps: that is three refreshes of the default.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from itertools import accumulate
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from statistics import median
from typing import Any

import torch
from record import write
from step_cost import CONTENDERS, MODELS, period, stepper
from torch.profiler import ProfilerActivity, profile

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


def allocated(model: str, contender: str) -> int:
    """The largest sum of torch's live allocations, in bytes."""
    torch.set_num_threads(1)
    cpu = [ProfilerActivity.CPU]
    with profile(activities=cpu, profile_memory=True) as seen:
        period(stepper(model, contender), STEPS)
    events = seen.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = [e for e in events if e.name() == "[memory]"]
    changes.sort(key=lambda e: e.start_ns())
    return max(accumulate(e.nbytes() for e in changes))


MEASURES = {"resident": measured, "torch": allocated}


def apart(measure: str, model: str, contender: str) -> int:
    """In a process of its own."""
    one = [sys.executable, __file__, "--one", measure, model, contender]
    run = subprocess.run(one, check=True, capture_output=True, text=True)
    return int(run.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--processes", type=int, default=5, help="of each")
    parser.add_argument("--models", nargs="+", default=["small CNN"])
    names = "MEASURE", "MODEL", "CONTENDER"
    parser.add_argument("--one", nargs=3, metavar=names)
    parser.add_argument("--out", type=Path, default=Path("peak_memory.json"))
    options = parser.parse_args()
    if options.one:
        measure, *what = options.one
        print(MEASURES[measure](*what))
        return
    rows = []
    for model in options.models or MODELS:
        first: dict[str, float] = {}  # SGD's
        for contender in CONTENDERS:
            row: dict[str, Any] = {"model": model, "contender": contender}
            for measure in MEASURES:
                count = 1 if measure == "torch" else options.processes
                peaks = [
                    apart(measure, model, contender) for _ in range(count)
                ]
                peak = median(peaks)
                sgd = first.setdefault(measure, peak)
                row[f"{measure}, MB"] = round(peak / 1e6, 1)
                row[f"{measure}, to SGD's"] = round(peak / sgd, 3)
            print(row, flush=True)
            rows.append(row)
    setting = f"{STEPS} steps, {options.processes} processes each, one thread"
    write(options.out, setting, rows)


if __name__ == "__main__":
    main()
