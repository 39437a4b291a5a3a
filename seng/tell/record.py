"""What is known of a layer from refresh to refresh, and how that goes into a checkpoint and back.

A basis that is spread over ranks is one DTensor per parameter, so that torch.distributed.checkpoint
can spread it over any other number of them. A whole basis loads where parameters are spread, and
the other way round.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from seng.distributed.sharded import from_parts, parts_of, spread_basis
from seng.gpu.recorder import settle
from seng.layers.dtensors import whole
from seng.layers.sites import Segment, Site
from seng.linalg.operators import Merged
from seng.metrics.metric import Metric, State
from seng.metrics.plan import Plan
from seng.tell.diagnostics import Refresh, describe
from seng.tell.state import pack, unpack

PARTS = "parts"
NO_CURVATURE = "form='plain': no curvature"


@dataclass
class LayerRecord:
    """One layer: its state and what that was built over, or why it has none."""

    state: Any = None
    active: tuple[Segment, ...] = ()  # what the state was built over
    plan: Plan | None = None
    refused: str | None = None  # why it takes the plain gradient by decision
    owed: bool = False  # in use, and no curvature yet
    refresh: Refresh | None = None  # the last one
    checked: bool = (
        False  # whether its samples were seen to add up to the gradient
    )
    dropped: int = 0  # refreshes that were not finite
    failed: int = 0  # solves that fell back to the plain gradient
    counted: int = 0  # of those, what the present state has counted
    solver: Any = None
    solved: Any = None  # the state and the damping that the solver is for
    other: bool = False  # whether what was loaded is of another kind

    @property
    def settled(self) -> bool:
        """Whether it is known what the layer does."""
        return self.state is not None or self.refused is not None or self.owed

    def install(
        self, state: State, active: tuple[Segment, ...], on_gpu: bool
    ) -> None:
        """A new state; on a GPU at the old one's place, where recordings read."""
        old = self.state
        if on_gpu and self.active == active:
            self.state = None  # interrupted, it leaves nothing half-written
            state = settle(old, state)
        if state is not old:  # a solver of before has tensors of its own
            self.solver = None
        self.state, self.active = state, active
        self.counted, self.owed, self.refused = 0, False, None
        self.solved = None

    def refuse(self, why: str) -> None:
        """It takes the plain gradient from now on."""
        self.state, self.refused, self.owed = None, why, False

    def previous(
        self, active: tuple[Segment, ...], dtype: torch.dtype
    ) -> State | None:
        """The state of before, if it is one of the same parameters and precision."""
        if self.state is None or self.active != active:
            return None
        known: State = self.state
        return known if known.dtype in (dtype, None) else None

    def restore(self, old: LayerRecord | None) -> None:
        """What a checkpoint leaves out, after the layers were surveyed anew."""
        if old is None or self.state is None:
            return
        self.plan, self.refresh, self.dropped = (
            old.plan,
            old.refresh,
            old.dropped,
        )
        self.state, self.solver, self.solved = (
            old.state,
            old.solver,
            old.solved,
        )
        self.failed, self.counted = old.failed, old.counted

    def describe(self, captures: bool) -> dict[str, Any]:
        """For `diagnostics()`."""
        damping = None if self.solved is None else self.solved[1]
        planned = None if self.plan is None else self.plan.why
        why = self.refused or (planned if captures else NO_CURVATURE)
        failed = self.failed - self.counted
        found = describe(self.state, damping, self.refresh, failed)
        return found | {"refreshes_dropped": self.dropped, "why": why}


def save_record(record: LayerRecord, site: Site) -> dict[str, Any]:
    """A layer's part of a checkpoint."""
    entry: dict[str, Any] = {
        "owed": torch.tensor(record.owed, device="cpu"),
        "refused": torch.tensor(record.refused is not None, device="cpu"),
    }
    if record.state is None:
        return entry
    device = site.lead.device
    active = [s in record.active for s in site.segments]
    entry["active"] = torch.tensor(active, device=device)
    state = record.state
    if site.sharded:
        params = [s.param for s in record.active]
        parts = parts_of(state.U, params)
        entry[PARTS] = {str(i): part for i, part in enumerate(parts)}
        state = replace(state, U=Merged.of(state.U.Y[:0, :0], (1, 1, 0)))
    return entry | pack("state", state, device)


def load_record(
    record: LayerRecord, site: Site, entry: Mapping[str, Any], metric: Metric
) -> None:
    """Restore it; a state that does not fit starts afresh at the next refresh."""
    record.owed = bool(entry.get("owed", False))
    if entry.get("refused", False):
        record.refused = "as before the checkpoint"
    on = entry["active"].tolist() if "active" in entry else []
    active = tuple(
        s for s, used in zip(site.segments, on, strict=False) if used
    )
    if not active or len(on) != len(site.segments):
        return
    state = unpack("state", entry, site.lead.device, site.dtype)
    if state is None:  # of a type that this process does not know
        record.other = True
        return
    state = _placed(state, site, active, entry.get(PARTS))
    shape = site.shape(active)
    if state is None or not state.fits(shape):
        return
    state = metric.accepts(state, shape)
    if state is None:
        record.other = True
    else:
        record.state, record.active = state, active


def _placed(
    state: Any, site: Site, active: tuple[Segment, ...], parts: Any
) -> Any | None:
    """The state with U whole or spread as the parameters are now."""
    params = [s.param for s in active]
    if parts is None:
        if site.sharded and state.columns:
            U = spread_basis(site, active, state.U.explicit().U.T)
            return replace(state, U=U)
        return state
    bases = [parts[str(i)] for i in range(len(parts))]
    if [part.shape[:-1] for part in bases] != [p.shape for p in params]:
        return None
    if site.sharded:
        return replace(state, U=from_parts(bases, params, site.dtype))
    device = site.lead.device
    columns = zip(
        *(whole(part).to(device).unbind(-1) for part in bases), strict=True
    )
    rows = []
    for one in columns:
        tensors = dict(zip(params, one, strict=True))
        rows.append(site.gather(active, tensors, site.dtype))
    return replace(state, U=Merged.of(torch.stack(rows), site.shape(active)))
