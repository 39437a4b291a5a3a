"""Lightning, Accelerate, the Hugging Face Trainer, TensorBoard."""

import contextlib
import io
import runpy
import tempfile
from pathlib import Path

import torch

import seng
from situations import as_plain, loop, mlp, sengs, situation


def framework(example):
    """The example runs to its end, and every layer of it is covered; tests/test_frameworks.py compares with the plain loop."""
    torch.set_default_dtype(torch.float32)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_path(
            str(Path(__file__).parents[2] / "examples" / f"{example}.py"),
            run_name="__main__",
        )
    printed = out.getvalue()
    kept = any(form in printed for form in ("merged", "implicit"))
    assert kept and "plain" not in printed


for title, example in (
    (
        "Lightning: configure_optimizers, accumulation, clipping, scheduler",
        "lightning_module",
    ),
    ("Accelerate: prepare, accumulate, clipping", "accelerate_loop"),
    (
        "Hugging Face Trainer: optimizers= and optimizer_cls_and_kwargs=",
        "hf_trainer",
    ),
):

    @situation("Frameworks", title)
    def _(example=example):
        framework(example)


@situation("Frameworks", "TensorBoard, by a step hook")
def _():
    from torch.utils.tensorboard import SummaryWriter

    model = mlp()
    opt = sengs(model)
    with (
        tempfile.TemporaryDirectory() as folder,
        SummaryWriter(folder) as writer,
    ):
        opt.register_step_post_hook(seng.TensorBoard(writer))
        as_plain(loop(model, opt))
        writer.flush()
        assert list(Path(folder).glob("events*"))
