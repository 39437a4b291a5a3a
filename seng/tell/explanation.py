"""`seng.explain`: what would be done with each layer of a network, and why, without training it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from statistics import mode
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from seng.checks import Periods, check_period, periods_of
from seng.layers.sites import Member, Site, differs, survey
from seng.linalg.memory import memory_budget, size_of
from seng.metrics.choose import metric_of
from seng.metrics.curvature import Curvature
from seng.metrics.metric import Metric, Plan, site_dims
from seng.recipes.recipe import recipe_of

HEAD = (
    "layer",
    "n",
    "n_G",
    "n_A",
    "κ",
    "ϱ",
    "form",
    "base",
    "bytes",
    "flop/step",
    "why",
)
WORDS = ("layer", "form", "base", "why")  # columns that begin at the left


@dataclass(frozen=True)
class Explanation:
    """What `explain` found: one plan per covered layer, and why each other parameter has none."""

    plans: tuple[Plan, ...]
    uncovered: Mapping[str, str]
    others: str = "the plain gradient"  # what these take
    refresh_every: Periods = 1
    passes: int = 0  # operations of forward and backward in these layers

    @property
    def bytes(self) -> int:
        return sum(p.bytes for p in self.plans)

    def share(self, period: int) -> float:
        """What curvature costs on average, in forward and backward passes of these layers."""
        each = sum(p.flops + p.refresh_flops / period for p in self.plans)
        return each / max(1, self.passes)

    def __str__(self) -> str:
        rows = [HEAD, *map(_row, self.plans)]
        columns = [_aligned(column) for column in zip(*rows, strict=True)]
        if all(p.dims.base == "identity" for p in self.plans):
            del columns[HEAD.index("base")]
        lines = ["  ".join(cells) for cells in zip(*columns, strict=True)]
        size = size_of(self.bytes)
        lines.append(f"{len(self.plans)} layers covered, {size} of curvature")
        for start, period in periods_of(self.refresh_every).items():
            share = self.share(period)
            lines.append(
                f"from step {start} a refresh every {period} steps: "
                f"{share:.0%} of the operations of forward and backward, "
                "solves included"
            )
        for name, why in self.uncovered.items():
            lines.append(f"{self.others}: {name}: {why}")
        return "\n".join(line.rstrip() for line in lines)


def _row(p: Plan) -> tuple[str, ...]:
    d = p.dims
    return (
        d.name,
        f"{d.n:,}",
        f"{d.n_G:,}",
        f"{d.n_A:,}",
        f"{d.kappa:,}",
        f"{d.samples:,}",
        p.form,
        f"kronecker {d.base_rank}" if d.base == "kronecker" else d.base,
        size_of(p.bytes),
        f"{p.flops:.1e}",
        p.why,
    )


def _aligned(column: tuple[str, ...]) -> list[str]:
    """The cells of a column at one width, below its head."""
    side = "<" if column[0] in WORDS else ">"
    width = max(map(len, column))
    return [f"{cell:{side}{width}}" for cell in column]


def explain(
    module: nn.Module,
    batch: Any,
    curvature: Curvature | Metric | None = None,
    *,
    recipe: str = "sgd",
    refresh_every: Periods | None = None,
) -> Explanation:
    """Run one forward pass and tell what would be done with each layer, and why.

    Per layer: its shapes, the form chosen, its bytes and cost; of all, what a step costs on
    average, refreshes included, as a share of forward and backward. `batch` is what the module
    takes: a tensor, a tuple of arguments or a dict of keywords; of an (inputs, targets) pair the
    first is taken when the module has one argument. Nothing about the module changes, running
    statistics included. `recipe`: under "muon" heads, tables, norms and biases are AdamW's.
    """
    trained = [p for p in module.parameters() if p.requires_grad]
    found, uncovered = survey(module, trained)
    kind = recipe_of(recipe)
    sites = []
    for site in found:
        why = kind.refuses(site, module)
        if why is None:
            sites.append(site)
        else:
            uncovered |= dict.fromkeys(site.parameter_names, why)
    calls = _calls(module, batch, sites)
    # As a backward sees them: of several numbers, the last call's.
    B = mode([call.samples for call in calls[::-1]]) if calls else 0
    metric: Any = Curvature() if curvature is None else curvature
    samples, budget = B, None
    if isinstance(metric, Curvature):
        samples = min(B, metric.samples or B)
        budget = memory_budget(metric.memory, module)
        metric = metric_of(metric, kind.power)
    used = {}
    for site in sites:
        own = [call for call in calls if call.site is site]
        why = _unusable(own, B)
        if why is None:
            used[site] = max(1, sum(call.positions for call in own))
        else:
            uncovered[site.name] = why
    dims = [site_dims(site, kappa, samples) for site, kappa in used.items()]
    plans = tuple(metric.plan(dims, budget))
    if refresh_every is None:
        refresh_every = kind.refresh_every
    check_period(refresh_every)
    passes = sum(6 * B * p.dims.kappa * p.dims.n for p in plans)
    return Explanation(plans, uncovered, kind.others, refresh_every, passes)


class Call(NamedTuple):
    """What one call of a layer tells of its shapes."""

    site: Site
    samples: int
    positions: int  # κ


def _unusable(calls: Sequence[Call], B: int) -> str | None:
    """Why a layer has no plan; None: it has."""
    if not calls:
        return "not used in this forward pass"
    others = [call.samples for call in calls if call.samples != B]
    return differs(others[0], B) if others else None


def _calls(module: nn.Module, batch: Any, sites: Sequence[Site]) -> list[Call]:
    """Every call of a layer in one forward pass; in eval mode, so that nothing is updated."""
    calls: list[Call] = []

    def note(
        site: Site, member: Member, _: Any, args: Any, kwargs: Any, out: Tensor
    ) -> None:
        given = *args, *kwargs.values()
        a = next(x for x in given if isinstance(x, Tensor))
        a, out = member.sample_first(a.to("meta"), out.to("meta"))
        if site.factored:  # output numbers per sample and output feature
            h, n_G, _ = site.segments[0].shape
            kappa = out.numel() // max(1, len(a) * h * n_G)
        else:  # an embedding's tokens per sample
            kappa = 1 if a.is_floating_point() else a.shape[1:].numel()
        calls.append(Call(site, len(a), kappa))

    with ExitStack() as undo, torch.no_grad():
        for site in sites:
            for member in site.members:
                hook = partial(note, site, member)
                register = member.module.register_forward_hook
                undo.enter_context(register(hook, with_kwargs=True))
        for layer in module.modules():
            undo.callback(setattr, layer, "training", layer.training)
        module.eval()
        _run(module, batch)
    return calls


def _run(module: nn.Module, batch: Any) -> None:
    if isinstance(batch, Mapping):
        module(**batch)
    elif isinstance(batch, Sequence):
        try:
            inspect.signature(module.forward).bind(*batch)
        except TypeError:  # a pair of inputs and targets
            batch = batch[:1]
        module(*batch)
    else:
        module(batch)
