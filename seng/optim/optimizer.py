"""`SENG`, a torch optimizer. Algorithm 2.

    d = λ(ŪŪᵀ + λP)⁻¹g per layer

Then comes the step of the recipe whose learning rate was brought.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from seng.checks import Periods, check_number
from seng.metrics.curvature import Curvature
from seng.metrics.metric import Metric
from seng.optim.preconditioned import Preconditioned
from seng.optim.settings import settings_of
from seng.recipes.recipe import recipe_of


class SENG(Preconditioned):
    """Sketchy empirical natural gradient descent.

    Each layer's gradient is multiplied by the inverse of a curvature: the covariance of its
    per-sample gradients, of low rank, over K-FAC's Kronecker factors. With a learning rate and
    weight decay of SGD, AdamW or Muon, name that recipe and keep them.

    Args:
        params: a module, or parameters or param groups of it beside `module`.
        lr: the recipe's learning rate; None: the recipe's default.
        module: where the layers are, if `params` is not the module.
        recipe: "sgd", "adamw", "muon" or "paper": whose learning rate and weight decay these are.
        weight_decay: as the recipe has it: coupled for "sgd" and "paper", else decoupled.
        damping: λ, in units of each layer's largest eigenvalue (`Curvature.relative_damping`).
            Large is closer to the Kronecker metric alone, `seng.KFAC`. None: 0.01; of "muon" 1.
        refresh_every: T, the steps from one refresh of the curvature to the next: a number, or one
            from each step on, as {0: 2, 50: 5, 300: 20}, the default.
        curvature: a `seng.Curvature`; None: its defaults.
        strategy: how ranks share the curvature: "shared" (the default), "block", "lagged", or
            "local" for a network that other processes do not train.
        sample_dim: the dimension of the samples in what layers take; 1 for time first.
        strict: refuse parameters without curvature instead of warning.
        maximize: go uphill.
        momentum, nesterov, betas, eps: as the recipe's optimizer has them; None: its defaults.

    `lr`, `weight_decay`, `damping`, `maximize` and the recipe's own options live in the param
    groups. A layer takes the damping of its weight's group.
    """

    def __init__(
        self,
        params: nn.Module | ParamsT,
        lr: float | Tensor | None = None,
        *,
        module: nn.Module | None = None,
        recipe: str = "sgd",
        weight_decay: float = 0.0,
        damping: float | None = None,
        refresh_every: Periods | None = None,
        curvature: Curvature | Metric | None = None,
        strategy: str | None = None,
        sample_dim: int = 0,
        strict: bool = False,
        maximize: bool = False,
        momentum: float | None = None,
        nesterov: bool | None = None,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
    ) -> None:
        if damping is None:
            damping = recipe_of(recipe).damping
        check_number("damping", damping, positive=True)
        super().__init__(
            params,
            module,
            recipe,
            lr=lr,
            weight_decay=weight_decay,
            damping=damping,
            maximize=maximize,
            momentum=momentum,
            nesterov=nesterov,
            betas=betas,
            eps=eps,
        )
        settings = settings_of(
            curvature,
            self.module,
            recipe=recipe,
            refresh_every=refresh_every,
            strategy=strategy,
            sample_dim=sample_dim,
            strict=strict,
        )
        self._build(settings)
