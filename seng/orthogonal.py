"""Steps that move all singular directions of a layer alike: of each layer's momentum x = UΣVᵀ its polar factor O ≈ UVᵀ.

    θ ← θ − lr·(‖x‖/‖O‖·O + weight_decay·θ)

That is steepest descent in the spectral norm, the step of Muon (Jordan et al. 2024), here of SENG's directions: what few
samples agree on is stepped along as far as what all do. It is as long as x itself, so that an SGD recipe's lr carries over.
Weight and bias of a layer are one matrix, as everywhere in SENG; norms, embeddings and all that is no matrix take SGD's step.
Weight decay is decoupled: as a part of x it would be stretched too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from seng.sites import Segment, Site

STEPS = 5
QUINTIC = 3.4445, -4.7750, 2.0315  # Jordan et al.: singular values between 0.7 and 1.2 after five steps, from 1e-3 up

Matrix = tuple[Site, tuple[Segment, ...]]


def polar(X: Tensor) -> Tensor:
    """O of each of X (L, m, n), nearly: X ← aX + (bXXᵀ + c(XXᵀ)²)X, from X/‖X‖; 0 of a matrix of zeros.

    On a GPU in bfloat16: the iteration corrects its own rounding.
    """
    wide = X.shape[-2] <= X.shape[-1]
    Y = X if wide else X.mT
    Y = Y / torch.linalg.matrix_norm(Y, keepdim=True).clamp_min(torch.finfo(Y.dtype).tiny)
    Y = Y.to(torch.bfloat16 if X.is_cuda and X.dtype != torch.float64 else X.dtype)
    a, b, c = QUINTIC
    for _ in range(STEPS):
        S = Y @ Y.mT
        Y = torch.baddbmm(Y, torch.baddbmm(S, S, S, beta=b, alpha=c), Y, beta=a)
    return (Y if wide else Y.mT).to(X.dtype)


def steps(*xs: Tensor, matrices: tuple[Matrix, ...]) -> tuple[Tensor, ...]:
    """‖x‖/‖O‖·O for the parameters of the matrices, in order; matrices of one shape are worked out at once."""
    rest = iter(xs)
    groups: defaultdict[object, list[tuple[int, Tensor]]] = defaultdict(list)
    for i, (site, active) in enumerate(matrices):
        given = {segment.param: next(rest) for segment in active}
        X = site.gather(active, given, next(iter(given.values())).dtype).view(site.shape(active))
        groups[X.shape, X.dtype, X.device].append((i, X))
    found: dict[int, Tensor] = {}
    for same in groups.values():
        X = torch.cat([x for _, x in same])
        both = [Z.unflatten(0, (len(same), -1)) for Z in (X, polar(X))]  # (L, h, n_G, n_A) each
        x, o = (torch.linalg.vector_norm(Z, dim=(1, 2, 3), keepdim=True) for Z in both)
        scaled = both[1] * (x / torch.where(o > 0, o, 1))
        found |= {i: one for (i, _), one in zip(same, scaled.unbind(), strict=True)}
    out = [site.scatter(active, found[i].reshape(-1)) for i, (site, active) in enumerate(matrices)]
    return tuple(parts[s.param] for parts, (_, active) in zip(out, matrices, strict=True) for s in active)


def matrices_of(sites: Sequence[Site], params: Sequence[nn.Parameter]) -> tuple[Matrix, ...]:
    """What of these parameters is a matrix: the weights of layers with factors, and the biases beside them."""
    there = set(params)
    found: list[Matrix] = []
    for site in sites:
        active = tuple(s for s in site.segments if s.param in there)
        if site.factored and any(s.name == "weight" for s in active):
            found.append((site, active))
    return tuple(found)


def update(
    state: Any,
    group: Mapping[str, Any],
    matrices: tuple[Matrix, ...],
    directions: Mapping[nn.Parameter, Tensor],
    run: Callable[..., Sequence[Tensor]],
) -> None:
    """One step of these matrices' parameters, in place; `run` may replay `steps`."""
    params = [s.param for _, active in matrices for s in active]
    if not params:
        return
    xs: Sequence[Tensor] = [directions[p].to(p.dtype) for p in params]
    xs = torch._foreach_neg(list(xs)) if group["maximize"] else xs
    if group["momentum"]:
        xs = _with_momentum(state, params, xs, group["momentum"], group["nesterov"])
    moves = list(run(steps, *xs, matrices=matrices))
    if group["weight_decay"]:
        moves = list(torch._foreach_add(moves, list(params), alpha=group["weight_decay"]))
    lr = group["lr"]
    if isinstance(lr, Tensor):
        torch._foreach_sub_(list(params), torch._foreach_mul(moves, lr))
    else:
        torch._foreach_add_(list(params), moves, alpha=-lr)


def _with_momentum(
    state: Any, params: Sequence[nn.Parameter], xs: Sequence[Tensor], momentum: float, nesterov: bool
) -> Sequence[Tensor]:
    """As torch's SGD has it: the first buffer is the first direction."""
    fresh = [p for p in params if state[p].get("momentum_buffer") is None]
    for p in fresh:
        state[p]["momentum_buffer"] = torch.zeros_like(p)
    buffers = [state[p]["momentum_buffer"] for p in params]
    torch._foreach_mul_(buffers, momentum)
    torch._foreach_add_(buffers, list(xs))
    return torch._foreach_add(list(xs), buffers, alpha=momentum) if nesterov else buffers
