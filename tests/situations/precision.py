"""Precisions, autocast and the GradScaler."""

import naive
import torch
from torch import nn

import seng
from seng.tell.inspection import inspect
from situations import (
    as_plain,
    batch,
    exact,
    loop,
    mlp,
    plain_gradient,
    sengs,
    situation,
)


@situation("Precision", "float64 parameters: curvature and solve in float64")
def _():
    opt = exact(mlp(), *batch())
    assert inspect(opt).states[0].gram.dtype == torch.float64


def low_precision(dtype, tolerance):
    model = mlp().to(dtype)
    opt = sengs(model)
    as_plain(loop(model, opt), tolerance)
    assert all(
        b.gram.dtype == torch.float32 for b in inspect(opt).states.values()
    )


@situation("Precision", "float32 parameters")
def _():
    low_precision(
        torch.float32, 1e-3
    )  # where, unlike in float64, eigenvalues below a thousandth of λ are dropped


@situation("Precision", "bfloat16 parameters: curvature and solve in float32")
def _():
    low_precision(torch.bfloat16, 0.05)


@situation("Precision", "float16 parameters: curvature and solve in float32")
def _():
    low_precision(torch.float16, 0.03)


def autocast(dtype, scaler=None):
    model = mlp().float()
    opt = sengs(model)

    def run(x):
        with torch.autocast("cpu", dtype):
            return model(x)

    step = None
    if scaler is not None:

        def step():
            scaler.step(opt)
            scaler.update()

    as_plain(loop(model, opt, run=run, step=step, scaler=scaler), 0.05)
    assert inspect(opt).steps == 9


@situation("Precision", "autocast to bfloat16")
def _():
    autocast(torch.bfloat16)


@situation(
    "Precision",
    "autocast to float16 with a GradScaler: captures are unscaled by the scale of their step",
)
def _():
    autocast(torch.float16, torch.amp.GradScaler("cpu", init_scale=1024.0))


@situation(
    "Precision",
    "GradScaler that skips a step: captures are dropped and the step does not count",
)
def _():
    model = mlp()
    opt, scaler = sengs(model), torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(
        torch.inf * naive.loss_of(model(batch()[0]), batch()[1])
    ).backward()
    scaler.step(opt)
    scaler.update()
    assert inspect(opt).steps == 0
    as_plain(loop(model, opt))


@situation("Precision", "GradScaler, unscale_ and gradient clipping")
def _():
    got = []
    for enabled in (False, True):
        model = mlp()
        opt, scaler = (
            sengs(model),
            torch.amp.GradScaler("cpu", init_scale=64.0, enabled=enabled),
        )

        def step(opt=opt, model=model, scaler=scaler):
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(opt)
            scaler.update()

        got.append(loop(model, opt, step=step, scaler=scaler))
    assert naive.relative_error(*got) < 1e-10


@situation("Precision", "layers of different precision in one model")
def _():
    model = nn.ModuleDict(
        {"a": nn.Linear(3, 4).float(), "b": nn.Linear(4, 2).bfloat16()}
    )
    opt = seng.SENG(model, lr=0.01)
    model["b"](
        model["a"](torch.randn(5, 3).float()).bfloat16()
    ).square().mean().backward()
    opt.step()
    assert len(inspect(opt).states) == 2 and all(
        p.isfinite().all() for p in model.parameters()
    )


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.real, self.complex = (
            nn.Linear(3, 3),
            nn.Linear(3, 2, dtype=torch.complex128),
        )

    def forward(self, x):
        return self.complex(self.real(x).to(torch.complex128)).abs()


@situation("Precision", "complex parameters beside real ones")
def _():
    model = Complex()
    plain_gradient(model, model.complex.weight, torch.randn(5, 3))
