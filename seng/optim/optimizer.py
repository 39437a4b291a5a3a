"""`SENG`, a torch optimizer. Algorithm 2.

One step: d = λ(M + λI)⁻¹g per layer, or P⁻¹g; then the recipe. As SGD's, d += weight_decay·θ,
momentum and update as torch has them, so that λ → ∞ is exactly SGD.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from seng.metrics.curvature import Curvature
from seng.metrics.metric import Metric
from seng.optim.preconditioned import Preconditioned
from seng.optim.settings import DAMPING, REFRESH_EVERY, settings_of


class SENG(Preconditioned):
    """Sketchy empirical natural gradient descent.

    `params` is a module, parameters or param groups; with the latter two, `module` says where the
    layers are. An SGD recipe's lr and weight_decay are the place to start. `lr`, `momentum`,
    `nesterov`, `weight_decay`, `damping`, `maximize` and `orthogonal` live in the param groups; a
    layer takes the damping of its weight's group. The defaults of damping (relative to each layer's
    largest eigenvalue, of a Kronecker metric alone to the mean one) and refresh_every, and why:
    docs/tuning.md. With `orthogonal`, layers step by the polar factor of their momentum, as Muon
    does: seng/recipes/orthogonal.py.

    Without a `curvature` each gradient is preconditioned by the Kronecker metric alone
    (seng/metrics/kronecker.py), which learns faster than low rank over λI. Low rank,
    `curvature=seng.Curvature()`, is taken with `orthogonal`, and where parameters are spread over
    ranks or directions are averaged.
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
        damping: float = DAMPING,
        refresh_every: int = REFRESH_EVERY,
        curvature: Curvature | Metric | None = None,
        units: str = "sgd",
        strategy: str | None = None,
        strict: bool = False,
        maximize: bool = False,
        orthogonal: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "weight_decay": weight_decay,
            "damping": damping,
            "maximize": maximize,
            "orthogonal": orthogonal,
        }
        super().__init__(params, module, defaults)
        settings = settings_of(
            curvature,
            self.module,
            self.orthogonal,
            refresh_every=refresh_every,
            units=units,
            strategy=strategy,
            strict=strict,
        )
        self._build(settings)

    def _check_orthogonal(self) -> None:
        if not self.orthogonal:
            return
        if self.engine is None:
            raise ValueError(
                "orthogonal=True is about the layers' matrices: write SENG(model, …), "
                "or module=model beside params"
            )
        if self.engine.spread:
            raise ValueError(
                "orthogonal=True needs whole matrices, and these parameters are spread "
                "over ranks: leave it out"
            )
