"""How the ranks that train one network share their curvature: chosen once, asked at every refresh.

    Local      one process
    Shared     one curvature on all ranks, from the samples of all of them
    Averaged   the paper's two ways: each rank has its own U_i, and what they make of g is averaged

        d = g − (1/𝓜) Σ_i U_i b_i,   b_i = (λI + U_iᵀU_i)⁻¹U_iᵀ ĝ     (eqs. sol-ls-1-dist, Dist-
                                                                      syn-2)

`block` has ĝ = g, so that the sum travels after the gradient. `lagged` has ĝ = g_{k−1}: the sum is
known before the backward and travels in the gradient's own messages; on refresh steps U_i is new,
and it travels by itself. With eq. 23 for U_i b_i the means of its two sides are taken, not of their
product.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from seng.distributed.team import (
    Team,
    bits,
    check_alike,
    check_weights,
    team_of,
)
from seng.layers.samples import Samples
from seng.layers.sites import Segment, Site, is_sharded

Tensors = dict[nn.Parameter, Tensor]
Sides = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class SiteCensus:
    """What the ranks have captured of a layer."""

    counts: list[int]  # samples on every rank
    samples: int  # on all of them
    kappa: int  # positions per sample, at most
    captured: bool  # whether any rank's backward reached it
    mismatch: str | None  # why dimension 0 of its input cannot be the sample

    @classmethod
    def of(
        cls, codes: Sequence[int], kappa: int, mismatch: str | None
    ) -> SiteCensus:
        """From every rank's `Look.code`."""
        if mismatch is None and -1 in codes:
            rank = codes.index(-1)
            mismatch = (
                f"on rank {rank} dimension 0 of its input is not the sample"
            )
        counts = [max(0, code - 1) for code in codes]
        return cls(counts, sum(counts), kappa, max(codes) > 0, mismatch)


@dataclass(frozen=True)
class Census:
    """What the ranks have captured for a refresh."""

    total: int  # B, of all ranks
    half: bool  # whether any of it is in half precision
    sites: list[SiteCensus]


def _check_census(steps: Sequence[int], dampings: Sequence[int]) -> None:
    if len(set(steps)) > 1:
        raise RuntimeError(
            f"the ranks refresh their curvature at different steps: {list(steps)}; each "
            "must take the same steps"
        )
    for rank, damping in enumerate(dampings):
        if damping != dampings[0]:
            raise RuntimeError(
                f"the dampings of rank {rank} are not those of rank 0 at step "
                f"{steps[0]}: all ranks need the same"
            )


class Local:
    """A process on its own; what several ranks do beyond that is in the subclasses."""

    averages = False  # whether directions are averaged at every step

    def __init__(self, team: Team, module: nn.Module) -> None:
        self.team = team
        self.met = False  # whether the ranks have compared their weights
        self.covered: dict[int, Covered] = {}  # alike on all ranks

    def meet(
        self,
        sites: Sequence[Site],
        account: dict[str, Any],
        own: dict[str, Any],
    ) -> list[dict[str, Any]]:
        """What each rank has of its `own`; refused where they train otherwise."""
        if not self.team.many:
            return [own]
        layers = []
        for site in sites:
            shapes = tuple(s.shape for s in site.segments)
            layers.append(f"{site.name} {shapes}")
        account = {"layers": layers, "strategy": self.team.strategy, **account}
        return check_alike(self.team, account, own)

    def census(
        self,
        samples: Samples,
        step: int,
        params: Sequence[nn.Parameter],
        dampings: Mapping[nn.Parameter, float],
    ) -> Census:
        """What each rank has captured; all must be at the same step and damping."""
        self.compare(params)
        # The hash of floats is the same in every process.
        lam = hash(tuple([dampings[p] for p in params])) % 2**62
        own = [step, lam, samples.total, int(bool(samples.half))]
        looks = [samples.look(i) for i in range(len(samples.sites))]
        for look in looks:
            own += look.code, look.kappa
        what = f"the refresh at step {step}"
        rows = self.team.gathered(own, samples.device, what)
        steps, lams, totals, halves, *rest = zip(*rows, strict=True)
        _check_census(steps, lams)
        sites = []
        for look, codes, kappas in zip(
            looks, rest[::2], rest[1::2], strict=True
        ):
            sites.append(SiteCensus.of(codes, max(kappas), look.mismatch))
        return Census(sum(totals), any(halves), sites)

    def compare(self, params: Sequence[nn.Parameter]) -> None:
        """The first time, refuse ranks that train different weights."""
        if (
            self.team.many
            and not self.met
            and not any(map(is_sharded, params))
        ):
            check_weights(self.team, params)
        self.met = True

    def loaded(self, state: Sequence[int], device: torch.device) -> bool:
        """Whether all ranks have loaded the same, so that they can go on from it."""
        rows = self.team.gathered(state, device, "comparing what was loaded")
        return all(row == rows[0] for row in rows)

    def know(self, covered: Mapping[int, Covered]) -> None:
        """Note layers that some rank has curvature of; told where `averages`."""
        self.covered |= covered

    def elsewhere(self, index: int) -> bool:
        """Whether some rank is known to have the curvature of a layer."""
        return index in self.covered

    def agree(
        self,
        states: dict[int, Any],
        refreshed: Sequence[int],
        sites: Sequence[Site],
    ) -> list[int]:
        """Make the refreshed states alike; the layers that are to be built anew."""
        return []

    def directions(self, grads: Tensors, plan: Any, stamp: Any) -> Tensors:
        """d for every gradient; asked for where `averages`."""
        raise NotImplementedError

    def ahead(self, plan: Any, stamp: Any) -> None:
        """After a step whose successor does not refresh; where `averages`."""


class Shared(Local):
    """One curvature for all."""

    def agree(
        self,
        states: dict[int, Any],
        refreshed: Sequence[int],
        sites: Sequence[Site],
    ) -> list[int]:
        """Should rounding have parted the ranks, the first one's holds."""
        if not self.team.many or not refreshed:
            return []
        kept, sums = [], []
        for i in refreshed:
            tensors = states[i].tensors()
            if sites[i].sharded:  # each rank has its own part of U
                own = {id(t) for t in states[i].U.tensors()}
                tensors = [t for t in tensors if id(t) not in own]
            kept.append(tensors)
            sums.append(torch.stack([bits(t) for t in tensors]).sum())
        device = sites[0].lead.device
        widths = torch.tensor(
            [states[i].columns for i in refreshed], device=device
        )
        both = torch.cat([widths, torch.stack(sums)])
        rows = self.team.gathered(both, device, "comparing bases")
        parted = [len(set(column)) > 1 for column in zip(*rows, strict=True)]
        anew, count = [], len(refreshed)
        for place, i in enumerate(refreshed):
            if parted[
                place
            ]:  # rounding has left them with other numbers of columns
                anew.append(i)
            elif parted[count + place]:
                self.team.from_first(kept[place], "sharing a basis")
        return anew


@dataclass(frozen=True)
class Covered:
    """A layer that some rank has curvature of."""

    site: Site
    active: tuple[Segment, ...]
    rank: int | None  # of the sides that are averaged, where eq. 23 is used


class Averaged(Local):
    """Directions of `block` and `lagged`."""

    averages = True

    def __init__(self, team: Team, module: nn.Module) -> None:
        super().__init__(team, module)
        self.message = Message()
        self.before: Tensors = {}  # the gradients of the last step
        self.stamp: Any = None  # under which the message was worked out
        self.hooked = False
        ddp = nn.parallel.DistributedDataParallel
        if self.lagged and team.many and isinstance(module, ddp):
            with suppress(
                RuntimeError
            ):  # there is a hook already: sums travel alone
                module.register_comm_hook((team, weakref.ref(self)), _along)
                self.hooked = True

    @property
    def lagged(self) -> bool:
        return self.team.strategy == "lagged"

    def loaded(self, state: Sequence[int], device: torch.device) -> bool:
        """Never: nobody knows which layers the others have curvature of."""
        self.covered, self.before, self.message = {}, {}, Message()
        super().loaded(state, device)
        return False

    def agree(
        self,
        states: dict[int, Any],
        refreshed: Sequence[int],
        sites: Sequence[Site],
    ) -> list[int]:
        """Relative dampings refer to the ranks' mean of the largest eigenvalue."""
        if not self.covered:
            return []
        found = [states.get(i) for i in sorted(self.covered)]
        tops = sites[0].lead.new_zeros(len(found), dtype=torch.float64)
        for top, state in zip(tops, found, strict=True):
            if state is not None:
                top.copy_(state.top)
        self.team.mean_([tops], "agreeing on λ")
        for top, state in zip(tops, found, strict=True):
            if state is not None:
                state.top.copy_(top)
        return []

    def directions(self, grads: Tensors, plan: Any, stamp: Any) -> Tensors:
        """What came along with the gradients holds while the stamp is the same."""
        message, self.message = self.message, Message()
        if message.arrived and self.stamp == stamp:
            mean = message.received
        else:
            lag = self.before if self.lagged else {}
            mean = self._mean(
                {p: lag.get(p, g) for p, g in grads.items()}, plan
            )
        if self.lagged:
            self.before = {p: g.clone() for p, g in grads.items()}
        return {p: g - mean[p] if p in mean else g for p, g in grads.items()}

    def ahead(self, plan: Any, stamp: Any) -> None:
        """What can be sent along with the next gradients."""
        self.stamp = stamp
        one_sided = all(c.rank is None for c in self.covered.values())
        if self.hooked and self.before and one_sided:
            self.message = Message(self._corrections(self.before, plan)[0])

    def _mean(self, base: Tensors, plan: Any) -> Tensors:
        """(1/𝓜) Σ_i U_i b_i by parameter."""
        out, sides = self._corrections(base, plan)
        both = chain(*sides.values())
        self.team.mean_([*out.values(), *both], "averaging directions")
        for index, (G, A) in sides.items():
            covered = self.covered[index]
            parts = covered.site.scatter(covered.active, (G @ A.mT).flatten())
            out |= {
                p: part.to(p.dtype) for p, part in parts.items() if p in base
            }
        return out

    def _corrections(
        self, base: Tensors, plan: Any
    ) -> tuple[Tensors, dict[int, Sides]]:
        """This rank's U_i b_i by parameter, or by layer the two sides of eq. 23."""
        solved: Tensors = plan.directions(base)
        out: Tensors = {}
        sides: dict[int, Sides] = {}
        for index, covered in sorted(self.covered.items()):
            if covered.rank is not None:
                sides[index] = _sides(
                    covered, covered.rank, plan.solver(index), base
                )
                continue
            params = [s.param for s in covered.active]
            out |= {p: base[p] - solved[p] for p in params if p in base}
        return out, sides


def _sides(covered: Covered, rank: int, solver: Any, base: Tensors) -> Sides:
    """Gᶜ and Aᶜ of C_U(b), zero where this rank has no curvature of the layer."""
    site, active, dtype = covered.site, covered.active, covered.site.dtype
    if solver is None:
        h, n_G, n_A = site.shape(active)
        G = site.lead.new_zeros(h, n_G, rank, dtype=dtype)
        return G, G.new_zeros(h, n_A, rank)
    g = site.gather(active, base, dtype)
    b, _ = solver.coefficients(solver.project(g))
    G, A = solver.U.sides(b.to(dtype))
    missing = 0, rank - G.shape[-1]
    return F.pad(G, missing), F.pad(A, missing)


class Message:
    """A rank's corrections, sent along with the gradients, and their mean."""

    def __init__(self, sent: Tensors | None = None) -> None:
        self.sent = sent or {}
        self.received: Tensors = {}

    @property
    def arrived(self) -> bool:
        return bool(self.sent) and self.received.keys() == self.sent.keys()


def _along(state, bucket):  # type: ignore[no-untyped-def]  # torch reads annotations
    """DDP's own mean of a bucket, with ours behind it while the optimizer lives."""
    team, strategy = state
    averaged = strategy()
    return _sent(
        team, Message() if averaged is None else averaged.message, bucket
    )


def _sent(team: Team, message: Message, bucket: Any) -> Any:
    """Send a bucket of gradients and the message's corrections of its parameters."""
    grads: Tensor = bucket.buffer()
    sent, received = message.sent, message.received
    extra = {p: sent[p] for p in bucket.parameters() if p in sent}
    rows = [t.reshape(-1).to(grads.dtype) for t in extra.values()]
    both = torch.cat([grads, *rows]) if extra else grads
    both.div_(team.size)
    reduced = dist.all_reduce(
        both, group=team.group, async_op=True
    ).get_future()

    # gloo's thread may hold on to this a little longer than the backward takes. It must not hold
    # the
    # strategy: an optimizer that is gone on one rank would still be there on another, whose message
    # would be twice as long.
    def arrived(done: Any) -> Tensor:
        whole: Tensor = done.value()[0]
        if not extra:
            return whole
        mean, *parts = whole.split([grads.numel(), *[t.numel() for t in rows]])
        for (p, t), part in zip(extra.items(), parts, strict=True):
            received[p] = part.view_as(t).to(t.dtype)
        return grads.copy_(mean)

    return reduced.then(arrived)


def strategy_of(strategy: str | None, module: nn.Module) -> Local:
    """The strategy of a module's ranks."""
    team = team_of(strategy, module)
    kind = Averaged if team.averages else Shared if team.pools else Local
    return kind(team, module)
