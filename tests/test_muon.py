"""`seng.Muon` against torch's Muon and AdamW: seng/optim/muon.py, seng/recipes/muon.py."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import seng
from seng.layers.sites import survey
from seng.optim.muon import Muon
from seng.recipes.muon import ROOM, batches, matrices, polar
from seng.recipes.muon import Muon as Recipe

TorchMuon = pytest.importorskip("torch.optim._muon").Muon
F64 = torch.float64
COEFFICIENTS = (3.4445, -4.775, 2.0315)
SHAPES = [(5, 9), (9, 5), (6, 6), (1, 7), (6, 6), (7, 1)]


def parameters(
    shapes: Iterable[tuple[int, ...]] = SHAPES,
    dtype: torch.dtype = torch.float32,
) -> list[nn.Parameter]:
    draw = torch.Generator().manual_seed(0)
    return [
        nn.Parameter(torch.randn(s, generator=draw, dtype=F64).to(dtype))
        for s in shapes
    ]


def draw_gradients(params: Iterable[nn.Parameter], seed: int) -> None:
    """The same ones in every precision and for every optimizer."""
    draw = torch.Generator().manual_seed(seed)
    for p in params:
        g = torch.randn(p.shape, generator=draw, dtype=F64)
        p.grad = torch.empty_like(p).copy_(g)


def drive(
    params: list[nn.Parameter],
    opts: torch.optim.Optimizer | list[torch.optim.Optimizer],
    steps: int = 20,
    after: Callable[[], object] = lambda: None,
) -> None:
    opts = opts if isinstance(opts, list) else [opts]
    for seed in range(steps):
        draw_gradients(params, seed)
        for opt in opts:
            opt.step()
        after()


def assert_close(
    got: Iterable[Tensor], want: Iterable[Tensor], tolerance: float = 1e-6
) -> None:
    for a, b in zip(got, want, strict=True):
        assert (a - b).norm() <= tolerance * b.norm()


def assert_same(got: Iterable[Tensor], want: Iterable[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


class Everything(nn.Module):
    """Layers of many kinds; its forward is not needed."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.conv = nn.Conv2d(3, 4, 3)
        self.grouped = nn.Conv2d(4, 6, 3, groups=2, bias=False)
        self.up = nn.ConvTranspose2d(6, 4, (2, 3))
        self.grouped_up = nn.ConvTranspose1d(6, 4, 3, groups=2)
        self.norm = nn.LayerNorm((3, 4))
        self.linear = nn.Linear(4, 4)
        self.bare = nn.Parameter(torch.randn(3, 5))
        self.attention = nn.MultiheadAttention(4, 2)
        self.head = nn.Linear(4, 3)


MATRICES = {
    f"{name}.weight"
    for name in ("conv", "grouped", "up", "grouped_up", "linear")
}


def everything(dtype: torch.dtype = F64) -> Everything:
    torch.manual_seed(0)
    return Everything().to(dtype)


def taken(opt: Muon, module: nn.Module) -> set[str]:
    """The names of the parameters that take the polar step."""
    named = module.named_parameters()
    return {name for name, p in named if opt.recipe.is_matrix(p)}


# ------------------------------------------------------------- torch's Muon


@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lr": 0.3},
        {"weight_decay": 0.0},
        {"weight_decay": 0.7},
        {"momentum": 0.6},
        {"momentum": 0.0},
        {"nesterov": False},
        {"ns_coefficients": (2.0, -1.5, 0.5)},
        {"eps": 3.0},
        {"ns_steps": 0},
        {"ns_steps": 7},
        {"adjust_lr_fn": "original"},
        {"adjust_lr_fn": "match_rms_adamw"},
        {"adjust_lr_fn": "match_rms_adamw", "nesterov": False, "lr": 1e-3},
    ],
    ids=str,
)
def test_matrices_step_as_torchs(
    options: dict[str, Any], dtype: torch.dtype
) -> None:
    options = {"lr": 0.02, **options}
    ours, theirs = parameters(dtype=dtype), parameters(dtype=dtype)
    drive(ours, Muon(ours, **options))
    drive(theirs, TorchMuon(theirs, **options))
    assert_close(ours, theirs)


@pytest.mark.parametrize("nesterov", [True, False])
def test_momentum_is_torchs_bit_for_bit(nesterov: bool) -> None:
    """In half precision too, where torch's Muon without Nesterov normalises its buffer in place; ours is let be."""
    for dtype in (torch.float32, F64, torch.bfloat16):
        if dtype == torch.bfloat16 and not nesterov:
            continue
        ours, theirs = parameters(dtype=dtype), parameters(dtype=dtype)
        one = Muon(ours, nesterov=nesterov)
        other = TorchMuon(theirs, 0.02, nesterov=nesterov)
        drive(ours, one)
        drive(theirs, other)
        for p, q in zip(ours, theirs, strict=True):
            a, b = (
                s["momentum_buffer"] for s in (one.state[p], other.state[q])
            )
            assert torch.equal(a, b)
    p = nn.Parameter(torch.randn(4, 4).bfloat16())
    opt = Muon([p], nesterov=False, momentum=0.0)
    p.grad = torch.full_like(p, 8)
    opt.step()
    assert torch.equal(opt.state[p]["momentum_buffer"], p.grad)


def test_it_trains_as_torchs_along_gradients_of_its_own() -> None:
    """Gradients answer to each rounding, and Newton–Schulz in bfloat16 makes it large: here there is none."""
    models = []
    for kind in (Muon, TorchMuon):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(8, 16, bias=False),
            nn.Tanh(),
            nn.Linear(16, 4, bias=False),
        )
        opt = kind(model.parameters(), lr=0.02)
        x, y = torch.randn(32, 8), torch.randn(32, 4)
        losses = []
        for _ in range(20):
            opt.zero_grad()
            loss = (model(x) - y).square().mean()
            loss.backward()
            opt.step()
            losses.append(loss.item())
        assert losses[-1] < 0.9 * losses[0]
        models.append(model)
    assert_close(models[0].parameters(), models[1].parameters())


# ------------------------------------------------------------ torch's AdamW


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weight_decay": 0.0},
        {"adam_betas": (0.8, 0.99), "adam_eps": 1e-3, "adam_lr": 0.1},
        {"adjust_lr_fn": "match_rms_adamw", "lr": 1e-3},
        {"maximize": True},
        {"adam_lr": torch.tensor(0.01)},
        {"lr": torch.tensor(0.01)},
    ],
    ids=str,
)
def test_all_else_takes_adamw_bit_for_bit(options: dict[str, Any]) -> None:
    ours, theirs = everything(torch.float32), everything(torch.float32)
    lr = options.get("lr", 0.02)
    share = 1 if "adjust_lr_fn" in options else 0.015
    opt = Muon(ours, **options)
    others = {n: p for n, p in theirs.named_parameters() if n not in MATRICES}
    adamw = torch.optim.AdamW(
        others.values(),
        lr=options.get("adam_lr", share * lr),
        betas=options.get("adam_betas", (0.9, 0.95)),
        eps=options.get("adam_eps", 1e-8),
        weight_decay=options.get("weight_decay", 0.1),
        maximize=options.get("maximize", False),
    )
    drive([*ours.parameters()], opt)
    drive([*theirs.parameters()], adamw)
    assert len(others) == 14
    for name, q in others.items():
        p = ours.get_parameter(name)
        assert torch.equal(p, q), name
        mine, its = opt.state[p], adamw.state[q]
        assert mine.keys() == its.keys()
        assert_same(mine.values(), its.values())


def test_the_published_recipe_has_3e_4_beside_0_02() -> None:
    """And the others' own learning rate is not lr's business."""
    p = nn.Parameter(torch.ones(3, dtype=F64))
    for options, moved in [
        ({}, 3e-4),
        ({"lr": 0.04}, 6e-4),
        ({"adjust_lr_fn": "original"}, 3e-4),
        ({"adjust_lr_fn": "match_rms_adamw"}, 0.02),
        ({"adam_lr": 0.5}, 0.5),
        ({"adam_lr": 0.0}, 0.0),
    ]:
        q = copy.deepcopy(p)
        q.grad = torch.ones_like(q)
        Muon([q], weight_decay=0.0, adam_eps=0.0, **options).step()
        assert torch.allclose(p - q, torch.full_like(p, moved), atol=1e-15)


# ------------------------------------------------------- which, and how laid


def as_matrices(layer: Any, w: Tensor) -> list[Tensor]:
    """A weight's matrices, one group after another: rows are outputs, columns an output's own inputs."""
    if isinstance(layer, nn.Linear):
        return [w]
    kernel = [*range(2, w.dim())]
    blocks = w.chunk(layer.groups)
    if layer.transposed:
        blocks = [b.flip(kernel).transpose(0, 1) for b in blocks]
    return [b.flatten(1) for b in blocks]


@pytest.mark.parametrize("adjust", [None, "match_rms_adamw"])
@pytest.mark.parametrize("last", [False, True])
def test_kernels_are_matrices_and_groups_are_several(
    adjust: str | None, last: bool
) -> None:
    model = everything()
    if last:
        model.to(memory_format=torch.channels_last)
        assert not model.conv.weight.is_contiguous()
    names = sorted(MATRICES)
    layers = [model.get_submodule(n.removesuffix(".weight")) for n in names]
    weights = [layer.weight for layer in layers]
    theirs = [
        [
            nn.Parameter(b.detach().clone().contiguous())
            for b in as_matrices(layer, w)
        ]
        for layer, w in zip(layers, weights, strict=True)
    ]
    flat = [q for blocks in theirs for q in blocks]
    assert len(flat) == 7
    opt = Muon(model, adjust_lr_fn=adjust)
    reference = TorchMuon(flat, 0.02, adjust_lr_fn=adjust)
    for seed in range(5):
        draw_gradients(model.parameters(), seed)
        for layer, w, blocks in zip(layers, weights, theirs, strict=True):
            grads = as_matrices(layer, w.grad)
            for q, g in zip(blocks, grads, strict=True):
                q.grad = g.contiguous()
        opt.step()
        reference.step()
    for layer, w, blocks in zip(layers, weights, theirs, strict=True):
        # Some CPUs round products of batches otherwise, which groups are.
        tolerance = 1e-6 if len(blocks) == 1 else 0.05
        assert_close(as_matrices(layer, w), blocks, tolerance)
        assert opt.state[w]["momentum_buffer"].stride() == w.stride()


def test_a_module_says_which_parameters_are_matrices() -> None:
    """The head, tables, norms, biases, bare parameters and what no rule covers are none."""
    model = everything()
    opt = Muon(model)
    assert taken(opt, model) == MATRICES
    drive([*model.parameters()], opt, 1)
    for name, p in model.named_parameters():
        keys = {"exp_avg", "exp_avg_sq", "step"}
        wanted = {"momentum_buffer"} if name in MATRICES else keys
        assert set(opt.state[p]) == wanted, name
    assert taken(Muon(model.parameters(), module=model), model) == MATRICES


def test_without_a_module_dimensions_say_it() -> None:
    """A parameter of three or more is flattened to its first."""
    shapes = [(), (4,), (4, 3), (4, 3, 2), (4, 3, 2, 2)]
    ours = parameters(shapes, F64)
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    flat = [nn.Parameter(p.detach().flatten(1).clone()) for p in ours[2:]]
    opt = Muon(ours)
    drive(ours, opt, 3)
    muon = TorchMuon(flat, 0.02)
    adamw = torch.optim.AdamW(
        theirs[:2], 0.02 * 0.015, (0.9, 0.95), weight_decay=0.1
    )
    for seed in range(3):
        draw_gradients(theirs, seed)
        for q, p in zip(flat, theirs[2:], strict=True):
            q.grad = p.grad.flatten(1)
        muon.step()
        adamw.step()
    assert_same(ours[:2], theirs[:2])
    assert_close([p.flatten(1) for p in ours[2:]], flat)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 4)
        self.inner = nn.Linear(4, 4)
        self.again = nn.Linear(4, 4)
        self.again.weight = self.inner.weight
        self.other_table = nn.Embedding(4, 4)
        self.reads = nn.Linear(4, 4)
        self.reads.weight = self.other_table.weight
        self.twin = nn.Linear(4, 5)
        self.head = nn.Linear(4, 5)
        self.twin.weight = self.head.weight


def test_what_shares_a_weight_with_head_or_table_is_no_matrix() -> None:
    model = Tied()
    assert taken(Muon(model), model) == {"inner.weight"}
    model.head.weight = model.table.weight
    assert taken(Muon(model), model) == {"inner.weight", "twin.weight"}


def test_a_network_without_linear_layers_has_no_head() -> None:
    model = nn.Sequential(nn.BatchNorm2d(2), nn.Conv2d(2, 3, 3))
    assert taken(Muon(model), model) == {"1.weight"}


def test_a_bias_that_is_trained_alone_is_no_matrix() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    opt = Muon([model[0].bias], module=model)
    draw_gradients(model.parameters(), 0)
    opt.step()
    assert "exp_avg" in opt.state[model[0].bias]


def test_refusals_say_why_in_words() -> None:
    model = everything()
    sites, _ = survey(model, model.parameters())
    said = {site.name: Recipe.refuses(site, model) for site in sites}
    assert said["linear"] is said["conv"] is said["grouped_up"] is None
    assert "head" in said["head"]
    assert "no matrix" in said["table"] and "no matrix" in said["norm"]
    alone, _ = survey(model, [model.linear.bias])
    assert "bias" in Recipe.refuses(alone[0], model)
    found = matrices(sites, model)
    accepted = [s.lead for s in sites if said[s.name] is None]
    assert set(found) == set(accepted)


# ----------------------------------------------------------------- optimizer


def test_defaults_are_the_recipes() -> None:
    parameters = inspect.signature(Muon).parameters
    given = {name: p.default for name, p in parameters.items()}
    assert given["lr"] == Recipe.lr
    assert Recipe.options.items() <= given.items()
    of_all = {"params", "lr", "module", "weight_decay", "maximize"}
    assert given.keys() - Recipe.options.keys() == of_all


def test_groups_have_options_of_their_own() -> None:
    ours, theirs = parameters(), parameters()
    options = [
        {"lr": 0.1, "ns_steps": 3, "momentum": 0.5},
        {"weight_decay": 0.0, "adjust_lr_fn": "match_rms_adamw"},
        {"nesterov": False},
    ]
    groups = [
        [
            {"params": params[2 * i : 2 * i + 2], **each}
            for i, each in enumerate(options)
        ]
        for params in (ours, theirs)
    ]
    drive(ours, Muon(groups[0], 0.02))
    drive(theirs, TorchMuon(groups[1], 0.02))
    assert_close(ours, theirs)


def test_an_added_group_is_looked_for_in_the_module() -> None:
    whole, parts = everything(), everything()
    opt = Muon(parts.conv.parameters(), module=parts)
    assert taken(opt, parts) == {"conv.weight"}
    known = {*parts.conv.parameters()}
    opt.add_param_group(
        {"params": [p for p in parts.parameters() if p not in known]}
    )
    assert taken(opt, parts) == MATRICES
    drive([*whole.parameters()], Muon(whole), 3)
    drive([*parts.parameters()], opt, 3)
    assert_same(whole.parameters(), parts.parameters())


@pytest.mark.parametrize("shape", [(), (1,)])
def test_lr_may_be_a_tensor(shape: tuple[int, ...]) -> None:
    """Which may be written to."""
    floats, tensors, theirs = (parameters([*SHAPES, (4,)]) for _ in range(3))
    lr = torch.full(shape, 0.02)
    one, other = Muon(floats, 0.02), Muon(tensors, lr)

    def halve() -> None:
        lr.mul_(0.5)
        one.param_groups[0]["lr"] *= 0.5

    drive(floats, one)
    drive(tensors, other)
    assert_close(tensors, floats)
    drive(floats, one, 3, lambda: one.param_groups[0].update(lr=0.01))
    lr.fill_(0.02)
    drive(tensors, other, 3, lambda: lr.fill_(0.01))
    assert_close(tensors, floats)
    drive(theirs[:-1], TorchMuon(theirs[:-1], torch.tensor(0.02)))


def test_schedulers_cycle_lr_and_momentum() -> None:
    ours, theirs = parameters(), parameters()
    seen = []
    for params, kind in ((ours, Muon), (theirs, TorchMuon)):
        opt = kind(params, lr=0.02)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            opt, max_lr=0.1, total_steps=30
        )
        drive(params, opt, 20, schedule.step)
        seen.append(opt.param_groups[0]["momentum"])
    assert seen[0] == seen[1] != 0.95
    assert_close(ours, theirs)


def test_maximize_goes_uphill() -> None:
    up, down = parameters([(4, 3), (3,)]), parameters([(4, 3), (3,)])
    one, other = Muon(up, maximize=True), Muon(down)
    for seed in range(5):
        draw_gradients(up, seed)
        draw_gradients(down, seed)
        for p in down:
            p.grad.neg_()
        one.step()
        other.step()
    assert_same(up, down)


def test_a_closure_computes_the_gradients() -> None:
    (p,) = parameters([(3, 3)])
    opt = Muon([p])

    def closure() -> Tensor:
        opt.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    before = p.detach().clone()
    assert opt.step(closure) == before.square().sum()
    assert not torch.equal(p, before)


def test_without_a_gradient_nothing_moves() -> None:
    model = everything()
    before = copy.deepcopy(model)
    opt = Muon(model)
    opt.step()
    assert_same(model.parameters(), before.parameters())
    assert not opt.state
    model.linear.weight.grad = torch.zeros_like(model.linear.weight)
    opt.step()
    assert [*opt.state] == [model.linear.weight]
    assert model.linear.weight.isfinite().all()


def copies(opt: Muon, model: nn.Module) -> dict[str, tuple[Any, Any]]:
    """A model and its optimizer once more, by each of the ways there are."""
    saved = io.BytesIO()
    torch.save(opt.state_dict(), saved)
    saved.seek(0)
    loaded = copy.deepcopy(model)
    fresh = Muon(loaded, lr=1.0)
    fresh.load_state_dict(torch.load(saved, weights_only=True))
    return {
        "state_dict": (fresh, loaded),
        "deepcopy": copy.deepcopy((opt, model)),
        "pickle": pickle.loads(pickle.dumps((opt, model))),
    }


def test_a_copy_goes_on_bit_for_bit() -> None:
    model = everything(torch.float32).to(memory_format=torch.channels_last)
    opt = Muon(model, momentum=0.8)
    drive([*model.parameters()], opt, 3)
    others = copies(opt, model)
    drive([*model.parameters()], opt, 3)
    for name, (twin, module) in others.items():
        assert taken(twin, module) == MATRICES, name
        drive([*module.parameters()], twin, 3)
        assert_same(module.parameters(), model.parameters())
        for p, q in zip(module.parameters(), model.parameters(), strict=True):
            mine, its = twin.state[p], opt.state[q]
            assert mine.keys() == its.keys()
            assert_same(mine.values(), its.values())


def test_a_checkpoint_of_torchs_muon_loads() -> None:
    ours, theirs = parameters(), parameters()
    reference = TorchMuon(theirs, 0.05)
    drive(theirs, reference, 3)
    for p, q in zip(ours, theirs, strict=True):
        p.data.copy_(q)
    opt = Muon(ours)
    opt.load_state_dict(copy.deepcopy(reference.state_dict()))
    drive(ours, opt, 3)
    drive(theirs, reference, 3)
    assert_close(ours, theirs)
    assert opt.param_groups[0]["adam_betas"] == (0.9, 0.95)


@pytest.mark.parametrize(
    "build",
    [
        Muon,
        torch.optim.AdamW,
        lambda p: torch.optim.SGD(p, momentum=0.9),
        lambda p: seng.SENG(p, recipe="muon"),
    ],
    ids=["ours", "AdamW", "SGD", "SENG"],
)
@pytest.mark.filterwarnings("ignore:seng. no module was given")
def test_a_group_holds_its_own_keys_whatever_was_loaded(build: Any) -> None:
    params = parameters()
    opt, other = Muon(params), build(params)
    keys = opt.param_groups[0].keys()
    drive(params, other, 1)
    opt.load_state_dict(other.state_dict())
    opt.load_state_dict(opt.state_dict())
    assert opt.param_groups[0].keys() == keys
    assert copy.deepcopy(opt).param_groups[0].keys() == keys


def test_it_leaves_no_hooks() -> None:
    model = everything()
    opt = Muon(model)
    drive([*model.parameters()], opt, 2)
    for layer in model.modules():
        assert not layer._forward_hooks and not layer._forward_pre_hooks
        assert not layer._backward_hooks and not layer._backward_pre_hooks
    for p in model.parameters():
        assert not p._backward_hooks
        assert not getattr(p, "_post_accumulate_grad_hooks", None)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"lr": -1.0}, "lr"),
        ({"lr": torch.ones(2)}, "1-element"),
        ({"weight_decay": -1.0}, "weight_decay"),
        ({"momentum": -0.1}, "momentum"),
        ({"eps": -1.0}, "eps"),
        ({"adam_eps": -1.0}, "adam_eps"),
        ({"adam_lr": -1.0}, "adam_lr"),
        ({"ns_coefficients": (1.0, 2.0)}, "ns_coefficients"),
        ({"ns_steps": 100}, "ns_steps"),
        ({"ns_steps": -1}, "ns_steps"),
        ({"adjust_lr_fn": "other"}, "adjust_lr_fn"),
        ({"adam_betas": (0.9, 1.0)}, "adam_betas"),
        ({"adam_betas": (0.9,)}, "adam_betas"),
    ],
    ids=str,
)
def test_options_out_of_range_are_refused(
    options: dict[str, Any], word: str
) -> None:
    with pytest.raises(ValueError, match=word):
        Muon(parameters(), **options)
    with pytest.raises(ValueError, match=word):
        Muon([{"params": parameters(), **options}])


def test_what_it_cannot_step_along_is_refused() -> None:
    table = nn.Embedding(5, 3, sparse=True)
    opt = Muon(table)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse=False"):
        opt.step()
    wave = nn.Parameter(torch.ones(2, 2, dtype=torch.complex64))
    with pytest.raises(ValueError, match="complex"):
        Muon([wave])
    opt = Muon(parameters())
    with pytest.raises(ValueError, match="complex"):
        opt.add_param_group({"params": [wave]})
    assert len(opt.param_groups) == 1
    with pytest.raises(ValueError, match="give one of them"):
        Muon(nn.Linear(2, 2), module=nn.Linear(2, 2))


def test_spread_matrices_are_refused_and_other_parameters_are_not() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        matrix, vector = (
            nn.Parameter(distribute_tensor(torch.ones(s), mesh, [Shard(0)]))
            for s in ((4, 3), (4,))
        )
        with pytest.raises(ValueError, match="ignored_params"):
            Muon([matrix])
        opt = Muon([vector])
        vector.grad = torch.ones_like(vector)
        opt.step()
        assert torch.allclose(
            vector.full_tensor(), torch.tensor((1 - 3e-5) - 3e-4)
        )
    finally:
        dist.destroy_process_group()


# -------------------------------------------------------------------- recipe


def test_matrices_go_along_directions_and_all_else_along_gradients() -> None:
    """As SENG asks of it: a layer's bias has a direction too, which is of no use."""
    ours, theirs = everything(), everything()
    sites, _ = survey(ours, ours.parameters())
    recipe = Recipe(sites, ours)
    group = {"lr": 0.02, "weight_decay": 0.1, "maximize": False}
    group |= Recipe.options
    state: dict[Any, Any] = {p: {} for p in ours.parameters()}
    opt = Muon(theirs)
    for seed in range(3):
        draw_gradients(ours.parameters(), seed)
        draw_gradients(theirs.parameters(), seed)
        directions = {p: 2 * p.grad.flip(0) + 1 for p in ours.parameters()}
        for name, p in theirs.named_parameters():
            if name in MATRICES:
                p.grad = 2 * p.grad.flip(0) + 1
        with torch.no_grad():
            recipe.step(state, group, [*ours.parameters()], directions)
        opt.step()
    assert_same(ours.parameters(), theirs.parameters())


def reference_polar(X: Tensor) -> Tensor:
    """As it is written, in float64."""
    a, b, c = COEFFICIENTS
    Y = X.to(F64) / X.norm()
    for _ in range(5):
        S = Y @ Y.T
        Y = a * Y + (b * S + c * S @ S) @ Y
    return Y


@pytest.mark.parametrize("shape", [(6, 6), (5, 20), (20, 5), (1, 9)], ids=str)
def test_polar_factors_of_batches_are_those_of_matrices(
    shape: tuple[int, int],
) -> None:
    draw = torch.Generator().manual_seed(0)
    X = torch.randn(3, *shape, generator=draw)
    before = X.clone()
    Q = polar(X, COEFFICIENTS, 5, 1e-7)
    assert Q.dtype == torch.bfloat16 and Q.shape == X.shape
    assert torch.equal(X, before)
    half = X.bfloat16()
    assert torch.equal(polar(half, COEFFICIENTS, 5, 1e-7), Q)
    assert torch.equal(half, before.bfloat16())
    for x, q in zip(X, Q, strict=True):
        one = polar(x, COEFFICIENTS, 5, 1e-7)
        assert_close([one.to(F64)], [reference_polar(x)], 0.1)
        assert_close([q.to(F64)], [one.to(F64)], 0.05)
    assert not polar(torch.zeros(2, *shape), COEFFICIENTS, 5, 1e-7).any()


def test_matrices_of_one_shape_are_one_batch_on_a_gpu_only() -> None:
    def fake(*shape: int, gpu: bool) -> Any:
        x = torch.empty(shape, device="meta")
        device = torch.device("cuda" if gpu else "cpu")
        return SimpleNamespace(
            shape=x.shape, dtype=x.dtype, device=device, is_cuda=gpu,
            numel=x.numel,
        )  # fmt: skip

    shapes = [(1, 4, 4), (1, 3, 4), (1, 4, 4), (2, 4, 4), (1, 4, 4)]
    on_gpu = [fake(*s, gpu=True) for s in shapes]
    assert [*batches(on_gpu)] == [[0, 2, 4], [1], [3]]
    on_cpu = [fake(*s, gpu=False) for s in shapes]
    assert sorted(batches(on_cpu)) == [[0], [1], [2], [3], [4]]
    half = [fake(1, ROOM // 2, 1, gpu=True)] * 3
    assert [*batches(half)] == [[0, 1], [2]]
    large = [fake(1, 2 * ROOM, 1, gpu=True)] * 2
    assert [*batches(large)] == [[0], [1]]


@pytest.mark.parametrize("kind", ["float", "cpu", "cuda"])
def test_a_step_on_a_gpu_never_waits_for_it(kind: str) -> None:
    """Where tensors have no numbers, whoever reads one fails."""
    with FakeTensorMode():
        params = [
            nn.Parameter(torch.empty(s, device="cuda"))
            for s in [(8, 3, 3, 3), (6, 6), (6, 6), (9, 6), (6, 6)]
        ]
        opt = Muon(params)
        if kind != "float":
            opt.param_groups[0]["lr"] = torch.empty((), device=kind)
        for p in params:
            p.grad = torch.empty_like(p)
        opt.step()
        opt.step()
        assert len(opt.state) == 5


def on_gpu(params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    return [nn.Parameter(p.detach().cuda()) for p in params]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_it_is_torchs_waits_for_nothing_and_can_be_recorded() -> None:
    """Batches round otherwise than matrices do; AdamW's step is the fused one."""
    shapes = [(64, 64), (64, 64), (64, 32), (32, 64), (64,)]
    ours, theirs, replayed = (on_gpu(parameters(shapes)) for _ in range(3))
    opt, twin = Muon(ours), Muon(replayed, torch.tensor(0.02, device="cuda"))
    muon = TorchMuon(theirs[:-1], 0.02)
    adamw = torch.optim.AdamW(
        theirs[-1:], 3e-4, (0.9, 0.95), weight_decay=0.1, fused=True
    )
    drive(theirs, [muon, adamw], 6)
    drive(ours, opt, 1)
    drive(replayed, twin, 1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        twin.step()
    for seed in range(1, 6):
        for params in (ours, replayed):
            grads = [p.grad for p in params]
            draw_gradients(params, seed)
            for p, g in zip(params, grads, strict=True):
                p.grad = g.copy_(p.grad)  # where the recording reads it
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            opt.step()
            graph.replay()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    start = on_gpu(parameters(shapes))
    for p, q, r, s in zip(ours, theirs, replayed, start, strict=True):
        assert (p - q).norm() <= 0.05 * (q - s).norm()
        assert (p - r).norm() <= 1e-5 * (q - s).norm()
