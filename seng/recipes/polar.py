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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from seng.gpu import kernels
from seng.layers.sites import Segment, Segments, Site, Tensors
from seng.linalg.operators import Shape, wide

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


class StepInputs(NamedTuple):
    """What a step reads of each parameter, and of their param group."""

    xs: Tensors  # directions
    buffers: Tensors  # b; none without momentum
    roots: Tensors  # r of what is no matrix
    # lr, μ, weight decay, and the memory of r; a recording reads them from the device
    rates: Sequence[float | Tensor]
    nesterov: bool
    maximize: bool

    def downhill(self, p: nn.Parameter) -> Tensor:
        """The direction downhill, with the strides and the type of p."""
        x = -self.xs[p] if self.maximize else self.xs[p]
        if x.stride() == p.stride() and x.dtype == p.dtype:
            return x
        return torch.empty_like(p).copy_(x)

    def along(self, params: Sequence[nn.Parameter]) -> list[Tensor]:
        """b ← μb + x where there are buffers; what the step goes along."""
        _, mu, *_ = self.rates
        x = [self.downhill(p) for p in params]
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
        keep = 1 - lr * decay
        old = [p.to(moves[0].dtype) for p in params]
        sums = torch._foreach_mul(old, keep)
        torch._foreach_sub_(sums, [*moves])
        torch._foreach_copy_([*params], sums)


def polar(X: Tensor) -> Tensor:
    """Q of each of X (L, m, n) with m ≤ n, nearly; 0 of a matrix of zeros.

        Y ← MY,   M = aI + bS + cS²,   S = YYᵀ,   from Y = X/‖X‖

    S of MY is MSM: so of a long Y several steps are taken on S alone, and Y goes through the
    product A of their M at once. On a GPU X comes in bfloat16: the iteration corrects its own
    rounding, as long as S comes from Y now and then.
    """
    _, m, n = X.shape
    largest = torch.linalg.vector_norm(X, math.inf, (-2, -1), keepdim=True)
    Y: Tensor = X / largest.clamp_min(torch.finfo(X.dtype).tiny)
    counts = STEPS if n > 2 * m else [1] * sum(STEPS)
    for i, steps in enumerate(counts):
        S = Y @ Y.mT
        if i == 0:  # ‖Y‖² is the trace of S, and at least 1 by now
            trace = S.diagonal(0, -2, -1).sum(-1, dtype=wide(S.dtype))
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
    return Y


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
    def shape(self) -> Shape:
        """(h, n_G, n_A) of its h matrices."""
        h, n_G, n_A = self.site.shape(self.segments)
        columns = self.segments[0].shape[2]  # the weight comes first
        if n_G == QKV * columns:
            return QKV * h, columns, n_A
        return h, n_G, n_A

    @property
    def sides(self) -> list[int]:
        """m and n, with m ≤ n."""
        return sorted(self.shape[1:])

    def columns(self, X: Tensor) -> tuple[Tensor, ...]:
        """Where each parameter's (h, n_G, width) lies in X, whose matrices are wide."""
        _, n_G, n_A = self.shape
        if n_G <= n_A:
            own = X[:, :n_G, :n_A]
        else:
            own = X[:, :n_A, :n_G].mT
        widths = [s.shape[2] for s in self.segments]
        return torch.split(own, widths, 2)


def stacks_of(parts: Sequence[Part], fill: bool) -> list[Stack]:
    """The matrices of a device in stacks, those first that take longest.

    With `fill` small matrices of several sizes share a stack; else those of one size.
    """
    alike: defaultdict[object, list[Part]] = defaultdict(list)
    for part in parts:
        alike[part.site.dtype, *part.sides].append(part)
    found = [Stack(same) for same in alike.values()]
    stacks: list[Stack] = []
    # Those of one precision side by side, small ones first.
    for stack in sorted(found, key=lambda s: (s.sums.itemsize, s.work)):
        if fill and stacks and stacks[-1].sums == stack.sums:
            both = Stack([*stacks[-1].parts, *stack.parts])
            small = math.prod(both.size) <= ROOM
            if small and both.work <= FILLED:
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
        self.device = site.lead.device
        self.sums = site.dtype
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

    def step(self, inputs: StepInputs) -> None:
        """θ ← keep·θ − lr·RMS·√m·q/‖q‖, in place."""
        lr, *_ = inputs.rates
        X, rooms = self._rooms()
        along = inputs.along(self.params)
        for s, room, x in zip(self.segments, rooms, along, strict=True):
            room.copy_(s.rows(x).reshape(room.shape))
        for s, q, length, root, least in self._measured(polar(X)):
            scale = lr * root / length.clamp_min(least)
            move = (q * scale).reshape(s.shape)
            inputs.subtract([s.param], [s.back(move)])

    def launch(self, inputs: StepInputs) -> None:
        """`step` where rates are on the device, by kernels where they can serve."""
        if not self._fuses(inputs.buffers):
            self.step(inputs)
            return
        lr, mu, decay, _ = inputs.rates
        X, rooms = self._rooms()
        for p, room in zip(self.params, rooms, strict=True):
            x = inputs.downhill(p)
            b = inputs.buffers[p]
            kernels.push(x, b, room, mu, inputs.nesterov)  # type: ignore[arg-type]
        for s, q, length, root, least in self._measured(polar(X)):
            kernels.pull(s.param, q, length, root, least, lr, decay)  # type: ignore[arg-type]

    def _fuses(self, buffers: Tensors) -> bool:
        """Whether the kernels can serve it."""
        return (
            kernels.AVAILABLE
            and self.dtype == torch.bfloat16
            and bool(buffers)
            and all(_is_plain(s, buffers[s.param]) for s in self.segments)
        )

    def _rooms(self) -> tuple[Tensor, list[Tensor]]:
        """Zeros for its matrices, and where each parameter's (h, n_G, width) lies in them."""
        X = torch.zeros(self.size, dtype=self.dtype, device=self.device)
        own = zip(self.parts, X.split(self.counts), strict=True)
        rooms: list[Tensor] = []
        for part, x in own:
            rooms += part.columns(x)
        return X, rooms

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
        matrices = zip(
            self.parts,
            Q.split(self.counts),
            norms.split(self.counts),
            strict=True,
        )
        for part, own, length in matrices:
            m, n = part.sides
            if m == 1:
                squares = length[:, :, :n].square()
                length = squares.mean(2, keepdim=True).sqrt()
            root = RMS * math.sqrt(m)
            least = SHORTEST * math.sqrt(m / n)
            columns = part.columns(own)
            lengths = part.columns(length.expand_as(own))
            found = zip(part.segments, columns, lengths, strict=True)
            for s, q, each in found:
                yield s, q, each, root, least


def _is_plain(s: Segment, b: Tensor) -> bool:
    """Whether the kernels can serve a parameter and its momentum, which they read as these lie in
    memory.

    Q does not mind the order of columns, but rows have to be the matrix's, without gaps.
    """
    p = s.param
    order = sorted(range(1, p.dim()), key=p.stride().__getitem__, reverse=True)
    rows = s.in_order and p.permute(0, *order).is_contiguous()
    single = p.dtype == b.dtype == torch.float32
    return rows and single and p.numel() < 2**31
