"""The plan's rules, the memory budget, and explain: the paper's Table 1 from a ResNet50."""

import copy
import re
from dataclasses import replace

import pytest
import torch
from refreshing import uncentred
from torch import nn

import seng
from seng.lab.models import resnet50
from seng.metrics.curvature import THRESHOLD
from seng.metrics.metric import Dims, paper_form, plan
from seng.tell.inspection import inspect

TABLE_1 = {  # case: (n, n_G, n_A, κ), and a layer of ResNet50 that has it
    "I": ((9_408, 64, 147, 12_544), "explicit"),
    "II": ((147_456, 128, 1_152, 784), "explicit"),
    "III": ((524_288, 1_024, 512, 196), "explicit"),
    "IV": ((1_048_576, 2_048, 512, 49), "implicit"),
    "V": ((2_359_296, 512, 4_608, 49), "implicit"),
    "VI": ((2_049_000, 1_000, 2_049, 1), "implicit"),
}


@pytest.fixture(scope="module")
def explanation():
    torch.set_default_dtype(torch.float32)
    return seng.explain(resnet50(), torch.randn(1, 3, 224, 224))


@pytest.mark.parametrize("case", TABLE_1)
def test_explain_reproduces_table_1(explanation, case):
    found = {
        (p.dims.n, p.dims.n_G, p.dims.n_A, p.dims.kappa): p
        for p in explanation.plans
    }
    dims, form = TABLE_1[case]
    assert dims in found
    assert paper_form(found[dims].dims, THRESHOLD)[0] == form


def test_explain_of_resnet50_covers_everything(explanation):
    assert (
        len(explanation.plans) == 53 + 53 + 1
    )  # convolutions, norms, the linear layer
    assert sum(p.dims.n for p in explanation.plans) == 25_557_032
    assert not explanation.uncovered
    text = str(explanation)
    assert "2,049,000" in text and "107 layers covered" in text


def test_explain_changes_nothing():
    model = nn.Sequential(
        nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 2)
    )
    model[2].eval()
    before = copy.deepcopy(model.state_dict())
    stream = torch.get_rng_state()
    seng.explain(
        model, torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    )
    assert torch.equal(torch.get_rng_state(), stream)
    assert all(
        torch.equal(v, before[k]) for k, v in model.state_dict().items()
    )
    assert (
        model.training
        and not model[2].training
        and not model[0]._forward_hooks
    )
    assert all(p.grad is None for p in model.parameters())


def test_explain_takes_tensors_tuples_pairs_and_dicts():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 2)

        def forward(self, x, scale):
            return self.linear(x) * scale

    x = torch.randn(5, 3)
    for batch in ((x, 2.0), {"x": x, "scale": 2.0}):
        assert seng.explain(Two(), batch).plans[0].dims.samples == 5
    assert (
        seng.explain(nn.Linear(3, 2), (x, torch.zeros(5))).plans[0].dims.n == 8
    )


def test_explain_tells_what_is_not_covered_and_why():
    model = nn.Sequential(nn.Linear(3, 4), nn.LSTM(4, 2))
    explanation = seng.explain(model, torch.randn(2, 5, 3))
    assert "a recurrent layer" in explanation.uncovered["1.weight_ih_l0"]
    assert "plain gradient: 1.weight_ih_l0: a recurrent layer" in str(
        explanation
    )


def test_explain_leaves_frozen_layers_out():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    assert [
        p.dims.name for p in seng.explain(model, torch.randn(5, 3)).plans
    ] == ["1"]


LARGE = Dims("large", (1, 1000, 2000), 1, 256, None)
SMALL = Dims("small", (1, 10, 20), 4, 256, None)
NORM = Dims("norm", (1, 1, 128), 1, 256, "explicit")
WORDS = Dims("words", (1, 50_000, 768), 64, 256, "lookup")


def forms(curvature, *dims):
    return [p.form for p in plan(dims, curvature)]


def test_the_rules_of_the_automatic_plan():
    accumulate, anew = uncentred(rank=16, decay=0.8), uncentred(rank=16)
    assert forms(accumulate, LARGE, SMALL, NORM, WORDS) == [
        "merged",
        "merged",
        "merged",
        "lookup",
    ]
    assert forms(anew, LARGE, SMALL, NORM, WORDS) == [
        "merged",
        "merged",
        "explicit",
        "lookup",
    ]
    assert forms(uncentred(rank=256, decay=0), LARGE, SMALL) == [
        "implicit",
        "explicit",
    ]
    assert forms(uncentred(combine="independent"), LARGE, SMALL) == [
        "implicit",
        "explicit",
    ]
    for form in ("explicit", "implicit", "merged"):
        chosen = forms(uncentred(form, decay=0), LARGE, SMALL, NORM, WORDS)
        assert chosen == [form, form, "explicit", "lookup"]
    assert all(p.why for p in plan([LARGE, SMALL, NORM, WORDS], accumulate))


def test_the_planned_bytes_are_those_that_are_kept():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.Flatten(),
        nn.Linear(8 * 36, 10),
    )
    x = torch.randn(16, 3, 8, 8)
    for options in (
        {"form": "explicit"},
        {"form": "implicit", "rank": 5},
        {"form": "merged", "rank": 7, "decay": 0},
    ):
        curvature = uncentred(**options)
        opt = seng.SENG(model, lr=0.1, curvature=curvature)
        model(x).square().mean().backward()
        opt.step()
        planned = {
            p.dims.name: p.bytes
            for p in seng.explain(model, x, curvature).plans
        }
        for name, entry in opt.diagnostics().items():
            overhead = 8 if entry["form"] == "merged" else 0  # its scale
            assert planned[name] <= entry["bytes"] <= planned[name] + overhead


@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("base", [None, seng.Kronecker()], ids=["I", "P"])
@pytest.mark.parametrize("budget", [10**9, 10**8, 10**7, 10**6, 10])
def test_a_budget_is_kept_or_refused_with_what_would_fit(budget, base, pooled):
    given: dict = {"rank": 64, "base": base, "memory": budget}
    given |= {"form": "merged", "decay": 0.8}
    dims = [LARGE, SMALL, NORM]
    if budget == 10**9:
        chosen = plan(dims, seng.Curvature(**given), budget, pooled)
        assert sum(p.bytes for p in chosen) <= budget and chosen[0].rank == 64
        return
    needs = rf"the curvature needs .* where memory={budget} allows"
    with pytest.raises(ValueError, match=needs) as refused:
        plan(dims, seng.Curvature(**given), budget, pooled)
    if budget <= 10**6:
        assert "use fewer samples, another form or more memory" in str(
            refused.value
        )
        return
    assert "would fit" in str(refused.value)
    of_U, *of_P = map(int, re.findall(r"rank=(\d+)", str(refused.value)))
    assert len(of_P) == (base is not None)

    def with_ranks(times: int) -> seng.Curvature:
        bases = [seng.Kronecker(rank=times * rank) for rank in of_P] or [None]
        fitting = {"rank": times * of_U, "base": bases[0]}
        return seng.Curvature(**given | fitting)

    chosen = plan(dims, with_ranks(1), budget, pooled)
    assert sum(p.bytes for p in chosen) <= budget
    with pytest.raises(ValueError, match=needs):  # it is the most that fits
        plan(dims, with_ranks(2), budget, pooled)


def test_a_budget_in_the_optimizer():
    model = nn.Sequential(nn.Linear(50, 40), nn.Tanh(), nn.Linear(40, 30))
    x = torch.randn(64, 50)

    def stepped(**given):
        opt = seng.SENG(model, lr=0.1, curvature=uncentred(**given))
        model(x).square().mean().backward()
        opt.step()
        return opt

    memory = 30_000 * 8
    refused = r"needs .* where memory=240000 allows .*: rank=8 would fit"
    with pytest.raises(ValueError, match=refused):
        stepped(rank=32, memory=memory)
    with pytest.raises(ValueError, match=refused):
        seng.explain(model, x, uncentred(rank=32, memory=memory))
    fitting = inspect(stepped(rank=8, memory=memory))
    assert sum(state.bytes for state in fitting.states.values()) <= memory
    assert fitting.layers[0].plan.rank == 8 and fitting.budget == memory
    fraction = seng.SENG(model, lr=0.1, curvature=seng.Curvature(memory=0.5))
    assert inspect(fraction).budget > 10**6
    with pytest.raises(
        ValueError,
        match=r"needs .* where memory=1000 allows 1000 B: use fewer samples, another",
    ):
        stepped(form="explicit", memory=1000)


def test_over_a_base_layers_are_merged_and_factors_that_are_no_smaller_are_columns():
    # LARGE has one position: its factors are small.
    chosen = forms(seng.Curvature(), LARGE, SMALL, NORM)
    assert chosen == ["implicit", "merged", "explicit"]
    accumulated = forms(seng.Curvature(decay=0.8), LARGE, SMALL, NORM)
    assert accumulated == ["merged"] * 3
    sketched = forms(seng.Curvature(sketch=seng.sketch.Rows(9)), LARGE, SMALL)
    assert sketched == ["merged"] * 2  # what a sketch chooses is a basis
    many = Dims("many positions", (1, 10, 20), 9, 256, None)
    rows = replace(WORDS, factored=False)  # P is diagonal: rows stay rows
    implicit = seng.Curvature("implicit", rank=200)
    kept = ["implicit", "implicit", "explicit", "explicit", "lookup"]
    assert forms(implicit, LARGE, SMALL, many, NORM, rows) == kept


def test_a_budget_of_columns_says_what_would_fit_of_the_base():
    dims = [Dims("layer", (1, 100, 100), 1, 8, None)]
    base = seng.Kronecker(rank=32)
    (free,) = plan(dims, seng.Curvature("explicit", base=base))
    budget = free.bytes - 1000
    curvature = seng.Curvature("explicit", base=base, memory=budget)
    with pytest.raises(
        ValueError, match=r": base=Kronecker\(rank=16\) would fit"
    ):
        plan(dims, curvature, budget)


def test_the_threshold_divides_explicit_from_implicit():
    by = {
        threshold: forms(
            uncentred(rank=256, decay=0, threshold=threshold), LARGE, SMALL
        )
        for threshold in (1, 201, 10**6, 2 * 10**6 + 1)
    }
    assert by == {
        1: ["implicit", "implicit"],
        201: ["implicit", "explicit"],
        10**6: ["implicit", "explicit"],
        2 * 10**6 + 1: ["explicit", "explicit"],
    }


def test_ranks_that_share_a_basis_have_one_width_for_all():
    dims = [
        Dims("a", (1, 64, 100), 9, 256, None),
        Dims("b", (1, 3, 4), 1, 256, None),
    ]
    dims.append(Dims("norm", (1, 1, 64), 1, 256, "explicit"))
    shared = plan(dims, uncentred(rank=128), pooled=True)
    assert [p.rank for p in shared] == [128, 12, 64]
    assert {p.form for p in shared} == {"merged"}
    assert all("the same on all ranks" in p.why for p in shared)
    every = plan(dims, uncentred("explicit"), pooled=True)
    assert [p.rank for p in every] == [256, 12, 64]  # all samples of all ranks
    some = plan(dims, seng.Curvature("explicit", samples=64), pooled=True)
    assert [p.rank for p in some] == [64, 12, 64]  # as many as U has
