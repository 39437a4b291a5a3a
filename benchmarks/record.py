"""Write a result with all it takes to make it again: see `seng.lab.record`."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import torch

from seng.lab.record import provenance


def command() -> str:
    """The command line, without the place where the file was put."""
    words = sys.argv[:]
    if "--out" in words:
        at = words.index("--out")
        del words[at : at + 2]
    return shlex.join(["python", *words])


def write(path: Path, setting: str, rows: Any) -> None:
    """Write and show it."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        json.dumps(
            {
                **provenance(command(), device),
                "setting": setting,
                "rows": rows,
            },
            indent=1,
        )
        + "\n"
    )
    print(path.read_text())
