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
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from seng.gpu import kernels
from seng.layers.sites import Segment, Segments, Site
from seng.linalg.operators import Shape

# Root mean square of a step per unit of lr: lr is then about what it is for SGD on networks with
# norms.
RMS = 1 / 30
# Before S comes from Y again: after four, bfloat16 has lost some matrices.
STEPS = 3, 2
# Jordan et al.: five steps take singular values from 1e-3 up to between 0.7 and 1.2.
QUINTIC = 3.4445, -4.7750, 2.0315
QKV = 3
# Numbers of bfloat16 that tensor cores read at once: odd sizes are slow.
GRAIN = 8
# Σ m²n, with the zeros, of the matrices that are filled up to one size; and their Σ mn.
FILLED = 2**31
ROOM = 2**24
SHORTEST = 0.1  # of √(m/n), the root of the mean of ‖q‖²: the least that ‖q‖ counts as

Number = float | Tensor
Tensors = Mapping[nn.Parameter, Tensor]


class StepInputs(NamedTuple):
    """What a step reads of each parameter, and of their param group."""

    xs: Tensors  # directions
    buffers: Tensors  # b; none without momentum
    roots: Tensors  # r of what is no matrix
    # lr, μ, weight decay, and the memory of r; a recording reads them from the device
    rates: Sequence[Number]
    nesterov: bool
    maximize: bool

    def along(self, params: Sequence[nn.Parameter]) -> list[Tensor]:
        """b ← μb + x where there are buffers; what the step goes along."""
        _, mu, *_ = self.rates
        x = [self.xs[p] for p in params]
        if not self.buffers:
            return x
        b = [self.buffers[p] for p in params]
        torch._foreach_mul_(b, mu)
        torch._foreach_add_(b, x)
        if not self.nesterov:
            return b
        ahead = [*torch._foreach_mul(b, mu)]
        torch._foreach_add_(ahead, x)
        return ahead

    def subtract(
        self, params: Sequence[nn.Parameter], moves: Sequence[Tensor]
    ) -> None:
        """θ ← (1 − lr·decay)·θ − move, in place.

        In half precision at once: a decay by itself is less than one rounding.
        """
        lr, _, decay, _ = self.rates
        dtype = moves[0].dtype
        sums = torch._foreach_mul(
            [p.to(dtype) for p in params], 1 - lr * decay
        )
        torch._foreach_sub_(sums, [*moves])
        torch._foreach_copy_([*params], sums)


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


@dataclass(frozen=True)
class Part:
    """The parameters of a layer that take this step."""

    site: Site
    segments: Segments

    @property
    def is_matrix(self) -> bool:
        """Whether it has a polar factor: not norms, tables, nor a bias that is trained alone."""
        named = any(s.name == "weight" for s in self.segments)
        return self.site.matrix and named

    @property
    def shape(self) -> Shape:
        """(h, n_G, n_A) of its h matrices."""
        h, n_G, n_A = self.site.shape(self.segments)
        columns = self.segments[0].shape[2]  # the weight comes first
        thirds = n_G == QKV * columns
        return (QKV * h, columns, n_A) if thirds else (h, n_G, n_A)

    @property
    def sides(self) -> list[int]:
        """m and n, with m ≤ n."""
        return sorted(self.shape[1:])

    def columns(self, X: Tensor) -> tuple[Tensor, ...]:
        """Where each parameter's (h, n_G, width) lies in X, whose matrices are wide."""
        _, n_G, n_A = self.shape
        own = X[:, :n_G, :n_A] if n_G <= n_A else X[:, :n_A, :n_G].mT
        return torch.split(own, [s.shape[2] for s in self.segments], 2)


def stacks_of(parts: Sequence[Part], fill: bool) -> list[Stack]:
    """The matrices of a device in stacks, those first that take longest.

    With `fill` small matrices of several sizes share a stack; else those of one size.
    """
    alike: defaultdict[object, list[Part]] = defaultdict(list)
    for part in parts:
        alike[part.site.dtype, *part.sides].append(part)
    stacks: list[Stack] = []
    for stack in sorted(map(Stack, alike.values()), key=Stack.order):
        if fill and stacks and stacks[-1].sums == stack.sums:
            both = Stack([*stacks[-1].parts, *stack.parts])
            if both.work <= FILLED and math.prod(both.size) <= ROOM:
                stacks[-1] = both
                continue
        stacks.append(stack)
    return sorted(stacks, key=lambda stack: -stack.work)


class Stack:
    """Matrices that are worked out at once: wide ones as they are, tall ones on their side, with
    zeros around them.
    """

    def __init__(
        self, parts: Sequence[Part], dtype: torch.dtype | None = None
    ) -> None:
        self.parts = parts
        site = parts[0].site
        self.device, self.sums = site.lead.device, site.dtype
        half = self.device.type == "cuda" and self.sums != torch.float64
        self.dtype = dtype or (torch.bfloat16 if half else self.sums)
        grain = GRAIN if self.dtype == torch.bfloat16 else 1
        sides = zip(*(part.sides for part in parts), strict=True)
        m, n = (-(-max(lengths) // grain) * grain for lengths in sides)
        self.counts = [part.shape[0] for part in parts]
        self.size = sum(self.counts), m, n
        self.work = math.prod(self.size) * m
        self.segments = [s for part in parts for s in part.segments]
        self.params = [s.param for s in self.segments]

    def order(self) -> tuple[int, int]:
        """Those of one precision side by side, small ones first."""
        return self.sums.itemsize, self.work

    def step(self, inputs: StepInputs) -> None:
        """θ ← keep·θ − lr·RMS·√m·q/‖q‖, in place."""
        lr, *_ = inputs.rates
        X = self._zeros()
        along = inputs.along(self.params)
        for s, room, x in zip(
            self.segments, self._columns(X), along, strict=True
        ):
            room.copy_(s.rows(x).reshape(room.shape))
        for s, q, length, root, least in self._measured(polar(X)):
            move = q * (lr * root / length.clamp_min(least))
            inputs.subtract([s.param], [s.back(move.reshape(s.shape))])

    def recorded_step(self, inputs: StepInputs, dry: bool) -> None:
        """`step` in a recording, where rates are tensors, by kernels where they can serve.

        A dry one compiles these, and does nothing else.
        """
        if not self._fuses(inputs.buffers):
            if not dry:
                self.step(inputs)
            return
        lr, mu, decay, _ = inputs.rates
        X = self._zeros()
        for p, room in zip(self.params, self._columns(X), strict=True):
            x, b = inputs.xs[p], inputs.buffers[p]
            kernels.push(x, b, room, mu, inputs.nesterov, dry)  # type: ignore[arg-type]
        Q = X if dry else polar(X)
        for s, q, length, root, least in self._measured(Q):
            kernels.pull(s.param, q, length, root, least, lr, decay, dry)  # type: ignore[arg-type]

    def _fuses(self, buffers: Tensors) -> bool:
        """Whether the kernels can serve it, which read parameters as they lie in memory.

        Q does not mind the order of columns, but rows have to be the matrix's.
        """
        single = torch.float32
        return (
            kernels.AVAILABLE
            and self.dtype == torch.bfloat16
            and bool(buffers)
            and all(s.in_order for s in self.segments)
            and all(p.dtype == buffers[p].dtype == single for p in self.params)
            and all(_row_by_row(p) and p.numel() < 2**31 for p in self.params)
        )

    def _zeros(self) -> Tensor:
        return torch.zeros(self.size, dtype=self.dtype, device=self.device)

    def _columns(self, X: Tensor) -> list[Tensor]:
        """Where each parameter's (h, n_G, width) lies in X."""
        own = zip(self.parts, X.split(self.counts), strict=True)
        return [columns for part, X in own for columns in part.columns(X)]

    def _measured(
        self, Q: Tensor
    ) -> Iterator[tuple[Segment, Tensor, Tensor, float, float]]:
        """Of each parameter the columns q in Q, their lengths ‖q‖, RMS·√m, and the least ‖q‖.

        Where columns are single numbers, the root mean square of all of them takes the place of
        ‖q‖.
        """
        norms = torch.linalg.vector_norm(
            Q, dim=1, keepdim=True, dtype=self.sums
        )
        whole = Q.split(self.counts), norms.split(self.counts)
        for part, own, length in zip(self.parts, *whole, strict=True):
            m, n = part.sides
            if m == 1:
                length = length[:, :, :n].square().mean(2, keepdim=True).sqrt()
            root, least = RMS * math.sqrt(m), SHORTEST * math.sqrt(m / n)
            lengths = part.columns(length.expand_as(own))
            for s, q, each in zip(
                part.segments, part.columns(own), lengths, strict=True
            ):
                yield s, q, each, root, least


def _row_by_row(p: Tensor) -> bool:
    """Whether rows follow each other in memory, without gaps."""
    order = sorted(range(1, p.dim()), key=p.stride().__getitem__, reverse=True)
    return p.permute(0, *order).is_contiguous()
