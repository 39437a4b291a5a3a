"""Every example runs to its end and learns."""

import re
import runpy
from pathlib import Path

import pytest
import torch

import seng

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))
# An untrained network has 2.30 on the digits; on the licence's text 4.85, and the frequencies of its letters alone give 3.07.
FRAMEWORKS = {
    "lightning_module": 0.4,
    "accelerate_loop": 0.45,
    "hf_trainer": 2.6,
}
LOSSES = {
    "quickstart": 0.2,
    "hf_layers": 3.0,
    "diagnostics": 0.6,
    "attach_adamw": 1.0,
    "own_layer": 0.5,
    "paper_setting": 2.3,
    **FRAMEWORKS,
}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(path, capsys):
    torch.set_default_dtype(torch.float32)
    kinds = dict(seng.layers.kinds.KINDS)
    try:
        runpy.run_path(str(path), run_name="__main__")
    finally:
        seng.layers.kinds.KINDS.clear()
        seng.layers.kinds.KINDS.update(kinds)
    final = float(
        re.search(r"final loss ([\d.]+)", capsys.readouterr().out).group(1)
    )
    assert final < LOSSES[path.stem]
    assert (
        len(path.read_text().splitlines()) <= 70
    )  # an example is read at one sitting


def test_the_readme_names_both_commands_and_every_public_name():
    text = (Path(__file__).parent.parent / "README.md").read_text()
    assert "make demo" in text and "make test" in text
    for name in (
        "seng.SENG(",
        "seng.attach(",
        "seng.explain(",
        "seng.Curvature(",
        "seng.schedules",
        "seng.sketch",
    ):
        assert name in text
