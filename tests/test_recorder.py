"""Recordings, with a stand-in for CUDA graphs that runs the function again into the same buffers: seng/gpu/recorder.py."""

from dataclasses import dataclass, field, replace
from operator import is_

import pytest
import torch
from torch import Tensor

from seng.gpu import recorder
from seng.gpu.recorder import Recorder, Replay, directly, settle, write
from seng.linalg.centred import Centred
from seng.linalg.implicit import Implicit
from seng.linalg.lookup import Lookup
from seng.linalg.operators import Explicit
from seng.linalg.sketch import IDENTITY
from seng.metrics.woodbury import LowRankState

CPU = torch.device("cpu")


class Again:
    """A stand-in graph: what was recorded is run again."""

    def __init__(self, device, run, pool):
        self.replay = run


class Counted:
    """A function, and how often Python has run it."""

    def __init__(self):
        self.calls = 0

    def __call__(self, X, y, by):
        self.calls += 1
        return X @ y, by * X


def numbers(i, rows=4):
    X = torch.full((4, rows), float(i)) + torch.arange(4.0)[:, None]
    return X.T, torch.arange(4.0) + i


def graphs(recorder):
    return [known.graph for known in recorder.recordings.values()]


def test_it_records_at_the_second_call_and_replays_with_other_numbers():
    run, function = Recorder(CPU, Again), Counted()
    kept = []
    for i in range(4):
        X, y = numbers(i)
        kept += zip(run(function, X, y, by=2.0), (X @ y, 2 * X), strict=True)
        assert (graphs(run) == [None]) == (i == 0)
    for got, want in kept:  # the results of earlier calls are still there
        torch.testing.assert_close(got, want)
        got.zero_()  # and the caller's to change
    X, y = numbers(9)
    torch.testing.assert_close(run(function, X, y, by=2.0), [X @ y, 2 * X])


def test_a_recording_reads_inputs_of_its_own():
    run, function = Recorder(CPU, Again), Counted()
    given = [numbers(i) for i in range(3)]
    for X, y in given:
        run(function, X, y, by=1.0)
    for i, (X, y) in enumerate(given):
        assert torch.equal(X, numbers(i)[0]) and torch.equal(y, numbers(i)[1])


def test_other_shapes_strides_and_constants_have_recordings_of_their_own():
    run, function = Recorder(CPU, Again), Counted()
    X, y = numbers(1)
    calls = [
        (X, y, 1.0),
        (*numbers(1, 6), 1.0),
        (X.contiguous(), y, 1.0),
        (X, y, 2.0),
    ]
    for _ in range(3):
        for X, y, by in calls:
            torch.testing.assert_close(
                run(function, X, y, by=by), [X @ y, by * X]
            )
    assert len(run.recordings) == 4 and None not in graphs(run)
    assert run(Counted(), *numbers(1), by=1.0) and len(run.recordings) == 5


def test_operators_are_taken_apart():
    run = Recorder(CPU, Again)
    for i in range(4):
        U = Explicit(torch.arange(6.0).view(3, 2) + i, (1, 3, 1))
        (K,) = run(lambda_free, U)
        torch.testing.assert_close(K, U.gram())
    assert None not in graphs(run)
    other = Explicit(torch.ones(3, 2), (1, 1, 3))
    run(lambda_free, other)
    assert len(run.recordings) == 2


def test_operators_inside_operators_are_taken_apart():
    run = Recorder(CPU, Again)
    roots = torch.full((4,), 0.5)
    for i in range(4):
        draw = torch.Generator().manual_seed(i)
        G = torch.randn(4, 1, 3, 2, generator=draw)
        A = torch.randn(4, 1, 5, 2, generator=draw)
        U = Centred(Implicit(G, A), roots)
        (K,) = run(lambda_free, U)
        columns = U.explicit().U
        torch.testing.assert_close(K, columns.T @ columns)
    assert len(run.recordings) == 1 and None not in graphs(run)
    run(lambda_free, U.U)
    run(lambda_free, Centred(U.explicit(), roots))
    assert len(run.recordings) == 3


def test_a_centred_state_settles_whole():
    found = []
    for i in range(2):
        G = torch.full((4, 1, 3, 2), 1.0 + i)
        A = torch.full((4, 1, 5, 2), 2.0 + i)
        U = Centred(Implicit(G, A), torch.full((4,), 0.5 - i / 10))
        gram = torch.eye(4) + i
        found.append(LowRankState(U, IDENTITY, gram, gram[0, 0], True))
    old, new = found
    places = old.tensors()  # G, A, s, the Gram and its largest eigenvalue
    assert len(places) == 5 and settle(old, new) is old
    assert all(map(is_, old.tensors(), places))
    for place, t in zip(places, new.tensors(), strict=True):
        assert torch.equal(place, t)
    plain = replace(new, U=new.U.U)
    assert settle(old, plain) is plain


def lambda_free(U):
    return (U.gram(),)


def test_what_waits_for_the_device_and_what_lies_elsewhere_is_run():
    run = Recorder(CPU, Again)
    U = Lookup(torch.tensor([[0, 1]]), torch.ones(1, 2, 3), 4)
    about_mean = Centred(U, torch.full((1,), 0.5))
    for _ in range(3):
        torch.testing.assert_close(run(lambda_free, U), [U.gram()])
        (K,) = run(lambda_free, about_mean)
        torch.testing.assert_close(K, about_mean.gram())
        run(Counted(), *(t.to("meta") for t in numbers(1)), by=1.0)
    assert not run.recordings


def test_what_is_too_large_is_run(monkeypatch):
    monkeypatch.setattr(recorder, "LARGE", 256)
    run, function = Recorder(CPU, Again), Counted()
    X, y = numbers(1)
    for i in range(3):
        torch.testing.assert_close(run(function, X, y, by=2.0), [X @ y, 2 * X])
        assert function.calls == i + 1 and graphs(run) == [None]


def test_recordings_are_let_go_of(monkeypatch):
    run, function = Recorder(CPU, Again), Counted()
    for i in range(2):
        run(function, *numbers(i), by=1.0)
    run.forget()
    assert not run.recordings and not run.arena.numel()
    X, y = numbers(5)
    torch.testing.assert_close(run(function, X, y, by=1.0), [X @ y, X])
    assert graphs(run) == [None]
    monkeypatch.setattr(recorder, "MOST", 3)
    for by in range(7):  # shapes that keep changing
        run(function, X, y, by=float(by))
        assert len(run.recordings) <= 3


def test_where_a_recording_has_no_memory_the_function_is_run():
    tries = []

    def full(device, run, pool):
        tries.append(run)
        raise torch.OutOfMemoryError("CUDA out of memory")

    run, function = Recorder(CPU, full), Counted()
    for i in range(4):
        X, y = numbers(i)
        torch.testing.assert_close(run(function, X, y, by=2.0), [X @ y, 2 * X])
    assert len(tries) == 1


def test_a_larger_recording_takes_a_larger_arena_and_the_others_stay():
    run, function = Recorder(CPU, Again), Counted()
    small, large = numbers(1), numbers(2, 4000)
    for X, y in (small, small, large, large, small):
        torch.testing.assert_close(run(function, X, y, by=2.0), [X @ y, 2 * X])
    assert None not in graphs(run)


def test_without_a_gpu_nothing_is_recorded():
    run, function = Recorder(CPU), Counted()
    for _ in range(3):
        run(function, *numbers(1), by=1.0)
    assert not run.recordings and function.calls == 3
    X, y = numbers(1)
    torch.testing.assert_close(
        directly(function, X, y, by=3.0), [X @ y, 3 * X]
    )


@dataclass(frozen=True)
class Inner:
    s: Tensor
    name: str = "inner"


@dataclass(frozen=True)
class Value:
    X: Tensor
    inner: Inner
    more: tuple[Inner | Tensor, ...] = ()
    power: float = 0.5
    listed: list[Tensor] = field(default_factory=list)


def value(fill: float, **changes: object) -> Value:
    parts = {
        "X": torch.full((3, 2), fill),
        "inner": Inner(torch.full((2,), fill, dtype=torch.float32)),
        "more": (Inner(torch.full((4,), fill)), torch.full((), fill)),
        "listed": [torch.full((1,), fill)],
    }
    return Value(**(parts | changes))


def tensors(v: Value) -> list[Tensor]:
    return [v.X, v.inner.s, v.more[0].s, v.more[1], *v.listed]


def test_a_value_settles_at_the_addresses_of_the_old_one():
    old, new = value(1.0), value(2.0)
    before = tensors(old)
    assert settle(old, new) is old
    for place, t, same in zip(tensors(old), tensors(new), before, strict=True):
        assert place is same and (t == 2).all() and (place == 2).all()


def test_tensors_that_are_the_same_object_are_not_copied(monkeypatch):
    copied = []
    monkeypatch.setattr(
        recorder, "write", lambda pairs: (copied.extend(pairs), write(pairs))
    )
    old = value(1.0)
    new = value(2.0, X=old.X)
    assert settle(old, new) is old
    assert len(copied) == 4 and (old.X == 1).all() and (old.inner.s == 2).all()


@pytest.mark.parametrize(
    "changes",
    [
        {"X": torch.ones(2, 3)},
        {"X": torch.ones(2, 3).T},
        {"X": torch.ones(3, 2, dtype=torch.float16)},
        {"X": torch.ones(3, 2, device="meta")},
        {"inner": Inner(torch.ones(2, dtype=torch.float32), "other")},
        {"inner": None},
        {"more": ()},
        {"power": 0.25},
        {"listed": [torch.ones(1), torch.ones(1)]},
        {"listed": (torch.ones(1),)},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_value_of_another_kind_is_the_new_one(changes):
    old, new = value(1.0), value(2.0, **changes)
    assert settle(old, new) is new
    assert all((t == 1).all() for t in tensors(old))


def test_without_an_old_value_the_new_one_stays():
    new = value(2.0)
    assert settle(None, new) is new


def test_launches_are_recorded_at_the_second_time_with_the_same_key():
    made, run = [], []

    def make(device, launch, pool):
        made.append(launch)
        return Again(device, launch, pool)

    replay = Replay(CPU, make)
    for i, key in enumerate(("a", "a", "a", "b", "b", "a")):
        replay(lambda: run.append(0), key)
        assert len(run) == i + 1
        assert (replay.graph is not None) == (i in (1, 2, 4))
    assert len(made) == 2


def test_without_memory_for_a_recording_launches_go_on():
    run = []

    def full(device, launch, pool):
        raise torch.OutOfMemoryError("CUDA out of memory")

    replay = Replay(CPU, full)
    for _ in range(4):
        replay(lambda: run.append(0))
    assert len(run) == 4 and replay.graph is None
