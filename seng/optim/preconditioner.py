"""Gradients in, directions out: the engine that `SENG` and `attach` share. Algorithm 1 of the paper.

On a refresh step U is built from what the backwards captured, sketched and factorized; on every step each block is solved
with the gradient. Ω is drawn on refresh and kept, where Algorithm 1 draws a new one at every step: so the factorization can be
kept too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor, nn

from seng.checks import check_options
from seng.distributed.ranks import Ranks
from seng.distributed.sharded import check_placements
from seng.distributed.team import Census
from seng.gpu.replay import Replay, write
from seng.gpu.staging import read
from seng.layers.capture import Capture, loss_scale
from seng.layers.fisher import Observer, output_of, seeds
from seng.layers.samples import Samples
from seng.layers.sites import Segment, Site, survey
from seng.linalg.implicit import Implicit
from seng.linalg.numerics import reduced
from seng.linalg.operators import HALF, Merged, Operator, wide
from seng.linalg.sketch import Identity
from seng.linalg.windows import Windows
from seng.metrics import base, network
from seng.metrics.block import Block, factorize
from seng.metrics.curvature import Curvature, Units
from seng.metrics.job import Job
from seng.metrics.memory import budget
from seng.metrics.plan import Plan, plan, pooled_plan, site_dims
from seng.metrics.refresh import build, grams
from seng.metrics.solver import Gradients, OneByOne, Ready, Solve, sort
from seng.notices import Notices, listed, not_captured, not_observed
from seng.tell.diagnostics import Refresh
from seng.tell.ledger import Ledger

# Why these two: docs/tuning.md. On digits no other value is better beyond the noise of the seeds.
DAMPING = (
    0.01  # of each block's largest eigenvalue, or of the mean one where P is alone
)
REFRESH_EVERY = 20
HALF_FROM = (
    5e-3  # the smallest relative damping at which bases are kept in half precision
)


Dampings = Mapping[nn.Parameter, float]


class Preconditioner:
    """The blocks of a module, refreshed every `refresh_every` steps and solved with at each."""

    samples: Samples
    capture: Capture

    def __init__(
        self,
        module: nn.Module,
        params: Iterable[nn.Parameter],
        *,
        curvature: Curvature,
        refresh_every: int,
        units: Units,
        strict: bool,
        strategy: str | None = None,
    ) -> None:
        check_options(curvature, refresh_every, units)
        self.ranks = Ranks(strategy, module, curvature)
        self.module, self.curvature, self.refresh_every, self.units = (
            module,
            curvature,
            refresh_every,
            units,
        )
        self.budget = budget(curvature, module)
        self.notices = Notices(strict)
        self.seed = (
            torch.initial_seed() % 2**63
        )  # read, not drawn: the global stream stays as it is
        self.coarse = False  # whether some gradients were worked out in half precision
        self.half = False  # whether bases are kept in half precision: on a GPU, where the network itself is trained so
        self.steps = 0
        self.own_batch = (
            False  # whether this step's curvature comes from a batch of its own
        )
        self.missed = False  # whether the last refresh found no samples at all
        self.renewals = 0  # refreshes so far
        self.loaded = False  # whether a state was loaded since the last backward, which drops what was captured
        self.last_refresh: int | None = None  # the step of the last refresh of any site
        self.trained: list[nn.Parameter] = []
        self.sites: list[Site] = []
        self.ledger = Ledger()
        self.replay = Replay(next(iter(module.parameters())).device)
        self._kept: tuple[Dampings, tuple[int, ...], bool, bool, Ready] | None = (
            None  # what the last step solved with, and under which dampings
        )
        self._waiting: dict[
            tuple[tuple[Segment, ...], int, int], Plan
        ] = {}  # parameters, κ and ϱ -> what `_keep` goes by
        self._noted: tuple[dict[int, Solve], Ready, Gradients] | None = (
            None  # a refresh whose directions are to come
        )
        self.renewed: dict[
            int, tuple[base.Kronecker | base.Diagonal, Tensor]
        ] = {}  # in a refresh: P, and whether it is fine
        self.observer = (
            Observer(module, WeakMethod(self._observe))
            if curvature.fisher != "empirical"
            else None
        )
        self.cover(params)
        if (self.observer or curvature.blocks == "network") and (
            self.ranks.team.many or self.spread
        ):
            raise ValueError(
                f"fisher={curvature.fisher!r}, blocks={curvature.blocks!r}: on several ranks only fisher='empirical' with "
                "blocks='layer' runs"
            )
        if (curvature.base != "identity" or curvature.grafts) and (
            self.ranks.averaging is not None or self.spread
        ):
            asked = (
                f"base={curvature.base!r}"
                if curvature.base != "identity"
                else "graft=True"
            )
            raise ValueError(
                f"{asked} needs whole layers and one curvature for all ranks: use strategy='shared' with whole parameters, "
                "or base='identity' without graft"
            )

    def cover(self, params: Iterable[nn.Parameter]) -> None:
        """Look for the layers of these parameters; again when there are more, in place and without loss of curvature."""
        params = list(params)
        inside = set(self.module.parameters())
        foreign = [tuple(p.shape) for p in params if p not in inside]
        if foreign:
            raise ValueError(
                f"{len(foreign)} of {len(params)} parameters are not the module's (the first has shape {foreign[0]}): "
                "pass the module that holds them as module=…"
            )
        check_placements(self.module, params, self.ranks.team.strategy)
        sites, uncovered = survey(self.module, params)
        if not sites:
            raise ValueError(
                f"no layer of {type(self.module).__name__} is covered, so SENG would be SGD: {listed(uncovered)}"
            )
        self.notices.uncovered(uncovered)
        settings = {"refresh_every": self.refresh_every, "units": self.units}
        self.seed, self.budget = self.ranks.meet(
            sites, settings, self.seed, self.budget
        )
        before, records = self.state(), self.ledger.records(self.sites)
        if self.sites:
            self.capture.remove()
        self.trained, self.sites, self.uncovered = params, sites, uncovered
        self.spread = any(
            site.sharded for site in sites
        )  # asked here, since a compiler does not see it
        self._kept = None
        self._waiting.clear()
        self.replay.forget()  # what it recorded holds on to sites of before
        plain = (
            self.curvature.sketch is None
            and self.curvature.base == "identity"
            and not self.ranks.team.pools
        )
        early = partial(grams, run=self.replay) if plain else None
        limit = self.curvature.samples
        share = None if limit is None else -(-limit // self.ranks.team.size)  # ϱ/𝓜
        self.samples = Samples(
            sites, share, WeakMethod(self._keep), early, self.observer is not None
        )
        self.capture = Capture(
            [member.module for _, member in self.samples.layers], self.samples.receive
        )
        if before:
            self.load_state(before)
            self.last_refresh = self.ledger.restore(sites, records)
        self._rearm()

    @property
    def blocks(self) -> dict[int, Block]:
        """Of the sites that have one, by their numbers."""
        return self.ledger.blocks

    @property
    def refresh_due(self) -> bool:
        """Whether the coming step refreshes the curvature."""
        due = (
            self.own_batch
            or self.missed
            or bool(self.ledger.owed)
            or self.steps % self.refresh_every == 0
        )
        return due and not self.curvature.none

    def _rearm(self) -> None:
        self.samples.clear()
        self.own_batch = self.samples.own = self.capture.own = False
        self.capture.armed = self.refresh_due

    def drop(self) -> None:
        """Forget what was captured: the gradients it belongs to are gone."""
        if self.samples.gated and not self.own_batch:
            self.samples.forget(trained=True)  # what is still to be sent backward stays
        elif not self.own_batch:
            self.samples.clear()

    def _observe(self, out: Any) -> None:
        """The module has been called: on a refresh step its output goes backward for the curvature alone."""
        if not self.capture.armed:
            return
        f = output_of(out)
        if not f.requires_grad:
            return
        params = [p for p in self.trained if p.requires_grad]
        stream = hash((self.seed, self.steps, len(self.samples.forwards))) % 2**63
        generator = torch.Generator(f.device).manual_seed(stream)
        with self.samples.listened(f.shape[0]) as forward:
            for seed in seeds(
                f, self.curvature.fisher, self.curvature.assumed, generator
            ):
                torch.autograd.grad(
                    f, params, seed, retain_graph=True, allow_unused=True
                )
        f.register_hook(lambda _: setattr(forward, "trained", True))

    @contextmanager
    def curvature_batch(self) -> Iterator[None]:
        """Backwards in here feed only the curvature (the paper's S̃_k); gradients stay as they were. The next step refreshes."""
        if self.curvature.none:
            raise RuntimeError(
                "Curvature(form='plain') keeps no curvature, so there is nothing to feed: leave out curvature_batch"
            )
        params = list(self.module.parameters())
        wrapped = isinstance(
            self.module, nn.parallel.DistributedDataParallel
        )  # which may reduce into what they are views of
        kept = [
            p.grad.clone() if wrapped and p.grad is not None else p.grad for p in params
        ]
        for p in params:
            p.grad = None
        self.samples.clear()
        self.own_batch = self.samples.own = self.capture.own = self.capture.armed = True
        try:
            yield
        except BaseException:
            self._rearm()
            self.loaded = True  # what an earlier backward had captured is gone
            raise
        finally:
            self.capture.own = False
            self.capture.armed = self.capture.armed and not self.own_batch
            for p, grad in zip(params, kept, strict=True):
                p.grad = grad

    def directions(
        self, grads: Gradients, damping: Dampings, ready: Ready
    ) -> dict[nn.Parameter, Tensor]:
        """The direction for every gradient: λ(M + λI)⁻¹g, or (M + λI)⁻¹g in the paper's units."""
        with torch.autocast(self.sites[0].lead.device.type, enabled=False):
            out = self._solved(grads, damping, ready)
            self.note(out)
            return (
                {p: d / damping[p] for p, d in out.items()}
                if self.units == "paper"
                else out
            )

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _averaged(
        self, grads: Gradients, damping: Dampings, ready: Ready
    ) -> dict[nn.Parameter, Tensor]:
        assert self.ranks.averaging is not None
        return self.ranks.averaging.directions(
            grads, ready, self.blocks, self._stamp(damping)
        )

    def _stamp(self, damping: Dampings) -> tuple[Any, ...]:
        """What a solve depends on but for the gradient, alike on all ranks."""
        return tuple(damping.values()), self.renewals

    def _solved(
        self, grads: Gradients, damping: Dampings, ready: Ready
    ) -> dict[nn.Parameter, Tensor]:
        plain = self.ranks.averaging is None or self.curvature.none
        return (
            ready.directions(grads) if plain else self._averaged(grads, damping, ready)
        )

    def ready(
        self,
        grads: Gradients,
        damping: Dampings,
        updates: bool = False,
        traced: bool = False,
    ) -> Ready:
        """The blocks to solve with at this step, refreshed and factorized; one by one where the solve is traced.

        With `updates`, the kernels are made ready to update parameters as well.
        """
        if not grads:
            return Ready()
        if self.curvature.none:
            self.ranks.compare(self.trained)
            return Ready()
        given = tuple(map(id, grads))
        if (
            self._kept is not None
            and not self.refresh_due
            and self._kept[:4] == (damping, given, updates, traced)
        ):
            return self._kept[4]
        with torch.autocast(self.sites[0].lead.device.type, enabled=False):
            kept, self._kept = self._kept, None
            refreshed = self._refresh(grads, damping) if self.refresh_due else []
            self.ledger.owed |= {
                index for index in range(len(self.sites)) if self._bare(index, grads)
            }
            self.loaded = False
            used = [
                i
                for i in self.blocks
                if any(s.param in grads for s in self.ledger.covered[i])
            ]
            whole = self.curvature.blocks == "network"
            if whole:
                network.share(
                    [self.blocks[i] for i in used],
                    [self.sites[i].damping(damping) for i in used],
                )
            else:
                factorize(
                    [(self.blocks[i], self.sites[i].damping(damping)) for i in used],
                    self.replay,
                )
            for i in used:
                self.blocks[i].bind(self.sites[i].damping(damping))
            solves = {
                i: Solve(
                    self.sites[i],
                    self.ledger.covered[i],
                    self.blocks[i],
                    *_core(self.blocks[i]),
                )
                for i in used
            }
            if (
                kept is not None
                and kept[:4] == (damping, given, updates, traced)
                and kept[4].renewed(list(solves.values()))
            ):
                out = kept[4]
                solves = {
                    i: out.solve_of[id(solve.block)] for i, solve in solves.items()
                }
            elif whole or traced:
                out = Ready(
                    (network.Whole if whole else OneByOne)(list(solves.values()))
                )
            else:
                out = sort(list(solves.values()), grads, updates)
            self._noted = (
                ({i: solves[i] for i in refreshed if i in solves}, out, grads)
                if refreshed
                else None
            )
            if traced and self._noted is not None:
                self.note(out.directions(grads))
        known = self.blocks.keys() | self.ledger.refused.keys()
        bare = [
            i
            for i, site in enumerate(self.sites)
            if i not in known and not self.ranks.elsewhere(i) and site.active()
        ]
        self._kept = None if bare else (damping, given, updates, traced, out)
        return out

    def keeps(self, ready: Ready, damping: Dampings) -> bool:
        """Whether a step with the same gradients, under these dampings, would solve with this again."""
        return (
            self._kept is not None
            and self._kept[4] is ready
            and self._kept[0] is damping
            and not self.refresh_due
        )

    def note(self, directions: Gradients) -> None:
        """What diagnostics will tell of this step, if it was a refresh; `directions` of all that the kernels do not serve."""
        if self._noted is None:
            return
        solves, ready, grads = self._noted
        self._noted = None
        self.last_refresh = self.steps
        for index, numbers in zip(
            solves,
            ready.compared(list(solves.values()), grads, directions),
            strict=True,
        ):
            self.ledger.refreshes[index] = Refresh(
                self.steps, self.samples.timer(index), numbers
            )

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def advance(self) -> None:
        """End the step; one that found nothing to begin with, as when tools step to fill an optimizer's state, is not one."""
        self.steps += not (self.missed and not self.blocks)
        self._rearm()
        if (
            self.ranks.averaging is not None
            and not self.refresh_due
            and self._kept is not None
        ):
            self.ranks.averaging.ahead(
                self._kept[4], self.blocks, self._stamp(self._kept[0])
            )

    def _take_plain(self, index: int, why: str) -> None:
        self.notices.plain(self.sites[index].name, why)
        self.ledger.refuse(index, why)

    def _bare(self, index: int, grads: Gradients) -> bool:
        """Whether a site that should have curvature is in use without any."""
        known = self.ledger.knows(index) or self.ranks.elsewhere(index)
        return not known and self.sites[index].in_use(grads)

    def _refresh(self, grads: Gradients, damping: Dampings) -> list[int]:
        """Build the blocks of all sites that were captured; the sites that succeeded."""
        self.samples.settle()
        seen = self.ranks.census(self.samples, self.steps, self.trained, damping)
        self.renewals += 1
        # Without samples, as when tools step to fill an optimizer's state, the refresh is still owed.
        self.missed = sum(seen.totals) == 0
        found: list[int] = []
        for index, site in enumerate(self.sites):
            reason = self.samples.mismatch(index) or seen.mismatch(index)
            if reason is not None:
                self._take_plain(index, reason)
            elif seen.captured(index):
                found.append(index)
            elif not (self.own_batch or self.loaded) and self.sites[index].in_use(
                grads
            ):
                raise (
                    not_captured(site.name)
                    if self.observer is None
                    else not_observed(site.name, self.curvature.fisher)
                )
        self.ranks.know(found, self.sites, seen)
        self.coarse, self.half = seen.half, seen.half and self.sites[0].lead.is_cuda
        pools = self.ranks.team.pools
        jobs = (
            self._pooled_jobs(found, seen, damping)
            if pools
            else self._jobs(found, grads, damping)
        )
        curvature = (
            replace(self.curvature, form="merged", sketch=None)
            if pools
            else self.curvature
        )
        with self.samples.together:
            if curvature.blocks == "network":
                for index in (
                    self.blocks.keys() - jobs.keys()
                ):  # a part of another whole
                    del self.blocks[index]
                blocks = network.build(list(jobs.values()), curvature)
            else:
                blocks = build(list(jobs.values()), curvature, self.replay)
            built = dict(zip(jobs, blocks, strict=True))
        for index, block in built.items():
            if jobs[index].failed:
                self.notices.failed(self.sites[index].name, jobs[index].failed)
            if block is not None:
                self.ledger.install(index, block, self.samples.active[index])
            elif len(
                jobs[index].gram
            ):  # the last good curvature stays; without one it is the plain gradient, and one is owed
                self._drop_refresh(index)
        refreshed = [
            index for index, block in built.items() if block is not None
        ] + self._install_alone(jobs)
        self.renewed.clear()
        self.ranks.agree(self.blocks, refreshed, self.sites)
        return [index for index in refreshed if index in self.blocks]

    def _jobs(
        self, found: list[int], grads: Gradients, damping: Dampings
    ) -> dict[int, Job]:
        """Of this rank's samples."""
        found = [i for i in found if self.samples.captured(i)]
        rho = self.samples.columns
        numbers = self.samples.numbers
        dims = [
            site_dims(self.sites[i], self.samples.kappa(i), rho, numbers(i), self.half)
            for i in found
        ]
        jobs: dict[int, Job] = {}
        scale = self._scale  # once: a scaler on a GPU is waited for
        known = self.samples.known_grams(scale)
        for index, chosen in zip(
            found,
            plan(dims, self.curvature, self.budget, self.refresh_every),
            strict=True,
        ):
            self.ledger.plans[index] = chosen
            if chosen.form == "plain":
                self._take_plain(index, chosen.why)
                continue
            self.notices.sketch(self.curvature.sketch, chosen.dims)
            U = self.samples.take(index, scale)
            self._check_sum(index, chosen, U, grads)
            U = self._whitened(index, U)
            if chosen.rank:
                jobs[index] = self._job(index, chosen, U, damping, known.get(index))
        return jobs

    def _whitened(self, index: int, U: Operator) -> Operator:
        """U in the coordinates of its base, which is renewed from it first."""
        chosen = self.ledger.plans[index]
        if chosen.base == "identity":
            return U
        previous, team = self._before(index), self.ranks.team
        with self.samples.timer(index):
            P, _ = self.renewed[index] = base.renewed(
                None if previous is None else previous.base,
                U,
                kronecker=chosen.base == "kronecker",
                power=float(self.curvature.power),
                rank=chosen.base_rank,
                decay=self.curvature.averaging,
                precision=torch.bfloat16 if self.coarse else self.sites[index].dtype,
                generator=self._generator(index, "base"),
                ranks=team.size if team.pools else 1,
                alone=not chosen.rank,
                total=lambda sums: (
                    team.sum_(list(sums), "adding up a base")
                    if team.pools and team.many
                    else None
                ),
            )
            return (
                P.white(U, chosen.rank if chosen.form == "implicit" else None)
                if chosen.rank
                else U
            )

    def _before(self, index: int) -> Block | None:
        return self.ledger.before(index, self.sites[index], self.samples.active[index])

    def _install_alone(self, jobs: Mapping[int, Job]) -> list[int]:
        """Blocks that are a base and nothing else."""
        alone = [index for index in self.renewed if index not in jobs]
        looks = read([self.renewed[index][1][None] for index in alone])
        for index in [
            index for index, (fine,) in zip(alone, looks, strict=True) if not fine
        ]:
            alone.remove(index)
            self._drop_refresh(index)
        for index in alone:
            site, previous, (P, _) = (
                self.sites[index],
                self._before(index),
                self.renewed[index],
            )
            nothing = torch.zeros((), dtype=site.dtype, device=site.lead.device)
            shape = site.shape(self.samples.active[index])
            U = Merged.of(nothing.new_zeros(0, math.prod(shape)), shape)
            new = (
                U,
                Identity(),
                nothing.new_zeros(0, 0),
                nothing,
                self.curvature.relative_damping,
            )
            pairs = None if previous is None else previous.renewed(*new, P)
            write(pairs or [])
            block = (
                Block(*new, base=P, graft=self.curvature.grafts)
                if previous is None or pairs is None
                else previous
            )
            self.ledger.install(index, block, self.samples.active[index])
        return alone

    def _pooled_jobs(
        self, found: list[int], seen: Census, damping: Dampings
    ) -> dict[int, Job]:
        """Of the samples of all ranks."""
        dims = [
            site_dims(self.sites[i], seen.kappa(i), sum(seen.of(i)), 0, self.half)
            for i in found
        ]
        plans = dict(
            zip(
                found,
                pooled_plan(dims, self.curvature, self.budget, self.refresh_every),
                strict=True,
            )
        )
        if self.ranks.team.many and self.curvature.traffic is None:
            self.notices.traffic(
                max((p.rank for p in plans.values()), default=0), self.refresh_every
            )
        self.ledger.plans |= plans
        for index, chosen in plans.items():
            if chosen.form == "plain":
                self._take_plain(index, chosen.why)
        kept = {
            index: chosen for index, chosen in plans.items() if chosen.form != "plain"
        }
        streams = {index: partial(self._generator, index) for index in kept}
        Us = self.ranks.pool(
            kept, self.samples, seen, self._scale, streams.__getitem__, self._whitened
        )
        return {
            index: self._job(index, plans[index], U, damping, None)
            for index, U in Us.items()
        }

    @property
    def _scale(self) -> float:
        """Of the loss, which the captured gradients carry."""
        return 1.0 if self.own_batch or self.observer is not None else loss_scale()

    def _job(
        self,
        index: int,
        chosen: Plan,
        U: Operator,
        dampings: Dampings,
        known: Tensor | None,
    ) -> Job:
        site = self.sites[index]
        damping = site.damping(dampings)
        # Rounding a basis changes d by about 1e-4 of λ_max/λ; and an explicit form that is asked for is to be exact.
        harmless = not self.curvature.relative_damping or damping >= HALF_FROM
        harmless = (
            harmless
            and self.curvature.form != "explicit"
            and self.curvature.blocks == "layer"
        )
        half = self.half and site.dtype == torch.float32 and harmless
        timer = self.samples.timer(index)
        own = self._before(index), partial(self._generator, index), timer, known
        P, _ = self.renewed.get(index, (None, None))
        return Job(U, chosen, damping, half, *own, base=P, graft=self.curvature.grafts)

    def _drop_refresh(self, index: int) -> None:
        self.ledger.fail(index)
        self.notices.dropped(self.sites[index].name)

    def _check_sum(
        self, index: int, chosen: Plan, U: Operator, grads: Gradients
    ) -> None:
        """Whether the samples add up to the gradient, up to scale; once per layer. If not, U tells only a part of the story."""
        reduced_factors = (
            chosen.form == "implicit"
            and chosen.dims.kappa > chosen.rank
            and isinstance(U, Implicit)
        )
        partial = (
            reduced_factors
            or self.own_batch
            or self.curvature.samples is not None
            or self.ranks.team.many
        )
        if (
            index in self.ledger.checked
            or partial
            or not U.samples
            or self.observer is not None
        ):
            return
        self.ledger.checked.add(index)
        g = self.sites[index].gather(
            self.samples.active[index], grads, self.sites[index].dtype
        )
        total = U.mv(torch.ones(U.samples, dtype=U.dtype, device=g.device))
        size = total.norm() * g.norm()
        cosine = float(total @ g / size) if size > 0 else 1.0
        if cosine < 0.9:
            self.notices.partial(self.sites[index].name, cosine)

    def _keep(self, site: Site, U: Operator) -> Operator:
        """What waits until step(): the smaller of columns and factors, or reduced factors where they are asked for."""
        if (
            not isinstance(U, Implicit | Windows) or self.curvature.base == "kronecker"
        ):  # which is made from all of the factors
            return U
        size = site.active(), U.rank, U.samples
        if size not in self._waiting:
            (self._waiting[size],) = plan(
                [site_dims(site, U.rank, U.samples)], self.curvature
            )
        chosen = self._waiting[size]
        if chosen.form == "implicit" and (
            chosen.rank < U.rank or self.curvature.combine == "independent"
        ):
            factors = U.implicit() if isinstance(U, Windows) else U
            return reduced(
                factors.to(wide(factors.G.dtype)),
                chosen.rank,
                self._generator(self.sites.index(site)),
            )
        if U.G.dtype in HALF and U.G.is_cuda:
            return U  # they are small, and launches in a backward hold it up
        columns = U.n * U.samples * U.dtype.itemsize
        return U.explicit() if columns <= U.bytes and chosen.form != "implicit" else U

    def _generator(self, index: int, what: str = "") -> torch.Generator:
        """Ω's own stream: a function of the seed, the step and the site, so that step and seed are all there is to save."""
        generator = torch.Generator(self.sites[index].lead.device)
        own = (
            self.seed,
            self.steps,
            index,
            *what.encode(),
        )  # numbers, whose hash is the same in every process
        return generator.manual_seed(hash(own) % 2**63)

    def diagnostics(self) -> dict[str, dict[str, Any]]:
        """Per layer, from its last refresh."""
        return self.ledger.diagnostics(self.sites, self.curvature.none)

    def state(self) -> dict[nn.Parameter, dict[str, Any]]:
        """Everything to continue from, as nested dictionaries of tensors: a site's with its lead parameter, and what holds for

        all of them with every parameter, since tools want an entry for each.
        """
        common = {"step": self.steps, "seed": self.seed, "missed": self.missed}
        out: dict[nn.Parameter, dict[str, Any]] = {
            p: {key: torch.tensor(value, device="cpu") for key, value in common.items()}
            for p in self.trained
        }
        for index, site in enumerate(self.sites):
            out[site.lead] |= self.ledger.entry(index, site)
        return out

    def load_state(self, state: Mapping[nn.Parameter, Mapping[str, Any]]) -> None:
        """Continue from `state()`; a site without an entry starts afresh at the next refresh."""
        self.ledger = Ledger()
        missed = False
        self.last_refresh = self._kept = None
        for index, site in enumerate(self.sites):
            entry = state.get(site.lead, {})
            if "step" in entry:
                self.steps, self.seed = (
                    int(entry["step"]),
                    int(entry.get("seed", self.seed)),
                )
                missed = bool(entry.get("missed", False))
            self.ledger.load(index, site, entry, self.curvature)
        self.missed = (missed or not self.blocks) and not self.curvature.none
        common = [
            self.steps,
            int(self.missed),
            hash(tuple(sorted(self.blocks))) % 2**62,
            len(self.ledger.owed),
        ]
        if not self.ranks.loaded(common, self.sites[0].lead.device):
            self.notices.renewed(self.ranks.team.strategy, bool(self.blocks))
            self.blocks.clear()
            self.ledger.owed.clear()
            self.missed = True
        self.loaded = any(p.grad is not None for p in self.trained)
        self._rearm()


def _core(block: Block) -> tuple[Tensor, Tensor]:
    assert block.core is not None
    return block.core[1], block.core[2]
