"""Schedules, groups, options and other optimizers."""

import naive
import pytest
import torch

import seng
from seng.tell.inspection import inspect
from situations import batch, loop, mlp, sengs, situation


@situation("Optimizer", "learning-rate schedulers, a tensor lr")
def _():
    got = []
    for lr in (0.05, torch.tensor(0.05)):
        model = mlp()
        opt = sengs(model, lr=lr)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            opt, 0.05, total_steps=20, cycle_momentum=False
        )
        got.append(
            loop(
                model,
                opt,
                step=lambda opt=opt, schedule=schedule: (
                    opt.step(),
                    schedule.step(),
                ),
            )
        )
    assert naive.relative_error(*got) < 1e-6


@situation("Optimizer", "param groups with their own lr and damping")
def _():
    model = mlp()
    groups = [
        {"params": model[0].parameters(), "damping": 0.1, "lr": 0.01},
        {"params": model[2:].parameters()},
    ]
    opt = seng.SENG(
        groups,
        lr=0.05,
        module=model,
        weight_decay=0.01,
        curvature=seng.Curvature(),
    )
    loop(model, opt)
    assert opt.diagnostics()["0"]["damping"] == pytest.approx(
        0.1 * opt.diagnostics()["0"]["top_eigenvalue"]
    )


@situation("Optimizer", "two dampings inside one layer: its weight's counts")
def _():
    model = mlp()
    groups = [
        {"params": [model[0].weight], "damping": 0.1},
        {"params": [model[0].bias], "damping": 0.2},
    ]
    loop(model, seng.SENG(groups, module=model))


@situation("Optimizer", "add_param_group while training")
def _():
    model = mlp()
    opt = seng.SENG(model[0].parameters(), lr=0.05, module=model)
    loop(model, opt, 0, 3)
    opt.add_param_group({"params": list(model[3].parameters())})
    loop(model, opt, 3, 6)
    assert len(inspect(opt).states) == 2


@situation("Optimizer", "an option of the whole optimizer in a param group")
def _():
    model = mlp()
    seng.SENG(
        [{"params": model.parameters(), "refresh_every": 5}], module=model
    )


for flag in ("foreach", "fused", "differentiable", "capturable"):

    @situation("Optimizer", f"{flag}=True")
    def _(flag=flag):
        seng.SENG(mlp(), **{flag: True})


@situation("Optimizer", "seng.attach in front of AdamW")
def _():
    model = mlp()
    adamw = torch.optim.AdamW(model.parameters(), lr=0.01)
    handle = seng.attach(adamw, model)
    loop(model, adamw)
    assert handle.diagnostics()["0"]["form"] == "implicit"


@situation("Optimizer", "seng.attach to a SENG")
def _():
    model = mlp()
    seng.attach(seng.SENG(model), model)


@situation("Optimizer", "two optimizers for two parts of one model")
def _():
    model = mlp()
    first = seng.SENG(model[0].parameters(), lr=0.05, module=model)
    second = seng.SENG(model[2:].parameters(), lr=0.05, module=model)
    for i in range(4):
        first.zero_grad()
        second.zero_grad()
        naive.loss_of(model(batch(i)[0]), batch(i)[1]).backward()
        first.step()
        second.step()
    assert len(inspect(first).states) == 1 and len(inspect(second).states) == 2
