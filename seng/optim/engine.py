"""Gradients in, directions out: the engine that all our optimizers share. Algorithm 1 of the paper.

On a refresh step the metric is initialised from what the backwards captured; on every step each
layer's solver is applied to its gradient. Ω is drawn on refresh and kept, where Algorithm 1 draws a
new one at every step: so the factorization can be kept too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakMethod

import torch
from torch import nn

from seng.distributed.sharded import check_placements, in_use
from seng.distributed.team import strategy_of
from seng.gpu.recorder import Recorder, settle
from seng.layers.kinds import ON_REQUEST
from seng.layers.samples import Collector
from seng.layers.sites import Site, survey
from seng.linalg.memory import memory_budget
from seng.linalg.operators import Operator
from seng.metrics.metric import site_dims
from seng.notices import Notices, listed
from seng.optim.refresh import captured_layers, install
from seng.optim.settings import Clock, Settings, StepCache
from seng.optim.step_plan import (
    Dampings,
    Directions,
    Gradients,
    LayerRecord,
    Refresh,
    StepPlan,
    Timer,
    compare,
    plan_of,
)
from seng.recipes.recipe import RECIPES, Layers
from seng.tell.diagnostics import describe
from seng.tell.state import load_record, save_record

Params = Sequence[nn.Parameter]
Saved = dict[nn.Parameter, dict[str, Any]]


class Engine:
    """The curvature of a module, refreshed every `refresh_every` steps."""

    collector: Collector
    timer: Timer  # of the last refresh

    def __init__(
        self, module: nn.Module, params: Params, settings: Settings
    ) -> None:
        self.module, self.settings = module, settings
        self.metric = settings.metric
        self.strategy = strategy_of(settings.strategy, module)
        self.notices = Notices(settings.strict)
        self.clock = Clock(torch.initial_seed() % 2**63)  # read, not drawn
        self.records: list[LayerRecord] = []
        device = next(module.parameters()).device
        self.on_gpu = device.type == "cuda"
        self.recorder = Recorder(device)
        self.cover(params)

    def cover(self, params: Params) -> None:
        """Look for the layers of these parameters; again when there are more."""
        inside = set(self.module.parameters())
        foreign = [tuple(p.shape) for p in params if p not in inside]
        if foreign:
            raise ValueError(
                f"{len(foreign)} of {len(params)} parameters are not the module's "
                f"(the first has shape {foreign[0]}): pass the module that holds them as module=…"
            )
        check_placements(self.module, params, self.strategy.team.strategy)
        sites, uncovered = self._survey(params)
        self._meet(sites)
        before = {_identity(r.site): r for r in self.records}
        if before:
            self.collector.remove()
        self.trained, self.uncovered = params, uncovered
        self.records = []
        for i, site in enumerate(sites):
            record = before.get(_identity(site)) or LayerRecord(i, site)
            record.index = i
            self.records.append(record)
        self.sites = [record.site for record in self.records]
        self.device = self.sites[0].lead.device
        # Worked out here: while it is traced, a DTensor does not look like one.
        self.spread = any(site.sharded for site in sites)
        self.recorder.forget()  # recordings hold on to layers of before
        self.cache = StepCache()
        self.collector = self._collector()
        if before:
            self._resume(self.clock.missed)
        self._arm()

    def _survey(self, params: Params) -> tuple[list[Site], dict[str, str]]:
        """The layers to cover, and every other parameter with the reason."""
        found, uncovered = survey(
            self.module, params, self.settings.sample_dim
        )
        recipe = RECIPES[self.settings.recipe]
        sites = []
        unused = []
        for site in found:
            own = recipe.refuses(site, self.module)
            why = own or self.metric.refuses(site)
            if why is None:
                sites.append(site)
                continue
            uncovered |= dict.fromkeys(site.parameter_names, why)
            unused.append(own)
        if not sites:
            raise ValueError(
                f"no layer of {type(self.module).__name__} is covered, so all would take "
                f"{recipe.others}: {listed(uncovered)}"
            )
        wanted = ON_REQUEST, *unused
        told = {k: why for k, why in uncovered.items() if why not in wanted}
        self.notices.uncovered(told, recipe.others)
        return sites, uncovered

    def _meet(self, sites: Sequence[Site]) -> None:
        """One seed for all ranks, and the smallest of their memory budgets."""
        account = dict(vars(self.settings))
        account["metric"] = repr(account.pop("metric"))
        budget = memory_budget(self.settings.curvature.memory, self.module)
        told = self.strategy.meet(sites, account, (self.clock.seed, budget))
        seeds, budgets = zip(*told, strict=True)
        self.clock.seed = seeds[0]
        self.budget = None if budget is None else min(budgets)

    def _collector(self) -> Collector:
        c = self.settings.curvature
        limit = c.samples
        if c.base is not None and c.fisher == "empirical":
            limit = None  # a base has all samples that there are
        if limit is not None:
            limit = -(-limit // self.strategy.team.size)  # ϱ/𝓜
        return Collector(
            self.module,
            self.sites,
            limit=limit,
            keep=WeakMethod(self._keep),
            fisher=c.fisher,
            loss=c.assumed,
            stream=self.clock.stream,
            per_sample=self.metric.per_sample,
        )

    @property
    def refresh_due(self) -> bool:
        """Whether the coming step refreshes the curvature."""
        return self.clock.due or self.collector.own

    def _arm(self, begin: bool = True) -> None:
        """Look ahead at the coming step; `begin`: whatever waits is of another."""
        clock, before = self.clock, self.clock.due
        due = self.settings.refreshes(clock.steps)
        clock.due = due or clock.owed or clock.missed
        if begin or before or clock.due or self.collector.own:
            self.collector.arm(clock.due)

    @contextmanager
    def curvature_batch(self) -> Iterator[None]:
        """Backwards in here feed only the curvature; the next step refreshes."""
        try:
            with self.collector.own_batch(list(self.module.parameters())):
                yield
        except BaseException:
            self._arm()
            self.clock.loaded = True  # what had been captured before is gone
            raise

    def ready(
        self, grads: Gradients, dampings: Dampings, updates: bool, traced: bool
    ) -> StepPlan:
        """What this step solves with, refreshed if a refresh is due.

        `updates`: a GPU may also update parameters; `traced`: a compiler looks on.
        """
        if not grads:
            self.strategy.compare(self.trained)
            return StepPlan([])
        cache, due = self.cache, self.refresh_due
        key = (dampings, tuple(map(id, grads)), updates, traced)
        if not due and cache.key == key and cache.plan is not None:
            return cache.plan
        cache.key = None  # should a refresh be interrupted
        with torch.autocast(self.device.type, enabled=False):
            cache.refreshed = self.refresh(grads, dampings) if due else []
            plan = cache.plan = self._plan(grads, dampings, updates, traced)
            if not self._bare(grads):
                cache.key = key
            if traced and cache.refreshed:
                self._note(plan, grads, plan.directions(grads))
        return plan

    def _plan(
        self, grads: Gradients, dampings: Dampings, updates: bool, traced: bool
    ) -> StepPlan:
        """The solvers of all layers that have a state and a gradient."""
        used = [record for record in self.records if record.uses(grads)]
        stale = {}
        for record in used:
            lam = record.site.damping(dampings)
            known = record.solved == (id(record.state), lam)
            if self.metric.together or not known:
                stale[record.index] = lam
        if stale:
            self._solve_anew(stale)
        old = self.cache.plan
        if old is not None and not traced and old.holds(used, grads):
            return old
        return plan_of(used, grads, self.metric, updates, traced)

    def _solve_anew(self, stale: dict[int, float]) -> None:
        """New solvers for layers whose state or damping has changed."""
        states = [self.records[i].state for i in stale]
        lams = [*stale.values()]
        found: Any = self.metric.solvers(states, lams, self.recorder)
        for i, state, solver in zip(stale, states, found, strict=True):
            record = self.records[i]
            if self.metric.pools and self.strategy.averages:
                solver = replace(solver, grafts=False)
            if self.on_gpu:
                solver = settle(record.solver, solver)
            record.solver = solver
            record.solved = id(state), stale[i]
            record.dtype = state.dtype or record.site.dtype

    def _bare(self, grads: Gradients) -> bool:
        """Layers in use without curvature ask for a refresh; whether any is left."""
        bare = False
        for record in self.records:
            told = record.refused is not None or record.owed
            elsewhere = record.index in self.strategy.covered
            if record.state is not None or told or elsewhere:
                continue
            record.owed = in_use(record.site, grads)
            bare = bare or bool(record.site.active())
        self.clock.loaded = False
        self.clock.owed = any(record.owed for record in self.records)
        return bare

    def layers(self, plan: StepPlan) -> Layers:
        """What this step solves, on any rank."""
        if self.strategy.averages:
            found = self.strategy.covered.values()
            return [(c.site, [s.param for s in c.active]) for c in found]
        return [(record.site, record.params) for record in plan.solves]

    def directions(
        self, plan: StepPlan, grads: Gradients, dampings: Dampings
    ) -> Directions:
        """d for every gradient."""
        out: Directions
        if self.strategy.averages:
            stamp = dampings, self.clock.renewals
            out = self.strategy.directions(dict(grads), plan, stamp)
        else:
            out = plan.directions(grads)
        if self.cache.refreshed:
            self._note(plan, grads, out)
        return out

    def _note(self, plan: StepPlan, grads: Gradients, ds: Gradients) -> None:
        """What diagnostics will tell of this refresh."""
        steps, refreshed = self.clock.steps, self.cache.refreshed
        self.cache.refreshed = []
        for record in plan.solves:
            if record.index in refreshed:
                g, d = record.gather(grads), record.gather(ds)
                compared = compare(g, d, record.site)
                record.refresh = Refresh(steps, self.timer, compared)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def advance(self, dampings: Dampings) -> None:
        """End the step; one that found nothing to begin with is not one."""
        clock, plan = self.clock, self.cache.plan
        idle = clock.missed and all(r.state is None for r in self.records)
        clock.steps += not idle
        self._arm(begin=False)
        if self.strategy.averages and not clock.due and plan is not None:
            self.strategy.ahead(plan, (dampings, clock.renewals))

    def refresh(self, grads: Gradients, dampings: Dampings) -> list[int]:
        """New states for all layers that were captured; those that succeeded."""
        clock, samples = self.clock, self.collector.samples
        samples.settle()
        seen = self.strategy.census(
            samples, clock.steps, self.trained, dampings
        )
        clock.renewals += 1
        # Tools step without samples to fill an optimizer's state: the refresh is still owed.
        clock.missed = sum(seen.totals) == 0
        places, layers = captured_layers(self, grads, seen, dampings)
        if self.metric.together and places:
            for record in self.records:
                if record.index not in places:  # it is of another whole
                    record.state = None
        self.timer = Timer(self.device)
        with self.timer:
            states = self.metric.refresh(
                layers, self.strategy.team, self.recorder
            )
        refreshed = install(self, dict(zip(places, states, strict=True)))
        kept = {r.index: r.state for r in self.records if r.state is not None}
        anew = self.strategy.agree(kept, refreshed, self.sites)
        for i in anew:
            self.records[i].state = None
        succeeded = [i for i in refreshed if i not in anew]
        if succeeded:
            clock.last_refresh = clock.steps
        return succeeded

    def _keep(self, site: Site, U: Operator) -> Operator:
        """What of a capture waits until step()."""
        i = self.sites.index(site)
        if not self.metric.keeps_less(first=self.records[i].state is None):
            return U
        dims = site_dims(site, U.kappa, U.samples)
        draw = partial(self.generator, i)
        return self.metric.keep(U, dims, draw)

    def generator(self, i: int, what: str = "") -> torch.Generator:
        """A stream from seed, step and layer: step and seed are all there is to save."""
        generator = torch.Generator(self.sites[i].lead.device)
        # The hash of numbers is the same in every process.
        own = (self.clock.seed, self.clock.steps, i, *what.encode())
        return generator.manual_seed(hash(own) % 2**63)

    def diagnostics(self) -> dict[str, dict[str, Any]]:
        """Per layer, from its last refresh."""
        return {r.site.name: describe(r) for r in self.records}

    def state(self) -> Saved:
        """Everything to continue from, as nested dictionaries of tensors.

        A layer's with its lead parameter; what holds for all with every parameter, since tools want
        an entry for each.
        """
        clock = self.clock
        common = {
            "step": torch.tensor(clock.steps, device="cpu"),
            "seed": torch.tensor(clock.seed, device="cpu"),
            "missed": torch.tensor(clock.missed, device="cpu"),
        }
        out: Saved = {p: dict(common) for p in self.trained}
        for record in self.records:
            out[record.site.lead] |= save_record(record, record.site)
        return out

    def load_state(self, state: Mapping[nn.Parameter, Any]) -> None:
        """Continue from `state()`; a layer without an entry starts afresh."""
        clock, missed = self.clock, False
        self.cache = StepCache()
        self.records = []
        clock.last_refresh = None
        for i, site in enumerate(self.sites):
            entry = state.get(site.lead, {})
            if "step" in entry:
                clock.steps = int(entry["step"])
                clock.seed = int(entry["seed"])
                missed = bool(entry["missed"])
            record = LayerRecord(i, site)
            load_record(record, site, entry, self.metric)
            self.records.append(record)
        self._resume(missed)
        self._arm()

    def _resume(self, missed: bool) -> None:
        """Go on with the layers' states, if all ranks can."""
        clock = self.clock
        kept = [r.index for r in self.records if r.state is not None]
        owed = sum(record.owed or record.other for record in self.records)
        clock.missed = missed or not kept
        clock.owed = owed > 0
        loaded = hash(tuple(kept)) % 2**62
        common = [clock.steps, int(clock.missed), loaded, owed]
        if not self.strategy.loaded(common, self.device):
            if kept:
                self.notices.renewed()
            for record in self.records:
                record.state, record.owed = None, False
            clock.missed, clock.owed = True, False
        clock.loaded = any(p.grad is not None for p in self.trained)


def _identity(site: Site) -> Any:
    """Equal for layers that were found again."""
    layers = [(member.module, member.kind) for member in site.members]
    return (*layers, *[segment.param for segment in site.segments])
