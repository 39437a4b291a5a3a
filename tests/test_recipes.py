"""Recipes: every optimizer trains, every hyperparameter arrives, and what is mistyped is refused with what was meant."""

import math

import pytest
import torch
from torch import nn

import seng
from seng.lab.muon import MuonAndAdamW
from seng.lab.recipe import Between, OneOf
from seng.lab.recipes import RECIPES, recipe
from seng.tell.inspection import inspect


def network():
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(4 * 36, 12),
        nn.ReLU(),
    ]
    return nn.Sequential(*layers, nn.Linear(12, 3)).float()


def batch():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(
        32, 1, 6, 6, generator=generator, dtype=torch.float32
    ), torch.arange(32) % 3


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.filterwarnings(
    "ignore:seng"
)  # K-FAC leaves norms to the plain gradient and says so
def test_every_optimizer_trains(name):
    model, (x, y) = network(), batch()
    made = recipe(name)
    opt = made.optimizer(model)
    losses = []
    for _ in range(30):
        made.follow(opt.param_groups, 0.5, 10)
        opt.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.filterwarnings("ignore:seng")
def test_every_optimizer_goes_on_from_its_state(name):
    ends = []
    for interrupted in (False, True):
        model, (x, y) = network(), batch()
        opt = recipe(name).optimizer(model)
        for i in range(8):
            if interrupted and i == 5:
                twin = network()
                twin.load_state_dict(model.state_dict())
                model, state = twin, opt.state_dict()
                opt = recipe(name).optimizer(model)
                opt.load_state_dict(state)
            opt.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            opt.step()
        ends.append(
            torch.cat([p.detach().flatten() for p in model.parameters()])
        )
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", RECIPES)
def test_what_a_search_varies_is_a_field_and_its_default_lies_inside(name):
    made = recipe(name)
    for field, space in made.space.items():
        value = getattr(made, field)
        if isinstance(space, Between):
            assert space.low <= value <= space.high, field
        else:
            assert isinstance(space, OneOf) and value in space.values, field


@pytest.mark.filterwarnings("ignore:seng")
def test_every_hyperparameter_arrives():
    model = network()
    opt = recipe(
        "seng",
        {
            "lr": "0.3",
            "damping": 0.2,
            "rank": "9",
            "average": "0",
            "samples": 7,
            "refresh_every": "5",
        },
    )
    built = opt.optimizer(model)
    assert (
        isinstance(built, seng.SENG)
        and built.defaults["lr"] == 0.3
        and built.defaults["damping"] == 0.2
    )
    curvature = inspect(built).metric.curvature
    assert (curvature.rank, curvature.decay, curvature.samples) == (9, 0.0, 7)
    assert built.settings.refresh_every == 5
    assert recipe("seng", {"samples": "none"}).curvature.samples is None
    paper = inspect(recipe("seng-paper").optimizer(model)).metric.curvature
    assert (paper.relative_damping, paper.decay, paper.combine) == (
        False,
        0.0,
        "independent",
    )
    kfac = recipe("kfac", {"average": 0.5}).optimizer(model)
    assert inspect(kfac).metric.decay == 0.5
    assert recipe("adam", {"beta1": 0.8}).optimizer(model).defaults[
        "betas"
    ] == (
        0.8,
        0.999,
    )
    assert set(recipe("sgd").values()) >= {
        "lr",
        "momentum",
        "nesterov",
        "weight_decay",
        "schedule",
        "warmup",
        "rate",
    }


@pytest.mark.filterwarnings("ignore:seng")
def test_with_a_large_damping_kfac_is_sgd_norms_and_weight_decay_too():
    ends = []
    for name, own in (("sgd", {}), ("kfac", {"damping": 1e7})):
        model, (x, y) = network(), batch()
        made = recipe(
            name, {"lr": 0.1, "weight_decay": 0.05, "nesterov": False, **own}
        )
        opt = made.optimizer(model)
        for step in range(5):
            made.follow(opt.param_groups, step / 5, 2)
            opt.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            opt.step()
        ends.append(
            torch.cat([p.detach().flatten() for p in model.parameters()])
        )
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-3, atol=1e-4)


def test_schedules_are_the_papers():
    exp = recipe(
        "sgd", {"lr": 0.1, "schedule": "exp", "rate": 6, "schedule_epochs": 75}
    )
    assert exp.lr_at(0, 60) == 0.1 and exp.lr_at(30, 60) == pytest.approx(
        0.1 * (1 - 30 / 75) ** 6
    )
    cosine = recipe("seng-paper", {"lr": 0.1})
    assert cosine.lr_at(40, 80) == pytest.approx(
        0.001 + 0.5 * 0.099 * (1 + math.cos(math.pi / 2))
    )
    warm = recipe("sgd", {"lr": 0.4, "warmup": 5, "warmup_lr": 0.1})
    assert (
        warm.lr_at(0, 60) == 0.1
        and warm.lr_at(2.5, 60) == pytest.approx(0.25)
        and warm.lr_at(5, 60) == 0.4
    )
    assert recipe("sgd", {"schedule": "linear", "lr": 1}).lr_at(
        3, 4
    ) == pytest.approx(0.25)
    assert recipe("sgd", {"schedule": "constant", "lr": 1}).lr_at(3, 4) == 1
    large = recipe("seng-paper", {"damping": 0.17, "damping_gamma": 0.9})
    assert (
        large.damping_at(20) == pytest.approx(0.17 * 0.81)
        and recipe("sgd").damping_at(20) is None
    )


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("senk", {}, "there is no optimizer 'senk': did you mean seng"),
        (
            "sgd",
            {"learning_rate": 1},
            "the recipe of sgd has no field 'learning_rate'",
        ),
        ("seng", {"dampin": 1}, "did you mean damping or"),
        ("sgd", {"lr": "fast"}, "lr is a number, not 'fast'"),
        ("sgd", {"lr": -1}, "lr is not negative, not -1"),
        ("sgd", {"lr": float("nan")}, "lr is a number, not nan"),
        (
            "sgd",
            {"nesterov": "perhaps"},
            "nesterov is true or false, not 'perhaps'",
        ),
        (
            "seng",
            {"refresh_every": 2.5},
            "refresh_every is a whole number, not 2.5",
        ),
        (
            "sgd",
            {"schedule": "cosin"},
            "schedule is one of constant, cosine, exp, linear, not 'cosin'",
        ),
    ],
)
def test_what_is_wrong_is_refused(name, changes, said):
    with pytest.raises(ValueError, match=said.replace("?", "\\?")):
        recipe(name, changes)


def test_muon_moves_kernels_in_either_memory_format_alike():
    ends = []
    for layout in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        kernel = (
            nn.Sequential(nn.Conv2d(3, 5, 3), nn.Flatten(), nn.Linear(80, 2))
            .float()
            .to(memory_format=layout)
        )
        opt = MuonAndAdamW(kernel, lr=0.1)
        x = torch.randn(
            8,
            3,
            6,
            6,
            dtype=torch.float32,
            generator=torch.Generator().manual_seed(1),
        )
        for _ in range(3):
            opt.zero_grad()
            kernel(x.to(memory_format=layout)).square().mean().backward()
            opt.step()
        assert (
            opt.matrices[0].data_ptr() == kernel[0].weight.data_ptr()
        )  # a view: the network itself has moved
        ends.append(kernel[0].weight.detach().contiguous())
    torch.testing.assert_close(
        *ends, rtol=1e-2, atol=2e-3
    )  # its iteration is in bfloat16


def test_muon_takes_kernels_and_matrices_and_adamw_the_rest():
    model = network()
    opt = MuonAndAdamW(model)
    assert [tuple(m.shape) for m in opt.matrices] == [(4, 9), (12, 144)]
    inside = {p for group in opt.adamw.param_groups for p in group["params"]}
    assert (
        inside == set(model.parameters()) - set(opt.weights)
        and model[-1].weight in inside
    )
