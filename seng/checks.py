"""Options that are refused, each with what was given, what was expected and what to do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

GLOBAL = (
    "module",
    "refresh_every",
    "curvature",
    "units",
    "strategy",
    "strict",
    "decay",
)


def check_period(refresh_every: object) -> None:
    """How many steps there are from refresh to refresh."""
    if type(refresh_every) is not int or refresh_every < 1:
        raise ValueError(
            f"refresh_every is a number of steps, at least 1, not {refresh_every!r}"
        )


def check_group(group: Mapping[str, Any], name: str) -> None:
    """The options that live in a param group of the optimizer of this name."""
    for option in GLOBAL:
        if option in group:
            raise ValueError(
                f"{option} holds for the whole optimizer: give it to {name}(…), not to "
                "a param group"
            )
    if group.get("dampening"):
        raise ValueError(
            f"{name}'s momentum has no dampening, and the group asks for "
            f"{group['dampening']!r}"
        )
    if isinstance(group["lr"], Tensor) and group["lr"].numel() != 1:
        raise ValueError("Tensor lr must be 1-element")
    for option in ("lr", "momentum", "weight_decay"):
        check_number(option, group[option])
    check_number("damping", group["damping"], positive=True)
    if not isinstance(group.get("orthogonal", False), bool):
        raise TypeError(
            f"orthogonal is True or False, not {group['orthogonal']!r}"
        )
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
