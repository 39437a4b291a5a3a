"""The one place that captures CUDA graphs.

A refresh is a thousand small launches, which take the host several times as long as they take the
GPU. So each part of it that is a function of tensors alone is recorded as a CUDA graph, the second
time it sees the same shapes. The graph has inputs of its own: later calls copy into them and replay
it.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from seng.linalg.operators import Operator

T = TypeVar("T")
Function = Callable[..., tuple[Tensor, ...]]
Run = Callable[..., list[Tensor]]  # `directly`, or a `Recorder`
MOST = 256  # recordings of one recorder
LARGE = (
    2**27
)  # bytes of inputs and outputs; copying more takes longer than launching


class Graph(Protocol):
    """Launches that were recorded: a torch.cuda.CUDAGraph, or a stand-in of a test."""

    def replay(self) -> None: ...


MakeGraph = Callable[[torch.device, Callable[[], None], Any], Graph]


def directly(
    function: Function, *args: Tensor | Operator, **constants: Any
) -> list[Tensor]:
    """function(*args, **constants), without a recording."""
    return list(function(*args, **constants))


class Recorder:
    """Runs a function of tensors, and from the second time with the same shapes replays a
    recording.

    The results belong to the caller. Without a GPU the function is always run, unless `make_graph`
    says how to record it.
    """

    def __init__(
        self, device: torch.device, make_graph: MakeGraph | None = None
    ) -> None:
        on_gpu = device.type == "cuda"
        self.device = device
        self.make_graph = (
            record if make_graph is None and on_gpu else make_graph
        )
        self.recordings: dict[object, _Recording] = {}
        self.arena: Tensor | None = None
        self.pool: Any = None

    def __call__(
        self, function: Function, *args: Tensor | Operator, **constants: Any
    ) -> list[Tensor]:
        """function(*args, **constants).

        The function must not wait for the device, and must depend on nothing but its arguments.
        """
        call = partial(directly, function, **constants)
        inputs = list(_tensors(args))
        waits = any(getattr(arg, "waits", False) for arg in args)
        elsewhere = any(t.device != self.device for t in inputs)
        if self.make_graph is None or waits or elsewhere or capturing():
            return call(*args)
        key = function, signature(args), tuple(constants.items())
        known = self.recordings.get(key)
        if known is None:
            results = call(*args)
            if (
                len(self.recordings) == MOST
            ):  # shapes keep changing: begin anew
                self.forget()
            self.recordings[key] = _Recording(inputs, results)
            return results
        if known.fits and known.graph is None:
            try:
                known.lay_out(self._arena())
                run = partial(known.run, call, args)
                known.graph = self.make_graph(self.device, run, self.pool)
            except (
                torch.OutOfMemoryError
            ):  # a graph cannot use what others have freed
                known.fits = False
        return known.replayed(inputs) if known.fits else call(*args)

    def forget(self) -> None:
        """Let go of all recordings."""
        self.recordings.clear()
        self.arena = self.pool = None

    def _arena(self) -> Tensor:
        """The memory in which the inputs and results of all recordings lie, each from its start."""
        if self.pool is None and self.device.type == "cuda":
            self.pool = torch.cuda.graph_pool_handle()
        needed = max(
            known.bytes for known in self.recordings.values() if known.fits
        )
        if self.arena is None or self.arena.numel() < needed:
            # In powers of 2: recordings that were made before keep the arena they have.
            size = 1 << (needed - 1).bit_length()
            self.arena = torch.empty(
                size, dtype=torch.uint8, device=self.device
            )
        return self.arena


class _Recording:
    """A graph, and where its inputs and results lie in the arena."""

    def __init__(
        self, inputs: Sequence[Tensor], results: Sequence[Tensor]
    ) -> None:
        # On "meta": shapes, types and strides without gaps, but no numbers.
        self.like = [
            torch.empty_like(t, device="meta") for t in (*inputs, *results)
        ]
        self.count = len(inputs)
        self.bytes = sum(_aligned(t) for t in self.like)
        self.fits = self.bytes <= LARGE
        self.graph: Graph | None = None

    def lay_out(self, arena: Tensor) -> None:
        """Give inputs and results their places, side by side."""
        places, start = [], 0
        for t in self.like:
            numbers = arena[start : start + t.nbytes].view(t.dtype)
            places.append(numbers.as_strided(t.shape, t.stride()))
            start += _aligned(t)
        self.inputs = places[: self.count]
        self.results = places[self.count :]

    def run(self, call: Run, args: Sequence[Any]) -> None:
        """What is recorded: the function, from its inputs here to its results here."""
        own_args = _with(tuple(args), iter(self.inputs))
        for place, result in zip(self.results, call(*own_args), strict=True):
            place.copy_(result)

    def replayed(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The results for other inputs of the same shapes."""
        assert self.graph is not None
        write(list(zip(self.inputs, inputs, strict=True)))
        self.graph.replay()
        return [result.clone() for result in self.results]


def _aligned(t: Tensor) -> int:
    """Its bytes, up to the next multiple of 256."""
    return -(-t.nbytes // 256) * 256


_SIDES: dict[tuple[torch.device, int], torch.cuda.Stream] = {}


def side_stream(device: torch.device, branch: int = 0) -> torch.cuda.Stream:
    """The stream on which graphs of a device are recorded, or one for a branch of them.

    There is one for all graphs, since libraries keep a workspace for each stream.
    """
    if (device, branch) not in _SIDES:
        _SIDES[device, branch] = torch.cuda.Stream(device)
    return _SIDES[device, branch]


def record(
    device: torch.device, run: Callable[[], None], pool: Any = None
) -> Graph:
    """What a function launches, as a CUDA graph; nothing of it happens yet."""
    graph = torch.cuda.CUDAGraph()
    here, side = torch.cuda.current_stream(device), side_stream(device)
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


def capturing() -> bool:
    """Whether someone records the current stream already."""
    return (
        torch.cuda.is_initialized()
        and torch.cuda.is_current_stream_capturing()
    )


def settle(old: T | None, new: T, always: bool = False) -> T:
    """The new value at the addresses of the old one, so that recordings which read the old one hold
    on.

    Both are dataclasses of tensors, of plain values and of other dataclasses, or tuples or lists of
    those. Where they differ in the numbers in their tensors alone, these are copied into the old
    tensors, and `old` is returned. Otherwise, and where no tensor is on a GPU (unless `always`),
    `new` is returned.
    """
    if old is None or signature(old) != signature(new):
        return new
    pairs = list(zip(_tensors(old), _tensors(new), strict=True))
    if not always and not any(to.is_cuda for to, _ in pairs):
        return new
    write([(to, t) for to, t in pairs if to is not t])
    return old


def write(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy into the first of each pair the second, all of one type at once."""
    kinds: defaultdict[object, list[tuple[Tensor, Tensor]]] = defaultdict(list)
    for to, t in pairs:
        kinds[to.dtype, t.dtype, to.device].append((to, t))
    for same in kinds.values():
        torch._foreach_copy_([to for to, _ in same], [t for _, t in same])


def signature(value: Any) -> object:
    """All of a value but the numbers in its tensors; what a recording depends on."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    parts = _parts(value)
    return value if parts is None else (type(value), *map(signature, parts))


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors inside a value, in order."""
    if isinstance(value, Tensor):
        yield value
    for part in _parts(value) or ():
        yield from _tensors(part)


def _with(value: Any, tensors: Iterator[Tensor]) -> Any:
    """The value with other tensors in their places."""
    if isinstance(value, Tensor):
        return next(tensors)
    parts = _parts(value)
    if parts is None:
        return value
    changed = [_with(part, tensors) for part in parts]
    if isinstance(value, tuple | list):
        return type(value)(changed)
    names = [field.name for field in fields(value)]
    return replace(value, **dict(zip(names, changed, strict=True)))


def _parts(value: Any) -> Sequence[Any] | None:
    """The entries of a tuple or list, the fields of a dataclass; None of anything else."""
    if isinstance(value, tuple | list):
        return value
    if is_dataclass(value):
        return [getattr(value, field.name) for field in fields(value)]
    return None
