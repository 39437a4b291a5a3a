"""Saving, loading, copying."""

import copy
import io
import pickle
import tempfile

import naive
import torch

import seng
from seng.tell.inspection import inspect
from situations import as_plain, batch, loop, mlp, sengs, situation


def resumed(save):
    """Six steps, a round trip through `save`, three more: as nine in a row."""
    model = mlp()
    opt = sengs(model)
    loop(model, opt, 0, 6)
    twin = mlp(1)
    other = sengs(twin)
    save(model, opt, twin, other)
    as_plain(loop(twin, other, 6, 9))


@situation(
    "Checkpoints",
    "state_dict and load_state_dict through torch.save with weights_only=True",
)
def _():
    def save(model, opt, twin, other):
        buffer = io.BytesIO()
        torch.save(
            {"model": model.state_dict(), "opt": opt.state_dict()}, buffer
        )
        buffer.seek(0)
        state = torch.load(buffer, weights_only=True)
        twin.load_state_dict(state["model"])
        other.load_state_dict(state["opt"])

    resumed(save)


for through, flat in (
    ("memory", False),
    ("memory", True),
    ("a folder, after seng.expect_curvature,", True),
):
    kind = "flattened" if flat else "nested"

    @situation(
        "Checkpoints",
        f"torch.distributed.checkpoint get and set through {through} {kind}",
    )
    def _(through=through, flat=flat):
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import (
            StateDictOptions,
            get_state_dict,
            set_state_dict,
        )

        options = StateDictOptions(flatten_optimizer_state_dict=flat)

        def save(model, opt, twin, other):
            state = dict(
                zip(
                    ("model", "optim"),
                    get_state_dict(model, opt, options=options),
                    strict=True,
                )
            )
            if through != "memory":
                with tempfile.TemporaryDirectory() as folder:
                    dcp.save(state, checkpoint_id=folder)
                    state = dict(
                        zip(
                            ("model", "optim"),
                            get_state_dict(twin, other, options=options),
                            strict=True,
                        )
                    )
                    seng.expect_curvature(state, folder)
                    dcp.load(state, checkpoint_id=folder)
            state = copy.deepcopy(state)
            model_state, optim_state = state["model"], state["optim"]
            set_state_dict(
                twin,
                other,
                model_state_dict=model_state,
                optim_state_dict=optim_state,
                options=options,
            )

        resumed(save)


@situation(
    "Checkpoints",
    "a checkpoint of torch.optim.SGD: momentum is kept, curvature built at the next step",
)
def _():
    model = mlp()
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loop(model, sgd, 0, 3)
    opt = sengs(model)
    opt.load_state_dict(sgd.state_dict())
    assert (
        opt.refresh_due and opt.state[model[0].weight]["momentum_buffer"].any()
    )
    loop(model, opt, 3, 6)
    assert len(inspect(opt).states) == 3


@situation("Checkpoints", "a checkpoint in another precision")
def _():
    model = mlp()
    opt = sengs(model)
    loop(model, opt, 0, 6)
    twin = copy.deepcopy(model).float()
    other = sengs(twin)
    other.load_state_dict(opt.state_dict())
    as_plain(loop(twin, other, 6, 9), 1e-4)


@situation(
    "Checkpoints",
    "copy.deepcopy((model, optimizer)) and pickle: copies train on, apart from the original",
)
def _():
    for clone in (
        copy.deepcopy,
        lambda pair: pickle.loads(pickle.dumps(pair)),
    ):
        model = mlp()
        opt = sengs(model)
        loop(model, opt, 0, 6)
        before = naive.flat(model.parameters()).detach().clone()
        as_plain(loop(*clone((model, opt)), 6, 9))
        assert torch.equal(naive.flat(model.parameters()), before)


@situation(
    "Checkpoints",
    "AveragedModel, EMA and other copies of the model alone: their hooks do nothing",
)
def _():
    model = mlp()
    opt = sengs(model)
    averaged = torch.optim.swa_utils.AveragedModel(model)

    def step():
        opt.step()
        averaged.update_parameters(model)
        averaged(batch()[0]).sum().backward()

    as_plain(loop(model, opt, step=step))
