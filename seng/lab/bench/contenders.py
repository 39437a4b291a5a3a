"""Who is compared: SGD, AdamW, Muon, K-FAC, SENG's orthogonal step and SENG in each of its forms, with learning rates at which
none diverges."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, get_args

from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.utils._pytree import tree_leaves

import seng
from seng.lab.muon import MuonAndAdamW
from seng.metrics.curvature import Form

BASELINES = (
    "sgd",
    "adamw",
    "muon",
    "kfac",
    "seng orthogonal",
    "seng kronecker",
)  # the same at every setting of SENG's
SENGS: Mapping[str, Form] = {
    "seng" if form == "auto" else f"seng {form}": form
    for form in get_args(Form)
    if form != "plain"
}
REFRESHING = ("kfac", "seng kronecker", *SENGS)
CONTENDERS = (
    *BASELINES,
    "seng",
    "seng merged",
    "seng implicit",
    "seng explicit",
)


@dataclass(frozen=True)
class Setting:
    """One way to run SENG."""

    every: int  # T, over which a refresh is spread
    damping: float
    relative_damping: bool
    rank: int
    decay: float
    samples: int | None

    def curvature(self, form: Form) -> seng.Curvature:
        if self.decay and form not in ("auto", "merged"):
            raise LeftOutError(
                f"only the merged form accumulates curvature (decay {self.decay:g})"
            )
        return seng.Curvature(
            form,
            samples=self.samples,
            rank=self.rank,
            decay=self.decay,
            relative_damping=self.relative_damping,
        )

    def __str__(self) -> str:
        kind = "relative" if self.relative_damping else "absolute"
        taken = "" if self.samples is None else f", {self.samples} samples"
        return f"T = {self.every}, {kind} λ = {self.damping:g}, rank {self.rank}, decay {self.decay:g}{taken}"


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
        return MuonAndAdamW(model, fused=fused)
    if name == "seng orthogonal":
        return seng.SENG(model, 0.01, **seng.presets.orthogonal())
    if name == "seng kronecker":  # as it comes
        return seng.SENG(
            model, lr, weight_decay=5e-4, refresh_every=refresh_every
        )
    if name == "kfac":
        try:
            from seng.optim.kfac import KFAC
        except ImportError as missing:
            raise LeftOutError("this version has no seng.KFAC") from missing
        # Its direction is (M + λI)⁻¹g, so that lr·λ is what lr is to SGD.
        kfac: Steps = KFAC(
            model, lr=0.1 * lr, damping=0.1, refresh_every=refresh_every
        )
        return kfac
    curvature = setting.curvature(SENGS[name])
    return seng.SENG(
        model,
        lr,
        weight_decay=5e-4,
        damping=setting.damping,
        refresh_every=refresh_every,
        curvature=curvature,
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
