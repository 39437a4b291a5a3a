"""The Kronecker metric P, alone (KFAC) and as the base of SENG: every kind of layer, mixed precision, compilers, checkpoints,
ranks, budgets, the GPU.
"""

import copy
import io
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import naive
import pytest
import test_attach
import test_state
import torch
import torch.distributed.checkpoint as dcp
from conftest import Case
from test_capture import InPlace, SharedConv, Tied, Twice, values
from test_compile import Alike, Checkpointed, Convolutions
from test_compile import train as train_compiled
from test_distributed import Branches, batches, network, parts, step_of
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.checkpoint.state_dict import (
    get_state_dict,
    set_state_dict,
)
from torch.nn.parallel import DistributedDataParallel

import seng
from seng.gpu.recorder import directly
from seng.layers.sites import survey
from seng.linalg.memory import size_of
from seng.linalg.sketch import (
    CountSketch,
    Gaussian,
    KroneckerRows,
    LeverageRows,
    Rows,
)
from seng.metrics.choose import metric_of
from seng.metrics.curvature import OF_ROOTS, POWER
from seng.metrics.kronecker import KroneckerState
from seng.metrics.metric import Dims, plan
from seng.tell.inspection import inspect

Fields = dict[str, Any]  # of Curvature, or of Kronecker

each_metric = pytest.mark.parametrize(
    "alone", [False, True], ids=["SENG", "KFAC"]
)
on_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device"
)


def curvature_of(alone: bool, P: Fields, U: Fields) -> Any:
    """Ū over P, or P alone."""
    base = seng.Kronecker(**P)
    if alone:
        return metric_of(base)
    return seng.Curvature(**{"samples": 16, **U}, base=base)  # all there are


def optimizer(
    alone: bool,
    params: Any,
    lr: Any = 0.1,
    *,
    P: Fields | None = None,
    U: Fields | None = None,
    **options: Any,
) -> Any:
    """KFAC, or SENG over the same P; KFAC has no damping."""
    if alone:
        options.pop("damping", None)
        return seng.KFAC(params, lr, **(P or {}), **options)
    curvature = curvature_of(alone, P or {}, U or {})
    return seng.SENG(params, lr, curvature=curvature, **options)


# Layers


FLOOR = OF_ROOTS["floor"]
WHOLE = {"rank": 10**6, "decay": 0}  # all of C, and all of U, anew


@each_metric
def test_every_kind_of_layer_takes_the_dense_direction(
    case: Case, alone: bool
) -> None:
    layer = case.layer()
    x, target = case.input(5), case.target(layer, 5)
    ((site,), _) = survey(layer, layer.parameters())
    u = naive.as_block(
        layer, site, naive.per_sample_gradients(layer, x, target)
    )
    P, g = naive.metric(layer, site, x, target), u.mean(0)
    want = (
        naive.as_long_as(g, torch.linalg.solve(P, g))
        if alone
        else naive.based_direction(naive.covariance(u), P, g, 0.03)
    )
    opt = optimizer(
        alone, layer, 1.0, momentum=0.0, damping=0.03, P=WHOLE, U=WHOLE
    )
    got = step_of(layer, opt, x, target)
    assert (
        naive.relative_error(naive.as_block(layer, site, got[None])[0], want)
        < 1e-9
    )
    (entry,) = opt.diagnostics().values()
    assert entry["base"] == ("kronecker" if site.factored else "diagonal")


class TiedLinear(nn.Module):
    """Two linear layers of one weight, one of them on sequences, each with a bias of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).tanh().mean(1))


class TimeFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = (
            nn.Linear(3, 4),
            nn.LayerNorm(4),
            nn.Linear(4, 2),
        )
        for layer in (self.a, self.norm, self.b):
            seng.layers.arrange(layer, lambda t: t.transpose(0, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.norm(self.a(x.transpose(0, 1)).tanh())).transpose(
            0, 1
        )


def frozen(name: str) -> nn.Module:
    model = nn.Sequential(
        nn.Linear(4, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 3)
    )
    for layer in (model[0], model[2]):
        getattr(layer, name).requires_grad_(False)
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "one dimension": (
        lambda: nn.Sequential(
            nn.Conv1d(2, 4, 3),
            nn.Tanh(),
            nn.ConvTranspose1d(4, 4, 2, groups=2),
            nn.GroupNorm(2, 4),
        ),
        lambda: torch.randn(8, 2, 6),
    ),
    "three dimensions": (
        lambda: nn.Sequential(
            nn.Conv3d(2, 2, 2),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(2 * 2 * 3 * 2, 3),
        ),
        lambda: torch.randn(8, 2, 3, 4, 3),
    ),
    "embedding": (
        lambda: nn.Sequential(
            nn.Embedding(6, 4), nn.Flatten(), nn.Linear(12, 3), nn.RMSNorm(3)
        ),
        lambda: torch.randint(6, (8, 3)),
    ),
    "in place": (InPlace, lambda: torch.randn(8, 4)),
    "twice": (Twice, lambda: torch.randn(8, 4, 3)),
    "tied to an embedding": (Tied, lambda: torch.randint(7, (8, 4))),
    "tied to an embedding without bias": (
        lambda: Tied(False),
        lambda: torch.randint(7, (8, 4)),
    ),
    "tied linear": (TiedLinear, lambda: torch.randn(8, 3, 4)),
    "tied convolution": (SharedConv, lambda: torch.randn(8, 2, 5, 5)),
    "time first": (TimeFirst, lambda: torch.randn(8, 5, 3)),
    "frozen weight": (lambda: frozen("weight"), lambda: torch.randn(8, 4)),
    "frozen bias": (lambda: frozen("bias"), lambda: torch.randn(8, 4)),
}


def trained(
    kind: str, sizes: tuple[int, ...], steps: int, alone: bool
) -> tuple[nn.Module, list[float]]:
    """On one batch of 8, cut into micro-batches."""
    torch.manual_seed(1)
    make, draw = MODELS[kind]
    model, x = make(), draw()
    target = torch.randn_like(model(x))
    opt = optimizer(
        alone, model, 0.005, refresh_every=2, damping=0.1, strict=True
    )
    losses = []
    for _ in range(steps):
        opt.zero_grad()
        losses.append(0.0)
        for a, b in zip(x.split(sizes), target.split(sizes), strict=True):
            loss = naive.loss_of(model(a), b) * len(a) / 8
            loss.backward()
            losses[-1] += float(loss.detach())
        opt.step()
    assert len(inspect(opt).states) == (
        len(inspect(opt).sites) if steps else 0
    )
    return model, losses


@each_metric
@pytest.mark.parametrize("kind", MODELS)
def test_each_kind_trains_and_micro_batches_are_one_batch(
    kind: str, alone: bool
) -> None:
    model, losses = trained(kind, (8,), 7, alone)
    assert values(model).isfinite().all() and losses[-1] < losses[0]
    start = values(trained(kind, (8,), 0, alone)[0])
    for sizes in ((4, 4), (1, 5, 2)):
        accumulated, _ = trained(kind, sizes, 7, alone)
        assert (
            naive.relative_error(
                values(accumulated) - start, values(model) - start
            )
            < 1e-9
        )


def test_inputs_may_be_overwritten() -> None:
    """As a buffer that each batch is copied into: between backwards, before the step, and after it."""
    ends = []
    for buffered in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
        opt = seng.SENG(model, lr=0.1, refresh_every=3)
        buffer = torch.empty(3, 4)
        for _ in range(4):
            for x in torch.randn(2, 3, 4):
                model(
                    buffer.copy_(x) if buffered else x
                ).square().mean().backward()
            buffer.fill_(7)
            opt.step()
            opt.zero_grad()
        ends.append(values(model))
    assert torch.equal(*ends)


@each_metric
def test_unfreezing_and_freezing_begins_anew(alone: bool) -> None:
    model = frozen("weight")
    opt = optimizer(alone, model, 0.01, refresh_every=1)
    for i in range(6):
        for layer in (model[0], model[2]):
            layer.weight.requires_grad_(2 <= i < 4)
        step_of(model, opt, torch.randn(8, 4), torch.randn(8, 3))
        assert values(model).isfinite().all()
    metrics = map(base_of, inspect(opt).states.values())
    assert [
        P.A.V.shape[1] if isinstance(P, KroneckerState) else P.v.numel()
        for P in metrics
    ] == [1, 5, 6]


def base_of(state: Any) -> Any:
    """P of a state, which may be P alone; None: I."""
    return getattr(state, "P", state)


# Precision and compilers

ABSOLUTE = {"relative_damping": False}  # a relative λ sees no wrong scale


@pytest.mark.parametrize(
    ("samples", "refreshes", "base_rank"),
    [(16, 1, 128), (36, 1, 32), (32, 12, 128)],
)
@pytest.mark.parametrize("power", [0.5, 1.0])
@pytest.mark.parametrize("floor", [0.1, 1e-3])
def test_rounding_is_not_what_few_samples_are_stepped_along(
    floor: float, power: float, samples: int, refreshes: int, base_rank: int
) -> None:
    """What no sample had, P⁻¹ makes large: in bfloat16 that used to be nearly all of the direction."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(128, 256),
        nn.ReLU(),
        nn.Linear(256, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    ).float()
    options = {"power": power, "rank": base_rank, "floor": floor}
    opt = seng.KFAC(model, 0.0, refresh_every=1, decay=0.8, **options)
    for i in range(refreshes):
        generator = torch.Generator().manual_seed(i)
        x, y = (
            torch.randn(samples, 128, generator=generator).float(),
            torch.randint(10, (samples,), generator=generator),
        )
        exact = torch.autograd.grad(
            nn.functional.cross_entropy(model(x), y), list(model.parameters())
        )
        opt.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
    grads = (
        dict(zip(model.parameters(), exact, strict=True)),
        {p: p.grad for p in model.parameters()},
    )
    for site, state in zip(
        inspect(opt).sites, inspect(opt).states.values(), strict=True
    ):
        d = [
            state.at(0.01)(site.gather(site.active(), each, torch.float32))
            for each in grads
        ]
        assert float(nn.functional.cosine_similarity(*d, dim=0)) > 0.92


@each_metric
def test_bfloat16_autocast_follows_float32(alone: bool) -> None:
    moved = []
    for mixed in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(1, 4, 3),
            nn.GroupNorm(2, 4),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(64, 5),
        ).float()
        opt = optimizer(
            alone, model, 0.02, refresh_every=3, damping=0.1, P={"rank": 8}
        )
        start = values(model)
        for i in range(7):
            generator = torch.Generator().manual_seed(i)
            x, y = (
                torch.randn(64, 1, 6, 6, generator=generator).float(),
                torch.randint(5, (64,), generator=generator),
            )
            opt.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
                loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            opt.step()
        moved.append(values(model) - start)
    assert float(nn.functional.cosine_similarity(*moved, dim=0)) > 0.99


@each_metric
def test_captures_are_unscaled_by_the_scale_of_their_step(alone: bool) -> None:
    results = []
    for scaled in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        opt = optimizer(
            alone, model, 0.05, refresh_every=1, damping=0.1, U=ABSOLUTE
        )
        scaler = torch.amp.GradScaler(
            "cpu", init_scale=1024.0, growth_interval=2, enabled=scaled
        )
        for _ in range(5):
            opt.zero_grad()
            scaler.scale(
                naive.loss_of(model(torch.randn(5, 3)), torch.randn(5, 2))
            ).backward()
            scaler.step(opt)
            scaler.update()
        results.append(values(model))
    assert naive.relative_error(*results) < 1e-9


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def built(
    kind: Callable[[], nn.Module], alone: bool, **given: Any
) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = kind()
    options = {"lr": 0.02, "refresh_every": 3, "strict": True, "damping": 0.1}
    return model, optimizer(alone, model, **options | given)


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize(
    ("kind", "alone"),
    [
        (Convolutions, False),
        (Convolutions, True),
        (Alike, False),
        (Checkpointed, False),
    ],
)
def test_a_compiled_model_is_captured_as_the_plain_one(
    kind: Callable[[], nn.Module], alone: bool
) -> None:
    model, opt = built(kind, alone, U=ABSOLUTE)
    want = train_compiled(model, opt, model)
    model, opt = built(kind, alone, U=ABSOLUTE)
    counter = CompileCounterWithBackend("aot_eager")
    got = train_compiled(
        model, opt, torch.compile(model, backend=counter, fullgraph=True)
    )
    assert naive.relative_error(got, want) < 1e-11 and counter.frame_count == 2


@pytest.mark.usefixtures("_fresh_compiler")
@each_metric
def test_a_compiled_step_is_one_graph_between_refreshes(alone: bool) -> None:
    given = {
        "U": {"decay": 0},
        "lr": torch.tensor(0.02),
        "refresh_every": 6,
    }
    model, opt = built(Convolutions, alone, **given)
    want = train_compiled(model, opt, model, steps=14)
    model, opt = built(Convolutions, alone, **given)
    counter, graphs = CompileCounterWithBackend("eager"), []
    step = torch.compile(opt.step, backend=counter)

    def compiled() -> None:
        step()
        graphs.append(counter.frame_count)

    got = train_compiled(model, opt, model, steps=14, step=compiled)
    assert naive.relative_error(got, want) < 1e-10
    assert graphs[2:] == [2] * 12  # no refresh compiles anything anew


@each_metric
def test_activation_checkpointing_changes_nothing(alone: bool) -> None:
    ends = [
        train_compiled(model, opt, model)
        for model, opt in (built(k, alone) for k in (InPlace, Checkpointed))
    ]
    assert torch.equal(*ends)


# Checkpoints

SAVED = [(False, 128), (False, 3), (True, 3)]  # alone, and the rank of P
each_saved = pytest.mark.parametrize(("alone", "rank"), SAVED)


def saved(alone: bool, **options: Any) -> tuple[nn.Module, Any]:
    """The network of `test_state`."""
    model, _ = test_state.built({})
    return model, optimizer(alone, model, 0.05, refresh_every=4, **options)


@pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed")
@pytest.mark.parametrize("through", ["state_dict", "file", "folder"])
@each_saved
def test_a_checkpoint_goes_on_bit_for_bit(
    alone: bool, rank: int, through: str, tmp_path: Any
) -> None:
    model, opt = saved(alone, P={"rank": rank})
    test_state.train(model, opt, 0, 6)
    fresh, other = saved(alone, P={"rank": rank})
    if through == "folder":
        dcp.save(
            dict(
                zip(
                    ("model", "optim"), get_state_dict(model, opt), strict=True
                )
            ),
            checkpoint_id=tmp_path,
        )
        state = dict(
            zip(("model", "optim"), get_state_dict(fresh, other), strict=True)
        )
        seng.expect_curvature(state, tmp_path)
        dcp.load(state, checkpoint_id=tmp_path)
        set_state_dict(
            fresh,
            other,
            model_state_dict=state["model"],
            optim_state_dict=state["optim"],
        )
    else:
        state = [model.state_dict(), opt.state_dict()]
        if through == "file":
            torch.save(state, tmp_path / "checkpoint.pt")
            state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
        fresh.load_state_dict(state[0])
        other.load_state_dict(copy.deepcopy(state[1]))
    assert len(inspect(other).states) == 4 and not other.refresh_due
    for m, o in ((model, opt), (fresh, other)):
        test_state.train(m, o, 6, 11)
    if (
        through == "folder"
    ):  # which loses strides, and with them the order of summation
        assert naive.relative_error(values(fresh), values(model)) < 1e-12
    else:
        assert torch.equal(values(fresh), values(model))


# alone, U and P; None: over λI
SETTINGS = {
    "λI": (False, {"base": None}, None),
    "P": (False, {}, {}),
    "P of rank 3": (False, {}, {"rank": 3}),
    "P of power 1": (False, {}, {"power": 1.0}),
    "P alone": (True, {}, {}),
}


def set_up(model: nn.Module, setting: str) -> Any:
    alone, U, P = SETTINGS[setting]
    options = {"lr": 0.05, "refresh_every": 4}
    if P is None:
        return seng.SENG(model, **options, curvature=seng.Curvature(**U))
    return optimizer(alone, model, P=P, U=U, **options)


@pytest.mark.filterwarnings(
    "ignore:seng. the loaded curvature of . layers is of another kind"
)
@pytest.mark.parametrize("after", SETTINGS)
@pytest.mark.parametrize("before", SETTINGS)
def test_a_checkpoint_of_another_setting_loads_and_its_base_is_soon_the_one_asked_for(
    before: str, after: str
) -> None:
    model, _ = test_state.built({})
    opt = set_up(model, before)
    test_state.train(model, opt, 0, 6)
    other = set_up(model, after)
    other.load_state_dict(opt.state_dict())
    alone, _, P = SETTINGS[after]
    power = None if P is None else P.get("power", POWER)
    for state in inspect(
        other
    ).states.values():  # what stays until the next refresh
        assert getattr(base_of(state), "power", None) == power
    assert len(inspect(other).states) == 4 or before != after
    test_state.train(model, other, 6, 13)
    metrics = ["diagonal", "kronecker", "diagonal", "kronecker"]
    if P is None:
        metrics = ["identity"] * 4
    assert [entry["base"] for entry in other.diagnostics().values()] == metrics
    for state in inspect(other).states.values():
        assert (state.columns == 0) == alone
        assert getattr(base_of(state), "power", None) == power
    assert values(model).isfinite().all()


@pytest.mark.parametrize("before", ["λI", "P", "P of power 1"])
def test_a_checkpoint_of_another_kind_is_told_of(before: str) -> None:
    """Of low rank, which was SENG's default; and of a P that was not alone, whose U is in the coordinates of another."""
    model, _ = test_state.built({})
    opt = set_up(model, before)
    test_state.train(model, opt, 0, 6)
    for after in ("P alone", "λI", "P"):
        other = set_up(model, after)
        if after == before:
            other.load_state_dict(opt.state_dict())
            continue
        with pytest.warns(
            UserWarning,
            match="of another kind than this optimizer keeps: the next step refreshes it",
        ):
            other.load_state_dict(opt.state_dict())
        assert not inspect(other).states and other.refresh_due


@each_metric
@pytest.mark.parametrize(
    "dtypes",
    [(torch.float64, torch.float32), (torch.float32, torch.float64)],
    ids=str,
)
def test_a_checkpoint_loads_in_another_precision(
    alone: bool, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    options: Any = {"lr": 0.05, "refresh_every": 4, "P": {"rank": 3}}
    model, _ = test_state.built({})
    model = model.to(dtypes[0])
    opt = optimizer(alone, model, **options)

    def train(
        m: nn.Module, o: torch.optim.Optimizer, start: int, stop: int
    ) -> None:
        for i in range(start, stop):
            generator = torch.Generator().manual_seed(i)
            x, target = (
                torch.randint(6, (8, 3), generator=generator),
                torch.randn(8, 3, generator=generator),
            )
            o.zero_grad()
            naive.loss_of(m(x), target.to(m[2].weight.dtype)).backward()
            o.step()

    train(model, opt, 0, 6)
    twin = copy.deepcopy(model).to(dtypes[1])
    other = optimizer(alone, twin, **options)
    other.load_state_dict(opt.state_dict())

    def precisions() -> set[torch.dtype]:
        """Of P and of the Gram, where there is one."""
        states = inspect(other).states.values()
        kept = [t for state in states for t in base_of(state).tensors()]
        kept += [state.gram for state in states if state.columns]
        return {t.dtype for t in kept if t.is_floating_point()}

    assert precisions() == {dtypes[1]}
    start = values(model).double()
    for m, o in ((model, opt), (twin, other)):
        train(m, o, 6, 8)
    assert (
        naive.relative_error(
            values(twin).double() - start, values(model).double() - start
        )
        < 1e-4
    )
    train(twin, other, 8, 10)  # a refresh
    assert values(twin).isfinite().all() and precisions() == {dtypes[1]}


# Optimizers and options


@each_metric
def test_any_optimizer_takes_the_directions(alone: bool) -> None:
    curvature = curvature_of(alone, {}, {})
    ours, theirs = test_attach.network(), test_attach.network()
    test_attach.train(
        ours,
        optimizer(alone, ours, 0.05, damping=0.1, refresh_every=3),
        10,
    )
    sgd = torch.optim.SGD(theirs.parameters(), lr=0.05, momentum=0.9)
    seng.attach(sgd, theirs, damping=0.1, refresh_every=3, curvature=curvature)
    test_attach.train(theirs, sgd, 10)
    torch.testing.assert_close(values(ours), values(theirs))

    model = test_attach.network()
    adam = torch.optim.AdamW(model.parameters(), lr=0.01)
    handle = seng.attach(adam, model, refresh_every=3, curvature=curvature)
    test_attach.train(model, adam, 4)
    twin = test_attach.network()
    again = torch.optim.AdamW(twin.parameters(), lr=0.01)
    attached = seng.attach(again, twin, refresh_every=3, curvature=curvature)
    buffer = io.BytesIO()
    torch.save(
        [model.state_dict(), adam.state_dict(), handle.state_dict()], buffer
    )
    buffer.seek(0)
    for target, state in zip(
        (twin, again, attached),
        torch.load(buffer, weights_only=True),
        strict=True,
    ):
        target.load_state_dict(state)
    for m, o in ((model, adam), (twin, again)):
        test_attach.train(m, o, 4, 4)
    assert torch.equal(values(model), values(twin))
    assert handle.diagnostics()["0"]["base"] == "kronecker"
    assert handle.diagnostics()["2"]["base"] == "diagonal"


def dense_step(
    layer: nn.Module,
    seen: tuple[Tensor, Tensor],
    x: Tensor,
    target: Tensor,
    damping: float,
) -> Tensor:
    """The direction at (x, target) under the curvature of the samples that were seen."""
    ((site,), _) = survey(layer, layer.parameters())
    u = naive.as_block(layer, site, naive.per_sample_gradients(layer, *seen))
    g = naive.as_block(
        layer, site, naive.per_sample_gradients(layer, x, target)
    ).mean(0)
    d = naive.based_direction(
        naive.covariance(u), naive.metric(layer, site, *seen), g, damping
    )
    return naive.flat(
        site.scatter(site.active(), d)[p] for p in layer.parameters()
    )


def exact(**given: Any) -> seng.Curvature:
    base = seng.Kronecker(**WHOLE)
    options = {"base": base, "samples": None, **WHOLE, **given}
    return seng.Curvature(**options)


def test_curvature_from_a_batch_of_its_own() -> None:
    layer = nn.Linear(4, 3)
    x, target, other, wanted = (
        torch.randn(6, 4),
        torch.randn(6, 3),
        torch.randn(5, 4),
        torch.randn(5, 3),
    )
    want = dense_step(layer, (other, wanted), x, target, 0.05)
    opt = seng.SENG(layer, 1.0, momentum=0.0, damping=0.05, curvature=exact())
    with opt.curvature_batch():
        naive.loss_of(layer(other), wanted).backward()
    assert naive.relative_error(step_of(layer, opt, x, target), want) < 1e-9


@pytest.mark.parametrize("fisher", ["gauss-newton", "sampled"])
def test_other_fishers(fisher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a linear model, the columns are those of a loss whose gradients at the output are the seeds."""
    layer, given = nn.Linear(4, 3), []
    x, y = torch.randn(6, 4), torch.randint(3, (6,))
    real = seng.layers.samples.seeds
    monkeypatch.setattr(
        "seng.layers.samples.seeds",
        lambda *a: (given.append(s) or s for s in real(*a)),
    )
    opt = seng.SENG(
        layer, 1.0, momentum=0.0, damping=0.05, curvature=exact(fisher=fisher)
    )
    loss = nn.functional.cross_entropy(layer(x), y)
    loss.backward()
    g = torch.cat([layer.weight.grad, layer.bias.grad[:, None]], 1).flatten()
    before = values(layer)
    opt.step()
    moved = before - values(layer)
    A = torch.cat([x, torch.ones(6, 1)], 1)
    S = torch.stack(given)  # (seeds, 6, 3)
    u = torch.einsum("kbi,bj->kbij", S, A).flatten(2)
    M = torch.einsum("kbi,kbj->ij", u, u) / 6
    C_G = torch.einsum("kbi,kbj->ij", S, S)[None]
    P = naive.kronecker_metric((A.T @ A)[None], C_G, POWER, FLOOR)
    want = naive.based_direction(M, P, g, 0.05).view(3, 5)
    assert (
        naive.relative_error(moved, naive.flat([want[:, :4], want[:, 4]]))
        < 1e-9
    )


def test_groups_have_dampings_of_their_own_and_maximize_goes_up() -> None:
    x, target = torch.randn(6, 4), torch.randn(6, 3)
    first, second = nn.Linear(4, 4), nn.Linear(4, 3)
    model = nn.Sequential(first, nn.Identity(), second)
    twins = [copy.deepcopy(model) for _ in range(3)]
    ends = []
    for m, dampings in zip(
        twins, ((0.1, 0.1), (0.01, 0.01), (0.1, 0.01)), strict=True
    ):
        groups = [
            {"params": list(layer.parameters()), "damping": lam}
            for layer, lam in zip((m[0], m[2]), dampings, strict=True)
        ]
        opt = seng.SENG(groups, 1.0, momentum=0.0, module=m, curvature=exact())
        ends.append(step_of(m, opt, x, target))
    assert torch.equal(
        ends[2], torch.cat([ends[0][:20], ends[1][20:]])
    ) and not torch.equal(ends[0], ends[1])
    up = seng.SENG(
        model, 1.0, momentum=0.0, damping=0.1, maximize=True, curvature=exact()
    )
    assert (
        naive.relative_error(-step_of(model, up, x, target), ends[0]) < 1e-12
    )


@each_metric
def test_a_group_that_is_added_later_leaves_the_bases_of_others(
    alone: bool,
) -> None:
    model = test_attach.network()
    opt = optimizer(
        alone, model[0].parameters(), 0.05, module=model, refresh_every=3
    )
    test_attach.train(model, opt, 2)
    before = [t.clone() for t in inspect(opt).states[0].tensors()]
    opt.add_param_group({"params": list(model[3].parameters())})
    assert all(map(torch.equal, before, inspect(opt).states[0].tensors()))
    test_attach.train(model, opt, 3)
    assert [opt.diagnostics()[name]["base"] for name in "03"] == [
        "kronecker"
    ] * 2


@pytest.mark.filterwarnings("ignore:seng. .*is larger than layer")
@pytest.mark.parametrize("form", ["auto", "merged"])
@pytest.mark.parametrize("decay", [0, 0.8])
@pytest.mark.parametrize(
    "sketch",
    [
        Rows(20),
        LeverageRows(20),
        Gaussian(20),
        CountSketch(20),
        KroneckerRows(4, 5),
    ],
    ids=str,
)
def test_every_sketch_gives_a_descent_direction(
    sketch: Any, decay: float, form: Any
) -> None:
    model = nn.Sequential(
        nn.Conv1d(3, 6, 3), nn.Tanh(), nn.Flatten(), nn.Linear(36, 5)
    )
    opt = optimizer(
        False,
        model,
        0.01,
        refresh_every=2,
        P={"rank": 8},
        U={"form": form, "decay": decay, "sketch": sketch, "rank": 4},
    )
    x, target = torch.randn(10, 3, 8), torch.randn(10, 5)
    for _ in range(5):
        step_of(model, opt, x, target)
    assert values(model).isfinite().all()
    for entry in opt.diagnostics().values():
        assert (
            entry["cosine"] > 0
            and entry["norm_ratio"] == pytest.approx(1)
            and entry["solves_failed"] == 0
        )


# Several ranks


def train_ranks(
    rank: int, steps: int, alone: bool, given: Fields, sizes: list[int] | None
) -> Tensor:
    """Weights after training; in one process where there are no sizes."""
    model = network()
    wrapped = DistributedDataParallel(model) if sizes else model
    part = parts(12, 2, sizes)[rank] if sizes else slice(None)
    options = {"damping": 0.01, "refresh_every": 3, **given}
    opt = optimizer(alone, wrapped, 0.05, **options)
    for x, target in batches(steps, 12):
        step_of(wrapped, opt, x[part], target[part])
    return values(model)


def in_one_process(steps: int, alone: bool, given: Fields) -> Tensor:
    """With one basis per layer, as ranks have."""
    U = {"form": "merged", **given.get("U", {})}
    return train_ranks(0, steps, alone, given | {"U": U}, None)


POOLED: list[tuple[bool, Fields]] = [
    (False, {"U": {"rank": 10**3}}),
    (False, {"U": {"rank": 10**3, "decay": 0}}),
    (False, {"U": {"rank": 10**3}, "P": {"power": 1.0, "decay": 0}}),
    (True, {}),
    (True, {"P": {"power": 1.0, "floor": 0.01}}),
]


@pytest.mark.parametrize(("alone", "given"), POOLED, ids=str)
def test_shared_curvature_is_that_of_one_process(
    two: Any, alone: bool, given: Fields
) -> None:
    given = {**given, "P": {"rank": 10**3, **given.get("P", {})}}
    found = two(train_ranks, 7, alone, given, [6, 6])
    assert torch.equal(*found)
    start, want = (in_one_process(steps, alone, given) for steps in (0, 7))
    assert naive.relative_error(found[0] - start, want - start) < 1e-9


def told(rank: int, sizes: list[int] | None) -> list[dict[str, Any]]:
    model = network()
    wrapped = DistributedDataParallel(model) if sizes else model
    opt = seng.KFAC(wrapped, strategy=None if sizes else "local")
    x, target = torch.randn(12, 1, 4, 4), torch.randn(12, 3)
    part = slice(6 * rank, 6 * rank + 6) if sizes else slice(None)
    step_of(wrapped, opt, x[part], target[part])
    return [
        {key: entry[key] for key in ("top_eigenvalue", "effective_rank")}
        for entry in opt.diagnostics().values()
    ]


def test_numbers_of_p_alone_are_those_of_one_process(two: Any) -> None:
    torch.manual_seed(0)
    want = told(0, None)
    for found in two(told, [6, 6]):
        for got, one in zip(found, want, strict=True):
            assert got == pytest.approx(one)


@pytest.mark.parametrize(
    ("alone", "given"),
    [
        (False, {"U": {"rank": 6}}),
        (True, {}),
        (False, {"U": {"rank": 3, "memory": 40_000}}),
    ],
    ids=str,
)
def test_ranks_with_a_part_of_the_factors_stay_alike(
    two: Any, alone: bool, given: Fields
) -> None:
    given = {**given, "P": {"rank": 3}}
    found = two(train_ranks, 10, alone, given, [6, 6])
    assert torch.equal(*found) and found[0].isfinite().all()
    start, want = (in_one_process(steps, alone, given) for steps in (0, 10))
    assert naive.relative_error(found[0] - start, want - start) < 1e-6


def uneven(
    rank: int, alone: bool, of_P: int, bad: bool
) -> tuple[Tensor, list[Any]]:
    """The second branch is used by the second rank alone, and the third by none; a capture of one rank may not be finite."""
    model = Branches(True)
    model.rank = rank
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    opt = optimizer(alone, wrapped, 0.01, refresh_every=2, P={"rank": of_P})
    generator = torch.Generator().manual_seed(rank)
    for step in range(6):
        opt.zero_grad()
        scale = torch.ones(3, 1)
        scale[0] = torch.inf if bad and rank and step == 2 else 1.0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            naive.loss_of(
                wrapped(torch.randn(3, 4, generator=generator)) * scale,
                torch.ones(3, 4),
            ).backward()
            for p in model.parameters():
                if p.grad is not None:
                    p.grad.nan_to_num_(0, 0, 0).clamp_(-1, 1)
            opt.step()
    return values(model), [
        entry["base"] for entry in opt.diagnostics().values()
    ]


@pytest.mark.parametrize("bad", [False, True])
@each_saved
def test_a_rank_without_samples_of_a_layer(
    two: Any, alone: bool, rank: int, bad: bool
) -> None:
    (first, metrics), (second, _) = two(uneven, alone, rank, bad)
    assert torch.equal(first, second) and first.isfinite().all()
    assert metrics == ["kronecker", "kronecker", None]


def lagged(rank: int) -> None:
    model = DistributedDataParallel(network())
    seng.SENG(model, strategy="lagged")


def test_lagged_ranks_have_no_base(two: Any) -> None:
    for _, error in two.outcomes(lagged):
        assert error is not None
        assert "strategy='lagged' has no Kronecker base" in error


# What is refused


@pytest.mark.parametrize(
    ("given", "said"),
    [
        *(
            ({"power": p}, "above 0 and at most 1")
            for p in (0, -0.5, 1.5, "half", True, float("nan"))
        ),
        ({"rank": 0}, "rank must be an integer of at least 1, not 0"),
        ({"rank": 2.5}, "rank must be an integer of at least 1, not 2.5"),
        ({"rank": True}, "rank must be an integer of at least 1, not True"),
        *(
            ({"floor": f}, "floor is a share of the mean eigenvalue above 0")
            for f in (0, -0.1, "a tenth", True, float("nan"))
        ),
        *(
            ({"decay": d}, "decay must lie in [0, 1)")
            for d in (1, 1.0, -0.1, "much", False)
        ),
        ({"damp": "pi"}, "unknown damp 'pi'; use one of 'floor', 'tikhonov'"),
        ({"damp": "tikhonov", "rank": 8}, "leave out rank"),
        ({"damp": "tikhonov", "floor": 0.1}, "leave out floor"),
        ({"damp": "tikhonov", "power": 0.5}, "has power 1, not 0.5"),
    ],
    ids=str,
)
def test_bad_fields_of_kronecker_are_refused_with_the_reason(
    given: Fields, said: str
) -> None:
    model = nn.Linear(2, 2)
    for make in (seng.Kronecker, lambda **g: seng.KFAC(model, **g)):
        with pytest.raises(ValueError, match="^Kronecker: ") as error:
            make(**given)
        assert said in str(error.value)


# Memory and numbers

LARGE = Dims("large", (1, 1000, 2000), 1, 256, None)
GROUPED = Dims("grouped", (4, 30, 50), 9, 256, None)
NORM = Dims("norm", (1, 1, 128), 1, 256, "explicit", factored=False)


def test_a_budget_in_the_optimizer_and_in_explain() -> None:
    model = nn.Sequential(
        nn.Linear(50, 40), nn.Tanh(), nn.LayerNorm(40), nn.Linear(40, 30)
    )
    x, target = torch.randn(8, 50), torch.randn(8, 30)
    kept: Any = {"rank": 16, "samples": 64, "decay": 0.8}
    plain = seng.explain(model, x, seng.Curvature(base=None, **kept))
    kept["base"] = seng.Kronecker(rank=32)
    free = seng.explain(model, x, seng.Curvature(**kept))
    assert free.bytes > plain.bytes
    assert size_of(free.bytes) in str(free)
    curvature = seng.Curvature(**kept, memory=free.bytes)
    explained = seng.explain(model, x, curvature)
    opt = seng.SENG(model, 0.1, curvature=curvature)
    step_of(model, opt, x, target)
    assert list(explained.plans) == [
        layer.plan for layer in inspect(opt).layers
    ]
    for p, entry in zip(
        explained.plans, opt.diagnostics().values(), strict=True
    ):
        # As yet there may be fewer columns.
        assert 0 < entry["bytes"] <= p.bytes + 16, p
    tight = seng.Curvature(**kept, memory=free.bytes // 2)
    half = r"rank=\d+ and base=Kronecker\(rank=\d+\)"
    said = f"the curvature needs .* where memory={free.bytes // 2} allows .*: {half} "
    with pytest.raises(ValueError, match=said):
        seng.explain(model, x, tight)
    with pytest.raises(ValueError, match=said):
        step_of(model, seng.SENG(model, 0.1, curvature=tight), x, target)


@pytest.mark.parametrize(
    "memory", [None, 3_000_000, 1_500_000, 800_000, 400_000, 200_000]
)
@pytest.mark.parametrize(
    "given",
    [
        *(
            {},
            {"decay": 0, "rank": 64},
            {"decay": 0, "samples": 8},
        ),
        *(
            {"form": "implicit", "decay": 0},
            {"form": "implicit", "decay": 0, "rank": 4},
            {"form": "explicit", "decay": 0},
        ),
    ],
)
@pytest.mark.parametrize(
    "base", [None, seng.Kronecker(rank=128)], ids=["I", "P"]
)
def test_no_more_is_kept_than_explain_says(
    base: Any, given: dict[str, Any], memory: int | None
) -> None:
    """In the coordinates of a base factors become columns, or windows factors."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(
            nn.Conv2d(3, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.GroupNorm(4, 32),
        ),
        *(
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * 16, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        ),
    ).float()
    x, y = torch.randn(32, 3, 8, 8).float(), torch.randint(10, (32,))
    curvature = seng.Curvature(base=base, memory=memory, **given)
    try:
        explained = seng.explain(model, x, curvature)
    except ValueError as refused:
        assert memory is not None and "needs" in str(refused)
        return
    opt = seng.SENG(model, 0.01, refresh_every=8, curvature=curvature)
    for _ in range(9):
        opt.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        opt.step()
    assert memory is None or explained.bytes <= memory
    for p, entry in zip(
        explained.plans, opt.diagnostics().values(), strict=True
    ):
        # One number scales a basis.
        assert entry["bytes"] <= p.bytes + 16, (
            p.dims.name,
            p.form,
            entry["form"],
        )
        assert entry["form"] == p.form


@pytest.mark.parametrize("pooled", [False, True])
def test_every_budget_is_kept_or_refused(pooled: bool) -> None:
    """With what would fit, which does."""
    layers = [
        Dims("first", (1, 40, 50), 1, 8, None),
        Dims("second", (1, 10, 41), 1, 8, None),
    ]
    for budget in range(500, 60_000, 170):
        U, P = 16, 128
        for _ in range(2):
            base = seng.Kronecker(rank=P)
            curvature = seng.Curvature(rank=U, base=base, memory=budget)
            try:
                chosen = plan(layers, curvature, budget, pooled)
            except ValueError as refused:
                found = re.findall(r"rank=(\d+)", str(refused))
                if not found:
                    assert budget < 12_000, refused
                    break
                U, P = map(int, found)
            else:
                assert sum(p.bytes for p in chosen) <= budget
                break
        else:
            raise AssertionError("what would fit does not")


def test_explain_tells_of_the_base() -> None:
    model, x = (
        nn.Sequential(nn.Linear(50, 40), nn.LayerNorm(40)),
        torch.randn(8, 50),
    )
    over_I = seng.explain(model, x, seng.Curvature(base=None))
    assert "base" not in str(over_I).split("\n")[0]
    # What SENG takes by itself.
    said = str(seng.explain(model, x))
    assert "base" in said.split("\n")[0]
    of_factors = f"kronecker {seng.Kronecker().of(False).rank}"
    assert of_factors in said and "diagonal" in said
    wide = seng.Curvature(base=seng.Kronecker(rank=32))
    needed = seng.explain(model, x, wide).bytes
    tight = replace(wide, memory=needed // 2)
    with pytest.raises(
        ValueError, match=r"base=Kronecker\(rank=\d+\) would fit"
    ):
        seng.explain(model, x, tight)


@pytest.mark.parametrize("rank", [1, 2])
def test_the_diagonal_is_of_whole_gradients_whatever_the_rank(
    rank: int,
) -> None:
    layer, x = nn.Embedding(7, 3), torch.randint(7, (10, 4))
    target = torch.randn(10, 4, 3)
    u = naive.per_sample_gradients(layer, x, target)
    opt = seng.SENG(
        layer, 0.1, curvature=seng.Curvature("implicit", rank=rank)
    )
    step_of(layer, opt, x, target)
    (state,) = inspect(opt).states.values()
    torch.testing.assert_close(state.P.v, u.square().mean(0))


@pytest.mark.parametrize("kind", ["kronecker", "diagonal"])
def test_every_number_of_the_diagnostics_is_what_it_says(kind: str) -> None:
    layer = nn.Linear(5, 4) if kind == "kronecker" else nn.LayerNorm(5)
    x, target = (
        torch.randn(8, 5),
        torch.randn(8, 4 if kind == "kronecker" else 5),
    )
    ((site,), _) = survey(layer, layer.parameters())
    u = naive.as_block(
        layer, site, naive.per_sample_gradients(layer, x, target)
    )
    M, g = naive.covariance(u), u.mean(0)
    P = naive.metric(layer, site, x, target)
    eigenvalues = torch.linalg.eigvals(torch.linalg.solve(P, M)).real
    d = naive.based_direction(M, P, g, 0.2)
    opt = seng.SENG(layer, 0.1, damping=0.2, curvature=exact(form="merged"))
    step_of(layer, opt, x, target)
    entry = opt.diagnostics()[type(layer).__name__]
    assert entry["top_eigenvalue"] == pytest.approx(float(eigenvalues.max()))
    assert entry["damping"] == pytest.approx(0.2 * float(eigenvalues.max()))
    assert entry["effective_rank"] == pytest.approx(
        float(eigenvalues.sum() / eigenvalues.max())
    )
    assert entry["cosine"] == pytest.approx(
        float(g @ d / (g.norm() * d.norm()))
    )
    assert entry["norm_ratio"] == pytest.approx(float(d.norm() / g.norm()))
    # Eigenvectors, eigenvalues, the rest's and how many were seen; or v.
    fewer = {"kronecker": 4 * 4 + 6 * 6 + (4 + 6) + 2 + 2, "diagonal": 10}[
        kind
    ]
    # Of P^{-½}; both sides are whole.
    whole = 4 * 4 + 6 * 6
    weights = {"kronecker": 4 + 6 + 1 + whole, "diagonal": 10}[kind]
    columns = 8 * len(g) + (
        entry["form"] == "merged"
    )  # one number scales a basis
    assert (
        entry["bytes"] // 8 == columns + fewer + weights
        and entry["columns"] == 8
    )
    alone = seng.KFAC(layer, 0.1, decay=0)
    step_of(layer, alone, x, target)
    entry = alone.diagnostics()[type(layer).__name__]
    assert entry["bytes"] // 8 == fewer and entry["columns"] == 0
    assert entry["top_eigenvalue"] > 0 and entry["base"] == kind
    assert (
        entry["norm_ratio"] == pytest.approx(1) and entry["solves_failed"] == 0
    )


# What is not finite


@each_metric
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e200])
def test_captures_that_are_not_finite_leave_the_last_good_base(
    alone: bool, bad: float, first: bool
) -> None:
    """Those of steps 0 and 3, or of step 3 alone; the gradients themselves were clipped to be fine."""
    model = nn.Sequential(
        nn.Linear(3, 4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 2)
    )
    opt = optimizer(
        alone, model, 0.02, momentum=0.0, refresh_every=1, damping=0.1
    )

    def tensors() -> list[Tensor]:
        states = inspect(opt).states.values()
        return [t for state in states for t in state.tensors()]

    kept: list[Tensor] = []
    losses = []
    x, target = torch.randn(8, 3), torch.randn(8, 2)
    for step in range(16):
        opt.zero_grad()
        scale = torch.ones(8, 1)
        if step == 3 or (first and step == 0):
            scale[1] = bad
            kept = [t.clone() for t in tensors()]
        loss = naive.loss_of(model(x) * scale, target)
        loss.backward()
        losses.append(float(loss.detach()))
        for p in model.parameters():
            p.grad.nan_to_num_(0, 0, 0).clamp_(-1, 1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            opt.step()
        assert values(model).isfinite().all()
        if step == 3:
            assert all(map(torch.equal, kept, tensors()))
    assert losses[-1] < losses[4]
    assert all(
        entry["refreshes_dropped"] == 1 + first
        for entry in opt.diagnostics().values()
    )


# On a GPU


def mixed_network(device: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    layers = (
        nn.Conv2d(2, 6, 3),
        nn.GroupNorm(2, 6),
        nn.Tanh(),
        nn.Conv2d(6, 6, 2, groups=2),
        nn.Flatten(),
        nn.Linear(54, 5),
    )
    return nn.Sequential(*layers).to(device, dtype)


def train_on(
    model: nn.Module,
    opt: torch.optim.Optimizer,
    steps: int,
    count: int = 16,
    autocast: Any = None,
) -> list[float]:
    like, losses = next(model.parameters()), []
    for i in range(steps):
        generator = torch.Generator().manual_seed(i % 4)
        x = torch.randn(count, 2, 6, 6, generator=generator).to(like)
        y = torch.randint(5, (count,), generator=generator).to(like.device)
        opt.zero_grad()
        with torch.autocast(
            "cuda", autocast or torch.bfloat16, enabled=autocast is not None
        ):
            loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        losses.append(float(loss.detach()))
    return losses


def moved(model: nn.Module) -> Tensor:
    return (
        values(model).double().cpu()
        - values(mixed_network("cpu", next(model.parameters()).dtype)).double()
    )


@on_gpu
@pytest.mark.parametrize(
    ("dtype", "close"), [(torch.float64, 1e-8), (torch.float32, 0.1)], ids=str
)
@pytest.mark.parametrize("decay", [0.8, 0])
@each_metric
def test_steps_on_the_gpu_are_those_of_the_cpu(
    alone: bool, decay: float, dtype: torch.dtype, close: float
) -> None:
    """Over refreshes that write into what was recorded: the graph that solves is the same from the second step on.

    In float32 a GPU takes what a range finder leaves for eigenvectors, which the CPU works out: 0.06 on an H200.
    """
    ends = []
    for device in ("cpu", "cuda"):
        model = mixed_network(device, dtype)
        opt = optimizer(
            alone,
            model,
            0.01,
            damping=0.1,
            refresh_every=3,
            P={"decay": decay},
            U={"decay": decay},
        )
        train_on(model, opt, 2)
        bases = [base_of(state) for state in inspect(opt).states.values()]
        train_on(model, opt, 10)
        ends.append(moved(model))
    assert naive.relative_error(ends[1], ends[0]) < close
    assert opt.engine.cache.plan.others.replay.graph is not None
    if (
        alone or not decay
    ):  # a basis that is averaged has other shapes at first
        assert all(
            base_of(state) is P
            for state, P in zip(
                inspect(opt).states.values(), bases, strict=True
            )
        )


@on_gpu
@each_saved
@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=str)
def test_recorded_refreshes_are_those_one_by_one(
    alone: bool, rank: int, autocast: torch.dtype | None
) -> None:
    ends = []
    for run in (None, directly):
        model = mixed_network("cuda", torch.float32)
        options = {"damping": 0.1, "refresh_every": 3, "P": {"rank": rank}}
        opt = optimizer(alone, model, 0.01, **options)
        opt.engine.recorder = run or opt.engine.recorder
        losses = train_on(model, opt, 16, 48, autocast)
        ends.append(moved(model))
        assert ends[-1].isfinite().all() and sum(losses[-4:]) < sum(losses[:4])
    assert naive.relative_error(*ends) < 0.01


@on_gpu
@each_metric
def test_bfloat16_autocast_on_the_gpu_follows_float32(alone: bool) -> None:
    ends = []
    for autocast in (None, torch.bfloat16):
        model = mixed_network("cuda", torch.float32)
        options = {"damping": 0.1, "refresh_every": 3, "P": {"rank": 8}}
        opt = optimizer(alone, model, 0.01, **options)
        train_on(model, opt, 8, 64, autocast)
        ends.append(moved(model))
    assert float(nn.functional.cosine_similarity(*ends, dim=0)) > 0.97


@on_gpu
@each_metric
def test_a_step_between_refreshes_does_not_wait_and_a_checkpoint_moves(
    alone: bool,
) -> None:
    model = mixed_network("cuda", torch.float32)
    opt = optimizer(alone, model, 0.01, refresh_every=100)
    train_on(model, opt, 2)
    opt.zero_grad()
    model(
        torch.ones(8, 2, 6, 6, device="cuda", dtype=torch.float32)
    ).square().mean().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        opt.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    twin = copy.deepcopy(model).cpu()
    other = optimizer(alone, twin, 0.01, refresh_every=100)
    other.load_state_dict(copy.deepcopy(opt.state_dict()))
    before = values(model)
    for m, o in ((model, opt), (twin, other)):
        train_on(m, o, 2)
    assert (
        naive.relative_error(
            values(twin) - before.cpu(), (values(model) - before).cpu()
        )
        < 1e-3
    )


@on_gpu
@pytest.mark.usefixtures("_fresh_compiler")
@each_metric
def test_a_compiled_step_on_the_gpu(alone: bool) -> None:
    ends = []
    for compiled in (False, True):
        model = mixed_network("cuda", torch.float32)
        lr = torch.tensor(0.01, device="cuda")
        opt = optimizer(alone, model, lr, damping=0.1, refresh_every=5)
        if compiled:
            opt.step = torch.compile(opt.step)
        train_on(model, opt, 12)
        ends.append(moved(model))
    assert naive.relative_error(*ends) < 0.02


@on_gpu
@each_metric
def test_float16_with_a_scaler_and_bad_captures_on_the_gpu(
    alone: bool,
) -> None:
    model = mixed_network("cuda", torch.float32)
    opt = optimizer(alone, model, 0.01, refresh_every=2)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**14)
    losses = []
    for i in range(12):
        x = torch.randn(
            32, 2, 6, 6, generator=torch.Generator().manual_seed(i % 3)
        ).to("cuda", torch.float32)
        opt.zero_grad()
        with torch.autocast("cuda", torch.float16):
            loss = nn.functional.cross_entropy(
                model(x), torch.arange(32, device="cuda") % 5
            )
        scaler.scale(loss * (torch.inf if i == 4 else 1)).backward()
        scaler.step(opt)
        scaler.update()
        losses.append(float(loss.detach()))
    assert (
        values(model).isfinite().all()
        and losses[-1] < losses[2]
        and inspect(opt).steps == 11
    )
