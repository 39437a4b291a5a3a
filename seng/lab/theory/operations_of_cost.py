"""The library's operations behind the rows of the table of costs: what to call, the bytes held, the count and the time.

Everything is float32, as networks are trained; the ϱ × ϱ system is solved in float64 all the same, as the library does.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from seng.linalg.implicit import Implicit, Independent
from seng.linalg.numerics import inverse, reduced
from seng.linalg.operators import Explicit, Merged, Operator
from seng.linalg.sketch import Identity, KroneckerRows, Omega, Rows
from seng.metrics.woodbury import LowRankSolver, LowRankState, inverses

Sizes = dict[str, int]  # by the paper's symbol
Ready = tuple[
    Callable[[], Any], int
]  # the operation, and the bytes of what it works on

DTYPE = torch.float32
DAMPING = 1.0
LONG = 50e-3  # seconds, after which a cold cache no longer matters
PERIOD = 65521  # a prime, so that columns of repeated random numbers differ


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """Random numbers, repeated: a matrix of half a gigabyte is there at once."""
    some = torch.randn(
        PERIOD, generator=torch.Generator().manual_seed(seed), dtype=DTYPE
    )
    size = math.prod(shape)
    return some.repeat(-(-size // PERIOD))[:size].view(shape)


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _bytes(*held: Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in held)


def explicit(s: Sizes) -> Explicit:
    """U (n, ϱ), laid out as the library forms it, sample by sample."""
    return Explicit(numbers(s["ϱ"], s["n"]).T, (1, s["n"], 1))


def factors(s: Sizes) -> Implicit:
    """G_i (n_G, r) and A_i (n_A, r)."""
    return Implicit(
        numbers(s["ϱ"], 1, s["n_G"], s["r"]),
        numbers(s["ϱ"], 1, s["n_A"], s["r"], seed=1),
    )


def independent(s: Sizes) -> Independent:
    """The same with the paper's cheap Uc."""
    return Independent(*factors(s).tensors())


def _positions(s: Sizes) -> Implicit:
    """Ĝ_i (n_G, κ) and Â_i (n_A, κ), before any reduction."""
    return factors(s | {"r": s["κ"]})


def _kronecker(s: Sizes, U: Operator) -> Omega:
    return KroneckerRows(s["ζ_G"], s["ζ_A"]).draw(U, _seeded())


def sketched_factors(s: Sizes) -> Operator:
    """ΩU of the implicit form: the chosen rows of G_i and of A_i (eq. 17)."""
    U = factors(s)
    return _kronecker(s, U).of(U)


def transposed(U: Operator) -> Ready:
    """Uᵀz."""
    z = numbers(U.n)
    return lambda: U.rmv(z), U.bytes


def gram(U: Operator) -> Ready:
    """UᵀU."""
    return U.gram, U.bytes


def combined(U: Operator) -> Ready:
    """Uc."""
    c = numbers(U.samples)
    return lambda: U.mv(c), U.bytes


def sketched_transposed(s: Sizes) -> Ready:
    """Ξᵀ(Ωz), the choice of the entries of z included (eq. 19)."""
    U, z = factors(s), numbers(s["n_G"] * s["n_A"])
    omega = _kronecker(s, U)
    Xi = omega.of(U)
    return lambda: Xi.rmv(omega(z)), Xi.bytes


def _state(U: Operator, omega: Omega) -> tuple[LowRankState, int]:
    """A state, and the bytes of U, of ΩU, of the Gram matrix and of (λI + K)⁻¹."""
    K = torch.eye(U.samples, dtype=DTYPE)
    out = LowRankState(U, omega, K, K[0, 0], relative=False)
    Xi = [] if isinstance(omega, Identity) else out.Xi.tensors()
    return out, _bytes(*U.tensors(), *Xi, K, out.at(DAMPING).inverse)


def _factorized(state: LowRankState) -> LowRankSolver:
    """The solver, with K and (λI + K)⁻¹ made anew."""
    K, lam = state.Xi.gram(), torch.tensor([DAMPING], dtype=DTYPE)
    lams, cores = inverses(K[None], lam, state.top[None], relative=False)
    return state.solver(lams[0], cores[0])


def low_rank(s: Sizes) -> Ready:
    """λd = g − Ub (eqs. 8 and 9)."""
    (state, held), g = _state(explicit(s), Identity()), numbers(s["n"])
    return lambda: _factorized(state)(g), held


def least_squares(s: Sizes, sketched: bool = False) -> Ready:
    """b (eq. 9), or b̂ from ΩU and Ωg (eq. 12)."""
    U, g = explicit(s), numbers(s["n"])
    state, held = _state(
        U, Rows(s["q"]).draw(U, _seeded()) if sketched else Identity()
    )

    def solve() -> Tensor:
        solver = _factorized(state)
        return solver.coefficients(solver.project(g))

    return solve, held


def inverted(s: Sizes) -> Ready:
    """(λI + K)⁻¹."""
    K = torch.eye(s["ϱ"], dtype=torch.float64) + 1 / s["ϱ"]
    return lambda: inverse(K), _bytes(K)


def formed(s: Sizes) -> Ready:
    """Every u_i = vec(Ĝ_i Â_iᵀ) (eqs. 3 and 4); held is what comes out."""
    U = _positions(s)
    return U.explicit, U.explicit().bytes


def reduction(s: Sizes) -> Ready:
    """Factors of rank r by a randomized partial SVD (eq. 15); held is what comes out."""
    U, generator = _positions(s), _seeded()
    return lambda: reduced(U, s["r"], generator), reduced(
        U, s["r"], generator
    ).bytes


def chosen(s: Sizes) -> Ready:
    """ΩU of q rows (eqs. 11 and 14); held is what comes out."""
    U = explicit(s)
    omega = Rows(s["q"]).draw(U, _seeded())
    return lambda: omega.of(U), omega.of(U).bytes


def merged(s: Sizes) -> Ready:
    """Both products of a step in the merged form, ours: Uᵀg and Uc of k combined columns."""
    U, g = Merged.of(numbers(s["k"], s["n"]), (1, s["n"], 1)), numbers(s["n"])
    return lambda: U.mv(U.rmv(g)), U.bytes


def multiply_adds(operation: Callable[[], Any]) -> float:
    """Those of an operation's products and factorizations, and one for each number that a choice of rows moves."""
    aten = torch.ops.aten
    more = {  # what the counter does not know, in its own unit: two for a multiply-add
        aten.mv: lambda A, x, **_: 2 * math.prod(A),
        aten.index: lambda *_, out_shape, **__: 2 * math.prod(out_shape),
        aten.linalg_cholesky_ex: lambda A, *_, **__: math.prod(A) * A[-1] / 3,
        aten.linalg_solve_triangular: lambda A, B, **_: math.prod(B) * A[-1],
    }
    with FlopCounterMode(display=False, custom_mapping=more) as counter:
        operation()
    return float(counter.get_total_flops()) / 2


def times(
    operations: Sequence[Callable[[], Any]], visits: int, burst: float
) -> list[float]:
    """The least seconds of each, in turns, so that a slow drift of the machine meets all of them.

    A visit goes on for `burst` seconds, and unless a call takes longer than LONG, for two calls: the first brings back what the
    others have driven out of the caches. The seconds are the thread's own.
    """
    least = [math.inf] * len(operations)
    for _ in range(visits):
        for i, operation in enumerate(operations):
            calls, spent = 0, 0.0
            while spent < burst or (calls < 2 and spent < LONG):
                start = time.thread_time()
                operation()
                taken = time.thread_time() - start
                least[i], calls, spent = (
                    min(least[i], taken),
                    calls + 1,
                    spent + taken,
                )
    return least


@contextmanager
def one_thread() -> Iterator[None]:
    """Products on one thread, whose own time is measured."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
