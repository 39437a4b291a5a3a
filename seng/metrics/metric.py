"""What a metric is: it plans from shapes, is initialised on a refresh, and gives a solver for every
step.

    Metric.plan(dims, budget) -> [Plan]          which form each layer keeps, and why
    Metric.refresh(layers, team) -> [State]      expensive, on refresh steps
    State.at(damping) -> Solver                  when the damping or the state changes
    Solver(g) -> d                               cheap, pure tensors, at every step

A metric of your own needs `init`, one layer's state from its per-sample gradients:

    class Mine(Metric):
        makes = MyState  # a frozen dataclass, so that checkpoints are taken up again

        def init(self, layer, team):
            return MyState(...)

    seng.SENG(model, curvature=Mine())
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from seng.distributed.team import Team
from seng.gpu.recorder import Run, directly
from seng.layers.sites import Site
from seng.linalg.operators import Operator, Shape
from seng.metrics.plan import Dims, Plan

Solver = Callable[[Tensor], Tensor]  # g (n,) -> d (n,)
TRUE = torch.ones((), dtype=torch.bool, device="cpu")
Draw = Callable[..., torch.Generator]


UNSAVED = {"saved": False}  # metadata of fields that checkpoints leave out


@dataclass(frozen=True)
class LayerRefresh:
    """One layer on a refresh: what was captured of it, and what there was before."""

    plan: Plan
    U: Operator  # this rank's samples, columns u_i/√ϱ
    samples: int  # ϱ of this rank's step
    positions: int  # over all samples
    counts: list[int]  # samples on every rank
    previous: State | None  # over the same parameters
    damping: float
    precision: torch.dtype  # the least in which gradients were computed
    half: bool  # whether a basis may be kept in half precision
    generator: Draw  # the same on all ranks
    timer: AbstractContextManager[None]
    basis: Callable[
        [Tensor], Operator
    ]  # Y (k, n) -> U = Yᵀ, spread as the layer is


STATES: dict[str, type[State]] = {}  # by name, as checkpoints have them


class State(ABC):
    """What a layer keeps between refreshes: a frozen dataclass of tensors."""

    form = "state"  # of U
    base = "identity"  # what stands in the place of I
    columns = 0  # of U
    sketch_error: Tensor | float | None = 0.0
    failures: Tensor | int = 0  # solves that fell back to the plain gradient

    def __init_subclass__(cls) -> None:
        STATES[cls.__name__] = cls

    @abstractmethod
    def at(self, damping: float) -> Solver:
        """The solver at this λ."""

    def fits(self, shape: Shape) -> bool:
        """Whether it is that of a layer of this shape."""
        return True

    def fine(self) -> Tensor:
        """Whether all of it is finite, (); a refresh that is not is dropped."""
        found = [
            t.isfinite().all() for t in self.tensors() if t.is_floating_point()
        ]
        return torch.stack(found).all() if found else TRUE

    def spectrum(self, damping: float | None) -> tuple[Any, Any, Any]:
        """Largest eigenvalue and trace of the curvature, and λ; None where unknown."""
        return None, None, None

    def tensors(self) -> list[Tensor]:
        """All that is kept."""
        return tensors_of(self)

    @property
    def dtype(self) -> torch.dtype | None:
        """The precision that it solves in; None: in any."""
        floats = [t.dtype for t in self.tensors() if t.is_floating_point()]
        return floats[0] if floats else None

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors())


class Metric(ABC):
    """Which curvature layers keep."""

    captures = True  # whether it needs per-sample gradients at all
    per_sample = True  # whether dimension 0 has to be the sample
    reduces = False  # whether `keep` does anything
    together = False  # whether all layers share one solve
    makes: type[State] | None = (
        None  # what `init` gives; None: nothing is loaded
    )

    def __repr__(self) -> str:
        """The same on all ranks, which compare what they build."""
        return f"{type(self).__name__}()"

    def refuses(self, site: Site) -> str | None:
        """Why a layer takes the plain gradient, in words; None where it is covered."""
        return None

    def plan(
        self,
        dims: Sequence[Dims],
        budget: int | None = None,
        pooled: bool = False,
    ) -> list[Plan]:
        """One plan per layer; `pooled` where all ranks share one curvature."""
        return [Plan(d, "own", 0, type(self).__name__) for d in dims]

    def keep(self, U: Operator, dims: Dims, generator: Draw) -> Operator:
        """What of a capture waits from the backward until step()."""
        return U

    def sides(self, chosen: Plan) -> int | None:
        """The rank of two-sided corrections, which eq. 23 has; None for all others."""
        return None

    def remark(self, chosen: Plan) -> str | None:
        """What users should know of a layer's plan, if anything."""
        return None

    def accepts(self, state: Any, shape: Shape) -> State | None:
        """A loaded state as this metric has them; None where it is another's."""
        return state if self.makes and isinstance(state, self.makes) else None

    @abstractmethod
    def init(self, layer: LayerRefresh, team: Team) -> State:
        """The state of one layer."""

    def refresh(
        self, layers: Sequence[LayerRefresh], team: Team, run: Run = directly
    ) -> list[State]:
        """The states of all layers."""
        out = []
        for layer in layers:
            with layer.timer:
                out.append(self.init(layer, team))
        return out

    def solvers(
        self,
        states: Sequence[Any],
        dampings: Sequence[float],
        run: Run = directly,
    ) -> list[Solver]:
        """The solvers of several layers, each with its damping."""
        return [
            s.at(damping) for s, damping in zip(states, dampings, strict=True)
        ]


@dataclass(frozen=True)
class PowerSolver:
    """d = P⁻¹g, as long as g where it is grafted."""

    inverse: Solver
    graft: bool

    def __call__(self, g: Tensor) -> Tensor:
        d = self.inverse(g)
        return grafted(d, g) if self.graft else d


def tensors_of(*values: Any) -> list[Tensor]:
    """The tensors in nested dataclasses, each once."""
    found: dict[int, Tensor] = {}

    def walk(value: Any) -> None:
        if isinstance(value, Tensor):
            found[id(value)] = value
        elif is_dataclass(value):
            for f in fields(value):
                walk(getattr(value, f.name))

    for value in values:
        walk(value)
    return list(found.values())


def grafted(d: Tensor, g: Tensor) -> Tensor:
    """d at the length of g, so that SGD's learning rate carries over."""
    length = torch.linalg.vector_norm(d).clamp_min(torch.finfo(d.dtype).tiny)
    out: Tensor = d * (torch.linalg.vector_norm(g) / length)
    return out
