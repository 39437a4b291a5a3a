"""Steps that move all singular directions of a layer alike: of each layer's momentum x = UΣVᵀ its polar factor Q ≈ UVᵀ, and
of that its columns q, of m numbers each (or rows, where those are more), at one length.

    θ ← θ − lr·(RMS·√m·q/‖q‖ + weight_decay·θ)

That is steepest descent in the spectral norm, the step of Muon (Jordan et al. 2024), here of SENG's directions: what few
samples agree on is stepped along as far as what all do. The root mean square of the step is lr·RMS, whatever the scale
of the loss; which matrices there are, and how they are worked out: `seng.recipes.polar`. Norms and embeddings, which are
none, take Adam's step, each number divided by the running root mean square r of its direction,

    θ ← θ − lr·(ELEMENT·(1 − momentum)·x/r + weight_decay·θ)

and what SENG does not cover takes SGD's. Weight decay is decoupled: as a part of x it would be stretched too. A layer whose
gradient is 0, and not None, goes on along its momentum, as far as any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from seng.gpu.replay import capturing, recorded, side_stream
from seng.gpu.staging import send
from seng.layers.sites import Site
from seng.linalg.operators import wide
from seng.metrics.solver import momentum_buffer
from seng.recipes.polar import (
    RMS,
    Rates,
    Tensors,
    is_matrix,
    momentum,
    shrink,
    stacks_of,
    subtract,
)

ELEMENT = (
    5 * RMS
)  # of a number that has no matrix: as much more as AdamW beside Muon takes
MEMORY = 0.95  # of r², as in SOAP: Adam's 0.999 is slow for runs of a few thousand steps; at least the momentum's
MOST = (
    1 - MEMORY
) ** -0.5  # |x|/r at most, which r says of itself once it has seen all of x
TINY = 1e-15  # added to r: where nothing has come yet, nothing is done
BRANCHES = 4  # of a recording, which run side by side: no stack fills a GPU, and each stream costs a workspace


def move_elements(
    params: Sequence[nn.Parameter],
    xs: Tensors,
    buffers: Tensors,
    roots: Tensors,
    rates: Rates,
) -> None:
    """θ ← keep·θ − lr·ELEMENT·(1 − momentum)·x/r, and r along with it, for parameters of one device, side by side."""
    along = momentum(params, xs, buffers, rates)
    shrink(params, rates.keep)
    each = [xs[p] for p in params], along, [roots[p] for p in params]
    x, a, r = (torch.cat([t.reshape(-1).to(wide(t.dtype)) for t in ts]) for ts in each)
    mu = rates.momentum
    memory = mu.clamp_min(MEMORY) if isinstance(mu, Tensor) else max(mu, MEMORY)
    r = (memory * r.square() + (1 - memory) * x.square()).sqrt()
    moves = ((1 - mu) * a / (r + TINY)).clamp(-MOST, MOST) * (rates.lr * ELEMENT)
    sizes = [p.numel() for p in params]
    moved, rooted = (
        [t.view(p.shape) for t, p in zip(new.split(sizes), params, strict=True)]
        for new in (moves, r)
    )
    subtract(params, moved, rates.keep)
    torch._foreach_copy_(each[2], rooted)


class Orthogonal:
    """The steps of the layers of one param group; on a GPU recorded at the second one, and from then on one launch."""

    def __init__(self, sites: Sequence[Site], params: Sequence[nn.Parameter]) -> None:
        """All that belongs to a covered layer; `others` are left to SGD."""
        there = set(params)
        found = [
            (site, tuple(s for s in site.segments if s.param in there))
            for site in sites
        ]
        found = [part for part in found if part[1]]
        self.stacks = stacks_of([part for part in found if is_matrix(part)])
        self.elements = [
            s.param for part in found if not is_matrix(part) for s in part[1]
        ]
        self.params = [p for stack in self.stacks for p in stack.params] + self.elements
        taken = set(self.params)
        self.others = [p for p in params if p not in taken]
        self.records = True  # unless a recording did not fit
        self.key: object = None
        self.where: list[
            int
        ] = []  # the directions of the recording, unless it has places of its own
        self.places: list[Tensor] = []
        self.graph: torch.cuda.CUDAGraph | None = None

    def step(self, state: Any, group: Mapping[str, Any], directions: Tensors) -> None:
        """In place."""
        if not self.params:
            return
        xs = [directions[p] for p in self.params]
        buffers = (
            [momentum_buffer(state[p], p) for p in self.params]
            if group["momentum"]
            else []
        )
        for p in self.elements:
            if "direction_rms" not in state[p]:
                state[p]["direction_rms"] = directions[p].to(p.dtype).abs()
        roots = [state[p]["direction_rms"] for p in self.elements]
        lr = group["lr"].reshape(()) if isinstance(group["lr"], Tensor) else group["lr"]
        signs = group["nesterov"], group["maximize"], bool(group["weight_decay"])
        rates = Rates(lr, group["momentum"], group["weight_decay"], *signs)
        device = self.params[0].device
        with torch.autocast(device.type, enabled=False):
            if torch.compiler.is_compiling() or not self._recorded(
                device, xs, buffers, roots, rates
            ):
                self._advance(xs, buffers, roots, rates)
            else:
                self._replay(xs, rates)

    def _advance(
        self,
        xs: Sequence[Tensor],
        buffers: Sequence[Tensor],
        roots: Sequence[Tensor],
        rates: Rates,
        streams: Sequence[torch.cuda.Stream] = (),
        dry: bool = False,
    ) -> None:
        """All of it; with `streams`, which are a recording's, by kernels where they can. A dry one is only for those."""
        xs = [
            x if _alike(x, p) else torch.empty_like(p).copy_(x)
            for x, p in zip(xs, self.params, strict=True)
        ]
        if rates.maximize:
            xs = torch._foreach_neg(xs)
        x_of = dict(zip(self.params, xs, strict=True))
        b_of = dict(zip(self.params, buffers, strict=True)) if buffers else {}
        with _side_by_side(() if dry else streams) as branch:
            for i, stack in enumerate(self.stacks):
                with branch(i):
                    if streams and stack.fuses(b_of):
                        stack.fused_step(x_of, b_of, rates, dry)
                    elif not dry:
                        stack.step(x_of, b_of, rates)
            with branch(-1):
                r_of = dict(zip(self.elements, roots, strict=True))
                for device in {p.device for p in self.elements if not dry}:
                    move_elements(
                        [p for p in self.elements if p.device == device],
                        x_of,
                        b_of,
                        r_of,
                        rates,
                    )

    def _recorded(
        self,
        device: torch.device,
        xs: list[Tensor],
        buffers: list[Tensor],
        roots: list[Tensor],
        rates: Rates,
    ) -> bool:
        """Whether there is a recording of this step: from the second time on that all of it lies where it did.

        Directions may lie elsewhere every time: from when they first do, they are copied to where a recording has them.
        """
        tensors = *self.params, *buffers, *roots
        whole = device.type == "cuda" and all(
            t.device == device for t in (*tensors, *xs)
        )
        if not whole or not self.records or capturing():
            return False
        looks = [(t.dtype, t.shape, t.stride()) for t in (*self.params, *xs)]
        key = rates[3:], len(buffers), [t.data_ptr() for t in tensors], looks
        where = [x.data_ptr() for x in xs]
        if key != self.key:
            self.key, self.where, self.places, self.graph = key, where, [], None
            return False
        if self.graph is None or not (self.places or where == self.where):
            self.graph, self.places = (
                None,
                [],
            )  # before the next one is begun, which may fail
            try:
                places = (
                    [] if where == self.where else [torch.empty_like(x) for x in xs]
                )
                self._record(device, places or xs, buffers, roots, rates)
                self.places = places
            except (
                torch.OutOfMemoryError
            ):  # a recording cannot have the memory that others have left unused
                self.records = False
        return self.records

    def _record(
        self,
        device: torch.device,
        xs: list[Tensor],
        buffers: list[Tensor],
        roots: list[Tensor],
        rates: Rates,
    ) -> None:
        self.numbers = torch.zeros(3, dtype=wide(self.params[0].dtype), device=device)
        lr, mu, decay = self.numbers.unbind()
        inside = rates._replace(lr=lr, momentum=mu, decay=decay)
        streams = [side_stream(device, 1 + i) for i in range(BRANCHES)]
        run = partial(self._advance, xs, buffers, roots, inside, streams)
        with torch.cuda.device(device):
            run(dry=True)
        self.graph = recorded(device, run)

    def _replay(self, xs: list[Tensor], rates: Rates) -> None:
        assert self.graph is not None
        numbers = rates[:3]
        if any(isinstance(number, Tensor) for number in numbers):
            for place, number in zip(self.numbers.unbind(), numbers, strict=True):
                place.copy_(number) if isinstance(number, Tensor) else place.fill_(
                    number
                )
        else:
            send(
                torch.tensor(numbers, dtype=self.numbers.dtype, device="cpu"),
                self.numbers.device,
                self.numbers,
            )
        if self.places:
            torch._foreach_copy_(self.places, xs)
        self.graph.replay()
        torch.autograd.graph.increment_version(self.params)


@contextmanager
def _side_by_side(
    streams: Sequence[torch.cuda.Stream],
) -> Iterator[Callable[[int], AbstractContextManager[Any]]]:
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
