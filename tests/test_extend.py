"""Extending SENG from outside: a metric and a recipe, each in one small file, do all that ours do."""

import copy
import io
import pickle
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import naive
import pytest
import torch
from torch import Tensor, nn
from toys.identity_metric import Identity
from toys.sign_recipe import Sign

import seng
from seng.metrics.metric import Solver, State
from seng.recipes.recipe import RECIPES
from seng.tell.inspection import inspect
from seng.tell.state import pack, unpack

RECIPE = {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv1d(2, 4, 3),
        nn.GroupNorm(2, 4),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(16, 3),
    )


def identity(model: nn.Module, **given: Any) -> seng.SENG:
    return seng.SENG(
        model,
        **{"refresh_every": 4, "curvature": Identity(), **RECIPE, **given},
    )


def train(
    model: nn.Module, opt: torch.optim.Optimizer, start: int, stop: int
) -> list[Tensor]:
    for step in range(start, stop):
        draw = torch.Generator().manual_seed(step)
        dtype = next(model.parameters()).dtype
        x = torch.randn(8, 2, 6, generator=draw, dtype=dtype)
        target = torch.randn(8, 3, generator=draw, dtype=dtype)
        opt.zero_grad()
        naive.loss_of(model(x), target).backward()
        opt.step()
    return [p.detach().clone() for p in model.parameters()]


def counts(opt: Any) -> list[int]:
    return [state.refreshes for state in inspect(opt).states.values()]


@pytest.mark.parametrize("file", ["identity_metric.py", "sign_recipe.py"])
def test_an_extension_is_one_small_file(file: str) -> None:
    lines = (Path(__file__).parent / "toys" / file).read_text().splitlines()
    assert len(lines) < 40


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_identity_is_exactly_sgd(dtype: torch.dtype) -> None:
    ours, theirs = network().to(dtype), network().to(dtype)
    opt = identity(ours)
    sgd = torch.optim.SGD(theirs.parameters(), **RECIPE)
    moved = train(ours, opt, 0, 10)
    assert all(map(torch.equal, moved, train(theirs, sgd, 0, 10)))
    assert counts(opt) == [3] * 3  # at steps 0, 4 and 8


def test_an_attached_identity_changes_nothing() -> None:
    ours, theirs = network(), network()
    adam, plain = (
        torch.optim.Adam(m.parameters(), 0.01) for m in (ours, theirs)
    )
    handle = seng.attach(adam, ours, refresh_every=4, curvature=Identity())
    moved = train(ours, adam, 0, 10)
    assert all(map(torch.equal, moved, train(theirs, plain, 0, 10)))
    assert counts(handle) == [3] * 3


def test_diagnostics_and_explain_tell_of_it() -> None:
    model = network()
    opt = identity(model)
    assert {entry["form"] for entry in opt.diagnostics().values()} == {"plain"}
    train(model, opt, 0, 6)
    assert list(opt.diagnostics()) == ["0", "1", "4"]
    for entry in opt.diagnostics().values():
        assert entry["form"] == "identity" and entry["refreshed_at"] == 4
        assert (
            entry["cosine"] == pytest.approx(1) and entry["why"] == "Identity"
        )
        assert entry["norm_ratio"] == pytest.approx(1) and entry["bytes"] == 0
        assert entry["solves_failed"] == entry["refreshes_dropped"] == 0
        assert entry["top_eigenvalue"] is entry["effective_rank"] is None
    explained = seng.explain(model, torch.randn(8, 2, 6), Identity())
    assert [p.dims.name for p in explained.plans] == ["0", "1", "4"]
    assert "3 layers covered" in str(explained) and "Identity" in str(
        explained
    )


@pytest.mark.parametrize("through", ["file", "deepcopy", "pickle"])
def test_a_checkpoint_goes_on(through: str) -> None:
    model = network()
    opt = identity(model)
    train(model, opt, 0, 6)
    if through == "file":
        buffer = io.BytesIO()
        torch.save([model.state_dict(), opt.state_dict()], buffer)
        buffer.seek(0)
        weights, state = torch.load(buffer, weights_only=True)
        twin = network()
        twin.load_state_dict(weights)
        other = identity(twin)
        other.load_state_dict(state)
    elif through == "deepcopy":
        twin, other = copy.deepcopy((model, opt))
    else:
        twin, other = pickle.loads(pickle.dumps((model, opt)))
    assert counts(other) == [2] * 3 and not other.refresh_due
    moved = train(twin, other, 6, 11)
    assert all(map(torch.equal, moved, train(model, opt, 6, 11)))
    assert counts(other) == [3] * 3


@dataclass(frozen=True)
class Various(State):
    """Fields of every type, whose annotations are types, not words."""

    matrix: Tensor
    single: Tensor
    seldom: Tensor | None
    weight: float
    count: int
    shape: tuple[int, ...]
    used: bool

    def at(self, damping: float) -> Solver:
        raise NotImplementedError


def test_fields_of_every_type_go_through_a_checkpoint() -> None:
    device, dtype = torch.device("cpu"), torch.float64
    single = torch.tensor(0.1)
    kept = Various(torch.eye(2), single, torch.ones(3), 0.3, 7, (1, 2), True)
    found = unpack("state", pack("state", kept, device), device, dtype)
    for f in fields(Various):
        before, after = getattr(kept, f.name), getattr(found, f.name)
        assert type(before) is type(after)
        torch.testing.assert_close(after, before, rtol=0, atol=0)


@pytest.mark.parametrize(
    "ours", [seng.Curvature(), None], ids=["low rank", "default"]
)
def test_a_checkpoint_of_another_metric_is_told_of(ours: Any) -> None:
    for before, after in ((Identity(), ours), (ours, Identity())):
        model = network()
        opt = seng.SENG(model, 0.01, curvature=before)
        train(model, opt, 0, 2)
        other = seng.SENG(model, 0.01, curvature=after)
        with pytest.warns(UserWarning, match="of 3 layers is of another kind"):
            other.load_state_dict(opt.state_dict())
        assert other.refresh_due and not inspect(other).states
        train(model, other, 2, 4)
        assert len(inspect(other).states) == 3


def test_a_checkpoint_of_an_unknown_metric_is_told_of() -> None:
    """As where the file that defines it was not imported."""
    model = network()
    opt = identity(model)
    train(model, opt, 0, 2)
    state = opt.state_dict()
    for entry in state["state"].values():
        if "state:Counted" in entry["seng"]:
            entry["seng"]["state:Unheard"] = entry["seng"].pop("state:Counted")
    other = identity(model)
    with pytest.warns(UserWarning, match="of 3 layers is of another kind"):
        other.load_state_dict(state)
    train(model, other, 2, 3)
    assert counts(other) == [1] * 3


@pytest.mark.parametrize(
    "curvature", [None, Identity(), seng.Curvature()], ids=str
)
def test_sign_descent_moves_each_weight_by_lr(curvature: Any) -> None:
    assert RECIPES["sign"] is Sign
    model = network()
    opt = seng.SENG(model, 0.01, recipe="sign", curvature=curvature)
    before = [p.detach().clone() for p in model.parameters()]
    after = train(model, opt, 0, 1)
    for old, new, p in zip(before, after, model.parameters(), strict=True):
        torch.testing.assert_close(
            (new - old).abs(), torch.full_like(old, 0.01)
        )
        if isinstance(curvature, Identity):
            torch.testing.assert_close(new, old - 0.01 * p.grad.sign())
    start = naive.loss_of(
        model(x := torch.randn(8, 2, 6)), torch.zeros(8, 3)
    ).item()
    for _ in range(20):
        opt.zero_grad()
        loss = naive.loss_of(model(x), torch.zeros(8, 3))
        loss.backward()
        opt.step()
    assert float(loss.detach()) < start


def test_a_recipe_that_nobody_has_told_of_is_refused() -> None:
    with pytest.raises(
        ValueError, match="unknown recipe 'cube'; use one of 'sgd', 'pa"
    ):
        seng.SENG(network(), recipe="cube")
