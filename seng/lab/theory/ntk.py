"""Theorem 2: on a wide network the method converges linearly, at a rate that does not know the condition number.

    d = Jᵀ(λI + JΩᵀΩJᵀ)⁻¹(f − y),   ‖f_k − y‖² ≤ ζᵏ‖f_0 − y‖²

The proof finds ζ = 1 − α for the squares. With Ω = I and λ → 0 it is (1 − α)², as long as J stands still: each step's speed
(1 − ρ_k)/α, ρ_k = ‖f_{k+1} − y‖/‖f_k − y‖, is 1. `seng.lab.theory.wide` has the network and the descent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from seng.lab.theory.study import Claim, Outcome, Say, Study
from seng.lab.theory.wide import (
    DECADES,
    INPUTS,
    SAMPLES,
    Network,
    Trace,
    descend,
    embedding_error,
    network,
    sketched_speed,
    straightness,
)
from seng.linalg.sketch import CountSketch, Rows

ALPHAS = (0.1, 0.25, 0.5)
ALPHA = 0.25  # where one has to do
TOLERANCE = 0.1  # of the speed (1 − ρ_k)/α, at every step
NEAR = 0.05  # of a sketched run's mean speed, against the theory's
COLOURS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
)  # of Okabe and Ito's palette


@dataclass(frozen=True)
class Size:
    """How much is run."""

    widths: tuple[int, ...]
    alphas: tuple[float, ...]  # at each of them; the widest has all
    seeds: int
    sketched: int  # the width of the network that is sketched
    draws: int  # of the sequence of Ω
    close: float  # how near the mean speed comes to the exact one with the most rows


def _widths(last: int) -> tuple[int, ...]:
    return tuple(2**i for i in range(3, last + 1))


def run(say: Say, quick: bool) -> Outcome:
    """The exact direction at several α, at several widths and under sketches, and gradient descent."""
    size = (
        Size(_widths(10), (ALPHA,), 2, 256, 1, 0.04)
        if quick
        else Size(_widths(13), ALPHAS, 5, 2048, 3, 0.01)
    )
    widest = [network(size.widths[-1], seed) for seed in range(size.seeds)]
    exact = {
        alpha: [descend(net, alpha) for net in widest] for alpha in ALPHAS
    }
    say(
        f"width {size.widths[-1]}: worst |(1 − ρ)/α − 1| is {max(t.worst for ts in exact.values() for t in ts):.3f}"
    )
    by_width = {
        m: [
            descend(network(m, seed), alpha)
            for alpha in size.alphas
            for seed in range(size.seeds)
        ]
        for m in size.widths[:-1]
    }
    by_width[size.widths[-1]] = [
        trace for alpha in size.alphas for trace in exact[alpha]
    ]
    for m, traces in by_width.items():
        reached = sum(t.converged for t in traces)
        say(
            f"width {m}: {reached} of {len(traces)} converge, worst {max(t.worst for t in traces):.3f}"
        )
    sketches = [_sketched(say, kind, size) for kind in (Rows, CountSketch)]
    plain = [
        _gradient_descent(net, t.eigenvalues)
        for net, t in zip(widest, exact[ALPHA], strict=True)
    ]
    say(
        f"gradient descent: {len(plain[0].speeds)} steps for what takes {len(exact[ALPHAS[-1]][0].speeds)} at α = {ALPHAS[-1]}"
    )
    numbers = _numbers(size, exact, by_width, sketches, plain)
    claims = (
        *_exact_claims(exact),
        _width_claim(by_width),
        *_sketch_claims(sketches, size.close),
        _plain_claim(plain, exact[ALPHAS[-1]]),
    )
    return Outcome(
        claims,
        numbers,
        lambda figure: _draw(figure, numbers),
        _remarks(numbers),
    )


def _gradient_descent(net: Network, eigenvalues: Sequence[float]) -> Trace:
    """With the best constant step, 2/(λ_min + λ_max)."""
    return descend(net, 2 / (eigenvalues[0] + eigenvalues[-1]), plain=True)


@dataclass(frozen=True)
class Sketched:
    """One kind of sketch, from few rows to all but all."""

    name: str
    q: list[int]
    speed: list[float]  # (1 − ρ)/α, the mean of the draws
    spread: list[
        float
    ]  # root mean square over all steps of their speed's distance to the exact one's
    eta: list[float]  # of A.1, once
    exact: float  # the speed of Ω = I
    theory: list[float]  # that of a Gaussian Ω, times the exact one


def _sketched(
    say: Say, kind: type[Rows] | type[CountSketch], size: Size
) -> Sketched:
    net, alpha = network(size.sketched, 0), ALPHA
    q = [
        2**i * SAMPLES
        for i in range(1, 20)
        if 2**i * SAMPLES < size.sketched * INPUTS
    ]
    exact = descend(net, alpha).speed
    out = Sketched(
        kind.__name__,
        q,
        [],
        [],
        [],
        exact,
        [exact * sketched_speed(rows, alpha) for rows in q],
    )
    for rows in q:
        traces = [
            descend(net, alpha, kind(rows), seed=draw)
            for draw in range(size.draws)
        ]
        steps = torch.tensor(
            [speed for trace in traces for speed in trace.speeds],
            dtype=torch.float64,
        )
        out.speed.append(sum(trace.speed for trace in traces) / size.draws)
        out.spread.append(float((steps - exact).square().mean().sqrt()))
        out.eta.append(embedding_error(net, kind(rows)))
        say(
            f"{kind.__name__}({rows}): speed {out.speed[-1]:.3f}, by theory {out.theory[len(out.speed) - 1]:.3f}"
        )
    return out


def _exact_claims(exact: Mapping[float, Sequence[Trace]]) -> list[Claim]:
    every = [trace for traces in exact.values() for trace in traces]
    fits = [straightness(trace) for trace in every]
    runs = f"{len(every)} runs, α = {', '.join(map(str, exact))}"
    worst = {
        alpha: max(trace.worst for trace in traces)
        for alpha, traces in exact.items()
    }
    bound = [  # ‖f_k − y‖²/((1 − α)ᵏ‖f_0 − y‖²) for k ≥ 1: Theorem 2 has it at most 1
        (r / trace.residuals[0]) ** 2 / (1 - trace.alpha) ** k
        for trace in every
        for k, r in enumerate(trace.residuals)
        if k
    ]
    return [
        Claim(
            "Theorem 2: with U = Jᵀ and vanishing damping log‖f − y‖ is linear in k: R² ≥ 0.99 over at least 6 decades",
            f"R² ≥ {min(fits):.6f} over {DECADES:g} decades; {sum(t.converged for t in every)} of {runs} reach the end",
            min(fits) >= 0.99
            and DECADES >= 6
            and all(t.converged for t in every),
        ),
        Claim(
            f"each step contracts f − y by 1 − α: |(1 − ρ_k)/α − 1| ≤ {TOLERANCE} at every step, for each α ≤ 0.5",
            ", ".join(f"{w:.4f} at α = {alpha}" for alpha, w in worst.items())
            + " at the worst step of all seeds",
            max(worst.values()) <= TOLERANCE,
        ),
        Claim(
            "Theorem 2 as printed, with the proof's ζ = 1 − α: ‖f_k − y‖² ≤ ζᵏ‖f_0 − y‖² for all k",
            f"the left side is at most {max(bound):.3f} of the right one after a step, and {min(bound):.0e} in the end",
            max(bound) <= 1,
        ),
    ]


def smallest_width(by_width: Mapping[int, Sequence[Trace]]) -> int | None:
    """From which width on every run converges with every step within TOLERANCE."""
    found = None
    for m in sorted(by_width, reverse=True):
        if not all(t.converged and t.worst <= TOLERANCE for t in by_width[m]):
            break
        found = m
    return found


def _width_claim(by_width: Mapping[int, Sequence[Trace]]) -> Claim:
    smallest, widest = smallest_width(by_width), max(by_width)
    fails = [
        m
        for m, traces in by_width.items()
        if not all(t.converged for t in traces)
    ]
    reach = (
        f"some runs do not converge at widths {fails}"
        if fails
        else "all converge at every width"
    )
    return Claim(
        f"wide enough is enough: from some width below the widest on, every run converges within {TOLERANCE} at each step",
        f"the smallest such width is {smallest}, N = {SAMPLES}; {reach}",
        smallest is not None and smallest < widest,
    )


def _sketch_claims(sketches: Sequence[Sketched], close: float) -> list[Claim]:
    falls = [
        all(b < a for a, b in zip(s.spread, s.spread[1:], strict=False))
        for s in sketches
    ]
    last = [abs(s.speed[-1] - s.exact) for s in sketches]
    off = [
        abs(v - t)
        for s in sketches
        for q, v, t in zip(s.q, s.speed, s.theory, strict=True)
        if q >= 4 * SAMPLES
    ]
    ends = ", ".join(
        f"{s.name} {s.spread[0]:.3f} at q = {s.q[0]} to {s.spread[-1]:.3f} at {s.q[-1]}"
        for s in sketches
    )
    return [
        Claim(
            f"the sketched rate tends to the exact one: a step's distance falls at each doubling of q, the mean's to ≤ {close}",
            f"{ends}; the mean speeds end {max(last):.4f} from the exact one",
            all(falls) and max(last) <= close,
        ),
        Claim(
            f"from q = 4N on the sketched speed is that of a Gaussian Ω, by the moments of W⁻¹, within {NEAR}",
            f"the largest distance is {max(off):.3f}, over {' and '.join(s.name for s in sketches)}",
            max(off) <= NEAR,
        ),
    ]


def _plain_claim(plain: Sequence[Trace], exact: Sequence[Trace]) -> Claim:
    kappas = [t.eigenvalues[-1] / t.eigenvalues[0] for t in plain]
    ratios = [
        t.tail * (kappa + 1) / 2
        for t, kappa in zip(plain, kappas, strict=True)
    ]
    steps = f"{len(plain[0].speeds)} steps where the exact direction takes {len(exact[0].speeds)}"
    return Claim(
        "gradient descent with its best step pays the condition number κ of JJᵀ: 1 − ρ = 2/(κ + 1), within 0.15 of it",
        f"κ = {kappas[0]:.1f}; 1 − ρ is {min(ratios):.3f} to {max(ratios):.3f} of that; {steps}",
        max(abs(ratio - 1) for ratio in ratios) <= 0.15
        and all(t.converged for t in plain),
    )


def _numbers(
    size: Size,
    exact: Mapping[float, Sequence[Trace]],
    by_width: Mapping[int, Sequence[Trace]],
    sketches: Sequence[Sketched],
    plain: Sequence[Trace],
) -> dict[str, Any]:
    return {
        "size": asdict(size),
        "exact": {
            str(alpha): traces[0].residuals for alpha, traces in exact.items()
        },
        "plain": {"alpha": plain[0].alpha, "residuals": plain[0].residuals},
        "eigenvalues": plain[0].eigenvalues,
        "widths": {
            str(m): {
                "alpha": [t.alpha for t in traces],
                "worst": [t.worst for t in traces],
                "converged": [t.converged for t in traces],
                "drift": [
                    t.drift if math.isfinite(t.drift) else None for t in traces
                ],
            }
            for m, traces in by_width.items()
        },
        "smallest_width": smallest_width(by_width),
        "sketches": [asdict(s) for s in sketches],
    }


def _remarks(numbers: Mapping[str, Any]) -> tuple[str, ...]:
    drift = max(list(numbers["widths"].values())[-1]["drift"])
    kappa = numbers["eigenvalues"][-1] / numbers["eigenvalues"][0]
    s = numbers["sketches"][0]
    return (
        f"Condition 2 of the proof wants C < ½; at the widest C is up to {drift:.2f} along the runs: it is not necessary.",
        f"The proof's bound on the sketch wants η < {8 / (81 * kappa**2):.1e} at κ = {kappa:.0f}; {s['name']}({s['q'][2]}) has "
        f"η = {s['eta'][2]:.2f} and converges. For η < 1 K(JΩᵀΩJᵀ)⁻¹ has eigenvalues in [1/(1 + η), 1/(1 − η)], at any κ.",
        "The printed width m = Ω(n⁴/…) is meant in N: n = m·m_0 grows with m itself.",
    )


def _draw(figure: Any, numbers: Mapping[str, Any]) -> None:
    left, middle, right = figure.subplots(1, 3)
    for (alpha, r), colour in zip(
        numbers["exact"].items(), COLOURS, strict=False
    ):
        left.semilogy(
            [v / r[0] for v in r],
            "o",
            markersize=2.5,
            color=colour,
            label=f"α = {alpha}",
        )
        left.semilogy(
            [(1 - float(alpha)) ** k for k in range(len(r))],
            color=colour,
            linewidth=0.8,
        )
    r = numbers["plain"]["residuals"]
    left.semilogy(
        [v / r[0] for v in r], color=COLOURS[3], label="gradient descent"
    )
    left.set(
        xlabel="step k", ylabel="‖f − y‖, relative", title="lines: (1 − α)ᵏ"
    )
    colour_of = dict(zip(ALPHAS, COLOURS, strict=False))
    for m, found in numbers["widths"].items():
        for alpha, worst in zip(found["alpha"], found["worst"], strict=True):
            middle.loglog(
                [int(m)], [worst], "o", markersize=3, color=colour_of[alpha]
            )
    middle.axhline(TOLERANCE, color="0.4", linewidth=0.8, linestyle="--")
    middle.set(
        xlabel="width m",
        ylabel="worst |(1 − ρ)/α − 1| of a run",
        title=f"how wide, N = {SAMPLES}",
    )
    for s, colour in zip(numbers["sketches"], COLOURS, strict=False):
        right.semilogx(
            s["q"],
            s["speed"],
            "o",
            markersize=4,
            color=colour,
            label=s["name"],
        )
    s = numbers["sketches"][0]
    fine = [
        round(s["q"][0] * (s["q"][-1] / s["q"][0]) ** (i / 99))
        for i in range(100)
    ]
    curve = [s["exact"] * sketched_speed(q, ALPHA) for q in fine]
    right.semilogx(
        fine, curve, color="0.4", linewidth=0.9, label="Gaussian Ω, theory"
    )
    right.axhline(
        s["exact"], color="black", linewidth=0.8, linestyle="--", label="Ω = I"
    )
    right.set(
        xlabel="rows of the sketch q",
        ylabel="speed (1 − ρ)/α",
        title=f"sketched, n = {numbers['size']['sketched'] * INPUTS:,}",
    )
    for ax in (left, middle, right):
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(alpha=0.25)
    left.legend(frameon=False, fontsize=7)
    right.legend(frameon=False, fontsize=7)


STUDY = Study(
    "ntk",
    "Theorem 2: does the residual of a wide network fall by 1 − α in every step?",
    run,
    (11.0, 3.6),
)
