"""Steps that move all singular directions of a layer alike: of each layer's momentum x = UΣVᵀ its polar factor O ≈ UVᵀ.

    θ ← θ − lr·(O·RMS·√n/‖O‖ + weight_decay·θ)

That is steepest descent in the spectral norm, the step of Muon (Jordan et al. 2024), here of SENG's directions: what few
samples agree on is stepped along as far as what all do. Every layer's step has the same root mean square, lr·RMS, whatever the
scale of the loss. Weight and bias of a layer are one matrix, as everywhere in SENG; norms and embeddings, which are none, step
along x itself, as long; what SENG does not cover takes SGD's step. Weight decay is decoupled: as a part of x it would be
stretched too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from seng.sites import Segment, Site

RMS = 1 / 30  # of a step, per unit of lr: so that lr is about what it is for SGD on networks with norms
STEPS = 5
QUINTIC = 3.4445, -4.7750, 2.0315  # Jordan et al.: singular values between 0.7 and 1.2 after five steps, from 1e-3 up

Part = tuple[Site, tuple[Segment, ...]]  # a layer, or those of its parameters that take this step


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


def steps(*xs: Tensor, blocks: tuple[Part, ...]) -> tuple[Tensor, ...]:
    """The steps of the parameters of the blocks, in order, at lr 1; matrices of one shape are worked out at once."""
    rest = iter(xs)
    given = [[next(rest) for _ in active] for _, active in blocks]
    found: dict[int, Tensor] = {}
    alike: defaultdict[object, list[int]] = defaultdict(list)
    for i, ((site, active), tensors) in enumerate(zip(blocks, given, strict=True)):
        tensor_of = {s.param: x for s, x in zip(active, tensors, strict=True)}
        found[i] = site.gather(active, tensor_of, site.dtype).view(site.shape(active))
        if site.matrix and any(s.name == "weight" for s in active):
            alike[found[i].shape, found[i].dtype, found[i].device].append(i)
    for same in alike.values():
        found |= zip(same, polar(torch.cat([found[i] for i in same])).chunk(len(same)), strict=True)
    out = []
    for i, (site, active) in enumerate(blocks):
        length = torch.linalg.vector_norm(found[i])
        moved = found[i] * (RMS * found[i].numel() ** 0.5 / torch.where(length > 0, length, 1))
        parts = site.scatter(active, moved.reshape(-1))
        out += [parts[s.param].to(x.dtype) for s, x in zip(active, given[i], strict=True)]
    return tuple(out)


def blocks_of(sites: Sequence[Site], params: Sequence[nn.Parameter]) -> tuple[Part, ...]:
    """What of these parameters belongs to a layer that is covered, layer by layer."""
    there = set(params)
    found = ((site, tuple(s for s in site.segments if s.param in there)) for site in sites)
    return tuple((site, active) for site, active in found if active)


def update(
    state: Any,
    group: Mapping[str, Any],
    blocks: tuple[Part, ...],
    directions: Mapping[nn.Parameter, Tensor],
    run: Callable[..., Sequence[Tensor]],
) -> None:
    """One step of the blocks' parameters, in place; `run` may replay `steps`."""
    params = [s.param for _, active in blocks for s in active]
    if not params:
        return
    xs: Sequence[Tensor] = [directions[p].to(p.dtype) for p in params]
    xs = torch._foreach_neg(list(xs)) if group["maximize"] else xs
    if group["momentum"]:
        xs = _with_momentum(state, params, xs, group["momentum"], group["nesterov"])
    moves = list(run(steps, *xs, blocks=blocks))
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
