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
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from seng.linalg.operators import Operator

Function = Callable[..., tuple[Tensor, ...]]
Run = Callable[..., list[Tensor]]  # `directly`, or a `Recorder`
Launch = Callable[[], None]
Graph = Any  # launches that were recorded, with `replay`
MOST = 256  # recordings of one recorder
LARGE = (
    2**27
)  # bytes of inputs and outputs; copying more takes longer than launching
ALIGNED = 256  # bytes: where inputs and outputs begin


@cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream on which all graphs are recorded: libraries keep a workspace for each."""
    return torch.cuda.Stream(device)


def record(device: torch.device, run: Launch, pool: Any = None) -> Graph:
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


class Replay:
    """Launches between tensors that stay where they are: recorded at the second time, and then
    replayed as one.

    Without a GPU they are always made one by one, unless `make_graph` says how to record them.
    """

    def __init__(self, device: torch.device, make_graph: Any = None) -> None:
        self.device = device
        self.make_graph = make_graph or _graphs_of(device)
        self.key: object = None
        self.graph: Graph = None

    def __call__(self, launch: Launch, key: object = ()) -> None:
        """Do what `launch` does, which is another recording where the key is another."""
        if key != self.key:
            self.key, self.graph = key, None
        elif self.graph is None and self.make_graph and not capturing():
            try:
                self.graph = self.make_graph(self.device, launch, None)
            except (
                torch.OutOfMemoryError
            ):  # a graph cannot use what others have freed
                self.make_graph = None
        if self.graph is None:
            launch()
        else:
            self.graph.replay()


def _graphs_of(device: torch.device) -> Any:
    return record if device.type == "cuda" else None


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

    def __init__(self, device: torch.device, make_graph: Any = None) -> None:
        self.device = device
        self.make_graph = make_graph or _graphs_of(device)
        self.forget()

    def forget(self) -> None:
        """Let go of all recordings."""
        self.recordings: dict[object, _Recording] = {}
        self.arena = self._bytes(0)
        on_gpu = self.device.type == "cuda"
        self.pool = torch.cuda.graph_pool_handle() if on_gpu else None

    def __call__(
        self, function: Function, *args: Tensor | Operator, **constants: Any
    ) -> list[Tensor]:
        """function(*args, **constants).

        The function must not wait for the device, and must depend on nothing but its arguments.
        """
        if self.make_graph is None:
            return list(function(*args, **constants))
        call = partial(directly, function, **constants)
        inputs = list(_tensors(args))
        waits = any(getattr(arg, "waits", False) for arg in args)
        elsewhere = any(t.device != self.device for t in inputs)
        if waits or elsewhere or capturing():
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
            except torch.OutOfMemoryError:
                known.fits = False
        return known.replayed(inputs) if known.fits else call(*args)

    def _arena(self) -> Tensor:
        """The memory in which the inputs and results of all recordings lie, each from its start."""
        needed = max(
            known.bytes for known in self.recordings.values() if known.fits
        )
        if self.arena.numel() < needed:
            # In powers of 2: recordings that were made before keep the arena they have.
            self.arena = self._bytes(1 << (needed - 1).bit_length())
        return self.arena

    def _bytes(self, count: int) -> Tensor:
        return torch.empty(count, dtype=torch.uint8, device=self.device)


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
        self.sizes = [-(-t.nbytes // ALIGNED) * ALIGNED for t in self.like]
        self.bytes = sum(self.sizes)
        self.fits = self.bytes <= LARGE
        self.graph: Graph = None

    def lay_out(self, arena: Tensor) -> None:
        """Give inputs and results their places, side by side."""
        places = []
        rooms = arena[: self.bytes].split(self.sizes)
        for t, room in zip(self.like, rooms, strict=True):
            numbers = room[: t.nbytes].view(t.dtype)
            places.append(numbers.as_strided(t.shape, t.stride()))
        self.inputs = places[: self.count]
        self.results = places[self.count :]

    def run(self, call: Run, args: Any) -> None:
        """What is recorded: the function, from its inputs here to its results here."""
        results = call(*_with(args, iter(self.inputs)))
        for place, result in zip(self.results, results, strict=True):
            place.copy_(result)

    def replayed(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The results for other inputs of the same shapes."""
        write(list(zip(self.inputs, inputs, strict=True)))
        self.graph.replay()
        return [result.clone() for result in self.results]


def settle(old: Any, new: Any) -> Any:
    """The new value at the addresses of the old one, so that recordings which read the old one hold
    on.

    Both are dataclasses of tensors, of plain values and of other dataclasses, or tuples or lists of
    those. Where they differ in the numbers in their tensors alone, these are copied into the old
    tensors, and `old` is returned; otherwise `new`.
    """
    if signature(old) != signature(new):
        return new
    pairs = zip(_tensors(old), _tensors(new), strict=True)
    write([(to, t) for to, t in pairs if to is not t])
    return old


def send(
    numbers: Tensor, device: torch.device, to: Tensor | None = None
) -> Tensor:
    """`numbers` of the host on a device that is not waited for; in `to`, if it has their shape."""
    if device.type != "cuda":
        return numbers.to(device)
    staged = numbers.pin_memory()
    if to is None or to.shape != staged.shape:
        to = torch.empty_like(staged, device=device)
    return to.copy_(staged, non_blocking=True)


def write(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy into the first of each pair the second, all of one type at once."""
    kinds: defaultdict[object, list[tuple[Tensor, Tensor]]] = defaultdict(list)
    for to, t in pairs:
        kinds[to.dtype, t.dtype, to.device].append((to, t))
    for same in kinds.values():
        places, given = zip(*same, strict=True)
        torch._foreach_copy_(places, given)


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
        return
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
    kind: Any = type(value)
    names = _names(kind)
    if names:
        return replace(value, **dict(zip(names, changed, strict=True)))
    return kind(changed)


@cache
def _names(kind: Any) -> tuple[str, ...]:
    """The fields of a dataclass."""
    if not is_dataclass(kind):
        return ()
    return tuple([field.name for field in fields(kind)])


def _parts(value: Any) -> Sequence[Any] | None:
    """The entries of a tuple or list, the fields of a dataclass; None of anything else."""
    if isinstance(value, tuple | list):
        return value
    kind: Any = type(value)
    return [getattr(value, name) for name in _names(kind)] or None
