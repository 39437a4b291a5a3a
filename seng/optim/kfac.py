"""K-FAC (Martens & Grosse 2015), with KFC's convolutions (Grosse & Martens 2016).

It is the Kronecker metric with dense factors, power 1 and Tikhonov's damping, at the method's own
length:

    X = (G + √λ/π I)⁻¹ g (A + π√λ I)⁻¹,   π² = (tr A / n_A) / (tr G / n_G)

of `seng.metrics.kronecker`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from seng.checks import check_number, check_period
from seng.distributed.team import team_of
from seng.layers.sites import is_sharded
from seng.metrics.kronecker import Tikhonov
from seng.optim.preconditioned import Preconditioned
from seng.optim.settings import Settings


class KFAC(Preconditioned):
    """Natural gradient descent with Kronecker-factored curvature.

    `params` is a module, parameters or param groups; with the latter two, `module` says where the
    layers are. Linear layers and convolutions without groups are covered; all else takes the plain
    gradient, and one warning says so. `lr`, `momentum`, `nesterov`, `weight_decay`, `damping` (λ,
    absolute) and `maximize` live in the param groups; a changed damping costs new inverses at the
    next step. Factors and inverses are renewed at the first step and then every `refresh_every`
    steps: factor ← decay·factor + (1 − decay)·fresh, the first with weight 1. Then weight decay,
    momentum and update as torch's SGD.

    The direction is the method's own, so λ → ∞ is SGD with the learning rate lr/λ. The loss is a
    mean over samples, and samples are dimension 0 of a layer's input. A layer keeps 2(n_A² + n_G²)
    numbers.
    """

    def __init__(
        self,
        params: nn.Module | ParamsT,
        lr: float | Tensor = 0.1,
        *,
        module: nn.Module | None = None,
        momentum: float = 0.9,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        # With lr 0.1 the best of 0.001 to 1 on digits, few seeds; lr ≈ λ/10 to λ/3.
        damping: float = 0.3,
        refresh_every: int = 10,
        decay: float = 0.95,
        maximize: bool = False,
    ) -> None:
        check_period(refresh_every)
        check_number("decay", decay)
        if decay >= 1:
            raise ValueError(
                f"decay is below 1, not {decay!r}: nothing new would ever enter"
            )
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "weight_decay": weight_decay,
            "damping": damping,
            "maximize": maximize,
        }
        super().__init__(params, module, defaults)
        settings = Settings(Tikhonov(decay), refresh_every, name="KFAC")
        self._build(settings)

    def _build(self, settings: Settings, curvature: Any = None) -> None:
        if team_of(None, None).many:
            raise RuntimeError(
                "KFAC runs in one process: ranks with factors of their own would drift "
                "apart"
            )
        if any(map(is_sharded, self._params())):
            raise RuntimeError(
                "KFAC works on whole parameters, and these are DTensors, spread over a "
                "device mesh (FSDP2)"
            )
        super()._build(settings, curvature)
