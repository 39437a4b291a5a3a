"""Least squares, min ½‖r(θ)‖²: Gauss–Newton steps by SENG's Woodbury formula, damped as in
Levenberg and Marquardt's method.

    θ ← θ − d − ½a,   (JᵀJ + λI)d = Jᵀr,   (JᵀJ + λI)a = Jᵀc              (`seng.residuals.normal`)

λ is `damping` times the mean eigenvalue of the smaller Gram, so that the units of r do not matter.
The damping follows the gain: the decrease of the loss over the decrease that a linear r would give.
a is the acceleration (Transtrum and Sethna 2012, arXiv 1201.5885): along −d the residuals are
r − hJd + ½h²c + …, and a compensates for their bend c as d does for r.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from seng.checks import check_number
from seng.linalg.memory import free_memory
from seng.linalg.sketch import Sketch
from seng.notices import warn
from seng.residuals.linearization import Linearization, linearize
from seng.residuals.normal import NormalEquations, normal_equations
from seng.residuals.terms import Batch, Parameters, Residual, Term, has_samples

TRIES = 12  # solves of a step before it is given up
SHARE = 0.5  # of the free memory, where no budget is given
LEAST, MOST = 1e-16, 1e12  # of the damping
LENGTHS = tuple(2.0**-i for i in range(6))  # that a line search tries
PROBE = 0.1  # h, where the bend c is measured
STATE = (
    "damping",
    "growth",
    "steps",
    "last",
)  # what a checkpoint keeps, with the generator
BEND = 0.75  # of ‖d‖: a longer acceleration is not trusted


@dataclass(frozen=True)
class Report:
    """What a step did."""

    loss: float  # ½‖r‖² before the step
    after: float  # ½‖r‖² after it, on the same batch
    damping: float  # at the last solve
    lam: float = math.nan  # λ: the damping times the mean eigenvalue
    length: float = (
        0.0  # of the step in units of d; 0 where the step was refused
    )
    tries: int = 0  # solves
    accepted: bool = False


@dataclass(frozen=True)
class Trial:
    """A step that was evaluated."""

    loss: float  # ½‖r‖² at θ − step
    predicted: float  # the decrease of the loss if r were linear
    length: float
    step: Tensor  # (n,)


class LeastSquares:
    """Fits a model's parameters, in place, so that residuals become small.

    `residual(model, *batch)` returns a vector. With a list of such functions, `step` takes a batch
    for each of them: a tensor, or a tuple of tensors, with the samples in dimension 0. Then r is
    what the functions return, one after the other.
    """

    def __init__(
        self,
        model: nn.Module | Mapping[str, Tensor],
        residual: Residual | Sequence[Residual],
        *,
        damping: float = 1e-3,
        adapt: bool = True,
        acceleration: bool = True,
        line_search: bool = False,
        momentum: float = 0.0,
        sketch: Sketch | None = None,
        memory: int | None = None,
        separate: bool | None = None,
    ) -> None:
        _check(damping, momentum, sketch, memory, separate)
        _check_switches(
            adapt=adapt, acceleration=acceleration, line_search=line_search
        )
        self.parameters = Parameters(model)
        self.several = isinstance(residual, (list, tuple))
        functions: Any = residual if self.several else [residual]
        self.terms = [
            Term(_name(f, i, self.several), f, self.parameters, separate)
            for i, f in enumerate(functions)
        ]
        if not self.terms:
            raise ValueError(
                "there is nothing to fit to: the list of residual functions is empty"
            )
        self.damping, self.momentum = float(damping), float(momentum)
        self.adapt, self.acceleration = adapt, acceleration and adapt
        self.line_search, self.sketch, self.memory = (
            line_search,
            sketch,
            memory,
        )
        self.growth = 2.0  # of the damping when a trial is refused
        self.steps = 0
        self.last: Tensor | None = None  # the last step (n,), with momentum
        generator = torch.Generator(self.parameters.device)
        self.generator = generator.manual_seed(0)  # of the sketches
        self.report: Report | None = None
        self._warned = False

    @torch.enable_grad()  # residuals may differentiate the model
    def step(self, *batches: Any) -> float:
        """Take one step on these samples. Returns ½‖r‖² before it."""
        memory = self.memory or int(
            SHARE * free_memory(self.parameters.device)
        )
        here = linearize(self.terms, self._split(batches), memory)
        loss = 0.5 * float(here.r @ here.r)
        damping, last = self.damping, self.last
        self.steps += 1
        if not math.isfinite(loss):
            still = Report(loss, loss, damping)
            return self._refuse(still, "the residuals are not finite")
        normal = normal_equations(here.operator(), self.sketch, self.generator)
        if not math.isfinite(normal.mean):
            still = Report(loss, loss, damping)
            return self._refuse(still, "the Jacobian is not finite")
        least = (
            torch.finfo(here.r.dtype).eps * loss
        )  # a gain worth another try
        for tries in range(1, TRIES + 1):
            lam = damping * (normal.mean or 1.0)
            trial = self._try(here, normal, lam, last)
            if trial is not None:
                if trial.loss < (loss if self.adapt else math.inf):
                    after, length = trial.loss, trial.length
                    report = Report(
                        loss, after, damping, lam, length, tries, True
                    )
                    return self._accept(report, trial)
                if not self.adapt or trial.predicted <= least:
                    break
            last = None  # a larger λ does not shorten what momentum adds
            damping = min(MOST, damping * self.growth)
            self.growth *= 2
        if self.adapt:
            self.damping = min(MOST, 10 * self.damping)
        return self._refuse(Report(loss, loss, damping, lam, 0.0, tries))

    def _try(
        self,
        here: Linearization,
        normal: NormalEquations,
        lam: float,
        last: Tensor | None,
    ) -> Trial | None:
        """The best step at this λ: d, d with its acceleration, and shorter ones on request."""
        solve = normal.at(lam)
        if solve is None:
            return None
        r, push = here.r, normal.U.rmv
        if last is None:
            d = solve(r)
        else:  # SPRING (Goldshlager, Abrahamsen and Lin 2024, arXiv 2401.10190)
            kept = self.momentum * last
            d = kept + solve(r - push(kept))
        Jd = push(d)
        bends: list[Tensor | float] = [0.0]
        if self.acceleration:
            there = here.residuals(self.parameters.minus(PROBE * d))
            a = solve(2 / PROBE**2 * (there - r + PROBE * Jd))
            if a.norm() <= BEND * d.norm():
                bends.append(a)
        trials = []
        lengths = LENGTHS if self.line_search else LENGTHS[:1]
        for length, bend in product(lengths, bends):
            step = length * d + 0.5 * length**2 * bend
            there = here.residuals(self.parameters.minus(step))
            predicted = length * float(r @ Jd) - 0.5 * length**2 * float(
                Jd @ Jd
            )
            trial = Trial(0.5 * float(there @ there), predicted, length, step)
            trials.append(trial)
        return min(
            trials, key=lambda t: math.inf if math.isnan(t.loss) else t.loss
        )

    def _accept(self, report: Report, trial: Trial) -> float:
        """Write the step into the model, and adapt the damping by Nielsen's rule.

        The damping falls to a third where the gain is 1 or more, and rises where it is below ½.
        Where the gain is 1 to three digits, r is linear, and the damping falls to a thousandth.
        """
        self.parameters.subtract(trial.step)
        self.report, self.growth = report, 2.0
        self.last = trial.step if self.momentum else None
        if self.adapt:
            fall = report.loss - report.after
            gain = fall / trial.predicted if trial.predicted > 0 else 0.0
            is_linear = abs(gain - 1) < 1e-3
            factor = 1e-3 if is_linear else max(1 / 3, 1 - (2 * gain - 1) ** 3)
            self.damping = min(MOST, max(LEAST, report.damping * factor))
        return report.loss

    def _refuse(self, report: Report, why: str = "") -> float:
        """Leave the parameters as they are, and say why, once."""
        self.report, self.growth, self.last = report, 2.0, None
        if why and not self._warned:
            self._warned = True
            warn(
                f"a step was refused, since {why}; the parameters stay as they were (report.accepted is False; said once)"
            )
        return report.loss

    def _split(self, batches: tuple[Any, ...]) -> list[Batch]:
        """The batch of each term, as a tuple."""
        given = batches if self.several else (batches,)
        if len(given) != len(self.terms):
            raise ValueError(
                f"step takes a batch for each of the {len(self.terms)} residual functions, not {len(given)}"
            )
        split = [
            tuple(b) if isinstance(b, (tuple, list)) else (b,) for b in given
        ]
        for term, batch in zip(self.terms, split, strict=True):
            if any(has_samples(x) and not len(x) for x in batch):
                raise ValueError(f"the batch of {term.name} is empty")
        return split

    def state_dict(self) -> dict[str, Any]:
        """What a resumed fit needs beside the model's own state."""
        state = {name: getattr(self, name) for name in STATE}
        return {**state, "generator": self.generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there, bit for bit on the same machine."""
        if set(state) != {*STATE, "generator"}:
            raise ValueError(
                f"a LeastSquares has the state {', '.join(self.state_dict())}, and this has {', '.join(state)}"
            )
        last, n = state["last"], self.parameters.n
        if last is not None and last.shape != (n,):
            raise ValueError(
                f"the state is that of {last.numel()} parameters, and the model has {n}"
            )
        for name in STATE:
            setattr(self, name, state[name])
        if last is not None:
            device, dtype = self.parameters.device, self.parameters.dtype
            self.last = last.to(device, dtype, copy=True)
        self.generator.set_state(state["generator"].cpu())


def _check(
    damping: float,
    momentum: float,
    sketch: object,
    memory: object,
    separate: object,
) -> None:
    """Refuse options that are not of their kind or range."""
    check_number("damping", damping, positive=True)
    check_number("momentum", momentum)
    if damping > MOST:
        raise ValueError(
            f"damping is λ in units of the mean eigenvalue, at most {MOST:g}, not {damping!r}"
        )
    if momentum >= 1:
        raise ValueError(f"momentum must be below 1, not {momentum!r}")
    if not isinstance(sketch, Sketch | None):
        raise TypeError(
            f"sketch is one of seng.sketch, as in sketch=seng.sketch.CountSketch(512), not {sketch!r}"
        )
    if memory is not None and (type(memory) is not int or memory < 1):
        raise ValueError(
            f"memory is a number of bytes, at least 1, not {memory!r}"
        )
    if not isinstance(separate, bool | None):
        raise TypeError(
            f"separate is True, False, or None to find out, not {separate!r}"
        )


def _check_switches(**switches: object) -> None:
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} is True or False, not {value!r}")


def _name(function: object, i: int, several: bool) -> str:
    """What messages call a residual function."""
    name = getattr(function, "__name__", "<lambda>")
    if name != "<lambda>":
        return f"residual '{name}'"
    return f"residual {i + 1}" if several else "the residual"
