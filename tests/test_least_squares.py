"""seng.LeastSquares: Jacobians against dense ones, directions against dense solves, damping, memory, and what is refused."""

import math
import warnings
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.func import functional_call, hessian, jacrev, jvp, vmap
from torch.testing import assert_close

import seng
from seng.linalg.operators import Explicit
from seng.metrics.woodbury import LowRankState
from seng.residuals.jacobian import TermJacobian
from seng.residuals.normal import Linearization, NormalEquations, linearize
from seng.residuals.terms import Parameters, Term

LARGE = 2**30


class Custom(nn.Module):
    """No layer that the library knows, a buffer, a frozen parameter and a parameter that is used twice."""

    def __init__(self):
        super().__init__()
        self.core = nn.Parameter(torch.randn(3, 4, 2))
        self.tied = nn.Parameter(torch.randn(4, 4))
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.fixed = nn.Parameter(torch.randn(2), requires_grad=False)
        self.register_buffer("shift", torch.randn(4))

    def forward(self, x):
        h = torch.einsum("bi,ijk->bjk", x, self.core) + self.shift[:, None]
        h = torch.einsum("bjk,jl,lm->bmk", h.sin(), self.tied, self.tied.T)
        return self.scale * (h @ self.fixed)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


class Last(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRU(2, 3, batch_first=True)

    def forward(self, x):
        return self.cell(x)[0][:, -1]


def tanh(*widths):
    layers = [
        layer
        for i, o in pairwise(widths)
        for layer in (nn.Linear(i, o), nn.Tanh())
    ]
    return nn.Sequential(*layers[:-1])


def flat(model, x):
    return model(x).flatten()


def by_output(model, x):
    return model(x).flatten(1).T.flatten()


def mean(model, x):
    return flat(model, x) / len(x) ** 0.5


def laplacian(model, x):
    return (
        vmap(hessian(lambda p: model(p[None]).sum()))(x)
        .diagonal(dim1=-2, dim2=-1)
        .sum(-1)
    )


def forward_laplacian(model, x):
    total = 0
    for i in range(x.shape[1]):
        e = torch.zeros_like(x).index_fill(1, torch.tensor(i), 1)
        total = (
            total
            + jvp(
                lambda y, e=e: jvp(lambda z: model(z).sum(1), (y,), (e,))[1],
                (x,),
                (e,),
            )[1]
        )
    return total


def autograd_laplacian(model, x):
    x = x.detach().requires_grad_()
    (g,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return sum(
        torch.autograd.grad(g[:, i].sum(), x, create_graph=True)[0][:, i]
        for i in range(x.shape[1])
    )


def coupled(model, x):
    r = flat(model, x)
    return r - r.mean()


def embedding():
    return nn.Sequential(nn.Embedding(7, 3), nn.Flatten(), nn.Linear(6, 2))


def convolution():
    return nn.Sequential(
        nn.Conv2d(1, 2, 3),
        nn.GELU(),
        nn.Flatten(),
        nn.LayerNorm(8),
        nn.Linear(8, 3),
    )


def batch_norm():
    return nn.Sequential(
        nn.Linear(3, 4),
        nn.BatchNorm1d(4, track_running_stats=False),
        nn.Tanh(),
        nn.Linear(4, 1),
    )


CASES = {  # model, residual, the shape of a sample, whether it separates
    "network": (lambda: tanh(3, 5, 1), flat, (3,), True),
    "several-outputs": (lambda: tanh(3, 4, 2), flat, (3,), True),
    "by-output": (lambda: tanh(3, 4, 2), by_output, (3,), True),
    "mean": (lambda: tanh(3, 4, 2), mean, (3,), True),
    "custom": (Custom, flat, (3,), True),
    "tied": (Tied, flat, (3,), True),
    "weight-norm": (
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)),
        flat,
        (3,),
        True,
    ),
    "recurrent": (lambda: Last(), flat, (4, 2), False),
    "attention": (
        lambda: nn.TransformerEncoderLayer(
            4, 2, 6, dropout=0.0, batch_first=True
        ),
        flat,
        (3, 4),
        True,
    ),
    "embedding": (embedding, flat, (2,), True),
    "convolution": (convolution, flat, (1, 4, 4), True),
    "laplacian": (lambda: tanh(2, 5, 1), laplacian, (2,), True),
    "forward-laplacian": (
        lambda: tanh(2, 5, 1),
        forward_laplacian,
        (2,),
        True,
    ),
    "autograd-laplacian": (
        lambda: tanh(2, 5, 1),
        autograd_laplacian,
        (2,),
        False,
    ),
    "coupled": (lambda: tanh(3, 5, 1), coupled, (3,), False),
    "batch-norm": (batch_norm, flat, (3,), False),
}


@pytest.fixture(params=CASES, ids=list(CASES))
def problem(request):
    make, residual, shape, separates = CASES[request.param]
    x = (
        torch.randint(7, (6, *shape))
        if request.param == "embedding"
        else torch.randn(6, *shape)
    )
    return make(), residual, x, separates


def dense(model, residual, *batch):
    """J (m, n), by plain backward passes through plain copies of the parameters, row by row."""
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    leaves = {
        name: p.detach().clone().requires_grad_()
        for name, p in model.named_parameters()
        if p.requires_grad
    }

    class Swapped:
        def __call__(self, x):
            return functional_call(model, leaves, (x,))

    r = residual(Swapped(), *batch)
    rows = [
        torch.autograd.grad(
            one,
            [leaves[n] for n in names],
            retain_graph=True,
            materialize_grads=True,
        )
        for one in r
    ]
    return r.detach(), torch.stack(
        [torch.cat([g.flatten() for g in row]) for row in rows]
    )


def dense_of(function, model):
    """r and J of a function of the parameters, by jacrev."""
    leaves = {name: p.detach() for name, p in model.named_parameters()}
    blocks = jacrev(function)(leaves)
    return function(leaves), torch.cat(
        [b.flatten(1) for b in blocks.values()], 1
    ).detach()


def linear(model, residual, *batch, memory=LARGE, separate=None):
    parameters = Parameters(model)
    functions = residual if isinstance(residual, list) else [residual]
    batches = (
        [b if isinstance(b, tuple) else (b,) for b in batch]
        if isinstance(residual, list)
        else [batch]
    )
    terms = [Term("residual", f, parameters, separate) for f in functions]
    return linearize(terms, batches, memory)


def jacobian(found):
    """J as a whole."""
    return found.jacobian(slice(0, found.n))


@pytest.mark.parametrize("separate", [None, False])
def test_jacobian_equals_the_dense_one(problem, separate):
    model, residual, x, separates = problem
    r, J = dense(model, residual, x)
    found = linear(model, residual, x, separate=separate)
    assert (found.parts[0].layout is not None) == (
        separates and separate is None
    )
    assert_close(found.r, r)
    assert_close(jacobian(found), J)


def test_products_equal_those_of_the_dense_jacobian(problem):
    model, residual, x, _ = problem
    found = linear(model, residual, x)
    _, J = dense(model, residual, x)
    c, z = torch.randn(len(J)), torch.randn(J.shape[1])
    assert_close(found.mv(c), J.T @ c)
    assert_close(found.rmv(z), J @ z)


def test_chunks_change_nothing(problem, monkeypatch):
    model, residual, x, _ = problem
    found = linear(model, residual, x)
    n = found.n
    whole = jacobian(found)
    for part in found.parts:
        part.room = 1
    assert len(list(found.columns())) > 1
    assert_close(jacobian(found), whole)
    cuts = [0, 1, n // 3, n // 2 + 1, n]
    assert_close(
        torch.cat([found.jacobian(slice(a, b)) for a, b in pairwise(cuts)], 1),
        whole,
    )


def test_residuals_that_squeeze_their_samples_separate():
    model, x = tanh(3, 4, 1), torch.randn(6, 3)
    found = linear(
        model, lambda model, x: model(x).squeeze(), x, separate=True
    )
    assert_close(jacobian(found), dense(model, flat, x)[1])


def test_a_batch_that_is_not_finite_tells_nothing_about_separation():
    model, x = tanh(3, 4, 1), torch.randn(6, 3)
    parameters = Parameters(model)
    term = Term("residual", flat, parameters, None)
    assert linearize([term], [(x * math.nan,)], LARGE).parts[0].layout is None
    assert linearize([term], [(x,)], LARGE).parts[0].layout is not None


def test_several_terms_follow_each_other():
    model, x, y, t = (
        tanh(2, 4, 2),
        torch.randn(5, 2),
        torch.randn(3, 2),
        torch.randn(3, 2),
    )
    found = linear(
        model, [flat, lambda model, y, t: (model(y) - t).flatten()], x, (y, t)
    )
    parts = [
        dense(model, flat, x),
        dense(model, lambda model, y: (model(y) - t).flatten(), y),
    ]
    J = torch.cat([J for _, J in parts])
    c, z = torch.randn(len(J)), torch.randn(J.shape[1])
    assert_close(found.r, torch.cat([r for r, _ in parts]))
    assert_close(jacobian(found), J)
    assert_close(found.mv(c), J.T @ c)
    assert_close(found.rmv(z), J @ z)


@pytest.mark.parametrize("separate", [None, False])
@pytest.mark.parametrize("samples", [4, 40])
def test_a_term_need_not_depend_on_every_parameter(separate, samples):
    model, x = tanh(3, 4, 2), torch.randn(samples, 3).requires_grad_()

    def first_layer(model, x):
        return model[0](x).flatten()

    found = linear(model, first_layer, x, separate=separate)
    _, J = dense_of(
        lambda leaves: (x @ leaves["0.weight"].T + leaves["0.bias"]).flatten(),
        model,
    )
    assert_close(jacobian(found), J)
    cuts = [
        0,
        7,
        15,
        18,
        20,
        found.n,
    ]  # some blocks lie in the second layer alone
    slabs = [found.jacobian(slice(a, b)) for a, b in pairwise(cuts)]
    assert_close(torch.cat(slabs, 1), J)
    z = torch.randn(found.n)
    assert_close(found.rmv(z), J @ z)


def test_few_parameters_are_differentiated_by_columns(monkeypatch):
    t = torch.linspace(0, 1, 50)
    values = {"a": torch.tensor(1.5), "b": torch.randn(2, 2)}

    def residual(p):
        return p["a"] * torch.exp(-t * p["b"][0, 1]) + p["b"].sum() * t.sin()

    parameters = Parameters(values)
    found = linearize(
        [Term("residual", residual, parameters, None)], [()], LARGE
    )
    expected = jacrev(residual)(values)
    called = []
    transposed = TermJacobian._transposed
    monkeypatch.setattr(
        TermJacobian,
        "_transposed",
        lambda self, *args: called.append(1) or transposed(self, *args),
    )
    assert_close(
        jacobian(found),
        torch.cat([expected["a"][:, None], expected["b"].flatten(1)], 1),
    )
    assert called
    found.parts[0].room = 1  # no room for them: by rows
    assert_close(
        jacobian(found),
        torch.cat([expected["a"][:, None], expected["b"].flatten(1)], 1),
    )
    assert len(called) == 1


def test_a_residual_that_depends_on_the_size_of_its_batch_is_told_by_its_factor():
    model = tanh(3, 4, 2)
    assert linear(model, mean, torch.randn(9, 3)).parts[
        0
    ].layout.factor == pytest.approx(1 / 3)


def test_separation_is_looked_at_again_in_another_mode():
    model = batch_norm().eval()
    model[1] = nn.BatchNorm1d(4).eval()
    parameters = Parameters(model)
    term, x = Term("residual", flat, parameters, None), torch.randn(6, 3)
    assert linearize([term], [(x,)], LARGE).parts[0].layout is not None
    model.train()
    found = linearize([term], [(x,)], LARGE)
    assert found.parts[0].layout is None
    assert_close(jacobian(found), dense(model, flat, x)[1])


def test_separation_is_still_seen_where_residuals_are_differences_of_large_numbers():
    model, x = tanh(2, 64, 64, 1), torch.rand(50, 2)
    target = flat(model, x).detach() + 1e-17
    found = linear(model, lambda model, x, y: flat(model, x) - y, x, target)
    assert found.r.abs().max() < 1e-15
    assert found.parts[0].layout is not None


def spectral(m, n, condition, seed=0):
    """J with singular values from 1 down to 1/condition."""
    g = torch.Generator().manual_seed(seed)
    k = min(m, n)
    left, right = (
        torch.linalg.qr(torch.randn(size, k, generator=g)).Q for size in (m, n)
    )
    return (left * torch.logspace(0, -math.log10(condition), k)) @ right.T


SHAPES = [(5, 30), (20, 20), (300, 20), (200, 150), (1, 4), (4, 1)]


@pytest.mark.parametrize("m, n", SHAPES)
@pytest.mark.parametrize("lam", [1e-6, 1e-2, 10.0])
def test_direction_equals_the_dense_solve(m, n, lam):
    J, r = torch.randn(m, n), torch.randn(m)
    d = NormalEquations(Explicit(J.T, (1, n, 1))).at(lam)(r)
    whole, zeros = (
        torch.cat([J, lam**0.5 * torch.eye(n)]),
        torch.zeros(n),
    )  # (JᵀJ + λI)⁻¹Jᵀr without its squared condition
    expected = torch.linalg.lstsq(
        whole, torch.cat([r, zeros])[:, None]
    ).solution[:, 0]
    assert (d - expected).norm() < 1e-9 * expected.norm()


@pytest.mark.parametrize("m, n", [(60, 120), (120, 60), (80, 80)])
def test_direction_is_as_accurate_as_the_condition_of_the_jacobian_allows(
    m, n
):
    """Without the refinement the error is about 1e-5: the Gram squares the condition."""
    J, lam = spectral(m, n, 1e7), 1e-12
    r = torch.randn(m)
    U, S, Vt = torch.linalg.svd(J, full_matrices=False)
    expected = Vt.T @ (S / (S.square() + lam) * (U.T @ r))
    d = NormalEquations(Explicit(J.T, (1, n, 1))).at(lam)(r)
    assert (d - expected).norm() < 1e-8 * expected.norm()


def test_mean_eigenvalue_is_that_of_the_smaller_gram():
    for m, n in SHAPES:
        J = torch.randn(m, n)
        assert NormalEquations(Explicit(J.T, (1, n, 1))).mean == pytest.approx(
            float(J.square().sum()) / min(m, n)
        )


def fitted(model, residual, *batches, **options):
    fit = seng.LeastSquares(model, residual, **options)
    loss = fit.step(*batches)
    return fit, loss


def theta(model):
    return torch.cat(
        [
            p.detach().flatten().clone()
            for p in model.parameters()
            if p.requires_grad
        ]
    )


@pytest.mark.parametrize("samples", [4, 60])
def test_a_step_is_the_formula(samples):
    model, x = tanh(3, 5, 2), torch.randn(samples, 3)
    r, J = dense(model, flat, x)
    lam = 0.3 * float(J.square().sum()) / min(J.shape)
    before = theta(model)
    fit, loss = fitted(model, flat, x, damping=0.3, adapt=False)
    assert loss == pytest.approx(0.5 * float(r @ r))
    assert_close(
        before - theta(model),
        torch.linalg.solve(J.T @ J + lam * torch.eye(J.shape[1]), J.T @ r),
    )
    assert fit.report.lam == pytest.approx(lam)
    assert fit.report.after == pytest.approx(
        0.5 * float(flat(model, x).detach().square().sum())
    )


@pytest.mark.parametrize("samples", [4, 60])
def test_momentum_is_the_formula(samples):
    model = tanh(3, 5, 2)
    fit = seng.LeastSquares(
        model, flat, damping=0.3, adapt=False, momentum=0.9
    )
    last = None
    for _ in range(3):
        x = torch.randn(samples, 3)
        r, J = dense(model, flat, x)
        lam = 0.3 * float(J.square().sum()) / min(J.shape)
        pushed = torch.zeros(J.shape[1]) if last is None else 0.9 * last
        last = pushed + J.T @ torch.linalg.solve(
            J @ J.T + lam * torch.eye(len(r)), r - J @ pushed
        )
        before = theta(model)
        fit.step(x)
        assert_close(before - theta(model), last)


def test_acceleration_is_the_formula():
    """Against the exact second derivative of r along d; a parabola's is seen exactly by the finite difference."""
    W = torch.randn(6, 4)

    def residual(p):
        z = W @ p["x"]
        return 0.1 * z.square() + z

    values = {"x": 0.5 * torch.randn(4)}  # and all residuals are 0 at 0
    x = values["x"].clone()
    J, r = jacrev(lambda x: residual({"x": x}))(x), residual({"x": x})
    lam = 1e-6 * float(J.square().sum()) / 4
    solve = torch.linalg.inv(J.T @ J + lam * torch.eye(4)) @ J.T
    d = solve @ r
    curvature = 0.2 * (W @ d).square()
    fit, _ = fitted(values, residual, damping=1e-6)
    assert fit.report.tries == 1
    assert_close(x - values["x"], d + 0.5 * solve @ curvature)


def test_line_search_takes_the_best_length():
    model, x = tanh(1, 6, 1), torch.randn(8, 1)
    fit, _ = fitted(
        model,
        lambda model, x: 30 * flat(model, x) - torch.sin(9 * x[:, 0]),
        x,
        damping=1e-9,
        line_search=True,
    )
    assert fit.report.accepted and fit.report.length < 1


def test_a_sketch_as_large_as_the_parameters_is_exact():
    x = torch.randn(5, 3)
    ends = []
    for sketch in (None, seng.sketch.CountSketch(100)):
        torch.manual_seed(0)
        model = tanh(3, 5, 2)
        fitted(model, flat, x, sketch=sketch)
        ends.append(theta(model))
    assert torch.equal(*ends)


SKETCHES = [
    seng.sketch.CountSketch(40),
    seng.sketch.Gaussian(40),
    seng.sketch.Rows(40),
    seng.sketch.LeverageRows(40),
]


@pytest.mark.parametrize("sketch", SKETCHES, ids=lambda s: type(s).__name__)
def test_sketched_direction_is_the_papers(sketch):
    J, r, lam = torch.randn(12, 70), torch.randn(12), 0.5
    U = Explicit(J.T, (1, 70, 1))
    normal = NormalEquations(U, sketch, torch.Generator().manual_seed(3))
    Omega = sketch.draw(U, torch.Generator().manual_seed(3))(torch.eye(70))
    Xi, g = Omega @ J.T, J.T @ r
    b = torch.linalg.solve(lam * torch.eye(12) + Xi.T @ Xi, Xi.T @ (Omega @ g))
    assert_close(normal.at(lam)(r), (g - J.T @ b) / lam)
    K = Xi.T @ Xi
    state = LowRankState(
        U,
        sketch.draw(U, torch.Generator().manual_seed(3)),
        K,
        torch.linalg.eigvalsh(K)[-1],
        relative=False,
    )
    assert_close(
        normal.at(lam)(r), state.at(lam)(g) / lam
    )  # the library's own


def test_sketched_fit_learns():
    model, x = tanh(1, 12, 12, 1), torch.linspace(-1, 1, 20)[:, None]
    fit = seng.LeastSquares(
        model,
        lambda model, x: flat(model, x) - torch.sin(3 * x[:, 0]),
        sketch=seng.sketch.Gaussian(100),
    )
    losses = [fit.step(x) for _ in range(40)]
    assert losses[-1] < 1e-2 * losses[0]


def rosenbrock(p):
    return torch.stack([10 * (p["x"][1] - p["x"][0] ** 2), 1 - p["x"][0]])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"acceleration": False},
        {"line_search": True},
        {"damping": 1e-8},
        {"damping": 100.0},
    ],
)
def test_rosenbrock(options):
    values = {"x": torch.tensor([-1.2, 1.0])}
    fit = seng.LeastSquares(values, rosenbrock, **options)
    for _ in range(60):
        if fit.step() < 1e-24:
            break
    assert_close(values["x"], torch.ones(2))


def test_a_linear_problem_takes_a_few_steps():
    A, b = torch.randn(30, 8), torch.randn(30)
    values = {"x": torch.zeros(8)}
    fit = seng.LeastSquares(values, lambda p, A, b: A @ p["x"] - b)
    for _ in range(2):
        fit.step(A, b)
    expected = torch.linalg.lstsq(A, b[:, None]).solution[:, 0]
    assert (values["x"] - expected).norm() < 1e-8 * expected.norm()
    assert fit.damping < 1e-8


def test_the_damping_falls_where_steps_are_good_and_rises_where_they_are_not():
    values = {"x": torch.tensor([-1.2, 1.0])}
    fit = seng.LeastSquares(
        values, rosenbrock, damping=1e-12, acceleration=False
    )
    fit.step()
    assert (
        fit.report.tries > 1
        and fit.report.accepted
        and fit.report.damping > 1e-12
    )
    while fit.step() > 1e-20:
        pass
    assert fit.damping < 1e-6


def test_units_of_the_residuals_change_nothing():
    x, ends = torch.randn(8, 2), []
    for unit in (1.0, 2.0**20):
        torch.manual_seed(0)
        model = tanh(2, 6, 1)
        fit = seng.LeastSquares(
            model,
            lambda model, x, unit=unit: (
                unit * (flat(model, x) - x[:, 0].sin())
            ),
        )
        for _ in range(5):
            fit.step(x)
        ends.append(theta(model))
    assert_close(*ends, rtol=1e-6, atol=1e-6)


def test_a_step_that_cannot_help_is_refused_and_leaves_the_parameters():
    values = {"x": torch.tensor([0.3, -0.4])}
    x = values["x"].clone()

    def residual(p):  # its gradient is a lie: no step along it lowers the loss
        return p["x"].detach().square() + 1 + (p["x"] - p["x"].detach())

    fit = seng.LeastSquares(values, residual, damping=1e-3)
    loss = fit.step()
    assert torch.equal(values["x"], x)
    assert (
        not fit.report.accepted
        and fit.report.after == loss
        and fit.report.length == 0
        and fit.report.tries > 5
    )
    assert 1e-3 <= fit.damping <= 1e-1  # the next batch may be another matter


@pytest.mark.parametrize("adapt", [True, False])
def test_a_gram_without_a_factorization_is_solved_with_a_larger_damping(adapt):
    A = 1e4 * torch.ones(6, 1) @ torch.ones(1, 9) + 1e-9 * torch.randn(6, 9)
    values = {"x": torch.zeros(9)}
    fit = seng.LeastSquares(
        values, lambda p: A @ p["x"] - 1, damping=1e-18, adapt=adapt
    )
    assert NormalEquations(Explicit(A.T, (1, 9, 1))).at(1e-18) is None
    fit.step()
    assert (
        fit.report.accepted
        and fit.report.tries > 1
        and fit.report.damping > 1e-18
    )
    assert fit.report.after < 1e-6 * fit.report.loss
    assert adapt or fit.damping == 1e-18


def test_at_a_minimum_a_step_is_refused_at_once():
    values = {"x": torch.ones(2)}
    fit = seng.LeastSquares(values, rosenbrock)
    assert (
        fit.step() == 0 and not fit.report.accepted and fit.report.tries == 1
    )
    assert torch.equal(values["x"], torch.ones(2))


@pytest.mark.parametrize(
    "what, residual",
    [
        ("residuals", lambda p: p["x"].log()),
        ("residuals", lambda p: p["x"] * torch.inf),
        ("Jacobian", lambda p: (p["x"] - p["x"].detach()).abs().sqrt() + 1),
    ],
)
def test_what_is_not_finite_is_refused(what, residual):
    values = {"x": torch.tensor([-1.0, 2.0])}
    x = values["x"].clone()
    fit = seng.LeastSquares(values, residual)
    with pytest.warns(UserWarning, match=f"the {what} (is|are) not finite"):
        fit.step()
    assert not fit.report.accepted and torch.equal(values["x"], x)
    fit.step()  # said once


def test_a_trial_that_is_not_finite_is_shortened():
    values = {"x": torch.tensor([1e-3])}
    fit = seng.LeastSquares(
        values, lambda p: p["x"].log() - math.log(2), damping=1e-6
    )
    for _ in range(60):
        fit.step()
    assert_close(values["x"], torch.tensor([2.0]))


def test_the_model_is_never_touched_by_trials():
    model, x = tanh(2, 4, 1), torch.randn(5, 2)
    seen = []

    def residual(model, x):
        seen.append(model)
        if len(seen) > 6:
            raise KeyboardInterrupt
        return flat(model, x)

    before = theta(model)
    fit = seng.LeastSquares(model, residual)
    with pytest.raises(KeyboardInterrupt):
        for _ in range(9):
            fit.step(x)
            before = theta(model)
    assert torch.equal(theta(model), before)
    assert all(isinstance(p, nn.Parameter) for p in model.parameters())
    assert seen[0] is model


def memory_of(m, n, slabs):
    """A budget for the Gram and a few slabs of J, and not for J."""
    return 3 * min(m, n) ** 2 * 8 + slabs * 8 * m * 4


@pytest.mark.parametrize("samples, outputs", [(7, 2), (60, 2)])
@pytest.mark.parametrize("residual", [flat, by_output, coupled])
def test_memory_paths_are_the_same(samples, outputs, residual):
    model, x = tanh(3, 6, outputs), torch.randn(samples, 3)
    held = linear(
        model, residual, x, separate=False if residual is coupled else None
    )
    m, n = held.samples, held.n
    streamed = linear(
        model,
        residual,
        x,
        memory=memory_of(m, n, 5),
        separate=False if residual is coupled else None,
    )
    U, V = held.operator(), streamed.operator()
    assert isinstance(U, Explicit) and isinstance(V, Linearization)
    assert V.width < n
    assert_close(
        NormalEquations(U).at(1e-3)(held.r),
        NormalEquations(V).at(1e-3)(held.r),
    )
    assert NormalEquations(U).mean == pytest.approx(NormalEquations(V).mean)
    if m < n:
        sketch = seng.sketch.CountSketch(30)
        dense_, slabs = (
            NormalEquations(W, sketch, torch.Generator().manual_seed(0)).at(
                0.1
            )(held.r)
            for W in (U, V)
        )
        assert_close(dense_, slabs)
        with pytest.raises(MemoryError, match="use CountSketch"):
            NormalEquations(V, seng.sketch.Rows(30), torch.Generator())
        with pytest.raises(MemoryError, match="use CountSketch"):
            NormalEquations(
                V, seng.sketch.KroneckerRows(30, 1), torch.Generator()
            )


def test_fits_within_a_budget_are_the_same():
    x, ends = torch.randn(9, 2), []
    for memory in (LARGE, memory_of(9, 41, 3)):
        torch.manual_seed(1)
        model = tanh(2, 10, 1)
        fit = seng.LeastSquares(
            model,
            lambda model, x: flat(model, x) - x[:, 0].sin(),
            memory=memory,
        )
        for _ in range(4):
            fit.step(x)
        ends.append(theta(model))
    assert_close(*ends)


def test_a_budget_that_is_too_small_is_refused_with_numbers():
    fit = seng.LeastSquares(tanh(2, 10, 1), flat, memory=1000)
    with pytest.raises(
        MemoryError,
        match=r"20 residuals and 41 parameters.*9\.4 KiB.*1000 B.*fewer samples",
    ):
        fit.step(torch.randn(20, 2))


@pytest.mark.parametrize(
    "options", [{"momentum": 0.8}, {"sketch": seng.sketch.CountSketch(20)}, {}]
)
def test_a_resumed_fit_goes_on_bit_for_bit(options, tmp_path):
    def residual(model, x):
        return flat(model, x) - torch.sin(4 * x[:, 0])

    def start():
        torch.manual_seed(2)
        model = tanh(1, 8, 1)
        return model, seng.LeastSquares(model, residual, **options)

    points = [torch.randn(12, 1) for _ in range(8)]
    model, fit = start()
    for x in points[:4]:
        fit.step(x)
    torch.save(
        {"model": model.state_dict(), "fit": fit.state_dict()},
        tmp_path / "state.pt",
    )
    ahead = [fit.step(x) for x in points[4:]]
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    other, again = start()
    other.load_state_dict(state["model"])
    again.load_state_dict(state["fit"])
    assert [again.step(x) for x in points[4:]] == ahead
    assert torch.equal(theta(model), theta(other))
    assert fit.steps == again.steps == 8 and fit.report == again.report


def test_states_of_others_are_refused():
    fit = seng.LeastSquares({"x": torch.zeros(2)}, rosenbrock)
    with pytest.raises(
        ValueError,
        match="has the state damping, growth, steps, last, generator",
    ):
        fit.load_state_dict({"damping": 1.0})
    with pytest.raises(
        ValueError, match="of 3 parameters, and the model has 2"
    ):
        fit.load_state_dict({**fit.state_dict(), "last": torch.zeros(3)})


def test_float32_is_fitted_in_float64_and_stays_float32():
    J = spectral(40, 12, 1e5)
    truth = torch.ones(12)
    b = J @ truth
    values = {"x": torch.zeros(12, dtype=torch.float32)}
    fit = seng.LeastSquares(values, lambda p: (J.float() @ p["x"]) - b.float())
    for _ in range(8):
        fit.step()
    assert values["x"].dtype == torch.float32
    assert (
        (values["x"] - truth).norm() < 0.05 * truth.norm()
    )  # a float32 Gram has errors of 1e-7, and its least eigenvalue is 1e-10


def test_fresh_points_may_differ_in_number():
    model = tanh(1, 8, 1)
    fit = seng.LeastSquares(
        model, [lambda m, x: flat(m, x) - x[:, 0].sin(), flat]
    )
    for count in (5, 9, 1, 30):
        fit.step(torch.randn(count, 1), torch.zeros(count + 1, 1))
    assert fit.report.accepted


def test_parameters_may_be_reached_by_name():
    """Inverse problems: a coefficient beside the network, as an attribute of the model."""
    model = tanh(1, 8, 1)
    model.register_parameter("kappa", nn.Parameter(torch.tensor(0.5)))
    x = torch.linspace(0, 1, 30)[:, None]

    def ode(model, x):  # u' = κu
        u, du = jvp(lambda x: model(x)[:, 0], (x,), (torch.ones_like(x),))
        return du - model.kappa * u

    def data(model, x):
        return model(x)[:, 0] - torch.exp(1.7 * x[:, 0])

    fit = seng.LeastSquares(model, [ode, data], separate=True)
    for _ in range(60):
        fit.step(x, x)
    assert abs(model.kappa.item() - 1.7) < 1e-3


def test_frozen_parameters_and_buffers_stay():
    model, x = Custom(), torch.randn(9, 3)
    fixed, shift = model.fixed.clone(), model.shift.clone()
    fit = seng.LeastSquares(model, flat)
    losses = [fit.step(x) for _ in range(5)]
    assert torch.equal(model.fixed, fixed) and torch.equal(model.shift, shift)
    assert losses[-1] < losses[0]


def test_poisson_to_five_digits():
    """The aim: −Δu = 2π² sin πx sin πy on the square, u = 0 on its border; and what acceleration is worth there."""
    x, t, test = torch.rand(300, 2), torch.rand(20), torch.rand(1000, 2)
    zero, one = torch.zeros(20), torch.ones(20)
    border = torch.cat(
        [
            torch.stack(side, 1)
            for side in ((t, zero), (t, one), (zero, t), (one, t))
        ]
    )

    def exact(x):
        return torch.sin(math.pi * x).prod(1)

    def pde(model, x):
        return (laplacian(model, x) + 2 * math.pi**2 * exact(x)) / len(
            x
        ) ** 0.5

    def boundary(model, x):
        return 10 * model(x)[:, 0] / len(x) ** 0.5

    errors = []
    for acceleration in (True, False):
        torch.manual_seed(0)
        model = tanh(2, 20, 20, 1)
        fit = seng.LeastSquares(
            model, [pde, boundary], acceleration=acceleration
        )
        for _ in range(100):
            fit.step(x, border)
        errors.append(
            float(
                (model(test)[:, 0] - exact(test)).detach().norm()
                / exact(test).norm()
            )
        )
    assert errors[0] < 1e-5
    assert errors[1] > 5 * errors[0]


def test_slow_residuals_are_told_of_once():
    model, x = tanh(2, 20, 1), torch.randn(150, 2)
    fit = seng.LeastSquares(model, autograd_laplacian)
    with pytest.warns(
        UserWarning,
        match="residual 'autograd_laplacian' is differentiated as a whole, 150 gradients.*torch.func",
    ):
        fit.step(x)
    fit.step(x)
    seng.LeastSquares(model, autograd_laplacian, separate=False).step(x)


def test_separate_true_is_a_promise():
    model, x = tanh(2, 4, 1), torch.randn(5, 2)
    seng.LeastSquares(model, laplacian, separate=True).step(x)
    with pytest.raises(
        ValueError,
        match="separate=True, but residual 'coupled' does not separate",
    ):
        seng.LeastSquares(model, coupled, separate=True).step(x)
    with pytest.raises(RuntimeError):  # torch's own words
        seng.LeastSquares(model, autograd_laplacian, separate=True).step(x)


def test_dropout_is_taken_as_a_whole():
    model = nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    found = linear(model, flat, torch.randn(6, 2))
    assert found.parts[0].layout is None


@pytest.mark.parametrize(
    "error, words, residual",
    [
        (
            ValueError,
            r"shape \(5, 1\).*must return a vector.*\.flatten\(\)",
            lambda model, x: model(x),
        ),
        (
            ValueError,
            r"shape \(\).*not the sum of their squares",
            lambda model, x: model(x).square().sum(),
        ),
        (TypeError, "returned float", lambda model, x: 1.0),
        (TypeError, "returned torch.int64", lambda model, x: torch.arange(5)),
        (
            TypeError,
            "returned torch.complex128",
            lambda model, x: flat(model, x) * 1j,
        ),
        (
            ValueError,
            "returned no residuals",
            lambda model, x: flat(model, x)[:0],
        ),
        (
            ValueError,
            "does not depend on the parameters",
            lambda model, x: x[:, 0],
        ),
        (
            ValueError,
            "does not depend on the parameters",
            lambda model, x: flat(model, x).detach(),
        ),
    ],
)
def test_residuals_that_are_refused(error, words, residual):
    model = tanh(2, 3, 1)
    with pytest.raises(error, match=words):
        seng.LeastSquares(model, residual).step(torch.randn(5, 2))


def test_batches_that_are_refused():
    model = tanh(2, 3, 1)
    with pytest.raises(
        ValueError, match="the batch of residual 'flat' is empty"
    ):
        seng.LeastSquares(model, flat).step(torch.zeros(0, 2))
    with pytest.raises(
        ValueError, match="a batch for each of the 2 residual functions, not 1"
    ):
        seng.LeastSquares(model, [flat, flat]).step(torch.randn(5, 2))


@pytest.mark.parametrize(
    "error, words, model",
    [
        (ValueError, "no trainable parameters", nn.Tanh()),
        (
            ValueError,
            "no trainable parameters",
            nn.Linear(2, 1).requires_grad_(False),
        ),
        (ValueError, "no trainable parameters", {}),
        (TypeError, "parameter 'x' is torch.int64", {"x": torch.arange(3)}),
        (
            TypeError,
            "parameter 'x' is torch.complex128",
            {"x": torch.zeros(2, dtype=torch.complex128)},
        ),
        (TypeError, "parameter 'x' is float", {"x": 1.0}),
        (
            TypeError,
            "an nn.Module or a dictionary of tensors, not list",
            [torch.zeros(2)],
        ),
    ],
)
def test_models_that_are_refused(error, words, model):
    with pytest.raises(error, match=words):
        seng.LeastSquares(model, flat)


@pytest.mark.parametrize(
    "error, options",
    [
        (ValueError, {"damping": 0}),
        (ValueError, {"damping": -1.0}),
        (ValueError, {"damping": math.nan}),
        (ValueError, {"damping": math.inf}),
        (TypeError, {"damping": "small"}),
        (ValueError, {"momentum": 1.0}),
        (ValueError, {"momentum": -0.1}),
        (TypeError, {"sketch": 100}),
        (ValueError, {"memory": 0}),
        (ValueError, {"memory": 0.5}),
        (TypeError, {"separate": "yes"}),
        (TypeError, {"line_search": 5}),
        (TypeError, {"adapt": "yes"}),
        (TypeError, {"unknown": 1}),
    ],
)
def test_options_that_are_refused(error, options):
    with pytest.raises(error, match=next(iter(options))):
        seng.LeastSquares(nn.Linear(2, 1), flat, **options)


def test_residual_functions_that_are_refused():
    with pytest.raises(TypeError, match="is a function"):
        seng.LeastSquares(nn.Linear(2, 1), "flat")
    with pytest.raises(
        ValueError, match="the list of residual functions is empty"
    ):
        seng.LeastSquares(nn.Linear(2, 1), [])


def test_the_documentations_code_runs():
    torch.set_default_dtype(torch.float32)
    text = (
        Path(__file__).parent.parent / "docs" / "least_squares.md"
    ).read_text()
    blocks = [part.split("```")[0] for part in text.split("```python\n")[1:]]
    assert len(blocks) == 3
    names = {}
    for block in blocks:
        exec(compile(block, "docs/least_squares.md", "exec"), names)
    x = torch.rand(1000, 2, dtype=torch.float64)
    truth = torch.sin(math.pi * x).prod(1)
    assert (names["model"](x)[:, 0] - truth).norm() < 1e-4 * truth.norm()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sketch": seng.sketch.CountSketch(64)},
        {"memory": 100_000},
        {"momentum": 0.5},
    ],
)
def test_a_gpu_fits_like_a_cpu(options):
    ends = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        model = tanh(2, 16, 1).to(device)
        x = torch.randn(40, 2).to(device)
        fit = seng.LeastSquares(
            model,
            [laplacian, lambda m, x: flat(m, x) - x[:, 0].sin()],
            **options,
        )
        fit.step(x, x)
        ends.append(theta(model).cpu())
    if "sketch" not in options:  # a GPU draws other sketches
        assert_close(*ends, rtol=1e-6, atol=1e-6)
    assert fit.report.accepted


def test_the_callers_graphs_and_modes_do_not_matter():
    ends = []
    for case in ("plain", "no_grad", "x.requires_grad"):
        torch.manual_seed(0)
        model, x = tanh(2, 6, 1), torch.randn(8, 2)
        fit = seng.LeastSquares(model, [flat, autograd_laplacian])
        with torch.set_grad_enabled(case != "no_grad"):
            for _ in range(2):
                fit.step(x.requires_grad_(case == "x.requires_grad"), x)
        assert x.grad is None and all(
            p.grad is None and p.requires_grad for p in model.parameters()
        )
        ends.append(theta(model))
    assert torch.equal(ends[0], ends[1]) and torch.equal(ends[0], ends[2])


def test_no_warning_without_a_reason():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = tanh(2, 16, 1)
        seng.LeastSquares(model, [laplacian, mean]).step(
            torch.randn(200, 2), torch.randn(120, 2)
        )
