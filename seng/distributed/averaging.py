"""The paper's two ways of solving with many ranks: each has its own U_i, and what they make of g is averaged.

    d = g − (1/𝓜) Σ_i U_i b_i,   b_i = (λI + U_iᵀU_i)⁻¹U_iᵀ ĝ            (eqs. inversion-dist, sol-ls-1-dist and Dist-syn-2)

`block` has ĝ = g, so that the sum travels after the gradient; `lagged` has ĝ = g_{k−1}, so that it is known before the
backward and travels in the gradient's own messages. On refresh steps U_i is new and the sum travels by itself. With eq. 23 for
U_i b_i, two sides are averaged in place of their product: (1/𝓜 Σ_i Gᶜ_i)(1/𝓜 Σ_i Aᶜ_i)ᵀ.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from seng.distributed.team import Team
from seng.layers.sites import Segment, Site
from seng.linalg.implicit import Independent
from seng.metrics.block import Block
from seng.metrics.solver import Gradients, Ready

Tensors = dict[nn.Parameter, Tensor]


@dataclass(frozen=True)
class Covered:
    """A site that some rank has a block of."""

    site: Site
    active: tuple[Segment, ...]
    rank: int | None  # r of the sides that are averaged, where eq. 23 is used


@dataclass
class Averaging:
    """Directions of `block` and `lagged`."""

    team: Team
    module: nn.Module
    covered: dict[int, Covered] = field(default_factory=dict)  # alike on all ranks
    before: Tensors = field(default_factory=dict)  # the gradients of the last step
    local: Tensors = field(
        default_factory=dict
    )  # this rank's U_i b_i, to be sent along with the coming gradients
    received: Tensors = field(
        default_factory=dict
    )  # and their mean, once it has arrived
    stamp: Any = None  # under which dampings and curvature `local` was worked out

    def __post_init__(self) -> None:
        self.hooked = False
        if (
            self.lagged
            and self.team.many
            and isinstance(self.module, nn.parallel.DistributedDataParallel)
        ):
            try:
                self.module.register_comm_hook((self.team, weakref.ref(self)), _along)
                self.hooked = True
            except RuntimeError:  # there is one already: then the sum travels by itself
                pass

    @property
    def lagged(self) -> bool:
        return self.team.strategy == "lagged"

    def forget(self) -> None:
        """What belongs to steps that are no more."""
        self.covered, self.before, self.local, self.received = {}, {}, {}, {}

    def directions(
        self, grads: Gradients, ready: Ready, blocks: Mapping[int, Block], stamp: Any
    ) -> Tensors:
        """d for every gradient; what came along with them holds where the stamp, alike on all ranks, is still the same."""
        arrived = (
            bool(self.local)
            and self.received.keys() == self.local.keys()
            and self.stamp == stamp
        )
        mean = (
            self.received if arrived else self._mean(self._base(grads), ready, blocks)
        )
        self.local, self.received = {}, {}
        if self.lagged:
            self.before = {p: g.clone() for p, g in grads.items()}
        return {p: g - mean[p] if p in mean else g for p, g in grads.items()}

    def ahead(self, ready: Ready, blocks: Mapping[int, Block], stamp: Any) -> None:
        """After a step whose successor does not refresh: what can be sent along with its gradients."""
        self.stamp = stamp
        if (
            self.hooked
            and self.before
            and all(c.rank is None for c in self.covered.values())
        ):
            self.local = self._corrections(self.before, ready, blocks)[0]

    def _base(self, grads: Gradients) -> Tensors:
        """ĝ."""
        return {
            p: self.before.get(p, g) if self.lagged else g for p, g in grads.items()
        }

    def _mean(
        self, base: Tensors, ready: Ready, blocks: Mapping[int, Block]
    ) -> Tensors:
        out, sides = self._corrections(base, ready, blocks)
        self.team.mean_(
            [*out.values(), *(x for pair in sides.values() for x in pair)],
            "averaging directions",
        )
        for index, (G, A) in sides.items():
            covered = self.covered[index]
            parts = covered.site.scatter(covered.active, (G @ A.mT).flatten())
            out |= {p: part.to(p.dtype) for p, part in parts.items() if p in base}
        return out

    def _corrections(
        self, base: Tensors, ready: Ready, blocks: Mapping[int, Block]
    ) -> tuple[Tensors, dict[int, tuple[Tensor, Tensor]]]:
        """This rank's U_i b_i by parameter, and where eq. 23 is used its two sides by site; zero where it has no block."""
        solved, solves = ready.directions(base), ready.solve_of
        out: Tensors = {}
        sides: dict[int, tuple[Tensor, Tensor]] = {}
        for index, covered in sorted(self.covered.items()):
            solve = solves.get(id(blocks[index])) if index in blocks else None
            if covered.rank is None:
                out |= {
                    s.param: base[s.param] - solved[s.param]
                    for s in covered.active
                    if s.param in base
                }
                continue
            h, n_G, n_A = covered.site.shape(covered.active)
            like, dtype = covered.site.lead, covered.site.dtype
            if solve is None:
                sides[index] = tuple(
                    like.new_zeros(h, n, covered.rank, dtype=dtype) for n in (n_G, n_A)
                )  # type: ignore[assignment]
                continue
            U = solve.block.U
            assert isinstance(U, Independent)
            g = covered.site.gather(covered.active, base, dtype)
            b = solve.inverse @ solve.block.Xi.rmv(solve.block.omega(g)).to(
                solve.inverse.dtype
            )
            b = torch.where(b.isfinite().all(), b, 0).to(dtype)
            sides[index] = tuple(
                F.pad(x, (0, covered.rank - x.shape[-1])) for x in U.sides(b)
            )  # type: ignore[assignment]
        return out, sides


def _along(state, bucket):  # type: ignore[no-untyped-def]  # torch looks at annotations, and does not read them as text
    """DistributedDataParallel's own mean of a bucket of gradients, with ours behind it for as long as the optimizer lives."""
    team, averaging = state
    return _sent(team, averaging(), bucket)


def _sent(
    team: Team, averaging: Averaging | None, bucket: Any
) -> torch.futures.Future[Tensor]:
    grads: Tensor = bucket.buffer()
    local, received = (
        ({}, {}) if averaging is None else (averaging.local, averaging.received)
    )
    extra = [(p, local[p]) for p in bucket.parameters() if p in local]
    both = (
        torch.cat([grads, *(t.reshape(-1).to(grads.dtype) for _, t in extra)])
        if extra
        else grads
    )
    both.div_(team.size)
    sent = dist.all_reduce(both, group=team.group, async_op=True).get_future()

    # gloo's thread may hold on to this a little longer than the backward takes. It must not hold the averaging: an optimizer
    # that is gone on one rank would then still be there on another, whose message would be twice as long.
    def arrived(done: torch.futures.Future[list[Tensor]]) -> Tensor:
        whole = done.value()[0]
        if not extra:
            return whole
        parts = whole[grads.numel() :].split([t.numel() for _, t in extra])
        received.update(
            {
                p: part.view_as(t).to(t.dtype)
                for (p, t), part in zip(extra, parts, strict=True)
            }
        )
        grads.copy_(whole[: grads.numel()])
        return grads

    out: torch.futures.Future[Tensor] = sent.then(arrived)
    return out
