"""`seng scale`: the formulae against values worked out by hand, what it refuses, and what it prints and draws."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from seng.lab import cli, models, scale
from seng.lab.projection import Compute, Link, Method, Projection, layers

SIZES = (1000, 10)  # n_l
LINK = Link(latency_us=100, bandwidth_gbs=1e-3)  # 10⁶ bytes per second
METHOD = Method(
    k=20,
    every=10,
    samples=8,
    sketch_rows=50,
    number_bytes=4,
    basis_bytes=2,
    overlap=0.5,
)


def projection(
    step: float = 1.0, link: Link = LINK, method: Method = METHOD
) -> Projection:
    return Projection(SIZES, Compute(step, 0.25, 2.0), link, method)


def test_bytes_of_the_strategies() -> None:
    p = projection()
    assert p.gradient == 4 * 1010
    assert p.basis == 2 * (
        20 * 1000 + 10 * 10
    )  # no more directions than numbers
    assert p.sketches == 4 * 8 * (50 + 10) and p.directions == 4 * 8 * (
        20 + 10
    )
    assert (
        p.per_step("SGD") == 4040
        and p.per_step("block") == p.per_step("lagged") == 8080
    )
    assert p.per_step("shared") == pytest.approx(
        4040 + (40200 + 1920 + 960) / 10
    )


def test_collectives_of_a_ring_and_of_a_tree() -> None:
    tree = Link(latency_us=100, bandwidth_gbs=1e-3, reduction="tree")
    assert LINK.all_reduce(4000, 8) == pytest.approx(
        2 * 7 / 8 * 4e-3 + 14 * 1e-4
    )
    assert tree.all_reduce(4000, 8) == pytest.approx(
        2 * 7 / 8 * 4e-3 + 6 * 1e-4
    )
    assert tree.all_reduce(4000, 9) == pytest.approx(
        2 * 8 / 9 * 4e-3 + 8 * 1e-4
    )  # ⌈log₂9⌉ = 4
    assert LINK.all_to_all(4000, 8) == pytest.approx(7 / 8 * 4e-3 + 7e-4)
    assert (
        LINK.all_reduce(4000, 1)
        == tree.all_reduce(4000, 1)
        == LINK.all_to_all(4000, 1)
        == 0
    )


def test_seconds_of_a_step_on_eight_gpus() -> None:
    p = projection()
    reduction = 7.07e-3 + 1.4e-3  # 2·7/8·4040/10⁶ + 14·10⁻⁴
    assert p.seconds("SGD", 8) == pytest.approx(1 + 0.5 * reduction)
    assert p.seconds("block", 8) == pytest.approx(1.25 + 0.2 + 1.5 * reduction)
    assert p.seconds("lagged", 8) == pytest.approx(
        1.25 + 0.2 + 0.5 * (14.14e-3 + 1.4e-3)
    )  # one message, one latency
    refresh = (
        2 * 7 / 8 * 40200e-6 + 1.4e-3 + 7 / 8 * (1920e-6 + 960e-6) + 2 * 0.7e-3
    )
    assert p.seconds("shared", 8) == pytest.approx(
        1.25 + 0.2 + 0.5 * reduction + refresh / 10
    )
    assert p.efficiency("SGD", 8, 1) == pytest.approx(
        1 / (1 + 0.5 * reduction)
    )
    assert p.efficiency("SGD", 4, 4) == 1


def test_no_more_is_hidden_than_the_backward_lasts() -> None:
    p = projection(
        step=3e-3
    )  # of which 2 ms are the backward's, while half the reduction takes 4.2 ms
    assert p.seconds("SGD", 8) == pytest.approx(3e-3 + 8.47e-3 - 2e-3)
    nothing = Method(**{**vars(METHOD), "overlap": 0.0})
    assert projection(method=nothing).seconds("SGD", 8) == pytest.approx(
        1 + 8.47e-3
    )


def test_one_gpu_sends_nothing_and_more_are_never_faster() -> None:
    p = projection()
    assert p.seconds("SGD", 1) == 1 and all(
        p.seconds(name, 1) == pytest.approx(1.45) for name in scale.METHODS[1:]
    )
    for name in scale.METHODS:
        times = [p.seconds(name, n) for n in scale.GPUS]
        assert times == sorted(times)


def test_layers_are_counted_once() -> None:
    tied = nn.Linear(4, 6, bias=False)
    tied.weight = (words := nn.Embedding(6, 4)).weight
    frozen = nn.Linear(2, 2).requires_grad_(False)
    assert layers(
        nn.Sequential(words, nn.Linear(4, 4), tied, nn.ReLU(), frozen)
    ) == [
        24,
        20,
    ]
    with torch.device("meta"):
        assert sum(layers(models.resnet50())) == 25_557_032


def test_shared_at_the_size_of_resnet50_stays_below_a_tenth_of_a_gradient() -> (
    None
):
    with torch.device("meta"):
        p = Projection(
            layers(models.resnet50()), Compute(0.05), Link(), Method()
        )  # k = 16, T = 200, a basis of 2 bytes
    assert 0.04 < p.per_step("shared") / p.gradient - 1 < 0.1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--bandwidth-gbs 0", ["--bandwidth-gbs", "positive", "not 0"]),
        ("--bandwidth-gbs nan", ["--bandwidth-gbs", "not nan"]),
        ("--latency-us -1", ["--latency-us", "at least 0", "not -1"]),
        ("--overlap 1.5", ["--overlap", "between 0 and 1", "not 1.5"]),
        ("--overlap -0.1", ["--overlap", "between 0 and 1"]),
        ("resnet51", ["'resnet51'", "did you mean resnet50", "gpt2"]),
        ("--every 0", ["--every", "at least 1"]),
        ("--step-ms 0", ["--step-ms", "milliseconds"]),
        ("--measure --step-ms 5", ["choose one"]),
        ("--refresh-ms 5", ["--step-ms"]),
        ("--batch 5", ["--measure"]),
        ("--reduction star", ["ring", "tree"]),
    ],
)
def test_bad_input_is_refused_with_what_is_wrong(
    arguments: str, said: list[str], capsys
) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["scale", *arguments.split()])
    assert left.value.code
    printed = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert all(word in printed for word in said), printed


def test_command_prints_projections_and_draws_them(
    tmp_path: Path, capsys
) -> None:
    picture = tmp_path / "deep" / "scale.png"
    cli.main(
        [
            "scale",
            "small_cnn",
            "--step-ms",
            "10",
            "--solve-ms",
            "1",
            "--latency-us",
            "5",
            "--out",
            str(picture),
        ]
    )
    printed = capsys.readouterr().out
    assert (
        "a projection, not a measurement" in printed
        and "ImageNet-BS" in printed
        and "0.93" in printed
    )
    lines = [line.split() for line in printed.splitlines()]
    numbers = [
        int(line[0]) for line in lines if len(line) >= 9 and line[0].isdigit()
    ]
    assert numbers == [8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_step_is_taken_from_the_benchmark_or_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scale, "RESULTS", tmp_path)
    with pytest.raises(ValueError, match="--step-ms, or --measure"):
        scale.recorded("resnet50")
    sgd, ours = (
        {"contender": "sgd", "step_ms": 50.0},
        {"contender": "seng lowrank", "idle_ms": 52.0, "refresh_ms": 100.0},
    )
    result = {
        "machine": "A GPU, 8 CPUs",
        "setting": {"batch": 64},
        "rows": [sgd, ours, {**sgd, "step_ms": 70.0}],
    }
    (tmp_path / "resnet50-cuda.json").write_text(json.dumps(result))
    found = scale.recorded("resnet50")
    assert (found.step, found.solve, found.refresh) == pytest.approx(
        (0.05, 0.002, 0.1)
    )
    assert "A GPU, batch 64" in found.source
    (tmp_path / "resnet50-cuda.json").write_text(
        json.dumps({**result, "rows": [sgd]})
    )
    with pytest.raises(ValueError, match="no rows of both"):
        scale.recorded("resnet50")


def test_a_step_is_measured_here() -> None:
    torch.set_default_dtype(torch.float32)  # as a user runs it
    try:
        found = scale.measured(
            "small_cnn",
            scale.Step(measure=True, batch=2, device="cpu"),
            METHOD,
        )
    finally:
        torch.set_default_dtype(torch.float64)
    assert (
        found.step > 0
        and found.solve >= 0
        and found.refresh >= 0
        and "measured here, on cpu, batch 2" in found.source
    )
