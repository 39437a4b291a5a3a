"""A refresh, before and after the metric: one request per captured layer, and the states that are
kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from seng.distributed.pool import empty
from seng.distributed.sharded import Place, in_use, spread_basis
from seng.distributed.team import Census, Covered
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
    columns, metric = engine.collector.samples.columns, engine.metric
    pools = engine.strategy.team.pools
    alike = pools or metric.pools  # all ranks plan the same
    half = seen.half and engine.on_gpu
    dims = {}
    for i in found:
        of_site = seen.sites[i]
        if alike or of_site.look.count:
            kappa = of_site.kappa if alike else of_site.look.kappa
            count = max(1, of_site.samples if pools else columns)
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
    layer = partial(_layer, engine, grads, seen, dampings)
    return places, map(layer, places)


def _captured(engine: Engine, grads: Gradients, seen: Census) -> list[int]:
    """The layers that some rank has captured; a layer that was missed is refused."""
    found = []
    excused = engine.collector.own or engine.clock.loaded
    for i, of_site in enumerate(seen.sites):
        site = engine.sites[i]
        if of_site.mismatch is not None:
            engine.notices.plain(site.name, of_site.mismatch)
            record = engine.records[i]
            record.state, record.owed = None, False
            record.refused = of_site.mismatch
        elif of_site.captured:
            found.append(i)
        elif not excused and in_use(site, grads):
            if engine.collector.observer is not None:
                raise not_observed(site.name, engine.settings.curvature.fisher)
            raise not_captured(site.name)
    return found


def _know(engine: Engine, found: Sequence[int], seen: Census) -> None:
    """Tell the strategy which layers some rank has curvature of."""
    for i in found:
        site, of_site = engine.sites[i], seen.sites[i]
        dims = site_dims(site, of_site.kappa, max(of_site.counts))
        (plan,) = engine.metric.plan([dims])
        rank = engine.metric.sides(plan)
        engine.strategy.covered[i] = Covered(site, site.active(), rank)


def _layer(
    engine: Engine, grads: Gradients, seen: Census, dampings: Dampings, i: int
) -> LayerRefresh:
    record, collector = engine.records[i], engine.collector
    samples, site = collector.samples, record.site
    of_site = seen.sites[i]
    active = samples.active.setdefault(i, site.active())
    pools = engine.strategy.team.pools
    columns = samples.columns
    if of_site.look.count:
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
    layer = LayerRefresh(
        plan=record.plan,
        U=U,
        samples=columns,
        positions=of_site.look.positions,
        counts=of_site.counts if pools else [U.samples],
        totals=seen.totals if pools else [columns],
        previous=record.previous(active),
        damping=damping,
        precision=torch.bfloat16 if seen.half else site.dtype,
        half=seen.half and single and harmless and not exact,
        generator=partial(engine.generator, i),
        basis=partial(spread_basis, site, active),
        place=Place(site, active) if site.sharded else None,
    )
    _check_sum(engine, i, layer, grads)
    return layer


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
    if not states:
        return []
    records = [engine.records[i] for i in states]
    looks = [state.fine() for state in states.values()]
    # Solves of the states before that fell back to the gradient.
    looks += [getattr(record.state, "failures", 0) for record in records]
    numbers = [torch.as_tensor(n, device=engine.device).long() for n in looks]
    # The one look at the device that a refresh takes.
    seen = torch.stack(numbers).tolist()
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
