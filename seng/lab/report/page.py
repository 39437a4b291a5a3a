"""The report as one HTML page with everything inside it, plotly.js included: it asks nobody for anything."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]

from seng.lab.report.curves import AXES
from seng.lab.report.data import task_data
from seng.lab.report.looks import (
    Look,
    cells,
    headings,
    looks,
    plus_minus,
    target_words,
)
from seng.lab.report.script import GUARD, SCRIPT
from seng.lab.report.style import STYLE
from seng.lab.report.summary import Task, provenances
from seng.lab.results import Trajectory
from seng.version import __version__

POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; form-action 'none'"
DASHES = {
    "solid": "",
    "dash": "8 4",
    "dot": "2 4",
    "dashdot": "8 3 2 3",
    "longdash": "14 4",
    "longdashdot": "14 3 2 3",
}
CURVES = (("metric", "{metric} on held-out data"), ("loss", "Loss"))
BARS = (
    ("seconds", "Time to the target, seconds"),
    ("epochs", "Epochs to the target"),
    ("step_ms", "Milliseconds per step"),
)
HOW = """Time counts training only, evaluation excluded. ± is a 95 % confidence interval over seeds (Student's t); one seed has
none. Times and epochs to the target are means over the seeds that reached it, and 2/3 says that two of three did. In the curves
a line is the mean of the seeds as far as all of them go, its band reaches from the lowest to the highest, the thin lines are
the single seeds, and a mark is where a seed reached the target. Drag to zoom, double-click to see everything."""


def page(tasks: Sequence[Task], skipped: Sequence[str], source: str) -> str:
    """The whole page; `skipped` are the sentences of `results.read`, `source` says where the runs came from."""
    drawn = list(zip(tasks, looks(tasks), strict=True))
    names = list(dict.fromkeys(task.name for task in tasks))
    runs = len(
        {(run.task, run.name, run.seed) for task in tasks for run in task.runs}
    )
    links = "".join(
        f'<li><a href="#task-{i}">{escape(task.title)}</a></li>'
        for i, task in enumerate(tasks)
    )
    data = json.dumps(
        [task_data(task, look) for task, look in drawn],
        separators=(",", ":"),
        allow_nan=False,
    )
    body = "".join(
        _section(i, task, look) for i, (task, look) in enumerate(drawn)
    )
    count = f"{runs} run{'s' * (runs != 1)} of {len(names)} task{'s' * (len(names) != 1)}, from {source}"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<link rel="icon" href="data:,">
<title>Optimizers compared: {escape(", ".join(names))}</title>
<style>{STYLE}</style>
<script>{GUARD}</script>
</head>
<body>
<header>
<h1>Optimizers compared</h1>
<button id="theme" type="button" aria-label="switch between light and dark">Dark</button>
<p class="quiet">{escape(count)}. Made by seng {escape(__version__)}.</p>
<nav aria-label="tasks"><ul>{links}</ul></nav>
</header>
<main>
<noscript><p class="mind">The pictures need JavaScript; the tables do not.</p></noscript>
{_sentences("Skipped while reading", skipped)}
<p class="quiet">{HOW}</p>
{body}
</main>
<footer>Colours: Okabe and Ito's palette, one for each optimizer, the same in every picture.</footer>
<script type="application/json" id="data">{data.replace("<", chr(92) + "u003c")}</script>
<script>{get_plotlyjs()}</script>
<script>{SCRIPT}</script>
</body>
</html>
"""


def _section(index: int, task: Task, look: dict[str, Look]) -> str:
    height = 78 + 34 * len(task.standings)
    metric = escape(task.metric_name.replace("_", " ").capitalize())
    curves = "".join(
        _plot(index, task, kind, title.format(metric=metric), "")
        for kind, title in CURVES
    )
    bars = "".join(
        _plot(index, task, kind, title, f"height:{height}px")
        for kind, title in BARS
    )
    return f"""<section id="task-{index}" aria-labelledby="name-{index}">
<h2 id="name-{index}">{escape(task.title)}</h2>
<p>Target: {escape(target_words(task))}. {escape(_headline(task))}</p>
{_sentences("Mind", task.remarks)}
{_standings(task)}
{_switches(index, task, look)}
<div class="grid">{curves}</div>
<div class="grid three">{bars}</div>
{_budget(task)}
{_provenance(task)}
</section>
"""


def _headline(task: Task) -> str:
    """One sentence on who came first."""
    first = task.standings[0]
    if first.epochs is None:
        return (
            "No seed of any method reached it."
            if task.target is not None
            else ""
        )
    seconds = f"{plus_minus(first.seconds)} s and " if first.seconds else ""
    who = f"{first.name} stands first: {seconds}{plus_minus(first.epochs)} epochs to it"
    return f"{who}, with {first.reached} of {len(first.seeds)} seed{'s' * (len(first.seeds) != 1)}."


def _sentences(title: str, sentences: Iterable[str]) -> str:
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    return (
        f'<div class="mind"><strong>{title}</strong><ul>{items}</ul></div>'
        if items
        else ""
    )


def _standings(task: Task) -> str:
    head = "".join(
        f'<th scope="col"><button type="button">{escape(word)}</button></th>'
        for word in headings(task)
    )
    rows = []
    for s in task.standings:
        means = [
            e and e.mean
            for e in (s.seconds, s.epochs, s.final, s.best, s.step_ms)
        ]
        values = [s.name, s.reached / len(s.seeds), *means, s.trials]
        texts = cells(s, task)
        first = f'<th scope="row" data-value="{escape(s.name)}">{escape(s.name)}</th>'
        rest = zip(values[1:], texts[1:], strict=True)
        rows.append(
            first
            + "".join(
                f'<td data-value="{"" if v is None else v}">{escape(text)}</td>'
                for v, text in rest
            )
        )
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    caption = "<caption>Standings, best first; a heading sorts by its column.</caption>"
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="standings of {escape(task.title)}">'
        f'<table class="standings">{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def _switches(index: int, task: Task, look: dict[str, Look]) -> str:
    """Buttons: which axis, which loss, which methods."""

    def button(
        key: str, value: str, text: str, pressed: bool, style: str = ""
    ) -> str:
        state = f'aria-pressed="{str(pressed).lower()}"'
        return f'<button type="button" data-task="{index}" data-{key}="{escape(value)}" {state} {style}>{text}</button>'

    axes = "".join(
        button("axis", axis, words, axis == "seconds")
        for axis, words in AXES.items()
    )
    losses = button("loss", "train_loss", "training", True) + button(
        "loss", "loss", "held-out", False
    )
    methods = ""
    for s in task.standings:
        paint = look[s.name]
        line = f'<svg aria-hidden="true"><line x1="0" x2="30" y1="5" y2="5" stroke-dasharray="{DASHES[paint.dash]}"/></svg>'
        style = f'style="--light:{paint.light};--dark:{paint.dark}"'
        methods += button("method", s.name, line + escape(s.name), True, style)
    return (
        '<h3>Curves</h3><div class="bar"><div class="group" role="group" aria-label="horizontal axis"><span>against</span>'
        f'{axes}</div><div class="group" role="group" aria-label="loss"><span>loss</span>{losses}</div></div>'
        f'<div class="bar"><div class="group methods" role="group" aria-label="methods shown">{methods}</div></div>'
    )


def _plot(index: int, task: Task, kind: str, title: str, style: str) -> str:
    label = f"{title}, {escape(task.title)}; the table of standings has the numbers"
    plot = f'<div class="plot" data-task="{index}" data-kind="{kind}" style="{style}" role="img" aria-label="{label}"></div>'
    return f"<figure><figcaption>{title}</figcaption>{plot}</figure>"


def _budget(task: Task) -> str:
    """How much search each method had, and every hyperparameter that it ran with."""
    rows = ""
    for s in task.standings:
        run = task.methods[s.name][0]
        study = f"<br><code>{escape(s.study)}</code>" if s.study else ""
        trials = "none" if s.trials is None else f"{s.trials} trials"
        cells = f"<td>{trials}{study}</td><td>{_chips(run.recipe)}</td><td>{_chips(run.run)}</td>"
        rows += f'<tr><th scope="row">{escape(s.name)}</th>{cells}</tr>'
    head = "".join(
        f'<th scope="col">{word}</th>'
        for word in ("method", "search", "hyperparameters", "run")
    )
    return (
        f'<h3>Tuning budget and recipes</h3><div class="scroll" tabindex="0" role="region" aria-label="tuning budget of '
        f'{escape(task.title)}"><table class="words"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
    )


def _chips(values: dict[str, Any]) -> str:
    def text(value: Any) -> str:
        return (
            f"{value:g}"
            if isinstance(value, float)
            else value
            if isinstance(value, str)
            else json.dumps(value)
        )

    return "".join(
        f'<code class="chip">{escape(f"{key} {text(value)}")}</code>'
        for key, value in values.items()
    )


def _provenance(task: Task) -> str:
    """Where the runs come from: machine, versions, commit and command, and which runs have them."""
    groups: dict[str, list[tuple[Trajectory, dict[str, Any]]]] = {}
    for run in task.runs:
        for where in provenances(run):
            groups.setdefault(json.dumps(where, sort_keys=True), []).append(
                (run, where)
            )
    rows = ""
    for members in groups.values():
        where = members[0][1]
        who = ", ".join(f"{run.name} (seed {run.seed})" for run, _ in members)
        versions = ", ".join(
            f"{name} {version}"
            for name, version in (where.get("versions") or {}).items()
        )
        cells = (
            who,
            where.get("machine", "unknown"),
            versions,
            where.get("commit", "unknown"),
        )
        rows += "<tr>" + "".join(
            f"<td>{escape(str(cell))}</td>" for cell in cells
        )
        rows += f"<td><code>{escape(str(where.get('command', 'unknown')))}</code></td></tr>"
    head = "".join(
        f'<th scope="col">{word}</th>'
        for word in ("runs", "machine", "versions", "commit", "command")
    )
    return (
        f'<details><summary>Where these runs come from</summary><div class="scroll"><table class="words"><thead><tr>{head}</tr>'
        f"</thead><tbody>{rows}</tbody></table></div></details>"
    )
