"""Triton kernels: four for the steps between refreshes, one for norms, two for the orthogonal step.

    d = g − Yᵀ(C(Yg))                            (eqs. 8, 12)
    d ← ±d + wθ,   m ← μm + d,   θ ← θ − η·(m, or d + μm by Nesterov)

A block's flat index i = r·n_A + a is cut into tiles of TILE numbers. `dots` leaves Yg of each tile,
`sums` adds up to SPAN tiles, `core` gives b = C(Yg), and `finish` ends with d or with the new θ.
Sums are taken in a fixed order, in float32. `seng.gpu.grouped` makes their tables and launches
them.

`standardized` sums up the per-sample gradients of a norm; `push` and `pull` are what the orthogonal
step does before and after its products.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import os
from collections.abc import Callable
from shutil import which
from typing import Any, NamedTuple

import torch
from torch import Tensor

try:
    import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
except ImportError:
    triton = tl = None
jit: Callable[[Any], Any] = getattr(triton, "jit", lambda kernel: kernel)
jit_any_n = jit if triton is None else triton.jit(do_not_specialize=["n"])


class Work(NamedTuple):
    """How much one program does."""

    TILE: int  # consecutive numbers of a block
    SLAB: int  # rows of Y that it has in flight
    ROWS: int  # rows of Y in all, in `dots`
    WARPS: int


MANY = 64  # rows of Y from which a block is worked on as a tall one
# Of blocks with few rows, and of tall ones:
WORK = {False: Work(1024, 8, 64, 4), True: Work(512, 8, 32, 2)}
SPAN = 256  # tiles that one program of `sums` adds
COLUMNS = 32  # columns of `sums` and rows of `core` for one program
COMPILER = os.environ.get("CC") or which("gcc") or which("clang")
AVAILABLE = triton is not None and bool(
    COMPILER
)  # Triton builds launchers in C
DTYPES = torch.float32, torch.bfloat16, torch.float16
# What the kernels call them:
TYPES = {
    dtype: getattr(tl, str(dtype).removeprefix("torch."), dtype)
    for dtype in DTYPES
}


@jit
def _int(address):
    return tl.load(address).to(tl.int32)


@jit
def _place(row, i):
    """Which piece number i lies in, and its offset there: a = (a₀·s₁ + a₁)·s₂ + a₂ by the strides t
    of the parameter.
    """
    second, offset = i < 0, i
    if tl.load(row + 6) > 0:  # not simply one parameter in the order of memory
        width = _int(row + 8)
        r = i // _int(row + 7)
        a = i - r * _int(row + 7)
        second = a >= width
        offset = r * _int(row + 9)
        if tl.load(row + 6) > 1:
            s1, s2 = _int(row + 10), _int(row + 11)
            outer = a // s2
            outest = outer // s1
            offset += (
                outest * _int(row + 12)
                + (outer - outest * s1) * _int(row + 13)
                + (a - outer * s2) * _int(row + 14)
            )
        else:
            offset += a * _int(row + 14)
        offset = tl.where(second, (r + a - width) * _int(row + 15), offset)
    return second, offset


@jit
def _either(second, table, first, other):
    return tl.where(second, tl.load(table + other), tl.load(table + first))


@jit
def _pointers(addresses, row, second, offset, TYPE: tl.constexpr):
    """Where each number lies of the two parameters whose first addresses are in the table."""
    p = tl.load(row + 16)
    return (
        _either(second, addresses, p, p + 1).to(tl.pointer_type(TYPE)) + offset
    )


@jit
def _entries(X, r, c, rows, columns, stride):
    """X[r, c], zero outside."""
    inside = (r < rows)[:, None] & (c < columns)[None, :]
    return tl.load(
        X + r.to(tl.int64)[:, None] * stride + c[None, :], mask=inside, other=0
    ).to(tl.float32)


@jit
def _products(Y, n, first, k, i, g, out, SLAB: tl.constexpr):
    for start in range(first, k, SLAB):
        j = start + tl.arange(0, SLAB)
        tl.store(
            out + j,
            tl.sum(_entries(Y, j, i, k, n, n) * g[None, :], axis=1),
            mask=j < k,
        )


@jit
def _combination(Y, n, k, i, b, SLAB: tl.constexpr, TILE: tl.constexpr):
    total = tl.zeros((TILE,), tl.float32)
    for start in range(0, k, SLAB):
        j = start + tl.arange(0, SLAB)
        total += tl.sum(
            _entries(Y, j, i, k, n, n)
            * tl.load(b + j, mask=j < k, other=0)[:, None],
            axis=0,
        )
    return total


@jit
def dots(
    tiles,
    blocks,
    gradients,
    partial,
    ROWS: tl.constexpr,
    SLAB: tl.constexpr,
    TILE: tl.constexpr,
    Y_TYPE: tl.constexpr,
    TYPE: tl.constexpr,
):
    """partial[tile, j] = Σ_i Y[j, i]·g[i], for ROWS of the j."""
    tile = tiles + 3 * tl.program_id(0)
    row = blocks + 20 * tl.load(tile)
    first = tl.program_id(1) * ROWS
    n, k, Y = (
        tl.load(row + 3),
        tl.minimum(_int(row + 4), first + ROWS),
        tl.load(row),
    )
    if first >= k:
        return
    i = _int(tile + 1) * TILE + tl.arange(0, TILE)
    second, offset = _place(row, i)
    g = tl.load(
        _pointers(gradients, row, second, offset, TYPE), mask=i < n, other=0
    ).to(tl.float32)
    out = partial + tl.load(tile + 2)
    # Where rows are aligned the compiler is told, and loads 16 bytes at a time; else every number
    # needs its own address.
    if tl.load(row + 5) > 0:
        _products(
            tl.multiple_of(Y.to(tl.pointer_type(Y_TYPE)), 16),
            n // 8 * 8,
            first,
            k,
            i,
            g,
            out,
            SLAB,
        )
    else:
        _products(Y.to(tl.pointer_type(Y_TYPE)), n, first, k, i, g, out, 2)


@jit
def sums(spans, partial, sums, COLUMNS: tl.constexpr):
    """sums[span, j] = Σ_tile partial[tile, j]."""
    span = spans + 5 * tl.program_id(0)
    source, k, count, width = (
        partial + tl.load(span),
        tl.load(span + 1),
        _int(span + 2),
        _int(span + 3),
    )
    j = tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.float32)
    for start in range(0, count, 64):
        total += tl.sum(
            _entries(source, start + tl.arange(0, 64), j, count, width, k),
            axis=0,
        )
    tl.store(sums + tl.load(span + 4) + j, total, mask=j < width)


@jit
def core(slices, blocks, sums, b, COLUMNS: tl.constexpr):
    """b = Cc, c = Σ_span sums[span]; COLUMNS rows of C."""
    part = slices + 2 * tl.program_id(0)
    row = blocks + 20 * tl.load(part)
    C, k = tl.load(row + 1).to(tl.pointer_type(tl.float32)), _int(row + 4)
    source, spans = sums + tl.load(row + 17), _int(row + 18)
    out = _int(part + 1) + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.float32)
    for start in range(0, k, 64):
        j = start + tl.arange(0, 64)
        c = tl.zeros((64,), tl.float32)
        for first in range(0, spans, 16):
            c += tl.sum(
                _entries(source, first + tl.arange(0, 16), j, spans, k, k),
                axis=0,
            )
        total += tl.sum(_entries(C, out, j, k, k, k) * c[None, :], axis=1)
    tl.store(b + tl.load(row + 19) + out, total, mask=out < k)


@jit
def _failed(b, k):
    """Whether one of the k numbers of b is not finite."""
    wrong = tl.zeros((64,), tl.int32)
    for start in range(0, k, 64):
        j = start + tl.arange(0, 64)
        size = tl.abs(tl.load(b + j, mask=j < k, other=0))
        wrong += tl.where(size < float("inf"), 0, 1)
    return tl.sum(wrong, axis=0) > 0


@jit
def finish(
    tiles, blocks, gradients, b, targets, buffers, groups, hyper,
    SGD: tl.constexpr, SLAB: tl.constexpr, TILE: tl.constexpr,
    Y_TYPE: tl.constexpr, TYPE: tl.constexpr, BUFFER_TYPE: tl.constexpr,
):  # fmt: skip
    """d = g − Yᵀb, or g where b is not finite; into the targets, or with SGD as the step of the
    weights that they are.
    """
    tile = tiles + 3 * tl.program_id(0)
    row = blocks + 20 * tl.load(tile)
    n, k, Y = tl.load(row + 3), _int(row + 4), tl.load(row)
    i = _int(tile + 1) * TILE + tl.arange(0, TILE)
    inside = i < n
    second, offset = _place(row, i)
    source = _pointers(gradients, row, second, offset, TYPE)
    g = tl.load(source, mask=inside, other=0).to(tl.float32)
    b += tl.load(row + 19)
    failed = _failed(b, k)
    if failed & (tl.load(tile + 1) == 0):
        count = tl.load(row + 2).to(tl.pointer_type(tl.int64))
        tl.atomic_add(count, tl.full((), 1, tl.int64))
    k = tl.where(failed, 0, k)
    Y = Y.to(tl.pointer_type(Y_TYPE))
    if tl.load(row + 5) > 0:
        Y = tl.multiple_of(Y, 16)
        d = g - _combination(Y, n // 8 * 8, k, i, b, SLAB, TILE)
    else:
        d = g - _combination(Y, n, k, i, b, 2, TILE)

    target = _pointers(targets, row, second, offset, TYPE)
    if SGD:
        p = tl.load(row + 16)
        first, other = 5 * tl.load(groups + p), 5 * tl.load(groups + p + 1)
        momentum = _either(second, hyper + 1, first, other)
        buffer = _pointers(buffers, row, second, offset, BUFFER_TYPE)
        kept = inside & (momentum != 0)
        weight = tl.load(target, mask=inside, other=0).to(tl.float32)
        decay = _either(second, hyper + 2, first, other)
        d = _either(second, hyper + 4, first, other) * d + decay * weight
        m = momentum * tl.load(buffer, mask=kept, other=0).to(tl.float32) + d
        tl.store(buffer, m.to(BUFFER_TYPE), mask=kept)
        nesterov = _either(second, hyper + 3, first, other) > 0
        step = tl.where(nesterov, d + momentum * m, m)
        d = weight - _either(second, hyper, first, other) * step
    tl.store(target, d.to(TYPE), mask=inside)


@jit
def standardized(
    a,
    g,
    mean,
    inverse,
    out,
    C,
    positions,
    a_sample,
    a_channel,
    a_position,
    g_sample,
    g_channel,
    g_position,
    POSITIONS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Σ g·(a − mean)·inverse and, C further on, Σ g over the positions, for one sample and some
    channels.
    """
    sample = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    mu, by = (
        tl.load(mean + c, mask=c < C, other=0),
        tl.load(inverse + c, mask=c < C, other=0),
    )
    a += sample * a_sample + c[None, :] * a_channel
    g += sample * g_sample + c[None, :] * g_channel
    weight, bias = (
        tl.zeros((CHANNELS,), tl.float32),
        tl.zeros((CHANNELS,), tl.float32),
    )
    for start in range(0, positions, POSITIONS):
        p = start + tl.arange(0, POSITIONS)
        inside = (p < positions)[:, None] & (c < C)[None, :]
        x = tl.load(a + p[:, None] * a_position, mask=inside, other=0).to(
            tl.float32
        )
        y = tl.load(g + p[:, None] * g_position, mask=inside, other=0).to(
            tl.float32
        )
        weight += tl.sum(y * (x - mu[None, :]) * by[None, :], axis=0)
        bias += tl.sum(y, axis=0)
    out += sample * 2 * C + c
    tl.store(out, weight, mask=c < C)
    tl.store(out + C, bias, mask=c < C)


PIECE = 1024  # numbers of `push` and `pull` for one program


@jit
def _spot(i, rows, width, matrix, row, column):
    """Where number i of a parameter lies in matrices of so many rows, by their strides."""
    r, c = i // width, i % width
    return (r // rows).to(tl.int64) * matrix + (r % rows) * row + c * column


@jit_any_n
def _push(
    x,
    b,
    room,
    momentum,
    n,
    rows,
    width,
    matrix,
    row,
    column,
    NESTEROV: tl.constexpr,
    TILE: tl.constexpr,
):
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = i < n
    mu, g = tl.load(momentum), tl.load(x + i, mask=inside, other=0)
    m = mu * tl.load(b + i, mask=inside, other=0) + g
    tl.store(b + i, m, mask=inside)
    along = g + mu * m if NESTEROV else m
    tl.store(
        room + _spot(i, rows, width, matrix, row, column),
        along.to(room.dtype.element_ty),
        mask=inside,
    )


@jit_any_n
def _pull(
    p,
    room,
    length,
    root,
    least,
    lr,
    decay,
    n,
    rows,
    width,
    matrix,
    row,
    column,
    each,
    down,
    across,
    TILE: tl.constexpr,
):
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = i < n
    q = tl.load(
        room + _spot(i, rows, width, matrix, row, column), mask=inside, other=0
    ).to(tl.float32)
    size = tl.load(
        length + _spot(i, rows, width, each, down, across),
        mask=inside,
        other=1,
    )
    eta = tl.load(lr)
    kept = (1 - eta * tl.load(decay)) * tl.load(p + i, mask=inside, other=0)
    tl.store(
        p + i,
        kept - q * (eta * root / tl.where(size < least, least, size)),
        mask=inside,
    )


def push(
    x: Tensor,
    b: Tensor,
    room: Tensor,
    momentum: Tensor,
    nesterov: bool,
    dry: bool = False,
) -> None:
    """b ← μb + x, and b, or x + μb, into its room (h, rows, columns), as x lies in memory.

    A dry one does nothing but compile the kernel.
    """
    n = 0 if dry else x.numel()
    places = *room.shape[1:], *room.stride()
    _push[_programs(n)](
        x, b, room, momentum, n, *places, NESTEROV=nesterov, TILE=PIECE
    )


def pull(
    p: Tensor,
    room: Tensor,
    length: Tensor,
    root: float,
    least: float,
    lr: Tensor,
    decay: Tensor,
    dry: bool = False,
) -> None:
    """θ ← (1 − lr·decay)·θ − lr·root·q/max(length, least).

    q lies in rooms as `push` fills them, and each number of it has its length.
    """
    n = 0 if dry else p.numel()
    places = *room.shape[1:], *room.stride(), *length.stride()
    _pull[_programs(n)](
        p, room, length, root, least, lr, decay, n, *places, TILE=PIECE
    )


def _programs(n: int) -> tuple[int]:
    """How many programs `push` or `pull` needs: at least one, which compiles it."""
    return (max(1, -(-n // PIECE)),)
