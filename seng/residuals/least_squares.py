"""Least squares, min ½‖r(θ)‖²: Gauss–Newton steps by SENG's Woodbury formula, with Levenberg and Marquardt's damping.

    θ ← θ − d,   (JᵀJ + λI)d = Jᵀr                                                                    (`seng.residuals.normal`)

λ is `damping` times the mean eigenvalue of the smaller Gram, so that residuals in other units leave the steps as they are. The
damping follows the gain, what the loss fell by over what it would have fallen by were r linear. To d comes its acceleration
(Transtrum and Sethna 2012, arXiv 1201.5885): along −d residuals are r − hJd + ½h²c + …, and c is compensated for as r was.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from seng.checks import check_number
from seng.linalg.operators import Operator
from seng.linalg.sketch import Sketch
from seng.metrics.memory import free_memory
from seng.notices import warn
from seng.residuals.linearization import Linear
from seng.residuals.normal import Solve, normal_equations
from seng.residuals.terms import Batch, Parameters, Residual, Term, Values, has_samples

TRIES = 12  # solves of a step before it is given up
SHARE = 0.5  # of the free memory, where no budget is given
LEAST, MOST = 1e-16, 1e12  # of the damping
LENGTHS = tuple(2.0**-i for i in range(6))  # that a line search tries
PROBE = 0.1  # h
BEND = 0.75  # of ‖d‖: an acceleration that is longer is not believed


@dataclass(frozen=True)
class Report:
    """What a step did."""

    loss: float  # ½‖r‖² before it
    after: float  # and after it, of the same batch
    damping: float  # at its last solve
    lam: float  # λ: the damping times the mean eigenvalue
    length: float  # of the step in units of d; 0 where it was refused
    tries: int  # solves
    accepted: bool


@dataclass(frozen=True)
class Trial:
    """A step that was looked at."""

    loss: float  # ½‖r‖² there
    predicted: float  # how much less than now it would be if r were linear
    length: float
    step: Tensor  # (n,): θ now minus θ there
    values: Values  # θ there


class LeastSquares:
    """Fits a model's parameters, in place, so that residuals become small.

    `residual(model, *batch)` returns a vector. With a list of such functions `step` takes a batch for each of them, a tensor or
    a tuple of tensors with the samples in dimension 0, and r is what they return, one after the other.
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
        _check(
            damping,
            momentum,
            sketch,
            memory,
            separate,
            adapt=adapt,
            acceleration=acceleration,
            line_search=line_search,
        )
        self.parameters = Parameters(model)
        self.several = isinstance(residual, (list, tuple))
        functions: list[Any] = (
            list(residual) if isinstance(residual, (list, tuple)) else [residual]
        )
        self.terms = [
            Term(_name(f, i, self.several), f, self.parameters, separate)
            for i, f in enumerate(functions)
        ]
        if not self.terms:
            raise ValueError(
                "there is nothing to fit to: the list of residual functions is empty"
            )
        self.damping, self.momentum = float(damping), float(momentum)
        self.adapt, self.acceleration, self.line_search = (
            adapt,
            acceleration and adapt,
            line_search,
        )
        self.sketch, self.memory = sketch, memory
        self.growth = 2.0  # of the damping when a trial is refused
        self.steps = 0
        self.last: Tensor | None = None  # the last step (n,), with momentum
        self.generator = torch.Generator(self.parameters.device).manual_seed(
            0
        )  # of the sketches
        self.report: Report | None = None
        self._warned = False

    def step(self, *batches: Any) -> float:
        """One step on these samples; ½‖r‖² before it."""
        given = self._batches(batches)
        linear = Linear(
            self.parameters,
            self.terms,
            given,
            self.memory or int(SHARE * free_memory(self.parameters.device)),
        )
        loss, start = 0.5 * float(linear.r @ linear.r), self.damping
        self.steps += 1
        if not math.isfinite(loss):
            return self._refuse(
                Report(loss, loss, start, math.nan, 0.0, 0, False),
                "the residuals are not finite",
            )
        U = linear.operator()
        normal = normal_equations(U, self.sketch, self.generator)
        if not math.isfinite(normal.mean):
            return self._refuse(
                Report(loss, loss, start, math.nan, 0.0, 0, False),
                "the Jacobian is not finite",
            )
        last = self.last
        for tries in range(1, TRIES + 1):
            lam = self.damping * (normal.mean or 1.0)
            solve = normal.at(lam)
            trial = None if solve is None else self._try(linear, U, solve, last)
            if trial is not None and trial.loss < (loss if self.adapt else math.inf):
                self.report = Report(
                    loss, trial.loss, self.damping, lam, trial.length, tries, True
                )
                self.parameters.set(trial.values)
                self.last = trial.step if self.momentum else None
                self._relax(
                    (loss - trial.loss) / trial.predicted
                    if trial.predicted > 0
                    else 0.0,
                    start,
                )
                return loss
            if trial is not None and (
                not self.adapt
                or trial.predicted <= torch.finfo(linear.r.dtype).eps * loss
            ):
                break  # there is nothing to gain
            last = None  # a larger λ does not shorten what momentum adds
            self.damping, self.growth = (
                min(MOST, self.damping * self.growth),
                2 * self.growth,
            )
        report = Report(loss, loss, self.damping, lam, 0.0, tries, False)
        self.damping = min(MOST, 10 * start) if self.adapt else start
        return self._refuse(report)

    def _try(
        self, linear: Linear, U: Operator, solve: Solve, last: Tensor | None
    ) -> Trial:
        """The best step at one λ: d, with its acceleration or without, and shorter ones where asked for."""
        r = linear.r
        # Momentum is SPRING (Goldshlager, Abrahamsen and Lin 2024, arXiv 2401.10190): the last step, and what that leaves.
        d = (
            solve(r)
            if last is None
            else self.momentum * last + solve(r - self.momentum * U.rmv(last))
        )
        Jd = U.rmv(d)
        bends: list[Tensor | None] = [None]
        if self.acceleration:
            c = (
                2
                / PROBE**2
                * (linear.residuals(self.parameters.moved(PROBE * d)) - r + PROBE * Jd)
            )
            a = solve(c)
            bends += [a] if a.norm() <= BEND * d.norm() else []
        trials = []
        for length in LENGTHS if self.line_search else LENGTHS[:1]:
            predicted = length * float(r @ Jd) - 0.5 * length**2 * float(Jd @ Jd)
            for bend in bends:
                step = (
                    length * d if bend is None else length * d + 0.5 * length**2 * bend
                )
                values = self.parameters.moved(step)
                there = linear.residuals(values)
                trials.append(
                    Trial(0.5 * float(there @ there), predicted, length, step, values)
                )
        return min(
            trials,
            key=lambda trial: trial.loss if math.isfinite(trial.loss) else math.inf,
        )

    def _relax(self, gain: float, start: float) -> None:
        """Nielsen's rule: to a third where the gain is 1 or more, up where it is below ½; where r is linear, far down."""
        factor = 1e-3 if abs(gain - 1) < 1e-3 else max(1 / 3, 1 - (2 * gain - 1) ** 3)
        self.damping = (
            min(MOST, max(LEAST, self.damping * factor)) if self.adapt else start
        )
        self.growth = 2.0

    def _refuse(self, report: Report, why: str = "") -> float:
        self.report, self.last, self.growth = report, None, 2.0
        if why and not self._warned:
            self._warned = True
            warn(
                f"a step was refused, since {why}; the parameters stay as they were (report.accepted is False; said once)"
            )
        return report.loss

    def _batches(self, batches: tuple[Any, ...]) -> list[Batch]:
        if self.several and len(batches) != len(self.terms):
            raise ValueError(
                f"step takes a batch for each of the {len(self.terms)} residual functions, not {len(batches)}"
            )
        split = (
            [tuple(b) if isinstance(b, (tuple, list)) else (b,) for b in batches]
            if self.several
            else [batches]
        )
        for term, batch in zip(self.terms, split, strict=True):
            if any(has_samples(x) and not len(x) for x in batch):
                raise ValueError(f"the batch of {term.name} is empty")
        return split

    def state_dict(self) -> dict[str, Any]:
        """Where it stands, beside the parameters."""
        state = {
            "damping": self.damping,
            "growth": self.growth,
            "steps": self.steps,
            "last": self.last,
        }
        return {**state, "generator": self.generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there, bit for bit on the same machine."""
        if set(state) != set(self.state_dict()):
            raise ValueError(
                f"a LeastSquares has the state {', '.join(self.state_dict())}, and this has {', '.join(state)}"
            )
        last = state["last"]
        if last is not None and last.shape != (self.parameters.n,):
            raise ValueError(
                f"the state is that of {last.numel()} parameters, and the model has {self.parameters.n}"
            )
        self.damping, self.growth, self.steps = (
            float(state["damping"]),
            float(state["growth"]),
            int(state["steps"]),
        )
        self.last = (
            None
            if last is None
            else last.to(self.parameters.device, self.parameters.dtype, copy=True)
        )
        self.generator.set_state(state["generator"].cpu())


def _check(
    damping: float,
    momentum: float,
    sketch: object,
    memory: object,
    separate: object,
    **switches: object,
) -> None:
    """Options that are refused."""
    check_number("damping", damping, positive=True)
    check_number("momentum", momentum)
    if damping > MOST:
        raise ValueError(
            f"damping is λ in units of the mean eigenvalue, at most {MOST:g}, not {damping!r}"
        )
    if momentum >= 1:
        raise ValueError(f"momentum must be below 1, not {momentum!r}")
    if sketch is not None and not isinstance(sketch, Sketch):
        raise TypeError(
            f"sketch is one of seng.sketch, as in sketch=seng.sketch.CountSketch(512), not {sketch!r}"
        )
    if memory is not None and (
        not isinstance(memory, int) or isinstance(memory, bool) or memory < 1
    ):
        raise ValueError(f"memory is a number of bytes, at least 1, not {memory!r}")
    if separate is not None and not isinstance(separate, bool):
        raise TypeError(
            f"separate is True, False, or None to find out, not {separate!r}"
        )
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} is True or False, not {value!r}")


def _name(function: object, i: int, several: bool) -> str:
    name = getattr(function, "__name__", "<lambda>")
    return (
        f"residual '{name}'"
        if name != "<lambda>"
        else f"residual {i + 1}"
        if several
        else "the residual"
    )
