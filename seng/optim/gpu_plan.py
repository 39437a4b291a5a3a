"""A step's solves on a GPU, where a small network's step is bound by launches.

Low rank over λI is served by the kernels of `seng.gpu.grouped`, all layers at once; the other
solvers run one after the other, from the second step on as one CUDA graph over copies of the
gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from seng.gpu.grouped import Grouped, Item, Piece, available, fits
from seng.gpu.recorder import Graph, capturing, record, write
from seng.layers.sites import is_sharded
from seng.optim.step_plan import (
    Gradients,
    LayerSolve,
    StepPlan,
)


class GpuPlan(StepPlan):
    """The same solves with few launches."""

    def __init__(
        self, solves: Sequence[LayerSolve], grads: Gradients, updates: bool
    ) -> None:
        super().__init__(solves)
        self.given = list(map(id, grads))
        items = _items(solves, grads)
        self.members = [s for s in solves if s.index in items]
        self.params = [
            p for s in self.members for p in s.params
        ]  # of the kernels
        self.others = RecordedPlan([s for s in solves if s.index not in items])
        self.kernels: Grouped | None = None
        if items:
            plain = (
                _plain_items(grads, set(self.params), items) if updates else []
            )
            self.params += [item.pieces[0].param for item in plain]  # type: ignore[misc]
            self.kernels = Grouped([*items.values(), *plain])

    def holds(self, solves: Sequence[LayerSolve], grads: Gradients) -> bool:
        if self.given != list(map(id, grads)):
            return False
        known = {s.index: (s.solver, s.active) for s in self.solves}
        new = {s.index: (s.solver, s.active) for s in solves}
        if known.keys() != new.keys():
            return False
        for i, (solver, active) in new.items():
            if known[i][0] is not solver or known[i][1] != active:
                return False
        if self.kernels is not None:
            cores = _cores(self.members)
            items = self.kernels.items[: len(cores)]
            write(
                [(item.core, C) for item, C in zip(items, cores, strict=True)]
            )
        return True

    def _solve(
        self, grads: Gradients, out: dict[nn.Parameter, Tensor]
    ) -> None:
        self.others._solve(grads, out)
        if self.kernels is not None:
            found = self.kernels.directions([out[p] for p in self.params])
            out.update(zip(self.params, found, strict=True))


class RecordedPlan(StepPlan):
    """Solves one after the other, recorded at the second step."""

    def __init__(self, solves: Sequence[LayerSolve]) -> None:
        super().__init__(solves)
        self.params = [p for solve in self.solves for p in solve.params]
        self.called = False
        self.graph: Graph | None = None
        self.copies: dict[nn.Parameter, Tensor] = {}

    def _solve(
        self, grads: Gradients, out: dict[nn.Parameter, Tensor]
    ) -> None:
        whole = bool(self.solves) and all(p in grads for p in self.params)
        if whole and self.called and self.graph is None and not capturing():
            self._record(grads)
        self.called = True
        if not whole or self.graph is None:
            return super()._solve(grads, out)
        given = [grads[p] for p in self.params]
        out.update(zip(self.params, self.replayed(given), strict=True))

    def replayed(self, grads: list[Tensor]) -> list[Tensor]:
        """d from the gradients of `params`; it holds until the next call."""
        assert self.graph is not None
        places = list(self.copies.values())
        torch._foreach_copy_(places, grads)
        self.graph.replay()
        return places

    def _record(self, grads: Gradients) -> None:
        """d takes the place of the copy of g."""
        for p in self.params:
            like = torch.empty_like(
                p, dtype=grads[p].dtype, requires_grad=False
            )
            self.copies[p] = like

        def run() -> None:
            found: dict[nn.Parameter, Tensor] = {}
            StepPlan._solve(self, self.copies, found)
            places = list(self.copies.values())
            torch._foreach_copy_(places, [found[p] for p in self.copies])

        self.graph = record(self.solves[0].site.lead.device, run)


def _items(solves: Sequence[LayerSolve], grads: Gradients) -> dict[int, Item]:
    """The layers that the kernels serve, by their index."""
    if not available(solves[0].site.lead.device):
        return {}
    found = {}
    served = [
        s for s in solves if _served(s) and all(p in grads for p in s.params)
    ]
    for solve, core in zip(served, _cores(served), strict=True):
        item = _item(solve, core)
        if fits(item):
            found[solve.index] = item
    return found


def _served(solve: LayerSolve) -> bool:
    """Whether d = g − Yᵀ(C(Yg)), and parameters lie as the layer's matrix does."""
    solver: Any = solve.solver
    basis = getattr(solver, "basis", None)
    in_order = all(s.in_order for s in solve.active)
    return basis is not None and in_order


def _item(solve: LayerSolve, core: Tensor) -> Item:
    """A layer as the kernels take it."""
    solver: Any = solve.solver
    h, n_G, _ = solve.site.shape(solve.active)
    pieces: list[Piece] = []
    column = 0
    for segment in solve.active:
        pieces.append(Piece(segment.param, column, segment.shape[2]))
        column += segment.shape[2]
    Y, _ = solver.basis
    return Item(Y, h * n_G, tuple(pieces), core, solver.failures)


def _plain_items(
    grads: Gradients, inside: set[nn.Parameter], items: dict[int, Item]
) -> list[Item]:
    """Parameters whose direction is their gradient, as blocks of no columns."""
    Y = next(iter(items.values())).Y
    none = torch.zeros((), dtype=torch.int64, device=Y.device)
    out = []
    for p in grads:
        if p in inside or p.device != Y.device or is_sharded(p):
            continue
        rows = p.shape[0] if p.dim() > 1 else 1
        empty = torch.empty(0, p.numel(), dtype=Y.dtype, device=p.device)
        piece = Piece(p, 0, p.numel() // max(1, rows))
        core = torch.empty(0, 0, dtype=torch.float32, device=p.device)
        item = Item(empty, rows, (piece,), core, none)
        if fits(item):
            out.append(item)
    return out


def _cores(solves: Sequence[LayerSolve]) -> list[Tensor]:
    """C of d = g − Yᵀ(C(Yg)) for U = scale·Yᵀ, those of one size at once."""
    sizes: dict[int, list[int]] = {}
    solvers: list[Any] = [s.solver for s in solves]
    for i, solver in enumerate(solvers):
        sizes.setdefault(len(solver.inverse), []).append(i)
    out: dict[int, Tensor] = {}
    for same in sizes.values():
        scale = torch.stack([solvers[i].basis[1] for i in same]).double()
        C = torch.stack([solvers[i].inverse for i in same])
        C = C * scale.square()[:, None, None]
        out |= zip(same, C.float().unbind(), strict=True)
    return [out[i] for i in range(len(solves))]
