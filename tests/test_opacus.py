"""opacus's oracle for per-sample gradients, one backward per sample, pointed at ours: its checker and the tests that it ships.

opacus computes per-sample gradients too (for privacy), so its tests know the shapes that matter: strides, paddings, dilations,
groups, leading dimensions, the batch second, batches of nothing, losses that are means and losses that are sums. They call
`compute_opacus_grad_sample`; here that is `ours`, which reads what the engine hands to its blocks.
"""

import dataclasses
import importlib
import unittest

import opacus.utils.per_sample_gradients_utils as oracle
import pytest
import torch
from conftest import Case
from hypothesis import HealthCheck, settings
from opacus.grad_sample import GradSampleModule
from opacus.layers import (
    DPGRU,
    DPLSTM,
    DPRNN,
    DPMultiheadAttention,
    SequenceBias,
)
from opacus.layers.dp_rnn import DPRNNCell, RNNLinear
from opacus.tests.grad_samples import common
from torch import Tensor, nn

import seng
from seng.tell.inspection import inspect

pytestmark = pytest.mark.filterwarnings(
    "ignore:subTest",
    "ignore:Using padding='same'",
    "ignore:Full backward hook",
)

SHIPPED = {  # opacus's test file -> the kind whose per-sample gradients it checks
    "conv1d": nn.Conv1d,
    "conv2d": nn.Conv2d,
    "conv3d": nn.Conv3d,
    "embedding": nn.Embedding,
    "group_norm": nn.GroupNorm,
    "instance_norm1d": nn.InstanceNorm1d,
    "instance_norm2d": nn.InstanceNorm2d,
    "instance_norm3d": nn.InstanceNorm3d,
    "layer_norm": nn.LayerNorm,
    "linear": nn.Linear,
    "rms_norm": nn.RMSNorm,
}
NOT_SHARED = [  # opacus has a rule for it and we have none, or it is built of such
    nn.EmbeddingBag(4, 3),
    SequenceBias(3),
    DPMultiheadAttention(4, 2, add_bias_kv=True),
    *(recurrent(3, 4) for recurrent in (DPRNN, DPGRU, DPLSTM)),
]
FORMS = {
    "hooks": "explicit",
    "functorch": "implicit",
    "ew": "merged",
}  # opacus's three ways pick three forms of ours
TIGHT = 1e-10
FULL = 10**6  # a rank above anything that exists means exact


def ours(
    x: Tensor,
    module: nn.Module,
    batch_first: bool = True,
    loss_reduction: str = "mean",
    grad_sample_mode: str = "hooks",
) -> dict[str, Tensor]:
    """Per-sample gradients (ϱ, *shape) by parameter name, as `compute_opacus_grad_sample` gives them."""
    module = oracle.clone_module(module)
    if not batch_first:
        for layer in module.modules():
            seng.layers.arrange(layer, lambda t: t.transpose(0, 1))
    form = FORMS[grad_sample_mode]
    rank = {} if form == "explicit" else {"rank": FULL}
    curvature = seng.Curvature(base=None, form=form, decay=0, **rank)
    opt = seng.SENG(module, curvature=curvature, strict=True)
    oracle.ModelWithLoss(module, loss_reduction)(x).backward()
    samples, grads = opt.engine.collector.samples, {}
    samples.settle()
    B = samples.total
    scale = max(B, 1) ** 0.5 / (
        1 if loss_reduction == "mean" else max(B, 1)
    )  # columns are u_i/√ϱ, of a loss that is a mean
    for index, site in enumerate(inspect(opt).sites):
        active = samples.active[index]
        U = samples.take(index, 1 / scale).explicit().U
        assert U.shape[1] == B
        columns = [site.scatter(active, u) for u in U.T]
        for p in (segment.param for segment in active):
            grads[p] = (
                torch.stack([column[p] for column in columns])
                if B
                else p.detach().new_zeros(0, *p.shape)
            )
    return {name: grads[p] for name, p in module.named_parameters()}


@pytest.fixture(autouse=True)
def calls(monkeypatch) -> list[tuple[nn.Module, Tensor]]:
    """opacus asks us; what it asked, so that no test passes without having asked."""
    made = []

    def noted(x, module, **options):
        made.append((module, x))
        return ours(x, module, **options)

    monkeypatch.setattr(oracle, "compute_opacus_grad_sample", noted)
    monkeypatch.setattr(common, "compute_opacus_grad_sample", noted)
    loose = (
        common.GradSampleHooks_test.check_values
    )  # opacus works in float32, we in float64
    monkeypatch.setattr(
        common.GradSampleHooks_test,
        "check_values",
        lambda self, *args: loose(self, *args[:3], TIGHT, TIGHT),
    )
    return made


def agrees(x: Tensor, module: nn.Module, **options) -> bool:
    return oracle.check_per_sample_gradients_are_correct(
        x, module, atol=TIGHT, rtol=TIGHT, **options
    )


def run_shipped(name: str, examples: int = 150) -> None:
    """opacus's own test cases of a file, on the same examples each time; those of its helpers, not of layers, are left out."""
    before = settings.get_current_profile_name()
    slow = HealthCheck.too_slow
    settings.register_profile(
        "opacus",
        max_examples=examples,
        derandomize=True,
        database=None,
        suppress_health_check=[slow],
    )
    settings.load_profile("opacus")
    try:
        module = importlib.import_module(f"opacus.tests.{name}_test")
    finally:
        settings.load_profile(before)
    result = unittest.TestResult()
    for suite in unittest.defaultTestLoader.loadTestsFromModule(module):
        for test in suite:
            if "unfold2d" not in test.id() and "asymetric" not in test.id():
                test.run(result)
    assert result.testsRun and not result.skipped
    assert result.wasSuccessful(), "\n".join(
        text for _, text in result.failures + result.errors
    )


@pytest.mark.parametrize("name", SHIPPED)
def test_the_tests_that_opacus_ships(name, calls):
    run_shipped(
        f"grad_samples.{name}", 400 if "conv" in name else 100
    )  # most of the groups drawn do not divide the channels
    assert {type(module) for module, _ in calls} == {SHIPPED[name]}
    sizes = {x.shape[0] for _, x in calls}
    assert len(calls) > 100 and {1, 2, 4} <= sizes
    assert (
        0 in sizes or name in ("layer_norm", "rms_norm") or "instance" in name
    )  # opacus draws no empty batch for these; we do, below


def test_the_test_of_its_checker(calls):
    run_shipped("per_sample_gradients_utils")
    assert {type(module) for module, _ in calls} == {nn.Conv1d, nn.Linear}


@pytest.mark.parametrize("mode", FORMS)
@pytest.mark.parametrize("batch", [1, 5])
def test_every_layer_of_ours(case: Case, batch, mode):
    assert agrees(case.input(batch), case.layer(), grad_sample_mode=mode)


@pytest.mark.parametrize("mode", ["hooks", "functorch"])
@pytest.mark.parametrize(
    ("layer", "x"),
    [
        (nn.Linear(4, 3), torch.randn(6, 5, 4)),
        (nn.Linear(4, 3), torch.randn(6, 5, 2, 4)),
        (nn.Embedding(4, 3), torch.randint(4, (6, 5))),
        (nn.LayerNorm(4), torch.randn(6, 5, 4)),
        (nn.RMSNorm(4), torch.randn(6, 5, 4)),
        (
            nn.Sequential(
                nn.Embedding(4, 3), nn.LayerNorm(3), nn.Linear(3, 2)
            ),
            torch.randint(4, (6, 5)),
        ),
    ],
    ids=[
        "linear",
        "linear-4d",
        "embedding",
        "layer-norm",
        "rms-norm",
        "network",
    ],
)
def test_the_batch_second(layer, x, mode):
    assert agrees(
        x.double() if x.is_floating_point() else x,
        layer.double(),
        batch_first=False,
        grad_sample_mode=mode,
    )


def takes_nothing(case: Case) -> nn.Module:
    layer = case.layer()
    if isinstance(
        layer, nn.InstanceNorm1d | nn.InstanceNorm2d | nn.InstanceNorm3d
    ):
        pytest.skip("torch's own forward of it raises on an empty batch")
    return layer


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("mode", FORMS)
def test_a_batch_of_nothing_has_no_columns(case: Case, reduction, mode):
    layer = takes_nothing(case)
    got = ours(
        case.input(0), layer, loss_reduction=reduction, grad_sample_mode=mode
    )
    assert {name: g.shape for name, g in got.items()} == {
        name: (0, *p.shape) for name, p in layer.named_parameters()
    }


def test_a_batch_of_nothing_is_a_step_to_nowhere(case: Case):
    layer = takes_nothing(case)
    opt = seng.SENG(layer, lr=0.1)
    before = [p.detach().clone() for p in layer.parameters()]
    layer(case.input(0)).sum().backward()
    opt.step()
    assert all(
        torch.equal(p, q)
        for p, q in zip(layer.parameters(), before, strict=True)
    )


class Unrolled(nn.Module):
    """A recurrent cell of opacus's over time: its layers run once per step, on one sample each."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = DPRNNCell(3, 4, bias=True)

    def forward(self, x):
        h = None
        for x_t in x.unbind(1):
            h = self.cell(x_t, h)
        return h


@pytest.mark.parametrize("mode", FORMS)
def test_a_layer_that_runs_many_times(mode):
    assert agrees(torch.randn(5, 6, 3), Unrolled(), grad_sample_mode=mode)


@pytest.mark.parametrize(
    ("name", "examples"),
    [("sequence_bias", 150), ("dp_multihead_attention", 40)],
)
def test_a_kind_of_opacus_registered_as_ones_own(
    name, examples, monkeypatch, calls
):
    monkeypatch.setattr(
        seng.layers.kinds, "KINDS", dict(seng.layers.kinds.KINDS)
    )
    seng.layers.columns(SequenceBias)(
        lambda layer, a, g: {"bias": g[:, -1]}
    )  # it appends its bias as one more position
    run_shipped(f"grad_samples.{name}", examples)
    assert len(calls) > 100


@pytest.mark.parametrize(
    "layer", NOT_SHARED, ids=lambda layer: type(layer).__name__
)
def test_what_is_not_shared_has_a_reason(layer):
    assert seng.layers.kind_of(layer).startswith(
        f"no rule for {type(layer).__name__}"
    )
    with pytest.raises(ValueError, match="no rule for"):
        seng.SENG(nn.Sequential(layer), strict=True)


def test_nothing_of_opacus_is_left_out():
    refused = {type(layer) for layer in NOT_SHARED}
    for kind in GradSampleModule.GRAD_SAMPLERS:
        assert (kind in SHIPPED.values()) + (kind in refused) + (
            kind is RNNLinear
        ) == 1, kind
    assert (
        seng.layers.kind_of(RNNLinear(3, 2)).type is nn.Linear
    )  # see test_a_layer_that_runs_many_times


WRONG = {
    "a scale": lambda kind: (
        lambda layer, a, g: kind.rule(layer, a, 1.0001 * g)
    ),
    "another sample's": lambda kind: (
        lambda layer, a, g: kind.rule(layer, a, g.flip(0))
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_rule_is_found(case: Case, wrong, monkeypatch):
    layer, x = case.layer(), case.input(5)
    kind = seng.layers.kind_of(layer)
    monkeypatch.setitem(
        seng.layers.kinds.KINDS,
        kind.type,
        dataclasses.replace(kind, rule=WRONG[wrong](kind)),
    )
    assert not agrees(x, layer)
    with pytest.raises(AssertionError, match="values do not match"):
        common.GradSampleHooks_test().run_test(x, layer)
