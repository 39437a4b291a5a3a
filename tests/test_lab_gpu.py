"""The lab on a GPU: steps that are replayed are the steps that a plain loop takes, and a run resumes. Skipped without."""

import warnings
from dataclasses import replace

import pytest
import torch
from test_train import QUICK, float32, small  # noqa: F401
from torch import nn

from seng.lab.datasets import load
from seng.lab.recipes import recipe
from seng.lab.run import Run
from seng.lab.train import PLAIN, Training

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device"
)
REFRESHED = (
    "seng",
    "seng-lowrank",
    "seng-adamw",
    "seng-muon",
    "seng-paper",
    "kfac",
    "kfac-root",
)
NAMES = ["sgd", "adamw", "muon", *REFRESHED]


def certain(classes: int) -> nn.Module:
    """Without dropout, whose chance a graph draws in another order."""
    return nn.Sequential(
        *(
            layer
            for layer in small(classes)
            if not isinstance(layer, nn.Dropout)
        )
    )


CERTAIN = replace(QUICK, build=certain)


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():  # of norms, which K-FAC leaves alone
        warnings.filterwarnings("ignore", message="seng: these parameters")
        yield


def training(name: str, **options) -> Training:
    changes = {"refresh_every": 7} if name in REFRESHED else {}
    return Training(
        Run(CERTAIN, recipe(name, changes), **options),
        load("digits"),
        torch.device("cuda"),
    )


def losses(run: Training) -> list[float]:
    found = []
    while run.state == "running":
        line = run.advance()
        found += [line["train_loss"], line["loss"]]
    return found


@pytest.mark.parametrize("name", NAMES)
def test_replayed_steps_are_plain_steps(name):
    replayed, plain = training(name), training(name, graph=False)
    assert losses(replayed) == pytest.approx(losses(plain), rel=0.02)
    assert (
        plain.graphed is None
        and replayed.run.head(replayed.device)["run"]["graph"]
    )
    assert replayed.plain < replayed.step / 2 and plain.plain == plain.step


def test_a_gradient_is_overwritten_and_not_added_to():
    line = replace(
        QUICK,
        build=lambda classes: nn.Sequential(
            nn.Flatten(), nn.Linear(64, classes)
        ),
    )
    run = Training(
        Run(line, recipe("sgd")), load("digits"), torch.device("cuda")
    )
    for _ in range(PLAIN + 3):
        run._step()
    batch = next(run._epoch())
    run.optimizer.zero_grad()
    run._loss(batch).backward()
    want = [p.grad.clone() for p in run.graphed.params]
    for _ in range(3):
        run.graphed(batch)
        for p, grad in zip(run.graphed.params, want, strict=True):
            assert torch.allclose(p.grad, grad, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("name", ["sgd", "seng"])
def test_it_resumes(name):
    whole, half = training(name), training(name)
    want = [whole.advance()["train_loss"] for _ in range(4)]
    got = [half.advance()["train_loss"] for _ in range(2)]
    rest = training(name)
    rest.restore(half.saved())
    got += [rest.advance()["train_loss"] for _ in range(2)]
    assert got == pytest.approx(want, rel=0.02)
