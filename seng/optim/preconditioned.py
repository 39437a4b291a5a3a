"""What our optimizers share: param groups that a recipe updates, and for `SENG` and `KFAC` an
engine that turns gradients into directions.

step: gradients → refresh, if due → directions → the recipe's update, group by group
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, ParamsT

from seng.checks import OF_RECIPES, OF_TORCH, check_group, check_number
from seng.notices import Notices, warn
from seng.optim.engine import Engine, Saved
from seng.optim.fused import Fusion
from seng.optim.settings import Settings
from seng.optim.step_plan import Dampings, Directions, StepPlan
from seng.recipes.recipe import Recipe, recipe_of

Group = dict[str, Any]


class RecipeOptimizer(Optimizer):
    """An optimizer with one recipe; `module` says where the layers are."""

    # Lightning reads through its wrapper what a class does not have: no defaults.
    recipe: Any  # its class, while the optimizer is built

    def __init__(
        self,
        params: nn.Module | ParamsT,
        module: nn.Module | None,
        recipe: type[Recipe],
        defaults: Group,
    ) -> None:
        if isinstance(params, nn.Module):
            if module not in (None, params):
                raise ValueError(
                    "the first argument is a module and module=… is another: give one of them"
                )
            module, params = params, list(params.parameters())
        self.recipe = recipe
        super().__init__(params, defaults)
        self.module = module

    def _cover(self) -> None:
        """Look for the layers of all parameters."""
        raise NotImplementedError

    def _params(self) -> list[nn.Parameter]:
        return [p for group in self.param_groups for p in group["params"]]

    def add_param_group(self, param_group: Group) -> None:
        """As torch's; layers that were not trained before are covered from now on."""
        given = {**self.defaults, **param_group}
        check_group(given, self.defaults, type(self).__name__)
        self.recipe.check(given)
        super().add_param_group(param_group)
        if not hasattr(self, "module"):  # while it is built
            return
        try:
            self._cover()
        except ValueError:
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One optimizer step; with a closure, its backward is the one that counts."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step()
        return loss

    def _step(self) -> None:
        """Along the gradients themselves."""
        grads = self._gradients()
        for group in self.param_groups:
            self._update(group, grads)

    def _gradients(self) -> Directions:
        grads = {}
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p.grad.is_sparse:
                    raise RuntimeError(
                        f"{type(self).__name__} does not support sparse gradients; "
                        "use sparse=False in the embedding"
                    )
                grads[p] = p.grad
        return grads

    def _update(self, group: Group, directions: Directions) -> None:
        params = [p for p in group["params"] if p in directions]
        self.recipe.step(self.state, group, params, directions)

    def __getstate__(self) -> Group:
        """For deepcopy and pickle."""
        return {**super().__getstate__(), "module": self.module}


class Preconditioned(RecipeOptimizer):
    """An optimizer with curvature: `engine` is None where no module was given."""

    engine: Engine | None

    def __init__(
        self,
        params: nn.Module | ParamsT,
        module: nn.Module | None,
        recipe: str,
        **options: Any,
    ) -> None:
        kind = recipe_of(recipe)
        defaults = group_defaults(kind, options, type(self).__name__)
        super().__init__(params, module, kind, defaults)
        self._forget()

    def _forget(self) -> None:
        """Nothing is known from an earlier step."""
        self.fusion = Fusion()
        self._damping_key: Any = None

    def _build(self, settings: Settings, curvature: Any = None) -> None:
        """The engine, once the groups are there; of a copy with its `curvature`."""
        self.settings, self.engine = settings, None
        if self.module is not None:
            self.engine = Engine(self.module, self._params(), settings)
        self._set_recipe()
        if curvature is not None:
            self._load_curvature(curvature)
        elif self.engine is None:
            self._warn()

    def _warn(self) -> None:
        """Say that without a module there is no curvature."""
        name, settings = type(self).__name__, self.settings
        Notices(settings.strict).refuse(
            "module",
            f"no module was given, so every parameter takes {self.recipe.others} in recipe="
            f"{settings.recipe!r}; write {name}(model, …), or module=model beside your parameters",
        )

    def _set_recipe(self) -> None:
        sites = [] if self.engine is None else self.engine.sites
        kind = recipe_of(self.settings.recipe)
        self.recipe = kind(sites, self.module)
        self.fusion.forget()

    def _cover(self) -> None:
        if self.engine is not None:
            self.engine.cover(self._params())
        self._set_recipe()

    @property
    def fuses(self) -> bool:
        """Whether a GPU may do directions and update at once."""
        averages = self.engine is not None and self.engine.strategy.averages
        return bool(self.recipe.fuses) and not averages

    def _step(self) -> None:
        if self.fusion.last is not None and self._repeat():
            return
        traced = torch.compiler.is_compiling()
        if traced and self.engine is not None and self.engine.spread:
            self._untraced_step()
            return
        grads, dampings, plan = self._ready(traced)
        if not grads:
            return
        directions = self.recipe.directions(
            self.state,
            self.param_groups,
            grads,
            [] if self.engine is None else self.engine.layers(plan),
            lambda given: self._directions(given, dampings, plan),
        )
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
    def _ready(self, traced: bool) -> tuple[Directions, Dampings, StepPlan]:
        """Gradients and dampings, checked, and what to solve with: left to Python."""
        grads = self._gradients()
        dampings = self._dampings()
        if self.engine is None:
            return grads, dampings, StepPlan([])
        for p in self.engine.trained:
            # Torch's checkpoints look for the name.
            self.state[p].setdefault("seng", {})
        plan = self.engine.ready(grads, dampings, self.fuses, traced)
        return grads, dampings, plan

    def _dampings(self) -> Dampings:
        """Each parameter's damping; the same object until one changes."""
        key = []
        for group in self.param_groups:
            lam = group.get("damping", 1.0)  # a tensor may be written to
            if type(lam) is not float or not lam > 0:
                check_number("damping", lam, positive=True)
            key.append((float(lam), len(group["params"])))
        if self._damping_key != key:
            values: dict[nn.Parameter, float] = {}
            for group, (lam, _) in zip(self.param_groups, key, strict=True):
                values |= dict.fromkeys(group["params"], lam)
            self._damping_key, self._damping_of = key, values
        return self._damping_of

    def _directions(
        self, grads: Directions, dampings: Dampings, plan: StepPlan
    ) -> Directions:
        if self.engine is None:
            return grads
        rest = None
        if type(plan) is not StepPlan:
            rest = self.fusion.step(self, plan, grads, dampings)
        if rest is not None:
            return rest
        return self.engine.directions(plan, grads, dampings)

    def __getstate__(self) -> Group:
        """For deepcopy and pickle: a copy is covered as the original is."""
        curvature = {} if self.engine is None else self.engine.state()
        ours = {"settings": self.settings, "_curvature": curvature}
        return super().__getstate__() | ours

    def __setstate__(self, state: Group) -> None:
        curvature = state.pop("_curvature", None)
        super().__setstate__(state)
        self._forget()
        if "settings" in state:  # torch's load_state_dict comes by here too
            self._build(self.settings, curvature)

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
                f"this {name} was built without a module, so it has no curvature: "
                f"write {name}(model, …)"
            )
        return self.engine

    def state_dict(self) -> Group:
        """As torch's, with each layer's curvature, step count and seed beside it."""
        # First, so that the user's hooks see all of it.
        handle = self.register_state_dict_post_hook(
            _with_curvature, prepend=True
        )
        try:
            return super().state_dict()
        finally:
            handle.remove()

    def load_state_dict(self, state_dict: Group) -> None:
        """As torch's; of a checkpoint of SGD the curvature is built at the next step."""
        curvature: Saved = {}
        # After the user's hooks have changed the checkpoint, and before they look at what was
        # loaded.
        handles = [
            self.register_load_state_dict_pre_hook(
                lambda _, given: self._without_curvature(given, curvature)
            ),
            self.register_load_state_dict_post_hook(
                lambda _: self._load_curvature(curvature), prepend=True
            ),
        ]
        try:
            super().load_state_dict(state_dict)
        finally:
            for handle in handles:
                handle.remove()

    def _without_curvature(self, given: Group, curvature: Saved) -> Group:
        """The checkpoint as SGD has it; what is ours goes into `curvature`."""
        groups = given["param_groups"]
        keys = [key for group in groups for key in group["params"]]
        rest = dict(given["state"])
        for key, p in zip(keys, self._params(), strict=False):
            entry = dict(rest.get(key, {}))
            if "seng" in entry:
                curvature[p] = entry.pop("seng")
                rest[key] = entry
        foreign = {*OF_RECIPES, *OF_TORCH} - {*self.defaults}
        kept = []
        for group in groups:
            known = {k: v for k, v in group.items() if k not in foreign}
            kept.append({**self.defaults, **known})
        return {**given, "state": rest, "param_groups": kept}

    def _load_curvature(self, curvature: Saved) -> None:
        if self.engine is None:
            return
        self.engine.load_state(curvature)
        others = sum(record.other for record in self.engine.records)
        entries = curvature.values()
        stepped = any(int(entry.get("step", 0)) for entry in entries)
        if others:
            warn(
                f"the loaded curvature of {others} layers is of another kind than this optimizer "
                "keeps: the next step refreshes it. "
                "To go on with it, give the curvature that it was saved with"
            )
        elif stepped and not any("active" in entry for entry in entries):
            warn(
                "the loaded state has no curvature: the next step refreshes it. "
                "torch.distributed.checkpoint loads only what is there already: "
                "call seng.expect_curvature before dcp.load"
            )


def group_defaults(kind: type[Recipe], options: Group, name: str) -> Group:
    """A param group's own options, from those given; None: the recipe's default."""
    given = {"lr": kind.lr}
    asked = {"lr", *OF_RECIPES}
    given |= {
        k: v for k, v in options.items() if v is not None or k not in asked
    }
    own = {*OF_RECIPES} - {"damping"}
    known = {k: v for k, v in given.items() if k not in own}
    known |= kind.options
    defaults = known | given
    check_group(defaults, known, name)
    kind.check(defaults)
    return defaults


def _with_curvature(optimizer: Any, state_dict: Group) -> None:
    if optimizer.engine is None:
        return
    state = state_dict["state"] = dict(state_dict["state"])
    saved = optimizer.engine.state()
    for i, p in enumerate(optimizer._params()):
        if p in saved:
            state[i] = {**state.get(i, {}), "seng": saved[p]}
