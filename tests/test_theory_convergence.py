"""The studies of Theorems 1 and 2: that their claims hold in short, and that what they are made of is right."""

import math
from dataclasses import replace

import pytest
import torch

import seng
from seng.lab.theory import descent, ntk, walk, wide
from seng.linalg.numerics import top
from seng.linalg.sketch import CountSketch, Gaussian, Rows
from seng.metrics.woodbury import LowRankState


@pytest.mark.parametrize(
    "study", [descent.STUDY, ntk.STUDY], ids=lambda study: study.name
)
def test_claims_hold(study):
    outcome = study.run(lambda line: None, True)
    assert outcome.claims
    assert [
        f"{claim.words}: {claim.measured}"
        for claim in outcome.claims
        if not claim.holds
    ] == []


# Theorem 2


@pytest.fixture
def net() -> wide.Network:
    return wide.network(24, 3)


def outputs(net: wide.Network, W: torch.Tensor) -> torch.Tensor:
    """f(x) = aᵀφ(Wx)/√m, as the theorem prints it."""
    return torch.relu(net.X @ W.T) @ net.a / math.sqrt(len(net.a))


def dense(net: wide.Network) -> torch.Tensor:
    """J (N, n), by automatic differentiation."""
    return torch.func.jacrev(lambda W: outputs(net, W))(net.W).flatten(1)


def test_jacobian_and_residual_are_the_networks(net):
    U = net.jacobian(net.W)
    torch.testing.assert_close(
        U.explicit().U.T, dense(net), rtol=1e-12, atol=1e-14
    )
    torch.testing.assert_close(
        net.residual(net.W, U),
        outputs(net, net.W) - net.y,
        rtol=1e-12,
        atol=1e-14,
    )


def test_network_is_the_theorems(net):
    torch.testing.assert_close(net.X.norm(dim=1), torch.ones(wide.SAMPLES))
    assert set(net.a.tolist()) == {-1.0, 1.0}
    assert float(wide.network(2000, 0).W.std()) == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("damping", [1.0, 1e-2, 1e-5])
def test_the_solve_is_the_dense_one(net, damping):
    U, J = net.jacobian(net.W), dense(net)
    r = net.residual(net.W, U)
    expected = torch.linalg.solve(
        J.T @ J + damping * torch.eye(J.shape[1]), J.T @ r
    )
    K = U.gram()
    largest = top(K[None])[0]
    state = LowRankState(U, seng.sketch.Identity(), K, largest, relative=False)
    d = state.at(damping)(U.mv(r)) / damping
    assert float((d - expected).norm() / expected.norm()) <= 1e-9
    ours = wide.direction(U, r, None, torch.Generator(), damping)
    torch.testing.assert_close(ours, d, rtol=0, atol=0)


@pytest.mark.parametrize(
    "sketch",
    [Rows(150), CountSketch(150), Gaussian(150)],
    ids=lambda s: type(s).__name__,
)
def test_sketched_direction_is_the_papers(net, sketch):
    """d = Jᵀ(λI + JΩᵀΩJᵀ)⁻¹(f − y)."""
    U, J, damping = net.jacobian(net.W), dense(net), 1e-4
    r = net.residual(net.W, U)
    omega = sketch.draw(U, torch.Generator().manual_seed(5))(
        torch.eye(J.shape[1])
    )  # (q, n)
    M = J @ omega.T @ omega @ J.T
    expected = J.T @ torch.linalg.solve(damping * torch.eye(len(M)) + M, r)
    d = wide.direction(U, r, sketch, torch.Generator().manual_seed(5), damping)
    assert float((d - expected).norm() / expected.norm()) <= 1e-9


def test_sketched_speed_is_that_of_wishart_matrices():
    """E‖(I − αW⁻¹)v‖² by drawing W = ZᵀZ/q."""
    q, alpha, draws = 200, 0.25, 400
    Z = torch.randn(
        draws,
        q,
        wide.SAMPLES,
        generator=torch.Generator().manual_seed(0),
        dtype=torch.float64,
    )
    inverse = torch.linalg.inv(Z.mT @ Z / q)
    squares = (torch.eye(wide.SAMPLES) - alpha * inverse).square().sum(
        (1, 2)
    ) / wide.SAMPLES
    assert (1 - math.sqrt(float(squares.mean()))) / alpha == pytest.approx(
        wide.sketched_speed(q, alpha), abs=3e-3
    )


def test_embedding_error_is_that_of_a_basis(net):
    U, sketch = net.jacobian(net.W), Rows(150)
    N = torch.linalg.qr(U.explicit().U)[0]
    sketched = sketch.draw(U, torch.Generator().manual_seed(0))(N)
    expected = torch.linalg.matrix_norm(
        sketched.T @ sketched - torch.eye(N.shape[1]), 2
    )
    assert wide.embedding_error(net, sketch) == pytest.approx(
        float(expected), rel=1e-8
    )


def test_narrow_network_breaks_the_claims_of_the_wide_one():
    """The verdicts can be no."""
    net = wide.network(8, 0)
    traces = {alpha: [wide.descend(net, alpha)] for alpha in ntk.ALPHAS}
    assert not any(claim.holds for claim in ntk._exact_claims(traces))
    assert ntk.smallest_width({8: traces[0.25]}) is None


# Theorem 1


def test_gradient_and_loss_are_the_models():
    given = walk.problem(0)
    model, trained = walk.network(given)
    given.losses(model(given.X), given.y).mean().backward()
    g = torch.cat(
        [trained.weight.grad, trained.bias.grad[:, None]], 1
    ).flatten()
    torch.testing.assert_close(
        given.gradient(given.start), g, rtol=1e-12, atol=1e-15
    )
    auto = torch.func.grad(given.loss)(given.start)
    torch.testing.assert_close(auto.flatten(), g, rtol=1e-12, atol=1e-15)


def test_problem_has_what_the_bound_on_its_hessian_rests_on():
    given = walk.problem(0)
    ones = torch.cat([given.X, torch.ones(walk.SAMPLES, 1)], 1)
    torch.testing.assert_close(
        ones.T @ ones / walk.SAMPLES,
        torch.eye(walk.INPUTS + 1),
        rtol=1e-10,
        atol=1e-10,
    )
    torch.testing.assert_close(
        given.A @ given.A.T, torch.eye(walk.HIDDEN), rtol=1e-10, atol=1e-10
    )
    generator = torch.Generator().manual_seed(0)
    for size in (0.1, 1.0, 5.0):
        theta = size * torch.randn(given.start.shape, generator=generator)
        assert float(given.curvature(theta).abs().max()) <= walk.LIPSCHITZ


def test_rule_keeps_the_sums_of_the_theorem():
    assert {name for name, rule in descent.RULES.items() if rule.summable} == {
        "growing",
        "both",
        "beyond",
    }
    for rule in descent.RULES.values():  # from one doubling of k to the next, the sums' tails shrink or grow as powers say
        sigma = [rule.step_size(k) / rule.batch(k) for k in (10**6, 2 * 10**6)]
        assert math.log2(sigma[1] / sigma[0]) == pytest.approx(
            -(rule.p + rule.s), abs=0.01
        )
        assert (
            rule.step_size(0) == pytest.approx(rule.alpha)
            and rule.batch(0) == walk.FIRST
        )


def test_a_step_is_the_papers():
    """θ ← θ − α(λI + UUᵀ)⁻¹g, where U has samples of its own: the walk's draws, again."""
    given, n = walk.problem(0), walk.HIDDEN * (walk.INPUTS + 1)
    rule = replace(descent.RULES["growing"], rows=n)  # no sketch
    path = walk.walk(given, rule, 1, seed=1)
    generator = torch.Generator().manual_seed(1)
    own = torch.randint(walk.SAMPLES, (rule.samples,), generator=generator)
    chosen = torch.randint(walk.SAMPLES, (rule.batch(0),), generator=generator)

    def gradient(i: torch.Tensor) -> torch.Tensor:
        return torch.func.grad(
            replace(given, X=given.X[i], y=given.y[i]).loss
        )(given.start).flatten()

    U = torch.stack([gradient(i[None]) for i in own], 1) / rule.samples**0.5
    d = torch.linalg.solve(
        rule.damping * torch.eye(n) + U @ U.T, gradient(chosen)
    )
    torch.testing.assert_close(
        path.end[0].flatten(),
        given.start.flatten() - rule.alpha * d,
        rtol=1e-9,
        atol=1e-12,
    )
    assert path.tops[0] == pytest.approx(
        float(torch.linalg.matrix_norm(U, 2)) ** 2
    )
    assert path.etas[0] < 1e-12 and path.epsilons[0] < 1e-12


def test_walk_is_repeatable_and_sums_up():
    given, rule = walk.problem(0), descent.RULES["both"]
    path, again = (walk.walk(given, rule, 5, seed=1) for _ in range(2))
    torch.testing.assert_close(again.end[0], path.end[0], rtol=0, atol=0)
    assert path.norms[0] == pytest.approx(
        float(given.gradient(given.start).norm())
    )
    assert path.sums[-1] == pytest.approx(
        sum(rule.step_size(k) * norm**2 for k, norm in enumerate(path.norms))
    )
    assert max(path.etas) > 0.1  # the sketch is one


def test_noise_breaks_the_claims_of_growing_batches():
    """The verdicts can be no."""
    size = descent.Size(400, 8, 0.3)
    path = walk.walk(
        walk.problem(0), descent.RULES["constant"], size.steps, seed=1
    )
    noisy = descent.seen(descent.RULES["constant"], path)
    found = dict.fromkeys(descent.RULES, noisy)
    assert not any(claim.holds for claim in descent._obeying(found, size))
    assert not descent._contrast(found, size).holds
    assert not any(claim.holds for claim in descent._beyond(found, size))
