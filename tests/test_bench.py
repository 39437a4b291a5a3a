"""The benchmark in its smallest configuration, the exact direction that it measures against, and its networks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import naive
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import seng
from seng.lab import cli, models
from seng.lab.bench import command as bench
from seng.lab.bench import contenders, report, tasks
from seng.lab.bench.exact import Watch, compare, observed
from seng.lab.bench.options import Amounts, Changes, Options, Which
from seng.lab.bench.rows import Row, summarise
from seng.lab.bench.tasks import TASKS, Task, images, tokens

SETTING = contenders.Setting(20, 0.01, True, 32, 0.0, None)


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(36, 5),
    )


def tiny_cnn() -> nn.Sequential:
    return nn.Sequential(
        *models.conv_norm(3, 4, 3),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(4 * 8 * 8, 4),
    )


def tiny_gpt2() -> nn.Module:
    return models.gpt2(2, 16, 2, 32, 8)


TINY = Task(
    "tiny",
    tiny_cnn,
    images,
    8,
    8,
    4,
    True,
    pool=2,
    every=6,
    warm=3,
    window=2,
    rounds=2,
)
TINY_TEXT = Task(
    "tiny_text",
    tiny_gpt2,
    tokens,
    4,
    8,
    32,
    pool=2,
    every=6,
    warm=3,
    window=2,
    rounds=2,
)


@pytest.fixture
def float32() -> Iterator[None]:
    """As a user runs it, where the rest of the suite is in float64."""
    torch.set_default_dtype(torch.float32)
    yield
    torch.set_default_dtype(torch.float64)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, float32: None) -> None:
    monkeypatch.setitem(TASKS, "tiny", TINY)
    monkeypatch.setitem(TASKS, "tiny_text", TINY_TEXT)


def dense(
    u: torch.Tensor, g: torch.Tensor, damping: float, relative: bool
) -> torch.Tensor:
    """λ(M + λI)⁻¹g by a dense solve."""
    M = naive.fisher(u)
    lam = (
        damping * float(torch.linalg.eigvalsh(M)[-1]) if relative else damping
    )
    return lam * naive.dense_direction(M, g, lam)


@pytest.mark.parametrize("samples", [None, 4])
@pytest.mark.parametrize(("damping", "relative"), [(0.01, True), (1.0, False)])
def test_exact_direction_is_the_dense_solve(
    damping: float, relative: bool, samples: int | None
) -> None:
    model = (
        network().eval()
    )  # so that a sample's gradient can be had from a batch of one
    x, y = torch.randn(7, 3, 5, 5), torch.randn(7, 5)
    watch = Watch(model)
    naive.loss_of(model(x), y).backward()
    watch.remove()
    got = watch.direction(damping, relative, samples)
    for layer in (model[0], model[1], model[4]):
        params = list(layer.parameters())
        u = naive.per_sample_gradients(model, x[:samples], y[:samples], params)
        want = dense(u, naive.flat(p.grad for p in params), damping, relative)
        assert (
            naive.relative_error(naive.flat(got[p] for p in params), want)
            < 1e-10
        )


def test_exact_direction_takes_batch_statistics_as_given() -> None:
    model, x, y = network(), torch.randn(7, 3, 5, 5), torch.randn(7, 5)
    watch = Watch(model)
    naive.loss_of(model(x), y).backward()
    got = watch.direction(0.3, False)
    watch.remove()
    z = model[0](x)
    out = model[1](z)
    (g,) = torch.autograd.grad(
        naive.loss_of(model[2:](out.clone()), y), out
    )  # a copy, since the ReLU is in place
    hat = F.batch_norm(z.detach(), None, None, training=True)
    u = 7 * torch.cat([(g * hat).sum((2, 3)), g.sum((2, 3))], 1)
    want = dense(
        u, naive.flat(p.grad for p in model[1].parameters()), 0.3, False
    )
    assert (
        naive.relative_error(
            naive.flat(got[p] for p in model[1].parameters()), want
        )
        < 1e-10
    )


@pytest.mark.parametrize("form", ["auto", "merged", "explicit"])
@pytest.mark.parametrize(("damping", "relative"), [(0.01, True), (1.0, False)])
@pytest.mark.parametrize("build", [network, tiny_gpt2])
def test_low_rank_of_full_rank_takes_the_exact_direction(
    build, form: str, damping: float, relative: bool
) -> None:
    model = build()
    curvature = seng.Curvature(
        form,
        base=None,
        centred=False,
        samples=None,
        decay=0,
        relative_damping=relative,
        **({} if form == "explicit" else {"rank": 10**6}),
    )
    opt = seng.SENG(
        model, 1.0, momentum=0, damping=damping, curvature=curvature
    )
    watch = Watch(model)
    if build is network:
        naive.loss_of(
            model(torch.randn(7, 3, 5, 5)), torch.randn(7, 5)
        ).backward()
    else:
        x, y = TINY_TEXT.batches(0, torch.device("cpu"), 1)[0]
        TINY_TEXT.loss(model(x), y).backward()
    grads = {p: p.grad.clone() for p in watch.params}
    want = watch.direction(damping, relative)
    found = compare(watch.sites, observed(opt, list(want)), want, grads)
    assert found.error < 1e-8 and found.worst_error < 1e-8
    assert found.cosine > 1 - 1e-12 and found.worst_cosine > 1 - 1e-12
    assert found.cosine_to_gradient == pytest.approx(
        found.exact_cosine_to_gradient
    )
    assert (
        0 < found.norm_to_gradient < 1 and found.cosine_to_gradient < 1 - 1e-4
    )  # no mere gradient


def in_order(site, P):
    """P⁻¹z, where z is laid out as the site's matrix [W b] and P as its parameters, one after the other."""

    def solve(z: torch.Tensor) -> torch.Tensor:
        parts = site.scatter(site.active(), z)
        params = list(parts)
        solved = torch.linalg.solve(P, naive.flat(parts[p] for p in params))
        sizes = [p.numel() for p in params]
        back = {
            p: part.view_as(p)
            for p, part in zip(params, solved.split(sizes), strict=True)
        }
        return site.gather(site.active(), back, torch.float64)

    return solve


@pytest.mark.parametrize("samples", [None, 4])
def test_exact_direction_over_a_base_is_the_dense_solve(
    samples: int | None,
) -> None:
    """λ(ŪŪᵀ + λP)⁻¹g at the length of g, Ū about its mean, from per-sample gradients and a dense P."""
    model = network().eval()
    x, y = torch.randn(7, 3, 5, 5), torch.randn(7, 5)
    watch = Watch(model)
    naive.loss_of(model(x), y).backward()
    watch.remove()
    bases = {}
    inverses = {}
    for site in watch.sites:
        n = sum(s.param.numel() for s in site.segments)
        root = torch.randn(n, n) / n**0.5
        bases[site.name] = root @ root.T + torch.eye(n)
        inverses[site.name] = in_order(site, bases[site.name])
    got = watch.direction(0.3, True, samples, True, inverses)
    for layer, name in ((model[0], "0"), (model[1], "1"), (model[4], "4")):
        params = list(layer.parameters())
        u = naive.per_sample_gradients(model, x[:samples], y[:samples], params)
        P, g = bases[name], naive.flat(p.grad for p in params)
        M = naive.fisher(u - u.mean(0))
        half = torch.linalg.cholesky(torch.linalg.inv(P))
        lam = 0.3 * torch.linalg.eigvalsh(half.T @ M @ half)[-1]
        want = lam * torch.linalg.solve(M + lam * P, g)
        want *= g.norm() / want.norm()
        found = naive.flat(got[p] for p in params)
        assert naive.relative_error(found, want) < 1e-9


@pytest.mark.parametrize("build", [network, tiny_gpt2])
def test_seng_as_it_comes_of_full_rank_takes_the_exact_direction(
    build,
) -> None:
    model = build()
    curvature = replace(seng.Curvature(), rank=10**6)
    opt = seng.SENG(model, 1.0, momentum=0, curvature=curvature)
    watch = Watch(model)
    if build is network:
        x, y = torch.randn(70, 3, 5, 5), torch.randn(70, 5)  # more than ϱ
        naive.loss_of(model(x), y).backward()
    else:
        x, y = TINY_TEXT.batches(0, torch.device("cpu"), 1)[0]
        TINY_TEXT.loss(model(x), y).backward()
    watch.remove()
    grads = {p: p.grad.clone() for p in watch.params}
    got = observed(opt, list(grads))
    want = watch.direction_of(opt)
    found = compare(watch.sites, got, want, grads)
    assert found.error < 1e-8 and found.worst_error < 1e-8
    assert found.norm_to_gradient == pytest.approx(1)
    assert found.cosine_to_gradient < 1 - 1e-3


def test_compare_tells_what_is_wrong_and_where() -> None:
    model = network()
    watch = Watch(model)
    want = {p: torch.randn_like(p) for p in model.parameters()}
    got = dict(want)
    got[model[0].weight] = 2 * want[model[0].weight]
    got[model[4].weight], got[model[4].bias] = (
        -want[model[4].weight],
        -want[model[4].bias],
    )
    found = compare(watch.sites, got, want, want)
    assert (found.worst_error_layer, found.worst_cosine_layer) == ("4", "4")
    assert found.worst_error == pytest.approx(
        2
    ) and found.worst_cosine == pytest.approx(-1)
    assert found.error == pytest.approx(
        naive.relative_error(
            naive.flat(got.values()), naive.flat(want.values())
        )
    )


def check(value: object) -> None:
    assert isinstance(value, float) and value > 0


@pytest.mark.parametrize(
    ("model", "damping"), [("tiny", None), ("tiny_text", 0.01)]
)
def test_bench_measures_everything_and_writes_it(
    tiny: None, tmp_path: Path, model: str, damping: float | None, capsys
) -> None:
    assert bench.bench(
        Options(
            Which((model,)),
            Changes(damping=damping, rank=16),  # more than samples
            Amounts(device="cpu"),
            tmp_path,
        )
    )
    (path,) = tmp_path.glob("*.json")
    change, word = ("-rank16", " --rank 16")
    if damping is not None:
        change, word = f"-damping0.01{change}", f" --damping 0.01{word}"
    assert path.name == f"{model}{change}-cpu.json"
    result = json.loads(path.read_text())
    assert (
        result["command"] == f"seng bench --models {model}{word} --device cpu"
        and result["finished"]
        and result["seed"] == 0
    )
    assert {"commit", "machine", "versions", "setting", "notes"} <= set(result)
    assert result["setting"]["parameters"] == sum(
        p.numel() for p in TASKS[model].build().parameters()
    )
    rows = result["rows"]
    dampings = [(0.01, True)] * len(contenders.CONTENDERS) + (
        [(1.0, False)] * len(contenders.CONTENDERS) if damping is None else []
    )
    assert [
        (r["setting"]["damping"], r["setting"]["relative_damping"])
        for r in rows
    ] == dampings
    assert [
        r["contender"] for r in rows[: len(contenders.CONTENDERS)]
    ] == list(contenders.CONTENDERS)
    for row in rows:
        assert not row["note"], row["note"]
        for key in (
            "step_ms",
            "ratio_to_sgd",
            "ratio_to_adamw",
            "peak_MiB",
            "peak_ratio_to_sgd",
            "state_MiB",
            "loss",
        ):
            check(row[key])
        assert (row["quality"] is None) == (
            row["contender"] not in contenders.MEASURED
        )
        if row["quality"]:
            assert (
                isinstance(row["refresh_ms"], float)
                and row["setting"]["every"] == 6
            )
            # Reduced factors, or the directions that the default keeps.
            cut = row["contender"] in ("seng lowrank implicit", "seng")
            assert row["quality"]["error"] < (2 if cut else 1e-3)
        if row["contender"] == "seng":
            check(row["whole_period_ms"])
        if row["contender"] == "sgd":
            assert (
                row["ratio_to_sgd"] == row["peak_ratio_to_sgd"] == 1
                and row["refresh_ms"] is None
            )
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert "seng lowrank implicit" in capsys.readouterr().out


def test_presets_and_changes_to_them(tiny: None, tmp_path: Path) -> None:
    task = TASKS["resnet18"]
    strong = Options(
        Which(("resnet18",), preset="strong", compile=True),
        out=tmp_path,
        amounts=Amounts(device="cpu"),
    )
    assert strong.path(task) == tmp_path / "resnet18-compiled-strong-cpu.json"
    assert [
        (s.every, s.rank, s.decay, s.damping) for s in strong.settings(task)
    ] == [
        (20, 128, 0.8, 0.01),
        (20, 128, 0.8, 1.0),
    ]
    changed = Options(
        changes=Changes(every=50, damping=2.0, absolute=True, rank=8),
        amounts=Amounts(warm=0, device="cpu"),
    )
    assert [
        (s.every, s.damping, s.relative_damping, s.rank)
        for s in changed.settings(task)
    ] == [(50, 2.0, False, 8)]
    assert (
        changed.path(task).name
        == "resnet18-every50-damping2-absolute-rank8-warm0-cpu.json"
    )
    words = "seng bench --models resnet18 --every 50 --damping 2.0 --absolute --rank 8 --warm 0 --device cpu"
    assert changed.command(task) == words
    assert TASKS["small_cnn"].every == 50 and TASKS["gpt2"].every == 200
    assert [t.name for t in changed.tasks] == ["small_cnn"]


def test_every_step_is_a_refresh_and_decay_leaves_forms_out(
    tiny: None, tmp_path: Path
) -> None:
    only = ("sgd", "seng-lowrank", "seng-lowrank-explicit")
    assert bench.bench(
        Options(
            Which(("tiny",), only, "every-step"),
            amounts=Amounts(device="cpu", rounds=1),
            out=tmp_path,
        )
    )
    assert bench.bench(
        Options(
            Which(("tiny",), only),
            Changes(decay=0.5, every=1),
            Amounts(device="cpu", rounds=1),
            tmp_path,
        )
    )
    every, decay = (
        json.loads(p.read_text())["rows"]
        for p in sorted(tmp_path.glob("*.json"))
    )
    seng_row = every[1]
    assert (
        seng_row["contender"] == "seng lowrank"
        and seng_row["setting"]["every"] == 1
        and seng_row["refresh_ms"] is None
    )
    check(seng_row["step_ms"])
    assert (
        "only the merged form" in decay[2]["note"]
        and decay[2]["step_ms"] is None
    )
    check(decay[1]["ratio_to_sgd"])


def test_interrupted_it_keeps_what_is_finished(
    tiny: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(self: bench.Bench, rows: list[Row]) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench.Bench, "race", interrupt)
    assert not bench.bench(
        Options(
            Which(("tiny",)),
            Changes(rank=16),  # more than samples
            Amounts(device="cpu"),
            tmp_path,
        )
    )
    result = json.loads((tmp_path / "tiny-rank16-cpu.json").read_text())
    assert (
        not result["finished"] and result["rows"][6]["quality"]["error"] < 1e-3
    )
    check(result["rows"][5]["peak_MiB"])


def test_a_contender_that_fails_does_not_stop_the_others(
    tiny: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")

    monkeypatch.setattr(seng.Muon, "step", fail)
    options = Options(
        Which(("tiny",), ("sgd", "muon", "seng")),
        Changes(damping=0.01),
        Amounts(device="cpu"),
        tmp_path,
    )
    assert bench.bench(options)
    (path,) = tmp_path.glob("*.json")
    sgd, muon, ours = json.loads(path.read_text())["rows"]
    assert (
        muon["note"] == "memory: out of memory"
        and muon["step_ms"] is None
        and not muon["runs"]
    )
    check(ours["ratio_to_sgd"])
    assert not sgd["note"]


def test_a_refresh_is_spread_over_its_period() -> None:
    sgd, ours = Row("sgd", SETTING), Row("seng lowrank", SETTING)  # T = 20
    summarise(
        [(sgd, [(1.0, 1.0), (2.0, 2.0)]), (ours, [(1.5, 1.0), (3.0, 2.0)])],
        window=10,
    )
    assert (
        sgd.ratio_to_sgd == 1
        and sgd.step_ms == 1500
        and sgd.refresh_ms is None
    )
    assert (
        ours.refresh_ms == 7500 and ours.idle_ms == 1500
    )  # 10 × 0.5 and 10 × 1
    assert ours.step_ms == pytest.approx(1e3 * (1.25 + 2.5) / 2)
    assert ours.ratio_to_sgd == pytest.approx(1.25)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--models", "resnet19"], ["resnet19", "did you mean resnet18"]),
        (["--contenders", "senglowrank"], ["senglowrank", "seng lowrank"]),
        (["--preset", "stronk"], ["stronk", "strong"]),
        (["--absolute"], ["--damping"]),
        (["--rounds", "0"], ["--rounds", "at least 1"]),
    ],
)
def test_bad_names_are_refused_with_what_may_be_meant(
    arguments: list[str], said: list[str], capsys
) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["bench", *arguments])
    assert left.value.code
    printed = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert all(word in printed for word in said), printed


def test_command_line_lists_its_commands(capsys) -> None:
    cli.main(["--help"])
    printed = capsys.readouterr().out
    assert all(word in printed for word in cli.COMMANDS)
    with pytest.raises(SystemExit, match="did you mean bench"):
        cli.main(["benhc"])


def test_command_line_reads_every_option(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[Options] = []
    monkeypatch.setattr(
        bench, "bench", lambda options: given.append(options) or True
    )
    words = "bench --models gpt2 vit_s16 --contenders sgd seng-lowrank-merged --compile --rank 8 --every 10 --damping 2 --seed 3"
    cli.main(words.split())
    want = Options(
        Which(
            ("gpt2", "vit_s16"), ("sgd", "seng-lowrank-merged"), compile=True
        ),
        Changes(every=10, damping=2.0, rank=8),
        Amounts(seed=3),
    )
    assert given == [want]
    assert want.contenders == ["sgd", "seng lowrank merged"]


def test_plot_draws_a_folder_again(tiny: None, tmp_path: Path, capsys) -> None:
    options = Options(
        Which(("tiny",), ("sgd", "seng")),
        Changes(damping=0.01),
        Amounts(device="cpu", rounds=1),
        tmp_path,
    )
    bench.bench(options)
    (picture,) = tmp_path.glob("*.png")
    picture.unlink()
    cli.main(["bench", "--plot", str(tmp_path)])
    assert picture.exists() and str(picture) in capsys.readouterr().out


def test_table_without_rich_has_the_same_numbers() -> None:
    row = Row("seng", SETTING, step_ms=12.5, ratio_to_sgd=1.05, note="slow")
    text = report.plain([row])
    assert (
        "12.50" in text
        and "1.050" in text
        and "seng: slow" in text
        and str(SETTING) in text
    )


@pytest.mark.filterwarnings("ignore:seng")  # K-FAC has no factors for norms
def test_each_contender_is_what_its_name_says() -> None:
    """At an lr of SGD's; what runs as it comes has the library's curvature, damping and settings."""
    made = {
        name: contenders.contender(name, network(), SETTING, 7, 0.1)
        for name in contenders.CONTENDERS
        if name not in ("sgd", "adamw")
    }
    default = seng.SENG(network(), 0.1)
    ours = made["seng"]
    assert ours.settings.curvature == default.settings.curvature
    assert ours.defaults == {**default.defaults, "weight_decay": 5e-4}
    assert ours.settings.refresh_every == 7
    assert isinstance(made["muon"], seng.Muon)
    for name, damp, power in (("kfac", "Tikhonov", 1), ("kfac root", "", 0.5)):
        assert isinstance(made[name], seng.KFAC), name
        metric = made[name].settings.metric
        assert (type(metric).__name__ == "Tikhonov") == bool(damp)
        assert damp or metric.curvature.power == power
    for name, form in contenders.LOW_RANKS.items():
        curvature = made[name].settings.curvature
        assert curvature.form == form and curvature.base is None
        assert not curvature.centres and curvature.samples is None


def test_what_runs_as_it_comes_is_spread_over_its_own_period() -> None:
    task = TASKS["resnet18"]
    (first, _) = Options(amounts=Amounts(device="cpu")).settings(task)
    assert first.every == 200
    library = contenders.GROWN
    for name in contenders.CONTENDERS:
        own = name in ("seng", "kfac root")
        assert Row(name, first).every == (library if own else 200), name
    asked = Options(changes=Changes(every=7), amounts=Amounts(device="cpu"))
    assert Row("seng", asked.settings(task)[0]).every == 7


def test_there_is_something_to_learn(float32: None) -> None:
    for task in (replace(TINY, warm=60), replace(TINY_TEXT, warm=60)):
        pool = task.batches(0, torch.device("cpu"), 2)
        again = task.batches(0, torch.device("cpu"), 2)
        assert len(pool) == 2 and all(
            torch.equal(a, b) for a, b in zip(pool[0], again[0], strict=True)
        )
        torch.manual_seed(0)
        model = task.build()
        opt = torch.optim.AdamW(model.parameters(), 0.01)
        losses = []
        for i in range(task.warm):
            opt.zero_grad()
            loss = task.loss(model(pool[i % 2][0]), pool[i % 2][1])
            loss.backward()
            opt.step()
            losses.append(loss.item())
        assert losses[-1] < 0.85 * losses[0]


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("gpt2", 124_439_808), ("vit_s16", 22_050_664), ("small_cnn", 150_954)],
)
def test_networks_have_the_published_size(
    name: str, parameters: int, float32: None
) -> None:
    with torch.device("meta"):
        model = getattr(models, name)()
        assert sum(p.numel() for p in model.parameters()) == parameters
        if name == "gpt2":
            assert model(torch.zeros(2, 5, dtype=torch.long)).shape == (
                2,
                5,
                50257,
            )
        else:
            size = TASKS[name].size
            assert model(torch.zeros(2, 3, size, size)).shape == (
                2,
                TASKS[name].classes,
            )


def test_gpt2_is_causal_and_its_parts_have_the_right_scale() -> None:
    model = tiny_gpt2()
    x = torch.randint(32, (2, 8))
    changed = x.clone()
    changed[:, 5] = (x[:, 5] + 1) % 32
    same = (model(x) - model(changed)).abs().amax((0, 2)) < 1e-12
    assert same.tolist() == [True] * 5 + [False] * 3
    big = models.gpt2(4, 128, 2, 500, 64)
    assert big.blocks[0].attention.out.weight.std().item() == pytest.approx(
        0.02 / 8**0.5, rel=0.05
    )
    assert (
        big.head.weight is big.tokens.weight
        and big.head.weight.std().item() == pytest.approx(0.02, rel=0.05)
    )


def test_transformers_train_under_seng_with_every_layer_captured(
    float32: None,
) -> None:
    vit = models.ViT(2, 16, 2, 4, 8, 4)
    for model, task in ((tiny_gpt2(), TINY_TEXT), (vit, TINY)):
        if model is vit:
            with pytest.warns(UserWarning, match="class_token"):
                opt = seng.SENG(model, 0.05, refresh_every=2)
        else:
            opt = seng.SENG(model, 0.05, refresh_every=2)
        for x, y in task.batches(0, torch.device("cpu"), 2) * 2:
            opt.zero_grad()
            task.loss(model(x), y).backward()
            opt.step()
        linear = [
            name
            for name, m in model.named_modules()
            if isinstance(
                m, nn.Linear | nn.LayerNorm | nn.Embedding | nn.Conv2d
            )
        ]
        covered = " + ".join(opt.diagnostics())
        assert all(name in covered for name in linear)


def test_unknown_names_come_with_near_matches() -> None:
    with pytest.raises(
        ValueError,
        match="unknown model 'vgg16': did you mean vgg16_bn or .*\\? there are",
    ):
        tasks.chosen("model", "vgg16", list(TASKS))
    with pytest.raises(ValueError, match="unknown model 'xyz': there are"):
        tasks.chosen("model", "xyz", list(TASKS))
