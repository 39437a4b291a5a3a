"""Layers' states as nested dictionaries of tensors, and back.

Any checkpoint format can hold them, and `weights_only=True` loads them. The key of a tensor is its
field's name. A nested value has the key `field:Type`, which tells its form. A single number has the
key `field()` and is kept as a row of one, since torch.distributed.checkpoint loses tensors without
dimensions.
"""

from __future__ import annotations

import os
import re
from collections import ChainMap
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from seng.distributed.sharded import (
    Place,
    from_parts,
    parts_of,
    spread_basis,
)
from seng.layers.sites import Segments, Site, whole
from seng.linalg import centred, implicit, lookup, operators, sketch
from seng.linalg.operators import HALF, Merged
from seng.metrics import factor
from seng.metrics.metric import STATES, Metric

# Where the type of a nested value is found by its name: states, operators, sketches, factors.
MODULES = operators, centred, implicit, lookup, sketch, factor
TYPES = ChainMap[str, Any](STATES, *map(vars, MODULES))

IS = "is"  # in every nested value, so that one without fields is there too


def pack(name: str, value: Any, device: torch.device) -> dict[str, Any]:
    """A value as an entry of that name, tensors on one device."""
    if is_dataclass(value):
        inside = {IS: torch.ones(1, dtype=torch.bool, device=device)}
        for f in fields(value):
            saved = f.init and f.metadata.get("saved", True)
            entry = getattr(value, f.name)
            if saved and entry is not None:
                inside |= pack(f.name, entry, device)
        return {f"{name}:{type(value).__name__}": inside}
    if isinstance(value, float):  # its bits: no change of precision touches it
        number = torch.tensor(value, dtype=torch.float64, device="cpu")
        value = number.view(torch.int64)
    tensor = torch.as_tensor(value, device=device)
    return {name: tensor} if tensor.dim() else {f"{name}()": tensor[None]}


def unpack(
    name: str,
    state: Mapping[str, Any],
    device: torch.device,
    dtype: torch.dtype,
) -> Any:
    """The value that `pack` was given, on another device or in another precision.

    None where nothing has that name, or its type is not known here.
    """
    key = next((k for k in state if k.startswith(f"{name}:")), "")
    kind = TYPES.get(key.removeprefix(f"{name}:"))
    if kind is None:
        return None
    inside = state[key]
    values: dict[str, Any] = {}
    for f in fields(kind):
        single = inside.get(f"{f.name}()")
        tensor = inside.get(f.name) if single is None else single[0]
        if tensor is None:
            found = unpack(f.name, inside, device, dtype)
        else:
            cast = f.metadata.get("cast", True)
            found = _value(
                tensor, str(f.type), device, dtype if cast else None
            )
        if found is not None:
            values[f.name] = found
    return kind(**values)


def _value(
    tensor: Tensor,
    kind: str,
    device: torch.device,
    dtype: torch.dtype | None,
) -> Any:
    """A field of this type, as it is written or as Python has it; None: in its own precision."""
    if "Tensor" in kind:
        cast = tensor.is_floating_point() and tensor.dtype not in HALF
        # On a GPU states are written to in place: not to what was loaded.
        return tensor.to(device, dtype if cast else None, copy=tensor.is_cuda)
    if kind in ("float", str(float)):
        return tensor.cpu().view(torch.float64).item()
    plain = tensor.tolist()
    return tuple(plain) if isinstance(plain, list) else plain


# The keys that lead to curvature: of nested entries, and of flattened ones.
OURS = re.compile(r"seng|state\..*\.seng\..*")


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
    from torch.distributed.checkpoint._traverse import set_element
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    metadata = FileSystemReader(checkpoint).read_metadata()
    _forget(state)
    for key, path in (metadata.planner_data or {}).items():
        entry = metadata.state_dict_metadata[key]
        ours = any(OURS.fullmatch(str(part)) for part in path)
        if ours and isinstance(entry, TensorStorageMetadata):
            room = torch.empty(entry.size, dtype=entry.properties.dtype)
            set_element(state, path, room)


def _forget(state: dict[Any, Any]) -> None:
    """Take out the curvature of an optimizer that has stepped, whose shapes may be others."""
    for key, value in list(state.items()):
        if OURS.fullmatch(str(key)):
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
        entry["parts"] = {str(i): part for i, part in enumerate(parts)}
        empty = Merged.of(state.U.Y[:0, :0], (1, 1, 0))
        state = replace(state, U=empty)
    return entry | pack("state", state, device)


def load_record(
    record: Any, site: Site, entry: Mapping[str, Any], metric: Metric
) -> None:
    """Restore it; a state that does not fit starts afresh at the next refresh."""
    record.owed = bool(entry.get("owed"))
    if entry.get("refused"):
        record.refused = "as before the checkpoint"
    on = entry.get("active", [])
    if len(on) != len(site.segments):
        return
    active = tuple(compress(site.segments, on))
    state = unpack("state", entry, site.lead.device, site.dtype)
    if state is not None:
        state = _placed(state, site, active, entry.get("parts"))
        shape = site.shape(active)
        if state is None or not state.fits(shape):
            return
        state = metric.accepts(state, site.convolution)
    if state is None:  # another metric's, or of a type unknown here
        record.other = True
    else:
        record.state = state
        record.active = active


def _placed(state: Any, site: Site, active: Segments, parts: Any) -> Any:
    """The state with U whole or spread as the parameters are now; None where it does not fit."""
    if parts is None:
        if not site.sharded or not state.columns:
            return state
        U = spread_basis(site, active, state.U.explicit().U.T)
    else:
        params = [s.param for s in active]
        bases = [parts[str(i)] for i in range(len(parts))]
        if [part.shape[:-1] for part in bases] != [p.shape for p in params]:
            return None
        U = _together(bases, params, site, active)
    changes = {"U": U}
    if getattr(state, "P", None) is not None:  # it lies where U does
        place = Place(site, active) if site.sharded else None
        changes["P"] = replace(state.P, place=place)
    return replace(state, **changes)


def _together(
    bases: list[Tensor], params: list[Any], site: Site, active: Segments
) -> Any:
    """U from the parts of its parameters, spread as they are."""
    if site.sharded:
        return from_parts(bases, params, site.dtype)

    def row(*column: Tensor) -> Tensor:
        tensors = dict(zip(params, column, strict=True))
        return site.gather(active, tensors, site.dtype)

    device = site.lead.device
    Y = torch.vmap(row, -1)(*[whole(part).to(device) for part in bases])
    return spread_basis(site, active, Y)
