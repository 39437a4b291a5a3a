"""The optimizers that are compared, each with its defaults and with what a search may vary.

`seng` is `seng.SENG(model, lr)`, as it comes; its other forms, K-FAC and its root are named beside it. SGD, Adam and AdamW are
torch's, Muon is `seng.Muon`, SOAP and Shampoo are pytorch_optimizer's. What is an option of the library and a field of a recipe
has the library's default, and is read from there.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import nn

import seng
from seng.lab.names import unknown
from seng.lab.recipe import Between, OneOf, Recipe, Space, Steps
from seng.layers.sites import survey
from seng.metrics.curvature import Combine, Form
from seng.metrics.kronecker import Tikhonov
from seng.optim import schedules
from seng.optim.kfac import TIKHONOV_DAMPING
from seng.recipes.recipe import recipe_of

CURVATURE = seng.Curvature()
KRONECKER = seng.Kronecker()
TIKHONOV = seng.Kronecker(damp="tikhonov")
PAPER = seng.presets.paper()
WEIGHT_DECAY: float = (
    inspect.signature(seng.SENG).parameters["weight_decay"].default
)
BRINGS_SGD, BRINGS_ADAMW, BRINGS_MUON, PRINTED = map(
    recipe_of, ("sgd", "adamw", "muon", "paper")
)


def _fused(model: nn.Module) -> bool | None:
    return next(model.parameters()).is_cuda or None


@dataclass(frozen=True)
class SGD(Recipe):
    """With momentum."""

    momentum: float = 0.9
    nesterov: bool = True
    name: ClassVar[str] = "sgd"
    space: ClassVar[Space] = {
        "lr": Between(1e-2, 1.0),
        "weight_decay": Between(1e-4, 2e-3),
    }

    def optimizer(self, model: nn.Module) -> Steps:
        return torch.optim.SGD(
            model.parameters(),
            self.lr,
            momentum=self.momentum,
            nesterov=self.nesterov,
            weight_decay=self.weight_decay,
            fused=_fused(model),
        )


@dataclass(frozen=True)
class Adam(Recipe):
    """Kingma and Ba; weight decay is added to the gradient."""

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    name: ClassVar[str] = "adam"
    kind: ClassVar[type[torch.optim.Adam]] = torch.optim.Adam
    space: ClassVar[Space] = {
        "lr": Between(2e-4, 1e-2),
        "weight_decay": Between(1e-5, 1e-3),
    }

    def optimizer(self, model: nn.Module) -> Steps:
        betas = self.beta1, self.beta2
        return self.kind(
            model.parameters(),
            self.lr,
            betas,
            self.eps,
            self.weight_decay,
            fused=_fused(model),
        )


@dataclass(frozen=True)
class AdamW(Adam):
    """With decoupled weight decay."""

    weight_decay: float = 5e-2
    name: ClassVar[str] = "adamw"
    space: ClassVar[Space] = {
        "lr": Between(3e-4, 1e-2),
        "weight_decay": Between(1e-3, 0.5),
    }
    kind: ClassVar[type[torch.optim.Adam]] = torch.optim.AdamW


@dataclass(frozen=True)
class Muon(Recipe):
    """Ours, which equals torch's: steps as long as AdamW's, and torch's AdamW for the head, norms and biases."""

    lr: float = 1e-2
    weight_decay: float = 0.3
    momentum: float = 0.85
    name: ClassVar[str] = "muon"
    space: ClassVar[Space] = {
        "lr": Between(3e-3, 3e-2),
        "weight_decay": Between(3e-2, 1.0),
        "momentum": Between(0.6, 0.97, log=False),
    }

    def optimizer(self, model: nn.Module) -> Steps:
        return seng.Muon(
            model,
            self.lr,
            weight_decay=self.weight_decay,
            momentum=self.momentum,
            adjust_lr_fn="match_rms_adamw",
            adam_betas=(0.9, 0.999),
        )


@dataclass(frozen=True)
class SOAP(Recipe):
    """Of pytorch_optimizer."""

    lr: float = 3e-3
    weight_decay: float = 5e-2
    beta1: float = 0.95
    beta2: float = 0.95
    refresh_every: int = 10
    name: ClassVar[str] = "soap"
    space: ClassVar[Space] = {
        "lr": Between(6e-4, 3e-2),
        "weight_decay": Between(1e-3, 0.5),
    }

    def optimizer(self, model: nn.Module) -> Steps:
        from pytorch_optimizer import SOAP

        soap: Steps = SOAP(
            model.parameters(),
            self.lr,
            (self.beta1, self.beta2),
            weight_decay=self.weight_decay,
            precondition_frequency=self.refresh_every,
            max_precondition_dim=2048,
        )
        return soap


@dataclass(frozen=True)
class Shampoo(Recipe):
    """Of pytorch_optimizer, the scalable one, grafted to SGD's lengths."""

    lr: float = 0.1
    momentum: float = 0.9
    beta2: float = 0.999
    refresh_every: int = 50
    name: ClassVar[str] = "shampoo"
    resumable: ClassVar[bool] = False
    space: ClassVar[Space] = {
        "lr": Between(1e-2, 1.0),
        "weight_decay": Between(1e-4, 2e-3),
    }

    def optimizer(self, model: nn.Module) -> Steps:
        from pytorch_optimizer import ScalableShampoo

        shampoo: Steps = ScalableShampoo(
            model.parameters(),
            self.lr,
            (self.momentum, self.beta2),
            weight_decay=self.weight_decay,
            preconditioning_compute_steps=self.refresh_every,
        )
        return shampoo


@dataclass(frozen=True)
class Damped(Recipe):
    """What K-FAC and SENG share: λ₀·γ^(epoch/10), and a refresh of the curvature every so many steps."""

    momentum: float = BRINGS_SGD.options["momentum"]
    nesterov: bool = BRINGS_SGD.options["nesterov"]
    damping: float = BRINGS_SGD.damping
    damping_gamma: float = 1.0
    refresh_every: int | None = None  # as the library has it

    def damping_at(self, epoch: float) -> float | None:
        return schedules.damping(epoch, self.damping, self.damping_gamma)


@dataclass(frozen=True)
class KFAC(Damped):
    """Martens and Grosse's, ours, in SGD's units: λ(M + λI)⁻¹g, so that lr and weight decay mean what they mean to SGD.

    Its own step is (M + λI)⁻¹g: what it covers takes λ·lr and weight_decay/λ, norms and all else the two as they are.
    """

    nesterov: bool = True
    damping: float = TIKHONOV_DAMPING
    average: float = TIKHONOV.decay  # of the factors, from refresh to refresh
    name: ClassVar[str] = "kfac"
    space: ClassVar[Space] = {
        "lr": Between(2e-2, 2.0),
        "weight_decay": Between(1e-4, 2e-3),
        "damping": Between(3e-3, 3.0),
    }

    def follow(
        self, groups: list[dict[str, Any]], epoch: float, epochs: float
    ) -> None:
        super().follow(groups, epoch, epochs)
        for group in groups:
            if group["covered"]:
                group |= {
                    "lr": group["lr"] * group["damping"],
                    "weight_decay": self.weight_decay / group["damping"],
                }

    def optimizer(self, model: nn.Module) -> Steps:
        params = list(model.parameters())
        covered = {
            s.param
            for site in survey(model, params)[0]
            if Tikhonov().refuses(site) is None
            for s in site.segments
        }
        groups = [
            {
                "params": [p for p in params if (p in covered) == inside],
                "covered": inside,
            }
            for inside in (True, False)
        ]
        kfac = seng.KFAC(
            [group for group in groups if group["params"]],
            module=model,
            damp="tikhonov",
            momentum=self.momentum,
            nesterov=self.nesterov,
            weight_decay=self.weight_decay,
            damping=self.damping,
            refresh_every=self.refresh_every,
            decay=self.average,
        )
        self.follow(kfac.param_groups, 0.0, 1.0)
        return kfac


@dataclass(frozen=True)
class RootKFAC(Recipe):
    """The square root of K-FAC's metric: `seng.KFAC` of power 1/2, whose directions are as long as the gradient."""

    lr: float = BRINGS_SGD.lr
    weight_decay: float = WEIGHT_DECAY
    momentum: float = BRINGS_SGD.options["momentum"]
    nesterov: bool = BRINGS_SGD.options["nesterov"]
    refresh_every: int | None = None  # as the library has it
    kronecker_rank: int | None = KRONECKER.rank
    kronecker_floor: float | None = KRONECKER.floor
    kronecker_decay: float = KRONECKER.decay
    power: ClassVar[float] = 0.5
    name: ClassVar[str] = "kfac-root"
    space: ClassVar[Space] = {
        "lr": Between(1e-2, 1.0),
        "weight_decay": Between(1e-4, 2e-3),
    }

    def optimizer(self, model: nn.Module) -> Steps:
        return seng.KFAC(
            model,
            self.lr,
            weight_decay=self.weight_decay,
            momentum=self.momentum,
            nesterov=self.nesterov,
            power=self.power,
            rank=self.kronecker_rank,
            floor=self.kronecker_floor,
            decay=self.kronecker_decay,
            refresh_every=self.refresh_every,
        )


@dataclass(frozen=True)
class FloorKFAC(RootKFAC):
    """K-FAC's metric with its eigenvalues raised to a floor: `seng.KFAC` of power 1."""

    power: ClassVar[float] = 1.0
    name: ClassVar[str] = "kfac-floor"


@dataclass(frozen=True)
class LowRank(Damped):
    """What all of SENG with a relative λ have: per-sample gradients."""

    lr: float = BRINGS_SGD.lr
    weight_decay: float = WEIGHT_DECAY
    samples: int | None = CURVATURE.samples
    rank: int = CURVATURE.rank
    average: float | None = (
        CURVATURE.decay
    )  # of the curvature, from refresh to refresh
    centred: bool | None = CURVATURE.centred
    brought: ClassVar[str] = "sgd"  # whose lr and weight decay they are
    kept: ClassVar[seng.Curvature] = (
        CURVATURE  # with all that is no field of a recipe
    )

    @property
    def curvature(self) -> seng.Curvature:
        return replace(self.kept, **self.shape())

    def shape(self) -> dict[str, Any]:
        """Of the curvature."""
        return {
            "samples": self.samples,
            "rank": self.rank,
            "decay": self.average,
            "centred": self.centred,
        }

    def optimizer(self, model: nn.Module) -> Steps:
        return seng.SENG(
            model,
            self.lr,
            recipe=self.brought,
            weight_decay=self.weight_decay,
            damping=self.damping,
            refresh_every=self.refresh_every,
            curvature=self.curvature,
            **self.options(),
        )

    def options(self) -> dict[str, Any]:
        """Of the recipe alone."""
        return {"momentum": self.momentum, "nesterov": self.nesterov}


@dataclass(frozen=True)
class SENG(LowRank):
    """`seng.SENG(model, lr)`, as it comes: centred per-sample gradients over a Kronecker metric."""

    kronecker_power: float | None = KRONECKER.power
    kronecker_rank: int | None = KRONECKER.rank
    kronecker_floor: float | None = KRONECKER.floor
    kronecker_decay: float = KRONECKER.decay
    name: ClassVar[str] = "seng"
    space: ClassVar[Space] = {
        "lr": Between(1e-2, 1.0),
        "weight_decay": Between(1e-4, 2e-3),
        "damping": Between(1e-2, 3.0),
    }

    def shape(self) -> dict[str, Any]:
        base = replace(
            KRONECKER,
            power=self.kronecker_power,
            rank=self.kronecker_rank,
            floor=self.kronecker_floor,
            decay=self.kronecker_decay,
        )
        return {**super().shape(), "base": base}


@dataclass(frozen=True)
class AdamWSENG(SENG):
    """SENG's directions as long as AdamW's updates: `seng.SENG(model, lr, recipe="adamw")`; momentum is β₁."""

    lr: float = BRINGS_ADAMW.lr
    momentum: float = BRINGS_ADAMW.options["betas"][0]
    beta2: float = BRINGS_ADAMW.options["betas"][1]
    damping: float = BRINGS_ADAMW.damping
    name: ClassVar[str] = "seng-adamw"
    brought: ClassVar[str] = "adamw"
    space: ClassVar[Space] = {
        "lr": Between(3e-4, 3e-2),
        "weight_decay": Between(1e-3, 0.5),
        "damping": Between(1e-2, 3.0),
    }

    def options(self) -> dict[str, Any]:
        if self.nesterov:
            raise ValueError("AdamW's recipe has no Nesterov momentum")
        return {"betas": (self.momentum, self.beta2)}


@dataclass(frozen=True)
class MuonSENG(SENG):
    """SENG's directions before Muon's step: `seng.SENG(model, lr, recipe="muon")`."""

    lr: float = BRINGS_MUON.lr
    damping: float = BRINGS_MUON.damping
    momentum: float = BRINGS_MUON.options["momentum"]
    nesterov: bool = BRINGS_MUON.options["nesterov"]
    name: ClassVar[str] = "seng-muon"
    brought: ClassVar[str] = "muon"
    space: ClassVar[Space] = {
        "lr": Between(3e-3, 0.2),
        "weight_decay": Between(1e-3, 1.0),
        "momentum": Between(0.6, 0.97, log=False),
        "damping": Between(1e-2, 3.0),
    }


@dataclass(frozen=True)
class LowRankSENG(LowRank):
    """Per-sample gradients over λI, not centred, of all samples: what the first edition's `seng` was."""

    samples: int | None = None
    centred: bool | None = False
    relative_damping: bool = CURVATURE.relative_damping
    combine: Combine = CURVATURE.combine
    form: Form = CURVATURE.form
    name: ClassVar[str] = "seng-lowrank"
    kept: ClassVar[seng.Curvature] = replace(CURVATURE, base=None)
    space: ClassVar[Space] = {
        "lr": Between(2e-2, 2.0),
        "weight_decay": Between(1e-4, 2e-3),
        "damping": Between(1e-3, 0.3),
    }

    def shape(self) -> dict[str, Any]:
        return {
            **super().shape(),
            "relative_damping": self.relative_damping,
            "combine": self.combine,
            "form": self.form,
        }


@dataclass(frozen=True)
class PaperSENG(Damped):
    """The paper's, with lr and weight decay as it prints them: `seng.presets.paper()`.

    Beside SGD's its step is 1/λ times as long: in SGD's units its lr is lr/λ and its weight decay λ·weight_decay.
    """

    lr: float = PRINTED.lr
    weight_decay: float = WEIGHT_DECAY
    damping: float = PAPER["damping"]
    refresh_every: int = PAPER["refresh_every"]
    floor: float = schedules.FLOOR
    name: ClassVar[str] = "seng-paper"
    space: ClassVar[Space] = {
        "lr": Between(2e-2, 2.0),
        "weight_decay": OneOf((WEIGHT_DECAY, 5e-4, 2e-4, 1e-4)),
        "damping": Between(0.5, 2.0),
        "schedule": OneOf(("cosine", "exp")),
    }

    def optimizer(self, model: nn.Module) -> Steps:
        preset = seng.presets.paper(self.damping, self.refresh_every)
        return seng.SENG(
            model,
            self.lr,
            weight_decay=self.weight_decay,
            momentum=self.momentum,
            nesterov=self.nesterov,
            **preset,
        )


KINDS = (
    SENG,
    LowRankSENG,
    AdamWSENG,
    MuonSENG,
    PaperSENG,
    RootKFAC,
    FloorKFAC,
    KFAC,
    SGD,
    Adam,
    AdamW,
    Muon,
    SOAP,
    Shampoo,
)
RECIPES: dict[str, type[Recipe]] = {kind.name: kind for kind in KINDS}


def recipe(name: str, changes: Mapping[str, Any] | None = None) -> Recipe:
    """The recipe of an optimizer, with some of its fields changed."""
    if name not in RECIPES:
        raise ValueError(unknown("there is no optimizer", name, RECIPES))
    return RECIPES[name]().with_(changes or {})
