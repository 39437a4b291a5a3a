"""On a GPU: directions as on the CPU, sketches drawn there, mixed precision, compiling, moving checkpoints. Skipped without."""

import copy
from dataclasses import replace

import naive
import pytest
import torch
from conftest import LAYERS
from torch import nn

import seng
from seng.gpu.recorder import Recorder, directly
from seng.linalg.sketch import (
    CountSketch,
    Gaussian,
    KroneckerRows,
    LeverageRows,
    Rows,
)
from seng.recipes import muon
from seng.tell.inspection import inspect

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device"
)


# Low rank over λI, which the fused kernels serve, and over the Kronecker metric, which they do not.
OVER = {
    "identity": seng.Curvature(base=None, samples=None),
    "kronecker": seng.Curvature(),
}
over = pytest.mark.parametrize("base", OVER)


@pytest.mark.parametrize("case", LAYERS, ids=lambda case: case.name)
@pytest.mark.parametrize("form", ["explicit", "implicit", "merged"])
@pytest.mark.parametrize("centred", [False, True], ids=["", "centred"])
def test_direction_on_the_gpu_is_the_dense_solve(case, form, centred):
    layer = case.layer()
    x, target = case.input(7), case.target(layer, 7)
    u = naive.per_sample_gradients(layer, x, target)
    mean = u.mean(0)
    M = naive.fisher(u - mean if centred else u)
    want = naive.dense_direction(M, mean, 0.3)
    layer = layer.cuda()
    options = {} if form == "explicit" else {"rank": 10**6}
    curvature = seng.Curvature(
        base=None,
        form=form,
        samples=None,
        centred=centred,
        decay=0,
        relative_damping=False,
        **options,
    )
    opt = seng.SENG(
        layer,
        lr=1.0,
        recipe="paper",
        momentum=0.0,
        damping=0.3,
        curvature=curvature,
    )
    before = naive.flat([p.detach().clone() for p in layer.parameters()])
    naive.loss_of(layer(x.cuda()), target.cuda()).backward()
    opt.step()
    got = before - naive.flat([p.detach() for p in layer.parameters()])
    assert naive.relative_error(got.cpu(), want) < 1e-9


@pytest.mark.parametrize("form", ["explicit", "implicit", "merged", None])
@pytest.mark.parametrize("power", [0.5, 1])
def test_directions_over_a_base_are_those_of_the_cpu(form, power):
    """In float64 and with all of P's directions, so that no device draws anything."""
    ends = []
    for device in ("cpu", "cuda"):
        model = network().to(device, torch.float64)
        options = {} if form == "explicit" else {"rank": 10**6}
        base = seng.Kronecker(power, rank=10**6)
        common = {"lr": 0.05, "refresh_every": 2}
        if form is None:
            opt = seng.KFAC(model, power=power, rank=10**6, **common)
        else:
            curvature = seng.Curvature(
                form=form, samples=16, base=base, decay=0, **options
            )
            opt = seng.SENG(model, curvature=curvature, **common)
        for i in range(5):
            draw = torch.Generator().manual_seed(i)
            x = torch.randn(24, 3, 8, 8, generator=draw)
            y = torch.randint(10, (24,), generator=draw)
            opt.zero_grad()
            out = model(x.to(device))
            nn.functional.cross_entropy(out, y.to(device)).backward()
            opt.step()
        ends.append(values(model))
    start = values(network())
    assert naive.relative_error(ends[1] - start, ends[0] - start) < 1e-6


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(288, 10),
    ).to("cuda", torch.float32)


def train(
    model, opt, steps, autocast=None, run=None, step=None, scaler=None, parts=1
):
    losses = []
    for i in range(steps):
        generator = torch.Generator().manual_seed(i % 4)
        x = torch.randn(48, 3, 8, 8, generator=generator).to(
            "cuda", torch.float32
        )
        y = torch.randint(10, (48,), generator=generator).cuda()
        opt.zero_grad()
        for inputs, labels in zip(x.chunk(parts), y.chunk(parts), strict=True):
            with torch.autocast(
                "cuda",
                autocast or torch.bfloat16,
                enabled=autocast is not None,
            ):
                loss = (
                    nn.functional.cross_entropy((run or model)(inputs), labels)
                    / parts
                )
            (scaler.scale(loss) if scaler else loss).backward()
        (step or opt.step)()
        losses.append(float(loss.detach()))
    return losses


def values(model):
    return naive.flat([p.detach() for p in model.parameters()]).double().cpu()


@pytest.mark.parametrize(
    "sketch",
    [
        None,
        Rows(64),
        LeverageRows(64),
        Gaussian(64),
        CountSketch(64),
        KroneckerRows(4, 16),
    ],
)
@pytest.mark.parametrize("form", ["explicit", "implicit", "merged"])
@over
def test_training_with_every_form_and_sketch(base, form, sketch):
    kept = form != "merged"
    if base == "kronecker" and kept and sketch is not None:
        with pytest.raises(ValueError, match="base=None"):
            seng.Curvature(form=form, sketch=sketch)
        return
    model = network()
    options = {} if form == "explicit" else {"rank": 8}
    curvature = replace(OVER[base], form=form, sketch=sketch, **options)
    opt = seng.SENG(model, lr=0.05, refresh_every=5, curvature=curvature)
    torch.manual_seed(1)
    before, on_device = torch.get_rng_state(), torch.cuda.get_rng_state()
    losses = train(model, opt, 25)
    assert losses[-1] < losses[0]
    assert torch.equal(torch.get_rng_state(), before) and torch.equal(
        torch.cuda.get_rng_state(), on_device
    )


@over
def test_bfloat16_autocast_follows_float32(base):
    exact, mixed = network(), network()
    train(
        exact,
        seng.SENG(exact, lr=0.05, refresh_every=5, curvature=OVER[base]),
        10,
    )
    losses = train(
        mixed,
        seng.SENG(mixed, lr=0.05, refresh_every=5, curvature=OVER[base]),
        10,
        torch.bfloat16,
    )
    assert losses[-1] < losses[0]
    start = naive.flat([p.detach() for p in network().parameters()])
    moved = [
        naive.flat([p.detach() for p in m.parameters()]) - start
        for m in (exact, mixed)
    ]
    assert float(torch.nn.functional.cosine_similarity(*moved, dim=0)) > 0.95


@over
def test_a_step_between_refreshes_does_not_wait_for_the_device(base):
    model = network()
    opt = seng.SENG(model, lr=0.05, refresh_every=100, curvature=OVER[base])
    train(model, opt, 2)
    x, y = (
        torch.randn(32, 3, 8, 8, device="cuda", dtype=torch.float32),
        torch.randint(10, (32,), device="cuda"),
    )
    opt.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        opt.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@over
def test_a_checkpoint_moves_between_devices(base):
    model = network()
    opt = seng.SENG(model, lr=0.05, refresh_every=100, curvature=OVER[base])
    train(model, opt, 2)
    twin = copy.deepcopy(model).cpu()
    other = seng.SENG(twin, lr=0.05, refresh_every=100, curvature=OVER[base])
    other.load_state_dict(opt.state_dict())
    assert all(
        t.device.type == "cpu"
        for block in inspect(other).states.values()
        for t in block.U.tensors()
    )
    x, y = (
        torch.randn(32, 3, 8, 8, dtype=torch.float32),
        torch.randint(10, (32,)),
    )
    for m, o, device in ((model, opt, "cuda"), (twin, other, "cpu")):
        o.zero_grad()
        nn.functional.cross_entropy(m(x.to(device)), y.to(device)).backward()
        o.step()
    got, want = (
        naive.flat([p.detach().cpu() for p in m.parameters()])
        for m in (twin, model)
    )
    assert naive.relative_error(got, want) < 1e-4


@pytest.fixture
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("form", ["merged", "implicit"])
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_compiled_model_is_captured(form, mode):
    """With CUDA graphs too, which must neither record our Python once and for all nor reuse the memory that we keep."""
    results = []
    for compiled in (False, True):
        model = network()
        opt = seng.SENG(
            model,
            lr=0.02,
            refresh_every=4,
            curvature=seng.Curvature(base=None, form=form, rank=400),
            strict=True,
        )
        run = (
            torch.compile(model, mode=mode, fullgraph=True)
            if compiled
            else None
        )
        train(
            model, opt, 12, run=run, parts=2 if mode == "default" else 1
        )  # torch cannot accumulate in what CUDA graphs own
        results.append(values(model))
        assert len(inspect(opt).states) == 3 and opt.last_refresh == 8
    start = values(network())
    assert (
        naive.relative_error(results[1] - start, results[0] - start) < 0.02
    )  # other kernels, float32


@pytest.mark.usefixtures("_fresh_compiler")
@over
def test_a_compiled_step(base):
    results = []
    for compiled in (False, True):
        model = network()
        opt = seng.SENG(
            model,
            lr=torch.tensor(0.02, device="cuda"),
            refresh_every=5,
            curvature=OVER[base],
        )
        train(
            model, opt, 12, step=torch.compile(opt.step) if compiled else None
        )
        results.append(values(model))
    start = values(network())
    assert naive.relative_error(results[1] - start, results[0] - start) < 0.02


@over
def test_float16_autocast_with_a_grad_scaler(base):
    exact, mixed = network(), network()
    train(
        exact,
        seng.SENG(exact, lr=0.05, refresh_every=5, curvature=OVER[base]),
        10,
    )
    opt, scaler = (
        seng.SENG(mixed, lr=0.05, refresh_every=5, curvature=OVER[base]),
        torch.amp.GradScaler("cuda", init_scale=2.0**14),
    )

    def step():
        scaler.step(opt)
        scaler.update()

    train(mixed, opt, 10, torch.float16, step=step, scaler=scaler)
    assert inspect(opt).steps == 10
    start = values(network())
    moved = [values(m) - start for m in (exact, mixed)]
    assert float(torch.nn.functional.cosine_similarity(*moved, dim=0)) > 0.95


@over
def test_a_step_that_the_scaler_skips(base):
    model = network()
    opt, scaler = (
        seng.SENG(model, lr=0.05, curvature=OVER[base]),
        torch.amp.GradScaler("cuda"),
    )
    before = values(model)
    x = torch.full((4, 3, 8, 8), torch.inf, device="cuda", dtype=torch.float32)
    scaler.scale(model(x).sum()).backward()
    scaler.step(opt)
    scaler.update()
    assert torch.equal(values(model), before) and inspect(opt).steps == 0
    losses = train(model, opt, 9)
    assert torch.isfinite(values(model)).all() and losses[-1] < losses[0]


@over
def test_diagnostics_are_timed_by_events(base):
    model = network()
    opt = seng.SENG(model, lr=0.05, curvature=OVER[base])
    train(model, opt, 1)
    for entry in opt.diagnostics().values():
        assert (
            0 < entry["refresh_seconds"] < 60
            and -1 <= entry["cosine"] <= 1
            and entry["norm_ratio"] > 0
        )


@over
def test_distributed_checkpoints_of_a_model_on_the_gpu(base):
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    for options in (
        StateDictOptions(),
        StateDictOptions(flatten_optimizer_state_dict=True),
        StateDictOptions(cpu_offload=True),
    ):
        model = network()
        opt = seng.SENG(
            model, lr=0.05, refresh_every=100, curvature=OVER[base]
        )
        train(model, opt, 2)
        twin = copy.deepcopy(model)
        other = seng.SENG(
            twin, lr=0.05, refresh_every=100, curvature=OVER[base]
        )
        set_optimizer_state_dict(
            twin,
            other,
            copy.deepcopy(
                get_optimizer_state_dict(model, opt, options=options)
            ),
            options=options,
        )
        for m, o in ((model, opt), (twin, other)):
            train(m, o, 2)
        assert naive.relative_error(values(twin), values(model)) < 1e-5


@pytest.mark.parametrize(
    "options",
    [
        {"base": None, "rank": 10**6, "decay": 0, "centred": False},
        {"base": None, "rank": 8, "decay": 0.7},
        {"base": None, "form": "implicit", "decay": 0},
        {"rank": 8, "decay": 0.7},
        {"form": "implicit", "decay": 0},
    ],
    ids=str,
)
@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("every", [1, 3])
def test_recorded_refreshes_are_those_one_by_one(options, autocast, every):
    ends = []
    for run in (None, directly):
        model = network().to(memory_format=torch.channels_last)
        opt = seng.SENG(
            model,
            lr=0.05,
            refresh_every=every,
            curvature=seng.Curvature(**options),
        )
        if run is not None:
            opt.engine.recorder = run
        train(model, opt, 13, autocast)
        ends.append(values(model))
        if run is None:
            assert any(
                known.graph is not None
                for known in opt.engine.recorder.recordings.values()
            )
    start = values(network())
    assert naive.relative_error(ends[0] - start, ends[1] - start) < 1e-3


def test_a_recording_gives_what_the_function_gives_for_other_numbers():
    recorder = Recorder(torch.device("cuda", torch.cuda.current_device()))
    kept = []
    for i in range(4):
        X, y = (
            torch.full((4, 4), float(i), device="cuda").T,
            torch.arange(4.0, device="cuda"),
        )
        first, second = recorder(lambda_free, X, y, by=2.0)
        kept += [(first, X @ y), (second, 2 * X)]
    for got, want in kept:  # each call's own
        torch.testing.assert_close(got, want)
    assert next(iter(recorder.recordings.values())).graph is not None


def lambda_free(X, y, by):
    return X @ y, by * X


@pytest.mark.parametrize(
    "options",
    [
        {"base": None},
        {"base": None, "rank": 10**6, "decay": 0},
        {"base": None, "rank": 10**6, "decay": 0, "centred": False},
        {},
        {"rank": 10**6, "decay": 0},
    ],
    ids=str,
)
def test_embeddings_over_several_refreshes(options):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(65, 32), nn.Flatten(), nn.Linear(128, 5)
    ).to("cuda", torch.float32)
    opt = seng.SENG(
        model, lr=0.05, refresh_every=1, curvature=seng.Curvature(**options)
    )
    for _ in range(4):
        opt.zero_grad()
        nn.functional.cross_entropy(
            model(torch.randint(65, (40, 4)).cuda()),
            torch.randint(5, (40,)).cuda(),
        ).backward()
        opt.step()
    assert values(model).isfinite().all()


@over
def test_a_norm_whose_weight_alone_is_trained(base):
    model = network()
    opt = seng.SENG(
        [p for name, p in model.named_parameters() if name != "1.bias"],
        lr=0.05,
        module=model,
        refresh_every=2,
        curvature=OVER[base],
    )
    before = model[1].bias.clone()
    losses = train(model, opt, 8, torch.bfloat16)
    assert losses[-1] < losses[0] and torch.equal(model[1].bias, before)


def test_what_others_hold_of_a_batch_is_not_written_to():
    torch.manual_seed(0)
    body, head = (
        nn.Linear(64, 512).to("cuda", torch.float32),
        nn.Linear(512, 300).to("cuda", torch.float32),
    )
    model = nn.Sequential(body, nn.Tanh(), head)
    curvature = seng.Curvature(base=None, form="implicit", rank=10**6, decay=0)
    opt = seng.SENG(model, lr=0.05, refresh_every=1, curvature=curvature)
    bank = []
    for i in range(4):
        x = torch.randn(40, 64, generator=torch.Generator().manual_seed(i)).to(
            "cuda", torch.float32
        )
        opt.zero_grad()
        h = model[:2](x)
        bank.append((h.detach(), h.detach().clone()))
        head(h).square().mean().backward()
        opt.step()
    assert all(torch.equal(held, copied) for held, copied in bank)


def test_a_refresh_that_is_interrupted_leaves_no_half_written_state(
    monkeypatch,
):
    model = network()
    curvature = seng.Curvature(base=None, rank=8, decay=0)
    opt = seng.SENG(model, lr=0.05, refresh_every=3, curvature=curvature)
    train(model, opt, 6)

    def interrupted(old, new):
        old.gram.fill_(torch.nan)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("seng.optim.step_plan.settle", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(model, opt, 1)
    assert len(inspect(opt).states) == 2  # the first layer's is gone
    opt.zero_grad()
    opt.engine.clock.steps += 1  # the next step comes without a refresh
    losses = train(model, opt, 9)
    assert values(model).isfinite().all() and losses[-1] < losses[0]
    assert len(inspect(opt).states) == 3
    assert not any(
        entry["solves_failed"] for entry in opt.diagnostics().values()
    )


def matrices(device):
    """Two convolutions of one shape, which are one batch, and one with groups; the others are AdamW's."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.Conv2d(8, 8, 3, padding=1, bias=False),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.Conv2d(8, 12, 3, groups=2),
        nn.BatchNorm2d(12),
        nn.Flatten(),
        nn.Linear(432, 16),
        nn.Linear(16, 10),
    ).to(device, torch.float32)


def muon_steps(model, opt, steps, first=0):
    """The weights after so many steps along gradients that are drawn."""
    for i in range(first, first + steps):
        draw = torch.Generator().manual_seed(i)
        for p in model.parameters():
            g = torch.randn(p.shape, generator=draw, dtype=torch.float32)
            p.grad = g.to(p.device)
        opt.step()
    return [p.detach().cpu().clone() for p in model.parameters()]


def assert_near_in_bfloat16(got, want, start):
    """Polar factors are worked out in bfloat16; AdamW is not."""
    for a, b, before in zip(got, want, start, strict=True):
        polar = b.dim() > 1 and len(b) != 10  # all but the head and vectors
        off = naive.relative_error(a - before, b - before)
        assert off < (0.05 if polar else 1e-3)


def start_of(model):
    return [p.detach().cpu().clone() for p in model.parameters()]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"nesterov": False, "momentum": 0.0},
        {"adjust_lr_fn": "match_rms_adamw", "lr": 0.002},
        {"maximize": True},
    ],
    ids=str,
)
def test_muon_on_the_gpu_is_that_of_the_cpu(options):
    ends = []
    for device in ("cpu", "cuda"):
        model = matrices(device)
        start = start_of(model)
        opt = seng.Muon(model, **options)
        ends.append(muon_steps(model, opt, 4))
    assert_near_in_bfloat16(ends[1], ends[0], start)


def test_muons_checkpoint_moves_to_the_gpu():
    model, moved = matrices("cpu"), matrices("cuda")
    opt, other = seng.Muon(model), seng.Muon(moved)
    muon_steps(model, opt, 3)
    moved.load_state_dict(model.state_dict())
    other.load_state_dict(copy.deepcopy(opt.state_dict()))
    start = start_of(model)
    want = muon_steps(model, opt, 2, first=3)
    got = muon_steps(moved, other, 2, first=3)
    assert_near_in_bfloat16(got, want, start)


def test_muons_matrices_of_one_shape_are_as_one_by_one(monkeypatch):
    ends = []
    for room in (muon.ROOM, 1):
        monkeypatch.setattr(muon, "ROOM", room)
        model = matrices("cuda")
        start = start_of(model)
        ends.append(muon_steps(model, seng.Muon(model), 3))
    assert_near_in_bfloat16(*ends, start)


MUONS = {
    "Muon": seng.Muon,
    "SENG": lambda model, **o: seng.SENG(model, recipe="muon", **o),
    "KFAC": lambda model, **o: seng.KFAC(model, recipe="muon", **o),
}


def muon_of(name, model, **options):
    if name != "Muon":
        options["refresh_every"] = 100
    return MUONS[name](model, weight_decay=0.1, **options)


def batch_backward(model, opt, seed):
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(24, 3, 8, 8, generator=draw, dtype=torch.float32)
    y = torch.randint(10, (24,), generator=draw)
    opt.zero_grad()
    loss = nn.functional.cross_entropy(model(x.cuda()), y.cuda())
    loss.backward()
    return float(loss.detach())


@pytest.mark.parametrize("name", MUONS)
@pytest.mark.parametrize("lr", ["a number", "on the device", "one element"])
def test_a_step_of_muon_does_not_wait_for_the_device(name, lr):
    rate = torch.tensor(0.02, dtype=torch.float32, device="cuda")
    given = {
        "a number": 0.02,
        "on the device": rate,
        "one element": rate[None],
    }
    model = matrices("cuda")
    opt = muon_of(name, model, lr=given[lr])
    for i in range(3):
        batch_backward(model, opt, i)
        if i < 2:  # the first refreshes, and the second records
            opt.step()
    before = values(model)
    torch.cuda.set_sync_debug_mode("error")
    try:
        opt.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not torch.equal(values(model), before)


@pytest.mark.parametrize("name", MUONS)
def test_a_learning_rate_on_the_device_is_that_number(name):
    """Also after it was written to, which no Python sees."""
    ends = []
    for on_device in (False, True):
        model = matrices("cuda")
        lr = torch.tensor(0.02, dtype=torch.float32, device="cuda")
        opt = muon_of(name, model, lr=lr if on_device else 0.02)
        start = start_of(model)
        for i in range(4):
            if i == 2:
                for group in opt.param_groups:
                    if on_device:
                        group["lr"].mul_(0.5)
                    else:
                        group["lr"] = 0.01
            muon_steps(model, opt, 1, first=i) if name == "Muon" else (
                batch_backward(model, opt, i),
                opt.step(),
            )
        ends.append(start_of(model))
    tolerance = 1e-3 if name == "Muon" else 0.1
    for a, b, before in zip(*ends, start, strict=True):
        assert naive.relative_error(a - before, b - before) < tolerance


@pytest.mark.parametrize("name", MUONS)
def test_training_by_muon(name):
    model = matrices("cuda")
    options = {"refresh_every": 3} if name != "Muon" else {}
    opt = MUONS[name](model, lr=0.02, **options)
    losses = []
    for i in range(20):
        losses.append(batch_backward(model, opt, i % 2))
        opt.step()
    assert values(model).isfinite().all() and losses[-1] < 0.7 * losses[0]
