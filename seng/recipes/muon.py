"""Muon (Jordan et al. 2024): each matrix steps along the polar factor of its momentum.

    b ← μb + (1 − μ)d,   X = b, or (1 − μ)d + μb by Nesterov
    θ ← (1 − lr·weight_decay)·θ − lr·ratio(m, n)·Q,   Q ≈ UVᵀ of X = UΣVᵀ

The arithmetic is that of `torch.optim.Muon`, which it equals on weights of two dimensions. The
kernels of a convolution are one matrix, those of h groups are h matrices. All other parameters
take AdamW's step along their gradients.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from seng.checks import check_lr, check_number
from seng.layers.sites import Segment, Site
from seng.recipes.adamw import adam_step, check_betas
from seng.recipes.recipe import (
    Directions,
    Group,
    Params,
    Recipe,
    momentum_buffers,
    recipe,
)

ADAM_SHARE = 0.015  # of lr: the published recipe has 3e-4 beside 0.02
RMS = 0.2  # of AdamW's updates, as Liu et al. (2025) measured it
ROOM = 2**24  # numbers in a batch on a GPU: larger matrices fill it one by one
ADJUSTMENTS = None, "original", "match_rms_adamw"
EXPECTED = (
    "ns_coefficients are three numbers, ns_steps is a count below 100, and adjust_lr_fn is one of "
    f"{ADJUSTMENTS}"
)


def polar(
    X: Tensor, coefficients: Sequence[float], steps: int, eps: float
) -> Tensor:
    """Q ≈ UVᵀ in bfloat16 of one matrix X = UΣVᵀ (m, n), or of each of (L, m, n).

    Y ← aY + (bS + cS²)Y,   S = YYᵀ,   from Y = X/‖X‖, on its side if it is tall
    """
    a, b, c = coefficients
    add_product = torch.addmm if X.dim() == 2 else torch.baddbmm
    tall = X.shape[-2] > X.shape[-1]
    Y = X.bfloat16()
    if tall:
        Y = Y.mT
    length = torch.linalg.vector_norm(Y, dim=(-2, -1), keepdim=True)
    Y = Y / length.clamp(min=eps)
    for _ in range(steps):
        S = Y @ Y.mT
        M = add_product(S, S, S, beta=b, alpha=c)
        Y = add_product(Y, M, Y, beta=a)
    return Y.mT if tall else Y


def ratio(m: int, n: int, adjust_lr_fn: str | None) -> float:
    """How far a matrix (m, n) goes, in units of lr."""
    if adjust_lr_fn == "match_rms_adamw":
        return RMS * math.sqrt(max(m, n))
    return math.sqrt(max(1, m / n))


def head_of(module: nn.Module) -> nn.Parameter | None:
    """The weight of the last linear layer."""
    linear = [m for m in module.modules() if isinstance(m, nn.Linear)]
    return linear[-1]._parameters.get("weight") if linear else None


def matrices(
    sites: Sequence[Site], module: nn.Module
) -> dict[nn.Parameter, Segment]:
    """The weights that are matrices, and how each lies as (h, n_G, n_A)."""
    used = [site for site in sites if Muon.refuses(site, module) is None]
    segments = [s for site in used for s in site.segments]
    return {s.param: s for s in segments if s.name == "weight"}


@recipe("muon")
class Muon(Recipe):
    """The polar step of the layers' matrices, and AdamW's of all else.

    Without a module every parameter of two or more dimensions is a matrix.
    """

    whole = prompt = True
    others: ClassVar[str] = "AdamW's step"
    lr: ClassVar[float] = 0.02
    damping: ClassVar[float] = 1.0
    power: ClassVar[float | None] = 0.25
    options: ClassVar[dict[str, Any]] = {
        "momentum": 0.95,
        "nesterov": True,
        "ns_coefficients": (3.4445, -4.775, 2.0315),
        "eps": 1e-7,
        "ns_steps": 5,
        "adjust_lr_fn": None,
        "adam_lr": None,
        "adam_betas": (0.9, 0.95),
        "adam_eps": 1e-8,
    }

    def __init__(
        self, sites: Sequence[Site], module: nn.Module | None = None
    ) -> None:
        super().__init__(sites)
        self.segments: dict[nn.Parameter, Segment] | None = None
        if module is not None:
            self.segments = matrices(sites, module)

    @classmethod
    def refuses(cls, site: Site, module: nn.Module) -> str | None:
        """Why a layer has no matrix; None: it has."""
        weights = [s.param for s in site.segments if s.name == "weight"]
        if not site.matrix:
            return "it is no matrix: it takes AdamW's step"
        if not weights:
            return "its weight is not trained: its bias takes AdamW's step"
        head = head_of(module)
        if any(p is head for p in weights):
            return "the head takes AdamW's step"
        return None

    @staticmethod
    def check(group: Group) -> None:
        check_lr(group["lr"])
        for name in ("weight_decay", "momentum", "eps", "adam_eps", "adam_lr"):
            if group[name] is not None:
                check_number(name, group[name])
        check_betas("adam_betas", group["adam_betas"])
        fits = {
            "ns_coefficients": len(group["ns_coefficients"]) == 3,
            "ns_steps": group["ns_steps"] in range(100),
            "adjust_lr_fn": group["adjust_lr_fn"] in ADJUSTMENTS,
        }
        for name, fit in fits.items():
            if not fit:
                raise ValueError(f"{name}={group[name]!r}: {EXPECTED}")

    def is_matrix(self, p: nn.Parameter) -> bool:
        if self.segments is None:
            return p.dim() >= 2 and not p.is_complex()
        return p in self.segments

    def step(
        self,
        state: Any,
        group: Group,
        params: Params,
        directions: Directions,
    ) -> None:
        """Matrices go along the polar factor of their momentum, all else takes AdamW's step."""
        weights = [p for p in params if self.is_matrix(p)]
        others = [p for p in params if not self.is_matrix(p)]
        if weights:
            along = momenta(state, group, weights, directions)
            self._descend(group, weights, along)
        lr = group["adam_lr"]
        if lr is None:
            same = group["adjust_lr_fn"] == "match_rms_adamw"
            lr = group["lr"] if same else ADAM_SHARE * group["lr"]
        betas, eps = group["adam_betas"], group["adam_eps"]
        adam_step(state, group, others, lr=lr, betas=betas, eps=eps)

    def _descend(
        self, group: Group, weights: Params, along: Sequence[Tensor]
    ) -> None:
        """θ ← (1 − lr·weight_decay)·θ − lr·ratio·Q, in place."""
        lr = group["lr"]
        if isinstance(lr, Tensor):
            lr = lr.reshape(())
        torch._foreach_mul_([*weights], 1 - lr * group["weight_decay"])
        how = group["ns_coefficients"], group["ns_steps"], group["eps"]
        rows = [self._rows(*pair) for pair in zip(weights, along, strict=True)]
        for batch in batches(rows):
            h, m, n = rows[batch[0]].shape
            X = torch.cat([rows[i] for i in batch])  # (L, m, n)
            # One matrix as torch does it: products of batches may round otherwise.
            single = len(X) == 1
            Q = polar(X.squeeze(0) if single else X, *how).view(X.shape)
            moved: list[Tensor] = [weights[i] for i in batch]
            moves = [
                self._back(weights[i], q)
                for i, q in zip(batch, Q.to(X.dtype).split(h), strict=True)
            ]
            rate = lr * ratio(m, n, group["adjust_lr_fn"])
            torch._foreach_sub_(moved, torch._foreach_mul(moves, rate))

    def _rows(self, p: nn.Parameter, x: Tensor) -> Tensor:
        """A tensor of p's shape as its h matrices (h, m, n)."""
        if self.segments is None:
            return x.reshape(1, len(p), -1)
        return self.segments[p].rows(x)

    def _back(self, p: nn.Parameter, rows: Tensor) -> Tensor:
        """And back."""
        if self.segments is None:
            return rows.reshape(p.shape)
        return self.segments[p].back(rows)


def momenta(
    state: Any, group: Group, params: Params, directions: Directions
) -> list[Tensor]:
    """b ← μb + (1 − μ)d in place; what the step goes along."""
    mu = group["momentum"]
    d = [directions[p].to(p.dtype) for p in params]
    if group["maximize"]:
        d = [*torch._foreach_neg(d)]
    b = momentum_buffers(state, params)
    torch._foreach_lerp_(b, d, 1 - mu)
    return [*torch._foreach_lerp(d, b, mu)] if group["nesterov"] else b


def batches(rows: Sequence[Tensor]) -> Iterator[list[int]]:
    """Which parameters go through Newton–Schulz at once: on a GPU those of one shape.

    On a CPU each goes alone.
    """
    alike: defaultdict[object, list[int]] = defaultdict(list)
    for i, x in enumerate(rows):
        alike[x.shape, x.device, x.dtype].append(i)
    for same in alike.values():
        x = rows[same[0]]
        count = max(1, ROOM // x.numel()) if x.is_cuda else 1
        for first in range(0, len(same), count):
            yield same[first : first + count]
