"""Does the code for several ranks run on a GPU? NCCL with one rank, gloo with two on the same GPU, each beside one process.

PYTHONPATH=. python benchmarks/ranks_on_one_gpu.py

Prints the relative difference of the parameters after 8 steps with 3 refreshes. One rank has to agree to rounding; so have two
that share a basis. Two ranks under `lagged` are another method (the mean of each rank's own curvature), so they differ.
"""

import os
import tempfile
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import seng

CHANCE = torch.Generator().manual_seed(1)
X, Y = (
    torch.randn(8, 16, 3, 16, 16, generator=CHANCE),
    torch.randint(10, (8, 16), generator=CHANCE),
)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    convolutions = (
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
    )
    head = (
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(512, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )
    return nn.Sequential(*convolutions, *head).cuda()


def trained(
    model: nn.Module,
    wrapped: nn.Module,
    rank: int = 0,
    ranks: int = 1,
    amp: bool = False,
    **options,
) -> Tensor:
    curvature = seng.Curvature(rank=64, decay=0.5)
    opt = seng.SENG(
        wrapped,
        lr=0.05,
        momentum=0.9,
        damping=0.1,
        refresh_every=3,
        curvature=curvature,
        **options,
    )
    for x, y in zip(X.cuda(), Y.cuda(), strict=True):
        with torch.autocast("cuda", torch.bfloat16, enabled=amp):
            loss = nn.functional.cross_entropy(
                wrapped(x[rank::ranks]).float(), y[rank::ranks]
            )
        opt.zero_grad()
        loss.backward()
        opt.step()
    whole = (
        p.full_tensor() if hasattr(p, "full_tensor") else p
        for p in model.parameters()
    )
    return torch.cat([p.detach().reshape(-1).float().cpu() for p in whole])


def worker(rank: int, ranks: int, backend: str, port: int, out: str) -> None:
    warnings.filterwarnings("ignore")
    address = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
    }
    os.environ |= {**address, "LOCAL_RANK": "0"}
    torch.cuda.set_device(0)
    dist.init_process_group(backend, rank=rank, world_size=ranks)
    found = {}
    for name, options in {
        "ddp": {},
        "lagged": {"strategy": "lagged"},
        "autocast": {"amp": True},
    }.items():
        model = network()
        found[name] = trained(
            model,
            DistributedDataParallel(model, device_ids=[0]),
            rank,
            ranks,
            **options,
        )
    if backend == "nccl":
        model = network()
        for layer in model:
            if list(layer.parameters()):
                fully_shard(layer)
        found["fsdp2"] = trained(model, fully_shard(model), rank, ranks)
    if rank == 0:
        torch.save(found, out)
    dist.destroy_process_group()


def main() -> None:
    kinds = {
        "ddp": {},
        "fsdp2": {},
        "lagged": {"strategy": "lagged"},
        "autocast": {"amp": True},
    }
    alone = {
        name: trained(model := network(), model, **options)
        for name, options in kinds.items()
    }
    print(
        "lagged is another method, by",
        f"{float((alone['lagged'] - alone['ddp']).norm() / alone['ddp'].norm()):.1e}",
    )
    for backend, ranks, port in (("nccl", 1, 29611), ("gloo", 2, 29612)):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "found.pt"
            mp.spawn(worker, (ranks, backend, port, str(path)), nprocs=ranks)
            for name, found in torch.load(path).items():
                print(
                    f"{backend}, {ranks} ranks, {name}: {float((found - alone[name]).norm() / alone[name].norm()):.1e}"
                )


if __name__ == "__main__":
    main()
