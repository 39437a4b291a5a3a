"""What is known of each site from refresh to refresh: its block and what that was built over, or why it has none; and how
that goes into a checkpoint and comes back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from seng.layers.sites import Segment, Site
from seng.metrics import base
from seng.metrics.block import Block
from seng.metrics.curvature import Curvature
from seng.metrics.plan import NO_CURVATURE, Plan
from seng.tell.diagnostics import Refresh, describe
from seng.tell.spread_state import pack_block, unpack_block

Record = tuple[Plan | None, Refresh | None, int, Block]


class Ledger:
    """By the sites' numbers."""

    def __init__(self) -> None:
        self.blocks: dict[int, Block] = {}
        self.covered: dict[
            int, tuple[Segment, ...]
        ] = {}  # what each block was built over
        self.owed: set[int] = set()  # in use, and no curvature yet
        self.refused: dict[
            int, str
        ] = {}  # these take the plain gradient by decision, and why
        self.plans: dict[int, Plan] = {}
        self.failures: dict[int, int] = {}  # refreshes that had to be dropped
        self.refreshes: dict[int, Refresh] = {}  # the last one of each
        self.others: list[
            str
        ] = []  # whose loaded curvature is of another kind than is asked for
        self.checked: set[int] = (
            set()
        )  # whose samples were seen to add up to the gradient

    def knows(self, index: int) -> bool:
        """Whether it is settled what a site does."""
        return index in self.blocks or index in self.refused or index in self.owed

    def install(self, index: int, block: Block, active: tuple[Segment, ...]) -> None:
        """A new block, built over these segments."""
        if index in self.blocks:
            block.failures = self.blocks[index].failures  # which goes on counting
        self.blocks[index], self.covered[index] = block, active
        self.owed.discard(index)
        self.refused.pop(index, None)

    def refuse(self, index: int, why: str) -> None:
        """It takes the plain gradient from now on."""
        self.blocks.pop(index, None)
        self.refused[index] = why
        self.owed.discard(index)

    def fail(self, index: int) -> None:
        """A refresh of it was dropped."""
        self.failures[index] = self.failures.get(index, 0) + 1

    def before(
        self, index: int, site: Site, active: tuple[Segment, ...]
    ) -> Block | None:
        """Its block of before, if it is one of the same parameters in the same precision."""
        previous = self.blocks.get(index)
        alike = previous is not None and self.covered[index] == active
        return (
            previous
            if alike and previous is not None and previous.gram.dtype == site.dtype
            else None
        )

    def diagnostics(
        self, sites: Sequence[Site], none: bool
    ) -> dict[str, dict[str, Any]]:
        """Per layer, from its last refresh; `none` where there is no curvature at all."""
        out: dict[str, dict[str, Any]] = {}
        for index, site in enumerate(sites):
            chosen = self.plans.get(index)
            out[site.name] = describe(
                self.blocks.get(index), self.refreshes.get(index)
            ) | {
                "refreshes_dropped": self.failures.get(index, 0),
                "why": self.refused.get(index)
                or (NO_CURVATURE if none else chosen and chosen.why),
            }
        return out

    def entry(self, index: int, site: Site) -> dict[str, Any]:
        """A site's part of a checkpoint."""
        entry: dict[str, Any] = {
            name: torch.tensor(index in known, device="cpu")
            for name, known in (("owed", self.owed), ("refused", self.refused))
        }
        if index in self.blocks:
            active = [s in self.covered[index] for s in site.segments]
            entry["active"] = torch.tensor(active, device=site.lead.device)
            entry["block"] = pack_block(site, self.covered[index], self.blocks[index])
        return entry

    def load(
        self, index: int, site: Site, entry: Mapping[str, Any], curvature: Curvature
    ) -> None:
        """It again; a block that does not fit starts afresh at the next refresh."""
        if entry.get("owed", False):
            self.owed.add(index)
        if entry.get("refused", False):
            self.refused[index] = "as before the checkpoint"
        on = entry["active"].tolist() if "block" in entry else []
        active = tuple(s for s, used in zip(site.segments, on, strict=False) if used)
        if not active or len(on) != len(site.segments):
            return
        block = unpack_block(site, active, entry["block"])
        if block is not None:
            block.relative, block.graft = curvature.relative_damping, curvature.grafts
            mixed = (
                bool(block.U.samples) and curvature.rank == 0
            )  # U beside a P that is to be alone
            if base.kept(block.base, curvature.base, curvature.power) and not mixed:
                self.blocks[index], self.covered[index] = block, active
            else:
                self.others.append(site.name)

    def records(self, sites: Sequence[Site]) -> dict[nn.Parameter, Record]:
        """What a checkpoint leaves out, by lead parameter: for sites that are surveyed anew."""
        return {
            sites[i].lead: (
                self.plans.get(i),
                self.refreshes.get(i),
                self.failures.get(i, 0),
                block,
            )
            for i, block in self.blocks.items()
        }

    def restore(
        self, sites: Sequence[Site], records: Mapping[nn.Parameter, Record]
    ) -> int | None:
        """It again; the step of the last refresh among them."""
        for index, block in self.blocks.items():
            plan, refresh, failures, old = records[sites[index].lead]
            if plan is not None and refresh is not None:
                self.plans[index], self.refreshes[index], self.failures[index] = (
                    plan,
                    refresh,
                    failures,
                )
            block.sketch_error, block.core, block.failures = (
                old.sketch_error,
                old.core,
                old.failures,
            )
            if old.bound is not None:
                block.bind(old.bound)
        return max((refresh.step for refresh in self.refreshes.values()), default=None)
