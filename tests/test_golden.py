"""Every method goes where it went when its golden file was written: tests/trajectories.py says how."""

import warnings

import pytest
import trajectories
from trajectories import (
    FITS,
    METHODS,
    MODELS,
    RANKS,
    TOLERANCE,
    difference,
    read,
)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("method", METHODS)
def test_a_method_repeats_its_trajectory(method, model):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = trajectories.trajectory(model, METHODS[method])
    assert difference(found, read(method)[model]) < TOLERANCE


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("fit", FITS)
def test_least_squares_repeats_its_trajectory(fit, model):
    assert (
        difference(trajectories.fit(model, FITS[fit]), read(fit)[model])
        < TOLERANCE
    )


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("method", RANKS)
def test_two_ranks_repeat_their_trajectory(method, model, two):
    found = two(trajectories.on_rank, method, model)[0]
    assert difference(found, read(method)[model]) < TOLERANCE


def test_a_trajectory_that_differs_is_seen():
    other = trajectories.trajectory(
        "mlp", trajectories.default(0.05 * (1 + 1e-8))
    )
    assert difference(other, read("default")["mlp"]) > TOLERANCE


def test_every_file_belongs_to_a_method():
    assert {path.stem for path in trajectories.FOLDER.glob("*.json")} == {
        *METHODS,
        *FITS,
        *RANKS,
    }
