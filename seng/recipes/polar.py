"""The matrices of the orthogonal step: of each layer's momentum x = UΣVᵀ its polar factor Q ≈ UVᵀ, and the weights' move.

    b ← μb + x,   X = b, or x + μb by Nesterov,   θ ← keep·θ − lr·RMS·√m·q/‖q‖

for each of the n columns q of a matrix (m, n), or rows where those are more. Along its shorter side Q has lines of one length
as it is; making them equal along the longer one as well keeps inputs, or neurons, from being left behind. Columns of a single
number stay as they are: equal ones would be signs.

Weight and bias of a layer are one matrix, as everywhere in SENG, but a weight that is three times as tall as wide is three:
that is how queries, keys and values lie in one layer, which have little to do with each other.

A GPU spends its time on launches rather than on numbers: so matrices of several sizes are filled up with zeros, which stay 0,
to one size, and are worked out at once; and in a recording two kernels do all that passes over gradients and weights.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from seng.gpu import kernels
from seng.layers.kinds import ROWS
from seng.layers.sites import Segment, Site
from seng.linalg.operators import HALF, Shape

RMS = (
    1 / 30
)  # of a step, per unit of lr: so that lr is about what it is for SGD on networks with norms
STEPS = 3, 2  # before S comes from Y again: after four, bfloat16 has lost some matrices
QUINTIC = (
    3.4445,
    -4.7750,
    2.0315,
)  # Jordan et al.: singular values between 0.7 and 1.2 after five steps, from 1e-3 up
QKV = 3
GRAIN = 8  # numbers of bfloat16 in what tensor cores read at once: products of odd sizes are slow
FILLED = (
    2**31
)  # Σ m²n, with the zeros, of matrices of several sizes that a GPU works out at once
ROOM = 2**24  # and Σ mn

SHORTEST = (
    0.1  # of √(m/n), the root of the mean of ‖q‖²: what is shorter counts as that
)

Part = tuple[
    Site, tuple[Segment, ...]
]  # a layer, or those of its parameters that take this step
Number = float | Tensor
Tensors = Mapping[nn.Parameter, Tensor]


class Rates(NamedTuple):
    """What a param group says of a step; in a recording the numbers are read from the device."""

    lr: Number
    momentum: Number
    decay: Number
    nesterov: bool = False
    maximize: bool = False
    decays: bool = False  # whether decay is more than 0

    @property
    def keep(self) -> Number | None:
        """What decay leaves of a weight."""
        return 1 - self.lr * self.decay if self.decays else None


def polar(X: Tensor) -> Tensor:
    """Q of each of X (L, m, n), nearly: Y ← MY, M = aI + bS + cS², S = YYᵀ, from Y = X/‖X‖; 0 of a matrix of zeros.

    S of MY is MSM: so of a long Y several steps are taken on S alone, and Y goes through the product of their M at once. On a
    GPU X comes in bfloat16: the iteration corrects its own rounding, as long as S comes from Y now and then.
    """
    wide = X.shape[-2] <= X.shape[-1]
    Y: Tensor = X if wide else X.mT
    Y = Y / torch.linalg.vector_norm(Y, math.inf, (-2, -1), keepdim=True).clamp_min(
        torch.finfo(Y.dtype).tiny
    )
    for i, steps in enumerate(
        STEPS if Y.shape[-1] > 2 * Y.shape[-2] else [1] * sum(STEPS)
    ):
        S = Y @ Y.mT
        if i == 0:  # ‖Y‖² is the trace of S, and at least 1 by now
            square = (
                S.diagonal(0, -2, -1)
                .sum(-1, dtype=torch.float32 if S.dtype == torch.bfloat16 else None)
                .clamp_min(1)
            )
            S = S * square.reciprocal().to(S.dtype)[:, None, None]
        M = A = _quintic(S)
        for _ in range(steps - 1):
            S = M @ S @ M
            M = _quintic(S)
            A = M @ A
        Y = (A * square.rsqrt().to(A.dtype)[:, None, None] if i == 0 else A) @ Y
    return Y if wide else Y.mT


def _quintic(S: Tensor) -> Tensor:
    a, b, c = QUINTIC
    M = torch.baddbmm(S, S, S, beta=b, alpha=c)
    M.diagonal(0, -2, -1).add_(a)
    return M


def is_matrix(part: Part) -> bool:
    """Whether it has a polar factor: not norms, tables, nor a bias that is trained alone."""
    site, active = part
    return site.matrix and any(s.name == "weight" for s in active)


def shape_of(part: Part) -> Shape:
    """(h, n_G, n_A) of its h matrices."""
    site, active = part
    h, n_G, n_A = site.shape(active)
    columns = next(s.shape[2] for s in active if s.name == "weight")
    return (QKV * h, columns, n_A) if n_G == QKV * columns else (h, n_G, n_A)


def stacks_of(parts: Sequence[Part], fill: bool | None = None) -> list[Stack]:
    """The matrices, those first that take longest; filled up on a GPU, and elsewhere only those of one size together."""
    alike: defaultdict[object, list[Part]] = defaultdict(list)
    for part in parts:
        site, _ = part
        alike[tuple(sorted(shape_of(part)[1:])), site.dtype, site.lead.device].append(
            part
        )
    stacks: list[Stack] = []
    for one in sorted(map(Stack, alike.values()), key=lambda stack: stack.work):
        filled = one.device.type == "cuda" if fill is None else fill
        last = next(
            (
                s
                for s in stacks
                if filled and (s.dtype, s.device) == (one.dtype, one.device)
            ),
            None,
        )
        both = one if last is None else Stack([*last.parts, *one.parts])
        if last is not None and both.work <= FILLED and math.prod(both.size) <= ROOM:
            stacks.remove(last)
            one = both
        stacks.insert(0, one)
    return sorted(stacks, key=lambda stack: -stack.work)


class Stack:
    """Matrices that are worked out at once: wide ones as they are, tall ones on their side, with zeros around them."""

    def __init__(self, parts: Sequence[Part], dtype: torch.dtype | None = None) -> None:
        self.parts = parts
        site, _ = parts[0]
        self.device = site.lead.device
        half = self.device.type == "cuda" and site.dtype != torch.float64
        self.dtype = dtype or (torch.bfloat16 if half else site.dtype)
        self.shapes = [shape_of(part) for part in parts]
        self.counts = [h for h, _, _ in self.shapes]
        grain = GRAIN if self.dtype == torch.bfloat16 else 1
        m, n = (
            -(-max(sides) // grain) * grain
            for sides in zip(*(sorted(shape[1:]) for shape in self.shapes), strict=True)
        )
        self.size = sum(self.counts), m, n
        self.work = math.prod(self.size) * m
        self.params = [s.param for _, active in parts for s in active]

    def step(self, xs: Tensors, buffers: Tensors, rates: Rates) -> None:
        """θ ← keep·θ − lr·RMS·√m·q/‖q‖, in place."""
        along = dict(
            zip(self.params, momentum(self.params, xs, buffers, rates), strict=True)
        )
        X = self._empty()
        for (site, active), room in self._rooms(X):
            if not _in_order(active):
                room.copy_(site.gather(active, along, site.dtype).view(room.shape))
                continue
            for s, columns in _columns(active, room):
                columns.copy_(_rows(along[s.param], s.param).view(columns.shape))
        Q = polar(X)
        shrink(self.params, rates.keep)
        for ((site, active), room), (_, length) in zip(
            self._rooms(Q), self._rooms(self._lengths(Q)), strict=True
        ):
            root, least = _measures(room)
            move = room * (
                rates.lr * root / _each(length, 1 in room.shape[1:]).clamp_min(least)
            )
            if not _in_order(active):
                for p, part in site.scatter(active, move.reshape(-1)).items():
                    subtract([p], [part], rates.keep)
                continue
            for s, columns in _columns(active, move):
                subtract([s.param], [_like(columns, s.param)], rates.keep)

    def fused_step(
        self, xs: Tensors, buffers: Tensors, rates: Rates, dry: bool = False
    ) -> None:
        """`step` by kernels, in a recording, where it may be; a dry one does nothing, so that they are compiled before."""
        assert (
            isinstance(rates.lr, Tensor)
            and isinstance(rates.momentum, Tensor)
            and isinstance(rates.decay, Tensor)
        )
        X = self._empty()
        for (_, active), room in self._rooms(X):
            for s, columns in _columns(active, room):
                kernels.push(
                    xs[s.param],
                    buffers[s.param],
                    columns,
                    rates.momentum,
                    rates.nesterov,
                    dry,
                )
        Q = X if dry else polar(X)
        for ((_, active), room), (_, length) in zip(
            self._rooms(Q), self._rooms(self._lengths(Q)), strict=True
        ):
            each = _columns(active, _each(length, 1 in room.shape[1:]).expand_as(room))
            for (s, columns), (_, lengths) in zip(
                _columns(active, room), each, strict=True
            ):
                kernels.pull(
                    s.param,
                    columns,
                    lengths,
                    *_measures(room),
                    rates.lr,
                    rates.decay,
                    dry,
                )

    def fuses(self, buffers: Tensors) -> bool:
        """Whether the kernels can serve it."""
        return (
            kernels.AVAILABLE
            and self.dtype == torch.bfloat16
            and all(
                p in buffers and p.dtype == buffers[p].dtype == torch.float32
                for p in self.params
            )
            and all(p.numel() < 2**31 for p in self.params)
            and all(_in_order(active) for _, active in self.parts)
            and all(p.permute(0, *_order(p)).is_contiguous() for p in self.params)
        )

    def _empty(self) -> Tensor:
        whole = all(sorted(shape[1:]) == [*self.size[1:]] for shape in self.shapes)
        return (torch.empty if whole else torch.zeros)(
            self.size, dtype=self.dtype, device=self.device
        )

    def _lengths(self, Q: Tensor) -> Tensor:
        """‖q‖ of each column; tall matrices lie on their side."""
        lengths: Tensor = torch.linalg.vector_norm(
            Q, dim=1, keepdim=True, dtype=self.parts[0][0].dtype
        )
        return lengths

    def _rooms(self, X: Tensor) -> list[tuple[Part, Tensor]]:
        """Where each layer's (h, n_G, n_A) lies in X."""
        rooms = []
        for part, (_, n_G, n_A), room in zip(
            self.parts, self.shapes, X.split(self.counts), strict=True
        ):
            rooms.append(
                (part, room[:, :n_G, :n_A] if n_G <= n_A else room[:, :n_A, :n_G].mT)
            )
        return rooms


def _columns(active: Sequence[Segment], room: Tensor) -> list[tuple[Segment, Tensor]]:
    return list(zip(active, room.split([s.shape[2] for s in active], 2), strict=True))


def _each(length: Tensor, single: bool) -> Tensor:
    """‖q‖ of the columns of a layer's matrices; where they are single numbers, the root mean square of all."""
    return length.square().mean((1, 2), keepdim=True).sqrt() if single else length


def _measures(room: Tensor) -> tuple[float, float]:
    """RMS·√m, and the least ‖q‖."""
    m, n = sorted(room.shape[1:])
    return RMS * math.sqrt(m), SHORTEST * math.sqrt(m / n)


def momentum(
    params: Sequence[nn.Parameter], xs: Tensors, buffers: Tensors, rates: Rates
) -> Sequence[Tensor]:
    """b ← μb + x where there are buffers; what the step goes along."""
    x = [xs[p] for p in params]
    if not buffers:
        return x
    b = [buffers[p] for p in params]
    torch._foreach_mul_(b, rates.momentum)
    torch._foreach_add_(b, x)
    if not rates.nesterov:
        return b
    along = torch._foreach_mul(b, rates.momentum)
    torch._foreach_add_(along, x)
    return along


def shrink(params: Sequence[Tensor], keep: Number | None) -> None:
    """θ ← keep·θ; in half precision by itself that is less than one rounding, and is left to `subtract`."""
    exact = [p for p in params if p.dtype not in HALF]
    if keep is not None and exact:
        torch._foreach_mul_(exact, keep)


def subtract(
    params: Sequence[Tensor], moves: Sequence[Tensor], keep: Number | None
) -> None:
    """θ ← θ − move; in half precision with the decay to keep·θ."""
    pairs = list(zip(params, moves, strict=True))
    if keep is not None:
        for p, move in (pair for pair in pairs if pair[0].dtype in HALF):
            p.copy_(keep * p.to(move.dtype) - move)
        pairs = [pair for pair in pairs if pair[0].dtype not in HALF]
    if pairs:
        torch._foreach_sub_([p for p, _ in pairs], [move for _, move in pairs])


def _in_order(active: Sequence[Segment]) -> bool:
    """Whether their rows are the matrix's. Then columns may be taken as they lie in memory: Q does not mind their order."""
    return all(s.owner.kind.layout[0] in ROWS for s in active)


def _order(p: Tensor) -> list[int]:
    """The dimensions of a row, as they lie in memory."""
    return sorted(range(1, p.dim()), key=p.stride().__getitem__, reverse=True)


def _rows(x: Tensor, p: Tensor) -> Tensor:
    """x, which looks like p, as (rows, columns)."""
    return x.permute(0, *_order(p)).reshape(len(p), -1)


def _like(rows: Tensor, p: Tensor) -> Tensor:
    """Rows (h, n_G, columns) as p."""
    order = _order(p)
    back = [0, *(1 + order.index(d) for d in range(1, p.dim()))]
    return rows.reshape(len(p), *(p.shape[d] for d in order)).permute(back)
