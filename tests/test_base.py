"""P in place of I: the Kronecker and diagonal metrics against dense matrices, and the places where a base must work."""

import copy
import math
from typing import Any

import naive
import pytest
import torch
from refreshing import uncentred
from torch import Tensor, nn

import seng
from seng.distributed.team import ALONE
from seng.linalg.implicit import Implicit, Windows
from seng.linalg.sketch import IDENTITY
from seng.metrics.factor import Factor, Moment, updated
from seng.metrics.kronecker import (
    DiagonalState,
    Kronecker,
    KroneckerState,
    Tikhonov,
)
from seng.metrics.kronecker import (
    moments as moments_of,
)
from seng.metrics.low_rank import LowRank, reduced_factors
from seng.metrics.woodbury import LowRankState
from seng.recipes.recipe import SGD

F64 = torch.float64

LAYERS = {
    "linear": (lambda: nn.Linear(4, 3), (4,)),
    "linear without bias": (lambda: nn.Linear(4, 3, bias=False), (4,)),
    "linear on sequences": (lambda: nn.Linear(4, 3), (5, 4)),
    "convolution": (
        lambda: nn.Conv2d(2, 3, 3, padding=1, stride=2),
        (2, 5, 4),
    ),
    "pointwise": (lambda: nn.Conv2d(3, 4, 1, bias=False), (3, 3, 3)),
    "grouped": (lambda: nn.Conv2d(4, 6, 2, groups=2), (4, 3, 3)),
    "dilated": (lambda: nn.Conv2d(2, 2, 2, dilation=2), (2, 4, 4)),
    # Without factors: P is diagonal.
    "norm": (lambda: nn.LayerNorm(4), (3, 4)),
    "norm without bias": (lambda: nn.RMSNorm(5), (5,)),
    "slopes": (lambda: nn.PReLU(3), (3, 4)),
    "embedding": (lambda: nn.Embedding(7, 3), (2,)),
}


def batch(
    layer: nn.Module, shape: tuple[int, ...], seed: int
) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    if isinstance(layer, nn.Embedding):
        x = torch.randint(layer.num_embeddings, (6, *shape), generator=draw)
    else:
        x = torch.randn(6, *shape, generator=draw, dtype=F64)
    return x, torch.randn(layer(x).shape, generator=draw, dtype=F64)


def moments(
    layer: nn.Module, x: Tensor, target: Tensor
) -> tuple[list[Tensor], Tensor]:
    """M̄ and what P is made of, which is C_A and C_G or E u², on one batch; and the gradient."""
    out = layer(x)
    loss = naive.loss_of(out, target)
    (g,) = torch.autograd.grad(loss, out, retain_graph=True)
    u = together(layer, naive.per_sample_gradients(layer, x, target))
    grads = naive.flat(torch.autograd.grad(loss, list(layer.parameters())))
    grad = together(layer, grads[None])[0]
    if not factored(layer):
        return [naive.covariance(u), u.square().mean(0)], grad
    A, G = naive.sides(layer, x, len(x) * g)
    return [naive.covariance(u), A.mT @ A / len(x), G.mT @ G / len(x)], grad


def metric(seen: list[Tensor], power: float, floor: float = 0.1) -> Tensor:
    """P, dense."""
    if len(seen) == 3:
        return naive.kronecker_metric(*seen[1:], power, floor)
    return naive.diagonal_metric(seen[1], power, floor)


def eigenvalues(seen: list[Tensor]) -> Tensor:
    """Those of C before any power."""
    if len(seen) == 2:
        return seen[1]
    _, C_A, C_G = seen
    sides = zip(C_G, C_A, strict=True)
    return torch.cat(
        [torch.kron(*map(torch.linalg.eigvalsh, pair)) for pair in sides]
    )


def anew(**given: Any) -> seng.Kronecker:
    """All of C, from the last refresh alone."""
    return seng.Kronecker(**{"rank": 1000, "floor": 0.1, "decay": 0} | given)


def exact(form: Any = "auto", **given: Any) -> seng.Curvature:
    """All of Ū, from the last refresh alone, over a base that is so too."""
    options = {"base": anew(), "samples": None, "rank": 1000, "decay": 0}
    options |= given
    if form == "explicit":  # it keeps every column
        options.pop("rank")
    return seng.Curvature(form, **options)


def factored(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Linear | nn.Conv2d)


def together(layer: nn.Module, rows: Tensor) -> Tensor:
    """Gradients of weight and bias (…, n), one after the other -> the bias as one more column of the weight's matrix."""
    if not factored(layer) or layer.bias is None:
        return rows
    weight = rows[:, : layer.weight.numel()].unflatten(
        1, (layer.weight.shape[0], -1)
    )
    return torch.cat(
        [weight, rows[:, layer.weight.numel() :, None]], 2
    ).flatten(1)


def step(
    opt: torch.optim.Optimizer, layer: nn.Module, x: Tensor, target: Tensor
) -> Tensor:
    """The direction that a step with lr 1 takes."""
    before = [p.detach().clone() for p in layer.parameters()]
    opt.zero_grad()
    naive.loss_of(layer(x), target).backward()
    opt.step()
    moved = naive.flat(
        [
            b - p.detach()
            for b, p in zip(before, layer.parameters(), strict=True)
        ]
    )[None]
    for b, p in zip(before, layer.parameters(), strict=True):
        p.data.copy_(b)
    return together(layer, moved)[0]


def off(got: Tensor, P: Tensor, g: Tensor) -> float:
    """How far a direction is from P⁻¹g at the length of g."""
    want = naive.as_long_as(g, torch.linalg.solve(P, g))
    return naive.relative_error(got, want)


@pytest.mark.parametrize("power", [1.0, 0.5, 0.25])
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("form", ["merged", "explicit", "implicit"])
def test_each_base_gives_the_dense_direction(
    kind: str, power: float, form: str
) -> None:
    make, shape = LAYERS[kind]
    layer = make().to(F64)
    x, target = batch(layer, shape, 1)
    curvature = exact(form, base=anew(power=power))
    opt = seng.SENG(
        layer, lr=1.0, momentum=0.0, damping=0.03, curvature=curvature
    )
    seen, g = moments(layer, x, target)
    want = naive.based_direction(seen[0], metric(seen, power), g, 0.03)
    assert naive.relative_error(step(opt, layer, x, target), want) < 1e-9


@pytest.mark.parametrize("kind", ["linear", "convolution", "grouped", "norm"])
@pytest.mark.parametrize(("decay", "of_P"), [(0.7, 0.7), (0.7, 0), (0.3, 0.9)])
def test_averaged_curvature_is_carried_over_to_the_new_coordinates(
    kind: str, decay: float, of_P: float
) -> None:
    make, shape = LAYERS[kind]
    layer = make().to(F64)
    base = anew(power=0.5, decay=of_P)
    curvature = exact(base=base, decay=decay)
    opt = seng.SENG(
        layer,
        lr=1.0,
        momentum=0.0,
        damping=0.03,
        refresh_every=1,
        curvature=curvature,
    )
    mean: list[Tensor] = []
    for seed in range(3):
        x, target = batch(layer, shape, seed)
        new, g = moments(layer, x, target)
        decays = [decay, of_P, of_P]
        mean = [
            share * a + (1 - share) * b
            for share, a, b in zip(decays, mean or new, new, strict=False)
        ]
        want = naive.based_direction(mean[0], metric(mean, 0.5), g, 0.03)
        assert naive.relative_error(step(opt, layer, x, target), want) < 1e-9


@pytest.mark.parametrize("floor", [1e-3, 0.2, 2.0])
@pytest.mark.parametrize("power", [1.0, 0.5])
@pytest.mark.parametrize(
    "kind", ["convolution", "linear", "grouped", "norm", "embedding"]
)
def test_kfac_is_the_inverse_of_p_whose_eigenvalues_have_a_floor(
    kind: str, power: float, floor: float
) -> None:
    make, shape = LAYERS[kind]
    layer = make().to(F64)
    x, target = batch(layer, shape, 1)
    opt = seng.KFAC(
        layer,
        1.0,
        momentum=0.0,
        refresh_every=2,
        power=power,
        rank=1000,
        floor=floor,
        decay=0,
    )
    seen, g = moments(layer, x, target)
    P = metric(seen, power, floor)
    assert off(step(opt, layer, x, target), P, g) < 1e-9
    (numbers,) = opt.diagnostics().values()
    e = eigenvalues(seen)
    assert numbers["base"] == ("kronecker" if factored(layer) else "diagonal")
    assert numbers["columns"] == 0 and numbers["solves_failed"] == 0
    assert numbers["top_eigenvalue"] == pytest.approx(float(e.max()))
    assert numbers["damping"] is None
    assert numbers["effective_rank"] == pytest.approx(float(e.sum() / e.max()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_kfac_with_a_high_floor_is_sgd(dtype: torch.dtype) -> None:
    """For every size of factor, whole or not, and a norm."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 6, 3),
        nn.BatchNorm2d(6),
        nn.Flatten(),
        nn.Linear(24, 40),
        nn.Linear(40, 3),
    ).to(dtype)
    twin = copy.deepcopy(model)
    opt = seng.KFAC(model, 0.1, refresh_every=2, rank=16, floor=1e6)
    sgd = torch.optim.SGD(twin.parameters(), 0.1, momentum=0.9)
    for net, optimizer in ((model, opt), (twin, sgd)):
        for seed in range(4):
            draw = torch.Generator().manual_seed(seed)
            x = torch.randn(8, 2, 4, 4, generator=draw, dtype=dtype)
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()
    near = (
        {"rtol": 1e-9, "atol": 1e-12}
        if dtype == F64
        else {"rtol": 1e-5, "atol": 1e-7}
    )
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, **near)


def test_kfac_with_a_high_floor_is_sgd_where_a_side_is_zero() -> None:
    """The first layer behind a last one of zeros: no gradient reaches it in the first step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).to(F64)
    nn.init.zeros_(model[2].weight)
    twin = copy.deepcopy(model)
    pairs = (
        (model, seng.KFAC(model, 0.1, floor=1e6)),
        (twin, torch.optim.SGD(twin.parameters(), 0.1, momentum=0.9)),
    )
    x, target = torch.randn(8, 4, dtype=F64), torch.randn(8, 3, dtype=F64)
    for net, opt in pairs:
        for _ in range(5):
            opt.zero_grad()
            naive.loss_of(net(x), target).backward()
            opt.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", ["linear", "norm"])
def test_much_damping_leaves_the_inverse_of_p(kind: str) -> None:
    make, shape = LAYERS[kind]
    layer = make().to(F64)
    x, target = batch(layer, shape, 1)
    some = seng.SENG(layer, 1.0, momentum=0.0, damping=1e12, curvature=exact())
    alone = seng.KFAC(layer, 1.0, momentum=0.0, rank=1000, floor=0.1, decay=0)
    assert (
        naive.relative_error(
            step(some, layer, x, target), step(alone, layer, x, target)
        )
        < 1e-9
    )


@pytest.mark.parametrize("kind", ["linear", "norm"])
def test_directions_over_a_base_are_as_long_as_the_gradient(kind: str) -> None:
    """Over λI they are λ(M + λI)⁻¹g, which is shorter."""
    make, shape = LAYERS[kind]
    layer = make().to(F64)
    x, target = batch(layer, shape, 1)
    seen, g = moments(layer, x, target)

    def moved(curvature: seng.Curvature) -> Tensor:
        opt = seng.SENG(layer, 1.0, momentum=0.0, curvature=curvature)
        return step(opt, layer, x, target)

    over = float(moved(exact()).norm())
    assert math.isclose(over, float(g.norm()), rel_tol=1e-12)
    plain = moved(exact(base=None))
    lam = SGD.damping * float(torch.linalg.eigvalsh(seen[0])[-1])
    want = lam * naive.dense_direction(seen[0], g, lam)
    assert naive.relative_error(plain, want) < 1e-9
    assert plain.norm() < (1 - 1e-6) * g.norm()


def test_a_gradient_of_zeros_stays_one() -> None:
    layer = nn.Linear(4, 3).to(F64)
    opt = seng.SENG(layer, 1.0)
    layer(torch.randn(5, 4, dtype=F64)).mul(0).sum().backward()
    before = layer.weight.detach().clone()
    opt.step()
    assert torch.equal(layer.weight, before)


def test_sketched_factors_come_closer_as_their_rank_grows() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(60, 40).to(F64)
    x = torch.randn(300, 60, dtype=F64) * torch.logspace(0, -2, 60, dtype=F64)
    target = layer(x).detach() + torch.randn(
        300, 40, dtype=F64
    ) * torch.logspace(0, -2, 40, dtype=F64)

    def direction(rank: int) -> Tensor:
        curvature = exact(base=anew(rank=rank), samples=None)
        opt = seng.SENG(
            layer, 1.0, momentum=0.0, damping=0.03, curvature=curvature
        )
        return step(opt, layer, x, target)

    whole = direction(61)  # the bias is one more
    errors = [
        naive.relative_error(direction(rank), whole)
        for rank in (4, 8, 16, 32, 48)
    ]
    assert (
        errors == sorted(errors, reverse=True)
        and errors[-1] < 0.06 * errors[0]
    )
    assert naive.relative_error(direction(1000), whole) == 0


def update(
    old: Factor | None, X: Tensor, rank: int, decay: float = 0.5, seed: int = 0
) -> Factor:
    """`updated` by XXᵀ."""
    draw = torch.Generator().manual_seed(seed)
    return updated(old, Moment(X), rank, decay, draw)


class TestFactor:
    """One side's running average."""

    def draw(self, n: int = 30, N: int = 100, h: int = 2) -> Tensor:
        scale = torch.logspace(0, -3, n, dtype=F64)[:, None]
        draw = torch.Generator().manual_seed(n + N)
        return torch.randn(h, n, N, dtype=F64, generator=draw) * scale

    def dense(self, factor: Factor) -> Tensor:
        V, rest = factor.V, factor.rest[:, None, None]
        outside = torch.eye(30, dtype=F64) - V @ V.mT
        return V @ factor.s.diag_embed() @ V.mT + rest * outside

    def test_the_leading_directions_are_found(self) -> None:
        X = self.draw()
        found = update(None, X, 8)
        e, V = torch.linalg.eigh(X @ X.mT)
        torch.testing.assert_close(
            found.s, e.flip(1)[:, :8], rtol=1e-6, atol=0
        )
        leading = V.flip(2)[:, :, :5]
        eye = torch.eye(8, dtype=F64).expand(2, 8, 8)
        torch.testing.assert_close(
            found.V.mT @ found.V, eye, atol=1e-10, rtol=0
        )
        assert (
            float((leading - found.V @ (found.V.mT @ leading)).norm()) < 1e-3
        )
        torch.testing.assert_close(found.trace, e.sum(1))

    def test_the_range_finder_goes_on_from_where_it_was(self) -> None:
        """A constant C is found better and better, a product or two a refresh."""
        draw = torch.Generator().manual_seed(3)
        X = torch.randn(
            1, 60, 200, dtype=F64, generator=draw
        )  # flat: the hard case
        C = X @ X.mT
        best = torch.linalg.eigvalsh(C)[:, -8:].sum()
        found, shares = None, []
        for i in range(6):
            found = update(found, X, 8, 0.9, seed=i)
            seen = (found.V.mT @ C @ found.V).diagonal(dim1=1, dim2=2).sum()
            shares.append(float(seen / best))
        assert (
            shares[-1] > shares[0]
            and shares[-1] > 0.95
            and max(shares) <= 1 + 1e-9
        )

    def test_large_moments_are_never_formed(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        X = self.draw()
        small = update(None, X, 8)
        monkeypatch.setattr("seng.metrics.factor.GRAM", 0)
        assert Moment(X).gram is None
        torch.testing.assert_close(update(None, X, 8).s, small.s)

    @pytest.mark.parametrize("rank", [8, 30])
    def test_without_eigh_it_comes_near(
        self, rank: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As on a GPU, where nothing waits: after some refreshes C^p is nearly what `eigh` makes of it."""
        X = self.draw()
        one = torch.ones(2, 1, 1, dtype=F64)
        eye = torch.eye(60, dtype=F64)  # of two groups

        def root() -> Tensor:
            found = None
            for i in range(6):
                found = update(found, X, rank, 0.9, seed=i)
            other = Factor(one, one[:, 0], 0 * one[:, 0, 0])
            state = KroneckerState(found, other, power=0.5, floor=1e-3)
            return state.to_power(-0.5).rows(eye)

        want = root()
        monkeypatch.setattr("seng.metrics.factor.exactly", lambda X, n: False)
        assert naive.relative_error(root(), want) < 0.03

    def test_fewer_samples_than_directions(self) -> None:
        X = self.draw(n=30, N=5)
        found = update(None, X, 8)
        assert found.V.isfinite().all() and found.s.isfinite().all()
        assert (found.rest >= 0).all()
        assert naive.relative_error(self.dense(found), X @ X.mT) < 1e-6

    def test_no_samples_and_no_size(self) -> None:
        found = update(None, torch.zeros(1, 6, 0, dtype=F64), 3)
        e, _ = found.powers(0.5, 1e-3)  # of a C that is zero: a multiple of I
        assert float(e.min()) > 0
        torch.testing.assert_close(e, e[:, :1].expand_as(e))

    @pytest.mark.parametrize("rank", [4, 30])
    @pytest.mark.parametrize("value", [torch.nan, torch.inf])
    def test_what_is_not_finite_is_seen(self, rank: int, value: float) -> None:
        """So that it is dropped, and the last good state stays."""
        X = self.draw()
        before = update(None, X, rank)
        bad = X.clone()
        bad[0, 0, 0] = value
        after = update(before, bad, rank, seed=1)
        for G, A, fine in (
            (before, before, True),
            (after, before, False),
            (before, after, False),
            (update(None, bad, rank), before, False),
        ):
            assert (
                bool(KroneckerState(G, A, power=0.5, floor=0.1).fine()) == fine
            )

    @pytest.mark.parametrize(
        "dtype", [torch.float64, torch.float32, torch.bfloat16]
    )
    def test_few_columns_are_not_multiplied_out(
        self, dtype: torch.dtype
    ) -> None:
        X = self.draw(n=30, N=7).to(dtype)
        seen = Moment(X, scale=0.5)
        assert seen.gram is None
        wide = torch.promote_types(dtype, torch.float32)
        draw = torch.Generator().manual_seed(0)
        Z = torch.randn(2, 30, 4, dtype=wide, generator=draw)
        X = X.to(wide)
        near = {"rtol": 1e-4, "atol": 1e-5}
        torch.testing.assert_close(seen.times(Z), (0.5 * X @ X.mT) @ Z, **near)
        torch.testing.assert_close(seen.trace, 0.5 * X.square().sum((1, 2)))


def test_the_inputs_of_a_convolution_side_by_side() -> None:
    torch.manual_seed(0)
    for kernel, stride, padding, dilation, bias in (
        ((3, 2), (2, 1), (1, 0), (1, 2), 1),
        ((1, 1), (1, 1), (0, 0), (1, 1), 0),
    ):
        a = torch.randn(5, 3, 7, 6)
        out = nn.functional.unfold(a, kernel, dilation, padding, stride).shape[
            2
        ]
        weight = torch.zeros(1, 3, *kernel)
        whole = nn.functional.conv2d(
            a, weight, None, stride, padding, dilation
        )
        size = whole.shape[2:]
        U = Windows(
            torch.randn(5, 4, *size),
            a,
            kernel,
            stride,
            (padding[1], padding[1], padding[0], padding[0]),
            dilation,
            bias,
        )
        A = nn.functional.unfold(
            a, kernel, dilation, padding, stride
        )  # (ϱ, n_A, κ)
        A = torch.cat([A, torch.ones(5, bias, out)], 1)
        assert torch.equal(U.inputs()[0], A.permute(1, 0, 2).flatten(1))
        at = torch.tensor([4, 0, 4, 2]), torch.tensor([0, 3, 1, out - 1])
        torch.testing.assert_close(U.inputs(at)[0], A[at[0], :, at[1]].T)


def test_of_many_positions_some_columns_are_enough_but_in_float64() -> None:
    torch.manual_seed(0)
    decay = torch.logspace(0, -1, 5)[:, None]
    U = Implicit(torch.randn(64, 1, 4, 36), torch.randn(64, 1, 5, 36) * decay)

    def seen(U: Implicit, seed: int = 0) -> tuple[Moment, Moment]:
        return moments_of(U, ALONE, torch.Generator().manual_seed(seed))

    C_G = torch.einsum("ihnk,ihmk->hnm", U.G, U.G)
    C_A = torch.einsum("ihnk,ihmk->hnm", U.A, U.A) / 64
    for got, want in zip(seen(U), (C_G, C_A), strict=True):
        assert got.X.shape[2] == 64 * 36
        torch.testing.assert_close(got.gram, want)
    single = U.to(torch.float32)
    for side, want in enumerate((C_G, C_A)):
        draws = [seen(single, seed)[side] for seed in range(40)]
        assert {moment.X.shape[2] for moment in draws} == {512}
        grams = torch.stack([moment.gram.to(F64) for moment in draws])
        assert naive.relative_error(grams[0], want) < 0.2
        assert naive.relative_error(grams.mean(0), want) < 0.03
    few = Implicit(torch.randn(64, 1, 4, 1), torch.randn(64, 1, 50, 1))
    for moment in seen(few.to(torch.float32)):  # none to spare
        assert moment.X.shape[2] == 64


def test_what_few_samples_had_counts_as_seen_and_no_more() -> None:
    """Of 60 directions: 8 that are kept, and of the others as many as there were samples."""
    found = None
    for seed, count in ((0, 10), (1, 20), (2, 30)):
        X = torch.randn(
            1, 60, 10, generator=torch.Generator().manual_seed(seed), dtype=F64
        )
        found = update(found, X, 8)
        assert float(found.count) == count
        # So much noise that the floor is above the others.
        e, _ = found.powers(0.5, 1e-3, noise=0.25)
        floor = (60 - count) / count
        assert float(e[0, -1]) == pytest.approx(floor**0.5)
        assert float(e[:, :-1].min()) >= floor**0.5
    assert float(update(found, X, 8, 0.0).count) == 10  # the others are gone


def test_factors_in_half_precision_are_reduced_and_stay_so() -> None:
    """As on a GPU, where captured factors stay in bfloat16, for which there is no QR."""
    torch.manual_seed(0)
    sides = (torch.randn(4, 1, n, 5).to(torch.bfloat16) for n in (6, 7))
    U = Implicit(*sides)
    small = reduced_factors(U, 5 - 2, torch.Generator)
    assert (
        small.G.dtype == small.A.dtype == torch.bfloat16 and small.kappa == 3
    )
    whole = U.to(F64).explicit().U
    assert naive.relative_error(small.to(F64).explicit().U, whole) < 0.7


def test_the_mean_eigenvalue_is_one_over_all_groups() -> None:
    torch.manual_seed(0)
    scale = torch.tensor([1.0, 10.0, 0.0], dtype=F64)[:, None, None]
    sizes = ((5, 2), (7, 9))
    G, A = (update(None, scale * torch.randn(3, n, 20), r) for n, r in sizes)
    eye = torch.eye(3 * 35, dtype=F64)
    for power in (0.25, 0.5, 1.0):
        P = torch.linalg.inv(
            KroneckerState(G, A, power=power, floor=1e-3)
            .to_power(-1.0)
            .rows(eye)
        )
        torch.testing.assert_close(
            P.diagonal().mean(), torch.ones((), dtype=F64)
        )
        small, large, none = P.diagonal().view(3, 35).mean(1)
        assert none < small < large


def states() -> list[KroneckerState | DiagonalState]:
    torch.manual_seed(0)
    A, G = (update(None, torch.randn(1, n, 20, dtype=F64), 4) for n in (7, 5))
    return [
        KroneckerState(G, A, power=0.5, floor=0.1),
        DiagonalState(torch.rand(35, dtype=F64), power=0.5, floor=0.1),
    ]


@pytest.mark.parametrize("state", states(), ids=["kronecker", "diagonal"])
def test_powers_of_a_base_undo_each_other(
    state: KroneckerState | DiagonalState,
) -> None:
    X = torch.randn(2, 35, dtype=F64)
    root, back, whole = map(state.to_power, (-0.5, 0.5, -1.0))
    torch.testing.assert_close(back.rows(root.rows(X)), X)
    torch.testing.assert_close(root.rows(root.rows(X)), whole.rows(X))
    rows = torch.stack([whole(x) for x in X])
    torch.testing.assert_close(rows, whole.rows(X))
    for rank in (1, 3):  # as factors and as columns
        G = torch.randn(2, 1, 5, rank, dtype=F64)
        A = torch.randn(2, 1, 7, rank, dtype=F64)
        U = Implicit(G, A)
        want = root.rows(U.explicit().U.T).T
        torch.testing.assert_close(root.of(U).explicit().U, want)


def test_what_was_loaded_is_kept_only_if_it_is_asked_for() -> None:
    shape = (1, 5, 7)
    kronecker, diagonal = states()
    U = Implicit(torch.randn(2, *shape[:2], 1), torch.randn(2, 1, shape[2], 1))
    over = {
        P: LowRankState(U, IDENTITY, U.gram(), torch.ones(()), True, P)
        for P in (None, kronecker, diagonal)
    }
    identity = LowRank(uncentred())
    root = seng.Kronecker(power=0.5)  # as the states have it
    based = LowRank(seng.Curvature(base=root))
    other = LowRank(seng.Curvature(base=seng.Kronecker(power=1.0)))
    alone = Kronecker(root)
    assert identity.accepts(over[None]) is not None
    for state in (
        kronecker,
        diagonal,
    ):  # the latter of a layer without factors
        assert alone.accepts(state) is not None
        assert state.fits(shape) and not state.fits((1, 5, 8))
        assert Kronecker(seng.Kronecker(power=1.0)).accepts(state) is None
        assert Tikhonov().accepts(state) is None
        assert based.accepts(over[state]) is not None
        assert not over[state].fits((1, 5, 8))
        for refusing in (identity, other, alone):
            assert refusing.accepts(over[state]) is None
        assert based.accepts(state) is None
    assert based.accepts(over[None]) is None


def test_a_loaded_state_takes_the_floor_that_is_asked_for_now() -> None:
    state = states()[0]
    U = Implicit(torch.randn(2, 1, 5, 1), torch.randn(2, 1, 7, 1))
    over = LowRankState(U, IDENTITY, U.gram(), torch.ones(()), True, state)
    asked = seng.Kronecker(power=0.5, floor=0.7)
    alone = Kronecker(asked).accepts(state)
    based = LowRank(seng.Curvature(base=asked)).accepts(over)
    assert alone.floor == based.P.floor == 0.7


def test_deepcopy_goes_on_as_the_original() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.Flatten(),
        nn.Linear(64, 3),
    ).to(F64)
    opt = seng.SENG(
        model,
        0.1,
        refresh_every=2,
        curvature=seng.Curvature(base=seng.Kronecker(rank=8)),
    )
    x, target = (
        torch.randn(8, 2, 4, 4, dtype=F64),
        torch.randn(8, 3, dtype=F64),
    )

    def train(m: nn.Module, o: torch.optim.Optimizer, steps: int) -> None:
        for _ in range(steps):
            o.zero_grad()
            naive.loss_of(m(x), target).backward()
            o.step()

    train(model, opt, 3)
    other, twin = copy.deepcopy((model, opt))
    train(model, opt, 4)
    train(other, twin, 4)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)
    assert {entry["base"] for entry in opt.diagnostics().values()} == {
        "kronecker",
        "diagonal",
    }
