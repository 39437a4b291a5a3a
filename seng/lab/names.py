"""One sentence for a name that nobody knows: what may have been meant, and what there is."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def unknown(said: str, name: str, known: Iterable[str]) -> str:
    """`said` 'name': did you mean …? there are …"""
    listed = list(known)
    near = get_close_matches(name.lower(), listed, 2, 0.4)
    meant = f" did you mean {' or '.join(near)}?" if near else ""
    return f"{said} {name!r}:{meant} there are {', '.join(listed)}"
