"""When did each optimizer of a task reach a metric, and at what price? From results that are there.

python benchmarks/reached.py results cifar10-resnet18 0.92
"""

import sys
from collections import defaultdict
from pathlib import Path

from seng.lab import results
from seng.lab.report.summary import estimate


def main(folder: str, task: str, level: str) -> None:
    runs: defaultdict[str, list[results.Trajectory]] = defaultdict(list)
    for run in results.read(Path(folder))[0]:
        if run.task == task:
            runs[run.name].append(run)
    print(
        f"{task}: final metric, epochs and seconds to {level} (means over seeds that reached it), ms per step, training loss"
    )
    for name, seeds in sorted(
        runs.items(),
        key=lambda entry: (
            -sum(run.final.metric or 0 for run in entry[1]) / len(entry[1])
        ),
    ):
        better = seeds[0].higher_is_better
        firsts = [
            next(
                (
                    p
                    for p in run.points
                    if p.metric is not None
                    and results.reaches(p.metric, float(level), better)
                ),
                None,
            )
            for run in seeds
        ]
        there = [point for point in firsts if point is not None]
        final = estimate(run.final.metric for run in seeds)
        epochs = estimate(p.epoch for p in there)
        seconds = estimate(
            p.seconds
            for run, p in zip(seeds, firsts, strict=True)
            if p is not None and run.timed
        )
        milliseconds = [
            1e3 * run.final.seconds / run.final.step
            for run in seeds
            if run.timed
        ]
        loss = sum(run.final.train_loss or 0 for run in seeds) / len(seeds)
        said = "not reached" if epochs is None else f"{epochs.mean:.1f} epochs"
        said += f", {seconds.mean:.1f} s" if seconds else ""
        half = (
            ""
            if final is None or final.half is None
            else f" ± {final.half:.4f}"
        )
        mean = float("nan") if final is None else final.mean
        steps = (
            f"{min(milliseconds):.2f} to {max(milliseconds):.2f} ms"
            if milliseconds
            else "untimed"
        )
        print(
            f"{name:12} {mean:.4f}{half}  {len(there)}/{len(seeds)} seeds: {said}  {steps}  {loss:.4f}"
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
