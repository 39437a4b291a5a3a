"""All layers at once: the block that `build` makes against a dense solve, in every precision, form and way of small work."""

import weakref
from contextlib import nullcontext
from dataclasses import replace

import naive
import pytest
import torch

import seng
from seng.gpu import replay, staging
from seng.gpu.replay import Task, directly, together
from seng.linalg import numerics
from seng.linalg.operators import Explicit, Merged
from seng.linalg.windows import Windows
from seng.metrics import job as jobs
from seng.metrics import refresh
from seng.metrics.block import factorize
from seng.metrics.job import PATIENCE, TOLERANCE, Job
from seng.metrics.plan import Dims, Plan, plan
from seng.metrics.refresh import build

LAM = 0.01  # of the largest eigenvalue


@pytest.fixture(params=["eigh", "range finder"])
def small_work(request, monkeypatch):
    monkeypatch.setattr(numerics, "one_by_one", lambda K: request.param == "eigh")


def graded(samples: int, n: int, decay: float, seed=0) -> torch.Tensor:
    """U (n, ϱ) whose singular values fall by `decay` from one to the next."""
    torch.manual_seed(seed)
    left, right = (
        torch.linalg.qr(torch.randn(n, samples)).Q,
        torch.linalg.qr(torch.randn(samples, samples)).Q,
    )
    return (left * decay ** torch.arange(samples)) @ right


def job(U, chosen: Plan, half=True, previous=None) -> Job:
    return Job(
        U,
        chosen,
        LAM,
        half,
        previous,
        lambda: torch.Generator().manual_seed(0),
        nullcontext(),
    )


def explicit(U: torch.Tensor) -> Explicit:
    return Explicit(U.float(), (1, U.shape[0], 1))


def merged(U, rank: int, otherwise=None) -> Plan:
    return Plan(
        Dims("layer", U.shape, 1, U.samples, None), "merged", rank, "", otherwise
    )


def error(block, U: torch.Tensor, g: torch.Tensor) -> float:
    """Of the direction, against the dense solve in float64."""
    M = U.double() @ U.double().T
    lam = LAM * float(torch.linalg.eigvalsh(M)[-1])
    d = block.solve(g.float(), LAM).double()
    return naive.relative_error(d, lam * naive.dense_direction(M, g.double(), lam))


@pytest.mark.parametrize("half", [True, False])
@pytest.mark.parametrize("decay", [0.7, 0.85, 1.0])
def test_as_many_directions_as_the_direction_needs(small_work, half, decay):
    Us = [graded(64, 300, decay, seed) for seed in range(3)]
    curvature = seng.Curvature(rank=None, decay=0)
    blocks = build(
        [job(explicit(U), merged(explicit(U), 48, "explicit"), half) for U in Us],
        curvature,
    )
    for U, block in zip(Us, blocks, strict=True):
        assert error(block, U, U.sum(1)) < TOLERANCE * 1.1
    ranks = [block.U.samples for block in blocks]
    assert ranks == [64] * 3 if decay == 1.0 else all(rank <= 48 for rank in ranks)


@pytest.mark.parametrize("half", [True, False])
def test_an_average_in_half_precision_is_that_of_the_matrices(small_work, half):
    curvature = seng.Curvature(rank=48, decay=0.7)
    Us = [graded(40, 300, 0.8, seed) for seed in range(3)]
    block, M = None, None
    for U in Us:
        (block,) = build(
            [job(explicit(U), merged(explicit(U), 48), half, block)], curvature
        )
        M = U @ U.T if M is None else 0.7 * M + 0.3 * U @ U.T
    values, vectors = torch.linalg.eigh(M)
    root = vectors * values.clamp_min(0).sqrt()
    assert block.U.samples < 120 and error(block, root, Us[-1].sum(1)) < 0.02


def test_wide_bases_of_steep_spectra(small_work):
    U = graded(64, 300, 0.9)
    (block,) = build(
        [job(explicit(U), merged(explicit(U), 60))], seng.Curvature(rank=60, decay=0.8)
    )
    assert block.U.samples == 60 and error(block, U, U.sum(1)) < 0.02


def test_factors_stay_where_a_basis_does_not_do(small_work):
    a, G = torch.randn(64, 5, 4, 4).float(), torch.randn(64, 6, 4, 4).float()
    U = Windows(G, a, (3, 3), (1, 1), (1, 1), (1, 1), 1)
    (block,) = build(
        [job(U, merged(U, 8, "implicit"), False)], seng.Curvature(rank=None, decay=0)
    )
    assert isinstance(block.U, Windows)


def test_layers_of_different_sizes_and_one_that_is_not_finite(small_work):
    good, other, bad = graded(20, 50, 0.9), graded(12, 30, 0.9), graded(20, 50, 0.9)
    bad[3, 4] = torch.nan
    none = torch.zeros(40, 0)
    jobs = [job(explicit(U), merged(explicit(U), 10)) for U in (good, bad, other, none)]
    blocks = build(jobs, seng.Curvature(rank=10, decay=0))
    assert (
        blocks[1] is None
        and blocks[3] is None
        and blocks[0].U.samples == blocks[2].U.samples == 10
    )
    zero = torch.zeros(30, 20)
    (block,) = build(
        [job(explicit(zero), merged(explicit(zero), 10))],
        seng.Curvature(rank=10, decay=0),
    )
    g = torch.randn(30).float()
    torch.testing.assert_close(block.solve(g, LAM), g)


def test_factorizing_together_is_factorizing_alone():
    blocks = build(
        [
            job(explicit(U), merged(explicit(U), 99), False)
            for U in (graded(9, 40, 0.8), graded(9, 40, 0.5))
        ],
        seng.Curvature(decay=0),
    )
    factorize([(block, 0.1 * (i + 1)) for i, block in enumerate(blocks)])
    for i, block in enumerate(blocks):
        lam = 0.1 * (i + 1) * block.top
        want = torch.linalg.inv(
            block.gram.double() + lam.double() * torch.eye(len(block.gram))
        )
        torch.testing.assert_close(block.core[2], want, rtol=1e-5, atol=1e-5)


def test_a_budget_turns_bases_into_factors():
    large = Dims("large", (1, 512, 4608), 16, 256, None, half=True, inputs=16 * 1024)
    (in_full,) = plan([replace(large, half=False)], seng.Curvature(rank=None, decay=0))
    assert in_full.otherwise == "explicit"  # where products take long
    (free,), (tight,) = (
        plan([large], seng.Curvature(rank=None, decay=0), budget)
        for budget in (None, 2**25)
    )
    assert free.form == "merged" and free.otherwise == "implicit"
    assert (
        tight.form == "implicit" and tight.bytes <= 2**25 and "to fit into" in tight.why
    )


def test_half_precision_is_for_the_basis_alone():
    U = graded(30, 200, 0.9)
    (block,) = build(
        [job(explicit(U), merged(explicit(U), 16))], seng.Curvature(rank=16, decay=0)
    )
    assert (
        isinstance(block.U, Merged)
        and block.U.Y.dtype == torch.float16
        and block.gram.dtype == torch.float32
    )


@pytest.mark.parametrize("size", [1e-12, 1.0, 1e12])
def test_a_basis_in_float32_is_averaged_with_one_in_half_precision(size):
    """As after a warm-up without autocast: whatever the size of the gradients, and it never stays broken."""
    curvature = seng.Curvature(rank=48, decay=0.7)
    Us = [size * graded(40, 300, 0.8, seed) for seed in range(2)]
    (before,) = build(
        [job(explicit(Us[0]), merged(explicit(Us[0]), 48), False)], curvature
    )
    (block,) = build(
        [job(explicit(Us[1]), merged(explicit(Us[1]), 48), True, before)], curvature
    )
    values, vectors = torch.linalg.eigh(0.7 * Us[0] @ Us[0].T + 0.3 * Us[1] @ Us[1].T)
    assert error(block, vectors * values.clamp_min(0).sqrt(), Us[1].sum(1)) < 0.02
    before.gram = before.gram * torch.nan
    (block,) = build(
        [job(explicit(Us[1]), merged(explicit(Us[1]), 48), True, before)], curvature
    )
    assert error(block, Us[1], Us[1].sum(1)) < 0.02


def test_columns_in_half_precision_keep_every_eigenvalue_in_range():
    U = graded(30, 200, 0.9)
    chosen = Plan(Dims("layer", (1, 200, 1), 1, 30, None), "explicit", 30, "")
    (block,) = build(
        [job(explicit(U), chosen)], seng.Curvature(form="explicit", rank=30)
    )
    directions = torch.stack([block.solve(e, 1e-5) for e in torch.eye(200).float()])
    values = torch.linalg.eigvalsh((directions + directions.T).double() / 2)
    assert values[0] > 0 and values[-1] < 1 + 1e-5


@pytest.mark.parametrize("rank", [4, 64])
def test_the_largest_eigenvalue_of_a_basis_is_not_the_sketch_s(rank):
    U = explicit(graded(16, 300, 0.9))
    curvature = seng.Curvature(
        form="merged", rank=rank, decay=0, sketch=seng.sketch.Rows(20)
    )
    (block,) = build([job(U, merged(U, rank), False)], curvature)
    torch.testing.assert_close(
        block.top, torch.linalg.eigvalsh(block.gram)[-1], rtol=1e-4, atol=0
    )


def test_grams_together_are_those_one_by_one(monkeypatch):
    monkeypatch.setattr(refresh, "LARGE", 2**15)
    Us = [
        explicit(graded(m, 70, 0.9, seed))
        for seed, m in enumerate((9, 9, 4, 4, 64, 64))
    ]  # the last ones are large
    Us.insert(4, Explicit(graded(4, 70, 0.9).double(), (1, 70, 1)))
    calls = []

    def run(function, *some):
        calls.append(len(some))
        return directly(function, *some)

    for U, K in zip(Us, refresh.grams(Us, run), strict=True):
        assert K.dtype == U.dtype
        torch.testing.assert_close(K, U.gram())
    assert calls == [2, 2, 1, 1, 1]


def test_tasks_together_are_those_one_by_one(monkeypatch):
    """Each gets its own results, in its own room; as many at once as LARGE allows, and none is held when it is done."""
    monkeypatch.setattr(replay, "LARGE", 1000)
    calls, got, alive = [], [], []

    def run(function, *args, into, **constants):
        calls.append(len(args))
        alive.append(sum(ref() is not None for ref in refs))
        return directly(function, *args, into=into, **constants)

    def scaled(X, *, by):
        return by * X, X.sum()

    Xs = [
        torch.full((size,), float(size), dtype=torch.float32)
        for size in (100, 100, 300, 40, 100)
    ]
    refs, room = [weakref.ref(X) for X in Xs], torch.zeros(40, dtype=torch.float32)
    tasks = [
        Task(
            scaled,
            (X,),
            {"by": i},
            lambda *found: got.append(found),
            nullcontext(),
            (room if i == 3 else None, None),
        )
        for i, X in enumerate(Xs)
    ]
    sizes = [len(X) for X in Xs]
    del Xs
    together(tasks, run)
    assert calls == [2, 1, 2] and alive == [5, 3, 2]
    for i, (size, (Y, total)) in enumerate(zip(sizes, got, strict=True)):
        assert (i * size == Y).all() and total == size**2 and (Y is room) == (i == 3)


def refreshed(U, previous, rank=16, otherwise="explicit", half=False):
    (block,) = build(
        [job(explicit(U), merged(explicit(U), rank, otherwise), half, previous)],
        seng.Curvature(rank=None, decay=0),
    )
    return block


def test_after_an_exact_form_it_is_not_asked_again_for_a_while(small_work):
    hard, easy = graded(64, 300, 1.0), graded(64, 300, 0.5)
    block = refreshed(hard, None)
    forms = []
    for _ in range(PATIENCE + 2):
        assert block.patience >= 0
        block = refreshed(easy, block)
        forms.append(block.U.samples)
    assert forms == [64] * PATIENCE + [8, 8]
    assert error(block, easy, easy.sum(1)) < TOLERANCE * 1.1


def test_as_many_directions_as_before_where_that_is_no_great_waste(small_work):
    many, some, few = (graded(64, 300, decay) for decay in (0.85, 0.75, 0.3))
    block = refreshed(many, None, rank=48)
    before = block.U.samples
    assert 16 < before < 64
    assert (
        refreshed(some, None, rank=48).U.samples < before
    )  # by itself it would be fewer
    assert refreshed(some, block, rank=48).U.samples == before
    assert refreshed(few, block, rank=48).U.samples == 8


def test_at_the_edge_a_form_stays(small_work, monkeypatch):
    """A layer that was exact becomes a basis only where that does clearly."""
    U = graded(64, 300, 0.85)
    basis = refreshed(U, None, rank=48)
    monkeypatch.setattr(jobs, "TOLERANCE", 1.5 * error(basis, U, U.sum(1)))
    assert refreshed(U, None, rank=basis.U.samples).U.samples == basis.U.samples
    exact = refreshed(graded(64, 300, 1.0), None, rank=basis.U.samples)
    exact.patience = 0
    assert refreshed(U, exact, rank=basis.U.samples).U.samples == 64


def test_no_basis_where_the_next_refresh_is_near():
    dims = Dims("layer", (1, 64, 576), 1024, 256, None)
    every_step, seldom = (
        plan([dims], seng.Curvature(rank=None, decay=0), None, every)[0]
        for every in (1, 200)
    )
    assert not every_step.asks and seldom.asks
    U = graded(64, 300, 0.5)
    chosen = Plan(
        Dims("layer", (1, 300, 1), 1, 64, None),
        "merged",
        16,
        "",
        "explicit",
        asks=False,
    )
    (block,) = build([job(explicit(U), chosen)], seng.Curvature(rank=None, decay=0))
    assert block.U.samples == 64 and error(block, U, U.sum(1)) < 2e-3


def test_an_average_that_needed_all_its_directions_is_not_looked_at_every_time(
    small_work, monkeypatch
):
    looks = []
    monkeypatch.setattr(
        refresh,
        "read",
        lambda numbers: looks.append(len(numbers)) or staging.read(numbers),
    )
    curvature = seng.Curvature(rank=12, decay=0.7)
    block, M, counts = None, None, []
    for seed in range(7):
        U = graded(40, 300, 0.95, seed)
        looks.clear()
        (block,) = build(
            [job(explicit(U), merged(explicit(U), 12), False, block)], curvature
        )
        counts.append(len(looks))
        M = U @ U.T if M is None else 0.7 * M + 0.3 * U @ U.T
        assert block.U.samples == 12
    assert counts == [1, 2, 1, 1, 1, 2, 1]
