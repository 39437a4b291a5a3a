"""The study `pdes`: derivatives and solutions against autograd, fair starts, rivals that work, claims that can fail."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.func import grad, hessian, vmap

from seng.lab.theory.equations import (
    BURGERS,
    POISSON,
    SMALL,
    VISCOSITY,
    Network,
    Problem,
    Start,
)
from seng.lab.theory.pdes import FULL, STUDY, judged
from seng.lab.theory.rivals import Curve, Rival, Watch, tuned

PROBLEMS = [POISSON, BURGERS]


def named(problem: Problem) -> str:
    return problem.name


@pytest.mark.parametrize("c", [(1.0, 1.0), (1.0, 0.0), (0.5, -2.0)])
def test_jet_equals_autograd(c):
    model = Network((2, 5, 4, 3, 1), torch.Generator().manual_seed(0))
    x = torch.rand(7, 2)
    u, first, second = model.jet(x, c)

    def at(point: Tensor) -> Tensor:
        return model(point[None])[0]

    torch.testing.assert_close(u, model(x))
    torch.testing.assert_close(torch.stack(first, 1), vmap(grad(at))(x))
    torch.testing.assert_close(
        second, vmap(hessian(at))(x).diagonal(dim1=1, dim2=2) @ torch.tensor(c)
    )


class Exact(nn.Module):
    """A known solution in the place of a network."""

    def __init__(self, problem: Problem) -> None:
        super().__init__()
        self.exact = problem.exact

    def forward(self, x: Tensor) -> Tensor:
        return self.exact(x)

    def jet(
        self, x: Tensor, c: tuple[float, ...]
    ) -> tuple[Tensor, list[Tensor], Tensor]:
        def at(point: Tensor) -> Tensor:
            return self.exact(point[None])[0]

        second = vmap(hessian(at))(x).diagonal(dim1=1, dim2=2) @ torch.tensor(
            c
        )
        return self(x), list(vmap(grad(at))(x).T), second


@pytest.mark.parametrize("problem", PROBLEMS, ids=named)
def test_solutions_solve(problem):
    inside, edge = problem.points(torch.Generator().manual_seed(1))
    solution = Exact(problem)
    assert problem.equation(solution, *inside).abs().max() < 1e-12
    assert problem.boundary(solution, *edge).abs().max() == 0
    assert problem.exact(inside[0]).abs().max() > 0.5


def test_the_equations_are_those_that_are_said():
    x = torch.rand(50, 2)
    assert torch.allclose(
        POISSON.exact(x),
        torch.sin(math.pi * x[:, 0]) * torch.sin(math.pi * x[:, 1]),
    )
    assert torch.allclose(POISSON.source(x), 2 * math.pi**2 * POISSON.exact(x))
    u, (u_x, u_t), u_xx = (
        model := Network((2, 6, 1), torch.Generator().manual_seed(0))
    ).jet(x, (1.0, 0.0))
    assert torch.allclose(
        BURGERS.operator(model, x), u_t + u * u_x - VISCOSITY * u_xx
    )


@pytest.mark.parametrize("problem", PROBLEMS, ids=named)
def test_points_lie_where_they_should(problem):
    (x, _), (y, _) = problem.points(torch.Generator().manual_seed(2))
    low, high = torch.tensor(problem.corner), torch.ones(2)
    assert len(x) == problem.inside and ((x > low) & (x < high)).all()
    on = {
        (i, end): int((y[:, i] == (low, high)[end][i]).sum())
        for i in (0, 1)
        for end in (0, 1)
    }
    assert {side for side, count in on.items() if count} == set(problem.sides)
    assert sum(on.values()) == len(y) == problem.edge
    assert ((y == low) | (y == high)).sum(1).eq(1).all()
    cells = ((x - low) / (high - low) * problem.cells).long()
    assert len(cells.unique(dim=0)) == problem.inside
    for k, (i, _) in enumerate(problem.sides):
        along = y[k :: len(problem.sides), 1 - i]
        assert (
            along.sort().values.diff()
            < 2.001 * (1 - low[1 - i]) * len(problem.sides) / problem.edge
        ).all()


def test_burgers_knows_nothing_of_its_end():
    assert (1, 1) not in BURGERS.sides


def test_the_sizes_are_those_of_the_task():
    for problem in PROBLEMS:
        assert (
            1200
            <= sum(p.numel() for p in Start(problem, 0).model.parameters())
            <= 5000
        )
        assert 600 <= problem.inside + problem.edge <= 1500
        assert problem.steps <= 200


def test_a_start_depends_on_its_seed_alone():
    torch.set_default_dtype(torch.float32)
    before = torch.random.get_rng_state()
    one, same, other = Start(SMALL, 3), Start(SMALL, 3), Start(SMALL, 4)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert one.error() == same.error() != other.error()
    assert torch.equal(one.residuals(1.0, False), same.residuals(1.0, False))
    assert one.residuals(1.0, False).dtype == torch.float64
    assert not torch.equal(
        one.residuals(1.0, True), same.residuals(1.0, False)
    )


def test_the_factor_is_on_the_boundarys_part_of_the_loss():
    start = Start(SMALL, 0)
    r, s = start.residuals(1.0, False), start.residuals(100.0, False)
    torch.testing.assert_close(s[: SMALL.inside], r[: SMALL.inside])
    torch.testing.assert_close(
        s[SMALL.inside :].square().sum(),
        100 * r[SMALL.inside :].square().sum(),
    )


class Valley:
    """Rosenbrock's function as a task."""

    def __init__(self, broken_after: int = 10**9) -> None:
        self.model = nn.ParameterList([torch.tensor([-1.2, 1.0])])
        self.calls, self.broken_after = 0, broken_after

    def residuals(self, factor: float, fresh: bool) -> Tensor:
        x, y = self.model[0]
        self.calls += 1
        r = torch.stack([1 - x, 10 * (y - x * x)])
        return r * (math.nan if self.calls > self.broken_after else 1)

    def error(self) -> float:
        return float((self.model[0].detach() - 1).norm())


@pytest.mark.parametrize(
    "rival, error",
    [(Rival("Adam", 0.05), 1.0), (Rival("L-BFGS", 1.0, 10), 1e-10)],
    ids=lambda x: str(x),
)
def test_rivals_descend(rival, error):
    curve = rival.fit(Valley(), 0.6)
    assert curve.errors[-1] < error
    assert curve.losses[-1] < 12.1  # ½‖r‖² of the start
    assert curve.seconds == sorted(curve.seconds)
    assert rival.method == "L-BFGS" or 0.6 <= curve.seconds[-1] < 3.0


def test_adam_ends_with_a_rate_of_zero(monkeypatch):
    rates = []

    class Spy(torch.optim.Adam):
        def step(self, closure=None):
            rates.append(self.param_groups[0]["lr"])
            super().step(closure)

    monkeypatch.setattr(torch.optim, "Adam", Spy)
    Rival("Adam", 0.05).fit(Valley(), 0.3)
    assert (
        rates[0] > 0.0499
        and rates[-1] < 1e-4
        and rates == sorted(rates, reverse=True)
    )


def test_lbfgs_survives_losses_that_are_not_finite():
    task = Valley(broken_after=30)
    curve = Rival("L-BFGS", 1.0, 10).fit(task, 0.3)
    assert all(math.isfinite(error) for error in curve.errors)
    assert curve.lowest < 2.2  # of (−1.2, 1)


def test_tuning_chooses_the_lowest_error_and_goes_on_past_the_end_of_a_range():
    best = Rival("Adam", 1e-2, factor=100.0)

    def measure(rivals: list[Rival]) -> list[Curve]:
        return [
            Curve([1], [1.0], [1.0], [distance(rival)]) for rival in rivals
        ]

    def distance(rival: Rival) -> float:
        return (
            1e-3
            + abs(math.log(rival.lr / best.lr))
            + abs(math.log(rival.factor / best.factor))
            + rival.fresh
        )

    chosen, curve, tries = tuned("Adam", measure)
    assert chosen == best and curve.lowest == distance(best) == min(
        one["error"] for one in tries
    )
    assert len({one["settings"] for one in tries}) == len(tries) == 9
    _, _, tries = tuned(
        "L-BFGS",
        lambda rivals: [Curve([1], [1.0], [1.0], [math.nan]) for _ in rivals],
    )
    assert all(one["error"] == math.inf for one in tries)


def test_a_watch_counts_only_what_is_between_go_and_hold():
    watch = Watch()
    watch.go()
    watch.hold()
    for _ in range(20):
        torch.rand(200, 200) @ torch.rand(200, 200)
    held = watch.seconds
    watch.go()
    watch.hold()
    assert held <= watch.seconds < 0.01


def found(
    ours: list[float], adam: list[float], lbfgs: list[float]
) -> dict[str, object]:
    def curves(errors: list[float]) -> list[dict[str, list[float]]]:
        return [
            {
                "steps": [100, 200],
                "seconds": [1.0, 2.0],
                "losses": [1.0, 1.0],
                "errors": [1.0, error],
            }
            for error in errors
        ]

    return {
        "curves": {
            "LeastSquares": curves(ours),
            "Adam": curves(adam),
            "L-BFGS": curves(lbfgs),
        }
    }


@pytest.mark.parametrize(
    "errors, holds",
    [
        (([9e-6, 1e-6], [1e-3, 1e-3], [1e-4, 1e-4]), (True, True, True)),
        (([2e-5, 1e-6], [1e-3, 1e-3], [1.1e-4, 1e-4]), (False, True, True)),
        (([9e-6, 1e-6], [1e-3, 2e-5], [1e-4, 1e-4]), (True, False, True)),
        (([9e-6, 1e-6], [1e-3, 1e-3], [4e-5, 1e-4]), (True, True, False)),
        (
            ([math.nan, 1e-6], [1e-3, 1e-3], [1e-4, 1e-4]),
            (False, False, False),
        ),
        (
            ([1e-6, math.nan], [1e-3, 1e-3], [1e-4, 1e-4]),
            (False, False, False),
        ),
    ],
)
def test_claims_can_fail(errors, holds):
    assert (
        tuple(claim.holds for claim in judged(POISSON, found(*errors), FULL))
        == holds
    )


def test_quick():
    said: list[str] = []
    outcome = STUDY.run(said.append, True)
    for claim in outcome.claims:
        assert claim.holds, claim
    assert len(outcome.claims) == 3 and said
    numbers = json.loads(json.dumps(outcome.numbers))["Poisson"]
    ours, theirs = (
        numbers["curves"]["LeastSquares"][0],
        numbers["curves"]["Adam"][0],
    )
    assert ours["steps"][-1] == SMALL.steps
    assert theirs["seconds"][-1] >= ours["seconds"][-1]
    assert len(numbers["tuning"]["Adam"]["tries"]) >= 8
    figure = Figure(figsize=STUDY.size)
    outcome.draw(figure)
    assert len(figure.axes) == 1 and len(figure.axes[0].lines) == 5


def test_points_of_a_smaller_problem_are_fewer():
    start = Start(replace(SMALL, cells=3, edge=8), 0)
    assert start.residuals(1.0, False).shape == (17,)
