"""The rows of the paper's table of complexity (ComStoCost, section 3.4), and beside them four operations that it leaves out.

A row has the table's formulae and our own. Ours counts what the library does: multiply-adds of matrix products and of
factorizations, and numbers moved by a choice of rows. Passes that only scale or add up what a product left are not counted.
The sizes are such that matrices are large enough for the products to run at the machine's rate, and that what only streams
through memory does not fit into a cache of 32 MiB.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction

from seng.lab.theory import operations_of_cost as op
from seng.lab.theory.operations_of_cost import Ready, Sizes
from seng.linalg.numerics import OVERSAMPLE

POWERS = {"²": 2, "³": 3}
LARGE = 100


@dataclass(frozen=True)
class Formula:
    """A sum of products of powers, written as the paper writes it: `ϱ²·n + 5/3·ϱ³`."""

    text: str

    def __call__(self, sizes: Sizes) -> float:
        return float(
            sum(
                math.prod(_factor(f, sizes) for f in term.split("·"))
                for term in self.text.split(" + ")
            )
        )


def _factor(text: str, sizes: Sizes) -> Fraction:
    power = POWERS.get(text[-1], 1)
    symbol = text if power == 1 else text[:-1]
    return Fraction(sizes.get(symbol, symbol)) ** power


@dataclass(frozen=True)
class Sweep:
    """One variable takes several values, and the others are held fixed."""

    symbol: str  # `ϱ`, or `n_G = n_A` where two go together
    values: tuple[int, ...]
    fixed: Sizes

    def sizes(self) -> Iterator[Sizes]:
        """Those of each value."""
        for value in self.values:
            yield self.fixed | dict.fromkeys(self.symbol.split(" = "), value)

    def smaller(self) -> Sweep:
        """Three sizes, with all that is large a quarter as large: for a look at the counts."""
        values = tuple(
            v // 4 if self.values[0] >= LARGE else v for v in self.values[:3]
        )
        return Sweep(
            self.symbol,
            values,
            {
                name: v // 4 if v >= LARGE else v
                for name, v in self.fixed.items()
            },
        )


@dataclass(frozen=True)
class Row:
    """One operation, what it should cost, and where it is measured."""

    name: str
    paper: (
        tuple[Formula, Formula | None] | None
    )  # cost and memory by the table; None where it has no such row
    ours: tuple[Formula, Formula]  # multiply-adds, and bytes
    prepare: Callable[[Sizes], Ready]
    sweeps: tuple[Sweep, ...]


def _row(
    name: str,
    paper: tuple[str, str | None] | None,
    ours: tuple[str, str],
    prepare: Callable[[Sizes], Ready],
    *sweeps: Sweep,
) -> Row:
    table = paper and (
        Formula(paper[0]),
        None if paper[1] is None else Formula(paper[1]),
    )
    return Row(
        name, table, (Formula(ours[0]), Formula(ours[1])), prepare, sweeps
    )


def _doubled(first: int, count: int) -> tuple[int, ...]:
    return tuple(first * 2**i for i in range(count))


def _sweep(symbol: str, values: tuple[int, ...], **fixed: int) -> Sweep:
    """With short words for the keys that Python cannot spell."""
    names = {
        "m": ("n_G", "n_A"),
        "zeta": ("ζ_G", "ζ_A"),
        "samples": ("ϱ",),
        "positions": ("κ",),
    }
    return Sweep(
        symbol,
        values,
        {
            name: value
            for key, value in fixed.items()
            for name in names.get(key, (key,))
        },
    )


SIDE, SKETCH = "n_G = n_A", "ζ_G = ζ_A"
STORED, FACTORS, CHOSEN = (
    "4·ϱ·n",
    "4·ϱ·r·n_G + 4·ϱ·r·n_A",
    "4·ϱ·r·ζ_G + 4·ϱ·r·ζ_A",
)
PAIRS = ("r²·ϱ²·n_A + r²·ϱ²·n_G", "n_A·r·ϱ + n_G·r·ϱ")
SKETCHED_PAIRS = ("r²·ϱ²·ζ_A + r²·ϱ²·ζ_G", "ζ_A·r·ϱ + ζ_G·r·ϱ")
SQUARED = (  # U in products of matrices
    _sweep("ϱ", (160, 224, 320, 448, 640), n=15_000),
    _sweep("n", _doubled(15_000, 4), samples=160),
)
STREAMED = (  # U from 64 MB on
    _sweep("ϱ", _doubled(64, 4), n=250_000),
    _sweep("n", _doubled(250_000, 4), samples=64),
)
ROWS = (
    _row(
        "low-rank direction (8)",
        ("ϱ³ + ϱ²·n", "ϱ·n"),
        ("ϱ²·n + 5/3·ϱ³ + 2·ϱ·n + ϱ²", "4·ϱ·n + 12·ϱ²"),
        op.low_rank,
        *SQUARED,
    ),
    _row(
        "original LS (10)",
        ("ϱ²·n", "ϱ·n"),
        ("ϱ²·n + 5/3·ϱ³ + ϱ·n + ϱ²", "4·ϱ·n + 12·ϱ²"),
        op.least_squares,
        *SQUARED,
    ),
    _row(
        "sketchy LS (11)",
        ("ϱ²·q", "ϱ·n"),
        ("ϱ²·q + 5/3·ϱ³ + ϱ·q + ϱ² + q", "4·ϱ·n + 4·ϱ·q + 12·ϱ²"),
        lambda s: op.least_squares(s, sketched=True),
        _sweep("ϱ", (224, 320, 448, 640), n=60_000, q=30_000),
        _sweep("q", _doubled(15_000, 4), n=240_000, samples=160),
        _sweep("n", _doubled(30_000, 4), q=15_000, samples=160),
        _sweep(
            "q", _doubled(64, 4), n=60_000, samples=32
        ),  # as one would use it: too short a time for a law
    ),
    _row(
        "(λI + K)⁻¹ of (8)",
        ("ϱ³", None),
        ("5/3·ϱ³", "8·ϱ²"),
        op.inverted,
        _sweep("ϱ", (1000, 1400, 2000, 2800)),
    ),
    _row(
        "Uᵀz",
        ("ϱ·n", "ϱ·n"),
        ("ϱ·n", STORED),
        lambda s: op.transposed(op.explicit(s)),
        *STREAMED,
    ),
    _row(
        "Uᵀz by factors (18)",
        ("n_A·n_G·ϱ·r", PAIRS[1]),
        ("n_A·n_G·ϱ·r", FACTORS),
        lambda s: op.transposed(op.factors(s)),
        _sweep("ϱ", _doubled(32, 4), m=1000, r=8),
        _sweep("r", _doubled(4, 4), m=1000, samples=64),
        _sweep(SIDE, (1000, 1400, 2000, 2800), samples=64, r=8),
    ),
    _row(
        "Uᵀz, randomized (19)",
        ("ζ_A·ζ_G·ϱ·r", SKETCHED_PAIRS[1]),
        ("ζ_A·ζ_G·ϱ·r + ζ_G·n_A + ζ_A·ζ_G", CHOSEN),
        op.sketched_transposed,
        _sweep("ϱ", _doubled(128, 4), m=1000, r=8, zeta=500),
        _sweep("r", _doubled(8, 4), m=1000, samples=128, zeta=500),
        _sweep(SKETCH, (1000, 1400, 2000, 2800), samples=128, r=8, m=3000),
        _sweep(SIDE, (600, 800, 1000, 1400), samples=512, r=8, zeta=500),
    ),
    _row(
        "UᵀU",
        ("ϱ²·n", "ϱ·n"),
        ("ϱ²·n", STORED),
        lambda s: op.gram(op.explicit(s)),
        *SQUARED,
    ),
    _row(
        "UᵀU by factors (20)",
        PAIRS,
        (PAIRS[0], FACTORS),
        lambda s: op.gram(op.factors(s)),
        _sweep("ϱ", (128, 192, 256, 384), m=1000, r=4),
        _sweep("r", (6, 8, 12, 16), m=1000, samples=128),
        _sweep(SIDE, _doubled(1000, 4), samples=64, r=4),
    ),
    _row(
        "UᵀU, randomized (21)",
        SKETCHED_PAIRS,
        (SKETCHED_PAIRS[0], CHOSEN),
        lambda s: op.gram(op.sketched_factors(s)),
        _sweep("ϱ", (64, 96, 128, 192, 256), m=1400, zeta=1000, r=4),
        _sweep("r", (4, 6, 8, 12, 16), m=1400, zeta=1000, samples=64),
        _sweep(SKETCH, _doubled(500, 4), m=5000, samples=64, r=4),
        _sweep(SIDE, (500, 700, 1000, 1400), zeta=350, samples=128, r=4),
    ),
    _row(
        "Uc",
        ("ϱ·n", "ϱ·n"),
        ("ϱ·n", STORED),
        lambda s: op.combined(op.explicit(s)),
        *STREAMED,
    ),
    _row(
        "Uc by factors (22)",
        ("n_A·n_G·r·ϱ", PAIRS[1]),
        ("n_A·n_G·r·ϱ", FACTORS),
        lambda s: op.combined(op.factors(s)),
        _sweep("ϱ", _doubled(32, 4), m=1000, r=8),
        _sweep("r", _doubled(4, 4), m=1000, samples=64),
        _sweep(SIDE, (1000, 1400, 2000, 2800), samples=64, r=8),
    ),
    _row(
        "Uc, independent (23)",
        ("n_A·n_G·r", PAIRS[1]),
        ("n_A·n_G·r + ϱ·r·n_G + ϱ·r·n_A", FACTORS),
        lambda s: op.combined(op.independent(s)),
        _sweep("ϱ", _doubled(1_000, 4), m=250, r=32),
        _sweep("ϱ", _doubled(2, 4), m=1000, r=64),
        _sweep("r", _doubled(128, 4), m=1000, samples=4),
        _sweep(SIDE, (1000, 1400, 2000, 2800), samples=4, r=256),
    ),
    _row(
        "U from Ĝ_i, Â_i (4)",
        None,
        ("ϱ·κ·n_G·n_A", "4·ϱ·n_G·n_A"),
        op.formed,
        _sweep("ϱ", _doubled(8, 4), m=250, positions=250),
        _sweep("κ", _doubled(400, 4), m=250, samples=8),
        _sweep(SIDE, (250, 350, 500, 700), samples=8, positions=500),
    ),
    _row(
        "G_i, A_i of rank r (15)",
        None,
        ("6·ϱ·κ·n_G·w + ϱ·κ·w·r + ϱ·κ·r·n_G + ϱ·κ·r·n_A", FACTORS),
        op.reduction,
        _sweep(
            "ϱ", _doubled(8, 4), m=180, positions=180, r=8, w=8 + OVERSAMPLE
        ),
        _sweep("κ", _doubled(250, 4), m=250, samples=4, r=8, w=8 + OVERSAMPLE),
        _sweep(
            SIDE,
            _doubled(250, 4),
            samples=4,
            positions=250,
            r=8,
            w=8 + OVERSAMPLE,
        ),
    ),
    _row(
        "ΩU of q rows (14)",
        None,
        ("ϱ·q", "4·ϱ·q"),
        op.chosen,
        _sweep("ϱ", (64, 96, 128, 192, 256), n=500_000, q=7_500),
        _sweep("q", _doubled(3_750, 4), n=500_000, samples=128),
    ),
    _row(
        "merged Uᵀg and Uc",
        None,
        ("2·k·n", "4·k·n + 4"),
        op.merged,
        _sweep("k", _doubled(32, 4), n=500_000),
        _sweep("n", _doubled(500_000, 4), k=32),
    ),
)
