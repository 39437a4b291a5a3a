"""SENG's default on several ranks: centred U over a pooled Kronecker base, against dense covariances."""

import naive
import pytest
import torch
from test_distributed import example, parts
from test_fsdp import mesh_of, whole
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import seng

LAM = 0.3
POWER = 0.5
FLOOR = 0.1
LR = 0.05
STEPS = 3  # each of them refreshes
EVERY = 10**6  # more directions, or samples, than there are


def curvature(base=True, decay=0.0, **options):
    """Nothing is cut off, but what the options say."""
    P = None
    if base:
        P = seng.Kronecker(POWER, rank=EVERY, floor=FLOOR, decay=decay)
    options = {"rank": EVERY, "samples": None, "decay": decay, **options}
    return seng.Curvature(base=P, **options)


def loss_of(out, target):
    return naive.loss_of(out, target) if len(out) else out.sum()


def data(name, count):
    """A layer, and a batch for each step."""
    layer, x, target = example(name, count)
    order = torch.arange(count)
    return layer, [(x[order.roll(i)] * 1, target) for i in range(STEPS)]


def directions(opt, model, layer, part, steps):
    """d of each step, as the weights tell."""
    out = []
    for x, target in steps:
        opt.zero_grad()
        loss_of(model(x[part]), target[part]).backward()
        before = whole(layer.parameters())
        opt.step()
        out.append((before - whole(layer.parameters())) / LR)
    return out


def on_rank(rank, names, sizes, strategy, options, how="ddp"):
    out = {}
    for name in names:
        layer, steps = data(name, sum(sizes))
        part = parts(sum(sizes), len(sizes), sizes)[rank]
        model = layer
        if how == "ddp" and len(sizes) > 1:
            model = DistributedDataParallel(layer)
        if how in ("fsdp", "hsdp"):
            mesh = mesh_of(len(sizes), how == "hsdp")
            model = nn.Sequential(layer)
            model = fully_shard(model, **({"mesh": mesh} if mesh else {}))
        opt = seng.SENG(
            model,
            lr=LR,
            momentum=0.0,
            damping=LAM,
            refresh_every=1,
            curvature=curvature(**options),
            strategy=strategy,
        )
        out[name] = directions(opt, model, layer, part, steps)
    return out


class Dense:
    """The same by dense matrices: of the second moments of each rank, and of its samples."""

    def __init__(self, layer, sizes, block, base=True, decay=0.0, **options):
        self.layer = layer
        self.sizes = sizes
        self.block = block
        self.base = base
        self.decay = decay
        self.samples = options.get("samples")
        self.rank = options.get("rank", EVERY)
        self.moments = None
        self.M = None
        self.order = self.matrix_order()

    def matrix_order(self):
        """Where the numbers of [W b], row by row, are among the parameters'."""
        shapes = [p.shape for p in self.layer.parameters()]
        places = torch.arange(sum(shape.numel() for shape in shapes))
        h = getattr(self.layer, "groups", 1)
        if not isinstance(self.layer, nn.Linear | nn.Conv2d):
            return places
        n_G = shapes[0][0] // h
        split = places.split([shape.numel() for shape in shapes])
        return torch.cat(
            [part.view(h, n_G, -1) for part in split], 2
        ).flatten()

    def gradients(self, x, target):
        u = naive.per_sample_gradients(self.layer, x, target)
        return u[:, self.order]

    def second_moments(self, x, target):
        """C_A and C_G of one rank, or v."""
        if not isinstance(self.layer, nn.Linear | nn.Conv2d):
            return [self.gradients(x, target).square().sum(0) / max(1, len(x))]
        out = self.layer(x)
        loss = naive.loss_of(out, target) * len(x) if len(x) else out.sum()
        (g,) = torch.autograd.grad(loss, out)
        sides = naive.sides(self.layer, x, g)
        return [X.mT @ X / max(1, len(x)) for X in sides]

    def metric(self):
        if not self.base:
            return torch.eye(len(self.order))
        if len(self.moments) == 1:
            return naive.diagonal_metric(*self.moments, POWER, FLOOR)
        return naive.kronecker_metric(*self.moments, POWER, FLOOR)

    def averaged(self, old, new):
        return (
            new if old is None else self.decay * old + (1 - self.decay) * new
        )

    def covariance(self, u_of):
        """About the mean of all; ranks weigh alike, an empty one as zeros."""
        size = len(u_of)
        mean = sum(u.sum(0) / max(1, len(u)) for u in u_of) / size
        second = sum(u.T @ u / max(1, len(u)) for u in u_of) / size
        return second - torch.outer(mean, mean)

    def leading(self, M, P):
        """M's leading directions over P."""
        e, V = torch.linalg.eigh(P)
        root = V @ torch.diag(e.sqrt()) @ V.T
        back = V @ torch.diag(e.rsqrt()) @ V.T
        e, V = torch.linalg.eigh(back @ M @ back)
        e[: -self.rank] = 0
        return root @ V @ torch.diag(e) @ V.T @ root

    def step(self, x, target):
        pieces = parts(sum(self.sizes), len(self.sizes), self.sizes)
        all_of = [(x[part], target[part]) for part in pieces]
        new = [self.second_moments(*batch) for batch in all_of]
        new = [sum(sides) / len(pieces) for sides in zip(*new, strict=True)]
        old = self.moments or [None] * len(new)
        self.moments = [
            self.averaged(a, b) for a, b in zip(old, new, strict=True)
        ]
        P = self.metric()
        u_of = [self.gradients(*batch) for batch in all_of]
        g = sum(u.sum(0) / max(1, len(u)) for u in u_of) / len(u_of)
        most = (
            EVERY if self.samples is None else -(-self.samples // len(pieces))
        )
        seen = [u[:most] for u in u_of]
        alone = [[u] for u in seen] if self.block else [seen]
        Ms = [self.leading(self.covariance(some), P) for some in alone]
        old = self.M or [None] * len(Ms)
        Ms = [self.averaged(a, b) for a, b in zip(old, Ms, strict=True)]
        self.M = [self.leading(M, P) for M in Ms]
        d = self.direction(P, g)
        with torch.no_grad():
            moved = torch.empty_like(d)
            moved[self.order] = d
            sizes = [p.numel() for p in self.layer.parameters()]
            for p, part in zip(
                self.layer.parameters(), moved.split(sizes), strict=True
            ):
                p -= LR * part.view_as(p)
        return moved

    def direction(self, P, g):
        tops = [
            float(torch.linalg.eigvals(torch.linalg.solve(P, M)).real.max())
            for M in self.M
        ]
        lam = LAM * sum(tops) / len(tops)
        ds = [lam * torch.linalg.solve(M + lam * P, g) for M in self.M]
        d = sum(ds) / len(ds)
        return d * g.norm() / d.norm() if self.base else d


def check(found, names, sizes, block, options):
    for name in names:
        layer, steps = data(name, sum(sizes))
        dense = Dense(layer, sizes, block, **options)
        for i, batch in enumerate(steps):
            want = dense.step(*batch)
            for got in found:
                off = naive.relative_error(got[name][i], want)
                assert off < 1e-9, (name, i, off)


FEW = ["linear", "conv2d", "conv2d-groups", "embedding-sequence", "layer-norm"]
SIZES = {
    "uneven": [3, 9, 2, 4],
    "an empty rank": [4, 0, 3, 2],
}
OPTIONS = {
    "over P": {},
    "over P, averaged": {"decay": 0.6},
    "over P, 4 directions": {"form": "merged", "rank": 4},
    "over P, 8 samples": {"samples": 8},
    "over I": {"base": False},
    "over I, averaged, 8 samples": {
        "base": False,
        "decay": 0.6,
        "samples": 8,
    },
}


def of(sizes, size):
    return SIZES[sizes][:size]


def names_of(strategy, options):
    """Layers without factors keep all columns where nothing is pooled."""
    whole = strategy == "block" and "rank" in options
    return FEW[:3] if whole else FEW


@pytest.mark.parametrize("strategy", ["shared", "block"])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("sizes", SIZES)
def test_it_is_the_dense_covariance(ranks, sizes, options, strategy):
    sizes, options = of(sizes, ranks.size), OPTIONS[options]
    names = names_of(strategy, options)
    found = ranks(on_rank, names, sizes, strategy, options)
    check(found, names, sizes, strategy == "block", options)


@pytest.mark.parametrize("options", OPTIONS)
def test_it_is_the_dense_covariance_in_one_process(options):
    options = OPTIONS[options]
    names = names_of("block", options)
    found = [on_rank(0, names, [7], None, options)]
    check(found, names, [7], False, options)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("sizes", SIZES)
def test_spread_parameters_have_the_dense_covariance(ranks, sizes, options):
    sizes, options = of(sizes, ranks.size), OPTIONS[options]
    found = ranks(on_rank, FEW, sizes, None, options, "fsdp")
    check(found, FEW, sizes, False, options)


def muon(rank, strategy):
    """Weights after five steps, and whether they moved as plain Muon's."""
    out = []
    for optimizer in (seng.SENG, seng.Muon):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8))
        model = model.append(nn.Linear(8, 3))
        wrapped = DistributedDataParallel(model)
        options = {}
        if optimizer is seng.SENG:
            options = {
                "recipe": "muon",
                "strategy": strategy,
                "refresh_every": 2,
            }
        opt = optimizer(wrapped, lr=0.02, **options)
        generator = torch.Generator().manual_seed(rank)
        for _ in range(5):
            x = torch.randn(3 + rank, 6, generator=generator)
            opt.zero_grad()
            naive.loss_of(wrapped(x), torch.ones(3 + rank, 3)).backward()
            opt.step()
        out.append(whole(model.parameters()))
    return out


@pytest.mark.parametrize("strategy", ["shared", "block"])
def test_muons_recipe_is_the_same_on_all_ranks(ranks, strategy):
    found = ranks(muon, strategy)
    first, plain = found[0]
    assert all(torch.equal(weights, first) for weights, _ in found)
    assert naive.relative_error(first, plain) > 1e-3
