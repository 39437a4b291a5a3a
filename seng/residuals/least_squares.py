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
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from seng.checks import check_number
from seng.linalg.memory import free_memory
from seng.linalg.sketch import Sketch
from seng.notices import Notices
from seng.residuals.normal import Linearization, NormalEquations, linearize
from seng.residuals.terms import Parameters, Residual, Term

TRIES = 12  # solves of a step before it is given up
SHARE = 0.5  # of the free memory, where no budget is given
LEAST = 1e-16  # of the damping
MOST = 1e12  # of the damping
LENGTHS = tuple(2.0**-i for i in range(6))  # that a line search tries
PROBE = 0.1  # h, where the bend c is measured
BEND = 0.75  # of ‖d‖: a longer acceleration is not trusted
# What a checkpoint keeps, with the generator.
STATE = ("damping", "growth", "steps", "last")


@dataclass(frozen=True)
class Report:
    """What a step did."""

    loss: float  # ½‖r‖² before the step
    after: float  # ½‖r‖² after it, on the same batch
    damping: float  # at the last solve
    lam: float = math.nan  # λ: the damping times the mean eigenvalue
    length: float = 0.0  # of the step in units of d; 0: it was refused
    tries: int = 0  # solves
    accepted: bool = False


class Trial(NamedTuple):
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
        self.adapt = adapt
        self.acceleration = acceleration
        self.line_search = line_search
        self.sketch = sketch
        self.memory = memory
        self._check(damping, momentum, separate)
        self.damping = float(damping)
        self.momentum = float(momentum)
        self.parameters = Parameters(model)
        self.several = isinstance(residual, (list, tuple))
        functions: Any = residual if self.several else [residual]
        self.terms = [
            Term(_name(f, i), f, self.parameters, separate)
            for i, f in enumerate(functions, 1)
        ]
        if not self.terms:
            raise ValueError(
                "there is nothing to fit to: the list of residual functions is empty"
            )
        self.growth = 2.0  # of the damping when the first trial is refused
        self.steps = 0
        self.last: Tensor | None = None  # the last step (n,), with momentum
        generator = torch.Generator(self.parameters.theta().device)
        self.generator = generator.manual_seed(0)  # of the sketches
        self.report: Report | None = None
        self.notices = Notices(strict=False)

    def _check(
        self, damping: float, momentum: float, separate: object
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
        if not isinstance(self.sketch, Sketch | None):
            raise TypeError(
                "sketch is one of seng.sketch, as in sketch=seng.sketch.CountSketch(512), not "
                f"{self.sketch!r}"
            )
        memory = self.memory
        if memory is not None and (type(memory) is not int or memory < 1):
            raise ValueError(
                f"memory is a number of bytes, at least 1, not {memory!r}"
            )
        if not isinstance(separate, bool | None):
            raise TypeError(
                f"separate is True, False, or None to find out, not {separate!r}"
            )
        for name in ("adapt", "acceleration", "line_search"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise TypeError(f"{name} is True or False, not {value!r}")

    @torch.enable_grad()  # residuals may differentiate the model
    def step(self, *batches: Any) -> float:
        """Take one step on these samples. Returns ½‖r‖² before it."""
        given = batches if self.several else (batches,)
        if len(given) != len(self.terms):
            raise ValueError(
                f"step takes a batch for each of the {len(self.terms)} residual functions, not "
                f"{len(given)}"
            )
        device = self.generator.device
        memory = self.memory or int(SHARE * free_memory(device))
        here = linearize(self.terms, given, memory)
        self.steps += 1
        self.report, step = self._search(here)
        self.last = step if self.momentum else None
        if step is not None:
            self.parameters.subtract(step)
        return self.report.loss

    def _search(self, here: Linearization) -> tuple[Report, Tensor | None]:
        """What to do, and the step; None where it is refused."""
        loss = half_square(here.r)
        report = Report(loss, loss, self.damping)
        if not math.isfinite(loss):
            self._not_finite("the residuals are")
            return report, None
        U = here.operator()
        normal = NormalEquations(U, self.sketch, self.generator)
        if not math.isfinite(normal.mean):
            self._not_finite("the Jacobian is")
            return report, None
        # A step must end below `most`, and predict a gain above `least` to be worth another try.
        most = loss if self.adapt else math.inf
        least = torch.finfo(here.r.dtype).eps * most
        last = self.last
        damping = self.damping
        for tries in range(1, TRIES + 1):
            lam = damping * (normal.mean or 1.0)
            report = Report(loss, loss, damping, lam, tries=tries)
            trial = self._try(here, normal, lam, last)
            if trial and trial.loss < most:
                if self.adapt:
                    self.damping = adapted(damping, loss, trial)
                how = damping, lam, trial.length, tries, True
                return Report(loss, trial.loss, *how), trial.step
            if trial and trial.predicted <= least:
                break
            last = None  # a larger λ does not shorten what momentum adds
            damping = min(MOST, damping * self.growth**tries)
        if self.adapt:
            self.damping = min(MOST, 10 * self.damping)
        return report, None

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
        r = here.r
        push = normal.U.rmv
        if last is None:
            d = solve(r)
        else:  # SPRING (Goldshlager, Abrahamsen and Lin 2024, arXiv 2401.10190)
            kept = self.momentum * last
            d = kept + solve(r - push(kept))
        Jd = push(d)
        bends: list[Any] = [0.0]
        if self.acceleration and self.adapt:
            there = here.residuals(PROBE * d)
            c = 2 / PROBE**2 * (there - r + PROBE * Jd)
            a = solve(c)
            if a.norm() <= BEND * d.norm():
                bends.append(a)
        trials = []
        lengths = LENGTHS if self.line_search else LENGTHS[:1]
        for h, bend in product(lengths, bends):
            step = h * d + 0.5 * h**2 * bend
            loss = half_square(here.residuals(step))
            square = 0.5 * h**2 * (Jd @ Jd)
            predicted = float(h * (r @ Jd) - square)
            trials.append(Trial(loss, predicted, h, step))
        return min(trials, key=lambda t: (math.isnan(t.loss), t.loss))

    def _not_finite(self, what: str) -> None:
        """Refuse a step, and say why, once."""
        self.notices.once(
            "refused",
            f"a step was refused, since {what} not finite; the parameters stay as they were "
            "(report.accepted is False; said once)",
        )

    def state_dict(self) -> dict[str, Any]:
        """What a resumed fit needs beside the model's own state."""
        state = {name: getattr(self, name) for name in STATE}
        return state | {"generator": self.generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there, bit for bit on the same machine."""
        if set(state) != {*STATE, "generator"}:
            raise ValueError(
                f"a LeastSquares has the state {', '.join(self.state_dict())}, and this has "
                f"{', '.join(state)}"
            )
        last = state["last"]
        theta = self.parameters.theta()
        if last is not None and last.shape != theta.shape:
            raise ValueError(
                f"the state is that of {last.numel()} parameters, and the model has {len(theta)}"
            )
        for name in STATE:
            setattr(self, name, state[name])
        if last is not None:
            self.last = last.to(theta)
        self.generator.set_state(state["generator"].cpu())


def half_square(r: Tensor) -> float:
    """½‖r‖²."""
    return 0.5 * float(r @ r)


def adapted(damping: float, loss: float, trial: Trial) -> float:
    """The damping after a step, by Nielsen's rule.

    The damping falls to a third where the gain is 1 or more, and rises where it is below ½. Where
    the gain is 1 to three digits, r is linear, and the damping falls to a thousandth.
    """
    fall = loss - trial.loss
    predicted = trial.predicted
    gain = fall / predicted if predicted > 0 else 0.0
    is_linear = abs(gain - 1) < 1e-3
    factor = 1e-3 if is_linear else max(1 / 3, 1 - (2 * gain - 1) ** 3)
    return min(MOST, max(LEAST, damping * factor))


def _name(function: object, i: int) -> str:
    """What messages call a residual function."""
    name = getattr(function, "__name__", "<lambda>")
    return f"residual {i}" if name == "<lambda>" else f"residual '{name}'"
