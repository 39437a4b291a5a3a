"""A refresh, before and after the metric: one request per captured layer, and the states that are
kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from seng.distributed.pool import empty
from seng.distributed.sharded import Place, spread_basis
from seng.distributed.sharded import in_use as in_use_anywhere
from seng.distributed.team import Census, Covered
from seng.layers.samples import Look
from seng.layers.sites import Site
from seng.linalg.operators import Merged, Operator
from seng.metrics.metric import LayerRefresh, site_dims
from seng.notices import not_captured, not_observed
from seng.optim.step_plan import Dampings, Gradients

if TYPE_CHECKING:
    from seng.optim.engine import Engine

FEW = 32  # samples whose sum is taken at once, to save memory
HALF_FROM = 5e-3  # the smallest relative damping at which bases are kept in half precision


def captured_layers(
    engine: Engine, grads: Gradients, seen: Census, dampings: Dampings
) -> tuple[list[int], Iterator[LayerRefresh]]:
    """Plan all captured layers; their indices, and the refresh of each from this rank's samples.

    They come one after the other, so that one U at a time is whole.
    """
    found = _captured(engine, grads, seen)
    if engine.strategy.averages:
        _know(engine, found, seen)
    samples, metric = engine.collector.samples, engine.metric
    pools = engine.strategy.team.pools
    base = metric.pools
    half = seen.half and engine.on_gpu
    looks = {i: samples.look(i) for i in found}
    dims = {}
    for i, look in looks.items():
        if pools:
            kappa, count = seen.sites[i].kappa, seen.sites[i].samples
        else:
            kappa, count = look.kappa, samples.columns
        if base and not pools:
            kappa, count = seen.sites[i].kappa, max(1, samples.columns)
        if pools or base or look.count:
            dims[i] = site_dims(engine.sites[i], kappa, count, half)
    places = []
    plans = metric.plan([*dims.values()], engine.budget, pools)
    for i, plan in zip(dims, plans, strict=True):
        engine.records[i].plan = plan
        if seen.sites[i].samples:
            remark = None if pools else metric.remark(plan)
            if remark is not None:
                engine.notices.once("remark", remark)
            places.append(i)

    def one(i: int) -> LayerRefresh:
        layer = _layer(engine, i, seen, looks[i], dampings)
        _check_sum(engine, i, layer, grads)
        return layer

    return places, map(one, places)


def _captured(engine: Engine, grads: Gradients, seen: Census) -> list[int]:
    """The layers that some rank has captured; a layer that was missed is refused."""
    found = []
    excused = engine.collector.own or engine.clock.loaded
    for i, of_site in enumerate(seen.sites):
        site = engine.sites[i]
        if of_site.mismatch is not None:
            engine.take_plain(i, of_site.mismatch)
        elif of_site.captured:
            found.append(i)
        elif not excused and in_use(site, grads):
            if engine.collector.observer is not None:
                raise not_observed(site.name, engine.settings.curvature.fisher)
            raise not_captured(site.name)
    return found


def _know(engine: Engine, found: Sequence[int], seen: Census) -> None:
    """Tell the strategy which layers some rank has curvature of."""
    covered = {}
    for i in found:
        site, of_site = engine.sites[i], seen.sites[i]
        dims = site_dims(site, of_site.kappa, max(of_site.counts))
        (plan,) = engine.metric.plan([dims])
        covered[i] = Covered(site, site.active(), engine.metric.sides(plan))
    engine.strategy.covered |= covered


def _layer(
    engine: Engine, i: int, seen: Census, look: Look, dampings: Dampings
) -> LayerRefresh:
    record, collector = engine.records[i], engine.collector
    samples, site = collector.samples, record.site
    active = samples.active.setdefault(i, site.active())
    pools = engine.strategy.team.pools
    columns = samples.columns
    if look.count:
        U = samples.take(i, collector.scale)
    else:  # a curvature of its own is then that of one sample without gradient
        zeros = 0 if pools else 1
        like = site.dtype, site.lead.device
        U = empty(site.shape(active), *like, zeros)
        columns = max(zeros, columns)
    damping = site.damping(dampings)
    c = engine.settings.curvature
    exact = c.form == "explicit" or c.blocks == "network"
    # Rounding a basis changes d by about 1e-4 of λ_max/λ.
    harmless = not c.relative_damping or damping >= HALF_FROM
    single = site.lead.is_cuda and site.dtype == torch.float32
    return LayerRefresh(
        plan=record.plan,
        U=U,
        samples=columns,
        positions=look.positions,
        counts=seen.sites[i].counts if pools else [U.samples],
        totals=seen.totals if pools else [columns],
        previous=record.previous(active),
        damping=damping,
        precision=torch.bfloat16 if seen.half else site.dtype,
        half=seen.half and single and harmless and not exact,
        generator=partial(engine.generator, i),
        basis=partial(_basis, site, active),
        place=Place(site, active) if site.sharded else None,
    )


def _check_sum(
    engine: Engine, i: int, layer: LayerRefresh, grads: Gradients
) -> None:
    """Whether the samples add up to the gradient; if not, U tells only a part."""
    record, site, U = engine.records[i], engine.sites[i], layer.U
    team, collector = engine.strategy.team, engine.collector
    some = collector.samples.total > collector.samples.columns
    some = some or team.many or team.pools
    observed = collector.own or collector.observer is not None
    reduced = U.form == "implicit" and U.kappa < layer.plan.dims.kappa
    reduced = reduced or U.drawn
    if record.checked or some or observed or reduced or not U.samples:
        return
    record.checked = True
    g = site.gather(collector.samples.active[i], grads, site.dtype)
    total = torch.zeros_like(g)
    for i in range(0, U.samples, FEW):
        part = U.part(i, FEW)
        total += part.mv(total.new_ones(part.samples, dtype=U.dtype))
    size = total.norm() * g.norm()
    cosine = float(total @ g / size) if size > 0 else 1.0
    if cosine < 0.9:
        engine.notices.partial(site.name, cosine)


def install(engine: Engine, states: Mapping[int, Any]) -> list[int]:
    """Keep the states that are finite; the last good ones stay otherwise."""
    records = [engine.records[i] for i in states]
    looks = [state.fine() for state in states.values()]
    counts = [record.failures for record in records]
    looks += [torch.as_tensor(n, device=engine.device) for n in counts]
    if not looks:
        return []
    # The one look at the device that a refresh takes.
    seen = torch.stack([t.to(engine.device).long() for t in looks]).tolist()
    fine, failed = seen[: len(states)], seen[len(states) :]
    strategy = engine.strategy
    if strategy.averages and engine.metric.pools:
        # P is all ranks': what is not finite on one of them is dropped by all.
        what = "comparing refreshes"
        rows = strategy.team.gathered(fine, engine.device, what)
        fine = [min(ranks) for ranks in zip(*rows, strict=True)]
    refreshed = []
    for i, record in enumerate(records):
        name, solves = record.site.name, record.failed + failed[i]
        if solves:
            engine.notices.failed(name, solves)
        if not fine[i]:
            record.dropped += 1
            engine.notices.dropped(name)
            continue
        active = engine.collector.samples.active[record.index]
        record.install(states[record.index], active, engine.on_gpu)
        record.failed = solves
        refreshed.append(record.index)
    return refreshed


def in_use(site: Site, grads: Gradients) -> bool:
    """Whether a gradient has reached a layer, on any rank that has a part of it."""
    return in_use_anywhere(site, grads) if site.sharded else site.in_use(grads)


def _basis(site: Site, active: Any, Y: Tensor) -> Operator:
    """U = Yᵀ (k, n), spread over ranks as the parameters are."""
    Y = Y.to(site.dtype)
    if site.sharded:
        return spread_basis(site, active, Y)
    return Merged.of(Y, site.shape(active))
