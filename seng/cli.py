"""The command `seng`: one word says what to do, and each of them has its own `--help`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module

COMMANDS = {  # word -> the module whose main(arguments) does it, and what it does
    "bench": ("seng.lab.bench.command", "time, memory and quality of a SENG step beside SGD, AdamW, Muon and K-FAC"),
    "demo": ("seng.lab.demo", "SENG, SGD and Adam train a small network side by side, in half a minute"),
}

HELP = "\n".join(
    [
        "usage: seng COMMAND [options]; seng COMMAND --help says which",
        "",
        *(f"  {word:8}{what}" for word, (_, what) in COMMANDS.items()),
    ]
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Hand the rest of the line to the command."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help"):
        print(HELP)
        return
    if words[0] not in COMMANDS:
        near = get_close_matches(words[0], COMMANDS, 1, 0.5)
        meant = f", did you mean {near[0]}?" if near else "."
        sys.exit(f"seng: there is no command {words[0]!r}{meant} There are: {', '.join(COMMANDS)}")
    try:
        module = import_module(COMMANDS[words[0]][0])
    except ImportError as missing:
        sys.exit(f"seng {words[0]}: {missing.name} is missing: pip install 'seng[lab]'")
    module.main(words[1:])
