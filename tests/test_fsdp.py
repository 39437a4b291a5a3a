"""FSDP2 and HSDP: parameters, gradients and bases are spread over ranks, and it is still one process on all samples."""

import naive
import pytest
import torch
import torch.distributed as dist
from conftest import LAYERS
from test_distributed import (
    CASES,
    LAM,
    batches,
    exact,
    example,
    low_rank,
    network,
    parts,
    train,
)
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import seng
from seng.tell.inspection import inspect


def whole(params) -> torch.Tensor:
    return naive.flat(
        [
            p.full_tensor().detach()
            if hasattr(p, "full_tensor")
            else p.detach()
            for p in params
        ]
    )


def mesh_of(size: int, hybrid: bool):
    return (
        init_device_mesh(
            "cpu", (2, size // 2), mesh_dim_names=("replicas", "shards")
        )
        if hybrid
        else None
    )


def one_step(rank, names, hybrid):
    size, out = dist.get_world_size(), {}
    mesh = mesh_of(size, hybrid)
    for name in names:
        layer, x, target = example(name, 3 * size)
        part = parts(3 * size, size)[rank]
        model = fully_shard(
            nn.Sequential(layer), **({"mesh": mesh} if hybrid else {})
        )
        before = whole(model.parameters())
        opt = seng.SENG(
            model,
            lr=1.0,
            momentum=0.0,
            damping=LAM,
            recipe="paper",
            curvature=exact(),
        )
        naive.loss_of(model(x[part]), target[part]).backward()
        opt.step()
        out[name] = before - whole(model.parameters())
    return out


def check(found, size, names):
    for name in names:
        layer, x, target = example(name, 3 * size)
        u = naive.per_sample_gradients(layer, x, target)
        want = naive.dense_direction(naive.fisher(u), u.mean(0), LAM)
        for got in found:
            assert naive.relative_error(got[name], want) < 1e-9, name


def test_spread_parameters_are_one_process_on_all_samples(ranks):
    names = [case.name for case in LAYERS]
    check(ranks(one_step, names, False), ranks.size, names)


def test_hybrid_sharding(four):
    names = [
        "linear",
        "conv2d",
        "embedding-sequence",
        "layer-norm",
        "conv2d-groups",
    ]
    check(four(one_step, names, True), 4, names)
    assert set(names) <= set(CASES)


DEFAULT = {"base": seng.Kronecker(), "centred": None, "samples": 64}
OVER_P = {  # directions are cut off of P alone, and P moves
    "base": seng.Kronecker(rank=2, decay=0.5),
    "centred": None,
    "rank": 10**6,
    "decay": 0.5,
}


def based_steps(rank, names, how, count):
    """Weights after three steps over P, each of which refreshes."""
    size = dist.get_world_size() if how != "alone" else 1
    out = {}
    for name in names:
        layer, x, target = example(name, count)
        part = parts(count, size)[rank]
        model = nn.Sequential(layer)
        if how != "alone":
            mesh = mesh_of(size, how == "hybrid")
            fully_shard(model, **({"mesh": mesh} if mesh else {}))
        opt = seng.SENG(
            model, lr=0.05, refresh_every=1, curvature=low_rank(**OVER_P)
        )
        for i in range(3):
            opt.zero_grad()
            a, b = x.roll(i, 0)[part], target[part]
            naive.loss_of(model(a), b).backward()
            opt.step()
        out[name] = whole(model.parameters())
    return out


def check_based(ranks, names, how):
    count = 3 * ranks.size
    want = based_steps(0, names, "alone", count)
    for found in ranks(based_steps, names, how, count):
        for name in names:
            off = naive.relative_error(found[name], want[name])
            assert off < 1e-9, (name, off)


def test_a_base_of_spread_parameters_is_one_process_on_all_samples(ranks):
    check_based(ranks, [case.name for case in LAYERS], "spread")


def test_a_base_under_hybrid_sharding(four):
    names = ["linear", "conv2d-groups", "conv-transpose2d", "layer-norm"]
    check_based(four, names, "hybrid")


class Tied(nn.Module):
    """Two layers with one weight and a bias each, and a table that is the head too."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.table = nn.Embedding(7, 5)
        self.first = nn.Linear(5, 5)
        self.second = nn.Linear(5, 5)
        self.second.weight = self.first.weight
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x):
        x = self.first(self.table(x)).tanh()
        return self.head(self.second(x))


def tied(rank, spread, count=8):
    model = Tied()
    part = slice(None)
    if spread:
        part = parts(count, dist.get_world_size())[rank]
        fully_shard(model)
    opt = seng.SENG(
        model, lr=0.05, refresh_every=1, curvature=low_rank(**OVER_P)
    )
    generator = torch.Generator().manual_seed(2)
    for _ in range(3):
        x = torch.randint(7, (count, 4), generator=generator)
        target = torch.randn(count, 4, 7, generator=generator)
        opt.zero_grad()
        naive.loss_of(model(x[part]), target[part]).backward()
        opt.step()
    return whole(model.parameters()), sorted(opt.diagnostics())


def test_layers_that_share_a_spread_weight(ranks):
    want, layers = tied(0, False)
    assert layers == ["first + second", "table + head"]
    for found, theirs in ranks(tied, True):
        assert theirs == layers
        assert naive.relative_error(found, want) < 1e-9


def sharded(model):
    for layer in model:
        if any(True for _ in layer.parameters()):
            fully_shard(layer)
    return fully_shard(model)


def trained(rank, steps, options, accumulate=1):
    model = sharded(network())
    opt = seng.SENG(
        model,
        lr=0.05,
        curvature=low_rank(**options),
        damping=0.01,
        refresh_every=3,
    )
    part = parts(12, dist.get_world_size())[rank]
    for x, target in batches(steps, 12):
        opt.zero_grad()
        chunks = list(
            zip(
                x[part].chunk(accumulate),
                target[part].chunk(accumulate),
                strict=True,
            )
        )
        for i, (a, b) in enumerate(chunks):
            model.set_requires_gradient_sync(i == len(chunks) - 1)
            (naive.loss_of(model(a), b) / accumulate).backward()
        opt.step()
    return whole(model.parameters())


@pytest.mark.parametrize(
    "options", [{}, {"rank": 5}, {"decay": 0, "rank": 6}, DEFAULT], ids=str
)
def test_training_with_spread_parameters_is_training_in_one_process(
    ranks, options
):
    found = ranks(trained, 10, options)
    want = train(0, 10, {"form": "merged", **options}, None)
    assert all(naive.relative_error(w, want) < 1e-8 for w in found)


def test_accumulation_is_one_large_batch(two):
    once, twice = two(trained, 7, {}), two(trained, 7, {}, 2)
    assert naive.relative_error(twice[0], once[0]) < 1e-9


def refused(rank, strategy):
    seng.SENG(sharded(network()), strategy=strategy)


@pytest.mark.parametrize("strategy", ["block", "lagged"])
def test_the_papers_strategies_need_whole_parameters(two, strategy):
    for _, error in two.outcomes(refused, strategy):
        assert (
            "averages whole directions" in error
            and "leave strategy out" in error
        )


def wrapped(how):
    return (
        sharded(network())
        if how == "fsdp"
        else nn.parallel.DistributedDataParallel(network())
    )


def saved(rank, folder, steps, options, how="fsdp"):
    """Train, save, and train on."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model = wrapped(how)
    opt = seng.SENG(
        model,
        lr=0.05,
        damping=0.01,
        refresh_every=4,
        curvature=low_rank(**options),
    )
    part = parts(12, dist.get_world_size())[rank]
    for i, (x, target) in enumerate(batches(2 * steps, 12)):
        if i == steps:
            weights, state = get_state_dict(model, opt)
            dcp.save({"model": weights, "optim": state}, checkpoint_id=folder)
        opt.zero_grad()
        naive.loss_of(model(x[part]), target[part]).backward()
        opt.step()
    return whole(model.parameters())


def resumed(rank, folder, steps, options, how="fsdp"):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import (
        get_state_dict,
        set_state_dict,
    )

    model = wrapped(how)
    opt = seng.SENG(
        model,
        lr=0.05,
        damping=0.01,
        refresh_every=4,
        curvature=low_rank(**options),
    )
    weights, optim = get_state_dict(model, opt)
    state = {"model": weights, "optim": optim}
    seng.expect_curvature(state, folder)
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        model,
        opt,
        model_state_dict=state["model"],
        optim_state_dict=state["optim"],
    )
    part = parts(12, dist.get_world_size())[rank]
    for x, target in list(batches(2 * steps, 12))[steps:]:
        opt.zero_grad()
        naive.loss_of(model(x[part]), target[part]).backward()
        opt.step()
    return whole(model.parameters())


@pytest.mark.parametrize("options", [{}, {"decay": 0}, DEFAULT], ids=str)
def test_a_checkpoint_resumes_on_another_number_of_ranks(
    two, four, tmp_path, options
):
    want = two(saved, str(tmp_path / "two"), 6, options)[
        0
    ]  # in mid-period: two steps after a refresh
    for ranks in (two, four):
        found = ranks(resumed, str(tmp_path / "two"), 6, options)
        assert all(naive.relative_error(w, want) < 1e-9 for w in found)


@pytest.mark.parametrize("options", [{}, DEFAULT], ids=["low rank", "default"])
@pytest.mark.parametrize(
    ("before", "after"), [("ddp", "fsdp"), ("fsdp", "ddp"), ("ddp", "ddp")]
)
def test_a_checkpoint_resumes_under_another_wrapper(
    two, four, tmp_path, before, after, options
):
    want = two(saved, str(tmp_path / "two"), 6, options, before)[0]
    for ranks in (two, four):
        found = ranks(resumed, str(tmp_path / "two"), 6, options, after)
        assert all(naive.relative_error(w, want) < 1e-9 for w in found)


def full_state(rank):
    """The usual recipe: rank 0 has all of the state, and a new optimizer on every rank is told."""
    import warnings

    from torch.distributed.checkpoint import state_dict as sd

    model = sharded(network())
    opt = seng.SENG(model, lr=0.05, damping=0.01, refresh_every=6)
    part = parts(12, dist.get_world_size())[rank]
    for i, (x, target) in enumerate(batches(8, 12)):
        if i == 4:
            whole_state = sd.StateDictOptions(
                full_state_dict=True, cpu_offload=True
            )
            weights, state = sd.get_state_dict(model, opt, options=whole_state)
            model = sharded(network())
            opt = seng.SENG(model, lr=0.05, damping=0.01, refresh_every=6)
            told = sd.StateDictOptions(
                full_state_dict=True, broadcast_from_rank0=True
            )
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                sd.set_model_state_dict(model, weights, options=told)
                sd.set_optimizer_state_dict(model, opt, state, options=told)
        opt.zero_grad()
        naive.loss_of(model(x[part]), target[part]).backward()
        opt.step()
    return whole(model.parameters()), inspect(opt).refreshes


def test_a_state_that_only_the_first_rank_has_is_refreshed_by_all(two):
    (first, count), (second, other) = two(full_state)
    assert torch.equal(first, second) and count == other


def to_and_fro(rank):
    """The curvature goes on, whole or spread: nothing is said of another kind."""
    import warnings

    from torch.distributed.checkpoint import state_dict as sd

    part, out = parts(12, dist.get_world_size())[rank], []
    for before, after in (("ddp", "fsdp"), ("fsdp", "ddp")):
        state = {}
        for how in (before, after):
            model = wrapped(how)
            opt = seng.SENG(model, lr=0.05)
            if state:
                with warnings.catch_warnings(record=True) as told:
                    warnings.simplefilter("always")
                    sd.set_optimizer_state_dict(
                        model,
                        opt,
                        state,
                        options=sd.StateDictOptions(full_state_dict=True),
                    )
                out.append(
                    not any("seng: the loaded" in str(w.message) for w in told)
                )
            for x, target in batches(3, 12):
                opt.zero_grad()
                naive.loss_of(model(x[part]), target[part]).backward()
                opt.step()
            state = sd.get_optimizer_state_dict(
                model, opt, options=sd.StateDictOptions(full_state_dict=True)
            )
        out.append(bool(whole(model.parameters()).isfinite().all()))
    return out


def test_checkpoints_of_the_defaults_load_where_parameters_are_spread_and_back(
    two,
):
    for found in two(to_and_fro):
        assert found == [True] * 4


def partly(rank):
    model = network()
    ignored = {model[3].bias}
    opt = seng.SENG(fully_shard(model, ignored_params=ignored), lr=0.05)
    return inspect(opt).uncovered


@pytest.mark.filterwarnings("ignore")
def test_a_layer_that_is_partly_spread_takes_the_plain_gradient(two):
    for uncovered in two(partly):
        assert "spread over ranks and others are not" in uncovered["3.weight"]


def some_spread(rank, steps, spread):
    """The other layers are whole, and the user averages their gradients."""
    model = network()
    others = [
        p for i in {0, 3, 5} - set(spread) for p in model[i].parameters()
    ]
    for i in spread:
        fully_shard(model[i])
    opt = seng.SENG(
        model,
        lr=0.05,
        curvature=low_rank(rank=5),
        damping=0.01,
        refresh_every=3,
    )
    size = dist.get_world_size()
    part = parts(12, size)[rank]
    for x, target in batches(steps, 12):
        opt.zero_grad()
        naive.loss_of(model(x[part]), target[part]).backward()
        for p in others:
            dist.all_reduce(p.grad)
            p.grad /= size
        opt.step()
    return whole(model.parameters())


@pytest.mark.parametrize("spread", [(0, 5), (3,)], ids=["first", "second"])
def test_layers_of_which_only_some_are_spread(two, spread):
    want = train(0, 7, {"form": "merged", "rank": 5}, None)
    found = two(some_spread, 7, spread)
    assert all(naive.relative_error(w, want) < 1e-8 for w in found)


def compiled(rank, compiles):
    model, counter = sharded(network()), CompileCounter()
    opt = seng.SENG(model, lr=0.05, refresh_every=3)
    step = torch.compile(opt.step, backend=counter) if compiles else opt.step
    part = parts(12, dist.get_world_size())[rank]
    for x, target in batches(7, 12):
        opt.zero_grad()
        naive.loss_of(model(x[part]), target[part]).backward()
        step()
    return whole(model.parameters()), counter.frame_count


def test_a_compiled_step_is_the_plain_one(two):
    """Shapes differ among ranks, and what one compiles fits no other: nothing is compiled."""
    (_, none), (got, other) = two(compiled, True)
    assert none == other == 0
    assert torch.equal(got, two(compiled, False)[1][0])


def one_rank_each(rank):
    """FSDP of one process, beside another one."""
    import warnings

    model = network()
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("runs", "shards"))[
        "shards"
    ]
    for i in (0, 3, 5):
        fully_shard(model[i], mesh=mesh)
    curvature = low_rank(rank=5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt = seng.SENG(
            model, lr=0.05, curvature=curvature, damping=0.01, refresh_every=3
        )
        for x, target in batches(7, 12):
            opt.zero_grad()
            naive.loss_of(model(x), target).backward()
            opt.step()
    return whole(model.parameters())


def test_one_process_with_spread_parameters_is_told_of_nothing(two):
    want = train(0, 7, {"form": "merged", "rank": 5}, None)
    for found in two(one_rank_each):
        assert naive.relative_error(found, want) < 1e-8
