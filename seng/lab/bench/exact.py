"""The exact direction of a batch, to measure an approximate one against: float64, every sample it uses, nothing truncated.

    d = g − U(λI + K)⁻¹Uᵀg,   K = UᵀU,   λ = damping × the largest eigenvalue of K, or damping itself

site by site, from the inputs and output gradients of the very backward that made g. Over a base,

    d ∝ λ(ŪŪᵀ + λP)⁻¹g = P⁻¹g − P⁻¹Ū(λI + K)⁻¹ŪᵀP⁻¹g,   K = ŪᵀP⁻¹Ū,   ‖d‖ = ‖g‖

where Ū has the samples' mean taken away. P is the optimizer's own, of the same refresh, in float64: what P leaves of K-FAC's
factors is not measured here. All else shares the layer rules with the library and none of its curvature: no plan, no form, no
rank, no solver.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from seng import SENG
from seng.layers.sites import Member, Site, survey
from seng.linalg.operators import Operator
from seng.tell.inspection import inspect

Directions = dict[nn.Parameter, Tensor]
Inverse = Callable[[Tensor], Tensor]  # P⁻¹ of a site


class Watch:
    """Keeps what every covered layer of a model sees in one backward, until `remove`."""

    def __init__(self, model: nn.Module) -> None:
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.sites: list[Site] = survey(model, self.params)[0]
        self.calls: dict[int, list[tuple[Member, Tensor, Tensor]]] = {
            i: [] for i in range(len(self.sites))
        }
        self._hooks = [
            member.module.register_forward_hook(self._hook(i, member))
            for i, site in enumerate(self.sites)
            for member in site.members
        ]

    def _hook(self, index: int, member: Member) -> Any:
        def seen(
            module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor
        ) -> None:
            a, version = inputs[0].detach(), inputs[0]._version

            def keep(g: Tensor) -> None:
                if a._version != version:
                    raise RuntimeError(
                        f"the input of {member.name} was overwritten after it was used"
                    )
                self.calls[index].append((member, a, g.detach().clone()))

            if (
                output.grad_fn is not None
            ):  # to look at it makes it: after the library's tap, a view's hook would crash without
                output.register_hook(keep)

        return seen

    def remove(self) -> None:
        """Take the hooks off again."""
        for hook in self._hooks:
            hook.remove()

    def direction_of(self, optimizer: SENG) -> Directions:
        """d of what an optimizer was asked for, over the P of its last refresh."""
        asked = optimizer.settings.curvature
        seen = inspect(optimizer)
        bases = {
            seen.sites[i].name: doubled(state.inverse)
            for i, state in seen.states.items()
            if state.P is not None
        }
        (damping,) = {g["damping"] for g in optimizer.param_groups}
        return self.direction(
            damping,
            asked.relative_damping,
            asked.samples,
            asked.centres,
            bases,
        )

    @torch.no_grad()
    def direction(
        self,
        damping: float,
        relative: bool = True,
        samples: int | None = None,
        centred: bool = False,
        bases: Mapping[str, Inverse] | None = None,
    ) -> Directions:
        """d in float64 for every gradient; what was seen is let go, site by site.

        `samples`: ϱ, the first so many. `bases`: P⁻¹ by the name of a site.
        """
        grads = {p: p.grad for p in self.params if p.grad is not None}
        counts = Counter(
            len(member.sample_first(a, g)[0])
            for calls in self.calls.values()
            for member, a, g in calls
        )
        B = counts.most_common(1)[0][0]
        out = {
            p: g.double() for p, g in grads.items()
        }  # where there is no site, d = g
        for index, site in enumerate(self.sites):
            calls, self.calls[index] = self.calls[index], []
            arranged = [
                (member, *member.sample_first(a, g)) for member, a, g in calls
            ]
            if not arranged or any(len(a) != B for _, a, _ in arranged):
                continue
            active = site.active()
            g = site.gather(active, grads, torch.float64)
            rho = min(B, samples or B)
            U = columns(site, arranged, g, rho, centred)
            inverse = (bases or {}).get(site.name)
            d = exact(U, g, damping, relative, inverse)
            out |= {
                p: part
                for p, part in site.scatter(active, d).items()
                if p in grads
            }
        return out


@dataclass(frozen=True)
class Scaled:
    """U: the columns u_i/√ϱ of the first ϱ samples, about their mean where they are centred."""

    all: Operator | Columns  # of the captured gradients, which are u_i/B
    count: int  # B
    rho: int
    centred: bool
    like: Tensor  # of the same precision and device

    @property
    def scale(self) -> float:
        return float(self.count / self.rho**0.5)

    def about_mean(self, c: Tensor) -> Tensor:
        """HC of C (ϱ, …), H = I − 11ᵀ/ϱ."""
        return c - c.mean(0) if self.centred else c

    def rmv(self, z: Tensor) -> Tensor:
        """Uᵀz."""
        return self.about_mean(self.scale * self.all.rmv(z)[: self.rho])

    def mv(self, c: Tensor) -> Tensor:
        """Uc."""
        rest = c.new_zeros(self.count - self.rho)
        out: Tensor = self.all.mv(torch.cat([self.about_mean(c), rest]))
        return self.scale * out

    def gram(self, inverse: Inverse | None) -> Tensor:
        """UᵀP⁻¹U (ϱ, ϱ); over a base column by column, since all of U may be too much to hold."""
        if inverse is None:
            K = self.scale**2 * self.all.gram()[: self.rho, : self.rho]
            return self.about_mean(self.about_mean(K).T)
        eye = torch.eye(
            self.rho, dtype=self.like.dtype, device=self.like.device
        )
        return torch.stack([self.rmv(inverse(self.mv(e))) for e in eye])


def columns(
    site: Site,
    calls: list[tuple[Member, Tensor, Tensor]],
    g: Tensor,
    rho: int,
    centred: bool,
) -> Scaled:
    """U of one site, in the precision of g (n,)."""
    # Under autocast a layer multiplies its input in the precision of its output.
    seen = [
        (
            member,
            a.to(y.dtype)
            if member.kind.factored and a.is_floating_point()
            else a,
            y,
        )
        for member, a, y in calls
    ]
    parts = [
        site.operator(site.active(), member, _like(a, g), _like(y, g))
        for member, a, y in seen
    ]
    B = len(calls[0][1])
    whole = parts[0] if len(parts) == 1 else Columns(parts, B, g)
    return Scaled(whole, B, rho, centred, g)


def exact(
    U: Scaled,
    g: Tensor,
    damping: float,
    relative: bool,
    inverse: Inverse | None,
) -> Tensor:
    """d (n,) of one site."""
    K = U.gram(inverse)
    lam = damping * (torch.linalg.eigvalsh(K)[-1] if relative else 1.0)
    first = g if inverse is None else inverse(g)
    d = first
    if lam > 0:
        eye = torch.eye(len(K), dtype=K.dtype, device=K.device)
        b = torch.linalg.solve(K + lam * eye, U.rmv(first))
        correction = U.mv(b)
        if inverse is not None:
            correction = inverse(correction)
        d = first - correction
    if inverse is None:
        return d
    out: Tensor = d * (
        torch.linalg.vector_norm(g) / torch.linalg.vector_norm(d)
    )
    return out


def doubled(power: Any) -> Any:
    """P⁻¹ in float64."""
    values = {f.name: getattr(power, f.name) for f in fields(power)}
    tensors = {name: t for name, t in values.items() if t is not None}
    return replace(power, **{name: t.double() for name, t in tensors.items()})


class Columns:
    """Σ of several calls, sample by sample, column by column: a layer used twice, or a tied weight."""

    def __init__(
        self, parts: Sequence[Operator], B: int, like: Tensor
    ) -> None:
        self.columns = like.new_zeros(B, len(like))  # Uᵀ
        for part in parts:
            self.columns += part.explicit().U.T

    def gram(self) -> Tensor:
        """UᵀU."""
        return self.columns @ self.columns.T

    def rmv(self, z: Tensor) -> Tensor:
        """Uᵀz."""
        return self.columns @ z

    def mv(self, c: Tensor) -> Tensor:
        """Uc."""
        return self.columns.T @ c


def _like(x: Tensor, g: Tensor) -> Tensor:
    """In the precision of g; tokens stay integers."""
    return x.to(g.dtype) if x.is_floating_point() else x


@torch.no_grad()
def observed(optimizer: Optimizer, params: list[nn.Parameter]) -> Directions:
    """The direction an optimizer takes from the gradients that are there: it steps from 0 with lr 1, so nothing is rounded.

    To be built with lr=1, momentum=0 and weight_decay=0. The weights are lost.
    """
    for p in params:
        p.zero_()
    optimizer.step()
    return {p: -p.double() for p in params}


@dataclass(frozen=True)
class Quality:
    """How near a direction d is to the exact one, and both to the gradient g; `worst_…`: the layer where it is worst."""

    error: float  # ‖d − exact‖ / ‖exact‖, over the network
    cosine: float
    worst_error: float
    worst_error_layer: str
    worst_cosine: float
    worst_cosine_layer: str
    cosine_to_gradient: float
    norm_to_gradient: float  # ‖d‖ / ‖g‖
    exact_cosine_to_gradient: float
    exact_norm_to_gradient: float


def compare(
    sites: list[Site],
    got: Directions,
    want: Directions,
    grads: Mapping[nn.Parameter, Tensor],
) -> Quality:
    """`got` against `want`."""
    layers = [
        (site.name, [s.param for s in site.active() if s.param in want])
        for site in sites
    ]
    layers = [
        (name, params)
        for name, params in layers
        if any(bool(want[p].any()) for p in params)
    ]
    errors = {name: _error(got, want, params) for name, params in layers}
    cosines = {name: _cosine(got, want, params) for name, params in layers}
    everything = list(want)
    far, turned = (
        max(errors, key=lambda name: errors[name]),
        min(cosines, key=lambda name: cosines[name]),
    )
    return Quality(
        _error(got, want, everything),
        _cosine(got, want, everything),
        errors[far],
        far,
        cosines[turned],
        turned,
        _cosine(got, grads, everything),
        _ratio(got, grads, everything),
        _cosine(want, grads, everything),
        _ratio(want, grads, everything),
    )


def _dot(
    x: Mapping[nn.Parameter, Tensor],
    y: Mapping[nn.Parameter, Tensor],
    params: list[nn.Parameter],
) -> float:
    return float(sum((x[p].double() * y[p].double()).sum() for p in params))


def _cosine(
    x: Mapping[nn.Parameter, Tensor],
    y: Mapping[nn.Parameter, Tensor],
    params: list[nn.Parameter],
) -> float:
    both = (_dot(x, x, params) * _dot(y, y, params)) ** 0.5
    return _dot(x, y, params) / both if both else float("nan")


def _ratio(
    x: Mapping[nn.Parameter, Tensor],
    y: Mapping[nn.Parameter, Tensor],
    params: list[nn.Parameter],
) -> float:
    return float((_dot(x, x, params) / _dot(y, y, params)) ** 0.5)


def _error(
    x: Mapping[nn.Parameter, Tensor],
    y: Mapping[nn.Parameter, Tensor],
    params: list[nn.Parameter],
) -> float:
    return _ratio(
        {p: x[p].double() - y[p].double() for p in params}, y, params
    )
