"""Recipes: every optimizer trains, every hyperparameter arrives, and what is mistyped is refused with what was meant."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import seng
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
    # AdamW's own 1e-3 is for longer runs.
    made = recipe(name, {"lr": 0.01} if name == "seng-adamw" else {})
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
        if field == "weight_decay" and value == 0:
            continue  # the library's: where a task leaves it at 0, it is not searched
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
    base = {
        "kronecker_power": 0.25,
        "kronecker_rank": 3,
        "kronecker_floor": 0.2,
        "kronecker_decay": 0.6,
    }
    expected = seng.Kronecker(power=0.25, rank=3, floor=0.2, decay=0.6)
    assert recipe("seng", base).curvature.base == expected
    del base["kronecker_power"]
    root = recipe("kfac-root", base).optimizer(model)
    assert inspect(root).metric.curvature == replace(expected, power=0.5)
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


def built(name, changes=None):
    """The optimizer of a recipe, its groups without their parameters, and what its engine was told."""
    opt = recipe(name, changes).optimizer(network())
    groups = [
        {k: v for k, v in group.items() if k != "params"}
        for group in opt.param_groups
    ]
    return opt, groups, told(opt)


def told(opt):
    """The settings, with a metric's values for the metric."""
    metric = opt.settings.metric
    values = getattr(metric, "curvature", metric)
    return replace(opt.settings, metric=values)


@pytest.mark.parametrize(
    ("name", "made"),
    [
        ("seng", lambda m: seng.SENG(m, 0.1)),
        ("seng-adamw", lambda m: seng.SENG(m, 1e-3, recipe="adamw")),
        ("seng-muon", lambda m: seng.SENG(m, 0.02, recipe="muon")),
        (
            "seng-lowrank",
            lambda m: seng.SENG(
                m,
                0.1,
                curvature=seng.Curvature(
                    base=None, centred=False, samples=None
                ),
            ),
        ),
        (
            "seng-paper",
            lambda m: seng.SENG(m, 0.05, **seng.presets.paper()),
        ),
        ("kfac-root", lambda m: seng.KFAC(m, 0.1, power=0.5)),
        ("kfac-floor", lambda m: seng.KFAC(m, 0.1, power=1.0)),
    ],
)
def test_each_of_ours_is_what_its_name_says(name, made):
    """With the library's own defaults for all that is not in the name."""
    opt, groups, settings = built(name)
    library = made(network())
    assert type(opt) is type(library)
    assert type(opt.recipe) is type(library.recipe)
    assert settings == told(library)
    expected = library.param_groups
    assert groups == [
        {k: v for k, v in group.items() if k != "params"} for group in expected
    ]


def test_low_rank_can_be_centred():
    _, _, settings = built("seng-lowrank", {"centred": "true"})
    assert settings.curvature.centres and settings.curvature.base is None


@pytest.mark.filterwarnings(
    "ignore:seng"
)  # it leaves norms to the plain gradient
def test_kfac_is_martens_and_grosses():
    opt, groups, _ = built("kfac", {"damping": 0.5, "lr": 0.2})
    assert type(opt) is seng.KFAC
    assert type(inspect(opt).metric).__name__ == "Tikhonov"
    rates = [(group["covered"], group["lr"]) for group in groups]
    assert rates == [(True, pytest.approx(0.1)), (False, 0.2)]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("sgd", torch.optim.SGD),
        ("adam", torch.optim.Adam),
        ("adamw", torch.optim.AdamW),
        ("muon", seng.Muon),
    ],
)
def test_each_rival_is_what_its_name_says(name, kind):
    made = recipe(name)
    opt = made.optimizer(network())
    assert type(opt) is kind
    (group,) = opt.param_groups
    assert (group["lr"], group["weight_decay"]) == (
        made.lr,
        made.weight_decay,
    )


def test_muon_is_torchs_for_matrices_and_torchs_adamw_for_the_rest():
    """One lr serves both: its steps are as long as AdamW's."""
    changes = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9}
    model, twin = network(), network()
    for net in (model, twin):
        net[
            0
        ].bias = None  # the norm takes it away: Adam would follow rounding
    opt = recipe("muon", changes).optimizer(model)
    weights = [twin[0].weight, twin[4].weight]
    rest = [p for p in twin.parameters() if all(p is not w for w in weights)]
    matrices = [nn.Parameter(w.detach().flatten(1)) for w in weights]
    how = {"weight_decay": 0.1, "momentum": 0.9}
    muon = torch.optim.Muon(
        matrices, 0.02, adjust_lr_fn="match_rms_adamw", **how
    )
    adamw = torch.optim.AdamW(rest, 0.02, weight_decay=0.1)
    x, y = batch()
    for _ in range(10):
        for net in (model, twin):
            net.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
        opt.step()
        for matrix, weight in zip(matrices, weights, strict=True):
            matrix.grad = weight.grad.flatten(1)
        muon.step()
        adamw.step()
    for ours, theirs in zip(
        model.parameters(), twin.parameters(), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_the_papers_units_are_sgds_divided_by_the_damping():
    """lr/λ and λ·weight_decay beside λ(M + λI)⁻¹g: the trajectory is the same."""
    ends = []
    lam = 0.5
    model, (x, y) = network().double(), batch()
    paper = recipe(
        "seng-paper", {"lr": 0.05, "weight_decay": 0.01, "damping": lam}
    )
    settings = seng.presets.paper(lam, 200)
    models = model, network().double()
    optimizers = (
        paper.optimizer(model),
        seng.SENG(
            models[1],
            0.05 / lam,
            weight_decay=0.01 * lam,
            **{**settings, "recipe": "sgd"},
        ),
    )
    for net, opt in zip(models, optimizers, strict=True):
        for _ in range(5):
            opt.zero_grad()
            nn.functional.cross_entropy(net(x.double()), y).backward()
            opt.step()
        ends.append(
            torch.cat([p.detach().flatten() for p in net.parameters()])
        )
    torch.testing.assert_close(*ends, rtol=1e-9, atol=1e-11)
