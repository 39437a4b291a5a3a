"""The paper's schedules at hand-computed points, and as torch schedulers."""

import math

import pytest
import torch
from torch import nn

import seng
from seng.optim import schedules


def test_cosine():
    assert schedules.cosine(0, 0.1, 90) == pytest.approx(0.1)
    assert schedules.cosine(45, 0.1, 90) == pytest.approx(0.001 + 0.5 * 0.099)
    assert (
        schedules.cosine(90, 0.1, 90)
        == schedules.cosine(200, 0.1, 90)
        == pytest.approx(0.001)
    )


def test_exp():
    assert schedules.exp(0, 0.145, 60, 6) == 0.145
    assert schedules.exp(30, 0.145, 60, 6) == pytest.approx(0.145 * 0.5**6)
    assert (
        schedules.exp(60, 0.145, 60, 6) == schedules.exp(99, 0.145, 60, 6) == 0
    )


def test_warmup():
    assert schedules.warmup(0, 1.2, 5, start=0.2) == pytest.approx(0.2)
    assert schedules.warmup(2.5, 1.2, 5, start=0.2) == pytest.approx(0.7)
    assert (
        schedules.warmup(5, 1.2, 5, start=0.2)
        == schedules.warmup(9, 1.2, 5, start=0.2)
        == pytest.approx(1.2)
    )
    assert schedules.warmup(0, 1.2, 0) == 1.2


def test_damping_of_the_large_batch_table():
    assert schedules.damping(0, 0.17, 0.9) == 0.17
    assert schedules.damping(10, 0.17, 0.9) == pytest.approx(0.17 * 0.9)
    assert schedules.damping(5, 0.3, 0.7) == pytest.approx(
        0.3 * math.sqrt(0.7)
    )


def test_as_torch_schedulers():
    model = nn.Linear(2, 2)
    groups = [{"params": [model.weight]}, {"params": [model.bias], "lr": 0.05}]
    opt = seng.SENG(groups, lr=0.1, damping=0.3, module=model)
    lr = schedules.schedule_lr(
        opt,
        lambda epoch, lr: schedules.exp(epoch, lr, epochs=4, rate=2),
        steps_per_epoch=2,
    )
    damping = schedules.DampingSchedule(
        opt,
        lambda epoch, lam: schedules.damping(epoch, lam, 0.7),
        steps_per_epoch=2,
    )
    for step in range(1, 6):
        opt.zero_grad()
        model(torch.randn(3, 2)).square().mean().backward()
        opt.step()
        lr.step()
        damping.step()
        assert [g["lr"] for g in opt.param_groups] == pytest.approx(
            [v * (1 - step / 8) ** 2 for v in (0.1, 0.05)]
        )
        assert [g["damping"] for g in opt.param_groups] == pytest.approx(
            [0.3 * 0.7 ** (step / 20)] * 2
        )
    resumed = schedules.DampingSchedule(
        opt, damping.of_epoch, steps_per_epoch=2
    )
    resumed.load_state_dict(damping.state_dict())
    assert resumed.steps == 5 and opt.param_groups[0][
        "damping"
    ] == pytest.approx(0.3 * 0.7 ** (5 / 20))
