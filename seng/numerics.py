"""Small dense linear algebra that never goes silently wrong, and two low-rank reductions: per sample, and of U as a whole."""

from __future__ import annotations

import torch
from torch import Tensor

from seng.operators import Implicit, Merged, Operator, Shape

OVERSAMPLE = 8  # extra directions of the randomized range finder (Halko et al.: 5 to 10 suffice)
POWER = 2  # its power iterations
JITTER = (1e-12, 1e-8, 1e-4)  # tried in this order, relative to the mean of the diagonal


def cholesky(S: Tensor) -> tuple[Tensor, Tensor]:
    """L with LLᵀ = S, and whether it was found with growing jitter. The device is never waited for."""
    L, info = torch.linalg.cholesky_ex(S)
    for jitter in JITTER:
        if S.device.type == "cpu" and not info:  # on other devices a look would be a wait
            break
        raised = S + torch.diag(jitter * S.diagonal().mean().expand(len(S)))
        retry, retried = torch.linalg.cholesky_ex(raised)
        L, info = torch.where(info > 0, retry, L), torch.where(info > 0, retried, info)
    return L, info == 0


def eigh(S: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, descending and never negative, and eigenvectors; not a number where S is not finite.

    In float64 on the CPU, whose float32 routine fails, or silently returns nan, on some of the graded Grams that accumulation
    makes; elsewhere float64 is the second try.
    """
    if not S.isfinite().all():
        return torch.full_like(S[0], torch.nan), torch.full_like(S, torch.nan)
    S = (S + S.T) / 2
    for dtype in (wide(S),) if S.device.type == "cpu" else (S.dtype, wide(S)):
        try:
            values, vectors = torch.linalg.eigh(S.to(dtype))
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            continue
        if vectors.isfinite().all():
            return values.flip(0).clamp_min(0).to(S.dtype), vectors.flip(1).to(S.dtype)
    return torch.full_like(S[0], torch.nan), torch.full_like(S, torch.nan)


def finite(*tensors: Tensor) -> bool:
    """Whether all numbers are finite (and their sum is): one pass, and no mask as large as the tensor."""
    return all(bool(t.sum().isfinite()) for t in tensors)


def wide(S: Tensor) -> torch.dtype:
    """The precision of small dense work."""
    return S.dtype if S.device.type == "mps" else torch.float64  # Apple's GPUs have no float64


def merged(Y: Tensor, rank: int, layout: Shape) -> Merged:
    """YYᵀ = Q diag(σ²) Qᵀ, the leading `rank`, from the smaller eigenproblem of the two.

    YᵀY = W diag(σ²) Wᵀ gives Q = Y W diag(1/σ); where Y is wider than tall, YYᵀ gives Q itself.
    """
    n, m = Y.shape
    if n <= m:
        values, Q = eigh(Y @ Y.T)
        k = min(rank, n)
        return Merged(Q[:, :k].contiguous(), values[:k], layout)
    values, W = _leading(Y.T @ Y, rank)
    return Merged(Y @ W, values, layout)


def averaged(old: Merged, new: Merged, decay: float, rank: int) -> Merged:
    """δM_old + (1 − δ)M_new, the leading `rank`: the same for Y = [√δ·QΣ, √(1−δ)·(QΣ)_new], which is not formed."""
    a, b = (decay * old.eigenvalues).sqrt(), ((1 - decay) * new.eigenvalues).sqrt()
    if old.n <= len(a) + len(b):
        return merged(torch.cat([old.Q * a, new.Q * b], 1), rank, new.shape)
    across = a[:, None] * (old.Q.T @ new.Q) * b
    gram = torch.cat([torch.cat([a.square().diag(), across], 1), torch.cat([across.T, b.square().diag()], 1)])
    values, W = _leading(gram, rank)
    return Merged(old.Q @ (a[:, None] * W[: len(a)]) + new.Q @ (b[:, None] * W[len(a) :]), values, new.shape)


def _leading(gram: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """σ² and W diag(1/σ) of YᵀY = W diag(σ²) Wᵀ; zero where a column of Q would be rounding noise."""
    values, W = (t[..., :rank] for t in eigh(gram))
    kept = values > values[:1] * torch.finfo(gram.dtype).eps * len(gram)
    values = torch.where(kept, values, 0)
    return values, W * torch.where(kept, values, 1).rsqrt() * kept


def leading(U: Operator, Xi: Operator, rank: int) -> tuple[Merged, Tensor]:
    """The `rank` leading directions of U. Ξ = ΩU may only choose the subspace V_k; Q and σ² come from UV_k itself.

    Also how far Ξ is off there; 0 where it is U itself or was not needed.
    """
    k = min(rank, U.samples, U.n)
    none = torch.zeros(())
    if k == U.samples:
        return merged(U.explicit().U, k, U.shape), none
    values, V = eigh(Xi.gram())
    Y = U.combine(V[:, :k])
    return merged(Y, k, U.shape), none if Xi is U else deviation(Y, values[:k])


def deviation(Y: Tensor, values: Tensor) -> Tensor:
    """The sketch error ‖e − ê‖/‖e‖: energies e_j = ‖Uv_j‖², Y = UV, against what the sketch sees of them, ê_j = ‖ΩUv_j‖²."""
    e: Tensor = Y.square().sum(0)
    error: Tensor = (e - values).norm() / e.norm().clamp_min(torch.finfo(Y.dtype).tiny)
    return error


def reduced(U: Implicit, rank: int, generator: torch.Generator) -> Implicit:
    """Rank-r factors G_i = Ĝ_i V_i, A_i = Â_i V_i (eq. 15), V_i (κ, r) leading right singular vectors of the smaller factor.

    A randomized partial SVD per sample. The signs of V_i are free in G_i A_iᵀ but not in eq. 23, so each column of V_i is
    made to sum to a positive number. With r ≥ κ nothing is done, and with r ≥ min(n_G, n_A) nothing is lost.
    """
    if rank >= U.rank:
        return U
    X = U.G if U.G.shape[2] <= U.A.shape[2] else U.A  # (ϱ, h, m, κ)
    X = torch.where(X.isfinite(), X, 0)  # what is not finite stays in the factors, and drops the refresh in `build`
    X = X / X.abs().amax((2, 3), keepdim=True).clamp_min(torch.finfo(X.dtype).tiny)
    m = X.shape[2]
    if rank >= m:
        V = torch.linalg.qr(X.mT).Q
    else:
        width = min(m, U.rank, rank + OVERSAMPLE)
        omega = torch.randn(m, width, generator=generator, device=X.device, dtype=X.dtype)
        Z = torch.linalg.qr(X.mT @ omega).Q  # (ϱ, h, κ, width)
        for _ in range(POWER):
            Z = torch.linalg.qr(X.mT @ (X @ Z)).Q
        V = Z @ torch.linalg.svd(X @ Z, full_matrices=False).Vh.mT[..., :rank]
    V = V * torch.where(V.sum(-2, keepdim=True) < 0, -1, 1)
    return Implicit(U.G @ V, U.A @ V)
