"""Several ranks: `shared` is one process on all samples, `block` and `lagged` are their formulas; uneven and empty batches,
frozen and unused layers, errors in place of hangs.
"""

import weakref
from types import SimpleNamespace

import naive
import pytest
import torch
import torch.distributed as dist
from conftest import LAYERS
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import seng
from seng.distributed.team import Averaged, Team, _along

CASES = {case.name: case for case in LAYERS}
LAM = 0.3


def low_rank(**options):
    """UUᵀ over λI from all samples, as the paper has it."""
    paper = {"base": None, "centred": False, "samples": None}
    return seng.Curvature(**{**paper, **options})


def exact(**options):
    """Nothing is cut off, and λ is absolute."""
    rank = {} if options.get("form") == "explicit" else {"rank": 10**6}
    fixed = {"decay": 0, "relative_damping": False}
    return low_rank(**{**rank, **fixed, **options})


def curvature_for(strategy):
    """The default, where the strategy has it."""
    return low_rank() if strategy == "lagged" else None


def parts(total: int, size: int, sizes=None) -> list[slice]:
    sizes = sizes or [total // size] * size
    starts = [sum(sizes[:i]) for i in range(size)]
    return [
        slice(start, start + count)
        for start, count in zip(starts, sizes, strict=True)
    ]


def example(name: str, count: int):
    torch.manual_seed(1)
    case = CASES[name]
    layer = case.layer()
    x = case.input(count)
    return layer, x, case.target(layer, count)


def wanted(
    u_of: list[torch.Tensor], lam: float, blocks: bool = False
) -> torch.Tensor:
    """(M + λI)⁻¹g with M and g as means over ranks; or the mean of the ranks' (M_i + λI)⁻¹g."""
    g = torch.stack(
        [u.mean(0) if len(u) else torch.zeros(u.shape[1]) for u in u_of]
    ).mean(0)
    Ms = [u.T @ u / max(1, len(u)) for u in u_of]
    if blocks:
        return torch.stack(
            [naive.dense_direction(M, g, lam) for M in Ms]
        ).mean(0)
    return naive.dense_direction(torch.stack(Ms).mean(0), g, lam)


def step_of(model, opt, x, target, loss=naive.loss_of):
    opt.zero_grad()
    loss(model(x), target).backward()
    before = naive.flat([p.detach().clone() for p in naive.trained(model)])
    opt.step()
    return before - naive.flat([p.detach() for p in naive.trained(model)])


def one_step(rank, names, strategy, options, sizes=None):
    size, out = dist.get_world_size(), {}
    for name in names:
        count = sum(sizes) if sizes else 3 * size
        layer, x, target = example(name, count)
        part = parts(count, size, sizes)[rank]
        model = DistributedDataParallel(layer)
        curvature = exact(**options)
        opt = seng.SENG(
            model,
            lr=1.0,
            momentum=0.0,
            damping=LAM,
            recipe="paper",
            curvature=curvature,
            strategy=strategy,
        )
        out[name] = step_of(model, opt, x[part], target[part])
    return out


def check(
    ranks, strategy, options=(), blocks=False, sizes=None, names=tuple(CASES)
):
    found = ranks(one_step, list(names), strategy, dict(options), sizes)
    for name in names:
        count = sum(sizes) if sizes else 3 * ranks.size
        layer, x, target = example(name, count)
        u = naive.per_sample_gradients(layer, x, target)
        want = wanted(
            [u[part] for part in parts(count, ranks.size, sizes)], LAM, blocks
        )
        for got in found:
            assert naive.relative_error(got[name], want) < 1e-9, name


def test_shared_is_one_process_on_all_samples(ranks):
    check(ranks, None)


@pytest.mark.parametrize("form", ["explicit", "implicit", "merged"])
def test_block_is_the_mean_of_the_ranks_directions(ranks, form):
    check(ranks, "block", {"form": form}, blocks=True)


def test_ranks_weigh_alike_however_many_samples_they_have(four):
    few = [
        "linear",
        "conv2d",
        "embedding-sequence",
        "layer-norm",
        "linear-sequence",
    ]
    check(four, None, sizes=[1, 5, 2, 4], names=few)
    check(four, "block", blocks=True, sizes=[1, 5, 2, 4], names=few)


def network():
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(64, 8),
        nn.Tanh(),
        nn.Linear(8, 3),
    )


def batches(steps: int, count: int):
    generator = torch.Generator().manual_seed(5)
    for _ in range(steps):
        yield (
            torch.randn(count, 1, 4, 4, generator=generator),
            torch.randn(count, 3, generator=generator),
        )


def train(
    rank, steps, options, sizes, settings=None, accumulate=1, order=None
):
    """Weights after training; in one process where there are no sizes, with samples in some order."""
    model = network()
    part = (
        (order or slice(None))
        if sizes is None
        else parts(sum(sizes), len(sizes), sizes)[rank]
    )
    wrapped = model if sizes is None else DistributedDataParallel(model)
    settings = {"damping": 0.01, "refresh_every": 3, **(settings or {})}
    opt = seng.SENG(
        wrapped, lr=0.05, curvature=low_rank(**options), **settings
    )
    for x, target in batches(steps, 12):
        x, target = x[part], target[part]
        opt.zero_grad()
        for i, (a, b) in enumerate(
            zip(x.chunk(accumulate), target.chunk(accumulate), strict=True)
        ):
            last = i == accumulate - 1
            with (
                wrapped.no_sync()
                if sizes is not None and not last
                else torch.enable_grad()
            ):
                (naive.loss_of(wrapped(a), b) / accumulate).backward()
        opt.step()
    return naive.flat([p.detach() for p in model.parameters()])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"rank": 5},
        {"decay": 0, "rank": 6},
        {"form": "merged", "samples": 4},
    ],
    ids=str,
)
def test_training_with_shared_curvature_is_training_in_one_process(
    ranks, options
):
    sizes = [12 // ranks.size] * ranks.size
    found = ranks(train, 10, options, sizes)
    assert all(torch.equal(w, found[0]) for w in found)
    size, share = sizes[0], options.get("samples", 12) // ranks.size
    order = sorted(
        range(12), key=lambda i: (i % size >= share, i)
    )  # what each rank takes for its curvature comes first
    assert (
        naive.relative_error(
            found[0],
            train(0, 10, {"form": "merged", **options}, None, order=order),
        )
        < 1e-8
    )


def test_accumulation_is_one_large_batch(two):
    once, twice = two(train, 7, {}, [6, 6]), two(train, 7, {}, [6, 6], None, 2)
    assert naive.relative_error(twice[0], once[0]) < 1e-9


def lagged(rank, steps, wrap, options):
    torch.manual_seed(1)
    layer = nn.Linear(5, 3)
    model = DistributedDataParallel(layer) if wrap else layer
    settings = {"refresh_every": 3, "strategy": "lagged", "recipe": "paper"}
    opt = seng.SENG(
        model,
        lr=0.01,
        momentum=0.0,
        damping=LAM,
        curvature=exact(**options),
        **settings,
    )
    seen = []
    generator = torch.Generator().manual_seed(7)
    for _ in range(steps):
        x, target = (
            torch.randn(8, 5, generator=generator),
            torch.randn(8, 3, generator=generator),
        )
        size = dist.get_world_size() if dist.is_initialized() else 1
        part = parts(8, size)[rank]
        opt.zero_grad()
        naive.loss_of(model(x[part]), target[part]).backward()
        if not wrap and size > 1:
            for p in layer.parameters():
                dist.all_reduce(p.grad)
                p.grad /= size
        before = naive.flat([p.detach().clone() for p in layer.parameters()])
        opt.step()
        seen.append(
            (before - naive.flat([p.detach() for p in layer.parameters()]))
            / 0.01
        )
    return seen


def lagged_by_hand(size, steps):
    torch.manual_seed(1)
    layer = nn.Linear(5, 3)
    generator = torch.Generator().manual_seed(7)
    out, before, Ms = [], None, []
    for k in range(steps):
        x, target = (
            torch.randn(8, 5, generator=generator),
            torch.randn(8, 3, generator=generator),
        )
        u = naive.per_sample_gradients(layer, x, target)
        g = u.mean(0)
        if k % 3 == 0:
            Ms = [naive.fisher(u[part]) for part in parts(8, size)]
        base = g if before is None else before
        correction = torch.stack(
            [base - LAM * naive.dense_direction(M, base, LAM) for M in Ms]
        ).mean(0)
        out.append((g - correction) / LAM)
        before = g
        with torch.no_grad():
            for p, d in zip(
                layer.parameters(), out[-1].split([15, 3]), strict=True
            ):
                p -= 0.01 * d.view_as(p)
    return out


@pytest.mark.parametrize("form", ["explicit", "implicit", "merged"])
@pytest.mark.parametrize(
    "wrap", [True, False], ids=["in the gradients' messages", "by itself"]
)
def test_lagged_is_its_formula(ranks, wrap, form):
    want = lagged_by_hand(ranks.size, 8)
    for found in ranks(lagged, 8, wrap, {"form": form}):
        for got, d in zip(found, want, strict=True):
            assert naive.relative_error(got, d) < 1e-9


def test_lagged_in_one_process_is_its_formula():
    for got, d in zip(
        lagged(0, 8, False, {}), lagged_by_hand(1, 8), strict=True
    ):
        assert naive.relative_error(got, d) < 1e-9


def independent(rank):
    layer, x, target = example("linear", 8)
    part = parts(8, dist.get_world_size())[rank]
    model = DistributedDataParallel(layer)
    curvature = exact(form="implicit", combine="independent")
    opt = seng.SENG(
        model,
        lr=1.0,
        momentum=0.0,
        damping=LAM,
        recipe="paper",
        curvature=curvature,
        strategy="block",
    )
    return step_of(model, opt, x[part], target[part])


def test_block_with_independent_sides_takes_the_product_of_their_means(ranks):
    layer, x, target = example("linear", 8)
    u = naive.per_sample_gradients(layer, x, target)
    g, sides = u.mean(0), []
    for part in parts(8, ranks.size):
        out = layer(x[part])
        (G,) = torch.autograd.grad(
            naive.loss_of(out, target[part]) * len(x[part]), out
        )
        rho = len(G)
        U = u[part].T / rho**0.5
        c = torch.linalg.solve(LAM * torch.eye(rho) + U.T @ U, U.T @ g)
        A = torch.cat([x[part], torch.ones(rho, 1)], 1)
        root = c.abs().sqrt()
        sides.append(
            (
                (root[:, None] * G / rho**0.5).sum(0),
                (c[:, None] * A).sum(0) / root.sum(),
            )
        )
    G, A = (torch.stack(side).mean(0) for side in zip(*sides, strict=True))
    product = torch.outer(G, A)
    want = (g - torch.cat([product[:, :-1].reshape(-1), product[:, -1]])) / LAM
    for got in ranks(independent):
        assert naive.relative_error(got, want) < 1e-9


class Branches(nn.Module):
    """The second branch is used by odd ranks alone, the third, if there is one, by nobody."""

    def __init__(self, third):
        super().__init__()
        torch.manual_seed(2)
        self.first, self.second, self.third = (
            nn.Linear(4, 4),
            nn.Linear(4, 4),
            nn.Linear(4, 4) if third else None,
        )
        self.rank = 0

    def forward(self, x):
        return self.second(self.first(x)) if self.rank % 2 else self.first(x)


def branches(rank, strategy, third, base):
    model = Branches(third)
    model.rank = rank
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    opt = seng.SENG(
        wrapped,
        lr=0.1 if base else 1.0,
        momentum=0.0,
        damping=LAM,
        recipe="sgd" if base else "paper",
        curvature=None if base else exact(),
        strategy=strategy,
        refresh_every=2,
    )
    generator = torch.Generator().manual_seed(rank)
    for _ in range(5):
        opt.zero_grad()
        naive.loss_of(
            wrapped(torch.randn(3, 4, generator=generator)), torch.ones(3, 4)
        ).backward()
        opt.step()
    return naive.flat(
        [p.detach() for p in model.parameters()]
    ), not third or model.third.weight.grad is None


@pytest.mark.parametrize("third", [True, False], ids=["three", "two"])
@pytest.mark.parametrize(
    ("strategy", "base"),
    [
        ("shared", False),
        ("block", False),
        ("lagged", False),
        ("shared", True),
        ("block", True),
    ],
)
def test_layers_that_some_ranks_or_none_use(ranks, strategy, base, third):
    found = ranks(branches, strategy, third, base)
    assert all(
        torch.equal(weights, found[0][0]) and unused
        for weights, unused in found
    )
    assert found[0][0].isfinite().all()


def an_empty_batch(rank, strategy):
    layer, x, target = example("linear", 4)
    model = DistributedDataParallel(layer)
    part = slice(0, 0) if rank == 1 else parts(4, 2)[rank]
    opt = seng.SENG(
        model,
        lr=1.0,
        momentum=0.0,
        damping=LAM,
        recipe="paper",
        curvature=exact(),
        strategy=strategy,
        refresh_every=2,
    )
    loss = lambda out, t: naive.loss_of(out, t) if len(out) else out.sum()  # noqa: E731
    first = step_of(model, opt, x[part], target[part], loss)
    for _ in range(4):
        step_of(model, opt, x[part], target[part], loss)
    return first


@pytest.mark.parametrize("strategy", ["shared", "block", "lagged"])
def test_a_rank_without_samples(two, strategy):
    layer, x, target = example("linear", 4)
    u = naive.per_sample_gradients(layer, x, target)
    want = wanted(
        [u[:2], u[:0]], LAM, strategy != "shared"
    )  # the first step is not lagged
    for got in two(an_empty_batch, strategy):
        assert naive.relative_error(got, want) < 1e-9


def frozen(rank, strategy):
    model = network()
    model[3].weight.requires_grad_(False)
    start = [p.detach().clone() for p in model.parameters()]
    wrapped = DistributedDataParallel(model)
    opt = seng.SENG(
        wrapped,
        lr=0.05,
        strategy=strategy,
        refresh_every=2,
        curvature=curvature_for(strategy),
    )
    part = parts(12, dist.get_world_size())[rank]
    for x, target in batches(5, 12):
        step_of(wrapped, opt, x[part], target[part])
    stayed = [
        torch.equal(p, before)
        for p, before in zip(model.parameters(), start, strict=True)
    ]
    return naive.flat([p.detach() for p in model.parameters()]), stayed


@pytest.mark.parametrize("strategy", ["shared", "block", "lagged"])
def test_frozen_parameters_stay(ranks, strategy):
    found = ranks(frozen, strategy)
    assert all(torch.equal(w, found[0][0]) for w, _ in found)
    assert found[0][1] == [
        False,
        False,
        True,
        False,
        False,
        False,
    ]  # of three layers the second one's weight


def relative(rank):
    layer, x, target = example("linear", 8)
    part = parts(8, dist.get_world_size())[rank]
    model = DistributedDataParallel(layer)
    curvature = exact(relative_damping=True)
    opt = seng.SENG(
        model,
        lr=1.0,
        momentum=0.0,
        damping=LAM,
        curvature=curvature,
        strategy="block",
    )
    return step_of(model, opt, x[part], target[part])


def test_a_relative_damping_of_block_is_relative_to_the_mean_of_the_ranks(
    ranks,
):
    layer, x, target = example("linear", 8)
    u = naive.per_sample_gradients(layer, x, target)
    u_of = [u[part] for part in parts(8, ranks.size)]
    lam = (
        LAM
        * sum(float(torch.linalg.eigvalsh(naive.fisher(v))[-1]) for v in u_of)
        / ranks.size
    )
    want = lam * wanted(u_of, lam, blocks=True)
    for got in ranks(relative):
        assert naive.relative_error(got, want) < 1e-9


SKETCHES = [
    seng.sketch.Rows(40),
    seng.sketch.LeverageRows(60),
    seng.sketch.KroneckerRows(3, 5),
    seng.sketch.Gaussian(40),
    seng.sketch.CountSketch(40),
]


@pytest.mark.parametrize(
    "sketch", SKETCHES, ids=lambda sketch: type(sketch).__name__
)
def test_sketches_choose_the_directions_alike_on_all_ranks(two, sketch):
    found = two(train, 7, {"sketch": sketch, "rank": 4}, [6, 6])
    assert torch.equal(*found) and found[0].isfinite().all()
    exactly = two(train, 7, {"rank": 4}, [6, 6])[0]
    assert not torch.equal(found[0], exactly)  # it was used


def parted(rank, metric):
    """States that differ in a bit after a refresh."""
    model = network()
    wrapped = DistributedDataParallel(model)
    if metric == "P alone":
        opt = seng.KFAC(wrapped, lr=0.05, refresh_every=3)
    else:
        low = low_rank() if metric == "low rank" else None
        opt = seng.SENG(wrapped, lr=0.05, refresh_every=3, curvature=low)
    real = opt.engine.strategy.agree

    def agree(states, refreshed, sites):
        for state in states.values():
            for t in state.tensors():
                if t.is_floating_point():
                    t.mul_(1 + 1e-3 * rank)
        return real(states, refreshed, sites)

    opt.engine.strategy.agree = agree
    part = parts(12, dist.get_world_size())[rank]
    for x, target in batches(5, 12):
        step_of(wrapped, opt, x[part], target[part])
    return naive.flat([p.detach() for p in model.parameters()])


@pytest.mark.parametrize("metric", ["P alone", "low rank", "low rank over P"])
def test_states_that_differ_become_the_first_ranks(two, metric):
    assert torch.equal(*two(parted, metric))


def lagged_with(rank, wrap, change):
    """`lagged` while the damping changes, or with a batch of its own for the curvature."""
    model = network()
    wrapped = DistributedDataParallel(model)
    opt = seng.SENG(
        wrapped if wrap else model,
        lr=0.05,
        refresh_every=4,
        strategy="lagged",
        damping=0.01,
        curvature=low_rank(),
    )
    part = parts(12, dist.get_world_size())[rank]
    for i, (x, target) in enumerate(batches(7, 12)):
        x, target = x[part], target[part]
        opt.zero_grad()
        if change == "damping":
            opt.param_groups[0]["damping"] = 0.01 * (1 + i)
        elif i == 2:
            with opt.curvature_batch():
                naive.loss_of(wrapped(x.flip(0)), target).backward()
        naive.loss_of(wrapped(x), target).backward()
        opt.step()
    return naive.flat([p.detach() for p in model.parameters()])


@pytest.mark.parametrize("change", ["damping", "a batch of its own"])
def test_what_travels_along_is_what_would_travel_by_itself(two, change):
    along, alone = (
        two(lagged_with, True, change),
        two(lagged_with, False, change),
    )
    assert (
        torch.equal(*along)
        and naive.relative_error(along[0], alone[0]) < 1e-12
    )


def reloaded(rank, strategy, fresh):
    """Save and load in mid-period; on a fresh optimizer too."""
    from torch.distributed.checkpoint.state_dict import (
        get_state_dict,
        set_state_dict,
    )

    model = network()
    wrapped = DistributedDataParallel(model)
    opt = seng.SENG(
        wrapped,
        lr=0.05,
        refresh_every=4,
        strategy=strategy,
        curvature=curvature_for(strategy),
    )
    part = parts(12, dist.get_world_size())[rank]
    weights, state = get_state_dict(wrapped, opt)
    if fresh:
        set_state_dict(
            wrapped, opt, model_state_dict=weights, optim_state_dict=state
        )
    for i, (x, target) in enumerate(batches(8, 12)):
        step_of(wrapped, opt, x[part], target[part])
        if i == 5:
            opt.load_state_dict(opt.state_dict())
    return naive.flat(
        [p.detach() for p in model.parameters()]
    ), opt.last_refresh


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("strategy", ["shared", "block", "lagged"])
def test_a_state_is_loaded_by_all(two, strategy, fresh):
    (first, at), (second, _) = two(reloaded, strategy, fresh)
    assert torch.equal(first, second) and at == (
        6 if strategy != "shared" else None
    )  # their own curvature is refreshed


def used_again(rank, strategy):
    """A layer that is used at the first refresh, not at the second, and then again."""
    model = Branches(False)
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    opt = seng.SENG(
        wrapped,
        lr=0.1,
        momentum=0.0,
        damping=LAM,
        curvature=exact(),
        strategy=strategy,
        refresh_every=2,
    )
    for i in range(4):
        model.rank = int(i not in (2,))
        opt.zero_grad()
        naive.loss_of(wrapped(torch.randn(3, 4)), torch.ones(3, 4)).backward()
        before, g = (
            model.second.weight.detach().clone(),
            model.second.weight.grad,
        )
        opt.step()
    return naive.relative_error(before - model.second.weight.detach(), 0.1 * g)


@pytest.mark.parametrize("strategy", ["shared", "block"])
def test_a_layer_keeps_its_curvature_over_a_refresh_that_does_not_see_it(
    two, strategy
):
    assert all(off > 0.01 for off in two(used_again, strategy))


def without_seng(rank):
    """SGD on a DistributedDataParallel that `lagged` has used."""
    from seng.lab.bench.traffic import Traffic

    model = network()
    wrapped = DistributedDataParallel(model)
    opt = seng.SENG(
        wrapped,
        lr=0.05,
        refresh_every=4,
        strategy="lagged",
        curvature=low_rank(),
    )
    part = parts(12, dist.get_world_size())[rank]
    for x, target in batches(3, 12):
        step_of(wrapped, opt, x[part], target[part])
    del opt
    with Traffic() as traffic:
        naive.loss_of(wrapped(x[part]), target[part]).backward()
    return traffic.bytes, sum(p.numel() * 8 for p in model.parameters())


def test_nothing_travels_along_once_the_optimizer_is_gone(two):
    assert all(sent == gradient for sent, gradient in two(without_seng))


class Sent:
    """A message whose callback somebody still holds, as gloo's thread does for a while."""

    def get_future(self):
        return self

    def then(self, callback):
        self.callback = callback
        return self


def test_a_message_does_not_keep_the_strategy(monkeypatch):
    sent, given = Sent(), []

    def all_reduce(both, **_):
        given.append(both)
        return sent

    monkeypatch.setattr("seng.distributed.team.dist.all_reduce", all_reduce)
    p = nn.Parameter(torch.ones(3))
    averaged = Averaged(Team("lagged", 2), nn.Linear(1, 1))
    averaged.message = {p: torch.ones(3)}, {}, None
    bucket = SimpleNamespace(
        buffer=lambda: torch.zeros(3), parameters=lambda: [p]
    )
    gone = weakref.ref(averaged)
    _along((averaged.team, gone), bucket)
    assert given[0].tolist() == [0, 0, 0, 0.5, 0.5, 0.5]  # it travels along
    del averaged
    assert gone() is None and callable(sent.callback)


def bucket_views(rank):
    model = network()
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    opt = seng.SENG(wrapped, lr=0.05)
    part = parts(12, dist.get_world_size())[rank]
    (x, target), (y, other) = batches(2, 12)
    naive.loss_of(wrapped(x[part]), target[part]).backward()
    before = naive.flat([p.grad.clone() for p in model.parameters()])
    with opt.curvature_batch():
        naive.loss_of(wrapped(y[part]), other[part]).backward()
    return naive.relative_error(
        naive.flat([p.grad for p in model.parameters()]), before
    )


def test_a_batch_for_the_curvature_leaves_gradients_alone(two):
    assert two(bucket_views) == [0.0, 0.0]


def alone(rank):
    """Networks that have nothing to do with each other."""
    torch.manual_seed(rank)
    model = nn.Linear(4, 3)
    opt = seng.SENG(model, strategy="local", refresh_every=1)
    for _ in range(1 + rank):
        step_of(model, opt, torch.randn(5, 4), torch.ones(5, 3))
    return opt.last_refresh


def test_networks_of_their_own_have_curvatures_of_their_own(two):
    assert two(alone) == [0, 1]


def drawn(rank):
    from seng.distributed.pool import Share, _omega
    from seng.distributed.team import team_of
    from seng.linalg.operators import Explicit

    U = Explicit(
        torch.randn(50, 3, generator=torch.Generator().manual_seed(rank)),
        (1, 5, 10),
    )
    share = Share(U, [3, 3], 2, lambda: torch.Generator().manual_seed(9))
    omega = _omega(team_of(None, None), share, seng.sketch.LeverageRows(20))
    return omega.index, omega.scale, U.row_norms()


def test_rows_are_chosen_by_the_norms_of_all_ranks(two):
    (index, scale, norms), (other, same, others) = two(drawn)
    assert torch.equal(index, other) and torch.equal(scale, same)
    p = (norms + others) / (norms + others).sum()
    assert torch.allclose(scale, (20 * p[index]).rsqrt())
