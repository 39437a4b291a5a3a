"""How far do options and sizes of `seng.LeastSquares` take Poisson's equation? Relative L2 errors after so many steps.

python benchmarks/least_squares_options.py            # the table of docs/least_squares.md, some minutes on one thread
python benchmarks/least_squares_options.py sketch     # with and without a sketch
"""

import math
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import hessian, vmap

import seng

MARKS = (21, 41, 60, 61, 100, 101)


def solution(x: Tensor) -> Tensor:
    return torch.sin(math.pi * x).prod(-1)


def pde(model: nn.Module, x: Tensor) -> Tensor:
    laplacian = (
        vmap(hessian(lambda p: model(p[None]).squeeze()))(x)
        .diagonal(dim1=1, dim2=2)
        .sum(1)
    )
    return (laplacian + 2 * math.pi**2 * solution(x)) / len(x) ** 0.5


def boundary(model: nn.Module, x: Tensor) -> Tensor:
    return 10 * model(x)[:, 0] / len(x) ** 0.5


def points(
    inside: int, border: int, chance: torch.Generator
) -> tuple[Tensor, Tensor]:
    x, t, side = (
        torch.rand(inside, 2, generator=chance),
        torch.rand(border, generator=chance),
        torch.arange(border) % 4,
    )
    across = torch.where(side == 0, 0.0, torch.where(side == 1, 1.0, t))
    up = torch.where(side == 2, 0.0, torch.where(side == 3, 1.0, t))
    return x, torch.stack([across, up], 1)


def errors(
    width: int,
    inside: int,
    border: int,
    steps: int,
    seed: int,
    fresh: bool = False,
    **options: Any,
) -> list[float]:
    chance = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(2, width),
        nn.Tanh(),
        nn.Linear(width, width),
        nn.Tanh(),
        nn.Linear(width, 1),
    )
    fit = seng.LeastSquares(model, [pde, boundary], **options)
    test = torch.rand(4000, 2, generator=chance)
    batch, found = points(inside, border, chance), []
    for _ in range(steps):
        batch = points(inside, border, chance) if fresh else batch
        fit.step(*batch)
        with torch.no_grad():
            found.append(
                float(
                    (model(test)[:, 0] - solution(test)).norm()
                    / solution(test).norm()
                )
            )
    return found


def main(sketches: bool) -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    if sketches:
        for sketch in (
            None,
            seng.sketch.CountSketch(4000),
            seng.sketch.CountSketch(1000),
        ):
            print(
                sketch,
                f"{errors(100, 250, 50, 60, 0, sketch=sketch)[-1]:.1e}",
                flush=True,
            )
        return
    for width, inside, border, seeds in (
        (20, 300, 80, 3),
        (32, 900, 120, 2),
        (64, 900, 120, 2),
    ):
        for options in (
            {},
            {"fresh": True},
            {"acceleration": False},
            {"line_search": True},
        ):
            for seed in range(seeds):
                found = errors(
                    width, inside, border, MARKS[-1], seed, **options
                )
                first = next(
                    (i for i, error in enumerate(found, 1) if error <= 1e-5),
                    None,
                )
                said = ", ".join(f"{found[mark - 1]:.0e}" for mark in MARKS)
                print(
                    f"width {width}, {options or 'default'}, seed {seed}: {said}; 1e-5 at step {first}",
                    flush=True,
                )


if __name__ == "__main__":
    main("sketch" in sys.argv[1:])
