"""A fleet of plain objects, for driving the controller through whole RL steps: no Ray, no engines, no arrays.

It keeps the promises of `trainer.spot_workers.Fleet` and notes every call. What goes wrong is set by the test: `broken`
makes a method raise, `slow` makes it take seconds, `deaf` and `stop_s` change how sessions end, `merge_gate` holds
merges back. A candidate waits for the first session to score it, as after a merge, unless `to_judge` is unset.
"""

import threading

import numpy as np

from verl_tlt.messages.rollout import DrafterFile, DrafterStatus
from verl_tlt.messages.training import BufferStats, HeldOutScores, MergeFacts, SessionResult, TappedStates
from verl_tlt.speculation.costs.tables import LatencyTable
from verl_tlt.trace.events import TRAINER_DEVICE
from verl_tlt.trainer.servers import Replica
from verl_tlt.trainer.waits import SYSTEM, CallFailed, Deadline, Waits

K = 3


class FakeCall:
    """See `waits.Call`."""

    def __init__(self, clock=SYSTEM):
        self._event, self._value = clock.event(), None

    def end(self, value):
        self._value = value
        self._event.set()

    def done(self):
        return self._event.is_set()

    def excused(self):
        return False

    def result(self, timeout_s):
        if not self._event.wait(timeout_s):
            raise CallFailed(f"no answer within {timeout_s} s", silent=True)
        if isinstance(self._value, Exception):
            raise self._value
        return self._value


def ended(value):
    call = FakeCall()
    call.end(value)
    return call


class FakeFleet:
    """See `Fleet`."""

    untapped = None
    stop_s, to_judge, overflows = 0.0, True, False
    candidate_acceptance, served_acceptance = 0.6, 0.5

    def __init__(self, *names, clock=SYSTEM, standalone=()):
        self.clock = clock
        self.replicas = {name: Replica(name, [] if name in standalone else [0], None, []) for name in names}
        colocated = [name for name, info in self.replicas.items() if info.colocated]
        self.spot_workers = dict.fromkeys(colocated or [f"{TRAINER_DEVICE} 0"])
        self.waits = Waits(self.restart, clock)
        self.stats, self.costs = {}, LatencyTable()
        self.load, self.loaded = dict.fromkeys(names, 0), dict.fromkeys(names, 0)
        self.balancer, self.disabled, self.asleep = set(names), set(), {}
        self.broken, self.slow, self.deaf = {}, {}, set()
        self.merge_gate = threading.Event()
        self.merge_gate.set()
        self.calls, self.staged, self.saved, self.places, self.restarts, self.tap_tokens = [], [], [], [], [], []
        self.token_counts = [None]
        self.sessions, self.on_device = {}, set()
        self.warming, self.starting = {}, set()  # replicas whose workers have not rehearsed -> how it goes
        self._spot = False

    def called(self, method):
        """The arguments of each call."""
        return [call[1:] for call in self.calls if call[0] == method]

    def _call(self, method, *args):
        self.calls.append((method, *args))
        if method in self.slow:
            self.clock.sleep(self.slow[method])
        if error := self.broken.get(method):
            raise error

    # rollout servers

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
        self._call("stage", drafter.version)
        self.staged.append(drafter)

    def sync(self):
        """The weight sync: everybody wakes up and loads what is staged."""
        self.asleep.clear()
        if self.staged:
            self.loaded = dict.fromkeys(self.replicas, self.staged[-1].version)

    def drafter_statuses(self):
        self._call("drafter_statuses")
        return {name: DrafterStatus(version=v, ok=True) for name, v in self.loaded.items()}

    def engine_stats(self):
        self._call("engine_stats")
        return dict(self.stats)

    def calibrate(self):
        self._call("calibrate")
        return self.costs

    def close(self):
        self._call("close")

    # actor and spot workers

    def start_spot(self, aux_layers, resume_from, counts_tokens):
        self._call("start_spot", aux_layers, resume_from, counts_tokens)
        self._spot = self.untapped is None
        return self.untapped

    def workers(self):
        return list(self.spot_workers) if self._spot else []

    def take(self, train_next, tokens):
        self._call("take", train_next)
        self.tap_tokens.append(tokens)
        return [TappedStates((), None, seconds=0.0, errors=0, token_counts=found) for found in self.token_counts]

    def choose_tokens(self, draft_ids):
        self._call("choose_tokens", draft_ids)

    def hand_over(self, step, taken):
        self._call("hand_over", step)
        stats = BufferStats(sequences=4, tokens=9000, train_tokens=8000, bytes=1000)
        return {name: ended(stats) for name in self.workers()}

    def unrehearsed(self, *, up=False):
        return [name for name in self.warming if not (up and name in self.starting)]

    def warm_up(self, names):
        self._call("warm_up", tuple(names))
        return {name: self.warming.pop(name) for name in names}

    def train(self, name):
        self._call("train", name)
        assert name in self.asleep or not self.load.get(name), "it trains on a device that decodes"
        self.on_device.add(name)
        call = self.sessions[name] = FakeCall(self.clock)
        if error := self.broken.get(f"session of {name}"):
            call.end(error)
        return call

    def stop(self, name):
        self._call("stop", name)
        if name not in self.deaf:
            self.clock.later(self.stop_s, lambda: self._end(name)) if self.stop_s else self._end(name)

    def _end(self, name):
        """A session begins with the scores of what was merged before it."""
        scores = self._scores() if self.to_judge else None
        self.to_judge = False
        self.on_device.discard(name)
        self.sessions[name].end(SessionResult("stopped", steps=20, tokens=5000, scores=scores))

    def restart(self, names):
        self.restarts += names
        self.on_device -= set(names)

    def first_done(self, calls, timeout_s):
        deadline = Deadline(timeout_s, self.clock)
        while not (done := [name for name, call in calls.items() if call.done()]) and deadline.left() > 0:
            self.clock.event().wait(0.001)
        return done

    def merge(self, names):
        self._call("merge", tuple(names))
        assert self.merge_gate.wait(30)
        self.to_judge = True
        return MergeFacts(tokens=5000, included=tuple(names))

    def _scores(self):
        rng = np.random.default_rng(0)
        positions = np.full(40, 1000)  # [S]

        def counts(acceptance):
            tau = sum(acceptance**i for i in range(K + 1))
            drafts = positions / tau * (1 + 0.001 * rng.standard_normal(len(positions)))
            return np.stack([drafts * acceptance**i for i in range(K + 1)], axis=1)  # [S, 1+K]

        served = counts(self.served_acceptance)
        return HeldOutScores(np.arange(40), positions, counts(self.candidate_acceptance), served, served)

    def keep_as_served(self):
        self._call("keep_as_served")

    def revert(self, which):
        self._call("revert", which)

    def export(self, version, dtype, acceptance):
        self._call("export", version)
        return None if self.overflows else DrafterFile(version, "{}", b"", tuple(acceptance))

    def save(self, directory, provenance, *places):
        self._call("save", directory)
        self.saved.append((directory, provenance))
        self.places.append(places)
        return {self.workers()[0]: ended(self.broken.get("writing"))}
