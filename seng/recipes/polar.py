"""The matrices of the orthogonal step: the polar factor Q ≈ UVᵀ of each layer's momentum X = UΣVᵀ.

    b ← μb + x,   X = b, or x + μb by Nesterov,   θ ← keep·θ − lr·RMS·√m·q/‖q‖

for each of the n columns q of a matrix Q (m, n), or rows where those are more. Along its shorter
side the lines of Q have one length as they are. Making them equal along the longer one as well
keeps inputs, or neurons, from being left behind. Columns of a single number stay as they are: equal
ones would be signs.

Weight and bias of a layer are one matrix, as everywhere in SENG. A weight that is three times as
tall as wide is three matrices: that is how queries, keys and values lie in one layer.

A GPU spends its time on launches rather than on numbers. So matrices of several sizes are filled up
with zeros, which stay 0, to one size, and are worked out at once. In a recording two kernels do all
that passes over gradients and weights.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from seng.gpu import kernels
from seng.layers.sites import Segment, Site
from seng.linalg.operators import HALF, Shape

# Root mean square of a step per unit of lr: lr is then about what it is for SGD on networks with
# norms.
RMS = 1 / 30
STEPS = (
    3,
    2,
)  # before S comes from Y again: after four, bfloat16 has lost some matrices
# Jordan et al.: five steps take singular values from 1e-3 up to between 0.7 and 1.2.
QUINTIC = 3.4445, -4.7750, 2.0315
QKV = 3
GRAIN = (
    8  # numbers of bfloat16 that tensor cores read at once: odd sizes are slow
)
FILLED = (
    2**31
)  # Σ m²n, with the zeros, of the matrices that are filled up to one size
ROOM = 2**24  # and Σ mn
SHORTEST = 0.1  # of √(m/n), the root of the mean of ‖q‖²: the least that ‖q‖ counts as

Part = tuple[
    Site, tuple[Segment, ...]
]  # a layer's parameters that take this step
Number = float | Tensor
Tensors = Mapping[nn.Parameter, Tensor]


class StepInputs(NamedTuple):
    """What a step reads, by parameter, and what its param group says of it.

    In a recording the three rates are read from the device.
    """

    xs: Tensors  # directions
    buffers: Tensors  # b; none without momentum
    roots: Tensors  # r of what is no matrix
    lr: Number
    momentum: Number
    decay: Number
    nesterov: bool
    maximize: bool
    decays: bool  # whether decay is more than 0

    @property
    def keep(self) -> Number | None:
        """What decay leaves of a weight."""
        return 1 - self.lr * self.decay if self.decays else None


def polar(X: Tensor) -> Tensor:
    """Q of each of X (L, m, n), nearly; 0 of a matrix of zeros.

        Y ← MY,   M = aI + bS + cS²,   S = YYᵀ,   from Y = X/‖X‖

    S of MY is MSM: so of a long Y several steps are taken on S alone, and Y goes through the
    product A of their M at once. On a GPU X comes in bfloat16: the iteration corrects its own
    rounding, as long as S comes from Y now and then.
    """
    wide = X.shape[-2] <= X.shape[-1]
    Y: Tensor = X if wide else X.mT
    largest = torch.linalg.vector_norm(Y, math.inf, (-2, -1), keepdim=True)
    Y = Y / largest.clamp_min(torch.finfo(Y.dtype).tiny)
    long = Y.shape[-1] > 2 * Y.shape[-2]
    for i, steps in enumerate(STEPS if long else [1] * sum(STEPS)):
        S = Y @ Y.mT
        if i == 0:  # ‖Y‖² is the trace of S, and at least 1 by now
            sums_in = torch.float32 if S.dtype == torch.bfloat16 else None
            trace = S.diagonal(0, -2, -1).sum(-1, dtype=sums_in)
            square = trace.clamp_min(1)[:, None, None]
            S = S * square.reciprocal().to(S.dtype)
        M = A = _quintic(S)
        for _ in range(steps - 1):
            S = M @ S @ M
            M = _quintic(S)
            A = M @ A
        if i == 0:
            A = A * square.rsqrt().to(A.dtype)
        Y = A @ Y
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
    columns = active[0].shape[2]  # of the weight, which comes first
    return (QKV * h, columns, n_A) if n_G == QKV * columns else (h, n_G, n_A)


def stacks_of(parts: Sequence[Part], fill: bool | None = None) -> list[Stack]:
    """The matrices in stacks, those first that take longest.

    On a GPU, or with `fill`, small matrices of several sizes share a stack; elsewhere those of one
    size.
    """
    alike: defaultdict[object, list[Part]] = defaultdict(list)
    for part in parts:
        site, _ = part
        sides = tuple(sorted(shape_of(part)[1:]))
        alike[sides, site.dtype, site.lead.device].append(part)
    kinds: defaultdict[object, list[Stack]] = defaultdict(list)
    for stack in sorted(
        map(Stack, alike.values()), key=lambda stack: stack.work
    ):
        stacks = kinds[stack.dtype, stack.device]
        if stacks and (stack.device.type == "cuda" if fill is None else fill):
            both = Stack([*stacks[-1].parts, *stack.parts])
            if both.work <= FILLED and math.prod(both.size) <= ROOM:
                stacks[-1] = both
                continue
        stacks.append(stack)
    found = [stack for stacks in kinds.values() for stack in stacks]
    return sorted(found, key=lambda stack: -stack.work)


class Stack:
    """Matrices that are worked out at once: wide ones as they are, tall ones on their side, with
    zeros around them.
    """

    def __init__(
        self, parts: Sequence[Part], dtype: torch.dtype | None = None
    ) -> None:
        self.parts = parts
        site, _ = parts[0]
        self.device, self.sums = site.lead.device, site.dtype
        half = self.device.type == "cuda" and site.dtype != torch.float64
        self.dtype = dtype or (torch.bfloat16 if half else site.dtype)
        self.shapes = [shape_of(part) for part in parts]
        self.counts = [h for h, _, _ in self.shapes]
        grain = GRAIN if self.dtype == torch.bfloat16 else 1
        sides = [sorted(shape[1:]) for shape in self.shapes]
        m, n = (
            -(-max(side) // grain) * grain for side in zip(*sides, strict=True)
        )
        self.whole = all(own == [m, n] for own in sides)
        self.size = sum(self.counts), m, n
        self.work = math.prod(self.size) * m
        self.segments = [s for _, active in parts for s in active]
        self.measures = [
            (RMS * math.sqrt(m), SHORTEST * math.sqrt(m / n))
            for (m, n), (_, active) in zip(sides, parts, strict=True)
            for _ in active
        ]
        self.params = [s.param for s in self.segments]

    def step(self, inputs: StepInputs) -> None:
        """θ ← keep·θ − lr·RMS·√m·q/‖q‖, in place."""
        X = self._empty()
        along = momentum(self.params, inputs)
        for s, room, x in zip(
            self.segments, self._columns(X), along, strict=True
        ):
            room.copy_(s.rows(x).reshape(room.shape))
        for s, q, length, (root, least) in self._measured(polar(X)):
            move = q * (inputs.lr * root / length.clamp_min(least))
            subtract([s.param], [s.back(move.reshape(s.shape))], inputs.keep)

    def fused_step(self, inputs: StepInputs, dry: bool = False) -> None:
        """`step` by kernels, in a recording, where rates are tensors; a dry one only compiles them."""
        xs, buffers, _, lr, mu, decay, nesterov, *_ = inputs
        X = self._empty()
        for p, room in zip(self.params, self._columns(X), strict=True):
            kernels.push(xs[p], buffers[p], room, mu, nesterov, dry)  # type: ignore[arg-type]
        Q = X if dry else polar(X)
        for s, q, length, measures in self._measured(Q):
            kernels.pull(s.param, q, length, *measures, lr, decay, dry)  # type: ignore[arg-type]

    def fuses(self, buffers: Tensors) -> bool:
        """Whether the kernels can serve it, which read parameters as they lie in memory.

        Q does not mind the order of columns, but rows have to be the matrix's.
        """
        single = torch.float32
        return (
            kernels.AVAILABLE
            and self.dtype == torch.bfloat16
            and all(s.in_order for s in self.segments)
            and all(p in buffers for p in self.params)
            and all(p.dtype == buffers[p].dtype == single for p in self.params)
            and all(_row_by_row(p) and p.numel() < 2**31 for p in self.params)
        )

    def _empty(self) -> Tensor:
        make = torch.empty if self.whole else torch.zeros
        return make(self.size, dtype=self.dtype, device=self.device)

    def _columns(self, X: Tensor) -> list[Tensor]:
        """Where each parameter's (h, n_G, width) lies in X."""
        columns: list[Tensor] = []
        for own, part, shape in zip(
            X.split(self.counts), self.parts, self.shapes, strict=True
        ):
            _, n_G, n_A = shape
            matrices = (
                own[:, :n_G, :n_A] if n_G <= n_A else own[:, :n_A, :n_G].mT
            )
            columns += matrices.split([s.shape[2] for s in part[1]], 2)
        return columns

    def _measured(
        self, Q: Tensor
    ) -> Iterator[tuple[Segment, Tensor, Tensor, tuple[float, float]]]:
        """Of each parameter the columns q in Q, their lengths ‖q‖, and RMS·√m and the least ‖q‖.

        Where columns are single numbers, the root mean square of all of them takes the place of
        ‖q‖.
        """
        norms = torch.linalg.vector_norm(
            Q, dim=1, keepdim=True, dtype=self.sums
        )
        for own, (_, *sides) in zip(
            norms.split(self.counts), self.shapes, strict=True
        ):
            if 1 in sides:
                own = own[:, :, : max(sides)]
                own.copy_(own.square().mean(2, keepdim=True).sqrt())
        columns, lengths = self._columns(Q), self._columns(norms.expand_as(Q))
        return zip(self.segments, columns, lengths, self.measures, strict=True)


def _row_by_row(p: Tensor) -> bool:
    """Whether rows follow each other in memory, without gaps."""
    order = sorted(range(1, p.dim()), key=p.stride().__getitem__, reverse=True)
    return p.permute(0, *order).is_contiguous()


def momentum(
    params: Sequence[nn.Parameter], inputs: StepInputs
) -> list[Tensor]:
    """b ← μb + x where there are buffers; what the step goes along."""
    x = [inputs.xs[p] for p in params]
    if not inputs.buffers:
        return x
    b = [inputs.buffers[p] for p in params]
    torch._foreach_mul_(b, inputs.momentum)
    torch._foreach_add_(b, x)
    if not inputs.nesterov:
        return b
    along = torch._foreach_mul(b, inputs.momentum)
    torch._foreach_add_(along, x)
    return list(along)


def subtract(
    params: Sequence[Tensor], moves: Sequence[Tensor], keep: Number | None
) -> None:
    """θ ← keep·θ − move, for parameters of one type.

    In half precision at once: a decay by itself is less than one rounding.
    """
    if keep is not None and params[0].dtype in HALF:
        for p, move in zip(params, moves, strict=True):
            p.copy_(keep * p.to(move.dtype) - move)
        return
    if keep is not None:
        torch._foreach_mul_([*params], keep)
    torch._foreach_sub_([*params], [*moves])
