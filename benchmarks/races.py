"""Equal races of optimizers on five small tasks: one CPU thread a run, or a GPU that runs share.

    seng data cifar10; seng data mnist; seng data shakespeare --from ../shared/data          # once
    python benchmarks/races.py cifar autoencoder gpt vit --out results/races.json            # every contender
    python benchmarks/races.py cifar --contenders sgd seng --trials 6 --out some.json        # these two
    python benchmarks/races.py gpt --contenders adam --lr 0.003 --out some.json              # no search
    python benchmarks/races.py gpt --contenders "seng rank=16 base.power=1" --out some.json  # options of one
    python benchmarks/races.py gpt --ablation --trials 3 --lrs 0.05 0.2 --out some.json      # the default, one knob at a time

    python benchmarks/races.py --show results/races/*.json                                   # the tables again

A machine that has torch alone, without numpy, takes the data from files:

    python benchmarks/races.py --export FOLDER                                               # here
    python benchmarks/races.py cifar --data FOLDER --jobs 16 --out some.json                 # there

The rules are the same for all contenders.

- The search runs `--trials` learning rates, log-spaced over the contender's range, with one seed.
- It keeps the one with the lowest validation loss. A star in the table marks the end of a range.
- The row is then the mean over other seeds at that learning rate. No held-out sample takes part in the search.
- One seed gives every contender the same initial weights and the same batches.
- The learning rate rises linearly over the first tenth of the steps and falls to 0 as a cosine.
- The training loss is the mean over the last tenth of the steps.
- Time is the CPU time of forward pass, backward pass and step. Drawing batches and evaluation do not count.

Finished runs are kept in OUT's .part.jsonl until the race is over: after an interruption the same command goes on.
They do not know when the library changed: delete that file then. Other options of a contender are other runs.
"""

from __future__ import annotations

import argparse
import ast
import gzip
import io
import json
import math
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean, median
from typing import Any

import record
import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

import seng
from seng.lab.models import ViT, basic, conv_norm, gpt2, initialised
from seng.lab.record import provenance

# seng.lab.datasets needs numpy, which a bare machine lacks: it is imported only where a dataset is read from its own files.

WARMUP = 0.1  # of all steps
CURVE_POINTS = 20
EVALUATED_TOGETHER = 1000  # samples
CHARACTERS, CONTEXT, WINDOWS = 65, 64, 64  # of the text
CIFAR_MEAN = torch.tensor([0.4914, 0.4822, 0.4465]).view(3, 1, 1)
CIFAR_STD = torch.tensor([0.2470, 0.2435, 0.2616]).view(3, 1, 1)

Batch = tuple[Tensor, Tensor]


# ---- Data


@dataclass(frozen=True)
class Split:
    """Images as uint8 (N, C, H, W) and classes (N,); of a text, tokens as uint8."""

    x: Tensor
    y: Tensor


@dataclass(frozen=True)
class Data:
    """`val` chooses the learning rate, `held` is for the table alone."""

    train: Split
    val: Split
    held: Split


def images(name: str, train: int, val: int, held: int) -> Data:
    """The first training images, those after them for validation, and the first test images."""
    from seng.lab.datasets.store import load

    whole = load(name)

    def part(split: Any, start: int, stop: int) -> Split:
        # Clones, as torch.save would write all that a slice is a view of.
        return Split(split.x[start:stop].clone(), split.y[start:stop].clone())

    return Data(
        part(whole.train, 0, train),
        part(whole.train, train, train + val),
        part(whole.test, 0, held),
    )


def text() -> Data:
    """Nine tenths to train on; of each half of the last tenth, equally spaced windows."""
    from seng.lab.datasets.store import load

    whole = load("shakespeare")
    assert whole.classes == CHARACTERS
    last = whole.test.x.to(torch.uint8)
    half = len(last) // 2
    train = whole.train.x.to(torch.uint8)
    return Data(
        Split(train, train.new_empty(0)),
        spaced_windows(last[:half]),
        spaced_windows(last[half:]),
    )


def spaced_windows(tokens: Tensor) -> Split:
    """Inputs and targets, both (WINDOWS, CONTEXT): windows that do not overlap."""
    pieces = tokens.unfold(0, CONTEXT + 1, len(tokens) // WINDOWS)[:WINDOWS]
    return Split(pieces[:, :-1].clone(), pieces[:, 1:].clone())


SOURCES: dict[str, Callable[[], Data]] = {
    "cifar10": lambda: images("cifar10", 10_000, 2_000, 5_000),
    "mnist": lambda: images("mnist", 58_000, 2_000, 5_000),
    "text": text,
}


def export(folder: Path) -> None:
    """Write every source's tensors, compressed."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, make in SOURCES.items():
        data, buffer = make(), io.BytesIO()
        splits = (data.train, data.val, data.held)
        torch.save([(split.x, split.y) for split in splits], buffer)
        path = folder / f"{name}.pt.gz"
        path.write_bytes(gzip.compress(buffer.getvalue(), mtime=0))
        print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")


@cache
def read(source: str, folder: Path | None) -> Data:
    """From what `export` wrote, else from seng.lab.datasets."""
    if folder is None:
        return SOURCES[source]()
    packed = (folder / f"{source}.pt.gz").read_bytes()
    splits = torch.load(io.BytesIO(gzip.decompress(packed)), weights_only=True)
    return Data(*(Split(x, y) for x, y in splits))


# ---- Batches: endless, by the generator


def shuffled(train: Split, batch: int, chance: Generator) -> Iterator[Batch]:
    """Whole batches, in another order every epoch."""
    whole = len(train.x) // batch * batch
    while True:
        order = torch.randperm(len(train.x), generator=chance)
        for rows in order[:whole].split(batch):
            yield train.x[rows], train.y[rows]


def augmented(train: Split, batch: int, chance: Generator) -> Iterator[Batch]:
    """Images shifted by up to 4 pixels along both axes and mirrored by a coin."""
    pad = 4
    for x, y in shuffled(train, batch, chance):
        count, _, height, width = x.shape
        padded = F.pad(x, [pad] * 4)
        places = padded.unfold(2, height, 1).unfold(3, width, 1)
        moves = torch.randint(2 * pad + 1, (2, count), generator=chance)
        shifted = places[torch.arange(count), :, moves[0], moves[1]]
        mirrored = torch.rand(count, 1, 1, 1, generator=chance) < 0.5
        yield torch.where(mirrored, shifted.flip(-1), shifted), y


def windows(train: Split, batch: int, chance: Generator) -> Iterator[Batch]:
    """Pieces of the text that begin anywhere."""
    reach = torch.arange(CONTEXT + 1)
    limit = len(train.x) - CONTEXT
    while True:
        starts = torch.randint(limit, (batch, 1), generator=chance)
        pieces = train.x[starts + reach]
        yield pieces[:, :-1], pieces[:, 1:]


# ---- Tasks


def residual_network() -> nn.Module:
    """Six convolutions with BatchNorm, one residual block, a linear layer: for small images."""
    layers = [
        *conv_norm(3, 32, 3, 2),
        nn.ReLU(),
        *conv_norm(32, 64, 3, 2),
        nn.ReLU(),
        basic(64, 64, 1),
        *conv_norm(64, 128, 3, 2),
        nn.ReLU(),
    ]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10)]
    return initialised(nn.Sequential(*layers, *head))


def autoencoder() -> nn.Module:
    """784-400-100-30-100-400-784 with sigmoids, but for the code of 30 and the logits."""
    return nn.Sequential(
        nn.Linear(784, 400),
        nn.Sigmoid(),
        nn.Linear(400, 100),
        nn.Sigmoid(),
        nn.Linear(100, 30),
        nn.Linear(30, 100),
        nn.Sigmoid(),
        nn.Linear(100, 400),
        nn.Sigmoid(),
        nn.Linear(400, 784),
    )


def normalised(x: Tensor, y: Tensor) -> Batch:
    return (x.float() / 255 - CIFAR_MEAN) / CIFAR_STD, y


def flat_pixels(x: Tensor, y: Tensor) -> Batch:
    flat = x.flatten(1).float() / 255
    return flat, flat


def as_indices(x: Tensor, y: Tensor) -> Batch:
    return x.long(), y.long()


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """Mean over samples, and over positions where there are any."""
    return F.cross_entropy(logits.flatten(0, -2), y.flatten())


def pixel_loss(logits: Tensor, pixels: Tensor) -> Tensor:
    """Binary cross-entropy, summed over pixels, mean over samples."""
    total = F.binary_cross_entropy_with_logits(logits, pixels, reduction="sum")
    return total / len(logits)


@dataclass(frozen=True)
class Task:
    """`batches` draws raw samples, `prepare` makes inputs and targets of them; `loss` takes outputs and targets."""

    name: str
    source: str
    build: Callable[[], nn.Module]
    batches: Callable[[Split, int, Generator], Iterator[Batch]]
    prepare: Callable[[Tensor, Tensor], Batch]
    loss: Callable[[Tensor, Tensor], Tensor]
    has_accuracy: bool
    batch: int
    steps: int
    sgd_seconds: float  # a step of SGD, roughly: long runs start first


CIFAR = Task(
    name="cifar",
    source="cifar10",
    build=residual_network,
    batches=augmented,
    prepare=normalised,
    loss=cross_entropy,
    has_accuracy=True,
    batch=128,
    steps=94,
    sgd_seconds=0.07,
)
LARGE_BATCH = replace(
    CIFAR, name="cifar-2048", batch=2048, steps=40, sgd_seconds=2.3
)
AUTOENCODER = Task(
    name="autoencoder",
    source="mnist",
    build=autoencoder,
    batches=shuffled,
    prepare=flat_pixels,
    loss=pixel_loss,
    has_accuracy=False,
    batch=256,
    steps=400,
    sgd_seconds=0.012,
)
GPT = Task(
    name="gpt",
    source="text",
    build=lambda: gpt2(3, 96, 4, CHARACTERS, CONTEXT),
    batches=windows,
    prepare=as_indices,
    loss=cross_entropy,
    has_accuracy=False,
    batch=32,
    steps=300,
    sgd_seconds=0.08,
)
VIT = Task(
    name="vit",
    source="cifar10",
    build=lambda: ViT(3, 96, 4, 4, 32, 10),
    batches=augmented,
    prepare=normalised,
    loss=cross_entropy,
    has_accuracy=True,
    batch=64,
    steps=300,
    sgd_seconds=0.12,
)
TASKS = {t.name: t for t in (CIFAR, LARGE_BATCH, AUTOENCODER, GPT, VIT)}


# ---- Contenders

# Learning rates that a search covers, by task; for one with ranges of its own, `lrs=SGD_LRS | {"gpt": (0.1, 3.0)}`.
Ranges = Mapping[str, tuple[float, float]]
SGD_LRS: Ranges = {
    "default": (1e-2, 3.0),
    "autoencoder": (5e-3, 0.3),
    "gpt": (1e-2, 1.0),
}
ADAM_LRS: Ranges = {"default": (3e-4, 3e-2)}
MUON_LRS: Ranges = {"default": (2e-3, 0.2)}


@dataclass(frozen=True)
class Contender:
    """`setting` says what it is, for the record."""

    build: Callable[[nn.Module, float], Any]
    setting: str
    lrs: Ranges

    def grid(self, task: str, trials: int) -> list[float]:
        """Log-spaced learning rates, both ends of the range among them."""
        low, high = self.lrs.get(task, self.lrs["default"])
        ratio = (high / low) ** (1 / max(trials - 1, 1))
        return [float(f"{low * ratio**i:.3g}") for i in range(trials)]


def by_model(method: Any, lrs: Ranges, **options: Any) -> Contender:
    """An optimizer that takes the model itself."""
    words = ", ".join(f"{name}={value!r}" for name, value in options.items())
    return Contender(
        lambda model, lr: method(model, lr=lr, **options),
        f"{method.__module__}.{method.__name__}({words})",
        lrs,
    )


def by_parameters(method: Any, lrs: Ranges, **options: Any) -> Contender:
    """An optimizer that takes parameters, as torch's own do."""
    return replace(
        by_model(method, lrs, **options),
        build=lambda model, lr: method(model.parameters(), lr=lr, **options),
    )


def ours(**options: Any) -> Contender:
    """SENG; options of Curvature go there, and those named base.x to Kronecker."""
    base: dict[str, Any] = {}
    of_curvature: dict[str, Any] = {}
    fields = seng.Curvature.__dataclass_fields__
    for name in [*options]:
        if name.startswith("base."):
            base[name.removeprefix("base.")] = options.pop(name)
        elif name in fields:
            of_curvature[name] = options.pop(name)
    if base:
        of_curvature["base"] = seng.Kronecker(**base)
    if of_curvature:
        options["curvature"] = seng.Curvature(**of_curvature)
    return in_recipe(seng.SENG, **options)


def kfac(**options: Any) -> Contender:
    return in_recipe(seng.KFAC, **options)


def in_recipe(method: Any, **options: Any) -> Contender:
    """Of ours, with the options that the recipe's own optimizer has in the race."""
    lrs, own = RECIPES[options.get("recipe", "sgd")]
    rival = by_model(method, lrs, **{**own, **options})

    def build(model: nn.Module, lr: float) -> Any:
        group = {"params": list(model.parameters()), **own}
        return method([group], lr=lr, module=model, **options)

    return replace(rival, build=build)


OURS = {"seng": ours, "kfac": kfac}
SOAP_SETTING = "pytorch_optimizer.SOAP(betas=(0.95, 0.95), weight_decay=0.01, precondition_frequency=10)"


def soap(model: nn.Module, lr: float) -> Any:
    """As its authors run it, with the weight decay of the others."""
    from pytorch_optimizer import SOAP

    options = {"betas": (0.95, 0.95), "precondition_frequency": 10}
    return SOAP(model.parameters(), lr=lr, **DECAYED, **options)


DECAYED = {"weight_decay": 0.01}
AS_ADAMW = {
    **DECAYED,
    "adjust_lr_fn": "match_rms_adamw",
    "adam_betas": (0.9, 0.999),
}
RECIPES: dict[str, tuple[Ranges, dict[str, Any]]] = {
    "sgd": (SGD_LRS, {}),
    "adamw": (ADAM_LRS, DECAYED),
    "muon": (MUON_LRS, AS_ADAMW),
}


@cache
def contender(words: str) -> Contender:
    """A contender by its name, or one of ours with options: "seng rank=16 base.power=1"."""
    known = {**CONTENDERS, **MORE}
    if words in known:
        return known[words]
    name, *given = words.split()
    if name not in OURS:
        raise ValueError(
            f"no contender {name!r}; there are {', '.join(known)}; and seng and kfac with options"
        )
    pairs = [word.partition("=") for word in given]
    return OURS[name](**{key: literal(value) for key, _, value in pairs})


def literal(value: str) -> Any:
    """A Python value, or the word itself."""
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return value


CONTENDERS = {
    "sgd": by_parameters(torch.optim.SGD, SGD_LRS, momentum=0.9),
    "adamw": by_parameters(torch.optim.AdamW, ADAM_LRS, **DECAYED),
    "muon": by_model(seng.Muon, MUON_LRS, **AS_ADAMW),
    "soap": Contender(soap, SOAP_SETTING, ADAM_LRS),
    "kfac": kfac(),
    "seng": ours(),
    "seng recipe=adamw": ours(recipe="adamw"),
    "seng recipe=muon": ours(recipe="muon"),
}
# Asked for by name.
MORE = {
    "sgd-nesterov": by_parameters(
        torch.optim.SGD, SGD_LRS, momentum=0.9, nesterov=True
    ),
    "adam": by_parameters(torch.optim.Adam, ADAM_LRS),
}

# The default, and with one knob changed.
ABLATION = [
    "seng",
    "seng centred=False",
    "seng base=None",
    "seng base=None centred=False",
    "kfac power=0.5",
    "kfac power=1",
    *[f"seng rank={k} samples={4 * k}" for k in (2, 8, 16)],
    "seng samples=64",
    *[f"seng damping={lam}" for lam in (0.03, 0.1, 0.3, 1.0, 3.0)],
    *[f"seng base.power={p}" for p in (0.5, 0.6, 0.6667, 1.0)],
    *[f"seng base.rank={r}" for r in (8, 32)],
    *[f"seng base.floor={floor}" for floor in (0.03, 0.3)],
    *[f"seng base.decay={delta}" for delta in (0.0, 0.5, 0.95)],
    "seng decay=0.8",
    *[f"seng refresh_every={T}" for T in (5, 10, 40)],
]


# ---- One run


@dataclass(frozen=True)
class Run:
    """What identifies it."""

    task: str
    contender: str
    setting: str
    lr: float
    seed: int
    steps: int


def factor(step: int, steps: int) -> float:
    """Of the learning rate: linear warm-up, then a cosine to 0."""
    warmup = max(1, round(WARMUP * steps))
    if step < warmup:
        return (step + 1) / warmup
    return (1 + math.cos(math.pi * (step - warmup) / (steps - warmup))) / 2


@dataclass(frozen=True)
class Trace:
    """Of each step; `error` says why the run ended early."""

    losses: list[float]
    seconds: list[float]
    error: str | None


def train(
    task: Task, model: nn.Module, optimizer: Any, data: Split, run: Run
) -> Trace:
    """Until the last step, a loss that is not finite, or an error of the optimizer."""
    chance = torch.Generator().manual_seed(run.seed)
    batches = task.batches(data, task.batch, chance)
    bases = [group["lr"] for group in optimizer.param_groups]
    losses: list[float] = []
    seconds: list[float] = []
    for step in range(run.steps):
        for group, base in zip(optimizer.param_groups, bases, strict=True):
            group["lr"] = base * factor(step, run.steps)
        inputs, targets = task.prepare(*next(batches))
        start = time.process_time()
        try:
            optimizer.zero_grad()
            loss = task.loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
        except (RuntimeError, ValueError) as error:
            reason = f"{type(error).__name__}: {error}"
            return Trace(losses, seconds, f"step {step}: {reason}")
        seconds.append(time.process_time() - start)
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            return Trace(losses, seconds, f"step {step}: loss {losses[-1]}")
    return Trace(losses, seconds, None)


@torch.no_grad()
def evaluate(
    task: Task, model: nn.Module, split: Split
) -> tuple[float, float | None]:
    """Loss, infinite where it is not finite, and accuracy where the task has one."""
    model.eval()
    loss, right = 0.0, 0
    pieces = zip(
        split.x.split(EVALUATED_TOGETHER),
        split.y.split(EVALUATED_TOGETHER),
        strict=True,
    )
    for x, y in pieces:
        inputs, targets = task.prepare(x, y)
        outputs = model(inputs)
        loss += task.loss(outputs, targets).item() * len(x) / len(split.x)
        if task.has_accuracy:
            right += int((outputs.argmax(1) == targets).sum())
    accuracy = right / len(split.x) if task.has_accuracy else None
    return (loss if math.isfinite(loss) else math.inf), accuracy


def curve(trace: Trace) -> list[dict[str, float]]:
    """The mean loss of each window of steps, and the CPU seconds up to its end."""
    width = max(1, len(trace.losses) // CURVE_POINTS)
    points = []
    for start in range(0, len(trace.losses), width):
        losses = trace.losses[start : start + width]
        end = start + len(losses)
        spent = sum(trace.seconds[:end])
        points.append({"step": end, "loss": fmean(losses), "seconds": spent})
    return points


def on(task: Task, device: str) -> Task:
    """The same with its batches moved to a device; they are drawn where the seeds are."""

    def moved(x: Tensor, y: Tensor) -> Batch:
        inputs, targets = task.prepare(x, y)
        return inputs.to(device), targets.to(device)

    return task if device == "cpu" else replace(task, prepare=moved)


def execute(run: Run, folder: Path | None, device: str) -> dict[str, Any]:
    """In a process of its own: train, evaluate, and say how it went."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(
        True
    )  # else a run that is stuck is ten times slower
    task = on(TASKS[run.task], device)
    data = read(task.source, folder)
    torch.manual_seed(run.seed)
    model = task.build().to(device)
    optimizer = contender(run.contender).build(model, run.lr)
    trace = train(task, model, optimizer, data.train, run)
    result: dict[str, Any] = {**asdict(run), "train_loss": math.inf}
    val = held = (math.inf, None)
    if trace.error is None:
        result["train_loss"] = fmean(trace.losses[-max(1, run.steps // 10) :])
        val = evaluate(task, model, data.val)
        held = evaluate(task, model, data.held)
    return {
        **result,
        "val_loss": val[0],
        "val_accuracy": val[1],
        "held_loss": held[0],
        "held_accuracy": held[1],
        "seconds": sum(trace.seconds),
        "median_step_seconds": median(trace.seconds)
        if trace.seconds
        else None,
        "error": trace.error,
        "curve": curve(trace),
    }


# ---- The race


def end_with_parent() -> None:
    """A worker ends when the race does, even where that was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


class Runner:
    """Carries out runs in processes and keeps each result on disk as soon as it is there."""

    def __init__(
        self, partial: Path, jobs: int, data: Path | None, device: str
    ) -> None:
        self.partial, self.jobs = partial, jobs
        self.data, self.device = data, device
        self.results: dict[Run, dict[str, Any]] = {}
        if partial.exists():
            for line in partial.read_text().splitlines():
                self._keep(json.loads(line))

    def _keep(self, result: dict[str, Any]) -> None:
        names = Run.__dataclass_fields__
        self.results[Run(**{name: result[name] for name in names})] = result

    def __call__(self, runs: Sequence[Run]) -> None:
        """All that are not done yet, those of long tasks first."""
        missing = [run for run in runs if run not in self.results]
        missing.sort(key=lambda run: -TASKS[run.task].sgd_seconds * run.steps)
        # spawn: a fork would inherit torch's threads in an unknown state
        context = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(self.jobs, context, end_with_parent)
        try:
            how = self.data, self.device
            waiting = [pool.submit(execute, run, *how) for run in missing]
            for count, done in enumerate(as_completed(waiting), 1):
                result = done.result()
                with self.partial.open("a") as file:
                    print(json.dumps(result), file=file)
                self._keep(result)
                print(f"{count}/{len(waiting)} {said(result)}", flush=True)
        finally:
            pool.shutdown(cancel_futures=True)


def said(result: dict[str, Any]) -> str:
    """One run in one line."""
    head = "{task} {contender} lr {lr:g} seed {seed}: ".format_map(result)
    if result["error"]:
        return head + result["error"]
    losses = "train {train_loss:.4g} val {val_loss:.4g}".format_map(result)
    return head + losses + f", {result['seconds']:.1f} s"


def mean(results: Sequence[dict[str, Any]], name: str) -> float | None:
    """None where a run has none, as one that diverged has no accuracy."""
    values = [result[name] for result in results]
    return None if None in values else fmean(values)


def summary(
    search: list[dict[str, Any]], results: list[dict[str, Any]], lr: float
) -> dict[str, Any]:
    """A row: one contender on one task."""
    first = results[0]
    tried = sorted(result["lr"] for result in search)
    return {
        **{name: first[name] for name in ("task", "contender", "setting")},
        "lr": lr,
        "edge": bool(tried) and lr in (tried[0], tried[-1]),
        "train_loss": mean(results, "train_loss"),
        "train_losses": [result["train_loss"] for result in results],
        "held_loss": mean(results, "held_loss"),
        "held_accuracy": mean(results, "held_accuracy"),
        "ms_per_step": milliseconds(results),
        "seeds": results,
        "search": search,
    }


def milliseconds(results: list[dict[str, Any]]) -> float | None:
    """The mean and not the median, which would hide the steps that renew a preconditioner."""
    whole = [result for result in results if result["error"] is None]
    if not whole:
        return None
    return 1000 * fmean(r["seconds"] / r["steps"] for r in whole)


def race(options: argparse.Namespace, runner: Runner) -> list[dict[str, Any]]:
    """Search every learning rate, then run the seeds at the best; the rows by task and held-out loss."""
    pairs = [(t, c) for t in options.tasks for c in options.contenders]

    def run(task: str, name: str, lr: float, seed: int) -> Run:
        steps = options.steps or TASKS[task].steps
        return Run(task, name, contender(name).setting, lr, seed, steps)

    searches: dict[tuple[str, str], list[Run]] = {pair: [] for pair in pairs}
    if options.lr is None:
        for task, name in pairs:
            rival = contender(name)
            if options.lrs is not None:
                rival = replace(rival, lrs={"default": options.lrs})
            grid = rival.grid(task, options.trials)
            tried = [run(task, name, lr, options.search_seed) for lr in grid]
            searches[task, name] = tried
    runner([run for tried in searches.values() for run in tried])
    finals: dict[tuple[str, str], list[Run]] = {}
    for (task, name), tried in searches.items():
        lr = options.lr
        if lr is None:
            best = min(tried, key=lambda r: runner.results[r]["val_loss"])
            lr = best.lr
        finals[task, name] = [run(task, name, lr, s) for s in options.seeds]
    runner([run for runs in finals.values() for run in runs])
    rows = []
    for pair, runs in finals.items():
        search = [runner.results[run] for run in searches[pair]]
        results = [runner.results[run] for run in runs]
        rows.append(summary(search, results, runs[0].lr))
    place = list(TASKS).index
    return sorted(rows, key=lambda r: (place(r["task"]), r["held_loss"]))


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Of one task, by held-out loss."""
    head = "contender,lr,train loss,held-out loss,each seed,accuracy,ms/step"
    lines = [head.split(",")]
    for row in rows:
        held = [result["held_loss"] for result in row["seeds"]]
        each = " ".join(f"{loss:.4f}" for loss in held)
        accuracy, ms = row["held_accuracy"], row["ms_per_step"]
        lines.append(
            [
                row["contender"],
                f"{row['lr']:g}" + "*" * row["edge"],
                f"{row['train_loss']:.4f}",
                f"{row['held_loss']:.4f}",
                each,
                "-" if accuracy is None else f"{accuracy:.4f}",
                "-" if ms is None else f"{ms:.1f}",
            ]
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(map(str.ljust, line, widths)).rstrip() for line in lines
    )


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("tasks", nargs="*", metavar="TASK", help=", ".join(TASKS))
    add("--contenders", nargs="+", metavar="NAME", default=[*CONTENDERS])
    add("--ablation", action="store_true", help="contend one knob at a time")
    add("--trials", type=int, default=12, help="learning rates of a search")
    add("--seeds", type=int, nargs="+", default=[31, 32, 33])
    add("--search-seed", type=int, default=7)
    add("--lr", type=float, help="run the seeds with it, without a search")
    add("--lrs", type=float, nargs=2, help="the range of the search")
    add("--steps", type=int, help="instead of the task's own number")
    add("--jobs", type=int, default=2, help="runs at a time")
    add("--device", default="cpu", help="cuda: for losses, not for times")
    add("--data", type=Path, help="a folder that --export wrote")
    add("--out", type=Path, default=Path("results/races.json"))
    add("--note", default="", help="kept beside the results")
    add("--show", type=Path, nargs="+", metavar="FILE", default=[])
    add("--export", type=Path, metavar="FOLDER", help="write the data")
    options = parser.parse_args()
    if options.ablation:
        options.contenders = ABLATION
    if unknown := [name for name in options.tasks if name not in TASKS]:
        parser.error(f"no task {unknown[0]!r}; there are {', '.join(TASKS)}")
    try:
        [contender(name) for name in options.contenders]
    except (TypeError, ValueError) as error:
        parser.error(str(error))
    if not (options.tasks or options.export or options.show):
        parser.error(f"which tasks? There are {', '.join(TASKS)}")
    return options


def show(content: Mapping[str, Any]) -> None:
    """The tables of a race."""
    rows = content["rows"]
    print(f"{content['command']}\n{content['commit']}, {content['machine']}")
    for task in dict.fromkeys(row["task"] for row in rows):
        print(f"\n{task}")
        print(table([row for row in rows if row["task"] == task]))


def main() -> None:
    options = parsed()
    torch.set_num_threads(1)
    for path in options.show:
        show(json.loads(path.read_text()))
    if options.export is not None:
        export(options.export)
    if not options.tasks:
        return
    options.out.parent.mkdir(parents=True, exist_ok=True)
    partial = options.out.with_suffix(".part.jsonl")
    how = options.jobs, options.data, options.device
    rows = race(options, Runner(partial, *how))
    head = provenance(record.command(), torch.device(options.device))
    content = {**head, "note": options.note, "rows": rows}
    options.out.write_text(json.dumps(content, indent=1) + "\n")
    partial.unlink(missing_ok=True)
    show(content)


if __name__ == "__main__":
    main()
