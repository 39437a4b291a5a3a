"""The situations of docs/compatibility.md: what is run, what happened, and the references that the checks compare with.

Directions are compared with a dense solve over per-sample gradients (`exact`), a training with the plain loop (`as_plain`).
"""

import functools
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import naive
import torch
from test_capture import optimizer, reference
from torch import nn

import seng
from seng.tell.inspection import inspect


@dataclass(frozen=True)
class Situation:
    group: str
    title: str
    check: Callable[[], None]


SITUATIONS: list[Situation] = []


def situation(group: str, title: str):
    def register(check):
        SITUATIONS.append(Situation(group, title, check))
        return check

    return register


@functools.cache
def outcome(s: Situation) -> tuple[str, str]:
    """What happened, and what the user was told; a failed check or anybody else's exception is nobody's outcome."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    torch._dynamo.reset()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            s.check()
        except (ValueError, TypeError, RuntimeError) as error:
            raised = Path(
                traceback.extract_tb(error.__traceback__)[-1].filename
            )
            ours = raised.is_relative_to(Path(seng.__file__).parent)
            if not ours and "SENG" not in str(error):
                raise
            return "refused", str(error)
    told = [
        str(w.message) for w in caught if str(w.message).startswith("seng: ")
    ]
    return "works", "; ".join(dict.fromkeys(told)).replace("seng: ", "")


def mlp(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(3, 4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 2)
    )


def batch(seed: int = 0, size: int = 6):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 3, generator=generator), torch.randn(
        size, 2, generator=generator
    )


def exact(
    model, x, target, layers=None, backward=None, tolerance=1e-9, **options
):
    """One step equals (M + λI)⁻¹g of every layer with M from a backward per sample; parameters without a layer take g/λ."""
    blocks = [
        list(layer.parameters())
        for layer in (layers if layers is not None else model.children())
    ]
    blocks = [params for params in blocks if params]
    u = [
        naive.per_sample_gradients(model, x, target, params)
        for params in blocks
    ]
    opt = optimizer(model, **options)
    before = [[p.detach().clone() for p in params] for params in blocks]
    (backward or (lambda: naive.loss_of(model(x), target).backward()))()
    opt.step()
    got = torch.cat(
        [
            naive.flat(b) - naive.flat(p)
            for b, p in zip(before, blocks, strict=True)
        ]
    )
    assert (
        naive.relative_error(
            got, reference([(rows, rows.mean(0)) for rows in u])
        )
        < tolerance
    )
    return opt


def loop(model, opt, start=0, stop=9, run=None, step=None, scaler=None):
    for i in range(start, stop):
        opt.zero_grad()
        x, target = batch(i)
        loss = naive.loss_of(
            (run or model)(x.to(model[0].weight.dtype)),
            target.to(model[0].weight.dtype),
        )
        (scaler.scale(loss) if scaler else loss).backward()
        (step or opt.step)()
    return naive.flat([p.detach().double() for p in model.parameters()])


def sengs(model, **options):
    absolute = {
        "damping": 0.3,
        "curvature": seng.Curvature(relative_damping=False, samples=16),
    }  # a relative λ would not see a wrong scale
    return seng.SENG(
        model, **{"lr": 0.05, "refresh_every": 3, **absolute, **options}
    )


def as_plain(got, tolerance=1e-10, **options):
    """The plain loop's parameters, which are not those of SGD."""
    model, other = mlp(), mlp()
    want = loop(model, sengs(model, **options))
    sgd = loop(
        other, torch.optim.SGD(other.parameters(), lr=0.05, momentum=0.9)
    )
    assert naive.relative_error(got, want) < min(
        tolerance, naive.relative_error(sgd, want) / 2
    )


def plain_gradient(model, parameter, x):
    """The parameter moves along its gradient, and something else is preconditioned."""
    opt = seng.SENG(model, lr=1.0, momentum=0.0)
    out = model(x)
    (out[0] if isinstance(out, tuple) else out).square().mean().backward()
    before = parameter.detach().clone()
    opt.step()
    torch.testing.assert_close(before - parameter.detach(), parameter.grad)
    assert inspect(opt).states
