"""Diagnostics: every number against its definition, and what TensorBoard gets."""

import copy
from functools import partial

import naive
import pytest
import torch
from refreshing import uncentred
from torch import nn

import seng
from seng.optim.step_plan import Timer
from seng.tell.inspection import inspect

KEYS = {
    *(
        "form",
        "base",
        "why",
        "columns",
        "bytes",
        "refreshed_at",
        "refresh_seconds",
        "top_eigenvalue",
        "effective_rank",
        "damping",
    ),
    *(
        "cosine",
        "norm_ratio",
        "sketch_error",
        "solves_failed",
        "refreshes_dropped",
    ),
}


FACTORS = "kronecker", "implicit"  # what a layer with one position keeps


def trained(steps=1, model=None, **options):
    model = model or nn.Sequential(
        nn.Linear(5, 4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 3)
    )
    opt = seng.SENG(model, **{"lr": 0.05, "refresh_every": 3, **options})
    return model, opt, train(model, opt, steps)


def train(model, opt, steps):
    for _ in range(steps):
        opt.zero_grad()
        x, target = torch.randn(8, 5), torch.randn(8, 3)
        naive.loss_of(model(x), target).backward()
        before = copy.deepcopy(model)
        opt.step()
    return before, x, target


@pytest.mark.parametrize("form", ["explicit", "implicit", "merged"])
@pytest.mark.parametrize("relative", [True, False])
def test_every_number_is_what_it_says(form, relative):
    curvature = uncentred(form, rank=99, relative_damping=relative)
    _, opt, (before, x, target) = trained(curvature=curvature, damping=0.2)
    for index, (name, entry) in zip(
        (0, 2, 3), opt.diagnostics().items(), strict=True
    ):
        assert set(entry) == KEYS and name == str(index)
        u = naive.per_sample_gradients(
            before, x, target, list(before[index].parameters())
        )
        M, g = naive.fisher(u), u.mean(0)
        values = torch.linalg.eigvalsh(M)
        lam = 0.2 * (values[-1] if relative else 1)
        d = lam * naive.dense_direction(M, g, float(lam))
        assert entry["top_eigenvalue"] == pytest.approx(float(values[-1]))
        assert entry["effective_rank"] == pytest.approx(
            float(values.sum() / values[-1])
        )
        assert entry["damping"] == pytest.approx(float(lam))
        assert entry["cosine"] == pytest.approx(
            float(g @ d / (g.norm() * d.norm()))
        )
        assert entry["norm_ratio"] == pytest.approx(float(d.norm() / g.norm()))
        assert (
            entry["refreshed_at"] == 0
            and entry["refresh_seconds"] > 0
            and entry["bytes"] > 0
        )
        assert (
            entry["sketch_error"]
            == entry["solves_failed"]
            == entry["refreshes_dropped"]
            == 0
        )


def test_over_a_base_numbers_are_those_of_whitened_samples():
    """Eigenvalues of P^{-½}ŪŪᵀP^{-½}; directions are as long as gradients."""
    every = seng.Curvature(samples=None)
    _, opt, (before, x, target) = trained(damping=0.2, curvature=every)
    for index, (name, entry) in zip(
        (0, 2, 3), opt.diagnostics().items(), strict=True
    ):
        assert set(entry) == KEYS and name == str(index)
        params = list(before[index].parameters())
        u = naive.per_sample_gradients(before, x, target, params)
        if index != 2:  # [W b], row by row
            W, b = u[:, : -len(params[1])], u[:, -len(params[1]) :, None]
            u = torch.cat([W.view(*b.shape[:2], -1), b], 2).flatten(1)
        spread = u - u.mean(0)
        P = inspect(opt).states[(0, 2, 3).index(index)].P
        white = P.to_power(-0.5).rows(spread)
        values = torch.linalg.eigvalsh(naive.fisher(white))
        assert entry["top_eigenvalue"] == pytest.approx(float(values[-1]))
        assert entry["damping"] == pytest.approx(0.2 * float(values[-1]))
        whole = float(values.sum() / values[-1])
        assert entry["effective_rank"] == pytest.approx(whole)
        assert entry["norm_ratio"] == pytest.approx(1)
        assert 0 < entry["cosine"] < 1 and entry["bytes"] > 0
        kept = ("diagonal", "explicit") if index == 2 else FACTORS
        assert (entry["base"], entry["form"]) == kept


@pytest.mark.parametrize(
    ("build", "form"),
    [
        (partial(seng.KFAC, damp="floor"), "power"),
        (partial(seng.SENG, recipe="muon"), "implicit"),
        (partial(seng.KFAC, damp="tikhonov", recipe="muon"), "merged"),
    ],
    ids=["KFAC", "muon", "tikhonov"],
)
def test_every_optimizer_and_recipe_has_the_same_keys(build, form):
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    opt = build(model, 0.01)
    train(model, opt, 2)
    muon = opt.settings.recipe == "muon"  # whose head is AdamW's
    assert list(opt.diagnostics()) == (["0"] if muon else ["0", "2"])
    for entry in opt.diagnostics().values():
        assert set(entry) == KEYS and entry["form"] == form
        assert entry["base"] == "kronecker" and entry["refreshed_at"] == 0


@pytest.mark.filterwarnings(
    "ignore:seng. Gaussian"
)  # the second layer is smaller than the larger sketch
@pytest.mark.parametrize("form", ["explicit", "implicit", "merged"])
def test_the_sketch_error_falls_with_the_size_of_the_sketch(form):
    errors = []
    for rows in (10, 400):
        torch.manual_seed(0)
        curvature = seng.Curvature(
            base=None,
            form=form,
            sketch=seng.sketch.Gaussian(rows),
            decay=0,
            **({} if form == "explicit" else {"rank": 4}),
        )
        _, opt, _ = trained(
            model=nn.Sequential(nn.Linear(5, 100), nn.Linear(100, 3)),
            curvature=curvature,
        )
        errors.append(opt.diagnostics()["0"]["sketch_error"])
    assert 0 < errors[1] < errors[0] / 2


def test_the_sketch_error_is_that_of_the_leading_energies():
    curvature = seng.Curvature(
        base=None, form="explicit", sketch=seng.sketch.Rows(12), decay=0
    )
    _, opt, _ = trained(model=nn.Linear(5, 3), curvature=curvature)
    block = inspect(opt).states[0]
    U, Xi = block.U.explicit().U, block.omega.of(block.U).explicit().U
    values, V = torch.linalg.eigh(Xi.T @ Xi)
    energies = (U @ V).square().sum(0)
    assert opt.diagnostics()["Linear"]["sketch_error"] == pytest.approx(
        float((energies - values).norm() / energies.norm())
    )


def test_numbers_are_those_of_the_last_refresh_and_unknown_after_loading():
    model, opt, _ = trained(steps=5)
    assert opt.last_refresh == 3 and all(
        entry["refreshed_at"] == 3 for entry in opt.diagnostics().values()
    )
    fresh = seng.SENG(model, lr=0.05, refresh_every=3)
    assert fresh.last_refresh is None and all(
        entry["form"] == "plain" for entry in fresh.diagnostics().values()
    )
    fresh.load_state_dict(opt.state_dict())
    for name, entry in fresh.diagnostics().items():
        assert (
            entry["refreshed_at"]
            is entry["cosine"]
            is entry["damping"]
            is None
        )
        assert (
            entry["top_eigenvalue"]
            == opt.diagnostics()[name]["top_eigenvalue"]
        )
    train(model, fresh, 2)
    assert (
        fresh.last_refresh == 6
        and fresh.diagnostics()["0"]["cosine"] is not None
    )


def test_a_gradient_of_zeros_has_nothing_to_compare():
    model = nn.Linear(3, 2)
    opt = seng.SENG(model)
    (0 * model(torch.randn(4, 3))).sum().backward()
    opt.step()
    entry = opt.diagnostics()["Linear"]
    assert (
        entry["cosine"] == entry["norm_ratio"] == 1
        and entry["effective_rank"] == 0
    )


def test_a_layer_with_the_plain_gradient_has_the_same_keys_and_a_reason():
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Embedding(5, 5), nn.Linear(5, 3)

        def forward(self, x):
            return self.head(x + self.table(torch.arange(5)).sum(0))

    model = Table()
    opt = seng.SENG(model, lr=0.05)
    with pytest.warns(UserWarning, match="'table' takes the plain gradient"):
        train(model, opt, 1)
    entry = opt.diagnostics()["table"]
    assert (
        set(entry) == KEYS
        and entry["form"] == "plain"
        and "dimension 0 of its input is 5" in entry["why"]
    )


def test_numbers_survive_a_group_that_is_added():
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
    opt = seng.SENG(
        model[0].parameters(), lr=0.05, module=model, refresh_every=3
    )
    train(model, opt, 2)
    before = opt.diagnostics()["0"]
    opt.add_param_group({"params": list(model[1].parameters())})
    assert opt.diagnostics()["0"] == before and opt.last_refresh == 0


class Written:
    def __init__(self):
        self.scalars = {}

    def add_scalar(self, tag, value, step):
        self.scalars.setdefault(tag, []).append((step, value))


def test_tensorboard_gets_every_refresh_in_one_line():
    writer = Written()
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
    opt = seng.SENG(model, lr=0.05, refresh_every=3)
    opt.register_step_post_hook(seng.TensorBoard(writer))
    train(model, opt, 8)
    assert [step for step, _ in writer.scalars["seng/cosine/0"]] == [0, 3, 6]
    numbers = KEYS - {"form", "base", "why", "refreshed_at"}
    assert set(writer.scalars) == {
        f"seng/{key}/{layer}" for key in numbers for layer in "01"
    }


def test_tensorboard_of_an_attached_optimizer():
    writer = Written()
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
    adam = torch.optim.Adam(model.parameters())
    handle = seng.attach(adam, model, refresh_every=2)
    adam.register_step_post_hook(seng.TensorBoard(writer, handle))
    train(model, adam, 3)
    assert [step for step, _ in writer.scalars["seng/effective_rank/1"]] == [
        0,
        2,
    ]
    adam.register_step_post_hook(seng.TensorBoard(writer))
    with pytest.raises(
        TypeError,
        match="Adam has no curvature; with seng.attach write TensorBoard\\(writer, handle\\)",
    ):
        train(model, adam, 1)
    with pytest.raises(TypeError, match="takes a SummaryWriter"):
        seng.TensorBoard("runs")


def test_a_real_summary_writer(tmp_path):
    tensorboard = pytest.importorskip(
        "torch.utils.tensorboard", reason="tensorboard is not installed"
    )
    from tensorboard.backend.event_processing.event_accumulator import (
        EventAccumulator,
    )

    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
    opt = seng.SENG(model, lr=0.05, refresh_every=2)
    with tensorboard.SummaryWriter(tmp_path) as writer:
        opt.register_step_post_hook(seng.TensorBoard(writer))
        train(model, opt, 4)
    read = EventAccumulator(str(tmp_path)).Reload()
    assert [event.step for event in read.Scalars("seng/cosine/0")] == [0, 2]


def test_the_timer_tells_what_passed_inside():
    timer = Timer(torch.device("cpu"))
    with timer:
        sum(range(10_000))
    assert 0 < timer.seconds == timer.end - timer.start < 60


def test_all_layers_of_a_refresh_have_its_time():
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
    opt = seng.SENG(model, lr=0.05)
    train(model, opt, 1)
    times = {e["refresh_seconds"] for e in opt.diagnostics().values()}
    assert len(times) == 1 and times.pop() > 0
