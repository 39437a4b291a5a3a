"""Muon for networks with convolutions: torch's Muon takes matrices, so a kernel is shown to it as one; AdamW does the rest."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.optim import AdamW, Muon


class MuonAndAdamW:
    """Muon for the weights of linear layers and convolutions, these as matrices; AdamW for the head and all else.

    One lr serves both: Muon's updates are scaled to the size of AdamW's (`match_rms_adamw`).
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 3e-4,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        fused: bool | None = None,
    ) -> None:
        layers = [
            layer
            for layer in model.modules()
            if isinstance(layer, nn.Linear | _ConvNd)
        ]
        head = [layer for layer in layers if isinstance(layer, nn.Linear)][-1:]
        tables = {
            layer.weight
            for layer in model.modules()
            if isinstance(layer, nn.Embedding)
        } | {h.weight for h in head}
        self.weights = list(
            dict.fromkeys(
                layer.weight for layer in layers if layer.weight not in tables
            )
        )
        self.matrices = [
            nn.Parameter(as_matrix(p.detach(), p)) for p in self.weights
        ]  # views of the weights
        taken = set(self.weights)
        self.muon = Muon(
            self.matrices,
            lr,
            weight_decay,
            momentum,
            nesterov,
            adjust_lr_fn="match_rms_adamw",
        )
        rest = [p for p in model.parameters() if p not in taken]
        self.adamw = AdamW(rest, lr, weight_decay=weight_decay, fused=fused)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Of both; schedules write their lr there."""
        return [*self.muon.param_groups, *self.adamw.param_groups]

    def step(self) -> None:
        """One step of each."""
        for matrix, p in zip(self.matrices, self.weights, strict=True):
            matrix.grad = None if p.grad is None else as_matrix(p.grad, p)
        self.muon.step()
        self.adamw.step()

    def zero_grad(self) -> None:
        """Let go of all gradients."""
        for p in (*self.weights, *self.matrices):
            p.grad = None
        self.adamw.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """Of both."""
        return {
            "muon": self.muon.state_dict(),
            "adamw": self.adamw.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from `state_dict()`."""
        self.muon.load_state_dict(state_dict["muon"])
        self.adamw.load_state_dict(state_dict["adamw"])


def as_matrix(x: Tensor, weight: Tensor) -> Tensor:
    """A weight, or its gradient, as (n_G, n_A): a view in either memory format. Muon does not mind the order of columns."""
    last = weight.dim() == 4 and weight.is_contiguous(
        memory_format=torch.channels_last
    )
    return (x.permute(0, 2, 3, 1) if last else x).flatten(1)
