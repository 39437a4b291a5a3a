"""What waits until step(): the per-sample gradients that the backwards since the last step have
captured, site by site.

Separate backwards follow each other (accumulation). B is the step's sample count; with a mean loss
u_i = B × the captured gradient, and U's columns are u_i/√ϱ over the first ϱ samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from seng.layers.backwards import Backward, Forward
from seng.layers.capture import accumulates
from seng.layers.sites import Member, Segments, Site
from seng.layers.timer import Timer
from seng.linalg.joined import stacked
from seng.linalg.operators import HALF, Operator

Keep = Callable[[Site, Operator], Operator]


@dataclass(frozen=True)
class Look:
    """What was captured of one site."""

    captured: bool  # whether a backward reached it
    count: int  # samples
    kappa: int  # positions per sample, at most
    positions: int  # over all samples
    mismatch: str | None  # why dimension 0 cannot be the sample

    @property
    def code(self) -> int:
        """For the other ranks: 1 + samples, 0 where not captured, −1 for a mismatch."""
        if self.mismatch is not None:
            return -1
        return self.count + 1 if self.captured else 0


class Samples:
    """Receives captures and hands out one U per site."""

    def __init__(
        self,
        sites: list[Site],
        limit: int | None,
        keep: Callable[[], Keep | None],
        gated: bool = False,
        per_sample: bool = True,
    ) -> None:
        self.sites, self.limit, self.keep = sites, limit, keep
        self.per_sample = (
            per_sample  # whether dimension 0 has to be the sample
        )
        self.own = False  # whether the samples feed only the curvature
        self.gated = (
            gated  # whether only backwards count that are `listened` to
        )
        self.forwards: list[
            Forward
        ] = []  # that were listened to since the last step
        self.forward: Forward | None = None  # the one that is now
        self.layers: list[tuple[int, Member]] = [
            (i, member)
            for i, site in enumerate(sites)
            for member in site.members
        ]
        self.active: dict[int, Segments] = {}
        self.backwards: dict[int, Backward] = {}
        self.timers: dict[int, Timer] = {}  # of the sites' refreshes
        self.device = sites[0].lead.device if sites else torch.device("cpu")
        self.together = Timer(self.device)  # a GPU refreshes all at once
        self.half: set[int] = (
            set()
        )  # sites that were captured in half precision

    def clear(self) -> None:
        for kept in (self.backwards, self.active, self.timers, self.half):
            kept.clear()
        self.forwards.clear()
        self.together = Timer(self.device)

    def __len__(self) -> int:
        return len(self.backwards)

    @contextmanager
    def listened(self, count: int) -> Iterator[Forward]:
        """Backwards in here are those of one forward with so many samples.

        They count if it is `trained` by the next step.
        """
        self.forward = Forward(count, trained=self.own)
        self.forwards.append(self.forward)
        try:
            yield self.forward
        finally:
            self.forward = None

    def forget(self, trained: bool) -> None:
        """Drop what came of forwards that were trained with, or that were not."""
        for forward in self.forwards:
            if forward.trained == trained:
                for task in forward.tasks:
                    self.backwards.pop(task, None)
        self.forwards = [f for f in self.forwards if f.trained != trained]

    def settle(self) -> None:
        """Before a refresh: what was not trained with goes, of the rest the first `limit` samples
        stay.
        """
        self.forget(trained=False)
        if self.limit is None:
            return
        left = self.limit
        for forward in self.forwards:
            kept = min(forward.count, left)
            left -= kept
            for task in forward.tasks:
                self.backwards[task].shorten(kept)

    def receive(
        self,
        task: int,
        layer: int,
        training: bool,
        own: bool,
        a: Tensor,
        g: Tensor,
    ) -> None:
        """Called inside the backward: turn (a, g) into what the block needs, or keep them as
        factors.
        """
        if own != self.own or (self.gated and self.forward is None):
            return  # of a forward from before or after an own batch
        index, member = self.layers[layer]
        active = self.active.get(index) or self.sites[index].active()
        if not self.gated and not any(accumulates(s.used) for s in active):
            return
        backward = self._of(task)
        self.active[index] = active
        a, g = member.sample_first(a, g)
        wanted = self._wanted(backward, len(a))
        if not backward.fits(index, len(a)) and self.per_sample:
            return
        if g.dtype in HALF:
            self.half.add(index)
        with nullcontext() if g.is_cuda else self.timer(index):
            if not member.kind.whole_batch:
                a, g = a[:wanted], g[:wanted]
            with _mode(member.module, training):
                U = (
                    self.sites[index]
                    .operator(active, member, a, g)
                    .first(wanted)
                )
            backward.kappa[index] += U.kappa
            backward.positions[index] += U.kappa * U.samples
            keep = self.keep()
            U = U if keep is None else keep(self.sites[index], U)
            backward.add(index, U, self.per_sample)

    def _wanted(self, backward: Backward, count: int) -> int:
        """How many of a call's samples are kept."""
        if self.forward is not None:  # `settle` looks at the limit
            backward.kept = count
        if self.forward is not None or self.limit is None:
            return count
        others = [b for b in self.backwards.values() if b is not backward]
        before = sum([other.samples for other in others])
        return max(0, min(count, self.limit - before))

    def _of(self, task: int) -> Backward:
        """The captures of a backward; stale ones are dropped, as after a step that was skipped."""
        if task not in self.backwards:
            if not self.gated and self._stale():
                self.clear()
            self.backwards[task] = Backward()
            if self.forward is not None:
                self.forward.tasks.append(task)
        return self.backwards[task]

    def _stale(self) -> bool:
        """Whether the gradients that belong to the captures are gone: not there, or zero where the
        captures are not.

        FSDP2 keeps gradients that are not to be reduced yet where nobody sees them: there only
        `zero_grad` tells.
        """
        if any(self.sites[i].sharded for i in self.active):
            return False
        grads = [
            s.param.grad for active in self.active.values() for s in active
        ]
        if any(g is not None and g.any() for g in grads):
            return False
        pieces = [
            U for b in self.backwards.values() for U in b.pieces.values()
        ]
        return all(g is None for g in grads) or any(
            U.values.any() for U in pieces
        )

    @property
    def total(self) -> int:
        """B, the step's sample count."""
        return sum([backward.samples for backward in self.backwards.values()])

    @property
    def columns(self) -> int:
        """ϱ, the number of U's columns."""
        if self.gated:
            return sum(
                backward.kept or 0 for backward in self.backwards.values()
            )
        return (
            self.total if self.limit is None else min(self.total, self.limit)
        )

    def timer(self, index: int) -> Timer:
        """The clock of a site's refresh."""
        device = self.sites[index].lead.device
        if device.type == "cuda":
            return self.together
        if index not in self.timers:
            self.timers[index] = Timer(device)
        return self.timers[index]

    def look(self, index: int) -> Look:
        """What was captured of a site."""
        count, kappa, positions, captured = 0, 0, 0, False
        mismatch: str | None = None
        for backward in self.backwards.values():
            if index in backward.pieces:
                captured = True
                count += backward.pieces[index].samples
                positions += backward.positions[index]
                kappa = max(kappa, backward.kappa[index])
            if self.per_sample and mismatch is None:
                mismatch = backward.mismatch(index)
        return Look(captured, count, kappa, positions, mismatch)

    def unit(self, scale: float) -> float:
        """From captured gradients, which carry `scale`, to the columns u_i/√ϱ."""
        # What is sent backward for the curvature alone is no mean over the batch.
        B = 1 if self.gated else self.total
        return float(B / max(self.columns, 1) ** 0.5 / scale)

    def take(self, index: int, unit: float) -> Operator:
        """U (n, ϱ) of a captured site; its pieces are let go: one U at a time is whole.

        Factors in bfloat16 stay so on a GPU, whose products of them are summed up in float32.
        """
        dtype = self.sites[index].dtype
        pieces = []
        for backward in self.backwards.values():
            if index in backward.pieces:
                pieces.append(_settled(backward.pieces.pop(index), dtype))
        U = pieces[0] if len(pieces) == 1 else stacked(pieces)
        return U.scaled(unit)


def _settled(U: Operator, dtype: torch.dtype) -> Operator:
    halved = U.values.dtype == torch.bfloat16 and U.values.is_cuda
    return U if halved and U.form == "implicit" else U.to(dtype)


@contextmanager
def _mode(module: nn.Module, training: bool) -> Iterator[None]:
    """The layer in the mode that its forward ran in, which BatchNorm's rule needs to know."""
    now, module.training = module.training, training
    try:
        yield
    finally:
        module.training = now
