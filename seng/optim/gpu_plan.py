"""A step's solves on a GPU, where a small network's step is bound by launches.

Low rank over λI is served by the kernels of `seng.gpu.grouped`, all layers at once; the other
solvers run one after the other, from the second step on as one CUDA graph over copies of the
gradients.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from seng.gpu.grouped import Grouped, Item, available, fits
from seng.gpu.recorder import Replay, write
from seng.layers.sites import is_sharded
from seng.optim.step_plan import Directions, Gradients, LayerRecord, StepPlan


class GpuPlan(StepPlan):
    """The same solves with few launches."""

    def __init__(
        self, solves: Sequence[LayerRecord], grads: Gradients, updates: bool
    ) -> None:
        super().__init__(solves)
        self.given = _given(solves, grads)
        items = _items(solves, grads)
        self.members = [s for s in solves if s.index in items]
        rest = [s for s in solves if s.index not in items]
        self.others = RecordedPlan(rest, grads)
        self.kernels: Grouped | None = None
        if items:
            served = list(items.values())
            plain = _plain_items(grads, served) if updates else []
            self.kernels = Grouped([*served, *plain])

    def holds(self, solves: Sequence[LayerRecord], grads: Gradients) -> bool:
        if self.given != _given(solves, grads):
            return False
        if self.kernels is not None:
            # Those of the members are the first.
            places = [item.core for item in self.kernels.items]
            write(list(zip(places, _cores(self.members), strict=False)))
        return True

    def _solve(self, grads: Gradients, out: Directions) -> None:
        self.others._solve(grads, out)
        if self.kernels is not None:
            params: Any = self.kernels.params
            found = self.kernels.directions([out[p] for p in params])
            out.update(zip(params, found, strict=True))


def _given(solves: Sequence[LayerRecord], grads: Gradients) -> Any:
    """What a plan is for; solvers may be rewritten in place."""
    return list(map(id, grads)), [
        (s.index, id(s.solver), s.active) for s in solves
    ]


class RecordedPlan(StepPlan):
    """Solves one after the other, from copies of the gradients, where d takes their place."""

    def __init__(
        self, solves: Sequence[LayerRecord], grads: Gradients
    ) -> None:
        super().__init__(solves)
        self.copies: dict[nn.Parameter, Tensor] = {}
        for p in [p for s in solves for p in s.params if p in grads]:
            like = torch.empty_like(p, dtype=grads[p].dtype)
            self.copies[p] = like.requires_grad_(False)
        if solves:
            self.replay = Replay(solves[0].site.lead.device)

    def _solve(self, grads: Gradients, out: Directions) -> None:
        found = self.replayed([grads[p] for p in self.copies])
        out.update(zip(self.copies, found, strict=True))

    def replayed(self, grads: list[Tensor]) -> list[Tensor]:
        """d from the gradients of `copies`; it holds until the next call."""
        places = list(self.copies.values())
        if places:
            torch._foreach_copy_(places, grads)
            self.replay(self._run)
        return places

    def _run(self) -> None:
        found: Directions = {}
        with torch.autocast(self.replay.device.type, enabled=False):
            super()._solve(self.copies, found)
        places = list(self.copies.values())
        torch._foreach_copy_(places, [found[p] for p in self.copies])


def _items(solves: Sequence[LayerRecord], grads: Gradients) -> dict[int, Item]:
    """The layers that the kernels serve, by their index."""
    if not available(solves[0].site.lead.device):
        return {}
    found = {}
    served = [s for s in solves if _served(s, grads)]
    for solve, core in zip(served, _cores(served), strict=True):
        h, n_G, _ = solve.site.shape(solve.active)
        solver = solve.solver
        Y, _ = solver.basis
        params = tuple(solve.params)
        item = Item(Y, h * n_G, params, core, solver.failures)
        if fits(item):
            found[solve.index] = item
    return found


def _served(solve: LayerRecord, grads: Gradients) -> bool:
    """Whether d = g − Yᵀ(C(Yg)), and parameters lie as the layer's matrix does."""
    if getattr(solve.solver, "basis", None) is None:
        return False
    return all(s.in_order and s.param in grads for s in solve.active)


def _plain_items(grads: Gradients, served: list[Item]) -> list[Item]:
    """Parameters whose direction is their gradient, as blocks of no columns."""
    Y = served[0].Y
    none = torch.zeros((), dtype=torch.int64, device=Y.device)
    core = torch.empty(0, 0, dtype=torch.float32, device=Y.device)
    inside = {p for item in served for p in item.params}
    out = []
    for p in grads:
        if p in inside or is_sharded(p):
            continue
        rows = p.shape[0] if p.dim() > 1 else 1
        item = Item(Y.new_empty(0, p.numel()), rows, (p,), core, none)
        if fits(item):
            out.append(item)
    return out


def _cores(solves: Sequence[LayerRecord]) -> list[Tensor]:
    """C of d = g − Yᵀ(C(Yg)) for U = scale·Yᵀ, those of one size at once."""
    sizes: defaultdict[int, list[Any]] = defaultdict(list)
    for solve in solves:
        sizes[len(solve.solver.inverse)].append(solve.solver)
    out: dict[int, Tensor] = {}
    for same in sizes.values():
        scale = torch.stack([solver.basis[1] for solver in same]).double()
        C = torch.stack([solver.inverse for solver in same])
        C = C * scale.square()[:, None, None]
        out |= zip(map(id, same), C.float().unbind(), strict=True)
    return [out[id(solve.solver)] for solve in solves]
