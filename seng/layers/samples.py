"""What waits until step(): the per-sample gradients that the backwards since the last step have captured, site by site.

Within one backward, captures of one site add up per sample (a layer used twice, tied weights); separate backwards follow each
other (accumulation). B is the step's sample count; with a mean loss u_i = B × the captured gradient, and U's columns are u_i/√ϱ
over the first ϱ samples.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from seng.layers.capture import accumulates
from seng.layers.sites import Member, Segment, Site, differs
from seng.linalg.implicit import Implicit
from seng.linalg.lookup import Lookup
from seng.linalg.operators import HALF, Explicit, Operator
from seng.linalg.windows import Windows
from seng.tell.diagnostics import Timer

EARLY = 2**26  # bytes of captures whose Grams a GPU is given at once


@dataclass
class Backward:
    """The captures of one backward."""

    counts: Counter[int] = field(
        default_factory=Counter
    )  # how many calls saw so many samples
    differing: dict[int, tuple[int, int]] = field(
        default_factory=dict
    )  # site -> two sample counts of one backward
    count_of: dict[int, int] = field(default_factory=dict)  # site -> its sample count
    pieces: dict[int, Operator] = field(default_factory=dict)  # site -> U, unscaled
    kappa: Counter[int] = field(
        default_factory=Counter
    )  # site -> positions per sample, over all its calls
    numbers: Counter[int] = field(
        default_factory=Counter
    )  # site -> numbers per sample of inputs and outputs of `Windows`
    grams: dict[int, Tensor] = field(
        default_factory=dict
    )  # site -> UᵀU of its piece, where it is known
    waiting: dict[int, Windows] = field(
        default_factory=dict
    )  # site -> a piece whose UᵀU is to be worked out
    bytes: int = 0  # of the pieces that wait
    kept: int | None = None  # samples that count, where it is not for `limit` to say
    stream: torch.cuda.Stream | None = None  # on which they came

    def shorten(self, kept: int) -> None:
        """To the first so many samples."""
        self.kept = kept
        self.pieces = {
            index: U.first(kept) if U.samples > kept else U
            for index, U in self.pieces.items()
        }
        self.grams, self.waiting = {}, {}

    @property
    def samples(self) -> int:
        """The sample count that most layers saw."""
        return self.counts.most_common(1)[0][0] if self.counts else 0


@dataclass
class Forward:
    """A call of the module whose output was sent backward for the curvature alone."""

    count: int  # samples
    trained: bool  # whether the training loss has been sent backward through it too; others may be evaluations
    tasks: list[int] = field(default_factory=list)  # its backwards


class Samples:
    """Receives captures and hands out one U per site."""

    def __init__(
        self,
        sites: list[Site],
        limit: int | None,
        keep: Callable[[], Callable[[Site, Operator], Operator] | None],
        grams: Callable[[list[Operator]], list[Tensor]] | None = None,
        gated: bool = False,
    ) -> None:
        self.sites, self.limit, self.keep, self.grams = sites, limit, keep, grams
        self.own = False  # whether the samples are those of a batch that feeds only the curvature
        self.gated = gated  # whether only backwards count that are `listened` to
        self.forwards: list[Forward] = []  # that were listened to since the last step
        self.forward: Forward | None = None  # the one that is now
        self.layers: list[tuple[int, Member]] = [
            (i, m) for i, site in enumerate(sites) for m in site.members
        ]
        self.active: dict[int, tuple[Segment, ...]] = {}
        self.backwards: dict[int, Backward] = {}
        self.timers: dict[
            int, Timer
        ] = {}  # site -> what its refresh costs; a GPU refreshes all of them `together`
        self.together = Timer(sites[0].lead.device)
        self.half: set[int] = set()  # sites that were captured in half precision

    @contextmanager
    def listened(self, count: int) -> Iterator[Forward]:
        """Backwards in here are those of one forward with so many samples; they count if it is `trained` by the next step."""
        self.forward = Forward(count, trained=self.own)
        self.forwards.append(self.forward)
        try:
            yield self.forward
        finally:
            self.forward = None

    def forget(self, trained: bool) -> None:
        """Drop what came of forwards that were trained with, or that were not."""
        for forward in [
            forward for forward in self.forwards if forward.trained == trained
        ]:
            self.forwards.remove(forward)
            for task in forward.tasks:
                self.backwards.pop(task, None)

    def settle(self) -> None:
        """Before a refresh: what was not trained with goes, and of the rest the first `limit` samples stay."""
        self.forget(trained=False)
        if self.limit is None:
            return
        left = self.limit
        for forward in self.forwards:
            kept = min(forward.count, left)
            left -= kept
            for task in forward.tasks:
                self.backwards[task].shorten(kept)

    def clear(self) -> None:
        self.forwards.clear()
        self.backwards.clear()
        self.active.clear()
        self.timers.clear()
        self.half.clear()
        self.together = Timer(self.sites[0].lead.device)

    def __len__(self) -> int:
        return len(self.backwards)

    def receive(
        self, task: int, layer: int, training: bool, own: bool, a: Tensor, g: Tensor
    ) -> None:
        """Called inside the backward: turn (a, g) into what the block needs, or keep them as factors."""
        if own != self.own or (
            self.gated and self.forward is None
        ):  # of a forward from before or after an own batch
            return
        index, member = self.layers[layer]
        site = self.sites[index]
        active = self.active.get(index) or site.active()
        if not self.gated and not any(accumulates(segment.used) for segment in active):
            return
        backward = self._of(task)
        self.active[index] = active
        a, g = member.sample_first(a, g)
        count = a.shape[0]
        before = sum(
            other.samples for other in self.backwards.values() if other is not backward
        )
        wanted = (
            count if self.limit is None else max(0, min(count, self.limit - before))
        )
        if self.forward is not None:  # `settle` looks at the limit
            wanted = backward.kept = count
        backward.counts[count] += 1
        if backward.count_of.setdefault(index, count) != count:
            backward.differing[index] = (backward.count_of[index], count)
            return
        if g.dtype in HALF:
            self.half.add(index)
        with nullcontext() if g.is_cuda else self.timer(index):
            if not member.kind.whole_batch and wanted < count:
                a, g = a[:wanted], g[:wanted]
            with (
                nullcontext()
                if member.module.training == training
                else _mode(member.module, training)
            ):
                U = site.operator(active, member, a, g)
            U = U.first(wanted) if U.samples > wanted else U
            backward.kappa[index] += _positions(U)
            if isinstance(U, Windows):
                backward.numbers[index] += (U.a.numel() + U.G.numel()) // max(
                    1, U.samples
                )
            keep = self.keep()
            U = U if keep is None else keep(site, U)
            waiting = backward.pieces.get(index)
            backward.pieces[index] = U if waiting is None else added(waiting, U)
            if waiting is not None:  # it is another U now
                backward.waiting.pop(
                    index, None
                )  # `bytes` may count it on: the others do not wait as long
                backward.grams.pop(index, None)
            elif isinstance(U, Windows) and self._early(backward, U):
                backward.waiting[index] = U
                backward.bytes += U.bytes
                self._work(backward, EARLY)

    def _early(self, backward: Backward, U: Windows) -> bool:
        """Whether UᵀU can be worked out during the backward: all of it on one stream, and U not yet to be unscaled."""
        if (
            self.grams is None
            or not U.G.is_cuda
            or U.G.dtype == torch.float16
            or len(self.backwards) > 1
        ):
            return False
        stream = torch.cuda.current_stream(U.G.device)
        backward.stream = backward.stream or stream
        return bool(backward.stream == stream)

    def _work(self, backward: Backward, least: int) -> None:
        """Grams of what waits, if it is that many bytes: while the host launches the backward, a GPU has the time."""
        if self.grams is not None and backward.bytes >= least:
            waiting, backward.waiting, backward.bytes = backward.waiting, {}, 0
            backward.grams |= zip(
                waiting, self.grams(list(waiting.values())), strict=True
            )

    def known_grams(self, scale: float) -> dict[int, Tensor]:
        """UᵀU of what `take` gives, for the sites where nothing stands against working them out during the backward."""
        if len(self.backwards) != 1:
            return {}
        (backward,) = self.backwards.values()
        self._work(backward, 0)
        found, backward.grams = backward.grams, {}
        return (
            dict(
                zip(
                    found,
                    torch._foreach_mul(list(found.values()), self._scale(scale) ** 2),
                    strict=True,
                )
            )
            if found
            else {}
        )

    def _scale(self, scale: float) -> float:
        """From captured gradients, which carry `scale`, to the columns of U."""
        B = (
            1 if self.gated else self.total
        )  # what is sent backward for the curvature alone is no mean over the batch
        return float(B / max(self.columns, 1) ** 0.5 / scale)

    @property
    def columns(self) -> int:
        """ϱ, the number of U's columns."""
        if self.gated:
            return sum(backward.kept or 0 for backward in self.backwards.values())
        return self.total if self.limit is None else min(self.total, self.limit)

    def timer(self, index: int) -> Timer:
        """The clock of a site's refresh."""
        if self.sites[index].lead.is_cuda:
            return self.together
        return self.timers.setdefault(index, Timer(self.sites[index].lead.device))

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
        """Whether the gradients that belong to the captures are gone: not there, or zero where the captures are not.

        FSDP2 keeps gradients that are not to be reduced yet where nobody sees them: there only `zero_grad` tells.
        """
        if any(self.sites[i].sharded for i in self.active):
            return False
        grads = [s.param.grad for i in self.active for s in self.active[i]]
        if any(g is not None and g.any() for g in grads):
            return False
        pieces = [
            U for backward in self.backwards.values() for U in backward.pieces.values()
        ]
        return all(g is None for g in grads) or any(_gradients(U).any() for U in pieces)

    @property
    def total(self) -> int:
        """B, the step's sample count."""
        return sum(backward.samples for backward in self.backwards.values())

    def kappa(self, index: int) -> int:
        """Positions per sample of a site."""
        return max(
            (backward.kappa[index] for backward in self.backwards.values()), default=0
        )

    def numbers(self, index: int) -> int:
        """Numbers per sample that a site's captures refer to, where they wait as `Windows`."""
        return max(
            (backward.numbers[index] for backward in self.backwards.values()), default=0
        )

    def mismatch(self, index: int) -> str | None:
        """Why a site's dimension 0 cannot be the sample, in words; None where it can."""
        for backward in self.backwards.values():
            if index in backward.differing:
                first, second = backward.differing[index]
                return f"it was called with {first} and with {second} samples in one backward, which cannot be added up"
            count = backward.count_of.get(index)
            if count is not None and count != backward.samples:
                return differs(count, backward.samples)
        return None

    def count(self, index: int) -> int:
        """Samples of a site that `take` gives."""
        return sum(
            backward.pieces[index].samples
            for backward in self.backwards.values()
            if index in backward.pieces
        )

    def captured(self, index: int) -> bool:
        """Whether a backward reached the site."""
        return any(index in backward.pieces for backward in self.backwards.values())

    def take(self, index: int, scale: float) -> Operator:
        """U (n, ϱ) of a captured site with columns u_i/√ϱ; its pieces are let go, so that one U at a time is whole.

        Factors in bfloat16 stay so on a GPU, whose products of them are summed up in float32. The gradients carry `scale`.
        """
        pieces = [
            backward.pieces.pop(index)
            for backward in self.backwards.values()
            if index in backward.pieces
        ]
        return stacked(
            [_settled(piece, self.sites[index].dtype) for piece in pieces]
        ).scaled(self._scale(scale))


def _settled(U: Operator, dtype: torch.dtype) -> Operator:
    kept = (
        isinstance(U, Implicit | Windows)
        and U.G.dtype == torch.bfloat16
        and U.G.is_cuda
    )
    return U if kept else U.to(dtype)


def _gradients(U: Operator) -> Tensor:
    """The part of a captured U that is zero where the gradients of the outputs were."""
    return U.U if isinstance(U, Explicit) else U.G  # type: ignore[attr-defined]


def _positions(U: Operator) -> int:
    """κ of a captured U."""
    if isinstance(U, Lookup):
        return U.tokens.shape[1]
    return U.rank if isinstance(U, Implicit | Windows) else 1


@contextmanager
def _mode(module: nn.Module, training: bool) -> Iterator[None]:
    """The layer in the mode that its forward ran in, which BatchNorm's rule needs to know."""
    now, module.training = module.training, training
    try:
        yield
    finally:
        module.training = now


def added(U: Operator, V: Operator) -> Operator:
    """U + V, column by column: one layer used twice in a backward, or two that share a weight."""
    if isinstance(U, Lookup) and isinstance(V, Lookup):
        return Lookup(
            torch.cat([U.tokens, V.tokens], 1), torch.cat([U.G, V.G], 1), U.vocabulary
        )
    looked_up = isinstance(U, Lookup) or isinstance(V, Lookup)
    wide_enough = (
        looked_up and _positions(U) + _positions(V) >= U.shape[2]
    )  # one-hot columns would be larger than U itself
    if isinstance(U, Explicit) or isinstance(V, Explicit) or wide_enough:
        return Explicit(U.explicit().U + V.explicit().U, U.shape)
    P, R = (W.implicit() if isinstance(W, Lookup | Windows) else W for W in (U, V))
    assert isinstance(P, Implicit) and isinstance(R, Implicit)
    return Implicit(torch.cat([P.G, R.G], 3), torch.cat([P.A, R.A], 3))


def stacked(parts: Sequence[Operator]) -> Operator:
    """[U_1, U_2, …], sample after sample: micro-batches of one step."""
    if len(parts) == 1:
        return parts[0]
    if all(
        isinstance(U, Windows) and U.a.shape[1:] == parts[0].a.shape[1:]
        for U in parts  # type: ignore[attr-defined]
    ):
        return replace(
            parts[0],
            **{
                name: torch.cat([getattr(U, name) for U in parts])
                for name in ("G", "a")
            },
        )
    parts = [U.implicit() if isinstance(U, Windows) else U for U in parts]
    if all(isinstance(U, Implicit) for U in parts):
        return Implicit(
            *(
                _padded_cat([getattr(U, name) for U in parts], dim=3)
                for name in ("G", "A")
            )
        )
    if all(isinstance(U, Lookup) for U in parts):
        tokens, G = (
            _padded_cat([getattr(U, name) for U in parts], dim=1)
            for name in ("tokens", "G")
        )
        return Lookup(tokens, G, parts[0].shape[1])
    return Explicit(torch.cat([U.explicit().U for U in parts], 1), parts[0].shape)


def _padded_cat(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Concatenate along dimension 0; where the number of positions differs, empty ones are added."""
    width = max(t.shape[dim] for t in parts)
    padded = [
        t
        if t.shape[dim] == width
        else torch.cat(
            [t, t.new_zeros(*t.shape[:dim], width - t.shape[dim], *t.shape[dim + 1 :])],
            dim,
        )
        for t in parts
    ]
    return torch.cat(padded)
