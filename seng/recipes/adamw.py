"""AdamW's recipe: layers with curvature go along d of Adam's first moment, as far as Adam would.

    m ← β₁m + (1 − β₁)g,   v ← β₂v + (1 − β₂)g²,   m̂ = m/(1 − β₁ᵗ),   v̂ = v/(1 − β₂ᵗ)
    d = λ(ŪŪᵀ + λP)⁻¹m̂ per layer, brought to the length ‖m̂/(√v̂ + ε)‖ of the whole layer
    θ ← (1 − lr·weight_decay)·θ − lr·d

β₁, β₂, ε, lr and weight decay are those of each parameter's group, and t its own count of steps.
All other parameters take torch's AdamW step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from seng.checks import check_number
from seng.distributed.sharded import holders
from seng.distributed.team import ALONE
from seng.layers.sites import Site, local
from seng.recipes.recipe import (
    Directions,
    Group,
    Layers,
    Params,
    Recipe,
    Solve,
    recipe,
)


@recipe("adamw")
class AdamW(Recipe):
    """A metric's direction at the length of Adam's own update."""

    prompt = True
    others: ClassVar[str] = "AdamW's step"
    lr: ClassVar[float] = 1e-3
    options: ClassVar[dict[str, Any]] = {"betas": (0.9, 0.999), "eps": 1e-8}

    def __init__(
        self, sites: Sequence[Site], module: nn.Module | None = None
    ) -> None:
        super().__init__(sites)
        self.solved: set[nn.Parameter] = set()  # in the running step

    @staticmethod
    def check(group: Group) -> None:
        check_number("eps", group["eps"])
        check_betas("betas", group["betas"])

    def directions(
        self,
        state: Any,
        groups: Sequence[Group],
        grads: Directions,
        layers: Layers,
        solve: Solve,
    ) -> Directions:
        self.solved = {p for _, params in layers for p in params if p in grads}
        given, lengths = dict(grads), Directions()
        for group in groups:
            params = [p for p in group["params"] if p in self.solved]
            if params:
                means, own = moments(state, group, params, grads)
                given |= zip(params, means, strict=True)
                lengths |= zip(params, own, strict=True)
        out = solve(given)
        for device in dict.fromkeys(p.device for p in lengths):
            here = {p: n for p, n in lengths.items() if p.device == device}
            out |= lengthened(layers, here, out)
        return out

    def step(
        self,
        state: Any,
        group: Group,
        params: Params,
        directions: Directions,
    ) -> None:
        solved = [p for p in params if p in self.solved]
        others = [p for p in params if p not in self.solved]
        if solved:
            lr = group["lr"]
            weights = [local(p) for p in solved]
            moves = [directions[p] for p in solved]
            torch._foreach_mul_(weights, 1 - lr * group["weight_decay"])
            torch._foreach_sub_(weights, torch._foreach_mul(moves, lr))
        adam_step(state, group, others)


def check_betas(name: str, betas: Any) -> None:
    """Refuse what are not two numbers from 0 to below 1."""
    fit = len(betas) == 2 and 0 <= min(betas) <= max(betas) < 1
    if not fit:
        raise ValueError(
            f"{name}={betas!r}: {name} are two numbers from 0 to below 1"
        )


@torch.compiler.disable  # type: ignore[untyped-decorator]
def moments(
    state: Any, group: Group, params: Params, grads: Directions
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """m̂, and the length of m̂/(√v̂ + ε), of this rank's part of each; m and v are renewed."""
    cpu = torch.device("cpu")
    entries = [entry_of(state, p, cpu) for p in params]
    g = [local(grads[p]) for p in params]
    if group["maximize"]:
        g = [*torch._foreach_neg(g)]
    m = [local(entry["exp_avg"]) for entry in entries]
    v = [local(entry["exp_avg_sq"]) for entry in entries]
    counts = [entry["step"] for entry in entries]
    beta1, beta2 = map(float, group["betas"])
    torch._foreach_add_(counts, 1)
    torch._foreach_lerp_(m, g, 1 - beta1)
    torch._foreach_mul_(v, beta2)
    torch._foreach_addcmul_(v, g, g, 1 - beta2)
    steps = [float(count) for count in counts]
    mean = torch._foreach_div(m, [1 - beta1**t for t in steps])
    size = torch._foreach_sqrt(v)
    torch._foreach_div_(size, [(1 - beta2**t) ** 0.5 for t in steps])
    torch._foreach_add_(size, group["eps"])
    return mean, torch._foreach_norm(torch._foreach_div(mean, size))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def lengthened(
    layers: Layers, lengths: Mapping[nn.Parameter, Tensor], ds: Directions
) -> Directions:
    """This rank's part of each direction, its layer's as long as asked for; one of zeros stays."""
    places = {
        p: i for i, (_, own) in enumerate(layers) for p in own if p in lengths
    }
    parts = [local(ds[p]) for p in places]
    asked = torch.stack([lengths[p] for p in places])
    found = torch.stack([*torch._foreach_norm(parts)])
    squares = torch.stack([asked, found]).square()
    index = indices(tuple(places.values()), squares.device)
    sums = squares.new_zeros(2, len(layers)).index_add_(1, index, squares)
    over_ranks(layers, sums)
    of_u, of_d = sums.sqrt()
    scale = torch.where(of_d > 0, of_u / of_d, 0)[index]
    moved = torch._foreach_mul(parts, [*scale])
    return dict(zip(places, moved, strict=True))


@cache
def indices(places: tuple[int, ...], device: torch.device) -> Tensor:
    """Made once, so that no step waits for a device."""
    return torch.tensor(places, device=device)


def over_ranks(layers: Layers, sums: Tensor) -> None:
    """Add up what ranks have of layers that are spread, in one message per team."""
    teams = [
        holders(site.lead) if site.sharded else ALONE for site, _ in layers
    ]
    columns = sums.unbind(1)
    for team in dict.fromkeys(teams):
        own = [c for c, t in zip(columns, teams, strict=True) if t == team]
        if team.many:
            team.sum_(own, "lengths of spread parameters")


def entry_of(state: Any, p: nn.Parameter, where: torch.device) -> Any:
    """Adam's state of a parameter, its count of steps at this place."""
    own = state[p]
    # A number in old checkpoints.
    count = own.get("step", 0.0)
    own["step"] = torch.as_tensor(count, dtype=torch.float32, device=where)
    for name in ("exp_avg", "exp_avg_sq"):
        if name not in own:
            own[name] = torch.zeros_like(p)
    return own


def adam_step(
    state: Any, group: Group, params: Params, **options: Any
) -> None:
    """torch's AdamW along the gradients; `options` replace the group's lr, betas and eps."""
    names = "lr", "betas", "eps", "weight_decay", "maximize"
    how: Any = {name: group.get(name) for name in names} | options
    how["beta1"], how["beta2"] = how.pop("betas")
    for on_gpu in (False, True):  # on a GPU AdamW is one kernel
        here = [p for p in params if p.is_cuda == on_gpu]
        if not here:
            continue
        cpu = torch.device("cpu")
        own = [entry_of(state, p, p.device if on_gpu else cpu) for p in here]
        adamw(
            [*here],
            [p.grad for p in here if p.grad is not None],
            [entry["exp_avg"] for entry in own],
            [entry["exp_avg_sq"] for entry in own],
            [],
            [entry["step"] for entry in own],
            fused=on_gpu or None,
            amsgrad=False,
            **how,
        )
