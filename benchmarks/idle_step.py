"""What does a step cost between refreshes? Time and peak memory of SENG beside SGD, interleaved in one run.

Between refreshes the hooks are disarmed: forward and backward must cost what they cost without SENG, and `waiting` (what the
capture holds) must be 0. The rest of the step's time is the solve, two skinny products per layer.

    python benchmarks/idle_step.py                      # ResNet18, batch 32, on the CPU (batch 256 on a GPU)

Writes results/idle_step-<device>.json.
"""

from __future__ import annotations

import argparse
import statistics
import time
import weakref
from pathlib import Path
from typing import Any

import record
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import seng
from seng.lab.models import resnet18


class PeakBytes(TorchDispatchMode):
    """The most bytes of tensors made inside the block that were alive at once; for the CPU, which keeps no such count."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {id(t.untyped_storage()) for t in tree_leaves(args) if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if not isinstance(t, Tensor):
                continue
            storage = t.untyped_storage()
            key = storage._cdata
            if id(storage) not in before and key not in self.live:
                self.live[key] = storage.nbytes()
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._free, key)
        return out

    def _free(self, key: int) -> None:
        self.now -= self.live.pop(key, 0)


def peak_of(run: Any, device: torch.device) -> int:
    if device.type == "cuda":
        torch.cuda.synchronize()
        start = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        return torch.cuda.max_memory_allocated() - start
    with PeakBytes() as peak:
        run()
    return peak.peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--compile", action="store_true", help="also with torch.compile of the model and of the step")
    parser.add_argument("--out", type=Path, default=Path("results"))
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    batch = options.batch or (256 if device.type == "cuda" else 32)
    torch.manual_seed(0)
    x, y = torch.randn(batch, 3, 32, 32, device=device), torch.randint(10, (batch,), device=device)

    def contender(make: Any, compiled: bool = False) -> dict[str, Any]:
        torch.manual_seed(0)
        model: nn.Module = resnet18().to(device)
        opt = make(model)
        run, step = (torch.compile(model, fullgraph=True), torch.compile(opt.step)) if compiled else (model, opt.step)
        return {"run": run, "opt": opt, "advance": step, "backward": [], "step": []}

    def sgd(m: nn.Module) -> torch.optim.SGD:
        return torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9)

    def ours(m: nn.Module) -> seng.SENG:
        return seng.SENG(m, lr=0.01, refresh_every=10**9)

    contenders = {
        "sgd": contender(sgd),
        "seng": contender(ours),
        "seng, k = 64": contender(lambda m: seng.SENG(m, lr=0.01, refresh_every=10**9, curvature=seng.Curvature(rank=64))),
    }
    if options.compile:  # ours first: torch.compile does not look for hooks on an equal model that had none
        contenders |= {"seng, compiled": contender(ours, True), "sgd, compiled": contender(sgd, True)}

    def backward(c: dict[str, Any]) -> None:
        c["opt"].zero_grad()
        cross_entropy(c["run"](x), y).backward()

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    for c in contenders.values():
        for _ in range(4):  # the first step refreshes, the others warm up
            backward(c)
            c["advance"]()
    for _ in range(options.rounds):
        for c in contenders.values():
            wait()
            start = time.perf_counter()
            backward(c)
            wait()
            middle = time.perf_counter()
            c["advance"]()
            wait()
            c["backward"].append(middle - start)
            c["step"].append(time.perf_counter() - middle)

    rows = {}
    for name, c in contenders.items():
        engine = getattr(c["opt"], "preconditioner", None)
        rows[name] = {
            "forward+backward_ms": 1e3 * statistics.median(c["backward"]),
            "step_ms": 1e3 * statistics.median(c["step"]),
            "forward+backward_peak_MiB": peak_of(lambda c=c: backward(c), device) / 2**20,
            "waiting": 0 if engine is None else len(engine.samples),
            "armed": False if engine is None else engine.capture.armed,
            "curvature_MiB": 0 if engine is None else sum(b.U.bytes for b in engine.blocks.values()) / 2**20,
        }
    total = {name: row["forward+backward_ms"] + row["step_ms"] for name, row in rows.items()}
    for name, row in rows.items():
        row["ratio_to_sgd"] = total[name] / total["sgd"]
        row["backward_ratio_to_sgd"] = row["forward+backward_ms"] / rows["sgd"]["forward+backward_ms"]
    setting = f"ResNet18 for 32x32, batch {batch}, float32, {options.rounds} interleaved rounds, medians, seed 0"
    record.write(options.out / f"idle_step-{device.type}.json", setting, rows)


if __name__ == "__main__":
    main()
