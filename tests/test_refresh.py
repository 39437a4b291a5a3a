"""All layers at once: the states that a refresh makes against a dense solve, in every precision, form and way of small work."""

from dataclasses import replace

import naive
import pytest
import torch
from refreshing import layer_refresh, low_rank, planned, uncentred

import seng
from seng.distributed.team import ALONE
from seng.linalg import numerics
from seng.linalg.operators import Explicit, Merged
from seng.metrics import low_rank as metric
from seng.metrics.low_rank import LowRank

LAM = 0.01  # of the largest eigenvalue
SAMPLES = 64


@pytest.fixture(params=["eigh", "range finder"])
def small_work(request, monkeypatch):
    for module in (numerics, metric):
        monkeypatch.setattr(
            module, "one_by_one", lambda K: request.param == "eigh"
        )


def graded(samples: int, n: int, decay: float, seed=0) -> torch.Tensor:
    """U (n, ϱ) whose singular values fall by `decay` from one to the next."""
    torch.manual_seed(seed)
    left, right = (
        torch.linalg.qr(torch.randn(n, samples)).Q,
        torch.linalg.qr(torch.randn(samples, samples)).Q,
    )
    return (left * decay ** torch.arange(samples)) @ right


def explicit(U: torch.Tensor) -> Explicit:
    return Explicit(U.float(), (1, U.shape[0], 1))


def refreshed(U: torch.Tensor, rank: int, half=True, previous=None, **given):
    curvature = uncentred(rank=rank, **given)
    return low_rank(explicit(U), curvature, rank, half=half, previous=previous)


def error(state, U: torch.Tensor, g: torch.Tensor) -> float:
    """Of the direction, against the dense solve in float64."""
    M = U.double() @ U.double().T
    lam = LAM * float(torch.linalg.eigvalsh(M)[-1])
    d = state.at(LAM)(g.float()).double()
    return naive.relative_error(
        d, lam * naive.dense_direction(M, g.double(), lam)
    )


def root(M: torch.Tensor) -> torch.Tensor:
    values, vectors = torch.linalg.eigh(M)
    return vectors * values.clamp_min(0).sqrt()


@pytest.mark.parametrize("half", [True, False])
@pytest.mark.parametrize("decay", [0.7, 0.85, 1.0])
def test_as_many_directions_as_samples_are_exact_and_fewer_come_near(
    small_work, half, decay
):
    """Fewer do where singular values fall: then 40 of 64 are all that is large beside λ."""
    U = graded(SAMPLES, 300, decay)
    precise = 0.02 if half else 1e-4  # half: 1e-4 of λ_max/λ
    state = refreshed(U, SAMPLES, half)
    assert state.columns == SAMPLES and error(state, U, U.sum(1)) < precise
    if decay < 1:
        state = refreshed(U, 40, half)
        assert state.columns == 40 and error(state, U, U.sum(1)) < 0.02


@pytest.mark.parametrize("half", [True, False])
def test_an_average_in_half_precision_is_that_of_the_matrices(
    small_work, half
):
    Us = [graded(40, 300, 0.8, seed) for seed in range(3)]
    state, M = None, None
    for U in Us:
        state = refreshed(U, 48, half, state, decay=0.7)
        M = U @ U.T if M is None else 0.7 * M + 0.3 * U @ U.T
    assert state.columns == 48 and error(state, root(M), Us[-1].sum(1)) < 0.02


def test_wide_bases_of_steep_spectra(small_work):
    U = graded(64, 300, 0.9)
    state = refreshed(U, 60, decay=0.8)
    assert state.columns == 60 and error(state, U, U.sum(1)) < 0.02


def test_layers_of_different_sizes_and_one_that_is_not_finite(small_work):
    good, other, bad = (
        graded(20, 50, 0.9),
        graded(12, 30, 0.9),
        graded(20, 50, 0.9),
    )
    bad[3, 4] = torch.nan
    Us = [explicit(U) for U in (good, bad, other)]
    layers = [
        layer_refresh(U, planned(U, "merged", 10), half=True) for U in Us
    ]
    states = LowRank(uncentred(rank=10)).refresh(layers, ALONE)
    assert [bool(state.fine()) for state in states] == [True, False, True]
    for state, U in zip(states, Us, strict=True):
        assert state.columns == 10
        alone = refreshed(U.U, 10)
        torch.testing.assert_close(state.gram, alone.gram, equal_nan=True)


def test_a_gradient_without_curvature_is_its_own_direction(small_work):
    state = refreshed(torch.zeros(30, 20), 10)
    g = torch.randn(30).float()
    torch.testing.assert_close(state.at(LAM)(g), g)


@pytest.mark.parametrize("relative", [True, False])
def test_factorizing_together_is_factorizing_alone(relative):
    Us = [graded(9, 40, 0.8), graded(7, 40, 0.5), graded(9, 40, 0.5)]
    states = [
        refreshed(U, 99, half=False, relative_damping=relative) for U in Us
    ]
    dampings = [0.1, 0.2, 0.3]
    curvature = uncentred(relative_damping=relative)
    solvers = LowRank(curvature).solvers(states, dampings)
    for state, solver, damping in zip(states, solvers, dampings, strict=True):
        lam = damping * float(state.top) if relative else damping
        assert float(solver.lam) == pytest.approx(lam)
        want = torch.linalg.inv(
            state.gram.double() + lam * torch.eye(len(state.gram))
        )
        torch.testing.assert_close(solver.inverse, want, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(solver.inverse, state.at(damping).inverse)


def test_half_precision_is_for_the_basis_alone():
    state = refreshed(graded(30, 200, 0.9), 16)
    assert isinstance(state.U, Merged)
    assert (
        state.U.Y.dtype == torch.float16 and state.gram.dtype == torch.float32
    )


@pytest.mark.parametrize("size", [1e-12, 1.0, 1e12])
@pytest.mark.parametrize("first", [True, False])
def test_a_basis_in_float32_is_averaged_with_one_in_half_precision(
    size, first
):
    """As after a warm-up without autocast, or before an evaluation with it: whatever the size of the gradients."""
    Us = [size * graded(40, 300, 0.8, seed) for seed in range(2)]
    before = refreshed(Us[0], 48, half=first, decay=0.7)
    state = refreshed(Us[1], 48, half=not first, previous=before, decay=0.7)
    M = 0.7 * Us[0] @ Us[0].T + 0.3 * Us[1] @ Us[1].T
    assert error(state, root(M), Us[1].sum(1)) < 0.02


def test_a_basis_that_is_not_finite_is_never_kept():
    """Neither of it nor of an average with it: the last good one stays."""
    U = graded(40, 300, 0.8)
    state = refreshed(U, 48, decay=0.7)
    assert state.fine()
    broken = replace(state, gram=state.gram * torch.nan)
    assert not broken.fine()
    assert not refreshed(U, 48, previous=broken, decay=0.7).fine()


def test_columns_in_half_precision_keep_every_eigenvalue_in_range():
    U = graded(30, 200, 0.9)
    solver = refreshed(U, 30, form="explicit").at(1e-5)
    directions = torch.stack([solver(e) for e in torch.eye(200).float()])
    values = torch.linalg.eigvalsh((directions + directions.T).double() / 2)
    assert values[0] > 0 and values[-1] < 1 + 1e-5


@pytest.mark.parametrize("rank", [4, 64])
def test_the_largest_eigenvalue_of_a_basis_is_not_the_sketch_s(rank):
    given = {"form": "merged", "sketch": seng.sketch.Rows(20)}
    state = refreshed(graded(16, 300, 0.9), rank, half=False, **given)
    largest = torch.linalg.eigvalsh(state.gram)[-1]
    torch.testing.assert_close(state.top, largest, rtol=1e-4, atol=0)
