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

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from seng.layers.sites import is_sharded

BUCKET = 2**26  # bytes after which another message begins


@dataclass(frozen=True)
class Team:
    """The ranks that train one network. All of them call its methods, in the same order."""

    strategy: str = "local"  # or shared, block, lagged
    size: int = 1  # 𝓜
    rank: int = 0
    group: Any = None  # a process group; None is the default one

    many: bool = field(init=False)  # whether there are other ranks
    pools: bool = field(init=False)  # whether all samples are one curvature's
    averages: bool = field(init=False)  # whether directions are averaged

    def __post_init__(self) -> None:
        vars(self).update(
            many=self.size > 1,
            pools=self.strategy == "shared",
            averages=self.strategy in ("block", "lagged"),
        )

    def _send(
        self, what: str, collective: Callable[..., Any], *args: Any
    ) -> None:
        """Call one of torch's collectives; an error of it says what it was about."""
        if not self.many:
            return
        try:
            collective(*args, group=self.group)
        except torch.OutOfMemoryError:  # which is nobody else's doing
            raise
        except (RuntimeError, OSError) as why:
            said = str(why).strip() or type(why).__name__
            raise RuntimeError(
                f"SENG, rank {self.rank} of {self.size}: {what} did not come about; another rank "
                f"has failed, is not there, or takes other steps ({said.splitlines()[0]})"
            ) from why

    def gathered(
        self, row: Any, device: torch.device, what: str
    ) -> list[list[Any]]:
        """Every rank's integers, as they are nested."""
        own = torch.tensor([row], dtype=torch.int64, device=device)
        rows = own.repeat_interleave(self.size, 0)
        self._send(what, dist.all_gather_into_tensor, rows, own)
        return rows.tolist()

    def told(self, value: Any, what: str) -> list[Any]:
        """Every rank's value; they are small."""
        values = [value] * self.size
        self._send(what, dist.all_gather_object, values, value)
        return values

    def sum_(self, tensors: list[Tensor], what: str) -> None:
        """Each tensor becomes its sum over the ranks; small ones travel together."""
        if not self.many or not tensors:
            return
        together: Any = dist._compute_bucket_assignment_by_size  # type: ignore[attr-defined]
        for indices in together(tensors, [BUCKET])[0]:
            batch = [tensors[i] for i in indices]
            flat = _flatten_dense_tensors(batch)
            self._send(what, dist.all_reduce, flat)
            torch._foreach_copy_(batch, _unflatten_dense_tensors(flat, batch))

    def mean_(self, tensors: list[Tensor], what: str) -> None:
        """Each tensor becomes its mean over the ranks."""
        self.sum_(tensors, what)
        if tensors:
            torch._foreach_div_(tensors, self.size)

    def exchanged(
        self, sent: Tensor, to: list[int], due: list[int], what: str
    ) -> Tensor:
        """Send the next to[i] numbers to rank i, and receive due[i] numbers from it."""
        came = sent.new_empty(sum(due)) if self.many else sent
        self._send(what, dist.all_to_all_single, came, sent, due, to)
        return came

    def from_first(self, tensors: list[Tensor], what: str) -> None:
        """Each tensor becomes the first rank's: the others add zeros to it."""
        for t in tensors if self.rank else ():
            t.zero_()
        self.sum_(tensors, what)


ALONE = Team()


def team_of(strategy: str | None, module: nn.Module | None) -> Team:
    """The ranks of a module: those of its DistributedDataParallel, or all of them."""
    if strategy not in (None, "local", "shared", "block", "lagged"):
        raise ValueError(
            f"unknown strategy {strategy!r}; there are 'local' (one process), 'shared', 'block' "
            "and 'lagged'"
        )
    there = dist.is_available() and dist.is_initialized()
    mesh = _mesh(module)
    group: Any = None
    if isinstance(module, nn.parallel.DistributedDataParallel):
        group = module.process_group
    elif mesh is not None and mesh.ndim == 1:
        group = mesh.get_group()
    size = dist.get_world_size(group) if there else 1
    if size == 1:
        # A shared basis of one rank, or the mean over it, is its own.
        alone = "lagged" if strategy == "lagged" else "local"
        return Team(alone if mesh is None else "shared")
    if strategy != "local":
        return Team(strategy or "shared", size, dist.get_rank(group), group)
    if group is not None or mesh is not None:
        raise RuntimeError(
            f"strategy='local' is one process, and this network is trained by {size}: ranks with "
            "curvatures of their own would drift apart; leave strategy out, and they share one"
        )
    return ALONE  # networks that have nothing to do with each other


def _mesh(module: nn.Module | None) -> Any:
    """The device mesh on which the parameters lie, if they are spread over ranks."""
    params: Any = () if module is None else module.parameters()
    meshes = {p.device_mesh for p in params if is_sharded(p)}
    for mesh in meshes:
        size, ranks = mesh.size(), dist.get_world_size()
        if len(meshes) > 1 or (mesh.ndim > 1 and size != ranks):
            raise RuntimeError(
                f"the parameters lie on {len(meshes)} device meshes, one of {size} of the {ranks} "
                "ranks: SENG works with one mesh; of several dimensions, it has all ranks"
            )
        return mesh
