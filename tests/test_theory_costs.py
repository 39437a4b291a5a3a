"""The study of costs: bytes exactly, counts by exponents written here by hand, and its verdicts on made-up times.

No test looks at a clock: times belong to the full study, on a quiet machine.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from matplotlib.figure import Figure

from seng.lab.theory import operations_of_cost
from seng.lab.theory.costs import STUDY, claims_of, draw, remarks_of
from seng.lab.theory.lines_of_cost import (
    THRESHOLD,
    TOLERANCE,
    Line,
    exponent,
    judged,
    measure,
)
from seng.lab.theory.operations_of_cost import multiply_adds, one_thread, times
from seng.lab.theory.rows_of_cost import ROWS, Formula
from seng.lab.theory.study import Outcome
from seng.linalg.implicit import Implicit

SIDE, SKETCH = "n_G = n_A", "ζ_G = ζ_A"
EXPONENTS = {  # of cost and of bytes, by hand from what each operation does; None: a sum of which no term leads
    "low-rank direction (8)": {"ϱ": (2, 1), "n": (1, 1)},
    "original LS (10)": {"ϱ": (2, 1), "n": (1, 1)},
    "sketchy LS (11)": {"ϱ": (2, 1), "q": (1, None), "n": (0, None)},
    "(λI + K)⁻¹ of (8)": {"ϱ": (3, 2)},
    "Uᵀz": {"ϱ": (1, 1), "n": (1, 1)},
    "Uᵀz by factors (18)": {"ϱ": (1, 1), "r": (1, 1), SIDE: (2, 1)},
    "Uᵀz, randomized (19)": {
        "ϱ": (1, 1),
        "r": (1, 1),
        SKETCH: (2, 1),
        SIDE: (0, 0),
    },
    "UᵀU": {"ϱ": (2, 1), "n": (1, 1)},
    "UᵀU by factors (20)": {"ϱ": (2, 1), "r": (2, 1), SIDE: (1, 1)},
    "UᵀU, randomized (21)": {
        "ϱ": (2, 1),
        "r": (2, 1),
        SKETCH: (1, 1),
        SIDE: (0, 0),
    },
    "Uc": {"ϱ": (1, 1), "n": (1, 1)},
    "Uc by factors (22)": {"ϱ": (1, 1), "r": (1, 1), SIDE: (2, 1)},
    "Uc, independent (23)": {"ϱ": (1, 1), "r": (1, 1), SIDE: (2, 1)},
    "U from Ĝ_i, Â_i (4)": {"ϱ": (1, 1), "κ": (1, 0), SIDE: (2, 2)},
    "G_i, A_i of rank r (15)": {"ϱ": (1, 1), "κ": (1, 0), SIDE: (1, 1)},
    "ΩU of q rows (14)": {"ϱ": (1, 1), "q": (1, 1)},
    "merged Uᵀg and Uc": {"k": (1, 1), "n": (1, 1)},
}
FEW = {
    "sketchy LS (11)": "q",
    "Uc, independent (23)": "ϱ",
}  # a second range of these is too small for a term to lead


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    return STUDY.run(lambda text: None, True)


@pytest.fixture(scope="module")
def lines(outcome: Outcome) -> list[Line]:
    return [Line(**line) for line in outcome.numbers["lines"]]


def test_every_claim_of_a_quick_run_holds(outcome: Outcome) -> None:
    assert len(outcome.claims) == 2
    assert all(claim.holds for claim in outcome.claims), outcome.claims
    json.dumps(outcome.numbers)


@pytest.mark.parametrize("operation", EXPONENTS)
def test_counts_and_bytes_have_the_exponents(
    lines: list[Line], operation: str
) -> None:
    own = [line for line in lines if line.operation == operation]
    leading: dict[str, Line] = {}
    for line in own:
        leading.setdefault(line.variable, line)
    assert set(leading) == set(EXPONENTS[operation])
    assert len(own) == len(leading) + (operation in FEW)
    for variable, (cost, held) in EXPONENTS[operation].items():
        line = leading[variable]
        assert line.of_count == pytest.approx(cost, abs=TOLERANCE), line
        assert line.byte_error == 0 and line.of_bytes == line.bytes_predicted
        if held is not None:
            monomial = (
                "12·ϱ²"
                not in next(row for row in ROWS if row.name == operation)
                .ours[1]
                .text
            )
            assert line.of_bytes == pytest.approx(
                held, abs=1e-6 if monomial else TOLERANCE
            ), line


def test_every_row_of_the_table_is_there() -> None:
    table = {
        row.name: [formula and formula.text for formula in row.paper]
        for row in ROWS
        if row.paper
    }
    assert [cost for cost, _ in table.values()] == [
        *("ϱ³ + ϱ²·n", "ϱ²·n", "ϱ²·q", "ϱ³"),
        *("ϱ·n", "n_A·n_G·ϱ·r", "ζ_A·ζ_G·ϱ·r"),
        *("ϱ²·n", "r²·ϱ²·n_A + r²·ϱ²·n_G", "r²·ϱ²·ζ_A + r²·ϱ²·ζ_G"),
        *("ϱ·n", "n_A·n_G·r·ϱ", "n_A·n_G·r"),
    ]
    factors, sketched = "n_A·r·ϱ + n_G·r·ϱ", "ζ_A·r·ϱ + ζ_G·r·ϱ"
    plain = "ϱ·n"
    assert [memory for _, memory in table.values()] == [
        *(
            plain,
            plain,
            plain,
            None,
            plain,
            factors,
            sketched,
            plain,
            factors,
            sketched,
            plain,
            factors,
            factors,
        )
    ]


def test_where_the_paper_counts_too_little(lines: list[Line]) -> None:
    """Eq. 23 still has to add up ϱ factors, which the table's n_A·n_G·r leaves out."""
    line = next(
        line
        for line in lines
        if line.operation == "Uc, independent (23)" and line.variable == "ϱ"
    )
    assert line.of_table == 0 and line.of_count > 0.8
    said = remarks_of([line], quick=False)
    assert any(
        "the table's n_A·n_G·r has exponent 0.00" in remark for remark in said
    )


def test_a_formula_is_what_it_says() -> None:
    sizes = {"ϱ": 3, "n": 5, "n_G": 7}
    assert Formula("ϱ²·n + 5/3·ϱ³ + 2·n_G")(sizes) == 9 * 5 + 45 + 14
    with pytest.raises(ValueError):
        Formula("ϱ·m")(sizes)


def test_the_counter_knows_what_the_operations_do() -> None:
    A, x = torch.randn(4, 6), torch.randn(6)
    S = torch.eye(6) * 2
    assert multiply_adds(lambda: A @ x) == 24
    assert multiply_adds(lambda: A @ A.T) == 96
    assert multiply_adds(lambda: A[torch.tensor([0, 2])]) == 12
    assert multiply_adds(lambda: torch.linalg.cholesky_ex(S)) == 36
    assert (
        multiply_adds(lambda: torch.linalg.solve_triangular(S, S, upper=False))
        == 108
    )


def test_exponents_of_powers() -> None:
    assert exponent([1, 2, 4], [3, 12, 48]) == pytest.approx(2)


def test_verdicts() -> None:
    costs = [1e9, 2e9, 4e9, 8e9]

    def verdict(seconds: list[float], found: float) -> tuple[str, str]:
        return judged(seconds, costs, found, 1.0, TOLERANCE)

    long = [10 * THRESHOLD * 2**i for i in range(4)]
    assert verdict(long, 1.0)[0] == "within"
    assert verdict(long, 1.0 + TOLERANCE + 0.01)[0] == "outside"
    rising = [10 * THRESHOLD * 2 ** (i / 2) for i in range(4)]
    assert verdict(rising, 0.5) == (
        "outside",
        f"the rate still rises with the size: {1 / 3e-3:.2g} → {8 / 3e-3 / 8**0.5:.2g} G/s",
    )
    assert (
        "slower" in verdict([t * 1.5**i for i, t in enumerate(long)], 1.6)[1]
    )
    short = [THRESHOLD / 4, THRESHOLD / 2, THRESHOLD, 2 * THRESHOLD]
    assert verdict(short, 1.0)[0] == "too small to measure" and verdict(
        short, 1.0
    )[1].startswith("2 of 4 sizes")
    assert verdict([THRESHOLD / 2, *long[:3]], 1.0)[1].startswith(
        "1 of 4 sizes under 0.3 ms, left out"
    )


def test_claims_can_fail(lines: list[Line]) -> None:
    fine = [
        replace(line, of_time=line.predicted, verdict="within")
        for line in lines
    ]
    assert all(claim.holds for claim in claims_of(fine, quick=False))
    assert len(claims_of(fine, quick=False)) == 3 + len(ROWS)
    for worse, said in (
        ({"byte_error": 4}, "memory"),
        ({"of_count": fine[0].of_count + 0.02}, "cost"),
        ({"count_error": 0.02}, "cost"),
        ({"verdict": "outside"}, "time of low-rank"),
    ):
        failed = [
            claim.words
            for claim in claims_of(
                [replace(fine[0], **worse), *fine[1:]], quick=False
            )
            if not claim.holds
        ]
        assert len(failed) == 1 and failed[0].startswith(said)
    unmeasured = [
        replace(line, of_time=None, verdict="too small to measure")
        for line in fine
    ]
    assert [claim.holds for claim in claims_of(unmeasured, quick=False)] == [
        True,
        True,
        *[False] * (1 + len(ROWS)),
    ]


def test_another_gram_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The count is of what the library does: with the columns formed, the law is another."""
    row = next(row for row in ROWS if row.name == "UᵀU by factors (20)")
    sweep = next(
        sweep for sweep in row.sweeps if sweep.symbol == "r"
    ).smaller()
    monkeypatch.setattr(Implicit, "gram", lambda self: self.explicit().gram())
    line = measure(row, sweep, quick=True)
    assert abs(line.of_count - line.predicted) > 1 and line.count_error > 0.1


def test_times_are_the_least_of_all_taken_in_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, order = 0.0, []
    left = {"a": iter([3.0, 2.0, 9.0, 4.0]), "b": iter([7.0, 5.0, 6.0, 8.0])}

    def operation(name: str) -> None:
        nonlocal now
        order.append(name)
        now += 1e-3 * next(left[name])

    monkeypatch.setattr(operations_of_cost.time, "thread_time", lambda: now)
    found = times(
        [lambda: operation("a"), lambda: operation("b")], visits=2, burst=0
    )
    assert (
        found == pytest.approx([2e-3, 5e-3])
        and order == ["a", "a", "b", "b"] * 2
    )


def test_threads_are_put_back() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with one_thread():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_the_picture_has_a_panel_for_each_operation(lines: list[Line]) -> None:
    figure = Figure(figsize=STUDY.size, layout="constrained")
    draw(lines, figure)
    titles = [ax.get_title().partition("\n")[0] for ax in figure.axes]
    assert titles[: len(ROWS)] == [row.name for row in ROWS]
    figure.canvas.draw()
