"""What people do between forward and step."""

import naive
import torch
import torch.nn.functional as F
from test_capture import InPlace, optimizer, reference, stepped
from torch import nn
from torch.utils.checkpoint import checkpoint

import seng
from seng.tell.inspection import inspect
from situations import as_plain, batch, exact, loop, mlp, sengs, situation

for reentrant in (True, False):

    @situation(
        "Autograd", f"activation checkpointing, use_reentrant={reentrant}"
    )
    def _(reentrant=reentrant):
        model = mlp()

        def run(x):
            return checkpoint(model[1:], model[0](x), use_reentrant=reentrant)

        as_plain(loop(model, sengs(model), run=run))


@situation(
    "Autograd",
    "gradient accumulation: k micro-batches equal one batch, in gradient and curvature",
)
def _():
    model, (x, target) = mlp(), batch()

    def backward():
        for part in (slice(0, 2), slice(2, 3), slice(3, 6)):
            (
                naive.loss_of(model(x[part]), target[part]) * len(x[part]) / 6
            ).backward()

    exact(model, x, target, backward=backward, tolerance=1e-10)


@situation(
    "Autograd",
    "gradient clipping: the curvature is that of the whole gradient",
)
def _():
    model, (x, target) = mlp(), batch()
    u = naive.per_sample_gradients(
        model, x, target, list(model[0].parameters())
    )
    opt = optimizer(model)
    naive.loss_of(model(x), target).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    g = naive.flat([p.grad for p in model[0].parameters()])
    assert (
        naive.relative_error(
            stepped(model, opt)[: len(g)], reference([(u, g)])
        )
        < 1e-9
    )


@situation("Autograd", "several forwards in one backward add up per sample")
def _():
    model, (x, target), (other, _) = mlp(), batch(), batch(1)
    blocks = [list(model[i].parameters()) for i in (0, 2, 3)]
    u = [
        sum(
            naive.per_sample_gradients(model, v, target, params)
            for v in (x, other)
        )
        for params in blocks
    ]
    opt = optimizer(model)
    (
        naive.loss_of(model(x), target) + naive.loss_of(model(other), target)
    ).backward()
    assert (
        naive.relative_error(
            stepped(model, opt),
            reference([(rows, rows.mean(0)) for rows in u]),
        )
        < 1e-9
    )


@situation("Autograd", "evaluation and no_grad forwards in between")
def _():
    model, (x, target) = mlp(), batch()

    def backward():
        loss = naive.loss_of(model(x), target)
        with torch.no_grad():
            model.eval()(torch.randn(9, 3))
        model.train()(torch.randn(4, 3))
        loss.backward()

    exact(model, x, target, backward=backward)


@situation("Autograd", "in-place operations on a layer's output")
def _():
    exact(InPlace(), torch.randn(6, 4), torch.randn(6, 3))


@situation(
    "Autograd",
    "gradients of one batch from torch.autograd.grad, assigned by hand",
)
def _():
    model, (x, target) = mlp(), batch()

    def backward():
        params = list(model.parameters())
        for p, g in zip(
            params,
            torch.autograd.grad(naive.loss_of(model(x), target), params),
            strict=True,
        ):
            p.grad = g

    exact(model, x, target, backward=backward)


@situation(
    "Autograd",
    "a gradient penalty (double backward): the curvature misses what it adds to the gradient",
)
def _():
    model, (x, target) = mlp(), batch()
    opt = sengs(model)
    x.requires_grad_()
    out = model(x)
    (g,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    (naive.loss_of(out, target) + g.square().sum(1).mean()).backward()
    opt.step()
    assert len(inspect(opt).states) == 3 and opt.last_refresh == 0


@situation(
    "Autograd", "retain_graph and a second backward through the same graph"
)
def _():
    model, (x, target) = mlp(), batch()

    def backward():
        loss = naive.loss_of(model(x), target) / 2
        loss.backward(retain_graph=True)
        loss.backward()

    exact(model, x, target, backward=backward)


@situation("Autograd", "forward and backward hooks of one's own")
def _():
    model = mlp()
    seen = []
    model[0].register_forward_hook(lambda *_: seen.append("forward"))
    model[3].register_full_backward_hook(lambda *_: seen.append("backward"))
    model[0].weight.register_post_accumulate_grad_hook(
        lambda _: seen.append("accumulated")
    )
    as_plain(loop(model, sengs(model)))
    assert len(seen) == 27


@situation(
    "Autograd", "torch.func and forward-mode derivatives of the same model"
)
def _():
    model = mlp()
    opt = sengs(model)
    torch.func.jacrev(
        lambda p: torch.func.functional_call(model, p, batch()[0])
    )(dict(model.named_parameters()))
    torch.func.jvp(model, (batch()[0],), (batch()[0],))
    as_plain(loop(model, opt))


@situation("Autograd", "a loss that is a sum over samples (relative damping)")
def _():
    steps = []
    for scale in (1, 6):
        model = mlp()
        opt = seng.SENG(model, lr=0.1 / scale, momentum=0.0)
        before = naive.flat(model.parameters()).detach().clone()
        (scale * naive.loss_of(model(batch()[0]), batch()[1])).backward()
        opt.step()
        steps.append(before - naive.flat(model.parameters()).detach())
    assert naive.relative_error(*steps) < 1e-9


@situation("Autograd", "a backward inside step(closure)")
def _():
    model = mlp()
    opt = sengs(model)
    for i in range(9):

        def closure(i=i):
            opt.zero_grad()
            loss = naive.loss_of(model(batch(i)[0]), batch(i)[1])
            loss.backward()
            return loss

        opt.step(closure)
    as_plain(naive.flat([p.detach() for p in model.parameters()]))


@situation("Autograd", "an empty batch, and a last batch that is short")
def _():
    model = mlp()
    opt = sengs(model, refresh_every=1)
    for size in (6, 0, 1, 6):
        opt.zero_grad()
        x, target = batch(size=size)
        (model(x) - target).square().sum().backward()
        opt.step()
    assert all(p.isfinite().all() for p in model.parameters())


@situation("Autograd", "freezing and unfreezing layers while training")
def _():
    model = mlp()
    model[0].requires_grad_(False)
    opt = sengs(model)
    loop(model, opt, 0, 4)
    model[0].requires_grad_(True)
    loop(model, opt, 4, 9)
    assert len(inspect(opt).states) == 3


@situation(
    "Autograd", "a gradient that did not come from the layer's own forward"
)
def _():
    model = mlp()
    opt = sengs(model)
    F.linear(batch()[0], model[0].weight).sum().backward()
    opt.step()
