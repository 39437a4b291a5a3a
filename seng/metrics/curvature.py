"""Curvature: which approximation of the Fisher matrix a layer keeps, as one frozen value that is
checked when it is made.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from seng.layers.fisher import Fisher, Loss
from seng.linalg.sketch import Sketch

Form = Literal["auto", "explicit", "implicit", "merged", "plain"]
Combine = Literal["exact", "independent"]
Blocks = Literal["layer", "network"]
Base = Literal["identity", "kronecker"]
# The default's: more gained nothing on digits and the small race.
BASE_RANK = 32

CHOICES = {
    "form": get_args(Form),
    "combine": get_args(Combine),
    "fisher": get_args(Fisher),
    "blocks": get_args(Blocks),
    "base": get_args(Base),
    "relative_damping": (True, False),
    "loss": (None, *get_args(Loss)),
    "graft": (None, True, False),
}


@dataclass(frozen=True)
class Curvature:
    """How U is sampled, kept and used.

    These defaults are low rank over λI, the paper's family. SENG without a curvature takes
    Curvature(base="kronecker", rank=0, base_rank=32), the Kronecker metric alone. Each field and
    the reason for its default:

    form="auto"            plans per layer from its shape; see `seng.explain`. "plain" keeps no
                           curvature:
                           d = g, which with `orthogonal=True` is Muon's step (docs/race.md)
    samples=None           ϱ: the first so many of the step's samples, ϱ/𝓜 on each of 𝓜 ranks; None
                           takes all,
                           since they cost no extra backward
    rank=16                r of the implicit form and width k of the merged basis, which holds k·n
                           numbers;
                           more gained little (docs/race.md). More than exists means exact; 0, with
                           a base, is the base alone
    sketch=None            exact products; a `seng.sketch` trades accuracy for a cheaper refresh
    combine="exact"        Uc by eq. 22; "independent" is the paper's cheap eq. 23, for its tables
    decay=None             0.8 where the form can accumulate: one batch is too noisy; 0 (each
                           refresh
                           replaces U) is the paper's
    relative_damping=True  λ = damping × the layer's largest eigenvalue (of a Kronecker metric
                           alone: the
                           mean one), so that one value fits every layer and loss scale
    fisher="empirical"     u_i from the training loss, as the backward has them (the paper); "gauss-
                           newton"
                           from the output's Jacobian and "sampled" from labels drawn from the
                           model, by backwards of their own on refresh steps
    loss=None              which loss those two assume at the output (seng/layers/fisher.py):
                           "squares" for
                           "gauss-newton", "cross-entropy" for "sampled"; "bernoulli" is the third
    blocks="layer"         one block per layer (the paper); "network" is one for all
                           (metrics/network.py)
    memory=None            bytes, or a fraction of the free memory, that the curvature may occupy;
                           more is
                           refused, with what would fit. None sets no limit
    base="identity"        P of UUᵀ + λP: I is the paper's; "kronecker" (metrics/kronecker.py) also
                           tells
                           apart what lies outside the span of U. Layers without factors have a
                           diagonal one
    power=0.5              p of P = C^p: 1 is K-FAC's metric, 1/2 its square root
    base_rank=128          directions kept of each Kronecker factor, all others being one constant
    graft=None             whether a layer's direction is scaled to the length of its gradient, so
                           that
                           SGD's lr carries over: with a base it is, unless False
    """

    form: Form = "auto"
    samples: int | None = None
    rank: int = 16
    sketch: Sketch | None = None
    combine: Combine = "exact"
    decay: float | None = None
    relative_damping: bool = True
    fisher: Fisher = "empirical"
    blocks: Blocks = "layer"
    memory: int | float | None = None
    loss: Loss | None = None
    base: Base = "identity"
    power: float = 0.5
    base_rank: int = 128
    graft: bool | None = None

    def __post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            value = getattr(self, name)
            alike = type(value) in map(type, allowed)  # 1 == True
            if value not in allowed or not alike:
                known = ", ".join(map(repr, allowed))
                raise ValueError(
                    f"Curvature: unknown {name} {value!r}; use one of {known}"
                )
        self._check_numbers()
        self._check_idle()
        self._check_together()

    def _check_numbers(self) -> None:
        # With a base, 0 leaves the base alone.
        _integer("rank", self.rank, least=1 if self.base == "identity" else 0)
        _integer("base_rank", self.base_rank)
        if self.samples is not None:
            _integer("samples", self.samples)
        if not (_is_number(self.power) and 0 < self.power <= 1):
            raise ValueError(
                "Curvature: power is the p of C^p, above 0 and at most 1, not "
                f"{self.power!r}"
            )
        if self.sketch is not None and not isinstance(self.sketch, Sketch):
            raise TypeError(
                "Curvature: sketch is None or one of seng.sketch, such as Rows(256), not "
                f"{self.sketch!r}"
            )
        decay = self.decay
        if decay is not None and not (_is_number(decay) and 0 <= decay < 1):
            raise ValueError(
                f"Curvature: decay must lie in [0, 1), not {decay!r}"
            )
        memory = self.memory
        fraction = isinstance(memory, float) and 0 < memory <= 1
        count = type(memory) is int and memory > 0
        if memory is not None and not (fraction or count):
            raise ValueError(
                "Curvature: memory is bytes (an int) or a fraction in (0, 1], not "
                f"{memory!r}"
            )

    def _check_idle(self) -> None:
        """Options that would do nothing beside the others are refused."""
        given = [
            f.name for f in fields(self) if getattr(self, f.name) != f.default
        ]
        if self.form == "plain":
            mute = {*given} - {"form"}
            why = "form='plain' keeps no curvature; leave out {}, or choose another form"
        elif self.base == "identity":
            mute = {"power", "base_rank"}
            why = "base='identity' has no factors; leave out {}, or use base='kronecker'"
        elif self.rank == 0:
            mute = {"form", "sketch"}
            why = "rank=0 is the base alone, without U; leave out {}, or use a rank"
        else:
            return
        idle = [name for name in given if name in mute]
        if idle:
            raise ValueError(f"Curvature: {why.format(', '.join(idle))}")

    def _check_together(self) -> None:
        """Options that exclude each other."""
        form, decay = self.form, self.decay
        network = self.blocks == "network"
        independent = self.combine == "independent"
        if self.loss is not None and self.fisher == "empirical":
            raise ValueError(
                f"Curvature: loss={self.loss!r} is what fisher='gauss-newton' or "
                "'sampled' starts from; fisher='empirical' takes the loss that is trained"
            )
        if self.graft and network:
            raise ValueError(
                "Curvature: graft=True gives each layer its gradient's length; use "
                "blocks='layer' with it"
            )
        if self.base != "identity" and (network or independent):
            asked = "blocks='network'" if network else "combine='independent'"
            raise ValueError(
                f"Curvature: base={self.base!r} is a metric of each layer's own; {asked} "
                "has base='identity' only"
            )
        if self.averaging > 0 and form not in ("auto", "merged"):
            raise ValueError(
                "Curvature: only the merged form can accumulate curvature; with "
                f"form={form!r} use decay=0, not decay={decay!r}"
            )
        if independent and (
            form not in ("auto", "implicit") or self.averaging > 0
        ):
            raise ValueError(
                "Curvature: combine='independent' (eq. 23) is the implicit form's; use "
                "form='implicit' or 'auto' with decay=0, not "
                f"form={form!r} with decay={decay!r}"
            )
        if independent and network:
            raise ValueError(
                "Curvature: combine='independent' (eq. 23) is made layer by layer; use "
                "blocks='layer' with it"
            )

    @property
    def assumed(self) -> Loss:
        """The loss at the output, where `fisher` asks for one."""
        if self.loss is not None:
            return self.loss
        return "squares" if self.fisher == "gauss-newton" else "cross-entropy"

    @property
    def grafts(self) -> bool:
        """Whether directions are scaled to the gradient's length."""
        return self.base != "identity" if self.graft is None else self.graft

    @property
    def averaging(self) -> float:
        """The decay that acts."""
        if self.decay is not None:
            return self.decay
        accumulates = (
            self.form in ("auto", "merged") and self.combine == "exact"
        )
        return 0.8 if accumulates else 0.0


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _integer(name: str, value: Any, least: int = 1) -> None:
    if type(value) is not int or value < least:
        raise ValueError(
            f"Curvature: {name} must be an integer of at least {least}, not {value!r}"
        )
