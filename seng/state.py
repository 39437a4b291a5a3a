"""Blocks as flat dictionaries of tensors and back: any checkpoint format can hold them, and `weights_only=True` loads them.

A field of tensors is `prefix.field`; a nested value is `prefix.field:Type.…`, so that the key tells which form it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

import torch
from torch import Tensor

from seng.operators import Explicit, Implicit, Independent, Lookup, Merged
from seng.sketch import Buckets, Dense, Identity, KroneckerSample, RowSample

NESTED: tuple[type, ...] = (
    *(Explicit, Implicit, Independent, Lookup, Merged),
    *(Buckets, Dense, Identity, KroneckerSample, RowSample),
)
TYPES = {t.__name__: t for t in NESTED}

T = TypeVar("T")


def pack(prefix: str, value: Any) -> dict[str, Tensor]:
    """A dataclass of tensors, numbers and nested values as flat tensors."""
    out: dict[str, Tensor] = {}
    for f in fields(value):
        entry = getattr(value, f.name)
        key = f"{prefix}.{f.name}"
        if not f.init:
            continue
        if isinstance(entry, NESTED):
            key = f"{key}:{type(entry).__name__}"
            out |= {key: torch.tensor(True)} | pack(key, entry)
        else:
            out[key] = entry if isinstance(entry, Tensor) else torch.tensor(entry)
    return out


def unpack(prefix: str, state: Mapping[str, Tensor], kind: type[T], device: torch.device, dtype: torch.dtype) -> T:
    """The value that `pack` was given, on another device or in another precision if need be."""
    values: dict[str, Any] = {}
    for f in fields(kind):  # type: ignore[arg-type]
        key = f"{prefix}.{f.name}"
        if not f.init:
            continue
        if key not in state:
            nested = next(k for k in state if k.startswith(f"{key}:") and "." not in k[len(key) :])
            values[f.name] = unpack(nested, state, TYPES[nested.rsplit(":")[-1]], device, dtype)
        elif f.type == "Tensor":
            tensor = state[key]
            values[f.name] = tensor.to(device, dtype) if tensor.is_floating_point() else tensor.to(device)
        else:
            plain = state[key].tolist()
            values[f.name] = tuple(plain) if isinstance(plain, list) else plain
    return kind(**values)
