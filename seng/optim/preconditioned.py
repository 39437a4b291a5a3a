"""What `SENG` and `KFAC` share: a torch optimizer whose gradients an engine turns into directions.

step: gradients → refresh, if due → directions → the recipe's update, group by group
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, ParamsT

from seng.checks import check_group, check_number
from seng.notices import warn
from seng.optim.engine import Engine
from seng.optim.fused import Fusion
from seng.optim.settings import Settings
from seng.optim.step_plan import StepPlan
from seng.recipes.orthogonal import Polar
from seng.recipes.recipe import RECIPES, Recipe
from seng.tell.state import nested

Directions = dict[nn.Parameter, Tensor]


class Preconditioned(Optimizer):
    """An optimizer with curvature: `engine` is None where no module was given."""

    engine: Engine | None
    recipe: Recipe

    def __init__(
        self,
        params: nn.Module | ParamsT,
        module: nn.Module | None,
        defaults: dict[str, Any],
    ) -> None:
        if isinstance(params, nn.Module):
            if module is not None and module is not params:
                raise ValueError(
                    "the first argument is a module and module=… is another: give one "
                    "of them"
                )
            module, params = params, list(params.parameters())
        check_group(defaults, type(self).__name__)
        self.engine = None
        self.fusion = Fusion()
        self._dampings_kept: Any = None
        super().__init__(params, defaults)
        self.module = module

    def _build(self, settings: Settings) -> None:
        """The engine, once the groups are there."""
        self.settings = settings
        name = type(self).__name__
        if self.module is not None:
            self.engine = Engine(self.module, self._params(), settings)
        elif settings.strict:
            raise ValueError(
                "strict=True: no module was given, so every parameter would take the "
                "plain gradient"
            )
        else:
            self._check_orthogonal()
            warn(
                "no module was given, so every parameter takes the plain gradient and "
                f"this is SGD; write {name}(model, …), or module=model beside your "
                "parameters"
            )
        self._set_recipes()

    def _set_recipes(self) -> None:
        sites = [] if self.engine is None else self.engine.sites
        self.recipe = RECIPES[self.settings.units](sites)
        self.polar = Polar(sites)
        self.on_gpu = any(site.lead.is_cuda for site in sites)
        self.fusion.forget()

    def _params(self) -> list[nn.Parameter]:
        return [p for group in self.param_groups for p in group["params"]]

    @property
    def orthogonal(self) -> bool:
        """Whether some group takes the polar step."""
        return any(group.get("orthogonal") for group in self.param_groups)

    @property
    def fuses(self) -> bool:
        """Whether a GPU may do directions and update at once."""
        engine = self.engine
        averages = engine is not None and engine.strategy.team.averages
        return self.recipe.fuses and not averages and not self.orthogonal

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; layers that were not trained before are covered from now on."""
        check_group({**self.defaults, **param_group}, type(self).__name__)
        super().add_param_group(param_group)
        if not hasattr(self, "settings"):  # while it is built
            return
        try:
            self._cover()
        except ValueError:
            self.param_groups.pop()
            raise

    def _cover(self) -> None:
        if self.engine is not None:
            self.engine.cover(self._params())
        self._set_recipes()

    @overload
    def step(self, closure: None = ...) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One optimizer step; with a closure, its backward is the one that counts."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.fusion.last is None or not self._repeat():
            self._step()
        return loss

    def _step(self) -> None:
        traced = torch.compiler.is_compiling()
        if traced and self.engine is not None and self.engine.spread:
            self._untraced_step()
            return
        grads, dampings, plan = self._ready(traced)
        if not grads:
            return
        directions = self._directions(grads, dampings, plan)
        for group in self.param_groups:
            self._update(group, directions)
        if self.engine is not None:
            self.engine.advance(dampings)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _untraced_step(self) -> None:
        """Spread parameters: shapes differ among ranks, and with them what is compiled."""
        self._step()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _repeat(self) -> bool:
        dampings = self._dampings()
        if self.engine is None or not self.fusion.repeat(self, dampings):
            return False
        self.engine.advance(dampings)
        return True

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _ready(
        self, traced: bool
    ) -> tuple[Directions, dict[nn.Parameter, float], StepPlan]:
        """Gradients and dampings, checked, and what to solve with: left to Python."""
        grads: Directions = {}
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    grads[p] = p.grad
                    if p.grad.is_sparse:
                        raise RuntimeError(
                            f"{type(self).__name__} does not support sparse gradients; "
                            "use sparse=False in the embedding"
                        )
        dampings = self._dampings()
        if self.engine is None:
            return grads, dampings, StepPlan([])
        for p in (
            self.engine.trained
        ):  # torch.distributed.checkpoint looks for the name
            self.state[p].setdefault("seng", {})
        updates = self.on_gpu and self.fuses
        return (
            grads,
            dampings,
            self.engine.ready(grads, dampings, updates, traced),
        )

    def _dampings(self) -> dict[nn.Parameter, float]:
        """Each parameter's damping; the same object until one changes."""
        key = []
        for group in self.param_groups:
            lam = group["damping"]  # a tensor may be written to
            lam = float(lam) if isinstance(lam, Tensor) else lam
            key.append((lam, len(group["params"])))
        if self._dampings_kept is None or self._dampings_kept[0] != key:
            values: dict[nn.Parameter, float] = {}
            for group in self.param_groups:
                check_number("damping", group["damping"], positive=True)
                values |= dict.fromkeys(
                    group["params"], float(group["damping"])
                )
            self._dampings_kept = key, values
        found: dict[nn.Parameter, float] = self._dampings_kept[1]
        return found

    def _directions(
        self,
        grads: Directions,
        dampings: dict[nn.Parameter, float],
        plan: StepPlan,
    ) -> Directions:
        if self.engine is None:
            return grads
        if type(plan) is not StepPlan:
            rest = self.fusion.step(self, plan, grads, dampings)
            if rest is not None:
                return rest
        return self.engine.directions(plan, grads, dampings)

    def _update(self, group: dict[str, Any], directions: Directions) -> None:
        params = [p for p in group["params"] if p in directions]
        recipe = self.recipe
        directions = recipe.scaled(group, params, directions)
        if group.get("orthogonal"):
            self._check_orthogonal()  # again: a group may have been changed by hand
            recipe = self.polar
        recipe.step(self.state, group, params, directions)

    def _check_orthogonal(self) -> None:
        """The polar step is about the layers' whole matrices."""

    def __getstate__(self) -> dict[str, Any]:
        """For deepcopy and pickle: a copy is covered as the original is."""
        curvature = None if self.engine is None else self.engine.state()
        ours = {"module": self.module, "settings": self.settings}
        return {**super().__getstate__(), **ours, "_curvature": curvature}

    def __setstate__(self, state: dict[str, Any]) -> None:
        curvature = state.pop("_curvature", None)
        super().__setstate__(state)
        self._dampings_kept = None
        self.fusion = Fusion()
        if (
            "settings" not in state
        ):  # torch's load_state_dict comes by here too
            return
        self.engine = None
        if self.module is not None:
            self.engine = Engine(self.module, self._params(), self.settings)
            self.engine.load_state(curvature or {})
        self._set_recipes()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; what was captured along with the gradients goes with them."""
        super().zero_grad(set_to_none)
        if self.engine is not None:
            self.engine.collector.drop()

    @property
    def refresh_due(self) -> bool:
        """Whether the coming step refreshes the curvature."""
        return self.engine is not None and self.engine.refresh_due

    @property
    def last_refresh(self) -> int | None:
        """The step count at the last refresh, or None."""
        return None if self.engine is None else self.engine.clock.last_refresh

    def curvature_batch(self) -> AbstractContextManager[None]:
        """Feed the curvature from a batch of its own (the paper's S̃_k):

        with opt.curvature_batch():
            loss(model(x_other), y_other).backward()   # leaves no gradient behind

        The next step refreshes. The loss is taken as it is: under a GradScaler, do not scale it.
        Under autocast, where the steps are: a base asks how precise gradients are.
        """
        return self._covered().curvature_batch()

    def diagnostics(self) -> dict[str, dict[str, Any]]:
        """Per layer, from its last refresh: see docs/diagnostics.md."""
        return self._covered().diagnostics()

    def _covered(self) -> Engine:
        if self.engine is None:
            name = type(self).__name__
            raise RuntimeError(
                f"this {name} was built without a module, so it has no curvature: write "
                f"{name}(model, …)"
            )
        return self.engine

    def state_dict(self) -> dict[str, Any]:
        """As torch's, with each layer's curvature, step count and seed beside it."""
        # First, so that the user's hooks see all of it.
        handle = self.register_state_dict_post_hook(
            _with_curvature, prepend=True
        )
        try:
            return super().state_dict()
        finally:
            handle.remove()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's; of a checkpoint of SGD the curvature is built at the next step."""
        curvature: dict[nn.Parameter, dict[str, Any]] = {}

        def take_out(_: Optimizer, given: dict[str, Any]) -> dict[str, Any]:
            return self._without_curvature(given, curvature)

        def load(_: Optimizer) -> None:
            self._load_curvature(curvature)

        self._dampings_kept = None
        self.fusion.forget()
        # After the user's hooks have changed the checkpoint, and before they look at what was
        # loaded.
        handles = [
            self.register_load_state_dict_pre_hook(take_out),
            self.register_load_state_dict_post_hook(load, prepend=True),
        ]
        try:
            super().load_state_dict(state_dict)
            self._set_recipes()
        finally:
            for handle in handles:
                handle.remove()

    def _without_curvature(
        self,
        given: dict[str, Any],
        curvature: dict[nn.Parameter, dict[str, Any]],
    ) -> dict[str, Any]:
        """The checkpoint as SGD has it; what is ours goes into `curvature`."""
        keys = [
            key for group in given["param_groups"] for key in group["params"]
        ]
        rest = dict(given["state"])
        for key, p in zip(keys, self._params(), strict=False):
            entry = rest.get(key, {})
            ours = {
                k: v for k, v in entry.items() if k.split(".")[0] == "seng"
            }
            if ours:
                rest[key] = {k: v for k, v in entry.items() if k not in ours}
                curvature[p] = nested(ours)["seng"]
        groups = [
            {**self.defaults, **group} for group in given["param_groups"]
        ]
        return {**given, "state": rest, "param_groups": groups}

    def _load_curvature(
        self, curvature: dict[nn.Parameter, dict[str, Any]]
    ) -> None:
        engine = self.engine
        if engine is None:
            return
        engine.load_state(curvature)
        if not engine.settings.metric.captures:
            return
        others = sum(record.other for record in engine.records)
        entries = list(curvature.values())
        stepped = any(int(entry.get("step", 0)) for entry in entries)
        if others:
            warn(
                f"the loaded curvature of {others} layers is of another kind than this "
                "optimizer keeps: the next step refreshes it. To go on with low rank, "
                "once SENG's default: curvature=seng.Curvature()"
            )
        elif stepped and not any("active" in entry for entry in entries):
            warn(
                "the loaded state has no curvature: the next step refreshes it. "
                "torch.distributed.checkpoint loads only what is there already: call "
                "seng.expect_curvature before dcp.load"
            )


def _with_curvature(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    engine = getattr(optimizer, "engine", None)
    if engine is None:
        return
    params = [p for group in optimizer.param_groups for p in group["params"]]
    index = {p: i for i, p in enumerate(params)}
    state = state_dict["state"] = dict(state_dict["state"])
    for p, entry in engine.state().items():
        if p in index:  # not so where a group was taken out by hand
            state[index[p]] = {**state.get(index[p], {}), "seng": entry}
