"""Capture: armed on refresh steps only, in-place safe, inert in copies, gone with the optimizer; what counts as a sample."""

import copy
import gc
import pickle
import warnings
import weakref

import naive
import pytest
import torch
from refreshing import uncentred
from torch import nn
from torch.utils.checkpoint import checkpoint

import seng
from seng.tell.inspection import inspect

FORMS = ("explicit", "implicit", "merged", "auto")


def optimizer(model, form="auto", samples=None, **options):
    exact = {"rank": 10**6, "relative_damping": False}
    curvature = uncentred(form, samples=samples, **exact)
    defaults = {
        "lr": 1.0,
        "momentum": 0.0,
        "damping": 0.3,
        "recipe": "paper",
        "curvature": curvature,
    }
    return seng.SENG(model, **(defaults | options))


def values(model):
    return naive.flat([p.detach() for p in model.parameters()]).clone()


def reference(u_by_block, damping=0.3):
    """Dense directions of several blocks, each given as its per-sample gradients and its gradient."""
    return torch.cat(
        [
            naive.dense_direction(naive.fisher(u), g, damping)
            for u, g in u_by_block
        ]
    )


def blocks_of(model, layers, x, target):
    """Per layer its per-sample gradients and its gradient, as `reference` takes them."""
    u = [
        naive.per_sample_gradients(model, x, target, list(layer.parameters()))
        for layer in layers
    ]
    return [(rows, rows.mean(0)) for rows in u]


def stepped(model, opt):
    before = values(model)
    opt.step()
    return before - values(model)


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        h = self.a(x)
        h += x  # on the very output that was captured
        h.relu_()
        out = self.b(h)
        return out.mul_(2)


@pytest.mark.parametrize("form", FORMS)
def test_in_place_operations_on_a_captured_output(form):
    model = InPlace()
    x, target = torch.randn(6, 4), torch.randn(6, 3)
    blocks = blocks_of(model, (model.a, model.b), x, target)
    opt = optimizer(model, form)
    naive.loss_of(model(x), target).backward()
    assert naive.relative_error(stepped(model, opt), reference(blocks)) < 1e-9


class Twice(nn.Module):
    """One layer used twice, with different numbers of positions."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(3, 3), nn.LayerNorm(3)

    def forward(self, x):
        first = self.norm(self.linear(x).tanh())
        return self.norm(self.linear(first.mean(1))) + first.sum(1)


@pytest.mark.parametrize("form", FORMS)
def test_a_layer_used_twice_adds_up_per_sample(form):
    model = Twice()
    nn.init.normal_(model.norm.weight)
    x, target = torch.randn(6, 4, 3), torch.randn(6, 3)
    blocks = blocks_of(model, (model.linear, model.norm), x, target)
    opt = optimizer(model, form)
    naive.loss_of(model(x), target).backward()
    assert naive.relative_error(stepped(model, opt), reference(blocks)) < 1e-9


class Tied(nn.Module):
    """An embedding whose weight is also the head's; the head has a bias of its own."""

    def __init__(self, bias=True):
        super().__init__()
        self.table, self.head = nn.Embedding(7, 3), nn.Linear(3, 7, bias=bias)
        self.head.weight = self.table.weight

    def forward(self, tokens):
        return self.head(self.table(tokens).tanh())


class ThereAndBack(nn.Module):
    """A convolution, and a transposed one of the same weight, which lies the other way."""

    def __init__(self):
        super().__init__()
        self.there = nn.Conv1d(6, 6, 3, padding=1, bias=False)
        self.back = nn.ConvTranspose1d(6, 6, 3, padding=1, bias=False)
        self.back.weight = self.there.weight

    def forward(self, x):
        return self.back(self.there(x).tanh())


def test_a_weight_that_lies_in_two_ways_is_refused():
    module = nn.Sequential(ThereAndBack(), nn.Flatten(), nn.Linear(30, 2))
    with pytest.raises(ValueError, match="a layer that lays it out diff"):
        seng.SENG(module, strict=True)


class SharedConv(nn.Module):
    """Two convolutions of one weight but different strides and biases."""

    def __init__(self):
        super().__init__()
        self.a, self.b = (
            nn.Conv2d(2, 2, 3, padding=1),
            nn.Conv2d(2, 2, 3, stride=2),
        )
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.b(self.a(x).tanh())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "case", ["tied", "tied-no-bias", "shared-convolution"]
)
def test_modules_that_share_a_parameter_are_one_block(form, case):
    model = {
        "tied": Tied,
        "tied-no-bias": lambda: Tied(False),
        "shared-convolution": SharedConv,
    }[case]()
    x = (
        torch.randn(6, 2, 5, 5)
        if case == "shared-convolution"
        else torch.randint(7, (6, 4))
    )
    target = torch.randn_like(model(x))
    u = naive.per_sample_gradients(model, x, target)
    opt = optimizer(model, form)
    assert len(inspect(opt).sites) == 1
    naive.loss_of(model(x), target).backward()
    assert (
        naive.relative_error(stepped(model, opt), reference([(u, u.mean(0))]))
        < 1e-9
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("samples", [None, 3, 5])
@pytest.mark.parametrize("sizes", [(6,), (2, 4), (1, 2, 3), (2, 2, 2)])
def test_micro_batches_equal_one_batch(form, samples, sizes):
    """Accumulation: u_i = B × the captured gradient, the first ϱ samples in order of the micro-batches."""
    torch.manual_seed(4)
    model = nn.Sequential(
        nn.Conv1d(2, 3, 2),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(12, 3),
        nn.LayerNorm(3),
    )
    x, target = torch.randn(6, 2, 5), torch.randn(6, 3)
    opt = optimizer(model, form, samples)
    blocks = []
    for layer in (model[0], model[3], model[4]):
        u = naive.per_sample_gradients(
            model, x, target, list(layer.parameters())
        )
        blocks.append((u[:samples], u.mean(0)))
    start = 0
    for size in sizes:
        part = slice(start, start + size)
        (naive.loss_of(model(x[part]), target[part]) * size / 6).backward()
        start += size
    assert naive.relative_error(stepped(model, opt), reference(blocks)) < 1e-10


def test_micro_batches_of_different_lengths():
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 2))
    parts = [torch.randint(5, (2, 4)), torch.randint(5, (3, 7))]
    targets = [torch.randn(2, 4, 2), torch.randn(3, 7, 2)]
    blocks = []
    for layer in (model[0], model[1]):
        u = torch.cat(
            [
                naive.per_sample_gradients(
                    model, x, t, list(layer.parameters())
                )
                for x, t in zip(parts, targets, strict=True)
            ]
        )
        blocks.append((u, u.mean(0)))
    opt = optimizer(model, "implicit")
    for x, target in zip(parts, targets, strict=True):
        (naive.loss_of(model(x), target) * len(x) / 5).backward()
    assert naive.relative_error(stepped(model, opt), reference(blocks)) < 1e-9


def test_several_forwards_in_one_backward_add_up_per_sample():
    model = nn.Linear(3, 2)
    x, y, target = torch.randn(5, 3), torch.randn(5, 3), torch.randn(5, 2)
    u = naive.per_sample_gradients(
        model, x, target
    ) + naive.per_sample_gradients(model, y, target)
    opt = optimizer(model)
    (
        naive.loss_of(model(x), target) + naive.loss_of(model(y), target)
    ).backward()
    assert (
        naive.relative_error(stepped(model, opt), reference([(u, u.mean(0))]))
        < 1e-9
    )


def test_eval_and_no_grad_forwards_in_between_do_not_count():
    model = nn.Linear(3, 2)
    x, target = torch.randn(5, 3), torch.randn(5, 2)
    u = naive.per_sample_gradients(model, x, target)
    opt = optimizer(model)
    loss = naive.loss_of(model(x), target)
    with torch.no_grad():
        model(torch.randn(9, 3))
    model(torch.randn(4, 3))  # with a graph, but never part of a backward
    loss.backward()
    assert (
        naive.relative_error(stepped(model, opt), reference([(u, u.mean(0))]))
        < 1e-9
    )


@pytest.mark.parametrize(
    "drop", ["zero_grad", "model.zero_grad", "zeros", "p.grad = None"]
)
def test_captures_of_a_skipped_step_are_dropped(drop):
    model = nn.Linear(3, 2)
    x, target = torch.randn(5, 3), torch.randn(5, 2)
    u = naive.per_sample_gradients(model, x, target)
    opt = optimizer(model)
    naive.loss_of(
        model(torch.randn(8, 3)), torch.randn(8, 2)
    ).backward()  # and no step
    if drop == "zero_grad":
        opt.zero_grad()
        assert inspect(opt).waiting == 0
    elif drop in ("model.zero_grad", "zeros"):
        model.zero_grad(set_to_none=drop != "zeros")
    else:
        for p in model.parameters():
            p.grad = None
    naive.loss_of(model(x), target).backward()
    assert (
        naive.relative_error(stepped(model, opt), reference([(u, u.mean(0))]))
        < 1e-9
    )


@pytest.mark.parametrize("form", FORMS)
def test_curvature_from_a_batch_of_its_own(form):
    """S̃_k: M from one batch, g from another; the extra backward leaves no gradient behind."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    x, target = torch.randn(5, 3), torch.randn(5, 2)
    other, its_target = torch.randn(8, 3), torch.randn(8, 2)
    blocks = []
    for layer in (model[0], model[2]):
        params = list(layer.parameters())
        u = naive.per_sample_gradients(model, other, its_target, params)
        blocks.append(
            (u, naive.per_sample_gradients(model, x, target, params).mean(0))
        )
    opt = optimizer(model, form, refresh_every=100)
    for first in (True, False):  # before the gradient's backward, or after it
        twin = copy.deepcopy(model)
        opt = optimizer(twin, form, refresh_every=100)
        opt.engine.clock.steps = (
            7  # not a refresh step: asking for it makes it one
        )
        opt.engine._arm()

        def feed(twin=twin, opt=opt):
            with opt.curvature_batch():
                naive.loss_of(twin(other), its_target).backward()

        if first:
            feed()
            assert all(p.grad is None for p in twin.parameters())
            opt.zero_grad()
        naive.loss_of(twin(x), target).backward()
        if not first:
            feed()
        assert (
            naive.relative_error(stepped(twin, opt), reference(blocks)) < 1e-9
        )
        assert not opt.refresh_due


def test_unfreezing_and_freezing_while_training():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    x, target = torch.randn(5, 3), torch.randn(5, 2)
    opt = optimizer(model, refresh_every=2)

    def direction():
        opt.zero_grad()
        naive.loss_of(model(x), target).backward()
        return stepped(model, opt)

    u = naive.per_sample_gradients(
        model, x, target, list(model[2].parameters())
    )
    assert (
        naive.relative_error(direction()[16:], reference([(u, u.mean(0))]))
        < 1e-9
    )
    model[0].requires_grad_(True)
    model[2].bias.requires_grad_(False)
    u = naive.per_sample_gradients(
        model, x, target, list(model[0].parameters())
    )
    plain = direction()[
        :16
    ]  # no refresh yet: the new layer has no curvature, and the frozen bias stays
    torch.testing.assert_close(plain, u.mean(0) / 0.3)
    u = naive.per_sample_gradients(
        model, x, target, list(model[0].parameters())
    )
    v = naive.per_sample_gradients(model, x, target, [model[2].weight])
    want = torch.cat(
        [reference([(u, u.mean(0)), (v, v.mean(0))]), torch.zeros(2)]
    )
    assert naive.relative_error(direction(), want) < 1e-9


def test_frozen_layers_are_not_captured():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    model[1].requires_grad_(False)
    opt = optimizer(model)
    naive.loss_of(model(torch.randn(5, 3)), torch.randn(5, 2)).backward()
    (backward,) = opt.engine.collector.samples.backwards.values()
    assert set(backward.pieces) == {0}
    opt.step()


def test_layers_that_are_not_used_keep_still():
    model = nn.ModuleDict({"used": nn.Linear(3, 2), "idle": nn.Linear(3, 2)})
    opt = optimizer(model, refresh_every=1)
    before = model["idle"].weight.detach().clone()
    for _ in range(2):
        opt.zero_grad(set_to_none=False)  # leaves gradients of zeros, not None
        naive.loss_of(
            model["used"](torch.randn(5, 3)), torch.randn(5, 2)
        ).backward()
        opt.step()
    assert torch.equal(model["idle"].weight, before)


@pytest.mark.parametrize("size", [0, 1])
def test_an_empty_batch_and_a_batch_of_one(size):
    model = nn.Sequential(
        nn.Conv2d(2, 3, 2, padding=1, padding_mode="reflect"),
        nn.Flatten(),
        nn.Linear(48, 2),
    )
    opt = optimizer(model, refresh_every=1)
    for count in (4, size, 4):
        opt.zero_grad()
        model(torch.randn(count, 2, 3, 3)).square().sum().backward()
        opt.step()
        assert values(model).isfinite().all()


def test_a_short_last_batch():
    model = nn.Linear(3, 2)
    opt = optimizer(model, "explicit", refresh_every=1)
    for count in (5, 2):
        x, target = torch.randn(count, 3), torch.randn(count, 2)
        u = naive.per_sample_gradients(model, x, target)
        opt.zero_grad()
        naive.loss_of(model(x), target).backward()
        assert (
            naive.relative_error(
                stepped(model, opt), reference([(u, u.mean(0))])
            )
            < 1e-9
        )


class Positions(nn.Module):
    """A table of positions whose dimension 0 is time, not the sample: its per-sample gradients cannot be seen."""

    def __init__(self):
        super().__init__()
        self.tokens, self.places, self.head = (
            nn.Embedding(7, 3),
            nn.Embedding(5, 3),
            nn.Linear(3, 2),
        )

    def forward(self, x):
        return self.head(
            self.tokens(x) + self.places(torch.arange(x.shape[1]))
        )


def test_a_layer_whose_dimension_0_is_not_the_sample_takes_the_plain_gradient_and_says_so():
    model = Positions()
    x, target = torch.randint(7, (8, 5)), torch.randn(8, 5, 2)
    opt = optimizer(model)
    naive.loss_of(model(x), target).backward()
    before = model.places.weight.detach().clone()
    with pytest.warns(
        UserWarning,
        match="'places' takes the plain gradient: dimension 0 of its input is 5 where the other",
    ):
        opt.step()
    torch.testing.assert_close(
        before - model.places.weight.detach(), model.places.weight.grad / 0.3
    )
    model = Positions()
    strict = optimizer(model, strict=True)
    naive.loss_of(model(x), target).backward()
    with pytest.raises(ValueError, match="strict=True: layer 'places'"):
        strict.step()
    assert "places" in seng.explain(model, x).uncovered


@pytest.mark.parametrize("layout", ["time-first", "flattened"])
def test_arrange_says_where_the_sample_is(layout):
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    x, target = torch.randn(6, 5, 3), torch.randn(6, 5, 2)
    blocks = blocks_of(model, (model[0], model[2]), x, target)
    bring, back = {
        "time-first": (
            lambda t: t.transpose(0, 1),
            lambda t: t.transpose(0, 1),
        ),
        "flattened": (
            lambda t: t.unflatten(0, (-1, 5)),
            lambda t: t.flatten(0, 1),
        ),
    }[layout]
    for layer in (model[0], model[2]):
        seng.layers.arrange(layer, bring)
    opt = optimizer(model)
    naive.loss_of(bring(model(back(x))), target).backward()
    assert naive.relative_error(stepped(model, opt), reference(blocks)) < 1e-9


def test_arrange_none_leaves_a_layer_out():
    model = Positions()
    seng.layers.arrange(model.places, None)
    opt = optimizer(
        model, strict=True
    )  # what was asked for is neither warned of nor refused
    assert inspect(opt).uncovered == {
        "places.weight": "left out on request, by seng.layers.arrange(layer, None)"
    }
    naive.loss_of(
        model(torch.randint(7, (8, 5))), torch.randn(8, 5, 2)
    ).backward()
    opt.step()


def test_between_refreshes_nothing_is_stored(monkeypatch):
    model = nn.Sequential(
        nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2)
    )
    opt = optimizer(model, refresh_every=3)
    calls = []
    receive = opt.engine.collector.receive
    monkeypatch.setattr(
        opt.engine.collector,
        "receive",
        lambda *a: (calls.append(1), receive(*a)),
    )
    saved = []
    for _ in range(6):
        stored = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, stored=stored: (stored.append(t), t)[1], lambda t: t
        ):
            loss = naive.loss_of(model(torch.randn(5, 3)), torch.randn(5, 2))
        opt.zero_grad()
        loss.backward()
        assert (inspect(opt).waiting > 0) == opt.refresh_due
        opt.step()
        assert inspect(opt).waiting == 0
        saved.append((len(calls), len(stored)))
    calls_after, tensors = zip(*saved, strict=True)
    assert calls_after == (2, 2, 2, 4, 4, 4)
    plain = copy.deepcopy(model)
    stored = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: (stored.append(t), t)[1], lambda t: t
    ):
        naive.loss_of(plain(torch.randn(5, 3)), torch.randn(5, 2))
    assert tensors[1] == tensors[2] == len(stored) < tensors[0]


def test_hooks_go_with_the_optimizer():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    opt = optimizer(model)
    assert all(len(layer._forward_hooks) == 1 for layer in model)
    gone = weakref.ref(opt.engine)
    del opt
    gc.collect()
    assert gone() is None
    assert all(len(layer._forward_hooks) == 0 for layer in model)


def test_copies_and_pickles_of_the_model_are_inert():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    opt = optimizer(model)
    for twin in (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.optim.swa_utils.AveragedModel(model),
    ):
        naive.loss_of(twin(torch.randn(5, 3)), torch.randn(5, 2)).backward()
        assert inspect(opt).waiting == 0
        assert all(
            hook() is None
            for layer in twin.modules()
            for hook in layer._forward_hooks.values()
        )


def test_keyword_inputs_are_captured():
    model = nn.Linear(3, 2)
    x, target = torch.randn(5, 3), torch.randn(5, 2)
    u = naive.per_sample_gradients(model, x, target)
    opt = optimizer(model)
    naive.loss_of(model(input=x), target).backward()
    assert (
        naive.relative_error(stepped(model, opt), reference([(u, u.mean(0))]))
        < 1e-9
    )


def test_attention_is_left_out_with_the_reason():
    model = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    with pytest.warns(
        UserWarning,
        match="self_attn.out_proj.weight.* does not call it as a module",
    ):
        opt = optimizer(model, refresh_every=1)
    for _ in range(2):
        opt.zero_grad()
        model(torch.randn(3, 5, 4)).square().mean().backward()
        opt.step()
    assert values(model).isfinite().all()
    assert {"linear1", "linear2", "norm1", "norm2"} == set(opt.diagnostics())


def test_a_hook_of_ones_own_may_change_the_output():
    model = nn.Linear(3, 2)
    model.register_forward_hook(lambda layer, args, out: 2 * out)
    x, target = torch.randn(5, 3), torch.randn(5, 2)
    u = naive.per_sample_gradients(model, x, target)
    opt = optimizer(model)
    model.register_forward_hook(lambda layer, args, out: out.tanh())
    v = naive.per_sample_gradients(model, x, target)
    assert not torch.allclose(u, v)
    opt.engine.collector.drop()  # what the reference has captured
    naive.loss_of(model(x), target).backward()
    assert (
        naive.relative_error(stepped(model, opt), reference([(v, v.mean(0))]))
        < 1e-9
    )


class Squashed(nn.Module):
    """Its output is saved for its backward."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return (self.weight * x).sigmoid()


def test_a_layer_that_has_saved_its_output(monkeypatch):
    monkeypatch.setattr(
        seng.layers.kinds, "KINDS", dict(seng.layers.kinds.KINDS)
    )

    @seng.layers.columns(Squashed)
    def _(layer, a, g):
        y = (layer.weight * a).sigmoid()
        return {"weight": g * y * (1 - y) * a}

    model = Squashed()
    x, target = torch.randn(5, 3), torch.randn(5, 3)
    u = naive.per_sample_gradients(model, x, target)
    opt = optimizer(model)
    naive.loss_of(model(x), target).backward()
    assert (
        naive.relative_error(stepped(model, opt), reference([(u, u.mean(0))]))
        < 1e-9
    )


def test_a_gradient_with_respect_to_the_input_alone_does_not_count():
    model = nn.Linear(3, 2)
    x, target = torch.randn(5, 3, requires_grad=True), torch.randn(5, 2)
    u = naive.per_sample_gradients(model, x, target)
    opt = optimizer(model)
    torch.autograd.grad(model(x).sum(), x)
    naive.loss_of(model(x), target).backward()
    assert (
        naive.relative_error(stepped(model, opt), reference([(u, u.mean(0))]))
        < 1e-9
    )


def test_gradients_that_are_assigned_by_hand():
    model = nn.Linear(3, 2)
    x, target = torch.randn(5, 3), torch.randn(5, 2)
    u = naive.per_sample_gradients(model, x, target)
    opt = optimizer(model)
    grads = torch.autograd.grad(
        naive.loss_of(model(x), target), list(model.parameters())
    )
    for p, grad in zip(model.parameters(), grads, strict=True):
        p.grad = grad
    assert (
        naive.relative_error(stepped(model, opt), reference([(u, u.mean(0))]))
        < 1e-9
    )


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(reentrant):
    model = nn.Sequential(
        nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)
    )
    x, target = torch.randn(5, 3), torch.randn(5, 2)
    blocks = blocks_of(model, (model[0], model[2], model[4]), x, target)
    opt = optimizer(model)
    h = model[0](x)
    h = checkpoint(model[1:3], h, use_reentrant=reentrant)
    out = checkpoint(model[3:], h, use_reentrant=reentrant)
    naive.loss_of(out, target).backward()
    assert opt.engine.collector.samples.total == 5
    assert naive.relative_error(stepped(model, opt), reference(blocks)) < 1e-9


@pytest.mark.parametrize("between", [True, False])
def test_reentrant_checkpoints_inside_each_other(between):
    """Three backwards that are one; also where no layer lies between the two checkpoints."""
    model = nn.Sequential(
        nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)
    )
    x, target = torch.randn(5, 3), torch.randn(5, 2)
    blocks = blocks_of(model, (model[0], model[2], model[4]), x, target)
    opt = optimizer(model)

    def outer(h):
        h = checkpoint(model[1:4], h, use_reentrant=True)
        return model[4](h) if between else h

    out = checkpoint(outer, model[0](x), use_reentrant=True)
    naive.loss_of(out if between else model[4](out), target).backward()
    assert opt.engine.collector.samples.total == 5
    assert naive.relative_error(stepped(model, opt), reference(blocks)) < 1e-9


def test_micro_batches_after_a_backward_that_failed():
    model = nn.Linear(3, 2)
    x, target = torch.randn(6, 3), torch.randn(6, 2)
    u = naive.per_sample_gradients(model, x, target)
    opt = optimizer(model)
    bad = model.weight.register_hook(lambda g: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        naive.loss_of(model(x), target).backward()
    bad.remove()
    opt.zero_grad()
    for part in (slice(0, 2), slice(2, 6)):
        (
            naive.loss_of(model(x[part]), target[part]) * len(x[part]) / 6
        ).backward()
    assert (
        naive.relative_error(stepped(model, opt), reference([(u, u.mean(0))]))
        < 1e-9
    )


def test_an_own_batch_between_forward_and_backward():
    model = nn.Linear(3, 2)
    x, target, other = torch.randn(5, 3), torch.randn(5, 2), torch.randn(8, 3)
    its_target = torch.randn(8, 2)
    g = naive.per_sample_gradients(model, x, target).mean(0)
    u = naive.per_sample_gradients(model, other, its_target)
    opt = optimizer(model)
    loss = naive.loss_of(model(x), target)
    with opt.curvature_batch():
        naive.loss_of(model(other), its_target).backward()
    loss.backward()
    assert (
        naive.relative_error(stepped(model, opt), reference([(u, g)])) < 1e-9
    )


def test_a_first_micro_batch_without_any_gradient_counts():
    model = nn.Linear(3, 2)
    x, target = torch.randn(8, 3), torch.randn(8, 2)
    weight = torch.tensor([0.0] * 4 + [1.0] * 4)

    def loss(part):
        return (
            (model(x[part]) - target[part]).square().sum(1) * weight[part]
        ).sum() / 8

    u = torch.stack(
        [
            8
            * naive.flat(
                torch.autograd.grad(loss(slice(i, i + 1)), model.parameters())
            )
            for i in range(8)
        ]
    )
    opt = optimizer(model)
    for part in (slice(0, 4), slice(4, 8)):
        loss(part).backward()
    assert opt.engine.collector.samples.total == 8
    assert (
        naive.relative_error(stepped(model, opt), reference([(u, u.mean(0))]))
        < 1e-9
    )


def test_the_engine_goes_at_once_with_the_optimizer():
    model = nn.Linear(3, 2)
    gc.collect()
    gc.disable()
    try:
        opt = optimizer(model)
        model(torch.randn(4, 3)).sum().backward()
        opt.step()
        gone = weakref.ref(opt.engine)
        del opt
        assert gone() is None and not model._forward_hooks
    finally:
        gc.enable()


@pytest.mark.parametrize("how", ["plain", "reentrant", "non-reentrant"])
def test_checkpointing_still_releases_what_lies_inside(how):
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    opt = optimizer(model)
    inside = []

    def run(x):
        h = model[0](x).tanh()
        inside.append(weakref.ref(h))
        return model[1](h)

    x = torch.randn(5, 3, requires_grad=True)
    out = (
        run(x)
        if how == "plain"
        else checkpoint(run, x, use_reentrant=how == "reentrant")
    )
    gc.collect()
    assert inspect(opt).armed and (inside[0]() is None) == (how != "plain")
    naive.loss_of(out, torch.randn(5, 2)).backward()
    opt.step()
    assert len(inspect(opt).states) == 2


def test_torch_func_and_forward_derivatives_pass_by():
    model = nn.Linear(3, 2)
    opt = optimizer(model)
    x = torch.randn(5, 3)
    params = dict(model.named_parameters())

    def loss(params, x):
        return torch.func.functional_call(model, params, (x,)).square().sum()

    torch.func.vmap(torch.func.grad(loss), (None, 0))(params, x)
    torch.func.jvp(lambda x: loss(params, x), (x,), (x,))
    with torch.autograd.forward_ad.dual_level():
        model(torch.autograd.forward_ad.make_dual(x, x))
    assert inspect(opt).waiting == 0


class FunctionalTie(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, 3)

    def forward(self, x):
        return nn.functional.linear(self.table(x).tanh(), self.table.weight)


@pytest.mark.parametrize("build", [optimizer, seng.SENG])
def test_a_weight_that_is_also_used_elsewhere_is_noticed(build):
    model = FunctionalTie()
    opt = build(model)
    naive.loss_of(
        model(torch.randint(7, (6, 4))), torch.randn(6, 4, 7)
    ).backward()
    with pytest.warns(
        UserWarning,
        match="'table' do not add up to its gradient .* its weight is used outside of it",
    ):
        opt.step()


def test_samples_that_were_left_out_are_not_missed():
    """Only some of a sum's terms were captured, on purpose: nothing to warn of."""
    model = nn.Linear(3, 2)
    opt = optimizer(model, samples=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        naive.loss_of(model(torch.randn(9, 3)), torch.randn(9, 2)).backward()
        opt.step()


def test_layers_in_turns_are_all_covered():
    """Refreshes fall on even steps, and head b is used on odd ones."""
    model = nn.ModuleDict({"a": nn.Linear(3, 2), "b": nn.Linear(3, 2)})
    opt = optimizer(model, refresh_every=10)
    due = []
    for i in range(9):
        due.append(opt.refresh_due)
        opt.zero_grad()
        naive.loss_of(
            model["ab"[i % 2]](torch.randn(5, 3)), torch.randn(5, 2)
        ).backward()
        opt.step()
    assert set(inspect(opt).states) == {0, 1} and due == [
        True,
        False,
        True,
        True,
        *[False] * 5,
    ]


def test_own_batch_under_a_grad_scaler_is_taken_as_it_is():
    tops = []
    for enabled in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        opt = optimizer(model)
        scaler = torch.amp.GradScaler("cpu", enabled=enabled)
        with opt.curvature_batch():
            naive.loss_of(
                model(torch.randn(5, 3)), torch.randn(5, 2)
            ).backward()
        scaler.scale(
            naive.loss_of(model(torch.randn(5, 3)), torch.randn(5, 2))
        ).backward()
        scaler.step(opt)
        tops.append(opt.diagnostics()["Linear"]["top_eigenvalue"])
    assert tops[0] == pytest.approx(tops[1])


def test_a_forward_that_was_replaced_is_not_trusted():
    layer = nn.Linear(2, 2)
    layer.forward = lambda x: x
    assert "forward of its own" in seng.layers.kind_of(layer)


def test_the_warning_about_positions_is_said_once():
    model = Positions()
    opt = optimizer(model, refresh_every=1)
    with pytest.warns(UserWarning, match="'places'") as caught:
        for length in (3, 4, 5):
            opt.zero_grad()
            naive.loss_of(
                model(torch.randint(7, (8, length))), torch.randn(8, length, 2)
            ).backward()
            opt.step()
    assert len(caught) == 1


def test_curvature_batch_that_fails_or_reaches_only_a_part():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    opt = optimizer(model)
    with pytest.raises(ZeroDivisionError), opt.curvature_batch():
        raise ZeroDivisionError
    x, target = torch.randn(5, 3), torch.randn(5, 2)
    naive.loss_of(model(x), target).backward()
    opt.step()
    assert len(inspect(opt).states) == 2
    kept = inspect(opt).states[1]
    with opt.curvature_batch():
        model[0](x).square().mean().backward()
    opt.zero_grad()
    naive.loss_of(model(x), target).backward()
    opt.step()
    assert inspect(opt).states[1] is kept


@pytest.mark.parametrize("where", ["step", "backward"])
def test_autocast_does_not_reach_our_own_products(where):
    results = []
    for enabled in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(30, 20).float()
        opt = seng.SENG(
            model,
            lr=1.0,
            momentum=0.0,
            damping=1e-3,
            curvature=uncentred("explicit"),
        )
        # 40 positions: the columns of U are formed inside the backward
        loss = naive.loss_of(
            model(torch.randn(8, 40, 30).float()),
            torch.randn(8, 40, 20).float(),
        )
        with torch.autocast(
            "cpu", torch.bfloat16, enabled=enabled and where == "backward"
        ):
            loss.backward()
        for p in (
            model.parameters()
        ):  # the backward's own products under autocast are not at stake
            p.grad.copy_(torch.linspace(-1, 1, p.numel()).view_as(p))
        opt.engine.records[0].checked = True
        before = values(model)
        with torch.autocast(
            "cpu", torch.bfloat16, enabled=enabled and where == "step"
        ):
            opt.step()
        results.append(before - values(model))
    assert naive.relative_error(*results) < 1e-5


@pytest.mark.parametrize("unscale", [False, True])
def test_captures_are_unscaled_by_the_scale_of_their_step(unscale):
    results = []
    for scaled in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        opt = optimizer(model, refresh_every=1, lr=0.05)
        scaler = torch.amp.GradScaler(
            "cpu", init_scale=1024.0, growth_interval=2, enabled=scaled
        )
        for _ in range(5):
            opt.zero_grad()
            scaler.scale(
                naive.loss_of(model(torch.randn(5, 3)), torch.randn(5, 2))
            ).backward()
            if unscale:
                scaler.unscale_(opt)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(opt)
            scaler.update()
        results.append(values(model))
    assert naive.relative_error(*results) < 1e-6


def test_hooks_of_users_on_captured_outputs():
    """A view's grad_fn is made when it is looked at; before, torch's register_hook crashed Python on a linear layer's."""
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    opt = seng.SENG(model, lr=0.1)
    seen = []
    for layer in model:
        layer.register_forward_hook(
            lambda layer, args, out: (
                out.register_hook(lambda g: seen.append(tuple(g.shape)))
                and None
            )
        )
    model(torch.randn(6, 3, 4)).square().mean().backward()
    opt.step()
    assert seen == [(6, 3, 2), (6, 3, 5), (6, 3, 5)]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("form", ["implicit", "merged"])
def test_inputs_may_be_overwritten(form, bias):
    """As a buffer that each batch is copied into: between backwards, before the step, and after it."""
    sides = []
    for buffered in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(4, 5, bias=bias), nn.Tanh(), nn.Linear(5, 2)
        )
        opt = seng.SENG(
            model,
            lr=0.1,
            refresh_every=3,
            curvature=uncentred(form, rank=64),
        )
        buffer = torch.empty(3, 4)
        for _ in range(4):
            for x in torch.randn(2, 3, 4):
                model(
                    buffer.copy_(x) if buffered else x
                ).square().mean().backward()
            buffer.fill_(7)
            opt.step()
            opt.zero_grad()
        sides.append(values(model))
    assert torch.equal(*sides)


def test_a_block_holds_no_more_than_its_samples():
    layer = nn.Linear(200, 300)
    opt = seng.SENG(
        layer,
        lr=0.1,
        curvature=seng.Curvature(
            base=None, form="implicit", samples=4, rank=64, decay=0
        ),
    )
    layer(torch.randn(512, 200)).square().mean().backward()
    opt.step()
    U = inspect(opt).states[0].U
    assert sum(t.untyped_storage().nbytes() for t in U.tensors()) == U.bytes


def test_between_refreshes_only_the_first_layer_has_a_hook():
    model = nn.Sequential(
        nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3), nn.Linear(3, 2)
    )
    others = [layer.register_forward_hook(lambda *_: None) for layer in model]
    opt = seng.SENG(model, lr=0.1, refresh_every=3)
    counts = []
    for _ in range(7):
        counts.append([len(layer._forward_hooks) - 1 for layer in model])
        opt.zero_grad()
        model(torch.randn(5, 4)).square().mean().backward()
        opt.step()
    armed, idle = [1, 0, 1, 1], [1, 0, 0, 0]
    assert counts == [armed, idle, idle, armed, idle, idle, armed]
    del opt
    gc.collect()
    assert [len(layer._forward_hooks) for layer in model] == [1] * 4 and len(
        others
    ) == 4
