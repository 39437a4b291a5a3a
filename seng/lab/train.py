"""One run: a task, a recipe and a seed, trained to its target or to the end of its budget, and resumed exactly where it was.

The clock counts training alone: it stops while the network is evaluated and while a checkpoint is written. Batches and their
augmentation are drawn from generators of the seed and the epoch, so that all optimizers see the same ones, and so that ranks
(seng.lab.ranks) can share them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Generator, Tensor, nn

from seng.lab import results
from seng.lab.checkpoint import Checkpoint
from seng.lab.datasets import Arrays, Data
from seng.lab.graphs import Graphed
from seng.lab.problems import Batch
from seng.lab.ranks import ALONE, Ranks
from seng.lab.record import provenance
from seng.lab.run import Run

PLAIN = 3  # steps before forward and backward are recorded: what libraries do once cannot be


def on(device: torch.device, data: Data) -> Data:
    """The data on a device."""
    train, test = (
        Arrays(part.x.to(device), part.y.to(device))
        for part in (data.train, data.test)
    )
    return replace(data, train=train, test=test)


class Training:
    """A run on the way: `advance` trains up to the next evaluation."""

    def __init__(
        self,
        run: Run,
        data: Data,
        device: torch.device,
        command: str = "",
        ranks: Ranks = ALONE,
    ) -> None:
        if run.ranks != ranks.count:
            raise ValueError(
                f"the run is for {run.ranks} ranks, and there are {ranks.count}"
            )
        self.run, self.device, self.command, self.ranks = (
            run,
            device,
            command,
            ranks,
        )
        self.data = on(device, data)
        self.per_epoch = run.task.problem.steps(data, run.size)
        if not self.per_epoch:
            raise ValueError(
                f"{run.task.name}: a batch of {run.size} is larger than the training set"
            )
        self.total = max(1, round(run.budget * self.per_epoch))
        torch.manual_seed(run.seed)
        model = run.task.build(data.classes).to(device)
        last = run.task.convolutional and device.type == "cuda"
        self.model: nn.Module = (
            model.to(memory_format=torch.channels_last) if last else model  # type: ignore[call-overload]
        )
        self.optimizer = run.recipe.optimizer(self.model)
        if run.compile:
            torch._dynamo.reset()  # else it takes the last run's graph, which had other hooks
        whole = ranks.wrapped(self.model, device)
        self.forward: nn.Module = (
            torch.compile(whole) if run.compile else whole  # type: ignore[assignment]
        )
        params = [p for p in self.model.parameters() if p.requires_grad]
        self.graphed = (
            Graphed(params, self._loss) if run.replays(device) else None
        )
        self.plain = 0  # steps that were not replayed
        self.step, self.seconds, self.state = 0, 0.0, "running"
        self.ahead: Iterator[Batch] = iter(())

    @property
    def epoch(self) -> float:
        """How far it is."""
        return self.step / self.per_epoch

    def advance(self) -> dict[str, Any]:
        """Train up to the next evaluation and evaluate: a line of results."""
        number, gone = divmod(self.step, self.per_epoch)
        often = self.run.task.evaluations
        marks = [
            round(self.per_epoch * (i + 1) / often) for i in range(often)
        ]  # of an epoch, the last one its end
        until = min(
            self.total,
            number * self.per_epoch
            + next(mark for mark in marks if mark > gone),
        )
        self.forward.train()
        self.ranks.own_chance(self.run.seed, self.step)
        losses = []
        self._wait()
        start = perf_counter()
        while self.step < until:
            losses.append(self._step())
        self._wait()
        self.seconds += perf_counter() - start
        train_loss = float(self.ranks.mean(torch.stack(losses).mean()))
        found = train_loss, *self._evaluate()
        train_loss, loss, metric = self.ranks.first_has(
            lambda: found
        )  # to the last bit, so that all stop together
        fine = math.isfinite(train_loss) and math.isfinite(loss)
        reached = results.reaches(
            metric,
            self.run.task.target,
            self.run.task.problem.higher_is_better,
        )
        if not fine:
            self.state = "diverged"
        elif self.step >= self.total:
            self.state = "finished"
        elif reached and self.run.stop:
            self.state = "target"
        return self._line(train_loss, loss, metric)

    def _step(self) -> Tensor:
        self.run.recipe.follow(
            self.optimizer.param_groups, self.epoch, self.run.budget
        )
        batch = next(self.ahead, None)
        if batch is None:
            self.ahead = self._epoch()
            batch = next(self.ahead)
        self.optimizer.zero_grad()
        loss = self._backward(batch)
        self.optimizer.step()
        self.step += 1
        return loss

    def _backward(self, batch: Batch) -> Tensor:
        """Leave gradients behind; by a recording, unless the optimizer is to see the layers' inputs and gradients."""
        if (
            self.graphed is not None
            and self.plain >= PLAIN
            and not getattr(self.optimizer, "refresh_due", False)
        ):
            return self.graphed(batch)
        self.plain += 1
        loss = self._loss(batch)
        loss.backward()
        return loss.detach()

    def _loss(self, batch: Batch) -> Tensor:
        with self._autocast():
            return self.run.task.problem.loss(self.forward, batch)

    def _epoch(self) -> Iterator[Batch]:
        """The batches that are left of the epoch."""
        number, gone = divmod(self.step, self.per_epoch)
        seed = 1_000_003 * self.run.seed + number
        order, chance = (
            Generator().manual_seed(seed),
            Generator(self.device).manual_seed(seed + 2**32),
        )  # two streams
        task = self.run.task
        batches = task.problem.batches(
            self.data, self.run.size, task.augment, order, chance, self.ranks
        )
        return islice(batches, gone, None)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(
            self.device.type,
            torch.bfloat16,
            enabled=self.device.type == "cuda",
        )

    @torch.no_grad()
    def _evaluate(self) -> tuple[float, float]:
        self.forward.eval()
        self.ranks.same(self.model.buffers())
        with self._autocast():
            loss, metric = self.run.task.problem.held_out(
                self.model, self.data, self.ranks
            )
        return float(loss), float(metric)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _line(
        self, train_loss: float, loss: float, metric: float
    ) -> dict[str, Any]:
        numbers = {"train_loss": train_loss, "loss": loss, "metric": metric}
        return {
            **self.run.head(self.device),
            "step": self.step,
            "epoch": self.epoch,
            "seconds": self.seconds,
            **{
                name: value if math.isfinite(value) else None
                for name, value in numbers.items()
            },
            "state": self.state,
            "provenance": provenance(self.command, self.device),
            "tuning": self.run.tuning,
        }

    def saved(self) -> dict[str, Any]:
        """All that the rest of the run depends on; made between evaluations, which is where epochs may be in the middle."""
        chance = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            chance["cuda"] = torch.cuda.get_rng_state(self.device)
        return {
            "head": self.run.head(self.device),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "progress": {"step": self.step, "seconds": self.seconds},
            "chance": chance,
        }

    def restore(self, saved: dict[str, Any]) -> None:
        """Continue from `saved()`."""
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.step, self.seconds = (
            saved["progress"]["step"],
            saved["progress"]["seconds"],
        )
        torch.set_rng_state(saved["chance"]["cpu"].cpu())
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(
                saved["chance"]["cuda"].cpu(), self.device
            )
        self.ahead = iter(())


def warm_up(
    run: Run, data: Data, device: torch.device, ranks: Ranks = ALONE
) -> None:
    """A few steps that nobody times: what a process does once, such as choosing kernels, is not the first run's to pay."""
    training = Training(run, data, device, ranks=ranks)
    training.forward.train()
    for _ in range(12):
        training._step()
    training._evaluate()
    training._wait()


def train(
    training: Training,
    folder: Path,
    checkpoint: Checkpoint | None = None,
    again: bool = False,
) -> Iterator[dict[str, Any]]:
    """Every line of a run as it comes, those that are there already included; each is in its file before it is given."""
    path, head, ranks = (
        training.run.path(folder),
        training.run.head(training.device),
        training.ranks,
    )
    if again:
        if ranks.first:
            path.unlink(missing_ok=True)
        if checkpoint is not None:
            checkpoint.remove()
    known = ranks.first_has(lambda: _known(path, head))
    if known and known[-1]["state"] != "running":
        yield from known
        return
    saved = None if checkpoint is None or again else checkpoint.load(head)
    if saved is not None:
        training.restore(saved)
    yield from (line for line in known if line["step"] <= training.step)
    while training.state == "running":
        line = training.advance()
        if ranks.first:
            results.append(path, line)
        if checkpoint is not None and training.state == "running":
            checkpoint.save(training.saved)
        yield line
    if checkpoint is not None:
        checkpoint.remove()


def _known(path: Path, head: dict[str, Any]) -> list[dict[str, Any]]:
    """The lines of a run that are there; refused where the file is of another."""
    wanted, lines = json.loads(json.dumps(head)), list[dict[str, Any]]()
    for text in path.read_bytes().splitlines() if path.exists() else ():
        try:
            line = json.loads(text)
        except ValueError:  # cut in half: `seng report` says so
            continue
        differs = [key for key in wanted if line.get(key) != wanted[key]]
        if differs:
            another = " and ".join(differs)
            raise ValueError(
                f"{path} has a run with another {another}: give this one a --label, or replace that one by --again"
            )
        lines = [
            *(before for before in lines if before["step"] < line["step"]),
            line,
        ]
    return lines
