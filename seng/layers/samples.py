"""What waits until step(): the per-sample gradients that the backwards since the last step have
captured, site by site.

Separate backwards follow each other (accumulation). B is the step's sample count; with a mean loss
u_i = B × the captured gradient, and U's columns are u_i/√ϱ over the first ϱ samples. Within one
backward, captures of one site add up per sample: a layer used twice, tied weights.

A `Collector` gathers them by its hooks. On refresh steps backwards are captured. `own_batch` lets
backwards feed the curvature alone (the paper's S̃_k). With `fisher` other than "empirical" the
module's output goes backward for the curvature alone (`seng.layers.fisher`).
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from seng.layers.capture import Capture, loss_scale
from seng.layers.fisher import Fisher, Loss, Observer, output_of, seeds
from seng.layers.sites import Segments, Site, differs
from seng.linalg.operators import HALF, Operator, added, stacked


@dataclass
class Piece:
    """What one backward has captured of one site."""

    count: int  # samples of the first call
    U: Operator | None = None  # unscaled; None once it was taken
    kappa: int = 0  # positions, over all calls
    positions: int = 0  # over all samples
    mismatch: str | None = None  # between two calls


@dataclass
class Backward:
    """The captures of one backward."""

    pieces: dict[int, Piece] = field(default_factory=dict)  # by site
    # samples -> calls with them
    counts: Counter[int] = field(default_factory=Counter)
    samples: int = 0  # the sample count that most layers saw

    def called(self, index: int, count: int) -> Piece:
        """Note a call of a site with so many samples."""
        self.counts[count] += 1
        self.samples = self.counts.most_common(1)[0][0]
        piece = self.pieces.setdefault(index, Piece(count))
        if piece.count != count:
            piece.mismatch = (
                f"it was called with {piece.count} and with {count} samples in one backward, which "
                "cannot be added up"
            )
        return piece


@dataclass
class Forward:
    """A call of the module whose output was sent backward for the curvature alone."""

    count: int  # samples
    trained: bool  # the training loss went backward through it too; else an evaluation
    tasks: list[int] = field(default_factory=list)  # its backwards


@dataclass
class Look:
    """What was captured of one site."""

    count: int = 0  # samples
    kappa: int = 0  # positions per sample, at most
    positions: int = 0  # over all samples
    mismatch: str | None = None  # why dimension 0 cannot be the sample
    # For the other ranks: 1 + samples, 0 where not captured, −1 for a mismatch.
    code: int = 0


class Samples:
    """What was captured since the last step: hands out one U per site."""

    def __init__(
        self, sites: list[Site], limit: int, per_sample: bool, gated: bool
    ) -> None:
        self.sites = sites
        self.limit = limit
        self.per_sample = per_sample  # dimension 0 has to be the sample
        self.gated = gated  # whether only backwards of `forwards` count
        self.forwards: list[Forward] = []
        self.active: dict[int, Segments] = {}
        self.backwards: dict[int, Backward] = {}
        self.half = False  # whether something was captured in half precision
        self.columns = 0  # ϱ, the number of U's columns; known when settled
        self.device = sites[0].lead.device if sites else torch.device("cpu")

    @property
    def total(self) -> int:
        """B, the step's sample count."""
        total = 0
        for backward in self.backwards.values():
            total += backward.samples
        return total

    def forget(self, trained: bool) -> None:
        """Drop what came of forwards that were trained with, or that were not."""
        kept = []
        for forward in self.forwards:
            if forward.trained != trained:
                kept.append(forward)
                continue
            for task in forward.tasks:
                del self.backwards[task]
        self.forwards = kept

    def settle(self) -> None:
        """Before a refresh: what was not trained with goes, of the rest the first `limit` samples
        stay.
        """
        if not self.gated:
            self.columns = min(self.total, self.limit)
            return
        self.forget(trained=False)
        self.columns = 0
        left = self.limit
        for forward in self.forwards:
            kept = min(forward.count, left)
            left -= kept
            self.columns += kept * len(forward.tasks)
            for task in forward.tasks:
                for piece in self.backwards[task].pieces.values():
                    if piece.U is not None:
                        piece.U = piece.U.first(kept)

    def room(self, backward: Backward) -> int:
        """How many samples of a backward are kept."""
        if self.gated:  # `settle` looks at the limit
            return sys.maxsize
        before = self.total - backward.samples
        return max(0, self.limit - before)

    def stale(self) -> bool:
        """Whether the gradients that belong to the captures are gone: not there, or zero where the
        captures are not.

        FSDP2 keeps gradients that are not to be reduced yet where nobody sees them: there only
        `zero_grad` tells.
        """
        spread = any(self.sites[i].sharded for i in self.active)
        if self.gated or spread or not self.backwards:
            return False
        params = [s.param for a in self.active.values() for s in a]
        grads = [p.grad for p in params if p.grad is not None]
        if any(g.any() for g in grads):
            return False
        pieces = [
            p for b in self.backwards.values() for p in b.pieces.values()
        ]
        captured = [p.U.values for p in pieces if p.U is not None]
        return not grads or any(values.any() for values in captured)

    def look(self, index: int) -> Look:
        """What was captured of a site."""
        look = Look()
        for backward in self.backwards.values():
            piece = backward.pieces.get(index)
            if piece is None:
                continue
            if piece.U is not None:
                look.count += piece.U.samples
                look.positions += piece.positions
                look.kappa = max(look.kappa, piece.kappa)
                look.code = 1 + look.count
            mismatch = piece.mismatch
            if mismatch is None and piece.count != backward.samples:
                mismatch = differs(piece.count, backward.samples)
            if self.per_sample and mismatch is not None:
                return Look(mismatch=mismatch, code=-1)
        return look

    def take(self, index: int, scale: float) -> Operator:
        """U (n, ϱ) of a captured site, with the columns u_i/√ϱ; captured gradients carry `scale`.

        Its pieces are let go: one U at a time is whole.
        Factors in bfloat16 stay so on a GPU, whose products of them are summed up in float32.
        """
        dtype = self.sites[index].dtype
        found = []
        for backward in self.backwards.values():
            piece = backward.pieces.get(index)
            if piece is None or piece.U is None:
                continue
            U = piece.U
            piece.U = None
            halved = U.values.dtype == torch.bfloat16 and U.values.is_cuda
            stays = halved and U.form == "implicit"
            found.append(U if stays else U.to(dtype))
        # What is sent backward for the curvature alone is no mean over the batch.
        B = 1 if self.gated else self.total
        root = max(self.columns, 1) ** 0.5
        return stacked(found).scaled(B / root / scale)


class Collector(Capture):
    """Hooks on the layers of some sites, and the samples that they hand over."""

    def __init__(
        self,
        module: nn.Module,
        sites: list[Site],
        *,
        limit: int | None,
        keep: Callable[[], Any],
        fisher: Fisher,
        loss: Loss,
        stream: Callable[[int], int],
        per_sample: bool,
    ) -> None:
        self.module = module
        self.keep = keep
        self.fisher = fisher
        self.loss = loss
        self.stream = stream
        self.layers = [(i, m) for i, s in enumerate(sites) for m in s.members]
        # Whether this step's curvature has a batch of its own.
        self.own = False
        observed = fisher != "empirical"
        self.observer = Observer(module, self._observe) if observed else None
        self.forward: Forward | None = None  # that goes backward now
        most = limit or sys.maxsize
        self.fresh = partial(Samples, sites, most, per_sample, observed)
        self.samples = self.fresh()
        super().__init__([member.module for _, member in self.layers])

    def arm(self, due: bool) -> None:
        """Begin a step, which is captured if a refresh is due."""
        self.samples = self.fresh()
        self.own = self.aside = False
        self.watch(due)

    def drop(self) -> None:
        """Forget what was captured: the gradients it belongs to are gone."""
        if self.own:
            return
        if self.observer is None:
            self.samples = self.fresh()
        else:  # what is still to go backward stays
            self.samples.forget(trained=True)

    @property
    def scale(self) -> float:
        """Of the loss, which the captured gradients carry."""
        unscaled = self.own or self.observer is not None
        return 1.0 if unscaled else loss_scale()

    @torch.no_grad()
    def receive(
        self,
        layer: int,
        training: bool,
        aside: bool,
        task: int,
        a: Tensor,
        g: Tensor,
    ) -> None:
        """Called inside the backward: turn (a, g) into what the block needs, or keep them as
        factors.
        """
        if aside != self.own or (self.observer and self.forward is None):
            return  # of a forward from before or after an own batch
        index, member = self.layers[layer]
        site = self.samples.sites[index]
        active = self.samples.active.get(index) or site.active()
        if self.observer is None and not site.reached(active):
            return
        samples = self._begun(task)
        backward = samples.backwards[task]
        samples.active[index] = active
        a, g = member.sample_first(a, g)
        room = samples.room(backward)
        piece = backward.called(index, len(a))
        if piece.mismatch is not None and samples.per_sample:
            return
        samples.half |= g.dtype in HALF
        with torch.autocast(g.device.type, enabled=False):
            if not member.kind.whole_batch:
                a = a[:room]
                g = g[:room]
            # BatchNorm's rule needs to know the mode that the forward ran in.
            now = member.module.training
            member.module.training = training
            try:
                U = site.operator(active, member, a, g).first(room)
            finally:
                member.module.training = now
            piece.kappa += U.kappa
            piece.positions += U.kappa * U.samples
            keep = self.keep()
            if keep is not None:
                U = keep(site, U)
            if piece.U is not None:
                both = [piece.U, U]
                U = added(*both) if samples.per_sample else stacked(both)
            piece.U = U

    def _begun(self, task: int) -> Samples:
        """The samples with an entry for a backward; stale ones are dropped, as after a step that
        was skipped.
        """
        if task not in self.samples.backwards:
            if self.samples.stale():
                self.samples = self.fresh()
            self.samples.backwards[task] = Backward()
            if self.forward is not None:
                self.forward.tasks.append(task)
        return self.samples

    def _observe(self, out: Any) -> None:
        """The module was called: on a refresh step send its output backward."""
        if not self.armed:
            return
        f = output_of(out)
        if not f.requires_grad:
            return
        sites = self.samples.sites
        params = [s.param for site in sites for s in site.active()]
        if not params:
            return
        seed = self.stream(len(self.samples.forwards))
        generator = torch.Generator(f.device).manual_seed(seed)
        forward = Forward(len(f), trained=self.own)
        self.samples.forwards.append(forward)
        self.forward = forward
        try:
            for h in seeds(f, self.fisher, self.loss, generator):
                torch.autograd.grad(
                    f, params, h, retain_graph=True, allow_unused=True
                )
        finally:
            self.forward = None
        f.register_hook(lambda _: setattr(forward, "trained", True))

    @contextmanager
    def own_batch(self, params: Sequence[nn.Parameter]) -> Iterator[None]:
        """Backwards in here feed only the curvature; gradients stay as they were."""
        # DDP may reduce into what gradients are views of.
        wrapped = isinstance(self.module, nn.parallel.DistributedDataParallel)
        kept = []
        for p in params:
            grad = p.grad
            if wrapped and grad is not None:
                grad = grad.clone()
            kept.append(grad)
            p.grad = None
        self.samples = self.fresh()
        self.own = self.aside = True
        self.watch(True)
        try:
            yield
        finally:
            self.aside = False
            if self.own:
                self.watch(False)
            for p, grad in zip(params, kept, strict=True):
                p.grad = grad
