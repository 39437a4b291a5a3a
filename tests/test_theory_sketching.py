"""The studies of Ω: assumptions A.1 and A.2, and the lemma behind Theorem 1, against slow formulas and enumeration."""

import io
import itertools
import json

import pytest
import torch
from matplotlib.figure import Figure

from seng.lab.theory import bounds, embedding, lemma, sketched, trained
from seng.lab.theory.trained import Layer
from seng.linalg.operators import Explicit
from seng.linalg.sketch import Buckets, Dense, Gaussian, RowSample


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def small(n_G=4, n_A=6, samples=5, seed=0) -> Layer:
    """Random columns with a decaying spectrum; v is not in their span."""
    n, random = n_G * n_A, generator(seed)
    U = torch.randn(n, samples, generator=random) * 0.5 ** torch.arange(
        float(samples)
    )
    return Layer(
        "small",
        Explicit(U, (1, n_G, n_A)),
        U.mean(1),
        torch.randn(n, generator=random),
    )


def power(S: torch.Tensor, exponent: float) -> torch.Tensor:
    values, vectors = torch.linalg.eigh(S)
    return vectors @ torch.diag(values**exponent) @ vectors.T


@pytest.fixture(scope="module", params=["embedding", "lemma"])
def outcome(request):
    return {"embedding": embedding, "lemma": lemma}[request.param].STUDY.run(
        lambda text: None, True
    )


def test_all_claims_hold(outcome):
    assert [
        (claim.words, claim.measured)
        for claim in outcome.claims
        if not claim.holds
    ] == []
    assert len(outcome.claims) >= 7


def test_numbers_are_plain_and_the_picture_is_drawn(outcome):
    json.dumps(outcome.numbers, allow_nan=False)
    figure = Figure(layout="constrained")
    outcome.draw(figure)
    figure.savefig(io.BytesIO(), format="png")
    assert len(figure.axes) >= 2 and all(ax.lines for ax in figure.axes)


def test_a_trained_layer_is_what_it_says_and_moves_no_global_state():
    before = torch.get_rng_state()
    trained.layers.cache_clear()
    first = trained.layers(8, 2)
    assert torch.equal(before, torch.get_rng_state())
    trained.layers.cache_clear()
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(5)
    for layer, again in zip(first, trained.layers(8, 2), strict=True):
        U, N = layer.U.explicit().U, layer.N
        assert (
            torch.equal(U, again.U.explicit().U)
            and torch.equal(layer.g, again.g)
            and U.dtype == torch.float64
        )
        assert (layer.U.n, layer.U.samples, N.shape) == (
            layer.g.numel(),
            8,
            (layer.U.n, layer.rank),
        )
        torch.testing.assert_close(
            U.sum(1) / 8**0.5, layer.own
        )  # columns are u_i/√ϱ, and the gradient is the mean of u_i
        torch.testing.assert_close(
            N.T @ N, torch.eye(layer.rank, dtype=torch.float64)
        )
        torch.testing.assert_close(N @ torch.diag(layer.sigma) @ layer.V, U)
        assert (N.T @ layer.perpendicular).norm() < 1e-12 * layer.g.norm()
        torch.testing.assert_close(
            layer.leverage.sum(),
            torch.tensor(float(layer.rank), dtype=torch.float64),
        )
    trained.layers.cache_clear()


def test_a_dependent_column_is_not_part_of_the_basis():
    U = torch.randn(12, 3)
    U = torch.cat([U, U[:, :1] + U[:, 1:2]], 1)
    assert (
        Layer("dependent", Explicit(U, (1, 3, 4)), U[:, 0], U[:, 0]).rank == 3
    )


def test_coherence_is_one_where_rows_are_alike_and_largest_where_few_count():
    corner, flat = torch.eye(8)[:, :2], torch.ones(8, 1)
    uniform = torch.full((8,), 1 / 8)
    for U, want in ((corner, 4.0), (flat, 1.0)):
        assert Layer("", Explicit(U, (1, 2, 4)), U[:, 0], U[:, 0]).coherence(
            uniform
        ) == pytest.approx(want)
    layer = small()
    assert layer.coherence(layer.leverage / layer.rank) == pytest.approx(1)
    assert layer.coherence(layer.row_norms) > layer.coherence(
        torch.full((24,), 1 / 24)
    )


@pytest.mark.parametrize("kind", sketched.KINDS)
def test_errors_are_those_of_dense_matrices(kind):
    layer = small()
    U, v, n = layer.U.explicit().U, layer.g, layer.U.n
    omega = sketched.drawn(kind, layer, 12, generator(1))
    Omega = omega(torch.eye(n))
    S, P = Omega.T @ Omega, U @ torch.linalg.pinv(U)
    found = sketched.errors(layer, v, omega)
    assert found.eta == pytest.approx(
        float(torch.linalg.matrix_norm(P @ S @ P - P, 2))
    )
    assert found.epsilon == pytest.approx(
        float((P @ (S @ v - v)).square().sum() / v.square().sum())
    )
    K, K_hat = U.T @ U, U.T @ S @ U
    largest = torch.linalg.eigvalsh(K)[-1]
    assert found.gram == pytest.approx(
        float(torch.linalg.matrix_norm(K_hat - K, 2) / largest)
    )
    root = power(K + sketched.DAMPING * largest * torch.eye(5), -0.5)
    assert found.damped == pytest.approx(
        float(torch.linalg.matrix_norm(root @ (K_hat - K) @ root, 2))
    )
    assert found.damped <= found.eta * (1 + 1e-12)
    assert found.energy == pytest.approx(
        float((Omega @ U).square().sum() / U.square().sum())
    )
    assert found.rows == len(Omega)


def test_rows_by_leverage_are_drawn_by_leverage():
    layer = small()
    index = sketched.drawn(
        "rows by leverage", layer, 40_000, generator(0)
    ).index
    shares = torch.bincount(index, minlength=24) / 40_000
    torch.testing.assert_close(
        shares, layer.leverage / layer.rank, rtol=0.15, atol=2e-3
    )


def mean_of_epsilon(layer: Layer, omegas, weights=None) -> float:
    found = torch.tensor(
        [sketched.errors(layer, layer.g, omega).epsilon for omega in omegas]
    )
    return float(found.mean() if weights is None else found @ weights)


def test_the_mean_of_epsilon_is_that_of_all_draws():
    layer = small(n_G=2, n_A=2, samples=2)
    n = layer.U.n
    subsets = [
        RowSample(torch.tensor(pair), torch.full((2,), (n / 2) ** 0.5))
        for pair in itertools.combinations(range(n), 2)
    ]
    assert sketched.expected("Rows", layer, layer.g, 2) == pytest.approx(
        mean_of_epsilon(layer, subsets)
    )
    for kind, p in (
        ("LeverageRows", layer.row_norms),
        ("rows by leverage", layer.leverage / layer.rank),
    ):
        pairs = list(itertools.product(range(n), repeat=2))
        omegas = [
            RowSample(torch.tensor(pair), (2 * p[list(pair)]).rsqrt())
            for pair in pairs
        ]
        weights = torch.stack([p[i] * p[j] for i, j in pairs])
        assert sketched.expected(kind, layer, layer.g, 2) == pytest.approx(
            mean_of_epsilon(layer, omegas, weights)
        )
    buckets = itertools.product(
        itertools.product(range(2), repeat=n),
        itertools.product((-1.0, 1.0), repeat=n),
    )
    counts = [
        Buckets(torch.tensor(bucket), torch.tensor(sign), 2)
        for bucket, sign in buckets
    ]
    assert sketched.expected(
        "CountSketch", layer, layer.g, 2
    ) == pytest.approx(mean_of_epsilon(layer, counts))
    gaussians = [Dense(torch.randn(2, n) / 2**0.5) for _ in range(4_000)]
    assert sketched.expected("Gaussian", layer, layer.g, 2) == pytest.approx(
        mean_of_epsilon(layer, gaussians), rel=0.1
    )
    assert sketched.expected("KroneckerRows", layer, layer.g, 2) is None


def test_crossing_and_exponent_of_a_power_law():
    points = [
        {"q": float(q), "eta": [0.0, (q / 50) ** -0.5]}
        for q in (8, 16, 32, 64, 128)
    ]
    assert embedding.crossing(points) == pytest.approx(50)
    assert embedding.crossing(points[:3]) is None
    assert embedding.crossing(points[3:]) == 64
    assert embedding.exponent(
        points, lambda point: point["eta"][1], 0
    ) == pytest.approx(-0.5)
    bent = [{"q": 1.0, "eta": [0.0, 100.0]}, *points]
    assert embedding.exponent(
        bent, lambda point: point["eta"][1], 8
    ) == pytest.approx(-0.5)


def test_the_printed_scale_is_too_large_by_q_times_n():
    mean, error, factor = embedding.printed(small(), 6, 400)
    assert factor == 6 * 24 and abs(mean - factor) <= 4 * error < 0.3 * factor


@pytest.mark.parametrize("damping", [1e-3, 0.1, 3.0])
def test_draws_are_those_of_dense_formulas(damping):
    layer = small()
    U, g = layer.U.explicit().U, layer.g
    omega = Gaussian(200).draw(layer.U, generator(3))
    Omega = omega(torch.eye(24))
    S, P, one = Omega.T @ Omega, U @ torch.linalg.pinv(U), torch.eye(5)
    b = torch.linalg.solve(U.T @ U + damping * one, U.T @ g)
    b_hat = torch.linalg.solve(U.T @ S @ U + damping * one, U.T @ S @ g)
    d, d_hat = ((g - U @ c) / damping for c in (b, b_hat))
    (draw,) = bounds.compared(layer, omega, [damping])
    eta = float(torch.linalg.matrix_norm(P @ S @ P - P, 2))
    outside = g - P @ g
    root_epsilon = float((P @ S @ outside).norm() / outside.norm())
    h = torch.linalg.eigvalsh(U @ U.T + damping * torch.eye(24))
    t = (root_epsilon + eta) / (1 - eta) * float(g.norm())
    assert 0 < eta < 1 and float(h[0]) == pytest.approx(damping)
    want = {
        "eta": eta,
        "b": float((b - b_hat).norm()),
        "d": float((d - d_hat).norm()),
        "size": float(d.norm()),
        "stated": t * float(h[0]) ** 0.5,
        "proven": t / float(h[0]) ** 0.5,
        "used": t * float(h[-1] / h[0]) ** 0.5 / damping,
        "ours": float((P @ (S @ d - d)).norm()) / (1 - eta),  # √ε_r‖d‖, r = λd
    }
    H = power(U.T @ U + damping * one, -0.5)
    eta_damped = float(
        torch.linalg.matrix_norm(H @ U.T @ (S - torch.eye(24)) @ U @ H, 2)
    )
    want["damped"] = float((H @ U.T @ (S @ d - d)).norm()) / (1 - eta_damped)
    assert {key: getattr(draw, key) for key in want} == pytest.approx(
        want, rel=1e-6
    )
    assert (
        draw.d <= draw.damped <= draw.ours <= draw.used
        and draw.b <= draw.proven
    )
    assert draw.identities < 1e-9


def test_bounds_are_silent_where_eta_is_not_below_one():
    layer = small()
    (draw,) = bounds.compared(layer, Dense(2.5**0.5 * torch.eye(24)), [0.1])
    assert draw.eta == pytest.approx(1.5) and (
        draw.stated,
        draw.proven,
        draw.used,
        draw.ours,
    ) == (None, None, None, None)
    (far,) = bounds.compared(layer, Dense(2.5**0.5 * torch.eye(24)), [1e3])
    assert (
        draw.damped is None and far.damped is not None
    )  # what a large λ leaves of η is below 1


def test_the_example_by_hand():
    for damping in (1e-3, 0.2, 5.0):
        draw = bounds.by_hand(damping, 0.3)
        assert draw.b == pytest.approx(0.3 / (2 * damping**0.5))
        assert draw.b / draw.proven == pytest.approx(0.5)
        assert draw.b / draw.stated == pytest.approx(1 / (2 * damping))


def test_units_of_the_loss_change_the_statement_alone():
    layer = small()
    omega = Gaussian(200).draw(layer.U, generator(3))
    (one,), (other,) = (
        bounds.compared(layer.in_units(c), omega, [0.5 * c**2])
        for c in (1.0, 0.01)
    )
    assert other.eta == pytest.approx(
        one.eta
    ) and other.b / other.proven == pytest.approx(one.b / one.proven)
    assert other.b / other.stated == pytest.approx(1e4 * one.b / one.stated)
    twice = layer.in_units(2.0)
    assert torch.equal(twice.g, 2 * layer.g) and torch.equal(
        twice.own, 2 * layer.own
    )
