"""U → sketch → block, for all layers at once: what happens on a refresh, after the backward and before the step.

Everything as large as a layer is done layer by layer; everything as small as ϱ × ϱ is done for all layers together, and the
host looks twice at most, so that a GPU does not wait for it. How many directions a merged layer keeps: as few as leave the
direction of the mean gradient within TOLERANCE of the untruncated one, at most `rank`; where `rank` is not enough and the plan
knows an exact form, that one. In float64 nothing is dropped but by `rank`.

A block that keeps its shapes is written to where it is, so that what was recorded for the steps between refreshes holds on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from seng.gpu.replay import LARGE, Run, Task, directly, together, write
from seng.gpu.staging import read, send
from seng.linalg.numerics import one_by_one, spectrum, start, top, truncation_errors
from seng.linalg.operators import Operator
from seng.metrics.block import Block
from seng.metrics.curvature import Curvature
from seng.metrics.job import PATIENCE, Job

NEGLIGIBLE = 1e-3  # of λ: averaged curvature drops eigenvalues below it, which change a direction by less than a thousandth


def grams(Us: Sequence[Operator], run: Run) -> list[Tensor]:
    """UᵀU of each, several at once as long as that is not too much for one recording."""
    batches: list[list[Operator]] = []
    for U in Us:
        if (
            batches
            and _alike(U, batches[-1][0])
            and U.bytes + sum(V.bytes for V in batches[-1]) <= LARGE // 2
        ):
            batches[-1].append(U)
        else:
            batches.append([U])
    return [K for batch in batches for K in run(_grams, *batch)[0].unbind()]


def _alike(U: Operator, V: Operator) -> bool:
    """Whether their Grams can be stacked."""
    first, second = U.tensors()[0], V.tensors()[0]
    return (U.samples, U.dtype, first.device) == (V.samples, V.dtype, second.device)


def _grams(*Us: Operator) -> tuple[Tensor]:
    return (torch.stack([U.gram() for U in Us]),)


def build(
    jobs: Sequence[Job], curvature: Curvature, run: Run = directly
) -> list[Block | None]:
    """A block per job, or None where U has no columns or numbers that are not finite."""
    for job in jobs:
        with job.timer:
            job.prepare(curvature)
    rest = [job for job in jobs if not hasattr(job, "gram")]
    for job, K in zip(rest, grams([job.U for job in rest], run), strict=True):
        job.gram = K
    groups = _by_size([job for job in jobs if len(job.gram)])
    counted = [job for job in jobs if job.previous is not None]
    failures = [
        job.previous.failures[None] for job in counted if job.previous is not None
    ]
    seen = read(
        [*(_choices(same, curvature, run) for same in groups), *failures]
    )  # the one look that every refresh takes
    for job, (failed,) in zip(counted, seen[len(groups) :], strict=True):
        job.failed = failed
    alive = [
        (job, k)
        for same, ks in zip(groups, seen, strict=False)
        for job, k in zip(same, ks, strict=True)
        if k >= 0
    ]
    try:
        together(_settled(alive, curvature.averaging > 0), run)
        if curvature.averaging:
            _average([job for job, _ in alive if job.averaged], curvature, run)
        built = {id(job): job.block(curvature.relative_damping) for job, _ in alive}
        write([pair for _, pairs in built.values() for pair in pairs])
    except BaseException:
        for job, _ in alive:
            if (
                job.writes and job.previous is not None
            ):  # half old and half new: it solves nothing until the next refresh
                job.previous.gram.fill_(torch.nan)
                job.previous.core = None
        raise
    return [built[id(job)][0] if id(job) in built else None for job in jobs]


def _settled(jobs: Sequence[tuple[Job, int]], averaging: bool) -> list[Task]:
    """What is left to do where each job keeps so many directions."""
    tasks = []
    for job, k in jobs:
        with job.timer:
            tasks.append(job.settle(job.steady(k), averaging))
    return [task for task in tasks if task is not None]


def _by_size(jobs: Sequence[Job]) -> list[list[Job]]:
    groups: defaultdict[object, list[Job]] = defaultdict(list)
    for job in jobs:
        groups[len(job.gram), job.gram.dtype, job.gram.device].append(job)
    return list(groups.values())


def _choices(jobs: Sequence[Job], curvature: Curvature, run: Run) -> Tensor:
    """For Grams of one size: the largest eigenvalue, leading directions where they are wanted, and how many of them to keep.

    The number is −1 where the Gram is not finite, and its size where U stays as it is.
    """
    K = torch.stack([job.gram for job in jobs])
    m = K.shape[-1]
    ranks = [job.most for job in jobs]
    widest = max((rank for rank in ranks if rank < m), default=0)
    exact = [float(job.plan.otherwise is not None) for job in jobs]
    tolerances = [job.tolerance for job in jobs]
    numbers = _sent(
        [
            [float(rank) for rank in ranks],
            [job.damping for job in jobs],
            exact,
            tolerances,
        ],
        K,
    )
    chosen, *found = (directly if one_by_one(K) else run)(
        _chosen,
        *(K, numbers, start(K, widest, jobs[0].generator if widest else None)),
        widest=widest,
        relative=curvature.relative_damping,
        tolerant=not curvature.averaging and K.dtype != torch.float64,
    )
    for job, *mine in zip(jobs, *(x.unbind() for x in found), strict=True):
        job.top, job.lengths, job.values, job.V = mine
    return chosen


def _chosen(
    K: Tensor,
    numbers: Tensor,
    start: Tensor,
    *,
    widest: int,
    relative: bool,
    tolerant: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """How many directions, the largest eigenvalue, lengths, leading eigenvalues and directions of each of K (L, m, m)."""
    m = K.shape[-1]
    chosen, lam, exact = numbers[0].long(), numbers[1], numbers[2] > 0
    K = torch.where(K.isfinite().all(2).all(1)[:, None, None], K, torch.nan)
    tops = top(K)
    fine = tops.isfinite()
    K = torch.where(fine[:, None, None], K, 0)
    if not widest:
        none = K[:, :, :0]
        return (
            torch.where(fine, chosen, -1),
            tops.to(K.dtype),
            _lengths(K)[:, -1:],
            none[:, 0],
            none,
        )
    values, V = spectrum(K, widest, start)
    small, V = V.mT @ K.to(V.dtype) @ V, V.to(K.dtype)
    lengths = torch.cat([_lengths(small.to(K.dtype)), _lengths(K)[:, -1:]], 1)
    if tolerant:
        lam = lam * tops if relative else lam
        enough = (
            truncation_errors(K, V, torch.where(lam > 0, lam, 1)) <= numbers[3, :, None]
        )
        first = torch.where(
            enough.any(1), enough.int().argmax(1) + 1, m
        )  # m: not even `widest` directions are enough
        rounded = torch.minimum(
            2 ** first.clamp_min(8).log2().ceil().long(), chosen
        )  # so that few sizes come up
        chosen = torch.where(
            chosen < m, torch.where(exact & (first > chosen), m, rounded), chosen
        )
    return torch.where(fine, chosen, -1), tops.to(K.dtype), lengths, values, V


def _average(jobs: Sequence[Job], curvature: Curvature, run: Run) -> None:
    """δM_old + (1 − δ)M_new, at most `rank` directions, less where eigenvalues are far below λ."""
    together(
        [task for job in jobs if (task := job.stack(curvature.averaging)) is not None],
        run,
    )
    groups, counts = _by_size(jobs), []
    for same in groups:
        K = torch.stack([job.gram for job in same])
        widest = max(job.plan.rank for job in same)
        kept, *found = (directly if one_by_one(K) else run)(
            _large_ones,
            *(
                K,
                _sent([job.damping for job in same], K),
                start(K, widest, same[0].generator),
            ),
            widest=widest,
            relative=curvature.relative_damping,
        )
        counts.append(kept)
        for job, *mine in zip(same, *(x.unbind() for x in found), strict=True):
            job.top, job.V = mine
    patient = all(
        job.left and job.before == job.plan.rank for job in jobs
    )  # which spares the look
    seen = (
        [[job.before for job in same] for same in groups] if patient else read(counts)
    )
    tasks = []
    for same, numbers in zip(groups, seen, strict=True):
        for job, count in zip(same, numbers, strict=True):
            if count < 0:  # what was kept before is not finite: it goes
                job.begin_anew()
                continue
            k = (
                job.before
                if patient
                else job.steady(
                    min(1 << max(3, (count - 1).bit_length()), job.plan.rank)
                )
            )
            job.patience = (
                job.left - 1
                if patient
                else PATIENCE
                if k == job.before == job.plan.rank
                else 0
            )
            tasks.append(job.truncate(k))
    together([task for task in tasks if task is not None], run)


def _large_ones(
    K: Tensor, lam: Tensor, start: Tensor, *, widest: int, relative: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """How many eigenvalues of each of K are not negligible, or −1; the largest of them, and leading directions."""
    values, W = spectrum(K, widest, start)
    tops = top(K)
    lam = lam * tops if relative else lam
    kept = (
        values >= (NEGLIGIBLE * lam[:, None] if K.dtype != torch.float64 else 0)
    ).sum(1)
    return torch.where(tops.isfinite(), kept, -1), tops.to(K.dtype), W.to(K.dtype)


def _lengths(K: Tensor) -> Tensor:
    """(Σ_{j≤k} K_jj)^½ (L, m) for k = 1 … m; 1 where it is 0, since it is divided by."""
    squares = K.diagonal(dim1=-2, dim2=-1).cumsum(-1)
    return torch.where(squares > 0, squares, 1).sqrt()


def _sent(numbers: Sequence[Any], like: Tensor) -> Tensor:
    """Numbers of the host on the device."""
    return send(torch.tensor(numbers, dtype=like.dtype, device="cpu"), like.device)
