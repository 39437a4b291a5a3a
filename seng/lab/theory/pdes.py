"""Differential equations by least squares: `seng.LeastSquares` beside tuned Adam and L-BFGS, second for second.

The residuals of `seng.lab.theory.equations` have a Jacobian J, and U = Jᵀ is the matrix of the paper's eq. 5: the step is that
of eqs. 7 to 9, with nothing sketched, damped by Levenberg and Marquardt's rule.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from typing import Any

import torch

from seng.lab.theory.equations import BURGERS, POISSON, SMALL, Problem, Start
from seng.lab.theory.rivals import Curve, Rival, Watch, tuned
from seng.lab.theory.study import Claim, Outcome, Say, Study
from seng.residuals.least_squares import LeastSquares

METHODS = {
    "LeastSquares": "#D55E00",
    "L-BFGS": "#0072B2",
    "Adam": "#009E73",
}  # colours of Okabe and Ito's palette
EVERY = 5  # steps of least squares from one error to the next
REMARKS = (
    "Seconds are processor seconds of one thread, and of the steps alone; two fits run side by side, on a core each.",
    "All methods have the same network with its derivatives, the same first weights and points. The rivals are tuned by their"
    " error on the first seed, and their lowest error counts. For least squares the last error counts; its settings are the"
    " defaults, and w was chosen once from three values.",
)


@dataclass(frozen=True)
class Job:
    """One fit, which any process can do; without a rival and its seconds it is least squares, for the problem's steps."""

    problem: Problem
    seed: int
    rival: Rival | None = None
    seconds: float = 0.0
    acceleration: bool = True


@dataclass(frozen=True)
class Bounds:
    """What is claimed."""

    error: float  # at most
    ratios: dict[
        str, float
    ]  # a rival's error over that of least squares, at least


FULL = Bounds(1e-5, {"Adam": 30.0, "L-BFGS": 5.0})
QUICK = Bounds(1e-3, {"Adam": 10.0, "L-BFGS": 2.0})
Work = Callable[[list[Job]], list[Curve]]


def done(job: Job) -> Curve:
    """From the weights and points of its seed."""
    start = Start(job.problem, job.seed)
    return (
        job.rival.fit(start, job.seconds)
        if job.rival
        else least_squares(start, job.acceleration)
    )


def least_squares(start: Start, acceleration: bool = True) -> Curve:
    """The problem's number of steps."""
    fit = LeastSquares(
        start.model,
        [start.problem.equation, start.problem.boundary],
        acceleration=acceleration,
    )
    curve, watch = Curve(), Watch()
    for step in range(1, start.problem.steps + 1):
        watch.go()
        loss = fit.step(*start.batches)
        watch.hold()
        if step % EVERY == 0:
            curve.add(step, watch.seconds, loss, start.error())
    return curve


def compared(
    problem: Problem, seeds: tuple[int, ...], work: Work, say: Say
) -> dict[str, Any]:
    """All methods on one problem: curves by method and seed, and how the rivals were tuned."""
    say(f"{problem.name}: least squares")
    *ours, plain = work(
        [
            *(Job(problem, seed) for seed in seeds),
            Job(problem, seeds[0], acceleration=False),
        ]
    )
    curves, tuning = {"LeastSquares": ours}, {}
    for method in ("L-BFGS", "Adam"):
        say(f"{problem.name}: {method}, tuned on the first seed")
        best, first, tries = tuned(
            method,
            lambda rivals: work(
                [
                    Job(problem, seeds[0], r, ours[0].seconds[-1])
                    for r in rivals
                ]
            ),
        )
        say(f"{problem.name}: {method}, {best.words()}")
        others = zip(seeds[1:], ours[1:], strict=True)
        curves[method] = [
            first,
            *work(
                [
                    Job(problem, seed, best, own.seconds[-1])
                    for seed, own in others
                ]
            ),
        ]
        tuning[method] = {"chosen": best.words(), "tries": tries}
    parameters = sum(p.numel() for p in Start(problem, 0).model.parameters())
    return {
        **{
            "parameters": parameters,
            "residuals": problem.inside + problem.edge,
            "seeds": list(seeds),
            "tuning": tuning,
        },
        "curves": {
            method: [asdict(curve) for curve in found]
            for method, found in curves.items()
        },
        "without acceleration": asdict(plain),
    }


def judged(
    problem: Problem, found: dict[str, Any], bounds: Bounds
) -> list[Claim]:
    """The claims on one problem, for all seeds at once."""
    ours = [Curve(**curve) for curve in found["curves"]["LeastSquares"]]
    errors = [curve.errors[-1] for curve in ours]
    words = f"{problem.name}: least squares has a relative L2 error of at most {bounds.error:g} after {problem.steps} steps"
    seconds = _list([curve.seconds[-1] for curve in ours], ".1f")
    claims = [
        Claim(
            words,
            f"{_list(errors)} in {seconds} s",
            all(error <= bounds.error for error in errors),
        )
    ]
    for method, least in bounds.ratios.items():
        theirs = [Curve(**curve).lowest for curve in found["curves"][method]]
        ratios = [
            their / our for their, our in zip(theirs, errors, strict=True)
        ]
        passed = [
            curve.passed(error)
            for curve, error in zip(ours, theirs, strict=True)
        ]
        words = f"{problem.name}: in the same seconds its error is at least {least:g} times below that of tuned {method}"
        measured = f"{_list(theirs)}, {_list(ratios, '.0f')} times above; least squares was there after {_list(passed, '.1f')} s"
        claims.append(
            Claim(words, measured, all(ratio >= least for ratio in ratios))
        )
    return claims


def _list(numbers: list[float], form: str = ".1e") -> str:
    return ", ".join(format(number, form) for number in numbers)


def draw(numbers: dict[str, Any], bounds: Bounds, figure: Any) -> None:
    """Errors against seconds."""
    panels = figure.subplots(1, len(numbers), sharey=True, squeeze=False)[0]
    for ax, (name, found) in zip(panels, numbers.items(), strict=True):
        for method, colour in METHODS.items():
            for i, curve in enumerate(found["curves"][method]):
                ax.plot(
                    curve["seconds"],
                    curve["errors"],
                    color=colour,
                    linewidth=1,
                    label=None if i else method,
                )
        plain = found["without acceleration"]
        label = "LeastSquares without acceleration, one seed"
        ax.plot(
            plain["seconds"],
            plain["errors"],
            color=METHODS["LeastSquares"],
            linewidth=1,
            linestyle=":",
            label=label,
        )
        ax.axhline(bounds.error, color="0.6", linewidth=0.8, linestyle="--")
        ax.set_yscale("log")
        ax.set_xlim(left=0)
        ax.set_xlabel("seconds of one thread")
        ax.set_title(
            f"{name}: {found['parameters']} parameters, {found['residuals']} residuals",
            fontsize=10,
        )
        ax.grid(alpha=0.25)
        ax.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("relative L2 error")
    panels[-1].legend(frameon=False, fontsize=8)


def run(say: Say, quick: bool = False) -> Outcome:
    """Both problems, three seeds; quick: a small network on Poisson's, one seed."""
    bounds, seeds, problems = (
        (FULL, (0, 1, 2), [POISSON, BURGERS])
        if not quick
        else (QUICK, (0,), [SMALL])
    )
    if quick:
        numbers = {
            p.name: compared(
                p, seeds, lambda jobs: [done(job) for job in jobs], say
            )
            for p in problems
        }
    else:
        with ProcessPoolExecutor(
            2, get_context("spawn"), torch.set_num_threads, (1,)
        ) as pool:
            numbers = {
                p.name: compared(
                    p, seeds, lambda jobs: list(pool.map(done, jobs)), say
                )
                for p in problems
            }
    claims = [
        claim
        for problem in problems
        for claim in judged(problem, numbers[problem.name], bounds)
    ]
    return Outcome(
        tuple(claims),
        numbers,
        lambda figure: draw(numbers, bounds, figure),
        REMARKS,
    )


STUDY = Study(
    "pdes",
    "Do least-squares steps solve differential equations more accurately than Adam and L-BFGS?",
    run,
)
