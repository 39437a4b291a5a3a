"""Every layer kind × form, exact: one step equals the dense solve with M from a per-sample autograd loop."""

import copy

import naive
import pytest
import torch
from conftest import Case
from refreshing import uncentred
from torch import nn
from torch.nn.utils import prune

import seng

FULL = 10**6  # a rank above anything that exists means exact


def step_direction(model, x, target, damping=0.3, **curvature):
    """θ_before − θ_after of one SENG step in the paper's units: (M + λI)⁻¹g."""
    options = {"rank": FULL, "decay": 0, "relative_damping": False} | curvature
    opt = seng.SENG(
        model,
        lr=1.0,
        momentum=0.0,
        damping=damping,
        recipe="paper",
        strict=True,
        curvature=uncentred(**options),
    )
    before = [p.detach().clone() for p in naive.trained(model)]
    naive.loss_of(model(x), target).backward()
    g = naive.flat([p.grad for p in naive.trained(model)])
    opt.step()
    return naive.flat(
        [
            b - p.detach()
            for b, p in zip(before, naive.trained(model), strict=True)
        ]
    ), g


@pytest.mark.parametrize("batch", [1, 7, 32])
def test_direction_equals_dense_solve(case: Case, form: str, batch: int):
    layer = case.layer()
    x, target = case.input(batch), case.target(layer, batch)
    M = naive.fisher(naive.per_sample_gradients(layer, x, target))
    d, g = step_direction(layer, x, target, form=form)
    assert naive.relative_error(d, naive.dense_direction(M, g, 0.3)) < 1e-9


@pytest.mark.parametrize("samples", [1, 3, 100])
def test_samples_below_the_batch(case: Case, form: str, samples: int):
    layer = case.layer()
    x, target = case.input(7), case.target(layer, 7)
    M = naive.fisher(
        naive.per_sample_gradients(layer, x[:samples], target[:samples])
    )
    d, g = step_direction(layer, x, target, form=form, samples=samples)
    assert naive.relative_error(d, naive.dense_direction(M, g, 0.3)) < 1e-9


@pytest.mark.parametrize("damping", [1e-3, 1.0, 1e3])
def test_any_damping(case: Case, form: str, damping: float):
    layer = case.layer()
    x, target = case.input(6), case.target(layer, 6)
    M = naive.fisher(naive.per_sample_gradients(layer, x, target))
    d, g = step_direction(layer, x, target, form=form, damping=damping)
    assert naive.relative_error(d, naive.dense_direction(M, g, damping)) < 1e-9


@pytest.mark.parametrize("batch", [2, 7, 32])
@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.BatchNorm1d(3), (3,)),
        (nn.BatchNorm1d(3), (3, 4)),
        (nn.BatchNorm2d(3), (3, 2, 2)),
        (nn.BatchNorm3d(2), (2, 2, 1, 3)),
        (nn.BatchNorm2d(3, track_running_stats=False), (3, 2, 2)),
    ],
    ids=["1d", "1d-sequence", "2d", "3d", "no-running-statistics"],
)
@pytest.mark.parametrize("samples", [None, 2])
def test_batch_norm_in_training(layer, shape, form, batch, samples):
    layer = copy.deepcopy(layer).double().train()
    x, target = torch.randn(batch, *shape), torch.randn(batch, *shape)
    u = naive.batch_norm_gradients(layer, x, target)
    d, g = step_direction(layer, x, target, form=form, samples=samples)
    assert naive.relative_error(u.mean(0), g) < 1e-12
    assert (
        naive.relative_error(
            d, naive.dense_direction(naive.fisher(u[:samples]), g, 0.3)
        )
        < 1e-9
    )


def test_batch_norm_mode_is_that_of_the_forward():
    layer = nn.BatchNorm1d(3).eval()
    x, target = torch.randn(5, 3), torch.randn(5, 3)
    u = naive.per_sample_gradients(layer, x, target)
    opt = seng.SENG(
        layer,
        lr=1.0,
        momentum=0.0,
        damping=0.3,
        recipe="paper",
        curvature=paper_curvature(),
    )
    before = naive.flat(layer.parameters()).clone()
    loss = naive.loss_of(layer(x), target)
    layer.train()
    loss.backward()
    g = naive.flat([p.grad for p in layer.parameters()])
    opt.step()
    got = before - naive.flat(layer.parameters())
    assert layer.training
    assert (
        naive.relative_error(
            got, naive.dense_direction(naive.fisher(u), g, 0.3)
        )
        < 1e-9
    )


def paper_curvature(**options):
    return uncentred(
        **({"rank": FULL, "decay": 0, "relative_damping": False} | options)
    )


@pytest.mark.parametrize("frozen", ["weight", "bias"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Linear(4, 3),
        lambda: nn.Conv2d(2, 3, 2),
        lambda: nn.LayerNorm(4),
    ],
)
def test_half_frozen_layer(make, frozen, form):
    layer = make()
    getattr(layer, frozen).requires_grad_(False)
    x = (
        torch.randn(6, 2, 4, 4)
        if isinstance(layer, nn.Conv2d)
        else torch.randn(6, 4)
    )
    if isinstance(layer, nn.LayerNorm):
        nn.init.normal_(layer.weight)
    target = torch.randn_like(layer(x))
    M = naive.fisher(naive.per_sample_gradients(layer, x, target))
    d, g = step_direction(layer, x, target, form=form)
    assert naive.relative_error(d, naive.dense_direction(M, g, 0.3)) < 1e-9


@pytest.mark.parametrize(
    ("layer", "x"),
    [
        (nn.Linear(4, 3), torch.randn(4)),
        (nn.Conv1d(2, 3, 2), torch.randn(2, 5)),
        (nn.Conv2d(2, 3, 2), torch.randn(2, 4, 4)),
        (nn.ConvTranspose1d(2, 3, 2), torch.randn(2, 4)),
        (nn.LayerNorm(4), torch.randn(4)),
        (nn.Embedding(4, 3), torch.tensor(2)),
        (nn.InstanceNorm1d(3, affine=True), torch.randn(3, 4)),
    ],
    ids=lambda v: type(v).__name__ if isinstance(v, nn.Module) else "x",
)
def test_input_without_a_sample_dimension_is_one_sample(layer, x, form):
    layer = copy.deepcopy(layer).double()
    x = x.double() if x.is_floating_point() else x
    target = torch.randn_like(layer(x))
    naive.loss_of(layer(x)[None], target[None]).backward()
    g = naive.flat([p.grad for p in layer.parameters()])
    layer.zero_grad()
    opt = seng.SENG(
        layer,
        lr=1.0,
        momentum=0.0,
        damping=0.3,
        recipe="paper",
        curvature=paper_curvature(form=form),
    )
    before = naive.flat(layer.parameters()).clone()
    naive.loss_of(layer(x)[None], target[None]).backward()
    opt.step()
    want = naive.dense_direction(torch.outer(g, g), g, 0.3)
    assert (
        naive.relative_error(before - naive.flat(layer.parameters()), want)
        < 1e-9
    )


class Scale(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.rand(features))

    def forward(self, x):
        return self.gain * x


class Affine(nn.Module):
    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n_out, n_in))
        self.bias = nn.Parameter(torch.randn(n_out))

    def forward(self, x):
        return x @ self.weight.T + self.bias


@pytest.fixture
def own_kinds():
    before = dict(seng.layers.kinds.KINDS)

    @seng.layers.columns(Scale)
    def _(layer, a, g):
        return {"gain": seng.layers.positions(g * a).sum(1)}

    @seng.layers.factors(Affine)
    def _(layer, a, g):
        return seng.layers.positions(g).mT, seng.layers.positions(a).mT

    yield
    seng.layers.kinds.KINDS.clear()
    seng.layers.kinds.KINDS.update(before)


@pytest.mark.parametrize("shape", [(6, 4), (6, 5, 4), (6, 2, 3, 4)])
@pytest.mark.parametrize("make", [lambda: Scale(4), lambda: Affine(4, 3)])
def test_a_kind_of_your_own(own_kinds, make, form, shape):
    layer = make()
    x = torch.randn(shape)
    target = torch.randn_like(layer(x))
    M = naive.fisher(naive.per_sample_gradients(layer, x, target))
    d, g = step_direction(layer, x, target, form=form)
    assert naive.relative_error(d, naive.dense_direction(M, g, 0.3)) < 1e-9


def test_subclass_with_a_forward_of_its_own_is_not_trusted():
    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    class Named(nn.Linear):
        pass

    assert "forward of its own" in seng.layers.kind_of(Doubled(2, 2))
    assert seng.layers.kind_of(Named(2, 2)).type is nn.Linear


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (nn.LSTM(2, 2), "inside one operation"),
        (nn.GRUCell(2, 2), "inside one operation"),
        (
            nn.MultiheadAttention(4, 2),
            "scaled_dot_product_attention can be covered",
        ),
        (
            nn.utils.parametrizations.weight_norm(
                nn.Linear(2, 2)
            ).parametrizations.weight,
            "a parametrization",
        ),
        (nn.Bilinear(2, 2, 2), "no rule for Bilinear: register one"),
        (nn.LazyLinear(3), "lazy parameters"),
        (
            nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)),
            "computed from other tensors",
        ),
        (
            prune.l1_unstructured(nn.LayerNorm(4), "weight", 1),
            "computed from other tensors",
        ),
        (nn.Embedding(3, 2, sparse=True), "sparse gradients"),
        (nn.Embedding(3, 2, scale_grad_by_freq=True), "scale_grad_by_freq"),
    ],
)
def test_reason_for_no_rule(layer, words):
    assert words in seng.layers.kind_of(layer)
