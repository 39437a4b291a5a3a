"""Slow, obvious references: one sample at a time, dense matrices, float64."""

import torch
from torch import Tensor, nn


def loss_of(out: Tensor, target: Tensor) -> Tensor:
    """A mean loss over samples whose gradient differs from sample to sample."""
    return (0.5 * (out - target).square() + out.sin() * target).flatten(1).sum(1).mean()


def trained(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.requires_grad]


def flat(tensors) -> Tensor:
    return torch.cat([t.reshape(-1) for t in tensors])


def per_sample_gradients(model: nn.Module, x: Tensor, target: Tensor, params=None, loss=loss_of) -> Tensor:
    """u_i as the rows of (ϱ, n): the gradient of each sample's own loss, one backward each."""
    params = trained(model) if params is None else params
    rows = []
    for i in range(x.shape[0]):
        grads = torch.autograd.grad(loss(model(x[i : i + 1]), target[i : i + 1]), params, allow_unused=True)
        rows.append(flat([torch.zeros_like(p) if g is None else g for p, g in zip(params, grads, strict=True)]))
    return torch.stack(rows) if rows else torch.zeros(0, sum(p.numel() for p in params), dtype=x.dtype)


def fisher(u: Tensor) -> Tensor:
    """M = (1/ϱ) Σ u_i u_iᵀ (eq. 2)."""
    return u.T @ u / u.shape[0]


def dense_direction(M: Tensor, g: Tensor, damping: float) -> Tensor:
    """(M + λI)⁻¹g by a dense solve."""
    return torch.linalg.solve(M + damping * torch.eye(len(M), dtype=M.dtype), g)


def batch_norm_gradients(layer: nn.Module, x: Tensor, target: Tensor) -> Tensor:
    """BatchNorm in training: u_i = B·(g_i ⊙ x̂_i summed over positions, g_i summed), with the batch's statistics given."""
    out = layer(x)
    (g,) = torch.autograd.grad(loss_of(out, target), out)
    over = tuple(i for i in range(x.dim()) if i != 1)
    shape = [1, -1] + [1] * (x.dim() - 2)
    mean = x.mean(over).view(shape)
    var = x.var(over, unbiased=False).view(shape)
    x_hat = (x - mean) / (var + layer.eps).sqrt()
    weight, bias = (g * x_hat).flatten(2).sum(2) if x.dim() > 2 else g * x_hat, g.flatten(2).sum(2) if x.dim() > 2 else g
    return len(x) * torch.cat([weight, bias], 1)


def relative_error(got: Tensor, want: Tensor) -> float:
    got, want = got.detach(), want.detach()
    return float((got - want).norm() / want.norm().clamp_min(1e-300))
