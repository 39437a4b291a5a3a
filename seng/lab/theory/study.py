"""What a study is: a question that a few minutes on two cores answer, with a verdict for each claim and one picture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Say = Callable[[str], None]  # progress, a line at a time


@dataclass(frozen=True)
class Claim:
    """One thing that the theory says, and whether it was seen."""

    words: str  # the claim, with its place in the paper
    measured: str  # what was found, with numbers
    holds: bool


@dataclass(frozen=True)
class Outcome:
    """What a study found."""

    claims: tuple[Claim, ...]
    numbers: dict[
        str, Any
    ]  # everything that the picture and the claims are made of: plain lists and numbers, for JSON
    draw: Callable[[Any], None]  # onto an empty matplotlib Figure
    remarks: tuple[str, ...] = field(
        default=()
    )  # what a reader must know beside it


@dataclass(frozen=True)
class Study:
    """One of them."""

    name: str  # a word for the command line
    title: str  # the question
    run: Callable[
        [Say, bool], Outcome
    ]  # (progress, quick): quick is seconds, for a test; the same claims, looser
    size: tuple[float, float] = (9.0, 3.6)  # of the picture, inches
