"""Options that are refused, each with what was given, what was expected and what to do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from seng.metrics.curvature import Curvature


def check_options(curvature: Curvature, refresh_every: int, units: str) -> None:
    """The options that `SENG` and `attach` share."""
    if not isinstance(curvature, Curvature):
        raise TypeError(f"curvature is a seng.Curvature, not {curvature!r}")
    if (
        not isinstance(refresh_every, int)
        or isinstance(refresh_every, bool)
        or refresh_every < 1
    ):
        raise ValueError(
            f"refresh_every is a number of steps, at least 1, not {refresh_every!r}"
        )
    if units not in ("sgd", "paper"):
        raise ValueError(
            f"unknown units {units!r}; use 'sgd' (λ → ∞ is SGD) or 'paper' (the paper's formula)"
        )
    if units == "paper" and curvature.relative_damping:
        raise ValueError(
            "units='paper' divides by one λ for all layers, so the damping cannot be relative: "
            "use Curvature(relative_damping=False) or units='sgd'"
        )
    if units == "paper" and curvature.grafts:
        raise ValueError(
            "units='paper' gives directions their own length: use Curvature(graft=False) or units='sgd'"
        )


def check_group(group: Mapping[str, Any]) -> None:
    """The options that live in a param group."""
    for name in ("module", "refresh_every", "curvature", "units", "strategy", "strict"):
        if name in group:
            raise ValueError(
                f"{name} holds for the whole optimizer: give it to SENG(…), not to a param group"
            )
    if group.get("dampening"):
        raise ValueError(
            f"SENG's momentum has no dampening, and the group asks for {group['dampening']!r}"
        )
    if isinstance(group["lr"], Tensor) and group["lr"].numel() != 1:
        raise ValueError("Tensor lr must be 1-element")
    for name in ("lr", "momentum", "weight_decay"):
        check_number(name, group[name])
    check_number("damping", group["damping"], positive=True)
    if not isinstance(group.get("orthogonal", False), bool):
        raise TypeError(f"orthogonal is True or False, not {group['orthogonal']!r}")
    if group["nesterov"] and group["momentum"] <= 0:
        raise ValueError("nesterov needs a momentum above 0")


def check_number(name: str, value: object, *, positive: bool = False) -> None:
    """Refuse what is not a number of the range that the option has."""
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise TypeError(f"{name} is a number, not {value!r}") from None
    if positive and not number > 0:
        raise ValueError(f"{name} is λ, a number above 0, not {value!r}")
    if not number >= 0:
        raise ValueError(f"{name} must be at least 0, not {value!r}")
