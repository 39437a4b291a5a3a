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

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._utils import _unflatten_dense_tensors

from seng.gpu.recorder import Replay, capturing, signature, write
from seng.layers.sites import Site, Tensors
from seng.linalg.operators import wide
from seng.recipes.polar import RMS, Part, Stack, StepInputs, stacks_of
from seng.recipes.recipe import SGD, Directions, Group, Params, momentum_buffer

ELEMENT = 5 * RMS  # of a number that has no matrix: as AdamW beside Muon
# Of r², as in SOAP: Adam's 0.999 is slow for runs of a few thousand steps. At least the momentum's.
MEMORY = 0.95
# |x|/r at most, which holds once r has seen all of x.
MOST = (1 - MEMORY) ** -0.5
TINY = 1e-15  # added to r: where nothing has come yet, nothing is done
SETS = 8  # of parameters with gradients, whose polar steps are kept ready


class Elements:
    """Parameters that are no matrices."""

    def __init__(self, params: Params) -> None:
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
        moves = moves * (lr * ELEMENT)
        inputs.subtract(self.params, _unflatten_dense_tensors(moves, roots))
        torch._foreach_copy_(roots, [*_unflatten_dense_tensors(r, roots)])

    launch = step


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    """All of their numbers, in the precision of sums."""
    return torch.cat([t.reshape(-1).to(wide(t.dtype)) for t in tensors])


class Orthogonal:
    """The steps of the layers of one device; on a GPU recorded at the second one, and then one
    launch.
    """

    def __init__(self, sites: Sequence[Site], params: Params) -> None:
        """All that belongs to a covered layer; `others` are left to SGD."""
        given = set(params)
        parts = []
        self.elements: Params = []
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
        self.replay = Replay(params[0].device)
        self.key: object = None
        self.where: list[int] = []  # of the directions that a recording reads
        self.places: Tensors = {}  # or that it has of its own

    def step(self, state: Any, group: Group, directions: Tensors) -> None:
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
        traced = torch.compiler.is_compiling() or capturing()
        with torch.autocast(self.replay.device.type, enabled=False):
            if traced or self.replay.make_graph is None:
                for block in self.blocks:
                    block.step(inputs)
            else:
                self._replay(inputs)

    def _replay(self, inputs: StepInputs) -> None:
        """The step with rates on the device: recorded as soon as all of it lies where it did.

        Directions may lie elsewhere every time. From the first time that they do, they are copied
        to where a recording has them.
        """
        self._settle(inputs)
        for place, rate in zip(self.rates, inputs.rates, strict=True):
            place.fill_(rate)
        write([(place, inputs.xs[p]) for p, place in self.places.items()])
        inputs = inputs._replace(xs=self.places or inputs.xs, rates=self.rates)
        launch = partial(self._launch, inputs)
        self.replay(launch, (self.key, bool(self.places)))
        torch.autograd.graph.increment_version(self.params)

    def _settle(self, inputs: StepInputs) -> None:
        """Rates, and directions where these move, get places that stay as long as all else does."""
        xs = [*inputs.xs.values()]
        states = *inputs.buffers.values(), *inputs.roots.values()
        addresses = [t.data_ptr() for t in (*self.params, *states)]
        key = inputs[4:], addresses, signature((self.params, xs))
        where = [x.data_ptr() for x in xs]
        if key != self.key:
            self.key = key
            self.where = where
            self.places = {}
            lead = self.params[0]
            rates = lead.new_zeros(4, dtype=wide(lead.dtype))
            self.rates = rates.unbind()
        elif where != self.where and not self.places:
            self.places = {
                p: torch.empty_like(x) for p, x in inputs.xs.items()
            }

    def _launch(self, inputs: StepInputs) -> None:
        with torch.cuda.device_of(self.params[0]):
            for block in self.blocks:
                block.launch(inputs)


class Polar(SGD):
    """The polar step of the layers' matrices."""

    def __init__(self, sites: Sequence[Site]) -> None:
        super().__init__(sites)
        self.kept: dict[object, list[Orthogonal]] = {}

    def step(
        self,
        state: Any,
        group: Group,
        params: Params,
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
