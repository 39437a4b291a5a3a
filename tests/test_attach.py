"""attach: SENG's directions for any torch optimizer."""

import copy
import io
import pickle

import naive
import pytest
import torch
from torch import nn

import seng
from seng.tell.inspection import inspect


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(5, 4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 3)
    )


def train(model, opt, steps, start=0, closure=False):
    for i in range(start, start + steps):
        generator = torch.Generator().manual_seed(i)
        x, target = (
            torch.randn(8, 5, generator=generator),
            torch.randn(8, 3, generator=generator),
        )

        def backward(x=x, target=target):
            opt.zero_grad()
            loss = naive.loss_of(model(x), target)
            loss.backward()
            return loss

        if closure:
            opt.step(backward)
        else:
            backward()
            opt.step()


def values(model):
    return naive.flat([p.detach() for p in model.parameters()]).clone()


@pytest.mark.parametrize("closure", [False, True])
def test_attached_to_sgd_it_is_seng(closure):
    ours, theirs = network(), network()
    train(ours, seng.SENG(ours, lr=0.05, damping=0.1, refresh_every=3), 10)
    sgd = torch.optim.SGD(theirs.parameters(), lr=0.05, momentum=0.9)
    seng.attach(sgd, theirs, damping=0.1, refresh_every=3)
    train(theirs, sgd, 10, closure=closure)
    torch.testing.assert_close(values(ours), values(theirs))


@pytest.mark.parametrize(
    "kind", [torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad]
)
def test_any_optimizer_sees_the_directions(kind):
    model, plain = network(), network()
    opt, alone = (
        kind(model.parameters(), lr=0.01),
        kind(plain.parameters(), lr=0.01),
    )
    handle = seng.attach(opt, model, refresh_every=2)
    train(model, opt, 5)
    train(plain, alone, 5)
    assert not torch.equal(values(model), values(plain))
    limit = network()
    opt = kind(limit.parameters(), lr=0.01)
    to_identity = seng.Curvature(base=None)
    seng.attach(
        opt, limit, refresh_every=2, damping=1e15, curvature=to_identity
    )
    train(limit, opt, 5)
    torch.testing.assert_close(
        values(limit), values(plain)
    )  # and in the limit it is the optimizer alone
    assert all(
        isinstance(key, torch.Tensor) for key in opt.state
    )  # nothing of ours is in the optimizer's state
    assert handle.diagnostics()["0"]["base"] == "kronecker"


def test_lbfgs_calls_its_closure_often_and_is_preconditioned_each_time():
    model = network()
    opt = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    handle = seng.attach(opt, model, refresh_every=1)
    train(model, opt, 2, closure=True)
    assert inspect(handle).steps >= 4 and values(model).isfinite().all()


def test_removal_leaves_optimizer_and_module_as_they_were():
    model, plain = network(), network()
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    handle = seng.attach(opt, model)
    assert model[0]._forward_hooks
    handle.remove()
    assert not any(layer._forward_hooks for layer in model)
    train(model, opt, 3)
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.05), 3)
    assert torch.equal(values(model), values(plain))


def test_the_handle_keeps_its_own_state():
    model = network()
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    handle = seng.attach(opt, model, damping=0.1, refresh_every=3)
    train(model, opt, 4)
    file = io.BytesIO()
    torch.save(
        [model.state_dict(), opt.state_dict(), handle.state_dict()], file
    )
    train(model, opt, 5, 4)

    other = network()
    resumed = torch.optim.SGD(other.parameters(), lr=0.05, momentum=0.9)
    attached = seng.attach(resumed, other, damping=0.7, refresh_every=3)
    file.seek(0)
    for target, state in zip(
        (other, resumed, attached),
        torch.load(file, weights_only=True),
        strict=True,
    ):
        target.load_state_dict(state)
    train(other, resumed, 5, 4)
    assert torch.equal(values(model), values(other))
    assert attached.damping == 0.1


def test_damping_may_change():
    model, plain = network(), network()
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    handle = seng.attach(opt, model, curvature=seng.Curvature(base=None))
    handle.damping = 1e15
    train(model, opt, 3)
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.05), 3)
    torch.testing.assert_close(values(model), values(plain))


def test_curvature_from_a_batch_of_its_own_is_sengs():
    results = []
    for attached in (False, True):
        model = network()
        opt = (
            torch.optim.SGD(model.parameters(), lr=0.05)
            if attached
            else seng.SENG(model, lr=0.05, momentum=0.0)
        )
        source = seng.attach(opt, model) if attached else opt
        generator = torch.Generator().manual_seed(9)
        with source.curvature_batch():
            x, target = (
                torch.randn(9, 5, generator=generator),
                torch.randn(9, 3, generator=generator),
            )
            naive.loss_of(model(x), target).backward()
        train(model, opt, 3)
        results.append(values(model))
    torch.testing.assert_close(*results)
    other = network()
    train(other, seng.SENG(other, lr=0.05, momentum=0.0), 3)
    assert (
        naive.relative_error(values(other), results[0]) > 1e-6
    )  # the batch did matter


def test_a_group_that_is_added_later_is_covered():
    model = network()
    opt = torch.optim.SGD(model[0].parameters(), lr=0.05)
    handle = seng.attach(opt, model, refresh_every=2)
    train(model, opt, 1)
    opt.add_param_group({"params": list(model[3].parameters())})
    train(model, opt, 3)
    assert handle.diagnostics()["3"]["base"] == "kronecker"
    assert len(model[0]._forward_hooks) == 1


def test_a_handle_is_not_copied():
    model = nn.Linear(3, 2)
    handle = seng.attach(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="attach again to the copies"):
            copied(handle)


def test_a_step_that_a_fused_optimizer_skips_does_not_count():
    model = nn.Linear(3, 2).float()
    adam = torch.optim.Adam(model.parameters(), lr=0.01, fused=True)
    handle, scaler = (
        seng.attach(adam, model),
        torch.amp.GradScaler("cpu", init_scale=8.0),
    )
    for bad in (torch.inf, 1.0):
        adam.zero_grad()
        scaler.scale(
            bad * model(torch.ones(4, 3).float()).square().mean()
        ).backward()
        scaler.step(adam)
        scaler.update()
    assert inspect(handle).steps == 1 and len(inspect(handle).states) == 1


def test_bad_input():
    model = network()
    with pytest.raises(TypeError, match="attach is for other optimizers"):
        seng.attach(seng.SENG(model, lr=0.1), model)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(
        ValueError, match="damping is λ, a number above 0, not -1"
    ):
        seng.attach(sgd, model, damping=-1)
    with pytest.raises(ValueError, match="refresh_every is a number of steps"):
        seng.attach(sgd, model, refresh_every=0)
    with pytest.raises(ValueError, match="are not the module's"):
        seng.attach(sgd, network())
    for recipe in ("muon", "paper"):  # the optimizer has its own
        with pytest.raises(TypeError, match="unexpected keyword.* 'recipe'"):
            seng.attach(sgd, model, recipe=recipe)


@pytest.mark.parametrize("curvature", ["kronecker", {}, 0])
def test_what_is_no_curvature_is_refused(curvature):
    model = network()
    for build in (
        lambda: seng.SENG(model, 0.1, curvature=curvature),
        lambda: seng.attach(
            torch.optim.SGD(model.parameters(), 0.1),
            model,
            curvature=curvature,
        ),
    ):
        with pytest.raises(
            TypeError, match="curvature is a seng.Curvature, not"
        ):
            build()
