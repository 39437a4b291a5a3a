"""Gradients in, directions out: the engine that all our optimizers share. Algorithm 1 of the paper.

On a refresh step the metric is initialised from what the backwards captured; on every step each
layer's solver is applied to its gradient. Ω is drawn on refresh and kept, where Algorithm 1 draws a
new one at every step: so the factorization can be kept too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor, nn

from seng.distributed.sharded import check_placements
from seng.distributed.strategies import strategy_of
from seng.gpu.recorder import Recorder, settle
from seng.layers.kinds import ON_REQUEST
from seng.layers.samples import Collector
from seng.layers.sites import Site, survey
from seng.linalg.memory import memory_budget
from seng.linalg.operators import Operator
from seng.metrics.metric import site_dims
from seng.notices import Notices, listed
from seng.optim.refresh import captured_layers, in_use, install
from seng.optim.settings import Clock, Settings, StepCache
from seng.optim.step_plan import (
    Dampings,
    Gradients,
    LayerRecord,
    LayerSolve,
    Refresh,
    StepPlan,
    compare,
    plan_of,
)
from seng.tell.state import load_record, save_record


class Engine:
    """The curvature of a module, refreshed every `refresh_every` steps."""

    collector: Collector

    def __init__(
        self,
        module: nn.Module,
        params: Iterable[nn.Parameter],
        settings: Settings,
    ) -> None:
        self.module, self.settings = module, settings
        self.strategy = strategy_of(settings.strategy, module)
        self.notices = Notices(settings.strict)
        self.clock = Clock(torch.initial_seed() % 2**63)  # read, not drawn
        self.sites: list[Site] = []
        self.records: list[LayerRecord] = []
        device = next(iter(module.parameters())).device
        self.on_gpu = device.type == "cuda"
        self.recorder = Recorder(device)
        self.cache = StepCache()
        self.cover(params)

    def cover(self, params: Iterable[nn.Parameter]) -> None:
        """Look for the layers of these parameters; again when there are more."""
        params = list(params)
        inside = set(self.module.parameters())
        foreign = [tuple(p.shape) for p in params if p not in inside]
        if foreign:
            raise ValueError(
                f"{len(foreign)} of {len(params)} parameters are not the module's "
                f"(the first has shape {foreign[0]}): pass the module that holds them "
                "as module=…"
            )
        check_placements(self.module, params, self.strategy.team.strategy)
        sites, uncovered = self._survey(params)
        self._meet(sites)
        before, last = self.state(), self.clock.last_refresh
        old = {
            site.lead: r
            for site, r in zip(self.sites, self.records, strict=True)
        }
        if self.sites:
            self.collector.remove()
        self.trained, self.sites, self.uncovered = params, sites, uncovered
        # Worked out here: while it is traced, a DTensor does not look like one.
        self.spread = any(site.sharded for site in sites)
        self.records = [LayerRecord() for _ in sites]
        self.cache = StepCache()
        self.recorder.forget()  # recordings hold on to sites of before
        self.collector = self._collector()
        if before:
            self.load_state(before)
            for site, record in zip(sites, self.records, strict=True):
                record.restore(old.get(site.lead))
        self.clock.last_refresh = last
        self._arm()

    def _survey(
        self, params: Sequence[nn.Parameter]
    ) -> tuple[list[Site], dict[str, str]]:
        """The layers to cover, and every other parameter with the reason."""
        sites, uncovered = survey(self.module, params)
        refused = {s: self.settings.metric.refuses(s) for s in sites}
        for site, why in refused.items():
            for s in site.segments if why is not None else ():
                uncovered[f"{s.owner.name}.{s.name}".lstrip(".")] = str(why)
        sites = [site for site, why in refused.items() if why is None]
        if not sites:
            name, ours = type(self.module).__name__, self.settings.name
            raise ValueError(
                f"no layer of {name} is covered, so {ours} would be SGD: "
                f"{listed(uncovered)}"
            )
        self.notices.uncovered(
            {name: why for name, why in uncovered.items() if why != ON_REQUEST}
        )
        return sites, uncovered

    def _meet(self, sites: Sequence[Site]) -> None:
        """One seed for all ranks, and the smallest of their memory budgets."""
        account = {
            f.name: getattr(self.settings, f.name) for f in fields(Settings)
        }
        account = {"curvature": repr(account.pop("metric")), **account}
        budget = memory_budget(self.settings.memory, self.module)
        own = {"seed": self.clock.seed, "budget": budget}
        told = self.strategy.meet(sites, account, own)
        self.clock.seed = told[0]["seed"]
        budgets = [
            other["budget"] for other in told if other["budget"] is not None
        ]
        self.budget = min(budgets, default=None)

    def _collector(self) -> Collector:
        s = self.settings
        size = self.strategy.team.size
        return Collector(
            self.module,
            self.sites,
            limit=None if s.samples is None else -(-s.samples // size),  # ϱ/𝓜
            keep=WeakMethod(self._keep),
            fisher=s.fisher,
            loss=s.loss,
            stream=partial(_stream, self.clock),
            per_sample=s.metric.per_sample,
        )

    @property
    def refresh_due(self) -> bool:
        """Whether the coming step refreshes the curvature."""
        return self.clock.due or self.collector.own

    def _arm(self, begin: bool = True) -> None:
        """Look ahead at the coming step; `begin`: whatever waits is of another."""
        clock, before = self.clock, self.clock.due
        clock.due = clock.owed or clock.missed
        clock.due = clock.due or clock.steps % self.settings.refresh_every == 0
        clock.due = (
            clock.due and self.settings.metric.captures and bool(self.sites)
        )
        if begin or before or clock.due or self.collector.own:
            self.collector.arm(clock.due)

    @contextmanager
    def curvature_batch(self) -> Iterator[None]:
        """Backwards in here feed only the curvature; the next step refreshes."""
        if not self.settings.metric.captures:
            raise RuntimeError(
                "Curvature(form='plain') keeps no curvature, so there is nothing to "
                "feed: leave out curvature_batch"
            )
        try:
            with self.collector.own_batch(list(self.module.parameters())):
                yield
        except BaseException:
            self._arm()
            self.clock.loaded = (
                True  # what an earlier backward had captured is gone
            )
            raise

    def ready(
        self, grads: Gradients, dampings: Dampings, updates: bool, traced: bool
    ) -> StepPlan:
        """What this step solves with, refreshed if a refresh is due.

        `updates`: a GPU may also update parameters; `traced`: a compiler looks on.
        """
        if not grads or not self.settings.metric.captures:
            self.strategy.compare(self.trained)
            return StepPlan([])
        key = (dampings, tuple(map(id, grads)), updates, traced)
        due = self.clock.due or self.collector.own
        if not due and self.cache.key == key and self.cache.plan is not None:
            return self.cache.plan
        self.cache.key = None  # should a refresh be interrupted
        device = self.sites[0].lead.device.type if self.sites else "cpu"
        with torch.autocast(device, enabled=False):
            refreshed = self.refresh(grads, dampings) if due else []
            plan = self._plan(grads, dampings, updates, traced)
            self.cache.keep(
                key, plan, refreshed, complete=not self._bare(grads)
            )
            if traced and refreshed:
                self._note(plan, grads, plan.directions(grads))
        return plan

    def _plan(
        self, grads: Gradients, dampings: Dampings, updates: bool, traced: bool
    ) -> StepPlan:
        """The solvers of all layers that have a state and a gradient."""
        used = []
        for i, record in enumerate(self.records):
            if record.state is not None and any(
                s.param in grads for s in record.active
            ):
                used.append(i)
        lams = [self.sites[i].damping(dampings) for i in used]
        self._solvers(used, lams)
        solves = []
        for i in used:
            r, site = self.records[i], self.sites[i]
            dtype = r.state.dtype or site.dtype
            solves.append(LayerSolve(i, site, r.active, r.solver, dtype))
        old = self.cache.plan
        if old is not None and not traced and old.holds(solves, grads):
            return old
        return plan_of(solves, grads, self.settings.metric, updates, traced)

    def _solvers(self, used: Sequence[int], lams: Sequence[float]) -> None:
        """New solvers for the layers whose state or damping has changed."""
        records = [self.records[i] for i in used]
        pairs = zip(records, lams, strict=True)
        stale = [
            (r, lam) for r, lam in pairs if r.solved != (id(r.state), lam)
        ]
        if not stale:
            return
        metric = self.settings.metric
        if metric.together:
            stale = list(zip(records, lams, strict=True))
        states = [r.state for r, _ in stale]
        found = metric.solvers(
            states, [lam for _, lam in stale], self.recorder
        )
        for (r, lam), solver in zip(stale, found, strict=True):
            r.solver = settle(r.solver, solver) if self.on_gpu else solver
            r.solved = id(r.state), lam

    def _bare(self, grads: Gradients) -> bool:
        """Layers in use without curvature ask for a refresh; whether any is left."""
        bare = False
        for i, (site, r) in enumerate(
            zip(self.sites, self.records, strict=True)
        ):
            if r.settled or self.strategy.elsewhere(i):
                continue
            r.owed = r.owed or in_use(site, grads)
            bare = bare or bool(site.active())
        self.clock.loaded = False
        self.clock.owed = any(r.owed for r in self.records)
        return bare

    def directions(
        self, plan: StepPlan, grads: Gradients, dampings: Dampings
    ) -> dict[nn.Parameter, Tensor]:
        """d for every gradient."""
        if self.strategy.averages:
            stamp = tuple(dampings.values()), self.clock.renewals
            out = self.strategy.directions(dict(grads), plan, stamp)
        else:
            out = plan.directions(grads)
        if self.cache.refreshed:
            self._note(plan, grads, out)
        return out

    def _note(
        self, plan: StepPlan, grads: Gradients, directions: Gradients
    ) -> None:
        """What diagnostics will tell of this refresh."""
        refreshed, self.cache.refreshed = set(self.cache.refreshed), []
        for solve in plan.solves:
            if solve.index in refreshed:
                g, d = solve.gather(grads), solve.gather(directions)
                compared = compare(g, d, solve.site)
                timer = self.collector.samples.timer(solve.index)
                record = self.records[solve.index]
                record.refresh = Refresh(self.clock.steps, timer, compared)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def advance(self, dampings: Dampings) -> None:
        """End the step; one that found nothing to begin with is not one."""
        clock = self.clock
        idle = clock.missed and all(r.state is None for r in self.records)
        clock.steps += not idle
        self._arm(begin=False)
        if (
            self.strategy.averages
            and not clock.due
            and self.cache.plan is not None
        ):
            stamp = tuple(dampings.values()), self.clock.renewals
            self.strategy.ahead(self.cache.plan, stamp)

    def refresh(self, grads: Gradients, dampings: Dampings) -> list[int]:
        """New states for all layers that were captured; those that succeeded."""
        samples, metric = self.collector.samples, self.settings.metric
        samples.settle()
        clock = self.clock
        seen = self.strategy.census(
            samples, clock.steps, self.trained, dampings
        )
        clock.renewals += 1
        # Tools step without samples to fill an optimizer's state: the refresh is still owed.
        clock.missed = seen.total == 0
        layers = captured_layers(self, grads, seen, dampings)
        if (
            metric.together and layers
        ):  # layers that were not reached are part of another whole
            for i, record in enumerate(self.records):
                record.state = record.state if i in layers else None
        with samples.together:
            team = self.strategy.team
            states = metric.refresh(list(layers.values()), team, self.recorder)
        refreshed = install(self, dict(zip(layers, states, strict=True)))
        kept = {
            i: r.state
            for i, r in enumerate(self.records)
            if r.state is not None
        }
        for i in self.strategy.agree(kept, refreshed, self.sites):
            self.records[i].state = None
        succeeded = [i for i in refreshed if self.records[i].state is not None]
        if succeeded:
            clock.last_refresh = clock.steps
        return succeeded

    def take_plain(self, i: int, why: str) -> None:
        self.notices.plain(self.sites[i].name, why)
        self.records[i].refuse(why)

    def _keep(self, site: Site, U: Operator) -> Operator:
        """What of a capture waits until step()."""
        if not self.settings.metric.reduces:
            return U
        dims = site_dims(site, U.kappa, U.samples)
        draw = partial(self.generator, self.sites.index(site))
        return self.settings.metric.keep(U, dims, draw)

    def generator(self, i: int, what: str = "") -> torch.Generator:
        """A stream from seed, step and layer: step and seed are all there is to save."""
        generator = torch.Generator(self.sites[i].lead.device)
        # The hash of numbers is the same in every process.
        own = (self.clock.seed, self.clock.steps, i, *what.encode())
        return generator.manual_seed(hash(own) % 2**63)

    def diagnostics(self) -> dict[str, dict[str, Any]]:
        """Per layer, from its last refresh."""
        captures = self.settings.metric.captures
        pairs = zip(self.sites, self.records, strict=True)
        return {site.name: record.describe(captures) for site, record in pairs}

    def state(self) -> dict[nn.Parameter, dict[str, Any]]:
        """Everything to continue from, as nested dictionaries of tensors.

        A layer's with its lead parameter; what holds for all with every parameter, since tools want
        an entry for each.
        """
        clock = self.clock
        common = {
            "step": clock.steps,
            "seed": clock.seed,
            "missed": clock.missed,
        }
        out: dict[nn.Parameter, dict[str, Any]] = {}
        for p in self.trained if self.sites else ():
            out[p] = {
                k: torch.tensor(v, device="cpu") for k, v in common.items()
            }
        for site, record in zip(self.sites, self.records, strict=True):
            out[site.lead] |= save_record(record, site)
        return out

    def load_state(
        self, state: Mapping[nn.Parameter, Mapping[str, Any]]
    ) -> None:
        """Continue from `state()`; a layer without an entry starts afresh."""
        clock = self.clock
        self.records = [LayerRecord() for _ in self.sites]
        self.cache = StepCache()
        clock.last_refresh, missed = None, False
        for site, record in zip(self.sites, self.records, strict=True):
            entry = state.get(site.lead, {})
            if "step" in entry:
                clock.steps = int(entry["step"])
                clock.seed = int(entry.get("seed", clock.seed))
                missed = bool(entry.get("missed", False))
            load_record(record, site, entry, self.settings.metric)
        kept = [i for i, r in enumerate(self.records) if r.state is not None]
        clock.missed = (missed or not kept) and self.settings.metric.captures
        owed = sum(r.owed for r in self.records)
        clock.owed = owed > 0
        common = [
            clock.steps,
            int(clock.missed),
            hash(tuple(kept)) % 2**62,
            owed,
        ]
        device = next(iter(self.module.parameters())).device
        if not self.strategy.loaded(common, device):
            self.notices.renewed(self.strategy.team.strategy, bool(kept))
            for record in self.records:
                record.state, record.owed = None, False
            clock.missed, clock.owed = True, False
        clock.loaded = any(p.grad is not None for p in self.trained)
        self._arm()


def _stream(clock: Clock, call: int) -> int:
    """The seed of one call of the module since the last step."""
    return hash((clock.seed, clock.steps, call)) % 2**63
