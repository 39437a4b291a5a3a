"""What every measurement carries: the command, the commit, the machine and the versions that made it."""

from __future__ import annotations

import os
import platform
import subprocess
from functools import cache
from typing import Any

import torch

import seng


@cache
def commit() -> str:
    """The commit, marked where the tree differs from it; a machine without the history is told by SENG_COMMIT."""
    told = os.environ.get("SENG_COMMIT")
    if told:
        return told
    here = os.path.dirname(
        os.path.abspath(__file__)
    )  # not where the results go
    try:
        git = subprocess.run(
            ["git", "describe", "--always", "--dirty"],
            capture_output=True,
            text=True,
            check=False,
            cwd=here,
        )
    except FileNotFoundError:  # no git on this machine
        return "unknown"
    return git.stdout.strip() or "unknown"


def provenance(command: str, device: torch.device) -> dict[str, Any]:
    """For the head of a result."""
    name = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"{platform.machine()} CPU"
    )
    versions = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "seng": seng.__version__,
    }
    if device.type == "cuda":
        versions["cuda"] = str(torch.version.cuda)
    return {
        "command": command,
        "commit": commit(),
        "machine": f"{name}, {os.cpu_count()} CPUs, {torch.get_num_threads()} threads",
        "versions": versions,
    }
