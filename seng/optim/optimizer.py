"""What a user touches: `SENG`, a torch optimizer. Algorithm 2.

One step: d = λ(M + λI)⁻¹g per layer, or P⁻¹g; d += weight_decay·θ; momentum and update as torch's SGD has them. So λ → ∞ is
exactly SGD.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, ParamsT
from torch.optim.sgd import sgd

from seng.checks import check_group, check_number, check_options
from seng.distributed.ranks import usual
from seng.distributed.team import team_of
from seng.metrics.curvature import Curvature, Units
from seng.metrics.solver import Quick, Ready
from seng.notices import warn
from seng.optim.preconditioner import DAMPING, REFRESH_EVERY, Preconditioner
from seng.recipes.orthogonal import Orthogonal
from seng.tell.state import nested

SETS = 8  # of parameters with gradients, whose orthogonal steps are kept ready


class SENG(Optimizer):
    """Sketchy empirical natural gradient descent.

    `params` is a module, parameters or param groups; with the latter two, `module` says where the layers are. An SGD recipe's
    lr and weight_decay are the place to start. `lr`, `momentum`, `nesterov`, `weight_decay`, `damping`, `maximize` and
    `orthogonal` live in the param groups; a layer takes the damping of its weight's group. The defaults of damping (relative
    to each layer's largest eigenvalue, of P alone to the mean one) and refresh_every, and why: docs/tuning.md. With
    `orthogonal`, layers step by the polar factor of their momentum, as Muon does: seng/recipes/orthogonal.py.

    Without a `curvature` it is P alone, a Kronecker metric (metrics/base.py), faster than low rank over λI; the
    latter, `curvature=seng.Curvature()`, with `orthogonal`, and where parameters are spread over ranks or directions averaged.
    """

    def __init__(
        self,
        params: nn.Module | ParamsT,
        lr: float | Tensor = 0.1,
        *,
        module: nn.Module | None = None,
        momentum: float = 0.9,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        damping: float = DAMPING,
        refresh_every: int = REFRESH_EVERY,
        curvature: Curvature | None = None,
        units: Units = "sgd",
        strategy: str | None = None,
        strict: bool = False,
        maximize: bool = False,
        orthogonal: bool = False,
    ) -> None:
        if isinstance(params, nn.Module):
            if module is not None and module is not params:
                raise ValueError(
                    "the first argument is a module and module=… is another: give one of them"
                )
            module, params = params, list(params.parameters())
        team_of(strategy, module)  # refuses what there is not
        check_options(curvature or Curvature(), refresh_every, units)
        self.preconditioner: Preconditioner | None = None
        self._forget_step()
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "weight_decay": weight_decay,
            "damping": damping,
            "maximize": maximize,
            "orthogonal": orthogonal,
        }
        check_group(defaults)
        self._units = units
        super().__init__(params, defaults)
        if curvature is None:
            curvature = Curvature() if self._orthogonal else usual(module, strategy)
        self._engine = partial(
            Preconditioner,
            curvature=curvature,
            refresh_every=refresh_every,
            units=units,
            strict=strict,
            strategy=strategy,
        )
        self._module = module
        if module is not None:
            self.preconditioner = self._engine(module, self._params())
        self._check_orthogonal()
        if module is None and strict:
            raise ValueError(
                "strict=True: no module was given, so every parameter would take the plain gradient"
            )
        if module is None:
            warn(
                "no module was given, so every parameter takes the plain gradient and this is SGD; "
                "write SENG(model, …), or module=model beside your parameters"
            )

    def _check_orthogonal(self) -> None:
        if not self._orthogonal:
            return
        if self.preconditioner is None:
            raise ValueError(
                "orthogonal=True is about the layers' matrices: write SENG(model, …), or module=model beside params"
            )
        if self.preconditioner.spread:
            raise ValueError(
                "orthogonal=True needs whole matrices, and these parameters are spread over ranks: leave it out"
            )

    @property
    def _orthogonal(self) -> bool:
        return any(group["orthogonal"] for group in self.param_groups)

    def _forget_step(self) -> None:
        """What is kept from step to step to save time."""
        self._quick: Quick | None = None
        self._layers: dict[object, Orthogonal] = {}
        self._damping: (
            tuple[list[tuple[float, int]], dict[nn.Parameter, float]] | None
        ) = None

    def _params(self) -> list[nn.Parameter]:
        return [p for group in self.param_groups for p in group["params"]]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; layers of the module that were not trained before are covered from the next refresh on."""
        check_group({**self.defaults, **param_group})
        super().add_param_group(param_group)
        self._forget_step()
        if hasattr(self, "_module"):  # not while it is built
            try:
                if self.preconditioner is not None:
                    self.preconditioner.cover(self._params())
                self._check_orthogonal()
            except ValueError:
                self.param_groups.pop()
                raise

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
        if self._quick is not None and self._quick_step():
            return loss
        traced = torch.compiler.is_compiling()
        if traced and self.preconditioner is not None and self.preconditioner.spread:
            self._untraced()
            return loss
        grads, damping, ready = self._ready(traced)
        directions = dict(grads)
        averages = (
            self.preconditioner is not None
            and self.preconditioner.ranks.averaging is not None
        )
        by_kernels = (
            ready.grouped is not None
            and self._units == "sgd"
            and not averages
            and not self._orthogonal
        )
        if by_kernels and self._plain_lr():
            directions = self._update_grouped(ready, grads)
        elif self.preconditioner is not None:
            directions = self.preconditioner.directions(grads, damping, ready)
        elif self._units == "paper":
            directions = {p: g / damping[p] for p, g in grads.items()}
        self._update(directions)
        if self.preconditioner is not None and grads:
            self.preconditioner.advance()
        return loss

    def _update(self, directions: dict[nn.Parameter, Tensor]) -> None:
        for i, group in enumerate(self.param_groups if directions else ()):
            params = [p for p in group["params"] if p in directions]
            if group["orthogonal"]:
                self._check_orthogonal()
                layers = self._layers_of(i, params)
                layers.step(self.state, group, directions)
                params = layers.others
            update(self.state, group, params, directions)

    def _layers_of(self, group: int, params: list[nn.Parameter]) -> Orthogonal:
        """One for each set of parameters that has had gradients: some networks leave out layers by chance."""
        assert self.preconditioner is not None
        key = group, *((id(p), p.dtype, p.device) for p in params)
        if key not in self._layers:
            if len(self._layers) == SETS:
                self._layers.clear()
            self._layers[key] = Orthogonal(self.preconditioner.sites, params)
        return self._layers[key]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _untraced(self) -> None:
        """With parameters that are spread over ranks: shapes differ among ranks, and what one compiles fits no other."""
        assert self.preconditioner is not None
        grads, damping, ready = self._ready(False)
        self._update(self.preconditioner.directions(grads, damping, ready))
        if grads:
            self.preconditioner.advance()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _ready(
        self, traced: bool
    ) -> tuple[dict[nn.Parameter, Tensor], dict[nn.Parameter, float], Ready]:
        """Gradients and dampings, checked, and the blocks to solve with: the part of a step that is left to Python."""
        grads = {
            p: p.grad
            for group in self.param_groups
            for p in group["params"]
            if p.grad is not None
        }
        if any(g.is_sparse for g in grads.values()):
            raise RuntimeError(
                "SENG does not support sparse gradients; use sparse=False in the embedding"
            )
        damping = self._dampings()
        if self.preconditioner is None:
            return grads, damping, Ready()
        for p in self.preconditioner.trained:  # state_dict fills it in; torch.distributed.checkpoint looks here for the name
            self.state[p].setdefault("seng", {})
        return (
            grads,
            damping,
            self.preconditioner.ready(
                grads, damping, updates=not self._orthogonal, traced=traced
            ),
        )

    def _dampings(self) -> dict[nn.Parameter, float]:
        """Each parameter's damping; the same object until one changes."""
        for group in self.param_groups:
            if not isinstance(group["damping"], float):
                check_number("damping", group["damping"], positive=True)
        key = [
            (float(group["damping"]), len(group["params"]))
            for group in self.param_groups
        ]
        if self._damping is None or self._damping[0] != key:
            values: dict[nn.Parameter, float] = {}
            for group in self.param_groups:
                check_number("damping", group["damping"], positive=True)
                values |= dict.fromkeys(group["params"], float(group["damping"]))
            self._damping = key, values
        return self._damping[1]

    def _plain_lr(self) -> bool:
        """Whether every learning rate can be read without waiting for a device."""
        return all(
            not isinstance(group["lr"], Tensor) or group["lr"].device.type == "cpu"
            for group in self.param_groups
        )

    def _update_grouped(
        self, ready: Ready, grads: dict[nn.Parameter, Tensor]
    ) -> dict[nn.Parameter, Tensor]:
        """Update all that the kernels serve, at once; the directions of the others. Where there are none, the next is quick."""
        group_of = {
            p: i for i, group in enumerate(self.param_groups) for p in group["params"]
        }
        inside = set(ready.params)
        rest = [p for p in grads if p not in inside]
        quick = Quick(
            ready,
            [group_of[p] for p in ready.params],
            [self.state[p] for p in ready.params],
            self.param_groups,
        )
        alone = ready.alone(grads)
        quick.step([grads[p] for p in ready.params], alone)
        assert self.preconditioner is not None
        self.preconditioner.note(alone)
        quick.entries = [*map(id, self.state.values())]
        self._quick = None if rest else quick
        return {p: alone[p] if p in alone else grads[p] for p in rest}

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _quick_step(self) -> bool:
        """A step like the last one, by the same blocks with the same gradients; False where it is another."""
        engine, quick = self.preconditioner, self._quick
        assert engine is not None and quick is not None
        grads = [p.grad for p in quick.ready.params]
        same = (
            engine.keeps(quick.ready, self._dampings())
            and self._plain_lr()
            and quick.groups is self.param_groups
        )
        same = same and not self._orthogonal
        given = sum(
            p.grad is not None for group in self.param_groups for p in group["params"]
        )
        same = (
            same
            and given == len(grads)
            and [*map(id, self.state.values())] == quick.entries
        )
        if not same or any(g is None for g in grads):
            self._quick = None
            return False
        quick.step(grads)  # type: ignore[arg-type]
        engine.advance()
        return True

    def __getstate__(self) -> dict[str, Any]:
        """For deepcopy and pickle: a copy is covered as the original is, over the module that is copied along with it."""
        curvature = None if self.preconditioner is None else self.preconditioner.state()
        ours = {
            "_module": self._module,
            "_engine": self._engine,
            "_units": self._units,
            "_curvature": curvature,
        }
        return {**super().__getstate__(), **ours}

    def __setstate__(self, state: dict[str, Any]) -> None:
        curvature = state.pop("_curvature", None)
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("orthogonal", False)  # of before there was such a thing
        self._forget_step()
        if (
            "_module" in state
        ):  # torch's load_state_dict comes by here too, with groups and momentum alone
            self.preconditioner = None
            if self._module is not None:
                self.preconditioner = self._engine(self._module, self._params())
                self.preconditioner.load_state(curvature or {})

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; what was captured along with the gradients goes with them."""
        super().zero_grad(set_to_none)
        if self.preconditioner is not None:
            self.preconditioner.drop()

    @property
    def refresh_due(self) -> bool:
        """Whether the coming step refreshes the curvature."""
        return self.preconditioner is not None and self.preconditioner.refresh_due

    @property
    def last_refresh(self) -> int | None:
        """The step count at the last refresh, or None."""
        return None if self.preconditioner is None else self.preconditioner.last_refresh

    def curvature_batch(self) -> AbstractContextManager[None]:
        """Feed the curvature from a batch of its own (the paper's S̃_k), which its convergence proof needs:

        with opt.curvature_batch():
            loss(model(x_other), y_other).backward()     # no gradient is left behind; the next step refreshes

        The loss is taken as it is: under a GradScaler, do not scale it. Under autocast, where the steps are: a base asks how
        precise gradients are.
        """
        return self._covered().curvature_batch()

    def diagnostics(self) -> dict[str, dict[str, Any]]:
        """Per layer, from its last refresh: see docs/diagnostics.md."""
        return self._covered().diagnostics()

    def _covered(self) -> Preconditioner:
        if self.preconditioner is None:
            raise RuntimeError(
                "this SENG was built without a module, so it has no curvature: write SENG(model, …)"
            )
        return self.preconditioner

    def state_dict(self) -> dict[str, Any]:
        """As torch's, with each block's curvature, the step count and the sketches' seed beside the weight's momentum."""
        handle = self.register_state_dict_post_hook(
            _with_curvature, prepend=True
        )  # so that the user's hooks see all of it
        try:
            return super().state_dict()
        finally:
            handle.remove()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's; a checkpoint of SGD loads too, and its curvature is then built at the next step."""
        curvature: dict[nn.Parameter, dict[str, Any]] = {}

        def take_out(_: Optimizer, given: dict[str, Any]) -> dict[str, Any]:
            keys = [key for group in given["param_groups"] for key in group["params"]]
            rest = dict(given["state"])
            for key, p in zip(keys, self._params(), strict=False):
                entry = rest.get(key, {})
                ours = {k: v for k, v in entry.items() if k.split(".")[0] == "seng"}
                if ours:
                    rest[key] = {k: v for k, v in entry.items() if k not in ours}
                    curvature[p] = nested(ours)["seng"]
            return {
                **given,
                "state": rest,
                "param_groups": [
                    {**self.defaults, **group} for group in given["param_groups"]
                ],
            }

        self._forget_step()
        # After the user's hooks have made of the checkpoint what they want, and before they look at what was loaded.
        handles = [
            self.register_load_state_dict_pre_hook(take_out),
            self.register_load_state_dict_post_hook(
                lambda _: self._load_curvature(curvature), prepend=True
            ),
        ]
        try:
            super().load_state_dict(state_dict)
            self._check_orthogonal()
        finally:
            for handle in handles:
                handle.remove()

    def _load_curvature(self, curvature: dict[nn.Parameter, dict[str, Any]]) -> None:
        if self.preconditioner is None:
            return
        self.preconditioner.load_state(curvature)
        if self.preconditioner.curvature.none:
            return
        entries = curvature.values()
        if others := len(self.preconditioner.ledger.others):
            warn(
                f"the loaded curvature of {others} layers is of another kind than this optimizer keeps: the next step "
                "refreshes it. To go on with low rank, once SENG's default: curvature=seng.Curvature()"
            )
        elif any(int(entry.get("step", 0)) for entry in entries) and not any(
            "block" in entry for entry in entries
        ):
            warn(
                "the loaded state has no curvature: the next step refreshes it. torch.distributed.checkpoint loads only "
                "what is there already: call seng.expect_curvature before dcp.load"
            )


def update(
    state: Any,
    group: dict[str, Any],
    params: list[nn.Parameter],
    directions: dict[nn.Parameter, Tensor],
) -> None:
    """Weight decay, momentum and step of torch's SGD, with directions in place of gradients."""
    if not params:
        return
    buffers = (
        [state[p].get("momentum_buffer") for p in params]
        if group["momentum"]
        else [None] * len(params)
    )
    options = {
        name: group[name]
        for name in ("weight_decay", "momentum", "lr", "nesterov", "maximize")
    }
    sgd(
        list(params), [directions[p] for p in params], buffers, dampening=0.0, **options
    )
    if group["momentum"]:
        for p, buffer in zip(params, buffers, strict=True):
            state[p]["momentum_buffer"] = buffer


def _with_curvature(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    engine = getattr(optimizer, "preconditioner", None)
    if engine is None:
        return
    index = {
        p: i
        for i, p in enumerate(
            p for group in optimizer.param_groups for p in group["params"]
        )
    }
    state = state_dict["state"] = dict(state_dict["state"])
    for p, entry in engine.state().items():
        if p in index:  # not so where a group was taken out by hand
            state[index[p]] = {**state.get(index[p], {}), "seng": entry}
