"""DistributedDataParallel, torch.compile, mixed precision with a scaler and accumulation, all at once."""

import naive
import torch
from test_distributed import batches, low_rank, parts
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import seng
from seng.tell.inspection import inspect


def small():
    torch.manual_seed(3)
    layers = (
        nn.Conv2d(1, 4, 3, padding=1),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(64, 8),
        nn.Tanh(),
        nn.Linear(8, 3),
    )
    return nn.Sequential(*layers).float()


def all_at_once(rank, steps, several, curved=True):
    torch.set_default_dtype(torch.float32)
    torch._dynamo.reset()
    model = small()
    wrapped = DistributedDataParallel(model) if several else model
    damping = 0.01 if curved else 1e30
    opt = seng.SENG(
        wrapped,
        lr=0.05,
        damping=damping,
        refresh_every=3,
        curvature=low_rank(form="merged"),
    )
    compiled = torch.compile(wrapped)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    part = parts(12, 2)[rank] if several else slice(None)
    for x, target in batches(steps, 12):
        x, target = x.float()[part], target.float()[part]
        opt.zero_grad()
        for i, (a, b) in enumerate(
            zip(x.chunk(2), target.chunk(2), strict=True)
        ):
            with (
                wrapped.no_sync()
                if several and i == 0
                else torch.enable_grad()
            ):
                with torch.autocast("cpu", torch.bfloat16):
                    loss = naive.loss_of(compiled(a).float(), b) / 2
                scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
    assert opt.last_refresh == 6 and len(inspect(opt).states) == 3
    return naive.flat([p.detach() for p in model.parameters()])


def test_ddp_compile_amp_and_accumulation_together(two):
    first, second = two(all_at_once, 8, True)
    assert torch.equal(first, second)
    start = naive.flat([p.detach() for p in small().parameters()])
    one, plain = (
        all_at_once(0, 8, False),
        all_at_once(0, 8, False, curved=False),
    )
    off, curved = (
        naive.relative_error(first - start, one - start),
        naive.relative_error(plain - start, one - start),
    )
    assert (
        off < 0.1 * curved
    )  # rounding of bfloat16 against what curvature does
