"""The optimizers that are compared, each with its defaults and with what a search may vary: SENG, low rank, as it comes, with
Muon's step and the paper's; SGD, Adam, AdamW and Muon of torch; our K-FAC; SOAP and Shampoo of pytorch_optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

import seng
from seng.lab.muon import MuonAndAdamW
from seng.lab.names import unknown
from seng.lab.recipe import Between, OneOf, Recipe, Space, Steps
from seng.layers.sites import survey
from seng.metrics.curvature import BASE_RANK, Base, Combine, Form
from seng.metrics.kronecker import Tikhonov
from seng.optim import schedules
from seng.optim.settings import DAMPING, REFRESH_EVERY


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
    """torch's, beside AdamW for the head, norms and biases."""

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
        return MuonAndAdamW(
            model,
            self.lr,
            self.weight_decay,
            self.momentum,
            fused=_fused(model),
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
class Damped(SGD):
    """What K-FAC and SENG share: λ₀·γ^(epoch/10), and a refresh of the curvature every so many steps."""

    damping: float = DAMPING
    damping_gamma: float = 1.0
    refresh_every: int = REFRESH_EVERY

    def damping_at(self, epoch: float) -> float | None:
        return schedules.damping(epoch, self.damping, self.damping_gamma)


@dataclass(frozen=True)
class KFAC(Damped):
    """Ours, in SGD's units: λ(M + λI)⁻¹g, so that lr and weight decay mean what they mean to SGD, whatever λ is.

    Its own step is (M + λI)⁻¹g: what it covers takes λ·lr and weight_decay/λ, norms and all else the two as they are.
    """

    damping: float = 0.3
    average: float = 0.95  # of the factors, from refresh to refresh
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
class SENG(Damped):
    """Ours, low rank: with the defaults of `seng.Curvature`."""

    damping: float = DAMPING
    relative_damping: bool = True
    samples: int | None = None
    rank: int = 16
    average: float = 0.8  # of the curvature, from refresh to refresh
    combine: Combine = "exact"
    form: Form = "auto"
    name: ClassVar[str] = "seng"
    space: ClassVar[Space] = {
        "lr": Between(2e-2, 2.0),
        "weight_decay": Between(1e-4, 2e-3),
        "damping": Between(1e-3, 0.3),
    }

    @property
    def curvature(self) -> seng.Curvature:
        return self.kept()

    def kept(self, **base: Any) -> seng.Curvature:
        """The curvature of these fields, over a base."""
        return seng.Curvature(
            self.form,
            samples=self.samples,
            rank=self.rank,
            decay=None if self.form == "plain" else self.average,
            combine=self.combine,
            relative_damping=self.relative_damping,
            **base,
        )

    def options(self) -> dict[str, Any]:
        """Of SENG's step."""
        return {
            "momentum": self.momentum,
            "nesterov": self.nesterov,
            "weight_decay": self.weight_decay,
            "damping": self.damping,
            "refresh_every": self.refresh_every,
        }

    def optimizer(self, model: nn.Module) -> Steps:
        return seng.SENG(
            model, self.lr, curvature=self.curvature, **self.options()
        )


@dataclass(frozen=True)
class KroneckerSENG(SENG):
    """Ours, with what `seng.SENG(model, lr)` takes by itself: a Kronecker metric alone."""

    rank: int = 0
    power: float = 0.5
    base_rank: int = BASE_RANK
    name: ClassVar[str] = "seng-kronecker"

    @property
    def curvature(self) -> seng.Curvature:
        return self.kept(
            base="kronecker", power=self.power, base_rank=self.base_rank
        )


@dataclass(frozen=True)
class PaperSENG(SENG):
    """The paper's: absolute λ, each refresh replaces the last, every 200 steps, eq. 23 for the large layers.

    In `units="sgd"` its lr is the paper's lr/λ and its weight decay the paper's times λ, which for λ near 1 is about the same.
    """

    damping: float = 1.0
    relative_damping: bool = False
    nesterov: bool = False
    refresh_every: int = 200
    average: float = 0.0
    combine: Combine = "independent"
    floor: float = schedules.FLOOR
    name: ClassVar[str] = "seng-paper"
    space: ClassVar[Space] = {
        "lr": Between(2e-2, 2.0),
        "weight_decay": OneOf((5e-4, 2e-4, 1e-4)),
        "damping": Between(0.5, 2.0),
        "schedule": OneOf(("cosine", "exp")),
    }


@dataclass(frozen=True)
class OrthogonalSENG(SENG):
    """Muon's step of SENG's directions, by default of gradients: docs/race.md."""

    lr: float = 0.06
    weight_decay: float = 5e-2
    momentum: float = 0.85
    form: Form = "plain"
    base: Base = "identity"
    power: float = 0.5
    base_rank: int = 128
    graft: bool | None = None
    orthogonal: bool = True
    name: ClassVar[str] = "seng-orthogonal"
    space: ClassVar[Space] = {
        "lr": Between(
            2e-2, 0.2
        ),  # steps as long as Muon's from 3e-3 to 3e-2, and decays as strong
        "weight_decay": Between(6e-3, 0.2),
        "momentum": Between(0.6, 0.97, log=False),
    }

    @property
    def curvature(self) -> seng.Curvature:
        return self.kept(
            base=self.base,
            power=self.power,
            base_rank=self.base_rank,
            graft=self.graft,
        )

    def options(self) -> dict[str, Any]:
        return {**super().options(), "orthogonal": self.orthogonal}


KINDS = (
    SENG,
    KroneckerSENG,
    OrthogonalSENG,
    PaperSENG,
    SGD,
    Adam,
    AdamW,
    KFAC,
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
