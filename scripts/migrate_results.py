"""Translate results of the first edition into the names of this one: python scripts/migrate_results.py [FOLDER]

    was              is
    seng             seng-lowrank: per-sample gradients over λI, not centred
    seng-kronecker   kfac-root, or kfac-floor where its power was 1
    seng-paper       seng-paper, with lr and weight decay as the paper prints them: λ·lr and weight_decay/λ
    seng-orthogonal  seng-orthogonal, which no edition has any more

Numbers, commits and commands stay as they were; "recorded_as" says under which name a commit knows its optimizer. It goes over
runs (*.jsonl), what searches found (tuned.json), their trials (studies.db), the rows of `seng bench` and their pictures. What is
translated already is left alone, so it may run again. A file that it does not know stops it before anything is written.
"""

from __future__ import annotations

import json
import os
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from seng.lab.bench.report import draw
from seng.lab.recipes import RECIPES, recipe

Recipe = dict[str, Any]
Change = Callable[[], None]

GONE = "seng-orthogonal"
OURS = "seng", "seng-kronecker", "seng-paper", GONE
# What the first edition's recipes had and this one's have not.
OF_PAPER = {
    "relative_damping": False,
    "samples": None,
    "rank": 16,
    "average": 0.0,
    "combine": "independent",
    "form": "auto",
}
CONTENDERS = {
    "seng kronecker": "kfac root",
    "seng": "seng lowrank",
    **{
        f"seng {word}": f"seng lowrank {word}"
        for word in (
            "merged",
            "implicit",
            "explicit",
            "shared",
            "block",
            "lagged",
        )
    },
}
KEPT = {  # tables of their own, each with its commit
    "ablation.json",
    "beside-forms.json",
    "beside-others.json",
    "digits_defaults.json",
    "races.json",
}
# Of studies whose trials are in other units: a search of today begins anew.
EDITION = "edition1"


class UnknownError(Exception):
    """What this script does not know, in a sentence."""


def is_old(name: str, values: Recipe) -> bool:
    """Whether a recipe is the first edition's."""
    return name in OURS and "form" in values and "centred" not in values


def translated(name: str, values: Recipe) -> tuple[str, Recipe]:
    """The name and the fields of today, of a whole recipe of the first edition."""
    if name == GONE:
        return name, values
    if name == "seng":
        new = "seng-lowrank", {**values, "centred": False}
    elif name == "seng-kronecker":
        new = of_kronecker(values)
    else:
        new = name, of_paper(values)
    made = recipe(*new).values()
    if {*made} != {*new[1]}:
        odd = sorted({*made} ^ {*new[1]})
        raise UnknownError(f"a recipe of {name} has other fields: {odd}")
    return new


def of_kronecker(values: Recipe) -> tuple[str, Recipe]:
    """Of the Kronecker metric alone, whose damping was the square of today's floor."""
    new = dict(values)
    power = new.pop("power")
    still = {"relative_damping": True, "rank": 0, "damping_gamma": 1.0}
    for key, value in still.items():
        if new.pop(key) != value:
            raise UnknownError(f"{key} of seng-kronecker is not {value!r}")
    for key in ("samples", "combine", "form"):  # of U, which it had not
        del new[key]
    new["kronecker_rank"] = new.pop("base_rank")
    new["kronecker_floor"] = new.pop("damping") ** 0.5
    new["kronecker_decay"] = new.pop("average")
    names = {0.5: "kfac-root", 1.0: "kfac-floor"}
    if power not in names:
        raise UnknownError(f"seng-kronecker of power {power}")
    return names[power], new


def of_paper(values: Recipe) -> Recipe:
    """Of units in which lr was the paper's over λ; all of a recipe, or what a search found of it."""
    new = dict(values)
    for key, value in OF_PAPER.items():
        if new.pop(key, value) != value:
            raise UnknownError(f"{key} of seng-paper is not {value!r}")
    if new.get("damping_gamma", 1.0) != 1:
        raise UnknownError("λ of seng-paper changed, and with it the units")
    lam = new["damping"]
    for key in ("lr", "warmup_lr"):
        if key in new:
            new[key] *= lam
    if "floor" in new and new["schedule"] == "cosine":  # where cosine ends
        new["floor"] *= lam
    new["weight_decay"] /= lam
    return new


def put(path: Path, text: str) -> None:
    """The whole file or nothing."""
    half = path.with_name(f"{path.name}.half")
    half.write_text(text)
    os.replace(half, path)


def of_study(name: str, task: str) -> str:
    """The name of a study, task-optimizer[-label]."""
    prefix = f"{task}-"
    if not name.startswith(prefix):
        raise UnknownError(f"the study {name} is not of {task}")
    optimizer, label = split(name.removeprefix(prefix))
    return f"{task}-" + "-".join(filter(None, today(optimizer, label)))


def split(key: str) -> tuple[str, str]:
    """optimizer[-label], by the longest name that is known."""
    known = {*RECIPES, *OURS}
    fits = [n for n in known if key == n or key.startswith(f"{n}-")]
    if not fits:
        raise UnknownError(f"no optimizer begins {key!r}")
    name = max(fits, key=len)
    return name, key.removeprefix(name).removeprefix("-")


def today(optimizer: str, label: str) -> tuple[str, str]:
    """Of a study of the first edition."""
    if optimizer == "seng-paper":
        return optimizer, "-".join(filter(None, (label, EDITION)))
    names = {"seng": "seng-lowrank", "seng-kronecker": "kfac-root"}
    return names.get(optimizer, optimizer), label


def runs(path: Path) -> Change | None:
    """A run, whose file has its optimizer's name."""
    lines = []
    old = ""
    for text in path.read_text().splitlines():
        line = json.loads(text)
        if line.get("format") != 1:
            raise UnknownError(f"{path} is not of format 1")
        name = line["optimizer"]
        if name not in RECIPES and name not in OURS:
            raise UnknownError(f"{path} is of an unknown optimizer, {name}")
        if "recorded_as" not in line and is_old(name, line["recipe"]):
            old = name
            line = of_run(line)
        lines.append(line)
    if not old:
        return None
    rest = path.name.removeprefix(old)
    target = path.with_name(lines[-1]["optimizer"] + rest)
    if target != path and target.exists():
        raise UnknownError(f"{path} would replace {target}")

    def change() -> None:
        said = [json.dumps(line, ensure_ascii=False) for line in lines]
        put(target, "\n".join(said) + "\n")
        if target != path:
            path.unlink()

    return change


def of_run(line: dict[str, Any]) -> dict[str, Any]:
    """One evaluation."""
    was = line["optimizer"]
    name, values = translated(was, line["recipe"])
    new = {**line, "optimizer": name, "recipe": values}
    if new["tuning"] is not None and new["tuning"].get("study"):
        study = of_study(new["tuning"]["study"], line["task"])
        new["tuning"] = {**new["tuning"], "study": study}
    return {**new, "recorded_as": was}


def tuned(path: Path) -> Change | None:
    """What searches found; which of the entries are old, their trials say."""
    entries = json.loads(path.read_text())
    old = old_studies(path.with_name("studies.db"))
    new = {}
    changed = False
    for key, entry in entries.items():
        optimizer, label = split(key)
        if optimizer not in OURS or entry["study"] not in old:
            new[key] = entry
            continue
        if "recorded_as" in entry:
            raise UnknownError(
                f"{path} is translated, and its studies are not"
            )
        task = entry["study"].removesuffix(f"-{key}")
        changed = True
        values = entry["recipe"]
        if optimizer == "seng-paper":
            values = of_paper(values)
        name = today(optimizer, label)[0]
        entry = {
            **entry,
            "recipe": values,
            "study": of_study(entry["study"], task),
            "recorded_as": optimizer,
        }
        new["-".join(filter(None, (name, label)))] = entry
    if not changed:
        return None
    return lambda: put(path, json.dumps(new, indent=1) + "\n")


RECIPES_OF = """
    SELECT studies.study_name, trial_user_attributes.value_json FROM studies
    JOIN trials USING (study_id) JOIN trial_user_attributes USING (trial_id)
    WHERE trial_user_attributes.key = 'recipe'
"""


def old_studies(path: Path) -> set[str]:
    """The names of the studies whose trials have recipes of the first edition."""
    if not path.exists():
        raise UnknownError(f"there is no {path} beside what was tuned")
    base = sqlite3.connect(path)
    found = base.execute(RECIPES_OF).fetchall()
    base.close()
    names = set()
    for name, text in found:
        values = json.loads(text)
        if EDITION in name or GONE in name or "form" not in values:
            continue
        if "centred" not in values:
            names.add(name)
    return names


def studies(path: Path) -> Change | None:
    """Trials: the studies' names and settings, and the recipes of low rank."""
    old = old_studies(path)
    if not old:
        return None

    def change() -> None:
        with sqlite3.connect(path) as base:
            for name in sorted(old):
                rename(base, name)
        base.close()

    return change


def rename(base: sqlite3.Connection, name: str) -> None:
    """One study."""
    (number,) = base.execute(
        "SELECT study_id FROM studies WHERE study_name = ?", [name]
    ).fetchone()
    (text,) = base.execute(
        "SELECT value_json FROM study_user_attributes"
        " WHERE study_id = ? AND key = 'settings'",
        [number],
    ).fetchone()
    settings = json.loads(text)
    was = settings["optimizer"]
    optimizer, label = today(was, settings["label"])
    settings |= {"optimizer": optimizer, "label": label, "recorded_as": was}
    base.execute(
        "UPDATE studies SET study_name = ? WHERE study_id = ?",
        [of_study(name, settings["task"]), number],
    )
    base.execute(
        "UPDATE study_user_attributes SET value_json = ?"
        " WHERE study_id = ? AND key = 'settings'",
        [json.dumps(settings), number],
    )
    if optimizer == "seng-paper":
        return  # its trials keep the units that they were drawn in
    trials = base.execute(
        "SELECT trial_user_attribute_id, value_json FROM trial_user_attributes"
        " JOIN trials USING (trial_id) WHERE study_id = ? AND key = 'recipe'",
        [number],
    ).fetchall()
    for row, text in trials:
        values = translated(was, json.loads(text))[1]
        base.execute(
            "UPDATE trial_user_attributes SET value_json = ?"
            " WHERE trial_user_attribute_id = ?",
            [json.dumps(values), row],
        )


def bench(path: Path) -> Change | None:
    """Rows of `seng bench`, and their picture."""
    result = json.loads(path.read_text())
    rows = result.get("rows", [])
    if not all("contender" in row for row in rows):
        raise UnknownError(f"{path} has rows without a contender")
    # Before this edition settings had no T of what runs as it comes.
    setting = rows[0].get("setting", result["setting"])
    if "recorded_as" in result or "default_every" in setting:
        return None
    names = {row["contender"]: row["contender"] for row in rows}
    names = {name: CONTENDERS.get(name, name) for name in names}
    moved = {new: name for name, new in names.items() if name != new}
    for row in rows:
        row["contender"] = names[row["contender"]]
    result["recorded_as"] = moved

    def change() -> None:
        put(path, json.dumps(result, indent=1, ensure_ascii=False) + "\n")
        if path.with_suffix(".png").exists():
            draw(path)

    return change


def change_of(path: Path, folder: Path) -> Change | None:
    """What is to be done with a file; None: nothing."""
    place = path.relative_to(folder)
    top = place.parts[0]
    if path.suffix == ".jsonl":
        return runs(path)
    if path.name == "tuned.json":
        return tuned(path)
    if path.name == "studies.db":
        return studies(path)
    if top == "bench" and path.suffix == ".json":
        return bench(path)
    pictures = top == "bench" and path.suffix in (".png", ".txt")
    tables = len(place.parts) == 1 and path.name in KEPT
    theory = top == "theory" and path.suffix in (".json", ".png")
    if pictures or tables or theory or place == Path("gpu_tests.txt"):
        return None
    raise UnknownError(f"{path} is a file that I do not know")


def main(folder: Path) -> None:
    """All of a folder, or nothing."""
    changes = []
    unknown = []
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        try:
            change = change_of(path, folder)
        except UnknownError as why:
            unknown.append(str(why))
            continue
        except (ValueError, KeyError, sqlite3.Error) as wrong:
            unknown.append(f"{path} cannot be read: {wrong!r}")
            continue
        if change is not None:
            changes.append(change)
    if unknown:
        sys.exit("\n".join([*unknown, "nothing was written"]))
    for change in changes:
        change()
    print(f"{len(changes)} files translated")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "results"))
