"""On a GPU: directions as on the CPU, sketches drawn there, mixed precision, compiling, moving checkpoints. Skipped without."""

import copy

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
from seng.tell.inspection import inspect

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device"
)


@pytest.mark.parametrize("case", LAYERS, ids=lambda case: case.name)
@pytest.mark.parametrize("form", ["explicit", "implicit", "merged"])
def test_direction_on_the_gpu_is_the_dense_solve(case, form):
    layer = case.layer()
    x, target = case.input(7), case.target(layer, 7)
    u = naive.per_sample_gradients(layer, x, target)
    want = naive.dense_direction(naive.fisher(u), u.mean(0), 0.3)
    layer = layer.cuda()
    curvature = seng.Curvature(
        form=form, rank=10**6, decay=0, relative_damping=False
    )
    opt = seng.SENG(
        layer,
        lr=1.0,
        momentum=0.0,
        damping=0.3,
        units="paper",
        curvature=curvature,
    )
    before = naive.flat([p.detach().clone() for p in layer.parameters()])
    naive.loss_of(layer(x.cuda()), target.cuda()).backward()
    opt.step()
    got = before - naive.flat([p.detach() for p in layer.parameters()])
    assert naive.relative_error(got.cpu(), want) < 1e-9


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
def test_training_with_every_form_and_sketch(form, sketch):
    model = network()
    opt = seng.SENG(
        model,
        lr=0.05,
        refresh_every=5,
        curvature=seng.Curvature(form=form, sketch=sketch, rank=8),
    )
    torch.manual_seed(1)
    before, on_device = torch.get_rng_state(), torch.cuda.get_rng_state()
    losses = train(model, opt, 25)
    assert losses[-1] < losses[0]
    assert torch.equal(torch.get_rng_state(), before) and torch.equal(
        torch.cuda.get_rng_state(), on_device
    )


def test_bfloat16_autocast_follows_float32():
    exact, mixed = network(), network()
    train(
        exact,
        seng.SENG(exact, lr=0.05, refresh_every=5, curvature=seng.Curvature()),
        10,
    )
    losses = train(
        mixed,
        seng.SENG(mixed, lr=0.05, refresh_every=5, curvature=seng.Curvature()),
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


def test_a_step_between_refreshes_does_not_wait_for_the_device():
    model = network()
    opt = seng.SENG(
        model, lr=0.05, refresh_every=100, curvature=seng.Curvature()
    )
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


def test_a_checkpoint_moves_between_devices():
    model = network()
    opt = seng.SENG(
        model, lr=0.05, refresh_every=100, curvature=seng.Curvature()
    )
    train(model, opt, 2)
    twin = copy.deepcopy(model).cpu()
    other = seng.SENG(
        twin, lr=0.05, refresh_every=100, curvature=seng.Curvature()
    )
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
            curvature=seng.Curvature(form=form, rank=400),
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
def test_a_compiled_step():
    results = []
    for compiled in (False, True):
        model = network()
        opt = seng.SENG(
            model,
            lr=torch.tensor(0.02, device="cuda"),
            refresh_every=5,
            curvature=seng.Curvature(),
        )
        train(
            model, opt, 12, step=torch.compile(opt.step) if compiled else None
        )
        results.append(values(model))
    start = values(network())
    assert naive.relative_error(results[1] - start, results[0] - start) < 0.02


def test_float16_autocast_with_a_grad_scaler():
    exact, mixed = network(), network()
    train(
        exact,
        seng.SENG(exact, lr=0.05, refresh_every=5, curvature=seng.Curvature()),
        10,
    )
    opt, scaler = (
        seng.SENG(mixed, lr=0.05, refresh_every=5, curvature=seng.Curvature()),
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


def test_a_step_that_the_scaler_skips():
    model = network()
    opt, scaler = (
        seng.SENG(model, lr=0.05, curvature=seng.Curvature()),
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


def test_diagnostics_are_timed_by_events():
    model = network()
    opt = seng.SENG(model, lr=0.05, curvature=seng.Curvature())
    train(model, opt, 1)
    for entry in opt.diagnostics().values():
        assert (
            0 < entry["refresh_seconds"] < 60
            and -1 <= entry["cosine"] <= 1
            and entry["norm_ratio"] > 0
        )


def test_distributed_checkpoints_of_a_model_on_the_gpu():
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
            model, lr=0.05, refresh_every=100, curvature=seng.Curvature()
        )
        train(model, opt, 2)
        twin = copy.deepcopy(model)
        other = seng.SENG(
            twin, lr=0.05, refresh_every=100, curvature=seng.Curvature()
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
        {"rank": 10**6, "decay": 0},
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


@pytest.mark.parametrize("options", [{}, {"rank": 10**6, "decay": 0}], ids=str)
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


def test_a_norm_whose_weight_alone_is_trained():
    model = network()
    opt = seng.SENG(
        [p for name, p in model.named_parameters() if name != "1.bias"],
        lr=0.05,
        module=model,
        refresh_every=2,
        curvature=seng.Curvature(),
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
    curvature = seng.Curvature(form="implicit", rank=10**6, decay=0)
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
    curvature = seng.Curvature(rank=8, decay=0, relative_damping=False)
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
