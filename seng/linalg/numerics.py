"""Small dense linear algebra, many matrices at once, that never waits for the device and never goes silently wrong.

`spectrum` gives the leading directions of Gram matrices: by `eigh` on the CPU and up to 32 × 32, where a GPU has a batched one,
and else by a randomized range finder with Cholesky-QR, since `eigh` of 256 × 256 takes a GPU 4 ms, one after the other.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seng.linalg.implicit import Implicit

OVERSAMPLE = 8  # extra directions of the randomized range finders (Halko et al.: 5 to 10 suffice)
POWER = 2  # power iterations of the per-sample one
ITERATIONS = 8  # of a Gram's; they also sort the directions
SQUARINGS = 10  # of a Gram whose largest eigenvalue is wanted: eigenvalues 1 % apart then differ by a factor e¹⁰
SMALL = 32  # up to here a GPU's eigh is batched
JITTER = (
    1e-12,
    1e-8,
    1e-4,
)  # tried in this order, relative to the mean of the diagonal


def cholesky(S: Tensor) -> tuple[Tensor, Tensor]:
    """L with LLᵀ = S for each of S (…, m, m), and whether it was found with growing jitter. The device is never waited for."""
    L, info = torch.linalg.cholesky_ex(S)
    here = (
        S.device.type == "cpu"
    )  # elsewhere a look would be a wait, and each try takes time
    for jitter in JITTER if here else JITTER[-1:]:
        if here and not info.any():
            break
        mean = S.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
        raised = S + jitter * mean * torch.eye(
            S.shape[-1], dtype=S.dtype, device=S.device
        )
        retry, retried = torch.linalg.cholesky_ex(raised)
        L, info = (
            torch.where(info[..., None, None] > 0, retry, L),
            torch.where(info > 0, retried, info),
        )
    return L, info == 0


def inverse(S: Tensor) -> Tensor:
    """S⁻¹ for each of S (…, m, m), positive definite; not a number where no factorization was found."""
    L, found = cholesky(S)
    R = torch.linalg.solve_triangular(
        L,
        torch.eye(S.shape[-1], dtype=S.dtype, device=S.device).expand_as(L),
        upper=False,
    )
    return torch.where(found[..., None, None], R.mT @ R, torch.nan)


def eigenvalues(S: Tensor) -> Tensor:
    """Those of `eigh` alone, which is quicker."""
    fine = S.isfinite().all((-2, -1), keepdim=True)
    try:
        values = torch.linalg.eigvalsh(
            torch.where(fine, (S + S.mT) / 2, 0).to(widest(S))
        )
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        values = torch.full_like(S[..., 0], torch.nan, dtype=widest(S))
    return torch.where(fine[..., 0], values.flip(-1).clamp_min(0), torch.nan).to(
        S.dtype
    )


def eigh(S: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, descending and never negative, and eigenvectors of each of S (…, m, m); not a number where S is not finite.

    In float64, and on the CPU, where the float32 routines fail, or silently return nan, on some of the graded Grams that
    accumulation makes.
    """
    fine = S.isfinite().all((-2, -1), keepdim=True)
    T = torch.where(fine, (S + S.mT) / 2, 0).to(widest(S))
    try:
        values, vectors = torch.linalg.eigh(T)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        values, vectors = (
            torch.full_like(T[..., 0], torch.nan),
            torch.full_like(T, torch.nan),
        )
    values = torch.where(fine[..., 0], values.flip(-1).clamp_min(0), torch.nan)
    return values.to(S.dtype), torch.where(fine, vectors.flip(-1), torch.nan).to(
        S.dtype
    )


def widest(S: Tensor) -> torch.dtype:
    """The precision of small dense work."""
    return (
        S.dtype if S.device.type == "mps" else torch.float64
    )  # Apple's GPUs have no float64


def one_by_one(K: Tensor) -> bool:
    """Whether `eigh` of each is quick enough; it waits for the device."""
    return K.device.type == "cpu" or K.shape[-1] <= SMALL


def top(K: Tensor) -> Tensor:
    """The largest eigenvalue of each of K (L, m, m): the mean of the eigenvalues, weighted by their powers 2^SQUARINGS."""
    if one_by_one(K):
        return eigenvalues(K)[..., 0]
    K = K.to(widest(K))
    P = _unit_trace(K)
    for i in range(SQUARINGS):
        P = P @ P
        P = _unit_trace(P) if i % 2 or i == SQUARINGS - 1 else P
    return (K * P).sum((-2, -1))


def _unit_trace(P: Tensor) -> Tensor:
    trace = P.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
    return P / torch.where(trace > 0, trace, 1)


def start(K: Tensor, width: int, generator: torch.Generator | None = None) -> Tensor:
    """Where `spectrum` begins, for the `width` leading directions of K (L, m, m): some more of them at random (m, w)."""
    m = K.shape[-1]
    wider = 0 if one_by_one(K) or not width else min(m, width + OVERSAMPLE)
    return torch.randn(m, wider, generator=generator, device=K.device, dtype=widest(K))


def spectrum(K: Tensor, width: int, start: Tensor) -> tuple[Tensor, Tensor]:
    """The `width` leading eigenvalues (L, w), descending, and directions V (L, m, w), orthonormal, of each of K (L, m, m).

    By orthogonal iteration the values are Rayleigh quotients, and V spans the leading directions up to where they decay slowly.
    """
    width = min(width, K.shape[-1])
    if one_by_one(K):
        values, V = eigh(K)
        return values[..., :width], V[..., :width]
    K = K.to(widest(K))
    V = start.expand(len(K), *start.shape)
    for _ in range(ITERATIONS):
        V = orthonormal(K @ V)
    V = orthonormal(V)
    values = (V * (K @ V)).sum(-2)
    values, order = values.sort(-1, descending=True)
    V = V.gather(-1, order[:, None].expand_as(V))
    return values[..., :width].clamp_min(0), V[..., :width]


def orthonormal(Z: Tensor) -> Tensor:
    """The columns of each of Z (L, m, w) made orthonormal, in order, by Cholesky; dependent ones come out 0."""
    Z = Z / torch.linalg.vector_norm(Z, dim=-2, keepdim=True).clamp_min(
        torch.finfo(Z.dtype).tiny
    )
    L, _ = torch.linalg.cholesky_ex(Z.mT @ Z + 1e-13 * _eye(Z.shape[-1], Z))
    Q: Tensor = torch.linalg.solve_triangular(L, Z.mT, upper=False).mT
    return Q.nan_to_num(0, 0, 0)


def deviation(Y: Tensor, values: Tensor) -> Tensor:
    """The sketch error ‖e − ê‖/‖e‖: energies e_j = ‖Uv_j‖², Y = (UV)ᵀ, against what the sketch sees of them, ê_j = ‖ΩUv_j‖²."""
    e: Tensor = Y.square().sum(1)
    error: Tensor = (e - values).norm() / e.norm().clamp_min(torch.finfo(Y.dtype).tiny)
    return error


def truncation_errors(K: Tensor, V: Tensor, lam: Tensor) -> Tensor:
    """‖d_k − d‖/‖d‖ (L, w) of the direction of the mean gradient g = U1/√ϱ when only V_k is kept of U, for k = 1 … w.

    All of it happens among the samples: d = Ux with x = λ(λI + K)⁻¹e, e = 1/√ϱ, and d_k = Ux_k with
    x_k = e − V_k(λI + V_kᵀKV_k)⁻¹V_kᵀKe. With λI + VᵀKV = RRᵀ and P = VR⁻ᵀ, that is e − Σ_{j≤k} p_j(p_jᵀKe): a running sum.
    Lengths are measured by K = UᵀU.
    """
    L, m, _ = K.shape
    K, V, lam = K.to(widest(K)), V.to(widest(K)), lam.to(widest(K))[:, None, None]
    e = torch.full((L, m, 1), m**-0.5, dtype=K.dtype, device=K.device)
    Ke = K @ e
    whole = torch.linalg.cholesky_ex(_eye(m, K) * lam + K)[0]
    half = torch.linalg.solve_triangular(whole, e, upper=False)
    x = lam * torch.linalg.solve_triangular(
        whole.mT, half, upper=True
    )  # cholesky_solve of a batch cannot be recorded
    R = torch.linalg.cholesky_ex(_eye(V.shape[-1], K) * lam + V.mT @ K @ V)[0]
    P = torch.linalg.solve_triangular(R, V.mT, upper=False).mT  # (L, m, w)
    off = x - e + (P * (P.mT @ Ke).mT).cumsum(-1)
    length = (x * (K @ x)).sum(1).clamp_min(torch.finfo(K.dtype).tiny)
    errors: Tensor = ((off * (K @ off)).sum(1).clamp_min(0) / length).sqrt()
    return errors


def _eye(m: int, like: Tensor) -> Tensor:
    return torch.eye(m, dtype=like.dtype, device=like.device)


def reduced(U: Implicit, rank: int, generator: torch.Generator) -> Implicit:
    """Rank-r factors G_i = Ĝ_i V_i, A_i = Â_i V_i (eq. 15), V_i (κ, r) leading right singular vectors of the smaller factor.

    A randomized partial SVD per sample. The signs of V_i are free in G_i A_iᵀ but not in eq. 23, so each column of V_i is
    made to sum to a positive number. With r ≥ κ nothing is done, and with r ≥ min(n_G, n_A) nothing is lost.
    """
    if rank >= U.rank:
        return U
    X = U.G if U.G.shape[2] <= U.A.shape[2] else U.A  # (ϱ, h, m, κ)
    X = torch.where(
        X.isfinite(), X, 0
    )  # what is not finite stays in the factors, and drops the refresh in `build`
    X = X / X.abs().amax((2, 3), keepdim=True).clamp_min(torch.finfo(X.dtype).tiny)
    m = X.shape[2]
    if rank >= m:
        V = torch.linalg.qr(X.mT).Q
    else:
        width = min(m, U.rank, rank + OVERSAMPLE)
        omega = torch.randn(
            m, width, generator=generator, device=X.device, dtype=X.dtype
        )
        Z = torch.linalg.qr(X.mT @ omega).Q  # (ϱ, h, κ, width)
        for _ in range(POWER):
            Z = torch.linalg.qr(X.mT @ (X @ Z)).Q
        V = Z @ torch.linalg.svd(X @ Z, full_matrices=False).Vh.mT[..., :rank]
    V = V * torch.where(V.sum(-2, keepdim=True) < 0, -1, 1)
    return Implicit(U.G @ V, U.A @ V)
