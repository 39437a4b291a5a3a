"""K-FAC (Martens & Grosse 2015), with KFC's convolutions (Grosse & Martens 2016), on the capture and layer rules of SENG.

Factors A and G per layer are in `kronecker.py`; with π² = (tr A / n_A) / (tr G / n_G) the direction of a layer is

    X = (G + √λ/π I)⁻¹ g (A + π√λ I)⁻¹
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, ParamsT

from seng.checks import check_group, check_number
from seng.distributed.sharded import is_sharded
from seng.layers.capture import Capture, loss_scale
from seng.layers.kinds import ON_REQUEST
from seng.layers.sites import Segment, Site, survey
from seng.metrics.kronecker import Moments, Pair, damped_inverses, why_plain
from seng.notices import not_captured, warn
from seng.optim.optimizer import update


class KFAC(Optimizer):
    """Natural gradient descent with Kronecker-factored curvature.

    `params` is a module, parameters or param groups; with the latter two, `module` says where the layers are. Linear layers and
    convolutions without groups are covered; all else takes the plain gradient, and one warning says so. `lr`, `momentum`,
    `nesterov`, `weight_decay`, `damping` (λ, absolute) and `maximize` live in the param groups; a changed damping costs new
    inverses at the next step. Factors and inverses are renewed at the first step and then every `refresh_every` steps:
    factor ← decay·factor + (1 − decay)·fresh, the first with weight 1. Then weight decay, momentum and update as torch's SGD.

    The direction is the method's own, so λ → ∞ is SGD with the learning rate lr/λ. The loss is a mean over samples, and samples
    are dimension 0 of a layer's input. A layer keeps 2(n_A² + n_G²) numbers.
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
        damping: float = 0.3,  # with lr 0.1 the best of 0.001 to 1 on digits, few seeds; lr and λ go together: lr ≈ λ/10 to λ/3
        refresh_every: int = 10,
        decay: float = 0.95,
        maximize: bool = False,
    ) -> None:
        if isinstance(params, nn.Module):
            if module is not None and module is not params:
                raise ValueError(
                    "the first argument is a module and module=… is another: give one of them"
                )
            module, params = params, list(params.parameters())
        if (
            not isinstance(refresh_every, int)
            or isinstance(refresh_every, bool)
            or refresh_every < 1
        ):
            raise ValueError(
                f"refresh_every is a number of steps, at least 1, not {refresh_every!r}"
            )
        check_number("decay", decay)
        if decay >= 1:
            raise ValueError(
                f"decay is below 1, not {decay!r}: nothing new would ever enter"
            )
        self._module: nn.Module | None = None  # until the groups are there
        self._refresh_every, self._decay = refresh_every, decay
        self._steps = 0
        self._told: set[str] = set()  # parameters whose plain gradient was warned of
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "weight_decay": weight_decay,
        }
        super().__init__(params, {**defaults, "damping": damping, "maximize": maximize})
        self._module = module
        self._cover()
        if module is None:
            warn(
                "no module was given, so every parameter takes the plain gradient and this is SGD; write KFAC(model, …)"
            )

    def _params(self) -> list[nn.Parameter]:
        return [p for group in self.param_groups for p in group["params"]]

    def _cover(self) -> None:
        """Look for the layers and hook them; the factors of those that were known before are in `state` and stay."""
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise RuntimeError(
                "KFAC runs in one process: ranks with factors of their own would drift apart"
            )
        if any(map(is_sharded, self._params())):
            raise RuntimeError(
                "KFAC works on whole parameters, and these are DTensors, spread over a device mesh (FSDP2)"
            )
        self._sites = [] if self._module is None else self._survey(self._module)
        self._moments = Moments(
            self._sites
        )  # an object of its own, so that no cycle holds the optimizer
        self._capture = Capture(
            [site.members[0].module for site in self._sites], self._moments.receive
        )
        self._restart()

    def _survey(self, module: nn.Module) -> list[Site]:
        """The sites to cover; a warning tells of the parameters that have none."""
        if not set(self._params()) <= set(module.parameters()):
            raise ValueError(
                "some parameters are not the module's: pass the module that holds them as module=…"
            )
        sites, reasons = survey(module, self._params())
        plain = {site: why for site in sites if (why := why_plain(site))}
        reasons |= {
            f"{s.owner.name}.{s.name}".lstrip("."): why
            for site, why in plain.items()
            for s in site.segments
        }
        listed = [
            f"{name} ({why})"
            for name, why in reasons.items()
            if why != ON_REQUEST and name not in self._told
        ]
        if len(plain) == len(sites):
            raise ValueError(
                f"no layer of {type(module).__name__} is covered, so KFAC would be SGD: {', '.join(listed)}"
            )
        if listed:
            self._told |= set(reasons)
            warn(f"these parameters take the plain gradient: {', '.join(listed)}")
        return [site for site in sites if site not in plain]

    def _restart(self) -> None:
        """Forget all but the factors."""
        self._moments.clear()
        self._inverses: dict[
            nn.Parameter, tuple[Any, Pair | None]
        ] = {}  # lead -> of what, (G⁻¹, A⁻¹)
        self._excused = any(
            p.grad is not None for p in self._params()
        )  # what was captured along with these is gone
        self._owed = (
            False  # whether a layer is in use that should have factors and has none
        )
        self._capture.armed = self.refresh_due

    @property
    def refresh_due(self) -> bool:
        """Whether the coming step refreshes the factors."""
        return self._owed or self._steps % self._refresh_every == 0

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; layers of the module that were not trained before are covered too."""
        check_group({**self.defaults, **param_group})
        if "decay" in param_group:
            raise ValueError(
                "decay holds for the whole optimizer: give it to KFAC(…), not to a param group"
            )
        super().add_param_group(param_group)
        if self._module is not None:
            try:
                self._cover()
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
        grads = {p: p.grad for p in self._params() if p.grad is not None}
        if any(g.is_sparse for g in grads.values()):
            raise RuntimeError(
                "KFAC does not support sparse gradients; use sparse=False in the embedding"
            )
        if not grads:
            return loss
        if self.refresh_due:
            self._refresh(grads)
        with torch.autocast(next(iter(grads)).device.type, enabled=False):
            directions = self._directions(grads)
        for group in self.param_groups:
            update(
                self.state,
                group,
                [p for p in group["params"] if p in grads],
                directions,
            )
        covered = {site for site in self._sites if self._factors(site)}
        self._owed = any(
            site.in_use(grads) for site in self._sites if site not in covered
        )
        self._steps += bool(
            covered
        )  # tools that step with zeros, to fill an optimizer's state, do not count
        for site in covered:
            self.state[site.lead]["step"] = torch.tensor(self._steps, device="cpu")
        self._moments.clear()
        self._excused = False
        self._capture.armed = self.refresh_due
        return loss

    def _factors(self, site: Site) -> Pair | None:
        """G, A of a site, unless it has none or those of fewer parameters."""
        G, A = (self.state[site.lead].get(name) for name in ("G", "A"))
        _, n_G, n_A = site.shape(site.segments)
        return (
            None if G is None or A is None or (len(G), len(A)) != (n_G, n_A) else (G, A)
        )

    def _refresh(self, grads: Mapping[nn.Parameter, Tensor]) -> None:
        """Let what was captured enter the factors; where it is not finite, the last good ones stay."""
        scale = loss_scale()
        for index, site in enumerate(self._sites):
            if index in self._moments.sums:
                fresh = self._moments.factors(index, scale)
                if fresh is not None:
                    old = self._factors(site) or fresh
                    G, A = (
                        x.lerp(y, 1 - self._decay)
                        for x, y in zip(old, fresh, strict=True)
                    )
                    self.state[site.lead] |= {"G": G, "A": A}
                    self._inverses[site.lead] = (
                        None,
                        self._inverses.get(site.lead, (None, None))[1],
                    )
            elif not self._excused and site.in_use(grads):
                raise not_captured(site.name)

    def _directions(
        self, grads: Mapping[nn.Parameter, Tensor]
    ) -> dict[nn.Parameter, Tensor]:
        """X = G⁻¹ g A⁻¹ for the layers that have factors, g for all else."""
        damping: dict[nn.Parameter, float] = {}
        for group in self.param_groups:
            check_number("damping", group["damping"], positive=True)
            damping |= dict.fromkeys(group["params"], float(group["damping"]))
        out = dict(grads)
        for site in self._sites:
            lam, active = site.damping(damping), site.active()
            inverse = (
                self._inverse(site, active, lam)
                if any(s.param in grads for s in active)
                else None
            )
            if inverse is not None:
                G, A = inverse
                X = G @ site.gather(active, grads, G.dtype).view(len(G), len(A)) @ A
                out |= {
                    p: d.to(p.dtype)
                    for p, d in site.scatter(active, X).items()
                    if p in grads
                }
        return out

    def _inverse(
        self, site: Site, active: tuple[Segment, ...], damping: float
    ) -> Pair | None:
        """(G + √λ/π I)⁻¹ and (A + π√λ I)⁻¹ over what is trained; where that fails, the last good ones."""
        factors, (of, inverse) = (
            self._factors(site),
            self._inverses.get(site.lead, (None, None)),
        )
        if factors is None or of == (damping, active):
            return None if factors is None else inverse
        trained = torch.cat(
            [
                torch.full((s.shape[2],), s in active, device=s.param.device)
                for s in site.segments
            ]
        )
        G, A = factors[0], factors[1][trained][:, trained]
        kept = inverse if inverse is not None and len(inverse[1]) == len(A) else None
        inverse = damped_inverses(G, A, damping) or kept
        self._inverses[site.lead] = (damping, active), inverse
        return inverse

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; what was captured along with the gradients goes with them."""
        super().zero_grad(set_to_none)
        self._moments.clear()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but factors keep their precision where the parameters have less; a checkpoint of SGD loads too."""
        super().load_state_dict(state_dict)
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        self._steps = 0
        dtypes = {site.lead: site.dtype for site in self._sites}
        for key, p in zip(keys, self._params(), strict=True):
            given = state_dict["state"].get(key, {})
            if "A" in given and p in dtypes:
                self.state[p] |= {
                    name: given[name].to(p.device, dtypes[p]) for name in ("A", "G")
                }
                self._steps = int(given["step"])
        self._restart()

    def __getstate__(self) -> dict[str, Any]:
        """For deepcopy and pickle: a copy looks for its layers anew, in the module that is copied along with it."""
        ours = ("_module", "_refresh_every", "_decay", "_steps", "_told")
        return {
            **super().__getstate__(),
            **{name: getattr(self, name) for name in ours},
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group.update({**self.defaults, **group})
        if "_module" in state:  # torch's load_state_dict comes by here too, without it
            self._cover()
