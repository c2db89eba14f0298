"""Whole RL steps, hook by hook, with plain objects and a clock on which they take no time."""

from contextlib import contextmanager

from verl_tlt.trainer.watch import POLL_S, SETTLE_S

STOP_S = 0.3
LOOKS_S = 3 * POLL_S + SETTLE_S
"""In which the fleet is looked at several times, and an idle replica has settled."""


@contextmanager
def sampling(controller, step, *, idle="b"):
    """A sampling phase: all decode, then `idle` runs dry; inside, that has been seen."""
    servers = controller.servers
    controller.sample_begin(step)
    servers.load |= dict.fromkeys(servers.replicas, 4)
    servers.clock.sleep(LOOKS_S)
    servers.load[idle] = 0
    servers.clock.sleep(LOOKS_S)
    yield
    controller.sample_end(step, last=True)
    servers.load = dict.fromkeys(servers.replicas, 0)


@contextmanager
def training(controller, step):
    """A sampling phase in which the drafter is trained; inside, that has begun."""
    with sampling(controller, step):
        assert controller.spot.session is not None
        yield


def rest_of_step(controller, step):
    """From the log-probs to the metrics, with the weight sync. Returns the metrics."""
    controller.log_probs_done(step)
    controller.before_sync(step)
    controller.servers.sync()
    controller.after_sync(step, colocated_asleep=False)
    return controller.metrics(step, {"timing_s/gen": 1.0, "timing_s/step": 2.0})


def rl_step(controller, step, seconds=0.0):
    """A whole step, whose sampling goes on for so long after `b` ran dry. Returns the metrics."""
    with sampling(controller, step):
        controller.servers.clock.sleep(seconds)
    return rest_of_step(controller, step)
