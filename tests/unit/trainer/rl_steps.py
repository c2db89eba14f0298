"""Whole RL steps, hook by hook, with a fleet of plain objects."""

import time
from contextlib import contextmanager

from verl_tlt.messages.rollout import DrafterFile

FIRST = DrafterFile(0, "{}", b"", "f0", (0.0, 0.0, 0.0))
STOP_S = 0.3


def until(condition, seconds=120.0):
    deadline = time.time() + seconds
    while not condition():
        assert time.time() < deadline, "it did not happen in time"
        time.sleep(0.002)


@contextmanager
def sampling(controller, fleet, step, *, idle="b"):
    """A sampling phase: both decode, then `idle` runs dry; inside, `a` still decodes."""
    controller.sample_begin(step)
    fleet.load |= dict.fromkeys(fleet.places, 4)
    until(lambda: controller._watch._load == fleet.load)
    fleet.load[idle] = 0
    yield
    controller.sample_end(step, last=True)
    fleet.load = dict.fromkeys(fleet.places, 0)


def rest_of_step(controller, fleet, step, merged=True):
    """From the log-probs to the metrics; the weight sync lies in it. Returns the metrics."""
    controller.log_probs_done(step)
    if merged and controller._merging is not None:
        until(controller._merging.done)
    controller.before_sync(step)
    fleet.sync()
    controller.after_sync(step, colocated_asleep=False)
    return controller.metrics(step, {"timing_s/gen": 1.0})


def fill_buffers(controller, fleet):
    """A first step, whose log-probs fill the buffers."""
    with sampling(controller, fleet, 1):
        pass
    return rest_of_step(controller, fleet, 1)


def called(fleet, method):
    return [call[1:] for call in fleet.calls if call[0] == method]
