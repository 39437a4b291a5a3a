"""A look inside an optimizer, for tests and studies: `inspect(opt)` shows where it stands, and each
layer's plan, state and solver.
"""

from __future__ import annotations

from copy import copy
from types import SimpleNamespace
from typing import Any


def inspect(optimizer: Any) -> SimpleNamespace:
    """Of a SENG, a KFAC or the handle of `attach`."""
    engine = optimizer.engine
    clock = engine.clock
    collector = engine.collector
    records = engine.records
    states = {i: r.state for i, r in enumerate(records) if r.state is not None}
    return SimpleNamespace(
        layers=[copy(record) for record in records],  # a LayerRecord each
        sites=[record.site for record in records],
        states=states,  # of the layers that have curvature, by their place
        metric=engine.metric,
        steps=clock.steps,
        refreshes=clock.renewals,
        missed=clock.missed,  # whether the last refresh found no samples
        waiting=len(
            collector.samples.backwards
        ),  # captured backwards, before a step
        armed=collector.armed,  # whether the next one is captured
        uncovered=engine.uncovered,
        budget=engine.budget,  # bytes that the curvature may occupy
    )
