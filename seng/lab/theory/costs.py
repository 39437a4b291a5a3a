"""What the operations cost: the paper's table of complexity (ComStoCost, section 3.4) against time, counts and bytes.

Each row of `rows_of_cost` is run at sizes in geometric progression, one variable at a time, on one thread. A straight line
through log time, and one through the log of the counted multiply-adds, give exponents to lay beside those of the formula.
Bytes are those of the tensors that are held, and have to be the formula's exactly.

Times are those of the thread, so that the turns of other processes do not count; each is the least of several, taken in turns
over the sizes. Sizes that take less than THRESHOLD are left out of the line, and where fewer than three remain the verdict is
"too small to measure".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from seng.lab.theory.lines_of_cost import (
    LEAST,
    LOOSE,
    THRESHOLD,
    TOLERANCE,
    Line,
    fitted,
    measure,
)
from seng.lab.theory.operations_of_cost import one_thread
from seng.lab.theory.rows_of_cost import ROWS
from seng.lab.theory.study import Claim, Outcome, Say, Study

CLOSE = 0.01  # of counts, relative, and of their exponents
EXACT = 1e-9  # of exponents of bytes
LOOKS = {  # colours of Okabe and Ito's palette
    "ϱ": ("#0072B2", "o"),
    "n": ("#D55E00", "s"),
    "n_G": ("#D55E00", "s"),
    "r": ("#009E73", "^"),
    "q": ("#CC79A7", "D"),
    "ζ_G": ("#CC79A7", "D"),
    "κ": ("#E69F00", "v"),
    "k": ("#56B4E9", "P"),
}


def claims_of(lines: Sequence[Line], quick: bool) -> tuple[Claim, ...]:
    """Bytes and counts for all operations together; times for each, where sizes are large enough to be measured."""
    byte_error, count_error = (
        max(line.byte_error for line in lines),
        max(line.count_error for line in lines),
    )
    bytes_off = max(
        abs(line.of_bytes - line.bytes_predicted) for line in lines
    )
    counts_off = max(abs(line.of_count - line.predicted) for line in lines)
    sure = [
        Claim(
            "memory (table ComStoCost): the bytes held are the formula's, to the byte, with its exponents",
            f"{len(lines)} variables of {len(ROWS)} operations: off by at most {byte_error} bytes, exponents {bytes_off:.0e}",
            byte_error == 0 and bytes_off <= EXACT,
        ),
        Claim(
            f"cost (table ComStoCost): the multiply-adds counted are our formula's, within {CLOSE:.0%}, and their exponents",
            f"counts off by at most {count_error:.1e} of them, exponents by {counts_off:.0e}",
            max(count_error, counts_off) <= CLOSE,
        ),
    ]
    if quick:
        return tuple(sure)
    large = [line for line in lines if line.of_time is not None]
    enough = Claim(
        f"at least nine in ten variables take {1e3 * THRESHOLD:g} ms at {LEAST} sizes or more, so that time has an exponent",
        f"{len(large)} of {len(lines)}",
        len(large) >= 0.9 * len(lines),
    )
    timed = []
    for row in ROWS:
        own = [line for line in large if line.operation == row.name]
        seen = ", ".join(
            f"{line.span}: {line.of_time:.2f} ({line.predicted:.2f})"
            for line in own
        )
        fine = bool(own) and all(line.verdict == "within" for line in own)
        timed.append(
            Claim(
                f"time of {row.name}: exponents within {TOLERANCE} of {row.ours[0].text}",
                seen or "nothing measured",
                fine,
            )
        )
    return (*sure, enough, *timed)


def remarks_of(lines: Sequence[Line], quick: bool) -> tuple[str, ...]:
    """What is not as the table has it, or was not measured, in words."""
    out = [
        "counts leave out passes that only scale or add up; bytes are of what is held, not of what a product needs meanwhile"
    ]
    if quick:
        out.append(
            f"a quick run: each time is taken once, its verdicts allow {LOOSE}, and no claim rests on it"
        )
        return tuple(out)
    for line in lines:
        where = f"{line.operation}, {line.span}"
        if line.verdict != "within":
            out.append(f"{where}: {line.verdict}; {line.words}")
        if other(line.of_table, line.predicted):
            exponents = f"exponent {line.of_table:.2f}, what is done, {line.cost}, {line.predicted:.2f}"
            out.append(f"{where}: the table's {line.table} has {exponents}")
        if other(line.bytes_of_table, line.bytes_predicted):
            held = f"exponent {line.bytes_of_table:.2f} by the table, {line.bytes_predicted:.2f} by what is held"
            out.append(f"{where}: memory has {held}")
    return tuple(out)


def other(table: float | None, ours: float) -> bool:
    """Whether the table has another exponent."""
    return table is not None and abs(table - ours) > TOLERANCE


def draw(lines: Sequence[Line], figure: Any) -> None:
    """A panel for each operation: time over each variable relative to its smallest value, and lines of the predicted slopes."""
    from matplotlib.ticker import FormatStrFormatter, LogLocator

    axes = iter(figure.subplots(3, 6).flat)
    for row, ax in zip(ROWS, axes, strict=False):
        for line in (found for found in lines if found.operation == row.name):
            x, (colour, mark) = (
                [v / line.values[0] for v in line.values],
                LOOKS[line.variable.split(" = ")[0]],
            )
            fit = fitted(line.seconds) or list(range(len(x)))
            slopes = [(line.predicted, "-")]
            if line.of_table is not None and other(
                line.of_table, line.predicted
            ):
                slopes.append((line.of_table, ":"))
            for slope, style in slopes:
                centre = sum(
                    math.log(1e3 * line.seconds[i]) - slope * math.log(x[i])
                    for i in fit
                ) / len(fit)
                ax.plot(
                    x,
                    [math.exp(centre) * v**slope for v in x],
                    style,
                    color=colour,
                    linewidth=0.9,
                )
            for v, t in zip(x, line.seconds, strict=True):
                ax.plot(
                    v,
                    1e3 * t,
                    mark,
                    markersize=4,
                    color=colour,
                    fillstyle="full" if t >= THRESHOLD else "none",
                )
            found = (
                "too small" if line.of_time is None else f"{line.of_time:.2f}"
            )
            ax.plot(
                [],
                [],
                f"{mark}-",
                markersize=3,
                color=colour,
                label=f"{line.variable}: {found} ({line.predicted:.2f})",
            )
        ax.set(xscale="log", yscale="log")
        low, high = ax.get_ylim()
        ax.set_ylim(low, high * (high / low) ** 0.6)  # room for the words
        ax.set_xticks([1, 2, 4, 8], ["1", "2", "4", "8"])
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 3)))
        ax.yaxis.set_major_formatter(FormatStrFormatter("%g"))
        ax.minorticks_off()
        table = (
            f"\ntable: {row.paper[0].text}"
            if row.paper
            else "\nnot in the table"
        )
        ax.set_title(f"{row.name}\n{row.ours[0].text}{table}", fontsize=5.8)
        ax.tick_params(labelsize=6)
        ax.legend(
            frameon=False, fontsize=5.5, loc="upper left", handlelength=1.2
        )
        ax.spines[["top", "right"]].set_visible(False)
    for ax in axes:  # those that are left
        ax.axis("off")
    words = "variable / its smallest value; exponents of time (of our formula); dotted: the table's slope, where it is another"
    figure.supxlabel(
        f"{words}; hollow: under {1e3 * THRESHOLD:g} ms, not fitted",
        fontsize=7,
    )
    figure.supylabel("milliseconds, one thread", fontsize=7)


def run(say: Say, quick: bool) -> Outcome:
    """Every row, one variable after the other."""
    lines: list[Line] = []
    with one_thread():
        for row in ROWS:
            for sweep in row.sweeps:
                line = measure(row, sweep.smaller() if quick else sweep, quick)
                time_of = (
                    "–" if line.of_time is None else f"{line.of_time:.2f}"
                )
                exponents = f"predicted {line.predicted:.2f}, counted {line.of_count:.2f}, time {time_of}"
                say(
                    f"{line.operation}, {line.span}: {exponents}, {line.verdict} ({line.words})"
                )
                lines.append(line)
    numbers = {
        "threshold_seconds": THRESHOLD,
        "tolerance": LOOSE if quick else TOLERANCE,
        "processor": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "lines": [asdict(line) for line in lines],
    }
    return Outcome(
        claims_of(lines, quick),
        numbers,
        lambda figure: draw(lines, figure),
        remarks_of(lines, quick),
    )


STUDY = Study(
    "costs",
    "Does each operation cost what the table of complexity says?",
    run,
    size=(14.0, 7.5),
)
