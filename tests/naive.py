"""Slow, obvious references: one sample at a time, dense matrices, float64."""

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

import seng
from seng.layers.sites import Site


def loss_of(out: Tensor, target: Tensor) -> Tensor:
    """A mean loss over samples whose gradient differs from sample to sample."""
    return (
        (0.5 * (out - target).square() + out.sin() * target)
        .flatten(1)
        .sum(1)
        .mean()
    )


def trained(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.requires_grad]


def flat(tensors) -> Tensor:
    return torch.cat([t.reshape(-1) for t in tensors])


def per_sample_gradients(
    model: nn.Module, x: Tensor, target: Tensor, params=None, loss=loss_of
) -> Tensor:
    """u_i as the rows of (ϱ, n): the gradient of each sample's own loss, one backward each."""
    params = trained(model) if params is None else params
    rows = []
    for i in range(x.shape[0]):
        grads = torch.autograd.grad(
            loss(model(x[i : i + 1]), target[i : i + 1]),
            params,
            allow_unused=True,
        )
        rows.append(
            flat(
                [
                    torch.zeros_like(p) if g is None else g
                    for p, g in zip(params, grads, strict=True)
                ]
            )
        )
    return (
        torch.stack(rows)
        if rows
        else torch.zeros(0, sum(p.numel() for p in params), dtype=x.dtype)
    )


def fisher(u: Tensor) -> Tensor:
    """M = (1/ϱ) Σ u_i u_iᵀ (eq. 2)."""
    return u.T @ u / u.shape[0]


def covariance(u: Tensor, samples: int | None = None) -> Tensor:
    """M̄ = (1/ϱ) Σ u_i u_iᵀ − ūūᵀ, ū = (1/ϱ) Σ u_i; of ϱ `samples` those without a u_i count as zeros."""
    count = samples or u.shape[0]
    mean = u.sum(0) / count
    return u.T @ u / count - torch.outer(mean, mean)


def dense_direction(M: Tensor, g: Tensor, damping: float) -> Tensor:
    """(M + λI)⁻¹g by a dense solve."""
    return torch.linalg.solve(
        M + damping * torch.eye(len(M), dtype=M.dtype), g
    )


def batch_norm_gradients(
    layer: nn.Module, x: Tensor, target: Tensor
) -> Tensor:
    """BatchNorm in training: u_i = B·(g_i ⊙ x̂_i summed over positions, g_i summed), with the batch's statistics given."""
    out = layer(x)
    (g,) = torch.autograd.grad(loss_of(out, target), out)
    over = tuple(i for i in range(x.dim()) if i != 1)
    shape = [1, -1] + [1] * (x.dim() - 2)
    mean = x.mean(over).view(shape)
    var = x.var(over, unbiased=False).view(shape)
    x_hat = (x - mean) / (var + layer.eps).sqrt()
    weight, bias = (
        (g * x_hat).flatten(2).sum(2) if x.dim() > 2 else g * x_hat,
        g.flatten(2).sum(2) if x.dim() > 2 else g,
    )
    return len(x) * torch.cat([weight, bias], 1)


def relative_error(got: Tensor, want: Tensor) -> float:
    got, want = got.detach(), want.detach()
    return float((got - want).norm() / want.norm().clamp_min(1e-300))


def sides(layer: nn.Module, a: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """What a linear layer or a convolution saw and what came back, position by position: rows (h, N, n_A), (h, N, n_G)."""
    if isinstance(layer, nn.Conv2d):
        h = layer.groups
        windows = nn.functional.unfold(
            a, layer.kernel_size, layer.dilation, layer.padding, layer.stride
        )
        A = windows.unflatten(1, (h, -1)).permute(1, 0, 3, 2).flatten(1, 2)
        G = (
            g.flatten(2)
            .unflatten(1, (h, -1))
            .permute(1, 0, 3, 2)
            .flatten(1, 2)
        )
    else:
        A, G = a.reshape(1, -1, a.shape[-1]), g.reshape(1, -1, g.shape[-1])
    return (
        A
        if layer.bias is None
        else torch.cat([A, torch.ones_like(A[..., :1])], 2)
    ), G


def kronecker_metric(
    A: Tensor, G: Tensor, power: float, floor: float
) -> Tensor:
    """P (n, n) from the second moments C_A (h, n_A, n_A) and C_G (h, n_G, n_G), for vectors that stack matrices row by row."""

    def powers(C: Tensor) -> list[Tensor]:
        """C^p of each group, eigenvalues at least floor·the mean of all groups'."""
        e, V = torch.linalg.eigh(C)
        return [
            W @ torch.diag(x.clamp_min(floor * float(e.mean())) ** power) @ W.T
            for x, W in zip(e, V, strict=True)
        ]

    P = torch.block_diag(
        *(
            torch.kron(P_G, P_A)
            for P_G, P_A in zip(powers(G), powers(A), strict=True)
        )
    )
    return P / P.diagonal().mean()


def diagonal_metric(v: Tensor, power: float, floor: float) -> Tensor:
    """diag(v)^p; it has no two sides: v counts as at least floor² of its mean."""
    e = v.clamp_min(floor**2 * float(v.mean())) ** power
    return torch.diag(e / e.mean())


def as_long_as(g: Tensor, d: Tensor) -> Tensor:
    return d * (g.norm() / d.norm())


def based_direction(
    M: Tensor, P: Tensor, g: Tensor, damping: float, relative: bool = True
) -> Tensor:
    """λ(M + λP)⁻¹g by a dense solve, as long as g; λ relative to the largest eigenvalue of P⁻¹M."""
    top = torch.linalg.eigvals(torch.linalg.solve(P, M)).real.max()
    lam = damping * float(top) if relative else damping
    return as_long_as(g, torch.linalg.solve(M + lam * P, g))


def about_mean(U: Tensor, s: Tensor) -> Tensor:
    """Ū = U(I − ssᵀ)^½ of columns √w_i·u_i with s_i = √w_i, by the eigenvalues of I − ssᵀ."""
    e, V = torch.linalg.eigh(
        torch.eye(len(s), dtype=U.dtype) - torch.outer(s, s)
    )
    e = torch.where(e > 1e-12, e, 0)  # whose root would be no rounding
    return U @ V @ e.sqrt().diag() @ V.T


def as_block(layer: nn.Module, site: Site, rows: Tensor) -> Tensor:
    """Gradients of all parameters (N, n), one after the other -> in the order that the block has (N, n)."""
    params = list(layer.parameters())
    pieces = [
        dict(zip(params, row.split([p.numel() for p in params]), strict=True))
        for row in rows
    ]
    return torch.stack(
        [
            site.gather(
                site.active(),
                {p: t.view_as(p) for p, t in one.items()},
                rows.dtype,
            )
            for one in pieces
        ]
    )


def second_moments(
    layer: nn.Module, site: Site, x: Tensor, target: Tensor
) -> tuple[Tensor, Tensor]:
    """C_A and C_G, up to a factor, of any layer whose outputs are a·w, each at its position: the gradient of an output is a."""
    h, n_G, n_A = site.shape(site.active())

    def features_second(t: Tensor) -> Tensor:
        return (
            t.movedim(-1, 1) if isinstance(layer, nn.Linear) else t
        ).reshape(len(t), h, n_G, -1)

    out = layer(x)
    (g,) = torch.autograd.grad(loss_of(out, target), out, retain_graph=True)
    G = features_second(g).permute(1, 2, 0, 3).flatten(2)  # (h, n_G, N)
    A = []
    for group in range(h):
        first = features_second(out)[:, group, 0].reshape(-1)  # (N,)
        each = torch.eye(len(first))
        rows = torch.autograd.grad(
            first,
            list(layer.parameters()),
            each,
            retain_graph=True,
            is_grads_batched=True,
        )
        A.append(
            as_block(layer, site, torch.cat([r.flatten(1) for r in rows], 1))
            .view(-1, h, n_G, n_A)[:, group, 0]
            .mT
        )
    return torch.stack([a @ a.mT for a in A]), G @ G.mT


def metric(
    layer: nn.Module,
    site: Site,
    x: Tensor,
    target: Tensor,
    power: float | None = None,
    floor: float | None = None,
) -> Tensor:
    """P of one batch, by default as the library's."""
    usual = seng.Kronecker(power).of(isinstance(layer, _ConvNd))
    power = usual.power
    floor = usual.floor if floor is None else floor
    if site.factored:
        moments = second_moments(layer, site, x, target)
        return kronecker_metric(*moments, power, floor)
    u = as_block(layer, site, per_sample_gradients(layer, x, target))
    return diagonal_metric(u.square().mean(0), power, floor)
