"""A site's block as tensors for a checkpoint, and back; a basis that is spread over ranks is one DTensor per parameter, so that
torch.distributed.checkpoint can spread it over any other number of them. A whole basis loads where parameters are spread, and
a spread one where they are whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from seng.distributed.sharded import Sharded, from_parts, parts_of, whole
from seng.layers.sites import Segment, Site
from seng.linalg.operators import Merged
from seng.linalg.sketch import Identity
from seng.metrics.block import Block
from seng.tell.state import pack, unpack

PARTS = "parts"


def pack_block(site: Site, active: tuple[Segment, ...], block: Block) -> dict[str, Any]:
    """A block as tensors."""
    device = site.lead.device
    if not isinstance(block.U, Sharded):
        return pack(block, device)
    parts = parts_of(block.U, [s.param for s in active])
    rest = pack(replace(block, U=Identity()), device)  # type: ignore[arg-type]
    return rest | {PARTS: {str(i): part for i, part in enumerate(parts)}}


def unpack_block(
    site: Site, active: tuple[Segment, ...], entry: Mapping[str, Any]
) -> Block | None:
    """The block, whole or spread as the parameters are now; None where it is one of other parameters."""
    params = [s.param for s in active]
    block = unpack(
        {k: v for k, v in entry.items() if k != PARTS},
        Block,
        site.lead.device,
        site.dtype,
    )
    if PARTS not in entry:
        if block.U.shape != site.shape(active):
            return None
        if (
            not site.sharded or block.base is not None
        ):  # a base is not spread, and so not kept either
            return block
        return replace(block, U=site.spread(active, block.U.explicit().U.T))
    parts = [entry[PARTS][str(i)] for i in range(len(entry[PARTS]))]
    if [part.shape[:-1] for part in parts] != [p.shape for p in params]:
        return None
    if site.sharded:
        return replace(block, U=from_parts(parts, params, site.dtype))
    columns = zip(
        *(whole(part).to(site.lead.device).unbind(-1) for part in parts), strict=True
    )
    Y = torch.stack(
        [
            site.gather(active, dict(zip(params, one, strict=True)), site.dtype)
            for one in columns
        ]
    )
    return replace(block, U=Merged.of(Y, site.shape(active)))
