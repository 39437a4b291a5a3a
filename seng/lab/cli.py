"""The command `seng`: one word says what to do, and each of them has its own `--help`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from seng.lab.names import unknown

COMMANDS = {  # word -> the module and the function in it that does it, and what it does
    "demo": (
        "seng.lab.demo",
        "main",
        "SENG, SGD, Adam and K-FAC train a small network side by side, in half a minute",
    ),
    "train": (
        "seng.lab.compare",
        "main_train",
        "train one optimizer on a task",
    ),
    "compare": (
        "seng.lab.compare",
        "main",
        "train several optimizers on a task, each with several seeds",
    ),
    "tune": (
        "seng.lab.tuning.command",
        "main",
        "search for each optimizer's recipe, with equal budgets",
    ),
    "report": (
        "seng.lab.report.command",
        "main",
        "one page with all results, and pictures of them",
    ),
    "reproduce": (
        "seng.lab.reproduce",
        "main",
        "the paper's tables with ours beside them",
    ),
    "data": ("seng.lab.datasets.command", "main", "get a data set, verified"),
    "bench": (
        "seng.lab.bench.command",
        "main",
        "time, memory and quality of a SENG step beside SGD, AdamW, Muon and K-FAC",
    ),
    "theory": (
        "seng.lab.theory.command",
        "main",
        "the paper's theorems, run: a verdict and a picture for each",
    ),
    "scale": (
        "seng.lab.scale",
        "main",
        "a projection of step time and scaling efficiency to 8–4096 GPUs",
    ),
}

HELP = "\n".join(
    [
        "usage: seng COMMAND [options]; seng COMMAND --help says which",
        "",
        *(f"  {word:11}{what}" for word, (_, _, what) in COMMANDS.items()),
    ]
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Hand the rest of the line to the command."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help"):
        print(HELP)
        return
    if words[0] not in COMMANDS:
        sys.exit(unknown("seng: there is no command", words[0], COMMANDS))
    module, function, _ = COMMANDS[words[0]]
    try:
        found = import_module(module)
    except ImportError as missing:
        sys.exit(
            f"seng {words[0]}: {missing.name} is missing: pip install 'seng[lab]'"
        )
    getattr(found, function)(words[1:])
