"""Steps by the polar factor of the momentum: seng/recipes/orthogonal.py."""

import copy
import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import naive
import pytest
import torch
from torch import Tensor, nn

import seng
from seng.gpu import kernels
from seng.gpu.recorder import Replay, capturing
from seng.recipes.orthogonal import ELEMENT, MOST, Orthogonal
from seng.recipes.polar import (
    QUINTIC,
    RMS,
    SHORTEST,
    Part,
    Stack,
    StepInputs,
    polar,
    stacks_of,
)
from seng.tell.inspection import inspect

F64 = torch.float64
OFF = 1e14  # a damping that leaves the gradient as it is


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = (
        nn.Conv2d(2, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.Tanh(),
        nn.Conv2d(4, 6, 2, groups=2, bias=False),
    )
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(54, 3)).to(F64)


def data(seed: int = 0) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(8, 2, 4, 4, generator=draw, dtype=F64), torch.randn(
        8, 3, generator=draw, dtype=F64
    )


def train(
    model: nn.Module, opt: torch.optim.Optimizer, steps: int
) -> list[float]:
    losses = []
    for i in range(steps):
        x, target = data(i % 2)
        opt.zero_grad()
        loss = naive.loss_of(model(x), target)
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return losses


def steps_of(opt: seng.SENG) -> list[Orthogonal]:
    """The polar steps that an optimizer keeps ready."""
    return [layers for kept in opt.polar.kept.values() for layers in kept]


def on_its_side(X: Tensor) -> Tensor:
    """Its polar factor, which is worked out of wide matrices."""
    return polar(X) if X.shape[-2] <= X.shape[-1] else polar(X.mT).mT


def exact(X: Tensor) -> Tensor:
    U, _, Vh = torch.linalg.svd(X, full_matrices=False)
    return U @ Vh


def one_by_one(X: Tensor) -> Tensor:
    """Five steps as they are written down."""
    a, b, c = QUINTIC
    Y = X / X.norm(dim=(-2, -1), keepdim=True)
    for _ in range(5):
        S = Y @ Y.mT
        Y = a * Y + (b * S + c * S @ S) @ Y
    return Y


@pytest.mark.parametrize(
    "shape",
    [(2, 32, 32), (2, 32, 64), (2, 32, 65), (2, 32, 300), (1, 1, 5)],
    ids=str,
)
@pytest.mark.parametrize("smallest", [1, 1e-3])
@pytest.mark.parametrize(
    "dtype", [F64, torch.float32, torch.bfloat16], ids=str
)
def test_steps_on_small_matrices_are_steps(
    shape: tuple[int, ...], smallest: float, dtype: torch.dtype
) -> None:
    """Of a long matrix, several of which are taken at once, too; and rounding does not much more harm to them.

    Errors of rounding differ among CPUs by a factor of 2. All five steps at once, without S from Y in between, have
    some 70 times as much in float32, and 10,000 times in bfloat16.
    """
    draw = torch.Generator().manual_seed(0)
    X = torch.randn(shape, dtype=F64, generator=draw)
    rotation = torch.linalg.qr(
        torch.randn(shape[1], shape[1], dtype=F64, generator=draw)
    ).Q
    X = rotation @ (
        X
        * torch.logspace(0, math.log10(smallest), shape[1], dtype=F64)[:, None]
    )
    exact = one_by_one(X)
    rounding = naive.relative_error(one_by_one(X.to(dtype)), exact)
    assert naive.relative_error(
        polar(X.to(dtype)), exact
    ) < 4 * rounding + torch.finfo(dtype).eps * 100 * (dtype == F64)


@pytest.mark.parametrize("shape", [(3, 5, 9), (2, 9, 5), (1, 4, 4), (2, 1, 7)])
def test_singular_values_come_near_one_and_directions_stay(
    shape: tuple[int, ...],
) -> None:
    X = torch.randn(
        shape, dtype=F64, generator=torch.Generator().manual_seed(0)
    )
    got = on_its_side(X)
    values = torch.linalg.svdvals(got)
    assert values.min() > 0.6 and values.max() < 1.25
    aligned = (
        exact(X).mT @ got
    )  # symmetric where the singular vectors are the same ones
    torch.testing.assert_close(aligned, aligned.mT, atol=1e-9, rtol=0)
    assert torch.equal(polar(torch.zeros(1, 3, 4)), torch.zeros(1, 3, 4))


@pytest.mark.parametrize(
    ("dtype", "close"),
    [(F64, 1e-9), (torch.float32, 1e-4), (torch.bfloat16, 0.1)],
    ids=str,
)
def test_the_scale_of_a_matrix_does_not_matter(
    dtype: torch.dtype, close: float
) -> None:
    """Nor is it squared where squares would vanish or overflow."""
    X = torch.randn(
        1, 4, 6, dtype=F64, generator=torch.Generator().manual_seed(0)
    )
    want = polar(X.to(dtype))
    for scale in (1e-30, 1e-20, 1e20, 1e30):
        torch.testing.assert_close(
            polar((scale * X).to(dtype)), want, atol=close, rtol=0
        )
    assert polar((1e-42 * X).to(dtype)).isfinite().all()


def test_a_layer_whose_gradient_is_zero_stays_finite() -> None:
    layer = nn.Linear(6, 4).float()
    opt = seng.SENG(layer, 0.01, **seng.presets.orthogonal())
    for i in range(500):
        opt.zero_grad(set_to_none=False)
        (
            layer(torch.ones(3, 6, dtype=torch.float32)) * (i < 3)
        ).sum().backward()
        opt.step()
    assert layer.weight.isfinite().all()


def words(dtype: torch.dtype = F64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(9, 4), nn.LayerNorm(4), nn.Linear(4, 2)
    ).to(dtype)


def read(
    model: nn.Module, opt: torch.optim.Optimizer, tokens: list[int]
) -> None:
    opt.zero_grad()
    model(torch.tensor([tokens])).square().mean().backward()
    opt.step()


@pytest.mark.parametrize("before", ["sgd", "switched", "without r"])
def test_a_row_that_is_not_read_moves_little_where_r_is_new(
    before: str,
) -> None:
    """Its momentum is there, and nothing is known of its size."""
    model = words()
    orthogonal = {
        "orthogonal": True,
        "curvature": seng.Curvature(form="plain"),
    }
    opt = seng.SENG(
        model, 0.1, **(orthogonal if before == "without r" else {})
    )
    for _ in range(3):
        read(model, opt, list(range(9)))
    if before == "switched":
        opt.param_groups[0]["orthogonal"] = True
    else:
        state = opt.state_dict()
        state["param_groups"][0]["orthogonal"] = True
        for entry in state["state"].values():
            entry.pop("direction_rms", None)
        opt = seng.SENG(model, 0.1, **orthogonal)
        opt.load_state_dict(state)
    table = model[0].weight.detach().clone()
    read(model, opt, [0, 1])
    assert (
        0
        < (model[0].weight - table).abs().max()
        <= 0.1 * ELEMENT * MOST * 1.001
    )


@pytest.mark.parametrize(
    "dtype", [F64, torch.float16, torch.bfloat16], ids=str
)
def test_a_row_that_is_read_once_does_not_run_away_with_much_momentum(
    dtype: torch.dtype,
) -> None:
    model = words(dtype)
    opt = seng.SENG(
        model,
        0.01,
        momentum=0.99,
        nesterov=True,
        orthogonal=True,
        curvature=seng.Curvature(form="plain"),
    )
    for i in range(300):
        read(model, opt, [i % 2, 8 if i == 0 else 0])
    once = (model[0].weight - words(dtype)[0].weight)[8].abs().max()
    assert 0 < once < 10 * 0.01 * ELEMENT


def test_weight_decay_in_half_precision_is_that_of_float32() -> None:
    norms = {}
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(32, 32, bias=False), nn.LayerNorm(32)
        ).to(dtype)
        opt = seng.SENG(model, 0.02, **seng.presets.orthogonal())
        for i in range(300):
            draw = torch.Generator().manual_seed(i)
            for p in model.parameters():
                p.grad = torch.randn(
                    p.shape, generator=draw, dtype=torch.float32
                ).to(dtype)
            opt.step()
        norms[dtype] = [p.float().norm() for p in model.parameters()]
    torch.testing.assert_close(
        norms[torch.bfloat16], norms[torch.float32], rtol=0.1, atol=0
    )


def test_a_learning_rate_may_be_a_tensor_of_any_shape_of_one() -> None:
    ends = []
    for lr in (0.01, torch.tensor(0.01), torch.tensor([0.01])):
        model = network()
        train(model, seng.SENG(model, lr, **seng.presets.orthogonal()), 3)
        ends.append(model[0].weight.detach())
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(ends[2], ends[0], rtol=1e-6, atol=1e-8)


def test_steps_are_counted_without_curvature_too() -> None:
    model = network()
    opt = seng.SENG(model, 0.01, **seng.presets.orthogonal())
    train(model, opt, 3)
    twin = network()
    twin.load_state_dict(model.state_dict())
    other = seng.SENG(twin, 0.01, **seng.presets.orthogonal())
    other.load_state_dict(copy.deepcopy(opt.state_dict()))
    pair = copy.deepcopy({"model": model, "opt": opt})
    assert (
        train(model, opt, 2)
        == train(twin, other, 2)
        == train(pair["model"], pair["opt"], 2)
    )
    assert (
        inspect(opt).steps
        == inspect(other).steps
        == inspect(pair["opt"]).steps
        == 5
    )


def of_one_length(X: Tensor) -> Tensor:
    """Along the longer side."""
    (Q,) = on_its_side(X[None])
    m, n = X.shape
    if 1 in X.shape:  # where columns of one length would be signs
        return Q * RMS * Q.numel() ** 0.5 / Q.norm()
    lengths = Q.norm(dim=0 if m <= n else 1, keepdim=True)
    return (
        Q
        * RMS
        * min(m, n) ** 0.5
        / lengths.clamp_min(SHORTEST * (min(m, n) / max(m, n)) ** 0.5)
    )


@pytest.mark.parametrize(
    ("outputs", "blocks"), [(1, 1), (3, 1), (6, 1), (10, 1), (15, 3), (20, 1)]
)
@pytest.mark.parametrize("nesterov", [False, True])
def test_a_step_is_the_formula(
    nesterov: bool, outputs: int, blocks: int
) -> None:
    """Two steps of one layer: momentum as torch has it, weight and bias one matrix, of one length, decay apart.

    Of a layer that is three times as tall as wide, each third has its own polar factor.
    """
    layer = nn.Linear(5, outputs).to(F64)
    W = torch.cat([layer.weight, layer.bias[:, None]], 1).detach().clone()
    opt = seng.SENG(
        layer,
        0.1,
        momentum=0.8,
        nesterov=nesterov,
        weight_decay=0.01,
        damping=OFF,
        orthogonal=True,
    )
    m = torch.zeros_like(W)
    for i in range(2):
        x, target = (
            torch.randn(7, 5, dtype=F64),
            torch.randn(7, outputs, dtype=F64),
        )
        opt.zero_grad()
        naive.loss_of(layer(x), target).backward()
        g = torch.cat([layer.weight.grad, layer.bias.grad[:, None]], 1)
        m = 0.8 * m + g
        along = g + 0.8 * m if nesterov else m
        Q = torch.cat([of_one_length(rows) for rows in along.chunk(blocks)])
        W = W - 0.1 * (Q + 0.01 * W)
        opt.step()
        got = torch.cat([layer.weight, layer.bias[:, None]], 1)
        assert naive.relative_error(got, W) < 1e-9, i


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(
    ("layer", "rows"),
    [
        (nn.Conv2d(4, 48, 2, groups=2, bias=False), lambda w: w.flatten(1)),
        (nn.ConvTranspose2d(2, 6, 1, bias=False), lambda w: w.flatten(1).mT),
        (nn.Conv2d(2, 24, (2, 2), bias=False), lambda w: w.flatten(1)),
        (nn.Conv2d(4, 4, 2, groups=4, bias=False), lambda w: w.flatten(1)),
    ],
    ids=[
        "grouped",
        "transposed",
        "four columns a channel",
        "one channel each",
    ],
)
def test_steps_of_other_layers(
    layer: nn.Module, rows: Callable[[Tensor], Tensor], last: bool
) -> None:
    """Thirds of a matrix, and of every group, that is three times as tall as wide; single rows."""
    layer = copy.deepcopy(layer).to(F64)
    layer = layer.to(memory_format=torch.channels_last) if last else layer
    W = rows(layer.weight).detach().clone()
    opt = seng.SENG(layer, 0.1, damping=OFF, orthogonal=True)
    layer(
        torch.randn(5, layer.in_channels, 3, 3, dtype=F64)
    ).square().mean().backward()
    Q = torch.cat(
        [
            of_one_length(part)
            for part in rows(layer.weight.grad).split(
                1 if layer.groups == 4 else W.shape[1]
            )
        ]
    )
    opt.step()
    assert naive.relative_error(rows(layer.weight), W - 0.1 * Q) < 1e-9


def assorted() -> nn.Module:
    """Odd sizes, wide and tall, with and without a bias, thirds, and groups, one of them transposed."""
    torch.manual_seed(0)
    layers = (
        nn.Linear(5, 15),
        nn.Linear(15, 7),
        nn.Linear(7, 30, bias=False),
        nn.Unflatten(1, (6, 5)),
    )
    return nn.Sequential(
        *layers,
        nn.Conv1d(6, 4, 3, groups=2),
        nn.ConvTranspose1d(4, 3, 2),
        nn.Flatten(),
        nn.Linear(12, 12),
    )


@pytest.mark.parametrize(
    ("dtype", "least", "most"),
    [(F64, 0, 1e-12), (torch.float32, 0, 1e-4), (torch.bfloat16, 1e-4, 0.05)],
    ids=str,
)
def test_matrices_filled_up_with_zeros_step_as_each_by_itself(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    least: float,
    most: float,
) -> None:
    """As on a GPU, where those of several sizes are worked out at once, and in bfloat16."""
    model = assorted()
    ends = []
    one: list[Stack] = []

    def filled_up(parts: Any, fill: bool) -> list[Stack]:
        (stack,) = stacks_of(parts, fill=True)
        one[:] = [Stack(stack.parts, dtype)]
        return one

    for filled in (False, True):
        each = copy.deepcopy(model)
        opt = seng.SENG(each, 0.1, **seng.presets.orthogonal(weight_decay=0.0))
        if filled:
            monkeypatch.setattr("seng.recipes.orthogonal.stacks_of", filled_up)
        for _ in range(2):
            for i, p in enumerate(each.parameters()):
                p.grad = torch.randn(
                    p.shape, generator=torch.Generator().manual_seed(i)
                )
            opt.step()
        (layers,) = steps_of(opt)
        assert layers.blocks == one if filled else len(layers.blocks) > 1
        ends.append(
            [
                p.detach() - start.detach()
                for p, start in zip(
                    each.parameters(), model.parameters(), strict=True
                )
            ]
        )
    assert dtype != torch.bfloat16 or all(
        side % 8 == 0 for side in one[0].size[1:]
    )
    errors = [
        naive.relative_error(got, want)
        for want, got in zip(*ends, strict=True)
    ]
    assert min(errors) >= least and max(errors) < most


@pytest.mark.parametrize(
    ("sizes", "stacks"),
    [
        (
            [(3000, 3000), (30, 40), (8, 200_000), (20, 21)],
            [(1, 3000, 3000), (1, 8, 200_000), (2, 30, 40)],
        ),
        (
            [(900, 900), (1000, 1000), (1100, 1100)],
            [(2, 1000, 1000), (1, 1100, 1100)],
        ),
    ],
    ids=["mostly zeros", "too much work"],
)
def test_what_is_large_is_not_filled_up(
    sizes: list[tuple[int, int]], stacks: list[tuple[int, int, int]]
) -> None:
    layers = nn.Sequential(
        *(nn.Linear(n, m, bias=False, device="meta") for m, n in sizes)
    )
    opt = seng.SENG(layers, 0.1, **seng.presets.orthogonal())
    assert opt.engine is not None
    parts = [Part(site, site.segments) for site in inspect(opt).sites]
    assert [stack.size for stack in stacks_of(parts, fill=True)] == stacks


def test_an_input_that_is_nearly_always_zero_is_not_stepped_along_as_far() -> (
    None
):
    """What a polar factor has of it is rounding, or chance: a thousandth of the usual is a hundredth of its step."""
    layer = nn.Linear(40, 4, bias=False).to(F64)
    before = layer.weight.detach().clone()
    layer.weight.grad = torch.randn(
        4, 40, dtype=F64, generator=torch.Generator().manual_seed(0)
    )
    layer.weight.grad[:, 0] *= 1e-3
    layer.weight.grad[:, 1] = 0
    seng.SENG(layer, 1.0, **seng.presets.orthogonal(weight_decay=0.0)).step()
    moved = (layer.weight.detach() - before).norm(dim=0) / (RMS * 2)
    torch.testing.assert_close(moved[2:], torch.ones(38, dtype=F64))
    assert 1e-3 < moved[0] < 0.05 and moved[1] == 0


class Scaled(nn.Module):
    """A parameter of no layer that is known."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4, dtype=F64))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x


@pytest.mark.filterwarnings(
    "ignore:seng. these parameters take the plain gradient"
)
def test_what_is_no_matrix_takes_the_step_of_adam_and_what_is_no_layer_that_of_sgd() -> (
    None
):
    model = nn.Sequential(
        nn.Embedding(5, 4), Scaled(), nn.LayerNorm(4), nn.Linear(4, 2)
    ).to(F64)
    before = copy.deepcopy(model)
    opt = seng.SENG(
        model,
        0.1,
        momentum=0.9,
        nesterov=True,
        weight_decay=0.1,
        damping=OFF,
        orthogonal=True,
    )
    table, scale, weight, bias, *_ = [
        p.detach().clone() for p in before.parameters()
    ]
    state = [(p, torch.zeros_like(p), None) for p in (table, weight, bias)]
    for i in range(3):
        draw = torch.Generator().manual_seed(i)
        x, target = (
            torch.randint(5, (6, 3), generator=draw),
            torch.randn(6, 3, 2, generator=draw, dtype=F64),
        )
        opt.zero_grad()
        naive.loss_of(model(x), target).backward()
        grads = [p.grad.clone() for p in model.parameters()]
        if i == 0:
            scale = scale - 0.1 * 1.9 * (grads[1] + 0.1 * scale)
        opt.step()
        after = []
        for (p, m, v), g in zip(state, (grads[0], *grads[2:4]), strict=True):
            m = 0.9 * m + g
            v = g**2 if v is None else 0.95 * v + 0.05 * g**2
            after.append(
                (
                    p
                    - 0.1
                    * (
                        ELEMENT * 0.1 * (g + 0.9 * m) / (v.sqrt() + 1e-15)
                        + 0.1 * p
                    ),
                    m,
                    v,
                )
            )
        state = after
        for got, (p, *_) in zip(
            (model[0].weight, model[2].weight, model[2].bias),
            state,
            strict=True,
        ):
            torch.testing.assert_close(got.detach(), p, atol=1e-12, rtol=1e-9)
        if i == 0:
            torch.testing.assert_close(model[1].scale.detach(), scale)


def test_memory_format_and_transposed_layers_do_not_matter() -> None:
    """Columns are taken as they lie in memory, where rows are rows, and as the layer has them otherwise."""
    models = []
    for form in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        layers = (
            nn.Conv2d(3, 4, 3),
            nn.Tanh(),
            nn.ConvTranspose2d(4, 2, 2),
            nn.Conv2d(2, 6, (1, 2), groups=2),
            nn.Flatten(),
        )
        model = nn.Sequential(*layers).to(F64).to(memory_format=form)
        opt = seng.SENG(
            model, 0.1, orthogonal=True, curvature=seng.Curvature(form="plain")
        )
        for i in range(3):
            opt.zero_grad()
            x = torch.randn(
                8,
                3,
                5,
                5,
                generator=torch.Generator().manual_seed(i),
                dtype=F64,
            )
            model(x.to(memory_format=form)).square().mean().backward()
            opt.step()
        models.append(model)
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


def test_without_curvature_nothing_is_captured_and_the_direction_is_the_gradient() -> (
    None
):
    model, other = network(), network()
    none = seng.Curvature(form="plain")
    opt, sgd = (
        seng.SENG(model, 0.01, curvature=none),
        torch.optim.SGD(other.parameters(), 0.01, momentum=0.9),
    )
    assert train(model, opt, 4) == train(other, sgd, 4)
    assert not opt.refresh_due and opt.last_refresh is None
    assert all(
        (row["form"], row["why"]) == ("plain", "form='plain': no curvature")
        for row in opt.diagnostics().values()
    )
    again = seng.SENG(network(), 0.01, curvature=none)
    again.load_state_dict(opt.state_dict())
    assert "no curvature" in str(
        seng.explain(model, data()[0], curvature=none)
    )
    with (
        pytest.raises(RuntimeError, match="nothing to feed"),
        opt.curvature_batch(),
    ):
        pass
    with pytest.raises(ValueError, match="nothing to attach"):
        seng.attach(sgd, other, curvature=none)
    with pytest.raises(ValueError, match="leave out samples, base, or"):
        seng.Curvature(form="plain", samples=4, base="kronecker")


def test_a_table_that_a_linear_layer_shares_is_no_matrix() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = (
                nn.Embedding(7, 4),
                nn.Linear(4, 7, bias=False),
            )
            self.head.weight = self.table.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.table(x).tanh())

    model = Tied().to(F64)
    before = model.table.weight.detach().clone()
    opt = seng.SENG(model, 0.1, momentum=0.0, damping=OFF, orthogonal=True)
    naive.loss_of(
        model(torch.randint(7, (6, 3))), torch.randn(6, 3, 7, dtype=F64)
    ).backward()
    opt.step()
    torch.testing.assert_close(
        before - model.table.weight,
        0.1 * ELEMENT * model.table.weight.grad.sign(),
    )


def test_half_precision_does_not_overflow() -> None:
    layer = nn.Linear(256, 256).half()
    opt = seng.SENG(layer, 0.1, damping=OFF, orthogonal=True)
    layer(torch.ones(4, 256).half()).float().mul(1000).sum().backward()
    opt.step()
    assert layer.weight.isfinite().all()


@pytest.mark.parametrize(
    "curvature",
    [
        seng.Curvature(),
        seng.Curvature(base="kronecker"),
        seng.Curvature(base="kronecker", rank=0),
    ],
)
def test_it_trains_with_every_base(curvature: seng.Curvature) -> None:
    model = network()
    opt = seng.SENG(
        model, 0.2, refresh_every=3, curvature=curvature, orthogonal=True
    )
    schedule = torch.optim.lr_scheduler.LinearLR(
        opt, 1.0, 0.0, 60
    )  # steps of one length need one to come to rest
    losses = []
    for _ in range(30):
        losses += train(model, opt, 2)
        schedule.step()
        schedule.step()
    assert (
        sum(losses[-2:]) < sum(losses[:2]) - 0.08
    )  # nearly all that there is to gain


def test_groups_choose_and_may_share_a_layer() -> None:
    """A bias in a group of its own, without decay, takes SGD's step; the weight's matrix then goes without it."""
    model, sgd_model = network(), network()
    bias = [p for name, p in model.named_parameters() if name.endswith("bias")]
    rest = [p for p in model.parameters() if all(p is not b for b in bias)]
    groups = [
        {"params": rest, "orthogonal": True},
        {"params": bias, "weight_decay": 0.0},
    ]
    opt = seng.SENG(groups, 0.1, module=model, damping=OFF)
    sgd = torch.optim.SGD(sgd_model.parameters(), 0.1, momentum=0.9)
    train(model, opt, 1)
    train(sgd_model, sgd, 1)
    pairs = dict(
        zip(
            dict(model.named_parameters()),
            zip(model.parameters(), sgd_model.parameters(), strict=True),
            strict=True,
        )
    )
    for name, (p, q) in pairs.items():
        assert torch.allclose(p, q, rtol=1e-9) == name.endswith("bias"), name


def test_maximize_and_a_tensor_lr() -> None:
    plain, other = network(), network()
    train(plain, seng.SENG(plain, 0.02, orthogonal=True), 5)
    opt = seng.SENG(
        other, torch.tensor(0.02, dtype=F64), orthogonal=True, maximize=True
    )
    for i in range(5):
        x, target = data(i % 2)
        opt.zero_grad()
        (-naive.loss_of(other(x), target)).backward()
        opt.step()
    for p, q in zip(plain.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_state_goes_on_and_old_checkpoints_load() -> None:
    model = network()
    opt = seng.SENG(model, 0.02, refresh_every=2, orthogonal=True)
    train(model, opt, 3)
    other = network()
    other.load_state_dict(model.state_dict())
    twin = seng.SENG(other, 0.02, refresh_every=2, orthogonal=True)
    state = copy.deepcopy(opt.state_dict())
    twin.load_state_dict(state)
    train(model, opt, 4)
    train(other, twin, 4)
    assert all(
        torch.equal(p, q)
        for p, q in zip(model.parameters(), other.parameters(), strict=True)
    )
    for group in state["param_groups"]:
        del group["orthogonal"]
    twin.load_state_dict(state)
    assert twin.param_groups[0]["orthogonal"] is True


def test_it_can_be_switched_while_training() -> None:
    model = network()
    opt = seng.SENG(model, 0.02)
    train(model, opt, 3)
    opt.param_groups[0]["orthogonal"] = True
    before = copy.deepcopy(model)
    train(model, opt, 1)
    moved = (before[5].weight - model[5].weight).detach()
    values = torch.linalg.svdvals(
        torch.cat(
            [moved, (before[5].bias - model[5].bias).detach()[:, None]], 1
        )
    )
    assert values.max() / values.min() < 2


def test_a_compiled_step_is_the_same() -> None:
    model, other = network(), network()
    train(model, seng.SENG(model, 0.02, refresh_every=4, orthogonal=True), 6)
    opt = seng.SENG(other, 0.02, refresh_every=4, orthogonal=True)
    step = torch.compile(opt.step, backend="eager")
    for i in range(6):
        x, target = data(i % 2)
        opt.zero_grad()
        naive.loss_of(other(x), target).backward()
        step()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="about the layers' matrices"):
        seng.SENG(network().parameters(), 0.1, orthogonal=True)
    with pytest.warns(UserWarning, match="no module was given"):
        plain = seng.SENG([nn.Parameter(torch.ones(2, 2))], 0.1)
    with pytest.raises(ValueError, match="about the layers' matrices"):
        plain.add_param_group(
            {"params": [nn.Parameter(torch.ones(2, 2))], "orthogonal": True}
        )
    assert len(plain.param_groups) == 1
    state = plain.state_dict()
    state["param_groups"][0]["orthogonal"] = True
    with pytest.raises(ValueError, match="about the layers' matrices"):
        plain.load_state_dict(state)
    plain.param_groups[0]["orthogonal"] = True
    plain.param_groups[0]["params"][0].grad = torch.ones(2, 2)
    with pytest.raises(ValueError, match="about the layers' matrices"):
        plain.step()
    with pytest.raises(TypeError, match="orthogonal is True or False"):
        seng.SENG(network(), 0.1, orthogonal="yes")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_steps_as_a_cpu_does() -> None:
    """In float64, where nothing is rounded to bfloat16; ten steps, so that the recording is replayed."""
    model = network()
    other = copy.deepcopy(model).cuda()
    train(model, seng.SENG(model, 0.02, refresh_every=4, orthogonal=True), 10)
    opt = seng.SENG(other, 0.02, refresh_every=4, orthogonal=True)
    for i in range(10):
        x, target = (t.cuda() for t in data(i % 2))
        opt.zero_grad()
        naive.loss_of(other(x), target).backward()
        opt.step()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q.cpu(), rtol=1e-6, atol=1e-9)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> str:
    """A GPU; else a CPU that passes for one: a recording is the function, to be called again."""
    if torch.cuda.is_available():
        return "cuda"

    def make_graph(device: torch.device, run: Any, pool: Any) -> Any:
        return SimpleNamespace(replay=run)

    replay = partial(Replay, make_graph=make_graph)
    monkeypatch.setattr("seng.recipes.orthogonal.Replay", replay)
    return "cpu"


def eventful(
    model: nn.Module, opt: seng.SENG, lr: float | Tensor, dtype: torch.dtype
) -> None:
    """Twenty-four steps in which everything changes that a recording could have taken for granted."""
    (group,) = opt.param_groups
    for i in range(24):
        changes = {
            4: {"lr": 0.5 * lr},
            7: {"momentum": 0.0},
            10: {"momentum": 0.7},
            13: {"weight_decay": 0.0},
        }
        group |= changes.get(i, {}) | (
            {"maximize": i == 16, "nesterov": i != 19}
        )
        if i == 11:
            for p in model.parameters():
                p.data = p.data.clone()
        if i == 14:
            opt.load_state_dict(copy.deepcopy(opt.state_dict()))
            (group,) = opt.param_groups
        device = model[0].weight.device
        x, target = (t.to(device, dtype) for t in data(i % 2))
        x = x.to(memory_format=torch.channels_last) if i > 18 else x
        opt.zero_grad()
        naive.loss_of(model(x), target).backward()
        if i == 8:
            model[3].weight.grad = None
        opt.step()


@pytest.mark.parametrize(
    ("dtype", "close"),
    [(F64, 1e-10), (torch.float32, 1e-3), (torch.bfloat16, 0.05)],
    ids=str,
)
@pytest.mark.parametrize("tensor", [False, True])
def test_recorded_steps_are_those_one_by_one(
    dtype: torch.dtype,
    close: float,
    tensor: bool,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:

    def each_by_itself(self: Orthogonal, inputs: StepInputs) -> None:
        for block in self.blocks:
            block.step(inputs)

    ends = []
    for records in (True, False):
        if not records:
            monkeypatch.setattr(Orthogonal, "_replay", each_by_itself)
        model = network().to(device, dtype)
        lr: float | Tensor = (
            torch.tensor(0.02, device=device) if tensor else 0.02
        )
        opt = seng.SENG(model, lr, **seng.presets.orthogonal())
        eventful(model, opt, lr, dtype)
        ends.append(
            torch.cat(
                [p.detach().double().flatten() for p in model.parameters()]
            )
        )
        assert (
            any(layers.replay.graph is not None for layers in steps_of(opt))
            == records
        )
    assert ends[0].isfinite().all() and naive.relative_error(*ends) < close


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_where_a_recording_does_not_fit_steps_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stepped = Stack.step

    def full(self: Stack, *args: Any) -> None:
        if capturing():
            raise torch.OutOfMemoryError("CUDA out of memory")
        stepped(self, *args)

    monkeypatch.setattr(Stack, "step", full)
    model = network().cuda()
    opt = seng.SENG(model, 0.02, **seng.presets.orthogonal())
    eventful(model, opt, 0.02, F64)
    assert all(p.isfinite().all() for p in model.parameters())
    assert not any(
        layers.replay.make_graph
        for layers in steps_of(opt)
        if layers.key is not None
    )


@pytest.mark.parametrize("nesterov", [False, True])
def test_kernels_take_the_steps_that_torch_takes(
    nesterov: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients come from the same places, then from others, then from these again."""

    def in_half_precision(parts: Any, fill: bool) -> list[Stack]:
        # Not filled up: one transposed layer would keep all of them from the kernels.
        stacks = stacks_of(parts, fill=False)
        return [Stack(stack.parts, torch.bfloat16) for stack in stacks]

    monkeypatch.setattr("seng.recipes.orthogonal.stacks_of", in_half_precision)
    pulled = 0
    pull = kernels.pull

    def counting(*args: Any) -> None:
        nonlocal pulled
        pulled += 1
        pull(*args)

    monkeypatch.setattr(kernels, "pull", counting)
    ends = []
    for fuses in (True, False):
        if not fuses:
            assert pulled > 0
            monkeypatch.setattr(Stack, "_fuses", lambda *_: False)
        model = assorted().float().to(device)
        opt = seng.SENG(
            model, 0.1, **seng.presets.orthogonal() | {"nesterov": nesterov}
        )
        stays = [torch.empty_like(p) for p in model.parameters()]
        for i in range(12):
            for p, place in zip(model.parameters(), stays, strict=True):
                g = torch.randn(
                    p.shape,
                    generator=torch.Generator().manual_seed(i),
                    dtype=torch.float32,
                ).to(device)
                p.grad = place.copy_(g) if i < 5 or i > 8 else g
            opt.step()
            (layers,) = steps_of(opt)
            assert bool(layers.places) == (i >= 5)
            recorded = layers.replay.graph is not None
            assert recorded == (i not in (0, 5))
        ends.append(
            torch.cat([p.detach().flatten() for p in model.parameters()])
        )
    assert naive.relative_error(*ends) < 2e-3


@pytest.mark.parametrize("error", [KeyboardInterrupt, torch.OutOfMemoryError])
def test_a_recording_that_is_interrupted_leaves_none_behind(
    error: type[BaseException], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients move at the sixth step, so that one is made at the next; the old one reads where they were."""
    ends = []
    for interrupted in (True, False):
        model = assorted().float().to(device)
        opt = seng.SENG(model, 0.1, **seng.presets.orthogonal())
        stays = [torch.empty_like(p) for p in model.parameters()]
        for i in range(9):
            for p, place in zip(model.parameters(), stays, strict=True):
                g = torch.randn(
                    p.shape,
                    generator=torch.Generator().manual_seed(i),
                    dtype=torch.float32,
                ).to(device)
                p.grad = place.copy_(g) if i < 5 else g
            if interrupted and i == 6:
                with monkeypatch.context() as patch:
                    (layers,) = steps_of(opt)
                    failing = Mock(side_effect=error)
                    patch.setattr(layers.replay, "make_graph", failing)
                    with (
                        pytest.raises(KeyboardInterrupt)
                        if error is KeyboardInterrupt
                        else nullcontext()
                    ):
                        opt.step()
                failing.assert_called_once()
                if error is torch.OutOfMemoryError:
                    continue
            opt.step()
        ends.append(
            torch.cat([p.detach().flatten() for p in model.parameters()])
        )
    assert naive.relative_error(*ends) < 2e-3
