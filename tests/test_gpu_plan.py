"""A GPU's steps are those of the plain `StepPlan`: seng/optim/gpu_plan.py and fused.py.

Without a GPU, kernels run in Triton's interpreter and CUDA graphs have a stand-in: a tape of the operators that ran, which a
replay runs again on the same tensors, without Python. As with a CUDA graph, a number that Python read while it was recorded
stays as it was, and waiting for the device is an error.
"""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import naive
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

pytest.importorskip("triton")

from test_recorder import Again

import seng
from seng.gpu import grouped, recorder
from seng.gpu.kernels import AVAILABLE
from seng.linalg.centred import Centred
from seng.linalg.operators import Merged
from seng.optim import engine, gpu_plan
from seng.optim import step_plan as records
from seng.optim.preconditioned import Preconditioned
from seng.optim.step_plan import StepPlan, over_layers
from seng.tell.inspection import inspect

if not AVAILABLE:
    pytest.skip("needs a C compiler", allow_module_level=True)
pytestmark = pytest.mark.filterwarnings("ignore")
CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
REAL = DEVICE.type == "cuda"


class Tape(TorchDispatchMode):
    """The operators of a function, with the tensors that they read and wrote."""

    def __init__(
        self, device: torch.device, run: Callable[[], None], pool=None
    ):
        super().__init__()
        self.entries: list[tuple[Any, ...]] = []
        self.made: set[int] = set()
        self.before: dict[int, tuple[Tensor, Tensor]] = {}
        self.keep: list[Any] = []
        self.replays = 0
        with self:
            run()
        for t, value in self.before.values():  # nothing of it happens yet
            t.copy_(value)

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        assert op is not torch.ops.aten._local_scalar_dense.default, (
            "it would wait"
        )
        given = tree_map(
            _as_it_lies, (args, kwargs)
        )  # squeeze_ changes a tensor's shape
        aliases = [a.alias_info for a in op._schema.arguments]
        written = []
        for i, alias in enumerate(aliases):
            if alias is not None and alias.is_write:
                name = op._schema.arguments[i].name
                written += tree_leaves(
                    args[i] if i < len(args) else kwargs[name]
                )
        for t in written:
            if t.untyped_storage().data_ptr() not in self.made:
                self.before.setdefault(id(t), (t, t.clone()))
        out = op(*args, **kwargs)
        self.keep.append(out)  # or its address would be given to another
        places = [
            _as_it_lies(t) for t in tree_leaves(out) if isinstance(t, Tensor)
        ]
        is_view = torch.Tag.inplace_view in op.tags or (
            not written and any(alias is not None for alias in aliases)
        )
        if is_view:
            return out
        if not written:
            self.made |= {t.untyped_storage().data_ptr() for t in places}
        self.entries.append((op, *given, [] if written else places))
        return out

    @torch.no_grad()
    @torch.autocast("cpu", enabled=False)  # a graph knows of neither
    def replay(self) -> None:
        self.replays += 1
        for op, args, kwargs, places in self.entries:
            found = tree_leaves(op(*args, **kwargs))
            for place, t in zip(places, found, strict=False):
                place.copy_(t)


def _as_it_lies(t: Any) -> Any:
    return t.as_strided(t.shape, t.stride()) if isinstance(t, Tensor) else t


class Launches:
    """The kernels' launches, which do not pass through torch; their tables stay where they are."""

    made: ClassVar[list["Launches"]] = []

    def __init__(self, device, run, pool=None):
        self.run, self.replays = run, 0
        self.made.append(self)

    def replay(self) -> None:
        self.replays += 1
        self.run()


def sent(
    numbers: Tensor, device: torch.device, to: Tensor | None = None
) -> Tensor:
    """Into the same table, as on a GPU."""
    if to is None or to.shape != numbers.shape:
        return numbers.clone()
    return to.copy_(numbers)


def gpu_plan_of(solves, grads, metric, updates, traced):
    """As `plan_of` on a GPU."""
    if not solves or traced:
        return StepPlan(solves)
    if metric.together:
        return StepPlan(solves, over_layers)
    return gpu_plan.GpuPlan(solves, grads, updates)


@pytest.fixture
def gpu(monkeypatch):
    """From now on optimizers take the CPU for a GPU."""
    if REAL:
        return

    monkeypatch.setattr(Launches, "made", [])
    monkeypatch.setattr(engine, "plan_of", gpu_plan_of)
    yes = property(lambda self: True, lambda self, value: None)
    for kind in (engine.Engine, Preconditioned):
        monkeypatch.setattr(kind, "on_gpu", yes, raising=False)
    monkeypatch.setattr(gpu_plan, "available", lambda device: True)
    for module, make_graph in ((gpu_plan, Tape), (grouped, Launches)):
        replay = partial(recorder.Replay, make_graph=make_graph)
        monkeypatch.setattr(module, "Replay", replay)
    monkeypatch.setattr(grouped, "send", sent)


def plain_plan_of(solves, grads, metric, updates, traced):
    return StepPlan(
        solves, over_layers if solves and metric.together else None
    )


@pytest.fixture
def both_ways(monkeypatch, request):
    """What a function returns with the plain plan, and with a GPU's."""

    def run(function: Callable[[], Any]) -> tuple[Any, Any]:
        with monkeypatch.context() as patch:
            patch.setattr(engine, "plan_of", plain_plan_of)
            want = function()
        request.getfixturevalue("gpu")
        return want, function()

    return run


class Net(nn.Module):
    """Layers of several kinds, one of which no kernel serves, and a parameter that no layer has."""

    def __init__(self):
        super().__init__()
        self.up = nn.ConvTranspose2d(2, 2, 2)
        self.conv = nn.Conv2d(2, 3, 4)
        self.norm = nn.BatchNorm2d(3)
        self.scale = nn.Parameter(torch.ones(3, 1, 1))
        self.hidden = nn.Linear(12, 5, bias=False)
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        x = self.norm(self.conv(self.up(x))) * self.scale
        return self.head(self.hidden(x.flatten(1)).tanh())


def network(dtype=torch.float32) -> Net:
    torch.manual_seed(0)
    return Net().to(DEVICE, dtype)


def backward(model: nn.Module, i: int, count: int = 6) -> Tensor:
    like = next(model.parameters())
    generator = torch.Generator().manual_seed(i)
    x = torch.randn(count, 2, 4, 4, generator=generator, dtype=torch.float64)
    y = torch.randn(count, 3, generator=generator, dtype=torch.float64)
    loss = naive.loss_of(model(x.to(like)), y.to(like))
    loss.backward()
    return loss


def vector(model: nn.Module) -> Tensor:
    return naive.flat([p.detach().cpu() for p in model.parameters()]).clone()


def train(model, opt, steps, changes=None, step=None) -> list[Tensor]:
    """The weights after every step; `changes` are made before some of them."""
    found = []
    for i in range(steps):
        (changes or {}).get(i, lambda *_: None)(model, opt)
        opt.zero_grad()
        backward(model, i)
        (step or opt.step)()
        found.append(vector(model))
    return found


def grouped_params(model: Net) -> list[dict[str, Any]]:
    """Four groups with other recipes."""
    return [
        {
            "params": [model.conv.weight, model.hidden.weight],
            "weight_decay": 0.01,
        },
        {
            "params": [model.head.weight, model.conv.bias],
            "lr": 0.02,
            "nesterov": True,
        },
        {
            "params": [*model.up.parameters(), model.head.bias],
            "maximize": True,
        },
        {"params": [*model.norm.parameters(), model.scale], "momentum": 0.0},
    ]


def built(model: Net, groups=True, metric=None, **options) -> Preconditioned:
    """SENG with a metric of CURVATURES, or KFAC where there is P alone."""
    options = {"lr": 0.05, "refresh_every": 4} | options
    params = grouped_params(model) if groups else model.parameters()
    curvature = CURVATURES.get(metric, options.pop("curvature", None))
    if curvature is SMALL:
        return seng.KFAC(params, module=model, rank=SMALL.rank, **options)
    options = {"damping": 0.1, "curvature": curvature} | options
    return seng.SENG(params, module=model, **options)


def change_lr(_, opt):
    for group in opt.param_groups:
        group["lr"] = 0.3 * group["lr"]


def change_damping(_, opt):
    for group in opt.param_groups:
        group["damping"] = 0.4


CHANGES = {3: change_lr, 6: change_damping, 7: change_lr}
over_identity = partial(seng.Curvature, base=None, samples=None)
SMALL = seng.Kronecker(rank=4)
OVER_P = partial(seng.Curvature, base=SMALL, samples=None)
CURVATURES = {
    "merged": over_identity(rank=3, decay=0.8, centred=False),
    "merged, centred": over_identity(rank=3, decay=0.8, centred=True),
    "merged, not averaged": over_identity(rank=3, decay=0),
    "explicit": over_identity(form="explicit", decay=0, centred=False),
    "explicit, centred": over_identity(form="explicit", decay=0, centred=True),
    "implicit": over_identity(form="implicit", rank=2, decay=0, centred=False),
    "implicit, centred": over_identity(
        form="implicit", rank=2, decay=0, centred=True
    ),
    "independent": over_identity(
        form="implicit", combine="independent", decay=0
    ),
    "sketched": over_identity(
        form="explicit", sketch=seng.sketch.Gaussian(20), decay=0
    ),
    "low rank over P": OVER_P(rank=3, decay=0.8),
    "explicit over P": OVER_P(form="explicit", decay=0),
    "implicit over P": OVER_P(form="implicit", rank=2, decay=0),
    "P alone": SMALL,
}
SERVED = (
    "merged",
    "merged, centred",
    "merged, not averaged",
    "explicit",
    "explicit, centred",
)
OVER_P = "low rank over P", "explicit over P", "implicit over P", "P alone"
CENTRED = "implicit, centred", "implicit over P"  # kept as operators
AVERAGED = "merged", "merged, centred", "low rank over P"
every_curvature = pytest.mark.parametrize("name", CURVATURES)


def near(got: list[Tensor], want: list[Tensor], tolerance=2e-5) -> None:
    """On a GPU not even the same backward gives the same twice."""
    start = vector(network(got[0].dtype))
    tolerance = max(tolerance, 1e-3) if REAL else tolerance
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        off = naive.relative_error(a - start, b - start)
        assert off < tolerance, f"step {i}: {off}"


@every_curvature
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_steps_are_those_of_the_plain_plan(name, dtype, both_ways):
    """Over three refreshes, a change of the damping and two of the learning rate."""

    def run():
        model, plans = network(dtype), []
        opt = built(model, metric=name)
        if not REAL:
            opt.engine.recorder = recorder.Recorder(CPU, Again)

        def note(*_):
            plans.append(opt.engine.cache.plan)

        noted = {i: both(note, CHANGES.get(i)) for i in range(12)}
        return train(model, opt, 12, noted), plans, opt

    (want, plain, _), (got, plans, opt) = both_ways(run)
    near(got, want, 2e-5 if dtype == torch.float32 else 1e-11)
    plan = opt.engine.cache.plan
    assert type(plain[-1]) is StepPlan and type(plan) is gpu_plan.GpuPlan
    assert plan.others.replay.graph is not None
    # An average of bases has more directions than the first basis.
    assert all(
        known is plan for known in plans[6 if name in AVERAGED else 2 :]
    )
    # Kernels have neither float64 nor factors, and do nothing but g − Ub.
    if dtype == torch.float32 and name in SERVED:
        assert [s.site.name for s in plan.others.solves] == ["up"]
        assert plan.kernels.replay.graph is not None
        assert opt.fusion.last is not None and opt.fusion.last.others
    elif dtype == torch.float64 or name in OVER_P:
        assert plan.kernels is None and opt.fusion.last is None
        assert len(plan.others.solves) == 5
    bases = {type(s.state.U) for s in plan.solves if name != "P alone"}
    assert (Centred in bases) == (name in CENTRED)
    if not REAL:
        assert plan.others.replay.graph.replays
        assert plan.kernels is None or any(
            each.replays for each in Launches.made
        )


def both(*changes: Any) -> Callable[..., None]:
    def change(*args: Any) -> None:
        for one in changes:
            if one is not None:
                one(*args)

    return change


def freeze(model, _):
    for p in (model.norm.bias, model.scale, *model.head.parameters()):
        p.requires_grad_(False)


def freeze_some(model, _):
    """No layer as a whole."""
    for p in (model.norm.bias, model.scale, model.up.bias):
        p.requires_grad_(False)


def thaw(model, _):
    model.requires_grad_(True)


def set_all(**options):
    def change(_, opt):
        for group in opt.param_groups:
            group.update(options)

    return change


def reload(model, opt):
    opt.load_state_dict(copy.deepcopy(opt.state_dict()))


def move(model, _):
    """As `model.to` does with what lies in memory in another order."""
    for p in model.parameters():
        p.data = p.data.clone()
    model.conv.weight.data = model.conv.weight.data.to(
        memory_format=torch.channels_last
    )


def forget_momentum(_, opt):
    opt.state.clear()


def wide_momentum(_, opt):
    """Which no kernel takes in another precision than its parameter."""
    for state in opt.state.values():
        state["momentum_buffer"] = state["momentum_buffer"].double()


def tensor_lr(_, opt):
    for group in opt.param_groups:
        group["lr"] = torch.tensor(0.03)


def new_damping_of_one(_, opt):
    opt.param_groups[3]["damping"] = 0.7  # of the norm


def other_batch(model, opt):
    with opt.curvature_batch():
        backward(model, 77)


BETWEEN = {
    "parameters frozen and thawed": {3: freeze, 6: thaw},
    "frozen at a refresh": {4: freeze, 7: thaw},
    "parts of layers frozen and thawed": {3: freeze_some, 6: thaw},
    "parts of layers frozen at a refresh": {4: freeze_some, 7: thaw},
    "momentum on": {0: set_all(momentum=0.0), 3: set_all(momentum=0.9)},
    "momentum off": {3: set_all(momentum=0.0)},
    "weight decay": {
        3: set_all(weight_decay=0.1),
        6: set_all(weight_decay=0.0),
    },
    "maximize": {3: set_all(maximize=True)},
    "nesterov": {3: set_all(momentum=0.9, nesterov=True)},
    "loaded": {3: reload, 6: reload},
    "moved": {3: move, 7: move},
    "momentum in another precision": {
        0: set_all(momentum=0.9),
        3: wide_momentum,
        8: forget_momentum,
    },
    "state cleared": {3: forget_momentum},
    "a learning rate that is a tensor": {3: tensor_lr},
    "one group's damping": {2: new_damping_of_one},
    "a batch for the curvature": {2: other_batch, 7: other_batch},
}


@pytest.mark.parametrize("name", BETWEEN)
@pytest.mark.parametrize("metric", ["merged", "low rank over P", "P alone"])
def test_what_happens_in_between_is_noticed(metric, name, both_ways):
    def run():
        model = network()
        opt = built(model, metric=metric)
        return train(model, opt, 10, BETWEEN[name])

    want, got = both_ways(run)
    near(got, want, 5e-5)


@pytest.mark.parametrize("loaded", [False, True], ids=["", "loaded"])
def test_solves_that_fail_are_counted(loaded, both_ways):
    """By the kernels too, and after a checkpoint, whose state has not all that a refresh knows."""

    def run():
        model = network()
        opt = built(model, metric="merged, not averaged")
        train(model, opt, 3)
        if loaded:
            reload(model, opt)
        found = train(model, opt, 3)
        for view in inspect(opt).layers:
            assert view.solver.U is view.state.U
            assert view.solver.failures is view.state.failures
            view.state.gram.fill_(torch.nan)
        change_damping(model, opt)
        found += train(model, opt, 3)  # the last of them refreshes
        return found, [x["solves_failed"] for x in opt.diagnostics().values()]

    (want, failed), (got, counted) = both_ways(run)
    assert failed == counted == [2] * 5
    near(got, want)


def test_a_refresh_that_is_interrupted_leaves_no_half_written_state(
    gpu, monkeypatch
):
    model = network()
    opt = built(model, metric="merged, not averaged")
    train(model, opt, 4)

    def interrupted(old, new):
        old.gram.fill_(torch.nan)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(records, "settle", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(model, opt, 1)
    assert set(inspect(opt).states) == {
        1,
        2,
        3,
        4,
    }  # the first layer's is gone
    opt.engine.clock.steps += 1  # the next step comes without a refresh
    found = train(model, opt, 3)
    assert found[-1].isfinite().all() and len(inspect(opt).states) == 5
    assert not any(
        entry["solves_failed"] for entry in opt.diagnostics().values()
    )


@pytest.mark.parametrize(
    "metric",
    ["merged", "implicit, centred", "low rank over P", "P alone"],
)
def test_a_step_under_autocast_is_in_full_precision(metric, gpu):
    ends = []
    for enabled in (False, True):
        model = network()
        opt = built(model, metric=metric)

        def step(opt=opt, enabled=enabled):
            with torch.autocast(DEVICE.type, torch.bfloat16, enabled=enabled):
                opt.step()

        ends.append(train(model, opt, 8, step=step))
    near(ends[1], ends[0])


def attached(model):
    sgd = torch.optim.SGD(
        model.parameters(), 0.05, momentum=0.9, nesterov=True
    )
    return sgd, seng.attach(
        sgd,
        model,
        damping=0.1,
        refresh_every=4,
        curvature=CURVATURES["merged"],
    )


ABSOLUTE = over_identity(decay=0, relative_damping=False)
OTHERS = {
    "attach": attached,
    "kfac": lambda model: (
        opt := seng.KFAC(
            model, lr=0.02, damp="tikhonov", damping=0.1, refresh_every=4
        ),
        opt,
    ),
    "network": lambda model: (
        opt := built(
            model, curvature=over_identity(blocks="network", decay=0)
        ),
        opt,
    ),
    "lagged": lambda model: (
        opt := built(model, strategy="lagged", metric="merged"),
        opt,
    ),
    "paper": lambda model: (
        opt := built(model, recipe="paper", lr=0.005, curvature=ABSOLUTE),
        opt,
    ),
    "default": lambda model: (opt := built(model), opt),
    "muon": lambda model: (opt := built(model, recipe="muon"), opt),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_optimizers(name, both_ways):
    """Also those whose updates no kernel takes over."""

    def run():
        model = network()
        opt, holder = OTHERS[name](model)
        return train(model, opt, 11), holder

    (want, _), (got, holder) = both_ways(run)
    near(got, want)
    plan = holder.engine.cache.plan
    assert (type(plan) is StepPlan) == (name == "network")
    if name != "network":
        assert plan.others.replay.graph is not None
    assert (
        getattr(holder, "fusion", None) is None or holder.fusion.last is None
    )


def test_a_closure_and_a_compiled_step_among_others(both_ways):
    def run():
        torch._dynamo.reset()
        model, found = network(), []
        opt = built(model, metric="merged")
        compiled = torch.compile(opt.step, backend="eager")
        for i in range(10):

            def closure(i=i):
                opt.zero_grad()
                return backward(model, i)

            if i in (2, 5, 6):  # 4 and 8 refresh
                closure()
                compiled()
            else:
                assert float(opt.step(closure)) != 0
            found.append(vector(model))
        return found

    want, got = both_ways(run)
    near(got, want)


def test_a_copy_goes_on_by_itself(gpu):
    model = network()
    opt = built(model, metric="merged")
    train(model, opt, 3)
    twin = copy.deepcopy({"model": model, "opt": opt})
    want = train(model, opt, 6)
    got = train(twin["model"], twin["opt"], 6)
    near(got, want)


def test_a_group_that_is_added_later(both_ways):
    def run():
        model = network()
        first, *rest = grouped_params(model)
        options = {"lr": 0.05, "damping": 0.1, "refresh_every": 4}
        curvature = CURVATURES["merged"]
        opt = seng.SENG([first], module=model, curvature=curvature, **options)

        def add(_, opt):
            for group in rest:
                opt.add_param_group(group)

        return train(model, opt, 9, {3: add})

    want, got = both_ways(run)
    near(got, want)


@pytest.mark.parametrize("form", ["merged", "explicit"])
def test_a_basis_in_half_precision(form, gpu):
    """As a GPU keeps it under autocast: the same directions as one solver after the other."""
    model = network()
    options = {"rank": 3} if form == "merged" else {}
    curvature = over_identity(form=form, decay=0, **options)
    opt = built(model, curvature=curvature)
    train(model, opt, 1)
    backward(model, 5)
    grads = {p: p.grad.clone() for p in model.parameters()}
    solves = []
    for solve in opt.engine.cache.plan.solves:
        state = inspect(opt).states[solve.index]
        U = Merged.of(
            state.U.explicit().U.T.contiguous(), state.U.shape, half=True
        )
        half = replace(state, U=U, gram=U.gram())
        solves.append(replace(solve, solver=half.at(0.1)))
    plan = gpu_plan.GpuPlan(solves, grads, updates=True)
    assert len(plan.members) == 4 and plan.members[0].solver.basis[
        0
    ].dtype == (torch.float16)
    want = StepPlan(solves).directions(grads)
    for _ in range(3):
        got = plan.directions(grads)
        for p, d in want.items():
            torch.testing.assert_close(got[p], d, rtol=1e-4, atol=1e-5)
        moved = (got[p] - grads[p] for p in grads)
        assert max(float(t.abs().max()) for t in moved) > 1e-3
