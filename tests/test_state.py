"""Checkpoints: bit for bit through torch.save and torch.distributed.checkpoint, across precisions, with missing fields."""

import copy
import io

import naive
import pytest
import torch
import torch.distributed.checkpoint as dcp
from test_capture import Positions
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

import seng
from seng.linalg.centred import Centred
from seng.linalg.operators import Explicit
from seng.linalg.sketch import CountSketch, Identity, KroneckerRows, Rows
from seng.metrics.factor import Factor
from seng.metrics.kronecker import KroneckerState
from seng.metrics.woodbury import LowRankState
from seng.tell.inspection import inspect
from seng.tell.state import pack, unpack

SETTINGS = {
    "default": {},
    "no-momentum": {"momentum": 0.0},
    "explicit-sketched": {
        "curvature": seng.Curvature(base=None, form="explicit", sketch=Rows(9))
    },
    "implicit-sketched": {
        "curvature": seng.Curvature(
            base=None, form="implicit", rank=2, sketch=KroneckerRows(3, 3)
        )
    },
    "independent": {
        "curvature": seng.Curvature(
            base=None, combine="independent", sketch=CountSketch(9), decay=0
        )
    },
    "centred columns": {
        "curvature": seng.Curvature(base=None, form="explicit")
    },
    "centred factors": {
        "curvature": seng.Curvature(base=None, form="implicit", rank=2)
    },
    "muon": {"recipe": "muon"},
}


def built(options):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(6, 4),
        nn.Flatten(),
        nn.Linear(12, 5),
        nn.Tanh(),
        nn.LayerNorm(5),
        nn.Linear(5, 3),
    )
    return model, seng.SENG(model, lr=0.05, refresh_every=4, **options)


def train(model, opt, start, stop):
    for i in range(start, stop):
        generator = torch.Generator().manual_seed(i)
        x, target = (
            torch.randint(6, (8, 3), generator=generator),
            torch.randn(8, 3, generator=generator),
        )
        opt.zero_grad()
        out = model(x)
        naive.loss_of(out, target.to(out.dtype)).backward()
        opt.step()


def values(model):
    return naive.flat([p.detach() for p in model.parameters()]).clone()


@pytest.fixture(params=SETTINGS.values(), ids=SETTINGS)
def options(request):
    return request.param


@pytest.mark.filterwarnings("ignore:seng. .*is larger than layer")
@pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed")
@pytest.mark.parametrize("stop", [0, 4, 6])
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("through", ["memory", "folder", "file"])
def test_distributed_checkpoints_resume_bit_for_bit(
    options, flat, through, stop, tmp_path
):
    how = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, opt = built(options)
    train(model, opt, 0, stop)
    # Before a first step, torch fills AdamW's state by a step of zeros.
    get_state_dict(model, opt, options=how)
    train(model, opt, stop, 10)
    want = values(model)

    model, opt = built(options)
    train(model, opt, 0, stop)
    model_state, optim_state = get_state_dict(model, opt, options=how)
    state = {"model": model_state, "optim": optim_state}
    if through == "memory":
        state = copy.deepcopy(state)
    elif through == "file":
        torch.save(state, tmp_path / "checkpoint.pt")
        state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    else:
        dcp.save(state, checkpoint_id=tmp_path)
    model, opt = built(options)
    if through == "folder":
        model_state, optim_state = get_state_dict(model, opt, options=how)
        state = {"model": model_state, "optim": optim_state}
        seng.expect_curvature(state, tmp_path)
        dcp.load(state, checkpoint_id=tmp_path)
    set_state_dict(
        model,
        opt,
        model_state_dict=state["model"],
        optim_state_dict=state["optim"],
        options=how,
    )
    train(model, opt, stop, 10)
    if (
        through == "folder"
    ):  # which loses strides, and with them the order of summation
        assert naive.relative_error(values(model), want) < 1e-12
    else:
        assert torch.equal(values(model), want)


def test_what_is_centred_resumes_bit_for_bit_in_single_precision():
    """The weights of the samples are kept in float64, whatever the layer is."""
    results = []
    for saved in (False, True):
        model, opt = built(SETTINGS["centred factors"])
        model.float()
        train(model, opt, 0, 6)
        if saved:
            state = copy.deepcopy(opt.state_dict())
            opt = seng.SENG(
                model, 0.05, refresh_every=4, **SETTINGS["centred factors"]
            )
            opt.load_state_dict(state)
        train(model, opt, 6, 8)
        results.append(values(model))
    assert torch.equal(*results)


@pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed")
def test_full_state_dicts_on_the_cpu():
    how = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model, opt = built({})
    train(model, opt, 0, 6)
    twin = copy.deepcopy(model)
    fresh = seng.SENG(twin, lr=0.05, refresh_every=4)
    state = copy.deepcopy(get_optimizer_state_dict(model, opt, options=how))
    set_optimizer_state_dict(twin, fresh, state, options=how)
    for m, o in ((model, opt), (twin, fresh)):
        train(m, o, 6, 10)
    assert torch.equal(values(model), values(twin))


@pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed")
def test_a_folder_loaded_without_its_curvature_says_so_and_refreshes(tmp_path):
    model, opt = built({})
    train(model, opt, 0, 6)
    dcp.save(
        {"optim": get_optimizer_state_dict(model, opt)}, checkpoint_id=tmp_path
    )
    fresh = seng.SENG(model, lr=0.05, refresh_every=4)
    model.zero_grad()
    state = {"optim": get_optimizer_state_dict(model, fresh)}
    dcp.load(state, checkpoint_id=tmp_path)
    with pytest.warns(
        UserWarning,
        match="seng: the loaded state has no curvature: .* call seng.expect_curvature",
    ):
        set_optimizer_state_dict(model, fresh, state["optim"])
    assert fresh.refresh_due and inspect(fresh).steps == 6
    train(model, fresh, 6, 8)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_asking_for_the_state_changes_nothing(momentum):
    results = []
    for asked in (False, True):
        model, opt = built({"momentum": momentum})
        for i in range(9):
            if asked:
                opt.zero_grad()
                get_optimizer_state_dict(model, opt)
            train(model, opt, i, i + 1)
        results.append(values(model))
        assert inspect(opt).steps == 9
    assert torch.equal(*results)


def precisions(state):
    """Of what is kept, but for the roots of samples' weights, which stay in float64."""
    roots = [state.U.s] if isinstance(state.U, Centred) else []
    assert all(s.dtype == torch.float64 for s in roots)
    kept = [t for t in state.tensors() if t.is_floating_point()]
    return {t.dtype for t in kept if all(t is not s for s in roots)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_loads_in_another_precision(dtype):
    model, opt = built({})
    train(model, opt, 0, 6)
    twin = copy.deepcopy(model).to(dtype)
    other = seng.SENG(twin, lr=0.05, refresh_every=4)
    other.load_state_dict(opt.state_dict())
    for state in inspect(other).states.values():
        assert precisions(state) == {torch.float32}
    before = values(twin)
    x, target = torch.randint(6, (8, 3)), torch.randn(8, 3)
    for m, o in ((model, opt), (twin, other)):
        o.zero_grad()
        naive.loss_of(m(x), target.to(m[2].weight.dtype)).backward()
        o.step()
    moved = values(twin) - before
    assert (
        moved.isfinite().all()
        and naive.relative_error(values(twin).double(), values(model))
        < (1e-5, 3e-2)[dtype == torch.bfloat16]
    )


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed")
def test_rolling_back_to_a_folder_from_other_shapes(flat, tmp_path):
    how = StateDictOptions(flatten_optimizer_state_dict=flat)
    # An average of bases grows with its second refresh.
    curvature = seng.Curvature(rank=16, decay=0.8)
    model, opt = built({"curvature": curvature})
    train(model, opt, 0, 1)
    dcp.save(
        {"optim": get_optimizer_state_dict(model, opt, options=how)},
        checkpoint_id=tmp_path,
    )
    kept = inspect(opt).states[1].gram.clone()
    train(model, opt, 1, 8)
    assert inspect(opt).states[1].gram.shape != kept.shape
    state = {"optim": get_optimizer_state_dict(model, opt, options=how)}
    seng.expect_curvature(state, tmp_path)
    dcp.load(state, checkpoint_id=tmp_path)
    set_optimizer_state_dict(model, opt, state["optim"], options=how)
    assert (
        torch.equal(inspect(opt).states[1].gram, kept)
        and inspect(opt).steps == 1
    )


def test_a_model_that_changes_its_precision_goes_on():
    model, opt = built({})
    train(model, opt, 0, 5)
    model.float()
    for p in model.parameters():
        p.grad = None
    for _ in range(5):
        opt.zero_grad()
        model(torch.randint(6, (8, 3))).square().mean().backward()
        opt.step()
    assert precisions(inspect(opt).states[0]) == {torch.float32}
    assert values(model).isfinite().all()


def resumed(opt, model):
    other = seng.SENG(model, lr=0.05, refresh_every=4)
    other.load_state_dict(opt.state_dict())
    return other


def test_decisions_survive_a_checkpoint():
    """What was refused stays so, and a refresh that is owed or was missed is still due."""
    model = Positions()
    opt = seng.SENG(model, lr=0.05, refresh_every=4)
    with pytest.warns(UserWarning, match="'places'"):
        for _ in range(2):
            opt.zero_grad()
            model(torch.randint(7, (8, 5))).square().mean().backward()
            opt.step()
    other = resumed(opt, model)
    for one in (opt, other):
        refused = [layer.refused is not None for layer in inspect(one).layers]
        assert refused == [False, True, False]
    assert not other.refresh_due

    heads = nn.ModuleDict({"a": nn.Linear(3, 2), "b": nn.Linear(3, 2)})
    opt = seng.SENG(heads, lr=0.05, refresh_every=4)
    for name in "ab":
        opt.zero_grad()
        heads[name](torch.randn(5, 3)).square().mean().backward()
        opt.step()
    for one in (opt, resumed(opt, heads)):
        assert [layer.owed for layer in inspect(one).layers] == [False, True]

    layer = nn.Linear(3, 2)
    opt = seng.SENG(layer, lr=0.05, refresh_every=1)
    layer(torch.randn(5, 3)).square().mean().backward()
    opt.step()
    for p in layer.parameters():
        p.grad = torch.zeros_like(p)
    opt.step()
    assert inspect(opt).missed and resumed(opt, layer).refresh_due


def test_a_checkpoint_whose_layout_is_unknown_starts_its_curvature_afresh():
    model, opt = built({})
    train(model, opt, 0, 6)
    state = opt.state_dict()
    for entry in state["state"].values():
        ours = entry["seng"]
        kept = [key for key in ours if key.startswith("state:")]
        ours |= {
            key.replace("state:", "block:"): ours.pop(key) for key in kept
        }
    other = seng.SENG(model, lr=0.05, refresh_every=4)
    with pytest.warns(UserWarning, match="the next step refreshes it"):
        other.load_state_dict(state)
    assert not inspect(other).states and inspect(other).steps == 6
    train(model, other, 6, 7)
    assert len(inspect(other).states) == 4 and values(model).isfinite().all()


def test_a_handle_keeps_its_state_in_a_file():
    model = nn.Linear(3, 2)
    adam = torch.optim.Adam(model.parameters())
    handle = seng.attach(adam, model)
    model(torch.randn(4, 3)).square().mean().backward()
    adam.step()
    buffer = io.BytesIO()
    torch.save(handle.state_dict(), buffer)
    buffer.seek(0)
    other = seng.attach(torch.optim.Adam(model.parameters()), model)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    kept, loaded = (
        inspect(each).states[0].tensors() for each in (handle, other)
    )
    assert len(kept) == len(loaded) and all(map(torch.equal, kept, loaded))


def test_fields_that_are_younger_than_a_checkpoint_have_their_defaults():
    side = Factor(torch.eye(3)[None], torch.ones(1, 3), torch.zeros(1))
    P = KroneckerState(side, side, noise=0.1, power=0.5, floor=0.1)
    U = Explicit(torch.randn(9, 4), (1, 3, 3))
    kept = LowRankState(U, Identity(), U.gram(), torch.ones(()), True, P)
    cpu = torch.device("cpu")
    entry = pack("state", kept, cpu)
    same = unpack("state", entry, cpu, torch.float64)
    assert (same.P.noise, same.U.layout) == (0.1, (1, 3, 3))
    del entry["state:LowRankState"]["P:KroneckerState"]["noise()"]
    old = unpack("state", entry, cpu, torch.float64)
    assert old.P.noise == 0.0
