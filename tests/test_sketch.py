"""Sketches: E ΩᵀΩ = I, products of sketched operators, error against size, and directions that never turn around."""

import naive
import pytest
import torch
from refreshing import low_rank, uncentred

from seng.linalg.implicit import Implicit
from seng.linalg.operators import Explicit
from seng.linalg.sketch import (
    CountSketch,
    Gaussian,
    Identity,
    KroneckerRows,
    LeverageRows,
    Rows,
)

SKETCHES = {
    "rows": lambda q: Rows(q),
    "rows-with-replacement": lambda q: Rows(q, replacement=True),
    "leverage": lambda q: LeverageRows(q),
    "gaussian": lambda q: Gaussian(q),
    "count": lambda q: CountSketch(q),
    "kronecker": lambda q: KroneckerRows(max(1, q // 4), 4),
}


@pytest.fixture(params=SKETCHES, ids=list(SKETCHES))
def sketch(request):
    return SKETCHES[request.param]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def factors(samples=8, n_G=4, n_A=6, r=3, h=1) -> Implicit:
    return Implicit(
        torch.randn(samples, h, n_G, r), torch.randn(samples, h, n_A, r)
    )


def matrix(omega, n: int) -> torch.Tensor:
    return omega(torch.eye(n))


def test_mean_of_the_square_is_the_identity(sketch):
    """The printed scale of eq. 14, 1/p, would give n·q on the diagonal of the uniform ones: this test fails with it."""
    U = factors()
    draws = 4000
    total = torch.zeros(U.n, U.n)
    squares = torch.zeros(U.n, U.n)
    for seed in range(draws):
        Omega = matrix(sketch(8).draw(U, generator(seed)), U.n)
        square = Omega.T @ Omega
        total += square
        squares += square.square()
    mean = total / draws
    deviation = (
        (squares / draws - mean.square()).clamp_min(0).div(draws).sqrt()
    )  # of the mean
    assert ((mean - torch.eye(U.n)).abs() <= 5 * deviation + 1e-9).all()
    assert abs(float(mean.diagonal().mean()) - 1) < 0.05


def test_leverage_rows_stay_with_the_rows_that_have_a_norm():
    U = Explicit(
        torch.cat([torch.zeros(5, 3), torch.randn(4, 3), torch.zeros(3, 3)]),
        (1, 4, 3),
    )
    index = LeverageRows(500).draw(U, generator(0)).index
    assert set(index.tolist()) == {5, 6, 7, 8}
    zero = Explicit(torch.zeros(6, 3), (1, 2, 3))
    assert LeverageRows(4).draw(zero, generator(0)).scale.isfinite().all()


def test_leverage_probabilities_are_the_row_norms():
    U = Explicit(torch.tensor([[1.0, 0.0], [0.0, 3.0]]), (1, 2, 1))
    omega = LeverageRows(20000).draw(U, generator(0))
    assert abs(float((omega.index == 1).double().mean()) - 0.9) < 0.01
    torch.testing.assert_close(
        omega.scale[omega.index == 0][0], torch.tensor((20000 * 0.1) ** -0.5)
    )


@pytest.mark.parametrize("h", [1, 3])
def test_sketched_operator_is_omega_times_dense(sketch, h):
    U = factors(h=h)
    dense = U.explicit()
    omega = sketch(8).draw(U, generator(3))
    Omega = matrix(omega, U.n)
    for V in (U, dense):
        Xi = omega.of(V)
        torch.testing.assert_close(
            Xi.gram(), (Omega @ dense.U).T @ (Omega @ dense.U)
        )
        z = torch.randn(U.n)
        torch.testing.assert_close(
            Xi.rmv(omega(z)), (Omega @ dense.U).T @ (Omega @ z)
        )


def test_kronecker_rows_are_flat_rows_with_the_kronecker_product():
    U = factors(n_G=5, n_A=6)
    omega = KroneckerRows(3, 4).draw(U, generator(0))
    Omega_G, Omega_A = matrix(omega.G, 5), matrix(omega.A, 6)
    flat = torch.kron(
        Omega_G, Omega_A
    )  # row-major; with the paper's vec it reads Ω_A ⊗ Ω_G
    torch.testing.assert_close(matrix(omega, U.n), flat)
    columns_first = (
        torch.arange(30).view(5, 6).T.flatten()
    )  # position of each entry of the paper's vec in ours
    paper = torch.kron(Omega_A, Omega_G)
    rows = torch.arange(12).view(3, 4).T.flatten()
    torch.testing.assert_close(flat[rows][:, columns_first], paper)
    assert isinstance(omega.of(U), Implicit)
    torch.testing.assert_close(omega.of(U).explicit().U, flat @ U.explicit().U)


def test_one_side_of_a_kronecker_sketch_may_cover_its_factor():
    U = factors(n_G=2, n_A=6)
    omega = KroneckerRows(5, 3).draw(U, generator(0))
    assert isinstance(omega.G, Identity)
    assert KroneckerRows(5, 6).covers(U.shape) and KroneckerRows(5, 3).exceeds(
        U.shape
    )


def solver_of(U, form, sketch, damping, rank=1000, seed=11):
    curvature = uncentred(form, sketch=sketch, rank=rank, decay=0)
    return low_rank(U, curvature, rank, seed=seed).at(damping)


@pytest.mark.parametrize("form", ["explicit", "implicit", "merged"])
def test_direction_error_falls_with_the_size(sketch, form):
    """Mean error over 40 draws at growing sizes, with a spectrum that decays as those of layers do."""
    torch.manual_seed(2)
    U = factors(samples=6, n_G=16, n_A=16, r=2)
    U = Implicit(U.G * (0.4 ** torch.arange(6.0))[:, None, None, None], U.A)
    g = U.mv(torch.rand(6)) + 0.05 * torch.randn(U.n)
    rank = 3 if form == "merged" else 1000
    exact = solver_of(U, form, None, 0.1, rank=rank)(g)
    sizes = (
        [KroneckerRows(q, q) for q in (4, 9, 15)]
        if isinstance(sketch(4), KroneckerRows)
        else map(sketch, (16, 64, 224))
    )
    errors = []
    for omega in sizes:
        drawn = [
            naive.relative_error(
                solver_of(U, form, omega, 0.1, rank=rank, seed=i)(g), exact
            )
            for i in range(40)
        ]
        errors.append(sum(drawn) / len(drawn))
    assert errors[0] > errors[1] > errors[2]


@pytest.mark.parametrize("form", ["explicit", "implicit", "merged"])
def test_a_sketch_of_n_rows_or_more_is_exact(sketch, form):
    U = factors()
    g = torch.randn(U.n)
    exact = solver_of(U, form, None, 0.2)(g)
    large = (
        KroneckerRows(99, 99)
        if isinstance(sketch(4), KroneckerRows)
        else sketch(10**6)
    )
    torch.testing.assert_close(solver_of(U, form, large, 0.2)(g), exact)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("damping", [1.0, 1e-2, 1e-4])
def test_merged_is_a_contraction_with_every_sketch(sketch, damping, dtype):
    """Eigenvalues of λ(M̂ + λI)⁻¹ in [0, 1], and never an ascent direction."""
    tolerance = 1e-9 if dtype == torch.float64 else 2e-3
    for seed in range(5):
        torch.manual_seed(seed)
        U = factors(samples=20, n_G=6, n_A=8, r=2).to(dtype)
        U = Implicit(
            U.G * (0.5 ** torch.arange(20.0).to(dtype))[:, None, None, None],
            U.A,
        )  # a spectrum over six decades
        solver = solver_of(U, "merged", sketch(8), damping, rank=5 + seed * 4)
        P = torch.stack([solver(e) for e in torch.eye(U.n, dtype=dtype)])
        torch.testing.assert_close(P, P.T, atol=tolerance, rtol=0)
        values = torch.linalg.eigvalsh((P.double() + P.T.double()) / 2)
        assert (
            -tolerance <= float(values[0])
            and float(values[-1]) <= 1 + tolerance
        )
        for g in (
            torch.randn(U.n).to(dtype),
            U.mv(torch.randn(20).to(dtype)),
            U.mv(torch.ones(20, dtype=dtype)),
        ):
            assert float(g @ solver(g)) >= 0


def test_draws_come_from_the_generator_alone(sketch):
    U = factors()
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = matrix(sketch(8).draw(U, generator(1)), U.n)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first, matrix(sketch(8).draw(U, generator(1)), U.n))
    assert not torch.equal(first, matrix(sketch(8).draw(U, generator(2)), U.n))


@pytest.mark.parametrize(
    "make",
    [
        lambda q: Rows(q),
        lambda q: Gaussian(q),
        lambda q: KroneckerRows(q, 2),
        CountSketch,
    ],
)
@pytest.mark.parametrize("q", [0, -3, 2.5, True])
def test_bad_sizes_are_refused(make, q):
    with pytest.raises(ValueError, match="at least 1, not"):
        make(q)
