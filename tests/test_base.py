"""P in place of I: base.py and factor.py against dense matrices, and the places where a base must work."""

import copy
import math

import naive
import pytest
import torch
from torch import Tensor, nn

import seng
from seng.linalg.implicit import Implicit
from seng.linalg.windows import Windows
from seng.metrics.base import Diagonal, Kronecker, _inputs, kept
from seng.metrics.factor import FLOOR, Factor, Moment, updated
from seng.metrics.job import _factors

F64 = torch.float64


def nothing(_: object) -> None:
    """One rank has nothing to add up."""


LAYERS = {
    "linear": (lambda: nn.Linear(4, 3), (4,)),
    "linear without bias": (lambda: nn.Linear(4, 3, bias=False), (4,)),
    "linear on sequences": (lambda: nn.Linear(4, 3), (5, 4)),
    "convolution": (lambda: nn.Conv2d(2, 3, 3, padding=1, stride=2), (2, 5, 4)),
    "pointwise": (lambda: nn.Conv2d(3, 4, 1, bias=False), (3, 3, 3)),
    "grouped": (lambda: nn.Conv2d(4, 6, 2, groups=2), (4, 3, 3)),
    "dilated": (lambda: nn.Conv2d(2, 2, 2, dilation=2), (2, 4, 4)),
}


def batch(layer: nn.Module, shape: tuple[int, ...], seed: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(6, *shape, generator=draw, dtype=F64)
    return x, torch.randn(layer(x).shape, generator=draw, dtype=F64)


def moments(
    layer: nn.Module, x: Tensor, target: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """C_A, C_G, M and E u² of a layer on one batch, and the gradient: vectors are (h, n_G, n_A), row by row."""
    out = layer(x)
    (g,) = torch.autograd.grad(naive.loss_of(out, target), out, retain_graph=True)
    A, G = naive.sides(layer, x, len(x) * g)
    u = together(layer, naive.per_sample_gradients(layer, x, target))
    grad = together(
        layer,
        naive.flat(
            torch.autograd.grad(naive.loss_of(out, target), list(layer.parameters()))
        )[None],
    )[0]
    return A.mT @ A, G.mT @ G, naive.fisher(u), u.square().mean(0), grad


def metric(
    base: str, C_A: Tensor, C_G: Tensor, v: Tensor, power: float, least: float = 0.0
) -> Tensor:
    """P, dense; `least`: the λ that bounds a P that is alone."""
    if base == "kronecker":
        return naive.kronecker_metric(C_A, C_G, power, max(FLOOR, least**0.5))
    return naive.diagonal_metric(v, power, max(FLOOR, least))


def together(layer: nn.Module, rows: Tensor) -> Tensor:
    """Gradients of weight and bias (…, n), one after the other -> the bias as one more column of the weight."""
    weight = rows[:, : layer.weight.numel()].unflatten(1, (layer.weight.shape[0], -1))
    return (
        weight
        if layer.bias is None
        else torch.cat([weight, rows[:, layer.weight.numel() :, None]], 2)
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
        [b - p.detach() for b, p in zip(before, layer.parameters(), strict=True)]
    )[None]
    for b, p in zip(before, layer.parameters(), strict=True):
        p.data.copy_(b)
    return together(layer, moved)[0]


@pytest.mark.parametrize("power", [1.0, 0.5, 0.25])
@pytest.mark.parametrize("base", ["kronecker", "diagonal"])
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("form", ["merged", "explicit", "implicit"])
def test_each_base_gives_the_dense_direction(
    kind: str, base: str, power: float, form: str
) -> None:
    make, shape = LAYERS[kind]
    layer = make().to(F64)
    x, target = batch(layer, shape, 1)
    curvature = seng.Curvature(
        form, base=base, power=power, rank=1000, decay=0, graft=False
    )
    opt = seng.SENG(layer, lr=1.0, momentum=0.0, damping=0.03, curvature=curvature)
    C_A, C_G, M, v, g = moments(layer, x, target)
    P = metric(base, C_A, C_G, v, power)
    want = naive.based_direction(M, P, g, 0.03)
    assert naive.relative_error(step(opt, layer, x, target), want) < 1e-9


@pytest.mark.parametrize("base", ["kronecker", "diagonal"])
@pytest.mark.parametrize("kind", ["linear", "convolution", "grouped"])
def test_averaged_curvature_is_carried_over_to_the_new_coordinates(
    kind: str, base: str
) -> None:
    make, shape = LAYERS[kind]
    layer = make().to(F64)
    curvature = seng.Curvature(base=base, rank=1000, decay=0.7, graft=False)
    opt = seng.SENG(
        layer, lr=1.0, momentum=0.0, damping=0.03, refresh_every=1, curvature=curvature
    )
    mean: list[Tensor] = []
    for seed in range(3):
        x, target = batch(layer, shape, seed)
        *new, g = moments(layer, x, target)
        mean = (
            [0.7 * a + 0.3 * b for a, b in zip(mean, new, strict=True)] if mean else new
        )
        C_A, C_G, M, v = mean
        P = metric(base, C_A, C_G, v, 0.5)
        want = naive.based_direction(M, P, g, 0.03)
        assert naive.relative_error(step(opt, layer, x, target), want) < 1e-9


@pytest.mark.parametrize("damping", [1e-6, 0.03, 2.0])
@pytest.mark.parametrize("kind", ["convolution", "linear", "grouped"])
@pytest.mark.parametrize("base", ["kronecker", "diagonal"])
def test_without_low_rank_it_is_the_inverse_of_p_bounded_by_the_damping(
    base: str, kind: str, damping: float
) -> None:
    make, shape = LAYERS[kind]
    layer = make().to(F64)
    x, target = batch(layer, shape, 1)
    curvature = seng.Curvature(base=base, rank=0, decay=0, graft=False)
    opt = seng.SENG(
        layer, 1.0, momentum=0.0, damping=damping, refresh_every=2, curvature=curvature
    )
    C_A, C_G, _, v, g = moments(layer, x, target)
    P = metric(base, C_A, C_G, v, 0.5, damping)
    assert (
        naive.relative_error(step(opt, layer, x, target), torch.linalg.solve(P, g))
        < 1e-9
    )
    opt.param_groups[0]["damping"] = 0.1  # acts at the next step, which is no refresh
    P = metric(base, C_A, C_G, v, 0.5, 0.1)
    assert (
        naive.relative_error(step(opt, layer, x, target), torch.linalg.solve(P, g))
        < 1e-9
    )
    (numbers,) = opt.diagnostics().values()
    e = (
        torch.cat(
            [
                torch.kron(*map(torch.linalg.eigvalsh, pair))
                for pair in zip(C_G, C_A, strict=True)
            ]
        )
        / len(x) ** 2
    )
    mean = (
        float(C_A.diagonal(dim1=1, dim2=2).mean() * C_G.diagonal(dim1=1, dim2=2).mean())
        / len(x) ** 2
    )
    e, mean = (v, float(v.mean())) if base == "diagonal" else (e, mean)
    assert (
        numbers["columns"] == 0
        and numbers["base"] == base
        and numbers["solves_failed"] == 0
    )
    assert numbers["top_eigenvalue"] == pytest.approx(float(e.max())) and numbers[
        "damping"
    ] == pytest.approx(0.1 * mean)
    assert numbers["effective_rank"] == pytest.approx(float(e.sum() / e.max()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("relative", [True, False])
@pytest.mark.parametrize("base", ["kronecker", "diagonal"])
def test_p_alone_with_much_damping_is_sgd(
    base: str, relative: bool, dtype: torch.dtype
) -> None:
    """For every size of factor, whole or not; and grafted or not."""
    torch.manual_seed(0)
    for graft in (True, False):
        model = nn.Sequential(
            nn.Conv2d(2, 6, 3),
            nn.BatchNorm2d(6),
            nn.Flatten(),
            nn.Linear(24, 40),
            nn.Linear(40, 3),
        ).to(dtype)
        twin = copy.deepcopy(model)
        curvature = seng.Curvature(
            base=base, rank=0, base_rank=16, relative_damping=relative, graft=graft
        )
        pairs = (
            (
                model,
                seng.SENG(
                    model, 0.1, damping=1e12, refresh_every=2, curvature=curvature
                ),
            ),
            (twin, torch.optim.SGD(twin.parameters(), 0.1, momentum=0.9)),
        )
        for net, opt in pairs:
            for seed in range(4):
                x = torch.randn(
                    8,
                    2,
                    4,
                    4,
                    generator=torch.Generator().manual_seed(seed),
                    dtype=dtype,
                )
                opt.zero_grad()
                net(x).square().mean().backward()
                opt.step()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(
                p,
                q,
                rtol=1e-9 if dtype == F64 else 1e-5,
                atol=1e-12 if dtype == F64 else 1e-7,
            )


@pytest.mark.parametrize("relative", [True, False])
def test_p_alone_with_much_damping_is_sgd_where_a_side_is_zero(relative: bool) -> None:
    """The first layer behind a last one of zeros: no gradient reaches it in the first step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).to(F64)
    nn.init.zeros_(model[2].weight)
    twin = copy.deepcopy(model)
    curvature = seng.Curvature(
        base="kronecker", rank=0, relative_damping=relative, graft=False
    )
    pairs = (
        (model, seng.SENG(model, 0.1, damping=1e12, curvature=curvature)),
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


def test_an_absolute_damping_bounds_the_eigenvalues_themselves() -> None:
    layer = nn.Linear(4, 3).to(F64)
    x, target = batch(layer, (4,), 1)
    C_A, C_G, _, v, g = moments(layer, x, target)
    mean = (
        float(C_A.diagonal(dim1=1, dim2=2).mean() * C_G.diagonal(dim1=1, dim2=2).mean())
        / len(x) ** 2
    )
    for base, unit in (("kronecker", mean), ("diagonal", float(v.mean()))):
        curvature = seng.Curvature(
            base=base, rank=0, decay=0, graft=False, relative_damping=False
        )
        opt = seng.SENG(
            layer, 1.0, momentum=0.0, damping=0.2 * unit, curvature=curvature
        )
        P = metric(base, C_A, C_G, v, 0.5, 0.2)
        assert (
            naive.relative_error(step(opt, layer, x, target), torch.linalg.solve(P, g))
            < 1e-9
        )


def test_much_damping_leaves_the_inverse_of_p_where_there_is_low_rank() -> None:
    layer = nn.Linear(4, 3).to(F64)
    x, target = batch(layer, (4,), 1)
    setting = {"base": "kronecker", "decay": 0, "graft": False}
    some, alone = (
        seng.SENG(
            layer,
            1.0,
            momentum=0.0,
            damping=damping,
            curvature=seng.Curvature(rank=rank, **setting),
        )
        for rank, damping in ((16, 1e12), (0, 1e-6))
    )
    assert (
        naive.relative_error(
            step(some, layer, x, target), step(alone, layer, x, target)
        )
        < 1e-9
    )


@pytest.mark.parametrize(
    "curvature", [{"base": "kronecker"}, {"base": "diagonal"}, {"graft": True}]
)
def test_grafted_directions_have_the_length_of_the_gradient(curvature: dict) -> None:
    layer = nn.Linear(4, 3).to(F64)
    x, target = batch(layer, (4,), 1)
    g = moments(layer, x, target)[-1]
    own, plain = (
        step(
            seng.SENG(
                layer,
                1.0,
                momentum=0.0,
                curvature=seng.Curvature(**{**curvature, "graft": graft}),
            ),
            layer,
            x,
            target,
        )
        for graft in (True, False)
    )
    assert math.isclose(float(own.norm()), float(g.norm()), rel_tol=1e-12)
    assert naive.relative_error(own / own.norm(), plain / plain.norm()) < 1e-12


def test_a_gradient_of_zeros_stays_one() -> None:
    layer = nn.Linear(4, 3).to(F64)
    opt = seng.SENG(layer, 1.0, curvature=seng.Curvature(base="kronecker"))
    layer(torch.randn(5, 4, dtype=F64)).mul(0).sum().backward()
    before = layer.weight.detach().clone()
    opt.step()
    assert torch.equal(layer.weight, before)


def test_sketched_factors_come_closer_as_their_rank_grows() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(60, 40).to(F64)
    x = torch.randn(300, 60, dtype=F64) * torch.logspace(0, -2, 60, dtype=F64)
    target = layer(x).detach() + torch.randn(300, 40, dtype=F64) * torch.logspace(
        0, -2, 40, dtype=F64
    )

    def direction(rank: int) -> Tensor:
        curvature = seng.Curvature(
            base="kronecker", base_rank=rank, rank=1000, decay=0, graft=False
        )
        return step(
            seng.SENG(layer, 1.0, momentum=0.0, damping=0.03, curvature=curvature),
            layer,
            x,
            target,
        )

    exact = direction(61)  # the bias is one more
    errors = [
        naive.relative_error(direction(rank), exact) for rank in (4, 8, 16, 32, 48)
    ]
    assert errors == sorted(errors, reverse=True) and errors[-1] < 0.06 * errors[0]
    assert naive.relative_error(direction(1000), exact) == 0


class TestFactor:
    """One side's running average."""

    def draw(self, n: int = 30, N: int = 100, h: int = 2) -> Tensor:
        scale = torch.logspace(0, -3, n, dtype=F64)[:, None]
        return (
            torch.randn(
                h, n, N, dtype=F64, generator=torch.Generator().manual_seed(n + N)
            )
            * scale
        )

    def test_the_leading_directions_are_found(self) -> None:
        X = self.draw()
        found = updated(
            None, Moment(X, nothing), 8, 0.5, torch.Generator().manual_seed(0)
        )
        e, V = torch.linalg.eigh(X @ X.mT)
        torch.testing.assert_close(found.s, e.flip(1)[:, :8], rtol=1e-6, atol=0)
        leading = V.flip(2)[:, :, :5]
        torch.testing.assert_close(
            found.V.mT @ found.V,
            torch.eye(8, dtype=F64).expand(2, 8, 8),
            atol=1e-10,
            rtol=0,
        )
        assert float((leading - found.V @ (found.V.mT @ leading)).norm()) < 1e-3
        torch.testing.assert_close(found.trace, e.sum(1))

    def test_the_range_finder_goes_on_from_where_it_was(self) -> None:
        """A constant C is found better and better, a product or two a refresh."""
        X = torch.randn(
            1, 60, 200, dtype=F64, generator=torch.Generator().manual_seed(3)
        )  # a flat spectrum: the hard case
        C = X @ X.mT
        best = torch.linalg.eigvalsh(C)[:, -8:].sum()
        found, shares = None, []
        for i in range(6):
            found = updated(
                found, Moment(X, nothing), 8, 0.9, torch.Generator().manual_seed(i)
            )
            shares.append(
                float((found.V.mT @ C @ found.V).diagonal(dim1=1, dim2=2).sum() / best)
            )
        assert shares[-1] > shares[0] and shares[-1] > 0.95 and max(shares) <= 1 + 1e-9

    def test_large_moments_are_never_formed(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        X = self.draw()
        small = updated(
            None, Moment(X, nothing), 8, 0.5, torch.Generator().manual_seed(0)
        )
        monkeypatch.setattr("seng.metrics.factor.GRAM", 0)
        seen = Moment(X, nothing)
        large = updated(None, seen, 8, 0.5, torch.Generator().manual_seed(0))
        assert "_local" not in vars(seen)
        torch.testing.assert_close(large.s, small.s)

    @pytest.mark.parametrize("rank", [8, 30])
    def test_without_eigh_it_comes_near(
        self, rank: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As on a GPU, where nothing waits: after some refreshes C^p is nearly what `eigh` makes of it."""
        X = self.draw()

        def root() -> Tensor:
            found = None
            for i in range(6):
                found = updated(
                    found,
                    Moment(X, nothing),
                    rank,
                    0.9,
                    torch.Generator().manual_seed(i),
                )
            base = Kronecker(
                found,
                Factor(
                    torch.eye(1, dtype=F64).expand(2, 1, 1),
                    torch.ones(2, 1),
                    torch.zeros(2),
                ),
                0.5,
            )
            return base.times(
                torch.eye(30, dtype=F64)
                .expand(2, 30, 30)
                .unflatten(2, (30, 1))
                .permute(2, 0, 1, 3),
                -0.5,
            )

        want = root()
        monkeypatch.setattr("seng.metrics.factor.exactly", lambda X, n: False)
        assert naive.relative_error(root(), want) < 0.03

    def test_fewer_samples_than_directions(self) -> None:
        X = self.draw(n=30, N=5)
        found = updated(
            None, Moment(X, nothing), 8, 0.5, torch.Generator().manual_seed(0)
        )
        assert (
            found.V.isfinite().all()
            and found.s.isfinite().all()
            and (found.rest >= 0).all()
        )
        C = found.times(torch.eye(30, dtype=F64).expand(2, 30, 30))
        assert naive.relative_error(C, X @ X.mT) < 1e-6

    def test_no_samples_and_no_size(self) -> None:
        found = updated(
            None,
            Moment(torch.zeros(1, 6, 0, dtype=F64), nothing),
            3,
            0.5,
            torch.Generator(),
        )
        kept_values, others = found.eigenvalues(0.5)  # of a C that is zero
        torch.testing.assert_close(kept_values, torch.ones_like(kept_values))
        torch.testing.assert_close(others, torch.ones_like(others))

    @pytest.mark.parametrize("rank", [4, 30])
    def test_what_is_not_finite_is_left_out(self, rank: int) -> None:
        X = self.draw()
        before = updated(
            None, Moment(X, nothing), rank, 0.5, torch.Generator().manual_seed(0)
        )
        bad = X.clone()
        bad[0, 0, 0] = torch.nan
        after = updated(
            before, Moment(bad, nothing), rank, 0.5, torch.Generator().manual_seed(1)
        )
        C, D = (
            f.times(torch.eye(30, dtype=F64).expand(2, 30, 30)) for f in (before, after)
        )
        assert (
            naive.relative_error(D[0], C[0]) < 1e-9
            and naive.relative_error(D[1], C[1]) < 0.1
        )

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
    def test_few_columns_are_not_multiplied_out(self, dtype: torch.dtype) -> None:
        X = self.draw(n=30, N=7).to(dtype)
        seen = Moment(X, nothing, 0.5)
        Z = torch.randn(
            2,
            30,
            4,
            dtype=torch.promote_types(dtype, torch.float32),
            generator=torch.Generator().manual_seed(0),
        )
        torch.testing.assert_close(
            seen.times(Z),
            (0.5 * X.to(Z.dtype) @ X.to(Z.dtype).mT) @ Z,
            rtol=1e-4,
            atol=1e-5,
        )
        torch.testing.assert_close(seen.trace, 0.5 * X.to(Z.dtype).square().sum((1, 2)))
        assert "_local" not in vars(seen)


def test_the_inputs_of_a_convolution_side_by_side() -> None:
    torch.manual_seed(0)
    for kernel, stride, padding, dilation, bias in (
        ((3, 2), (2, 1), (1, 0), (1, 2), 1),
        ((1, 1), (1, 1), (0, 0), (1, 1), 0),
    ):
        a = torch.randn(5, 3, 7, 6)
        out = nn.functional.unfold(a, kernel, dilation, padding, stride).shape[2]
        U = Windows(
            torch.randn(5, 4, out, 1), a, kernel, stride, padding, dilation, bias
        )
        A = U.implicit().A[:, 0]  # (ϱ, n_A, κ)
        assert torch.equal(U.inputs(), A.permute(1, 0, 2).flatten(1))
        assert torch.equal(
            U.inputs(slice(1, None, 2)), A[1::2].permute(1, 0, 2).flatten(1)
        )


def test_of_many_positions_some_samples_are_enough_but_in_float64() -> None:
    torch.manual_seed(0)
    U = Implicit(
        torch.randn(64, 1, 4, 36),
        torch.randn(64, 1, 5, 36) * torch.logspace(0, -1, 5)[:, None],
    )
    whole, some = _inputs(U, nothing), _inputs(U.to(torch.float32), nothing)
    assert whole.X.shape[2] == 64 * 36 and some.X.shape[2] == 16 * 36
    torch.testing.assert_close(
        whole.dense(), torch.einsum("ihnk,ihmk->hnm", U.A, U.A) / 64
    )
    assert naive.relative_error(some.dense().to(F64), whole.dense()) < 0.1
    few = Implicit(torch.randn(64, 1, 4, 1), torch.randn(64, 1, 50, 1)).to(
        torch.float32
    )
    assert _inputs(few, nothing).X.shape[2] == 64  # none to spare
    firsts = {
        float(_inputs(U.to(torch.float32), nothing, 1, seed).X[0, 0, 0])
        for seed in range(8)
    }
    assert firsts == set(
        U.A[:4, 0, 0, 0].float().tolist()
    )  # of every four, now this one and now that


def test_what_few_samples_had_counts_as_seen_and_no_more() -> None:
    """Of 60 directions: 8 that are kept, and of the others as many as there were samples."""
    found = None
    for seed, count in ((0, 10), (1, 20), (2, 30)):
        X = torch.randn(
            1, 60, 10, generator=torch.Generator().manual_seed(seed), dtype=F64
        )
        found = updated(
            found, Moment(X, nothing), 8, 0.5, torch.Generator().manual_seed(0)
        )
        assert float(found.count) == count
        kept_values, others = found.eigenvalues(
            0.5, noise=0.25
        )  # so much of it that the floor is above the others
        floor = (60 - count) / count
        assert (
            float(others) == pytest.approx(floor**0.5)
            and float(kept_values.min()) >= floor**0.5
        )
    again = updated(found, Moment(X, nothing), 8, 0.0, torch.Generator().manual_seed(0))
    assert float(again.count) == 10  # the others are gone


def test_factors_in_half_precision_are_reduced_and_stay_so() -> None:
    """As on a GPU, where captured factors stay in bfloat16, for which there is no QR."""
    torch.manual_seed(0)
    U = Implicit(
        torch.randn(4, 1, 6, 5).to(torch.bfloat16),
        torch.randn(4, 1, 7, 5).to(torch.bfloat16),
    )
    small = _factors(U, 5 - 2, seng.Curvature("implicit", decay=0), torch.Generator())
    assert small.G.dtype == small.A.dtype == torch.bfloat16 and small.rank == 3
    whole = U.to(F64).explicit().U
    assert naive.relative_error(small.to(F64).explicit().U, whole) < 0.7


def test_the_mean_eigenvalue_is_one_over_all_groups() -> None:
    torch.manual_seed(0)
    scale = torch.tensor([1.0, 10.0, 0.0], dtype=F64)[:, None, None]
    G, A = (
        updated(
            None,
            Moment(scale * torch.randn(3, n, 20), nothing),
            r,
            0.5,
            torch.Generator(),
        )
        for n, r in ((5, 2), (7, 9))
    )
    eye = torch.eye(3 * 35, dtype=F64).unflatten(1, (3, 5, 7))
    for power in (0.25, 0.5, 1.0):
        base = Kronecker(G, A, power)
        P = torch.linalg.inv(base.times(eye, -1.0).flatten(1))
        torch.testing.assert_close(P.diagonal().mean(), torch.ones((), dtype=F64))
        small, large, none = P.diagonal().view(3, 35).mean(1)
        assert none < small < large


def test_powers_of_a_base_undo_each_other() -> None:
    torch.manual_seed(0)
    X = torch.randn(2, 1, 5, 7, dtype=F64)
    A, G = (
        updated(
            None,
            Moment(torch.randn(1, n, 20, dtype=F64), nothing),
            4,
            0.5,
            torch.Generator(),
        )
        for n in (7, 5)
    )
    for base in (Kronecker(G, A, 0.5), Diagonal(torch.rand(35, dtype=F64), 0.5)):
        torch.testing.assert_close(base.times(base.times(X, -0.5), 0.5), X)
        torch.testing.assert_close(
            base.times(base.times(X, -0.5), -0.5), base.times(X, -1.0)
        )


def test_what_was_loaded_is_kept_only_if_it_is_asked_for() -> None:
    eye = Factor(torch.eye(2)[None], torch.ones(1, 2), torch.zeros(1))
    kronecker, diagonal = Kronecker(eye, eye, 0.5), Diagonal(torch.ones(4), 0.5)
    assert (
        kept(None, "identity", 0.5)
        and kept(kronecker, "kronecker", 0.5)
        and kept(diagonal, "diagonal", 0.5)
    )
    assert kept(diagonal, "kronecker", 0.5)  # of a layer without factors
    assert (
        not kept(None, "kronecker", 0.5)
        and not kept(kronecker, "identity", 0.5)
        and not kept(kronecker, "diagonal", 0.5)
    )
    assert not kept(kronecker, "kronecker", 1.0)


def test_deepcopy_goes_on_as_the_original() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 3)
    ).to(F64)
    opt = seng.SENG(
        model,
        0.1,
        refresh_every=2,
        curvature=seng.Curvature(base="kronecker", base_rank=8),
    )
    x, target = torch.randn(8, 2, 4, 4, dtype=F64), torch.randn(8, 3, dtype=F64)

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
