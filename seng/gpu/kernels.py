"""Triton kernels: four for the steps between refreshes.

    d = g − Yᵀ(C(Yg))                            (eqs. 8, 12)
    d ← ±d + wθ,   m ← μm + d,   θ ← θ − η·(m, or d + μm by Nesterov)

A block's flat index i = r·n_A + a is cut into tiles of TILE numbers. `dots` leaves Yg of each tile,
`sums` adds up to SPAN tiles, `core` gives b = C(Yg), and `finish` ends with d or with the new θ.
Sums are taken in a fixed order, in float32. `seng.gpu.grouped` makes their tables and launches
them.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import os
from collections.abc import Callable
from shutil import which
from typing import Any

import torch

try:
    import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
    from triton.language import constexpr  # type: ignore[import-not-found,import-untyped,unused-ignore]
except ImportError:
    triton = tl = None
jit: Callable[[Any], Any] = getattr(triton, "jit", lambda kernel: kernel)


MANY = 64  # rows of Y from which a block is worked on as a tall one
# How much one program does, of blocks with few rows and of tall ones: TILE consecutive numbers of a
# block, with SLAB rows of Y in flight, and in `dots` ROWS rows in all.
WORK: dict[bool, dict[str, Any]] = {
    False: {"TILE": 1024, "SLAB": 8, "num_warps": 4},
    True: {"TILE": 512, "SLAB": 8, "num_warps": 2},
}
ROWS = {False: 64, True: 32}
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
def _numbers(address, inside):
    """What lies there, in float32; zero outside."""
    return tl.load(address, mask=inside, other=0).to(tl.float32)


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
def _pointers(addresses, row, second, offset, TYPE: constexpr):
    """Where each number lies of the two parameters whose first addresses are in the table."""
    p = tl.load(row + 16)
    return (
        _either(second, addresses, p, p + 1).to(tl.pointer_type(TYPE)) + offset
    )


@jit
def _gradient(tile, row, gradients, TILE: constexpr, TYPE: constexpr):
    """The numbers i of a tile, which piece each lies in and where, and its gradient."""
    i = _int(tile + 1) * TILE + tl.arange(0, TILE)
    second, offset = _place(row, i)
    source = _pointers(gradients, row, second, offset, TYPE)
    return i, second, offset, _numbers(source, i < tl.load(row + 3))


@jit
def _entries(X, r, c, rows, columns, stride):
    """X[r, c], zero outside."""
    inside = (r < rows)[:, None] & (c < columns)[None, :]
    places = X + r.to(tl.int64)[:, None] * stride + c[None, :]
    return _numbers(places, inside)


@jit
def _products(Y, n, first, k, i, g, out, SLAB: constexpr):
    for start in range(first, k, SLAB):
        j = start + tl.arange(0, SLAB)
        tl.store(
            out + j,
            tl.sum(_entries(Y, j, i, k, n, n) * g[None, :], axis=1),
            mask=j < k,
        )


@jit
def _combination(Y, n, k, i, b, SLAB: constexpr, TILE: constexpr):
    total = tl.zeros((TILE,), tl.float32)
    for start in range(0, k, SLAB):
        j = start + tl.arange(0, SLAB)
        total += tl.sum(
            _entries(Y, j, i, k, n, n) * _numbers(b + j, j < k)[:, None],
            axis=0,
        )
    return total


@jit
def dots(
    tiles, blocks, gradients, partial,
    ROWS: constexpr, SLAB: constexpr, TILE: constexpr,
    Y_TYPE: constexpr, TYPE: constexpr,
):  # fmt: skip
    """partial[tile, j] = Σ_i Y[j, i]·g[i], for ROWS of the j."""
    tile = tiles + 2 * tl.program_id(0)
    row = blocks + 20 * tl.load(tile)
    first = tl.program_id(1) * ROWS
    n, k = tl.load(row + 3), _int(row + 4)
    if first >= k:
        return
    i, _, _, g = _gradient(tile, row, gradients, TILE, TYPE)
    out = partial + tl.load(row + 17) + k * tl.load(tile + 1)
    Y = tl.load(row).to(tl.pointer_type(Y_TYPE))
    k = tl.minimum(k, first + ROWS)
    # Where rows are aligned the compiler is told, and loads 16 bytes at a time; else every number
    # needs its own address.
    if tl.load(row + 5) > 0:
        Y = tl.multiple_of(Y, 16)
        _products(Y, n // 8 * 8, first, k, i, g, out, SLAB)
    else:
        _products(Y, n, first, k, i, g, out, 2)


@jit
def sums(
    blocks, partial, sums,
    TILE: constexpr, SPAN: constexpr, COLUMNS: constexpr,
):  # fmt: skip
    """sums[span, j] = Σ_tile partial[tile, j], over the SPAN tiles of a span."""
    row = blocks + 20 * tl.program_id(0)
    span, first = tl.program_id(1), tl.program_id(2) * COLUMNS
    k = tl.load(row + 4)
    count = tl.minimum(tl.cdiv(_int(row + 3), TILE) - span * SPAN, SPAN)
    if (count <= 0) | (first >= k):
        return
    j = first + tl.arange(0, COLUMNS)
    source = partial + tl.load(row + 17) + k * span * SPAN
    total = tl.zeros((COLUMNS,), tl.float32)
    for start in range(0, count, 64):
        tile = start + tl.arange(0, 64)
        total += tl.sum(_entries(source, tile, j, count, k, k), axis=0)
    tl.store(sums + tl.load(row + 18) + k * span + j, total, mask=j < k)


@jit
def core(
    blocks, sums, b,
    TILE: constexpr, SPAN: constexpr, COLUMNS: constexpr,
):  # fmt: skip
    """b = Cc, c = Σ_span sums[span]; COLUMNS rows of C."""
    row = blocks + 20 * tl.program_id(0)
    C, k = tl.load(row + 1).to(tl.pointer_type(tl.float32)), _int(row + 4)
    out = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    source = sums + tl.load(row + 18)
    spans = tl.cdiv(_int(row + 3), TILE * SPAN)
    total = tl.zeros((COLUMNS,), tl.float32)
    for start in range(0, k, 64):
        j = start + tl.arange(0, 64)
        c = tl.zeros((64,), tl.float32)
        for first in range(0, spans, 16):
            span = first + tl.arange(0, 16)
            c += tl.sum(_entries(source, span, j, spans, k, k), axis=0)
        total += tl.sum(_entries(C, out, j, k, k, k) * c[None, :], axis=1)
    tl.store(b + tl.load(row + 19) + out, total, mask=out < k)


@jit
def _failed(b, k):
    """Whether one of the k numbers of b is not finite."""
    wrong = tl.zeros((64,), tl.int32)
    for start in range(0, k, 64):
        j = start + tl.arange(0, 64)
        size = tl.abs(_numbers(b + j, j < k))
        wrong += tl.where(size < float("inf"), 0, 1)
    return tl.sum(wrong, axis=0) > 0


@jit
def finish(
    tiles, blocks, gradients, b, targets, buffers, groups, hyper,
    SGD: constexpr, SLAB: constexpr, TILE: constexpr,
    Y_TYPE: constexpr, TYPE: constexpr,
):  # fmt: skip
    """d = g − Yᵀb, or g where b is not finite; into the targets, or with SGD as the step of the
    weights that they are.
    """
    tile = tiles + 2 * tl.program_id(0)
    row = blocks + 20 * tl.load(tile)
    n, k, Y = tl.load(row + 3), _int(row + 4), tl.load(row)
    i, second, offset, g = _gradient(tile, row, gradients, TILE, TYPE)
    inside = i < n
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
        buffer = _pointers(buffers, row, second, offset, TYPE)
        kept = inside & (momentum != 0)
        weight = _numbers(target, inside)
        decay = _either(second, hyper + 2, first, other)
        d = _either(second, hyper + 4, first, other) * d + decay * weight
        m = momentum * _numbers(buffer, kept) + d
        tl.store(buffer, m.to(TYPE), mask=kept)
        nesterov = _either(second, hyper + 3, first, other) > 0
        step = tl.where(nesterov, d + momentum * m, m)
        d = weight - _either(second, hyper, first, other) * step
    tl.store(target, d.to(TYPE), mask=inside)
