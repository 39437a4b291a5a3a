"""Directions, or whole steps of SGD, for many blocks at once: what the kernels of `seng.gpu.kernels` need on the host.

They read gradients where autograd left them: per step a table of addresses goes to the device, and the four launches are
replayed as one CUDA graph.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from seng.gpu import kernels
from seng.gpu.kernels import AVAILABLE, COLUMNS, MANY, SPAN, TYPES, WORK
from seng.gpu.replay import capturing, side_stream
from seng.gpu.staging import send


@dataclass(frozen=True)
class Piece:
    """Where one parameter lies in a block's (R, n_A) matrix."""

    param: Tensor
    column: int  # its first
    width: int  # its number of columns: R·width numbers in all


@dataclass(frozen=True)
class Item:
    """One block."""

    Y: Tensor  # (k, R·n_A)
    rows: int  # R
    pieces: tuple[Piece, ...]  # one or two, side by side
    core: Tensor  # C (k, k), float32; its owner may overwrite it in place
    failures: Tensor  # (), int64: counts the times that b was not finite and d = g


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
    """Whether an item can be served."""
    Y, core, rows, params = (
        item.Y,
        item.core,
        item.rows,
        [piece.param for piece in item.pieces],
    )
    interpreted = AVAILABLE and os.environ.get("TRITON_INTERPRET") == "1"
    placed = (available(Y.device) or interpreted) and {
        x.device for x in (*params, core, item.failures)
    } == {Y.device}
    typed = (
        {Y.dtype, params[0].dtype} <= TYPES.keys()
        and len({p.dtype for p in params}) == 1
        and core.dtype == torch.float32
    )
    dense = all(
        torch.empty_like(p, device="meta").stride() == p.stride() for p in params
    )  # in memory without gaps or overlap
    sized = (
        Y.shape[1] > 0
        and Y.shape[1] == sum(p.numel() for p in params)
        and Y.shape[1] < 2**31 - 2**10
    )
    shaped = (
        sized
        and Y.is_contiguous()
        and core.is_contiguous()
        and all(rows == 1 or p.shape[0] == rows for p in params)
    )
    first, second = [*(_dims(piece, rows) for piece in item.pieces), [(1, 1)]][:2]
    simple = (
        len(params) <= 2
        and len(first) <= 3
        and len(second) == 1
        and (rows == 1 or second == [(1, 1)])
    )
    return placed and typed and dense and shaped and simple


def _merged(shape: Sequence[int], strides: Sequence[int]) -> list[tuple[int, int]]:
    """(size, stride) of the fewest dimensions that a row-major walk goes through."""
    dims: list[tuple[int, int]] = []
    for size, stride in zip(shape, strides, strict=True):
        if dims and dims[-1][1] == size * stride:
            dims[-1] = dims[-1][0] * size, stride
        elif size > 1:
            dims.append((size, stride))
    return dims or [(1, 1)]


def _dims(piece: Piece, rows: int) -> list[tuple[int, int]]:
    """The dimensions of a row."""
    skip = int(rows > 1)
    return _merged(piece.param.shape[skip:], piece.param.stride()[skip:])


def _row(item: Item, *places: int) -> list[int]:
    """A block's row of the table, by whose columns the kernels read it.

    0 Y, 1 C, 2 failures, 3 n, 4 k, 5 aligned, 6 kind of layout, 7 n_A, 8 width of the first piece, 9 stride of its rows, 10 s₁,
    11 s₂, 12 t₀, 13 t₁, 14 t₂, 15 stride of the second piece, 16 number of the first parameter, 17 place in sums, 18 spans,
    19 place in b.
    """
    (k, n), (first, *rest) = item.Y.shape, item.pieces
    dims = [(1, 0)] * 3 + _dims(first, item.rows)
    (_, t0), (s1, t1), (s2, t2) = dims[-3:]
    whole = _merged(first.param.shape, first.param.stride())
    in_order = k == 0 or (
        whole[1:] == [] and whole[0][1] == 1
    )  # without a basis any order does, and memory's is the fastest
    kind = 0 if not rest and in_order else 1 if dims[-2] == (1, 0) else 2
    row_stride = first.param.stride(0) if item.rows > 1 else 0
    bias_stride = (
        (rest[0].param.stride(0) if item.rows > 1 else _dims(rest[0], 1)[0][1])
        if rest
        else 0
    )
    pointers = [item.Y.data_ptr(), item.core.data_ptr(), item.failures.data_ptr()]
    aligned = int(n % 8 == 0 and item.Y.data_ptr() % 16 == 0)
    return [
        *pointers,
        n,
        k,
        aligned,
        kind,
        n // item.rows,
        first.width,
        row_stride,
        s1,
        s2,
        t0,
        t1,
        t2,
        bias_stride,
        *places,
    ]


class _Upload:
    """Numbers on the device, at one place, sent again only when they changed."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self.values: list[Any] | None = None
        self.table: Tensor | None = None

    def __call__(self, values: list[Any]) -> Tensor:
        if self.table is None or values != self.values:
            self.table = send(
                torch.tensor([*values, 0], dtype=self.dtype, device="cpu"),
                self.device,
                self.table,
            )  # 0: no second piece
            self.values = values
        return self.table


class _Kind:
    """Blocks of one pair of types, all with few rows or all tall, and their tables on the device."""

    def __init__(
        self, items: list[tuple[int, int, Item]], device: torch.device
    ) -> None:
        """Each item with its number and that of its first parameter."""
        spans, slices, blocks = [], [], []
        counts: list[int] = []
        starts: list[int] = []
        ks: list[int] = []
        numbers = sums = b = 0
        self.items = [number for number, _, _ in items]
        self.work = WORK[items[0][2].Y.shape[0] >= MANY]
        self.places: list[
            tuple[int, int, int, int]
        ] = []  # of each block in `sums` (first, spans) and in `b` (first, k)
        for block, (_, param, item) in enumerate(items):
            k, n = item.Y.shape
            count = -(-n // self.work.TILE)
            counts, starts, ks = [*counts, count], [*starts, numbers], [*ks, k]
            blocks.append(_row(item, param, sums, -(-count // SPAN), b))
            for first in range(0, count, SPAN):
                for j in range(0, k, COLUMNS):
                    spans.append(
                        [
                            numbers + k * first + j,
                            k,
                            min(SPAN, count - first),
                            min(COLUMNS, k - j),
                            sums + j,
                        ]
                    )
                sums += k
            slices += [[block, j] for j in range(0, k, COLUMNS)]
            self.places.append((sums - k * -(-count // SPAN), -(-count // SPAN), b, k))
            numbers, b = numbers + k * count, b + k
        of, counted = (
            torch.repeat_interleave(torch.tensor(counts, device="cpu")),
            torch.tensor(counts, device="cpu"),
        )
        number = torch.arange(len(of), device="cpu") - (counted.cumsum(0) - counted)[of]
        self.tiles = send(
            torch.stack(
                [
                    of,
                    number,
                    torch.tensor(starts, device="cpu")[of]
                    + torch.tensor(ks, device="cpu")[of] * number,
                ],
                1,
            ),
            device,
        )
        self.spans, self.slices, self.blocks = (
            send(torch.tensor(rows, dtype=torch.int64, device="cpu"), device)
            for rows in (spans, slices, blocks)
        )
        self.partial, self.sums, self.b = (
            torch.empty(size, dtype=torch.float32, device=device)
            for size in (numbers, sums, b)
        )
        Y, p = items[0][2].Y, items[0][2].pieces[0].param
        self.constants: dict[str, Any] = {
            "SLAB": self.work.SLAB,
            "TILE": self.work.TILE,
        }
        self.chunks = -(-max(ks) // self.work.ROWS)
        self.constants |= {"Y_TYPE": TYPES[Y.dtype], "TYPE": TYPES[p.dtype]}
        self.params = [
            q
            for _, param, item in items
            for q in range(param, param + len(item.pieces))
        ]
        self.buffer_type = self.constants["TYPE"]

    def project(self, gradients: Tensor) -> None:
        """b of every block, in three launches."""
        if not len(self.slices):  # blocks of no columns alone
            return
        options = {
            **self.constants,
            "ROWS": self.work.ROWS,
            "num_warps": self.work.WARPS,
        }
        kernels.dots[(len(self.tiles), self.chunks)](
            self.tiles, self.blocks, gradients, self.partial, **options
        )
        kernels.sums[(len(self.spans),)](
            self.spans, self.partial, self.sums, COLUMNS=COLUMNS
        )
        kernels.core[(len(self.slices),)](
            self.slices, self.blocks, self.sums, self.b, COLUMNS=COLUMNS
        )

    def run(
        self, gradients: Tensor, targets: Tensor, *tables: Tensor, SGD: bool
    ) -> None:
        """Four launches."""
        self.project(gradients)
        own = self.tiles, self.blocks, gradients
        options = {
            "SGD": SGD,
            "BUFFER_TYPE": self.buffer_type,
            "num_warps": self.work.WARPS,
        }
        kernels.finish[(len(self.tiles),)](
            *own, self.b, targets, *tables, **self.constants, **options
        )


class Grouped:
    """Directions, or steps, of many blocks: parameters, gradients and buffers in the order of the items' pieces."""

    def __init__(self, items: Sequence[Item]) -> None:
        self.items = list(items)
        self.params = [piece.param for item in self.items for piece in item.pieces]
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
        kinds: dict[object, list[tuple[int, int, Item]]] = {}
        param = 0
        for number, item in enumerate(self.items):
            key = item.Y.dtype, item.pieces[0].param.dtype, item.Y.shape[0] >= MANY
            kinds.setdefault(key, []).append((number, param, item))
            param += len(item.pieces)
        self.kinds = [_Kind(kind, self.device) for kind in kinds.values()]
        self.addresses = [p.data_ptr() for p in self.params]
        self.layouts = [
            (p.stride(), p.dtype) for p in self.params
        ]  # of gradients that can be read as they are
        self.momenta: object = None  # what `_check` has seen
        self.key: object = None  # of the last run
        self.graph: torch.cuda.CUDAGraph | None = None

    def directions(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """d of every parameter, new tensors with its strides."""
        gradients, table = self._laid_out(grads)
        out = [
            torch.empty_strided(p.shape, p.stride(), dtype=p.dtype, device=self.device)
            for p in self.params
        ]
        self._run(
            table,
            self._targets([d.data_ptr() for d in out]),
            table,
            table,
            table,
            SGD=False,
        )
        del gradients  # not before the kernels are in the stream
        return out

    def projected(self) -> list[Callable[[], tuple[Tensor, Tensor]]]:
        """c = Yg and b = Cc of every item at the last run, to be cut out when they are asked for."""
        out: dict[int, Callable[[], tuple[Tensor, Tensor]]] = {}
        for kind in self.kinds:
            sums, b = kind.sums.clone(), kind.b.clone()
            for item, (first, spans, start, k) in zip(
                kind.items, kind.places, strict=True
            ):
                out[item] = partial(_cut, sums, b, first, spans, start, k)
        return [out[i] for i in range(len(self.items))]

    def update(
        self,
        grads: Sequence[Tensor],
        buffers: Sequence[Tensor | None] | None,
        hyper: Sequence[Hyper],
        groups: Sequence[int],
        located: bool = False,
    ) -> None:
        """A step of SGD in place: parameter p by hyper[groups[p]], with buffers[p] where that has momentum.

        `located` says that the parameters have been asked where they are.
        """
        gradients, table = self._laid_out(grads, located)
        buffers = buffers or [None] * len(self.params)
        addresses, groups = (
            [0 if m is None else m.data_ptr() for m in buffers],
            list(groups),
        )
        momenta = addresses, groups, [h.momentum for h in hyper]
        if momenta != self.momenta:
            self._check(buffers, [hyper[group].momentum for group in groups])
            self.momenta = momenta
        numbers = [
            x
            for h in hyper
            for x in (
                h.lr,
                h.momentum,
                h.weight_decay,
                h.nesterov,
                -1 if h.maximize else 1,
            )
        ]
        tables = (
            self._targets(self.addresses),
            self._buffers(addresses),
            self._groups(groups),
            self._hyper(numbers),
        )
        self._run(table, *tables, SGD=True)
        del gradients
        torch.autograd.graph.increment_version(self.params)

    def located(self) -> list[int]:
        """Where the parameters are: the same list for as long as they stay there."""
        if [p.data_ptr() for p in self.params] != self.addresses:
            self._build()
        return self.addresses

    def _laid_out(
        self, grads: Sequence[Tensor], located: bool = False
    ) -> tuple[Sequence[Tensor], Tensor]:
        """The gradients, those with other strides than their parameter copied, and their addresses on the device."""
        if not located:
            self.located()
        layouts = [(g.stride(), g.dtype) for g in grads]
        if layouts != self.layouts:
            pairs = zip(grads, self.params, strict=True)
            read = [
                g
                if g.dtype == p.dtype and _alike(g, p)
                else torch.empty_like(p).copy_(g)
                for g, p in pairs
            ]
            if all(a is b for a, b in zip(read, grads, strict=True)):
                self.layouts = layouts
            grads = read
        return grads, self._gradients([g.data_ptr() for g in grads])

    def _check(self, buffers: Sequence[Tensor | None], momentum: list[float]) -> None:
        """Buffers lie as their parameters do, and those of blocks of one kind have one type."""
        for p, m, mu in zip(self.params, buffers, momentum, strict=True):
            if mu and (m is None or m.dtype not in TYPES or not _alike(m, p)):
                given = "none" if m is None else f"{m.dtype} with strides {m.stride()}"
                raise ValueError(
                    f"momentum {mu} needs a buffer with strides {p.stride()}, in 16 or 32 bits; given: {given}"
                )
        for kind in self.kinds:
            types = {
                m.dtype
                for q in kind.params
                if momentum[q] and (m := buffers[q]) is not None
            }
            if len(types) > 1:
                raise ValueError(
                    f"buffers of parameters of one type have one type; given: {sorted(map(str, types))}"
                )
            kind.buffer_type = TYPES[types.pop()] if types else kind.constants["TYPE"]

    def _run(self, *tables: Tensor, SGD: bool) -> None:
        """The launches, on a GPU recorded at the second time with the same tables and from then on replayed as one."""
        key = (
            SGD,
            *(id(table) for table in tables),
            *(kind.buffer_type for kind in self.kinds),
        )
        with (
            torch.cuda.device(self.device)
            if self.device.type == "cuda"
            else nullcontext()
        ):
            if (
                self.graph is None
                and self.key == key
                and self.device.type == "cuda"
                and not capturing()
            ):
                self.graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(
                    self.graph,
                    stream=side_stream(self.device),
                    capture_error_mode="thread_local",
                ):
                    self._launch(*tables, SGD=SGD)
            if self.graph is not None and self.key == key:
                return self.graph.replay()
            self.key, self.graph = key, None
            self._launch(*tables, SGD=SGD)

    def _launch(self, *tables: Tensor, SGD: bool) -> None:
        for kind in self.kinds:
            kind.run(*tables, SGD=SGD)


def _cut(
    sums: Tensor, b: Tensor, first: int, spans: int, start: int, k: int
) -> tuple[Tensor, Tensor]:
    return sums[first : first + spans * k].view(spans, k).sum(0), b[start : start + k]


def _alike(x: Tensor, p: Tensor) -> bool:
    """Whether x lies in memory as p does."""
    strides = zip(p.shape, x.stride(), p.stride(), strict=True)
    return x.shape == p.shape and all(a == b for size, a, b in strides if size > 1)
