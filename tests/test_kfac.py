"""K-FAC against dense Kronecker products and factors that are formed one sample at a time."""

import copy
import io
import pickle

import pytest
import torch
from conftest import LAYERS, Case
from naive import loss_of
from torch import Tensor, nn
from torch.testing import assert_close

import seng
from seng.linalg.operators import Operator
from seng.metrics.kronecker import TikhonovState, shifted_inverse
from seng.tell.inspection import inspect

CASES = [
    case
    for case in LAYERS
    if case.name.startswith(("linear", "conv"))
    and not any(s in case.name for s in ("groups", "depthwise", "transpose"))
]
B = 6


def data(case: Case, layer: nn.Module) -> tuple[Tensor, Tensor]:
    return case.input(B), case.target(layer, B)


def kfac(module: nn.Module, **options) -> seng.KFAC:
    return seng.KFAC(
        module,
        **{
            "lr": 1.0,
            "momentum": 0.0,
            "damping": 0.3,
            "refresh_every": 1,
            "decay": 0.0,
            "damp": "tikhonov",
        }
        | options,
    )


def train(opt: seng.KFAC, model: nn.Module, x: Tensor, y: Tensor) -> None:
    opt.zero_grad()
    loss_of(model(x), y).backward()
    opt.step()


def factors(opt: seng.KFAC, index: int = 0) -> TikhonovState:
    """G and A of a covered layer."""
    return inspect(opt).states[index]


def windows(layer: nn.Module, x: Tensor) -> Tensor:
    """The inputs (κ, n_A) that the κ outputs of one sample (1, …) see: the derivatives of each by the weight."""
    out = (
        layer(x)
        .movedim(-1 if isinstance(layer, nn.Linear) else 1, -1)[..., 0]
        .reshape(-1)
    )  # of the first output feature
    rows = [
        torch.autograd.grad(value, layer.weight, retain_graph=True)[0][
            0
        ].reshape(-1)
        for value in out
    ]
    ones = [] if layer.bias is None else [torch.ones(len(out), 1)]
    return torch.cat([torch.stack(rows), *ones], 1)


def naive_factors(
    layer: nn.Module, x: Tensor, y: Tensor
) -> tuple[Tensor, Tensor]:
    """G and A, one sample after the other."""
    G = A = 0.0
    for i in range(len(x)):
        a = windows(layer, x[i : i + 1])
        out = layer(x[i : i + 1])
        (g,) = torch.autograd.grad(loss_of(out, y[i : i + 1]), out)
        g = g.movedim(-1 if isinstance(layer, nn.Linear) else 1, -1).flatten(
            0, -2
        )  # (κ, n_G)
        A = A + a.T @ a / len(x)
        G = G + g.T @ g / len(g) / len(x)
    return G, A


def matrix(layer: nn.Module, of=lambda p: p.grad) -> Tensor:
    """Weight and bias, or their gradients, as (n_G, n_A)."""
    return torch.cat(
        [of(p).detach().reshape(len(p), -1) for p in layer.parameters()], 1
    )


def dense_direction(G: Tensor, A: Tensor, g: Tensor, damping: float) -> Tensor:
    pi = ((A.trace() / len(A)) / (G.trace() / len(G))).sqrt()
    F = torch.kron(
        G + damping**0.5 / pi * torch.eye(len(G)),
        A + pi * damping**0.5 * torch.eye(len(A)),
    )
    return (torch.linalg.inv(F) @ g.reshape(-1)).view_as(g)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_factors_and_direction_equal_the_dense_ones(case):
    layer = case.layer()
    x, y = data(case, layer)
    G, A = naive_factors(layer, x, y)
    opt, before = kfac(layer), matrix(layer, of=lambda p: p.clone())
    train(opt, layer, x, y)
    assert_close(factors(opt).G, G)
    assert_close(factors(opt).A, A)
    assert_close(
        before - matrix(layer, of=lambda p: p),
        dense_direction(G, A, matrix(layer), 0.3),
    )


def test_pi_balances_the_two_dampings():
    G, A = 4.0 * torch.eye(3), 9.0 * torch.eye(2)  # π = 3/2
    inverse = TikhonovState(G, A).at(0.36)
    assert_close(inverse.G, torch.eye(3) / (4 + 0.4))
    assert_close(inverse.A, torch.eye(2) / (9 + 0.9))


def test_without_gradients_or_inputs_the_direction_is_the_gradient_over_the_damping():
    layer = nn.Linear(3, 2, bias=False)
    opt, before = kfac(layer, damping=0.5), layer.weight.detach().clone()
    layer(torch.zeros(4, 3)).sum(1).mean().backward()
    layer.weight.grad = torch.randn(2, 3)
    opt.step()
    G = factors(opt).G
    assert_close(
        before - layer.weight.detach(),
        torch.linalg.solve(G + 0.5**0.5 * torch.eye(2), layer.weight.grad)
        / 0.5**0.5,
    )


def test_running_average_over_refreshes():
    layer = nn.Linear(4, 3)
    opt = kfac(layer, decay=0.75, lr=0.01)
    want = None
    for _ in range(3):
        x, y = torch.randn(B, 4), torch.randn(B, 3)
        fresh = naive_factors(layer, x, y)
        want = (
            fresh
            if want is None
            else tuple(
                0.75 * old + 0.25 * new
                for old, new in zip(want, fresh, strict=True)
            )
        )
        train(opt, layer, x, y)
        assert_close((factors(opt).G, factors(opt).A), want)


def test_first_step_refreshes_then_every_so_many():
    layer = nn.Linear(4, 3)
    opt, changed, last = (
        kfac(layer, refresh_every=3, decay=0.5, lr=0.01),
        [],
        None,
    )
    for _ in range(8):
        armed = inspect(opt).armed
        train(opt, layer, torch.randn(B, 4), torch.randn(B, 3))
        changed.append(factors(opt).A is not last)
        assert armed == changed[-1]
        last = factors(opt).A
    assert changed == [True, False, False, True, False, False, True, False]


def net() -> nn.Sequential:
    torch.manual_seed(1)
    conv = nn.Conv2d(2, 3, 3, stride=2, padding=1)
    return nn.Sequential(
        conv,
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(12, 5),
        nn.Tanh(),
        nn.Linear(5, 3),
    )


def batches(count: int, size: int = 8) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [
        (
            torch.randn(size, 2, 4, 4, generator=generator),
            torch.randn(size, 3, generator=generator),
        )
        for _ in range(count)
    ]


def params_of(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def test_micro_batches_equal_one_batch():
    (x, y), one, parts = batches(1)[0], net(), net()
    train(kfac(one), one, x, y)
    opt = kfac(parts)
    for part in (slice(0, 2), slice(2, 8)):  # of unequal size
        (loss_of(parts(x[part]), y[part]) * len(x[part]) / len(x)).backward()
    opt.step()
    assert_close(params_of(parts), params_of(one))


def test_layer_used_twice_in_one_backward_adds_up():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return self.layer(x[:, 0]) + self.layer(x[:, 1])

    model = Twice()
    x, y = torch.randn(B, 2, 4), torch.randn(B, 4)
    layer, stacked = model.layer, copy.deepcopy(model.layer)
    train(kfac(model), model, x, y)
    opt = kfac(stacked)  # the same as one call on both positions
    loss_of(stacked(x).sum(1), y).backward()
    opt.step()
    assert_close(params_of(layer), params_of(stacked))


@pytest.mark.parametrize("flat", [False, True])
def test_tokens_are_positions_however_they_are_laid_out(flat):
    """B is what most layers see: a layer on flattened tokens has the same factors."""

    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.third = (
                nn.Linear(3, 4),
                nn.Linear(4, 2),
                nn.Linear(2, 2),
            )

        def forward(self, x):
            h = (
                self.first(x.flatten(0, 1)).view(*x.shape[:2], 4)
                if flat
                else self.first(x)
            )
            return self.third(self.second(h))

    model = Tokens()
    x, y = torch.randn(B, 5, 3), torch.randn(B, 5, 2)
    out = (h := model.first(x)) @ model.second.weight.T + model.second.bias
    g = (
        torch.autograd.grad(loss_of(model.third(out), y), h)[0].flatten(0, 1)
        * B
    )
    a = torch.cat([x, torch.ones(B, 5, 1)], 2).flatten(0, 1)
    opt = kfac(model)
    train(opt, model, x, y)
    assert_close(factors(opt).A, a.T @ a / B)
    assert_close(factors(opt).G, g.T @ g / (5 * B))


def test_large_damping_is_the_gradient_over_it():
    model, damping = net(), 1e12
    opt, before = kfac(model, lr=damping), params_of(model)
    for group in opt.param_groups:
        group["damping"] = damping
    train(opt, model, *batches(1)[0])
    for old, p in zip(before, model.parameters(), strict=True):
        assert_close(old - p.detach(), p.grad, rtol=1e-4, atol=1e-6)


def test_changed_damping_acts_at_the_next_step():
    a, b = net(), net()
    for model, first in ((a, 0.3), (b, 7.0)):
        opt = kfac(model, damping=first, lr=0.0, refresh_every=10)
        train(opt, model, *batches(1)[0])
        opt.param_groups[0] |= {"damping": 0.3, "lr": 1.0}
        train(opt, model, *batches(1)[0])
    assert_close(params_of(a), params_of(b))


@pytest.mark.parametrize("how", ["state_dict", "deepcopy", "pickle"])
def test_a_copy_continues_identically(how):
    model, stream = net(), batches(7)
    opt = seng.KFAC(
        model,
        lr=0.05,
        damp="tikhonov",
        damping=0.1,
        refresh_every=3,
        nesterov=True,
        weight_decay=0.01,
    )
    for x, y in stream[:4]:
        train(opt, model, x, y)
    if how == "state_dict":
        buffer = io.BytesIO()
        torch.save(opt.state_dict(), buffer)
        buffer.seek(0)
        twin = copy.deepcopy(model)
        resumed = seng.KFAC(twin, lr=1.0, damp="tikhonov", refresh_every=3)
        resumed.load_state_dict(torch.load(buffer, weights_only=True))
    else:
        twin, resumed = (
            copy.deepcopy((model, opt))
            if how == "deepcopy"
            else pickle.loads(pickle.dumps((model, opt)))
        )
    for x, y in stream[4:]:
        train(opt, model, x, y)
        train(resumed, twin, x, y)
    assert_close(params_of(twin), params_of(model), rtol=0, atol=0)
    assert_close(
        resumed.state_dict()["state"],
        opt.state_dict()["state"],
        rtol=0,
        atol=0,
    )


def test_factors_of_half_precision_parameters_keep_their_own_through_a_checkpoint():
    layer = nn.Linear(4, 3, dtype=torch.bfloat16)
    opt = kfac(layer)
    train(
        opt,
        layer,
        torch.randn(B, 4, dtype=torch.bfloat16),
        torch.randn(B, 3, dtype=torch.bfloat16),
    )
    assert factors(opt).A.dtype == torch.float32
    other = kfac(layer)
    other.load_state_dict(opt.state_dict())
    for name in "GA":
        loaded, kept = (getattr(factors(o), name) for o in (other, opt))
        assert_close(loaded, kept, rtol=0, atol=0)


def test_a_checkpoint_of_sgd_loads():
    model = net()
    sgd = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    loss_of(model(batches(1)[0][0]), batches(1)[0][1]).backward()
    sgd.step()
    opt = seng.KFAC(model, damp="tikhonov", damping=0.2)
    opt.load_state_dict(sgd.state_dict())
    assert (
        opt.param_groups[0]["lr"] == 0.3
        and opt.param_groups[0]["damping"] == 0.2
    )
    train(opt, model, *batches(1)[0])
    assert sorted(inspect(opt).states) == [0, 1, 2]


def test_training_lowers_the_loss():
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
    x = torch.randn(64, 4)
    y = torch.stack([x.prod(1), x.sin().sum(1)], 1)
    opt = seng.KFAC(model, lr=0.03, damp="tikhonov", refresh_every=10)

    def closure():
        opt.zero_grad()
        loss = (model(x) - y).square().sum(1).mean()
        loss.backward()
        return loss.item()

    losses = [opt.step(closure) for _ in range(60)]
    assert losses[-1] < 0.2 * losses[0]


@pytest.mark.parametrize("damp", ["floor", "tikhonov"])
def test_update_is_that_of_sgd_with_the_direction_for_a_gradient(damp):
    model, twin = net(), net()
    options = {
        "lr": 0.1,
        "momentum": 0.8,
        "nesterov": True,
        "weight_decay": 0.1,
        "maximize": True,
    }
    kind = {"damp": damp, "refresh_every": 10}
    opt, sgd = (
        seng.KFAC(model, **kind, **options),
        torch.optim.SGD(twin.parameters(), **options),
    )
    probe = net()
    alone = seng.KFAC(
        probe, lr=1.0, momentum=0.0, **kind
    )  # whose steps are the directions
    for x, y in batches(3):
        probe.load_state_dict(model.state_dict())
        train(alone, probe, x, y)
        params = map(nn.Module.parameters, (model, twin, probe))
        for p, q, moved in zip(*params, strict=True):
            q.grad = (p - moved).detach()
        train(opt, model, x, y)
        sgd.step()
        assert_close(params_of(model), params_of(twin))


def test_what_is_not_covered_takes_the_plain_gradient_and_says_so():
    tied = nn.Linear(6, 6)
    shared = nn.Linear(6, 6)
    shared.weight = tied.weight
    parts = [
        nn.Embedding(7, 6),
        nn.LayerNorm(6),
        nn.Linear(6, 6),
        tied,
        shared,
        nn.Unflatten(1, (6, 1)),
    ]
    parts += [
        nn.Conv1d(6, 6, 1, groups=2),
        nn.ConvTranspose1d(6, 2, 1),
        nn.Flatten(),
    ]
    model = nn.Sequential(*parts)
    with pytest.warns(
        UserWarning, match="seng: these parameters take the plain gradient"
    ) as told:
        opt = kfac(model)
    assert len(told) == 1
    for name in (
        "0.weight (Embedding)",
        "1.bias (LayerNorm)",
        "4.bias (layers that share a parameter)",
        "6.bias (grouped convolution)",
        "7.bias (ConvTranspose1d)",
    ):
        assert name in str(told[0].message)
    before = params_of(model)
    train(opt, model, torch.randint(7, (B,)), torch.randn(B, 2))
    for old, (name, p) in zip(before, model.named_parameters(), strict=True):
        plain = torch.allclose(old - p.detach(), p.grad)
        assert plain == (not name.startswith("2.")), name


def test_frozen_weight_leaves_the_bias_a_block_of_its_own():
    layer = nn.Linear(4, 3)
    layer.weight.requires_grad_(False)
    x, y = torch.randn(B, 4), torch.randn(B, 3)
    opt, before = kfac(layer), layer.bias.detach().clone()
    train(opt, layer, x, y)
    G = factors(opt).G
    want = dense_direction(G, torch.ones(1, 1), layer.bias.grad[:, None], 0.3)[
        :, 0
    ]
    assert_close(before - layer.bias.detach(), want)
    layer.weight.requires_grad_(True)
    train(opt, layer, x, y)
    assert factors(opt).A.shape == (5, 5)


@pytest.mark.parametrize("whose", ["optimizer", "module"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_captures_go_with_their_gradients(whose, set_to_none):
    (x, y), (x_other, y_other) = batches(2)
    want, model = net(), net()
    train(kfac(want), want, x, y)
    opt = kfac(model)
    loss_of(model(x_other), y_other).backward()
    (opt if whose == "optimizer" else model).zero_grad(set_to_none)
    loss_of(model(x), y).backward()
    opt.step()
    assert_close(params_of(model), params_of(want))


def test_gradient_penalty_is_no_sample():
    (x, y), want, model = batches(1)[0], net(), net()
    train(kfac(want), want, x, y)
    opt = kfac(model)
    torch.autograd.grad(model(z := x.clone().requires_grad_()).sum(), z)
    train(opt, model, x, y)
    assert_close(params_of(model), params_of(want))


def test_grad_scaler_and_autocast():
    torch.set_default_dtype(torch.float32)
    x, y = (t.float() for t in batches(1)[0])
    found = []
    for scale in (1.0, 1024.0):
        model = net()
        opt, scaler = (
            kfac(model),
            torch.amp.GradScaler("cpu", init_scale=scale),
        )
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model(x).float(), y)
        scaler.scale(loss).backward()
        scaler.step(opt)
        found.append(
            [getattr(factors(opt, i), name) for i in (0, 1) for name in "AG"]
        )
    assert all(f.dtype == torch.float32 for f in found[0])
    assert_close(found[0], found[1])
    plain = net()
    opt = kfac(plain)
    train(opt, plain, x, y)
    near = {"rtol": 0.1, "atol": 0.05 * float(found[0][3].max())}
    assert_close(found[0][3], factors(opt, 1).G, **near)


def test_factors_of_captures_in_bfloat16_are_in_float32(monkeypatch):
    """As a GPU keeps captures under autocast; a CPU would widen them before they come here."""
    monkeypatch.setattr(Operator, "to", lambda U, dtype: U)
    torch.set_default_dtype(torch.float32)
    x, y = (t.float() for t in batches(1)[0])
    model, exact = net(), net()
    opt, wanted = kfac(model), kfac(exact)
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(model(x).float(), y)
    loss.backward()
    opt.step()
    train(wanted, exact, x, y)
    for i in (0, 1):
        for name in "GA":
            got, want = (getattr(factors(o, i), name) for o in (opt, wanted))
            assert got.dtype == torch.float32
            near = 0.05 * float(want.abs().max())
            assert_close(got, want, rtol=0.1, atol=near)
    assert all(p.isfinite().all() for p in model.parameters())


def test_param_groups_may_have_their_own_damping_and_come_later():
    model = net()
    opt = seng.KFAC(
        model[0].parameters(),
        module=model,
        lr=0.01,
        damp="tikhonov",
        damping=0.2,
        refresh_every=10,
    )
    train(opt, model, *batches(1)[0])
    A = factors(opt).A
    opt.add_param_group(
        {"params": list(model[3].parameters()), "damping": 5.0}
    )
    assert factors(opt).A is A
    train(opt, model, *batches(1)[0])
    train(opt, model, *batches(1)[0])
    for layer, damping in zip(inspect(opt).layers, (0.2, 5.0), strict=True):
        assert_close(layer.solver.A, layer.state.at(damping).A)
    with pytest.raises(ValueError, match="not the module's"):
        opt.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    assert len(opt.param_groups) == 2
    opt.add_param_group({"params": [model[5].weight], "damping": 1.0})
    opt.add_param_group({"params": [model[5].bias], "damping": 2.0})
    train(opt, model, *batches(1)[0])  # a layer that is new asks for a refresh
    train(opt, model, *batches(1)[0])
    *_, last = inspect(opt).layers
    assert_close(last.solver.A, last.state.at(1.0).A)  # its weight's


def test_refusals():
    with pytest.raises(ValueError, match="refresh_every"):
        seng.KFAC(net(), refresh_every=0)
    with pytest.raises(ValueError, match="decay"):
        seng.KFAC(net(), decay=1.0)
    with pytest.raises(ValueError, match="damping"):
        seng.KFAC(net(), damp="tikhonov", damping=0.0)
    with pytest.raises(
        ValueError, match="damped by its floor; leave out damp"
    ):
        seng.KFAC(net(), damping=0.3)
    for given in ({"rank": 8}, {"floor": 0.1}):
        (name,) = given
        with pytest.raises(ValueError, match=f"leave out {name}, or use damp"):
            seng.KFAC(net(), damp="tikhonov", **given)
    with pytest.raises(ValueError, match="has power 1, not 0.5"):
        seng.KFAC(net(), damp="tikhonov", power=0.5)
    with pytest.raises(
        ValueError, match="unknown damp 'relative'; use one of"
    ):
        seng.KFAC(net(), damp="relative")
    with pytest.raises(ValueError, match="unknown recipe 'adam'; use one of"):
        seng.KFAC(net(), recipe="adam")
    with pytest.raises(ValueError, match="no layer of LayerNorm"):
        seng.KFAC(nn.LayerNorm(3), damp="tikhonov")
    with pytest.warns(UserWarning, match="no module"):
        seng.KFAC(net().parameters())
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 2))
    with pytest.warns(UserWarning, match="sparse"):
        opt = kfac(model)
    with pytest.raises(RuntimeError, match="sparse"):
        train(opt, model, torch.randint(5, (B,)), torch.randn(B, 2))
    layer = nn.Linear(3, 2)
    opt = kfac(layer)
    nn.functional.linear(
        torch.randn(B, 3), layer.weight, layer.bias
    ).square().mean().backward()
    with pytest.raises(RuntimeError, match="not captured"):
        opt.step()


def test_a_shift_that_is_lost_in_rounding_grows():
    M = torch.tensor([[1.0, 1.0], [1.0, 1.0 - 1e-12]])  # not positive definite
    assert shifted_inverse(M, torch.tensor(1e-30)).isfinite().all()
    negative = -1e6 * torch.eye(2)  # nothing that a shift makes up for
    assert shifted_inverse(negative, torch.tensor(1e-30)).isfinite().all()


def test_not_finite_captures_are_dropped():
    layer = nn.Linear(4, 3)
    opt = kfac(layer, lr=0.0)
    train(opt, layer, torch.randn(B, 4), torch.randn(B, 3))
    A = factors(opt).A
    with pytest.warns(UserWarning, match="a refresh was dropped"):
        train(opt, layer, torch.full((B, 4), float("inf")), torch.randn(B, 3))
    assert factors(opt).A is A
