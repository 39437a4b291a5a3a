"""The captures of one backward: what each site's layers saw, as one U per site.

Within one backward, captures of one site add up per sample: a layer used twice, tied weights.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from seng.layers.sites import differs
from seng.linalg.joined import added, stacked
from seng.linalg.operators import Operator


@dataclass
class Backward:
    """The captures of one backward; its dictionaries are by the site's number."""

    counts: Counter[int] = field(
        default_factory=Counter
    )  # samples -> calls with them
    count_of: dict[int, int] = field(
        default_factory=dict
    )  # samples of the first call
    mismatches: dict[int, str] = field(
        default_factory=dict
    )  # between two calls
    kappa: Counter[int] = field(
        default_factory=Counter
    )  # positions, over all calls
    positions: Counter[int] = field(
        default_factory=Counter
    )  # over all samples
    pieces: dict[int, Operator] = field(default_factory=dict)  # U, unscaled
    kept: int | None = (
        None  # samples that count, if that is not for a limit to say
    )

    @property
    def samples(self) -> int:
        """The sample count that most layers saw."""
        return self.counts.most_common(1)[0][0] if self.counts else 0

    def fits(self, index: int, count: int) -> bool:
        """Note a call with so many samples: whether it can be added to those before it."""
        self.counts[count] += 1
        first = self.count_of.setdefault(index, count)
        if first != count:
            self.mismatches[index] = (
                f"it was called with {first} and with {count} samples in one backward, which cannot be added up"
            )
        return first == count

    def add(self, index: int, U: Operator, per_sample: bool) -> None:
        """Add a call's columns to those of before, or put them beside them."""
        before = self.pieces.get(index)
        if before is not None:
            U = added(before, U) if per_sample else stacked([before, U])
        self.pieces[index] = U

    def mismatch(self, index: int) -> str | None:
        """Why a site's dimension 0 cannot be the sample, in words; None where it can."""
        count = self.count_of.get(index, self.samples)
        other = None if count == self.samples else differs(count, self.samples)
        return self.mismatches.get(index, other)

    def shorten(self, kept: int) -> None:
        """Keep the first so many samples."""
        self.kept = kept
        self.pieces = {
            index: U.first(kept) for index, U in self.pieces.items()
        }


@dataclass
class Forward:
    """A call of the module whose output was sent backward for the curvature alone."""

    count: int  # samples
    trained: bool  # the training loss went backward through it too; else an evaluation
    tasks: list[int] = field(default_factory=list)  # its backwards
