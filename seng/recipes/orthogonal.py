"""The orthogonal step: all singular directions of a layer move alike.

Of each layer's momentum x = UΣVᵀ its polar factor Q ≈ UVᵀ is taken, and of that its columns q, of m
numbers each (or rows, where those are more), at one length:

    θ ← θ − lr·(RMS·√m·q/‖q‖ + weight_decay·θ)

That is steepest descent in the spectral norm, the step of Muon (Jordan et al. 2024), here of SENG's
directions: what few samples agree on is stepped along as far as what all do. The root mean square
of the step is lr·RMS, whatever the scale of the loss. Which matrices there are:
`seng.recipes.polar`.

Norms and embeddings, which are no matrices, take Adam's step: each number is divided by the running
root mean square r of its direction,

    θ ← θ − lr·(ELEMENT·(1 − momentum)·x/r + weight_decay·θ)

and what SENG does not cover takes SGD's. Weight decay is decoupled: as a part of x it would be
stretched too. A layer whose gradient is 0, and not None, goes on along its momentum, as far as any
other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from seng.gpu.recorder import (
    Graph,
    capturing,
    record,
    side_stream,
    signature,
    write,
)
from seng.layers.sites import Site
from seng.linalg.operators import wide
from seng.recipes.polar import (
    RMS,
    StepInputs,
    Tensors,
    is_matrix,
    momentum,
    stacks_of,
    subtract,
)
from seng.recipes.recipe import SGD, Recipe, momentum_buffer

ELEMENT = 5 * RMS  # of a number that has no matrix: as AdamW beside Muon
# Of r², as in SOAP: Adam's 0.999 is slow for runs of a few thousand steps. At least the momentum's.
MEMORY = 0.95
MOST = (
    1 - MEMORY
) ** -0.5  # |x|/r at most, which holds once r has seen all of x
TINY = 1e-15  # added to r: where nothing has come yet, nothing is done
BRANCHES = 4  # of a recording: no stack fills a GPU, and each stream costs a workspace


def move_elements(params: Sequence[nn.Parameter], inputs: StepInputs) -> None:
    """θ ← keep·θ − lr·ELEMENT·(1 − momentum)·x/r, and r with it, for parameters of one type and
    device.
    """
    mu = inputs.momentum
    along = momentum(params, inputs)
    xs, roots = ([of[p] for p in params] for of in (inputs.xs, inputs.roots))
    x, a, r = (
        torch.cat([t.reshape(-1).to(wide(t.dtype)) for t in tensors])
        for tensors in (xs, along, roots)
    )
    memory = (
        mu.clamp_min(MEMORY) if isinstance(mu, Tensor) else max(mu, MEMORY)
    )
    r = (memory * r.square() + (1 - memory) * x.square()).sqrt()
    moves = ((1 - mu) * a / (r + TINY)).clamp(-MOST, MOST) * (
        inputs.lr * ELEMENT
    )
    sizes = [p.numel() for p in params]
    moved, rooted = (
        [
            t.view(p.shape)
            for t, p in zip(new.split(sizes), params, strict=True)
        ]
        for new in (moves, r)
    )
    subtract(params, moved, inputs.keep)
    torch._foreach_copy_(roots, rooted)


class Orthogonal:
    """The steps of the layers of one param group; on a GPU recorded at the second one, and then one
    launch.
    """

    def __init__(
        self, sites: Sequence[Site], params: Sequence[nn.Parameter]
    ) -> None:
        """All that belongs to a covered layer; `others` are left to SGD."""
        given, parts = set(params), []
        self.elements: list[nn.Parameter] = []
        for site in sites:
            active = tuple(s for s in site.segments if s.param in given)
            if is_matrix((site, active)):
                parts.append((site, active))
            else:
                self.elements += [s.param for s in active]
        self.stacks = stacks_of(parts)
        self.params = [p for stack in self.stacks for p in stack.params]
        self.params += self.elements
        taken = set(self.params)
        self.others = [p for p in params if p not in taken]
        self.records = True  # unless a recording did not fit
        self.key: object = None
        self.where: list[int] = []  # of the directions that a recording reads
        self.places: dict[
            nn.Parameter, Tensor
        ] = {}  # or that it has of its own
        self.graph: Graph | None = None

    def step(
        self, state: Any, group: Mapping[str, Any], directions: Tensors
    ) -> None:
        """In place."""
        if not self.params:
            return
        buffers = {}
        if group["momentum"]:
            buffers = {p: momentum_buffer(state[p], p) for p in self.params}
        for p in self.elements:
            if "direction_rms" not in state[p]:
                state[p]["direction_rms"] = directions[p].to(p.dtype).abs()
        lr = group["lr"]
        inputs = StepInputs(
            xs={p: directions[p] for p in self.params},
            buffers=buffers,
            roots={p: state[p]["direction_rms"] for p in self.elements},
            lr=lr.reshape(()) if isinstance(lr, Tensor) else lr,
            momentum=group["momentum"],
            decay=group["weight_decay"],
            nesterov=group["nesterov"],
            maximize=group["maximize"],
            decays=bool(group["weight_decay"]),
        )
        with torch.autocast(self.params[0].device.type, enabled=False):
            if torch.compiler.is_compiling() or not self._recorded(inputs):
                self._advance(inputs)
            else:
                self._replay(inputs)

    def _advance(
        self,
        inputs: StepInputs,
        streams: Sequence[torch.cuda.Stream] = (),
        dry: bool = False,
    ) -> None:
        """The step of all layers.

        With `streams`, which are those of a recording, by kernels where they can serve. A dry one
        compiles these and does nothing else.
        """
        xs = [_laid_out(x, p) for p, x in inputs.xs.items()]
        if inputs.maximize:
            xs = [*torch._foreach_neg(xs)]
        inputs = inputs._replace(xs=dict(zip(self.params, xs, strict=True)))
        kinds = {(p.device, p.dtype) for p in self.elements if not dry}
        with _side_by_side(() if dry else streams) as branch:
            for i, stack in enumerate(self.stacks):
                with branch(i):
                    if streams and stack.fuses(inputs.buffers):
                        stack.fused_step(inputs, dry)
                    elif not dry:
                        stack.step(inputs)
            with branch(-1):
                for kind in kinds:
                    alike = [
                        p for p in self.elements if (p.device, p.dtype) == kind
                    ]
                    move_elements(alike, inputs)

    def _recorded(self, inputs: StepInputs) -> bool:
        """Whether there is a recording of this step: from the second time on that all of it lies
        where it did.

        Directions may lie elsewhere every time. From the first time that they do, they are copied
        to where a recording has them.
        """
        device = self.params[0].device
        xs = [*inputs.xs.values()]
        others = [
            *self.params,
            *inputs.buffers.values(),
            *inputs.roots.values(),
        ]
        on_gpu = device.type == "cuda" and all(
            t.device == device for t in xs + others
        )
        if not on_gpu or not self.records or capturing():
            return False
        addresses = [t.data_ptr() for t in others]
        key = inputs[6:], addresses, signature((self.params, xs))
        where = [x.data_ptr() for x in xs]
        if key != self.key:
            self.key, self.where, self.places, self.graph = (
                key,
                where,
                {},
                None,
            )
            return False
        moved = where != self.where
        if self.graph is None or (moved and not self.places):
            # The old one goes before the next is begun, which may fail.
            self.graph, self.places = None, {}
            try:
                places = {
                    p: torch.empty_like(x)
                    for p, x in inputs.xs.items()
                    if moved
                }
                self._record(inputs._replace(xs=places or inputs.xs))
                self.places = places
            except (
                torch.OutOfMemoryError
            ):  # a graph cannot use what others have freed
                self.records = False
        return self.records

    def _record(self, inputs: StepInputs) -> None:
        lead = self.params[0]
        device = lead.device
        rates = torch.zeros(3, dtype=wide(lead.dtype), device=device)
        self.rates = lr, mu, decay = rates.unbind()
        inputs = inputs._replace(lr=lr, momentum=mu, decay=decay)
        streams = [side_stream(device, 1 + i) for i in range(BRANCHES)]
        with torch.cuda.device(device):
            self._advance(inputs, streams, dry=True)
        self.graph = record(device, partial(self._advance, inputs, streams))

    def _replay(self, inputs: StepInputs) -> None:
        assert self.graph is not None
        rates = inputs.lr, inputs.momentum, inputs.decay
        for place, rate in zip(self.rates, rates, strict=True):
            place.copy_(rate) if isinstance(rate, Tensor) else place.fill_(
                rate
            )
        write([(place, inputs.xs[p]) for p, place in self.places.items()])
        self.graph.replay()
        torch.autograd.graph.increment_version(self.params)


@contextmanager
def _side_by_side(
    streams: Sequence[torch.cuda.Stream],
) -> Iterator[Callable[[int], AbstractContextManager[Any]]]:
    """Branches of a recording, taken in turn: each begins after what has been recorded, and its end
    waits for all.
    """
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


def _laid_out(x: Tensor, p: Tensor) -> Tensor:
    """x, or a copy, with the strides and the type of p."""
    alike = x.stride() == p.stride() and x.dtype == p.dtype
    return x if alike else torch.empty_like(p).copy_(x)


SETS = 8  # of parameters with gradients, whose polar steps are kept ready


class Polar(Recipe):
    """The polar step of the layers' matrices."""

    def __init__(self, sites: Sequence[Site]) -> None:
        super().__init__(sites)
        self.kept: dict[object, Orthogonal] = {}

    def step(
        self,
        state: Any,
        group: Mapping[str, Any],
        params: list[nn.Parameter],
        directions: dict[nn.Parameter, Tensor],
    ) -> None:
        # One for each set of parameters that had gradients: some networks leave out layers by
        # chance.
        key = tuple((id(p), p.dtype, p.device) for p in params)
        if key not in self.kept:
            if len(self.kept) == SETS:
                self.kept.clear()
            self.kept[key] = Orthogonal(self.sites, params)
        layers = self.kept[key]
        layers.step(state, group, directions)
        SGD.step(self, state, group, layers.others, directions)  # type: ignore[arg-type]
