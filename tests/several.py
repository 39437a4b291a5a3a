"""Ranks for tests: processes that stay, joined by gloo, and run what they are given; starting them anew would take seconds."""

from __future__ import annotations

import gc
import os
import tempfile
import traceback
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def _serve(
    rank: int, size: int, store: str, timeout: float, inbox: Any, outbox: Any
) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    files = dist.FileStore(store, size)
    dist.init_process_group(
        "gloo",
        store=files,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout),
    )
    while (order := inbox.get()) is not None:
        function, args = order
        torch.set_default_dtype(torch.float64)
        torch.manual_seed(0)
        try:
            outbox.put((rank, function(rank, *args), None))
        except BaseException:
            outbox.put((rank, None, traceback.format_exc()))
    gc.collect()  # networks first: where DDP is the last to hold the group, gloo's thread and Python wait for each other
    dist.destroy_process_group()


class Ranks:
    """`size` of them, whose collectives wait so many seconds for the others."""

    def __init__(self, size: int, timeout: float = 60) -> None:
        self.size = size
        context = mp.get_context("spawn")
        self.folder = tempfile.TemporaryDirectory()
        self.outbox = context.SimpleQueue()
        self.inboxes = [context.SimpleQueue() for _ in range(size)]
        self.processes = [
            context.Process(
                target=_serve,
                args=(
                    rank,
                    size,
                    f"{self.folder.name}/store",
                    timeout,
                    self.inboxes[rank],
                    self.outbox,
                ),
            )
            for rank in range(size)
        ]
        for process in self.processes:
            process.start()

    def outcomes(
        self, function: Any, *args: Any
    ) -> list[tuple[Any, str | None]]:
        """What each rank returned, or the error that it raised, as text."""
        for inbox in self.inboxes:
            inbox.put((function, args))
        found = sorted(
            (self.outbox.get() for _ in range(self.size)),
            key=lambda entry: entry[0],
        )
        return [(value, error) for _, value, error in found]

    def __call__(self, function: Any, *args: Any) -> list[Any]:
        """What each rank returned; an error of one is an error."""
        outcomes = self.outcomes(function, *args)
        for rank, (_, error) in enumerate(outcomes):
            assert error is None, f"rank {rank}: {error}"
        return [value for value, _ in outcomes]

    def close(self) -> None:
        for inbox in self.inboxes:
            inbox.put(None)
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()
        self.folder.cleanup()
