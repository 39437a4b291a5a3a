"""What waits of a layer's captures after its first refresh: the first samples, and drawn columns of its factors."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import seng
from seng.linalg.implicit import Implicit
from seng.linalg.operators import added, stacked
from seng.metrics.kronecker import Kronecker, drawn
from seng.metrics.low_rank import LowRank


class Twice(nn.Module):
    """A convolution that is used twice, and a table of words that is the head, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 3, 3, padding=1)
        self.again = nn.Conv2d(3, 3, 3, padding=1)
        self.head = nn.Linear(3, 4)
        self.tied = nn.Linear(4, 4)
        self.other = nn.Linear(4, 4)
        self.other.weight = self.tied.weight

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        x = torch.tanh(self.again(torch.tanh(self.again(x))))
        x = torch.tanh(self.head(x.mean((2, 3))))
        return self.other(torch.tanh(self.tied(x)))


def trained(optimizer: Any, parts: int, **options: Any) -> nn.Module:
    """After six steps of two refreshes."""
    torch.manual_seed(0)
    model = Twice().float()
    opt = optimizer(model, 0.05, refresh_every=2, **options)
    loss = nn.CrossEntropyLoss()
    for _ in range(6):
        x, y = torch.randn(8, 2, 4, 4).float(), torch.randint(4, (8,))
        opt.zero_grad()
        for a, b in zip(x.chunk(parts), y.chunk(parts), strict=True):
            (loss(model(a), b) / parts).backward()
        opt.step()
    return model


@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (seng.KFAC, {}),
        (seng.SENG, {"curvature": seng.Curvature(samples=3, rank=2)}),
        (seng.SENG, {"curvature": seng.Curvature(samples=None, rank=8)}),
    ],
    ids=["KFAC", "three samples", "all samples"],
)
def test_where_all_columns_fit_nothing_changes(
    optimizer: Any,
    options: dict[str, Any],
    parts: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = trained(optimizer, parts, **options)
    for metric in (Kronecker, LowRank):
        monkeypatch.setattr(metric, "keeps_less", lambda *_, **__: False)
    whole = trained(optimizer, parts, **options)
    for p, q in zip(found.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


def factors(samples: int, kappa: int, h: int = 1) -> Implicit:
    G = torch.randn(samples, h, 3, kappa).float()
    A = torch.randn(samples, h, 2, kappa).float()
    return Implicit(G, A)


@pytest.mark.parametrize("join", [stacked, lambda parts: added(*parts)])
def test_drawn_columns_have_the_second_moments_of_all(join: Any) -> None:
    parts = [factors(20, 40), factors(20, 40)]  # 800 columns, of which 512
    whole = join(parts)
    sums = [0.0, 0.0]
    for seed in range(400):
        draw = torch.Generator().manual_seed(seed)
        U = join([drawn(part, 5, draw) for part in parts])
        assert U.G.shape[2] == U.A.shape[2] == 1024
        assert U.samples == whole.samples
        for i, X in enumerate((U.G, U.A)):
            sums[i] = sums[i] + (X @ X.mT) / 400
    for found, X in zip(sums, (whole.outputs(), whole.inputs()), strict=True):
        torch.testing.assert_close(found, X @ X.mT, rtol=0.02, atol=8)


def test_the_first_samples_are_those_of_the_whole() -> None:
    U = factors(20, 40)
    draw = torch.Generator().manual_seed(0)
    some = drawn(U, 5, draw).scaled(0.5)
    torch.testing.assert_close(
        some.first(3).explicit().U, 0.5 * U.explicit().U[:, :3]
    )
    assert some.to(torch.float64).G.dtype == torch.float64


def waiting(model: nn.Module, opt: Any) -> int:
    """Bytes of what was captured by a backward."""
    x = torch.randn(64, 3, 16, 16).float()
    opt.zero_grad()
    model(x).square().mean().backward()
    pieces = [
        piece
        for b in opt.engine.collector.samples.backwards.values()
        for piece in b.pieces.values()
    ]
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for piece in pieces
        for t in _tensors(piece.U)
    }
    opt.step()
    return sum(storages.values())


def _tensors(U: Any) -> list[Tensor]:
    return [U.G, U.A, *U.U.tensors()] if U.drawn else U.tensors()


@pytest.mark.parametrize("optimizer", [seng.SENG, seng.KFAC])
def test_after_the_first_refresh_captures_are_small(optimizer: Any) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.Tanh(), nn.Conv2d(8, 8, 3)
    ).float()
    opt = optimizer(model, 0.01, refresh_every=1)
    first = waiting(model, opt)
    later = waiting(model, opt)
    assert later < 0.5 * first


def test_double_precision_keeps_every_column() -> None:
    U = factors(20, 40).to(torch.float64)
    draw = torch.Generator().manual_seed(0)
    found = drawn(U, 5, draw)
    assert torch.equal(found.G, U.outputs()) and found.A.shape[2] == 800


def test_a_copy_of_the_model_trains_alike() -> None:
    torch.manual_seed(1)
    model = Twice().float()
    twin = copy.deepcopy(model)
    for net in (model, twin):
        torch.manual_seed(2)
        opt = seng.SENG(net, 0.05, refresh_every=1)
        for _ in range(3):
            opt.zero_grad()
            net(torch.randn(8, 2, 4, 4).float()).square().mean().backward()
            opt.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)
