"""One test per numbered equation of sections 2 and 3, named after it; where the paper prints a slip, the test says so."""

import naive
import pytest
import torch
from refreshing import low_rank, uncentred
from torch import nn

import seng
from seng.layers import kind_of
from seng.linalg.implicit import Independent
from seng.linalg.numerics import reduced
from seng.linalg.operators import Explicit
from seng.linalg.sketch import KroneckerRows, LeverageRows, Rows

LAM = 0.3
RHO, N_G, N_A, KAPPA = 6, 4, 5, 3


@pytest.fixture
def layer():
    """A linear layer over KAPPA positions without bias, a batch, its per-sample gradients u_i and its factors."""
    torch.manual_seed(0)
    layer = nn.Linear(N_A, N_G, bias=False)
    x, target = torch.randn(RHO, KAPPA, N_A), torch.randn(RHO, KAPPA, N_G)
    out = layer(x)
    (grad,) = torch.autograd.grad(naive.loss_of(out, target), out)
    u = naive.per_sample_gradients(layer, x, target)
    # With a mean loss u_i = ϱ × the captured gradient.
    U = kind_of(layer).rule(layer, x, RHO * grad).factors()
    return layer, x, target, u, U


@pytest.fixture
def U(layer):
    """U with columns u_i/√ϱ, in its implicit form."""
    return layer[4].scaled(RHO**-0.5)


@pytest.fixture
def g(layer):
    return layer[3].mean(0)


def solved(U, g, form="explicit", sketch=None, rank=1000, combine="exact"):
    """The solver at λ, and (M + λI)⁻¹g."""
    curvature = uncentred(
        form,
        sketch=sketch,
        rank=rank,
        combine=combine,
        decay=0,
        relative_damping=False,
    )
    solver = low_rank(U, curvature, rank).at(LAM)
    return solver, solver(g) / LAM


def direction(U, g, *args, **given):
    return solved(U, g, *args, **given)[1]


def coefficients(solver, g):
    """b of eq. 9."""
    return solver.coefficients(solver.project(g))


def mat(z):
    return z.view(N_G, N_A)


def vec(X):
    """The paper's vec stacks columns."""
    return X.T.flatten()


def test_eq_02_mb_EFIM(layer):
    u = layer[3]
    M = sum(torch.outer(u_i, u_i) for u_i in u) / RHO
    torch.testing.assert_close(naive.fisher(u), M)


def test_eq_03_grad_back(layer):
    _, _, _, u, factors = layer
    for i in range(RHO):
        torch.testing.assert_close(
            mat(u[i]), factors.G[i, 0] @ factors.A[i, 0].T
        )
        by_columns = sum(
            torch.kron(factors.A[i, 0, :, j], factors.G[i, 0, :, j])
            for j in range(KAPPA)
        )
        torch.testing.assert_close(vec(mat(u[i])), by_columns)


def test_eq_04_mb_EFIM2_whole_network():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    x, target = torch.randn(5, 3), torch.randn(5, 2)
    u = naive.per_sample_gradients(model, x, target)
    U = u.T / 5**0.5
    torch.testing.assert_close(naive.fisher(u), U @ U.T)


def test_eq_05_mb_EFIM2_per_layer(layer, U):
    dense = U.explicit().U
    torch.testing.assert_close(naive.fisher(layer[3]), dense @ dense.T)


def test_eq_06_quadratic_model(U, g):
    M = U.explicit().U @ U.explicit().U.T
    d = -direction(U, g)

    def F(d):
        return g @ d + 0.5 * d @ (M @ d + LAM * d)

    assert all(F(d) <= F(d + 1e-3 * torch.randn(len(d))) for _ in range(50))


def test_eq_07_dk_is_block_diagonal():
    """Each layer is solved with its own M^l: the step of a two-layer network is the two dense solves."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    x, target = torch.randn(5, 3), torch.randn(5, 2)
    want = []
    for layer in (model[0], model[2]):
        u = naive.per_sample_gradients(
            model, x, target, list(layer.parameters())
        )
        want.append(naive.dense_direction(naive.fisher(u), u.mean(0), LAM))
    curvature = uncentred(decay=0, relative_damping=False, rank=100)
    opt = seng.SENG(
        model,
        lr=1.0,
        momentum=0.0,
        damping=LAM,
        recipe="paper",
        curvature=curvature,
    )
    before = naive.flat([p.detach().clone() for p in model.parameters()])
    naive.loss_of(model(x), target).backward()
    opt.step()
    torch.testing.assert_close(
        before - naive.flat([p.detach() for p in model.parameters()]),
        torch.cat(want),
    )


def test_eq_08_inversion(U, g):
    dense = U.explicit().U
    b = torch.linalg.solve(LAM * torch.eye(RHO) + dense.T @ dense, dense.T @ g)
    torch.testing.assert_close(direction(U, g), g / LAM - dense @ b / LAM)


def test_eq_09_sol_ls_1(U, g):
    dense = U.explicit().U
    solver, _ = solved(U, g)
    b = coefficients(solver, g)
    torch.testing.assert_close(
        b,
        torch.linalg.solve(
            LAM * torch.eye(RHO) + dense.T @ dense, dense.T @ g
        ),
    )


def test_eq_10_least_square_1(U, g):
    """b minimises ‖Ub − g‖² + λ‖b‖²: it is the least-squares solution of the stacked system."""
    stacked = torch.cat([U.explicit().U, LAM**0.5 * torch.eye(RHO)])
    b = torch.linalg.lstsq(
        stacked, torch.cat([g, torch.zeros(RHO)])[:, None]
    ).solution[:, 0]
    solver, _ = solved(U, g)
    torch.testing.assert_close(coefficients(solver, g), b)


@pytest.mark.parametrize("sketch", [Rows(9), LeverageRows(9)])
def test_eq_11_least_square_2(U, g, sketch):
    solver, _ = solved(U, g, sketch=sketch)
    Xi, xi = solver.omega(U.explicit().U), solver.omega(g)
    stacked = torch.cat([Xi, LAM**0.5 * torch.eye(RHO)])
    b = torch.linalg.lstsq(
        stacked, torch.cat([xi, torch.zeros(RHO)])[:, None]
    ).solution[:, 0]
    torch.testing.assert_close(coefficients(solver, g), b)


@pytest.mark.parametrize("sketch", [Rows(9), LeverageRows(9)])
def test_eq_12_sol_ls_2(U, g, sketch):
    solver, _ = solved(U, g, sketch=sketch)
    Xi, xi = solver.omega(U.explicit().U), solver.omega(g)
    b = torch.linalg.inv(LAM * torch.eye(RHO) + Xi.T @ Xi) @ Xi.T @ xi
    torch.testing.assert_close(coefficients(solver, g), b)


@pytest.mark.parametrize("sketch", [Rows(9), LeverageRows(9)])
def test_eq_13_sketch_direc(U, g, sketch):
    solver, d = solved(U, g, sketch=sketch)
    dense, Omega = U.explicit().U, solver.omega(torch.eye(U.n))
    b = (
        torch.linalg.inv(
            LAM * torch.eye(RHO) + (Omega @ dense).T @ (Omega @ dense)
        )
        @ (Omega @ dense).T
        @ (Omega @ g)
    )
    torch.testing.assert_close(d, g / LAM - dense @ b / LAM)
    torch.testing.assert_close(
        d,
        torch.linalg.solve(
            LAM * torch.eye(U.n) + dense @ dense.T @ Omega.T @ Omega, g
        ),
    )


def test_eq_14_sketch_mat(U):
    """Rows e_i/√(q·p_i), not the printed e_i/p_i, which has no E ΩᵀΩ = I: here for both probabilities of the paper."""
    q, n = 7, U.n
    uniform = Rows(q).draw(U, torch.Generator().manual_seed(0))
    Omega = uniform(torch.eye(n))
    assert (Omega != 0).sum(1).eq(
        1
    ).all() and uniform.index.unique().numel() == q
    torch.testing.assert_close(
        Omega.max(1).values, torch.full((q,), (n / q) ** 0.5)
    )
    leverage = LeverageRows(q).draw(U, torch.Generator().manual_seed(0))
    p = U.explicit().U.square().sum(1) / U.explicit().U.square().sum()
    torch.testing.assert_close(
        leverage.scale, 1 / (q * p[leverage.index]).sqrt()
    )


def test_eq_15_ApproximationGA(layer):
    """G_i A_iᵀ of rank r: exact at r = κ, and otherwise the partial SVD of the smaller factor."""
    factors = layer[4]
    assert reduced(factors, KAPPA, torch.Generator()) is factors
    two = reduced(factors, 2, torch.Generator().manual_seed(0))
    assert two.G.shape == (RHO, 1, N_G, 2) and two.A.shape == (RHO, 1, N_A, 2)
    for i in range(RHO):
        smaller = factors.G[i, 0]  # n_G < n_A
        V = torch.linalg.svd(smaller).Vh[:2].T
        torch.testing.assert_close(
            two.G[i, 0] @ two.A[i, 0].T, smaller @ V @ V.T @ factors.A[i, 0].T
        )


def test_eq_16_storeAG(layer):
    factors = layer[4]
    A = torch.cat(list(factors.A[:, 0]), 1)
    G = torch.cat(list(factors.G[:, 0]), 1)
    assert A.shape == (N_A, KAPPA * RHO) and G.shape == (N_G, KAPPA * RHO)
    torch.testing.assert_close(mat(factors.mv(torch.ones(RHO))), G @ A.T)


@pytest.fixture
def sketched(U):
    omega = KroneckerRows(3, 4).draw(U, torch.Generator().manual_seed(0))
    return omega, omega.G(torch.eye(N_G)), omega.A(torch.eye(N_A))


def test_eq_17_sketchedAG(U, sketched):
    omega, Omega_G, Omega_A = sketched
    Xi = omega.of(U)
    for i in range(RHO):
        torch.testing.assert_close(Xi.G[i, 0], Omega_G @ U.G[i, 0])
        torch.testing.assert_close(Xi.A[i, 0], Omega_A @ U.A[i, 0])


def test_eq_18_computeUtz(U):
    z = torch.randn(U.n)
    want = [
        sum(U.G[i, 0, :, j] @ mat(z) @ U.A[i, 0, :, j] for j in range(KAPPA))
        for i in range(RHO)
    ]
    torch.testing.assert_close(U.rmv(z), torch.stack(want))
    torch.testing.assert_close(U.rmv(z), U.explicit().U.T @ z)


def test_eq_19_implicit_sketching_2(U, sketched):
    omega, Omega_G, Omega_A = sketched
    z = torch.randn(U.n)
    Xi_z = Omega_G @ mat(z) @ Omega_A.T
    want = [
        ((Xi_z.T @ (Omega_G @ U.G[i, 0])) * (Omega_A @ U.A[i, 0])).sum()
        for i in range(RHO)
    ]
    torch.testing.assert_close(omega.of(U).rmv(omega(z)), torch.stack(want))


def test_eq_20_UtUapprox1(U):
    want = U.explicit().U.T @ U.explicit().U
    torch.testing.assert_close(U.gram_by_factors(), want)


def test_eq_21_UtUapprox2(U, sketched):
    omega, Omega_G, Omega_A = sketched
    Xi_G, Xi_A = Omega_G @ U.G[:, 0], Omega_A @ U.A[:, 0]
    want = torch.tensor(
        [
            [
                ((Xi_A[i].T @ Xi_A[j]) * (Xi_G[i].T @ Xi_G[j])).sum()
                for j in range(RHO)
            ]
            for i in range(RHO)
        ]
    )
    torch.testing.assert_close(omega.of(U).gram(), want)
    torch.testing.assert_close(omega.of(U).gram_by_factors(), want)


def test_eq_22_approx_2(layer):
    """The implicit formulas print u_i; U's columns are u_i/√ϱ, and so is what our Uc sums."""
    _, _, _, u, factors = layer
    c = torch.randn(RHO)
    torch.testing.assert_close(
        factors.scaled(RHO**-0.5).mv(c),
        sum(c[i] * u[i] for i in range(RHO)) / RHO**0.5,
    )


def test_eq_23_approx_3(U):
    c = torch.randn(RHO)
    G = sum(c[i].abs().sqrt() * U.G[i, 0] for i in range(RHO))
    A = sum(c[i] / c.abs().sqrt().sum() * U.A[i, 0] for i in range(RHO))
    torch.testing.assert_close(mat(Independent(U.G, U.A).mv(c)), G @ A.T)
    assert torch.equal(
        Independent(U.G, U.A).mv(torch.zeros(RHO)), torch.zeros(U.n)
    )


@pytest.mark.parametrize("combine", ["exact", "independent"])
def test_eq_24_implicit_dir(U, g, combine):
    """d̂ = −g/λ + C_U(b̂)/λ: Woodbury has the 1/λ in front of C_U that the paper drops. Ω = Ω_A ⊗ Ω_G."""
    solver, d = solved(U, g, "implicit", KroneckerRows(3, 4), combine=combine)
    Xi = solver.omega.of(U)
    b = torch.linalg.inv(Xi.gram() + LAM * torch.eye(RHO)) @ Xi.rmv(
        solver.omega(g)
    )
    Uc = Independent(U.G, U.A).mv(b) if combine == "independent" else U.mv(b)
    torch.testing.assert_close(d, g / LAM - Uc / LAM)
    flat = torch.kron(
        solver.omega.G(torch.eye(N_G)), solver.omega.A(torch.eye(N_A))
    )
    torch.testing.assert_close(
        Xi.gram(), (flat @ U.explicit().U).T @ (flat @ U.explicit().U)
    )


def test_algorithm_1_between_refreshes_keeps_U(layer):
    """k mod T ≠ 0: U stays that of the last refresh, and only the gradient is new."""
    model, x, target, u, _ = layer
    curvature = uncentred("explicit", decay=0, relative_damping=False)
    opt = seng.SENG(
        model,
        lr=0.1,
        momentum=0.0,
        damping=LAM,
        recipe="paper",
        refresh_every=3,
        curvature=curvature,
    )
    for step in range(5):
        u = naive.per_sample_gradients(model, x, target)
        if step % 3 == 0:
            M = naive.fisher(u)
        before = model.weight.detach().clone()
        opt.zero_grad()
        naive.loss_of(model(x), target).backward()
        opt.step()
        want = naive.dense_direction(M, u.mean(0), LAM)
        torch.testing.assert_close(
            (before - model.weight.detach()).flatten(), 0.1 * want
        )


@pytest.mark.parametrize("k", range(1, 7))
def test_merged_truncation_is_within_its_bound(U, k):
    """DESIGN §4: ‖d − d̂‖ ≤ σ²_{k+1}/(σ²_{k+1} + λ)·‖g‖/λ with an exact V_k."""
    values = torch.linalg.eigvalsh(U.gram()).flip(0)
    tail = float(values[k]) if k < RHO else 0.0
    for _ in range(10):
        g = torch.randn(U.n)
        error = (direction(U, g, "merged", rank=k) - direction(U, g)).norm()
        assert (
            error <= tail / (tail + LAM) * g.norm() / LAM * (1 + 1e-9) + 1e-12
        )


def test_implicit_direction_error_falls_with_the_rank(U, g):
    exact = direction(U, g)
    errors = [
        naive.relative_error(direction(U, g, "implicit", rank=r), exact)
        for r in range(1, KAPPA + 1)
    ]
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 1e-12


def test_the_papers_recipe_and_sgds_agree_at_constant_damping(layer):
    model, x, target, _, _ = layer
    results = []
    for recipe, lr, decay in (
        ("paper", 0.03, 0.01),
        ("sgd", 0.03 / LAM, 0.01 * LAM),
    ):
        copy = nn.Linear(N_A, N_G, bias=False)
        copy.load_state_dict(model.state_dict())
        curvature = uncentred(decay=0, relative_damping=False, rank=100)
        opt = seng.SENG(
            copy,
            lr=lr,
            weight_decay=decay,
            damping=LAM,
            recipe=recipe,
            curvature=curvature,
            refresh_every=2,
        )
        for _ in range(6):
            opt.zero_grad()
            naive.loss_of(copy(x), target).backward()
            opt.step()
        results.append(copy.weight.detach())
    torch.testing.assert_close(*results)


def test_explicit_columns_are_what_the_implicit_form_means(U):
    assert isinstance(U.explicit(), Explicit)
    torch.testing.assert_close(U.explicit().gram(), U.gram())
