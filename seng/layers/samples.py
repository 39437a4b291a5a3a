"""What waits until step(): the per-sample gradients that the backwards since the last step have
captured, site by site.

Separate backwards follow each other (accumulation). B is the step's sample count; with a mean loss
u_i = B × the captured gradient, and U's columns are u_i/√ϱ over the first ϱ samples.

A clock for what one layer's refresh costs.

The captures of one backward: what each site's layers saw, as one U per site.

Within one backward, captures of one site add up per sample: a layer used twice, tied weights.

What gathers the per-sample gradients of a module: its hooks, what they have captured, and when.

On refresh steps backwards are captured. `own_batch` lets backwards feed the curvature alone (the
paper's S̃_k). With `fisher` other than "empirical" the module's output goes backward for the
curvature alone (`seng.layers.fisher`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor, nn

from seng.layers.capture import Capture, accumulates, loss_scale
from seng.layers.fisher import Fisher, Loss, Observer, output_of, seeds
from seng.layers.sites import Member, Segments, Site, differs
from seng.linalg.operators import HALF, Operator, added, stacked


class Timer:
    """Seconds spent inside `with timer:`, added up; inside of itself it does nothing.

    On a GPU by events, so that nothing waits until they are read.
    """

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.marks: list[tuple[Any, Any]] = []
        self.depth = 0

    def _now(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def __enter__(self) -> None:
        self.depth += 1
        if self.depth == 1:
            self.start = self._now()

    def __exit__(self, *_: object) -> None:
        self.depth -= 1
        if self.depth == 0:
            self.marks.append((self.start, self._now()))

    @property
    def seconds(self) -> float:
        if not self.cuda:
            return float(sum(end - start for start, end in self.marks))
        for _, end in self.marks:
            end.synchronize()
        return (
            float(sum(start.elapsed_time(end) for start, end in self.marks))
            / 1000
        )


@dataclass
class Backward:
    """The captures of one backward; its dictionaries are by the site's number."""

    counts: Counter[int] = field(
        default_factory=Counter
    )  # samples -> calls with them
    count_of: dict[int, int] = field(
        default_factory=dict
    )  # samples of the first call
    mismatches: dict[int, str] = field(
        default_factory=dict
    )  # between two calls
    kappa: Counter[int] = field(
        default_factory=Counter
    )  # positions, over all calls
    positions: Counter[int] = field(
        default_factory=Counter
    )  # over all samples
    pieces: dict[int, Operator] = field(default_factory=dict)  # U, unscaled
    kept: int | None = (
        None  # samples that count, if that is not for a limit to say
    )

    @property
    def samples(self) -> int:
        """The sample count that most layers saw."""
        return self.counts.most_common(1)[0][0] if self.counts else 0

    def fits(self, index: int, count: int) -> bool:
        """Note a call with so many samples: whether it can be added to those before it."""
        self.counts[count] += 1
        first = self.count_of.setdefault(index, count)
        if first != count:
            self.mismatches[index] = (
                f"it was called with {first} and with {count} samples in one backward, which cannot be added up"
            )
        return first == count

    def add(self, index: int, U: Operator, per_sample: bool) -> None:
        """Add a call's columns to those of before, or put them beside them."""
        before = self.pieces.get(index)
        if before is not None:
            U = added(before, U) if per_sample else stacked([before, U])
        self.pieces[index] = U

    def mismatch(self, index: int) -> str | None:
        """Why a site's dimension 0 cannot be the sample, in words; None where it can."""
        count = self.count_of.get(index, self.samples)
        other = None if count == self.samples else differs(count, self.samples)
        return self.mismatches.get(index, other)

    def shorten(self, kept: int) -> None:
        """Keep the first so many samples."""
        self.kept = kept
        self.pieces = {
            index: U.first(kept) for index, U in self.pieces.items()
        }


@dataclass
class Forward:
    """A call of the module whose output was sent backward for the curvature alone."""

    count: int  # samples
    trained: bool  # the training loss went backward through it too; else an evaluation
    tasks: list[int] = field(default_factory=list)  # its backwards


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


class Collector:
    """Hooks on the layers of some sites, and the samples that they hand over."""

    def __init__(
        self,
        module: nn.Module,
        sites: list[Site],
        *,
        limit: int | None,
        keep: Callable[[], Keep | None],
        fisher: Fisher,
        loss: Loss,
        stream: Callable[[int], int],
        per_sample: bool = True,
    ) -> None:
        self.module, self.fisher, self.loss, self.stream = (
            module,
            fisher,
            loss,
            stream,
        )
        self.own = (
            False  # whether this step's curvature has a batch of its own
        )
        observed = fisher != "empirical"
        self.samples = Samples(sites, limit, keep, observed, per_sample)
        layers = [member.module for _, member in self.samples.layers]
        self.capture = Capture(layers, self.samples.receive)
        self.observer = (
            Observer(module, WeakMethod(self._observe)) if observed else None
        )

    def arm(self, due: bool) -> None:
        """Begin a step, which is captured if a refresh is due."""
        self.samples.clear()
        self.own = self.samples.own = self.capture.own = False
        self.capture.armed = due

    def drop(self) -> None:
        """Forget what was captured: the gradients it belongs to are gone."""
        if self.own:
            return
        if self.samples.gated:
            self.samples.forget(
                trained=True
            )  # what is still to go backward stays
        else:
            self.samples.clear()

    def remove(self) -> None:
        """Leave the module as it was."""
        self.capture.remove()

    @property
    def scale(self) -> float:
        """Of the loss, which the captured gradients carry."""
        unscaled = self.own or self.observer is not None
        return 1.0 if unscaled else loss_scale()

    def _observe(self, out: Any) -> None:
        """The module was called: on a refresh step send its output backward."""
        if not self.capture.armed:
            return
        f = output_of(out)
        if not f.requires_grad:
            return
        segments = [s for site in self.samples.sites for s in site.segments]
        params = [s.param for s in segments if s.param.requires_grad]
        if not params:
            return
        seed = self.stream(len(self.samples.forwards))
        generator = torch.Generator(f.device).manual_seed(seed)
        with self.samples.listened(f.shape[0]) as forward:
            for h in seeds(f, self.fisher, self.loss, generator):
                torch.autograd.grad(
                    f, params, h, retain_graph=True, allow_unused=True
                )
        f.register_hook(lambda _: setattr(forward, "trained", True))

    @contextmanager
    def own_batch(self, params: Sequence[nn.Parameter]) -> Iterator[None]:
        """Backwards in here feed only the curvature; gradients stay as they were."""
        # DDP may reduce into what gradients are views of.
        wrapped = isinstance(self.module, nn.parallel.DistributedDataParallel)
        kept = []
        for p in params:
            kept.append(
                p.grad.clone() if wrapped and p.grad is not None else p.grad
            )
            p.grad = None
        self.samples.clear()
        self.own = self.samples.own = self.capture.own = self.capture.armed = (
            True
        )
        try:
            yield
        finally:
            self.capture.own = False
            self.capture.armed = self.capture.armed and not self.own
            for p, grad in zip(params, kept, strict=True):
                p.grad = grad
