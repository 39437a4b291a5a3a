"""A thousand steps of random interleavings: nothing is lost, nothing leaks, and the result is that of the plain loop.

Beside the machine runs a plain loop that sees only what counts: the micro-batches of the steps that were taken. The parameters
of the two must stay equal, whatever happens in between: evaluations, skipped steps, checkpoints, copies, new parameter groups.
"""

import copy
import gc
import io
import tracemalloc
from collections import Counter

import naive
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from torch import nn

import seng
from seng.tell.inspection import inspect

REFRESH_EVERY = 3
LATER = ("bias", "weight")  # of the last layer, one group each
AT_REST = (
    "checkpoint_and_resume",
    "add_param_group",
    "deepcopy",
)  # between steps, not between micro-batches
KINDS = (
    *AT_REST,
    "accumulate",
    "forward_in_between",
    "skipped_amp_step",
    "zero_grad_without_a_step",
)


def network() -> nn.Module:
    torch.manual_seed(0)
    convolution, norm = nn.Conv1d(2, 3, 2), nn.BatchNorm1d(3)
    return nn.Sequential(
        convolution,
        norm,
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(9, 4),
        nn.ReLU(inplace=True),
        nn.Linear(4, 2),
    )


class Side:
    """A model, its optimizer and a GradScaler."""

    def __init__(self, scaled: bool) -> None:
        self.model = network()
        self.optimizer = self.build()
        self.scaler = torch.amp.GradScaler(
            "cpu", init_scale=256.0, growth_interval=7, enabled=scaled
        )

    def build(self) -> seng.SENG:
        first = [p for i in (0, 1, 4) for p in self.model[i].parameters()]
        options = {
            "lr": 0.02,
            "weight_decay": 1e-3,
            "refresh_every": REFRESH_EVERY,
            "damping": 0.3,
        }
        # An absolute λ: a relative one would not see a wrong scale.
        return seng.SENG(
            first,
            module=self.model,
            curvature=seng.Curvature(rank=4, relative_damping=False),
            **options,
        )

    def backward(self, seed: int, size: int, share: float) -> None:
        generator = torch.Generator().manual_seed(seed)
        x, target = (
            torch.randn(size, 2, 4, generator=generator),
            torch.randn(size, 2, generator=generator),
        )
        self.scaler.scale(
            share * naive.loss_of(self.model(x), target)
        ).backward()

    def step(self) -> None:
        before = inspect(self.optimizer).steps
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if inspect(self.optimizer).steps > before:  # not skipped
            assert inspect(self.optimizer).waiting == 0
        self.optimizer.zero_grad()

    def join(self, name: str) -> None:
        self.optimizer.add_param_group(
            {"params": [getattr(self.model[6], name)], "lr": 0.01}
        )

    def values(self) -> torch.Tensor:
        return naive.flat([p.detach() for p in self.model.parameters()])


class Interleavings(RuleBasedStateMachine):
    steps = runs = 0  # of all machines
    events: Counter[str] = Counter()  # noqa: RUF012  on optimizers that had curvature
    tensors: dict[int, int] = {}  # noqa: RUF012  groups -> bytes of tensors alive in a machine at rest; the same whatever its history
    held: list[Counter[str]] = []  # noqa: RUF012  what tracemalloc holds for the library at rest

    @initialize()
    def start(self) -> None:
        gc.collect()
        self.before = live_tensors()
        self.side, self.plain = Side(scaled=True), Side(scaled=False)
        self.waiting: list[
            tuple[int, int]
        ] = []  # micro-batches of the coming step: seed and size
        self.joined = 0
        self.seed = 0

    @rule(
        events=st.lists(st.sampled_from(KINDS), max_size=3),
        size=st.integers(1, 5),
        clip=st.booleans(),
    )
    def round(self, events: list[str], size: int, clip: bool) -> None:
        """What happens before a step, and the step."""
        for kind in events:
            if (self.waiting and kind in AT_REST) or (
                kind == "add_param_group" and self.joined == len(LATER)
            ):
                continue
            Interleavings.events[kind] += bool(
                inspect(self.side.optimizer).states
            )
            getattr(self, kind)(
                *(
                    (size,)
                    if kind in ("accumulate", "forward_in_between")
                    else ()
                )
            )
        self.step(size, clip)

    def accumulate(self, size: int) -> None:
        self.seed += 1
        self.waiting.append((self.seed, size))
        self.side.backward(self.seed, size, 0.5)

    def step(self, size: int, clip: bool) -> None:
        self.accumulate(size)
        for seed, count in self.waiting:
            self.plain.backward(seed, count, 0.5)
        for side in (self.side, self.plain):
            if clip:
                side.scaler.unscale_(side.optimizer)
                nn.utils.clip_grad_norm_(
                    [
                        p
                        for g in side.optimizer.param_groups
                        for p in g["params"]
                    ],
                    1.0,
                )
            side.step()
        self.waiting = []
        Interleavings.steps += 1
        assert self.side.values().isfinite().all()
        assert (
            naive.relative_error(self.side.values(), self.plain.values())
            < 1e-9
        )

    def forward_in_between(self, size: int) -> None:
        self.side.model.train(size % 2 == 0)
        with torch.set_grad_enabled(size > 2):
            self.side.model(torch.randn(size + 1, 2, 4))
        self.side.model.train()

    def skipped_amp_step(self) -> None:
        scale, drop = (
            self.side.scaler.get_scale(),
            ("optimizer", "model", "zeros")[self.seed % 3],
        )
        self.side.backward(0, 3, float("nan" if self.seed % 2 else "inf"))
        self.side.scaler.step(self.side.optimizer)
        self.side.scaler.update()
        assert self.side.scaler.get_scale() < scale
        self.waiting = []  # their gradients are lost with it
        if drop == "optimizer":
            self.side.optimizer.zero_grad()
        else:
            self.side.model.zero_grad(set_to_none=drop == "model")

    def zero_grad_without_a_step(self) -> None:
        self.side.backward(0, 2, 1.0)
        self.side.optimizer.zero_grad()
        self.waiting = []

    def checkpoint_and_resume(self) -> None:
        buffer = io.BytesIO()
        saved = {
            "model": self.side.model,
            "optimizer": self.side.optimizer,
            "scaler": self.side.scaler,
        }
        torch.save(
            {name: part.state_dict() for name, part in saved.items()}, buffer
        )
        buffer.seek(0)
        state = torch.load(buffer, weights_only=True)
        self.side = Side(scaled=True)
        for name in LATER[: self.joined]:
            self.side.join(name)
        self.side.model.load_state_dict(state["model"])
        self.side.optimizer.load_state_dict(state["optimizer"])
        self.side.scaler.load_state_dict(state["scaler"])

    def add_param_group(self) -> None:
        for side in (self.side, self.plain):
            side.optimizer.zero_grad()
            side.model.zero_grad()
            side.join(LATER[self.joined])
        self.joined += 1

    def deepcopy(self) -> None:
        self.side.optimizer.zero_grad()
        self.side.model, self.side.optimizer = copy.deepcopy(
            (self.side.model, self.side.optimizer)
        )

    @invariant()
    def nothing_waits_unless_a_refresh_is_due(self) -> None:
        if hasattr(self, "side") and not self.side.optimizer.refresh_due:
            assert inspect(self.side.optimizer).waiting == 0

    def teardown(self) -> None:
        if not hasattr(self, "side"):
            return
        self.zero_grad_without_a_step()
        for _ in range(
            2 * REFRESH_EVERY
        ):  # full blocks, and no refresh pending
            self.step(5, False)
        self.side.model.zero_grad()
        self.plain.model.zero_grad()
        gc.collect()
        alive = live_tensors() - self.before
        assert Interleavings.tensors.setdefault(self.joined, alive) == alive
        Interleavings.runs += 1
        if Interleavings.runs % 6 == 0:
            Interleavings.held.append(held_by_the_library())
        del self.side, self.plain
        gc.collect()
        assert live_tensors() <= self.before


def live_tensors() -> int:
    """The bytes of all tensors; those of which only a part is in use count whole, and shared ones once."""
    storages = [
        o.untyped_storage()
        for o in gc.get_objects()
        if issubclass(type(o), torch.Tensor)
    ]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


def held_by_the_library() -> Counter[str]:
    """Objects that are there, by the line of ours that made them."""
    ours = tracemalloc.take_snapshot().filter_traces(
        [tracemalloc.Filter(True, f"{seng.__path__[0]}/*")]
    )
    return Counter(
        {
            str(entry.traceback): entry.count
            for entry in ours.statistics("lineno")
        }
    )


def grown(before: Counter[str], after: Counter[str]) -> list[tuple[str, int]]:
    """Lines of which there are ever more objects; Python and torch keep some for later use, a hundred at most."""
    return [
        (line, count)
        for line, count in (after - before).items()
        if count >= 200
    ]


def test_a_thousand_steps_of_random_interleavings():
    gc.collect()
    gc.freeze()  # what is here already is not looked at again
    tracemalloc.start()
    try:
        run_state_machine_as_test(
            Interleavings,
            settings=settings(
                max_examples=30,
                stateful_step_count=40,
                deadline=None,
                derandomize=True,
                database=None,
                phases=[
                    Phase.generate
                ],  # a failure of sixty steps is short enough to read
                suppress_health_check=list(HealthCheck),
            ),
        )
    finally:
        tracemalloc.stop()
        gc.unfreeze()
    assert Interleavings.steps >= 1000
    assert all(
        Interleavings.events[kind]
        >= (20 if kind == "add_param_group" else 100)
        for kind in KINDS
    ), Interleavings.events
    first, *later = Interleavings.held
    assert len(later) >= 4 and not grown(first, later[-1])


def test_one_optimizer_holds_no_more_after_a_thousand_steps():
    side, held = Side(scaled=True), []
    gc.collect()
    gc.freeze()
    tracemalloc.start()
    try:
        for i in range(1000):
            if i % 11 == 5:
                side.backward(0, 3, float("inf"))
                side.step()  # which is skipped
            if i % 7 == 3:
                side.backward(i, 2, 0.5)
            if i % 5 == 2:
                side.model(torch.randn(3, 2, 4))
            side.backward(i, 4, 0.5)
            side.step()
            assert inspect(side.optimizer).waiting == 0
            if i in (198, 999):  # at the same distance from a refresh
                gc.collect()
                held.append((live_tensors(), held_by_the_library()))
    finally:
        tracemalloc.stop()
        gc.unfreeze()
    assert (
        inspect(side.optimizer).steps == 1000
        and side.values().isfinite().all()
    )
    tensors, objects = zip(*held, strict=True)
    assert tensors[0] == tensors[1] and not grown(
        *objects
    )  # a number kept per step would be 800
