"""Which processes share the curvature, and what they send each other (section 4 of the paper).

    local    one process
    shared   one basis on all ranks, from the samples of all of them; nothing is sent between refreshes (ours; `pool`)
    block    d = (1/𝓜) Σ_i λ(M_i + λI)⁻¹g: each rank has its own U_i, and one more gradient travels at every step
             (eq. sol-ls-1-dist)
    lagged   d = g_k − (1/𝓜) Σ_i U_i b_i with b_i from g_{k−1}, which is known before the backward: that sum travels in the
             gradient's own message (eq. Dist-syn-2); the first step is not lagged

DistributedDataParallel averages the ranks' gradients, however many samples each has. So M = (1/𝓜) Σ_i M_i here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

Strategy = Literal["local", "shared", "block", "lagged"]
STRATEGIES = ("shared", "block", "lagged")
BUCKET = 2**24  # numbers that are reduced in one message


@dataclass(frozen=True)
class Team:
    """The ranks that train one network. All of its methods are called by all of them, in the same order."""

    strategy: Strategy = "local"
    size: int = 1  # 𝓜
    rank: int = 0
    group: Any = None  # a process group; None is the default one

    @property
    def many(self) -> bool:
        """Whether there is anybody to talk to."""
        return self.size > 1

    @property
    def pools(self) -> bool:
        """Whether samples become one basis."""
        return self.strategy == "shared"

    @property
    def averages(self) -> bool:
        """Whether directions are averaged at every step."""
        return self.strategy in ("block", "lagged")

    @contextmanager
    def _said(self, what: str) -> Iterator[None]:
        """An error of the process group, with what it was about."""
        try:
            yield
        except torch.OutOfMemoryError:  # which is nobody else's doing
            raise
        except (RuntimeError, ConnectionError, OSError) as why:
            said = (
                str(why).strip().splitlines()[0]
                if str(why).strip()
                else type(why).__name__
            )
            raise RuntimeError(
                f"SENG, rank {self.rank} of {self.size}: {what} did not come about; another rank has failed, is not there, or "
                f"takes other steps ({said})"
            ) from why

    def gathered(
        self, row: Sequence[int] | Tensor, device: torch.device, what: str
    ) -> list[list[int]]:
        """Every rank's numbers."""
        if not self.many:
            return [row.tolist() if isinstance(row, Tensor) else list(row)]
        own = (
            row
            if isinstance(row, Tensor)
            else torch.tensor(row, dtype=torch.int64, device=device)
        )
        rows = [torch.empty_like(own) for _ in range(self.size)]
        with self._said(what):
            dist.all_gather(rows, own, group=self.group)
        return [line.tolist() for line in rows]

    def told(self, value: Any, what: str) -> list[Any]:
        """Every rank's value; they are small."""
        if not self.many:
            return [value]
        values: list[Any] = [None] * self.size
        with self._said(what):
            dist.all_gather_object(values, value, group=self.group)
        return values

    def sum_(self, tensors: Sequence[Tensor], what: str) -> None:
        """Each tensor becomes its sum over the ranks; small ones travel together."""
        if not self.many:
            return
        with self._said(what):
            for batch in _batches(tensors):
                if len(batch) == 1 and batch[0].is_contiguous():
                    dist.all_reduce(batch[0], group=self.group)
                    continue
                flat = torch.cat([t.reshape(-1) for t in batch])
                dist.all_reduce(flat, group=self.group)
                for t, part in zip(
                    batch, flat.split([t.numel() for t in batch]), strict=True
                ):
                    t.copy_(part.view_as(t))

    def mean_(self, tensors: Sequence[Tensor], what: str) -> None:
        """Each tensor becomes its mean over the ranks."""
        self.sum_(tensors, what)
        if self.many and tensors:
            torch._foreach_div_(list(tensors), self.size)

    def max_(self, t: Tensor, what: str) -> None:
        """A tensor becomes the largest of the ranks', number by number."""
        if self.many:
            with self._said(what):
                dist.all_reduce(t, dist.ReduceOp.MAX, group=self.group)

    def exchanged(
        self, parts: Sequence[Tensor], sizes: Sequence[int], what: str
    ) -> list[Tensor]:
        """Part i goes to rank i; what each of them sent us, of `sizes` numbers."""
        if not self.many:
            return list(parts)
        out = parts[0].new_empty(sum(sizes))
        sent = torch.cat([part.reshape(-1) for part in parts])
        counts = [part.numel() for part in parts]
        with self._said(what):
            dist.all_to_all_single(out, sent, list(sizes), counts, group=self.group)
        return list(out.split(list(sizes)))

    def from_first(self, tensors: Sequence[Tensor], what: str) -> None:
        """Each tensor becomes the first rank's."""
        first = dist.get_global_rank(self.group or dist.group.WORLD, 0)  # type: ignore[arg-type]
        with self._said(what):
            for t in tensors:
                whole = t.contiguous()
                dist.broadcast(whole, first, group=self.group)
                if whole is not t:
                    t.copy_(whole)


def _batches(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Neighbours of one type, as long as they are few numbers."""
    batch: list[Tensor] = []
    for t in tensors:
        room = sum(b.numel() for b in batch) + t.numel() <= BUCKET
        if batch and not (
            room and t.dtype == batch[0].dtype and t.device == batch[0].device
        ):
            yield batch
            batch = []
        batch.append(t)
    if batch:
        yield batch


def team_of(strategy: str | None, module: nn.Module | None) -> Team:
    """The ranks of a module: those of its DistributedDataParallel, or all of them."""
    if strategy not in (None, "local", *STRATEGIES):
        raise ValueError(
            f"unknown strategy {strategy!r}; there are 'local' (one process), 'shared', 'block' and 'lagged'"
        )
    wrapped = isinstance(module, nn.parallel.DistributedDataParallel)
    group: Any = module.process_group if wrapped else None  # type: ignore[union-attr]
    meshes = (
        []
        if module is None
        else list(
            dict.fromkeys(
                _mesh(p) for p in module.parameters() if hasattr(p, "device_mesh")
            )
        )
    )
    if len(meshes) > 1:
        raise RuntimeError(
            f"the parameters lie on {len(meshes)} device meshes: SENG works with one"
        )
    there = dist.is_available() and dist.is_initialized()
    for mesh in meshes:
        if mesh.ndim == 1:
            group = mesh.get_group()
        elif mesh.size() != dist.get_world_size():
            raise RuntimeError(
                f"the device mesh {mesh} has not all of the {dist.get_world_size()} ranks: SENG works with all"
            )
    size = dist.get_world_size(group) if there else 1
    if size == 1:  # a shared basis of one rank, or the mean over it, is its own
        return Team(
            "shared" if meshes else "lagged" if strategy == "lagged" else "local"
        )
    if strategy == "local":
        if wrapped or meshes:
            raise RuntimeError(
                f"strategy='local' is one process, and this network is trained by {size}: ranks with curvatures of their own "
                "would drift apart; leave strategy out, and they share one"
            )
        return Team()  # networks that have nothing to do with each other
    return Team(strategy or "shared", size, dist.get_rank(group), group)  # type: ignore[arg-type]


def _mesh(p: Any) -> Any:
    return p.device_mesh


@dataclass(frozen=True)
class Census:
    """What the ranks have captured for a refresh."""

    totals: list[int]  # B of every rank
    half: bool  # whether any of it is in half precision
    counts: list[
        list[int]
    ]  # by rank and site: 1 + captured samples, 0 where none were, −1 where dimension 0 is not the sample
    kappas: list[list[int]]  # and positions

    def of(self, site: int) -> list[int]:
        """Samples of a site on each rank."""
        return [max(0, line[site] - 1) for line in self.counts]

    def captured(self, site: int) -> bool:
        """Whether any rank's backward reached it."""
        return any(line[site] > 0 for line in self.counts)

    def kappa(self, site: int) -> int:
        return max(line[site] for line in self.kappas)

    def mismatch(self, site: int) -> str | None:
        """Why it cannot be covered, if another rank found out."""
        at = [rank for rank, line in enumerate(self.counts) if line[site] < 0]
        return (
            f"on rank {at[0]} dimension 0 of its input is not the sample"
            if at
            else None
        )


def census(
    team: Team,
    step: int,
    dampings: int,
    total: int,
    half: bool,
    counts: list[int],
    kappas: list[int],
    device: torch.device,
) -> Census:
    """What all of them have captured; ranks that are at different steps, or have other dampings, are refused."""
    rows = team.gathered(
        [step, dampings, total, int(half), *counts, *kappas],
        device,
        f"the refresh at step {step}",
    )
    steps = [row[0] for row in rows]
    if len(set(steps)) > 1:
        raise RuntimeError(
            f"the ranks refresh their curvature at different steps: {steps}; each must take the same steps"
        )
    other = [rank for rank, row in enumerate(rows) if row[1] != rows[0][1]]
    if other:
        raise RuntimeError(
            f"the dampings of rank {other[0]} are not those of rank 0 at step {step}: all ranks need the same"
        )
    counted, positions = (
        [row[4 : 4 + len(counts)] for row in rows],
        [row[4 + len(counts) :] for row in rows],
    )
    return Census(
        [row[2] for row in rows], any(row[3] for row in rows), counted, positions
    )


def check_alike(
    team: Team, account: dict[str, Any], own: dict[str, Any]
) -> list[dict[str, Any]]:
    """What each rank has of its `own`; refused where their accounts of themselves differ."""
    told = team.told((account, own), "meeting the other ranks")
    first = told[0][0]
    for rank, (other, _) in enumerate(told):
        for key, value in other.items():
            if value != first[key]:
                raise ValueError(
                    f"rank {rank} differs from rank 0 in its {key}: {_first_difference(value, first[key])}; all ranks "
                    "build the same network and the same optimizer"
                )
    return [theirs for _, theirs in told]


def _first_difference(ours: Any, theirs: Any) -> str:
    if isinstance(ours, list) and isinstance(theirs, list):
        pairs = [(a, b) for a, b in zip(ours, theirs, strict=False) if a != b]
        return (
            f"{pairs[0][0]} where rank 0 has {pairs[0][1]}"
            if pairs
            else f"{len(ours)} where rank 0 has {len(theirs)}"
        )
    return f"{ours} where rank 0 has {theirs}"


def check_weights(team: Team, params: Sequence[Tensor]) -> None:
    """Ranks that start from different weights would train different networks."""
    own = torch.stack([bits(p.detach()).to(params[0].device) for p in params]).sum()[
        None
    ]
    rows = team.gathered(own, params[0].device, "comparing weights")
    other = [rank for rank, row in enumerate(rows) if row != rows[0]]
    if other:
        raise RuntimeError(
            f"the weights of rank {other[0]} are not those of rank 0: wrap the network in DistributedDataParallel, which makes "
            "them alike, or seed all ranks alike before it is built"
        )


def bits(t: Tensor) -> Tensor:
    """A number () that tells tensors apart that differ anywhere, but for the rare case; whatever the order of summation."""
    flat = (
        t.contiguous().as_strided((t.numel(),), (1,)).view(torch.uint8)
    )  # a single number may have any stride
    words = (
        flat.view(torch.int32)
        if flat.numel() % 4 == 0 and flat.storage_offset() % 4 == 0
        else flat
    )
    return words.sum(dtype=torch.int64)
