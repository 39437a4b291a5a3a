"""Checkpoints that are whole or not there: written beside the last one, flushed to the disk, and only then put in its place.

Rank 0 writes and reads, and all ranks go on from what it read: no other needs the file.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from seng.lab.ranks import ALONE, SHARED, Ranks


class Checkpoint:
    """One file that is written anew every so many seconds."""

    def __init__(
        self, path: Path, seconds: float = 60.0, ranks: Ranks = ALONE
    ) -> None:
        self.path, self.seconds, self.ranks = path, seconds, ranks
        self.last = monotonic()

    def save(self, state: Callable[[], dict[str, Any]]) -> bool:
        """Write what `state` gives, if it is time; whether it did. A disk that is full keeps the last one and warns."""
        if not self.ranks.first_has(
            lambda: monotonic() - self.last >= self.seconds
        ):
            return False
        whole = state()  # on all ranks, as an optimizer may gather its state
        if not self.ranks.first:
            return False
        half = self.path.with_name(f"{self.path.name}.{os.getpid()}.half")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with half.open("wb") as file:
                torch.save(whole, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(half, self.path)
        except (
            OSError,
            RuntimeError,
        ) as why:  # torch reports a full disk as either
            kept = (
                "the one before stays"
                if self.path.exists()
                else "there is none yet"
            )
            warnings.warn(
                f"seng: the checkpoint {self.path} could not be written ({why}); {kept}",
                stacklevel=2,
            )
            return False
        finally:
            half.unlink(missing_ok=True)
            self.last = monotonic()
        return True

    def load(self, head: dict[str, Any]) -> dict[str, Any] | None:
        """What was saved, if anything; refused where it belongs to another run."""
        there = self.ranks.all_have(self.path.exists())
        if any(there) and not there[0]:
            raise ValueError(
                f"rank {there.index(True)} has the checkpoint {self.path}, and rank 0 has not: {SHARED}"
            )
        return self.ranks.first_has(lambda: self._read(head))

    def _read(self, head: dict[str, Any]) -> dict[str, Any] | None:
        if not self.path.exists():
            return None
        try:
            saved: dict[str, Any] = torch.load(
                self.path, map_location="cpu", weights_only=True
            )
        except Exception as why:
            raise ValueError(
                f"the checkpoint {self.path} cannot be read ({why}): remove it to begin anew"
            ) from why
        differs = [key for key in head if saved["head"].get(key) != head[key]]
        if differs:
            raise ValueError(
                f"the checkpoint {self.path} is of a run with another {' and '.join(differs)}: "
                "finish that run, give this one a --label, or remove the file"
            )
        return saved

    def remove(self) -> None:
        """The run is over."""
        if self.ranks.first:
            self.path.unlink(missing_ok=True)
