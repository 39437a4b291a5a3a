"""Which processes share the curvature, and what they send each other (section 4 of the paper).

    local    one process
    shared   one basis on all ranks, from the samples of all of them; nothing is sent between
             refreshes
             (ours; `pool`)
    block    d = (1/𝓜) Σ_i λ(M_i + λI)⁻¹g: each rank has its own U_i, and one more gradient travels
             at
             every step (eq. sol-ls-1-dist)
    lagged   d = g_k − (1/𝓜) Σ_i U_i b_i with b_i from g_{k−1}, which is known before the backward:
             that
             sum travels in the gradient's own message (eq. Dist-syn-2); the first step is not
             lagged

DistributedDataParallel averages the ranks' gradients, however many samples each has. So M = (1/𝓜)
Σ_i M_i.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from seng.layers.sites import is_sharded

Strategy = Literal["local", "shared", "block", "lagged"]
STRATEGIES = ("shared", "block", "lagged")
BUCKET = 2**24  # numbers that are reduced in one message


@dataclass(frozen=True)
class Team:
    """The ranks that train one network. All of them call its methods, in the same order."""

    strategy: Strategy = "local"
    size: int = 1  # 𝓜
    rank: int = 0
    group: Any = None  # a process group; None is the default one

    @cached_property
    def many(self) -> bool:
        """Whether there are other ranks."""
        return self.size > 1

    @cached_property
    def pools(self) -> bool:
        """Whether the ranks' samples become one curvature."""
        return self.strategy == "shared"

    @cached_property
    def averages(self) -> bool:
        """Whether the ranks' directions are averaged."""
        return self.strategy in ("block", "lagged")

    def _send(
        self,
        what: str,
        collective: Callable[..., Any],
        *args: Any,
        **options: Any,
    ) -> None:
        """Call one of torch's collectives; an error of it says what it was about."""
        if not self.many:
            return
        try:
            collective(*args, group=self.group, **options)
        except torch.OutOfMemoryError:  # which is nobody else's doing
            raise
        except (RuntimeError, OSError) as why:
            said = str(why).strip() or type(why).__name__
            raise RuntimeError(
                f"SENG, rank {self.rank} of {self.size}: {what} did not come about; "
                "another rank has failed, is not there, or takes other steps "
                f"({said.splitlines()[0]})"
            ) from why

    def gathered(
        self, row: Sequence[int] | Tensor, device: torch.device, what: str
    ) -> list[list[int]]:
        """Every rank's integers."""
        own = torch.as_tensor(row, dtype=torch.int64, device="cpu")
        if not self.many:
            return [own.tolist()]
        own = own.to(device)
        rows = [torch.empty_like(own) for _ in range(self.size)]
        self._send(what, dist.all_gather, rows, own)
        return [line.tolist() for line in rows]

    def told(self, value: Any, what: str) -> list[Any]:
        """Every rank's value; they are small."""
        values = [value] * self.size
        self._send(what, dist.all_gather_object, values, value)
        return values

    def sum_(self, tensors: Sequence[Tensor], what: str) -> None:
        """Each tensor becomes its sum over the ranks; small ones travel together."""
        if not self.many:
            return
        for batch in _batches(tensors):
            if len(batch) == 1 and batch[0].is_contiguous():
                self._send(what, dist.all_reduce, batch[0])
                continue
            flat = torch.cat([t.reshape(-1) for t in batch])
            self._send(what, dist.all_reduce, flat)
            parts = flat.split([t.numel() for t in batch])
            for t, part in zip(batch, parts, strict=True):
                t.copy_(part.view_as(t))

    def mean_(self, tensors: Sequence[Tensor], what: str) -> None:
        """Each tensor becomes its mean over the ranks."""
        self.sum_(tensors, what)
        if self.many and tensors:
            torch._foreach_div_(list(tensors), self.size)

    def max_(self, t: Tensor, what: str) -> None:
        """A tensor becomes the largest of the ranks', number by number."""
        self._send(what, dist.all_reduce, t, dist.ReduceOp.MAX)

    def exchanged(
        self,
        parts: Sequence[Sequence[Tensor]],
        sizes: Sequence[list[int]],
        none: Tensor,
        what: str,
    ) -> list[tuple[Tensor, ...]]:
        """Send parts[i] to rank i, and receive tensors of sizes[i] numbers from it.

        `none` is a tensor of their type without numbers, for ranks that have nothing to send.
        """
        flat = [
            torch.cat([none, *[t.flatten() for t in some]]) for some in parts
        ]
        came = sent = torch.cat(flat)
        totals = [sum(some) for some in sizes]
        if self.many:
            counts = [part.numel() for part in flat]
            came = sent.new_empty(sum(totals))
            self._send(
                what, dist.all_to_all_single, came, sent, totals, counts
            )
        received = zip(came.split(totals), sizes, strict=True)
        return [numbers.split(some) for numbers, some in received]

    def from_first(self, tensors: Sequence[Tensor], what: str) -> None:
        """Each tensor becomes the first rank's."""
        for t in tensors:
            whole = t.contiguous()
            self._send(what, dist.broadcast, whole, group_src=0)
            if whole is not t:
                t.copy_(whole)


ALONE = Team()


def _batches(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Neighbours of one type, as long as they are few numbers."""
    for _, alike in groupby(tensors, lambda t: (t.dtype, t.device)):
        batch: list[Tensor] = []
        room = BUCKET
        for t in alike:
            room -= t.numel()
            if batch and room < 0:
                yield batch
                batch, room = [], BUCKET - t.numel()
            batch.append(t)
        yield batch


def team_of(strategy: str | None, module: nn.Module | None) -> Team:
    """The ranks of a module: those of its DistributedDataParallel, or all of them."""
    if strategy not in (None, "local", *STRATEGIES):
        raise ValueError(
            f"unknown strategy {strategy!r}; there are 'local' (one process), "
            "'shared', 'block' and 'lagged'"
        )
    wrapped = isinstance(module, nn.parallel.DistributedDataParallel)
    mesh = None if module is None else _mesh(module)
    group: Any = module.process_group if wrapped else None  # type: ignore[union-attr]
    if mesh is not None and mesh.ndim == 1:
        group = mesh.get_group()
    there = dist.is_available() and dist.is_initialized()
    size = dist.get_world_size(group) if there else 1
    if (
        size == 1
    ):  # a shared basis of one rank, or the mean over it, is its own
        alone: Strategy = "lagged" if strategy == "lagged" else "local"
        return Team(alone if mesh is None else "shared")
    if strategy != "local":
        rank = dist.get_rank(group)
        return Team(strategy or "shared", size, rank, group)  # type: ignore[arg-type]
    if wrapped or mesh is not None:
        raise RuntimeError(
            f"strategy='local' is one process, and this network is trained by {size}: "
            "ranks with curvatures of their own would drift apart; leave strategy out, "
            "and they share one"
        )
    return ALONE  # networks that have nothing to do with each other


def _mesh(module: nn.Module) -> Any:
    """The device mesh on which the parameters lie, if they are spread over ranks."""
    params: Any = module.parameters()
    meshes = {p.device_mesh for p in params if is_sharded(p)}
    if len(meshes) > 1:
        raise RuntimeError(
            f"the parameters lie on {len(meshes)} device meshes: SENG works with one"
        )
    mesh = next(iter(meshes), None)
    if (
        mesh is not None
        and mesh.ndim > 1
        and mesh.size() != dist.get_world_size()
    ):
        raise RuntimeError(
            f"the device mesh {mesh} has not all of the {dist.get_world_size()} ranks: "
            "SENG works with all"
        )
    return mesh


def check_alike(
    team: Team, account: dict[str, Any], own: dict[str, Any]
) -> list[dict[str, Any]]:
    """Every rank's `own`; refused where their accounts of themselves differ."""
    told = team.told((account, own), "meeting the other ranks")
    first, _ = told[0]
    for rank, (other, _) in enumerate(told):
        for key, value in other.items():
            if value != first[key]:
                raise ValueError(
                    f"rank {rank} differs from rank 0 in its {key}: "
                    f"{_first_difference(value, first[key])}; all ranks build the same "
                    "network and the same optimizer"
                )
    return [theirs for _, theirs in told]


def _first_difference(ours: Any, theirs: Any) -> str:
    if isinstance(ours, list) and isinstance(theirs, list):
        pairs = zip(ours, theirs, strict=False)
        lengths = len(ours), len(theirs)
        ours, theirs = next(
            (pair for pair in pairs if pair[0] != pair[1]), lengths
        )
    return f"{ours} where rank 0 has {theirs}"


def check_weights(team: Team, params: Sequence[Tensor]) -> None:
    """Refuse ranks that start from different weights: they would train different networks."""
    device = params[0].device
    own = torch.stack([bits(p.detach()).to(device) for p in params])
    rows = team.gathered(own.sum()[None], device, "comparing weights")
    other = [rank for rank, row in enumerate(rows) if row != rows[0]]
    if other:
        raise RuntimeError(
            f"the weights of rank {other[0]} are not those of rank 0: wrap the network "
            "in DistributedDataParallel, which makes them alike, or seed all ranks "
            "alike before it is built"
        )


def bits(t: Tensor) -> Tensor:
    """A sum () of all bits: tensors that differ have different ones, but for rare cases.

    It does not depend on the order of summation.
    """
    # A single number may have any stride.
    flat = t.contiguous().as_strided((t.numel(),), (1,)).view(torch.uint8)
    aligned = flat.numel() % 4 == 0 and flat.storage_offset() % 4 == 0
    words = flat.view(torch.int32) if aligned else flat
    return words.sum(dtype=torch.int64)
