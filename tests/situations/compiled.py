"""torch.compile of the model, of a part of it, of the step."""

import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from situations import as_plain, batch, loop, mlp, sengs, situation


@situation(
    "torch.compile",
    "the model with fullgraph=True: one graph on refresh steps, one between",
)
def _():
    model, counter = mlp(), CompileCounterWithBackend("aot_eager")
    opt = sengs(model)
    as_plain(
        loop(
            model,
            opt,
            run=torch.compile(model, backend=counter, fullgraph=True),
        )
    )
    assert counter.frame_count == 2


@situation(
    "torch.compile",
    "torch.compile(model) before the optimizer is built, first called after",
)
def _():
    model = mlp()
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    as_plain(loop(model, sengs(model), run=run))


@situation(
    "torch.compile",
    "SENG(torch.compile(model)): the wrapper instead of the module",
)
def _():
    model = mlp()
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    as_plain(loop(model, sengs(run), run=run))


@situation(
    "torch.compile", "model.compile() in place, and only a part of the model"
)
def _():
    model = mlp()
    model[0].compile(backend="aot_eager", fullgraph=True)
    as_plain(loop(model, sengs(model)))


@situation("torch.compile", "the model is compiled after some steps without")
def _():
    model = mlp()
    opt = sengs(model)
    loop(model, opt, stop=4)
    as_plain(
        loop(
            model,
            opt,
            start=4,
            run=torch.compile(model, backend="aot_eager", fullgraph=True),
        )
    )


@situation(
    "torch.compile",
    "a part without the first layer is compiled after some steps, where it was not before",
)
def _():
    model = mlp()
    opt = sengs(model)
    loop(model, opt, stop=4)
    part = torch.compile(
        lambda x: model[3](model[2](x)), backend="aot_eager", fullgraph=True
    )
    as_plain(
        loop(model, opt, start=4, run=lambda x: part(model[1](model[0](x))))
    )


@situation(
    "torch.compile", "the optimizer is built after the first compiled call"
)
def _():
    model = mlp()
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    run(batch()[0]).sum().backward()
    loop(model, sengs(model), run=run)


@situation("torch.compile", "opt.step: one graph between refreshes")
def _():
    model, counter = mlp(), CompileCounterWithBackend("eager")
    opt = sengs(model)
    as_plain(loop(model, opt, step=torch.compile(opt.step, backend=counter)))
    assert counter.frame_count <= 3


@situation("torch.compile", "a compiled model with activation checkpointing")
def _():
    model = mlp()
    inner = torch.compile(
        lambda x: checkpoint(model, x, use_reentrant=False),
        backend="aot_eager",
        fullgraph=True,
    )
    as_plain(loop(model, sengs(model), run=inner))
