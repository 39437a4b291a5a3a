"""The Jacobian J (m, n) of one residual function on one batch, in chunks and in products.

Where r of a batch consists of the residuals of its samples, J is `vmap(jacrev(…))` over single
samples. For each residual of a sample this takes about as long as one gradient of the batch.

Other code is differentiated as a whole: by rows vᵀJ, m gradients of the batch, some at a time,
or by columns Jz where there are few parameters. This works for any differentiable code.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import jacrev, vjp, vmap
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from seng.notices import warn
from seng.residuals.terms import (
    Batch,
    Layout,
    Term,
    Values,
    has_samples,
)

COPIES = 4  # how many copies of a chunk of J exist while it is made
ROWS = 64  # of a chunk, where samples do not separate
COLUMN = 3  # the cost of a column in rows
FEW = 100  # gradients per step that are not worth a warning

Pair = tuple[Tensor, Tensor]
Chunks = Iterator[
    tuple[slice | Tensor, Tensor]
]  # some rows, and J[rows, columns]


class TermJacobian:
    """A term at the present θ on its batch: the residuals r (m,) and their Jacobian J (m, n)."""

    def __init__(
        self,
        term: Term,
        batch: Batch,
        values: Values,
        room: int,
    ) -> None:
        self.term = term
        self.batch = batch
        self.room = room  # bytes for a chunk of J and for what it is made from
        self.parameters = term.parameters
        self.samples = [x.detach() for x in batch if has_samples(x)]
        self.r = self.residuals(values)
        self.layout = layout_of(self)

    def residuals(self, values: Values) -> Tensor:
        """r (m,) at other values of the parameters."""
        return self.term(values, self.batch).detach().to(self.parameters.dtype)

    def chunks(self, columns: slice) -> Chunks:
        """J[:, columns], some rows at a time."""
        layout = self.layout
        if layout is None:
            yield from self._whole(columns)
            return
        B, k = layout.places.shape
        sample_bytes = k * (self._row_bytes(columns) + layout.bytes)
        for index in pieces(B, self.room // sample_bytes):
            rows = layout.places[index].flatten()
            samples = [x[index] for x in self.samples]
            X = self.of_samples(columns, samples)  # (b, k, w)
            yield rows, layout.factor * X.flatten(0, 1)

    def of_samples(
        self,
        columns: slice,
        samples: list[Tensor],
    ) -> Tensor:
        """The Jacobians (b, k, w) of single samples."""
        jacobian = vmap(jacrev(partial(self.of_one, columns)), (None, 0))
        J: Tensor = jacobian(self.parameters.theta()[columns], samples)
        return J

    def of_one(
        self,
        entries: slice,
        given: Tensor,
        sample: list[Tensor],
    ) -> Tensor:
        """The residuals (k,) of one sample, where these entries of θ are given."""
        values = self.parameters.values(entries, given)
        left = iter(sample)
        batch = tuple(
            next(left)[None] if has_samples(x) else x for x in self.batch
        )
        return self.term.call(values, batch).flatten()

    def pull(self, c: Tensor) -> Tensor:
        """Jᵀc (n,): one gradient of the batch."""
        r, theta = self._graph(self.parameters.all)
        return product(r, theta, c)

    def push(self, z: Tensor) -> Tensor:
        """Jz (m,): two gradients of the batch, or all of J where r is not twice differentiable."""
        with suppress(RuntimeError):
            Jv, v = self._transposed(self.parameters.all)
            return product(Jv, v, z).to(z)
        Jz = torch.empty_like(self.r)
        for rows, X in self.chunks(self.parameters.all):
            Jz[rows] = X @ z
        return Jz

    def _whole(self, columns: slice) -> Chunks:
        m = len(self.r)
        width = columns.stop - columns.start
        if COLUMN * width < m and COPIES * width * self.r.nbytes < self.room:
            with suppress(
                RuntimeError
            ):  # of code that is not twice differentiable
                Jv, v = self._transposed(columns)
                blocks = [X for _, X in self._matrix(Jv, v, ROWS)]
                yield slice(0, m), torch.cat(blocks).T
                return
        with Allocated() as allocated:
            r, theta = self._graph(columns)
        most = self.room // (self._row_bytes(columns) + allocated.bytes)
        yield from self._matrix(r, theta, min(ROWS, most))

    def _row_bytes(self, columns: slice) -> int:
        """The memory of a row of J while it is made, for which whole tensors are differentiated."""
        tensors = self.parameters.tensors
        width = sum(
            tensors[name].numel() for name in self.parameters.places(columns)
        )
        return COPIES * width * self.r.element_size()

    def _matrix(
        self,
        y: Tensor,
        x: Tensor,
        step: int,
    ) -> Chunks:
        """∂y/∂x, some rows at a time: by vmap where the code allows it, else one by one."""
        for index in pieces(len(y), step):
            E = y.new_zeros(index.stop - index.start, len(y))
            E.diagonal(index.start).fill_(1)
            X = None
            if self.term.batched:
                with suppress(RuntimeError):
                    X = product(y, x, E)
            if X is None:
                X = torch.stack([product(y, x, e) for e in E])
                self.term.batched = False
            yield index, X

    def _transposed(self, columns: slice) -> Pair:
        """Jᵀv and v: this is linear in v, and the derivative of zᵀJᵀv is Jz."""
        r, theta = self._graph(columns)
        v = torch.zeros_like(r, requires_grad=True)
        (Jv,) = torch.autograd.grad(
            r, theta, v, create_graph=True, materialize_grads=True
        )
        return Jv, v

    def _graph(self, columns: slice) -> Pair:
        """r with its graph, and the entries of θ that it was computed from."""
        theta = self.parameters.theta()[columns].requires_grad_()
        r = self.term(self.parameters.values(columns, theta), self.batch)
        if r.requires_grad:
            return r, theta
        if columns == self.parameters.all:
            raise ValueError(
                f"{self.term.name} does not depend on the parameters: is the model called, and nothing detached?"
            )
        return (
            r + 0 * theta.sum(),
            theta,
        )  # a term need not depend on all of them


def product(
    y: Tensor,
    x: Tensor,
    v: Tensor,
) -> Tensor:
    """vᵀ·∂y/∂x of one vector v, or of several at once as rows (b, …)."""
    (found,) = torch.autograd.grad(
        y,
        x,
        v.to(y),
        retain_graph=True,
        materialize_grads=True,
        is_grads_batched=v.dim() > 1,
    )
    return found.expand(
        *v.shape[:-1], len(x)
    )  # zeros of an unused x come as one row


class MixedSamplesError(ValueError):
    """The residuals of a batch are not those of its samples."""


def layout_of(part: TermJacobian) -> Layout | None:
    """How the samples separate, found out once for each shape of a batch; None: they do not."""
    term = part.term
    r = part.r
    if term.separate is False or not r.isfinite().all():
        return None
    shapes = [x.shape for x in (r, *part.samples)]
    key = (*shapes, r.device, term.modes)
    if key not in term.layouts:
        try:
            term.layouts[key] = find_layout(part)
        except Exception as error:  # of any kind: this runs the user's code
            if term.separate and not isinstance(error, MixedSamplesError):
                raise
            why = str(error).strip().split("\n")[0]
            _give_up(term, len(r), why)
    return term.layouts.get(key)


def _give_up(
    term: Term,
    m: int,
    why: str,
) -> None:
    """Differentiate this term as a whole from now on, with a warning where that is slow."""
    if term.separate:
        raise ValueError(
            f"separate=True, but {term.name} does not separate by samples: {why}"
        )
    term.separate = False
    gradients = min(m, COLUMN * term.parameters.n)
    if gradients > FEW:
        warn(
            f"{term.name} is differentiated as a whole, {gradients} gradients of the batch at every step, since its samples do "
            f"not separate ({why}). It is much faster with residuals that depend on one sample each, a term for every batch "
            "and derivatives by torch.func (grad, jacrev, hessian, jvp), not torch.autograd.grad; separate=False is quiet"
        )


def find_layout(part: TermJacobian) -> Layout:
    """Compare r and a product Jᵀv of the batch with those of three samples taken one by one."""
    r = part.r
    sizes = {len(x) for x in part.samples}
    B = sizes.pop() if len(sizes) == 1 else 0
    if not B or len(r) % B:
        count = B or "no common number of"
        raise MixedSamplesError(f"{len(r)} residuals of {count} samples")
    order = torch.arange(len(r), device=r.device)
    picked = order[[0, B // 2, B - 1]].unique()
    few = [x[picked] for x in part.samples]
    theta = part.parameters.theta()
    alone = vmap(partial(part.of_one, part.parameters.all), (None, 0))
    with Allocated() as allocated:
        s, pull, *_ = vjp(lambda theta: alone(theta, few).flatten(), theta)
        v = torch.linspace(1, 2, len(s)).to(s)
        (z,) = pull(v)
    part.of_samples(slice(0, 1), few)  # fails here, if it does
    slope = float(z.abs().max())
    # r may be a small difference of numbers as large as `level`.
    largest = r.abs().max()
    level = float(largest + slope * theta.norm())
    tolerance = torch.finfo(s.dtype).eps ** 0.5
    for places in (order.view(B, -1), order.view(-1, B).T):
        index = places[picked].flatten()
        V = torch.zeros_like(r)
        V[index] = v.to(r)
        w = part.pull(V)
        factor = float(z @ w / (z @ z)) if slope else 1.0
        if abs(factor - 1) < 1e-6:
            factor = 1.0
        slopes_agree = torch.allclose(w, factor * z, 0, tolerance * slope)
        expected = factor * s.to(r)
        levels_agree = torch.allclose(r[index], expected, 0, tolerance * level)
        if slopes_agree and levels_agree:
            sample_bytes = allocated.bytes // len(picked)
            return Layout(places, factor, sample_bytes)
    raise MixedSamplesError("a sample's residuals are others when it is alone")


class Allocated(TorchDispatchMode):
    """Counts the bytes of every tensor that is computed, as if nothing were freed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0

    def __torch_dispatch__(
        self,
        function: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        tensors = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        self.bytes += sum(t.nbytes for t in tensors)
        return out


def pieces(total: int, step: int) -> Iterator[slice]:
    """0 … total in slices of `step`, which is at least 1."""
    step = max(1, step)
    for start in range(0, total, step):
        yield slice(start, min(start + step, total))
