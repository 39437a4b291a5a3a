"""The Jacobian of one residual function on one batch: sample by sample where they separate, else by products with the whole.

separate    r of a batch is r of its samples, one after the other: J is `vmap(jacrev)` of the residuals of one sample,
            which takes about as long as a gradient of the whole batch for each residual of a sample
whole       rows vᵀJ, v from the identity, some at a time: m gradients of the whole batch, for any differentiable code;
            or columns Jz, n products of the whole, where there are few parameters
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, jacrev, vmap
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from seng.notices import warn
from seng.residuals.terms import (
    Batch,
    Order,
    Term,
    Values,
    dims,
    has_samples,
    samples_of,
    some,
)

COPIES = 4  # how many times a chunk of J exists while it is made
ROWS = 64  # of a chunk where residuals do not separate
COLUMN = 3  # what a column costs, in rows
FEW = 100  # rows that nobody needs to be told about


class Part:
    """A term at θ on its batch: its residuals, in the order of the samples, and its part of J."""

    def __init__(self, term: Term, batch: Batch, values: Values, room: int) -> None:
        self.term, self.batch, self.values = term, batch, values
        self.parameters = term.parameters
        self.room = room  # bytes of a chunk of J and of what it is made from
        self.samples = samples_of(batch) or 1
        self.order: Order | None = None
        r = self.residuals(values)
        self.m = len(r)
        self.order = order_of(term, batch, values, r)
        self.r = self._sorted(r)

    def residuals(self, values: Values) -> Tensor:
        """r (m,) at other parameters."""
        with torch.enable_grad():  # it may differentiate the model
            return self._sorted(self.term(values, self.batch).detach()).to(
                self.parameters.dtype
            )

    def chunks(self, columns: slice) -> Iterator[Tensor]:
        """J[:, columns], some rows (b, w) after the other."""
        if self.order is not None:
            return self._separate(self.order, columns)
        return self._whole(columns)

    def pull(self, c: Tensor) -> Tensor:
        """Jᵀc (n,): one gradient of the whole."""
        r, leaves = graph(self.term, self.values, self.batch)
        v = self._sorted(c, back=True).to(r.dtype)
        return self.parameters.row(
            torch.autograd.grad(r, list(leaves.values()), v, allow_unused=True)
        )

    def push(self, z: Tensor) -> Tensor:
        """Jz (m,): two gradients of the whole, or all rows again where r cannot be differentiated twice."""
        try:
            return self._sorted(
                self._columns(
                    {
                        name: part[None]
                        for name, part in self.parameters.split(z).items()
                    }
                )[0]
            )
        except RuntimeError:
            return torch.cat([X @ z for X in self.chunks(slice(0, len(z)))])

    def _separate(self, order: Order, columns: slice) -> Iterator[Tensor]:
        k = self.m // self.samples
        within = self.parameters.within(columns)
        chosen = {name: self.values[name] for name, _, _ in within}
        width = sum(value.numel() for value in chosen.values())
        rows = rows_of(self.term, self.batch, self.values)
        one = k * (COPIES * width * self.r.element_size() + order.bytes)
        for index in pieces(self.samples, self.room // one):
            blocks = rows(chosen, *some(self.batch, index))  # (b, k, …) each
            X = self.r.new_empty(
                k * (index.stop - index.start), columns.stop - columns.start
            )
            for name, entries, at in within:
                X[:, at] = blocks[name].reshape(len(X), -1)[:, entries]
            yield X if order.factor == 1 else X.mul_(order.factor)

    def _whole(self, columns: slice) -> Iterator[Tensor]:
        within = self.parameters.within(columns)
        width, size = columns.stop - columns.start, self.r.element_size()
        if COLUMN * width < self.m and COPIES * self.m * width * size < self.room:
            found = self._by_columns(within, width)
            if found is not None:
                yield found
                return
        with Allocated() as allocated:
            r, leaves = graph(self.term, self.values, self.batch)
        chosen = [leaves[name] for name, _, _ in within]
        one = COPIES * sum(t.numel() for t in chosen) * size + allocated.bytes
        for index in pieces(self.m, min(ROWS, self.room // one)):
            V = torch.zeros(
                index.stop - index.start, self.m, dtype=r.dtype, device=r.device
            )
            V.diagonal(index.start).fill_(1)
            X = self.r.new_zeros(len(V), width)
            for (_, entries, at), g in zip(
                within, several(self.term, r, chosen, V), strict=True
            ):
                if g is not None:
                    X[:, at] = g.reshape(len(V), -1)[:, entries]
            yield X

    def _by_columns(
        self, within: list[tuple[str, slice, slice]], width: int
    ) -> Tensor | None:
        """J[:, columns] (m, w); None where r cannot be differentiated twice, or not for several z at once."""
        X = self.r.new_empty(self.m, width)
        try:
            for name, entries, at in within:
                p = self.values[name]
                for index in pieces(entries.stop - entries.start, ROWS):
                    Z = torch.zeros(
                        index.stop - index.start,
                        p.numel(),
                        dtype=p.dtype,
                        device=p.device,
                    )
                    Z.diagonal(entries.start + index.start).fill_(1)
                    X[:, at.start + index.start : at.start + index.stop] = (
                        self._columns({name: Z.view(-1, *p.shape)}).T
                    )
        except RuntimeError:
            return None
        return X

    def _columns(self, Z: Values) -> Tensor:
        """Jz (c, m) for c of them at once: Jᵀv is linear in v, and zᵀJᵀv has the derivative Jz."""
        r, leaves = graph(self.term, self.values, self.batch)
        v = torch.zeros_like(r, requires_grad=True)
        chosen = [leaves[name] for name in Z]
        grads = torch.autograd.grad(r, chosen, v, create_graph=True, allow_unused=True)
        used = [
            (g, z.to(g.dtype))
            for g, z in zip(grads, Z.values(), strict=True)
            if g is not None and g.requires_grad
        ]
        if not used:
            return r.new_zeros(len(next(iter(Z.values()))), len(r))
        along = [z for _, z in used]
        if len(along[0]) == 1:  # which any code can do
            return torch.autograd.grad([g for g, _ in used], v, [z[0] for z in along])[
                0
            ][None]
        Jz: Tensor = torch.autograd.grad(
            [g for g, _ in used], v, along, is_grads_batched=True
        )[0]
        return Jz

    def _sorted(self, r: Tensor, back: bool = False) -> Tensor:
        """r in the order of the samples, or the way back."""
        if self.order is None or not self.order.by_output:
            return r
        return (
            r.view(self.samples, -1).T.flatten()
            if back
            else r.view(-1, self.samples).T.flatten()
        )


def order_of(term: Term, batch: Batch, values: Values, r: Tensor) -> Order | None:
    """How the samples separate, found out once for each size of a batch; None where they do not."""
    if term.separate is False or not r.isfinite().all():
        return None
    samples = samples_of(batch)
    if samples is None or len(r) % samples:
        _as_a_whole(
            term,
            len(r),
            f"{len(r)} residuals of {samples or 'no common number of'} samples",
        )
        return None
    key = (tuple(x.shape for x in batch if has_samples(x)), term.modes)
    if key not in term.orders:
        try:
            found = probe(term, batch, values, r)
        except (
            Exception
        ) as error:  # of any kind: it is the user's code, which ran well as a whole
            if term.separate:
                raise
            _as_a_whole(term, len(r), str(error).strip().split("\n")[0])
            return None
        if found is None:
            _as_a_whole(
                term, len(r), "a sample's residuals are others when it is alone"
            )
            return None
        term.orders[key] = found
    return term.orders[key]


def _as_a_whole(term: Term, m: int, why: str) -> None:
    if term.separate:
        raise ValueError(
            f"separate=True, but {term.name} does not separate by samples: {why}"
        )
    gradients = min(m, COLUMN * term.parameters.n)
    if gradients > FEW:
        warn(
            f"{term.name} is differentiated as a whole, {gradients} gradients of the batch at every step, since its samples do "
            f"not separate ({why}). It is much faster with residuals that depend on one sample each, a term for every batch "
            "and derivatives by torch.func (grad, jacrev, hessian, jvp), not torch.autograd.grad; separate=False is quiet"
        )
    term.separate = False


def probe(term: Term, batch: Batch, values: Values, r: Tensor) -> Order | None:
    """Whether r and a product Jᵀv of the whole are, up to one factor, what three samples give by themselves."""
    samples = samples_of(batch) or 1
    k = len(r) // samples
    picked = torch.tensor(sorted({0, samples // 2, samples - 1}), device=r.device)
    v = torch.linspace(1, 2, len(picked) * k, dtype=r.dtype, device=r.device)

    def weighted(values: Values) -> tuple[Tensor, Tensor]:
        s = vmap(term.one(values, batch), (None, *dims(batch)))(
            values, *some(batch, picked)
        ).flatten()
        return s @ v.to(s.dtype), s

    with Allocated() as allocated:
        parts, s = grad(weighted, has_aux=True)(values)
    least = min(values, key=lambda name: values[name].numel())
    rows_of(term, batch, values)(
        {least: values[least]}, *some(batch, picked)
    )  # fails here, if it does
    if len(s) != len(v):
        return None
    z = term.parameters.row(parts.values())
    slope = float(z.abs().max())
    level = float(r.abs().max()) + slope * max(
        float(value.norm()) for value in values.values()
    )  # what r may be a difference of
    whole, leaves = graph(term, values, batch)
    steps = torch.arange(k, device=r.device)
    for by_output in (False, True)[: 2 if k > 1 and samples > 1 else 1]:
        index = (
            picked[:, None] + samples * steps
            if by_output
            else k * picked[:, None] + steps
        ).flatten()
        V = torch.zeros_like(whole).index_put((index,), v.to(whole.dtype))
        w = term.parameters.row(
            torch.autograd.grad(
                whole, list(leaves.values()), V, retain_graph=True, allow_unused=True
            )
        )
        factor = float(z @ w / (z @ z)) if z.any() else 1.0
        factor = 1.0 if abs(factor - 1) < 1e-6 else factor
        far = [(w - factor * z, slope), (r[index] - factor * s, level)]
        if all(
            float(off.abs().max()) <= torch.finfo(whole.dtype).eps ** 0.5 * size
            for off, size in far
        ):
            return Order(factor, by_output, allocated.bytes // len(picked))
    return None


def rows_of(term: Term, batch: Batch, values: Values) -> Callable[..., Values]:
    """(some of the values, *samples) -> the Jacobian (b, k, …) of their residuals with respect to each of the values."""
    rows: Callable[..., Values] = vmap(
        jacrev(term.one(values, batch)), (None, *dims(batch))
    )
    return rows


def graph(term: Term, values: Values, batch: Batch) -> tuple[Tensor, Values]:
    """r with its graph, and the parameters that it hangs on."""
    leaves = {name: value.clone().requires_grad_() for name, value in values.items()}
    with torch.enable_grad():
        r = term(leaves, batch)
    if not r.requires_grad:
        raise ValueError(
            f"{term.name} does not depend on the parameters: is the model called, and nothing detached?"
        )
    return r, leaves


def several(
    term: Term, r: Tensor, chosen: list[Tensor], V: Tensor
) -> tuple[Tensor | None, ...]:
    """VJ as a tensor (b, …) for each of the chosen parameters; None where r does not depend on it."""
    if term.batched:
        try:
            return torch.autograd.grad(
                r,
                chosen,
                V,
                retain_graph=True,
                allow_unused=True,
                is_grads_batched=True,
            )
        except RuntimeError:
            term.batched = False
    singles = [
        torch.autograd.grad(r, chosen, v, retain_graph=True, allow_unused=True)
        for v in V
    ]
    return tuple(
        None if column[0] is None else torch.stack(column)
        for column in zip(*singles, strict=True)
    )


class Allocated(TorchDispatchMode):
    """Counts the bytes of all that is computed, as if nothing were freed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        self.bytes += sum(
            t.numel() * t.element_size()
            for t in tree_leaves(out)
            if isinstance(t, Tensor)
        )
        return out


def pieces(total: int, step: int) -> Iterator[slice]:
    """0 … total, `step` at a time, and one at least."""
    step = max(1, step)
    for start in range(0, total, step):
        yield slice(start, min(start + step, total))
