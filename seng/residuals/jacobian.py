"""The Jacobian J (m, n) of one residual function on one batch, in chunks and in products.

Where r of a batch consists of the residuals of its samples, J is `vmap(jacrev(…))` over single
samples. For each residual of a sample this takes about as long as one gradient of the batch.

Other code is differentiated as a whole: by rows vᵀJ, m gradients of the batch, some at a time,
or by columns Jz where there are few parameters. This works for any differentiable code.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import jacrev, vmap
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from seng.notices import warn
from seng.residuals.terms import Layout, Term

COPIES = 4  # how many copies of a chunk of J exist while it is made
ROWS = 64  # of a chunk, where samples do not separate
COLUMN = 3  # the cost of a column in rows
FEW = 100  # gradients per step that are not worth a warning

Pair = tuple[Tensor, Tensor]
Chunks = Iterator[tuple[Any, Tensor]]  # some rows, and J[rows, columns]


@dataclass
class TermJacobian:
    """A term at the present θ on its batch: the residuals r (m,) and their Jacobian J (m, n)."""

    term: Term
    batch: tuple[Any, ...]
    theta: Tensor  # (n,)
    room: int  # bytes for a chunk of J and for what it is made from

    def __post_init__(self) -> None:
        self.shapes = [x.shape for x in self.batch if has_samples(x)]
        if any(shape[0] == 0 for shape in self.shapes):
            raise ValueError(f"the batch of {self.term.name} is empty")
        self.r = self.residuals(0.0)
        self.layout = layout_of(self)

    def residuals(self, step: Tensor | float) -> Tensor:
        """r (m,) at θ − step."""
        r = self.term(self.theta - step, self.batch)
        return r.detach().to(self.theta)

    def chunks(self, columns: slice) -> Chunks:
        """J[:, columns], some rows at a time."""
        if self.layout is None:
            yield from self._whole(columns)
            return
        places = self.layout.places
        step = self.room // self.layout.bytes
        for index in pieces(len(places), step):
            X, _ = self.of_samples(index)
            J = X.flatten(0, 1)[:, columns]
            yield places[index].flatten(), self.layout.factor * J

    def of_samples(self, index: slice | Tensor) -> Pair:
        """The Jacobians (b, k, n) and the residuals (b, k) of single samples."""

        def alone(theta: Tensor, *sample: Any) -> Pair:
            call = self.term.parameters.call
            r = call(self.term.function, theta, sample).flatten()
            return r, r

        samples = [
            x.detach()[index, None] if has_samples(x) else x
            for x in self.batch
        ]
        dims = [0 if has_samples(x) else None for x in self.batch]
        jacobian = vmap(jacrev(alone, has_aux=True), (None, *dims))
        return jacobian(self.theta, *samples)  # type: ignore[no-any-return]

    def pull(self, c: Tensor) -> Tensor:
        """Jᵀc (n,): one gradient of the batch."""
        return product(*self._graph(), c)

    def push(self, z: Tensor) -> Tensor:
        """Jz (m,): two gradients of the batch, or all of J where r is not twice differentiable."""
        with suppress(RuntimeError):
            return product(*self._transposed(), z).to(z)
        Jz = torch.empty_like(self.r)
        for rows, X in self.chunks(slice(0, len(z))):
            Jz[rows] = X @ z
        return Jz

    def _whole(self, columns: slice) -> Chunks:
        m = len(self.r)
        width = columns.stop - columns.start
        fits = COPIES * width * self.r.nbytes < self.room
        if COLUMN * width < m and fits:
            # This fails where code is not twice differentiable.
            with suppress(RuntimeError):
                Jv, v = self._transposed()
                blocks = [X for _, X in self._matrix(Jv[columns], v, ROWS)]
                yield slice(0, m), torch.cat(blocks).T
                return
        with Allocated() as allocated:  # type: ignore[no-untyped-call]
            r, theta = self._graph()
        of_row = COPIES * theta.nbytes + allocated.bytes
        most = self.room // of_row
        for rows, X in self._matrix(r, theta, min(ROWS, most)):
            yield rows, X[:, columns]

    def _matrix(self, y: Tensor, x: Tensor, step: int) -> Chunks:
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

    def _transposed(self) -> Pair:
        """Jᵀv and v: this is linear in v, and the derivative of zᵀJᵀv is Jz."""
        r, theta = self._graph()
        v = torch.zeros_like(r, requires_grad=True)
        (Jv,) = torch.autograd.grad(r, theta, v, create_graph=True)
        return Jv, v

    def _graph(self) -> Pair:
        """r with its graph, and the θ that it was computed from."""
        theta = self.theta.clone().requires_grad_()
        r = self.term(theta, self.batch)
        if not r.requires_grad:
            raise ValueError(
                f"{self.term.name} does not depend on the parameters: is the model called, and "
                "nothing detached?"
            )
        return r, theta


def product(y: Tensor, x: Tensor, v: Tensor) -> Tensor:
    """vᵀ·∂y/∂x of one vector v, or of several at once as rows (b, …)."""
    several = v.dim() > 1
    (found,) = torch.autograd.grad(
        y, x, v.to(y), retain_graph=True, is_grads_batched=several
    )
    return found


def layout_of(part: TermJacobian) -> Layout | None:
    """How the samples separate, found out once for each shape of a batch; None: they do not.

    A BatchNorm mixes samples in training mode, so that the modes of all modules count as well.
    """
    term = part.term
    r = part.r
    if term.separate is False or not r.isfinite().all():
        return None
    modes = [module.training for module in term.parameters.modules()]
    key = (r.shape, r.device, *part.shapes, *modes)
    if key in term.layouts:
        return term.layouts[key]
    try:
        found = find_layout(part)
    except Exception as error:  # of any kind: this runs the user's code
        if term.separate:
            raise
        found = str(error).strip().split("\n")[0]
    if isinstance(found, Layout):
        term.layouts[key] = found
        return found
    if term.separate:
        raise ValueError(
            f"separate=True, but {term.name} does not separate by samples: {found}"
        )
    # From now on it is differentiated as a whole.
    term.separate = False
    gradients = min(len(r), COLUMN * len(part.theta))
    if gradients > FEW:
        warn(
            f"{term.name} is differentiated as a whole, {gradients} gradients of the batch at "
            f"every step, since its samples do not separate ({found}). It is much faster with "
            "residuals that depend on one sample each, a term for every batch and derivatives by "
            "torch.func (grad, jacrev, hessian, jvp), not torch.autograd.grad; separate=False is "
            "quiet"
        )
    return None


def find_layout(part: TermJacobian) -> Layout | str:
    """Compare r and a product Jᵀv of the batch with those of three samples taken one by one.

    In words: why they are not the same.
    """
    r = part.r
    counts = {shape[0] for shape in part.shapes}
    if len(counts) != 1:
        return f"{len(r)} residuals of no common number of samples"
    B = counts.pop()
    if len(r) % B:
        return f"{len(r)} residuals of {B} samples"
    order = torch.arange(len(r), device=r.device)
    picked = order[[0, B // 2, B - 1]].unique()
    with Allocated() as allocated:  # type: ignore[no-untyped-call]
        J, s = part.of_samples(picked)
    s = s.flatten()
    v = torch.linspace(1, 2, len(s)).to(r)
    z = v @ J.flatten(0, 1)
    slope = float(z.abs().max())
    # r may be a small difference of numbers as large as `level`.
    level = float(r.abs().max() + slope * part.theta.norm())
    tolerance = torch.finfo(s.dtype).eps ** 0.5
    layouts = order.view(B, -1), order.view(-1, B).T
    for places in layouts:
        index = places[picked].flatten()
        w = part.pull(torch.zeros_like(r).index_put((index,), v))
        measured = float(z @ w / (z @ z)) if slope else 1.0
        factor = exact_factor(measured, B, tolerance)
        expected = factor * s.to(r)
        slopes_agree = torch.allclose(w, factor * z, 0, tolerance * slope)
        levels_agree = torch.allclose(r[index], expected, 0, tolerance * level)
        if slopes_agree and levels_agree:
            return Layout(places, factor, allocated.bytes // len(picked))
    return "a sample's residuals are others when it is alone"


def exact_factor(measured: float, B: int, tolerance: float) -> float:
    """The factor without rounding, which another batch rounds otherwise: 1, 1/B, B or a root."""
    for power in (0.0, -1.0, -0.5, 1.0, 0.5):
        exact = float(B**power)
        if abs(measured / exact - 1) < tolerance:
            return exact
    return measured


class Allocated(TorchDispatchMode):
    """Counts the bytes of every tensor that is computed, as if nothing were freed."""

    bytes = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            self.bytes += getattr(t, "nbytes", 0)
        return out


def has_samples(x: object) -> bool:
    """Whether dimension 0 counts samples. Numbers and 0-d tensors are the same for all samples."""
    return isinstance(x, Tensor) and x.dim() > 0


def pieces(total: int, step: int) -> list[slice]:
    """0 … total in slices of `step`, which is at least 1."""
    step = max(1, step)
    starts = range(0, total, step)
    return [slice(i, min(i + step, total)) for i in starts]
