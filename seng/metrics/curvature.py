"""Curvature: which approximation of the Fisher matrix a block keeps, as one frozen value that is checked when it is made."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from seng.layers.fisher import Fisher, Loss
from seng.linalg.sketch import Sketch

Form = Literal["auto", "explicit", "implicit", "merged", "plain"]
Combine = Literal["exact", "independent"]
Blocks = Literal["layer", "network"]
Metric = Literal["identity", "kronecker", "diagonal"]
Units = Literal["sgd", "paper"]
BASE_RANK = 32  # where SENG chooses: more costs more and gained nothing on digits and the small race
PLAIN_REFUSES = (
    "samples",
    "sketch",
    "combine",
    "decay",
    "fisher",
    "blocks",
    "memory",
    "base",
    "graft",
)  # what it would ignore


@dataclass(frozen=True)
class Curvature:
    """How U is sampled, kept and used. These defaults are low rank over λI, the paper's family; SENG without a curvature takes

    Curvature(base="kronecker", rank=0, base_rank=32), a metric alone (`usual` of the ranks). Defaults and the reason for each:

    form="auto"            plans per layer from its shape; see `seng.explain`. "plain" keeps no curvature: d = g, which
                           with `orthogonal=True` is Muon's step and got further than any curvature (docs/race.md)
    samples=None           ϱ: the first so many of the step's samples, ϱ/𝓜 on each of 𝓜 ranks; None takes all, since they
                           cost no extra backward
    rank=16                r of the implicit form and width k of the merged basis, which holds k·n numbers; more gained little
                           (docs/race.md); more than exists means exact; None keeps as many as the direction needs; 0, with a
                           base, is P alone
    sketch=None            exact products; a `seng.sketch` trades accuracy for a cheaper refresh
    combine="exact"        Uc by eq. 22; "independent" is the paper's cheap eq. 23, for its tables
    decay=None             0.8 where the form can accumulate: one batch is too noisy; 0 (each refresh replaces U) is the paper's
    relative_damping=True  λ = damping × the block's largest eigenvalue (of P alone: the mean one, which λ bounds all of them
                           by), so that one value fits every layer and loss scale
    fisher="empirical"     u_i from the training loss, as the backward has them (the paper); "gauss-newton" from the output's
                           Jacobian and "sampled" from labels drawn from the model, by backwards of their own on refresh steps
    loss=None              which loss those two assume at the output (seng/layers/fisher.py): "squares" for "gauss-newton",
                           "cross-entropy" for "sampled", unless it is given; "bernoulli" is the third
    blocks="layer"         one block per layer (the paper); "network" is one for all of them (seng/metrics/network.py)
    memory=None            bytes, or a fraction of the free memory, that the curvature may occupy; None sets no limit
    base="identity"        P of UUᵀ + λP (base.py): I is the paper's; "kronecker" and "diagonal" also tell apart what lies
                           outside the span of U. Layers without factors take "diagonal" where "kronecker" is asked for
    power=0.5              p of P = C^p: 1 is K-FAC's metric, 1/2 its square root (of the diagonal: Adam's)
    base_rank=128          directions kept of each Kronecker factor, all others being one constant; all of a smaller factor
    graft=None             whether a layer's direction is scaled to the length of its plain gradient, so that SGD's lr carries
                           over: with a base it is, unless False
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
    fisher: Fisher = "empirical"
    blocks: Blocks = "layer"
    memory: int | float | None = None
    traffic: float | None = None
    loss: Loss | None = None
    base: Metric = "identity"
    power: float = 0.5
    base_rank: int = 128
    graft: bool | None = None

    def __post_init__(self) -> None:
        _one_of("form", self.form, get_args(Form))
        _one_of("combine", self.combine, get_args(Combine))
        _one_of("fisher", self.fisher, get_args(Fisher))
        _one_of("blocks", self.blocks, get_args(Blocks))
        if self.loss is not None:
            _one_of("loss", self.loss, get_args(Loss))
            if self.fisher == "empirical":
                raise ValueError(
                    f"Curvature: loss={self.loss!r} is what fisher='gauss-newton' or 'sampled' starts from; "
                    "fisher='empirical' takes the loss that is trained"
                )
        _one_of("base", self.base, get_args(Metric))
        if self.rank is not None:
            _integer(
                "rank", self.rank, least=1 if self.base == "identity" else 0
            )  # with a base, 0 leaves P alone
        _integer("base_rank", self.base_rank)
        if isinstance(self.power, bool) or not (
            isinstance(self.power, int | float) and 0 < self.power <= 1
        ):
            raise ValueError(
                f"Curvature: power is the p of C^p, above 0 and at most 1, not {self.power!r}"
            )
        if not (self.graft is None or isinstance(self.graft, bool)):
            raise ValueError(
                f"Curvature: graft is True, False or None, not {self.graft!r}"
            )
        if self.graft and self.blocks == "network":
            raise ValueError(
                "Curvature: graft=True gives each layer its gradient's length; use blocks='layer' with it"
            )
        if self.form == "plain":
            default = {f.name: f.default for f in fields(self)}
            idle = [
                name for name in PLAIN_REFUSES if getattr(self, name) != default[name]
            ]
            if idle:
                raise ValueError(
                    f"Curvature: form='plain' keeps no curvature; leave out {', '.join(idle)}, or choose another form"
                )
        if self.base != "identity" and (
            self.blocks == "network" or self.combine == "independent"
        ):
            asked = (
                "blocks='network'"
                if self.blocks == "network"
                else "combine='independent'"
            )
            raise ValueError(
                f"Curvature: base={self.base!r} is a metric of each layer's own; {asked} has base='identity' only"
            )
        if self.samples is not None:
            _integer("samples", self.samples)
        if self.sketch is not None and not isinstance(self.sketch, Sketch):
            raise TypeError(
                f"Curvature: sketch is None or one of seng.sketch, such as Rows(256), not {self.sketch!r}"
            )
        if self.decay is not None and not (
            isinstance(self.decay, int | float) and 0 <= self.decay < 1
        ):
            raise ValueError(f"Curvature: decay must lie in [0, 1), not {self.decay!r}")
        if self.averaging > 0 and self.form not in ("auto", "merged"):
            raise ValueError(
                f"Curvature: only the merged form can accumulate curvature; with form={self.form!r} use decay=0, "
                f"not decay={self.decay!r}"
            )
        if self.combine == "independent" and (
            self.form not in ("auto", "implicit") or self.averaging > 0
        ):
            raise ValueError(
                "Curvature: combine='independent' (eq. 23) is the implicit form's; use form='implicit' or 'auto' with "
                f"decay=0, not form={self.form!r} with decay={self.decay!r}"
            )
        if self.combine == "independent" and self.blocks == "network":
            raise ValueError(
                "Curvature: combine='independent' (eq. 23) is made layer by layer; use blocks='layer' with it"
            )
        if not isinstance(self.relative_damping, bool):
            raise ValueError(
                f"Curvature: relative_damping is True or False, not {self.relative_damping!r}"
            )
        if self.memory is not None:
            fraction = isinstance(self.memory, float) and 0 < self.memory <= 1
            if not (fraction or (type(self.memory) is int and self.memory > 0)):
                raise ValueError(
                    f"Curvature: memory is bytes (an int) or a fraction in (0, 1], not {self.memory!r}"
                )

        if self.traffic is not None and not (
            isinstance(self.traffic, int | float)
            and not isinstance(self.traffic, bool)
            and self.traffic > 0
        ):
            raise ValueError(
                f"Curvature: traffic is a positive number of gradients per step, not {self.traffic!r}"
            )

    @property
    def assumed(self) -> Loss:
        """The loss at the output, where `fisher` asks for one."""
        return self.loss or (
            "squares" if self.fisher == "gauss-newton" else "cross-entropy"
        )

    @property
    def none(self) -> bool:
        """Whether directions are gradients, and nothing is captured."""
        return self.form == "plain"

    @property
    def grafts(self) -> bool:
        """Whether directions are scaled to the gradient's length."""
        return self.base != "identity" if self.graft is None else self.graft

    @property
    def averaging(self) -> float:
        """The decay that acts."""
        if self.decay is not None:
            return self.decay
        return (
            0.8 if self.form in ("auto", "merged") and self.combine == "exact" else 0.0
        )


def _one_of(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(
            f"Curvature: unknown {name} {value!r}; use one of {', '.join(map(repr, allowed))}"
        )


def _integer(name: str, value: Any, least: int = 1) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(
            f"Curvature: {name} must be an integer of at least {least}, not {value!r}"
        )
