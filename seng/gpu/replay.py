"""Functions of tensors that a GPU runs again in one launch.

A refresh is a thousand small launches, which take the host several times as long as they take the GPU. So each part of it that
is a function of tensors alone is recorded, the second time it sees the same shapes, as a CUDA graph over inputs of its own;
from then on they are copied in and the graph is replayed.
"""

from __future__ import annotations

import gc
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from seng.linalg.operators import Operator

Function = Callable[..., tuple[Tensor, ...]]
Run = Callable[..., list[Tensor]]  # `directly`, or a `Replay`
MOST = 256  # recordings
LARGE = (
    2**27
)  # bytes of inputs and outputs from which copying them takes longer than launching


def directly(
    function: Function,
    *args: Tensor | Operator,
    into: Sequence[Tensor | None] = (),
    **constants: Any,
) -> list[Tensor]:
    """function(*args, **constants); each result in its place of `into`, where that is a tensor that has room for it."""
    return _placed(function(*args, **constants), into)


@dataclass(frozen=True)
class Task:
    """A function of tensors that may wait to be run along with others."""

    function: Function
    args: tuple[Tensor | Operator, ...]
    constants: dict[str, Any]
    then: Callable[..., None]  # takes the results
    timer: AbstractContextManager[None]
    into: tuple[Tensor | None, ...]  # for each result the room for it, if there is one
    size: int = 0  # bytes of the results, where they are many

    @property
    def bytes(self) -> int:
        return self.size + sum(
            t.numel() * t.element_size() for t in _tensors(self.args)
        )


def together(tasks: list[Task], run: Run) -> None:
    """Run them: by recordings several at once, as long as that is not too much for one; else each by itself.

    Tasks are let go of as soon as they are done, since they hold what was captured.
    """
    tasks.reverse()
    while tasks:
        batch, room = [tasks.pop()], LARGE
        while (
            run is not directly
            and tasks
            and (room := room - batch[-1].bytes) >= tasks[-1].bytes
        ):
            batch.append(tasks.pop())
        calls = tuple(
            (task.function, len(task.args), tuple(task.constants.items()))
            for task in batch
        )
        with batch[0].timer:
            args, into = (
                [x for task in batch for x in getattr(task, name)]
                for name in ("args", "into")
            )
            results = iter(run(_in_turn, *args, into=into, calls=calls))
            for task in batch:
                task.then(*itertools.islice(results, len(task.into)))
        del args, task


def _in_turn(
    *args: Tensor | Operator, calls: tuple[tuple[Function, int, Any], ...]
) -> tuple[Tensor, ...]:
    """The results of several functions, each with its number of arguments and its constants."""
    rest = iter(args)
    return tuple(
        t
        for function, count, constants in calls
        for t in function(*itertools.islice(rest, count), **dict(constants))
    )


class Replay:
    """`directly`, by recordings. The results belong to the caller."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.recordings: dict[object, _Recording] = {}
        self.arena: Tensor | None = None
        self.pool: Any = None

    def __call__(
        self,
        function: Function,
        *args: Tensor | Operator,
        into: Sequence[Tensor | None] = (),
        **constants: Any,
    ) -> list[Tensor]:
        """As `directly`; the function never waits for the device, and all it depends on is among its arguments."""
        tensors = list(_tensors(args))
        waits = any(isinstance(arg, Operator) and arg.waits for arg in args)
        if (
            self.device.type != "cuda"
            or waits
            or any(t.device != self.device for t in tensors)
            or capturing()
        ):
            return directly(function, *args, into=into, **constants)
        key = function, tuple(map(signature, args)), tuple(constants.items())
        known = self.recordings.get(key)
        if known is None or not known.fits:
            results = function(*args, **constants)
            if known is None:
                if len(self.recordings) == MOST:  # shapes keep changing: begin anew
                    self.forget()
                self.recordings[key] = _Recording(
                    [_like(t) for t in (*tensors, *results)], len(tensors)
                )
            return _placed(results, into)
        try:
            if known.graph is None:
                self._record(known, function, args, constants)
        except (
            torch.OutOfMemoryError
        ):  # a recording cannot have the memory that others have left unused
            known.fits = False
            return directly(function, *args, into=into, **constants)
        return known.replayed(tensors, into)

    def forget(self) -> None:
        """Let go of all recordings."""
        self.recordings.clear()
        self.arena = self.pool = None

    def _record(
        self,
        recording: _Recording,
        function: Function,
        args: Sequence[Tensor | Operator],
        constants: Any,
    ) -> None:
        needed = max(known.bytes for known in self.recordings.values() if known.fits)
        if (
            self.arena is None or self.arena.numel() < needed
        ):  # in powers of 2, since the one before stays as well
            self.arena = torch.empty(
                1 << (needed - 1).bit_length(), dtype=torch.uint8, device=self.device
            )
        if self.pool is None:
            self.pool = torch.cuda.graph_pool_handle()
        recording.record(self.arena, self.pool, function, args, constants)


_SIDES: dict[tuple[torch.device, int], torch.cuda.Stream] = {}


def side_stream(device: torch.device, branch: int = 0) -> torch.cuda.Stream:
    """Where graphs are recorded on a device: one stream, since libraries keep workspaces for each, and more for branches."""
    if (device, branch) not in _SIDES:
        _SIDES[device, branch] = torch.cuda.Stream(device)
    return _SIDES[device, branch]


def recorded(
    device: torch.device, run: Callable[[], None], pool: Any = None
) -> torch.cuda.CUDAGraph:
    """What a function launches, as a graph; nothing of it happens yet."""
    graph, here, side = (
        torch.cuda.CUDAGraph(),
        torch.cuda.current_stream(device),
        side_stream(device),
    )
    side.wait_stream(here)
    collecting = gc.isenabled()
    gc.disable()  # a graph that is let go of while another is recorded would spoil it
    try:
        with torch.cuda.device(device), torch.cuda.stream(side):
            graph.capture_begin(
                pool=pool or torch.cuda.graph_pool_handle(),
                capture_error_mode="thread_local",
            )
            try:
                run()
            finally:
                graph.capture_end()
    finally:
        if collecting:
            gc.enable()
    here.wait_stream(side)
    return graph


@dataclass(frozen=True)
class _Like:
    """What a tensor looks like."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return -(-math.prod(self.shape) * self.dtype.itemsize // 256) * 256  # aligned


class _Recording:
    """Inputs and results side by side in an arena that all recordings share, and the graph that leads from one to the other."""

    def __init__(self, places: list[_Like], inputs: int) -> None:
        self.places, self.count = places, inputs
        self.bytes = sum(place.bytes for place in places)
        self.fits = self.bytes <= LARGE
        self.graph: torch.cuda.CUDAGraph | None = None

    def record(
        self,
        arena: Tensor,
        pool: Any,
        function: Function,
        args: Sequence[Tensor | Operator],
        constants: Any,
    ) -> None:
        places, start = [], 0
        for place in self.places:
            numbers = arena[
                start : start + math.prod(place.shape) * place.dtype.itemsize
            ].view(place.dtype)
            places.append(numbers.as_strided(place.shape, place.stride))
            start += place.bytes
        self.inputs, self.results = places[: self.count], places[self.count :]

        def run() -> None:
            results = function(*_with(args, self.inputs), **constants)
            for room, result in zip(self.results, results, strict=True):
                room.copy_(result)

        self.graph = recorded(arena.device, run, pool)

    def replayed(
        self, tensors: list[Tensor], into: Sequence[Tensor | None]
    ) -> list[Tensor]:
        assert self.graph is not None
        write(list(zip(self.inputs, tensors, strict=True)))
        self.graph.replay()
        return _placed(self.results, into, torch.clone)


def _placed(
    results: Sequence[Tensor],
    into: Sequence[Tensor | None],
    otherwise: Callable[[Tensor], Tensor] = lambda t: t,
) -> list[Tensor]:
    rooms = [*into, *[None] * (len(results) - len(into))]
    return [
        room.copy_(t)
        if room is not None and (room.shape, room.dtype) == (t.shape, t.dtype)
        else otherwise(t)
        for t, room in zip(results, rooms, strict=True)
    ]


def _tensors(args: Sequence[Tensor | Operator]) -> Iterator[Tensor]:
    for arg in args:
        yield from [arg] if isinstance(arg, Tensor) else arg.tensors()


def _with(
    args: Sequence[Tensor | Operator], tensors: Sequence[Tensor]
) -> Iterator[Tensor | Operator]:
    """The arguments with other tensors in their places."""
    rest = iter(tensors)
    for arg in args:
        if isinstance(arg, Tensor):
            yield next(rest)
        else:
            yield replace(
                arg,
                **{
                    name: next(rest)
                    for name, value in vars(arg).items()
                    if isinstance(value, Tensor)
                },
            )


def signature(arg: Tensor | Operator) -> object:
    """All that a recording depends on but the numbers."""
    if isinstance(arg, Tensor):
        return arg.shape, arg.stride(), arg.dtype
    return type(arg), tuple(
        signature(v) if isinstance(v, Tensor) else v for v in vars(arg).values()
    )


def _like(t: Tensor) -> _Like:
    """Its shape and type; its strides where they leave no gaps."""
    return _Like(t.shape, torch.empty_like(t, device="meta").stride(), t.dtype)


def write(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Tensors into others, those of one type at once."""
    kinds: defaultdict[object, list[tuple[Tensor, Tensor]]] = defaultdict(list)
    for to, t in pairs:
        kinds[to.dtype, t.dtype, to.device].append((to, t))
    for same in kinds.values():
        torch._foreach_copy_([to for to, _ in same], [t for _, t in same])


def capturing() -> bool:
    """Whether someone records the current stream already."""
    return torch.cuda.is_current_stream_capturing()
