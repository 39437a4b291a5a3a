"""Who is compared: SGD, AdamW, Muon, K-FAC and its root, SENG as it comes, and low rank over λI in each of its forms, with
learning rates at which none diverges."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, get_args

from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.utils._pytree import tree_leaves

import seng
from seng.checks import periods_of
from seng.metrics.curvature import Form
from seng.recipes.recipe import SGD as BRINGS_SGD

GROWN = max(
    periods_of(BRINGS_SGD.refresh_every).values()
)  # what the library's T comes to

DEFAULTS = ("kfac root", "seng")  # as they come, at the library's T
BASELINES = (
    "sgd",
    "adamw",
    "muon",
    "kfac",
    *DEFAULTS,
)  # the same at every setting of low rank's
LOW_RANKS: Mapping[str, Form] = {
    "seng lowrank" if form == "auto" else f"seng lowrank {form}": form
    for form in get_args(Form)
}
MEASURED = ("seng", *LOW_RANKS)  # whose direction is measured
REFRESHING = ("kfac", *DEFAULTS, *LOW_RANKS)
CONTENDERS = (
    *BASELINES,
    "seng lowrank",
    "seng lowrank merged",
    "seng lowrank implicit",
    "seng lowrank explicit",
)


@dataclass(frozen=True)
class Setting:
    """One way to run low rank over λI, and the T of what runs as it comes."""

    every: int  # T, over which a refresh is spread
    damping: float
    relative_damping: bool
    rank: int
    decay: float
    samples: int | None
    default_every: int = GROWN  # T of what runs as it comes

    def period(self, name: str) -> int:
        """T of a contender."""
        return self.default_every if name in DEFAULTS else self.every

    def curvature(self, form: Form) -> seng.Curvature:
        if self.decay and form not in ("auto", "merged"):
            raise LeftOutError(
                f"only the merged form accumulates curvature (decay {self.decay:g})"
            )
        return seng.Curvature(
            form,
            base=None,
            centred=False,
            samples=self.samples,
            rank=seng.Curvature().rank if form == "explicit" else self.rank,
            decay=self.decay,
            relative_damping=self.relative_damping,
        )

    def __str__(self) -> str:
        kind = "relative" if self.relative_damping else "absolute"
        taken = "" if self.samples is None else f", {self.samples} samples"
        low_rank = f"low rank: T = {self.every}, {kind} λ = {self.damping:g}, rank {self.rank}, decay {self.decay:g}{taken}"
        return f"{low_rank}; as they come: T = {self.default_every}"


class Steps(Protocol):
    """What the benchmark asks of an optimizer."""

    def step(self) -> Any: ...
    def zero_grad(self) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...


class LeftOutError(Exception):
    """Why a contender does not run, in words."""


def contender(
    name: str,
    model: nn.Module,
    setting: Setting,
    refresh_every: int,
    lr: float,
) -> Steps:
    """The optimizer of that name; `lr` is SGD's. `refresh_every` may differ from the setting's T, over which it is spread."""
    fused = next(model.parameters()).is_cuda or None
    if name == "sgd":
        return SGD(
            model.parameters(),
            lr,
            momentum=0.9,
            weight_decay=5e-4,
            fused=fused,
        )
    if name == "adamw":
        return AdamW(model.parameters(), 3e-4, fused=fused)
    if name == "muon":
        return seng.Muon(
            model,
            3e-4,
            adjust_lr_fn="match_rms_adamw",
            adam_betas=(0.9, 0.999),
        )
    if name == "seng":
        return seng.SENG(
            model, lr, weight_decay=5e-4, refresh_every=refresh_every
        )
    if name == "kfac root":
        return seng.KFAC(
            model,
            lr,
            power=0.5,
            weight_decay=5e-4,
            refresh_every=refresh_every,
        )
    if name == "kfac":
        # Its direction is (M + λI)⁻¹g, so that lr·λ is what lr is to SGD.
        return seng.KFAC(
            model,
            lr=0.1 * lr,
            damp="tikhonov",
            damping=0.1,
            refresh_every=refresh_every,
        )
    return seng.SENG(
        model,
        lr,
        weight_decay=5e-4,
        damping=setting.damping,
        refresh_every=refresh_every,
        curvature=setting.curvature(LOW_RANKS[name]),
    )


def state_bytes(optimizer: Steps) -> int:
    """Of everything in the state_dict."""
    tensors = [
        t for t in tree_leaves(optimizer.state_dict()) if isinstance(t, Tensor)
    ]
    return sum(
        {
            s._cdata: s.nbytes()
            for s in (t.untyped_storage() for t in tensors)
        }.values()
    )
