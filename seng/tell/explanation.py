"""`seng.explain`: what would be done with each layer of a network, and why, without training it."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from seng.layers.sites import Member, Site, differs, survey
from seng.linalg.memory import memory_budget, size_of
from seng.metrics.choose import metric_of, usual
from seng.metrics.curvature import Curvature
from seng.metrics.metric import Dims, Metric, Plan, site_dims


@dataclass(frozen=True)
class Explanation:
    """What `explain` found: one plan per covered layer, and every other parameter with its reason."""

    plans: tuple[Plan, ...]
    uncovered: Mapping[str, str]

    @property
    def bytes(self) -> int:
        return sum(p.bytes for p in self.plans)

    def __str__(self) -> str:
        rows = [HEAD, *map(_row, self.plans)]
        if all(p.base == "identity" for p in self.plans):
            place = HEAD.index("base")
            rows = [row[:place] + row[place + 1 :] for row in rows]
        columns = [_aligned(column) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cells) for cells in zip(*columns, strict=True)]
        size = size_of(self.bytes)
        lines.append(f"{len(self.plans)} layers covered, {size} of curvature")
        for name, why in self.uncovered.items():
            lines.append(f"plain gradient: {name}: {why}")
        return "\n".join(line.rstrip() for line in lines)


HEAD = (
    *("layer", "n", "n_G", "n_A", "κ", "ϱ"),
    *("form", "base", "bytes", "flop/step", "why"),
)
WORDS = ("layer", "form", "base", "why")  # columns that begin at the left


def _row(p: Plan) -> tuple[str, ...]:
    d = p.dims
    sizes = [f"{v:,}" for v in (d.n, d.n_G, d.n_A, d.kappa, d.samples)]
    base = f"kronecker {d.base_rank}" if p.base == "kronecker" else p.base
    cost = size_of(p.bytes), f"{p.flops:.1e}"
    return (d.name, *sizes, p.form, base, *cost, p.why)


def _aligned(column: tuple[str, ...]) -> list[str]:
    """The cells of a column at one width, below its head."""
    width = max(map(len, column))
    if column[0] in WORDS:
        return [cell.ljust(width) for cell in column]
    return [cell.rjust(width) for cell in column]


def explain(
    module: nn.Module, batch: Any, curvature: Curvature | Metric | None = None
) -> Explanation:
    """Run one forward pass and tell what would be done with each layer, and why.

    Per layer: its shapes, the form chosen, its bytes and cost. `batch` is what the module takes: a
    tensor, a tuple of arguments or a dict of keywords; of an (inputs, targets) pair the first is
    taken when the module has one argument. Nothing about the module changes, running statistics
    included.
    """
    curvature = usual(module) if curvature is None else curvature
    trained = [p for p in module.parameters() if p.requires_grad]
    sites, uncovered = survey(module, trained)
    members = [member for site in sites for member in site.members]
    calls = _shapes(module, batch, members)
    sizes = [a.shape[0] for seen in calls.values() for a, _ in seen]
    counts = Counter(sizes[::-1])  # the backward's order
    B = counts.most_common(1)[0][0] if counts else 0
    limit = None if isinstance(curvature, Metric) else curvature.samples
    dims: list[Dims] = []
    for site in sites:
        seen = [call for m in site.members for call in calls.get(m.module, ())]
        other = next((a.shape[0] for a, _ in seen if a.shape[0] != B), None)
        if not seen:
            uncovered[site.name] = "not used in this forward pass"
        elif other is not None:
            uncovered[site.name] = differs(other, B)
        else:
            kappa = max(1, sum(_positions(site, *call) for call in seen))
            dims.append(site_dims(site, kappa, min(B, limit or B)))
    if isinstance(curvature, Metric):
        return Explanation(tuple(curvature.plan(dims)), uncovered)
    budget = memory_budget(curvature.memory, module)
    return Explanation(
        tuple(metric_of(curvature).plan(dims, budget)), uncovered
    )


def _positions(site: Site, a: Tensor, out: Tensor) -> int:
    """κ of one call: output numbers per sample and output feature; tokens per sample of an
    embedding.
    """
    if not site.factored:
        return 1 if a.is_floating_point() else a.shape[1:].numel()
    h, n_G, _ = site.segments[0].shape
    return out.numel() // max(1, a.shape[0] * h * n_G)


def _shapes(
    module: nn.Module, batch: Any, members: Sequence[Member]
) -> dict[nn.Module, list[tuple[Tensor, Tensor]]]:
    """Input and output, sample first, of every call of a layer in one forward pass; in eval mode,
    so nothing is updated.
    """
    calls: dict[nn.Module, list[tuple[Tensor, Tensor]]] = {}

    def note(
        member: Member,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Tensor,
    ) -> None:
        a = next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        call = member.sample_first(a.to("meta"), out.to("meta"))
        calls.setdefault(member.module, []).append(call)

    handles = [
        m.module.register_forward_hook(
            lambda _, args, kwargs, out, m=m: note(m, args, kwargs, out),
            with_kwargs=True,
        )
        for m in members
    ]
    modes = {layer: layer.training for layer in module.modules()}
    try:
        module.eval()
        with torch.no_grad():
            _call(module, batch)
    finally:
        for handle in handles:
            handle.remove()
        for layer, training in modes.items():
            layer.training = training
    return calls


def _call(module: nn.Module, batch: Any) -> None:
    if isinstance(batch, Mapping):
        module(**batch)
    elif isinstance(batch, Sequence):
        try:
            inspect.signature(module.forward).bind(*batch)
        except TypeError:
            batch = batch[:1]
        module(*batch)
    else:
        module(batch)
