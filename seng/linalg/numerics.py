"""Small dense linear algebra on many matrices at once, without waiting for the device.

`spectrum` gives the leading directions of Gram matrices. On the CPU, and up to 32 × 32, it calls
`eigh`. Larger matrices on a GPU take a randomized range finder with Cholesky-QR: `eigh` of one 256
× 256 matrix takes a GPU 4 ms, and it works on one after the other.

What cannot be worked out is not a number in the result; nothing is silently wrong.
"""

from __future__ import annotations

import torch
from torch import Tensor, linalg, nan, where

from seng.linalg.implicit import Implicit

# Extra directions of the range finders (Halko et al.: 5 to 10 suffice).
OVERSAMPLE = 8
POWER = 2  # power iterations of the per-sample one
ITERATIONS = 8  # of a Gram's; they also sort the directions
SQUARINGS = 10  # even; eigenvalues 1 % apart then differ by a factor e¹⁰
SMALL = 32  # up to here a GPU's eigh is batched
JITTER = 1e-4  # of the diagonal's mean


def inverse(S: Tensor) -> Tensor:
    """S⁻¹ for each of S (…, m, m), positive definite, if need be with jitter; nan where no
    factorization was found.
    """
    L, info = linalg.cholesky_ex(S)
    # Elsewhere a look at `info` would be to wait for the device.
    if S.device.type != "cpu" or info.any():
        jitter = JITTER * _trace(S) / S.shape[-1]
        retry, retried = linalg.cholesky_ex(S + jitter * _eye(S))
        failed = info > 0
        L = where(failed[..., None, None], retry, L)
        info = where(failed, retried, info)
    R = linalg.solve_triangular(L, _eye(S).expand_as(L), upper=False)
    found = (info == 0)[..., None, None]
    return where(found, R.mT @ R, nan)


def _eye(S: Tensor) -> Tensor:
    """I as large as S."""
    return torch.eye(S.shape[-1], dtype=S.dtype, device=S.device)


def _trace(S: Tensor) -> Tensor:
    """Of each of S (…, m, m): (…, 1, 1)."""
    diagonal = S.diagonal(dim1=-2, dim2=-1)
    return diagonal.sum(-1)[..., None, None]


def _nonzero(lengths: Tensor) -> Tensor:
    """Raised so that it can be divided by."""
    smallest = torch.finfo(lengths.dtype).tiny
    return lengths.clamp_min(smallest)


def eigh(S: Tensor, vectors: bool = True) -> tuple[Tensor, Tensor]:
    """Eigenvalues, descending and never negative, and eigenvectors of each of S (…, m, m).

    Both are nan where S is not finite. Without `vectors`, which is quicker, the second is of no
    use.

    In float64, since the float32 routines fail, or silently return nan, on some of the graded Grams
    that accumulation makes.
    """
    fine = S.isfinite().all((-2, -1), keepdim=True)
    V = where(fine, (S + S.mT) / 2, 0).to(widest(S))
    try:
        if vectors:
            values, V = linalg.eigh(V)
        else:
            values = linalg.eigvalsh(V)
    except linalg.LinAlgError:  # type: ignore[attr-defined]
        values = V[..., 0]
        fine = torch.zeros_like(fine)
    descending = values.flip(-1).clamp_min(0)
    values = where(fine[..., 0], descending, nan)
    V = where(fine, V.flip(-1), nan)
    return values.to(S.dtype), V.to(S.dtype)


def widest(S: Tensor) -> torch.dtype:
    """The precision of small dense work: Apple's GPUs have no float64."""
    return S.dtype if S.device.type == "mps" else torch.float64


def one_by_one(K: Tensor) -> bool:
    """Whether `eigh` of each is quick enough; it waits for the device."""
    return K.device.type == "cpu" or K.shape[-1] <= SMALL


def top(K: Tensor) -> Tensor:
    """The largest eigenvalue of each of K (L, m, m).

    On a GPU it is the mean of the eigenvalues, weighted by their powers 2^SQUARINGS.
    """
    if one_by_one(K):
        values, _ = eigh(K, vectors=False)
        return values[..., 0]
    P = K = K.to(widest(K))
    for _ in range(SQUARINGS // 2):
        P = linalg.matrix_power(_unit_trace(P), 4)
    return (K * _unit_trace(P)).sum((-2, -1))


def _unit_trace(P: Tensor) -> Tensor:
    trace = _trace(P)
    return P / where(trace > 0, trace, 1)


def start(K: Tensor, width: int, generator: torch.Generator | None) -> Tensor:
    """Random directions (m, w), where `spectrum` begins to look for K's (L, m, m) leading ones."""
    m = K.shape[-1]
    wider = min(m, width + OVERSAMPLE)
    if one_by_one(K) or not width:
        wider = 0
    directions = K.new_empty(m, wider, dtype=widest(K))
    return directions.normal_(generator=generator)


def spectrum(K: Tensor, width: int, start: Tensor) -> tuple[Tensor, Tensor]:
    """The `width` leading eigenvalues (L, w), descending, and directions V (L, m, w) of K (L, m,
    m).

    V is orthonormal. By orthogonal iteration the values are Rayleigh quotients, and V spans the
    leading directions up to where they decay slowly.
    """
    if one_by_one(K):
        values, V = eigh(K)
        return values[..., :width], V[..., :width]
    K = K.to(widest(K))
    V = start
    for _ in range(ITERATIONS):
        V = orthonormal(K @ V)
    V = orthonormal(V)
    quotients = (V * (K @ V)).sum(-2)
    values, order = quotients.sort(-1, descending=True)
    V = V.gather(-1, order[:, None].expand_as(V))
    return values[..., :width].clamp_min(0), V[..., :width]


def orthonormal(Z: Tensor) -> Tensor:
    """The columns of each of Z (L, m, w) made orthonormal, in order, by Cholesky.

    Columns that depend on earlier ones become 0.
    """
    lengths = linalg.vector_norm(Z, dim=-2, keepdim=True)
    Z = Z / _nonzero(lengths)
    gram = Z.mT @ Z
    L, _ = linalg.cholesky_ex(gram + 1e-13 * _eye(gram))
    Q: Tensor = linalg.solve_triangular(L, Z.mT, upper=False).mT
    return Q.nan_to_num(0, 0, 0)


def deviation(Y: Tensor, values: Tensor) -> Tensor:
    """The sketch error ‖e − ê‖/‖e‖ of the energies of directions v_j.

    e_j = ‖Uv_j‖² with Y = (UV)ᵀ; the sketch sees ê_j = ‖ΩUv_j‖², which are `values`.
    """
    e = Y.square().sum(1)
    error: Tensor = (e - values).norm()
    return error / _nonzero(e.norm())


def reduced(U: Implicit, rank: int, generator: torch.Generator) -> Implicit:
    """Rank-r factors G_i = Ĝ_i V_i, A_i = Â_i V_i (eq. 15).

    V_i (κ, r) are leading right singular vectors of the smaller factor, by a randomized partial
    SVD. Their signs are free in G_i A_iᵀ but not in eq. 23, so each column of V_i is made to sum to
    a positive number. With r ≥ κ nothing is done, and with r ≥ min(n_G, n_A) nothing is lost.
    """
    if rank >= U.kappa:
        return U
    X = min(U.G, U.A, key=lambda factor: factor.shape[2])  # (ϱ, h, m, κ)
    # What is not finite stays in the factors, and the state that comes of them is dropped.
    X = where(X.isfinite(), X, 0)
    largest = X.abs().amax((2, 3), keepdim=True)
    X = X / _nonzero(largest)
    m = X.shape[2]
    if rank >= m:
        V = linalg.qr(X.mT).Q
    else:
        width = min(m, U.kappa, rank + OVERSAMPLE)
        omega = X.new_empty(m, width).normal_(generator=generator)
        Z = linalg.qr(X.mT @ omega).Q  # (ϱ, h, κ, width)
        for _ in range(POWER):
            Z = linalg.qr(X.mT @ (X @ Z)).Q
        Vh = linalg.svd(X @ Z, full_matrices=False).Vh
        V = Z @ Vh.mT[..., :rank]
    sign = where(V.sum(-2, keepdim=True) < 0, -1, 1)
    V = V * sign
    return Implicit(U.G @ V, U.A @ V)
