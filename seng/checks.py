"""Options that are refused, each with what was given, what was expected and what to do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

# Of the whole optimizer, and not of a param group.
GLOBAL = (
    "module",
    "recipe",
    "refresh_every",
    "curvature",
    "strategy",
    "sample_dim",
    "strict",
    "power",
    "rank",
    "floor",
    "decay",
    "damp",
)
# Of param groups, in the order of the recipes' signatures.
OF_RECIPES = (
    "momentum",
    "nesterov",
    "betas",
    "eps",
    "damping",
    "ns_coefficients",
    "ns_steps",
    "adjust_lr_fn",
    "adam_lr",
    "adam_betas",
    "adam_eps",
)
# Torch's, of how it works out a step; checkpoints of its optimizers have them.
OF_TORCH = (
    "dampening",
    "foreach",
    "fused",
    "capturable",
    "differentiable",
    "decoupled_weight_decay",
    "amsgrad",
)


Periods = int | Mapping[int, int]  # T, or one from each of these steps on


def periods_of(refresh_every: Any) -> Mapping[int, int]:
    """How many steps there are from refresh to refresh, by the step from which that holds."""
    own = refresh_every
    return own if isinstance(own, Mapping) else {0: own}


def check_period(refresh_every: object) -> None:
    """A number of steps, or one from each step on."""
    periods = periods_of(refresh_every)
    counts = all(type(n) is int for n in (*periods, *periods.values()))
    if not counts or min(periods, default=1) or min(periods.values()) < 1:
        raise ValueError(
            "refresh_every is a number of steps, at least 1, or such numbers by the step from "
            f"which they hold, as {{0: 4, 100: 20}}, not {refresh_every!r}"
        )


def check_group(
    group: Mapping[str, Any], defaults: Mapping[str, Any], name: str
) -> None:
    """A param group of the optimizer of this name, whose recipe has these options."""
    for option in GLOBAL:
        if option in group:
            raise ValueError(
                f"{option} holds for the whole optimizer: give it to {name}(…), not to "
                "a param group"
            )
    for option in OF_RECIPES:
        if option in group and option not in defaults:
            known = ", ".join(defaults)
            raise ValueError(
                f"{name} has no option {option} with this recipe: leave it out, or take the "
                f"recipe that has it; this one has {known}"
            )
    if group.get("dampening"):
        raise ValueError(
            f"{name}'s momentum has no dampening, and the group asks for "
            f"{group['dampening']!r}"
        )
    check_lr(group["lr"])
    for option in ("momentum", "weight_decay"):
        if option in group:
            check_number(option, group[option])
    if "damping" in group:
        check_number("damping", group["damping"], positive=True)


def check_lr(lr: object) -> None:
    """Refuse what is no learning rate."""
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError("Tensor lr must be 1-element")
    check_number("lr", lr)


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
