"""The recipe "adamw": a metric's direction at Adam's own length, and torch's AdamW for all else."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import naive
import pytest
import torch
import torch.distributed as dist
from test_distributed import parts
from test_fsdp import sharded, whole
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

import seng

LR, DECAY = 0.01, 0.1
METRICS: dict[str, Callable[..., Any]] = {
    "SENG": seng.SENG,
    "SENG over I": lambda m, *a, **o: seng.SENG(
        m, *a, curvature=seng.Curvature(base=None), **o
    ),
    "KFAC": seng.KFAC,
    "tikhonov": lambda m, *a, **o: seng.KFAC(m, *a, damp="tikhonov", **o),
}
each_metric = pytest.mark.parametrize("metric", METRICS)
pytestmark = pytest.mark.filterwarnings(
    "ignore:seng. these parameters take AdamW.s step. 4.weight"
)  # of K-FAC, whose norms have no factors


def network() -> nn.Sequential:
    torch.manual_seed(3)
    convolution = nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Flatten()
    return nn.Sequential(
        *convolution, nn.Linear(12, 8), nn.LayerNorm(8), nn.Linear(8, 3)
    )


def batches(count: int, size: int = 7) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(5)
    return [
        (
            torch.randn(size, 2, 4, 4, generator=draw),
            torch.randn(size, 3, generator=draw),
        )
        for _ in range(count)
    ]


def backward(model: nn.Module, x: Tensor, y: Tensor, scale: float = 1) -> None:
    (scale * naive.loss_of(model(x), y)).backward()


def train(model: nn.Module, opt: Any, count: int, first: int = 0) -> Tensor:
    for x, y in batches(first + count)[first:]:
        opt.zero_grad()
        backward(model, x, y)
        opt.step()
    return naive.flat(model.parameters()).detach()


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """As nanoGPT has them: matrices decay, and weight and bias of a layer lie in two groups."""
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": DECAY},
        {
            "params": [p for p in params if p.dim() < 2],
            "lr": 3 * LR,
            "betas": (0.8, 0.99),
            "eps": 1e-3,
        },
    ]


# Against the formulas


class Reference:
    """Adam's moments one parameter at a time, and one layer after the other along its own solver."""

    def __init__(self, opt: Any) -> None:
        self.opt = opt
        self.m: dict[nn.Parameter, Any] = {}
        self.v: dict[nn.Parameter, Any] = {}
        self.t: dict[nn.Parameter, int] = {}

    def moves(
        self, before: dict[nn.Parameter, Tensor]
    ) -> dict[nn.Parameter, Tensor]:
        """New weights of the layers that have a solver, from the weights before the step."""
        mean, update, group_of = {}, {}, {}
        for group in self.opt.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                g = -p.grad if group["maximize"] else p.grad
                t = self.t[p] = self.t.get(p, 0) + 1
                m = self.m[p] = beta1 * self.m.get(p, 0) + (1 - beta1) * g
                v = self.v[p] = beta2 * self.v.get(p, 0) + (1 - beta2) * g * g
                mean[p] = m / (1 - beta1**t)
                root = (v / (1 - beta2**t)).sqrt()
                update[p] = mean[p] / (root + group["eps"])
                group_of[p] = group
        out = {}
        for record in self.opt.engine.records:
            if record.solver is None:
                continue
            d = record.solver(record.gather(mean))
            length = naive.flat(update[p] for p in record.params).norm()
            d = d * length / d.norm()
            for p, part in record.site.scatter(record.active, d).items():
                group = group_of[p]
                kept = before[p] * (1 - group["lr"] * group["weight_decay"])
                out[p] = kept - group["lr"] * part
        return out


@each_metric
@pytest.mark.parametrize("maximize", [False, True])
def test_a_layer_goes_along_its_metric_as_far_as_adam_would(
    metric: str, maximize: bool
) -> None:
    model = network()
    opt = METRICS[metric](
        groups(model),
        LR,
        module=model,
        recipe="adamw",
        refresh_every=3,
        maximize=maximize,
    )
    reference = Reference(opt)
    for x, y in batches(10):
        opt.zero_grad()
        backward(model, x, y)
        before = {p: p.detach().clone() for p in model.parameters()}
        opt.step()
        want = reference.moves(before)
        assert len(want) >= 6  # both linear layers and the convolution
        for p, new in want.items():
            assert naive.relative_error(p.detach(), new) < 1e-12


@pytest.mark.parametrize("base", [None, seng.Kronecker(power=0.5)], ids=str)
def test_much_damping_leaves_the_first_moment_or_kfac(base: Any) -> None:
    """Over I Adam's first moment at Adam's length; over P what KFAC does."""
    ours, other = network(), network()
    how = {"recipe": "adamw", "refresh_every": 3, "weight_decay": DECAY}
    curvature = seng.Curvature(base=base, samples=4)
    opt = seng.SENG(ours, LR, damping=1e30, curvature=curvature, **how)
    if base is not None:
        end = train(other, seng.KFAC(other, LR, power=0.5, **how), 20)
        assert naive.relative_error(train(ours, opt, 20), end) < 1e-12
        return
    train(ours, opt, 20)
    before = {p: p.detach().clone() for p in ours.parameters()}
    train(ours, opt, 1, 20)
    for i in (0, 3, 5):
        weight = ours[i].weight
        moved = weight - before[weight] * (1 - LR * DECAY)
        m = opt.state[weight]["exp_avg"]
        cosine = (moved * m).sum() / moved.norm() / m.norm()
        assert abs(cosine + 1) < 1e-12


@each_metric
def test_the_loss_s_scale_hardly_matters(metric: str) -> None:
    """As it does not to AdamW, but for ε."""
    ends = []
    for scale in (1, 256):
        model = network()
        opt = METRICS[metric](
            model, LR, recipe="adamw", refresh_every=3, eps=1e-12
        )
        if metric == "tikhonov":
            for group in opt.param_groups:
                group["damping"] *= scale**2
        for x, y in batches(12):
            opt.zero_grad()
            backward(model, x, y, scale)
            opt.step()
        ends.append(naive.flat(model.parameters()).detach())
    assert naive.relative_error(ends[1], ends[0]) < 1e-7


def test_gradients_of_zeros_move_nothing() -> None:
    model = network()
    opt = seng.SENG(model, LR, recipe="adamw")
    before = naive.flat(model.parameters()).detach().clone()
    for x, y in batches(3):
        opt.zero_grad()
        backward(model, x, y, 0)
        opt.step()
    assert torch.equal(naive.flat(model.parameters()), before)


# AdamW itself


def schedule(opt: Any, which: str) -> Any:
    of = torch.optim.lr_scheduler
    if which == "OneCycleLR":
        return of.OneCycleLR(opt, [0.02, 0.05], total_steps=60)
    return of.CosineAnnealingLR(opt, 50)


@pytest.mark.filterwarnings("ignore:seng. no module was given")
@pytest.mark.parametrize("which", ["OneCycleLR", "cosine"])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("build", [seng.SENG, seng.KFAC])
def test_without_layers_it_is_torchs(
    build: Any, scaled: bool, which: str
) -> None:
    """With groups, a schedule, clipping and a GradScaler that skips a step."""
    ends = []
    for ours in (False, True):
        model = network()
        how = {"recipe": "adamw"} if ours else {}
        kind = build if ours else AdamW
        opt = kind(groups(model), lr=LR, weight_decay=0.02, **how)
        scheduler = schedule(opt, which)
        scaler = torch.amp.GradScaler("cpu", enabled=scaled)
        for i, (x, y) in enumerate(batches(50)):
            opt.zero_grad()
            loss = naive.loss_of(model(x), y)
            scaler.scale(
                loss * (torch.inf if i == 7 and scaled else 1)
            ).backward()
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(opt)
            scaler.update()
            scheduler.step()
        ends.append(naive.flat(model.parameters()).detach())
    assert naive.relative_error(ends[1], ends[0]) < 1e-12


def test_a_step_that_a_scaler_skips_touches_no_moment() -> None:
    model = network()
    opt = seng.SENG(model, LR, recipe="adamw")
    scaler = torch.amp.GradScaler("cpu")
    states = []
    for i, (x, y) in enumerate(batches(3)):
        opt.zero_grad()
        loss = naive.loss_of(model(x), y) * (torch.inf if i == 2 else 1)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        entry = opt.state[model[3].weight]
        states.append({k: entry[k].clone() for k in ("step", "exp_avg")})
    assert states[1]["step"] == 2 == states[2]["step"]
    assert torch.equal(states[1]["exp_avg"], states[2]["exp_avg"])


def test_moments_of_adamw_come_along_and_go_back() -> None:
    """A checkpoint of torch's AdamW, ours, and torch's again."""
    model = network()
    theirs = AdamW(model.parameters(), 0.02, (0.8, 0.95), fused=True)
    train(model, theirs, 4)
    opt = seng.SENG(model, recipe="adamw")
    keys = opt.param_groups[0].keys()
    opt.load_state_dict(theirs.state_dict())
    (group,) = opt.param_groups
    assert group.keys() == keys and group["betas"] == (0.8, 0.95)
    for p in model.parameters():
        for name in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(opt.state[p][name], theirs.state[p][name])
    train(model, opt, 3, 4)
    back = AdamW(model.parameters())
    back.load_state_dict(opt.state_dict())
    assert all(float(s["step"]) == 7 for s in back.state.values())
    train(model, back, 2, 7)


@pytest.mark.parametrize("given", [{"amsgrad": True}, {"momentum": 0.9}])
def test_other_options_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError), match=next(iter(given))):
        seng.SENG(network(), recipe="adamw", **given)


@pytest.mark.parametrize("betas", [(0.9,), (0.9, 1.0), (-0.1, 0.9)])
def test_betas_out_of_range_are_refused(betas: Any) -> None:
    with pytest.raises(ValueError, match="betas are two numbers from 0"):
        seng.SENG(network(), recipe="adamw", betas=betas)


def test_it_goes_on_from_a_checkpoint_as_it_was() -> None:
    model = network()
    opt = seng.SENG(model, LR, recipe="adamw", refresh_every=3)
    train(model, opt, 5)
    twin = copy.deepcopy(model)
    other = seng.SENG(twin, LR, recipe="adamw", refresh_every=3)
    other.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert torch.equal(train(model, opt, 5, 5), train(twin, other, 5, 5))


# Several ranks


def on_rank(rank: int, how: str | None, strategy: str | None) -> Tensor:
    size = 1 if how is None else dist.get_world_size()
    model: nn.Module = network()
    if how == "fsdp":
        model = sharded(model)
    elif how == "ddp":
        model = DistributedDataParallel(model)
    base = seng.Kronecker(power=0.5, rank=10**6)
    opt = seng.SENG(
        model,
        LR,
        recipe="adamw",
        weight_decay=DECAY,
        refresh_every=3,
        strategy=strategy,
        curvature=seng.Curvature(rank=10**6, samples=None, base=base),
    )
    part = parts(12, size)[rank]
    for x, y in batches(8, 12):
        opt.zero_grad()
        backward(model, x[part], y[part])
        opt.step()
    return whole(model.parameters())


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_ranks_that_share_are_one_process(ranks: Any, how: str) -> None:
    want = on_rank(0, None, None)
    for found in ranks(on_rank, how, None):
        assert naive.relative_error(found, want) < 1e-8


def test_ranks_with_blocks_of_their_own_stay_alike(ranks: Any) -> None:
    first, *others = ranks(on_rank, "ddp", "block")
    assert all(torch.equal(first, other) for other in others)
    assert naive.relative_error(first, on_rank(0, None, None)) < 0.3


def test_late_gradients_are_refused() -> None:
    how = {"recipe": "adamw", "strategy": "lagged"}
    with pytest.raises(
        ValueError, match="gradients of this step: it does not"
    ):
        seng.SENG(network(), curvature=seng.Curvature(base=None), **how)
