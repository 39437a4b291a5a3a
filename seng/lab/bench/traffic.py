"""The bytes that this rank hands to its process groups, by kind of collective.

Every collective of torch.distributed, whoever starts it (its Python functions, the reducer of DistributedDataParallel in C++,
FSDP2, DTensor), is an operator of torch's dispatcher on its way to the backend, gloo or NCCL alike: `c10d::allreduce_` or a
functional `_c10d_functional::all_reduce`. There a dispatch mode sees its tensors. What is counted is what this rank gives:

    all_reduce, broadcast, reduce       the tensor once, on every rank that takes part
    all_gather, gather, reduce_scatter  what this rank puts in: its part, or all that is to be reduced
    all_to_all, scatter                 what this rank sends to the others, so without its own part
    send                                the tensor; its receiver counts nothing

How often a backend's algorithm moves these bytes is its own affair. A backward's threads belong to the block that started the
backward; a collective that another thread starts is not seen. Inside the block every operator passes through Python: count
there, and time elsewhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

NAMESPACES = (
    "c10d",
    "_c10d_functional",
    "_c10d_functional_autograd",
    "_dtensor",
)


def size(tensors: Any) -> int:
    """Bytes of all tensors in there."""
    return sum(
        t.numel() * t.element_size()
        for t in tree_leaves(tensors)
        if isinstance(t, Tensor)
    )


def group_of(given: Any) -> dist.ProcessGroup:
    """The group that an operator was given: by name, boxed or as it is."""
    if isinstance(given, str):
        return _resolve_process_group(given)  # type: ignore[arg-type, unused-ignore]
    return (
        dist.ProcessGroup.unbox(given)
        if isinstance(given, torch.ScriptObject)
        else given
    )


def to_others(tensor: Tensor, splits: Sequence[int], group: Any) -> int:
    """Bytes of an input that is cut along dimension 0, evenly unless `splits` says otherwise, without this rank's own part."""
    found = group_of(group)
    parts = splits or [1] * found.size()
    return (
        size(tensor) * (sum(parts) - parts[found.rank()]) // max(sum(parts), 1)
    )


def but_own(lists: Sequence[Any], group: Any) -> int:
    """Bytes of a list with one tensor for each rank; it is empty where this rank sends nothing."""
    return size(lists) - size(lists[group_of(group).rank()]) if lists else 0


def sent(kinds: Sequence[str], tensors: Sequence[Tensor]) -> int:
    """Bytes of those of a batch of messages that go out."""
    return sum(
        size(t)
        for kind, t in zip(kinds, tensors, strict=True)
        if kind == "isend"
    )


Rule = tuple[
    str, Callable[..., int]
]  # the kind, and the bytes that this rank gives, from the operator's arguments


def first(x: Any, *_: Any) -> int:
    """The tensors stand first."""
    return size(x)


def second(_: Any, x: Any, *__: Any) -> int:
    """The results stand first, then what is given."""
    return size(x)


RULES: Mapping[str, Rule] = {
    "allreduce_": ("all_reduce", first),
    "allreduce_coalesced_": ("all_reduce", first),
    "broadcast_": ("broadcast", first),
    "reduce_": ("reduce", first),
    "allgather_": ("all_gather", second),
    "_allgather_base_": ("all_gather", second),
    "allgather_coalesced_": ("all_gather", second),
    "allgather_into_tensor_coalesced_": ("all_gather", second),
    "gather_": ("gather", second),
    "reduce_scatter_": ("reduce_scatter", second),
    "_reduce_scatter_base_": ("reduce_scatter", second),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", second),
    "scatter_": (
        "scatter",
        lambda _, x, group, *__: but_own(x[0] if x else x, group),
    ),
    "alltoall_": ("all_to_all", lambda _, x, group, *__: but_own(x, group)),
    "alltoall_base_": (
        "all_to_all",
        lambda _, x, group, __, splits, *___: to_others(x, splits, group),
    ),
    "send": ("send", first),
    # the functional ones
    "all_reduce": ("all_reduce", first),
    "all_reduce_": ("all_reduce", first),
    "all_reduce_coalesced": ("all_reduce", first),
    "all_reduce_coalesced_": ("all_reduce", first),
    "broadcast": ("broadcast", first),
    "all_gather_into_tensor": ("all_gather", first),
    "all_gather_into_tensor_out": ("all_gather", first),
    "all_gather_into_tensor_coalesced": ("all_gather", first),
    "reduce_scatter_tensor": ("reduce_scatter", first),
    "reduce_scatter_tensor_out": ("reduce_scatter", first),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", first),
    "all_to_all_single": (
        "all_to_all",
        lambda x, _, splits, group: to_others(x, splits, group),
    ),
    "shard_dim_alltoall": (
        "all_to_all",
        lambda x, _, __, group: to_others(x, (), group),
    ),
    "isend": ("send", first),
    "batch_p2p_ops": (
        "send",
        lambda kinds, _, __, tensors, *___: sent(kinds, tensors),
    ),
}
SILENT = frozenset(  # nothing of this rank's travels
    (
        "barrier",
        "monitored_barrier_",
        "recv_",
        "recv_any_source_",
        "irecv",
        "wait_tensor",
        "_wrap_tensor_autograd",
        "check_for_nan",
    )
)


class Traffic(TorchDispatchMode):
    """Counts while its block runs: `with Traffic() as traffic: step()`, then `traffic.bytes`, `traffic.by_kind`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.by_kind: Counter[str] = Counter()
        self.messages: Counter[str] = (
            Counter()
        )  # how many collectives of a kind were started

    @property
    def bytes(self) -> int:
        """Of all kinds."""
        return self.by_kind.total()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # a DTensor's turn: it becomes collectives of plain tensors, which come here
        if (
            func.namespace in NAMESPACES
            and (name := func._schema.name.partition("::")[2]) not in SILENT
        ):
            if name not in RULES:
                raise NotImplementedError(
                    f"Traffic does not know how many bytes {func} sends: give it a rule in {__name__}"
                )
            kind, given = RULES[name]
            self.by_kind[kind] += given(*args)
            self.messages[kind] += 1
        return func(*args, **(kwargs or {}))
