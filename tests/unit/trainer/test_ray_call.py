"""What Ray's errors mean for the actor that was called."""

import pytest

from verl_tlt.trainer.ray_calls import is_dead

errors = pytest.importorskip("ray").exceptions


@pytest.mark.parametrize("error", [errors.ActorDiedError(), errors.OutOfMemoryError("killed by the memory monitor")])
def test_an_actor_that_was_killed_is_dead(error):
    assert is_dead(error)


@pytest.mark.parametrize(
    "error", [errors.GetTimeoutError(), errors.ObjectStoreFullError(), errors.RayTaskError("f", "", OSError())]
)
def test_one_that_raised_or_is_slow_is_not(error):
    assert not is_dead(error)
