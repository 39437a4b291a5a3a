"""Theorem 1: ∇Ψ(θ_k) → 0 on a problem that is not convex, where Σα_k = ∞ and Σα_kσ_k² < ∞: with batches that grow.

The proof shows Σα‖∇Ψ‖² < ∞ and from it that the whole sequence goes to 0, not a part of it. Two runs obey its rule, with α_0 at
the bound min{1/(2L), h_1²/(2Lh_2)} that it asks for; one has a batch that stays small; two leave the rule on purpose, by a
batch that stays small under a falling step size, and by a small sketch with little damping and a step size beyond the bound.
`seng.lab.theory.walk` has the problem and the descent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from seng.lab.theory.study import Claim, Outcome, Say, Study
from seng.lab.theory.walk import (
    HIDDEN,
    INPUTS,
    LIPSCHITZ,
    SLOW,
    Path,
    Rule,
    problem,
    walk,
)

DAMPING = 2.25  # h_1
LARGEST = 3.0  # ‖B_k‖ is to stay below this: h_2 = h_1 + LARGEST
ALPHA = min(
    1 / (2 * LIPSCHITZ), DAMPING**2 / (2 * LIPSCHITZ * (DAMPING + LARGEST))
)  # the theorem's bound
LITTLE = 0.1  # the damping beyond it, with as large a step along g
HALF, FEW = HIDDEN * (INPUTS + 1) // 2, HIDDEN * (INPUTS + 1) // 8  # rows of Ω
TAIL = 0.02  # share of Σα‖∇Ψ‖² that the second half of the steps may add where the sum is bounded
LAG = 0.25  # by which log‖∇Ψ‖ may fall less steeply than in balance
COLOURS = (
    "#0072B2",
    "#56B4E9",
    "#D55E00",
    "#E69F00",
    "#009E73",
)  # of Okabe and Ito's palette

RULES = {
    "growing": Rule("α constant, |S| ∝ k²", 0.0, 2.0, DAMPING, ALPHA, HALF, 8),
    "both": Rule("α ∝ 1/√k, |S| ∝ k", 0.5, 1.0, DAMPING, ALPHA, HALF, 8),
    "constant": Rule(
        "α and |S| = 8 constant", 0.0, 0.0, DAMPING, ALPHA, HALF, 8
    ),
    "falling": Rule("α ∝ k^−0.6, |S| = 8", 0.6, 0.0, DAMPING, ALPHA, HALF, 8),
    "beyond": Rule(
        "as the first; λ = 0.1, q = n/8",
        0.0,
        2.0,
        LITTLE,
        LITTLE * ALPHA / DAMPING,
        FEW,
        8,
    ),
}


@dataclass(frozen=True)
class Size:
    """How many steps, and what so many can show."""

    steps: int
    fall: float  # ‖∇Ψ‖ is to fall by this factor, for good
    flat: float  # the largest slope of what does not fall


@dataclass(frozen=True)
class Seen:
    """One run in short."""

    last: float  # the mean of ‖∇Ψ‖ over the last tenth of the steps
    highest: float  # the largest of them, over the first of all
    slope: float  # of log‖∇Ψ‖ against log(1 + k/SLOW), over the second half
    share: float  # of Σα‖∇Ψ‖² that the second half adds
    descent: float  # the smallest h_2·⟨∇Ψ, Ĥ∇Ψ⟩/‖∇Ψ‖²: without a sketch at least 1, and the proof needs ⅛
    top: float  # the largest ‖B_k‖
    eta: tuple[float, float]  # of A.1, the median and the largest
    error: float  # the median of (√ε + η)/(1 − η), which is to be small


def seen(rule: Rule, path: Path) -> Seen:
    """What the claims are about."""
    norms = torch.tensor(path.norms, dtype=torch.float64)
    half, tenth, top = len(norms) // 2, len(norms) // 10, max(path.tops)
    etas, epsilons = (
        torch.tensor(x, dtype=torch.float64)
        for x in (path.etas, path.epsilons)
    )
    errors = torch.where(etas < 1, (epsilons + etas) / (1 - etas), math.inf)
    return Seen(
        last=float(norms[-tenth:].mean()),
        highest=float(norms[-tenth:].max() / norms[0]),
        slope=_slope(norms, half),
        share=1 - path.sums[half - 1] / path.sums[-1],
        descent=min(path.descents) * (rule.damping + top),
        top=top,
        eta=(float(etas.median()), float(etas.max())),
        error=float(errors.median()),
    )


def _slope(norms: torch.Tensor, start: int) -> float:
    k = torch.arange(len(norms), dtype=norms.dtype)
    x, y = (1 + k / SLOW).log()[start:], norms.log()[start:]
    x = x - x.mean()
    return float(x @ y / (x @ x))


def run(say: Say, quick: bool) -> Outcome:
    """Five runs from one start."""
    given, size = (
        problem(0),
        Size(400, 8, 0.3) if quick else Size(3000, 100, 0.15),
    )
    steps = size.steps
    paths: dict[str, Path] = {}
    for name, rule in RULES.items():
        paths[name] = walk(given, rule, steps, seed=1)
        say(
            f"{rule.words}: ‖∇Ψ‖ from {paths[name].norms[0]:.2g} to {paths[name].norms[-1]:.2g} in {steps} steps"
        )
    found = {name: seen(RULES[name], path) for name, path in paths.items()}
    hessian = [
        given.curvature(theta)
        for theta in (given.start, paths["growing"].end[0])
    ]
    spectrum = [(float(values[0]), float(values[-1])) for values in hessian]
    claims = (
        _inside(found, spectrum),
        *_obeying(found, size),
        _contrast(found, size),
        _descends(found),
        *_beyond(found, size),
    )
    at = sorted(
        {min(steps - 1, int(steps ** (i / 199))) for i in range(200)} | {0}
    )  # as a logarithmic axis shows them
    numbers = {
        "steps": steps,
        "alpha": ALPHA,
        "lipschitz": LIPSCHITZ,
        "hessian": {"start": spectrum[0], "end": spectrum[1]},
        "runs": {
            name: _numbers(RULES[name], path, found[name], at)
            for name, path in paths.items()
        },
        "at": at,
    }
    return Outcome(
        claims, numbers, lambda figure: _draw(figure, numbers), _remarks(found)
    )


def _numbers(
    rule: Rule, path: Path, found: Seen, at: Sequence[int]
) -> dict[str, Any]:
    columns = {
        "norms": path.norms,
        "sums": path.sums,
        "descents": path.descents,
    }
    kept = asdict(found) | {
        "error": found.error if math.isfinite(found.error) else None
    }
    return {
        "rule": asdict(rule),
        **kept,
        **{name: [column[k] for k in at] for name, column in columns.items()},
    }


def _inside(
    found: Mapping[str, Seen], spectrum: Sequence[tuple[float, float]]
) -> Claim:
    largest = max(found[name].top for name in ("growing", "both"))
    bound = max(abs(value) for pair in spectrum for value in pair)
    return Claim(
        "the problem is one of Theorem 1's and not convex: ∇²Ψ has a negative eigenvalue, all are below L, and λ + ‖B_k‖ ≤ h_2",
        f"eigenvalues {spectrum[0][0]:.3f} to {spectrum[0][1]:.3f} at the start, L = {LIPSCHITZ:.3f}; "
        f"‖B_k‖ ≤ {largest:.2f}, h_1 = {DAMPING}, h_2 = {DAMPING + LARGEST}, α_0 = {ALPHA:.3f}",
        spectrum[0][0] < 0 and bound <= LIPSCHITZ and largest <= LARGEST,
    )


def _obeying(found: Mapping[str, Seen], size: Size) -> list[Claim]:
    obey = {
        name: found[name]
        for name, rule in RULES.items()
        if rule.summable and name != "beyond"
    }
    slopes = ", ".join(
        f"{s.slope:.2f} where {RULES[name].slope:g} is balance"
        for name, s in obey.items()
    )
    return [
        Claim(
            f"Theorem 1: ‖∇Ψ‖ → 0. Under the rule all of the last tenth of the steps lie below 1/{size.fall:g} of the start",
            ", ".join(
                f"below 1/{1 / s.highest:.0f} with {RULES[name].words}"
                for name, s in obey.items()
            ),
            all(s.highest <= 1 / size.fall for s in obey.values()),
        ),
        Claim(
            f"it falls as ‖∇Ψ‖² ∝ α_kσ_k², where noise and descent are in balance, or faster, within {LAG} of the slope",
            slopes,
            all(
                s.slope <= RULES[name].slope + LAG for name, s in obey.items()
            ),
        ),
        Claim(
            f"Σα‖∇Ψ‖² stays bounded: the second half of the steps adds at most {TAIL:.0%}",
            ", ".join(f"{s.share:.2%}" for s in obey.values()),
            all(s.share <= TAIL for s in obey.values()),
        ),
    ]


def _contrast(found: Mapping[str, Seen], size: Size) -> Claim:
    flat, best = found["constant"], found["growing"]
    return Claim(
        f"the rule matters: with a constant α and batch ‖∇Ψ‖ stays 10 times above, its slope within {size.flat} of 0",
        f"at {flat.last:.3g}, {flat.last / best.last:.0f} times above, slope {flat.slope:.2f}; "
        f"the second half adds {flat.share:.0%} to Σα‖∇Ψ‖²",
        flat.last >= 10 * best.last and abs(flat.slope) <= size.flat,
    )


def _descends(found: Mapping[str, Seen]) -> Claim:
    return Claim(
        "the sketched direction descends: ⟨∇Ψ, Ĥ_k∇Ψ⟩ ≥ ‖∇Ψ‖²/(8h_2) at every step of every run",
        ", ".join(f"{name} {s.descent:.2f}/h_2" for name, s in found.items())
        + " at the least",
        all(s.descent >= 1 / 8 for s in found.values()),
    )


def _beyond(found: Mapping[str, Seen], size: Size) -> list[Claim]:
    falling, beyond = found["falling"], found["beyond"]
    times = RULES["beyond"].alpha / (
        LITTLE**2 / (2 * LIPSCHITZ * (LITTLE + beyond.top))
    )
    return [
        Claim(
            "the rule is not necessary: a small batch and α ∝ k^−0.6, for which Σασ² = ∞, falls too",
            f"slope {falling.slope:.2f} where {RULES['falling'].slope:g} is balance; ends at {falling.last:.3g}, "
            f"constant α at {found['constant'].last:.3g}",
            falling.slope <= -size.flat
            and falling.last < found["constant"].last,
        ),
        Claim(
            f"nor is the bound on α: λ = {LITTLE}, q = n/8 and an α that is {times:.0f} times as large converge alike",
            f"the last tenth lies below 1/{1 / beyond.highest:.0f} of the start; η is {beyond.eta[0]:.2f} in the median",
            beyond.highest <= 1 / size.fall and times > 1,
        ),
    ]


def _remarks(found: Mapping[str, Seen]) -> tuple[str, ...]:
    s, h1 = found["growing"], DAMPING
    h2 = h1 + s.top
    wanted = h1 * math.sqrt(h1 / (4 * h2 * (h2**2 + h1**2)))
    return (
        f"(√ε + η)/(1 − η) “small enough” is below {wanted:.2f} in the proof; here its median is {s.error:.2f}, with η up to "
        f"{s.eta[1]:.2f}, and each step descends all the same.",
        "The proof's t² < h_1/(4h_2(h_2² − h_1²)) should have a sum in place of the difference.",
        "Π(1 − δ_k) is 0 where q stays as it is: q has to grow like log k for the theorem to say something.",
        "Given U and Ω the direction is linear in g, so the noise is 0 in the mean and enters as α²σ²: Σα²σ² < ∞ would do.",
    )


def _draw(figure: Any, numbers: Mapping[str, Any]) -> None:
    left, middle, right = figure.subplots(1, 3)
    k = [1 + i for i in numbers["at"]]
    for (name, r), colour in zip(
        numbers["runs"].items(), COLOURS, strict=True
    ):
        rule = RULES[name]
        left.loglog(
            k, r["norms"], color=colour, linewidth=1.2, label=rule.words
        )
        late = [i for i in numbers["at"] if i >= numbers["steps"] // 4]
        line = [
            ((1 + i / SLOW) / (1 + late[-1] / SLOW)) ** rule.slope * r["last"]
            for i in late
        ]
        left.loglog(
            [1 + i for i in late],
            line,
            color="black",
            linewidth=0.8,
            linestyle=":",
        )
        if name != "beyond":  # its α is of other units
            middle.semilogx(k, r["sums"], color=colour)
        right.loglog(
            k,
            [d * (rule.damping + r["top"]) for d in r["descents"]],
            ".",
            markersize=3,
            color=colour,
        )
    right.axhline(1, color="black", linewidth=0.8, linestyle="--")
    right.axhline(1 / 8, color="black", linewidth=0.8, linestyle=":")
    left.set(
        xlabel="step k", ylabel="‖∇Ψ‖", title="dotted: α_kσ_k² in balance"
    )
    middle.set(
        xlabel="step k",
        ylabel="Σα‖∇Ψ‖²",
        title="bounded, or not",
        ylim=(0, None),
    )
    right.set(
        xlabel="step k",
        ylabel="h₂⟨∇Ψ, Ĥ∇Ψ⟩/‖∇Ψ‖²",
        title="≥ 1 without a sketch; the proof needs ⅛",
        ylim=(0.1, None),
    )
    for ax in (left, middle, right):
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(alpha=0.25)
    left.legend(frameon=False, fontsize=6.5, loc="lower left")


STUDY = Study(
    "descent",
    "Theorem 1: does the gradient of a problem that is not convex go to 0?",
    run,
    (12.0, 3.8),
)
