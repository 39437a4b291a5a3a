"""Curvature: which approximation of the Fisher matrix a block keeps, as one frozen value that is checked when it is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from seng.sketch import Sketch

Form = Literal["auto", "explicit", "implicit", "merged"]
Combine = Literal["exact", "independent"]
Units = Literal["sgd", "paper"]


@dataclass(frozen=True)
class Curvature:
    """How U is sampled, kept and used. Defaults and the reason for each:

    form="auto"            plans per layer from its shape; see `seng.explain`
    samples=None           ϱ: the first so many of the step's samples; None takes all, since they cost no extra backward
    rank=16                r of the implicit form and width k of the merged basis, which holds k·n numbers; more gained little
                           (docs/tuning.md); more than exists means exact; None keeps as many as the direction needs
    sketch=None            exact products; a `seng.sketch` trades accuracy for a cheaper refresh
    combine="exact"        Uc by eq. 22; "independent" is the paper's cheap eq. 23, for its tables
    decay=None             0.8 where the form can accumulate: one batch is too noisy; 0 (each refresh replaces U) is the paper's
    relative_damping=True  λ = damping × the block's largest eigenvalue, so that one value fits every layer and loss scale
    memory=None            bytes, or a fraction of the free memory, that the curvature may occupy; None sets no limit
    traffic=None           gradients per step that ranks which share a basis may send for it, on average: k ≤ traffic·T, to be
                           weighed against the network between them; None sets no limit
    """

    form: Form = "auto"
    samples: int | None = None
    rank: int | None = 16
    sketch: Sketch | None = None
    combine: Combine = "exact"
    decay: float | None = None
    relative_damping: bool = True
    fisher: Literal["empirical"] = "empirical"
    blocks: Literal["layer"] = "layer"
    memory: int | float | None = None
    traffic: float | None = None

    def __post_init__(self) -> None:
        _one_of("form", self.form, get_args(Form))
        _one_of("combine", self.combine, get_args(Combine))
        _one_of("fisher", self.fisher, ("empirical",))
        _one_of("blocks", self.blocks, ("layer",))
        if self.rank is not None:
            _positive_int("rank", self.rank)
        if self.samples is not None:
            _positive_int("samples", self.samples)
        if self.sketch is not None and not isinstance(self.sketch, Sketch):
            raise TypeError(f"Curvature: sketch is None or one of seng.sketch, such as Rows(256), not {self.sketch!r}")
        if self.decay is not None and not (isinstance(self.decay, int | float) and 0 <= self.decay < 1):
            raise ValueError(f"Curvature: decay must lie in [0, 1), not {self.decay!r}")
        if self.averaging > 0 and self.form not in ("auto", "merged"):
            raise ValueError(
                f"Curvature: only the merged form can accumulate curvature; with form={self.form!r} use decay=0, "
                f"not decay={self.decay!r}"
            )
        if self.combine == "independent" and (self.form not in ("auto", "implicit") or self.averaging > 0):
            raise ValueError(
                "Curvature: combine='independent' (eq. 23) is the implicit form's; use form='implicit' or 'auto' with "
                f"decay=0, not form={self.form!r} with decay={self.decay!r}"
            )
        if not isinstance(self.relative_damping, bool):
            raise ValueError(f"Curvature: relative_damping is True or False, not {self.relative_damping!r}")
        if self.memory is not None:
            fraction = isinstance(self.memory, float) and 0 < self.memory <= 1
            if not (fraction or (type(self.memory) is int and self.memory > 0)):
                raise ValueError(f"Curvature: memory is bytes (an int) or a fraction in (0, 1], not {self.memory!r}")

        if self.traffic is not None and not (
            isinstance(self.traffic, int | float) and not isinstance(self.traffic, bool) and self.traffic > 0
        ):
            raise ValueError(f"Curvature: traffic is a positive number of gradients per step, not {self.traffic!r}")

    @property
    def averaging(self) -> float:
        """The decay that acts."""
        if self.decay is not None:
            return self.decay
        return 0.8 if self.form in ("auto", "merged") and self.combine == "exact" else 0.0


def _one_of(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"Curvature: unknown {name} {value!r}; use one of {', '.join(map(repr, allowed))}")


def _positive_int(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"Curvature: {name} must be an integer of at least 1, not {value!r}")
