"""Layers' states as nested dictionaries of tensors, and back.

Any checkpoint format can hold them, and `weights_only=True` loads them. The key of a tensor is its
field's name. A nested value has the key `field:Type`, which tells its form. A single number has the
key `field()` and is kept as a row of one, since torch.distributed.checkpoint loses tensors without
dimensions.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from seng.distributed.sharded import from_parts, parts_of, spread_basis
from seng.layers.sites import Segment, Site, whole
from seng.linalg.implicit import Implicit, Independent
from seng.linalg.lookup import Lookup
from seng.linalg.operators import HALF, Explicit, Merged
from seng.linalg.sketch import (
    Buckets,
    Dense,
    Identity,
    KroneckerSample,
    RowSample,
)
from seng.metrics.factor import Factor
from seng.metrics.metric import STATES, Metric

TYPES: dict[str, type] = {
    t.__name__: t
    for t in (
        *(Explicit, Implicit, Independent, Lookup, Merged),
        *(Buckets, Dense, Identity, KroneckerSample, RowSample, Factor),
    )
}
PARTS = "parts"
IS = "is"  # in every nested value, so that one without fields is there too


def _type(name: str) -> Any:
    """An operator, a sketch or a state; None where nobody has told of it."""
    return TYPES.get(name) or STATES.get(name)


def pack(name: str, value: Any, device: torch.device) -> dict[str, Any]:
    """A value as an entry of that name, tensors on one device."""
    if _type(type(value).__name__) is type(value):
        inside = {IS: torch.ones(1, dtype=torch.bool, device=device)}
        for f in fields(value):
            saved = f.init and f.metadata.get("saved", True)
            entry = getattr(value, f.name)
            if saved and entry is not None:
                inside |= pack(f.name, entry, device)
        return {f"{name}:{type(value).__name__}": inside}
    tensor = value if isinstance(value, Tensor) else _number(value, device)
    return {name: tensor} if tensor.dim() else {f"{name}()": tensor[None]}


def _number(entry: Any, device: torch.device) -> Tensor:
    """A number or several; a float by its bits, which no change of precision touches."""
    if isinstance(entry, float):
        bits = torch.tensor(entry, dtype=torch.float64, device="cpu").view(
            torch.int64
        )
        return bits.to(device)
    return torch.tensor(entry, device=device)


def unpack(
    name: str,
    state: Mapping[str, Any],
    device: torch.device,
    dtype: torch.dtype,
) -> Any:
    """The value that `pack` was given, on another device or in another precision."""
    key = next((k for k in state if k.startswith(f"{name}:")), None)
    kind = None if key is None else _type(key.split(":")[1])
    if key is None or kind is None:
        return None
    inside = state[key]
    values: dict[str, Any] = {}
    for f in fields(kind):
        found = unpack(f.name, inside, device, dtype)
        single = inside.get(f"{f.name}()")
        tensor = inside.get(f.name) if single is None else single[0]
        if tensor is not None:
            found = _value(tensor, _annotation(f.type), device, dtype)
        if found is not None:
            values[f.name] = found
    return kind(**values)


def _annotation(kind: Any) -> str:
    """A field's type as it is written."""
    name = (
        kind if isinstance(kind, str) else getattr(kind, "__name__", str(kind))
    )
    return str(name).removeprefix("torch.")


def _value(
    tensor: Tensor, kind: str, device: torch.device, dtype: torch.dtype
) -> Any:
    """A field of this type."""
    if kind == "float":
        return tensor.cpu().view(torch.float64).item()
    if not kind.startswith("Tensor"):
        plain = tensor.tolist()
        return tuple(plain) if isinstance(plain, list) else plain
    cast = tensor.is_floating_point() and tensor.dtype not in HALF
    # On a GPU states are written to in place: not to what was loaded.
    return tensor.to(device, dtype if cast else None, copy=tensor.is_cuda)


def nested(state: Mapping[str, Any]) -> dict[str, Any]:
    """Keys joined by dots taken apart; keys without dots stay as they are."""
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


def expect_curvature(
    state: dict[str, Any], checkpoint: str | os.PathLike[str]
) -> None:
    """Make room in `state` for the curvature that a torch.distributed.checkpoint folder holds,
    before `dcp.load(state, …)`.

    It loads only what is there already, and an optimizer that has not stepped does not know the
    shapes of its curvature:

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
        node.setdefault(
            path[-1], torch.empty(entry.size, dtype=entry.properties.dtype)
        )


def _ours(path: tuple[Any, ...]) -> bool:
    """Whether a path into a checkpoint leads to curvature, nested or flattened."""
    return any(
        part == "seng"
        or (
            isinstance(part, str)
            and part.startswith("state.")
            and ".seng." in part
        )
        for part in path
    )


def _forget(state: dict[Any, Any]) -> None:
    """Take out the curvature of an optimizer that has stepped, whose shapes may be others."""
    for key, value in list(state.items()):
        if _ours((key,)):
            del state[key]
        elif isinstance(value, dict):
            _forget(value)


def save_record(record: Any, site: Site) -> dict[str, Any]:
    """A layer's part of a checkpoint."""
    entry: dict[str, Any] = {
        "owed": torch.tensor(record.owed, device="cpu"),
        "refused": torch.tensor(record.refused is not None, device="cpu"),
    }
    if record.state is None:
        return entry
    device = site.lead.device
    active = [s in record.active for s in site.segments]
    entry["active"] = torch.tensor(active, device=device)
    state = record.state
    if site.sharded:
        params = [s.param for s in record.active]
        parts = parts_of(state.U, params)
        entry[PARTS] = {str(i): part for i, part in enumerate(parts)}
        state = replace(state, U=Merged.of(state.U.U[:0, :0], (1, 1, 0)))
    return entry | pack("state", state, device)


def load_record(
    record: Any, site: Site, entry: Mapping[str, Any], metric: Metric
) -> None:
    """Restore it; a state that does not fit starts afresh at the next refresh."""
    record.owed = bool(entry.get("owed", False))
    if entry.get("refused", False):
        record.refused = "as before the checkpoint"
    on = entry["active"].tolist() if "active" in entry else []
    active = tuple(
        s for s, used in zip(site.segments, on, strict=False) if used
    )
    if not active or len(on) != len(site.segments):
        return
    state = unpack("state", entry, site.lead.device, site.dtype)
    if state is None:  # of a type that this process does not know
        record.other = True
        return
    state = _placed(state, site, active, entry.get(PARTS))
    shape = site.shape(active)
    if state is None or not state.fits(shape):
        return
    state = metric.accepts(state, shape)
    if state is None:
        record.other = True
    else:
        record.state, record.active = state, active


def _placed(
    state: Any, site: Site, active: tuple[Segment, ...], parts: Any
) -> Any | None:
    """The state with U whole or spread as the parameters are now."""
    params = [s.param for s in active]
    if parts is None:
        if site.sharded and state.columns:
            U = spread_basis(site, active, state.U.explicit().U.T)
            return replace(state, U=U)
        return state
    bases = [parts[str(i)] for i in range(len(parts))]
    if [part.shape[:-1] for part in bases] != [p.shape for p in params]:
        return None
    if site.sharded:
        return replace(state, U=from_parts(bases, params, site.dtype))
    device = site.lead.device
    columns = zip(
        *(whole(part).to(device).unbind(-1) for part in bases), strict=True
    )
    rows = []
    for one in columns:
        tensors = dict(zip(params, one, strict=True))
        rows.append(site.gather(active, tensors, site.dtype))
    return replace(state, U=Merged.of(torch.stack(rows), site.shape(active)))
