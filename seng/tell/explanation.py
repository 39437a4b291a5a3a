"""`seng.explain`: what would be done with each layer of a network, and why, without training it."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from seng.distributed.ranks import usual
from seng.layers.sites import Member, Site, differs, survey
from seng.metrics.curvature import Curvature
from seng.metrics.memory import budget, size_of
from seng.metrics.plan import Dims, Plan, plan, site_dims


@dataclass(frozen=True)
class Explanation:
    """What `explain` found: one plan per covered layer, and every other parameter with its reason."""

    plans: tuple[Plan, ...]
    uncovered: Mapping[str, str]

    @property
    def bytes(self) -> int:
        return sum(p.bytes for p in self.plans)

    def __str__(self) -> str:
        based = any(p.base != "identity" for p in self.plans)
        head = (
            "layer",
            "n",
            "n_G",
            "n_A",
            "κ",
            "ϱ",
            "form",
            *["base"] * based,
            "bytes",
            "flop/step",
            "why",
        )
        rows: list[tuple[str, ...]] = [head]
        for p in self.plans:
            d = p.dims
            sizes = (f"{v:,}" for v in (d.n, d.n_G, d.n_A, d.kappa, d.samples))
            base = f"kronecker {p.base_rank}" if p.base == "kronecker" else p.base
            rows.append(
                (
                    d.name,
                    *sizes,
                    p.form,
                    *[base] * based,
                    size_of(p.bytes),
                    f"{p.flops:.1e}",
                    p.why,
                )
            )
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        left = [
            i for i, name in enumerate(head) if name in ("layer", "form", "base", "why")
        ]
        lines = [
            "  ".join(
                cell.ljust(w) if i in left else cell.rjust(w)
                for i, (cell, w) in enumerate(zip(row, widths, strict=True))
            )
            for row in rows
        ]
        lines.append(
            f"{len(self.plans)} layers covered, {size_of(self.bytes)} of curvature"
        )
        lines += [
            f"plain gradient: {name}: {why}" for name, why in self.uncovered.items()
        ]
        return "\n".join(line.rstrip() for line in lines)


def explain(
    module: nn.Module, batch: Any, curvature: Curvature | None = None
) -> Explanation:
    """Run one forward pass and tell, per layer, its shapes, the form chosen, its bytes and cost, and why.

    `batch` is what the module takes: a tensor, a tuple of arguments or a dict of keywords; of an (inputs, targets) pair the
    first is taken when the module has one argument. Nothing about the module changes, running statistics included.
    """
    curvature = usual(module) if curvature is None else curvature
    sites, uncovered = survey(
        module, (p for p in module.parameters() if p.requires_grad)
    )
    calls = _shapes(
        module, batch, [member for site in sites for member in site.members]
    )
    counts = Counter(
        [a.shape[0] for seen in calls.values() for a, _ in seen][::-1]
    )  # the backward's order
    B = counts.most_common(1)[0][0] if counts else 0
    rho = B if curvature.samples is None else min(B, curvature.samples)
    dims: list[Dims] = []
    for site in sites:
        seen = [
            call for member in site.members for call in calls.get(member.module, ())
        ]
        other = next((a.shape[0] for a, _ in seen if a.shape[0] != B), None)
        if not seen:
            uncovered[site.name] = "not used in this forward pass"
        elif other is not None:
            uncovered[site.name] = differs(other, B)
        else:
            inputs = (
                sum((a.numel() + out.numel()) // max(1, B) for a, out in seen)
                if _waits_whole(site)
                else 0
            )
            dims.append(
                site_dims(
                    site,
                    max(1, sum(_positions(site, *call) for call in seen)),
                    rho,
                    inputs,
                )
            )
    return Explanation(
        tuple(plan(dims, curvature, budget(curvature, module))), uncovered
    )


def _waits_whole(site: Site) -> bool:
    """Whether its factors stay inside its input."""
    layers = [member.module for member in site.members]
    return all(
        member.kind.unfolded_later is not None for member in site.members
    ) and not any(
        getattr(layer, "groups", 1) > 1
        or getattr(layer, "padding_mode", "zeros") != "zeros"
        for layer in layers
    )


def _positions(site: Site, a: Tensor, out: Tensor) -> int:
    """κ of one call: output numbers per sample and output feature; tokens per sample of an embedding."""
    if not site.factored:
        return 1 if a.is_floating_point() else a.shape[1:].numel()
    h, n_G, _ = site.segments[0].shape
    return out.numel() // max(1, a.shape[0] * h * n_G)


def _shapes(
    module: nn.Module, batch: Any, members: Sequence[Member]
) -> dict[nn.Module, list[tuple[Tensor, Tensor]]]:
    """Input and output, sample first, of every call of a layer in one forward pass; in eval mode, so nothing is updated."""
    calls: dict[nn.Module, list[tuple[Tensor, Tensor]]] = {}

    def note(
        member: Member, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor
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
