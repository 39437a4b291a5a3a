"""BatchNorm's per-sample sums, Σ g ⊙ x̂ and Σ g over the positions of each sample, in one pass by
Triton.

Importing this module makes `seng.layers.kinds` use it wherever the kernels are available.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from seng.gpu import kernels
from seng.layers.kinds import ACCELERATORS, Columns, of_the_batch

CHANNELS = 32  # that one program takes


def standardized_sums(
    a: Tensor, g: Tensor, mean: Tensor, inverse: Tensor
) -> Tensor:
    """Σ g ⊙ x̂ and Σ g side by side (ϱ, 2C), x̂ = (a − mean)·inverse."""
    a, g = (x[..., None] if x.dim() == 2 else x.flatten(2) for x in (a, g))
    samples, C, positions = a.shape
    out = torch.empty(samples, 2 * C, dtype=torch.float32, device=a.device)
    tensors = a, g, mean.float(), inverse.float(), out
    sizes = C, positions, *a.stride(), *g.stride()
    kernels.standardized[samples, -(-C // CHANNELS)](
        *tensors, *sizes, POSITIONS=64, CHANNELS=CHANNELS
    )
    return out


def _batch_norm(layer: _BatchNorm, a: Tensor, g: Tensor) -> Columns | None:
    if a.dtype != g.dtype or a.dtype not in kernels.TYPES:
        return None
    mean, variance = layer.running_mean, layer.running_var
    if of_the_batch(layer) or mean is None or variance is None:
        mean, inverse = torch.batch_norm_stats(a, layer.eps)
    else:
        inverse = torch.rsqrt(variance + layer.eps)
    weight, bias = standardized_sums(a, g, mean, inverse).chunk(2, 1)
    return {"weight": weight, "bias": bias}


if kernels.AVAILABLE:
    ACCELERATORS["cuda"] = _batch_norm
