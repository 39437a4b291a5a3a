"""The host's side of the kernels: directions, or whole steps of SGD, of many blocks in four
launches.

    d = g − Yᵀ(C(Yg))                                                (eqs. 8, 12)

The kernels of `seng.gpu.kernels` find everything by tables on the device. Tables of addresses are
sent at every step, since they read gradients where autograd left them; what a block looks like is
sent once. From the second step on the four launches are replayed as one CUDA graph.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import Tensor

from seng.gpu import kernels
from seng.gpu.kernels import (
    AVAILABLE,
    COLUMNS,
    MANY,
    ROWS,
    SPAN,
    TYPES,
    WORK,
)
from seng.gpu.recorder import Replay, send

HYPER = (
    "lr",
    "momentum",
    "weight_decay",
    "nesterov",
)  # as the kernels read them


@dataclass(frozen=True)
class Item:
    """One block: a layer's parameters side by side as a matrix (R, n_A), and what is to be solved
    with.
    """

    Y: Tensor  # (k, R·n_A)
    rows: int  # R
    params: tuple[Tensor, ...]  # one or two, side by side: weight and bias
    core: Tensor  # C (k, k), float32; its owner may overwrite it in place
    failures: (
        Tensor  # (), int64: counts the times that b was not finite and d = g
    )


def available(device: torch.device) -> bool:
    """Whether these kernels run there."""
    return AVAILABLE and device.type == "cuda"


def fits(item: Item) -> bool:
    """Whether the kernels can serve a block."""
    Y, rows = item.Y, item.rows
    first, *second = item.params
    dense = [torch.empty_like(p, device="meta") for p in item.params]
    return (
        {p.device for p in item.params} == {Y.device}
        and {p.dtype for p in item.params} == {first.dtype}
        and {Y.dtype, first.dtype} <= TYPES.keys()
        and Y.is_contiguous()
        and 0 < Y.shape[1] < 2**31 - 2**10
        # Without gaps or overlap:
        and all(map(_alike, dense, item.params))
        and len(_dims(first, rows)) <= 3
        and len(second) <= 1
        and all(len(_dims(p)) == 1 for p in second)
        and all(rows in (1, p.numel()) for p in second)
    )


def _alike(x: Tensor, p: Tensor) -> bool:
    """Whether x, of the shape of p, lies in memory as p does."""
    return x.squeeze().stride() == p.squeeze().stride()


def _dims(p: Tensor, rows: int = 1) -> list[tuple[int, int]]:
    """(size, stride) of the fewest dimensions that a row-major walk through one row has."""
    dims: list[tuple[int, int]] = []
    first = int(rows > 1)
    for size, stride in zip(p.shape[first:], p.stride()[first:], strict=True):
        if dims and dims[-1][1] == size * stride:
            dims[-1] = dims[-1][0] * size, stride
        elif size > 1:
            dims.append((size, stride))
    return dims or [(1, 1)]


def _block_row(item: Item, *places: int) -> list[int]:
    """A block's row of the table of blocks; the kernels read it by the numbers of its columns."""
    k, n = item.Y.shape
    first, *second = item.params
    dims = [(1, 0)] * 3 + _dims(first, item.rows)
    (_, t0), (s1, t1), (s2, t2) = dims[-3:]
    # Without a basis any order does, and memory's is the fastest.
    in_order = k == 0 or _dims(first) == [(n, 1)]
    layout = 0 if in_order and not second else 1 if dims[-2] == (1, 0) else 2
    address = item.Y.data_ptr()
    return [
        address,  # 0
        item.core.data_ptr(),  # 1
        item.failures.data_ptr(),  # 2
        n,  # 3
        k,  # 4
        n % 8 == 0 and address % 16 == 0,  # 5: whether rows of Y are aligned
        layout,  # 6: memory's order, rows of one stride, or rows of several dimensions
        n // item.rows,  # 7: n_A
        first.numel() // item.rows,  # 8: columns of the first parameter
        first.stride(0) if item.rows > 1 else 0,  # 9: from row to row
        s1,  # 10: sizes and strides of the dimensions of a row
        s2,  # 11
        t0,  # 12
        t1,  # 13
        t2,  # 14
        sum(_dims(p)[0][1] for p in second),  # 15: from number to number
        # 16: number of the first parameter
        # 17, 18, 19: where its numbers begin in `partial`, `sums` and `b`
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
        """Each block comes with the number of its first parameter.

        The tables say for every program which numbers it reads and where it leaves its result.
        """
        lead = members[0][1]
        tall = len(lead.Y) >= MANY
        self.ROWS = ROWS[tall]
        self.constants = WORK[tall] | {
            "Y_TYPE": TYPES[lead.Y.dtype],
            "TYPE": TYPES[lead.params[0].dtype],
        }
        TILE = WORK[tall]["TILE"]
        # Of the largest block; where another has fewer, programs have nothing to do.
        self.k = max(len(item.Y) for _, item in members)
        longest = max(item.Y.shape[1] for _, item in members)
        self.spans = -(-longest // (TILE * SPAN))
        tiles, rows = [], []
        products = sums = b = 0  # how many numbers there are of each so far
        for block, (param, item) in enumerate(members):
            k, n = item.Y.shape
            rows.append(_block_row(item, param, products, sums, b))
            tile = torch.arange(-(-n // TILE), device="cpu")
            own = torch.full_like(tile, block), tile
            tiles.append(torch.stack(own, 1))
            products += k * len(tile)
            sums += k * -(-len(tile) // SPAN)
            b += k
        self.tiles = send(torch.cat(tiles), device)
        self.blocks = send(
            torch.tensor(rows, dtype=torch.int64, device="cpu"), device
        )
        self.partial, self.sums, self.b = (
            torch.empty(size, dtype=torch.float32, device=device)
            for size in (products, sums, b)
        )

    def launch(self, gradients: Tensor, *tables: Tensor, SGD: bool) -> None:
        """The four launches. The first three find b; blocks of no columns do without."""
        tiles, blocks = self.tiles, self.blocks
        if self.k:
            chunks = -(-self.k // self.ROWS)
            kernels.dots[len(tiles), chunks](
                *(tiles, blocks, gradients, self.partial),
                ROWS=self.ROWS,
                **self.constants,
            )
            chunks = -(-self.k // COLUMNS)
            sizes = self.constants["TILE"], SPAN, COLUMNS
            kernels.sums[len(blocks), self.spans, chunks](
                blocks, self.partial, self.sums, *sizes
            )
            kernels.core[len(blocks), chunks](
                blocks, self.sums, self.b, *sizes
            )
        kernels.finish[(len(tiles),)](
            *(tiles, blocks, gradients, self.b, *tables),
            SGD=SGD,
            **self.constants,
        )


class Grouped:
    """Directions, or steps, of many blocks.

    Parameters, gradients and buffers come in the order of the items.
    """

    def __init__(self, items: Sequence[Item]) -> None:
        self.items = items
        self.params = [p for item in items for p in item.params]
        self.device = items[0].Y.device
        types = [torch.int64] * 4 + [torch.float32]
        self._uploads = [_Upload(self.device, dtype) for dtype in types]
        self._build()

    def _build(self) -> None:
        """The tables, which hold for as long as the parameters stay where they are."""
        if any(p.device != self.device for p in self.params):
            raise RuntimeError(
                f"the parameters were moved away from {self.device}, where their curvature is: "
                "build the optimizer anew"
            )
        alike: defaultdict[object, list[tuple[int, Item]]] = defaultdict(list)
        param = 0
        for item in self.items:
            types = item.Y.dtype, item.params[0].dtype
            alike[types, len(item.Y) >= MANY].append((param, item))
            param += len(item.params)
        self.batches = [
            _Batch(members, self.device) for members in alike.values()
        ]
        self.addresses = _addresses(self.params)
        # Strides and types of gradients that can be read as they are.
        self.layouts: object = None
        self.replay = Replay(self.device)

    def located(self) -> list[int]:
        """Where the parameters are now."""
        if _addresses(self.params) != self.addresses:
            self._build()
        return self.addresses

    def directions(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """d of every parameter, new tensors with its strides."""
        self.located()
        read = self._laid_out(grads)
        out = [torch.empty_like(p) for p in self.params]
        gradients, targets = self._sent(_addresses(read), _addresses(out))
        unused = [gradients] * 3
        self._run(gradients, targets, *unused, SGD=False)
        return out

    def update(
        self,
        grads: Sequence[Tensor],
        buffers: Sequence[Tensor | None],
        groups: Sequence[Mapping[str, Any]],
        group_of: list[int],
    ) -> None:
        """A step of SGD in place: parameter p by groups[group_of[p]], with buffers[p] where that
        has momentum; it has the type and the strides of p.

        The parameters have to be where `located` saw them.
        """
        read = self._laid_out(grads)
        hyper = []
        for group in groups:
            hyper += [float(group[name]) for name in HYPER]
            hyper.append(-1.0 if group["maximize"] else 1.0)
        tables = self._sent(
            _addresses(read),
            self.addresses,
            [0 if m is None else m.data_ptr() for m in buffers],
            group_of,
            hyper,
        )
        self._run(*tables, SGD=True)
        torch.autograd.graph.increment_version(self.params)

    def _laid_out(self, grads: Sequence[Tensor]) -> Sequence[Tensor]:
        """Gradients that lie as their parameters do, where need be copies.

        They have to live until the kernels that read them are in the stream.
        """
        layouts = [(g.stride(), g.dtype) for g in grads]
        if layouts == self.layouts:
            return grads
        read = [
            g
            if g.dtype == p.dtype and _alike(g, p)
            else torch.empty_like(p).copy_(g)
            for g, p in zip(grads, self.params, strict=True)
        ]
        if all(map(is_, read, grads)):
            self.layouts = layouts
        return read

    def _sent(self, *values: list[Any]) -> list[Tensor]:
        """These numbers in tables on the device."""
        pairs = zip(self._uploads, values, strict=False)
        return [upload(numbers) for upload, numbers in pairs]

    def _run(self, *tables: Tensor, SGD: bool) -> None:
        def launch() -> None:
            with torch.cuda.device_of(tables[0]):
                for batch in self.batches:
                    batch.launch(*tables, SGD=SGD)

        self.replay(launch, (SGD, *map(id, tables)))


def _addresses(tensors: Sequence[Tensor]) -> list[int]:
    return [t.data_ptr() for t in tensors]
