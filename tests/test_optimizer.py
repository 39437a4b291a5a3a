"""SENG as an optimizer: SGD in the limit, damping and decay against dense references, groups, resuming, bad input."""

import copy
import dataclasses
import functools
import io
import itertools
import pickle
import re
import warnings

import naive
import pytest
import torch
from refreshing import uncentred
from torch import nn

import seng
from seng.linalg.sketch import (
    CountSketch,
    Gaussian,
    KroneckerRows,
    LeverageRows,
    Rows,
)
from seng.optim.engine import Engine
from seng.recipes.recipe import RECIPES, SGD
from seng.tell.inspection import inspect


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(64, 3),
    )


def batch(seed: int, size: int = 9):
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(size, 2, 4, 4, generator=generator),
        torch.randn(size, 3, generator=generator),
    )


def train(model, opt, steps, start=0):
    for i in range(start, start + steps):
        x, target = batch(i)
        opt.zero_grad()
        naive.loss_of(model(x), target).backward()
        opt.step()


def parameters(model) -> torch.Tensor:
    return naive.flat([p.detach() for p in model.parameters()]).clone()


@pytest.mark.parametrize("form", ["explicit", "implicit", "merged", "auto"])
@pytest.mark.parametrize("damping", [1e15, 1e300, float("inf")])
@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize(
    "recipe",
    [
        {},
        {"momentum": 0.0},
        {"nesterov": True},
        {"maximize": True, "lr": 1e-4},
    ],
    ids=str,
)
def test_infinite_damping_is_sgd(form, damping, relative, recipe):
    options = {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.05} | recipe
    ours, theirs = network(), network()
    curvature = seng.Curvature(
        base=None, form=form, decay=0, relative_damping=relative
    )
    train(
        ours,
        seng.SENG(
            ours,
            damping=damping,
            refresh_every=3,
            curvature=curvature,
            **options,
        ),
        20,
    )
    train(theirs, torch.optim.SGD(theirs.parameters(), **options), 20)
    assert naive.relative_error(parameters(ours), parameters(theirs)) < 1e-12


def layer_gradients(model, x, target, layer):
    return naive.per_sample_gradients(
        model, x, target, list(layer.parameters())
    )


def plain_network() -> nn.Module:
    return nn.Sequential(
        nn.Linear(5, 4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 3)
    )


@pytest.mark.parametrize("form", ["explicit", "implicit", "merged", "auto"])
def test_relative_damping_is_a_fraction_of_the_largest_eigenvalue(form):
    model = plain_network()
    x, target = torch.randn(8, 5), torch.randn(8, 3)
    want = []
    for layer in (model[0], model[2], model[3]):
        u = layer_gradients(model, x, target, layer)
        M = naive.fisher(u)
        lam = 0.2 * float(torch.linalg.eigvalsh(M)[-1])
        want.append(lam * naive.dense_direction(M, u.mean(0), lam))
    before = parameters(model)
    opt = seng.SENG(
        model,
        lr=1.0,
        momentum=0.0,
        damping=0.2,
        curvature=uncentred(form, rank=99),
    )
    naive.loss_of(model(x), target).backward()
    opt.step()
    assert (
        naive.relative_error(before - parameters(model), torch.cat(want))
        < 1e-9
    )


def test_decay_accumulates_the_curvature_of_refreshes():
    """M ← δM + (1 − δ)M_new, the first with weight 1; for every layer, the norm's too."""
    model = plain_network()
    curvature = uncentred(decay=0.7, relative_damping=False, rank=99)
    opt = seng.SENG(
        model,
        lr=0.1,
        momentum=0.0,
        damping=0.3,
        recipe="paper",
        refresh_every=2,
        curvature=curvature,
    )
    layers = (model[0], model[2], model[3])
    M = {}
    for step in range(7):
        x, target = torch.randn(6, 5), torch.randn(6, 3)
        want = []
        for layer in layers:
            u = layer_gradients(model, x, target, layer)
            if step % 2 == 0:
                M[layer] = (
                    0.7 * M[layer] + 0.3 * naive.fisher(u)
                    if layer in M
                    else naive.fisher(u)
                )
            want.append(0.1 * naive.dense_direction(M[layer], u.mean(0), 0.3))
        before = parameters(model)
        opt.zero_grad()
        naive.loss_of(model(x), target).backward()
        opt.step()
        assert (
            naive.relative_error(before - parameters(model), torch.cat(want))
            < 1e-9
        )


def test_decay_of_an_embedding():
    model = nn.Embedding(6, 3)
    curvature = uncentred(decay=0.5, relative_damping=False, rank=99)
    opt = seng.SENG(
        model,
        lr=1.0,
        momentum=0.0,
        damping=0.3,
        recipe="paper",
        refresh_every=1,
        curvature=curvature,
    )
    M = None
    for _ in range(3):
        x, target = torch.randint(6, (5, 4)), torch.randn(5, 4, 3)
        u = naive.per_sample_gradients(model, x, target)
        M = naive.fisher(u) if M is None else 0.5 * M + 0.5 * naive.fisher(u)
        before = parameters(model)
        opt.zero_grad()
        naive.loss_of(model(x), target).backward()
        opt.step()
        assert (
            naive.relative_error(
                before - parameters(model),
                naive.dense_direction(M, u.mean(0), 0.3),
            )
            < 1e-9
        )


def test_groups_take_their_own_values_and_a_changed_damping_acts_at_the_next_step():
    model = plain_network()
    groups = [
        {
            "params": [*model[0].parameters(), *model[2].parameters()],
            "lr": 0.5,
            "damping": 0.1,
        },
        {"params": [model[3].weight]},
        {"params": [model[3].bias], "lr": 0.25, "weight_decay": 0.1},
    ]
    opt = seng.SENG(
        groups,
        lr=1.0,
        momentum=0.0,
        damping=0.7,
        module=model,
        curvature=uncentred(relative_damping=False, rank=99),
        refresh_every=9,
    )
    x, target = torch.randn(6, 5), torch.randn(6, 3)
    M = {}
    for damping in (0.7, 0.2):
        opt.param_groups[1]["damping"] = opt.param_groups[2]["damping"] = (
            damping
        )
        want = []
        for layer, lam, lrs, decays in (
            (model[0], 0.1, (0.5, 0.5), (0, 0)),
            (model[2], 0.1, (0.5, 0.5), (0, 0)),
            (model[3], damping, (1.0, 0.25), (0, 0.1)),
        ):
            u = layer_gradients(model, x, target, layer)
            M.setdefault(layer, naive.fisher(u))
            d = lam * naive.dense_direction(M[layer], u.mean(0), lam)
            parts = d.split([p.numel() for p in layer.parameters()])
            for part, p, lr, decay in zip(
                parts, layer.parameters(), lrs, decays, strict=True
            ):
                want.append(lr * (part + decay * p.detach().flatten()))
        before = parameters(model)
        opt.zero_grad()
        naive.loss_of(model(x), target).backward()
        opt.step()
        assert (
            naive.relative_error(before - parameters(model), torch.cat(want))
            < 1e-9
        )


def test_a_layer_takes_the_damping_of_its_weights_group():
    """Many scripts put weights and biases into two groups."""
    ends = []
    for of_bias in (0.3, 0.5):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        weights = {"params": [model.weight], "damping": 0.3}
        biases = {"params": [model.bias], "damping": of_bias}
        opt = seng.SENG([biases, weights], module=model)
        naive.loss_of(model(torch.randn(4, 3)), torch.randn(4, 2)).backward()
        opt.step()
        ends.append(parameters(model))
    assert torch.equal(*ends)


def test_what_has_no_recipes_default_is_not_none():
    with pytest.raises(TypeError, match="weight_decay is a number, not None"):
        seng.SENG(network(), weight_decay=None)


def test_layers_of_another_power_are_refreshed_at_the_step_after_loading():
    """Though others' curvature was kept."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(2, 2, 1), nn.Flatten(), nn.Linear(4, 3))
    x = torch.randn(6, 2, 2)
    opt = seng.KFAC(model, power=1)
    model(x).square().mean().backward()
    opt.step()
    other = seng.KFAC(model, refresh_every=20)
    with pytest.warns(UserWarning, match="of 1 layers is of another kind"):
        other.load_state_dict(opt.state_dict())
    assert other.refresh_due
    other.zero_grad()
    model(x).square().mean().backward()
    other.step()
    assert other.last_refresh == 1 and not other.refresh_due
    cosines = [entry["cosine"] for entry in other.diagnostics().values()]
    assert len(cosines) == 2 and max(cosines) < 1


def test_a_period_that_grows_survives_a_checkpoint():
    """Each phase begins with a refresh; the steps count on after loading."""
    torch.manual_seed(0)
    model, x = nn.Linear(4, 3), torch.randn(6, 4)
    grows = {0: 2, 5: 3, 12: 5}
    want = [0, 2, 4, 5, 8, 11, 12, 17]
    opt, found = seng.SENG(model, refresh_every=grows), []
    for step in range(20):
        if step == 7:
            saved = opt.state_dict()
            opt = seng.SENG(model, refresh_every=grows)
            opt.load_state_dict(saved)
        opt.zero_grad()
        model(x).square().mean().backward()
        opt.step()
        found.append(opt.last_refresh)
    assert [i for i, last in enumerate(found) if last == i] == want
    assert seng.SENG(model).settings.refresh_every == SGD.refresh_every
    explained = seng.explain(model, x, refresh_every=grows)
    shares = [explained.share(period) for period in grows.values()]
    assert shares == sorted(shares, reverse=True) and shares[0] > shares[2]
    for start, period in grows.items():
        told = f"from step {start} a refresh every {period} steps: "
        assert told in str(explained)


def test_a_scheduler_drives_lr_and_a_closure_is_run():
    model = plain_network()
    opt = seng.SENG(model, lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 1, 0.5)
    x, target = torch.randn(6, 5), torch.randn(6, 3)

    def closure():
        opt.zero_grad()
        loss = naive.loss_of(model(x), target)
        loss.backward()
        return loss

    losses = []
    for _ in range(30):
        losses.append(float(opt.step(closure).detach()))
        scheduler.step()
    assert losses[-1] < losses[0] and opt.param_groups[0]["lr"] < 1e-8
    tensor_lr = seng.SENG(plain_network(), lr=torch.tensor(0.1))
    assert isinstance(tensor_lr.param_groups[0]["lr"], torch.Tensor)


FORMS_TO_SAVE = [
    {},
    *(
        {"form": form, "decay": 0}
        for form in ("explicit", "implicit", "merged")
    ),
    *(
        {"base": None, "form": form, "decay": 0}
        for form in ("explicit", "implicit", "merged")
    ),
    {"form": "implicit", "rank": 3},
    {"base": None, "centred": False},
    {
        "base": None,
        "form": "implicit",
        "rank": 3,
        "combine": "independent",
        "sketch": KroneckerRows(2, 5),
    },
    {"decay": 0.6, "rank": 4, "sketch": Rows(20)},
    *(
        {"base": None, "form": "explicit", "sketch": sketch}
        for sketch in (
            Rows(20),
            LeverageRows(20),
            Gaussian(20),
            CountSketch(20),
        )
    ),
]


@pytest.mark.parametrize("options", FORMS_TO_SAVE, ids=str)
@pytest.mark.parametrize("stop", [4, 6])
def test_resuming_continues_bit_for_bit(options, stop):
    """Saved in the middle of a refresh period (4) and right before a refresh (6), through a file, weights only."""

    def make(seed):
        model = network(seed)
        torch.manual_seed(
            seed + 5
        )  # the sketches' seed comes from here, and the resumed run has another
        return model, seng.SENG(
            model,
            lr=0.02,
            refresh_every=3,
            damping=0.1,
            curvature=seng.Curvature(**options),
        )

    torch.use_deterministic_algorithms(True)
    model, opt = make(0)
    train(model, opt, stop)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, file)
    train(model, opt, 8, stop)

    other, resumed = make(1)
    train(other, resumed, 2)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    other.load_state_dict(state["model"])
    resumed.load_state_dict(state["opt"])
    train(other, resumed, 8, stop)
    torch.use_deterministic_algorithms(False)
    assert torch.equal(parameters(model), parameters(other))


def test_checkpoints_of_sgd_and_without_new_group_options_load():
    model = network()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, sgd, 2)
    opt = seng.SENG(model, lr=0.2)
    opt.load_state_dict(sgd.state_dict())
    assert (
        opt.param_groups[0]["lr"] == 0.1
        and opt.param_groups[0]["damping"] == SGD.damping
    )
    train(model, opt, 3)
    assert parameters(model).isfinite().all()


def test_training_with_sketches_leaves_the_global_random_stream_alone():
    model = network()
    opt = seng.SENG(
        model,
        lr=0.02,
        refresh_every=1,
        curvature=seng.Curvature(
            base=None, form="implicit", rank=2, sketch=Rows(5)
        ),
    )
    torch.manual_seed(3)
    before = torch.get_rng_state()
    train(model, opt, 3)
    assert torch.equal(torch.get_rng_state(), before)


def test_sketches_follow_torch_manual_seed_and_differ_between_seeds():
    def run(seed):
        model = network()
        torch.manual_seed(seed)
        train(
            model,
            seng.SENG(
                model,
                lr=0.02,
                curvature=seng.Curvature(
                    base=None, form="explicit", sketch=Rows(10)
                ),
            ),
            3,
        )
        return parameters(model)

    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))


def test_every_refresh_draws_anew_and_the_steps_between_keep_it():
    model = network()
    opt = seng.SENG(
        model,
        lr=0.0,
        refresh_every=2,
        curvature=seng.Curvature(base=None, form="explicit", sketch=Rows(10)),
    )
    drawn = []
    for i in range(4):
        train(model, opt, 1, i)
        drawn.append(inspect(opt).states[0].omega.index)
    assert (
        torch.equal(drawn[0], drawn[1])
        and torch.equal(drawn[2], drawn[3])
        and not torch.equal(drawn[1], drawn[2])
    )


BAD = {
    "lr must be at least 0": lambda m: seng.SENG(m, lr=-0.1),
    "momentum must be at least 0": lambda m: seng.SENG(m, momentum=-1.0),
    "weight_decay must be at least 0": lambda m: seng.SENG(
        m, weight_decay=-1.0
    ),
    "damping is λ, a number above 0, not -1": lambda m: seng.SENG(
        m, damping=-1.0
    ),
    "damping is λ, a number above 0, not 0": lambda m: seng.SENG(
        m, damping=0.0
    ),
    "damping is λ, a number above 0, not nan": lambda m: seng.SENG(
        m, damping=float("nan")
    ),
    "nesterov needs a momentum": lambda m: seng.SENG(
        m, momentum=0.0, nesterov=True
    ),
    "rank must be an integer of at least 1, not -2": lambda m: seng.Curvature(
        rank=-2
    ),
    "samples must be an integer of at least 1, not 0": lambda m: (
        seng.Curvature(samples=0)
    ),
    "refresh_every is a number of steps, at least 1, or.*, not 0": lambda m: (
        seng.SENG(m, refresh_every=0)
    ),
    "unknown form 'dense'; use one of 'auto', 'explicit'": lambda m: (
        seng.Curvature(form="dense")
    ),
    "unknown combine 'sum'": lambda m: seng.Curvature(combine="sum"),
    "unknown fisher 'true'": lambda m: seng.Curvature(fisher="true"),
    "only the merged form can accumulate": lambda m: seng.Curvature(
        form="explicit", decay=0.5
    ),
    "only the merged form can": lambda m: seng.Curvature(
        form="implicit", decay=0.5
    ),
    r"decay must lie in \[0, 1\), not 1": lambda m: seng.Curvature(decay=1.0),
    "combine='independent' .* is the implicit form's": lambda m: (
        seng.Curvature(base=None, form="merged", combine="independent")
    ),
    "combine='independent' has no Kronecker base; give base=None": lambda m: (
        seng.Curvature(combine="independent")
    ),
    "blocks='network' has no Kronecker base; give base=None with": lambda m: (
        seng.Curvature(blocks="network")
    ),
    "form='explicit' with sketch has no Kronecker base; give base": lambda m: (
        seng.Curvature(form="explicit", sketch=Rows(9))
    ),
    "base.damp='tikhonov' has no Kronecker base": lambda m: seng.Curvature(
        base=seng.Kronecker(damp="tikhonov")
    ),
    "power is the p of C.p, above 0 and at most 1, not 2": lambda m: (
        seng.Kronecker(power=2)
    ),
    "floor is a share of the mean eigenvalue above 0, not 0": lambda m: (
        seng.Kronecker(floor=0)
    ),
    "rank does nothing here, since form='explicit' keeps every": lambda m: (
        seng.Curvature(form="explicit", rank=3)
    ),
    "threshold does nothing here": lambda m: seng.Curvature(threshold=9),
    "combine='independent' has no centred form; leave centred": lambda m: (
        seng.Curvature(base=None, combine="independent", centred=True)
    ),
    "memory is bytes": lambda m: seng.Curvature(memory=-5),
    r"memory is bytes \(an int\) or a fraction in \(0, 1\], not 1.5": lambda m: (
        seng.Curvature(memory=1.5)
    ),
    r"divides by one λ for all layers, over λI: write SENG\(model, \*\*seng": lambda m: (
        seng.SENG(m, recipe="paper")
    ),
    "give Curvature.base=None, relative_damping=False": lambda m: seng.SENG(
        m, recipe="paper", curvature=seng.Curvature(base=None)
    ),
    "unknown recipe 'si'; use one of 'sgd', 'paper', 'adamw', 'muon'": lambda m: (
        seng.SENG(m, recipe="si")
    ),
    "unknown strategy 'ring'": lambda m: seng.SENG(m, strategy="ring"),
    "no layer of Sequential is covered.*a recurrent layer runs its time steps inside one operation": lambda m: (
        seng.SENG(nn.Sequential(nn.LSTM(2, 2)), lr=0.1)
    ),
    "1 of 9 parameters are not the module's": lambda m: seng.SENG(
        [*m.parameters(), nn.Parameter(torch.zeros(3))], module=m
    ),
    "is a module and module=… is another": lambda m: seng.SENG(
        m, module=network()
    ),
    "strict=True: these parameters take the plain gradient: 1.weight_ih_l0": lambda m: (
        seng.SENG(nn.Sequential(nn.Linear(2, 2), nn.LSTM(2, 2)), strict=True)
    ),
    "strict=True: no module was given": lambda m: seng.SENG(
        m.parameters(), strict=True
    ),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input_is_refused_with_the_reason(message):
    model = nn.Sequential(
        nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
    )
    with pytest.raises(ValueError, match=message):
        BAD[message](model)


def test_bad_types_are_refused():
    with pytest.raises(
        TypeError, match="sketch is None or one of seng.sketch"
    ):
        seng.Curvature(sketch="rows")
    with pytest.raises(TypeError, match=r"curvature is a seng\.Curvature"):
        seng.SENG(network(), curvature={"rank": 3})
    with pytest.raises(TypeError, match="unexpected keyword"):
        seng.SENG(network(), dampening=0.1)
    with pytest.raises(ValueError, match="empty parameter list"):
        seng.SENG([])


def test_a_sketch_larger_than_the_layer_is_said_once():
    model = network()
    opt = seng.SENG(
        model,
        lr=0.01,
        refresh_every=1,
        curvature=seng.Curvature(sketch=Rows(10**6)),
    )
    with pytest.warns(
        UserWarning,
        match=r"Rows\(q=1000000, replacement=False\) is larger than layer '0' .*: it is then taken",
    ) as caught:
        train(model, opt, 3)
    assert len(caught) == 1


def test_a_gradient_without_a_capture_is_an_error():
    model = network()
    x, target = batch(0)
    loss = naive.loss_of(
        model(x), target
    )  # the forward ran before the optimizer was there
    opt = seng.SENG(model, lr=0.1)
    loss.backward()
    with pytest.raises(
        RuntimeError,
        match="layer '0' has a gradient but was not captured on this refresh step",
    ):
        opt.step()


def test_parameters_without_a_module_warn_once_and_are_sgd():
    ours, theirs = network(), network()
    with pytest.warns(
        UserWarning, match="in recipe='sgd'; write SENG"
    ) as caught:
        opt = seng.SENG(ours.parameters(), lr=0.1)
    train(ours, opt, 3)
    train(
        theirs, torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9), 3
    )
    assert len(caught) == 1 and torch.equal(
        parameters(ours), parameters(theirs)
    )
    with pytest.raises(RuntimeError, match="built without a module"):
        opt.diagnostics()


def test_uncovered_layers_take_the_plain_gradient_with_one_warning():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.scale = (
                nn.Linear(3, 2),
                nn.Parameter(torch.ones(2)),
            )

        def forward(self, x):
            return self.scale * self.linear(x)

    for recipe, divisor in (("sgd", 1.0), ("paper", 0.3)):
        model = Net()
        with pytest.warns(
            UserWarning, match=r"plain gradient: scale \(no rule for Net"
        ):
            opt = seng.SENG(
                model,
                lr=1.0,
                momentum=0.0,
                damping=0.3,
                recipe=recipe,
                curvature=uncentred(relative_damping=False),
            )
        naive.loss_of(model(torch.randn(4, 3)), torch.randn(4, 2)).backward()
        before = model.scale.detach().clone()
        opt.step()
        torch.testing.assert_close(
            before - model.scale.detach(), model.scale.grad / divisor
        )


BASES = pytest.mark.parametrize(
    "base", [None, seng.Kronecker()], ids=["I", "P"]
)


@BASES
@pytest.mark.parametrize("form", ["explicit", "implicit", "merged"])
def test_zero_gradients_and_zero_curvature(form, base):
    model = nn.Linear(3, 2)
    opt = seng.SENG(
        model,
        lr=0.1,
        curvature=seng.Curvature(base=base, form=form),
        refresh_every=1,
    )
    before = parameters(model)
    (model(torch.zeros(4, 3)) * 0).sum().backward()
    opt.step()
    assert torch.equal(parameters(model), before)
    opt.zero_grad()
    model(torch.zeros(4, 3)).square().sum().backward()
    model.weight.grad.fill_(1.0)  # a gradient where there is no curvature
    model.bias.grad.zero_()
    opt.param_groups[0]["momentum"] = 0.0
    opt.step()
    moved = parameters(model) - before
    if base is None:
        torch.testing.assert_close(moved[:6], torch.full((6,), -0.1))
    else:  # the outputs' factor has curvature
        assert moved.norm().item() == pytest.approx(0.1 * 6**0.5)


@pytest.mark.parametrize("form", ["explicit", "implicit", "merged"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e200])
@BASES
def test_bad_captures_never_reach_the_parameters(form, bad, base):
    """Captures that are not finite (or overflow when squared) drop the refresh; the gradient itself was clipped to be fine."""
    model = nn.Linear(3, 2)
    opt = seng.SENG(
        model,
        lr=0.1,
        refresh_every=1,
        damping=0.1,
        curvature=seng.Curvature(base=base, form=form),
    )
    for step in range(4):
        opt.zero_grad()
        x, scale = torch.randn(4, 3), torch.ones(4, 1)
        if step in (0, 2):
            scale[1] = bad
        naive.loss_of(model(x) * scale, torch.randn(4, 2)).backward()
        for p in model.parameters():
            p.grad.nan_to_num_(0, 0, 0).clamp_(-1, 1)
        if step == 0:
            before = parameters(model)
            with pytest.warns(
                UserWarning,
                match="a refresh was dropped, its captures are not finite",
            ):
                opt.step()
            plain = naive.flat([p.grad for p in model.parameters()])
            torch.testing.assert_close(before - parameters(model), 0.1 * plain)
        else:
            opt.step()
        assert parameters(model).isfinite().all()
    assert opt.diagnostics()["Linear"]["refreshes_dropped"] == 2


def test_a_failed_factorization_falls_back_to_the_plain_gradient_and_is_counted():
    model = nn.Linear(3, 2)
    opt = seng.SENG(
        model,
        lr=0.1,
        momentum=0.0,
        refresh_every=9,
        curvature=uncentred("explicit", relative_damping=False),
    )
    for _ in range(2):
        opt.zero_grad()
        naive.loss_of(model(torch.randn(4, 3)), torch.randn(4, 2)).backward()
        opt.step()
    block = inspect(opt).states[0]
    block.gram.neg_().mul_(1e6)  # nothing that adds jitter can save it
    opt.param_groups[0]["damping"] = 0.02
    opt.zero_grad()
    naive.loss_of(model(torch.randn(4, 3)), torch.randn(4, 2)).backward()
    before = parameters(model)
    opt.step()
    torch.testing.assert_close(
        before - parameters(model),
        0.1 * naive.flat([p.grad for p in model.parameters()]),
    )
    assert opt.diagnostics()["Linear"]["solves_failed"] >= 1


def test_diagnostics_tell_form_rank_and_bytes():
    model = network()
    opt = seng.SENG(model, lr=0.01)
    train(model, opt, 1)
    report = opt.diagnostics()
    assert list(report) == ["0", "1", "4"]
    plans = seng.explain(model, batch(0)[0]).plans
    forms = [entry["form"] for entry in report.values()]
    assert forms == [plan.form for plan in plans]
    bases = [entry["base"] for entry in report.values()]
    assert bases == ["kronecker", "diagonal", "kronecker"]
    for entry in report.values():
        assert entry["bytes"] > 0 and entry["top_eigenvalue"] > 0
        assert (
            1 <= entry["effective_rank"] <= entry["columns"]
            and entry["solves_failed"] == 0
        )


def test_what_is_kept_of_a_kronecker_metric_alone():
    model = network()
    opt = seng.KFAC(model, lr=0.01)
    train(model, opt, 1)
    report = opt.diagnostics()
    bases = [entry["base"] for entry in report.values()]
    assert bases == ["kronecker", "diagonal", "kronecker"]
    for entry in report.values():
        assert entry["form"] == "power" and entry["columns"] == 0
        assert entry["bytes"] > 0 and entry["damping"] is None
        assert entry["norm_ratio"] == pytest.approx(1)
        assert entry["effective_rank"] >= 1 and entry["top_eigenvalue"] > 0


def test_the_default_is_a_curvature_s_defaults():
    """The README's one line; and what `attach` takes is the same."""
    model, twin = network(), network()
    opt = seng.SENG(model, lr=0.01)
    sgd = torch.optim.SGD(twin.parameters(), lr=0.01, momentum=0.9)
    handle = seng.attach(sgd, twin)
    kept = [inspect(each).metric.curvature for each in (handle, opt)]
    assert kept == [seng.Curvature(), seng.Curvature()]
    usual = kept[0]
    assert usual.form == "auto" and usual.centres and not usual.sketches
    assert usual.base == seng.Kronecker()
    for each in (handle, opt):
        assert each.engine.settings.refresh_every == SGD.refresh_every
    assert handle.damping == opt.param_groups[0]["damping"] == SGD.damping


def test_refresh_on_the_first_step_and_then_every_T():
    model = network()
    opt = seng.SENG(model, lr=0.01, refresh_every=4)
    due = []
    for i in range(9):
        due.append(opt.refresh_due)
        train(model, opt, 1, i)
    assert due == [True, False, False, False, True, False, False, False, True]


def test_add_param_group_covers_the_new_layer():
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    opt = seng.SENG(
        [{"params": list(model[0].parameters())}],
        lr=0.1,
        module=model,
        refresh_every=2,
    )
    x, target = torch.randn(6, 5), torch.randn(6, 3)

    def step():
        opt.zero_grad()
        naive.loss_of(model(x), target).backward()
        opt.step()

    step()
    opt.add_param_group({"params": list(model[2].parameters()), "lr": 0.05})
    step()
    step()
    assert opt.diagnostics()["2"]["base"] == "kronecker"
    assert inspect(opt).steps == 3
    assert len(model[0]._forward_hooks) == 1


def test_every_combination_of_options_trains():
    for base, form, combine, sketch, relative, samples in itertools.product(
        (None, seng.Kronecker()),
        ("auto", "explicit", "implicit", "merged"),
        ("exact", "independent"),
        (None, Rows(16), KroneckerRows(3, 4)),
        (True, False),
        (None, 4),
    ):
        independent = combine == "independent"
        kept = form in ("explicit", "implicit")
        if independent and form in ("explicit", "merged"):
            continue
        if base is not None and (independent or (kept and sketch)):
            continue
        model = network()
        rank = {} if form == "explicit" else {"rank": 3}
        curvature = seng.Curvature(
            base=base,
            form=form,
            combine=combine,
            sketch=sketch,
            relative_damping=relative,
            samples=samples,
            **rank,
        )
        opt = seng.SENG(
            model, lr=0.001, damping=0.5, refresh_every=2, curvature=curvature
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            train(model, opt, 3)
        assert parameters(model).isfinite().all()


def test_float32_and_bfloat16_parameters_solve_in_float32():
    for dtype in (torch.float32, torch.bfloat16):
        model = plain_network().to(dtype)
        opt = seng.SENG(model, lr=0.01)
        loss = naive.loss_of(
            model(torch.randn(6, 5, dtype=dtype)),
            torch.randn(6, 3, dtype=dtype),
        )
        loss.backward()
        opt.step()
        assert inspect(opt).states[0].P.G.V.dtype == torch.float32
        assert inspect(opt).states[0].gram.dtype == torch.float32
        assert (
            model[0].weight.dtype == dtype and model[0].weight.isfinite().all()
        )


def test_sparse_and_complex_are_refused():
    table = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 2))
    with pytest.warns(UserWarning, match="sparse gradients"):
        opt = seng.SENG(table, lr=0.1)
    table(torch.randint(5, (4,))).sum().backward()
    with pytest.raises(
        RuntimeError, match="does not support sparse gradients"
    ):
        opt.step()
    with pytest.warns(
        UserWarning, match="complex parameters are not supported"
    ):
        seng.SENG(
            nn.Sequential(
                nn.Linear(2, 2, dtype=torch.complex128), nn.Linear(2, 2)
            ),
            lr=0.1,
        )


def test_deepcopied_model_trains_on_its_own():
    model = network()
    opt = seng.SENG(model, lr=0.01, refresh_every=1)
    twin = copy.deepcopy(model)
    x, target = batch(0)
    naive.loss_of(twin(x), target).backward()
    assert inspect(opt).waiting == 0


@pytest.mark.parametrize(
    "how",
    [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))],
    ids=["deepcopy", "pickle"],
)
def test_a_copy_of_model_and_optimizer_trains_alike_and_apart(how):
    model = network()
    opt = seng.SENG(model, lr=0.02, refresh_every=3)
    train(model, opt, 4)
    twin, its_opt = how((model, opt))
    assert inspect(its_opt).sites[0].lead is twin[0].weight
    before = parameters(twin)
    train(model, opt, 4, 4)
    assert torch.equal(parameters(twin), before)
    train(twin, its_opt, 4, 4)
    assert torch.equal(parameters(twin), parameters(model))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e25])
@pytest.mark.parametrize(
    "options",
    [
        {"form": "implicit"},
        {"base": None, "form": "implicit"},
        {"base": None, "combine": "independent", "form": "implicit"},
    ],
    ids=str,
)
def test_bad_captures_of_reduced_factors(bad, options):
    model = nn.Sequential(nn.Conv2d(4, 6, 3)).float()
    opt = seng.SENG(
        model,
        lr=0.01,
        refresh_every=9,
        curvature=seng.Curvature(rank=2, **options),
    )
    for step in range(3):
        opt.zero_grad()
        scale = torch.ones(4, 1, 1, 1).float()
        scale[1] = bad if step == 0 else 1.0
        (model(torch.randn(4, 4, 6, 6).float()) * scale).square().sum(
            (1, 2, 3)
        ).mean().backward()
        for p in model.parameters():
            p.grad.nan_to_num_(0, 0, 0).clamp_(-1, 1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            opt.step()
        assert parameters(model).isfinite().all()
    assert (
        opt.diagnostics()["0"]["form"] != "plain"
    )  # the owed refresh was made up for at the next step


def test_a_refresh_that_could_not_be_made_is_made_at_the_next_step():
    model = network()
    opt = seng.SENG(model, lr=0.01, refresh_every=50)
    opt.step()  # no gradients yet
    assert opt.refresh_due
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    opt.step()  # zeros, as tools make them to fill an optimizer's state
    assert opt.refresh_due
    train(model, opt, 1)
    assert not opt.refresh_due
    assert opt.diagnostics()["0"]["base"] == "kronecker"
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    opt.load_state_dict(sgd.state_dict())
    assert opt.refresh_due


def test_add_param_group_that_completes_a_layer_or_is_refused():
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    opt = seng.SENG(
        [model[0].weight, model[2].weight],
        lr=0.1,
        module=model,
        refresh_every=2,
    )
    x, target = torch.randn(6, 5), torch.randn(6, 3)

    def step():
        opt.zero_grad()
        naive.loss_of(model(x), target).backward()
        opt.step()

    step()
    with pytest.raises(ValueError, match="are not the module's"):
        opt.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    step()
    opt.add_param_group({"params": [model[0].bias, model[2].bias]})
    step()
    assert (
        len(inspect(opt).layers[0].active) == 2 and len(opt.param_groups) == 2
    )


def test_a_checkpoint_of_other_shapes_or_damping_loads_without_its_curvature():
    small, large = nn.Linear(3, 4), nn.Linear(4, 3)
    saved, other = (
        seng.SENG(m, lr=0.1, momentum=0.0, curvature=seng.Curvature(base=None))
        for m in (small, large)
    )
    small(torch.randn(5, 3)).square().mean().backward()
    saved.step()
    other.load_state_dict(saved.state_dict())
    assert not inspect(other).states and other.refresh_due
    absolute = seng.SENG(
        small,
        lr=0.1,
        recipe="paper",
        curvature=seng.Curvature(base=None, relative_damping=False),
    )
    absolute.load_state_dict(saved.state_dict())
    assert not inspect(absolute).states[0].relative


@pytest.mark.parametrize("value", [0.0, -0.5, float("nan"), None])
def test_a_damping_that_goes_bad_later_is_refused(value):
    model = network()
    opt = seng.SENG(model, lr=0.01)
    train(model, opt, 1)
    opt.param_groups[0]["damping"] = value
    with pytest.raises((ValueError, TypeError), match="damping is"):
        train(model, opt, 1)


def test_a_curvature_can_be_varied_field_by_field():
    for field, value in (
        ("form", "explicit"),
        ("base", None),
        ("base", seng.Kronecker(rank=8)),
        ("rank", 3),
    ):
        assert (
            getattr(
                dataclasses.replace(seng.Curvature(), **{field: value}), field
            )
            == value
        )


def test_only_the_same_parameters_are_accumulated():
    model = nn.LayerNorm(4)
    nn.init.normal_(model.weight)
    curvature = uncentred(decay=0.8, relative_damping=False)
    opt = seng.SENG(
        model,
        lr=0.1,
        momentum=0.0,
        damping=0.3,
        recipe="paper",
        refresh_every=1,
        curvature=curvature,
    )
    for trained, frozen in (
        (model.weight, model.bias),
        (model.bias, model.weight),
    ):
        trained.requires_grad_(True)
        frozen.requires_grad_(False)
        x, target = torch.randn(6, 4), torch.randn(6, 4)
        u = naive.per_sample_gradients(model, x, target, [trained])
        before = trained.detach().clone()
        opt.zero_grad()
        naive.loss_of(model(x), target).backward()
        opt.step()
        want = 0.1 * naive.dense_direction(naive.fisher(u), u.mean(0), 0.3)
        assert naive.relative_error(before - trained.detach(), want) < 1e-9


def test_a_kronecker_sketch_with_one_side_too_large_says_which():
    model = network()
    opt = seng.SENG(
        model,
        lr=0.01,
        curvature=seng.Curvature(sketch=KroneckerRows(10**6, 3)),
    )
    with pytest.warns(
        UserWarning, match="that side of it is then taken exactly"
    ):
        train(model, opt, 1)


def test_failed_solves_are_remembered_and_reported():
    model = nn.Linear(3, 2)
    opt = seng.SENG(
        model,
        lr=0.1,
        refresh_every=2,
        curvature=seng.Curvature(form="explicit"),
    )

    def step():
        opt.zero_grad()
        naive.loss_of(model(torch.randn(4, 3)), torch.randn(4, 2)).backward()
        opt.step()

    step()
    inspect(opt).states[0].failures.add_(3)
    step()
    with pytest.warns(
        UserWarning, match="3 solves failed and took the plain gradient"
    ):
        step()
    assert opt.diagnostics()["Linear"]["solves_failed"] == 3


def test_the_papers_plan_keeps_small_layers_exact():
    """combine="independent" with form="auto": below the threshold U is explicit, and no factor is reduced on the way."""
    model = nn.Conv2d(2, 3, 3)
    x, target = torch.randn(5, 2, 8, 8), torch.randn(5, 3, 6, 6)
    curvature = seng.Curvature(
        base=None, combine="independent", rank=1, relative_damping=False
    )
    opt = seng.SENG(
        model,
        lr=1.0,
        momentum=0.0,
        damping=0.3,
        recipe="paper",
        curvature=curvature,
    )
    u = naive.per_sample_gradients(model, x, target)
    before = parameters(model)
    naive.loss_of(model(x), target).backward()
    opt.step()
    assert (
        naive.relative_error(
            before - parameters(model),
            naive.dense_direction(naive.fisher(u), u.mean(0), 0.3),
        )
        < 1e-9
    )


def test_loading_between_backward_and_step_is_made_up_for():
    model = network()
    opt = seng.SENG(model, lr=0.01, refresh_every=5)
    x, target = batch(0)
    naive.loss_of(model(x), target).backward()
    opt.load_state_dict(opt.state_dict())
    opt.step()
    assert opt.refresh_due
    train(model, opt, 1)
    assert not opt.refresh_due and len(inspect(opt).states) == 3


def step_of_large_layers(curvature):
    model = nn.Sequential(nn.BatchNorm1d(500), nn.Linear(500, 500))
    opt = seng.SENG(model, lr=0.1, strict=True, curvature=curvature)
    model(torch.randn(16, 500)).square().mean().backward()
    opt.step()
    return opt


REPLACED = seng.Curvature(rank=8, samples=32, base=seng.Kronecker(rank=32))
ACCUMULATED = seng.Curvature(rank=16, decay=0.8, base=seng.Kronecker(rank=32))


@pytest.mark.parametrize(
    ("memory", "advice"),
    [
        (
            40_000,
            "where memory=40000 allows 39.1 KiB: use fewer samples, another form",
        ),
        (
            5_000_000,
            "where memory=5000000 allows 4.8 MiB: "
            r"rank=2 and base=Kronecker\(rank=4\) would fit",
        ),
    ],
)
def test_curvature_that_memory_does_not_allow_is_refused_with_what_would_fit(
    memory, advice
):
    curvature = dataclasses.replace(ACCUMULATED, memory=memory)
    with pytest.raises(
        ValueError, match=f"the curvature needs 31.0 MiB {advice}"
    ):
        step_of_large_layers(curvature)


@pytest.mark.parametrize(
    "curvature", [REPLACED, ACCUMULATED], ids=["replaced", "averaged"]
)
def test_what_would_fit_into_memory_does(curvature):
    found = step_of_large_layers(curvature).diagnostics().values()
    memory = int(0.8 * sum(entry["bytes"] for entry in found))
    short = dataclasses.replace(curvature, memory=memory)
    with pytest.raises(ValueError, match="would fit") as refused:
        step_of_large_layers(short)
    ranks = re.findall(r"rank=(\d+)", str(refused.value))
    of_U, of_P = map(int, ranks)
    base = seng.Kronecker(rank=of_P)
    fits = dataclasses.replace(short, rank=of_U, base=base)
    found = step_of_large_layers(fits).diagnostics().values()
    assert sum(entry["bytes"] for entry in found) <= memory


def test_a_step_like_the_last_one_sorts_nothing_again(monkeypatch):
    """Also where a layer is frozen; and what changes is seen."""
    calls = []
    plan = Engine._plan
    monkeypatch.setattr(
        Engine, "_plan", lambda *args: calls.append(1) or plan(*args)
    )
    model = nn.Sequential(
        nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 2)
    )
    model[0].requires_grad_(False)
    damping = torch.tensor(0.1)
    opt = seng.SENG(model, lr=0.1, refresh_every=100, damping=damping)
    for step in range(8):
        opt.zero_grad()
        model(torch.randn(6, 4)).square().mean().backward()
        if step == 4:
            damping.fill_(0.5)
        if step == 6:
            model[4].bias.grad = None
        opt.step()
    assert (
        len(calls) == 4
    )  # the first, another damping, another set of gradients and back
    layer = inspect(opt).layers[1]
    g = torch.randn(18)
    torch.testing.assert_close(layer.solver(g), layer.state.at(0.5)(g))


def test_no_positions_are_no_samples_of_curvature():
    layer = nn.Linear(7, 3)
    opt = seng.SENG(layer, lr=0.1)
    layer(torch.randn(4, 0, 7)).sum().backward()
    opt.step()
    assert all(p.isfinite().all() for p in layer.parameters())


# Recipes and their options


def sgd_of(p, **options):
    return torch.optim.SGD(p, lr=0.3, momentum=0.5, **options)


BUILT = {
    "sgd": (seng.SENG, 0.1, {"momentum": 0.9, "nesterov": False}),
    "paper": (
        lambda m, **o: seng.SENG(m, **seng.presets.paper(), **o),
        0.05,
        {"momentum": 0.9, "nesterov": False},
    ),
    "adamw": (
        functools.partial(seng.SENG, recipe="adamw"),
        0.001,
        {"betas": (0.9, 0.999), "eps": 1e-8},
    ),
    "muon": (
        functools.partial(seng.SENG, recipe="muon"),
        0.02,
        RECIPES["muon"].options,
    ),
}
COMMON = {"params", "lr", "weight_decay", "damping", "maximize"}


@pytest.mark.parametrize("recipe", BUILT)
def test_a_group_holds_its_recipe_s_keys_and_no_more(recipe):
    build, lr, options = BUILT[recipe]
    (group,) = build(network()).param_groups
    assert group["lr"] == lr and set(group) == COMMON | set(options)
    assert {name: group[name] for name in options} == options
    (given,) = build(network(), lr=0.3).param_groups
    assert given["lr"] == 0.3


@pytest.mark.parametrize("recipe", ["sgd", "adamw", "muon"])
def test_kfac_damped_by_its_floor_has_no_damping_in_its_groups(recipe):
    lr, options = BUILT[recipe][1:]
    (group,) = seng.KFAC(network(), recipe=recipe).param_groups
    assert group["lr"] == lr
    assert set(group) == COMMON - {"damping"} | set(options)
    model = plain_network()[0]
    headed = nn.Sequential(model, nn.Linear(4, 3))
    other = {"sgd": model, "adamw": model, "muon": headed}
    (group,) = seng.KFAC(
        other[recipe], recipe=recipe, damp="tikhonov"
    ).param_groups
    assert set(group) == COMMON | set(options) and group["damping"] == 0.3


FOREIGN = {
    "betas": ("sgd", {"betas": (0.9, 0.99)}),
    "eps": ("sgd", {"eps": 1e-8}),
    "betas of muon": ("muon", {"betas": (0.9, 0.99)}),
    "momentum": ("adamw", {"momentum": 0.9}),
    "nesterov": ("adamw", {"nesterov": True}),
}


@pytest.mark.parametrize("build", [seng.SENG, seng.KFAC])
@pytest.mark.parametrize(("recipe", "given"), FOREIGN.values(), ids=FOREIGN)
def test_an_option_of_another_recipe_is_refused_by_name(build, recipe, given):
    (name,) = given
    words = f"{build.__name__} has no option {name} with this recipe"
    with pytest.raises(ValueError, match=words):
        build(network(), recipe=recipe, **given)
    (opt,) = [build(network(), recipe=recipe)]
    before = [dict(group) for group in opt.param_groups]
    layer = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=words):
        opt.add_param_group({"params": layer.parameters(), **given})
    assert [dict(group) for group in opt.param_groups] == before


@pytest.mark.parametrize(
    ("recipe", "given", "words"),
    [
        ("sgd", {"adam_lr": 1.0}, "has no option adam_lr"),
        ("sgd", {"module": None}, "module holds for the whole optimizer"),
        ("sgd", {"dampening": 0.1}, "has no dampening, and the group asks"),
        ("sgd", {"nesterov": True, "momentum": 0.0}, "nesterov needs a mom"),
        ("muon", {"ns_steps": 100}, "ns_steps is a count below 100"),
        ("muon", {"lr": -1.0}, "lr must be at least 0"),
        ("adamw", {"betas": (0.9,)}, "betas are two numbers"),
    ],
)
def test_a_group_that_is_refused_leaves_the_optimizer_as_it_was(
    recipe, given, words
):
    model = network()
    opt = seng.SENG(model[0].parameters(), module=model, recipe=recipe)
    train(model, opt, 1)
    before = repr(opt)
    group = {"params": [*model[1].parameters(), *model[4].parameters()]}
    with pytest.raises(ValueError, match=words):
        opt.add_param_group({**group, **given})
    assert repr(opt) == before
    opt.add_param_group(group)
    train(model, opt, 2)
    assert len(opt.param_groups) == 2


def test_a_recipe_s_own_options_are_taken():
    (group,) = seng.SENG(
        network(), recipe="muon", nesterov=False, eps=1e-5
    ).param_groups
    assert group["nesterov"] is False and group["eps"] == 1e-5


of_lr = torch.optim.lr_scheduler
SCHEDULERS = {
    "OneCycleLR": lambda opt: of_lr.OneCycleLR(opt, 0.05, total_steps=20),
    "CosineAnnealingLR": lambda opt: of_lr.CosineAnnealingLR(opt, 9),
    "LambdaLR": lambda opt: of_lr.LambdaLR(opt, lambda step: 0.9**step),
    "CyclicLR": lambda opt: of_lr.CyclicLR(opt, 0.01, 0.05),
}


@pytest.mark.parametrize("recipe", ["sgd", "adamw", "muon"])
@pytest.mark.parametrize("which", SCHEDULERS)
def test_keys_of_schedulers_are_let_be_and_come_back(recipe, which):
    model = network()
    opt = seng.SENG(model, 0.02, recipe=recipe)
    bare = set(opt.param_groups[0])
    scheduler = SCHEDULERS[which](opt)
    train(model, opt, 1)
    scheduler.step()
    state = copy.deepcopy(opt.state_dict())
    other = seng.SENG(model, 0.02, recipe=recipe)
    other.load_state_dict(state)
    keys = opt.param_groups[0].keys()
    assert other.param_groups[0].keys() == keys
    assert "initial_lr" in keys - bare
    train(model, other, 1)


@pytest.mark.parametrize("recipe", ["sgd", "muon"])
def test_one_cycle_cycles_the_momentum_that_acts(recipe):
    model = network()
    opt = seng.SENG(model, 0.02, recipe=recipe)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        opt, 0.05, total_steps=10, base_momentum=0.5, max_momentum=0.8
    )
    seen = []
    for i in range(6):
        seen.append(opt.param_groups[0]["momentum"])
        before = copy.deepcopy(opt.state[model[4].bias])
        train(model, opt, 1, i)
        if recipe == "sgd" and before:
            mu = seen[-1]
            b = opt.state[model[4].bias]["momentum_buffer"]
            rest = b - mu * before["momentum_buffer"]
            assert rest.norm() > 0
        scheduler.step()
    assert seen[0] == 0.8 and min(seen) == pytest.approx(0.5)


OTHERS = {
    "SGD": sgd_of,
    "SGD, nesterov": lambda p: sgd_of(p, nesterov=True),
    "AdamW": lambda p: torch.optim.AdamW(p, 0.3, amsgrad=True),
    "Muon": lambda p: torch.optim.Muon([q for q in p if q.dim() == 2], 0.3),
}


@pytest.mark.parametrize("recipe", BUILT)
@pytest.mark.parametrize("which", OTHERS)
def test_groups_of_other_optimizers_checkpoints_lose_their_own_keys(
    recipe, which
):
    """torch's foreach, fused, … go, and so do another recipe's options."""
    model = nn.Sequential(
        nn.Linear(3, 4, bias=False), nn.Linear(4, 2, bias=False)
    )
    theirs = OTHERS[which](list(model.parameters()))
    opt = BUILT[recipe][0](model)
    keys, defaults = opt.param_groups[0].keys(), dict(opt.defaults)
    opt.load_state_dict(theirs.state_dict())
    (group,) = opt.param_groups
    assert group.keys() == keys and group["lr"] == 0.3
    if which.startswith("SGD") and "momentum" in defaults:
        assert group["momentum"] == 0.5
    if which == "AdamW" and "momentum" in defaults and recipe != "muon":
        assert group["momentum"] == defaults["momentum"]
    model(torch.randn(5, 3)).square().mean().backward()
    opt.step()
    assert parameters(model).isfinite().all()


@pytest.mark.parametrize("build", [seng.SENG, seng.KFAC])
@pytest.mark.parametrize("recipe", ["sgd", "adamw", "muon"])
def test_without_a_module_the_warning_names_recipe_and_class(build, recipe):
    name = build.__name__
    words = f"in recipe='{recipe}'; write {name}.model, …., or module=model"
    with pytest.warns(UserWarning, match=words):
        build(network().parameters(), recipe=recipe)


@pytest.mark.parametrize(
    "build",
    [
        functools.partial(seng.SENG, recipe="muon"),
        functools.partial(seng.SENG, recipe="adamw"),
        seng.KFAC,
        functools.partial(seng.KFAC, recipe="muon"),
        seng.Muon,
    ],
    ids=["SENG, muon", "SENG, adamw", "KFAC", "KFAC, muon", "Muon"],
)
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "file"])
def test_copies_of_every_optimizer_go_on_alike(build, how):
    model = network()
    opt = build(model, 0.02)
    train(model, opt, 4)
    if how == "file":
        file = io.BytesIO()
        torch.save(opt.state_dict(), file)
        file.seek(0)
        twin = copy.deepcopy(model)
        other = build(twin, 0.02)
        other.load_state_dict(torch.load(file, weights_only=True))
    elif how == "deepcopy":
        twin, other = copy.deepcopy((model, opt))
    else:
        twin, other = pickle.loads(pickle.dumps((model, opt)))
    train(model, opt, 3, 4)
    train(twin, other, 3, 4)
    assert torch.equal(parameters(model), parameters(twin))


def test_explain_lists_what_a_recipe_leaves_to_adamw():
    model = nn.Sequential(
        nn.Embedding(5, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 5)
    )
    tokens = torch.randint(5, (6, 3))
    usual = seng.explain(model, tokens)
    assert len(usual.plans) == 4 and not usual.uncovered
    told = seng.explain(model, tokens, recipe="muon")
    assert [p.dims.name for p in told.plans] == ["1"]
    opt = seng.SENG(model, recipe="muon")
    assert told.uncovered == inspect(opt).uncovered
    table = "AdamW's step: 0.weight: it is no matrix: it takes AdamW's step"
    head = "AdamW's step: 3.bias: the head takes AdamW's step"
    assert table in str(told) and head in str(told)
    with pytest.raises(ValueError, match="unknown recipe 'cube'"):
        seng.explain(model, tokens, recipe="cube")
