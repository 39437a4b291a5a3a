"""U of layers of a network that has been trained a little, as the library captures it: for studies of Ω on true gradients.

The network is the lab's CNN for scikit-learn's digits, in float64. It is a function of its arguments alone: no global stream of
random numbers is read or moved, and the default dtype does not matter.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from seng import SENG, Curvature
from seng.lab.datasets.formats import digits
from seng.lab.models import digits_cnn
from seng.linalg.operators import Operator
from seng.tell.inspection import inspect

BATCH = (
    64  # samples of a training step, and of the gradient that U does not know
)
STEPS = 40
NEGLIGIBLE = (
    1e-10  # of the largest singular value: below it, a direction is rounding
)


@dataclass(frozen=True)
class Layer:
    """One layer's U and gradients, at the same weights."""

    name: str
    U: Operator  # (n, ϱ), columns u_i/√ϱ
    own: Tensor  # (n,): the gradient of the samples that U is made of
    g: Tensor  # (n,): that of other samples, as assumption B.3 asks

    @cached_property
    def _svd(self) -> tuple[Tensor, Tensor, Tensor]:
        N, sigma, V = torch.linalg.svd(
            self.U.explicit().U, full_matrices=False
        )
        kept = sigma > NEGLIGIBLE * sigma[0]
        return N[:, kept], sigma[kept], V[kept]

    @property
    def N(self) -> Tensor:
        """An orthonormal basis (n, ρ) of the span of U = NΣV."""
        return self._svd[0]

    @property
    def sigma(self) -> Tensor:
        """Singular values (ρ,), descending."""
        return self._svd[1]

    @property
    def V(self) -> Tensor:
        """Right singular vectors, as rows (ρ, ϱ)."""
        return self._svd[2]

    @property
    def rank(self) -> int:
        """ρ."""
        return self.N.shape[1]

    @property
    def perpendicular(self) -> Tensor:
        """g⊥ = g − NNᵀg (n,)."""
        g: Tensor = self.g - self.N @ (self.N.T @ self.g)
        return g - self.N @ (
            self.N.T @ g
        )  # twice, since what is left may be small

    @cached_property
    def leverage(self) -> Tensor:
        """Leverage scores ℓ_i = ‖N_i‖² (n,), which sum to ρ."""
        return self.N.square().sum(1)

    @cached_property
    def row_norms(self) -> Tensor:
        """p_i ∝ ‖U_i‖² (n,), which the paper calls leverage scores."""
        norms = self.U.row_norms()
        return norms / norms.sum()

    def coherence(self, p: Tensor) -> float:
        """max ℓ_i/(ρ p_i) ≥ 1: of p_i = 1/n the coherence of N. Rows drawn by p need, up to a logarithm, so many times ρ."""
        return float((self.leverage[p > 0] / p[p > 0]).max() / self.rank)

    def in_units(self, c: float) -> Layer:
        """The same where the loss is c times as large."""
        return Layer(self.name, self.U.scaled(c), self.own * c, self.g * c)


@cache
def layers(
    samples: int, steps: int = STEPS, seed: int = 0
) -> tuple[Layer, Layer]:
    """The second convolution (n = 9216) and the linear layer (n = 7690), with ϱ = `samples`, after so many steps of SGD."""
    generator = torch.Generator().manual_seed(seed)
    model = initial(generator)
    train, _ = digits(Path())
    x, y = train.x.double() / 255, train.y
    sgd = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    for _ in range(steps):
        _backward(
            model, x, y, torch.randperm(len(y), generator=generator)[:BATCH]
        )
        sgd.step()
    return _captured(
        model, x, y, torch.randperm(len(y), generator=generator), samples
    )


def initial(generator: torch.Generator) -> nn.Sequential:
    """The network with weights drawn as torch draws them, but in float64 and from a stream of their own."""
    with torch.device("meta"):
        model = digits_cnn()
    model = model.double().to_empty(device="cpu")
    for layer in model:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.kaiming_uniform_(
                layer.weight, a=5**0.5, generator=generator
            )
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
        elif isinstance(layer, nn.BatchNorm2d):
            layer.reset_parameters()
    return model


def _captured(
    model: nn.Sequential, x: Tensor, y: Tensor, order: Tensor, samples: int
) -> tuple[Layer, Layer]:
    """A refresh of the library on the first samples, whose step has length 0; then the gradient of the next ones."""
    optimizer = SENG(
        model,
        lr=0.0,
        momentum=0.0,
        curvature=Curvature(
            form="explicit",
            base=None,
            centred=False,
            samples=None,
            decay=0.0,
        ),
    )
    _backward(model, x, y, order[:samples])
    own = _gathered(inspect(optimizer))
    optimizer.step()
    seen = inspect(optimizer)
    _backward(model, x, y, order[samples : samples + BATCH])
    g = _gathered(seen)
    convolutions, (linear,) = (
        _layers(seen, kind) for kind in (nn.Conv2d, nn.Linear)
    )
    wanted = {"convolution": convolutions[1], "linear": linear}
    first, second = (
        Layer(name, seen.states[i].U, own[i], g[i])
        for name, i in wanted.items()
    )
    return first, second


def _backward(model: nn.Module, x: Tensor, y: Tensor, batch: Tensor) -> None:
    model.zero_grad()
    cross_entropy(model(x[batch]), y[batch]).backward()


def _gathered(seen: SimpleNamespace) -> list[Tensor]:
    """The gradient of every layer, laid out as the rows of its U."""
    out = []
    for site in seen.sites:
        params = [s.param for s in site.segments]
        grads = {p: p.grad.clone() for p in params if p.grad is not None}
        out.append(site.gather(site.active(), grads, site.dtype))
    return out


def _layers(seen: SimpleNamespace, kind: type[nn.Module]) -> list[int]:
    modules = [site.members[0].module for site in seen.sites]
    return [i for i, module in enumerate(modules) if isinstance(module, kind)]
