"""`seng theory`: what it prints, keeps and draws, and what it does with a claim that does not hold."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from seng.lab.theory import command
from seng.lab.theory.study import Claim, Outcome, Study


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[bool]]:
    """Put a study of ours in the place of all; the list has an entry for each time that it ran: whether quickly."""

    def put(holds: bool = True, stops: bool = False) -> list[bool]:
        ran: list[bool] = []

        def run(say: Callable[[str], None], quick: bool) -> Outcome:
            ran.append(quick)
            say("on the way")
            if stops:
                raise KeyboardInterrupt
            draw = lambda figure: figure.subplots().plot([1, 2])  # noqa: E731
            return Outcome(
                (Claim("two is more than one", "2 > 1", holds),),
                {"x": [1 / 3, 2]},
                draw,
                ("mind this",),
            )

        monkeypatch.setattr(command, "STUDIES", ("ours",))
        monkeypatch.setattr(
            command, "study", lambda name: Study("ours", "Is it so?", run)
        )
        return ran

    threads = torch.get_num_threads()
    monkeypatch.setenv("SENG_COMMIT", "abc1234")
    command.commit.cache_clear()
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    yield put
    command.commit.cache_clear()
    assert torch.get_num_threads() == threads


def words(folder: Path, *more: str) -> list[str]:
    return [
        "--out",
        str(folder / "numbers"),
        "--figures",
        str(folder / "figures"),
        *more,
    ]


def test_a_study_is_kept_drawn_and_not_run_again(
    tried: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = tried()
    command.main(words(tmp_path))
    said = capsys.readouterr().out
    assert (
        "two is more than one" in said
        and "2 > 1" in said
        and "yes" in said
        and "mind this" in said
    )
    kept = json.loads((tmp_path / "numbers/ours.json").read_text())
    assert (
        kept["numbers"] == {"x": [0.333333, 2]}
        and kept["provenance"]["commit"] == "abc1234"
    )
    assert kept["provenance"]["command"].startswith("seng theory --out")
    assert (tmp_path / "figures/theory-ours.png").read_bytes()[
        :4
    ] == b"\x89PNG"
    command.main(words(tmp_path))
    assert ran == [False] and "made at this commit" in capsys.readouterr().out
    command.main(words(tmp_path, "--again"))
    assert ran == [False, False]


def test_a_quick_look_leaves_nothing_behind(
    tried: Any, tmp_path: Path
) -> None:
    ran = tried()
    command.main(words(tmp_path, "--quick"))
    assert ran == [True] and not list(tmp_path.iterdir())


def test_a_claim_that_does_not_hold_is_an_error(
    tried: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tried(holds=False)
    with pytest.raises(SystemExit, match="claims that do not hold, in ours"):
        command.main(words(tmp_path))
    assert (
        "NO" in capsys.readouterr().out
        and (tmp_path / "numbers/ours.json").exists()
    )


def test_an_interruption_and_a_broken_file(tried: Any, tmp_path: Path) -> None:
    tried(stops=True)
    with pytest.raises(SystemExit, match="interrupted"):
        command.main(words(tmp_path))
    ran = tried()
    (tmp_path / "numbers").mkdir(exist_ok=True)
    (tmp_path / "numbers/ours.json").write_text('{"claims": [')
    command.main(words(tmp_path))
    assert ran == [False]


def test_bad_input_is_one_sentence() -> None:
    for given, said in (
        (["embeding"], "did you mean embedding"),
        (["--threads", "0"], "--threads is a count"),
    ):
        with pytest.raises(SystemExit) as stopped:
            command.main(given)
        assert str(stopped.value).startswith("seng theory: ") and said in str(
            stopped.value
        )


def test_every_study_is_there() -> None:
    for name in command.STUDIES:
        assert command.study(name).name == name
