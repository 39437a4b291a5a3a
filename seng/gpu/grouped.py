"""The host's side of the kernels: directions, or whole steps of SGD, of many blocks in four
launches.

    d = g − Yᵀ(C(Yg))                                                (eqs. 8, 12)

The kernels of `seng.gpu.kernels` find everything by tables on the device. Tables of addresses are
sent at every step, since they read gradients where autograd left them; what a block looks like is
sent once. From the second step on the four launches are replayed as one CUDA graph.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from seng.gpu import kernels
from seng.gpu.kernels import AVAILABLE, COLUMNS, MANY, SPAN, TYPES, WORK
from seng.gpu.recorder import Graph, capturing, record
from seng.gpu.staging import send


@dataclass(frozen=True)
class Piece:
    """The columns of a block's (R, n_A) matrix that belong to one parameter."""

    param: Tensor
    column: int  # the first of them
    width: int  # how many: the parameter has R·width numbers


@dataclass(frozen=True)
class Item:
    """One block: a layer's parameters side by side as a matrix (R, n_A), and what is to be solved
    with.
    """

    Y: Tensor  # (k, R·n_A)
    rows: int  # R
    pieces: tuple[Piece, ...]  # one or two, side by side: weight and bias
    core: Tensor  # C (k, k), float32; its owner may overwrite it in place
    failures: (
        Tensor  # (), int64: counts the times that b was not finite and d = g
    )


class Hyper(NamedTuple):
    """What SGD does with the directions of a group of parameters."""

    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    maximize: bool = False


def available(device: torch.device) -> bool:
    """Whether these kernels run there."""
    return AVAILABLE and device.type == "cuda"


def fits(item: Item) -> bool:
    """Whether the kernels can serve a block."""
    Y, core, rows = item.Y, item.core, item.rows
    params = [piece.param for piece in item.pieces]
    types = {p.dtype for p in params}
    devices = {t.device for t in (*params, core, item.failures)}
    dense = [torch.empty_like(p, device="meta").stride() for p in params]
    interpreted = AVAILABLE and os.environ.get("TRITON_INTERPRET") == "1"
    return (
        (available(Y.device) or interpreted)
        and devices == {Y.device}
        and len(types) == 1
        and {Y.dtype, *types} <= TYPES.keys()
        and core.dtype == torch.float32
        and Y.is_contiguous()
        and core.is_contiguous()
        and 0 < Y.shape[1] < 2**31 - 2**10
        and Y.shape[1] == sum(p.numel() for p in params)
        and dense == [p.stride() for p in params]  # without gaps or overlap
        and all(rows == 1 or p.shape[0] == rows for p in params)
        and len(params) <= 2
        and len(_dims(params[0], rows)) <= 3
        and all(len(_dims(p, rows)) == 1 for p in params[1:])
        and all(rows == 1 or p.numel() == rows for p in params[1:])
    )


def _dims(p: Tensor, rows: int = 1) -> list[tuple[int, int]]:
    """(size, stride) of the fewest dimensions that a row-major walk through one row goes through."""
    dims: list[tuple[int, int]] = []
    first = int(rows > 1)
    for size, stride in zip(p.shape[first:], p.stride()[first:], strict=True):
        if dims and dims[-1][1] == size * stride:
            dims[-1] = dims[-1][0] * size, stride
        elif size > 1:
            dims.append((size, stride))
    return dims or [(1, 1)]


def _block_row(
    item: Item, param: int, sums: int, spans: int, b: int
) -> list[int]:
    """A block's row of the table of blocks; the kernels read it by the numbers of its columns."""
    k, n = item.Y.shape
    first, *second = [piece.param for piece in item.pieces]
    dims = [(1, 0)] * 3 + _dims(first, item.rows)
    (_, t0), (s1, t1), (s2, t2) = dims[-3:]
    # Without a basis any order does, and memory's is the fastest.
    in_order = k == 0 or _dims(first) == [(n, 1)]
    layout = 0 if in_order and not second else 1 if dims[-2] == (1, 0) else 2
    return [
        item.Y.data_ptr(),  # 0
        item.core.data_ptr(),  # 1
        item.failures.data_ptr(),  # 2
        n,  # 3
        k,  # 4
        n % 8 == 0
        and item.Y.data_ptr() % 16 == 0,  # 5: whether rows of Y are aligned
        layout,  # 6: memory's order, rows of one stride, or rows of several dimensions
        n // item.rows,  # 7: n_A
        item.pieces[0].width,  # 8
        first.stride(0) if item.rows > 1 else 0,  # 9: from row to row
        s1,  # 10: sizes and strides of the dimensions of a row
        s2,  # 11
        t0,  # 12
        t1,  # 13
        t2,  # 14
        sum(_dims(p)[0][1] for p in second),  # 15: from number to number
        param,  # 16: number of the first parameter
        sums,  # 17: where its numbers begin in `sums`
        spans,  # 18: how many rows it has there
        b,  # 19: where its numbers begin in `b`
    ]


class _Upload:
    """Numbers on the device, at one place, sent again only when they changed."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self.values: list[Any] | None = None
        self.table: Tensor | None = None

    def __call__(self, values: list[Any]) -> Tensor:
        if self.table is None or values != self.values:
            # The kernels look one further than the last parameter, for its second piece.
            padded = torch.tensor([*values, 0], dtype=self.dtype, device="cpu")
            self.table = send(padded, self.device, self.table)
            self.values = values
        return self.table


class _Batch:
    """Blocks that the same four launches serve, and their tables on the device.

    They have one pair of types, and all have few rows of Y or all have many.
    """

    def __init__(
        self, members: list[tuple[int, Item]], device: torch.device
    ) -> None:
        """Each block comes with the number of its first parameter."""
        lead = members[0][1]
        TYPE = TYPES[lead.pieces[0].param.dtype]
        self.work = WORK[len(lead.Y) >= MANY]
        self.constants: dict[str, Any] = {
            "SLAB": self.work.SLAB,
            "TILE": self.work.TILE,
            "Y_TYPE": TYPES[lead.Y.dtype],
            "TYPE": TYPE,
        }
        self.buffer_type = TYPE
        self._tables(members, device)

    def _tables(
        self, members: list[tuple[int, Item]], device: torch.device
    ) -> None:
        """Say for every program which numbers it reads and where it leaves its result."""
        tiles, spans, slices = [], [], []
        self.rows: list[list[int]] = []
        self.params: list[int] = []  # numbers of the parameters
        products = sums = b = 0  # how many numbers there are of each so far
        for block, (param, item) in enumerate(members):
            k, n = item.Y.shape
            count = -(-n // self.work.TILE)
            self.rows.append(
                _block_row(item, param, sums, -(-count // SPAN), b)
            )
            self.params += range(param, param + len(item.pieces))
            tile = torch.arange(count, device="cpu")
            own = torch.full_like(tile, block), tile, products + k * tile
            tiles.append(torch.stack(own, 1))
            columns = range(0, k, COLUMNS)
            slices += [[block, j] for j in columns]
            for first in range(0, count, SPAN):
                height = min(SPAN, count - first)
                for j in columns:
                    source = products + k * first + j
                    width = min(COLUMNS, k - j)
                    spans.append([source, k, height, width, sums + j])
                sums += k
            products += k * count
            b += k
        self.tiles = send(torch.cat(tiles), device)
        self.spans, self.slices, self.blocks = (
            send(torch.tensor(rows, dtype=torch.int64, device="cpu"), device)
            for rows in (spans, slices, self.rows)
        )
        self.partial, self.sums, self.b = (
            torch.empty(size, dtype=torch.float32, device=device)
            for size in (products, sums, b)
        )

    def launch(self, gradients: Tensor, *tables: Tensor, SGD: bool) -> None:
        """The four launches. The first three find b; blocks of no columns do without."""
        tiles, blocks, work = self.tiles, self.blocks, self.work
        if len(self.slices):
            chunks = -(-max(row[4] for row in self.rows) // work.ROWS)
            kernels.dots[(len(tiles), chunks)](
                *(tiles, blocks, gradients, self.partial),
                ROWS=work.ROWS,
                num_warps=work.WARPS,
                **self.constants,
            )
            kernels.sums[(len(self.spans),)](
                self.spans, self.partial, self.sums, COLUMNS=COLUMNS
            )
            kernels.core[(len(self.slices),)](
                self.slices, blocks, self.sums, self.b, COLUMNS=COLUMNS
            )
        kernels.finish[(len(tiles),)](
            *(tiles, blocks, gradients, self.b, *tables),
            SGD=SGD,
            BUFFER_TYPE=self.buffer_type,
            num_warps=work.WARPS,
            **self.constants,
        )


class Grouped:
    """Directions, or steps, of many blocks.

    Parameters, gradients and buffers come in the order of the items' pieces.
    """

    def __init__(self, items: Sequence[Item]) -> None:
        self.items = list(items)
        self.params = [
            piece.param for item in self.items for piece in item.pieces
        ]
        self.device = self.items[0].Y.device
        self._gradients, self._targets, self._buffers, self._groups = (
            _Upload(self.device, torch.int64) for _ in range(4)
        )
        self._hyper = _Upload(self.device, torch.float32)
        self._build()

    def _build(self) -> None:
        """The tables, which hold for as long as the parameters stay where they are."""
        if any(p.device != self.device for p in self.params):
            raise RuntimeError(
                f"the parameters were moved away from {self.device}, where their curvature is: build the optimizer anew"
            )
        alike: defaultdict[object, list[tuple[int, Item]]] = defaultdict(list)
        param = 0
        for item in self.items:
            types = item.Y.dtype, item.pieces[0].param.dtype
            alike[types, len(item.Y) >= MANY].append((param, item))
            param += len(item.pieces)
        self.batches = [
            _Batch(members, self.device) for members in alike.values()
        ]
        self.addresses = [p.data_ptr() for p in self.params]
        # Strides and types of gradients that can be read as they are.
        self.layouts = [(p.stride(), p.dtype) for p in self.params]
        self.momenta: object = None  # what `_check` has seen
        self.key: object = None  # of the last run
        self.graph: Graph | None = None

    def directions(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """d of every parameter, new tensors with its strides."""
        read, table = self._laid_out(grads)
        out = [torch.empty_like(p) for p in self.params]
        targets = self._targets([d.data_ptr() for d in out])
        self._run(table, targets, table, table, table, SGD=False)
        del read  # not before the kernels are in the stream
        return out

    def update(
        self,
        grads: Sequence[Tensor],
        buffers: Sequence[Tensor | None] | None,
        hyper: Sequence[Hyper],
        groups: Sequence[int],
        located: bool = False,
    ) -> None:
        """A step of SGD in place: parameter p by hyper[groups[p]], with buffers[p] where that has
        momentum.

        `located` says that the parameters have been asked where they are.
        """
        read, table = self._laid_out(grads, located)
        buffers = buffers or [None] * len(self.params)
        addresses = [0 if m is None else m.data_ptr() for m in buffers]
        momenta = addresses, list(groups), [h.momentum for h in hyper]
        if momenta != self.momenta:
            self._check(buffers, [hyper[group].momentum for group in groups])
            self.momenta = momenta
        numbers = [x for h in hyper for x in (*h[:4], -1 if h.maximize else 1)]
        tables = (
            self._targets(self.addresses),
            self._buffers(addresses),
            self._groups(list(groups)),
            self._hyper(numbers),
        )
        self._run(table, *tables, SGD=True)
        del read  # not before the kernels are in the stream
        torch.autograd.graph.increment_version(self.params)

    def located(self) -> list[int]:
        """Where the parameters are: the same list for as long as they stay there."""
        if [p.data_ptr() for p in self.params] != self.addresses:
            self._build()
        return self.addresses

    def _laid_out(
        self, grads: Sequence[Tensor], located: bool = False
    ) -> tuple[Sequence[Tensor], Tensor]:
        """Gradients that lie as their parameters do, where need be copies, and the table of their
        addresses.
        """
        if not located:
            self.located()
        layouts = [(g.stride(), g.dtype) for g in grads]
        if layouts != self.layouts:
            read = [
                g
                if g.dtype == p.dtype and _alike(g, p)
                else torch.empty_like(p).copy_(g)
                for g, p in zip(grads, self.params, strict=True)
            ]
            if all(map(is_, read, grads)):
                self.layouts = layouts
            grads = read
        return grads, self._gradients([g.data_ptr() for g in grads])

    def _check(
        self, buffers: Sequence[Tensor | None], momentum: list[float]
    ) -> None:
        """Buffers lie as their parameters do, and those of one batch have one type."""
        for batch in self.batches:
            types = set()
            for q in batch.params:
                if momentum[q]:
                    found = _buffer_type(
                        self.params[q], buffers[q], momentum[q]
                    )
                    types.add(found)
            if len(types) > 1:
                raise ValueError(
                    f"buffers of parameters of one type have one type; given: {sorted(map(str, types))}"
                )
            own = batch.constants["TYPE"]
            batch.buffer_type = TYPES[types.pop()] if types else own

    def _run(self, *tables: Tensor, SGD: bool) -> None:
        """The launches; on a GPU recorded at the second time with the same tables, and then
        replayed as one.
        """

        def launch() -> None:
            for batch in self.batches:
                batch.launch(*tables, SGD=SGD)

        key = (
            SGD,
            *map(id, tables),
            *(batch.buffer_type for batch in self.batches),
        )
        if key != self.key:
            self.key, self.graph = key, None
        elif (
            self.graph is None
            and self.device.type == "cuda"
            and not capturing()
        ):
            self.graph = record(self.device, launch)
        with torch.cuda.device_of(tables[0]):
            launch() if self.graph is None else self.graph.replay()


def _buffer_type(p: Tensor, m: Tensor | None, momentum: float) -> torch.dtype:
    """The type of a momentum buffer, which has to lie in memory as its parameter does."""
    if m is None or m.dtype not in TYPES or not _alike(m, p):
        given = "none" if m is None else f"{m.dtype} with strides {m.stride()}"
        raise ValueError(
            f"momentum {momentum} needs a buffer with strides {p.stride()}, in 16 or 32 bits; given: {given}"
        )
    return m.dtype


def _alike(x: Tensor, p: Tensor) -> bool:
    """Whether x lies in memory as p does."""
    strides = zip(p.shape, x.stride(), p.stride(), strict=True)
    return x.shape == p.shape and all(
        a == b for size, a, b in strides if size > 1
    )
