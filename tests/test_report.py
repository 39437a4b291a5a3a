"""`seng report`: the numbers against ones worked out by hand, the page's text, and the page itself in a headless Chromium."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import chromium
import numpy as np
import pytest
from matplotlib.image import imread

from seng.lab.report import command, curves, data, figures, looks, summary
from seng.lab.report.page import page
from seng.lab.results import Point, Trajectory, append, path_of, read

PROVENANCE = {
    "command": "seng compare",
    "commit": "abc1234",
    "machine": "a CPU",
    "versions": {"torch": "2.13.0"},
}


def run(
    optimizer: str = "seng",
    seed: int = 0,
    metrics: Sequence[float | None] = (0.5, 0.8, 0.95),
    seconds: float = 1.0,
    **changes: Any,
) -> Trajectory:
    """Ten steps and one epoch between evaluations, `seconds` each."""
    state = ["running"] * (len(metrics) - 1) + ["finished"]
    points = tuple(
        Point(
            10 * i,
            float(i),
            seconds * i,
            2.0 / i,
            2.2 / i,
            metric,
            state[i - 1],
        )
        for i, metric in enumerate(metrics, 1)
    )
    return Trajectory(
        **{
            "task": "digits-cnn",
            "optimizer": optimizer,
            "label": "",
            "seed": seed,
            "recipe": {"lr": 0.1, "momentum": 0.9},
            "run": {"epochs": 3.0, "batch": 64, "amp": False},
            "target": 0.9,
            "metric_name": "accuracy",
            "higher_is_better": True,
            "provenance": PROVENANCE,
            "tuning": {"trials": 24, "study": f"digits-cnn-{optimizer}"},
            "points": points,
            **changes,
        }
    )


def save(folder: Path, trajectory: Trajectory) -> Path:
    path = path_of(
        folder,
        trajectory.task,
        trajectory.optimizer,
        trajectory.label,
        trajectory.seed,
    )
    head = {
        key: value
        for key, value in vars(trajectory).items()
        if key not in ("points", "earlier")
    }
    for point in trajectory.points:
        append(path, {**head, **vars(point)})
    return path


def climb(rate: float, count: int = 12, top: float = 0.97) -> list[float]:
    return [
        top - (top - 0.1) * float(np.exp(-rate * i))
        for i in range(1, count + 1)
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tasks, three methods, three seeds; one misses the target once, one file is cut in half, one from a later format."""
    out = tmp_path_factory.mktemp("results")
    for seed in range(3):
        for optimizer, rate, seconds in (
            ("seng", 0.5, 1.1),
            ("sgd", 0.3, 0.8),
            ("adam", 0.25 if seed else 0.1, 0.9),
        ):
            save(
                out,
                run(
                    optimizer,
                    seed,
                    climb(rate + 0.02 * seed),
                    seconds + 0.01 * seed,
                ),
            )
            perplexity = [60 / metric for metric in climb(rate + 0.01 * seed)]
            changes = {
                "task": "shakespeare-gpt",
                "metric_name": "perplexity",
                "higher_is_better": False,
                "target": 70.0,
            }
            save(out, run(optimizer, seed, perplexity, 3 * seconds, **changes))
    cut = path_of(out, "shakespeare-gpt", "adam", "", 2)
    cut.write_bytes(cut.read_bytes()[:-50])
    late = path_of(out, "shakespeare-gpt", "muon", "", 0)
    append(late, {"format": 99, "anything": 1})
    (out / "bench").mkdir()
    (out / "bench" / "resnet18.json").write_text("{}")
    return out


def test_an_interval_is_students() -> None:
    found = summary.estimate([1.0, 2.0, 4.0, None])
    assert found and found.count == 3
    assert found.mean == pytest.approx(7 / 3)
    assert found.half == pytest.approx(
        4.302653 * np.sqrt(7 / 3) / np.sqrt(3), rel=1e-6
    )  # t(0.975, 2), s² = 7/3
    alone = summary.estimate([5.0])
    assert alone == summary.Estimate(5.0, None, 1)
    assert summary.estimate([None]) is None


def test_seeds_that_missed_the_target_are_counted() -> None:
    runs = [
        run(seed=0),
        run(seed=1, metrics=(0.5, 0.91, 0.92), seconds=2.0),
        run(seed=2, metrics=(0.5, 0.6, 0.7)),
    ]
    found = summary.standing(runs)
    assert (found.share, found.seeds, found.trials, found.study) == (
        "2/3",
        (0, 1, 2),
        24,
        "digits-cnn-seng",
    )
    assert (
        found.seconds
        and found.seconds.mean == pytest.approx(3.5)
        and found.seconds.count == 2
    )  # 3 s and 4 s
    assert found.seconds.half == pytest.approx(
        12.706205 * 0.5, rel=1e-6
    )  # t(0.975, 1)·(1/√2)/√2
    assert found.epochs and found.epochs.mean == pytest.approx(2.5)
    assert found.final and found.final.mean == pytest.approx(
        (0.95 + 0.92 + 0.7) / 3
    )
    assert found.step_ms and found.step_ms.mean == pytest.approx(
        (100 + 200 + 100) / 3
    )
    assert looks.cells(found, summary.summarise(runs)[0])[:4] == [
        "seng",
        "2/3",
        "3.50 ± 6.35",
        "2.50 ± 6.35",
    ]


def test_a_run_that_shared_the_machine_has_epochs_but_no_seconds(
    tmp_path: Path,
) -> None:
    shared = {
        "run": {"epochs": 3.0, "batch": 64, "amp": False, "shared": True}
    }
    alone, beside = run(seed=0), run(seed=1, seconds=9.0, **shared)
    mixed = summary.standing([alone, beside])
    assert mixed.reached == 2 and mixed.epochs and mixed.epochs.count == 2
    assert mixed.seconds and (mixed.seconds.mean, mixed.seconds.count) == (
        3.0,
        1,
    )
    assert mixed.step_ms and (mixed.step_ms.mean, mixed.step_ms.count) == (
        pytest.approx(100.0),
        1,
    )
    both = curves.band([alone, beside], "seconds", "metric")
    assert both is not None and both.x[-1] == 3.0
    assert (
        curves.band([beside], "seconds", "metric") is None
        and curves.band([beside], "epoch", "metric") is not None
    )
    task = summary.summarise([beside])[0]
    drawn = data.task_data(task, looks.looks([task])[0])
    assert drawn["methods"][0]["seeds"][0]["seconds"] == [None] * 3
    assert (
        drawn["bars"]["seconds"][0]["text"] == "untimed (1/1)"
        and drawn["bars"]["epochs"][0]["mean"] == 3.0
    )
    assert re.search(
        r"stands first: [\d.]+ epochs to it", page([task], [], "now")
    )
    figures.draw([task], tmp_path)
    assert (tmp_path / "digits-cnn-curves.png").exists()


def test_step_time_is_a_median_that_a_slow_start_does_not_move() -> None:
    def at(*pairs: tuple[int, float]) -> Trajectory:
        return run(
            points=tuple(
                Point(step, step / 10, seconds, 1.0, 1.0, 0.5, "running")
                for step, seconds in pairs
            )
        )

    assert summary.step_ms(
        at((10, 30.0), (20, 31.0), (30, 32.0), (40, 42.0))
    ) == pytest.approx(100)
    assert summary.step_ms(at((10, 2.0))) == pytest.approx(200)
    assert summary.step_ms(at((0, 0.0))) is None


def test_standings_put_more_seeds_before_less_time() -> None:
    runs = [
        run("sgd", 0, seconds=2.0),
        run("sgd", 1, seconds=2.0),
        run("adam", 0, seconds=0.1),
        run("adam", 1, (0.1, 0.2)),
    ]
    runs += [run("kfac", 0, (0.1, 0.3)), run("soap", 0, (None, None))]
    task = summary.summarise(runs)[0]
    assert [s.name for s in task.standings] == ["sgd", "adam", "kfac", "soap"]
    assert task.standings[3].best is None and task.standings[3].share == "0/1"


def test_what_does_not_compare_is_said() -> None:
    elsewhere = {**PROVENANCE, "machine": "a GPU", "commit": "def5678"}
    runs = [
        run("seng", 0),
        run("seng", 1, recipe={"lr": 0.2, "momentum": 0.9}),
        run(
            "sgd",
            0,
            provenance=elsewhere,
            run={"epochs": 3.0, "batch": 256, "amp": False},
            tuning=None,
        ),
        run("adam", 0, earlier=(elsewhere,)),
        run(
            "kfac",
            0,
            points=(Point(1234, 1.0, 1.0, None, None, None, "diverged"),),
        ),
        run(
            "muon", 0, points=(Point(10, 1.0, 1.0, 1.0, 1.0, 0.5, "running"),)
        ),
    ]
    said = "\n".join(summary.summarise(runs)[0].remarks)
    for sentence in (
        "kfac: diverged (seed 0 at step 1,234).",
        "muon: not finished (seed 0 at step 10).",
        "Machines differ, so times do not compare: a GPU (adam, sgd); a CPU (adam, seng, muon, kfac).",
        "Commits differ: def5678 (adam, sgd); abc1234 (adam, seng, muon, kfac).",
        "The runs' setting batch differs: 64 (adam, seng, muon, kfac); 256 (sgd).",
        "seng: its seeds have different recipes (lr).",
        "Tuning budgets differ (trials): adam 24; seng 24; sgd none; muon 24; kfac 24.",
    ):
        assert sentence in said
    assert (
        summary.summarise([run("seng", 0), run("seng", 1), run("sgd", 0)])[
            0
        ].remarks
        == ()
    )


def test_a_band_ends_with_the_first_seed_that_ends() -> None:
    found = curves.band(
        [
            run(seed=0, metrics=(0.2, 0.4, 0.6, 0.8)),
            run(seed=1, metrics=(0.4, 0.6)),
        ],
        "step",
        "metric",
    )
    assert found is not None
    assert found.x.tolist() == [10, 20]
    assert found.mean.tolist() == pytest.approx([0.3, 0.5])
    assert (found.low.tolist(), found.high.tolist()) == (
        [0.2, 0.4],
        [0.4, 0.6],
    )
    between = curves.band(
        [
            run(seed=0, metrics=(0.2, 0.4), seconds=1),
            run(seed=1, metrics=(0.2, 0.4), seconds=1.5),
        ],
        "seconds",
        "metric",
    )
    assert between is not None
    assert between.x.tolist() == [1.5, 2.0]
    assert between.mean.tolist() == pytest.approx(
        [(0.3 + 0.2) / 2, (0.4 + 0.2 + 0.2 / 3) / 2]
    )
    assert (
        curves.band(
            [run(), run(seed=1, metrics=(None, None))], "step", "metric"
        )
        is None
    )


def test_long_curves_are_thinned_with_both_ends() -> None:
    x, _ = curves.series(run(metrics=[0.5] * 5000), "step", "metric")
    assert len(x) == curves.MOST and (x[0], x[-1]) == (10, 50000)
    assert curves.thin(3).tolist() == [0, 1, 2] and curves.thin(
        0
    ).tolist() in (
        [],
        [0],
    )


def test_an_optimizer_has_one_colour_and_labels_differ_by_dash() -> None:
    runs = [run("seng", label=label) for label in ("", "T100", "T20")] + [
        run("sgd"),
        run("homemade"),
    ]
    tasks = summary.summarise([*runs, run("seng", task="fashion-cnn")])
    main, study, other = looks.looks(tasks)
    assert (
        len(
            {
                look.light
                for look in (main["seng"], other["seng"], *study.values())
            }
        )
        == 1
    )
    assert [
        study[name].dash for name in ("seng", "seng-T20", "seng-T100")
    ] == [
        "solid",
        "dash",
        "dot",
    ]
    assert len({main[name].light for name in ("seng", "sgd", "homemade")}) == 3


def studies() -> list[Trajectory]:
    """Three methods, five refresh periods of one of them and two batch sizes of two."""
    runs = [run(name) for name in ("seng", "sgd", "kfac")]
    runs += [
        run("seng", label=f"T{period}") for period in (20, 100, 200, 500, 800)
    ]
    return runs + [
        run(name, label=label)
        for name in ("seng", "sgd")
        for label in ("b1024", "b4096")
    ]


def test_a_study_stands_by_itself_beside_its_optimizers() -> None:
    tasks = summary.summarise(
        [
            *studies(),
            run("sgd", task="fashion-cnn"),
            run("sgd", task="only", label="b1"),
        ]
    )
    assert [(task.name, task.study, set(task.methods)) for task in tasks] == [
        ("digits-cnn", "", {"seng", "sgd", "kfac"}),
        (
            "digits-cnn",
            "T",
            {
                "seng",
                "seng-T20",
                "seng-T100",
                "seng-T200",
                "seng-T500",
                "seng-T800",
            },
        ),
        (
            "digits-cnn",
            "b",
            {
                "seng",
                "seng-b1024",
                "seng-b4096",
                "sgd",
                "sgd-b1024",
                "sgd-b4096",
            },
        ),
        ("fashion-cnn", "", {"sgd"}),
        ("only", "b", {"sgd-b1"}),
    ]
    for task, look in zip(tasks, looks.looks(tasks), strict=True):
        assert len(
            {
                (paint.light, paint.dash, paint.marker)
                for paint in look.values()
            }
        ) == len(task.methods)
    words = {
        "": "",
        "b1024": "b",
        "no-decay": "no",
        "T20x": "T",
        "0.1": "other",
        "_": "other",
    }
    assert {label: summary.study_of(label) for label in words} == words


def test_a_study_is_named_wherever_it_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for trajectory in [
        *studies(),
        run("seng", label="0.1"),
        run("sgd", task="fashion-cnn"),
    ]:
        save(tmp_path, trajectory)
    out, pictures = tmp_path / "report.html", tmp_path / "pictures"
    command.main(
        [
            str(tmp_path),
            "--out",
            str(out),
            "--figures",
            str(pictures),
            "--tasks",
            "digits-cnn",
        ]
    )
    titles = [
        "digits-cnn",
        *(
            f"digits-cnn, {words}"
            for words in (
                "runs labelled T…",
                "runs labelled b…",
                "other labels",
            )
        ),
    ]
    said, text = capsys.readouterr().out, out.read_text()
    assert all(
        f"{title}; target: accuracy of at least 90 %" in said
        for title in titles
    )
    assert re.findall(r"<h2.*?>(.*?)</h2>", text) == titles
    assert re.findall(r'<a href="#task-\d">(.*?)</a>', text) == titles
    assert (
        "13 runs of 1 task, from" in text
        and "<title>Optimizers compared: digits-cnn</title>" in text
    )
    stems = {
        path.name.removesuffix("-curves.png")
        for path in pictures.glob("*-curves.png")
    }
    assert stems == {
        "digits-cnn",
        "digits-cnn-T",
        "digits-cnn-b",
        "digits-cnn-other",
    }
    with pytest.raises(SystemExit, match="there are digits-cnn, fashion-cnn$"):
        command.main([str(tmp_path), "--out", str(out), "--tasks", "nothing"])


class Attributes(HTMLParser):
    """Whatever could make a browser ask for something, and how many plots there are."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.plots = 0
        self.words: list[str] = []
        self.quiet = False
        self.feed(text)

    def handle_starttag(
        self, tag: str, attrs: list[tuple[str, str | None]]
    ) -> None:
        self.quiet = tag in ("script", "style")
        self.plots += ("class", "plot") in attrs
        self.addresses += [
            value or ""
            for name, value in attrs
            if name in ("src", "href", "xlink:href", "action", "data")
        ]

    def handle_endtag(self, tag: str) -> None:
        self.quiet = False

    def handle_data(self, data: str) -> None:
        self.words += [] if self.quiet else [data]


def test_the_command_says_what_stands_and_what_was_skipped(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "deep" / "report.html"
    command.main([str(folder), "--out", str(out)])
    said = capsys.readouterr().out
    assert (
        f"{folder}/shakespeare-gpt/adam-2.jsonl, line 12: cut in half or not JSON; skipped."
        in said
    )
    assert (
        f"{folder}/shakespeare-gpt/muon-0.jsonl, line 1: written in format 99 by another version of seng"
        in said
    )
    assert "digits-cnn; target: accuracy of at least 90 %" in said
    assert "shakespeare-gpt; target: perplexity of at most 70" in said
    assert re.search(r"adam +2/3", said) and re.search(r"seng +3/3", said)
    assert "adam: not finished (seed 2 at step 110)." in said
    assert f"page: {out}" in said
    parsed = Attributes(out.read_text())
    text = " ".join(parsed.words)
    assert parsed.plots == 10
    assert all(
        address.startswith(("#", "data:")) for address in parsed.addresses
    )
    for words in (
        "cut in half or not JSON",
        "format 99",
        "24 trials",
        "momentum 0.9",
        "abc1234",
        "a CPU",
        "torch 2.13.0",
        "2/3",
    ):
        assert words in text
    assert [path.name for path in out.parent.iterdir()] == ["report.html"]


def test_tasks_can_be_chosen_and_wrong_input_gets_one_sentence(
    folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "report.html"
    command.main([str(folder), "--out", str(out), "--tasks", "digits-cnn"])
    assert Attributes(out.read_text()).plots == 5
    for arguments, words in (
        (
            [str(folder), "--tasks", "digit-cnn"],
            "no results for the task 'digit-cnn': did you mean digits-cnn? there are ",
        ),
        (
            [str(tmp_path)],
            f"no results in {tmp_path}: runs are expected in {tmp_path}/<task>/*.jsonl",
        ),
        ([str(folder / "digits-cnn")], f"try {folder}"),
        ([str(tmp_path / "nowhere")], "there is no folder"),
    ):
        with pytest.raises(SystemExit) as stopped:
            command.main([*arguments, "--out", str(tmp_path / "other.html")])
        assert str(stopped.value).startswith("seng report: ") and words in str(
            stopped.value
        )
    assert not (tmp_path / "other.html").exists()


def test_text_from_files_stays_text() -> None:
    nasty = '<script>alert("1")</script>'
    text = page(
        summary.summarise(
            [run(nasty, recipe={nasty: nasty}, provenance={"machine": nasty})]
        ),
        [nasty],
        nasty,
    )
    assert "<script>alert" not in text and "</script>alert" not in text


def test_the_figures_are_the_same_every_time(
    folder: Path, tmp_path: Path
) -> None:
    tasks = summary.summarise(read(folder)[0])[:1]
    first = figures.draw(tasks, tmp_path / "a")
    second = figures.draw(tasks, tmp_path / "b")
    names = {
        f"digits-cnn-{what}.{kind}"
        for what in ("curves", "time-to-target", "step-time")
        for kind in ("png", "svg")
    }
    assert {path.name for path in first} == names
    for a, b in zip(first, second, strict=True):
        assert a.read_bytes() == b.read_bytes()
        assert a.suffix == ".svg" or imread(a).std() > 0.01


def test_hundreds_of_runs_make_a_page_quickly() -> None:
    runs = []
    for i in range(200):
        name, seed = f"method{i // 3 % 10}", i % 3
        runs.append(
            run(
                name,
                seed,
                climb(0.1 + 0.01 * seed, 50),
                1 + 0.1 * seed,
                task=f"task{i // 30}",
            )
        )
    start = time.process_time()  # what other processes take does not count
    text = page(summary.summarise(runs), [], "results")
    assert time.process_time() - start < 4  # usually 2
    assert len(text.encode()) < 12e6


@pytest.fixture(scope="module")
def address(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    out = tmp_path_factory.mktemp("page") / "report.html"
    command.main([str(folder), "--out", str(out)])
    return out.as_uri()


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[chromium.Page]:
    program = chromium.find()
    if program is None:
        why = "there is no Chromium; scripts/chromium.sh installs one"
        pytest.fail(why) if os.environ.get(
            "CI_REQUIRES_CHROMIUM"
        ) else pytest.skip(why)
    with chromium.browse(program, tmp_path_factory.mktemp("profile")) as page:
        yield page


ROOT = "document.documentElement"
INK = "document.querySelector('.plot')._fullLayout.font.color"


@pytest.mark.parametrize(
    ("scheme", "query", "theme", "width"),
    [
        ("light", "", "light", 1280),
        ("dark", "", "dark", 1280),
        ("light", "?theme=dark", "dark", 390),
        ("dark", "?theme=light", "light", 390),
    ],
)
def test_the_page_draws_itself_without_a_network(
    tab: chromium.Page,
    address: str,
    tmp_path: Path,
    scheme: str,
    query: str,
    theme: str,
    width: int,
) -> None:
    tab.requests.clear()
    tab.open(address + query, scheme, width)
    assert tab.run(f"{ROOT}.dataset.errors") == ""
    assert tab.run(f"{ROOT}.dataset.ready") == "10"
    assert (
        tab.run(
            "document.querySelectorAll('.plot .main-svg .xaxislayer-above').length"
        )
        == 10
    )
    assert tab.run(f"{ROOT}.dataset.theme") == theme
    assert (
        tab.run(f"{ROOT}.scrollWidth") <= width
    )  # nothing but tables has to be scrolled sideways
    assert set(tab.requests) <= {address + query, "data:,"}
    for top in (0, 900):
        tab.run(f"window.scrollTo(0, {top})")
        picture = imread(tab.picture(tmp_path / "page.png"))[..., :3]
        assert picture.std() > 0.03
        assert (np.median(picture) > 0.5) == (theme == "light")


def test_the_buttons_do_what_they_say(
    tab: chromium.Page, address: str
) -> None:
    def click(selector: str) -> None:
        found = f"document.querySelector({json.dumps(selector)})"
        tab.run(f"{found}.click(); new Promise(done => setTimeout(done, 200))")

    def first(what: str) -> Any:
        return tab.run(f"document.querySelector('.plot').{what}")

    tab.open(address)
    assert first("layout.xaxis.title.text") == "seconds of training"
    click("button[data-axis=epoch]")
    assert first("layout.xaxis.title.text") == "epochs"
    assert (
        tab.run(
            "document.querySelectorAll('.plot')[1].layout.xaxis.title.text"
        )
        == "epochs"
    )
    assert (
        tab.run(
            "document.querySelectorAll('.plot')[5].layout.xaxis.title.text"
        )
        == "seconds of training"
    )  # another task
    click("button[data-loss=loss]")
    assert (
        tab.run(
            "document.querySelectorAll('.plot')[1].layout.yaxis.title.text"
        )
        == "held-out loss"
    )
    click("button[data-method=sgd]")
    assert set(
        first("data.filter(trace => trace.visible).map(trace => trace.name)")
    ) == {"seng", "adam"}
    click("button[data-method=sgd]")
    assert len(first("data.filter(trace => trace.visible)")) == len(
        first("data")
    )
    tab.run(
        "Plotly.relayout(document.querySelector('.plot'), {'xaxis.range': [1, 3]}).then(() => 0)"
    )
    light = tab.run(INK)
    click("#theme")
    assert tab.run(f"{ROOT}.dataset.theme") == "dark" and tab.run(INK) != light
    assert first("_fullLayout.xaxis.range") == [1, 3]  # a zoom stays
    names = "[...document.querySelector('.standings').tBodies[0].rows].map(row => row.children[0].textContent)"
    assert tab.run(names) == ["seng", "sgd", "adam"]
    click(".standings th:nth-child(7) button")  # milliseconds per step
    assert tab.run(names) == ["sgd", "adam", "seng"]
    titles = tab.run(
        "[...new Set([...document.querySelectorAll('.modebar-btn')].map(button => button.dataset.title))]"
    )
    assert titles == [
        "Download plot",
        "Zoom",
        "Pan",
        "Zoom in",
        "Zoom out",
        "Autoscale",
        "Reset axes",
    ]  # and none that uploads
    assert tab.run(f"{ROOT}.dataset.errors") == ""


def test_odd_runs_are_drawn_and_what_goes_wrong_is_seen(
    tab: chromium.Page, tmp_path: Path
) -> None:
    nasty = "<img src=x onerror=nowhere()>"
    runs = [
        run(
            "kfac",
            0,
            points=(Point(1234, 1.0, 1.0, None, None, None, "diverged"),),
        ),
        run("sgd", 0, (0.1,)),
        run("sgd", 1, (None, None)),
        run(nasty, 0),
        run(nasty, 1, (0.3, 0.4)),
        run(
            "seng",
            0,
            (-1.0, 0.0),
            task="no-target",
            target=None,
            metric_name="score",
        ),
        run("seng", 0, (None,), task="nothing"),
    ]
    path = tmp_path / "odd.html"
    path.write_text(page(summary.summarise(runs), [], "results"))
    tab.open(path.as_uri())
    assert tab.run(f"[{ROOT}.dataset.ready, {ROOT}.dataset.errors]") == [
        "15",
        "",
    ]
    tab.run(
        "setTimeout(() => nowhere()); new Image().src = 'https://example.org/x.png'; new Promise(done => setTimeout(done, 200))"
    )
    said = tab.run(f"{ROOT}.dataset.errors")
    assert (
        "nowhere is not defined" in said
        and "refused: https://example.org/x.png" in said
    )
