"""Whole RL steps, hook by hook, with a fleet of plain objects and a clock on which they take no time."""

import concurrent.futures
from contextlib import contextmanager

STOP_S, POLL_S = 0.3, 0.005
LOOKS_S = 50 * POLL_S
"""In which the fleet is looked at several times, however long nothing has changed."""


@contextmanager
def sampling(controller, fleet, step, *, idle="b"):
    """A sampling phase: all decode, then `idle` runs dry; inside, that has been seen."""
    controller.sample_begin(step)
    fleet.load |= dict.fromkeys(fleet.replicas, 4)
    fleet.clock.sleep(LOOKS_S)
    fleet.load[idle] = 0
    fleet.clock.sleep(LOOKS_S)
    yield
    controller.sample_end(step, last=True)
    fleet.load = dict.fromkeys(fleet.replicas, 0)


def sampled(controller, step):
    """A sampling phase without a bubble."""
    controller.sample_begin(step)
    controller.sample_end(step, last=True)


@contextmanager
def training(controller, fleet, step):
    """A sampling phase in which somebody trains; inside, that has begun."""
    trained = len(fleet.called("train"))
    with sampling(controller, fleet, step):
        fleet.clock.until(lambda: len(fleet.called("train")) > trained)
        yield


def train(controller, fleet, step):
    with training(controller, fleet, step):
        pass


def merged(controller):
    """Wait for what merges in the background."""
    if controller.updates.under_way is not None:
        concurrent.futures.wait([controller.updates.under_way], timeout=60)


def rest_of_step(controller, fleet, step, wait=True, step_s=2.0):
    """From the log-probs to the metrics; the weight sync lies in it. Returns the metrics, by which it took `step_s`."""
    controller.log_probs_done(step)
    if wait:
        merged(controller)
    controller.before_sync(step)
    fleet.sync()
    controller.after_sync(step, colocated_asleep=False)
    return controller.metrics(step, {"timing_s/gen": 1.0, "timing_s/step": step_s})


def rl_step(controller, fleet, step, seconds=0.0):
    """A whole step, whose sampling goes on for so long after `b` ran dry. Returns the metrics."""
    with sampling(controller, fleet, step):
        fleet.clock.sleep(seconds)
    return rest_of_step(controller, fleet, step)


def trained_step(controller, fleet, step):
    """One in whose sampling somebody trains. Returns the metrics."""
    train(controller, fleet, step)
    assert fleet.on_device == set(), "a guest is on the device when the actor comes"
    return rest_of_step(controller, fleet, step)
