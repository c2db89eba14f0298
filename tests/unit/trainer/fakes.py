"""Plain objects in place of rollout servers, actor and spot trainer, for driving the controller through RL steps.

They keep the promises of `trainer.servers.Servers`, `trainer.spot.HiddenStates` and `SpotTrainerHandle`, and note every
call. What goes wrong is set by the test: `broken` makes a method raise, `slow` makes it take seconds, `verdict` is
what the next session says, `late` holds an export back.
"""

import math

from step_costs import step_costs

from verl_tlt.messages.rollout import DrafterFile, DrafterStatus
from verl_tlt.messages.training import BufferStats, CapturedStates, CaptureReady, SessionResult, Verdict
from verl_tlt.trainer.servers import Replica
from verl_tlt.trainer.spot import Place
from verl_tlt.trainer.waits import CallFailed

PUBLISHES = Verdict(decision="published", reason="better", publishes=True, tau={"candidate": 2.2, "served": 2.0})
KEEPS = Verdict(reason="perhaps worse", acceptance=(0.5, 0.4, 0.3), tau={"candidate": 2.0, "served": 2.0})


class Fake:
    def __init__(self, clock):
        self.clock, self.calls, self.broken, self.slow = clock, [], {}, {}

    def called(self, method):
        """The arguments of each call."""
        return [call[1:] for call in self.calls if call[0] == method]

    def _call(self, method, *args):
        self.calls.append((method, *args))
        if method in self.slow:
            self.clock.sleep(self.slow[method])
        if error := self.broken.get(method):
            raise error


class FakeServers(Fake):
    def __init__(self, names, clock, standalone=()):
        super().__init__(clock)
        self.replicas = {name: Replica(name, [] if name in standalone else [0], None, []) for name in names}
        self.stats, self.costs = {}, step_costs({k: [(1, 0.01)] for k in (0, 3)})
        self.load, self.loaded = dict.fromkeys(names, 0), dict.fromkeys(names, 0)
        self.balancer, self.disabled, self.asleep, self.staged = set(names), set(), {}, []
        self.full, self.files = set(), {}  # replicas that cannot write a drafter, and what the others have

    def inflight(self):
        if error := self.broken.get("inflight"):
            raise error
        return {name: self.load[name] for name in self.balancer}

    def leave(self, name):
        self._call("leave", name)
        self.balancer.discard(name)

    def rejoin(self, names):
        self._call("rejoin", tuple(names))
        self.balancer |= set(names)

    def try_sleep(self, name, keep_weights):
        self._call("try_sleep", name, keep_weights)
        if self.load[name]:
            return False
        self.asleep[name] = keep_weights
        return True

    def wake_up(self, name):
        self._call("wake_up", name)
        if not self.asleep.pop(name):
            raise CallFailed("it sleeps without its weights")

    def disable_drafting(self, names, at_once):
        self._call("disable_drafting", tuple(names))
        self.disabled = set(names)

    def stage(self, drafter):
        self._call("stage", drafter)
        self.staged.append(drafter)
        self.files |= {name: drafter for name in self.replicas if name not in self.full}
        return len(self.full)

    def sync(self):
        """The weight sync: everybody wakes up and loads what is staged."""
        self.asleep.clear()
        self.loaded |= self.files

    def drafter_statuses(self):
        self._call("drafter_statuses")
        return {name: DrafterStatus(version=v, ok=True) for name, v in self.loaded.items()}

    def engine_stats(self):
        self._call("engine_stats")
        return dict(self.stats)

    def calibrate(self):
        self._call("calibrate")
        return self.costs

    def tell_costs(self, costs):
        self._call("tell_costs", costs)

    def close(self):
        self._call("close")


class FakeHiddenStates(Fake):
    def __init__(self, clock, refusal=None):
        super().__init__(clock)
        self.refusal, self.token_counts = refusal, [None]

    def set_up(self, config, aux_layers, counts_tokens):
        self._call("set_up", tuple(aux_layers), counts_tokens)
        return [CaptureReady(0, "far-node", "0", self.refusal)]

    def take(self, counts):
        self._call("take")
        known = [found if counts else None for found in self.token_counts]
        return [CapturedStates(None, None, seconds=0.0, errors=0, token_counts=found) for found in known]

    def release(self):
        self._call("release")

    def stop(self):
        self._call("stop")


class FakeSpot(Fake):
    """A drafter in a file is its version."""

    def __init__(self, servers, clock):
        super().__init__(clock)
        self._servers = servers
        self.off, self.failures, self.last_failure, self.stats = "spot training has not started", [], "", None
        self.replicas, self.running, self.published, self.version = {}, False, None, 0
        self.verdict, self.late, self.exporting = None, False, False
        self.saved, self.left_out = [], 0
        self.lasts, self.ends_at = math.inf, None  # seconds after which a session's epochs are used up
        self.session = None  # the replica on whose device a session runs

    def start(self, ranks, replicas):
        self._call("start", tuple(replicas))
        self.off, self.running, self.replicas = "", True, dict.fromkeys(replicas, 0)
        self.place = Place.beside(ranks, replicas)

    def rehearse(self, within_s):
        self._call("rehearse", within_s)

    def wait_until_started(self):
        self._call("wait_until_started")

    def choose_tokens(self, ids):
        self._call("choose_tokens", ids)

    def add(self, step, captured):
        self._call("add", step)
        self.stats = BufferStats(train_tokens=8000)

    def ready(self):
        return not self.off and self.stats is not None and self.session is None

    def train(self, replica):
        self._call("train", replica)
        assert replica not in self._servers.balancer or not self._servers.load.get(replica), "the device decodes"
        self.session, self.ends_at = replica, self.clock.now + self.lasts

    def ended(self, timeout_s=0.0):
        left = self.ends_at - self.clock.now
        self.clock.sleep(min(left, timeout_s))
        return self._result("exhausted") if left <= timeout_s else None

    def stop(self, _within_s):
        self._call("stop")
        return self._result("stopped")

    def _result(self, outcome):
        verdict, self.verdict, self.session = self.verdict, None, None
        return SessionResult(outcome, steps=20, tokens=5000, verdict=verdict)

    def fail(self, during, error):
        self.failures.append(during)
        self.last_failure = error

    def export(self):
        self._call("export")
        self.exporting = True

    def exported(self):
        if not self.exporting or self.late:
            return None
        self.exporting = False
        if self.broken.get("exporting"):
            self.fail("export", "RayActorError: gone")
            return None
        self.version += 1
        self.published = self.version
        return DrafterFile(self.version, "{}", b"", (0.6, 0.6, 0.6))

    def save(self, directory, provenance, step=None, rotates=False):
        self.saved.append((directory, provenance, step, rotates))
        self._call("save", directory)

    def on_its_node(self, function, *arguments):
        self._call("on_its_node", function.__name__)
        return function(*arguments)

    def close(self):
        self._call("close")
