"""K-FAC and its roots: the Kronecker metric alone, without per-sample gradients.

    d = P⁻¹g, as long as g,   P = C_G^p ⊗ C_A^p      (`seng.metrics.kronecker`)

With damp="tikhonov" it is the method itself (Martens & Grosse 2015; KFC's convolutions, Grosse &
Martens 2016): dense factors, power 1, Tikhonov's damping, at the method's own length,

    X = (G + √λ/π I)⁻¹ g (A + π√λ I)⁻¹,   π² = (tr A / n_A) / (tr G / n_G)
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from seng.checks import Periods
from seng.distributed.team import team_of
from seng.layers.sites import is_sharded
from seng.metrics.choose import metric_of
from seng.metrics.curvature import Damp, Kronecker
from seng.metrics.metric import Metric
from seng.optim.preconditioned import Preconditioned
from seng.optim.settings import Settings, settings_of
from seng.recipes.recipe import recipe_of

# With lr 0.1 the best of 0.001 to 1 on digits, few seeds; lr ≈ λ/10 to λ/3.
TIKHONOV_DAMPING = 0.3


class KFAC(Preconditioned):
    """Gradient descent with Kronecker-factored curvature.

    It is what SENG becomes as its damping grows: power 1 is K-FAC's metric, 1/2 its square root.

    Args:
        params: a module, or parameters or param groups of it beside `module`.
        lr: the recipe's learning rate; None: the recipe's default.
        module: where the layers are, if `params` is not the module.
        recipe: "sgd", "adamw" or "muon": whose learning rate and weight decay these are.
        weight_decay: as the recipe has it.
        power, rank, floor, decay, damp: as in `seng.Kronecker`.
        damping: λ of damp="tikhonov", absolute; damp="floor" has none. The direction is then the
            method's own, so that λ → ∞ is SGD with the learning rate lr/λ.
        refresh_every: the steps from one refresh of the factors to the next, as in `seng.SENG`.
        strategy, sample_dim, strict, maximize: as in `seng.SENG`.
        momentum, nesterov, betas, eps: as the recipe's optimizer has them; None: its defaults.
    """

    def __init__(
        self,
        params: nn.Module | ParamsT,
        lr: float | Tensor | None = None,
        *,
        module: nn.Module | None = None,
        recipe: str = "sgd",
        weight_decay: float = 0.0,
        power: float | None = None,
        rank: int | None = None,
        floor: float | None = None,
        decay: float | None = None,
        damp: Damp = "floor",
        damping: float | None = None,
        refresh_every: Periods | None = None,
        strategy: str | None = None,
        sample_dim: int = 0,
        strict: bool = False,
        maximize: bool = False,
        momentum: float | None = None,
        nesterov: bool | None = None,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
    ) -> None:
        metric = _metric(recipe, power, rank, floor, decay, damp)
        super().__init__(
            params,
            module,
            recipe,
            lr=lr,
            weight_decay=weight_decay,
            maximize=maximize,
            momentum=momentum,
            nesterov=nesterov,
            betas=betas,
            eps=eps,
            damping=_damping_of(damp, damping),
        )
        settings = settings_of(
            metric,
            self.module,
            name="KFAC",
            recipe=recipe,
            refresh_every=refresh_every,
            strategy=strategy,
            sample_dim=sample_dim,
            strict=strict,
        )
        self._check(damp, settings)
        self._build(settings)

    def _check(self, damp: Damp, settings: Settings) -> None:
        if recipe_of(settings.recipe).paper:
            raise ValueError(
                f"KFAC: recipe={settings.recipe!r} divides by the λ of SENG over λI; use "
                "another recipe, or SENG(model, **seng.presets.paper())"
            )
        team = team_of(settings.strategy, self.module)
        if damp == "tikhonov" and team.many:
            raise RuntimeError(
                "KFAC(damp='tikhonov') runs in one process: ranks with factors of their own "
                "would drift apart; use damp='floor', whose factors all ranks share"
            )
        if team.averages:
            raise ValueError(
                f"strategy={settings.strategy!r} averages what each rank makes of its own "
                "samples, and KFAC's factors are shared by all: leave strategy out"
            )
        if any(map(is_sharded, self._params())):
            raise RuntimeError(
                "KFAC works on whole parameters, and these are DTensors, spread over a "
                "device mesh (FSDP2): seng.SENG works there"
            )


def _metric(recipe: str, *asked: Any) -> Metric:
    """The metric, with the recipe's power where none is asked for."""
    return metric_of(Kronecker(*asked), recipe_of(recipe).power)


def _damping_of(damp: Damp, damping: float | None) -> float | None:
    """The damping of a param group, which damp="floor" has not."""
    if damp == "tikhonov":
        return TIKHONOV_DAMPING if damping is None else damping
    if damping is not None:
        raise ValueError(
            "KFAC: damp='floor' is damped by its floor; leave out damping, or use "
            "damp='tikhonov'"
        )
    return None
