"""Steps that move all singular directions of a layer alike: of each layer's momentum x = UΣVᵀ its polar factor O ≈ UVᵀ.

    θ ← θ − lr·(O·RMS·√n/‖O‖ + weight_decay·θ)

That is steepest descent in the spectral norm, the step of Muon (Jordan et al. 2024), here of SENG's directions: what few
samples agree on is stepped along as far as what all do. Every layer's step has the same root mean square, lr·RMS, whatever the
scale of the loss. Weight and bias of a layer are one matrix, as everywhere in SENG. Norms and embeddings, which are none, take
Adam's step, each number divided by the running root mean square r of its direction,

    θ ← θ − lr·(RMS·(1 − momentum)·x/r + weight_decay·θ)

and what SENG does not cover takes SGD's. Weight decay is decoupled: as a part of x it would be stretched too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from seng.operators import wide
from seng.replay import capturing, side_stream
from seng.sites import Segment, Site
from seng.staging import send

RMS = 1 / 30  # of a step, per unit of lr: so that lr is about what it is for SGD on networks with norms
STEPS = 5
QUINTIC = 3.4445, -4.7750, 2.0315  # Jordan et al.: singular values between 0.7 and 1.2 after five steps, from 1e-3 up
MEMORY = 0.95  # of r², as in SOAP: Adam's 0.999 is slow for runs of a few thousand steps
TINY = 1e-15  # added to r: where nothing has come yet, nothing is done

Part = tuple[Site, tuple[Segment, ...]]  # a layer, or those of its parameters that take this step
Number = float | Tensor


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


def is_matrix(part: Part) -> bool:
    """Whether it has a polar factor: not norms, tables, nor a bias that is trained alone."""
    site, active = part
    return site.matrix and any(s.name == "weight" for s in active)


def polar_steps(xs: Sequence[Tensor], blocks: Sequence[Part]) -> list[Tensor]:
    """The steps of the parameters of the blocks, in order, at lr 1; matrices of one shape are worked out at once."""
    rest = iter(xs)
    given = [[next(rest) for _ in active] for _, active in blocks]
    found: dict[int, Tensor] = {}
    alike: defaultdict[object, list[int]] = defaultdict(list)
    for i, ((site, active), tensors) in enumerate(zip(blocks, given, strict=True)):
        tensor_of = {s.param: x for s, x in zip(active, tensors, strict=True)}
        found[i] = site.gather(active, tensor_of, site.dtype).view(site.shape(active))
        alike[found[i].shape, found[i].dtype, found[i].device].append(i)
    for same in alike.values():
        found |= zip(same, polar(torch.cat([found[i] for i in same])).chunk(len(same)), strict=True)
    out = []
    for i, (site, active) in enumerate(blocks):
        length = torch.linalg.vector_norm(found[i])
        moved = found[i] * (RMS * found[i].numel() ** 0.5 / torch.where(length > 0, length, 1))
        parts = site.scatter(active, moved.reshape(-1))
        out += [parts[s.param].to(x.dtype) for s, x in zip(active, given[i], strict=True)]
    return out


class Orthogonal:
    """The steps of the layers of one param group; on a GPU recorded at the second one, and from then on one launch."""

    def __init__(self, sites: Sequence[Site], params: Sequence[nn.Parameter]) -> None:
        """All that belongs to a covered layer, matrices first; `others` are left to SGD."""
        self.given = [*map(id, params)]
        there = set(params)
        found = [(site, tuple(s for s in site.segments if s.param in there)) for site in sites]
        self.matrices = [part for part in found if part[1] and is_matrix(part)]
        rest = [part for part in found if part[1] and not is_matrix(part)]
        self.params, self.elements = ([s.param for _, active in parts for s in active] for parts in (self.matrices, rest))
        self.all = self.params + self.elements
        taken = set(self.all)
        self.others = [p for p in params if p not in taken]
        self.key: object = None
        self.graph: torch.cuda.CUDAGraph | None = None

    def step(self, state: Any, group: Mapping[str, Any], directions: Mapping[nn.Parameter, Tensor]) -> None:
        """In place."""
        if not self.all:
            return
        xs = [directions[p] for p in self.all]
        buffers = [_kept(state[p], "momentum_buffer", torch.zeros_like, p) for p in self.all] if group["momentum"] else []
        roots = [_kept(state[p], "direction_rms", torch.abs, directions[p].to(p.dtype)) for p in self.elements]
        numbers = group["lr"], group["momentum"], group["weight_decay"]
        signs = group["nesterov"], group["maximize"]
        device = self.all[0].device
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
    ) -> None:
        xs = [x.to(p.dtype) for x, p in zip(xs, self.all, strict=True)]
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
        count = len(self.params)
        moves = polar_steps(along[:count], self.matrices)
        for x, a, r in zip(xs[count:], along[count:], roots, strict=True):
            x, a, before = (t.to(wide(t.dtype)) for t in (x, a, r))
            root = (MEMORY * before.square() + (1 - MEMORY) * x.square()).sqrt()
            moves.append((RMS * (1 - momentum) * a / (root + TINY)).to(r.dtype))
            r.copy_(root)
        params: list[Tensor] = [*self.all]
        change = torch._foreach_mul(params, decay)
        torch._foreach_add_(change, moves)
        torch._foreach_mul_(change, lr)
        torch._foreach_sub_(params, change)

    def _recorded(
        self, device: torch.device, xs: list[Tensor], buffers: list[Tensor], roots: list[Tensor], signs: tuple[bool, bool]
    ) -> bool:
        """Whether there is a recording of this step: the second time that all of it lies where it did."""
        tensors = *self.all, *buffers, *roots
        if device.type != "cuda" or any(t.device != device for t in (*tensors, *xs)) or capturing():
            return False
        key = signs, len(buffers), [t.data_ptr() for t in tensors], [x.dtype for x in xs]
        if key != self.key:
            self.key, self.graph = key, None
            return False
        if self.graph is None:
            self.places = [torch.empty_like(x) for x in xs]
            self.numbers = torch.zeros(3, dtype=wide(self.all[0].dtype), device=device)
            self.graph = torch.cuda.CUDAGraph()
            with (
                torch.cuda.device(device),
                torch.cuda.graph(self.graph, stream=side_stream(device), capture_error_mode="thread_local"),
            ):
                lr, momentum, decay = self.numbers.unbind()
                self._advance(self.places, buffers, roots, lr, momentum, decay, *signs)
        return True

    def _replay(self, xs: list[Tensor], numbers: Sequence[Number]) -> None:
        assert self.graph is not None
        if any(isinstance(number, Tensor) for number in numbers):
            for place, number in zip(self.numbers.unbind(), numbers, strict=True):
                place.copy_(number) if isinstance(number, Tensor) else place.fill_(number)
        else:
            send(torch.tensor(numbers, dtype=self.numbers.dtype, device="cpu"), self.numbers.device, self.numbers)
        torch._foreach_copy_(self.places, xs)
        self.graph.replay()
        torch.autograd.graph.increment_version(self.all)


def _kept(entry: dict[str, Any], name: str, first: Callable[[Tensor], Tensor], of: Tensor) -> Tensor:
    """What is kept of a parameter under a name; `first(of)` where there is nothing yet."""
    if entry.get(name) is None:
        entry[name] = first(of)
    kept: Tensor = entry[name]
    return kept
