"""The processes that `torchrun` started to train one network together, each on its part of every batch.

All draw the same global batches from the same seeds and take their rows of them, so that N ranks train on what one process
would. Rank 0 decides what a disk or a clock decides, speaks, and writes; the others hear of it. A process on its own is rank 0
of one, for which all of this does nothing: nobody who uses it asks how many there are.
"""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice
from time import monotonic, sleep
from typing import Any, TypeVar
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

T = TypeVar("T")
Rows = TypeVar("Rows", bound=Sequence[Any] | Tensor)
SHARED = "--out is to be a folder that all nodes share, since rank 0 may be on another node after a restart"


@dataclass(frozen=True)
class Ranks:
    """Which of how many processes this is, in all and on its machine."""

    count: int = 1
    rank: int = 0
    local_count: int = 1
    local_rank: int = 0
    restarts: int = 0  # that torchrun may make

    @classmethod
    def present(cls, environment: Mapping[str, str] = os.environ) -> Ranks:
        """As torchrun's variables say; one process where there are none."""
        count = _number(environment, "WORLD_SIZE", 1)
        if count == 1:
            return ALONE
        local = (
            _number(environment, "LOCAL_WORLD_SIZE", 1),
            _number(environment, "LOCAL_RANK", 0),
        )
        return cls(
            count,
            _number(environment, "RANK", None),
            *local,
            _number(environment, "TORCHELASTIC_MAX_RESTARTS", 0),
        )

    @property
    def first(self) -> bool:
        """Whether this one speaks and writes."""
        return self.rank == 0

    @property
    def said(self) -> str:
        """Whose error it is."""
        return f", rank {self.rank} of {self.count}" if self.count > 1 else ""

    @property
    def launcher(self) -> str:
        """What starts as many of them again, before the command."""
        nodes = self.count // self.local_count
        several = f"--nnodes={nodes} " if nodes > 1 else ""
        return (
            f"torchrun {several}--nproc-per-node={self.local_count} -m "
            if self.count > 1
            else ""
        )

    def device(self, device: torch.device) -> torch.device:
        """One GPU for each process of a machine."""
        if self.count == 1 or device.type != "cuda":
            return device
        if str(device) != "cuda":
            raise ValueError(
                f"--device {device} would give all ranks one GPU: --device cuda gives each its own"
            )
        if self.local_count > torch.cuda.device_count():
            seen = f"{self.local_count} processes on a machine whose GPUs are {torch.cuda.device_count()}"
            raise ValueError(
                f"{seen}: give torchrun --nproc-per-node={torch.cuda.device_count()}"
            )
        torch.cuda.set_device(self.local_rank)
        return torch.device("cuda", self.local_rank)

    @contextmanager
    def joined(self, device: torch.device, timeout: float) -> Iterator[None]:
        """The process group, as long as this lasts; no rank waits longer than `timeout` seconds for another."""
        if not 0 < timeout < 1e7:
            raise ValueError(
                f"--timeout is a number of seconds, more than 0, not {timeout:g}"
            )
        if self.count == 1:
            yield
            return
        wait = timedelta(seconds=timeout)
        kind: dict[str, Any] = (
            {"backend": "nccl", "device_id": device}
            if device.type == "cuda"
            else {"backend": "gloo"}
        )
        try:
            if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
                host, port = (
                    os.environ["MASTER_ADDR"],
                    int(os.environ["MASTER_PORT"]),
                )
                store = dist.TCPStore(  # type: ignore[attr-defined]
                    host, port, self.count, is_master=False, timeout=wait
                )
                fresh = dist.PrefixStore(_start(store, self, timeout), store)  # type: ignore[attr-defined]
                kind |= {
                    "store": fresh,
                    "rank": self.rank,
                    "world_size": self.count,
                }
            dist.init_process_group(timeout=wait, **kind)
        except (
            RuntimeError,
            ValueError,
        ) as why:  # torch's errors of networks and of stores are RuntimeErrors
            raise ValueError(
                f"the {self.count} ranks did not find one another within {timeout:g} s ({_line(why)})"
            ) from why
        with warnings.catch_warnings():
            if not self.first:
                warnings.filterwarnings("ignore", "seng")  # rank 0 says it
            try:
                yield
            except RuntimeError as why:
                if not _lost(why):
                    raise
                raise ValueError(
                    f"another rank has gone, or was silent for {timeout:g} s ({_line(why)})"
                ) from why
            finally:
                _left[:] = [dist.group.WORLD]
                dist.destroy_process_group()
                sleep(0.1)  # for the threads of gloo

    def wrapped(self, model: nn.Module, device: torch.device) -> nn.Module:
        """A model whose backward leaves the mean of all ranks' gradients."""
        if self.count == 1:
            return model
        return DistributedDataParallel(
            model, device_ids=[device.index] if device.type == "cuda" else None
        )

    def part(self, rows: Rows) -> Rows:
        """This rank's of a batch, which are as many on all ranks."""
        size = len(rows) // self.count
        return (
            rows
            if self.count == 1
            else rows[self.rank * size : (self.rank + 1) * size]  # type: ignore[return-value]
        )

    def among(self, part: Tensor, batch: int) -> Tensor:
        """A batch with this rank's part in its place, the other rows unknown: whatever draws for the batch draws as for all."""
        if self.count == 1:
            return part
        whole = part.new_zeros(batch, *part.shape[1:])
        self.part(whole).copy_(part)
        return whole

    def share(self, pieces: Iterable[T]) -> Iterable[T]:
        """Every count-th of some pieces of work."""
        return (
            pieces
            if self.count == 1
            else islice(pieces, self.rank, None, self.count)
        )

    def mean(self, x: Tensor) -> Tensor:
        """Over ranks."""
        return self._sum(x) / self.count

    def average(self, total: Tensor, count: int) -> Tensor:
        """total/count of what was shared: each rank has a part of both."""
        if self.count == 1:
            return total / count
        sums = self._sum(
            torch.stack(
                (
                    total.double(),
                    torch.full_like(total, count, dtype=torch.float64),
                )
            )
        )
        return (sums[0] / sums[1]).to(total.dtype)

    def _sum(self, x: Tensor) -> Tensor:
        if self.count > 1:
            dist.all_reduce(x := x.clone())
        return x

    def same(self, tensors: Iterable[Tensor]) -> None:
        """Rank 0's on all ranks: the statistics of BatchNorm are each rank's own while it trains."""
        for x in tensors if self.count > 1 else ():
            dist.broadcast(x, src=0)

    def first_has(self, make: Callable[[], T]) -> T:
        """What rank 0 makes, on all ranks; where it refuses, all of them do."""
        if self.count == 1:
            return make()
        made: list[Any] = [None, None]
        if self.first:
            try:
                made = [make(), None]
            except (ValueError, OSError) as wrong:
                made = [None, wrong]
        dist.broadcast_object_list(made, src=0)
        if made[1] is not None:
            raise made[1]
        out: T = made[0]
        return out

    def all_have(self, value: T) -> list[T]:
        """Every rank's value, on all ranks."""
        out: list[Any] = [value] * self.count
        if self.count > 1:
            dist.all_gather_object(out, value)
        return out

    def own_chance(self, seed: int, step: int) -> None:
        """Other numbers for each rank, so that dropout differs among them; by the step, so that resumed runs draw the same."""
        if self.count > 1:
            torch.manual_seed(
                random.Random(f"{seed} {step} {self.rank}").getrandbits(63)
            )


ALONE = Ranks()
# The last process group. DistributedDataParallel, if it were the last to hold it, would wait for gloo's threads without letting
# go of the interpreter, which such a thread may need to free a tensor: a deadlock, seen where an error follows a collective.
_left: list[Any] = []


def _start(store: Any, ranks: Ranks, timeout: float) -> str:
    """A name that these processes agree on and no earlier ones had: after a restart the store of torchrun still holds the
    addresses of the processes before (pytorch issue 135712), and how often it restarted may differ from node to node.

    Everyone says who it is. Rank 0 names those that it sees, once more where one turns out to be new; when all of them have
    found themselves under one name, that is it.
    """

    def read(key: str) -> list[str]:
        return store.get(key).decode().split() if store.check([key]) else []

    mine, name, end = uuid4().hex, "", monotonic() + timeout
    store.set(f"seng {ranks.rank} is", mine)
    while monotonic() < end:
        if ranks.first:
            here = [
                word
                for rank in range(ranks.count)
                for word in read(f"seng {rank} is")
            ]
            if here != read("seng named")[1:]:
                name = uuid4().hex
                store.set("seng named", " ".join([name, *here]))
            if all(
                read(f"seng {rank} found") == [name]
                for rank in range(1, ranks.count)
            ):
                store.set("seng start", name)
                return name
        elif mine in (named := read("seng named")):
            store.set(f"seng {ranks.rank} found", named[0])
            if read("seng start") == named[:1]:
                return named[0]
        sleep(0.05)
    raise RuntimeError("not all of them came")


def _number(
    environment: Mapping[str, str], name: str, default: int | None
) -> int:
    text = environment.get(name, default)
    try:
        return int(text)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        given = "missing" if text is None else repr(text)
        raise ValueError(
            f"the environment's {name} is {given}, while torchrun sets it to a number: start with torchrun"
        ) from None


def _line(why: BaseException) -> str:
    """The first line of a message."""
    return str(why).strip().partition("\n")[0]


def _lost(why: RuntimeError) -> bool:
    """Whether the other ranks cannot be reached; gloo has no error of its own."""
    return isinstance(why, dist.DistError) or "gloo" in str(why)
