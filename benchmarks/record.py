"""What every measurement carries: the command, the commit, the machine and the versions that made it."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import seng


def _command() -> str:
    """The command line, without the place where the file was put."""
    words = sys.argv[:]
    if "--out" in words:
        at = words.index("--out")
        del words[at : at + 2]
    return " ".join(["python", *words])


def _commit() -> str:
    """The commit, marked where the tree differs from it; a machine without the history is told by SENG_COMMIT."""
    told = os.environ.get("SENG_COMMIT")
    if told:
        return told
    git = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return git.stdout.strip() or "unknown"


def write(path: Path, setting: str, rows: Any) -> None:
    """Write a result with all it takes to make it again."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{platform.machine()} CPU"
    result = {
        "command": _command(),
        "commit": _commit(),
        "machine": f"{device}, {torch.get_num_threads()} threads",
        "versions": {"torch": torch.__version__, "python": platform.python_version(), "seng": seng.__version__},
        "setting": setting,
        "rows": rows,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(path.read_text())
