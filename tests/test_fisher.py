"""`fisher="gauss-newton"` and `"sampled"`, `blocks="network"`: directions against dense matrices in float64."""

from __future__ import annotations

import copy
import warnings
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from conftest import LAYERS, Case
from naive import dense_direction, flat, relative_error
from torch import Tensor, nn
from torch.func import functional_call, hessian, jacrev, vmap
from trajectories import UNCENTRED

import seng
from seng.layers import fisher as columns
from seng.layers.fisher import seeds
from seng.tell.inspection import inspect

LOSSES = ("squares", "cross-entropy", "bernoulli")


def one_loss(kind: str, f: Tensor, y: Tensor) -> Tensor:
    """Of one sample with output f (…, C): the mean over its positions."""
    f, y = f.reshape(-1, f.shape[-1]), y.reshape(-1, f.shape[-1])
    if kind == "squares":
        return 0.5 * (f - y).square().sum() / len(f)
    if kind == "bernoulli":
        return nn.functional.binary_cross_entropy_with_logits(
            f, y.sigmoid(), reduction="sum"
        ) / len(f)
    return nn.functional.cross_entropy(f, y.softmax(-1))


def batch_loss(kind: str, out: Tensor, y: Tensor) -> Tensor:
    return torch.stack(
        [one_loss(kind, f, t) for f, t in zip(out, y, strict=True)]
    ).mean()


def jacobians(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Per sample, (B, outputs, n) for each parameter, slow and obvious."""
    params = {k: p.detach() for k, p in model.named_parameters()}
    rows = [
        jacrev(
            lambda p, one=one: functional_call(model, p, (one[None],))[
                0
            ].reshape(-1)
        )(params)
        for one in x
    ]
    return {
        k: torch.stack([row[k].flatten(1) for row in rows]) for k in params
    }


def gauss_newton(
    model: nn.Module, x: Tensor, kind: str
) -> dict[tuple[str, str], Tensor]:
    """(1/B) Σ JᵀHJ for every pair of parameters."""
    with (
        torch.no_grad()
    ):  # so that the optimizer does not take it for training
        out = model(x)
    J = jacobians(model, x)
    y = torch.randn_like(out)  # H does not depend on it
    H = torch.stack(
        [
            hessian(lambda f, t=t: one_loss(kind, f, t))(f).reshape(
                f.numel(), -1
            )
            for f, t in zip(out, y, strict=True)
        ]
    )
    return {
        (a, b): torch.einsum("bim,bij,bjn->mn", J[a], H, J[b]) / len(x)
        for a in J
        for b in J
    }


def assembled(M: dict[tuple[str, str], Tensor], names: list[str]) -> Tensor:
    return torch.cat([torch.cat([M[a, b] for b in names], 1) for a in names])


def layers_of(model: nn.Module, blocks: str) -> list[list[str]]:
    names = [name for name, _ in model.named_parameters()]
    if blocks == "network":
        return [names]
    return [
        [n for n in names if n.rpartition(".")[0] == layer]
        for layer in dict.fromkeys(n.rpartition(".")[0] for n in names)
    ]


def expected(
    model: nn.Module,
    M: dict[tuple[str, str], Tensor],
    blocks: str,
    damping: float,
) -> Tensor:
    params = dict(model.named_parameters())
    out = {}
    for names in layers_of(model, blocks):
        d = dense_direction(
            assembled(M, names), flat(params[n].grad for n in names), damping
        )
        for n, part in zip(
            names, d.split([params[n].numel() for n in names]), strict=True
        ):
            out[n] = part
    return torch.cat([out[n] for n in params])


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 3, 3),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(3 * 3 * 2, 5),
        nn.Tanh(),
        nn.Linear(5, 3),
    )


X, Y = (
    torch.randn(
        6,
        *shape,
        generator=torch.Generator().manual_seed(1),
        dtype=torch.float64,
    )
    for shape in ((2, 5, 4), (3,))
)


def options(**changes: object) -> seng.Curvature:
    plain = {
        **UNCENTRED,
        "rank": 100,
        "decay": 0.0,
        "relative_damping": False,
        "fisher": "gauss-newton",
        "form": "auto",
    }
    if changes.get("form") == "explicit":
        del plain["rank"]
    return seng.Curvature(**{**plain, **changes})  # type: ignore[arg-type]


def moved(model: nn.Module, opt: torch.optim.Optimizer) -> Tensor:
    before = flat(p.detach().clone() for p in model.parameters())
    opt.step()
    return before - flat(p.detach() for p in model.parameters())


@pytest.mark.parametrize("form", ["auto", "explicit", "implicit", "merged"])
@pytest.mark.parametrize("blocks", ["layer", "network"])
@pytest.mark.parametrize("kind", LOSSES)
def test_gauss_newton_is_the_dense_matrix(
    kind: str, blocks: str, form: str
) -> None:
    model = network()
    opt = seng.SENG(
        model,
        1.0,
        momentum=0,
        damping=0.3,
        curvature=options(loss=kind, blocks=blocks, form=form),
    )
    M = gauss_newton(model, X, kind)
    batch_loss(kind, model(X), Y).backward()
    want = expected(model, M, blocks, 0.3) * 0.3  # in SGD's units
    assert relative_error(moved(model, opt), want) < 1e-9


@pytest.mark.parametrize("case", LAYERS, ids=lambda case: case.name)
def test_gauss_newton_of_every_kind_of_layer(case: Case) -> None:
    torch.manual_seed(0)
    layer = case.layer()
    if (
        any(
            isinstance(m, nn.modules.batchnorm._BatchNorm)
            for m in layer.modules()
        )
        and layer.training
    ):
        pytest.skip("a batch's samples are not independent")
    x = case.input(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        opt = seng.SENG(
            layer,
            1.0,
            momentum=0,
            damping=0.5,
            curvature=options(loss="squares", rank=10000),
        )
    J = torch.cat(list(jacobians(layer, x).values()), 2)
    positions = (
        layer(x)[0].movedim(0, -1)[..., 0].numel()
        if layer(x).dim() > 3
        else layer(x)[0, ..., 0].numel()
    )
    M = torch.einsum("bim,bin->mn", J, J) / len(x) / positions
    out = layer(x)
    (out * torch.randn_like(out)).mean().backward()
    want = 0.5 * dense_direction(
        M, flat(p.grad for p in layer.parameters()), 0.5
    )
    assert relative_error(moved(layer, opt), want) < 1e-8


def test_one_number_per_sample_needs_no_dimension_for_it() -> None:
    model = nn.Sequential(
        nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1), nn.Flatten(0)
    )
    x = torch.randn(7, 4)
    opt = seng.SENG(
        model,
        1.0,
        momentum=0,
        damping=0.1,
        curvature=options(blocks="network"),
    )
    J = torch.cat(
        [
            j.flatten(1)
            for j in vmap(
                jacrev(
                    lambda p, one: functional_call(model, p, (one[None],))[0]
                ),
                (None, 0),
            )(dict(model.named_parameters()), x).values()
        ],
        1,
    ).detach()
    (model(x) ** 2).mean().backward()
    g = flat(p.grad for p in model.parameters())
    assert (
        relative_error(
            moved(model, opt), 0.1 * dense_direction(J.T @ J / 7, g, 0.1)
        )
        < 1e-9
    )


@pytest.mark.parametrize("shape", [(4, 5), (4, 3, 5), (2, 5, 3, 2)])
@pytest.mark.parametrize("kind", LOSSES)
def test_the_columns_are_a_root_of_the_hessian(
    kind: str, shape: tuple[int, ...]
) -> None:
    out = torch.randn(shape)
    chance = torch.Generator().manual_seed(0)
    S = torch.stack(list(seeds(out, "gauss-newton", kind, chance)))  # type: ignore[arg-type]
    last = out.movedim(1, -1) if out.dim() > 3 else out
    S = S.movedim(2, -1) if out.dim() > 3 else S
    for i in range(len(out)):
        H = hessian(partial(one_loss, kind, y=torch.randn_like(last[i])))(
            last[i]
        ).reshape(last[i].numel(), -1)
        rows = S[:, i].flatten(1) / len(S) ** 0.5
        torch.testing.assert_close(rows.T @ rows, H)


@pytest.mark.parametrize("kind", LOSSES)
def test_drawn_labels_have_the_hessian_as_their_mean(kind: str) -> None:
    out = torch.randn(1, 2, 4).expand(200_000, 2, 4)
    (s,) = seeds(out, "sampled", kind, torch.Generator().manual_seed(0))  # type: ignore[arg-type]
    s = s.flatten(1)
    H = hessian(partial(one_loss, kind, y=torch.zeros(2, 4)))(out[0]).reshape(
        8, 8
    )
    assert (s.T @ s / len(s) - H).abs().max() < 0.01 and s.mean(
        0
    ).abs().max() < 0.01


@pytest.mark.parametrize("blocks", ["layer", "network"])
def test_sampled_is_the_matrix_of_its_draw(
    monkeypatch: pytest.MonkeyPatch, blocks: str
) -> None:
    model, given = network(), list[Tensor]()
    monkeypatch.setattr(
        "seng.layers.samples.seeds",
        lambda *a: (given.append(s) or s for s in columns.seeds(*a)),
    )
    opt = seng.SENG(
        model,
        1.0,
        momentum=0,
        damping=0.2,
        curvature=options(fisher="sampled", blocks=blocks),
    )
    J = jacobians(model, X)
    loss = nn.functional.cross_entropy(model(X), Y.argmax(1))
    loss.backward()
    assert len(given) == 1 and given[0].shape == (6, 3)
    u = {k: torch.einsum("bi,bin->bn", given[0], j) for k, j in J.items()}
    M = {(a, b): u[a].T @ u[b] / 6 for a in u for b in u}
    assert (
        relative_error(
            moved(model, opt), 0.2 * expected(model, M, blocks, 0.2)
        )
        < 1e-9
    )


def test_micro_batches_and_limits_and_the_order_of_zero_grad() -> None:
    for samples in (None, 4):
        model = network()
        opt = seng.SENG(
            model,
            1.0,
            momentum=0,
            damping=0.3,
            curvature=options(loss="cross-entropy", samples=samples),
        )
        M = gauss_newton(model, X[:samples], "cross-entropy")
        for part in (slice(0, 3), slice(3, 6)):
            loss = 0.5 * nn.functional.cross_entropy(
                model(X[part]), Y[part].argmax(1)
            )
            if part.start == 0:
                opt.zero_grad()  # between forward and backward, as many loops have it
            loss.backward()
        assert (
            relative_error(
                moved(model, opt), 0.3 * expected(model, M, "layer", 0.3)
            )
            < 1e-9
        )


def test_a_forward_that_is_not_trained_with_does_not_count() -> None:
    model = network()
    opt = seng.SENG(
        model, 1.0, momentum=0, damping=0.3, curvature=options(samples=4)
    )
    M = gauss_newton(model, X[:4], "squares")
    for _ in range(2):
        model(torch.randn_like(X))  # an evaluation that forgot torch.no_grad()
        opt.zero_grad()
        model(X).square().mean().backward()
        model(torch.randn_like(X))
        if _ == 0:
            opt.zero_grad()
    model(
        X
    ).square().sum().backward()  # accumulated, and beyond the limit of four samples
    assert (
        relative_error(
            moved(model, opt), 0.3 * expected(model, M, "layer", 0.3)
        )
        < 1e-9
    )


def test_a_skipped_step_leaves_nothing_behind() -> None:
    model = network()
    opt = seng.SENG(model, 1.0, momentum=0, damping=0.3, curvature=options())
    model(10 * X).sum().backward()
    opt.zero_grad()  # the step was skipped
    M = gauss_newton(model, X, "squares")
    model(X).square().sum().backward()
    assert (
        relative_error(
            moved(model, opt), 0.3 * expected(model, M, "layer", 0.3)
        )
        < 1e-9
    )


def test_between_refreshes_nothing_is_sent_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, count = network(), []
    monkeypatch.setattr(
        "seng.layers.samples.seeds",
        lambda *a: count.append(1) or columns.seeds(*a),
    )
    opt = seng.SENG(model, 0.1, refresh_every=3, curvature=options())
    for _ in range(4):
        opt.zero_grad()
        with torch.no_grad():
            model(X)
        model(X).square().mean().backward()
        opt.step()
    assert len(count) == 2


def test_a_batch_of_its_own_needs_no_loss() -> None:
    model = network()
    opt = seng.SENG(model, 1.0, momentum=0, damping=0.3, curvature=options())
    other = torch.randn_like(X)
    with opt.curvature_batch():
        model(other)
    M = gauss_newton(model, other, "squares")
    model(X).square().mean().backward()
    assert (
        relative_error(
            moved(model, opt), 0.3 * expected(model, M, "layer", 0.3)
        )
        < 1e-9
    )


def test_logits_of_a_record_and_what_has_none() -> None:
    class Wrapped(nn.Module):
        def __init__(self, bare: bool) -> None:
            super().__init__()
            self.inner, self.bare = network(), bare

        def forward(self, x: Tensor) -> object:
            return (
                SimpleNamespace(logits=self.inner(x))
                if not self.bare
                else {"out": self.inner(x)}
            )

    model = Wrapped(False)
    opt = seng.SENG(model, 0.1, curvature=options(fisher="sampled"))
    model(X).logits.square().mean().backward()  # type: ignore[attr-defined]
    opt.step()
    assert opt.engine is not None and len(inspect(opt).states[0].gram) == 6
    model = Wrapped(True)
    opt = seng.SENG(model, 0.1, curvature=options(fisher="sampled"))
    with pytest.raises(
        TypeError, match="start from the module's output.*dict"
    ):
        model(X)


def test_a_module_that_is_not_called_as_a_whole_is_told() -> None:
    model = network()
    opt = seng.SENG(model, 0.1, curvature=options())
    x = X
    for layer in model:
        x = layer(x)
    x.square().mean().backward()
    with pytest.raises(RuntimeError, match="has to be called as a whole"):
        opt.step()


def test_too_many_outputs_are_refused() -> None:
    model = nn.Linear(2, 2000)
    opt = seng.SENG(model, 0.1, curvature=options())
    with pytest.raises(
        ValueError, match="once for each of its 2000 numbers.*fisher='sampled'"
    ):
        model(torch.randn(3, 2))
    assert opt.refresh_due


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"fisher": "exact"}, "unknown fisher 'exact'"),
        ({"blocks": "all"}, "unknown blocks 'all'"),
        ({"loss": "hinge"}, "unknown loss 'hinge'"),
        (
            {"blocks": "network", "combine": "independent"},
            "is made layer by layer",
        ),
        (
            {"fisher": "empirical", "loss": "squares"},
            "fisher='empirical' takes the loss that is trained",
        ),
    ],
)
def test_bad_options(given: dict[str, str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        options(**given)


def test_the_optimizer_goes_and_its_hook_with_it() -> None:
    model = network()
    opt = seng.SENG(model, 0.1, curvature=options())
    copied = copy.deepcopy(model)
    assert len(model._forward_hooks) == 1
    del opt
    assert not model._forward_hooks
    copied(X)


# One block for the whole network


@pytest.mark.parametrize("fisher", ["empirical", "gauss-newton"])
def test_layers_of_every_form_make_one_block(fisher: str) -> None:
    """Convolution, norms, an embedding: each in its own form."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(7, 6),
        nn.LayerNorm(6),
        nn.Conv1d(4, 3, 2),
        nn.GroupNorm(1, 3),
        nn.Flatten(),
        nn.Linear(15, 2),
    )
    x = torch.randint(7, (5, 4))
    opt = seng.SENG(
        model,
        1.0,
        momentum=0,
        damping=0.2,
        curvature=options(fisher=fisher, blocks="network", form="implicit"),
    )
    if fisher == "gauss-newton":
        M = gauss_newton(model, x, "squares")
    else:
        u = [
            torch.cat(
                [
                    v.flatten()
                    for v in torch.autograd.grad(
                        model(one[None]).square().sum(),
                        list(model.parameters()),
                    )
                ]
            )
            for one in x
        ]
    model(x).square().sum(1).mean().backward()
    g = flat(p.grad for p in model.parameters())
    if fisher == "gauss-newton":
        want = expected(model, M, "network", 0.2)
    else:
        U = torch.stack(u, 1) / 5**0.5
        want = dense_direction(U @ U.T, g, 0.2)
    assert relative_error(moved(model, opt), 0.2 * want) < 1e-9


def test_the_network_accumulates_and_truncates_as_one() -> None:
    """δM + (1 − δ)M', cut to k directions, against dense eigenvectors of the whole."""
    model, k = network(), 4
    opt = seng.SENG(
        model,
        0.0,
        momentum=0,
        damping=0.1,
        refresh_every=1,
        curvature=options(
            fisher="empirical",
            blocks="network",
            rank=k,
            decay=0.6,
            relative_damping=True,
        ),
    )
    basis = None
    for i in range(3):
        x = torch.randn(6, 2, 5, 4, generator=torch.Generator().manual_seed(i))
        params = list(model.parameters())
        each = [
            flat(torch.autograd.grad(model(one[None]).square().sum(), params))
            for one in x
        ]
        U = torch.stack(each, 1) / 6**0.5
        left, s, _ = torch.linalg.svd(U, full_matrices=False)
        new = left[:, :k] * s[:k]
        if basis is not None:
            left, s, _ = torch.linalg.svd(
                torch.cat([0.6**0.5 * basis, 0.4**0.5 * new], 1),
                full_matrices=False,
            )
            new = left[:, :k] * s[:k]
        basis = new
        opt.zero_grad()
        model(x).square().sum(1).mean().backward()
        g = flat(p.grad for p in params)
        with torch.no_grad():
            assert opt.engine is not None
            damping = dict.fromkeys(params, 0.1)
            grads = {p: p.grad for p in params if p.grad is not None}
            plan = opt.engine.ready(
                grads, damping, updates=False, traced=False
            )
            found = opt.engine.directions(plan, grads, damping)
            opt.engine.advance(damping)
        M = basis @ basis.T
        lam = 0.1 * float(torch.linalg.eigvalsh(M)[-1])
        assert (
            relative_error(
                flat(found[p] for p in params),
                lam * dense_direction(M, g, lam),
            )
            < 1e-9
        )


def test_one_block_has_one_damping_and_fits_its_memory_or_says_so() -> None:
    model = network()
    groups = [
        {"params": model[0].parameters(), "damping": 0.2},
        {"params": [*model[3].parameters(), *model[5].parameters()]},
    ]
    opt = seng.SENG(
        groups, 0.1, module=model, curvature=options(blocks="network")
    )
    model(X).square().mean().backward()
    with pytest.raises(
        ValueError, match="one block, but its parameters have the dampings"
    ):
        opt.step()
    opt = seng.SENG(
        model, 0.1, curvature=options(blocks="network", memory=100)
    )
    opt.zero_grad()
    model(X).square().mean().backward()
    with pytest.raises(
        ValueError,
        match="the curvature needs .* where memory=100 allows 100 B",
    ):
        opt.step()


def test_a_saved_network_block_goes_on_as_it_was() -> None:
    def train(model: nn.Module, opt: seng.SENG, steps: range) -> None:
        for i in steps:
            x = torch.randn(
                6, 2, 5, 4, generator=torch.Generator().manual_seed(i)
            )
            opt.zero_grad()
            model(x).square().mean().backward()
            opt.step()

    make = partial(
        seng.SENG,
        lr=0.1,
        refresh_every=3,
        curvature=options(blocks="network", decay=0.5, rank=5),
    )
    model = network()
    opt = make(model)
    train(model, opt, range(5))
    twin = copy.deepcopy(model)
    other = make(twin)
    other.load_state_dict(copy.deepcopy(opt.state_dict()))
    train(model, opt, range(5, 9))
    train(twin, other, range(5, 9))
    assert torch.equal(
        flat(p.detach() for p in model.parameters()),
        flat(p.detach() for p in twin.parameters()),
    )


def test_explain_tells_of_the_whole() -> None:
    assert "of the whole network" in str(
        seng.explain(network(), X, curvature=options(blocks="network", rank=3))
    )


# Beside the rest of the library


def test_attach_and_half_precision() -> None:
    found = []
    for amp in (False, True):
        model = network().float()
        opt = torch.optim.SGD(model.parameters(), 1.0)
        seng.attach(
            opt,
            model,
            damping=0.3,
            curvature=options(fisher="sampled", blocks="network"),
        )
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            loss = nn.functional.cross_entropy(
                model(X.float()).float(), Y.argmax(1)
            )
        loss.backward()
        assert all(
            p.grad is not None and p.grad.dtype == torch.float32
            for p in model.parameters()
        )
        found.append(moved(model, opt))
    assert 0 < relative_error(found[1], found[0]) < 0.05


def test_a_loss_scale_does_not_reach_the_curvature() -> None:
    found = []
    for scale in (1.0, 1024.0):
        model = network().float()
        opt = seng.SENG(
            model,
            1.0,
            momentum=0,
            damping=0.3,
            curvature=options(loss="cross-entropy"),
        )
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        scaler.scale(
            nn.functional.cross_entropy(model(X.float()), Y.argmax(1))
        ).backward()
        before = flat(p.detach().clone() for p in model.parameters())
        scaler.step(opt)
        found.append(before - flat(p.detach() for p in model.parameters()))
    assert relative_error(found[1], found[0]) < 1e-5


def test_a_compiled_module_is_told_what_to_do_and_can() -> None:
    torch._dynamo.reset()
    model = network()
    opt = seng.SENG(model, 1.0, momentum=0, damping=0.3, curvature=options())
    compiled = torch.compile(model, backend="eager")
    compiled(X).square().mean().backward()
    with pytest.raises(
        RuntimeError, match="not under torch.compile.*curvature_batch"
    ):
        opt.step()
    M = gauss_newton(model, X, "squares")
    with opt.curvature_batch():
        model(X)
    assert (
        relative_error(
            moved(model, opt), 0.3 * expected(model, M, "layer", 0.3)
        )
        < 1e-9
    )


def test_parameters_that_the_output_does_not_reach_take_the_plain_gradient() -> (
    None
):
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.aside = nn.Linear(3, 2), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    model = Two()
    opt = seng.SENG(model, 1.0, momentum=0, damping=0.3, curvature=options())
    model(torch.randn(4, 3)).square().mean().backward()
    before = model.aside.weight.detach().clone()
    opt.step()
    assert torch.equal(model.aside.weight, before)
