"""U about its mean: directions, averages, limits and precision of the covariance of the samples, against dense matrices."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import naive
import pytest
import torch
import torch.nn.functional as F
from conftest import Case
from refreshing import low_rank, uncentred
from torch import Tensor, nn

import seng
from seng.layers.sites import survey
from seng.linalg.centred import Centred, about_mean, centred
from seng.linalg.implicit import Implicit
from seng.linalg.numerics import reduced
from seng.linalg.operators import Explicit
from seng.linalg.sketch import KroneckerRows, LeverageRows, Rows
from seng.tell.inspection import inspect

FULL = 10**6  # a rank above anything that exists means exact
BASES = {"I": None, "root": 0.5, "power 1": 1.0}
each_base = pytest.mark.parametrize("base", BASES.values(), ids=BASES)
each_form = pytest.mark.parametrize(
    "form", ["explicit", "implicit", "merged", "auto"]
)


def curvature_of(
    form: Any, base: float | None, **given: Any
) -> seng.Curvature:
    """All of Ū, over all of a P of this power, from the last refresh alone."""
    options = {"rank": FULL, "samples": None, "decay": 0} | given
    if form == "explicit":  # it keeps every column
        options.pop("rank")
    decay = options["decay"]
    P = None
    if base is not None:
        P = seng.Kronecker(power=base, rank=FULL, decay=decay)
    return seng.Curvature(form, **{"base": P} | options)


class One:
    """A layer, its optimizer with steps of length 1, and vectors in the order of its block."""

    def __init__(self, layer: nn.Module, **options: Any) -> None:
        self.layer = layer
        ((self.site,), _) = survey(layer, layer.parameters())
        given = {"damping": 0.3, "momentum": 0.0, "strict": True} | options
        self.opt = seng.SENG(layer, 1.0, **given)

    def block(self, rows: Tensor) -> Tensor:
        return naive.as_block(self.layer, self.site, rows)

    def samples(self, x: Tensor, target: Tensor) -> Tensor:
        """u_i, as rows."""
        return self.block(naive.per_sample_gradients(self.layer, x, target))

    def direction(
        self, x: Tensor, target: Tensor, sizes: Sequence[int] | None = None
    ) -> Tensor:
        """d of one step, in micro-batches of these sizes; the weights stay."""
        params = list(self.layer.parameters())
        before = [p.detach().clone() for p in params]
        self.opt.zero_grad()
        chunks = [len(x)] if sizes is None else list(sizes)
        for a, b in zip(x.split(chunks), target.split(chunks), strict=True):
            loss = naive.loss_of(self.layer(a), b)
            (loss * len(a) / len(x)).backward()
        self.opt.step()
        with torch.no_grad():
            moved = [b - p for b, p in zip(before, params, strict=True)]
            for b, p in zip(before, params, strict=True):
                p.copy_(b)
        return self.block(naive.flat(moved)[None])[0]

    @property
    def state(self) -> Any:
        (state,) = inspect(self.opt).states.values()
        return state

    def P(self) -> Tensor | None:
        """Dense, from the products of the state's own."""
        P = self.state.P
        if P is None:
            return None
        n = sum(p.numel() for p in self.layer.parameters())
        return P.to_power(1.0).rows(torch.eye(n))


def dense(M: Tensor, P: Tensor | None, g: Tensor, damping: float) -> Tensor:
    """λ(M + λP)⁻¹g by a dense solve, over P as long as g."""
    if P is not None:
        return naive.based_direction(M, P, g, damping)
    lam = damping * float(torch.linalg.eigvalsh(M)[-1])
    return lam * naive.dense_direction(M, g, lam)


# The direction of one refresh


@each_base
def test_directions_are_those_of_the_dense_covariance(
    case: Case, form: str, base: float | None
) -> None:
    layer = case.layer()
    x, target = case.input(7), case.target(layer, 7)
    one = One(layer, curvature=curvature_of(form, base))
    u = one.samples(x, target)
    got = one.direction(x, target)
    P, M = one.P(), naive.covariance(u)
    assert naive.relative_error(got, dense(M, P, u.mean(0), 0.3)) < 1e-9
    if base is not None:
        want = naive.metric(layer, one.site, x, target, base)
        assert naive.relative_error(P, want) < 1e-9


@each_base
@each_form
@pytest.mark.parametrize("sizes", [(3, 4), (1, 5, 1), (1,) * 7])
@pytest.mark.parametrize("samples", [None, 4, 100])
def test_micro_batches_are_one_batch_about_one_mean(
    form: str, base: float | None, sizes: tuple[int, ...], samples: int | None
) -> None:
    layer, x, target = nn.Conv2d(2, 3, 2), torch.randn(7, 2, 3, 3), None
    target = torch.randn_like(layer(x))
    curvature = curvature_of(form, base, samples=samples)
    one = One(layer, curvature=curvature)
    u = one.samples(x, target)
    got = one.direction(x, target, sizes)
    M = naive.covariance(u[:samples])
    assert naive.relative_error(got, dense(M, one.P(), u.mean(0), 0.3)) < 1e-9


@pytest.mark.parametrize("base", [None, 0.5], ids=["I", "root"])
@pytest.mark.parametrize("samples", [1, 4])
def test_the_first_samples_make_U_about_their_own_mean_and_all_make_P(
    case: Case, form: str, base: float | None, samples: int
) -> None:
    layer = case.layer()
    x, target = case.input(7), case.target(layer, 7)
    one = One(layer, curvature=curvature_of(form, base, samples=samples))
    u = one.samples(x, target)
    got = one.direction(x, target)
    P, g = one.P(), u.mean(0)
    if samples == 1:  # which has no spread
        want = g
        if P is not None:
            want = naive.as_long_as(g, torch.linalg.solve(P, g))
    else:
        want = dense(naive.covariance(u[:samples]), P, g, 0.3)
    assert naive.relative_error(got, want) < 1e-9
    if base is not None:
        want = naive.metric(layer, one.site, x, target, base)
        assert naive.relative_error(P, want) < 1e-9


class Sometimes(nn.Module):
    """The second layer is not reached while `off`."""

    def __init__(self, second: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = second
        self.off = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        return x if self.off else self.second(x)


class Half:
    """One refresh of two layers, the second of which only the first samples reach, in a micro-batch of their own."""

    def __init__(
        self, kind: nn.Module, reached: int, curvature: seng.Curvature
    ) -> None:
        torch.manual_seed(5)
        self.model = Sometimes(copy.deepcopy(kind).double())
        second = self.model.second
        with torch.no_grad():
            for p in second.parameters():
                p.normal_()
        opt = seng.SENG(
            self.model, 1.0, momentum=0.0, damping=0.3, curvature=curvature
        )
        ((site,), _) = survey(second, second.parameters())
        x, target = torch.randn(7, 4), torch.randn(7, 4)
        with torch.no_grad():
            inside = self.model.first(x).tanh()
        rows = naive.per_sample_gradients(
            second, inside[:reached], target[:reached]
        )
        self.u = naive.as_block(second, site, rows)
        before = naive.flat(second.parameters()).detach().clone()
        for part, off in ((slice(reached), False), (slice(reached, 7), True)):
            self.model.off = off
            loss = naive.loss_of(self.model(x[part]), target[part])
            (loss * len(x[part]) / 7).backward()
        opt.step()
        moved = before - naive.flat(second.parameters()).detach()
        self.direction = naive.as_block(second, site, moved[None])[0]
        found = inspect(opt)
        pairs = zip(found.sites, found.states.values(), strict=True)
        (state,) = [state for s, state in pairs if s.name == "second"]
        self.P = None
        if state.P is not None:
            eye = torch.eye(self.u.shape[1])
            self.P = state.P.to_power(1.0).rows(eye)


@each_base
@each_form
@pytest.mark.parametrize("kind", [nn.Linear(4, 4), nn.LayerNorm(4)], ids=str)
@pytest.mark.parametrize("reached", [5, 3, 1])
def test_samples_that_do_not_reach_a_layer_count_as_zeros(
    reached: int, kind: nn.Module, form: str, base: float | None
) -> None:
    half = Half(kind, reached, curvature_of(form, base))
    u = half.u
    M = naive.covariance(u, samples=7)
    Ubar = naive.about_mean(u.T / 7**0.5, torch.full((reached,), 7**-0.5))
    assert naive.relative_error(Ubar @ Ubar.T, M) < 1e-12
    want = dense(M, half.P, u.sum(0) / 7, 0.3)
    assert naive.relative_error(half.direction, want) < 1e-9


@pytest.mark.parametrize("form", ["explicit", "implicit", "merged"])
def test_of_a_layer_that_some_reach_as_large_a_share_of_samples_is_kept(
    form: str,
) -> None:
    """Of 7 samples 4 reach it; of the first 5 it is taken to be 4 · 5/7, rounded up."""
    half = Half(nn.Linear(4, 4), 4, curvature_of(form, 0.5, samples=5))
    M = naive.covariance(half.u[:3], samples=5)
    want = dense(M, half.P, half.u.sum(0) / 7, 0.3)
    assert naive.relative_error(half.direction, want) < 1e-9


def test_H_is_the_root_of_I_minus_s_s_and_the_null_vector_adds_no_column() -> (
    None
):
    V, U = torch.randn(6, 6), torch.randn(9, 6)
    for weights in (torch.full((6,), 1 / 6), torch.rand(6) / 6):
        s = weights.sqrt()
        H = about_mean(torch.eye(6), s)
        torch.testing.assert_close(H @ H, torch.eye(6) - torch.outer(s, s))
        torch.testing.assert_close(U @ H, naive.about_mean(U, s))
        torch.testing.assert_close(about_mean(V, s), H @ V)
    whole = Centred(Explicit(U, (1, 3, 3)), torch.full((6,), 6**-0.5))
    # V has the mean's direction where k ≥ ϱ: it must not add it as a column.
    Y = whole.combine(torch.linalg.eigh(whole.gram()).eigenvectors)
    torch.testing.assert_close(
        Y.T @ Y, whole.explicit().U @ whole.explicit().U.T
    )
    assert float(Y.square().sum(1).min()) < 1e-25


@pytest.mark.parametrize("missing", [0.0, 0.4])
def test_products_of_a_centred_operator_are_those_of_its_dense_matrix(
    missing: float,
) -> None:
    U = Implicit(torch.randn(5, 2, 3, 2), torch.randn(5, 2, 4, 2))
    s = torch.full((5,), ((1 - missing) / 5) ** 0.5)
    want = naive.about_mean(U.explicit().U, s)
    z, c, V = torch.randn(24), torch.randn(5), torch.randn(5, 3)
    for kept in (U, U.explicit()):
        op = Centred(kept, s)
        torch.testing.assert_close(op.explicit().U, want)
        torch.testing.assert_close(op.gram(), want.T @ want)
        torch.testing.assert_close(op.rmv(z), want.T @ z)
        torch.testing.assert_close(op.mv(c), want @ c)
        torch.testing.assert_close(op.combine(V), (want @ V).T)
        torch.testing.assert_close(op.row_norms(), want.square().sum(1))
        weights = torch.rand(24)
        torch.testing.assert_close(
            op.weighted(weights).explicit().U, weights[:, None] * want
        )


# Averages over refreshes


@each_base
def test_averages_mix_covariances_each_about_its_own_mean(
    case: Case, base: float | None
) -> None:
    layer = case.layer()
    curvature = curvature_of("auto", base, decay=0.8)
    one = One(layer, curvature=curvature, refresh_every=1)
    M: Any = None
    moved = []
    for step in range(3):
        torch.manual_seed(step)
        x, target = case.input(7), case.target(layer, 7) + step
        u = one.samples(x, target)
        new = naive.covariance(u)
        M = new if M is None else 0.8 * M + 0.2 * new
        got = one.direction(x, target)
        P = one.P()
        assert naive.relative_error(got, dense(M, P, u.mean(0), 0.3)) < 1e-9
        moved.append(P)
    if base is not None and len(M) > 1:  # of one number P is always 1
        assert naive.relative_error(moved[0], moved[2]) > 1e-3


# Precision


def far_from_zero(ratio: float, kappa: int, samples: int = 12) -> Implicit:
    """Float32 factors of per-sample gradients G_i A_iᵀ whose spread is `ratio` times smaller than their mean."""

    def about(n: int) -> Tensor:
        mean = F.normalize(torch.randn(1, 1, n, kappa), dim=2)
        spread = F.normalize(torch.randn(samples, 1, n, kappa), dim=2)
        return (mean + spread / ratio).float()

    return Implicit(about(5), about(6)).scaled(samples**-0.5)


# One position: the Gram is made of factors; three: of columns.
@pytest.mark.parametrize("kappa", [1, 3])
@pytest.mark.parametrize("ratio", [10, 100, 1000])
@pytest.mark.parametrize("form", ["explicit", "implicit", "merged"])
@each_base
def test_float32_keeps_the_spread_beside_a_large_mean(
    base: float | None, form: str, ratio: int, kappa: int
) -> None:
    """An uncentred Gram in float32 loses 5 % of it at 100, and turns indefinite at 1000."""
    U = far_from_zero(ratio, kappa)
    assert U.by_columns == (kappa == 3)
    c = curvature_of(form, base)
    single, double = (low_rank(V, c) for V in (U, U.to(torch.float64)))
    assert single.gram.dtype == torch.float32
    values = torch.linalg.eigvalsh(single.gram.double())
    assert values[0] >= -1e-6 * values[-1]
    assert naive.relative_error(single.gram.double(), double.gram) < 1e-3
    mean = U.to(torch.float64).explicit().U.sum(1)
    draws = torch.randn(2, U.n)
    some = double.U.mv(torch.randn(double.U.samples))
    for g in (mean, some, *draws):
        got = single.at(0.1)(g.float()).double()
        assert naive.relative_error(got, double.at(0.1)(g)) < 1e-3


# No spread: no curvature


NO_SPREAD = [
    ("identical", lambda x: x[:1].expand_as(x)),
    ("single", lambda x: x[:1]),
]


@each_form
@each_base
@pytest.mark.parametrize(
    "same", [change for _, change in NO_SPREAD], ids=[n for n, _ in NO_SPREAD]
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("decay", [0, 0.8])
def test_without_spread_there_is_no_curvature(
    decay: float,
    dtype: torch.dtype,
    same: Callable[[Tensor], Tensor],
    base: float | None,
    form: Any,
) -> None:
    """Over λI the direction is the gradient itself, over P KFAC's; of a second refresh that averages, too.

    Factors share products with P, which rounds otherwise: by ε, times the condition of P.
    """
    if decay and form not in ("auto", "merged"):
        form = "auto"
    model = nn.Sequential(
        nn.Conv2d(2, 3, 2),
        nn.Tanh(),
        nn.LayerNorm([3, 3, 3]),
        nn.Flatten(),
        nn.Linear(27, 3),
    ).to(dtype)
    twin = copy.deepcopy(model)
    lr = 1e-3  # a fitted sample would leave the rounding of its residual
    x = same(torch.randn(5, 2, 4, 4, dtype=dtype))
    target = same(torch.randn(5, 3, dtype=dtype))
    plain: Any = torch.optim.SGD(twin.parameters(), lr, 0.9)
    if base is not None:
        fields = {"power": base, "rank": FULL, "decay": decay}
        plain = seng.KFAC(twin, lr, refresh_every=1, **fields)
    curvature = curvature_of(form, base, decay=decay)
    opt = seng.SENG(model, lr, refresh_every=1, curvature=curvature)
    for _ in range(3):
        for net, o in ((model, opt), (twin, plain)):
            o.zero_grad()
            naive.loss_of(net(x), target).backward()
            o.step()
    entries = opt.diagnostics().values()
    factors = any(entry["form"] == "implicit" for entry in entries)
    rounding = 1000 * torch.finfo(dtype).eps
    tolerance = rounding if factors and base is not None else 0
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert naive.relative_error(p, q) <= tolerance
    for entry in entries:
        assert entry["top_eigenvalue"] == 0 and entry["solves_failed"] == 0


@pytest.mark.parametrize("form", ["explicit", "implicit", "merged"])
@pytest.mark.parametrize("kappa", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_the_rounding_of_large_samples_without_spread_is_no_curvature(
    dtype: torch.dtype, kappa: int, form: str
) -> None:
    G, A = (1e6 * torch.randn(1, 1, n, kappa, dtype=dtype) for n in (5, 6))
    U = Implicit(G.expand(12, -1, -1, -1), A.expand(12, -1, -1, -1))
    state = low_rank(U.scaled(12**-0.5), curvature_of(form, None))
    g = torch.randn(U.n, dtype=dtype)
    assert float(state.top) == 0 and torch.equal(state.at(0.1)(g), g)


@each_base
@pytest.mark.parametrize("first", [True, False])
def test_a_refresh_without_spread_fades_the_last_one(
    base: float | None, first: bool
) -> None:
    layer = nn.Linear(4, 3)
    x, target = torch.randn(7, 4), torch.randn(7, 3)
    batches = [(x, target), (x[:1].expand(7, 4), target[:1].expand(7, 3))]
    curvature = curvature_of("auto", base, decay=0.8)
    one = One(layer, curvature=curvature, refresh_every=1)
    for batch in batches if first else batches[::-1]:
        g = one.samples(*batch).mean(0)
        got = one.direction(*batch)
    M = naive.covariance(one.samples(x, target)) * (0.8 if first else 0.2)
    assert naive.relative_error(got, dense(M, one.P(), g, 0.3)) < 1e-9


# λ → ∞


class Transformer(nn.Module):
    """Words, two blocks with attention, a head; time first where `time` is 0."""

    def __init__(self, width: int = 6, words: int = 9, time: int = 1) -> None:
        super().__init__()
        self.time = time
        self.table = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm": nn.LayerNorm(width),
                    # Keys' bias has no gradient but rounding, which Adam scales up.
                    "qkv": nn.Linear(width, 3 * width, bias=False),
                    "out": nn.Linear(width, width, bias=False),
                    "second": nn.LayerNorm(width),
                    "up": nn.Linear(width, 2 * width),
                    "down": nn.Linear(2 * width, width),
                }
            )
            for _ in range(2)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for b in self.blocks:
            q, k, v = b["qkv"](b["norm"](x)).chunk(3, -1)
            if self.time == 0:
                q, k, v = (t.transpose(0, 1) for t in (q, k, v))
            seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            if self.time == 0:
                seen = seen.transpose(0, 1)
            x = x + b["out"](seen)
            x = x + b["down"](F.gelu(b["up"](b["second"](x))))
        return self.head(self.norm(x))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "cnn": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1, bias=False),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Conv2d(4, 4, 3, stride=2, groups=2),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(16, 3),
        ),
        lambda: torch.randn(8, 2, 6, 6),
    ),
    "transformer": (Transformer, lambda: torch.randint(9, (8, 5))),
    "mlp": (
        lambda: nn.Sequential(
            nn.Linear(5, 8),
            nn.Tanh(),
            nn.Linear(8, 8),
            nn.Tanh(),
            nn.Linear(8, 3),
        ),
        lambda: torch.randn(8, 5),
    ),
}


def ends_of(
    name: str, make: Callable[[nn.Module], Any], steps: int = 20
) -> Tensor:
    """How far so many steps go, each on a batch of its own."""
    torch.manual_seed(0)
    build, draw = NETWORKS[name]
    model = build()
    start = naive.flat(model.parameters()).detach().clone()
    opt = make(model)
    for step in range(steps):
        torch.manual_seed(step)
        x = draw()
        opt.zero_grad()
        out = model(x)
        naive.loss_of(out, torch.randn_like(out)).backward()
        opt.step()
    return naive.flat(model.parameters()).detach() - start


@pytest.mark.parametrize("decay", [0, 0.8])
@pytest.mark.parametrize("recipe", ["sgd", "muon"])
@pytest.mark.parametrize("name", NETWORKS)
def test_with_much_damping_over_the_identity_it_is_the_recipes_own_optimizer(
    name: str, recipe: str, decay: float
) -> None:
    def ours(model: nn.Module) -> Any:
        return seng.SENG(
            model,
            0.01,
            recipe=recipe,
            weight_decay=0.1,
            damping=1e30,
            refresh_every=3,
            curvature=seng.Curvature(base=None, samples=4, decay=decay),
        )

    def theirs(model: nn.Module) -> Any:
        if recipe == "muon":
            return seng.Muon(model, 0.01, weight_decay=0.1)
        params = model.parameters()
        return torch.optim.SGD(params, 0.01, 0.9, weight_decay=0.1)

    want = ends_of(name, theirs)
    assert naive.relative_error(ends_of(name, ours), want) < 1e-12


@pytest.mark.parametrize(
    "fields",
    [{}, {"power": 1.0, "rank": 3, "floor": 0.3, "decay": 0.5}],
    ids=str,
)
@pytest.mark.parametrize("recipe", ["sgd", "adamw", "muon"])
@pytest.mark.parametrize("name", NETWORKS)
def test_with_much_damping_over_a_base_it_is_kfac(
    name: str, recipe: str, fields: dict[str, Any]
) -> None:
    """With the same Kronecker fields, though U has fewer samples than the batch."""
    common = {"recipe": recipe, "weight_decay": 0.1, "refresh_every": 3}

    def ours(model: nn.Module) -> Any:
        base = seng.Kronecker(**fields)
        curvature = seng.Curvature(base=base, samples=4)
        return seng.SENG(
            model, 0.01, damping=1e30, curvature=curvature, **common
        )

    def theirs(model: nn.Module) -> Any:
        return seng.KFAC(model, 0.01, **fields, **common)

    want = ends_of(name, theirs)
    assert naive.relative_error(ends_of(name, ours), want) < 1e-12


# Sketches, reduced factors


def partly_constant(samples: int = 6) -> Implicit:
    """Factors of which the first output and the first three inputs are alike in all samples, and large."""
    G, A = torch.randn(samples, 1, 3, 1), torch.randn(samples, 1, 6, 1)
    G[:, :, :1] = 10
    A[:, :, :3] = 10
    return Implicit(G, A).scaled(samples**-0.5)


@pytest.mark.parametrize("form", ["explicit", "implicit", "merged"])
def test_row_norm_sampling_takes_rows_of_the_centred_samples(
    form: Any,
) -> None:
    U = partly_constant()
    alike = [0, 1, 2]  # of 18 rows, the largest before they are centred
    s = torch.full((6,), 6**-0.5)
    p = naive.about_mean(U.explicit().U, s).square().sum(1)
    assert p[alike].max() < 1e-20 * p.max()
    omega = LeverageRows(40_000).draw(centred(U, s), torch.Generator())
    seen = omega.index.bincount(minlength=18) / 40_000
    assert (seen - p / p.sum()).abs().max() < 0.02
    if form == "merged":
        return
    c = curvature_of(form, None, sketch=LeverageRows(12))
    rows = low_rank(U, c).omega.index.tolist()
    assert set(rows).isdisjoint(alike)
    uncentred_rows = low_rank(
        U, uncentred(form, sketch=LeverageRows(12), decay=0)
    )
    assert not set(uncentred_rows.omega.index.tolist()).isdisjoint(alike)


@pytest.mark.parametrize(
    "sketch", [Rows(9), LeverageRows(9), KroneckerRows(2, 4)], ids=str
)
@pytest.mark.parametrize("form", ["explicit", "implicit"])
def test_a_sketched_direction_is_that_of_the_sketched_centred_samples(
    form: Any, sketch: Any
) -> None:
    U = Implicit(torch.randn(6, 1, 3, 2), torch.randn(6, 1, 6, 2))
    solver = low_rank(U, curvature_of(form, None, sketch=sketch)).at(0.3)
    Ubar = naive.about_mean(U.explicit().U, torch.full((6,), 6**-0.5))
    Omega = solver.omega(torch.eye(18))
    Xi = Omega @ Ubar
    lam = 0.3 * torch.linalg.eigvalsh(Xi.T @ Xi)[-1]
    g = torch.randn(18)
    b = torch.linalg.solve(Xi.T @ Xi + lam * torch.eye(6), Xi.T @ (Omega @ g))
    assert naive.relative_error(solver(g), g - Ubar @ b) < 1e-9


@pytest.mark.parametrize("rank", [1, 2, 4])
@each_base
def test_reduced_factors_are_about_their_own_mean(
    base: float | None, rank: int
) -> None:
    """The mean of what is kept of the factors is not what is kept of the mean."""
    U = Implicit(torch.randn(6, 1, 7, 4), torch.randn(6, 1, 8, 4))
    state = low_rank(U, curvature_of("implicit", base, rank=rank), rank)
    small = reduced(U, rank, torch.Generator().manual_seed(0))
    Ubar = naive.about_mean(small.explicit().U, torch.full((6,), 6**-0.5))
    P = None
    if base is not None:
        P = state.P.to_power(1.0).rows(torch.eye(U.n))
    for g in (U.explicit().U.sum(1), torch.randn(U.n)):
        want = dense(Ubar @ Ubar.T, P, g, 0.3)
        assert naive.relative_error(state.at(0.3)(g), want) < 1e-9


# Whether it is centred


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, True),
        ({"base": None}, True),
        ({"blocks": "network", "base": None}, True),
        ({"centred": False}, False),
        ({"centred": True}, True),
        ({"fisher": "sampled"}, False),
        ({"fisher": "gauss-newton"}, False),
        ({"fisher": "sampled", "centred": False}, False),
        ({"combine": "independent", "base": None}, False),
        ({"form": "implicit", "combine": "independent", "base": None}, False),
    ],
    ids=str,
)
def test_what_centred_none_means(given: dict[str, Any], wanted: bool) -> None:
    assert seng.Curvature(**given).centres is wanted


@each_form
@each_base
def test_uncentred_samples_have_the_second_moment(
    form: str, base: float | None
) -> None:
    layer, x, target = nn.Linear(4, 3), torch.randn(7, 4), torch.randn(7, 3)
    one = One(layer, curvature=curvature_of(form, base, centred=False))
    u = one.samples(x, target)
    got = one.direction(x, target)
    M = naive.fisher(u)
    assert naive.relative_error(got, dense(M, one.P(), u.mean(0), 0.3)) < 1e-9


def test_one_block_for_the_network_is_centred_as_a_whole() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    x, target = torch.randn(7, 4), torch.randn(7, 2)
    u = naive.per_sample_gradients(model, x, target)
    for form in ("explicit", "merged"):
        net = copy.deepcopy(model)
        curvature = curvature_of(form, None, blocks="network")
        opt = seng.SENG(
            net, 1.0, momentum=0.0, damping=0.3, curvature=curvature
        )
        before = naive.flat(net.parameters()).detach().clone()
        naive.loss_of(net(x), target).backward()
        opt.step()
        got = before - naive.flat(net.parameters()).detach()
        want = dense(naive.covariance(u), None, u.mean(0), 0.3)
        assert naive.relative_error(got, want) < 1e-9


# Time first


METRICS: dict[str, Callable[..., Any]] = {
    "SENG": seng.SENG,
    "over λI": lambda *a, **g: seng.SENG(
        *a, curvature=seng.Curvature(base=None), **g
    ),
    "uncentred": lambda *a, **g: seng.SENG(*a, curvature=uncentred(), **g),
    "muon": lambda *a, **g: seng.SENG(*a, recipe="muon", **g),
    "KFAC": seng.KFAC,
}


class Stack(nn.Module):
    """Layers that do not look at other places of a sequence."""

    def __init__(self, time: int = 1) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Embedding(9, 4),
            nn.LayerNorm(4),
            nn.Linear(4, 6),
            nn.Tanh(),
            nn.Linear(6, 9),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        return self.layers(tokens)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("kind", [Stack, Transformer])
@pytest.mark.parametrize("sizes", [(7,), (3, 4)])
def test_time_first_is_batch_first(
    kind: Any, metric: str, sizes: tuple[int, ...]
) -> None:
    tokens = torch.randint(9, (7, 5))
    target = torch.randn(7, 5, 9)
    moved = []
    for sample_dim, time in ((0, 1), (1, 0), (0, 0)):
        torch.manual_seed(1)
        model = kind(time=time)
        before = naive.flat(model.parameters()).detach().clone()
        opt = METRICS[metric](model, 1.0, sample_dim=sample_dim, strict=True)
        for a, b in zip(tokens.split(sizes), target.split(sizes), strict=True):
            out = model(a if time else a.T)
            out = out if time else out.transpose(0, 1)
            (naive.loss_of(out, b) * len(a) / 7).backward()
        try:
            opt.step()
        except (RuntimeError, ValueError):
            assert (sample_dim, time) == (0, 0)
            continue
        moved.append(before - naive.flat(model.parameters()).detach())
    assert naive.relative_error(moved[1], moved[0]) < 1e-12
    if len(moved) > 2:  # time taken for samples
        assert naive.relative_error(moved[2], moved[0]) > 1e-3
