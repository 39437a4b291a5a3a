"""Two equations whose solutions are known, and the networks that are fitted to them.

½‖r‖² = 1/(2N) Σ (𝒟u − f)²(x_i) + w/(2M) Σ (u − u*)²(y_j)         x_i inside, y_j on those sides where u = u* is given
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn

VISCOSITY, OFFSET = 0.1, 1.5  # ν and a of Burgers' equation
GRID = 101  # points of each axis on which errors are taken


class Network(nn.Module):
    """A tanh network u(x) of several variables that takes its derivatives along, which is the fastest way to them."""

    def __init__(
        self, widths: tuple[int, ...], generator: torch.Generator
    ) -> None:
        super().__init__()
        layers = (
            nn.utils.skip_init(nn.Linear, i, o, dtype=torch.float64)
            for i, o in pairwise(widths)
        )
        self.layers = nn.ModuleList(
            layers
        )  # not nn.Linear's own values, which take from the global generator
        with torch.no_grad():
            for p in self.parameters():  # Glorot's range for weights; biases from −1 to 1 spread the bends over the domain
                bound = math.sqrt(6 / sum(p.shape)) if p.dim() > 1 else 1.0
                p.uniform_(-bound, bound, generator=generator)

    @property
    def _split(self) -> tuple[nn.Linear, list[nn.Linear]]:
        first, *rest = (cast(nn.Linear, layer) for layer in self.layers)
        return first, rest

    def forward(self, x: Tensor) -> Tensor:
        """u (B,) at x (B, d)."""
        first, rest = self._split
        z: Tensor = first(x)
        for layer in rest:
            z = layer(z.tanh())
        return z[:, 0]

    def jet(
        self, x: Tensor, c: tuple[float, ...]
    ) -> tuple[Tensor, list[Tensor], Tensor]:
        """u, ∂u/∂x_i for each i, and Σ c_i ∂²u/∂x_i², each (B,)."""
        first, rest = self._split
        z, dz, Dz = first(x), list(first.weight.T), x.new_zeros(())
        for layer in rest:
            t = z.tanh()
            slope = 1 - t * t  # tanh′; tanh″ = −2 tanh tanh′
            Dz = (
                slope
                * (
                    Dz
                    - 2
                    * t
                    * sum(
                        c_i * d * d
                        for c_i, d in zip(c, dz, strict=True)
                        if c_i
                    )
                )
                @ layer.weight.T
            )
            dz = [(slope * d) @ layer.weight.T for d in dz]
            z = layer(t)
        return z[:, 0], [d[:, 0] for d in dz], Dz[:, 0]


@dataclass(frozen=True)
class Problem:
    """An equation 𝒟u = f on a rectangle, with values of u given on parts of its boundary."""

    name: str
    corner: tuple[float, float]  # the lowest; the highest is (1, 1)
    operator: Callable[[Network, Tensor], Tensor]  # 𝒟u
    source: Callable[[Tensor], Tensor]  # f
    exact: Callable[[Tensor], Tensor]  # u*
    sides: tuple[
        tuple[int, int], ...
    ]  # where u is given: (the coordinate that is fixed, 0 its lowest or 1 its highest value)
    weight: float  # w
    cells: int = 23  # of each axis; N is their square
    edge: int = 120  # M, a multiple of the number of sides
    widths: tuple[int, ...] = (2, 24, 24, 24, 1)
    steps: int = 200  # of least squares

    @property
    def inside(self) -> int:
        return self.cells**2

    def equation(self, model: Network, x: Tensor, f: Tensor) -> Tensor:
        return (self.operator(model, x) - f) / math.sqrt(self.inside)

    def boundary(self, model: Network, x: Tensor, u: Tensor) -> Tensor:
        r: Tensor = math.sqrt(self.weight / self.edge) * (model(x) - u)
        return r

    def placed(self, unit: Tensor) -> Tensor:
        """From the unit square to the rectangle."""
        low = unit.new_tensor(self.corner)
        return low + (1 - low) * unit

    def points(
        self, generator: torch.Generator
    ) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """(x, f) inside and (y, u*) on the sides in turns: one point anywhere in each cell, so that there are no gaps."""
        places = torch.arange(self.cells, dtype=torch.float64)
        x = torch.cartesian_prod(places, places) + torch.rand(
            self.inside, 2, generator=generator, dtype=torch.float64
        )
        x = self.placed(x / self.cells)
        turns = torch.arange(self.edge)[:, None] // len(self.sides)
        y = turns + torch.rand(
            self.edge, 2, generator=generator, dtype=torch.float64
        )
        y = y * len(self.sides) / self.edge
        for i, (coordinate, end) in enumerate(self.sides):
            y[i :: len(self.sides), coordinate] = end
        y = self.placed(y)
        return (x, self.source(x)), (y, self.exact(y))


class Start:
    """A network, points and the errors of a problem, the same for all methods."""

    def __init__(self, problem: Problem, seed: int) -> None:
        self.problem = problem
        self.generator = torch.Generator().manual_seed(seed)
        self.model = Network(problem.widths, self.generator)
        self.batches = problem.points(self.generator)
        axis = torch.linspace(0, 1, GRID, dtype=torch.float64)
        self.grid = problem.placed(torch.cartesian_prod(axis, axis))
        self.truth = problem.exact(self.grid)

    def residuals(self, factor: float, fresh: bool) -> Tensor:
        inside, edge = (
            self.problem.points(self.generator) if fresh else self.batches
        )
        boundary = math.sqrt(factor) * self.problem.boundary(self.model, *edge)
        return torch.cat(
            [self.problem.equation(self.model, *inside), boundary]
        )

    @torch.no_grad()
    def error(self) -> float:
        """‖u − u*‖/‖u*‖ on the grid."""
        return float(
            (self.model(self.grid) - self.truth).norm() / self.truth.norm()
        )


def _laplace(model: Network, x: Tensor) -> Tensor:
    return -model.jet(x, (1.0, 1.0))[2]


def _waves(x: Tensor) -> Tensor:
    return torch.sin(math.pi * x).prod(1)


def _forcing(x: Tensor) -> Tensor:
    return 2 * math.pi**2 * _waves(x)


def _burgers(model: Network, x: Tensor) -> Tensor:
    """u_t + u u_x − ν u_xx at (x, t)."""
    u, (u_x, u_t), u_xx = model.jet(x, (1.0, 0.0))
    return u_t + u * u_x - VISCOSITY * u_xx


def _front(x: Tensor) -> Tensor:
    """Cole and Hopf: u = −2ν φ_x/φ where φ = a − e^{−νπ²t} cos πx solves the heat equation; a front at x = 0 that wears off."""
    e = torch.exp(-VISCOSITY * math.pi**2 * x[:, 1])
    angle = math.pi * x[:, 0]
    return (
        -2
        * VISCOSITY
        * math.pi
        * e
        * torch.sin(angle)
        / (OFFSET - e * torch.cos(angle))
    )


def _nothing(x: Tensor) -> Tensor:
    return torch.zeros_like(x[:, 0])


SQUARE = ((0, 0), (0, 1), (1, 0), (1, 1))
POISSON = Problem(
    "Poisson", (0.0, 0.0), _laplace, _forcing, _waves, SQUARE, weight=100.0
)
BURGERS = Problem(
    "Burgers",
    (-1.0, 0.0),
    _burgers,
    _nothing,
    _front,
    ((0, 0), (1, 0), (0, 1), (1, 0)),
    weight=10.0,
)
SMALL = replace(POISSON, cells=14, edge=60, widths=(2, 16, 16, 1), steps=30)
