"""One block for the whole network: M = UUᵀ with U = [U_1; …; U_L], the layers' rows below each other.

Grams and products add up over layers, UᵀU = Σ_l U_lᵀU_l and Uᵀg = Σ_l U_lᵀg_l, so that the exact direction, with all that is
between layers, costs no more arithmetic than layer by layer:

    d_l = (g_l − U_l b)/λ,   b = (λI + Σ_l U_lᵀU_l)⁻¹ Σ_l U_lᵀg_l

Every layer keeps its own U_l in its own form; the Gram that each of their blocks holds is the sum. A merged basis is UV_k with
one V_k for all layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from seng.linalg.implicit import Independent
from seng.linalg.numerics import spectrum, start, top
from seng.linalg.operators import Merged
from seng.linalg.sketch import Identity
from seng.metrics.block import Block, factorize
from seng.metrics.curvature import Curvature
from seng.metrics.job import Job
from seng.metrics.solver import Gradients, OneByOne, Solve


def build(jobs: Sequence[Job], curvature: Curvature) -> list[Block | None]:
    """A block per layer, all of them with the Gram of the whole; none where that is not finite."""
    if not jobs:
        return []
    for job in jobs:
        with job.timer:
            job.prepare(curvature)
            if not hasattr(job, "gram"):
                job.gram = job.omega.of(job.U).gram()
    _tie(jobs)
    K = jobs[0].gram
    if not len(K) or not K.isfinite().all():
        return [None] * len(jobs)
    if jobs[0].plan.form == "merged":
        _merge(jobs, curvature)
    largest = top(jobs[0].gram[None])[0].to(K.dtype)
    return [
        Block(job.U, job.omega, job.gram, largest, curvature.relative_damping)
        for job in jobs
    ]


def _tie(jobs: Sequence[Job]) -> None:
    """The sum of the layers' Grams becomes everybody's."""
    K = torch.stack([job.gram.to(jobs[0].gram) for job in jobs]).sum(0)
    for job in jobs:
        job.gram = K


def _merge(jobs: Sequence[Job], curvature: Curvature) -> None:
    """U_l becomes U_lV_k, and with what was there before [√δ·U_old, √(1−δ)·U_new]W_k."""
    k = jobs[0].plan.rank
    _reduce(
        jobs,
        [job.U.explicit().U.T for job in jobs] if k >= len(jobs[0].gram) else None,
        k,
    )
    olds = [job.previous.U if job.previous is not None else None for job in jobs]
    alike = {old.samples if isinstance(old, Merged) else 0 for old in olds}
    if curvature.averaging and len(alike) == 1 and 0 not in alike:
        delta = curvature.averaging
        stacks = []
        for job, old in zip(jobs, olds, strict=True):
            assert old is not None
            parts = (
                delta**0.5 * old.explicit().U.T.to(job.gram.dtype),
                (1 - delta) ** 0.5 * job.U.explicit().U.T,
            )
            stacks.append(torch.cat(parts))
            job.gram = stacks[-1] @ stacks[-1].T
        _tie(jobs)
        _reduce(jobs, stacks, k)


def _reduce(jobs: Sequence[Job], rows: list[Tensor] | None, k: int) -> None:
    """Combinations of U's columns along the k leading directions of the Gram; `rows` has U_lᵀ where that is at hand."""
    K = jobs[0].gram
    every = k >= len(K)
    V = (
        spectrum(K[None], k, start(K[None], k, jobs[0].generator))[1][0].to(K.dtype)
        if not every
        else None
    )
    for i, job in enumerate(jobs):
        Y = (
            job.U.combine(V)  # type: ignore[arg-type]
            if rows is None
            else rows[i]
            if V is None
            else V.T @ rows[i]
        )
        job.U, job.omega = (
            Merged.of(Y.to(K.dtype).contiguous(), job.U.shape),
            Identity(),
        )
        job.gram = job.U.gram()
    _tie(jobs)


def share(blocks: Sequence[Block], dampings: Sequence[float]) -> None:
    """(λI + K)⁻¹ once for all of them."""
    if len(set(dampings)) > 1:
        raise ValueError(
            f"blocks='network' is one block, but its parameters have the dampings {sorted(set(dampings))}: give one"
        )
    if blocks:
        factorize([(blocks[0], dampings[0])])
        for block in blocks:
            block.core = blocks[0].core


class Whole(OneByOne):
    """Solves that share b."""

    def _solved(self, grads: Gradients) -> dict[nn.Parameter, Tensor]:
        solves = self.solves
        if not solves:
            return {}
        gs = [s.site.gather(s.active, grads, s.block.gram.dtype) for s in solves]
        ds, fine = _corrected(solves, gs)
        exact = not any(isinstance(s.block.U, Independent) for s in solves)
        if (
            gs[0].dtype == torch.float64 and exact
        ):  # refined once, as in `Block.attempt`
            c = _projected(solves, ds) / solves[0].lam
            rest = [
                g - d - s.block.U.mv(c) for s, g, d in zip(solves, gs, ds, strict=True)
            ]
            more = _corrected(
                solves, [torch.where(fine & r.isfinite().all(), r, 0) for r in rest]
            )[0]
            ds = [d + r for d, r in zip(ds, more, strict=True)]
        out: dict[nn.Parameter, Tensor] = {}
        for s, d in zip(solves, ds, strict=True):
            s.block.failures += ~fine
            out |= {
                p: part.to(p.dtype)
                for p, part in s.site.scatter(s.active, d).items()
                if p in grads
            }
        return out


def _projected(solves: Sequence[Solve], zs: Sequence[Tensor]) -> Tensor:
    """Σ_l Ξ_lᵀΩ_lz_l."""
    return torch.stack(
        [s.block.Xi.rmv(s.block.omega(z)) for s, z in zip(solves, zs, strict=True)]
    ).sum(0)


def _corrected(
    solves: Sequence[Solve], gs: Sequence[Tensor]
) -> tuple[list[Tensor], Tensor]:
    """g − Ub, and whether b is finite; where it is not, g."""
    inverse = solves[0].inverse
    b = inverse @ _projected(solves, gs).to(inverse.dtype)
    fine = b.isfinite().all()
    b = torch.where(fine, b, 0)
    return [
        g - s.block.U.mv(b.to(g.dtype)) for s, g in zip(solves, gs, strict=True)
    ], fine
