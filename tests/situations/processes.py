"""Process groups and what shards parameters."""

import tempfile

import torch.distributed as dist
from torch import nn

from situations import as_plain, loop, mlp, sengs, situation


def in_a_group(size, run):
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
        try:
            if size > 1:
                real, dist.get_world_size = dist.get_world_size, lambda *_: size
            run()
        finally:
            if size > 1:
                dist.get_world_size = real
            dist.destroy_process_group()


@situation("Processes", "DistributedDataParallel with one process")
def _():
    def run():
        model = mlp()
        parallel = nn.parallel.DistributedDataParallel(model)
        as_plain(loop(model, sengs(parallel), run=parallel))

    in_a_group(1, run)


@situation("Processes", "a process group of several")
def _():
    in_a_group(2, lambda: sengs(mlp()))


@situation("Processes", "FSDP2 (fully_shard)")
def _():
    def run():
        from torch.distributed.fsdp import fully_shard

        sengs(fully_shard(mlp()))

    in_a_group(1, run)


@situation("Processes", "nn.DataParallel without GPUs")
def _():
    model = mlp()
    parallel = nn.DataParallel(model)
    as_plain(loop(model, sengs(parallel), run=parallel))
