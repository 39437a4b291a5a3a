"""What a user says of the curvature, as frozen values that are checked when they are made.

    M̄ + λP     M̄ = ŪŪᵀ of per-sample gradients: `Curvature`;  P = C^p: `Kronecker`, or I

Each layer has its own.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from math import inf
from typing import Any, Literal, get_args

from seng.layers.fisher import Fisher, Loss
from seng.linalg.sketch import Sketch

Form = Literal["auto", "explicit", "implicit", "merged"]
Combine = Literal["exact", "independent"]
Blocks = Literal["layer", "network"]
Damp = Literal["floor", "tikhonov"]

# 𝒯: Table 1 keeps cases I to III (n ≤ 524,288) explicit, IV to VI (n ≥ 1,048,576) implicit.
THRESHOLD = 10**6

# What None stands for: why these values, docs/tuning.md.
POWER, POWER_OF_CONVOLUTIONS = 0.55, 1.0
STEEP = 0.75  # powers above it stretch so much that they need the higher floor
OF_STEEP = {"rank": 16, "floor": 0.1}
OF_ROOTS = {"rank": 128, "floor": 0.001}
DECAYS = {"floor": 0.8, "tikhonov": 0.95}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _choice(owner: str, name: str, value: Any, allowed: Any) -> None:
    alike = type(value) in map(type, allowed)  # 1 == True
    if value not in allowed or not alike:
        known = ", ".join(map(repr, allowed))
        raise ValueError(
            f"{owner}: unknown {name} {value!r}; use one of {known}"
        )


def _integer(owner: str, name: str, value: Any) -> None:
    if type(value) is not int or value < 1:
        raise ValueError(
            f"{owner}: {name} must be an integer of at least 1, not {value!r}"
        )


def _fraction(owner: str, name: str, value: Any) -> None:
    if not (_is_number(value) and 0 <= value < 1):
        raise ValueError(f"{owner}: {name} must lie in [0, 1), not {value!r}")


@dataclass(frozen=True)
class Kronecker:
    """The Kronecker metric P = C_G^p ⊗ C_A^p of a layer's outputs and inputs.

    As `Curvature(base=seng.Kronecker(…))` it stands in the place of I; `seng.KFAC` takes the same
    fields and has it alone. Layers without factors (norms, embeddings) have a diagonal one.

    Args:
        power: p of C^p. 1 is K-FAC's metric, 1/2 its square root, as in Shampoo and Adam.
        rank: directions kept of each factor; all others count as one constant. Factors of up to
            twice as many rows are kept whole, which is as cheap.
        floor: eigenvalues of each factor count as at least this share of their mean.
        decay: how much of the old factors a refresh keeps.
        damp: "floor" as above; P has mean 1 and directions have the gradient's length. "tikhonov"
            is K-FAC as Martens and Grosse have it: dense factors, power 1, π-damping by λ, and the
            length that comes of it.

    A power of None is 1 for convolutions, which have a `kernel_size`, and 0.55 for other layers.
    Rank and floor of None are 16 and 0.1 for powers above 0.75, else 128 and 0.001.
    """

    power: Any = None  # tikhonov: 1
    rank: Any = None  # tikhonov: all
    floor: Any = None  # tikhonov has none
    decay: Any = None  # 0.8; tikhonov: 0.95
    damp: Damp = "floor"

    def __post_init__(self) -> None:
        _choice("Kronecker", "damp", self.damp, get_args(Damp))
        if self.damp == "tikhonov":
            for name in ("rank", "floor"):
                if getattr(self, name) is not None:
                    raise ValueError(
                        "Kronecker: damp='tikhonov' has dense factors and is damped by λ; leave "
                        f"out {name}, or use damp='floor'"
                    )
            if self.power not in (None, 1):
                raise ValueError(
                    f"Kronecker: damp='tikhonov' has power 1, not {self.power!r}; leave it out, "
                    "or use damp='floor'"
                )
            vars(self)["power"] = 1.0
        if self.decay is None:
            vars(self)["decay"] = DECAYS[self.damp]
        power, floor, decay = self.power, self.floor, self.decay
        if power is not None and not (_is_number(power) and 0 < power <= 1):
            raise ValueError(
                f"Kronecker: power is the p of C^p, above 0 and at most 1, not {power!r}"
            )
        if self.rank is not None:
            _integer("Kronecker", "rank", self.rank)
        if floor is not None and not (_is_number(floor) and 0 < floor < inf):
            raise ValueError(
                f"Kronecker: floor is a share of the mean eigenvalue above 0, not {floor!r}"
            )
        _fraction("Kronecker", "decay", decay)

    def or_power(self, power: float | None) -> Kronecker:
        """With this power, where it has none."""
        return self if self.power is not None else replace(self, power=power)

    def of(self, convolution: bool) -> Kronecker:
        """That of a layer, with numbers where None was."""
        power = POWER_OF_CONVOLUTIONS if convolution else POWER
        if self.power is not None:
            power = float(self.power)
        usual = OF_STEEP if power > STEEP else OF_ROOTS
        asked = {name: getattr(self, name) for name in usual}
        own = {k: v for k, v in asked.items() if v is not None}
        return replace(self, power=power, **{**usual, **own})


CHOICES = {
    "form": get_args(Form),
    "combine": get_args(Combine),
    "fisher": get_args(Fisher),
    "blocks": get_args(Blocks),
    "relative_damping": (True, False),
    "loss": (None, *get_args(Loss)),
    "centred": (None, True, False),
}
SKETCHES = "sketch", "implicit_sketch"


@dataclass(frozen=True)
class Curvature:
    """How the per-sample gradients U of a layer are sampled, kept and used.

    Args:
        form: how U is kept. "auto" plans each layer from its shape; see `seng.explain`.
            "explicit": its columns; "implicit": factors G_i, A_i; "merged": leading directions.
        samples: ϱ, so many of the step's samples make U (ϱ/𝓜 on each of 𝓜 ranks); None: all.
        rank: k, the directions kept by the merged form; r, the columns of the implicit factors.
            More than exists means exact.
        sketch: a `seng.sketch`, for a cheaper refresh; None: exact products.
        implicit_sketch: the same for layers in implicit form; None: as `sketch`.
        threshold: 𝒯 of Algorithm 1, the size n from which a layer is kept in implicit form.
        combine: "exact" is eq. 22; "independent" the paper's cheap eq. 23.
        centred: whether U is taken about its mean, so that the curvature is the covariance of the
            samples. None: yes for `fisher="empirical"` with exact products.
        decay: how much of the old U a refresh keeps, which the merged form can; 0: each refresh
            replaces U.
        relative_damping: whether λ is in units of a layer's largest eigenvalue.
        fisher: "empirical": from the training loss; "gauss-newton": the output's Jacobian;
            "sampled": labels drawn from the model. The last two cost backwards of their own.
        loss: which loss these two assume at the output: "squares", "cross-entropy", "bernoulli".
        blocks: "layer": one block per layer; "network": one for all.
        base: P of ŪŪᵀ + λP: a `seng.Kronecker`, or None for the paper's I.
        memory: bytes, or a fraction of the free memory, that the curvature may occupy; more is
            refused, with what would fit.
    """

    form: Form = "auto"
    samples: int | None = 8
    rank: int = 4
    sketch: Sketch | None = None
    implicit_sketch: Sketch | None = None
    threshold: int = THRESHOLD
    combine: Combine = "exact"
    centred: bool | None = None
    decay: float = 0.0
    relative_damping: bool = True
    fisher: Fisher = "empirical"
    loss: Loss | None = None
    blocks: Blocks = "layer"
    base: Kronecker | None = Kronecker()
    memory: int | float | None = None

    def __post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            _choice("Curvature", name, getattr(self, name), allowed)
        self._check_numbers()
        self._check_base()
        self._check_together()

    def _check_numbers(self) -> None:
        for name in ("rank", "threshold"):
            _integer("Curvature", name, getattr(self, name))
        if self.samples is not None:
            _integer("Curvature", "samples", self.samples)
        for name in SKETCHES:
            given = getattr(self, name)
            if given is not None and not isinstance(given, Sketch):
                raise TypeError(
                    f"Curvature: {name} is None or one of seng.sketch, such as Rows(256), not "
                    f"{given!r}"
                )
        _fraction("Curvature", "decay", self.decay)
        memory = self.memory
        fraction = type(memory) is float and 0 < memory <= 1
        count = type(memory) is int and memory > 0
        if memory is not None and not (fraction or count):
            raise ValueError(
                "Curvature: memory is bytes (an int) or a fraction in (0, 1], not "
                f"{memory!r}"
            )

    def _check_base(self) -> None:
        """What is made for λI alone."""
        base = self.base
        if base is None:
            return
        if not isinstance(base, Kronecker):
            raise TypeError(
                f"Curvature: base is None (I) or a seng.Kronecker, not {base!r}"
            )
        form = self.form
        kept = form in ("explicit", "implicit") and self.sketch is not None
        own = form == "implicit" and self.implicit_sketch is not None
        alone = {
            "base.damp='tikhonov'": base.damp == "tikhonov",
            "blocks='network'": self.blocks == "network",
            "combine='independent'": self.combine == "independent",
            f"form={form!r} with sketch": kept,
            f"form={form!r} with implicit_sketch": own,
        }
        for asked, given in alone.items():
            if given:
                raise ValueError(
                    f"Curvature: {asked} has no Kronecker base; give base=None with it"
                )

    def _check_together(self) -> None:
        """Options that exclude each other, or do nothing beside the others."""
        form, decay = self.form, self.decay
        independent = self.combine == "independent"
        if self.loss is not None and self.fisher == "empirical":
            raise ValueError(
                f"Curvature: loss={self.loss!r} is what fisher='gauss-newton' or "
                "'sampled' starts from; fisher='empirical' takes the loss that is trained"
            )
        if self.centred and (self.fisher != "empirical" or independent):
            asked = "combine" if independent else "fisher"
            raise ValueError(
                f"Curvature: {asked}={getattr(self, asked)!r} has no centred form; leave "
                "centred out, or use fisher='empirical' with combine='exact'"
            )
        if decay > 0 and form not in ("auto", "merged"):
            raise ValueError(
                "Curvature: only the merged form can accumulate curvature; with "
                f"form={form!r} use decay=0, not decay={decay!r}"
            )
        if independent and (form not in ("auto", "implicit") or decay > 0):
            raise ValueError(
                "Curvature: combine='independent' (eq. 23) is the implicit form's; use "
                "form='implicit' or 'auto' with decay=0, not "
                f"form={form!r} with decay={decay!r}"
            )
        if independent and self.blocks == "network":
            raise ValueError(
                "Curvature: combine='independent' (eq. 23) is made layer by layer; use "
                "blocks='layer' with it"
            )
        self._check_idle()

    def _check_idle(self) -> None:
        """Options that would do nothing."""
        by_threshold = self.form == "auto" and not self.decay
        by_threshold = by_threshold and self.base is None
        why = {}
        if self.form == "explicit":
            why["rank"] = "form='explicit' keeps every column"
        if not by_threshold:
            why["threshold"] = (
                "only form='auto' with base=None and decay=0 plans by it"
            )
            if self.form != "implicit":
                why["implicit_sketch"] = "no layer is kept in implicit form"
        for f in fields(self):
            if f.name in why and getattr(self, f.name) != f.default:
                raise ValueError(
                    f"Curvature: {f.name} does nothing here, since {why[f.name]}; leave it out"
                )

    @property
    def sketches(self) -> bool:
        """Whether anything is sketched."""
        return bool(self.sketch or self.implicit_sketch)

    @property
    def assumed(self) -> Loss:
        """The loss at the output, where `fisher` asks for one."""
        if self.loss is not None:
            return self.loss
        return "squares" if self.fisher == "gauss-newton" else "cross-entropy"

    @property
    def columns(self) -> int | None:
        """How many of the captured columns make U; None: all.

        A Jacobian has several for each sample, and only so many samples are sent backward.
        """
        return self.samples if self.fisher == "empirical" else None

    @property
    def centres(self) -> bool:
        """Whether U is taken about its mean."""
        if self.centred is not None:
            return self.centred
        return self.fisher == "empirical" and self.combine == "exact"
