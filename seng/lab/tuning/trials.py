"""Trials: a training each, reported to its study evaluation by evaluation, and worked through until every study is complete."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import sleep
from typing import Any

import optuna
import torch
from optuna.trial import Trial, TrialState

from seng.lab.datasets import Data
from seng.lab.run import Run
from seng.lab.train import Training
from seng.lab.tuning.search import Plan
from seng.lab.tuning.study import Campaign, again, worker_id

WORST = 1e9  # of a metric that is to be small, where a run diverged
WAIT = 1.0  # seconds between looks at the storage


class SuperfluousError(RuntimeError):
    """More workers began than there were trials left."""


@dataclass(frozen=True)
class Worker:
    """Trains trial after trial."""

    data: Data  # of `held_out`
    device: torch.device
    watch: Callable[[], None]  # called at every evaluation

    def work(self, campaigns: Sequence[Campaign]) -> None:
        """Until every study is complete, each time on the one with the fewest trials, so that all get on alike."""
        while not all(each.complete() for each in campaigns):
            begun = {
                i: count
                for i, each in enumerate(campaigns)
                if (count := each.begun()) < each.plan.asked
            }
            if begun:
                self.one(campaigns[min(begun, key=lambda i: begun[i])])
            else:  # others train the last trials; should they die, these are ours
                sleep(WAIT)
                for each in campaigns:
                    each.recover()
            self.watch()

    def one(self, campaign: Campaign) -> None:
        """One trial."""
        numbers = list[int]()

        def objective(trial: Trial) -> float:
            numbers.append(trial.number)
            return self._value(campaign, trial)

        try:  # torch's own errors, such as a GPU that is too small, end a trial and not the search
            campaign.study.optimize(
                objective, n_trials=1, catch=(RuntimeError, ArithmeticError)
            )
        except ValueError:
            if (
                not numbers
                or campaign.trials()[numbers[0]].state != TrialState.FAIL
            ):
                raise
            # else others took us for dead, as after a machine slept, and queued the trial again
        finally:
            if self.device.type == "cuda":
                gc.collect()
                torch.cuda.empty_cache()  # other workers share the GPU

    def _value(self, campaign: Campaign, trial: Trial) -> float:
        trial.set_user_attr("worker", worker_id())
        if campaign.superfluous(trial):
            trial.set_user_attr("superfluous", True)
            frozen = campaign.trials()[trial.number]
            if frozen.system_attrs.get("fixed_params"):
                again(campaign.study, frozen)
            raise SuperfluousError
        try:
            with (
                warnings.catch_warnings()
            ):  # what a network's layers get is the same in every trial
                warnings.filterwarnings("ignore", message="seng: ")
                return self._trained(campaign.plan, trial)
        except KeyboardInterrupt:
            again(campaign.study, campaign.trials()[trial.number])
            raise
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # of numbers that are not finite
            return _diverged(campaign.plan, trial)
        except (RuntimeError, ArithmeticError) as why:
            if not isinstance(why, optuna.TrialPruned):
                trial.set_user_attr(
                    "failed",
                    f"{type(why).__name__}: {why}".splitlines()[0][:300],
                )
            raise

    def _trained(self, plan: Plan, trial: Trial) -> float:
        """The metric at the end of the budget."""
        recipe, curve = plan.suggest(trial), list[dict[str, Any]]()
        trial.set_user_attr("recipe", recipe.values())
        training = Training(
            Run(
                plan.task,
                recipe,
                plan.seed,
                plan.budget,
                plan.size,
                plan.label,
                stop=False,
            ),
            self.data,
            self.device,
        )
        try:
            while training.state == "running":
                line = training.advance()
                curve.append(
                    {
                        name: line[name]
                        for name in (
                            "step",
                            "epoch",
                            "seconds",
                            "train_loss",
                            "loss",
                            "metric",
                        )
                    }
                )
                if training.state == "diverged":
                    return _diverged(plan, trial)
                trial.report(line["metric"], len(curve))
                self.watch()
                if training.state == "running" and trial.should_prune():
                    raise optuna.TrialPruned
            return float(line["metric"])
        finally:
            with suppress(optuna.exceptions.UpdateFinishedTrialError):
                for name, value in (
                    (
                        *line["provenance"].items(),
                        ("seconds", training.seconds),
                        ("curve", curve),
                    )
                    if curve
                    else ()
                ):
                    if name != "command":  # it may have the storage's password
                        trial.set_user_attr(name, value)


def _diverged(plan: Plan, trial: Trial) -> float:
    """A result too, and the worst one."""
    trial.set_user_attr("diverged", True)
    return 0.0 if plan.task.problem.higher_is_better else WORST
