"""Steps that move all singular directions of a layer alike: of each layer's momentum x = UΣVᵀ its polar factor Q ≈ UVᵀ.

    θ ← θ − lr·(Q·RMS·√n/‖Q‖ + weight_decay·θ)

That is steepest descent in the spectral norm, the step of Muon (Jordan et al. 2024), here of SENG's directions: what few
samples agree on is stepped along as far as what all do. Every layer's step has the same root mean square, lr·RMS, whatever the
scale of the loss. Weight and bias of a layer are one matrix, as everywhere in SENG, but a weight that is three times as tall as
wide is three: that is how queries, keys and values lie in one layer, which have little to do with each other. Norms and
embeddings, which are none, take Adam's step, each number divided by the running root mean square r of its direction,

    θ ← θ − lr·(ELEMENT·(1 − momentum)·x/r + weight_decay·θ)

and what SENG does not cover takes SGD's. Weight decay is decoupled: as a part of x it would be stretched too. A layer whose
gradient is 0, and not None, goes on along its momentum, as far as any other.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from seng.layers import ROWS
from seng.operators import HALF, Shape, wide
from seng.replay import capturing, recorded, side_stream
from seng.sites import Segment, Site
from seng.solver import momentum_buffer
from seng.staging import send

RMS = 1 / 30  # of a step, per unit of lr: so that lr is about what it is for SGD on networks with norms
ELEMENT = 5 * RMS  # of a number that has no matrix: as much more as AdamW beside Muon takes
STEPS = 5
QUINTIC = 3.4445, -4.7750, 2.0315  # Jordan et al.: singular values between 0.7 and 1.2 after five steps, from 1e-3 up
MEMORY = 0.95  # of r², as in SOAP: Adam's 0.999 is slow for runs of a few thousand steps; at least the momentum's
MOST = (1 - MEMORY) ** -0.5  # |x|/r at most, which r says of itself once it has seen all of x
TINY = 1e-15  # added to r: where nothing has come yet, nothing is done

QKV = 3
GRAIN = 8  # numbers of bfloat16 in what tensor cores read at once
BRANCHES = 4  # of a recording, which run side by side: matrices are small and many, and each stream costs a workspace

Part = tuple[Site, tuple[Segment, ...]]  # a layer, or those of its parameters that take this step
Number = float | Tensor


def polar(X: Tensor) -> Tensor:
    """Q of each of X (L, m, n), nearly: X ← aX + (bXXᵀ + c(XXᵀ)²)X, from X/‖X‖; 0 of a matrix of zeros.

    On a GPU X comes in bfloat16: the iteration corrects its own rounding. There sizes are filled up with zeros, which stay 0,
    since products of odd ones are slow: a layer with a bias has one column more.
    """
    m, n = X.shape[-2:]
    if X.dtype == torch.bfloat16 and (m % GRAIN or n % GRAIN):
        X = pad(X, (0, -n % GRAIN, 0, -m % GRAIN))
    wide = X.shape[-2] <= X.shape[-1]
    Y = X if wide else X.mT
    Y = Y / Y.abs().amax((-2, -1), keepdim=True).clamp_min(torch.finfo(Y.dtype).tiny)  # squares of which do not vanish
    Y = Y / torch.linalg.matrix_norm(Y, keepdim=True).clamp_min(1)
    a, b, c = QUINTIC
    for _ in range(STEPS):
        S = Y @ Y.mT
        Y = torch.baddbmm(Y, torch.baddbmm(S, S, S, beta=b, alpha=c), Y, beta=a)
    return (Y if wide else Y.mT)[..., :m, :n]


def is_matrix(part: Part) -> bool:
    """Whether it has a polar factor: not norms, tables, nor a bias that is trained alone."""
    site, active = part
    return site.matrix and any(s.name == "weight" for s in active)


def shape_of(part: Part) -> Shape:
    """(h, n_G, n_A) of its h matrices."""
    site, active = part
    h, n_G, n_A = site.shape(active)
    columns = next(s.shape[2] for s in active if s.name == "weight")
    return (QKV * h, columns, n_A) if n_G == QKV * columns else (h, n_G, n_A)


class Stack:
    """Matrices of one shape, whose steps are worked out at once."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = parts
        site, _ = parts[0]
        self.shape = shape_of(parts[0])
        self.device = site.lead.device
        half = self.device.type == "cuda" and site.dtype != torch.float64
        self.dtype = torch.bfloat16 if half else site.dtype
        self.work = len(parts) * math.prod(self.shape) * min(self.shape[1:])

    def move(self, x_of: Mapping[nn.Parameter, Tensor], lr: Number, keep: Number | None) -> None:
        """θ ← θ − lr·Q·RMS·√n/‖Q‖ for each of them."""
        X = torch.empty(len(self.parts), *self.shape, dtype=self.dtype, device=self.device)
        for room, (site, active) in zip(X, self.parts, strict=True):
            if not _in_order(active):
                room.copy_(site.gather(active, x_of, site.dtype).view(self.shape))
                continue
            for s, columns in zip(active, room.split([s.shape[2] for s in active], 2), strict=True):
                columns.copy_(_rows(x_of[s.param], s.param).view(columns.shape))
        Q = polar(X.flatten(0, 1)).view(X.shape)
        length = torch.linalg.vector_norm(Q, dim=(1, 2, 3), keepdim=True, dtype=self.parts[0][0].dtype)
        moves = Q * (lr * RMS * math.prod(self.shape) ** 0.5 / torch.where(length > 0, length, 1))
        for move, (site, active) in zip(moves, self.parts, strict=True):
            if not _in_order(active):
                for p, part in site.scatter(active, move.reshape(-1)).items():
                    _subtract([p], [part], keep)
                continue
            for s, columns in zip(active, move.split([s.shape[2] for s in active], 2), strict=True):
                _subtract([s.param], [_like(columns, s.param)], keep)


def _in_order(active: Sequence[Segment]) -> bool:
    """Whether their rows are the matrix's. Then columns may be taken as they lie in memory: Q does not mind their order."""
    return all(s.owner.kind.layout[0] in ROWS for s in active)


def _order(p: Tensor) -> list[int]:
    """The dimensions of a row, as they lie in memory."""
    return sorted(range(1, p.dim()), key=p.stride().__getitem__, reverse=True)


def _rows(x: Tensor, p: Tensor) -> Tensor:
    """x, which looks like p, as (rows, columns)."""
    return x.permute(0, *_order(p)).reshape(len(p), -1)


def _like(rows: Tensor, p: Tensor) -> Tensor:
    """Rows (h, n_G, columns) as p."""
    order = _order(p)
    back = [0, *(1 + order.index(d) for d in range(1, p.dim()))]
    return rows.reshape(len(p), *(p.shape[d] for d in order)).permute(back)


def _subtract(params: Sequence[Tensor], moves: Sequence[Tensor], keep: Number | None) -> None:
    """θ ← θ − move; in half precision with the decay to keep·θ, since by itself that is less than one rounding."""
    pairs = list(zip(params, moves, strict=True))
    if keep is not None:
        for p, move in (pair for pair in pairs if pair[0].dtype in HALF):
            p.copy_(keep * p.to(move.dtype) - move)
        pairs = [pair for pair in pairs if pair[0].dtype not in HALF]
    if pairs:
        torch._foreach_sub_([p for p, _ in pairs], [move for _, move in pairs])


def move_elements(
    params: Sequence[Tensor],
    xs: Sequence[Tensor],
    along: Sequence[Tensor],
    roots: Sequence[Tensor],
    lr: Number,
    momentum: Number,
    keep: Number | None,
) -> None:
    """θ ← θ − lr·ELEMENT·(1 − momentum)·x/r, and r along with it, for parameters of one device, side by side."""
    x, a, r = (torch.cat([t.reshape(-1).to(wide(t.dtype)) for t in ts]) for ts in (xs, along, roots))
    memory = momentum.clamp_min(MEMORY) if isinstance(momentum, Tensor) else max(momentum, MEMORY)
    r = (memory * r.square() + (1 - memory) * x.square()).sqrt()
    moves = ((1 - momentum) * a / (r + TINY)).clamp(-MOST, MOST) * (lr * ELEMENT)
    sizes = [p.numel() for p in params]
    moved, rooted = ([t.view(p.shape) for t, p in zip(new.split(sizes), params, strict=True)] for new in (moves, r))
    _subtract(params, moved, keep)
    torch._foreach_copy_(list(roots), rooted)


class Orthogonal:
    """The steps of the layers of one param group; on a GPU recorded at the second one, and from then on one launch."""

    def __init__(self, sites: Sequence[Site], params: Sequence[nn.Parameter]) -> None:
        """All that belongs to a covered layer; `others` are left to SGD."""
        there = set(params)
        found = [(site, tuple(s for s in site.segments if s.param in there)) for site in sites]
        found = [part for part in found if part[1]]
        alike: defaultdict[object, list[Part]] = defaultdict(list)
        for part in filter(is_matrix, found):
            alike[shape_of(part), part[0].dtype, part[0].lead.device].append(part)
        self.stacks = sorted(map(Stack, alike.values()), key=lambda stack: -stack.work)
        self.elements = [s.param for part in found if not is_matrix(part) for s in part[1]]
        self.params = [s.param for stack in self.stacks for _, active in stack.parts for s in active] + self.elements
        taken = set(self.params)
        self.others = [p for p in params if p not in taken]
        self.records = True  # unless a recording did not fit
        self.key: object = None
        self.graph: torch.cuda.CUDAGraph | None = None

    def step(self, state: Any, group: Mapping[str, Any], directions: Mapping[nn.Parameter, Tensor]) -> None:
        """In place."""
        if not self.params:
            return
        xs = [directions[p] for p in self.params]
        buffers = [momentum_buffer(state[p], p) for p in self.params] if group["momentum"] else []
        for p in self.elements:
            if "direction_rms" not in state[p]:
                state[p]["direction_rms"] = directions[p].to(p.dtype).abs()
        roots = [state[p]["direction_rms"] for p in self.elements]
        lr = group["lr"].reshape(()) if isinstance(group["lr"], Tensor) else group["lr"]
        numbers = lr, group["momentum"], group["weight_decay"]
        signs = group["nesterov"], group["maximize"], bool(group["weight_decay"])
        device = self.params[0].device
        with torch.autocast(device.type, enabled=False):
            if torch.compiler.is_compiling() or not self._recorded(device, xs, buffers, roots, signs):
                self._advance(xs, buffers, roots, *numbers, *signs)
            else:
                self._replay(xs, numbers)

    def _advance(
        self,
        xs: Sequence[Tensor],
        buffers: list[Tensor],
        roots: list[Tensor],
        lr: Number,
        momentum: Number,
        decay: Number,
        nesterov: bool,
        maximize: bool,
        decays: bool,
        streams: Sequence[torch.cuda.Stream] = (),
    ) -> None:
        params: list[Tensor] = [*self.params]
        xs = [x if _alike(x, p) else torch.empty_like(p).copy_(x) for x, p in zip(xs, params, strict=True)]
        if maximize:
            xs = torch._foreach_neg(xs)
        along: Sequence[Tensor] = xs
        if buffers:
            torch._foreach_mul_(buffers, momentum)
            torch._foreach_add_(buffers, xs)
            along = buffers
        if buffers and nesterov:
            along = torch._foreach_mul(buffers, momentum)
            torch._foreach_add_(along, xs)
        keep = 1 - lr * decay if decays else None
        if keep is not None and (exact := [p for p in params if p.dtype not in HALF]):
            torch._foreach_mul_(exact, keep)
        x_of = dict(zip(self.params, along, strict=True))
        with _side_by_side(streams) as branch:
            for i, stack in enumerate(self.stacks):
                with branch(i):
                    stack.move(x_of, lr, keep)
            start = len(params) - len(self.elements)
            for device in {p.device for p in self.elements}:
                at = [i for i, p in enumerate(self.elements) if p.device == device]
                theirs, x, a = ([ts[start + i] for i in at] for ts in (params, xs, along))
                move_elements(theirs, x, a, [roots[i] for i in at], lr, momentum, keep)

    def _recorded(
        self, device: torch.device, xs: list[Tensor], buffers: list[Tensor], roots: list[Tensor], signs: tuple[bool, bool, bool]
    ) -> bool:
        """Whether there is a recording of this step: from the second time on that all of it lies where it did."""
        tensors = *self.params, *buffers, *roots
        whole = device.type == "cuda" and all(t.device == device for t in (*tensors, *xs))
        if not whole or not self.records or capturing():
            return False
        looks = [(t.dtype, t.shape, t.stride()) for t in (*self.params, *xs)]
        key = signs, len(buffers), [t.data_ptr() for t in tensors], looks
        if key != self.key:
            self.key, self.graph = key, None
            return False
        if self.graph is None:
            try:
                self._record(device, xs, buffers, roots, signs)
            except torch.OutOfMemoryError:  # a recording cannot have the memory that others have left unused
                self.records = False
        return self.records

    def _record(
        self, device: torch.device, xs: list[Tensor], buffers: list[Tensor], roots: list[Tensor], signs: tuple[bool, bool, bool]
    ) -> None:
        self.places = [torch.empty_like(x) for x in xs]
        self.numbers = torch.zeros(3, dtype=wide(self.params[0].dtype), device=device)
        lr, momentum, decay = self.numbers.unbind()
        streams = [side_stream(device, 1 + i) for i in range(BRANCHES)]
        run = partial(self._advance, self.places, buffers, roots, lr, momentum, decay, *signs, streams=streams)
        self.graph = recorded(device, run)

    def _replay(self, xs: list[Tensor], numbers: Sequence[Number]) -> None:
        assert self.graph is not None
        if any(isinstance(number, Tensor) for number in numbers):
            for place, number in zip(self.numbers.unbind(), numbers, strict=True):
                place.copy_(number) if isinstance(number, Tensor) else place.fill_(number)
        else:
            send(torch.tensor(numbers, dtype=self.numbers.dtype, device="cpu"), self.numbers.device, self.numbers)
        torch._foreach_copy_(self.places, xs)
        self.graph.replay()
        torch.autograd.graph.increment_version(self.params)


@contextmanager
def _side_by_side(streams: Sequence[torch.cuda.Stream]) -> Iterator[Callable[[int], AbstractContextManager[Any]]]:
    """Branches of a recording, taken in turn: each begins after what has been recorded, and its end waits for all."""
    if not streams:
        yield lambda i: nullcontext()
        return
    here = torch.cuda.current_stream(streams[0].device)
    for stream in streams:
        stream.wait_stream(here)
    try:
        yield lambda i: torch.cuda.stream(streams[i % len(streams)])
    finally:
        for stream in streams:
            here.wait_stream(stream)


def _alike(x: Tensor, p: Tensor) -> bool:
    return x.stride() == p.stride() and x.dtype == p.dtype
