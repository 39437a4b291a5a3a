"""Is anything slower than it was? Every method of this tree beside the same method of another commit, in turns.

    python benchmarks/beside.py --base HEAD~1                                     # all methods, some ten minutes on one core
    python benchmarks/beside.py --base main --methods default kfac --models gpt   # these alone
    python benchmarks/beside.py --base main --hold                                # exit code 1 where something is slower

A name is one method in both trees, but for "default", what `seng.SENG(model, lr)` takes in each, and "muon", whose columns the
first edition made of one length.

Each side has a process of its own, with one thread and equal seeds; both are started anew a few times. A pair is a chunk of
work on one side and the same chunk on the other, the order swapped from pair to pair. Counted are the process's own seconds of
processor time, so that other work on the machine matters less; a chunk's figure is the median of

    step      opt.step() between refreshes (least squares: one whole step)
    refresh   backward and opt.step() where the curvature is renewed

The ratio new/old of each pair is a sample; the table has their median and the upper end of its one-sided 95 % interval. Where that
is above 1.05, twice as many pairs more are taken: of fifty equal rows with 30 pairs, four were above it on a busy machine.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from beside_worker import FIT, SPARSE, methods
from record import command
from rich.console import Console
from rich.table import Table
from scipy.stats import binom

from seng.lab.record import provenance

HERE = Path(__file__).resolve()
CHUNK = 0.05  # the fewest seconds of a chunk's steps, and of its refreshes
STARTS = (
    3  # of the processes: where one finds its memory is worth some per cent
)
LIMIT = 1.05  # what --hold lets the upper end of a ratio be
MODELS = ["small_cnn", "gpt"]


class Side:
    """The worker of one tree."""

    def __init__(self, tree: Path) -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": str(tree),
            "OMP_NUM_THREADS": "1",
        }
        worker = [sys.executable, str(HERE.with_name("beside_worker.py"))]
        pipes = {
            "stdin": subprocess.PIPE,
            "stdout": subprocess.PIPE,
            "text": True,
        }
        self.process = subprocess.Popen(
            worker, env=environment, cwd=tree, **pipes
        )

    def seconds(
        self, rounds: int, case: list[Any] | None = None
    ) -> list[float]:
        print(json.dumps([case, rounds]), file=self.process.stdin, flush=True)
        answer = json.loads(
            self.process.stdout.readline() or '"the worker died"'
        )
        if isinstance(answer, str):
            raise RuntimeError(answer)
        return answer


class Case:
    """One method on one network: how long its chunks are, and the times of its pairs."""

    def __init__(self, method: str, model: str) -> None:
        self.method, self.model, self.every, self.rounds = (
            method,
            model,
            SPARSE,
            0,
        )
        self.pairs: list[
            tuple[list[float], list[float]]
        ] = []  # of new, of old
        self.error = ""

    def calibrate(self, side: Side) -> None:
        step, *refresh = side.seconds(2, [self.method, self.model, SPARSE])
        self.rounds = math.ceil(CHUNK / (refresh or [step])[0])
        self.every = max(SPARSE, 1 + math.ceil(CHUNK / self.rounds / step))

    def run(self, new: Side, old: Side, pairs: int) -> None:
        if not self.rounds:
            self.calibrate(old)
        for side in (new, old):
            side.seconds(1, [self.method, self.model, self.every])
        for pair in range(pairs):
            order = (new, old) if pair % 2 else (old, new)
            times = {side: side.seconds(self.rounds) for side in order}
            self.pairs.append((times[new], times[old]))

    def slow(self) -> bool:
        return any(row.get("upper", 0) > LIMIT for row in self.rows())

    def rows(self) -> list[dict[str, Any]]:
        name = {
            "method": self.method,
            "model": self.model,
            "pairs": len(self.pairs),
        }
        if self.error:
            return [{**name, "what": self.error}]
        rows = []
        for i, what in enumerate(["step", "refresh"][: len(self.pairs[0][0])]):
            ratios = [new[i] / old[i] for new, old in self.pairs]
            old, new = (
                1e3 * median(p[side][i] for p in self.pairs) for side in (1, 0)
            )
            found = {"ratio": median(ratios), "upper": upper(ratios)}
            rows.append(
                {**name, "what": what, "old_ms": old, "new_ms": new, **found}
            )
        return rows


def upper(ratios: list[float]) -> float:
    """The median lies below with 95 %: of 30 the 20th smallest, of fewer than 5 the largest."""
    k = int(binom.ppf(0.95, len(ratios), 0.5))
    return sorted(ratios)[min(k, len(ratios) - 1)]


def git(*words: str) -> str:
    command = ["git", "-C", str(HERE.parent), *words]
    return subprocess.check_output(
        command, text=True, stderr=subprocess.PIPE
    ).strip()


def measure(cases: list[Case], tree: Path, pairs: int) -> None:
    """So many pairs more of all cases, with each start of the processes a share of them."""
    begun = time.monotonic()
    for start in range(STARTS):
        share = pairs * (start + 1) // STARTS - pairs * start // STARTS
        sides = Side(HERE.parent.parent), Side(tree)
        for i, case in enumerate(cases, 1):
            where = f"start {start + 1} of {STARTS}, {i} of {len(cases)}"
            line = f"{where}: {case.method} on {case.model}"
            line += f", {time.monotonic() - begun:.0f} s"
            print(f"\r{line:78}", end="", file=sys.stderr, flush=True)
            try:
                case.run(*sides, share)
            except (RuntimeError, OSError) as error:
                case.error = str(error)
        for side in sides:
            side.process.communicate()
    print(file=sys.stderr)


def main() -> int:
    known = [*methods(), FIT]
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--base", required=True, help="the commit to compare with"
    )
    parser.add_argument("--methods", nargs="+", choices=known, default=known)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument(
        "--out", type=Path, default=Path("results/beside.json")
    )
    parser.add_argument(
        "--hold", action="store_true", help=f"fail above {LIMIT}"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)  # as the workers have
    networks = dict.fromkeys(options.methods, options.models) | {FIT: ["pde"]}
    cases = [
        Case(name, on) for name in options.methods for on in networks[name]
    ]
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "base"
        git("worktree", "add", "--detach", str(tree), options.base)
        try:
            measure(cases, tree, options.pairs)
            if again := [case for case in cases if case.slow()]:
                measure(again, tree, 2 * options.pairs)
        finally:
            git("worktree", "remove", "--force", str(tree))
    rows = [row for case in cases for row in case.rows()]
    head = provenance(command(), torch.device("cpu"))
    head["base"] = git("describe", "--always", options.base)
    head["setting"] = f"{options.pairs} pairs, one thread, processor seconds"
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n")
    table = Table(
        "method",
        "model",
        "pairs",
        "what",
        "old ms",
        "new ms",
        "ratio",
        "upper",
    )
    for row in rows:
        words = [
            f"{v:.3f}" if isinstance(v, float) else str(v)
            for v in row.values()
        ]
        table.add_row(
            *words, style="red" if row.get("upper", 9) > LIMIT else None
        )
    Console().print(table)
    return int(
        options.hold and any(case.slow() or case.error for case in cases)
    )


if __name__ == "__main__":
    sys.exit(main())
