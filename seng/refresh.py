"""U → sketch → block, for all layers at once: what happens on a refresh, after the backward and before the step.

Everything as large as a layer is done layer by layer; everything as small as ϱ × ϱ is done for all layers together, and the
host looks twice at most, so that a GPU does not wait for it. The merged form keeps Y = UV_k, where V_k are leading directions
of the Gram K = ΞᵀΞ: Ω may only choose the subspace, so that the eigenvalues of λ(YYᵀ + λI)⁻¹ lie in [0, 1] for every sketch.
How many directions: as few as leave the direction of the mean gradient within TOLERANCE of the untruncated one, at most
`rank`; where `rank` is not enough and the plan knows an exact form, that one. In float64 nothing is dropped but by `rank`.

A block that keeps its shapes is written to where it is, so that what was recorded for the steps between refreshes holds on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from seng.block import Block
from seng.curvature import Curvature
from seng.numerics import deviation, one_by_one, reduced, spectrum, start, top, truncation_errors
from seng.operators import HALF, Implicit, Independent, Merged, Operator, product
from seng.plan import Plan
from seng.replay import LARGE, directly, write
from seng.sketch import Identity, Omega
from seng.staging import read, send
from seng.windows import Windows

TOLERANCE = 0.03  # relative error of the direction that dropping directions may cause
PATIENCE = 3  # refreshes for which an exact form stays before it is asked again whether few directions do
NEGLIGIBLE = 1e-3  # of λ: averaged curvature drops eigenvalues below it, which change a direction by less than a thousandth

Run = Callable[..., list[Tensor]]  # `replay.directly`, or by recordings


@dataclass
class Job:
    """One layer to be refreshed."""

    U: Operator  # as it was captured
    plan: Plan
    damping: float
    half: bool  # whether bases may be kept in half precision
    previous: Block | None  # of the same parameters: averaged with, and written to where the shapes stay
    seed: Callable[[], torch.Generator]
    timer: AbstractContextManager[None]
    run: Run = directly
    known: Tensor | None = None  # UᵀU, where it was worked out during the backward
    omega: Omega = field(init=False)
    gram: Tensor = field(init=False)
    top: Tensor = field(init=False)  # its largest eigenvalue
    values: Tensor = field(init=False)  # its leading eigenvalues
    V: Tensor = field(init=False)  # and directions
    lengths: Tensor = field(init=False)  # of UV_k for every k, and of U at the end
    stacked: tuple[Merged, Merged] = field(init=False)  # the old basis and the new one
    fresh: tuple[Tensor, Tensor] = field(init=False)  # Gram and largest eigenvalue of the new one
    error: Tensor | None = field(init=False, default=None)
    failed: int = field(init=False, default=0)  # solves with the previous block
    patience: int = field(init=False, default=0)

    @cached_property
    def generator(self) -> torch.Generator:
        """Its own stream, made when it is needed: making one takes time."""
        return self.seed()

    @property
    def averaged(self) -> bool:
        """Whether there is a basis to average with."""
        return isinstance(self.U, Merged) and self.previous is not None and isinstance(self.previous.U, Merged)

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
        if self.plan.form != "merged":
            self.U = seen
        if not (plain and isinstance(seen, Windows)):
            self.gram = self.omega.of(seen).gram()
        elif self.known is not None:
            self.gram = self.known

    @property
    def left(self) -> int:
        """Refreshes for which things stay as they were."""
        return 0 if self.previous is None else self.previous.patience

    @property
    def patient(self) -> bool:
        """Whether an average is taken to need all its directions, as it did before."""
        return self.left > 0 and len(self.gram) >= self.plan.rank

    @property
    def most(self) -> int:
        """The number of directions that is asked about; all of them where U stays as it is."""
        settled = (
            not self.plan.asks
            or self.plan.form != "merged"
            or (self.plan.otherwise is not None and self.previous is not None and self.previous.patience > 0)
        )
        return len(self.gram) if settled else min(self.plan.rank, len(self.gram))

    @property
    def tolerance(self) -> float:
        """Less where U was kept as it is: what is at the edge would change its form all the time."""
        exact = self.previous is not None and self.previous.U.samples == len(self.gram)
        return TOLERANCE / 2 if exact else TOLERANCE

    def steady(self, k: int) -> int:
        """As many directions as there were, where so many are needed that this is no great waste: the shapes stay then."""
        before = 0 if self.previous is None or not isinstance(self.previous.U, Merged) else self.previous.U.samples
        return before if k < before <= min(4 * k, self.most) and before < len(self.gram) else k

    def settle(self, k: int, averaging: bool) -> None:
        """Keep UV_k, or U as it is."""
        if self.plan.form == "explicit" and self.half and self.plan.dims.own is None and isinstance(self.omega, Identity):
            self._keep(_whole, self.U, self.lengths[-1])
        if self.plan.form != "merged":
            return
        self.error = torch.zeros((), device="cpu")
        sketched, every = not isinstance(self.omega, Identity), k >= len(self.gram)
        if self.plan.otherwise is not None:
            self.patience = (self.left - 1 if self.left else PATIENCE) if every else 0
        if every and self.plan.otherwise == "implicit":
            self.U = self.U.implicit() if sketched and isinstance(self.U, Windows) else self.U
        elif every and self.plan.otherwise == "explicit" and not (self.half and not sketched):
            self.U = self.U.explicit()
        elif sketched:
            Y = self.U.explicit().U.T if every else self.U.combine(self.V[:, :k].to(self.U.dtype))
            self.error = self.error if every else deviation(Y, self.values[:k].to(Y.dtype))
            self.U = Merged.of(Y, self.U.shape, self.half)
            self.gram, self.omega = self.U.gram(), Identity()
            self.top = top(self.gram[None])[0].to(self.gram.dtype)
        elif every:
            self._keep(_whole, self.U, self.lengths[-1], averaging=averaging)
        else:
            self._keep(_basis, self.U, self.V[:, :k], self.lengths[k - 1], averaging=averaging)

    def stack(self, decay: float) -> None:
        """U becomes [√δ·U_old, √(1−δ)·U], whose Gram is put together from its parts."""
        assert self.previous is not None and isinstance(self.previous.U, Merged) and isinstance(self.U, Merged)
        before = self.previous.U
        if self.half and before.Y.dtype not in HALF:
            before = Merged.of(before.Y, before.shape, True).scaled(before.scale)
        self.fresh = self.gram, self.top
        (self.gram,) = self.run(_gram_of_both, before, self.U, self.previous.gram, self.gram, decay=decay)
        self.stacked = before.scaled(decay**0.5), self.U.scaled((1 - decay) ** 0.5)

    def truncate(self, k: int) -> None:
        """The stack becomes what its k leading directions keep of it."""
        self._keep(_truncated, *self.stacked, self.V[:, :k])

    def _keep(self, function: Callable[..., tuple[Tensor, ...]], *args: Tensor | Operator, averaging: bool = False) -> None:
        """U becomes a basis, where the last one was if that is not needed any more."""
        before = None if self.previous is None or averaging else self.previous.U
        rooms = (before.Y, before.scale) if isinstance(before, Merged) else ()
        Y, scale, self.gram = self.run(function, *args, into=rooms, half=self.half)
        self.U = Merged(Y, scale, self.U.shape)

    def block(self, relative: bool) -> tuple[Block, list[tuple[Tensor, Tensor]]]:
        """The finished block, and what has to be copied into which of its tensors."""
        pairs = None if self.previous is None else self.previous.renewed(self.U, self.omega, self.gram, self.top, relative)
        if self.previous is not None and pairs is not None:
            block = self.previous
        else:
            block = Block(_own(self.U), self.omega, self.gram.clone(), self.top.clone(), relative)
        block.sketch_error, block.patience = self.error, self.patience
        return block, pairs or []


def grams(Us: Sequence[Operator], run: Run, timers: Sequence[AbstractContextManager[None]] = ()) -> list[Tensor]:
    """UᵀU of each, several at once as long as that is not too much for one recording."""
    out: list[Tensor] = []
    timers = timers or [nullcontext()] * len(Us)
    while len(out) < len(Us):
        start = end = len(out)
        while end < len(Us) and (
            end == start
            or (
                sum(U.bytes for U in Us[start : end + 1]) <= LARGE // 2
                and Us[end].samples == Us[start].samples
                and timers[end] is timers[start]
            )
        ):
            end += 1
        with timers[start]:
            (stack,) = run(_grams, *Us[start:end])
        out += stack.unbind()
    return out


def _grams(*Us: Operator) -> tuple[Tensor]:
    return (torch.stack([U.gram() for U in Us]),)


def _basis(U: Operator, V: Tensor, length: Tensor, *, half: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Y, its scale and its Gram for UV, whose length is known."""
    with coarser(half and V.is_cuda):
        Y = U.combine(V.to(U.dtype))
    return _parts(Merged.of(Y, U.shape, half, length))


@contextmanager
def coarser(allowed: bool) -> Iterator[None]:
    """Products of float32 numbers with the digits that float16 has (TF32), which is what a basis in half precision keeps."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32" if allowed else before
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def _whole(U: Operator, length: Tensor, *, half: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The same for U itself."""
    return _parts(Merged.of(U.explicit().U.T, U.shape, half, length))


def _gram_of_both(old: Merged, new: Merged, K_old: Tensor, K_new: Tensor, *, decay: float) -> tuple[Tensor]:
    """The Gram of [√δ·U_old, √(1−δ)·U_new]."""
    across = product(old.Y.to(new.Y.dtype), new.Y.T) * (old.scale * new.scale * (decay * (1 - decay)) ** 0.5)
    return (torch.cat([torch.cat([decay * K_old, across], 1), torch.cat([across.T, (1 - decay) * K_new], 1)]),)


def _truncated(old: Merged, new: Merged, W: Tensor, *, half: bool) -> tuple[Tensor, Tensor, Tensor]:
    """[U_old, U_new]W as a basis."""
    W = W.to(old.dtype)
    if not half:
        return _parts(Merged.of(old.combine(W[: old.samples]) + new.combine(W[old.samples :]), old.shape))
    scale = torch.maximum(old.scale, new.scale)
    W = torch.cat([W[: old.samples] * (old.scale / scale), W[old.samples :] * (new.scale / scale)]).T.to(torch.float16)
    Y = torch.mm(W[:, : old.samples].contiguous(), old.Y.to(torch.float16))
    Y.addmm_(W[:, old.samples :].contiguous(), new.Y)  # orthonormal combinations of numbers of size 1: no overflow
    return _parts(Merged(Y, scale, old.shape))


def _parts(U: Merged) -> tuple[Tensor, Tensor, Tensor]:
    return U.Y, U.scale, U.gram()


def build(jobs: Sequence[Job], curvature: Curvature, run: Run = directly) -> list[Block | None]:
    """A block per job, or None where U has no columns or numbers that are not finite."""
    for job in jobs:
        with job.timer:
            job.prepare(curvature)
    rest = [job for job in jobs if not hasattr(job, "gram")]
    for job, K in zip(rest, grams([job.U for job in rest], run, [job.timer for job in rest]), strict=True):
        job.gram = K
    groups = _by_size([job for job in jobs if len(job.gram)])
    counted = [job for job in jobs if job.previous is not None]
    failures = [job.previous.failures[None] for job in counted if job.previous is not None]
    seen = read([*(_choices(same, curvature, run) for same in groups), *failures])  # the one look that every refresh takes
    for job, (failed,) in zip(counted, seen[len(groups) :], strict=True):
        job.failed = failed
    alive = [(job, k) for same, ks in zip(groups, seen, strict=False) for job, k in zip(same, ks, strict=True) if k >= 0]
    for job, k in alive:
        with job.timer:
            job.settle(job.steady(k), curvature.averaging > 0)
    if curvature.averaging:
        _average([job for job, _ in alive if job.averaged], curvature, run)
    built = {id(job): job.block(curvature.relative_damping) for job, _ in alive}
    write([pair for _, pairs in built.values() for pair in pairs])
    return [built[id(job)][0] if id(job) in built else None for job in jobs]


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
    numbers = _sent([[float(rank) for rank in ranks], [job.damping for job in jobs], exact, tolerances], K)
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
    K: Tensor, numbers: Tensor, start: Tensor, *, widest: int, relative: bool, tolerant: bool
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
        return torch.where(fine, chosen, -1), tops.to(K.dtype), _lengths(K)[:, -1:], none[:, 0], none
    values, V = spectrum(K, widest, start)
    small, V = V.mT @ K.to(V.dtype) @ V, V.to(K.dtype)
    lengths = torch.cat([_lengths(small.to(K.dtype)), _lengths(K)[:, -1:]], 1)
    if tolerant:
        lam = lam * tops if relative else lam
        enough = truncation_errors(K, V, torch.where(lam > 0, lam, 1)) <= numbers[3, :, None]
        first = torch.where(enough.any(1), enough.int().argmax(1) + 1, m)  # m: not even `widest` directions are enough
        rounded = torch.minimum(2 ** first.clamp_min(8).log2().ceil().long(), chosen)  # so that few sizes come up
        chosen = torch.where(chosen < m, torch.where(exact & (first > chosen), m, rounded), chosen)
    return torch.where(fine, chosen, -1), tops.to(K.dtype), lengths, values, V


def _average(jobs: Sequence[Job], curvature: Curvature, run: Run) -> None:
    """δM_old + (1 − δ)M_new, at most `rank` directions, less where eigenvalues are far below λ."""
    for job in jobs:
        with job.timer:
            job.stack(curvature.averaging)
    groups, counts = _by_size(jobs), []
    for same in groups:
        K = torch.stack([job.gram for job in same])
        widest = max(job.plan.rank for job in same)
        kept, *found = (directly if one_by_one(K) else run)(
            _large_ones,
            *(K, _sent([job.damping for job in same], K), start(K, widest, same[0].generator)),
            widest=widest,
            relative=curvature.relative_damping,
        )
        counts.append(kept)
        for job, *mine in zip(same, *(x.unbind() for x in found), strict=True):
            job.top, job.V = mine
    patient = all(job.patient for job in jobs)  # which spares the look
    seen = [[job.plan.rank for job in same] for same in groups] if patient else read(counts)
    for same, numbers in zip(groups, seen, strict=True):
        for job, count in zip(same, numbers, strict=True):
            job.patience = (job.left - 1 if job.patient else PATIENCE) if count >= job.plan.rank else 0
            if count < 0:  # what was kept before is not finite: it goes
                job.gram, job.top = job.fresh
                continue
            with job.timer:
                job.truncate(max(1, min(count, job.plan.rank)))


def _large_ones(K: Tensor, lam: Tensor, start: Tensor, *, widest: int, relative: bool) -> tuple[Tensor, Tensor, Tensor]:
    """How many eigenvalues of each of K are not negligible, or −1; the largest of them, and leading directions."""
    values, W = spectrum(K, widest, start)
    tops = top(K)
    lam = lam * tops if relative else lam
    kept = (values >= (NEGLIGIBLE * lam[:, None] if K.dtype != torch.float64 else 0)).sum(1)
    return torch.where(tops.isfinite(), kept, -1), tops.to(K.dtype), W.to(K.dtype)


def _own(U: Operator) -> Operator:
    """Factors without the rest of a batch of which they are a part."""
    if not isinstance(U, Implicit | Windows):
        return U
    whole: dict[str, Any] = {name: t for name, t in vars(U).items() if isinstance(t, Tensor)}
    return replace(U, **{name: t.clone() for name, t in whole.items() if t.untyped_storage().nbytes() > t.nbytes})


def _lengths(K: Tensor) -> Tensor:
    """(Σ_{j≤k} K_jj)^½ (L, m) for k = 1 … m; 1 where it is 0, since it is divided by."""
    squares = K.diagonal(dim1=-2, dim2=-1).cumsum(-1)
    return torch.where(squares > 0, squares, 1).sqrt()


def _sent(numbers: Sequence[Any], like: Tensor) -> Tensor:
    """Numbers of the host on the device."""
    return send(torch.tensor(numbers, dtype=like.dtype, device="cpu"), like.device)


def _factors(U: Implicit | Windows, rank: int, curvature: Curvature, generator: torch.Generator) -> Operator:
    """The implicit form: rank-r factors, or all of them where they are no more."""
    if curvature.combine == "exact" and rank >= U.rank:
        return U
    factors = U.implicit() if isinstance(U, Windows) else U
    factors = reduced(factors, rank, generator)
    return Independent(factors.G, factors.A) if curvature.combine == "independent" else factors
