"""Every operator against its dense matrix, and the two low-rank reductions."""

from itertools import pairwise

import naive
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from seng.linalg import implicit as windowed
from seng.linalg import numerics, operators
from seng.linalg.implicit import Implicit, Independent, Windows
from seng.linalg.lookup import Lookup
from seng.linalg.operators import Explicit, Merged, added, stacked


def implicit(samples=5, h=1, n_G=4, n_A=3, r=2) -> Implicit:
    return Implicit(
        torch.randn(samples, h, n_G, r), torch.randn(samples, h, n_A, r)
    )


def lookup(samples=5, vocabulary=6, width=3, kappa=4) -> Lookup:
    return Lookup(
        torch.randint(vocabulary, (samples, kappa)),
        torch.randn(samples, kappa, width),
        vocabulary,
    )


def merged(n=12, k=3) -> Merged:
    return Merged(torch.randn(k, n), torch.rand(()), (1, 4, 3))


def windows(samples=5, bias=0, stride=(2, 1), dilation=(1, 2)) -> Windows:
    a = torch.randn(samples, 2, 6, 5)
    out = torch.nn.functional.conv2d(
        a,
        torch.randn(3, 2, 3, 2),
        stride=stride,
        padding=(1, 2),
        dilation=dilation,
    )
    return Windows(
        torch.randn_like(out),
        a,
        (3, 2),
        stride,
        (2, 2, 1, 1),
        dilation,
        bias,
        0.7,
    )


def many_channels(space, kernel, padding, dilation, bias=0) -> Windows:
    """So many that the input is moved, not cut into windows; positions enough that columns are formed at all."""
    a = torch.randn(3, windowed.MANY, *space)
    out = getattr(torch.nn.functional, f"conv{len(space)}d")(
        a,
        torch.randn(2, windowed.MANY, *kernel),
        padding=padding,
        dilation=dilation,
    )
    return Windows(
        torch.randn_like(out),
        a,
        kernel,
        (1,) * len(space),
        tuple(side for side in reversed(padding) for _ in range(2)),
        dilation,
        bias,
        0.7,
    )


def dense(U) -> torch.Tensor:
    """U entry by entry, from its definition."""
    if isinstance(
        U, Windows
    ):  # the gradient of ⟨G_i, conv(a_i)⟩, sample by sample
        W, b = (
            torch.zeros(
                U.G.shape[1], U.a.shape[1], *U.kernel, requires_grad=True
            ),
            torch.zeros(U.G.shape[1], requires_grad=True),
        )
        conv = getattr(torch.nn.functional, f"conv{len(U.kernel)}d")
        a = torch.nn.functional.pad(U.a, U.padding)
        out = U.scale * conv(a, W, b, U.stride, 0, U.dilation)
        pairs = [
            torch.autograd.grad(
                (out[i] * U.G[i]).sum(), (W, b), retain_graph=True
            )
            for i in range(U.samples)
        ]
        return torch.stack(
            [
                torch.cat(
                    [w.flatten(1), v[:, None]][: 1 + U.bias], 1
                ).flatten()
                for w, v in pairs
            ],
            1,
        )
    if isinstance(U, Explicit):
        return U.U
    if isinstance(U, Merged):
        return U.Y.T.to(U.dtype) * U.scale
    columns = []
    for i in range(U.samples):
        u = torch.zeros(U.shape)
        if isinstance(U, Lookup):
            for token, g in zip(U.tokens[i], U.G[i], strict=True):
                u[0, token] += g
        else:
            for h in range(U.shape[0]):
                u[h] = U.G[i, h] @ U.A[i, h].T
        columns.append(u.flatten())
    return torch.stack(columns, 1)


KINDS = {
    "explicit": lambda: Explicit(torch.randn(12, 5), (1, 4, 3)),
    "implicit": implicit,
    "implicit-groups": lambda: implicit(h=3),
    "implicit-deep": lambda: implicit(r=7),
    "implicit-one-sample": lambda: implicit(samples=1),
    "lookup": lookup,
    "merged": merged,
    "windows": windows,
    "windows-bias": lambda: windows(bias=1, stride=(1, 1), dilation=(1, 1)),
    "moved-1d": lambda: many_channels((12,), (3,), (0,), (2,)),
    "moved-2d": lambda: many_channels((9, 7), (3, 2), (1, 1), (1, 1), bias=1),
    "moved-2d-wide": lambda: many_channels((8, 9), (2, 3), (0, 2), (2, 1)),
    "moved-3d": lambda: many_channels(
        (4, 5, 3), (2, 3, 1), (1, 0, 0), (1, 2, 1)
    ),
}


@pytest.fixture(params=KINDS, ids=list(KINDS))
def U(request):
    return KINDS[request.param]()


@pytest.fixture(params=[operators.CHUNK, 16], ids=["whole", "slabs"])
def chunk(request, monkeypatch):
    monkeypatch.setattr(operators, "CHUNK", request.param)


def test_products_equal_the_dense_ones(U, chunk):
    D = dense(U)
    z, c, V = (
        torch.randn(U.n),
        torch.randn(U.samples),
        torch.randn(U.samples, 3),
    )
    torch.testing.assert_close(U.rmv(z), D.T @ z)
    torch.testing.assert_close(U.mv(c), D @ c)
    torch.testing.assert_close(U.gram(), D.T @ D)
    torch.testing.assert_close(U.combine(V), (D @ V).T)
    torch.testing.assert_close(U.row_norms(), D.square().sum(1))
    torch.testing.assert_close(U.explicit().U, D)


def test_scale_first_and_precision(U):
    D = dense(U)
    torch.testing.assert_close(dense(U.scaled(2.5)), 2.5 * D)
    torch.testing.assert_close(dense(U.first(1)), D[:, :1])
    assert all(
        t.dtype == torch.float32
        for t in U.to(torch.float32).tensors()
        if t.is_floating_point()
    )
    assert U.bytes == sum(t.numel() * t.element_size() for t in U.tensors())


def test_both_contractions_of_the_gram_agree(chunk):
    for U in (
        implicit(),
        implicit(h=3, r=5),
        implicit(samples=9, n_G=2, n_A=11, r=1),
    ):
        torch.testing.assert_close(
            U.gram_by_factors(), operators.Operator.gram(U)
        )


@pytest.mark.parametrize(
    ("U", "V"),
    [
        (implicit, lambda: implicit(r=3)),
        (lambda: lookup(), lambda: lookup(kappa=2)),
        (lambda: implicit(n_G=6), lookup),
        (lookup, lambda: implicit(n_G=6)),
        (lambda: Explicit(torch.randn(12, 5), (1, 4, 3)), implicit),
        (
            lambda: lookup(vocabulary=4),
            lambda: Explicit(torch.randn(12, 5), (1, 4, 3)),
        ),
    ],
)
def test_sum_and_stack(U, V):
    U, V = U(), V()
    torch.testing.assert_close(dense(added(U, V)), dense(U) + dense(V))
    torch.testing.assert_close(
        dense(stacked([U, V, U])), torch.cat([dense(U), dense(V), dense(U)], 1)
    )


def test_independent_is_the_product_of_weighted_means_and_zero_at_zero():
    U = implicit(h=2)
    V = Independent(U.G, U.A)
    c = torch.randn(5)
    root = c.abs().sqrt()
    G = sum(root[i] * U.G[i] for i in range(5))
    A = sum(c[i] / root.sum() * U.A[i] for i in range(5))
    torch.testing.assert_close(V.mv(c), (G @ A.mT).flatten())
    assert torch.equal(V.mv(torch.zeros(5)), torch.zeros(U.n))
    one = implicit(samples=1)
    c = torch.tensor([-0.7])  # a single sample leaves nothing to assume
    torch.testing.assert_close(Independent(one.G, one.A).mv(c), one.mv(c))


@settings(deadline=None, max_examples=40)
@given(
    st.integers(1, 6),
    st.integers(1, 3),
    st.integers(1, 5),
    st.integers(1, 5),
    st.integers(1, 9),
    st.integers(0, 10**6),
)
def test_reduced_factors_are_exact_where_the_rank_reaches_a_side(
    samples, h, n_G, n_A, kappa, seed
):
    torch.manual_seed(seed)
    U = implicit(samples, h, n_G, n_A, kappa)
    rank = min(n_G, n_A)
    V = numerics.reduced(U, rank, torch.Generator().manual_seed(seed))
    assert V.kappa <= kappa
    torch.testing.assert_close(dense(V), dense(U))


def test_reduced_error_falls_with_the_rank_and_vanishes_at_kappa():
    U = implicit(samples=6, n_G=12, n_A=15, r=10)
    decaying = U.G * 0.6 ** torch.arange(10.0)
    U = Implicit(decaying, U.A)
    errors = [
        naive.relative_error(
            dense(numerics.reduced(U, r, torch.Generator().manual_seed(0))),
            dense(U),
        )
        for r in range(1, 11)
    ]
    assert all(later < earlier for earlier, later in pairwise(errors))
    assert errors[-1] == 0


def test_partial_svd_is_nearly_the_best_of_its_rank():
    U = Implicit(
        torch.randn(4, 1, 8, 20) * 0.5 ** torch.arange(20.0),
        torch.eye(20).expand(4, 1, 20, 20).clone(),
    )
    V = numerics.reduced(U, 3, torch.Generator().manual_seed(1))
    for i in range(
        4
    ):  # with Â = I, u_i = Ĝ_i, whose best approximation of rank 3 is its truncated SVD
        tail = torch.linalg.svdvals(U.G[i, 0])[3:].norm()
        assert (dense(V)[:, i] - dense(U)[:, i]).norm() <= 1.01 * tail


def test_signs_of_the_factors_follow_the_convention():
    U = implicit(samples=3, n_G=6, n_A=7, r=9)
    V = numerics.reduced(U, 4, torch.Generator().manual_seed(0))
    W = numerics.reduced(U, 4, torch.Generator().manual_seed(5))
    torch.testing.assert_close(
        V.G, W.G, rtol=1e-4, atol=1e-4
    )  # another test matrix, the same factors: signs included


@pytest.mark.parametrize("kernel", [1, 3])
def test_half_precision_factors_lose_nothing_in_combinations_and_columns(
    kernel,
):
    a, G = (
        torch.randn(6, 8, 5, 5).bfloat16(),
        torch.randn(6, 16, 5, 5).bfloat16(),
    )
    U = Windows(G, a, (kernel, kernel), (1, 1), (kernel // 2,) * 4, (1, 1), 1)
    V = torch.randn(6, 3).float()
    want = dense(Windows(G.double(), a.double(), *list(vars(U).values())[2:]))
    assert (
        naive.relative_error(U.combine(V).double(), (want @ V.double()).T)
        < 1e-6
    )
    assert naive.relative_error(U.explicit().U.double(), want) < 1e-6
    assert (
        naive.relative_error(U.mv(V[:, 0]).double(), want @ V[:, 0].double())
        < 1e-6
    )


def grams(decay: float, m=40, n=300) -> torch.Tensor:
    U = torch.randn(3, n, m) * decay ** torch.arange(m)
    return U.mT @ U


@pytest.fixture(params=["eigh", "range finder"])
def small_work(request, monkeypatch):
    """Both ways of `spectrum` and `top`; a GPU takes the second above 32 × 32."""
    monkeypatch.setattr(
        numerics, "one_by_one", lambda K: request.param == "eigh"
    )


def test_spectrum_gives_orthonormal_leading_directions(small_work):
    K = grams(0.7)
    values, V = numerics.spectrum(
        K, 6, numerics.start(K, 6, torch.Generator().manual_seed(0))
    )
    exact, W = torch.linalg.eigh(K)
    torch.testing.assert_close(
        values, exact.flip(-1)[:, :6], rtol=0.01, atol=0
    )
    torch.testing.assert_close(V.mT @ V, torch.eye(6).expand(3, 6, 6))
    leading = W.flip(-1)[..., :6]
    torch.testing.assert_close(
        V @ V.mT, leading @ leading.mT, rtol=0, atol=0.1
    )
    torch.testing.assert_close(
        numerics.top(K), exact[:, -1], rtol=1e-3, atol=0
    )


@pytest.mark.parametrize("decay", [1.0, 0.99])
def test_what_spectrum_keeps_is_nearly_the_most_there_is(small_work, decay):
    K = grams(decay)
    _, V = numerics.spectrum(
        K, 8, numerics.start(K, 8, torch.Generator().manual_seed(0))
    )
    kept = (V.mT @ K @ V).diagonal(dim1=1, dim2=2).sum(1)
    most = torch.linalg.eigvalsh(K)[:, -8:].sum(1)
    assert (kept <= most * (1 + 1e-9)).all() and (kept > 0.97 * most).all()


def test_small_eigenvalues_are_not_lost_beside_large_ones(small_work):
    K = grams(0.8)  # over more than seven orders of magnitude
    _, V = numerics.spectrum(
        K, 30, numerics.start(K, 30, torch.Generator().manual_seed(0))
    )
    left = (torch.eye(40) - V @ V.mT) @ K @ (torch.eye(40) - V @ V.mT)
    assert (
        torch.linalg.eigvalsh(left)[:, -1]
        < 20 * torch.linalg.eigvalsh(K)[:, 9]
    ).all()


def test_spectrum_of_singular_and_empty_grams(small_work):
    U = torch.randn(20, 2) @ torch.randn(2, 40)
    K = torch.stack([U.T @ U, torch.zeros(40, 40)])
    values, V = numerics.spectrum(
        K, 5, numerics.start(K, 5, torch.Generator().manual_seed(0))
    )
    assert (
        V.isfinite().all()
        and (values[0, 2:] < 1e-9 * values[0, 0]).all()
        and (values[1] == 0).all()
    )
    Y = V[0].T @ U.T
    torch.testing.assert_close(Y.T @ Y, U @ U.T)
    torch.testing.assert_close(
        numerics.top(K), torch.linalg.eigvalsh(K)[:, -1]
    )


def test_a_basis_in_half_precision_rounds_each_direction_alike():
    Y = (
        torch.randn(6, 500) * 1e-20 * torch.logspace(2, 0, 6)[:, None]
    )  # two orders of magnitude matter; see NEGLIGIBLE
    U = Merged.of(Y.float(), (1, 50, 10), half=True)
    assert U.Y.dtype == torch.float16 and U.dtype == torch.float32
    for i, row in enumerate(dense(U).T.double()):
        assert naive.relative_error(row, Y[i]) < 3e-4
    torch.testing.assert_close(
        U.gram().double(),
        dense(U).double().T @ dense(U).double(),
        rtol=1e-5,
        atol=0,
    )
    assert (
        Merged.of(torch.zeros(2, 8), (1, 4, 2), half=True).gram().eq(0).all()
    )


def test_an_inverse_takes_jitter_where_it_must_and_says_when_it_fails():
    S = torch.eye(4)
    assert torch.equal(numerics.inverse(S), S)
    S = torch.ones(4, 4) - 1e-10 * torch.eye(
        4
    )  # slightly indefinite: jitter mends it
    assert torch.linalg.cholesky_ex(S).info != 0
    jittered = torch.linalg.inv(numerics.inverse(S))
    torch.testing.assert_close(jittered, S, rtol=1e-3, atol=1e-3)
    assert numerics.inverse(-torch.eye(4)).isnan().all()


def test_eigh_of_numbers_that_are_not_finite_does_not_raise():
    values, vectors = numerics.eigh(
        torch.tensor([[1.0, torch.inf], [torch.inf, 1.0]])
    )
    assert values.isnan().all() and vectors.isnan().all()


def test_eigh_of_graded_float32_grams_is_finite():
    """In float32, about one in eight of these fails, and some are nan without an error."""
    for seed in range(40):
        torch.manual_seed(seed)
        Y = (
            torch.randn(200, 64) * torch.logspace(0, -30 + seed % 25, 64)
        ).float()
        values, V = numerics.eigh(Y.T @ Y)
        assert (
            values.isfinite().all()
            and ((V.T @ V) - torch.eye(64)).abs().max() < 1e-5
        )
