"""Who is compared: SGD, AdamW, Muon, K-FAC, and SENG in each of its forms, with learning rates at which none diverges."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.optim import SGD, AdamW, Muon
from torch.utils._pytree import tree_leaves

import seng
from seng.curvature import Form

BASELINES = ("sgd", "adamw", "muon", "kfac")
SENGS: Mapping[str, Form] = {"seng" if form == "auto" else f"seng {form}": form for form in get_args(Form)}
REFRESHING = ("kfac", *SENGS)
CONTENDERS = (*BASELINES, "seng", "seng merged", "seng implicit", "seng explicit")


@dataclass(frozen=True)
class Setting:
    """One way to run SENG."""

    every: int  # T, over which a refresh is spread
    damping: float
    relative_damping: bool
    rank: int | None
    decay: float
    samples: int | None
    memory: int | None = None  # bytes

    def curvature(self, form: Form) -> seng.Curvature:
        if self.decay and form not in ("auto", "merged"):
            raise LeftOutError(f"only the merged form accumulates curvature (decay {self.decay:g})")
        return seng.Curvature(
            form,
            samples=self.samples,
            rank=self.rank,
            decay=self.decay,
            relative_damping=self.relative_damping,
            memory=self.memory,
        )

    def __str__(self) -> str:
        kind = "relative" if self.relative_damping else "absolute"
        taken = "" if self.samples is None else f", {self.samples} samples"
        within = "" if self.memory is None else f", within {self.memory / 2**20:g} MiB"
        rank = self.rank or "by tolerance"
        return f"T = {self.every}, {kind} λ = {self.damping:g}, rank {rank}, decay {self.decay:g}{taken}{within}"


class Steps(Protocol):
    """What the benchmark asks of an optimizer."""

    def step(self) -> Any: ...
    def zero_grad(self) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...


class LeftOutError(Exception):
    """Why a contender does not run, in words."""


def contender(name: str, model: nn.Module, setting: Setting, refresh_every: int, lr: float) -> Steps:
    """The optimizer of that name; `lr` is SGD's. `refresh_every` may differ from the setting's T, over which it is spread."""
    fused = next(model.parameters()).is_cuda or None
    if name == "sgd":
        return SGD(model.parameters(), lr, momentum=0.9, weight_decay=5e-4, fused=fused)
    if name == "adamw":
        return AdamW(model.parameters(), 3e-4, fused=fused)
    if name == "muon":
        return MuonAndAdamW(model, fused=fused)
    if name == "kfac":
        try:
            from seng.kfac import KFAC
        except ImportError as missing:
            raise LeftOutError("this version has no seng.KFAC") from missing
        # Its direction is (M + λI)⁻¹g, so that lr·λ is what lr is to SGD.
        kfac: Steps = KFAC(model, lr=0.1 * lr, damping=0.1, refresh_every=refresh_every)
        return kfac
    curvature = setting.curvature(SENGS[name])
    return seng.SENG(model, lr, weight_decay=5e-4, damping=setting.damping, refresh_every=refresh_every, curvature=curvature)


class MuonAndAdamW:
    """Muon for the weights of linear layers and convolutions, these as matrices; AdamW for the head and all else."""

    def __init__(self, model: nn.Module, lr: float = 3e-4, fused: bool | None = None) -> None:
        layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear | _ConvNd)]
        head = [layer for layer in layers if isinstance(layer, nn.Linear)][-1:]
        tables = {layer.weight for layer in model.modules() if isinstance(layer, nn.Embedding)} | {h.weight for h in head}
        self.weights = list(dict.fromkeys(layer.weight for layer in layers if layer.weight not in tables))
        self.matrices = [nn.Parameter(as_matrix(p.detach(), p)) for p in self.weights]  # views of the weights
        taken = set(self.weights)
        self.muon = Muon(self.matrices, lr, adjust_lr_fn="match_rms_adamw")
        self.adamw = AdamW([p for p in model.parameters() if p not in taken], lr, fused=fused)

    def step(self) -> None:
        for matrix, p in zip(self.matrices, self.weights, strict=True):
            matrix.grad = None if p.grad is None else as_matrix(p.grad, p)
        self.muon.step()
        self.adamw.step()

    def zero_grad(self) -> None:
        for p in (*self.weights, *self.matrices):
            p.grad = None
        self.adamw.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        return {"muon": self.muon.state_dict(), "adamw": self.adamw.state_dict()}


def as_matrix(x: Tensor, weight: Tensor) -> Tensor:
    """A weight, or its gradient, as (n_G, n_A): a view in either memory format. Muon does not mind the order of columns."""
    last = weight.dim() == 4 and weight.is_contiguous(memory_format=torch.channels_last)
    return (x.permute(0, 2, 3, 1) if last else x).flatten(1)


def state_bytes(optimizer: Steps) -> int:
    """Of everything in the state_dict."""
    tensors = [t for t in tree_leaves(optimizer.state_dict()) if isinstance(t, Tensor)]
    return sum({s._cdata: s.nbytes() for s in (t.untyped_storage() for t in tensors)}.values())
