"""Process groups and what shards parameters."""

import gc
import tempfile

import torch
import torch.distributed as dist
from torch import nn

from situations import as_plain, loop, mlp, sengs, situation


def in_a_group(run):
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(f"{folder}/store", 1),
            rank=0,
            world_size=1,
        )
        try:
            run()
        finally:
            gc.collect()  # networks first: where DDP is the last to hold the group, gloo and Python wait for each other
            dist.destroy_process_group()


@situation("Processes", "DistributedDataParallel with one process")
def _():
    def run():
        model = mlp()
        parallel = nn.parallel.DistributedDataParallel(model)
        as_plain(loop(model, sengs(parallel), run=parallel))

    in_a_group(run)


def among_two(function, *args):
    """On two ranks: what the first one's weights are, and that the other's are the same."""
    from several import Ranks

    ranks = Ranks(2)
    try:
        first, second = ranks(function, *args)
    finally:
        ranks.close()
    assert torch.equal(first, second)
    return first


@situation("Processes", "DistributedDataParallel with two processes")
def _():
    from test_distributed import train

    torch.set_default_dtype(torch.float64)
    assert torch.allclose(
        among_two(train, 6, {}, [6, 6]), train(0, 6, {"form": "merged"}, None)
    )


@situation("Processes", "FSDP2 (fully_shard) with two processes")
def _():
    from test_distributed import train
    from test_fsdp import trained

    torch.set_default_dtype(torch.float64)
    assert torch.allclose(
        among_two(trained, 6, {}), train(0, 6, {"form": "merged"}, None)
    )


@situation("Processes", "nn.DataParallel without GPUs")
def _():
    model = mlp()
    parallel = nn.DataParallel(model)
    as_plain(loop(model, sengs(parallel), run=parallel))
