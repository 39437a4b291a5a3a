"""Studies that many processes and machines share: how one is opened, which of its trials count, and what it found.

A trial counts once it is complete, pruned or failed. One that was interrupted, or whose process died, is queued again with
the same values, and then the second one counts.
"""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from math import inf
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import optuna
from optuna.exceptions import (
    DuplicatedStudyError,
    ExperimentalWarning,
    OptunaError,
    StorageInternalError,
    UpdateFinishedTrialError,
)
from optuna.trial import FrozenTrial, Trial, TrialState
from sqlalchemy.engine import make_url
from sqlalchemy.exc import (
    IntegrityError,
    NoSuchModuleError,
    OperationalError,
    ProgrammingError,
    SQLAlchemyError,
)

from seng.lab.tuning.search import Plan, Seeded

BEAT, GRACE = (
    30,
    150,
)  # seconds: how often a running trial says that it is alive, and when it is taken for dead
DRIVERS = {
    "psycopg": "'psycopg[binary]'",
    "psycopg2": "psycopg2-binary",
    "MySQLdb": "mysqlclient",
}  # module -> package


def default_storage(out: Path, task: str) -> str:
    """A file beside the results."""
    return f"sqlite:///{out / task / 'studies.db'}"


def shown(url: str) -> str:
    """An address without its password."""
    try:
        return make_url(url).render_as_string(hide_password=True)
    except SQLAlchemyError:
        return url


def connect(url: str) -> optuna.storages.RDBStorage:
    """Open a storage, and make it where it is a file; what is in the way is said in one sentence."""
    turns = {
        "connect_args": {"timeout": 60}
    }  # workers write one after another
    patient = turns if url.startswith("sqlite") else {"pool_pre_ping": True}
    alive: dict[str, Any] = {
        "heartbeat_interval": BEAT,
        "grace_period": GRACE,
        "heartbeat_stale_trial_callback": again,
    }
    optuna.logging.set_verbosity(
        optuna.logging.CRITICAL
    )  # what matters of its trials is shown by us
    try:
        place = make_url(url)
        if place.get_backend_name() == "sqlite" and place.database:
            Path(place.database).parent.mkdir(parents=True, exist_ok=True)
        with _tried():
            return _made(
                lambda: optuna.storages.RDBStorage(url, patient, **alive)
            )
    except (ImportError, NoSuchModuleError) as missing:
        module = getattr(
            missing.__cause__, "name", None
        )  # which one is asked for depends on the version of SQLAlchemy
        need = (
            f"pip install {DRIVERS.get(module, module)}"
            if module
            else "Optuna knows sqlite, postgresql and mysql"
        )
        raise ValueError(
            f"the storage {shown(url)} needs a driver that is not here: {need}"
        ) from missing
    except (
        SQLAlchemyError,
        OptunaError,
        StorageInternalError,
        RuntimeError,
        OSError,
    ) as why:
        said = str(getattr(why, "orig", None) or why).strip().splitlines()[0]
        raise ValueError(
            f"the storage {shown(url)} cannot be opened ({said}): sqlite:///FILE or postgresql://USER:PASSWORD@HOST/NAME is one"
        ) from why


def _made(
    storage: Callable[[], optuna.storages.RDBStorage],
) -> optuna.storages.RDBStorage:
    """Two machines may make the tables of a new database at once: the slower one looks again, and finds them."""
    for _ in range(5):
        try:
            return storage()
        except (IntegrityError, ProgrammingError, OperationalError) as why:
            if not isinstance(
                why, IntegrityError
            ) and "already exists" not in str(why):
                raise
            sleep(0.5)
    return storage()


@contextmanager
def _tried() -> Iterator[None]:
    """Heartbeats are new in Optuna, and it says so each time."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        yield


def again(study: optuna.Study, trial: FrozenTrial) -> None:
    """Queue a trial once more; this is what says that the first one does not count."""
    known = {**trial.system_attrs.get("fixed_params", {}), **trial.params}
    study.enqueue_trial(known, {"again": trial.number})


@dataclass(frozen=True)
class Campaign:
    """A study with its plan."""

    plan: Plan
    study: optuna.Study

    def trials(self) -> list[FrozenTrial]:
        """All that were begun."""
        return self.study.get_trials(deepcopy=False)

    def begun(self) -> int:
        """Trials that count, and those under way."""
        trials = self.trials()
        return len(counted(trials)) + len(running(trials))

    def complete(self) -> bool:
        """Whether all trials are there."""
        return len(counted(self.trials())) >= self.plan.asked

    def superfluous(self, trial: Trial) -> bool:
        """Whether workers that started together took one too many, and this is it."""
        trials = self.trials()
        return (
            sum(
                other.number < trial.number
                for other in (*counted(trials), *running(trials))
            )
            >= self.plan.asked
        )

    def recover(self) -> None:
        """Queue again what dead processes left behind: of this machine at once, of others when they have been silent."""
        with _tried():
            optuna.storages.fail_stale_trials(self.study)
        for trial in running(self.trials()):
            if _dead(trial):
                with suppress(
                    ValueError, UpdateFinishedTrialError
                ):  # another process was faster
                    self.study.tell(trial.number, state=TrialState.FAIL)
                    again(self.study, trial)


def counted(trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
    """Those that use up the budget."""
    repeated = {trial.user_attrs.get("again") for trial in trials}
    return [
        trial
        for trial in trials
        if trial.state.is_finished()
        and "superfluous" not in trial.user_attrs
        and not (trial.state == TrialState.FAIL and trial.number in repeated)
    ]


def running(trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
    """Those under way."""
    return [trial for trial in trials if trial.state == TrialState.RUNNING]


def best(study: optuna.Study) -> FrozenTrial | None:
    """The complete trial with the best value; of equals, as a small held-out set has them, the one with the lowest loss."""
    found = [
        trial
        for trial in study.get_trials(
            deepcopy=False, states=[TrialState.COMPLETE]
        )
        if trial.value is not None
    ]
    sign = -1 if study.direction == optuna.study.StudyDirection.MAXIMIZE else 1
    return min(
        found,
        key=lambda trial: (sign * (trial.value or 0.0), _loss(trial)),
        default=None,
    )


def _loss(trial: FrozenTrial) -> float:
    """Held out, at the end."""
    curve = trial.user_attrs.get("curve")
    return (
        inf
        if not curve or curve[-1]["loss"] is None
        else float(curve[-1]["loss"])
    )


def worker_id() -> dict[str, Any]:
    """This process, for others of the machine to see whether it is alive."""
    namespace = Path("/proc/self/ns/pid")  # containers may share a name
    return {
        "host": socket.gethostname()
        + (os.readlink(namespace) if namespace.exists() else ""),
        "pid": os.getpid(),
    }


def _dead(trial: FrozenTrial) -> bool:
    worker, ours = trial.user_attrs.get("worker"), worker_id()
    if (
        worker is None
    ):  # killed before it could say who it was, unless it has only just begun
        began = trial.datetime_start or datetime.now()
        return (datetime.now() - began).total_seconds() > GRACE
    if worker["host"] != ours["host"] or os.name != "posix":
        return False
    try:
        os.kill(worker["pid"], 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False


def campaign(storage: optuna.storages.BaseStorage, plan: Plan) -> Campaign:
    """The study of a plan, new or as it is; refused where it was made with other settings."""
    parts: dict[str, Any] = {
        "sampler": Seeded(plan.seed),
        "pruner": plan.pruner(),
    }
    try:
        study = optuna.create_study(
            storage=storage,
            study_name=plan.name,
            direction=plan.direction,
            **parts,
        )
        settings = None
    except DuplicatedStudyError:
        study = optuna.load_study(
            storage=storage, study_name=plan.name, **parts
        )
        settings = _settings(study)
    if settings is None and study.direction.name.lower() != plan.direction:
        raise ValueError(
            f"the study {plan.name} does not {plan.direction}: give this one a --label of its own"
        )
    if (
        settings is not None and "first" not in settings
    ):  # a study of before it was noted
        settings["first"] = plan.settings["first"]
    if settings is not None and settings != plan.settings:
        differs = [
            key
            for key in {**settings, **plan.settings}
            if settings.get(key) != plan.settings.get(key)
        ]
        was = ", ".join(f"{key} {settings.get(key)}" for key in differs)
        now = ", ".join(f"{key} {plan.settings.get(key)}" for key in differs)
        raise ValueError(
            f"the study {plan.name} was made with {was}, not with {now}: give this one a --label of its own"
        )
    _queue(study, plan)
    if study.user_attrs.get("trials") != plan.asked:
        study.set_user_attr("trials", plan.asked)
    if settings is None:
        study.set_user_attr(
            "settings", plan.settings
        )  # the last, so that nobody starts with half a queue
    return Campaign(plan, study)


def _queue(study: optuna.Study, plan: Plan) -> None:
    """The task's own recipe first, and of a grid as many points as are asked for: those that are not there yet."""
    there = sum(
        "again" not in trial.user_attrs
        for trial in study.get_trials(deepcopy=False)
    )
    for point in [
        plan.first,
        *(plan.points if plan.sampler == "grid" else []),
    ][there : plan.asked]:
        study.enqueue_trial(point)


def _settings(
    study: optuna.Study, patience: float = 5.0
) -> dict[str, Any] | None:
    """How a study was made; one that is just being made is waited for, and None if whoever made it died over it."""
    until, before = monotonic() + patience, -1
    while True:
        trials = study.get_trials(deepcopy=False)
        settings: dict[str, Any] | None = study.user_attrs.get("settings")
        if settings is not None or (
            len(trials) == before and monotonic() > until
        ):
            return settings
        if any(trial.state != TrialState.WAITING for trial in trials):
            raise ValueError(
                f"the study {study.study_name} was not made by seng tune: give this one a --label of its own"
            )
        if len(trials) != before:  # its queue grows
            until, before = monotonic() + patience, len(trials)
        sleep(0.1)


def studies(
    storage: optuna.storages.BaseStorage, task: str
) -> list[optuna.Study]:
    """Those of a task."""
    names = optuna.get_all_study_names(storage)
    found = [
        optuna.load_study(study_name=name, storage=storage) for name in names
    ]
    return [
        study
        for study in found
        if study.user_attrs.get("settings", {}).get("task") == task
    ]
