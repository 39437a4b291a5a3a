"""What the ranks that train one network do together at a refresh: meet, count what each has captured, and agree on the outcome.

A process on its own goes through the same steps and finds itself in agreement.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from seng.distributed.averaging import Averaging, Covered
from seng.distributed.pool import Share, empty, pooled
from seng.distributed.sharded import is_sharded
from seng.distributed.team import (
    Census,
    bits,
    census,
    check_alike,
    check_weights,
    team_of,
)
from seng.layers.samples import Samples
from seng.layers.sites import Site
from seng.linalg.operators import Merged, Operator
from seng.metrics.block import Block
from seng.metrics.curvature import BASE_RANK, Curvature
from seng.metrics.plan import Plan, plan, site_dims


def usual(module: nn.Module | None, strategy: str | None = None) -> Curvature:
    """What is kept where nothing is asked for: P alone, the best robust setting found (docs/race.md, docs/tuning.md).

    Low rank over λI where there are no whole layers, or no one curvature for all ranks, to make P from.
    """
    spread = module is not None and any(is_sharded(p) for p in module.parameters())
    if spread or team_of(strategy, module).averages:
        return Curvature()
    return Curvature(base="kronecker", rank=0, base_rank=BASE_RANK)


class Ranks:
    """The team, and how it solves."""

    def __init__(
        self, strategy: str | None, module: nn.Module, curvature: Curvature
    ) -> None:
        self.team, self.curvature = team_of(strategy, module), curvature
        self.averaging = Averaging(self.team, module) if self.team.averages else None
        self.met = False  # whether they have compared their weights
        if self.team.pools and (
            curvature.form == "implicit" or curvature.combine == "independent"
        ):
            asked = (
                "combine='independent'"
                if curvature.combine == "independent"
                else "form='implicit'"
            )
            raise ValueError(
                f"Curvature({asked}) keeps each sample's factors, and ranks that share their curvature keep one basis: "
                "leave it out, or use strategy='block', where each rank has its own"
            )

    def meet(
        self,
        sites: Sequence[Site],
        settings: dict[str, Any],
        seed: int,
        budget: int | None,
    ) -> tuple[int, int | None]:
        """Refuse ranks that train another network, or otherwise; the first one's seed, and the smallest of their budgets."""
        if not self.team.many:
            return seed, budget
        layers = [
            f"{site.name} {tuple(tuple(s.shape) for s in site.segments)}"
            for site in sites
        ]
        account = {
            "layers": layers,
            "curvature": repr(self.curvature),
            "strategy": self.team.strategy,
            **settings,
        }
        accounts = check_alike(self.team, account, {"seed": seed, "budget": budget})
        budgets = [other["budget"] for other in accounts if other["budget"] is not None]
        return accounts[0]["seed"], min(budgets, default=None)

    def census(
        self,
        samples: Samples,
        step: int,
        params: Sequence[nn.Parameter],
        dampings: Mapping[nn.Parameter, float],
    ) -> Census:
        """What each of them has captured. At the first time, whether they train the same weights."""
        self.compare(params)
        sites = range(len(samples.sites))
        counts = [
            -1
            if samples.mismatch(i) is not None
            else samples.captured(i) + samples.count(i)
            for i in sites
        ]
        kappas = [samples.kappa(i) for i in sites]
        device = samples.sites[0].lead.device
        lam = (
            hash(tuple(dampings[p] for p in params)) % 2**62
        )  # of floats it is the same in every process
        return census(
            self.team,
            step,
            lam,
            samples.total,
            bool(samples.half),
            counts,
            kappas,
            device,
        )

    def compare(self, params: Sequence[nn.Parameter]) -> None:
        """At the first time, refuse ranks that train different weights."""
        if self.team.many and not self.met and not any(map(is_sharded, params)):
            check_weights(self.team, params)
        self.met = True

    def know(self, found: Sequence[int], sites: Sequence[Site], seen: Census) -> None:
        """Which sites some rank has a block of, for directions that are averaged."""
        if self.averaging is not None:
            self.averaging.covered |= {
                i: self._covered(sites[i], seen.kappa(i), max(seen.of(i)))
                for i in found
            }

    def _covered(self, site: Site, kappa: int, samples: int) -> Covered:
        (chosen,) = plan([site_dims(site, kappa, samples)], self.curvature)
        sides = chosen.form == "implicit" and self.curvature.combine == "independent"
        return Covered(site, site.active(), min(chosen.rank, kappa) if sides else None)

    def elsewhere(self, index: int) -> bool:
        """Whether some rank has a block of a site, so that one without samples of it need not ask for any."""
        return self.averaging is not None and index in self.averaging.covered

    def pool(
        self,
        plans: Mapping[int, Plan],
        samples: Samples,
        seen: Census,
        scale: float,
        generator: Callable[[int], Callable[[], torch.Generator]],
        whiten: Callable[[int, Operator], Operator],
    ) -> dict[int, Operator]:
        """One U per site from the samples of all ranks, the same on each, or spread over them as the parameters are."""
        shares: dict[int, Share] = {}
        for index, chosen in plans.items():
            site = samples.sites[index]
            active = samples.active.setdefault(index, site.active())
            have = samples.captured(index)
            U = (
                samples.take(index, scale)
                if have
                else empty(site.shape(active), site.dtype, site.lead.device)
            )
            U = whiten(index, U)
            if chosen.rank:
                shares[index] = Share(U, seen.of(index), chosen.rank, generator(index))
        out: dict[int, Operator] = {}
        if not shares:
            return out
        bases = pooled(
            self.team, list(shares.values()), self.curvature.sketch, seen.half
        )
        for index, Y in zip(shares, bases, strict=True):
            site, active = samples.sites[index], samples.active[index]
            Y = Y.to(site.dtype)
            out[index] = (
                site.spread(active, Y)
                if site.sharded
                else Merged.of(Y, site.shape(active))
            )
        return out

    def loaded(self, state: Sequence[int], device: torch.device) -> bool:
        """After all of them have loaded a state: whether they can go on from it, which is not so where theirs differ.

        Nor where each has a curvature of its own: nobody knows then which sites the others have.
        """
        if self.averaging is not None:
            self.averaging.forget()
        rows = self.team.gathered(state, device, "comparing what was loaded")
        return self.averaging is None and all(row == rows[0] for row in rows)

    def agree(
        self, blocks: dict[int, Block], refreshed: Sequence[int], sites: Sequence[Site]
    ) -> None:
        """One λ for all; and where they share a basis the same one: should rounding have parted them, the first rank's."""
        if not self.team.many:
            return
        if self.averaging is not None:
            self._agree_on_damping(
                [blocks.get(i) for i in sorted(self.averaging.covered)], sites[0].lead
            )
            return
        if not refreshed:
            return
        tensors = {i: [blocks[i].gram, blocks[i].top] for i in refreshed}
        for i in refreshed:
            tensors[i] += [] if (base := blocks[i].base) is None else base.tensors()
            tensors[i] += [] if sites[i].sharded else blocks[i].U.tensors()
        device = sites[0].lead.device
        sums = torch.stack(
            [torch.stack([bits(t) for t in tensors[i]]).sum() for i in refreshed]
        )
        widths = torch.tensor([blocks[i].U.samples for i in refreshed], device=device)
        rows = self.team.gathered(torch.cat([widths, sums]), device, "comparing bases")
        for place, i in enumerate(refreshed):
            if (
                len({row[place] for row in rows}) > 1
            ):  # rounding cut them off at different places: to be built anew
                del blocks[i]
            elif len({row[len(refreshed) + place] for row in rows}) > 1:
                self.team.from_first(tensors[i], "sharing a basis")

    def _agree_on_damping(self, blocks: Sequence[Block | None], like: Tensor) -> None:
        """A damping that is relative to the largest eigenvalue is so to the mean of the ranks'."""
        if not blocks:
            return
        tops = torch.stack(
            [
                like.new_zeros((), dtype=torch.float64) if b is None else b.top.double()
                for b in blocks
            ]
        )
        self.team.mean_([tops], "agreeing on λ")
        for block, top in zip(blocks, tops, strict=True):
            if block is not None:
                block.top.copy_(top)
