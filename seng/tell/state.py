"""Blocks as nested dictionaries of tensors and back: any checkpoint format can hold them, and `weights_only=True` loads them.

A tensor is its field's name; a nested value is `field:Type`, so that the key tells which form it was; a single number is
`field()`, kept as one of a row since torch.distributed.checkpoint loses tensors without dimensions.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, TypeVar

import torch
from torch import Tensor

from seng.linalg.implicit import Implicit, Independent
from seng.linalg.lookup import Lookup
from seng.linalg.operators import HALF, Explicit, Merged
from seng.linalg.sketch import Buckets, Dense, Identity, KroneckerSample, RowSample
from seng.linalg.windows import Windows
from seng.metrics.base import Diagonal, Kronecker
from seng.metrics.factor import Factor

NESTED: tuple[type, ...] = (
    *(Explicit, Implicit, Independent, Lookup, Merged, Windows),
    *(Buckets, Dense, Identity, KroneckerSample, RowSample),
    *(Diagonal, Factor, Kronecker),
)
TYPES = {t.__name__: t for t in NESTED}
IS = "is"  # in every nested value, so that one without fields is there too

T = TypeVar("T")


def pack(value: Any, device: torch.device) -> dict[str, Any]:
    """A dataclass of tensors, numbers and nested values as tensors on one device."""
    out: dict[str, Any] = {}
    for f in fields(value):
        entry = getattr(value, f.name)
        if not f.init or entry is None:
            continue
        if isinstance(entry, NESTED):
            out[f"{f.name}:{type(entry).__name__}"] = {
                IS: torch.ones(1, dtype=torch.bool, device=device)
            } | pack(entry, device)
            continue
        tensor = entry if isinstance(entry, Tensor) else _number(entry, device)
        out |= {f.name: tensor} if tensor.dim() else {f"{f.name}()": tensor[None]}
    return out


def _number(entry: Any, device: torch.device) -> Tensor:
    """A number or several; a float by its bits, which no tool that changes precisions touches."""
    if isinstance(entry, float):
        return (
            torch.tensor(entry, dtype=torch.float64, device="cpu")
            .view(torch.int64)
            .to(device)
        )
    return torch.tensor(entry, device=device)


def unpack(
    state: Mapping[str, Any], kind: type[T], device: torch.device, dtype: torch.dtype
) -> T:
    """The value that `pack` was given, on another device or in another precision if need be."""
    if kind is Merged and "Q" in state:  # before 0.2 it was U = Q diag(√eigenvalues)
        Y = (state["Q"] * state["eigenvalues"].sqrt()).T.contiguous()
        state = {**state, "Y": Y, "scale": torch.ones((), dtype=Y.dtype)}
    values: dict[str, Any] = {}
    for f in fields(kind):  # type: ignore[arg-type]
        if not f.init:
            continue
        single = state.get(f"{f.name}()")
        tensor = state.get(f.name) if single is None else single[0]
        key = next((k for k in state if k.startswith(f"{f.name}:")), None)
        if tensor is None and key is None and f.default is not MISSING:
            continue  # a field that is younger than the checkpoint
        if tensor is None:
            assert key is not None, f"the checkpoint has no {f.name}"
            values[f.name] = unpack(state[key], TYPES[key.split(":")[1]], device, dtype)
        elif f.type == "Tensor":
            cast = tensor.is_floating_point() and tensor.dtype not in HALF
            # On a GPU blocks are written to in place: not to what was loaded.
            values[f.name] = tensor.to(
                device, dtype if cast else None, copy=tensor.is_cuda
            )
        elif f.type == "float":
            values[f.name] = tensor.cpu().view(torch.float64).item()
        else:
            plain = tensor.tolist()
            values[f.name] = tuple(plain) if isinstance(plain, list) else plain
    return kind(**values)


def nested(state: Mapping[str, Any]) -> dict[str, Any]:
    """Keys joined by dots, as older checkpoints have them, taken apart; keys without dots stay as they are."""
    out: dict[str, Any] = {}
    for key, value in state.items():
        *path, last = key.split(".")
        node = out
        for part in path:
            if not isinstance(node.get(part), dict):
                node[part] = {IS: node[part]} if part in node else {}
            node = node[part]
        node[last] = value
    return out


def expect_curvature(state: dict[str, Any], checkpoint: str | os.PathLike[str]) -> None:
    """Make room in `state` for the curvature that a torch.distributed.checkpoint folder holds, before `dcp.load(state, …)`.

    It loads only what is there already, and an optimizer that has not stepped does not know the shapes of its curvature:

    state = {"model": model_state, "optim": optim_state}     # from get_state_dict(model, opt)
    seng.expect_curvature(state, folder)
    dcp.load(state, checkpoint_id=folder)
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    metadata = FileSystemReader(checkpoint).read_metadata()
    _forget(state)
    for key, path in (metadata.planner_data or {}).items():
        entry = metadata.state_dict_metadata[key]
        if not isinstance(entry, TensorStorageMetadata) or not _ours(path):
            continue
        node: Any = state
        for part in path[:-1]:
            node = node.setdefault(part, {})
        node.setdefault(path[-1], torch.empty(entry.size, dtype=entry.properties.dtype))


def _ours(path: tuple[Any, ...]) -> bool:
    """Whether a path into a checkpoint leads to curvature, nested or flattened."""
    return any(
        part == "seng"
        or (isinstance(part, str) and part.startswith("state.") and ".seng." in part)
        for part in path
    )


def _forget(state: dict[Any, Any]) -> None:
    """Take out the curvature of an optimizer that has stepped, whose shapes may be others."""
    for key, value in list(state.items()):
        if _ours((key,)):
            del state[key]
        elif isinstance(value, dict):
            _forget(value)
