"""Per-sample gradients of the layers without factors: norms, y = w ⊙ x̂ + b, and PReLU. See `seng.layers`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from seng.gpu import kernels
from seng.gpu.grouped import available
from seng.gpu.kernels import TYPES
from seng.layers.kinds import Columns, columns
from seng.linalg.operators import wide

CHANNELS = 32  # that one program takes


def _affine(x_hat: Tensor, g: Tensor, keep: tuple[int, ...]) -> Columns:
    """y = w ⊙ x̂ + b: sum g ⊙ x̂ and g over every dimension but the sample and `keep`."""
    summed = tuple(i for i in range(1, g.dim()) if i not in keep)
    return {
        "weight": (g * x_hat).sum(summed) if summed else g * x_hat,
        "bias": g.sum(summed) if summed else g,
    }


def _normalized(layer: nn.LayerNorm | nn.RMSNorm) -> int:
    return len(layer.normalized_shape)


@columns(nn.LayerNorm, _normalized)
def _layer_norm(layer: nn.LayerNorm, a: Tensor, g: Tensor) -> Columns:
    keep = tuple(range(a.dim() - _normalized(layer), a.dim()))
    return _affine(F.layer_norm(a, layer.normalized_shape, eps=layer.eps), g, keep)


@columns(nn.RMSNorm, _normalized)
def _rms_norm(layer: nn.RMSNorm, a: Tensor, g: Tensor) -> Columns:
    keep = tuple(range(a.dim() - _normalized(layer), a.dim()))
    return _affine(F.rms_norm(a, layer.normalized_shape, eps=layer.eps), g, keep)


@columns(nn.GroupNorm)
def _group_norm(layer: nn.GroupNorm, a: Tensor, g: Tensor) -> Columns:
    return _affine(F.group_norm(a, layer.num_groups, eps=layer.eps), g, (1,))


def _batch_norm(layer: _BatchNorm, a: Tensor, g: Tensor) -> Columns | Tensor:
    """u_i = g_i ⊙ x̂_i: in training the batch's statistics are taken as given, so that the mean of u_i is the gradient."""
    now = layer.training or layer.running_mean is None
    if available(a.device) and a.dtype == g.dtype and a.dtype in TYPES:
        mean, variance = layer.running_mean, layer.running_var
        if now or mean is None or variance is None:
            mean, inverse = torch.batch_norm_stats(a, layer.eps)
        else:
            inverse = torch.rsqrt(variance + layer.eps)
        return standardized_sums(a, g, mean, inverse)
    a, g = a.to(wide(a.dtype)), g.to(wide(g.dtype))
    statistics = (None, None) if now else (layer.running_mean, layer.running_var)
    return _affine(F.batch_norm(a, *statistics, training=now, eps=layer.eps), g, (1,))


def standardized_sums(a: Tensor, g: Tensor, mean: Tensor, inverse: Tensor) -> Tensor:
    """Σ g ⊙ x̂ and Σ g side by side (ϱ, 2C), over the positions of each sample, x̂ = (a − mean)·inverse; one pass by Triton."""
    a, g = (x[..., None] if x.dim() == 2 else x.flatten(2) for x in (a, g))
    samples, C, positions = a.shape
    out = torch.empty(samples, 2 * C, dtype=torch.float32, device=a.device)
    grid = samples, -(-C // CHANNELS)
    own = (
        a,
        g,
        mean.float(),
        inverse.float(),
        out,
        C,
        positions,
        *a.stride(),
        *g.stride(),
    )
    kernels.standardized[grid](*own, POSITIONS=64, CHANNELS=CHANNELS)
    return out


for _norm in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
    columns(_norm, whole_batch=True, any_precision=True)(_batch_norm)


def _instance_norm(layer: _InstanceNorm, a: Tensor, g: Tensor) -> Columns:
    if layer.training or layer.running_mean is None:
        return _affine(F.instance_norm(a, eps=layer.eps), g, (1,))
    return _affine(
        F.instance_norm(
            a,
            layer.running_mean,
            layer.running_var,
            use_input_stats=False,
            eps=layer.eps,
        ),
        g,
        (1,),
    )


for _space, _instance in enumerate(
    (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d), start=1
):
    columns(_instance, lambda layer, _space=_space: 1 + _space)(_instance_norm)  # type: ignore[misc]


@columns(nn.PReLU, lambda layer: int(layer.num_parameters > 1))
def _prelu(layer: nn.PReLU, a: Tensor, g: Tensor) -> Columns:
    """y = max(a, 0) + w min(a, 0), one w or one per channel."""
    single = layer.num_parameters == 1
    u = _affine(a.clamp_max(0), g, () if single else (1,))["weight"]
    return {"weight": u[:, None] if single else u}
