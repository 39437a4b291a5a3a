"""What SENG sends beyond DistributedDataParallel's and FSDP2's own messages, counted at the process group."""

import naive
import pytest
import torch
import torch.distributed as dist
from test_distributed import batches, low_rank, network, parts
from test_fsdp import sharded
from torch import nn

import seng
from seng.lab import models
from seng.lab.bench.traffic import Traffic


def steps_of(rank, strategy, wrap, curvature):
    """(bytes, messages) of each step; strategy None is SGD."""
    model = network()
    gradient = sum(p.numel() * p.element_size() for p in model.parameters())
    wrapped = (
        nn.parallel.DistributedDataParallel(model)
        if wrap == "ddp"
        else sharded(model)
    )
    if strategy is None:
        opt = torch.optim.SGD(wrapped.parameters(), lr=0.05)
    else:
        opt = seng.SENG(
            wrapped,
            lr=0.05,
            refresh_every=4,
            strategy=strategy,
            curvature=curvature,
        )
    part = parts(12, dist.get_world_size())[rank]
    found = []
    for x, target in batches(8, 12):
        opt.zero_grad()
        with Traffic() as traffic:
            naive.loss_of(wrapped(x[part]), target[part]).backward()
            opt.step()
        found.append((traffic.bytes, traffic.messages.total()))
    return found, gradient


def beyond(ranks, strategy, wrap="ddp", curvature=None):
    """What a strategy sends at each step more than SGD does."""
    (plain, gradient), (ours, _) = (
        ranks(steps_of, None, wrap, None)[0],
        ranks(steps_of, strategy, wrap, curvature)[0],
    )
    return [
        (b - a, m - n) for (a, n), (b, m) in zip(plain, ours, strict=True)
    ], gradient


IDLE = (2, 3, 5, 6, 7)  # of T = 4; the first steps have messages of DDP's own


def test_shared_sends_nothing_between_refreshes(two):
    extra, _ = beyond(two, "shared")
    assert all(extra[i] == (0, 0) for i in IDLE)
    assert extra[4][0] > 0


def test_block_sends_one_gradient_more(two):
    extra, gradient = beyond(two, "block")
    assert all(extra[i][0] == gradient for i in IDLE)


def test_lagged_sends_one_gradient_more_in_the_same_messages(two):
    extra, gradient = beyond(two, "lagged", curvature=low_rank())
    assert all(extra[i] == (gradient, 0) for i in IDLE)


def test_spread_parameters_send_k_numbers_per_layer(two):
    extra, _ = beyond(two, "shared", "fsdp", low_rank(rank=5))
    assert all(
        extra[i] == (3 * 5 * 8, 1) for i in IDLE
    )  # three layers, float64, one message


def test_over_a_base_spread_parameters_send_its_columns_too(two):
    """r_G × n_A numbers of each layer with the k of Uᵀg; then two lengths of each."""
    P = seng.Kronecker(rank=2)
    extra, _ = beyond(two, "shared", "fsdp", seng.Curvature(rank=5, base=P))
    # r_G·n_A of the three layers; 4 and 3 outputs stay whole.
    columns = 4 * (9 + 1) + 2 * (64 + 1) + 3 * (8 + 1)
    numbers = 3 * 5 + columns + 3 * 2
    assert all(extra[i] == (numbers * 8, 2) for i in IDLE)


def resnet50(rank, half):
    """Bytes of one refresh at the size of ResNet50, and of its gradients."""
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    model = models.resnet50(1000)
    gradient = sum(p.numel() * p.element_size() for p in model.parameters())
    wrapped = nn.parallel.DistributedDataParallel(model)
    opt = seng.SENG(
        wrapped,
        lr=0.01,
        refresh_every=200,
        curvature=seng.Curvature(rank=16, samples=16),
    )
    x, y = torch.randn(8, 3, 32, 32), torch.randint(1000, (8,))
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        loss = nn.functional.cross_entropy(wrapped(x).float(), y)
    loss.backward()
    with Traffic() as traffic:
        opt.step()
    return traffic.bytes, gradient


@pytest.mark.parametrize(
    ("half", "least", "most"),
    [(False, 0.08, 0.1), (True, 0.04, 0.06)],
    ids=["float32", "bfloat16"],
)
def test_a_refresh_of_resnet50_every_200_steps_is_less_than_a_tenth_of_a_gradient_per_step(
    two, half, least, most
):
    for sent, gradient in two(resnet50, half):
        assert least < sent / 200 / gradient < most
