"""Which processes share the curvature, what they send each other, and when (section 4).

    local    one process
    shared   one basis on all ranks, from the samples of all of them; nothing is sent between
             refreshes (ours; `pool`)
    block    each rank has its own U_i, and what they make of g is averaged, after the gradient
    lagged   the same with g_{k−1}

        d = g − (1/𝓜) Σ_i U_i b_i,   b_i = (λI + U_iᵀU_i)⁻¹U_iᵀ ĝ     (eqs. sol-ls-1-dist,
                                                                      Dist-syn-2)

`block` over a base is the mean of P⁻¹g − Z_i b_i at the length of g: P is pooled as `shared` has
it.

`block` has ĝ = g: one more gradient travels at every step. `lagged` has ĝ = g_{k−1}: the sum is
known before the backward and travels in the gradient's own messages; on refresh steps U_i is new,
and it travels by itself; the first step is not lagged. With eq. 23 for U_i b_i the means of its two
sides are taken, not of their product.

DistributedDataParallel averages the ranks' gradients, however many samples each has. So M = (1/𝓜)
Σ_i M_i. A `Team` sends; `Shared` and `Averaged` say what, chosen once and asked at every refresh.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.nn.functional import pad

from seng.layers.sites import Site, is_sharded

BUCKET = 2**26  # bytes after which another message begins


@dataclass(frozen=True)
class Team:
    """The ranks that train one network. All of them call its methods, in the same order."""

    strategy: str = "local"  # or shared, block, lagged
    size: int = 1  # 𝓜
    rank: int = 0
    group: Any = None  # a process group; None is the default one

    many: bool = field(init=False)  # whether there are other ranks
    pools: bool = field(init=False)  # whether all samples are one curvature's
    averages: bool = field(init=False)  # whether directions are averaged

    def __post_init__(self) -> None:
        vars(self).update(
            many=self.size > 1,
            pools=self.strategy == "shared",
            averages=self.strategy in ("block", "lagged"),
        )

    def _send(
        self, what: str, collective: Callable[..., Any], *args: Any
    ) -> None:
        """Call one of torch's collectives; an error of it says what it was about."""
        if not self.many:
            return
        try:
            collective(*args, group=self.group)
        except torch.OutOfMemoryError:  # which is nobody else's doing
            raise
        except (RuntimeError, OSError) as why:
            said = str(why).strip() or type(why).__name__
            raise RuntimeError(
                f"SENG, rank {self.rank} of {self.size}: {what} did not come about; another rank "
                f"has failed, is not there, or takes other steps ({said.splitlines()[0]})"
            ) from why

    def gathered(
        self, row: Any, device: torch.device, what: str
    ) -> list[list[Any]]:
        """Every rank's integers, as they are nested."""
        own = torch.tensor([row], dtype=torch.int64, device=device)
        rows = own.repeat_interleave(self.size, 0)
        self._send(what, dist.all_gather_into_tensor, rows, own)
        return rows.tolist()

    def told(self, value: Any, what: str) -> list[Any]:
        """Every rank's value; they are small."""
        values = [value] * self.size
        self._send(what, dist.all_gather_object, values, value)
        return values

    def sum_(self, tensors: list[Tensor], what: str) -> None:
        """Each tensor becomes its sum over the ranks; small ones travel together."""
        if not self.many or not tensors:
            return
        together: Any = dist._compute_bucket_assignment_by_size  # type: ignore[attr-defined]
        for indices in together(tensors, [BUCKET])[0]:
            batch = [tensors[i] for i in indices]
            flat = _flatten_dense_tensors(batch)
            self._send(what, dist.all_reduce, flat)
            torch._foreach_copy_(batch, _unflatten_dense_tensors(flat, batch))

    def mean_(self, tensors: list[Tensor], what: str) -> None:
        """Each tensor becomes its mean over the ranks."""
        self.sum_(tensors, what)
        if tensors:
            torch._foreach_div_(tensors, self.size)

    def exchanged(
        self, sent: Tensor, to: list[int], due: list[int], what: str
    ) -> Tensor:
        """Send the next to[i] numbers to rank i, and receive due[i] numbers from it."""
        came = sent.new_empty(sum(due)) if self.many else sent
        self._send(what, dist.all_to_all_single, came, sent, due, to)
        return came


ALONE = Team()


def team_of(strategy: str | None, module: nn.Module | None) -> Team:
    """The ranks of a module: those of its DistributedDataParallel, or all of them."""
    if strategy not in (None, "local", "shared", "block", "lagged"):
        raise ValueError(
            f"unknown strategy {strategy!r}; there are 'local' (one process), 'shared', 'block' "
            "and 'lagged'"
        )
    there = dist.is_available() and dist.is_initialized()
    mesh = _mesh(module)
    group: Any = None
    if isinstance(module, nn.parallel.DistributedDataParallel):
        group = module.process_group
    elif mesh is not None and mesh.ndim == 1:
        group = mesh.get_group()
    size = dist.get_world_size(group) if there else 1
    if size == 1:
        # A shared basis of one rank, or the mean over it, is its own.
        alone = "lagged" if strategy == "lagged" else "local"
        return Team(alone if mesh is None else "shared")
    if strategy != "local":
        return Team(strategy or "shared", size, dist.get_rank(group), group)
    if group is not None or mesh is not None:
        raise RuntimeError(
            f"strategy='local' is one process, and this network is trained by {size}: ranks with "
            "curvatures of their own would drift apart; leave strategy out, and they share one"
        )
    return ALONE  # networks that have nothing to do with each other


def _mesh(module: nn.Module | None) -> Any:
    """The device mesh on which the parameters lie, if they are spread over ranks."""
    params: Any = () if module is None else module.parameters()
    meshes = {p.device_mesh for p in params if is_sharded(p)}
    for mesh in meshes:
        size, ranks = mesh.size(), dist.get_world_size()
        if len(meshes) > 1 or (mesh.ndim > 1 and size != ranks):
            raise RuntimeError(
                f"the parameters lie on {len(meshes)} device meshes, one of {size} of the {ranks} "
                "ranks: SENG works with one mesh; of several dimensions, it has all ranks"
            )
        return mesh


Tensors = dict[Any, Tensor]  # by parameter


class SiteCensus(NamedTuple):
    """What the ranks have captured of a layer."""

    look: Any  # this rank's own
    counts: list[int]  # samples on every rank
    samples: int  # on all of them
    kappa: int  # positions per sample, at most
    captured: bool  # whether any rank's backward reached it
    mismatch: str | None  # why dimension 0 of its input cannot be the sample


class Census(NamedTuple):
    """What the ranks have captured for a refresh."""

    totals: list[int]  # ϱ, or B where all samples are taken, of every rank
    half: bool  # whether any of it is in half precision
    sites: list[SiteCensus]


class Covered(NamedTuple):
    """A layer that some rank has curvature of."""

    site: Site
    active: Any  # its segments
    rank: Any  # of the sides that are averaged; None where eq. 23 is not used


class Shared:
    """One curvature for all; a process on its own has nobody to ask."""

    averages = False  # whether directions are averaged at every step

    def __init__(self, team: Team) -> None:
        self.team = team
        self.met = not team.many  # whether the ranks have compared weights
        self.covered: dict[int, Covered] = {}  # where `averages`, on any rank

    def meet(
        self, sites: Sequence[Site], account: dict[str, Any], own: Any
    ) -> list[Any]:
        """What each rank has of its `own`; refused where they train otherwise."""
        lines = [("strategy", self.team.strategy), *account.items()]
        lines.append(("layers", len(sites)))
        for site in sites:
            shapes = [s.shape for s in site.segments]
            lines.append(("layers", f"{site.name} {shapes}"))
        told = self.team.told((lines, own), "meeting the other ranks")
        for rank, (others, _) in enumerate(told):
            both = zip(others, told[0][0], strict=False)
            for (key, value), (_, first) in both:
                if value != first:
                    raise ValueError(
                        f"rank {rank} differs from rank 0 in its {key}: {value} where rank 0 has "
                        f"{first}; all ranks build the same network and the same optimizer"
                    )
        return [theirs for _, theirs in told]

    def compare(self, params: Sequence[nn.Parameter]) -> None:
        """The first time, refuse ranks that train different weights."""
        if self.met or any(map(is_sharded, params)):
            return
        self.met = True
        own = [int(_bits(params))]
        device = params[0].device
        rows = self.team.gathered(own, device, "comparing weights")
        _check_alike(
            rows,
            "weights",
            ": wrap the network in DistributedDataParallel, which makes them alike, or seed all "
            "ranks alike before it is built",
        )

    def census(
        self, samples: Any, step: int, params: Any, dampings: Any
    ) -> Census:
        """What each rank has captured; all must be at the same step and damping."""
        looks = [samples.look(i) for i in range(len(samples.sites))]
        # The hash of floats is the same in every process.
        lam = hash(tuple([dampings[p] for p in params])) % 2**62
        own = [step, lam, samples.total, int(samples.half)]
        for look in looks:
            own += look.code, look.kappa
        rows = [own]
        when = f" at step {step}"
        if self.team.many:
            self.compare(params)
            what = "the refresh" + when
            rows = self.team.gathered(own, samples.device, what)
        steps, lams, totals, halves, *rest = zip(*rows, strict=True)
        if len(set(steps)) > 1:
            raise RuntimeError(
                f"the ranks refresh their curvature at different steps: {list(steps)}"
            )
        _check_alike(lams, "dampings", when + ": all ranks need the same")
        sites = []
        for look, codes, kappas in zip(
            looks, rest[::2], rest[1::2], strict=True
        ):
            mismatch = look.mismatch
            if mismatch is None and -1 in codes:
                mismatch = f"on rank {codes.index(-1)} dimension 0 of its input is not the sample"
            counts = [max(0, code - 1) for code in codes]
            found = sum(counts), max(kappas), max(codes) > 0, mismatch
            sites.append(SiteCensus(look, counts, *found))
        taken = [min(total, samples.limit) for total in totals]
        return Census(taken, any(halves), sites)

    def loaded(self, state: list[int], device: torch.device) -> bool:
        """Whether all ranks have loaded the same, so that they can go on from it."""
        rows = self.team.gathered(state, device, "comparing what was loaded")
        return rows.count(rows[0]) == len(rows)

    def agree(
        self, states: dict[int, Any], refreshed: list[int], sites: list[Site]
    ) -> list[int]:
        """Make the refreshed states alike; the layers that are to be built anew.

        Should rounding have parted the ranks, the first one's holds.
        """
        if not self.team.many or not refreshed:
            return []
        kept = []
        own = []
        for i in refreshed:
            state = states[i]
            tensors = state.tensors()
            if sites[i].sharded:  # each rank has its own part of U
                apart = {id(t) for t in state.U.tensors()}
                tensors = [t for t in tensors if id(t) not in apart]
            kept.append(tensors)
            own.append([state.columns, int(_bits(tensors))])
        device = sites[0].lead.device
        rows = self.team.gathered(own, device, "comparing bases")
        anew = []
        for i, tensors, *seen in zip(refreshed, kept, *rows, strict=True):
            widths = {columns for columns, _ in seen}
            if len(widths) > 1:
                anew.append(i)
            elif seen.count(seen[0]) < len(seen):
                if self.team.rank:
                    torch._foreach_zero_(tensors)
                self.team.sum_(tensors, "sharing a basis")
                states[i].follow()
        return anew


# A rank's corrections that travel with the gradients, their mean, and the stamp that both hold for.
NOTHING: Any = {}, {}, None


class Averaged(Shared):
    """Directions of `block` and `lagged`."""

    averages = True

    def __init__(self, team: Team, module: nn.Module) -> None:
        super().__init__(team)
        self.message = NOTHING
        self.before: Tensors = {}  # where lagged: the last step's gradients
        self.lagged = team.strategy == "lagged"
        self.hooked = False
        ddp = nn.parallel.DistributedDataParallel
        if self.lagged and team.many and isinstance(module, ddp):
            # Where there is a hook already, sums travel alone.
            with suppress(RuntimeError):
                module.register_comm_hook((team, weakref.ref(self)), _along)
                self.hooked = True

    def loaded(self, *_: Any) -> bool:
        """Never: nobody knows which layers the others have curvature of."""
        self.covered = {}
        self.before = {}
        self.message = NOTHING
        return False

    def agree(
        self, states: dict[int, Any], refreshed: list[int], sites: list[Site]
    ) -> list[int]:
        """Relative dampings refer to the ranks' mean of the largest eigenvalue."""
        tops = sites[0].lead.new_zeros(len(sites), dtype=torch.float64)
        for i, state in states.items():
            tops[i] = state.top
        self.team.mean_([tops], "agreeing on λ")
        for i, state in states.items():
            state.top.copy_(tops[i])
        return []

    def directions(self, grads: Tensors, plan: Any, stamp: Any) -> Tensors:
        """What came along with the gradients holds while the stamp is the same."""
        sent, mean, stamped = self.message
        self.message = NOTHING
        if mean.keys() != sent.keys() or stamped != stamp:
            base = {p: self.before.get(p, g) for p, g in grads.items()}
            mean = self._mean(base, plan)
        if self.lagged:
            self.before = {p: g.clone() for p, g in grads.items()}
        ds: Tensors = {
            p: g - mean[p].to(g.dtype) if p in mean else g
            for p, g in grads.items()
        }
        plan.graft(grads, ds)
        return ds

    def ahead(self, plan: Any, stamp: Any) -> None:
        """What can be sent along with the next gradients, if they refresh nothing."""
        one_sided = all(c.rank is None for c in self.covered.values())
        if self.hooked and self.before and one_sided:
            self.message = self._corrections(self.before, plan), {}, stamp

    def _mean(self, base: Tensors, plan: Any) -> Tensors:
        """(1/𝓜) Σ_i U_i b_i by parameter."""
        out = self._corrections(base, plan)
        self.team.mean_(list(out.values()), "averaging directions")
        for i, (site, active, rank) in self.covered.items():
            if rank is not None:
                d = out[i, "G"] @ out[i, "A"].mT
                out |= site.scatter(active, d.flatten())
        return out

    def _corrections(self, base: Tensors, plan: Any) -> Tensors:
        """This rank's U_i b_i by parameter, or by layer the two sides of eq. 23."""
        solved = plan.directions(base)
        out: Tensors = {}
        for i, covered in sorted(self.covered.items()):
            if covered.rank is not None:
                sides = _sides(covered, plan.solver(i), base)
                out[i, "G"], out[i, "A"] = sides
                continue
            params = [s.param for s in covered.active]
            out |= {p: base[p] - solved[p] for p in params if p in base}
        return out


def _sides(covered: Covered, solver: Any, base: Tensors) -> list[Tensor]:
    """Gᶜ and Aᶜ of C_U(b), zero where this rank has no curvature of the layer."""
    site, active, rank = covered
    if solver is None:
        h, *sizes = site.shape(active)
        zeros = site.lead.new_zeros
        return [zeros(h, n, rank, dtype=site.dtype) for n in sizes]
    g = site.gather(active, base, site.dtype)
    b = solver.coefficients(solver.project(g))
    sides = solver.U.sides(b.to(site.dtype))
    missing = rank - solver.U.kappa
    return [pad(t.to(site.dtype), (0, missing)) for t in sides]


def _along(state, bucket):  # type: ignore[no-untyped-def]  # torch reads annotations
    """DDP's own mean of a bucket, with ours behind it while the optimizer lives."""
    team, strategy = state
    averaged = strategy()
    sent, received, _ = NOTHING if averaged is None else averaged.message
    grads = bucket.buffer()
    extra = {p: sent[p] for p in bucket.parameters() if p in sent}
    ours = [t.to(grads.dtype) for t in extra.values()]
    rows = [grads, *ours]
    both = _flatten_dense_tensors(rows).div_(team.size)
    reduced = dist.all_reduce(both, group=team.group, async_op=True)

    # gloo's thread may hold on to this a little longer than the backward takes. It must not hold
    # the strategy: an optimizer that is gone on one rank would still be there on another, whose
    # message would be twice as long.
    def arrived(done: Any) -> Any:
        mean, *parts = _unflatten_dense_tensors(done.value()[0], rows)
        received.update(zip(extra, parts, strict=True))
        return grads.copy_(mean)

    return reduced.get_future().then(arrived)


def strategy_of(strategy: str | None, module: nn.Module) -> Any:
    """The strategy of a module's ranks."""
    team = team_of(strategy, module)
    return Averaged(team, module) if team.averages else Shared(team)


def _check_alike(values: Sequence[Any], what: str, advice: str) -> None:
    """Refuse ranks that have something else than the first."""
    for rank, value in enumerate(values):
        if value != values[0]:
            raise RuntimeError(
                f"the {what} of rank {rank} are not those of rank 0{advice}"
            )


def _bits(tensors: Sequence[Tensor]) -> Tensor:
    """A sum () of all bits: tensors that differ have different ones, but for rare cases.

    It does not depend on the order of summation.
    """
    sums = []
    for t in tensors:
        # A single number may have any stride.
        flat = t.detach().contiguous()
        flat = flat.as_strided((t.numel(),), (1,))
        words = flat.view(getattr(torch, f"int{8 * min(8, t.itemsize)}"))
        sums.append(words.sum(dtype=torch.int64).to(tensors[0].device))
    return torch.stack(sums).sum()
