"""torch.compile: the model in one graph, captured or not; the step between refreshes in one graph; late comers are told."""

import gc
import shutil

import naive
import pytest
import torch
from test_capture import InPlace
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import seng
from seng.tell.inspection import inspect

inductor = pytest.param(
    "inductor",
    marks=pytest.mark.skipif(
        shutil.which("g++") is None,
        reason="inductor needs a C++ compiler, and there is none",
    ),
)


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Convolutions(nn.Sequential):
    def __init__(self):
        norm = nn.BatchNorm2d(3)
        super().__init__(
            nn.Conv2d(1, 3, 2, padding=1),
            norm,
            nn.ReLU(inplace=True),
            nn.Flatten(),
            nn.Linear(27, 3),
        )

    def forward(self, x):
        return super().forward(x.view(-1, 1, 2, 2))


class Alike(nn.Module):
    """Two calls that a compiler may see as one."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(x) + self.layer(x)


class Checkpointed(InPlace):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head, self.out = (
            nn.Embedding(7, 3),
            nn.Linear(3, 7),
            nn.Linear(7, 3),
        )
        self.head.weight = self.table.weight

    def forward(self, x):
        return self.out(
            self.head(self.table((9 * x).long() % 7).tanh()).mean(1)
        )


MODELS = (Convolutions, Alike, InPlace, Checkpointed, Tied)


def train(model, opt, run, steps=7, step=None, sizes=(5, 5)):
    for i in range(steps):
        opt.zero_grad()
        for k, size in enumerate(
            sizes
        ):  # accumulation: what was captured must outlive the compiler's buffers
            generator = torch.Generator().manual_seed(10 * i + k)
            x, target = (
                torch.randn(size, width, generator=generator)
                for width in (4, 3)
            )
            (naive.loss_of(run(x), target) / len(sizes)).backward()
        (step or opt.step)()
    return naive.flat(model.parameters()).detach().clone()


def built(kind, **options):
    torch.manual_seed(0)
    model = kind()
    absolute = {
        "damping": 0.01,
        "curvature": seng.Curvature(relative_damping=False),
    }  # a relative λ would not see a wrong scale
    return model, seng.SENG(
        model,
        **{
            "lr": 0.05,
            "refresh_every": 3,
            "strict": True,
            **absolute,
            **options,
        },
    )


@pytest.mark.parametrize(
    "backend", ["eager", "aot_eager", "aot_eager_decomp_partition", inductor]
)
@pytest.mark.parametrize("kind", MODELS)
def test_a_compiled_model_is_captured_in_one_graph(kind, backend):
    model, opt = built(kind)
    want = train(model, opt, model)
    model, opt = built(kind)
    counter = CompileCounterWithBackend(backend)
    got = train(
        model, opt, torch.compile(model, backend=counter, fullgraph=True)
    )
    assert naive.relative_error(got, want) < 1e-12
    assert counter.frame_count == 2  # with the capture and without
    assert len(inspect(opt).states) == len(inspect(opt).sites)


@pytest.mark.parametrize("backend", ["aot_eager", inductor])
def test_what_is_kept_from_a_compiled_backward_is_ours(backend):
    """Factors are kept as they were handed over, and inductor reuses its buffers."""

    def deep():
        return nn.Sequential(
            *(
                layer
                for _ in range(4)
                for layer in (nn.Linear(4, 4), nn.Tanh())
            ),
            nn.Linear(4, 3),
        )

    results = []
    for compiled in (False, True):
        model, opt = built(
            deep, curvature=seng.Curvature(form="implicit", rank=99)
        )
        results.append(
            train(
                model,
                opt,
                torch.compile(model, backend=backend, fullgraph=True)
                if compiled
                else model,
            )
        )
    assert naive.relative_error(*results) < 1e-12


def test_batches_of_changing_size():
    model, opt = built(Convolutions)
    want = train(model, opt, model, sizes=(5, 3, 4))
    model, opt = built(Convolutions)
    got = train(
        model,
        opt,
        torch.compile(model, backend="aot_eager", fullgraph=True),
        sizes=(5, 3, 4),
    )
    assert naive.relative_error(got, want) < 1e-12


@pytest.mark.parametrize("reentrant", [True, False])
def test_compiled_layers_inside_a_checkpoint(reentrant):
    """Inside a reentrant one, a recomputation runs in the outer backward, and its samples are that one's."""
    results = []
    for compiled in (False, True):
        model, opt = built(
            lambda: nn.Sequential(nn.Linear(4, 4), InPlace(), nn.Linear(3, 3))
        )
        if compiled:
            model[1].compile(backend="aot_eager", fullgraph=True)

        def run(x, model=model):
            return model[2](
                checkpoint(
                    model[1], model[0](x).tanh(), use_reentrant=reentrant
                )
            )

        results.append(train(model, opt, run))
    assert naive.relative_error(*results) < 1e-12


def test_curvature_from_a_batch_of_its_own():
    results = []
    for compiled in (False, True):
        model, opt = built(InPlace, refresh_every=2)
        run = (
            torch.compile(model, backend="aot_eager", fullgraph=True)
            if compiled
            else model
        )

        def step(model=model, opt=opt, run=run):
            if opt.refresh_due:
                with opt.curvature_batch():
                    naive.loss_of(
                        run(torch.ones(6, 4)), torch.randn(6, 3)
                    ).backward()
            opt.step()

        torch.manual_seed(1)
        results.append(train(model, opt, run, step=step))
    assert naive.relative_error(*results) < 1e-12


def test_bfloat16_autocast_in_a_compiled_model():
    model, opt = built(Convolutions)
    model.float()
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    for _ in range(4):
        opt.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = run(torch.randn(5, 4).float()).square().mean()
        loss.backward()
        opt.step()
    assert (
        all(p.isfinite().all() for p in model.parameters())
        and len(inspect(opt).states) == 3
    )


def test_an_optimizer_that_comes_after_the_first_compiled_call_is_told_at_step():
    torch.manual_seed(0)
    model = InPlace()
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    run(torch.randn(5, 4)).sum().backward()
    opt = seng.SENG(model, lr=0.05)
    opt.zero_grad()
    run(torch.randn(5, 4)).sum().backward()
    with pytest.raises(
        RuntimeError,
        match="layer 'a' has a gradient but was not captured .* before torch.compile traces it",
    ):
        opt.step()


@pytest.mark.parametrize(
    "steps", [1, 3, 4]
)  # the next step is without a refresh, with one, without again
@pytest.mark.parametrize("kind", MODELS)
def test_a_model_that_is_compiled_after_some_steps_is_captured_as_before(
    kind, steps
):
    model, opt = built(kind)
    train(model, opt, model, steps)
    want = train(model, opt, model)
    model, opt = built(kind)
    train(model, opt, model, steps)
    got = train(
        model, opt, torch.compile(model, backend="aot_eager", fullgraph=True)
    )
    assert naive.relative_error(got, want) < 1e-12
    assert len(inspect(opt).states) == len(inspect(opt).sites)


def test_a_second_optimizer_after_the_first_is_traced_anew():
    model, opt = built(InPlace)
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    train(model, opt, run)
    del opt
    gc.collect()
    opt = seng.SENG(model, lr=0.05)
    train(model, opt, run)
    assert len(inspect(opt).states) == 2


def test_a_group_that_is_added_later_is_traced_anew():
    torch.manual_seed(0)
    model = InPlace()
    opt = seng.SENG(
        model.a.parameters(), lr=0.05, module=model, refresh_every=2
    )
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    train(model, opt, run, steps=3)
    opt.add_param_group({"params": list(model.b.parameters())})
    train(model, opt, run, steps=3)
    assert len(inspect(opt).states) == 2


@pytest.mark.parametrize(
    ("form", "backend"),
    [
        ("explicit", "eager"),
        ("implicit", "eager"),
        ("merged", "eager"),
        pytest.param("merged", *inductor.values, marks=inductor.marks),
    ],
)
def test_a_compiled_step_is_one_graph_between_refreshes(form, backend):
    options = {
        "curvature": seng.Curvature(form=form, rank=4, decay=0),
        "lr": torch.tensor(0.05),
        "refresh_every": 6,
    }
    model, opt = built(Convolutions, **options)
    want = train(model, opt, model, steps=14)
    model, opt = built(Convolutions, **options)
    counter = CompileCounterWithBackend(backend)
    graphs = []

    def compiled(step=torch.compile(opt.step, backend=counter)):  # noqa: B008
        opt.param_groups[0]["damping"] = 0.01  # a schedule that writes it anew
        step()
        graphs.append(counter.frame_count)

    got = train(model, opt, model, steps=14, step=compiled)
    assert naive.relative_error(got, want) < 1e-11
    assert (
        graphs[2:] == [graphs[2]] * 12
    )  # the first step has no momentum yet, and no refresh compiles anything anew
    if backend == "eager":
        assert graphs[2] == 2


def test_a_changing_damping_and_learning_rate_do_not_recompile_the_step():
    results = []
    for compiled in (False, True):
        model, opt = built(Convolutions, lr=torch.tensor(0.05))
        counter = CompileCounterWithBackend("eager")
        step = (
            torch.compile(opt.step, backend=counter) if compiled else opt.step
        )
        seen = []

        def scheduled(opt=opt, step=step, seen=seen, counter=counter):
            opt.param_groups[0]["damping"] *= 0.9
            opt.param_groups[0]["lr"].mul_(0.9)
            step()
            seen.append(counter.frame_count)

        results.append(
            train(model, opt, model, steps=20, step=scheduled, sizes=(20,))
        )
    assert naive.relative_error(*results) < 1e-11
    assert seen[4:] == [seen[4]] * 16


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(4),
            nn.Linear(4, 8),
            nn.Linear(8, 4),
        )

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


def test_many_equal_blocks_compiled_one_by_one_share_their_graphs():
    """More of them than the compiler would trace anew; evaluations in between are not traced twice for the refresh's sake."""
    results = []
    for compiled in (False, True):
        model, opt = built(
            lambda: nn.Sequential(
                *(Residual() for _ in range(12)), nn.Linear(4, 3)
            ),
            lr=0.01,
        )
        counter = CompileCounterWithBackend("aot_eager")
        for block in model[:-1] if compiled else ():
            block.compile(backend=counter, fullgraph=True)

        def step(model=model, opt=opt):
            opt.step()
            with torch.no_grad():
                model.eval()(torch.ones(5, 4))
            model.train()

        results.append(train(model, opt, model, step=step))
    assert naive.relative_error(*results) < 1e-12
    assert (
        counter.frame_count == 5
    )  # with the capture and without, for the first block and for the others; evaluation


def test_two_models_with_an_optimizer_each():
    wanted, pairs = [], []
    for kind in (InPlace, InPlace):
        model, opt = built(kind)
        wanted.append(train(model, opt, model))
        pairs.append(built(kind))
    for (model, opt), want in zip(pairs, wanted, strict=True):
        assert (
            naive.relative_error(
                train(
                    model,
                    opt,
                    torch.compile(model, backend="aot_eager", fullgraph=True),
                ),
                want,
            )
            < 1e-12
        )


def test_torch_export_sees_no_capture():
    """The graph is that of a network without an optimizer: no operator of ours, no constant of a hook."""
    model, opt = built(InPlace)
    x = torch.randn(5, 4)
    with_capture = torch.export.export(model, (x,)).graph_module.code
    without = torch.export.export(InPlace(), (x,)).graph_module.code
    assert inspect(opt).armed and with_capture == without
