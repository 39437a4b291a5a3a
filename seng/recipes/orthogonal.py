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

from collections.abc import Mapping, Sequence
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
from seng.layers.sites import Site, Tensors
from seng.linalg.operators import wide
from seng.recipes.polar import (
    RMS,
    Part,
    Stack,
    StepInputs,
    stacks_of,
)
from seng.recipes.recipe import SGD, Directions, momentum_buffer

ELEMENT = 5 * RMS  # of a number that has no matrix: as AdamW beside Muon
# Of r², as in SOAP: Adam's 0.999 is slow for runs of a few thousand steps. At least the momentum's.
MEMORY = 0.95
# |x|/r at most, which holds once r has seen all of x.
MOST = (1 - MEMORY) ** -0.5
TINY = 1e-15  # added to r: where nothing has come yet, nothing is done
BRANCHES = 4  # of a recording: no stack fills a GPU, and each stream costs a workspace
SETS = 8  # of parameters with gradients, whose polar steps are kept ready


class Elements:
    """Parameters that are no matrices."""

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self.params = params

    def step(self, inputs: StepInputs) -> None:
        """θ ← keep·θ − lr·ELEMENT·(1 − momentum)·x/r, and r with it, in place."""
        lr, mu, _, memory = inputs.rates
        along = _flat(inputs.along(self.params))
        x = _flat([inputs.xs[p] for p in self.params])
        roots = [inputs.roots[p] for p in self.params]
        r = _flat(roots)
        r = (memory * r.square() + (1 - memory) * x.square()).sqrt()
        moves = ((1 - mu) * along / (r + TINY)).clamp(-MOST, MOST)
        own = self._split(moves * (lr * ELEMENT))
        inputs.subtract(self.params, own)
        torch._foreach_copy_(roots, self._split(r))

    def recorded_step(self, inputs: StepInputs, dry: bool) -> None:
        """`step`; a dry one does nothing."""
        if not dry:
            self.step(inputs)

    def _split(self, numbers: Tensor) -> list[Tensor]:
        """One tensor per parameter."""
        pieces = numbers.split([p.numel() for p in self.params])
        pairs = zip(pieces, self.params, strict=True)
        return [piece.view(p.shape) for piece, p in pairs]


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    """All of their numbers, in the precision of sums."""
    return torch.cat([t.reshape(-1).to(wide(t.dtype)) for t in tensors])


class Orthogonal:
    """The steps of the layers of one device; on a GPU recorded at the second one, and then one
    launch.
    """

    def __init__(
        self, sites: Sequence[Site], params: Sequence[nn.Parameter]
    ) -> None:
        """All that belongs to a covered layer; `others` are left to SGD."""
        given = set(params)
        parts = []
        self.elements: list[nn.Parameter] = []
        for site in sites:
            active = [s for s in site.segments if s.param in given]
            # Not norms, tables, nor a bias that is trained alone.
            if site.matrix and any(s.name == "weight" for s in active):
                parts.append(Part(site, tuple(active)))
            else:
                self.elements += [s.param for s in active]
        stacks = stacks_of(parts, fill=params[0].is_cuda)
        self.blocks: list[Stack | Elements] = [*stacks]
        if self.elements:
            self.blocks.append(Elements(self.elements))
        self.params = [p for block in self.blocks for p in block.params]
        taken = set(self.params)
        self.others = [p for p in params if p not in taken]
        self.records = params[0].is_cuda  # unless a recording did not fit
        self.key: object = None
        self.where: list[int] = []  # of the directions that a recording reads
        self.places: Tensors = {}  # or that it has of its own
        self.graph: Graph | None = None

    def step(
        self, state: Any, group: Mapping[str, Any], directions: Tensors
    ) -> None:
        """In place."""
        if not self.params:
            return
        lr = group["lr"]
        if isinstance(lr, Tensor):
            lr = lr.reshape(())
        mu = group["momentum"]
        for p in self.elements:
            if "direction_rms" not in state[p]:
                state[p]["direction_rms"] = directions[p].to(p.dtype).abs()
        buffered = self.params if mu else []
        inputs = StepInputs(
            xs={p: directions[p] for p in self.params},
            buffers={p: momentum_buffer(state[p], p) for p in buffered},
            roots={p: state[p]["direction_rms"] for p in self.elements},
            rates=(
                lr,
                mu,
                group["weight_decay"],
                max(mu, MEMORY),
            ),
            nesterov=group["nesterov"],
            maximize=group["maximize"],
        )
        with torch.autocast(self.params[0].device.type, enabled=False):
            if torch.compiler.is_compiling() or not self._recorded(inputs):
                for block in self.blocks:
                    block.step(inputs)
            else:
                self._replay(inputs)

    def _recorded(self, inputs: StepInputs) -> bool:
        """Whether there is a recording of this step: from the second time on that all of it lies
        where it did.

        Directions may lie elsewhere every time. From the first time that they do, they are copied
        to where a recording has them.
        """
        if not self.records or capturing():
            return False
        xs = [*inputs.xs.values()]
        states = *inputs.buffers.values(), *inputs.roots.values()
        addresses = [t.data_ptr() for t in (*self.params, *states)]
        key = inputs[4:], addresses, signature((self.params, xs))
        where = [x.data_ptr() for x in xs]
        if key != self.key:
            self.key = key
            self.where = where
            self.graph = None
            self.places = {}
            return False
        moved = where != self.where
        if self.graph is None or (moved and not self.places):
            try:
                self._record(inputs, moved)
            except (
                torch.OutOfMemoryError
            ):  # a graph cannot use what others have freed
                self.records = False
        return self.records

    def _record(self, inputs: StepInputs, moved: bool) -> None:
        """Record the step, with rates of its own, and directions of its own where these move."""
        # The old one goes before the next is begun, which may fail.
        self.graph = None
        self.places = {}
        lead = self.params[0]
        rates = torch.zeros(4, dtype=wide(lead.dtype), device=lead.device)
        self.rates = rates.unbind()
        places = {
            p: torch.empty_like(x) for p, x in inputs.xs.items() if moved
        }
        inputs = inputs._replace(xs=places or inputs.xs, rates=self.rates)
        with torch.cuda.device(lead.device):
            for block in self.blocks:
                block.recorded_step(inputs, dry=True)
        self.graph = record(lead.device, partial(self._branch, inputs))
        self.places = places

    def _branch(self, inputs: StepInputs) -> None:
        """The step as it is recorded: each block in a branch, which begins after what came before,
        and the end waits for all.
        """
        device = self.params[0].device
        here = torch.cuda.current_stream(device)
        streams = [side_stream(device, 1 + i) for i in range(BRANCHES)]
        for stream in streams:
            stream.wait_stream(here)
        try:
            for i, block in enumerate(self.blocks):
                with torch.cuda.stream(streams[i % BRANCHES]):
                    block.recorded_step(inputs, dry=False)
        finally:
            for stream in streams:
                here.wait_stream(stream)

    def _replay(self, inputs: StepInputs) -> None:
        assert self.graph is not None
        for place, rate in zip(self.rates, inputs.rates, strict=True):
            place.fill_(rate)
        write([(place, inputs.xs[p]) for p, place in self.places.items()])
        self.graph.replay()
        torch.autograd.graph.increment_version(self.params)


class Polar(SGD):
    """The polar step of the layers' matrices."""

    def __init__(self, sites: Sequence[Site]) -> None:
        super().__init__(sites)
        self.kept: dict[object, list[Orthogonal]] = {}

    def step(
        self,
        state: Any,
        group: Mapping[str, Any],
        params: list[nn.Parameter],
        directions: Directions,
    ) -> None:
        # Kept for each set of parameters that had gradients: some networks leave out layers by
        # chance.
        key = tuple((id(p), p.dtype, p.device) for p in params)
        if key not in self.kept:
            if len(self.kept) == SETS:
                self.kept.clear()
            devices = dict.fromkeys(p.device for p in params)
            self.kept[key] = [
                Orthogonal(self.sites, [p for p in params if p.device == d])
                for d in devices
            ]
        for layers in self.kept[key]:
            layers.step(state, group, directions)
            super().step(state, group, layers.others, directions)
