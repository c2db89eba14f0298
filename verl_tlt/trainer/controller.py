"""The story of one RL step with TLT: what happens at each of verl's hooks, in order.

Whatever fails in here costs speed only: the `Guard` contains it, and the step goes on as stock verl's.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from verl_tlt.config import TLTConfig
from verl_tlt.drafter import most_frequent
from verl_tlt.files.disk import CONFIG
from verl_tlt.idle.planner import IdlePlanner, TrainerIdlePlanner
from verl_tlt.messages.rollout import DrafterFile
from verl_tlt.messages.training import DrafterProvenance, SessionResult, Verdict
from verl_tlt.speculation.alarm import falls_short
from verl_tlt.speculation.costs import LatencyTable
from verl_tlt.speculation.off import OffDecision, saved_estimate_s
from verl_tlt.trace.events import TRAINER_DEVICE, Session
from verl_tlt.trainer.checkpoints import CHECKPOINT, holds_drafter, remove_halves, tidy
from verl_tlt.trainer.pending_work import AskPending
from verl_tlt.trainer.run_setup import FirstDrafter, RunFacts
from verl_tlt.trainer.servers import Servers
from verl_tlt.trainer.spot import HiddenStates, SpotTrainerHandle
from verl_tlt.trainer.step_log import StepLog
from verl_tlt.trainer.waits import CallFailed
from verl_tlt.trainer.watch import SETTLE_S, PhaseReport, SamplingWatch

logger = logging.getLogger(__name__)

WARM_UP_S = 300.0
"""Bound in seconds of tuning the kernels of a session, before the run's first step."""
COLD_START_STEPS = 2
"""RL steps whose hidden states a cold start needs: fewer hold too little, and the drafter learns them by heart."""
COLD_START_TRAINS = 0.75
"""Share of a cold start after which its second session begins, which scores what the first one taught."""


class Controller:
    """One run of RL: what the RL trainer asks of rollout servers, actor and spot trainer, and when."""

    def __init__(
        self,
        tlt: TLTConfig,
        facts: RunFacts,
        start: FirstDrafter,
        servers: Servers,
        hidden_states: HiddenStates,
        spot: SpotTrainerHandle,
        log: StepLog,
        pending_work: AskPending,
    ) -> None:
        self.tlt = tlt
        self.facts = facts
        self.servers = servers
        self.hidden_states = hidden_states
        self.spot = spot
        self.log = log
        self.guard = log.guard
        self._charged = log.charged
        self._start = start
        self._pending_work = pending_work
        # The first of them try drafters and decode without; those on the trainer's devices may sleep meanwhile.
        replicas = sorted(servers.replicas, key=lambda name: servers.replicas[name].colocated)
        self.speculation = OffDecision(replicas, tlt.speculation.policy, tlt.speculation.source)
        self.served: DrafterProvenance = replace(
            facts.provenance, version=start.served.version, acceptance=start.served.acceptance
        )
        self._to_publish: DrafterFile | None = None  # without its weights
        self._verdict: Verdict | None = None  # of this step, not in the trace yet
        self._updated = 0  # the last RL step with an update of the policy
        self._watch: SamplingWatch | None = None
        self._handed_over = 0  # RL steps whose hidden states went to the spot trainer
        self._tokens = start.tokens_trained
        self._tokens_to_choose = 0 if start.chosen else start.draft_vocab
        self._saves = 0
        drafts = tlt.speculation.enable and tlt.speculation.source != "ngram"
        # In `separate_async` engines decode all the time, so that there is nothing to stop.
        stops = facts.rule.idle == "replicas" and facts.cold_start_s > 0
        self._cold_start_due = start.served.untrained and drafts and stops
        self._captures = False  # the actor copies hidden states

    # ------------------------------------------------------------------ on_init_end: before and after the first sync

    def before_first_sync(self, step: int) -> None:
        """Start the spot trainer after `step`. The first weight sync then brings the policy's embedding and head."""
        logger.info("TLT starts from %s", self._start.origin)
        self._updated = step
        self._choose_who_drafts()
        with self.guard("start of spot training"):
            if self.tlt.spot.enable:
                self._start_spot_training()
        self._count_failures()

    def _start_spot_training(self) -> None:
        self._captures = True
        ranks = self.hidden_states.set_up(self.tlt, self._start.aux_layers, self._tokens_to_choose > 0)
        refusals = [rank.refusal for rank in ranks if rank.refusal]
        if refusals:
            self.spot.off = refusals[0]
            logger.warning("the drafter is not trained in this run, and used as it is: %s", refusals[0])
            return
        replicas = {r.name: r.ranks for r in self.servers.replicas.values() if r.colocated}
        self.spot.start(ranks, replicas)
        self.spot.rehearse(WARM_UP_S)

    def after_first_sync(self, step: int) -> None:
        """Engines hold weights: learn what their steps cost."""
        if self.tlt.speculation.enable:
            costs = LatencyTable()
            with self.guard("calibration"):
                self.spot.wait_until_started()  # its imports would be measured, too
                costs = self.servers.calibrate()
                self.servers.tell_costs(costs)
            with self.guard("calibration"):
                notice = self.speculation.calibrated(costs, self._most_requests())
                if notice:
                    logger.warning("%s", notice)
            self._choose_who_drafts(at_once=True)
        self.log.run_started(step + 1, self.tlt, self.servers.replicas, self.facts)

    def _most_requests(self) -> int | None:
        """Requests of a rollout that a replica has at once; None: not known.

        verl's balancer gives each request to the replica with the fewest.
        """
        at_once = self.facts.requests_at_once
        return at_once and math.ceil(at_once / len(self.servers.replicas))

    def _choose_who_drafts(self, *, at_once: bool = False) -> None:
        """Tell the engines who decodes the coming rollout without drafts, from the weight sync on or at once."""
        if self.tlt.speculation.enable:
            with self._charged("speculation control"):
                drafting = self.speculation.drafting(self.served.acceptance)
                self.servers.disable_drafting(self.servers.replicas.keys() - drafting, at_once)

    # ------------------------------------------------------------------ on_sample_begin, on_sample_end

    def sample_begin(self, step: int) -> None:
        """Watch the rollout: a replica of the spot trainer's node that has nothing to decode trains the drafter."""
        self._count_failures()
        if self.facts.rule.idle == "trainer" and not self.spot.off:
            with self.guard("hidden states"):
                self.hidden_states.release()
        with self.guard("watch"):
            self._watch = SamplingWatch(
                self.servers, self.spot, self._planner(), self._pending_work, self.log.trace, step,
                self.facts.rule.recall, self.log.clock,
            )  # fmt: skip

    def _planner(self) -> IdlePlanner:
        if self.facts.rule.idle == "trainer":
            return TrainerIdlePlanner(self._trainer_device(), begin=self.log.clock.monotonic(), settle_s=SETTLE_S)
        return IdlePlanner(
            list(self.servers.replicas), self.spot.replicas, expected_requests=self.facts.requests, settle_s=SETTLE_S
        )

    def _trainer_device(self) -> str:
        """Name of the device that trains in `separate_async`: of the replica on it, if there is one."""
        return next(iter(self.spot.replicas), f"{TRAINER_DEVICE} 0")

    def more_prompts(self) -> None:
        """The sampler is about to send more groups: a replica that has left is called back to serve them, too."""
        if self._watch is not None and self.facts.rule.recall:
            with self._charged("recall"):
                self._watch.recall(self.tlt.spot.stop_timeout_s)

    def sample_end(self, step: int, last: bool) -> None:
        """Stop training (bounded), and read what the engines did. Asynchronous trainers may sample more than once."""
        with self._charged("end of sampling", "stop"):
            watch = self._watch
            self._watch = None
            if watch is not None:
                self._sampled(step, watch.finish(self.tlt.spot.stop_timeout_s))
        with self._charged("end of sampling", "statistics"):
            if self.tlt.speculation.enable and last:
                stats = self.servers.engine_stats()
                self.guard.count("statistics", self.log.engine_stats(stats))
                self.guard.warn("acceptance", falls_short(stats.values(), self.served.acceptance))
                notice = self.speculation.rollout_ended(stats)
                if notice:
                    logger.warning("%s", notice)
                saved_s = saved_estimate_s(stats) if self.speculation.knows_costs else None
                self.log.speculated(step, saved_s, self.speculation.cause, self.speculation.against)
        if self.facts.rule.recall:
            # Responses that verl aborts now are sent again within a second: to all replicas, as in stock verl.
            with self._charged("rejoin"):
                self.servers.rejoin(list(self.servers.replicas))

    def _sampled(self, step: int, report: PhaseReport) -> None:
        self.guard.count("watch", int(report.error is not None))
        self.guard.count("lost replica", report.idle.lost)
        self.guard.count("leaving", report.idle.failures)
        self.log.sampled(step, report)
        self._sessions_ended(report.sessions)

    def _sessions_ended(self, sessions: Sequence[SessionResult]) -> None:
        """Count what was trained, and have the drafter exported if the spot trainer would publish one."""
        for session in sessions:
            self._tokens += session.tokens
            if session.skipped:
                logger.warning("%d micro-batches were left out: not finite", session.skipped)
        verdicts = [session.verdict for session in sessions if session.verdict is not None]
        for verdict in verdicts:  # of several in a step the last one that publishes is told, or else the last one
            already_publishes = self._verdict is not None and self._verdict.publishes
            if verdict.publishes or not already_publishes:
                self._verdict = verdict
        if any(verdict.publishes for verdict in verdicts):
            self.spot.export()

    # ------------------------------------------------------------------ _balance_batch: the cold start

    def cold_start(self, step: int) -> None:
        """Train a random head once, for `cold_start_s` seconds, while the engines sleep and the actor has not begun."""
        due = self._cold_start_due and not self.speculation.never
        if not due or self._handed_over < COLD_START_STEPS or not self.spot.ready():
            return
        self._cold_start_due = False
        seconds = self.facts.cold_start_s
        logger.info("TLT: cold start: RL waits up to %.0f s while the spot trainer trains a drafter", seconds)
        with self._charged("cold start"), self.log.phase("cold_start", step):
            trains_s = COLD_START_TRAINS * seconds
            if self._train_for(step, trains_s).outcome != "failed":
                self._train_for(step, seconds - trains_s)  # begins with the scores of what the first session taught

    def _train_for(self, step: int, seconds: float) -> SessionResult:
        """One session on the spot trainer's first device, for at most so many seconds."""
        clock = self.log.clock
        begun = clock.time()
        device = self._trainer_device()
        self.spot.train(device)
        result = self.spot.ended(seconds) or self.spot.stop(self.tlt.spot.stop_timeout_s)
        session = Session(**vars(result), t=clock.time(), step=step, replica=device, start=begun, end=clock.time())
        self.log.trained(step, [session])
        self._sessions_ended([session])
        return result

    # ------------------------------------------------------------------ _compute_old_log_prob

    def log_probs_done(self, step: int) -> None:
        """Send the hidden states that the actor captured to the spot trainer; does not wait for the copies."""
        if self.spot.off:
            if self._captures:
                with self._charged("hidden states"):
                    self._captures = False
                    self.hidden_states.stop()
            return
        with self._charged("hidden states"):
            captured = self.hidden_states.take(counts=self._tokens_to_choose > 0)
            self.guard.count("hidden states", sum(c.errors for c in captured))
            counts = [c.token_counts for c in captured if c.token_counts is not None]
            if self._tokens_to_choose and counts:  # what the drafter can draft: the first rollout's most frequent
                self.spot.choose_tokens(most_frequent(sum(counts), self._tokens_to_choose).numpy())
                self._tokens_to_choose = 0
            self.spot.add(step, captured)
            self._handed_over += 1
            self.log.captured(captured)

    # ------------------------------------------------------------------ _save_checkpoint

    def save(self, step: int) -> None:
        """The policy's checkpoint is written: write the drafter beside it, before verl names the step to resume."""
        if not self.spot.running:
            return
        directory = self.facts.checkpoints / f"global_step_{step}"
        self._saves += 1
        rotates = 0 < self.facts.keeps <= self._saves  # verl does not remove what an earlier process saved
        with self._charged("save"):
            try:
                self.spot.save(directory / CHECKPOINT, self._provenance(step), directory, rotates)
            except Exception:
                with suppress(CallFailed):
                    self.spot.on_its_node(remove_halves, directory.absolute())
                raise
            if not holds_drafter(directory):
                logger.warning(
                    "%s is on another node's disk, where a resumed run does not find it: put trainer.default_local_dir "
                    "on a file system that all nodes share", directory / CHECKPOINT,
                )  # fmt: skip

    def saved(self, step: int) -> None:
        """The checkpoint is complete, and verl has named its step."""
        self._count_failures()
        if not self.spot.running:
            return
        directory = self.facts.checkpoints / f"global_step_{step}"
        with self._charged("save"):
            self.spot.on_its_node(tidy, directory.absolute(), self.facts.prunes)

    def _provenance(self, step: int) -> DrafterProvenance:
        return replace(self.served, policy_step=step, tokens_trained=self._tokens)

    # ------------------------------------------------------------------ on_step_end: before and after the weight sync

    def before_sync(self, step: int) -> None:
        """Publish the drafter if it is there in time; then say which replicas draft in the coming rollout."""
        self._updated = step
        with self._charged("publish"):
            self._publish(step)
        self._choose_who_drafts()

    def _publish(self, step: int) -> None:
        """Have the servers stage what was exported, which the weight sync loads; a late one is published next time."""
        exported = self.spot.exported()
        if exported is not None:
            self._to_publish = exported
        elif self.spot.exporting:
            return
        verdict = self._verdict
        self._verdict = None
        drafter = self._to_publish
        if drafter is not None:
            assert self.spot.published is not None
            if self.tlt.speculation.enable:
                # Where this raises, the next step tries again, without the verdict.
                self.guard.count("publish", self.servers.stage(self.spot.published))
            self._to_publish = None
            self.served = replace(self.served, version=drafter.version, acceptance=drafter.acceptance)
            verdict = verdict or Verdict(decision="published")
        elif verdict is not None and verdict.publishes:
            verdict = replace(verdict, decision="reverted", reason="it could not be exported", acceptance=())
        elif verdict is not None and verdict.acceptance:
            self.served = replace(self.served, acceptance=verdict.acceptance)
        if verdict is not None:
            self.log.judged(step, verdict, self.served.version)

    def after_sync(self, step: int, colocated_asleep: bool) -> None:
        """Every engine has new weights, but for colocated replicas if they are `colocated_asleep`: all rejoin."""
        with self._charged("rejoin"):
            if self.facts.rule.idle == "replicas":
                self.servers.rejoin(list(self.servers.replicas))
            if self.tlt.speculation.enable:
                self._compare(step, self._serving(colocated_asleep))

    def _compare(self, step: int, serving: set[str]) -> None:
        statuses = {name: status for name, status in self.servers.drafter_statuses().items() if name in serving}
        self.log.reloaded(step, statuses, self.served.version)

    def _serving(self, colocated_asleep: bool) -> set[str]:
        return {name for name, info in self.servers.replicas.items() if not (colocated_asleep and info.colocated)}

    def validated(self, step: int, colocated_asleep: bool) -> None:
        """A validation is over: its engine steps are not the next rollout's."""
        with self._charged("validation"):
            if self.tlt.speculation.enable:
                self.servers.engine_stats()
                if self.log.reloads:  # for the validation verl may have woken replicas up, or synced weights again
                    self._compare(step, self._serving(colocated_asleep))

    # ------------------------------------------------------------------ _compute_metrics

    def metrics(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """The step's `tlt/*` metrics, given verl's; ends the step in trace and log."""
        self._count_failures()
        with self.guard("metrics"):
            self.log.observed.spot_off = bool(self.spot.off) if self.tlt.spot.enable else None
            self.log.observed.buffer = self.spot.stats
            return self.log.finish(step, dict(metrics))
        return {}

    def _count_failures(self) -> None:
        for during in self.spot.failures:
            self.guard.count(during, 1)
            self.log.spot_trainer_failed()
        self.spot.failures.clear()
        left_out = self.spot.left_out
        self.spot.left_out = 0
        self.guard.count("hidden states", left_out)

    # ------------------------------------------------------------------ the end of fit

    def finish(self) -> None:
        """The run is over: keep the drafter as a directory that vLLM serves, and clear away the rest."""
        with self.guard("end of sampling"):
            if self._watch is not None:  # the run failed while it sampled: a session would hold up the drafter
                self._watch.finish(self.tlt.spot.stop_timeout_s)
        with self.guard("final drafter"):
            if self.spot.running:
                self._save_final_drafter(Path(str(self.tlt.drafter.save_dir)))
        self._count_failures()
        with self.guard("end of the run"):
            self.spot.close()
            self.servers.close()

    def _save_final_drafter(self, directory: Path) -> None:
        """Have the spot trainer save the drafter; if this run has nothing new, an earlier run's is not replaced."""
        published_none = self.spot.published is None and not self.spot.exporting
        nothing_new = published_none and self._start.checkpoint is None
        if nothing_new and (directory / CONFIG).is_file():
            logger.warning("nothing was published, so %s keeps the drafter of an earlier run", directory)
            return
        self.spot.save(directory, self._provenance(self._updated))
        if not (directory / CONFIG).is_file():
            logger.warning(
                "the trained drafter is in %s on the disk of another node, the spot trainer's (Ray's id %s): "
                "copy it from there, and put tlt.drafter.save_dir on a file system that all nodes share",
                directory, self.spot.place.node,
            )  # fmt: skip
