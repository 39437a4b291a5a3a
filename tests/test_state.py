"""Checkpoints: bit for bit through torch.save and torch.distributed.checkpoint, across precisions, and from older versions."""

import copy
import io
from pathlib import Path

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
from seng.linalg.sketch import CountSketch, Identity, KroneckerRows, Rows
from seng.linalg.windows import Windows
from seng.metrics.block import Block
from seng.tell.state import pack, unpack

SETTINGS = {
    "default": {},
    "no-momentum": {"momentum": 0.0},
    "explicit-sketched": {"curvature": seng.Curvature(form="explicit", sketch=Rows(9))},
    "implicit-sketched": {
        "curvature": seng.Curvature(form="implicit", rank=2, sketch=KroneckerRows(3, 3))
    },
    "independent": {
        "curvature": seng.Curvature(
            combine="independent", sketch=CountSketch(9), decay=0
        )
    },
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
        naive.loss_of(model(x), target).backward()
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
    model, opt = built(options)
    train(model, opt, 0, 10)
    want = values(model)

    how = StateDictOptions(flatten_optimizer_state_dict=flat)
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
    if through == "folder":  # which loses strides, and with them the order of summation
        assert naive.relative_error(values(model), want) < 1e-12
    else:
        assert torch.equal(values(model), want)


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
    dcp.save({"optim": get_optimizer_state_dict(model, opt)}, checkpoint_id=tmp_path)
    fresh = seng.SENG(model, lr=0.05, refresh_every=4)
    model.zero_grad()
    state = {"optim": get_optimizer_state_dict(model, fresh)}
    dcp.load(state, checkpoint_id=tmp_path)
    with pytest.warns(
        UserWarning,
        match="seng: the loaded state has no curvature: .* call seng.expect_curvature",
    ):
        set_optimizer_state_dict(model, fresh, state["optim"])
    assert fresh.refresh_due and fresh.preconditioner.steps == 6
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
        assert opt.preconditioner.steps == 9
    assert torch.equal(*results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_loads_in_another_precision(dtype):
    model, opt = built({})
    train(model, opt, 0, 6)
    twin = copy.deepcopy(model).to(dtype)
    other = seng.SENG(twin, lr=0.05, refresh_every=4)
    other.load_state_dict(opt.state_dict())
    assert {
        t.dtype
        for b in other.preconditioner.blocks.values()
        for t in b.U.tensors()
        if t.is_floating_point()
    } == {torch.float32}
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
    model, opt = built({"curvature": seng.Curvature()})
    train(model, opt, 0, 1)
    dcp.save(
        {"optim": get_optimizer_state_dict(model, opt, options=how)},
        checkpoint_id=tmp_path,
    )
    kept = opt.preconditioner.blocks[1].gram.clone()
    train(model, opt, 1, 8)
    assert opt.preconditioner.blocks[1].gram.shape != kept.shape
    state = {"optim": get_optimizer_state_dict(model, opt, options=how)}
    seng.expect_curvature(state, tmp_path)
    dcp.load(state, checkpoint_id=tmp_path)
    set_optimizer_state_dict(model, opt, state["optim"], options=how)
    assert (
        torch.equal(opt.preconditioner.blocks[1].gram, kept)
        and opt.preconditioner.steps == 1
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
    assert (
        opt.preconditioner.blocks[0].gram.dtype == torch.float32
        and values(model).isfinite().all()
    )


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
    assert (
        set(opt.preconditioner.ledger.refused)
        == set(other.preconditioner.ledger.refused)
        == {1}
        and not other.refresh_due
    )

    heads = nn.ModuleDict({"a": nn.Linear(3, 2), "b": nn.Linear(3, 2)})
    opt = seng.SENG(heads, lr=0.05, refresh_every=4)
    for name in "ab":
        opt.zero_grad()
        heads[name](torch.randn(5, 3)).square().mean().backward()
        opt.step()
    assert (
        opt.preconditioner.ledger.owed
        == resumed(opt, heads).preconditioner.ledger.owed
        == {1}
    )

    layer = nn.Linear(3, 2)
    opt = seng.SENG(layer, lr=0.05, refresh_every=1)
    layer(torch.randn(5, 3)).square().mean().backward()
    opt.step()
    for p in layer.parameters():
        p.grad = torch.zeros_like(p)
    opt.step()
    assert opt.preconditioner.missed and resumed(opt, layer).refresh_due


OLDER = sorted((Path(__file__).parent / "data").glob("checkpoint_*.pt"))


@pytest.mark.parametrize("path", OLDER, ids=lambda path: path.stem)
def test_checkpoints_of_older_versions_continue_where_they_were(path):
    """Each file was written by the version that its name tells, with what that version reached six steps later."""
    torch.set_default_dtype(torch.float32)
    saved = torch.load(path, weights_only=True)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 2))
    opt = seng.SENG(model, lr=0.05, refresh_every=4, curvature=seng.Curvature(rank=3))
    model.load_state_dict(saved["model"])
    opt.load_state_dict(saved["optimizer"])
    assert len(opt.preconditioner.blocks) == 3 and opt.preconditioner.steps == 6
    for i in range(6, 12):
        generator = torch.Generator().manual_seed(i)
        x, target = (
            torch.randn(6, 3, generator=generator),
            torch.randn(6, 2, generator=generator),
        )
        opt.zero_grad()
        nn.functional.mse_loss(model(x), target).backward()
        opt.step()
    for name, p in model.state_dict().items():
        torch.testing.assert_close(
            p, saved["after_12_steps"][name], rtol=1e-4, atol=1e-6
        )


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
    assert torch.equal(
        other.preconditioner.blocks[0].gram, handle.preconditioner.blocks[0].gram
    )


def test_fields_that_are_younger_than_a_checkpoint_have_their_defaults():
    U = Windows(
        torch.randn(3, 2, 4), torch.randn(3, 5, 4), (1,), (1,), (0,), (1,), 1, 0.1
    )
    block = Block(U, Identity(), U.gram(), torch.ones(()), True, patience=2)
    state = pack(block, torch.device("cpu"))
    same = unpack(state, Block, torch.device("cpu"), torch.float64)
    assert (same.patience, same.U.scale, same.U.kernel) == (2, 0.1, (1,))
    del state["patience()"], state["U:Windows"]["scale()"]
    old = unpack(state, Block, torch.device("cpu"), torch.float64)
    assert (old.patience, old.U.scale) == (0, 1.0)
