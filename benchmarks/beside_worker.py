"""The worker of benchmarks/beside.py: serves the methods of whichever tree PYTHONPATH names, and times them."""

from __future__ import annotations

import gc
import json
import sys
import time
import warnings
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import hessian, vmap

import seng
from seng.lab import models

LR = 1e-6  # gradients are kept from step to step, so weights should stay
SPARSE = (
    8  # the fewest steps between refreshes: with fewer, other forms are chosen
)
FIT = "least squares"
Times = list[list[float]]  # seconds of steps, and of refreshes


def methods(every: int = SPARSE) -> dict[str, Callable[[nn.Module], Any]]:
    """Optimizers by name; `seng` is that of the worker's own tree.

    The first edition says several of them in other words, and has not all of them: what a tree has not
    is an error of that row.
    """
    new = hasattr(seng, "Kronecker")

    def ours(**options: Any) -> Callable[[nn.Module], Any]:
        return lambda model: seng.SENG(
            model, LR, **{"refresh_every": every, **options}
        )

    def low_rank(**options: Any) -> Callable[[nn.Module], Any]:
        """Over λI, of all samples and not centred."""
        if new:
            options |= {"base": None, "centred": False, "samples": None}
        curvature = seng.Curvature(**options)
        return ours(curvature=curvature, damping=0.01)

    def root(model: nn.Module) -> Any:
        """The square root of K-FAC's metric: the first edition's default."""
        if new:
            floor = 0.01**0.5
            return seng.KFAC(
                model, LR, power=0.5, floor=floor, refresh_every=every
            )
        return seng.SENG(model, LR, refresh_every=every)

    def kfac(model: nn.Module) -> Any:
        options: dict[str, Any] = {"damp": "tikhonov"} if new else {}
        return seng.KFAC(model, LR, refresh_every=every, **options)

    def only_new(recipe: str) -> Callable[[nn.Module], Any]:
        def build(model: nn.Module) -> Any:
            if not new:
                raise ValueError("this tree has no centred U over a metric")
            return seng.SENG(model, LR, recipe=recipe, refresh_every=every)

        return build

    def polar(model: nn.Module) -> Any:
        """Muon's step of plain gradients; the first edition's had columns of one length."""
        if new:
            return seng.Muon(model, LR)
        return seng.SENG(model, LR, **seng.presets.orthogonal())

    def attached(model: nn.Module) -> Any:
        optimizer = torch.optim.AdamW(model.parameters(), LR)
        seng.attach(optimizer, model, refresh_every=every)
        return optimizer

    def paper(model: nn.Module) -> Any:
        preset = seng.presets.paper(refresh_every=every)
        return seng.SENG(model, LR, **preset)

    return {
        "default": ours(),
        "seng": only_new("sgd"),
        "seng muon": only_new("muon"),
        "kfac root": root,
        "kfac": kfac,
        "muon": polar,
        "low rank": low_rank(),
        "explicit": low_rank(form="explicit", decay=0),
        "implicit": low_rank(form="implicit", decay=0),
        "merged": low_rank(form="merged", decay=0),
        "sketch": low_rank(sketch=seng.sketch.CountSketch(512)),
        "network": low_rank(blocks="network"),
        "paper": paper,
        "attach AdamW": attached,
    }


def pde(model: nn.Module, x: Tensor) -> Tensor:
    second = vmap(hessian(lambda p: model(p[None]).squeeze()))(x)
    return second.diagonal(dim1=1, dim2=2).sum(1) - x.sin().prod(1)


def fitting() -> Callable[[], Times]:
    """A step of a small Poisson fit, always from the same start."""
    hidden = [nn.Linear(2, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh()]
    model = nn.Sequential(*hidden, nn.Linear(24, 1)).double()
    start = {name: p.clone() for name, p in model.state_dict().items()}
    x = torch.rand(150, 2, dtype=torch.float64)

    def run() -> Times:
        model.load_state_dict(start)
        fit = seng.LeastSquares(model, pde)
        before = time.process_time()
        fit.step(x)
        return [[time.process_time() - before]]

    return run


def network(
    name: str,
) -> tuple[nn.Module, Callable[[], tuple[Tensor, Tensor]]]:
    """A model, and what draws its next batch: equal ones would make averaged bases smaller than they are in training."""

    def text() -> tuple[Tensor, Tensor]:
        tokens = torch.randint(65, (8, 33))
        return tokens[:, :-1], tokens[:, 1:]

    def images() -> tuple[Tensor, Tensor]:
        return torch.randn(64, 3, 32, 32), torch.randint(10, (64,))

    if name == "gpt":
        return models.gpt2(2, 64, 4, 65, 32), text
    return models.small_cnn(), images


def training(method: str, name: str, every: int) -> Callable[[], Times]:
    """every − 1 ordinary steps, and a refresh."""
    model, draw = network(name)
    opt = methods(every)[method](model)
    params = list(model.parameters())

    def refresh() -> float:
        opt.zero_grad()
        x, y = draw()
        loss = F.cross_entropy(model(x).flatten(0, -2), y.flatten())
        before = time.process_time()
        loss.backward()
        opt.step()
        return time.process_time() - before

    refresh()
    grads = [p.grad.clone() for p in params]

    def step() -> float:
        for p, g in zip(params, grads, strict=True):
            p.grad.copy_(g)  # attach leaves its directions there
        before = time.process_time()
        opt.step()
        return time.process_time() - before

    return lambda: [[step() for _ in range(every - 1)], [refresh()]]


def work() -> None:
    """Serve orders, a line of the standard input each: a method to build first, and how many rounds of it to run."""
    tree = Path.cwd().resolve()
    if tree not in Path(seng.__file__).resolve().parents:
        sys.exit(f"seng is not that of {tree}, but {seng.__file__}")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    methods()
    gc.collect()
    gc.freeze()  # what was imported is not looked through again and again
    run: Any = None
    for line in sys.stdin:
        case, rounds = json.loads(line)
        try:
            if case:
                run = None
                torch.manual_seed(0)
                run = fitting() if case[0] == FIT else training(*case)
                run()
            gc.collect()
            times = zip(*(run() for _ in range(rounds)), strict=True)
            answer: Any = [median(chain(*each)) for each in times]
        except Exception as error:  # of this method; the next may work
            answer = f"{type(error).__name__}: {error}"
        print(json.dumps(answer), flush=True)
    gc.unfreeze()


if __name__ == "__main__":
    work()
