"""What a search found, in results/<task>/tuned.json for `seng compare`: each study when all of its trials are there."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from seng.lab.tuning.search import at_the_edge
from seng.lab.tuning.study import Campaign, best, counted


def entry(campaign: Campaign) -> dict[str, Any] | None:
    """What a complete study found, for tuned.json; None where no trial came to its end."""
    top, plan = best(campaign.study), campaign.plan
    if top is None:
        return None
    return {
        "recipe": {**plan.lengths, **plan.given, **top.params},
        "trials": len(counted(campaign.trials())),
        "study": plan.name,
        "value": top.value,
        "epochs": plan.budget,
        "batch": plan.size,
        "sampler": plan.sampler,
        "at_the_edge": at_the_edge(top.params, top.distributions),
    }


def write(path: Path, entries: dict[str, dict[str, Any]]) -> None:
    """Put entries into tuned.json beside those that are there, the whole file or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _alone(path.parent):
        known = json.loads(path.read_text()) if path.exists() else {}
        if all(known.get(key) == value for key, value in entries.items()):
            return
        half = path.with_name(f"{path.name}.{os.getpid()}.half")
        try:
            with half.open("w") as file:
                file.write(json.dumps({**known, **entries}, indent=1) + "\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(half, path)
        finally:
            half.unlink(missing_ok=True)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One at a time; where the system has no such locks, commands that end in the same moment may miss each other."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    held = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield
    finally:
        os.close(held)
