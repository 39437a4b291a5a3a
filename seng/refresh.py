"""U → sketch → block, for all layers at once: what happens on a refresh, after the backward and before the step.

Everything as large as a layer is done layer by layer; everything as small as ϱ × ϱ is done for all layers together, and the
host looks twice at most, so that a GPU does not wait for it. The merged form keeps Y = UV_k, where V_k are leading directions
of the Gram K = ΞᵀΞ: Ω may only choose the subspace, so that the eigenvalues of λ(YYᵀ + λI)⁻¹ lie in [0, 1] for every sketch.
How many directions: as few as leave the direction of the mean gradient within TOLERANCE of the untruncated one, at most
`rank`; where `rank` is not enough and the plan knows an exact form, that one. In float64 nothing is dropped but by `rank`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from seng.block import Block
from seng.curvature import Curvature
from seng.numerics import deviation, reduced, spectrum, top, truncation_errors
from seng.operators import HALF, Explicit, Implicit, Independent, Merged, Operator, Windows, product
from seng.plan import Plan
from seng.sketch import Identity, Omega
from seng.staging import read, send

TOLERANCE = 0.03  # relative error of the direction that dropping directions may cause
NEGLIGIBLE = 1e-3  # of λ: averaged curvature drops eigenvalues below it, which change a direction by less than a thousandth


@dataclass
class Job:
    """One layer to be refreshed."""

    U: Operator  # as it was captured
    plan: Plan
    damping: float
    half: bool  # whether bases may be kept in half precision
    previous: Block | None  # what a merged basis is averaged with
    generator: torch.Generator
    timer: AbstractContextManager[None]
    omega: Omega = field(init=False)
    gram: Tensor = field(init=False)
    top: Tensor = field(init=False)  # its largest eigenvalue
    values: Tensor = field(init=False)  # its leading eigenvalues
    V: Tensor = field(init=False)  # and directions
    lengths: Tensor = field(init=False)  # of UV_k for every k, and of U at the end
    stacked: tuple[Merged, Merged] = field(init=False)  # the old basis and the new one
    fresh: tuple[Tensor, Tensor] = field(init=False)  # Gram and largest eigenvalue of the new one
    error: Tensor | None = field(init=False, default=None)

    def prepare(self, curvature: Curvature) -> None:
        """U in its planned form, Ω and the Gram of ΩU."""
        if self.plan.form == "explicit":
            self.U = self.U.explicit()
        elif self.plan.form == "implicit" and isinstance(self.U, Implicit | Windows):
            self.U = _factors(self.U, self.plan.rank, curvature, self.generator)
        sketch = curvature.sketch if self.plan.dims.own is None else None  # layers without factors stay exact
        plain = sketch is None or sketch.covers(self.U.shape)
        seen = self.U.implicit() if isinstance(self.U, Windows) and not plain else self.U
        self.omega = Identity() if plain or sketch is None else sketch.draw(seen, self.generator)
        self.gram = self.omega.of(seen).gram()
        if self.plan.form != "merged":
            self.U = seen

    def settle(self, k: int) -> None:
        """Keep UV_k, or U as it is."""
        if self.plan.form != "merged":
            return
        self.error = torch.zeros((), device="cpu")
        sketched = not isinstance(self.omega, Identity)
        if k < len(self.gram):
            Y = self.U.combine(self.V[:, :k].to(self.U.dtype))
            self.error = deviation(Y, self.values[:k].to(Y.dtype)) if sketched else self.error
            self._keep(Y, None if sketched else k)
        elif self.plan.otherwise is None:
            self._keep(self.U.explicit().U.T, None)
        elif sketched and isinstance(self.U, Windows) and self.plan.otherwise == "implicit":
            self.U = self.U.implicit()
        elif self.plan.otherwise == "explicit":
            self.U = self.U.explicit()
        if sketched and isinstance(self.U, Merged):
            self.top = top(self.gram[None])[0].to(self.gram.dtype)

    def stack(self, decay: float) -> None:
        """U becomes [√δ·U_old, √(1−δ)·U], whose Gram is put together from its parts."""
        assert self.previous is not None and isinstance(self.previous.U, Merged) and isinstance(self.U, Merged)
        before = self.previous.U
        if self.half and before.Y.dtype not in HALF:
            before = Merged.of(before.Y, before.shape, True).scaled(before.scale)
        old, new = before.scaled(decay**0.5), self.U.scaled((1 - decay) ** 0.5)
        self.fresh = self.gram, self.top
        across = product(old.Y.to(new.Y.dtype), new.Y.T) * (old.scale * new.scale)
        upper = torch.cat([decay * self.previous.gram, across], 1)
        self.gram = torch.cat([upper, torch.cat([across.T, (1 - decay) * self.gram], 1)])
        self.stacked = old, new

    def truncate(self, k: int) -> None:
        """The stack becomes what its k leading directions keep of it."""
        old, new = self.stacked
        W = self.V[:, :k].to(old.dtype)
        if not self.half:
            return self._keep(old.combine(W[: old.samples]) + new.combine(W[old.samples :]), None)
        scale = torch.maximum(old.scale, new.scale)
        W = torch.cat([W[: old.samples] * (old.scale / scale), W[old.samples :] * (new.scale / scale)]).T.to(torch.float16)
        Y = torch.mm(W[:, : old.samples].contiguous(), old.Y.to(torch.float16))
        Y.addmm_(W[:, old.samples :].contiguous(), new.Y)  # orthonormal combinations of numbers of size 1: no overflow
        self.U = Merged(Y, scale, self.U.shape)
        self.gram = self.U.gram()

    def _keep(self, Y: Tensor, k: int | None) -> None:
        """Y (k, n) becomes U; where it is known to be UV_k, its length is known too."""
        shape, self.omega = self.U.shape, Identity()
        if k is None or not self.half:
            self.U = Merged.of(Y, shape, self.half)
        else:
            self.U = Merged.of(Y, shape, self.half, self.lengths[k - 1])
        self.gram = self.U.gram()

    def block(self, relative: bool) -> Block:
        """The finished block."""
        if self.half and isinstance(self.U, Explicit) and isinstance(self.omega, Identity):
            self.U = Merged.of(self.U.U.T, self.U.shape, True, self.lengths[-1])
            self.gram = self.U.gram()
        if isinstance(self.U, Implicit | Windows):
            own: dict[str, Any] = {name: _own(t) for name, t in vars(self.U).items() if isinstance(t, Tensor)}
            self.U = replace(self.U, **own)
        block = Block(self.U, self.omega, self.gram, self.top.to(self.gram.dtype), relative)
        block.sketch_error = self.error
        return block


def build(jobs: Sequence[Job], curvature: Curvature) -> list[Block | None]:
    """A block per job, or None where U has no columns or numbers that are not finite."""
    for job in jobs:
        with job.timer:
            job.prepare(curvature)
    groups = _by_size([job for job in jobs if len(job.gram)])
    choices = read([_choices(same, curvature) for same in groups])  # the one look that every refresh takes
    alive = [(job, k) for same, ks in zip(groups, choices, strict=True) for job, k in zip(same, ks, strict=True) if k >= 0]
    for job, k in alive:
        with job.timer:
            job.settle(k)
    if curvature.averaging:
        _average([job for job, _ in alive if isinstance(job.U, Merged) and job.previous is not None], curvature)
    blocks = {id(job): job.block(curvature.relative_damping) for job, _ in alive}
    return [blocks.get(id(job)) for job in jobs]


def _by_size(jobs: Sequence[Job]) -> list[list[Job]]:
    groups: defaultdict[object, list[Job]] = defaultdict(list)
    for job in jobs:
        groups[len(job.gram), job.gram.dtype, job.gram.device].append(job)
    return list(groups.values())


def _choices(jobs: Sequence[Job], curvature: Curvature) -> Tensor:
    """For Grams of one size: the largest eigenvalue, leading directions where they are wanted, and how many of them to keep.

    The number is −1 where the Gram is not finite, and its size where U stays as it is.
    """
    K = torch.stack([job.gram for job in jobs])
    K = torch.where(K.isfinite().all(2).all(1)[:, None, None], K, torch.nan)
    tops = top(K)
    fine = tops.isfinite()
    K = torch.where(fine[:, None, None], K, 0)
    for job, largest, size in zip(jobs, tops.to(K.dtype).unbind(), _lengths(K).unbind(), strict=True):
        job.top, job.lengths = largest, size[-1:]
    m = K.shape[-1]
    ranks = [min(job.plan.rank, m) if job.plan.form == "merged" else m for job in jobs]
    widest = max((rank for rank in ranks if rank < m), default=0)
    chosen = _sent(ranks, K)
    if widest:
        values, V = spectrum(K, widest, jobs[0].generator)
        small, V = V.mT @ K.to(V.dtype) @ V, V.to(K.dtype)
        lengths = torch.cat([_lengths(small.to(K.dtype)), _lengths(K)[:, -1:]], 1)
        for job, *found in zip(jobs, values.unbind(), V.unbind(), lengths.unbind(), strict=True):
            job.values, job.V, job.lengths = found
        if not curvature.averaging and K.dtype != torch.float64:
            lam = _sent([job.damping for job in jobs], tops)
            lam = lam * tops if curvature.relative_damping else lam
            enough = truncation_errors(K, V, torch.where(lam > 0, lam, 1)) <= TOLERANCE
            first = torch.where(enough.any(1), enough.int().argmax(1) + 1, m)  # m: not even `widest` directions are enough
            rounded = torch.minimum(2 ** first.clamp_min(8).log2().ceil().long(), chosen)  # so that few sizes come up
            exact = _sent([job.plan.otherwise is not None for job in jobs], K).bool()
            chosen = torch.where(chosen < m, torch.where(exact & (first > chosen), m, rounded), chosen)
    return torch.where(fine, chosen, -1)


def _average(jobs: Sequence[Job], curvature: Curvature) -> None:
    """δM_old + (1 − δ)M_new, at most `rank` directions, less where eigenvalues are far below λ."""
    for job in jobs:
        with job.timer:
            job.stack(curvature.averaging)
    groups, counts = _by_size(jobs), []
    for same in groups:
        K = torch.stack([job.gram for job in same])
        values, W = spectrum(K, max(job.plan.rank for job in same), same[0].generator)
        tops = top(K)
        lam = _sent([job.damping for job in same], tops)
        lam = lam * tops if curvature.relative_damping else lam
        kept = (values >= (NEGLIGIBLE * lam[:, None] if K.dtype != torch.float64 else 0)).sum(1)
        counts.append(torch.where(tops.isfinite(), kept, -1))
        for job, *found in zip(same, tops.to(K.dtype).unbind(), W.to(K.dtype).unbind(), strict=True):
            job.top, job.V = found
    for same, numbers in zip(groups, read(counts), strict=True):
        for job, count in zip(same, numbers, strict=True):
            if count < 0:  # what was kept before is not finite: it goes
                job.gram, job.top = job.fresh
                continue
            with job.timer:
                job.truncate(max(1, min(count, job.plan.rank)))


def _own(t: Tensor) -> Tensor:
    """Without the rest of a batch of which it is a part."""
    return t if t.untyped_storage().nbytes() <= t.numel() * t.element_size() else t.clone()


def _lengths(K: Tensor) -> Tensor:
    """(Σ_{j≤k} K_jj)^½ (L, m) for k = 1 … m; 1 where it is 0, since it is divided by."""
    squares = K.diagonal(dim1=-2, dim2=-1).cumsum(-1)
    return torch.where(squares > 0, squares, 1).sqrt()


def _sent(numbers: Sequence[float], like: Tensor) -> Tensor:
    """Numbers of the host on the device; integers stay integers."""
    return send(
        torch.tensor(numbers, dtype=like.dtype if isinstance(numbers[0], float) else torch.int64, device="cpu"), like.device
    )


def _factors(U: Implicit | Windows, rank: int, curvature: Curvature, generator: torch.Generator) -> Operator:
    """The implicit form: rank-r factors, or all of them where they are no more."""
    if curvature.combine == "exact" and rank >= U.rank:
        return U
    factors = U.implicit() if isinstance(U, Windows) else U
    factors = reduced(factors, rank, generator)
    return Independent(factors.G, factors.A) if curvature.combine == "independent" else factors
