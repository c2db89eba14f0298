"""One RL run with TLT: what happens at each of verl's hooks, and what one step hands to the next.

    sample_begin        watch for idle devices, and train the drafter there (`idle.replica_idle`)
    more_prompts        replicas that have left are called back before more prompts are sent
    sample_end          stop training (bounded), start merging in the background
    warm_up             spot workers that replaced others load their kernels
    cold_start          once in a run without a drafter: train one on all devices before RL goes on
    log_probs_done      what the tap captured goes to the spot workers
    save                write the drafter once the policy's checkpoint is on the disk
    before_sync         publish the drafter if the gate said so in time; say which replicas draft in the coming rollout
    after_sync          replicas that left rejoin; compare what the engines have loaded
    metrics             the step's numbers

Whatever fails in here costs speed only: the `Guard` contains it, and the step goes on as stock verl's.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from verl_tlt.config import TLTConfig
from verl_tlt.drafter import most_frequent
from verl_tlt.idle.failure_budget import FailureBudget
from verl_tlt.idle.replica_idle import ReplicaIdlePlanner, TrainerIdlePlanner
from verl_tlt.idle.tap_budget import TapBudget
from verl_tlt.messages.training import BufferStats
from verl_tlt.speculation.alarm import falls_short
from verl_tlt.trace.events import Session
from verl_tlt.trace.metrics import buffer_metrics
from verl_tlt.trainer.checkpoints import CHECKPOINT, POLICY, remove_halves, tidy
from verl_tlt.trainer.cold_start import SHORTEST_S, ColdStart, train_in_portions
from verl_tlt.trainer.drafter_update import DrafterUpdate, DrafterUpdates
from verl_tlt.trainer.run_setup import FirstDrafter, RunFacts
from verl_tlt.trainer.speculation_control import SpeculationControl
from verl_tlt.trainer.step_log import StepLog
from verl_tlt.trainer.waits import SILENT_S, Call, Deadline
from verl_tlt.trainer.watch import AskPending, PendingWork, PhaseReport, SamplingWatch

if TYPE_CHECKING:
    from verl_tlt.trainer.spot_workers import Fleet

logger = logging.getLogger(__name__)

SAVE_S = 600.0
"""Bound in seconds of writing a drafter: gigabytes, perhaps over a network."""
WARM_UP_S = 300.0
"""Bound in seconds of starting spot workers and tuning their kernels, before the run's first step."""
WARM_AGAIN_S = 30.0
"""Bound in seconds for workers that replace others to load their kernels, which the first ones have tuned."""


class Controller:
    """One run of RL; `fleet` is everything outside this process."""

    def __init__(
        self, tlt: TLTConfig, facts: RunFacts, start: FirstDrafter, fleet: Fleet, log: StepLog, pending_work: AskPending
    ) -> None:
        self.tlt, self.facts, self.fleet, self.log, self.clock = tlt, facts, fleet, log, log.clock
        self.guard, self._charged = log.guard, log.charged
        # The first of them try drafters and decode without; those on the trainer's devices may sleep meanwhile.
        replicas = sorted(fleet.replicas, key=lambda name: fleet.replicas[name].colocated)
        self.speculation = SpeculationControl(replicas, tlt.speculation, facts.shared, facts.active_share)
        served = replace(facts.provenance, version=start.served.version, acceptance=start.served.acceptance)
        self.updates = DrafterUpdates(fleet, tlt, served, facts.dtype, self.log)
        self._updated = 0  # the last RL step with an update of the policy
        self.spot = False
        """Whether there are spot workers, and the actor is tapped."""
        self._start, self._pending_work = start, pending_work
        self._failures = FailureBudget()
        self._untrained = "spot training has not started"  # why nobody trains in this run; empty: it was set up
        self._said_idle = False
        drafts = tlt.speculation.enable and tlt.speculation.policy != "off" and tlt.speculation.source != "ngram"
        # Engines sleep while RL waits, but for those of `separate_async`.
        self._cold = ColdStart(start.untrained and drafts and facts.rule.idle == "replicas", tlt.spot.cold_start_s)
        buffer, cold = tlt.buffer, self._cold.wanted
        self._tap = TapBudget(buffer.first_tokens, buffer.tokens_per_step is None, buffer.max_bytes, cold)
        self._watch: SamplingWatch | None = None
        self._sessions: list[Session] = []
        self._ready = self._trained = False  # of the last sampling: a worker could train; one did
        self._buffers: dict[str, BufferStats] = {}
        self._arriving: dict[str, Call[BufferStats]] = {}
        self._policies: list[Path] = []  # that verl has saved in this run
        self._tokens, self._tokens_to_choose = start.tokens_trained, 0 if start.chosen else start.draft_vocab

    def _count_failures(self, step: int) -> None:
        for failure in self.fleet.waits.failures():
            self.guard.count(failure.during, 1)
            if failure.replaced:
                self.log.worker_failed()
                self._failed(failure.replica, step, failure.during)

    def _failed(self, replica: str, step: int, error: str) -> None:
        if wait := self._failures.failed(replica, step):
            self.log.given_up(step, replica, wait, error)

    # ------------------------------------------------------------------ the run's start

    def before_first_sync(self, step: int) -> None:
        """Start spot training after `step`, before the first weight sync, which then brings the verifier weights."""
        logger.info("TLT starts from %s", self._start.origin)
        self._updated = step
        self._choose_who_drafts(step + 1)
        with self.guard("start of spot training"):
            if self.tlt.spot.enable:
                start, counts_tokens = self._start, self._tokens_to_choose > 0
                untapped = self.fleet.start_spot(start.aux_layers, start.checkpoint, counts_tokens)
                self.spot, self._untrained = untapped is None, untapped or ""
                if untapped:
                    logger.warning("the drafter is not trained in this run, and used as it is: %s", untapped)
                else:
                    self.warm_up(step, WARM_UP_S, up=False)
        self._count_failures(step)

    def warm_up(self, step: int, within_s: float = WARM_AGAIN_S, *, up: bool = True) -> None:
        """Have new spot workers rehearse while nobody else is on their devices: before the first weight sync, and, for
        those that replaced others and are `up`, when the engines sleep and the actor has not begun. A rehearsal in a
        session would delay a stop.
        """
        with self.guard("warm-up"):
            new = [name for name in self.fleet.unrehearsed(up=up) if self._failures.allows(name, step + 1)]
            if new:
                with self.log.overhead("warm-up"):  # one that is late is replaced: it must have left the device
                    self.fleet.waits.answers("warm-up", self.fleet.warm_up(new), within_s, keep=True)

    def after_first_sync(self, step: int) -> None:
        """Engines hold weights: learn what their steps cost."""
        if self.tlt.speculation.enable:
            with self.guard("calibration"):
                self.speculation.calibrated(self.fleet.calibrate())
            self._choose_who_drafts(step + 1, at_once=True)
        self.updates.since = step
        self.log.run_started(step + 1, self.tlt, self.fleet.replicas, self.facts)

    def _choose_who_drafts(self, step: int, at_once: bool = False) -> None:
        """Tell the engines who decodes the rollout of `step` without drafts, from the weight sync on or at once."""
        with self._charged("speculation control"):
            undrafted = self.speculation.undrafted(step, self.updates.served.acceptance)
            if self.tlt.speculation.enable:
                self.fleet.disable_drafting(undrafted, at_once)

    # ------------------------------------------------------------------ sampling

    def sample_begin(self, step: int) -> None:
        with self._charged("hand-over"):
            if self._arriving:  # one whose workers got nothing has new ones, which hold nothing
                arriving, self._arriving = self._arriving, {}
                self._buffers = self.fleet.waits.answers("hand-over", arriving, SILENT_S)
                self.guard.count("incomplete sequences", sum(stats.incomplete for stats in self._buffers.values()))
        self._count_failures(step)
        with self.guard("watch"):
            self._watch = SamplingWatch(
                self.fleet, self._planner(step), self._pending_work, self.tlt.spot.poll_s, self.log.trace, step,
                self.facts.rule.recall, self.clock,
            )  # fmt: skip

    def _planner(self, step: int) -> ReplicaIdlePlanner:
        ready, settle_s = self._trainable(step), self.tlt.spot.settle_s
        self._ready = bool(ready)
        if self.facts.rule.idle == "trainer":  # whose devices' replicas, if there are any, are not the balancer's
            names, begin = list(self.fleet.spot_workers), self.clock.time()
            return TrainerIdlePlanner(names, begin=begin, settle_s=settle_s, spot_workers=ready)
        names, requests = list(self.fleet.replicas), self.facts.requests
        return ReplicaIdlePlanner(names, expected_requests=requests, settle_s=settle_s, spot_workers=ready)

    def _trainable(self, step: int) -> list[str]:
        """Replicas whose spot workers may train now and have enough to train on."""
        # A merge that is late still reads and replaces the workers' weights.
        if not (self.spot and self.speculation.may_train and self.updates.under_way is None):
            return []
        supplied = {name for name, stats in self._buffers.items() if stats.train_tokens >= self.tlt.buffer.min_tokens}
        supplied -= set(self.fleet.unrehearsed())
        return [name for name in self.fleet.workers() if name in supplied and self._failures.allows(name, step)]

    def more_prompts(self) -> None:
        """The sampler is about to send more groups: replicas that have left are called back to serve them, too."""
        if self._watch is not None:
            with self._charged("recall"):
                self._watch.recall(self.tlt.spot.stop_timeout_s)

    def sample_end(self, step: int, last: bool) -> None:
        """Stop training (bounded), and start merging in the background after a step's `last` sampling.

        Asynchronous trainers may take several in a step.
        """
        with self._charged("end of sampling", "stop"):
            watch, self._watch = self._watch, None
            if watch is not None:
                self._account(step, watch.finish(self.tlt.spot.stop_timeout_s), in_bubbles=True)
        with self._charged("end of sampling", "statistics"):
            if self.tlt.speculation.enable and last:
                stats = self.fleet.engine_stats()
                self.guard.count("statistics", self.log.engine_stats(stats))
                self.guard.warn("acceptance", falls_short(stats.values(), self.updates.served.acceptance))
                off = self.speculation.off
                saved_s = self.speculation.rollout_ended(stats, [(s.start, s.end) for s in self._sessions])
                self.log.speculated(step, saved_s, self.speculation.disabled, off)
        if last:
            with self.guard("end of sampling"):
                if sessions := self._sessions:
                    self._sessions = []
                    self.updates.begin(sessions)
                token_bytes = max((s.bytes / s.tokens for s in self._buffers.values() if s.tokens), default=0.0)
                bubble_s, trained_s = self.log.observed.bubble_s, self.log.observed.bubble_trained_s
                self._tap.sampled(bubble_s, trained_s, self.log.exhausted, token_bytes)
        if self.facts.rule.recall:
            # Responses that verl aborts now are sent again within a second: to all replicas, as in stock verl.
            with self._charged("rejoin"):
                self.fleet.rejoin(list(self.fleet.replicas))

    def _account(self, step: int, report: PhaseReport, in_bubbles: bool) -> None:
        self.guard.count("watch", int(report.error is not None))
        self.guard.count("lost replica", report.account.lost)
        if in_bubbles:
            self.log.sampled(step, report)
            self._sessions += report.sessions
        else:
            self.log.trained(step, report)
        self._trained |= bool(report.sessions)
        for session in report.sessions:
            self._tokens += session.tokens
            if skipped := session.skipped:
                logger.warning("%d micro-batches on %s were left out: not finite", skipped, session.replica)
            if session.error is not None:
                self._failed(session.replica, step, session.error)
            elif self._failures.succeeded(session.replica):
                self.log.works_again(step, session.replica)

    # ------------------------------------------------------------------ the cold start

    def cold_start(self, step: int, steps_left: int) -> None:
        """Train a random head on all devices, once in a run, while the engines sleep and the actor has not begun."""
        if not (self.spot and self._cold.due()):
            return
        with self._charged("cold start"):
            self.updates.publish(step, within_s=SHORTEST_S)  # what was trained in this sampling
            if not self._trainable(step):
                return
            saving = self.speculation.saving
            if seconds := self._cold.begin(steps_left, saving):
                train, learn = partial(self._train_together, step), partial(self._learn, step)
                with self.log.phase("cold_start", step):
                    train_in_portions(self._cold, Deadline(seconds, self.clock), train, learn, saving)

    def _train_together(self, step: int, seconds: float) -> Sequence[Session]:
        if not (names := self._trainable(step)):
            return []
        planner = TrainerIdlePlanner(names, begin=self.clock.time(), settle_s=0.0, spot_workers=names)
        watch = SamplingWatch(
            self.fleet, planner, PendingWork, self.tlt.spot.poll_s, self.log.trace, step, clock=self.clock
        )  # fmt: skip
        watch.wait(seconds)
        report = watch.finish(self.tlt.spot.stop_timeout_s)
        self._account(step, report, in_bubbles=False)
        return report.sessions

    def _learn(self, step: int, sessions: Sequence[Session], within_s: float) -> DrafterUpdate | None:
        """Judge, merge and publish; None: the update is late, and published with the weight sync."""
        self.updates.begin(sessions)
        with self.guard("publish"):
            return self.updates.publish(step, within_s)
        return DrafterUpdate(failure="it was not published")

    # ------------------------------------------------------------------ inference, and the end of a step

    def log_probs_done(self, step: int) -> None:
        """Send what the tap captured to the spot workers; does not wait for the copies."""
        if not self.spot:
            return
        with self._charged("tap"):
            start = self.clock.monotonic()
            taken = self.fleet.take(self._trains_next(step), self._tap.tokens)  # every rank puts what it has in a store
            handed_s = self.clock.monotonic() - start
            self._tap.tapped(max((t.seconds for t in taken), default=0.0) + handed_s, self.clock.time())
            self.guard.count("tap", sum(t.errors for t in taken))
            counts = [t.token_counts for t in taken if t.token_counts is not None]
            if self._tokens_to_choose and counts:  # what the drafter can draft: the first rollout's most frequent
                self.fleet.choose_tokens(most_frequent(sum(counts), self._tokens_to_choose).numpy())
                self._tokens_to_choose = 0
            self._arriving = self.fleet.hand_over(step, taken)
            self.log.tapped(taken)

    def _trains_next(self, step: int) -> bool:
        """Whether the next weight sync is to bring the verifier weights; otherwise those of an earlier sync are used.

        Not while no worker may train, nor after workers were ready and no session began: there was no bubble.
        """
        trained, self._trained = self._trained, False
        allowed = any(self._failures.allows(n, step + 1) for n in self.fleet.workers())
        return allowed and (trained or not self._ready)

    def before_sync(self, step: int) -> None:
        """Publish the drafter for the weight sync to load; then say which replicas draft in the coming rollout."""
        self._updated = step
        with self._charged("publish"):
            self.updates.publish(step)
        self._choose_who_drafts(step + 1)

    def after_sync(self, step: int, colocated_asleep: bool) -> None:
        """Every engine has new weights, but for colocated replicas if they are `colocated_asleep`: all rejoin."""
        with self._charged("rejoin"):
            if self.facts.rule.idle == "replicas":
                self.fleet.rejoin(list(self.fleet.replicas))
            if self.tlt.speculation.enable:
                self._compare(step, self._serving(colocated_asleep))

    def _compare(self, step: int, serving: set[str]) -> None:
        statuses = {name: status for name, status in self.fleet.drafter_statuses().items() if name in serving}
        self.log.reloaded(step, statuses, self.updates.served.version)

    def _serving(self, colocated_asleep: bool) -> set[str]:
        return {name for name, info in self.fleet.replicas.items() if not (colocated_asleep and info.colocated)}

    def validated(self, step: int, colocated_asleep: bool) -> None:
        """A validation is over: its engine steps are not the next rollout's."""
        with self._charged("validation"):
            if self.tlt.speculation.enable:
                self.fleet.engine_stats()
                serving = self._serving(colocated_asleep)
                if self.log.reloads and not self.log.reloads.keys() >= serving:
                    self._compare(step, serving)  # verl woke replicas up for the validation

    def metrics(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        tlt: dict[str, float] = {}
        self._count_failures(step)
        with self.guard("metrics"):
            self._say_if_idle()
            observed, updates = self.log.observed, self.updates
            observed.published_version, observed.served_since = updates.served.version, updates.since
            own = buffer_metrics(self._buffers.values(), self._tap.tokens) | self._cold.news
            tlt |= self.log.finish(step, {**metrics, **own}) | own
            bubble_s = tlt.get("tlt/bubble_s", 0.0) / len(self.fleet.replicas)
            step_s, rollout_s = (metrics.get(f"timing_s/{name}", 0.0) for name in ("step", "gen"))
            self._cold.stepped(step_s, rollout_s, bubble_s)
        return tlt

    def _say_if_idle(self) -> None:
        """Count the replicas that are given up; log, once, where TLT does nothing for the run any more."""
        off = len(self._failures.off)
        self.log.observed.spot_off_replicas = off if self.spot else None
        given_up = "spot training is given up on every replica" if off >= len(self.fleet.workers()) else ""
        random = "the drafter is a random one" if self._start.untrained and not self.updates.served.version else ""
        untrained = self._untrained or given_up
        undrafted = self.speculation.undrafted_since or random
        if untrained and undrafted and not self._said_idle:
            self._said_idle = True
            logger.error("TLT does nothing for this run any more: %s, and %s", untrained, undrafted)

    # ------------------------------------------------------------------ checkpoints

    def save(self, step: int) -> None:
        """The policy's checkpoint is written: write the drafter beside it, before verl names the step to resume from.

        A drafter that does not fit on the disk is left out, and nothing of it stays there.
        """
        directory = self.facts.checkpoints / f"global_step_{step}"
        if self.spot:
            self._policies.append(directory / POLICY)
            with self._charged("save"):
                full = len(self._policies) >= self.facts.rotates > 0
                leaves = [self._policies[-self.facts.rotates]] if full else []
                calls = self._save(directory / CHECKPOINT, step, directory, *leaves)
                if not self.fleet.waits.answers("save", calls, SAVE_S, keep=True):
                    remove_halves(directory)

    def saved(self, step: int) -> None:
        """The checkpoint is complete, and verl has named its step."""
        self._count_failures(step)
        with self._charged("save"):
            tidy(self.facts.checkpoints / f"global_step_{step}", self.facts.prunes)

    def finish(self) -> None:
        """The run is over: keep the drafter as a directory that vLLM serves, and clear away the rest."""
        with self.guard("end of sampling"):
            if self._watch is not None:  # the run failed while it sampled: a session would hold up the drafter
                self._watch.finish(self.tlt.spot.stop_timeout_s)
        with self.guard("final drafter"):
            if self.spot:
                calls = self._save(Path(str(self.tlt.drafter.save_dir)), self._updated)
                self.fleet.waits.answers("final drafter", calls, SAVE_S, keep=True)
        self._count_failures(self._updated)
        self.fleet.waits.close()
        with self.guard("end of the run"):
            self.fleet.close()
        self.updates.close()

    def _save(self, directory: Path, step: int, *places: Path) -> dict[str, Call[None]]:
        provenance = replace(self.updates.served, policy_step=step, tokens_trained=self._tokens)
        return self.fleet.save(directory, provenance, *places)
