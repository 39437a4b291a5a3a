"""Per-sample gradients of the layers without factors: norms, y = w ⊙ x̂ + b, and PReLU.

See `seng.layers`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from seng.layers.kinds import Columns, columns
from seng.linalg.operators import wide

# Faster ways to BatchNorm's sums, which a device's package appends; None where one does not serve.
ACCELERATORS: list[Callable[[_BatchNorm, Tensor, Tensor], Columns | None]] = []


def _affine(x_hat: Tensor, g: Tensor, keep: tuple[int, ...]) -> Columns:
    """y = w ⊙ x̂ + b: sum g ⊙ x̂ and g over every dimension but the sample and `keep`."""
    summed = [i for i in range(1, g.dim()) if i not in keep]
    both = {"weight": g * x_hat, "bias": g}
    return (
        {name: u.sum(summed) for name, u in both.items()} if summed else both
    )


def _normalized(layer: nn.LayerNorm | nn.RMSNorm) -> int:
    return len(layer.normalized_shape)


def _shaped(
    norm: Callable[..., Tensor], layer: Any, a: Tensor, g: Tensor
) -> Columns:
    x_hat = norm(a, layer.normalized_shape, eps=layer.eps)
    return _affine(
        x_hat, g, tuple(range(a.dim() - _normalized(layer), a.dim()))
    )


columns(nn.LayerNorm, _normalized)(partial(_shaped, F.layer_norm))
columns(nn.RMSNorm, _normalized)(partial(_shaped, F.rms_norm))


@columns(nn.GroupNorm)
def _group_norm(layer: nn.GroupNorm, a: Tensor, g: Tensor) -> Columns:
    return _affine(F.group_norm(a, layer.num_groups, eps=layer.eps), g, (1,))


def of_the_batch(layer: _BatchNorm | _InstanceNorm) -> bool:
    """Whether the layer normalises by what it sees now, and not by running statistics."""
    return layer.training or layer.running_mean is None


def _batch_norm(layer: _BatchNorm, a: Tensor, g: Tensor) -> Columns:
    """u_i = g_i ⊙ x̂_i.

    In training the batch's statistics are taken as given, so that the mean of u_i is the gradient.
    """
    for accelerated in ACCELERATORS:
        found = accelerated(layer, a, g)
        if found is not None:
            return found
    a, g = a.to(wide(a.dtype)), g.to(wide(g.dtype))
    now = of_the_batch(layer)
    statistics = (
        (None, None) if now else (layer.running_mean, layer.running_var)
    )
    x_hat = F.batch_norm(a, *statistics, training=now, eps=layer.eps)
    return _affine(x_hat, g, (1,))


for _norm in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
    columns(_norm, whole_batch=True, any_precision=True)(_batch_norm)


def _instance_norm(layer: _InstanceNorm, a: Tensor, g: Tensor) -> Columns:
    now = of_the_batch(layer)
    statistics = (
        (None, None) if now else (layer.running_mean, layer.running_var)
    )
    x_hat = F.instance_norm(a, *statistics, use_input_stats=now, eps=layer.eps)
    return _affine(x_hat, g, (1,))


def _channels_and_space(layer: _InstanceNorm) -> int:
    return layer._get_no_batch_dim()  # type: ignore[no-any-return]


for _instance in (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d):
    columns(_instance, _channels_and_space)(_instance_norm)


@columns(nn.PReLU, lambda layer: int(layer.num_parameters > 1))
def _prelu(layer: nn.PReLU, a: Tensor, g: Tensor) -> Columns:
    """y = max(a, 0) + w min(a, 0), one w or one per channel."""
    single = layer.num_parameters == 1
    u = _affine(a.clamp_max(0), g, () if single else (1,))["weight"]
    return {"weight": u[:, None] if single else u}
