"""docs/compatibility.md: every situation works or is refused with a message, and the table is what happened.

`python tests/test_compatibility.py` writes the table; the last test fails when it is not up to date.
"""

import importlib
import re
from pathlib import Path

import pytest
import torch
from situations import SITUATIONS, outcome

for _name in (
    "precision",
    "compiled",
    "autograd",
    "models",
    "options",
    "checkpoints",
    "processes",
    "frameworks",
):
    importlib.import_module(
        f"situations.{_name}"
    )  # registers its own, in this order
DOCS = Path(__file__).parent.parent / "docs" / "compatibility.md"

HEAD = """# Compatibility

Every situation below is run by the tests. It works, or it is refused with a message; there is no third outcome. "Told" is the
warning or the message that the user gets: parameters that take the plain gradient are told of, and `strict=True` refuses them.

Written by `python tests/test_compatibility.py` from what happened; a test fails when it is not up to date. GPU situations are
in `tests/test_gpu.py`.
"""


def table() -> str:
    lines = [HEAD]
    for group in dict.fromkeys(s.group for s in SITUATIONS):
        lines += [
            f"## {group}",
            "",
            "| situation | outcome | told |",
            "|---|---|---|",
        ]
        for s in (s for s in SITUATIONS if s.group == group):
            what, told = outcome(s)
            told = re.sub(
                r"cosine [-\d.]+", "cosine …", told.replace("|", "·")
            )
            lines.append(f"| {s.title} | {what} | {told} |")
        lines.append("")
    count = {
        what: sum(outcome(s)[0] == what for s in SITUATIONS)
        for what in ("works", "refused")
    }
    lines.append(
        f"{len(SITUATIONS)} situations: {count['works']} work, {count['refused']} are refused."
    )
    return "\n".join(lines) + "\n"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("s", SITUATIONS, ids=lambda s: s.title)
def test_it_works_or_is_refused_with_a_message(s):
    what, told = outcome(s)
    assert what == "works" or len(told) > 20


def test_there_are_enough_and_each_once():
    assert len(SITUATIONS) >= 40 and len({s.title for s in SITUATIONS}) == len(
        SITUATIONS
    )


@pytest.mark.filterwarnings("ignore")
def test_the_table_in_the_docs_is_what_happens():
    assert DOCS.read_text() == table(), (
        "run python tests/test_compatibility.py"
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    DOCS.write_text(table())
