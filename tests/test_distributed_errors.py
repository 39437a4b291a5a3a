"""Ranks that disagree, fail or are not there: an error that says what is wrong, within the timeout, and no hang."""

import time

import naive
import pytest
import torch
from several import Ranks
from torch import nn
from torch.distributed.fsdp import fully_shard

import seng

TIMEOUT = 4


@pytest.fixture
def hasty():
    """Two ranks that may break, and do not wait long."""
    ranks = Ranks(2, TIMEOUT)
    yield ranks
    ranks.close()


def other_model(rank):
    seng.SENG(nn.Linear(4, 3 + rank))


def other_options(rank):
    seng.SENG(nn.Linear(4, 3), refresh_every=10 + rank)


def other_damping_units(rank):
    seng.SENG(
        nn.Linear(4, 3), curvature=seng.Curvature(relative_damping=bool(rank))
    )


def stepped(model, opt, count=1):
    for _ in range(count):
        opt.zero_grad()
        naive.loss_of(model(torch.ones(3, 4)), torch.ones(3, 3)).backward()
        opt.step()


def other_seed(rank):
    torch.manual_seed(rank)
    model = nn.Linear(4, 3)
    stepped(model, seng.SENG(model))


def other_seed_of_the_kronecker_metric(rank):
    torch.manual_seed(rank)
    model = nn.Linear(4, 3)
    stepped(model, seng.KFAC(model))


def other_steps(rank):
    model = nn.Linear(4, 3)
    opt = seng.SENG(model, refresh_every=1)
    stepped(model, opt)
    if rank:
        opt.engine.clock.steps += 1
    stepped(model, opt)


def other_damping(rank):
    model = nn.Linear(4, 3)
    stepped(model, seng.SENG(model, damping=0.1 + rank))


def local_among_several(rank):
    seng.SENG(
        nn.parallel.DistributedDataParallel(nn.Linear(4, 3)), strategy="local"
    )


def tensor_parallel(rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        parallelize_module,
    )

    model = nn.Sequential(nn.Linear(4, 4))
    seng.SENG(
        parallelize_module(
            model, init_device_mesh("cpu", (2,)), {"0": ColwiseParallel()}
        )
    )


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (
            other_damping,
            "the dampings of rank 1 are not those of rank 0 at step 0",
        ),
        (
            local_among_several,
            "ranks with curvatures of their own would drift apart",
        ),
        (
            tensor_parallel,
            "DTensors that no fully_shard has made (tensor parallelism?)",
        ),
        (other_model, "rank 1 differs from rank 0 in its layers"),
        (
            other_options,
            "rank 1 differs from rank 0 in its refresh_every: 11 where rank 0 has 10",
        ),
        (other_damping_units, "rank 1 differs from rank 0 in its curvature"),
        (
            other_seed,
            "the weights of rank 1 are not those of rank 0: wrap the network in DistributedDataParallel",
        ),
        (
            other_seed_of_the_kronecker_metric,
            "the weights of rank 1 are not those of rank 0",
        ),
        (
            other_steps,
            "the ranks refresh their curvature at different steps: [1, 2]",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_ranks_that_disagree_are_told_so(two, function, said):
    for _, error in two.outcomes(function):
        assert said in " ".join(error.split())


def only_the_first(rank):
    if rank == 0:
        seng.SENG(nn.Linear(4, 3))


def one_raises(rank):
    model = nn.Linear(4, 3)
    opt = seng.SENG(model)
    if rank == 1:
        raise ZeroDivisionError("on purpose")
    stepped(model, opt)


@pytest.mark.parametrize(
    ("function", "what"),
    [
        (only_the_first, "meeting the other ranks"),
        (one_raises, "comparing weights"),
    ],
)
def test_a_rank_that_is_missing_or_fails_ends_the_wait(hasty, function, what):
    """A minute of room: on a busy machine it takes far longer than the wait, and torch's own would be 30 minutes."""
    start = time.monotonic()
    (_, error), _ = hasty.outcomes(function)
    assert (
        f"SENG, rank 0 of 2: {what} did not come about; another rank has failed"
        in error
    )
    assert time.monotonic() - start < TIMEOUT + 60


def forms(rank, options):
    curvature = seng.Curvature(base=None, **options)
    seng.SENG(nn.Linear(4, 3), curvature=curvature)


@pytest.mark.parametrize(
    "options",
    [{"form": "implicit", "decay": 0}, {"combine": "independent", "decay": 0}],
    ids=str,
)
def test_factors_cannot_be_shared(two, options):
    for _, error in two.outcomes(forms, options):
        assert (
            "keeps each sample's factors" in error
            and "strategy='block'" in error
        )


def default_of(rank, strategy, recipe, spread):
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    if spread:
        fully_shard(model)
    seng.SENG(model, strategy=strategy, recipe=recipe)


@pytest.mark.parametrize(
    ("strategy", "recipe", "spread", "said"),
    [
        ("lagged", "sgd", False, "curvature=seng.Curvature(base=None)"),
        ("lagged", "muon", False, "does not run with strategy='lagged'"),
        (None, "muon", True, "does not run with parameters spread over ranks"),
    ],
)
def test_what_a_strategy_does_not_have_is_refused(
    two, strategy, recipe, spread, said
):
    for _, error in two.outcomes(default_of, strategy, recipe, spread):
        assert said in " ".join(error.split())


def spread_kfac(rank):
    seng.KFAC(fully_shard(nn.Linear(4, 3)))


def test_the_kronecker_metric_alone_needs_whole_parameters(two):
    for _, error in two.outcomes(spread_kfac):
        assert "KFAC works on whole parameters" in error
        assert "seng.SENG works there" in error
