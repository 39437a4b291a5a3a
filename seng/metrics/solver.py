"""How a step solves with its blocks: all that `kernels` can serve at once, the others one by one, recorded as a CUDA graph.

On a GPU a small network's step is bound by launches, and a block solved by itself takes a dozen of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from seng.distributed.sharded import Sharded, is_sharded
from seng.gpu.grouped import Grouped, Hyper, Item, Piece, available, fits
from seng.gpu.replay import capturing, side_stream, write
from seng.layers.kinds import ROWS
from seng.layers.sites import Segment, Site
from seng.linalg.operators import Explicit, Merged
from seng.linalg.sketch import Identity
from seng.linalg.windows import Windows
from seng.metrics.block import Block
from seng.tell.diagnostics import compare, compare_energies, cosine_of

Gradients = Mapping[nn.Parameter, Tensor]
Compared = Callable[[], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Solve:
    """One block at one step."""

    site: Site
    active: tuple[Segment, ...]  # what it was built over
    block: Block
    lam: Tensor
    inverse: Tensor  # (λI + K)⁻¹
    seen: list[Tensor] = field(
        default_factory=list
    )  # Uᵀg and b of the last call, where they tell all that is asked of d

    @property
    def params(self) -> list[nn.Parameter]:
        return [segment.param for segment in self.active]

    def __call__(self, grads: Gradients) -> dict[nn.Parameter, Tensor]:
        """λ(M + λI)⁻¹g, for the parameters that have a gradient."""
        parts = self._parts(grads)
        if parts is not None:
            return dict(zip(self.params, self._by_parts(*parts), strict=True))
        d = self.block.direction(
            self.site.gather(self.active, grads, self.block.gram.dtype),
            self.lam,
            self.inverse,
        )
        return {
            p: part.to(p.dtype)
            for p, part in self.site.scatter(self.active, d).items()
            if p in grads
        }

    def compared(self, grads: Gradients, directions: Gradients) -> Compared:
        """cos(g, d) and ‖d‖/‖g‖ of the last call, to be worked out when they are asked for."""
        if not self.seen:
            g, d = (
                self.site.gather(self.active, x, self.block.gram.dtype)
                for x in (grads, directions)
            )
            if isinstance(self.block.U, Sharded):  # each rank has a part
                sums = torch.stack([g @ g, d @ d, g @ d])
                self.block.U.team.sum_([sums], "comparing directions")
                numbers = cosine_of(*sums)
            else:
                numbers = compare(g, d)
            return lambda: numbers
        c, b = (t.clone() for t in self.seen)
        return partial(
            _energies,
            torch._foreach_norm([grads[p] for p in self.params]),
            c,
            b,
            self.lam,
        )

    def _parts(self, grads: Gradients) -> tuple[Windows, *tuple[Tensor, ...]] | None:
        """U and the gradients of weight and bias, where they need not be laid side by side, which would copy them."""
        U = self.block.U
        if (
            not isinstance(U, Windows)
            or not isinstance(self.block.omega, Identity)
            or U.dtype != torch.float32
        ):
            return None
        if self.block.base is not None or self.block.graft:
            return None
        fine = all(p in grads and grads[p].dtype == torch.float32 for p in self.params)
        return (U, *(grads[p] for p in self.params)) if fine else None

    def _by_parts(
        self, U: Windows, weight: Tensor, bias: Tensor | None = None
    ) -> list[Tensor]:
        c = U.against(weight, bias).to(self.inverse.dtype)
        b = self.inverse @ c
        fine = b.isfinite().all()
        self.block.failures += ~fine
        if not torch.compiler.is_compiling():
            self.seen[:] = c, b
        W, v = U.combined(torch.where(fine, b, 0).to(U.dtype), minus=weight.flatten(1))
        return (
            [W.view_as(weight)]
            if bias is None or v is None
            else [W.view_as(weight), bias - v]
        )


class Recorded:
    """Solves as one launch: a CUDA graph over copies of the gradients, which autograd puts now here, now there."""

    def __init__(self, solves: Sequence[Solve], grads: Gradients) -> None:
        params = [p for solve in solves for p in solve.params]
        self.copies = {
            p: torch.empty_like(p, dtype=grads[p].dtype, requires_grad=False)
            for p in params
        }
        self.places = list(self.copies.values())
        self.graph = torch.cuda.CUDAGraph()
        device = solves[0].site.lead.device
        with (
            torch.cuda.device(device),
            torch.cuda.graph(
                self.graph,
                stream=side_stream(device),
                capture_error_mode="thread_local",
            ),
        ):
            out = {p: d for solve in solves for p, d in solve(self.copies).items()}
            torch._foreach_copy_(
                self.places, [out[p] for p in self.copies]
            )  # d takes the place of the copy
        self.seen = [(solve.seen, list(solve.seen)) for solve in solves]

    def __call__(self, grads: list[Tensor]) -> list[Tensor]:
        """d from the gradients of `copies`, in order; it holds until the next call."""
        torch._foreach_copy_(self.places, grads)
        self.graph.replay()
        for place, seen in self.seen:
            place[:] = seen
        return self.places


class OneByOne:
    """Solves one after the other; on a GPU from the second call on as a graph."""

    def __init__(self, solves: Sequence[Solve]) -> None:
        self.solves = list(solves)
        self.params = [p for solve in self.solves for p in solve.params]
        self.called = False
        self.graph: Recorded | None = None

    def __call__(self, grads: Gradients) -> dict[nn.Parameter, Tensor]:
        """d for the parameters of these blocks."""
        with (
            torch.autocast(self.solves[0].site.lead.device.type, enabled=False)
            if self.solves
            else nullcontext()
        ):
            return self._solved(grads)

    def replayed(self, grads: list[Tensor]) -> list[Tensor] | None:
        """d from the gradients of `params`, once there is a graph."""
        return (
            None
            if self.graph is None or len(grads) != len(self.params)
            else self.graph(grads)
        )

    def _solved(self, grads: Gradients) -> dict[nn.Parameter, Tensor]:
        whole = bool(self.solves) and all(p in grads for p in self.params)
        devices = {solve.site.lead.device for solve in self.solves}
        spread = any(
            isinstance(solve.block.U, Sharded) for solve in self.solves
        )  # these send something
        recordable = (
            whole
            and len(devices) == 1
            and devices.pop().type == "cuda"
            and not torch.compiler.is_compiling()
        )
        recordable = recordable and not spread
        if recordable and self.graph is None and self.called and not capturing():
            self.graph = Recorded(self.solves, grads)
        if recordable and self.graph is not None:
            return dict(
                zip(
                    self.params,
                    self.graph([grads[p] for p in self.params]),
                    strict=True,
                )
            )
        self.called = True
        alone = [
            solve for solve in self.solves if not isinstance(solve.block.U, Sharded)
        ]
        out = {p: d for solve in alone for p, d in solve(grads).items()}
        return (
            out
            | _spread(
                [solve for solve in self.solves if isinstance(solve.block.U, Sharded)],
                grads,
            )
            if spread
            else out
        )


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _spread(solves: Sequence[Solve], grads: Gradients) -> dict[nn.Parameter, Tensor]:
    """λ(M + λI)⁻¹g where each rank has a part of g: the layers' Uᵀg travel in one message."""
    gs = [s.site.gather(s.active, grads, s.block.gram.dtype) for s in solves]
    Us = [s.block.U for s in solves]
    cs = [U.Y @ g for U, g in zip(Us, gs, strict=True)]  # type: ignore[attr-defined]
    for team in dict.fromkeys(U.team for U in Us):  # type: ignore[attr-defined]
        team.sum_(
            [c for c, U in zip(cs, Us, strict=True) if U.team == team],  # type: ignore[attr-defined]
            "Uᵀg of spread parameters",
        )
    out: dict[nn.Parameter, Tensor] = {}
    for s, U, g, c in zip(solves, Us, gs, cs, strict=True):
        b = s.inverse @ c.to(s.inverse.dtype)
        fine = b.isfinite().all()
        s.block.failures += ~fine
        d = g - U.mv(torch.where(fine, b, 0).to(g.dtype))
        out |= {
            p: part.to(p.dtype)
            for p, part in s.site.scatter(s.active, d).items()
            if p in grads
        }
    return out


@dataclass(frozen=True)
class Ready:
    """What a step solves with."""

    alone: OneByOne = field(default_factory=lambda: OneByOne([]))
    grouped: Grouped | None = None
    members: list[Solve] = field(default_factory=list)  # the grouped blocks
    params: list[nn.Parameter] = field(
        default_factory=list
    )  # theirs, in order; then those that only take their update there

    @property
    def solve_of(self) -> dict[int, Solve]:
        """By the identity of the block."""
        return {id(s.block): s for s in (*self.members, *self.alone.solves)}

    def directions(self, grads: Gradients) -> dict[nn.Parameter, Tensor]:
        """λ(M + λI)⁻¹g; the gradient itself where there is no block."""
        out = dict(grads) | self.alone(grads)
        if self.grouped is not None:
            out |= zip(
                self.params,
                self.grouped.directions([out[p] for p in self.params]),
                strict=True,
            )
        return out

    def renewed(self, solves: Sequence[Solve]) -> bool:
        """Whether it holds for these too: the same blocks, written to where they are. Then it is made to."""
        before = self.solve_of
        if len(before) != len(solves) or any(
            id(s.block) not in before
            or (
                s.inverse is not before[id(s.block)].inverse
                or s.active != before[id(s.block)].active
            )
            for s in solves
        ):
            return False
        if self.grouped is not None:
            cores = _cores(self.members)
            items = self.grouped.items[: len(self.members)]
            write(
                [
                    (item.core, cores[id(s)])
                    for item, s in zip(items, self.members, strict=True)
                ]
            )
        return True

    def compared(
        self, solves: Sequence[Solve], grads: Gradients, directions: Gradients
    ) -> list[Compared]:
        """cos(g, d) and ‖d‖/‖g‖ for some of them at the last step, to be worked out when they are asked for.

        Of blocks that the kernels serve, the directions are not asked for.
        """
        found: dict[int, Compared] = {}
        if self.grouped is not None:
            norms = dict(
                zip(
                    self.params,
                    torch._foreach_norm([grads[p] for p in self.params]),
                    strict=True,
                )
            )
            for solve, cut in zip(self.members, self.grouped.projected(), strict=False):
                found[id(solve.block)] = partial(
                    _energies_of, solve, [norms[p] for p in solve.params], cut
                )
        return [found.get(id(s.block)) or s.compared(grads, directions) for s in solves]


class Quick:
    """A step of SGD with everything at hand: the parameters that the kernels serve, their momenta and their groups."""

    def __init__(
        self,
        ready: Ready,
        group_of: list[int],
        states: list[dict[str, Any]],
        groups: list[dict[str, Any]],
    ) -> None:
        self.ready, self.group_of, self.states, self.groups = (
            ready,
            group_of,
            states,
            groups,
        )
        self.entries: list[int] = []  # the optimizer's states, by identity
        self.buffers: list[Tensor | None] = []
        self.at: list[int] | None = (
            None  # where the parameters were when the buffers were made,
        )
        self.momenta: list[float] = []  # and with which momenta
        position = {p: i for i, p in enumerate(ready.params)}
        self.places = [position[p] for p in ready.alone.params if p in position]

    def step(self, grads: list[Tensor], alone: Gradients | None = None) -> None:
        """Update the parameters in place; `alone` has the directions of blocks solved one by one, if they are known."""
        ready = self.ready
        assert ready.grouped is not None
        if self.places:
            found = (
                None if alone else ready.alone.replayed([grads[i] for i in self.places])
            )
            if found is None:
                alone = alone or ready.alone(
                    {ready.params[i]: grads[i] for i in self.places}
                )
                found = [alone[ready.params[i]] for i in self.places]
            grads = list(grads)
            for i, d in zip(self.places, found, strict=True):
                grads[i] = d
        hyper = [
            Hyper(
                float(h["lr"]),
                h["momentum"],
                h["weight_decay"],
                h["nesterov"],
                h["maximize"],
            )
            for h in self.groups
        ]
        buffers = [state.get("momentum_buffer") for state in self.states]
        at, momenta = ready.grouped.located(), [h.momentum for h in hyper]
        known = (
            at is self.at
            and momenta == self.momenta
            and all(map(is_, buffers, self.buffers))
        )
        if any(momenta) and not known:
            entries = zip(self.states, ready.params, self.group_of, strict=True)
            buffers = self.buffers = [
                momentum_buffer(state, p) if hyper[i].momentum else None
                for state, p, i in entries
            ]
            self.at, self.momenta = at, momenta
        ready.grouped.update(grads, buffers, hyper, self.group_of, located=True)


def momentum_buffer(state: dict[str, Any], p: nn.Parameter) -> Tensor:
    """The momentum of a parameter, laid out in memory as the parameter is."""
    buffer: Tensor | None = state.get("momentum_buffer")
    if buffer is None or buffer.stride() != p.stride():
        buffer = (
            torch.zeros_like(p) if buffer is None else torch.empty_like(p).copy_(buffer)
        )
        state["momentum_buffer"] = buffer
    return buffer


def _energies(
    norms: Sequence[Tensor], c: Tensor, b: Tensor, lam: Tensor
) -> tuple[Tensor, Tensor]:
    return compare_energies(torch.stack(list(norms)).square().sum(), b, c, lam)


def _energies_of(
    solve: Solve, norms: Sequence[Tensor], cut: Compared
) -> tuple[Tensor, Tensor]:
    """From Yg and b of the kernels, U = scale·Yᵀ."""
    c, b = cut()
    U = solve.block.U
    scale = U.scale if isinstance(U, Merged) else 1
    return _energies(norms, c * scale, b / scale, solve.lam)


def sort(solves: Sequence[Solve], grads: Gradients, updates: bool) -> Ready:
    """The blocks of a step by how they are solved; with `updates` the kernels update all other parameters too."""
    if not solves or not available(solves[0].site.lead.device):
        return Ready(OneByOne(solves))
    cores = _cores(solves)
    whole = [s for s in solves if all(p in grads for p in s.params)]
    found = {id(s): _item(s, cores[id(s)]) for s in whole}
    device = next(
        (item.Y.device for item in found.values() if item is not None),
        solves[0].site.lead.device,
    )
    items = {
        key: item
        for key, item in found.items()
        if item is not None and item.Y.device == device and fits(item)
    }
    members = [s for s in solves if id(s) in items]
    params = [p for s in members for p in s.params]
    plain: list[Item] = []
    if updates:
        inside = set(params)
        none = torch.zeros((), dtype=torch.int64, device=device)
        dtype = next(
            (item.Y.dtype for item in items.values()), torch.float32
        )  # of one kind with the others
        others = [
            p
            for p in grads
            if p not in inside and p.device == device and not is_sharded(p)
        ]
        plain = [item for p in others if fits(item := _plain(p, dtype, none))]
        params += [item.pieces[0].param for item in plain]  # type: ignore[misc]
    if not items:
        return Ready(OneByOne(solves))
    grouped = Grouped([*items.values(), *plain])
    return Ready(
        OneByOne([s for s in solves if id(s) not in items]), grouped, members, params
    )


def _plain(p: nn.Parameter, dtype: torch.dtype, none: Tensor) -> Item:
    """A parameter whose direction is its gradient: a block of no columns."""
    rows = p.shape[0] if p.dim() > 1 else 1
    Y = torch.empty(0, p.numel(), dtype=dtype, device=p.device)
    return Item(
        Y,
        rows,
        (Piece(p, 0, p.numel() // max(1, rows)),),
        torch.empty(0, 0, device=p.device),
        none,
    )


def _item(s: Solve, core: Tensor) -> Item | None:
    """A block as the kernels take it; None where they cannot."""
    U = s.block.U
    plain = isinstance(s.block.omega, Identity) and all(
        segment.owner.kind.layout[0] in ROWS for segment in s.active
    )
    if (
        not plain
        or not isinstance(U, Merged | Explicit)
        or s.block.base is not None
        or s.block.graft
    ):
        return None
    h, n_G, _ = s.site.shape(s.active)
    pieces: list[Piece] = []
    column = 0
    for segment in s.active:
        pieces.append(Piece(segment.param, column, segment.shape[2]))
        column += segment.shape[2]
    return Item(
        U.Y if isinstance(U, Merged) else U.U.T,
        h * n_G,
        tuple(pieces),
        core,
        s.block.failures,
    )


def _cores(solves: Sequence[Solve]) -> dict[int, Tensor]:
    """C of d = g − Yᵀ(C(Yg)) for U = scale·Yᵀ, those of one size at once."""
    sizes: dict[tuple[int, torch.device], list[Solve]] = {}
    for s in solves:
        sizes.setdefault((len(s.inverse), s.inverse.device), []).append(s)
    out: dict[int, Tensor] = {}
    for (_, device), same in sizes.items():
        one = torch.ones((), device=device)
        scale = torch.stack(
            [s.block.U.scale if isinstance(s.block.U, Merged) else one for s in same]
        ).double()
        C = torch.stack([s.inverse for s in same]) * scale.square()[:, None, None]
        out |= zip(map(id, same), C.float().unbind(), strict=True)
    return out
