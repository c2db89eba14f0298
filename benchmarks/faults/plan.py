"""The faults: what fails, where and in which RL step, and what must be seen of it. Standard library only.

One long run holds most of them, one to four a step. Two replicas take turns at being idle (`run.py`): the first in
even steps, the second in odd ones. A spot trainer that failed is replaced, and trains again once it has hidden states.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

STEPS = 72
"""Of the long run: the last fault is judged over more than a dozen of them, and on a busy machine all strike late."""
SAVE_EVERY = 10
BOUNDS = {
    "verl_tlt.trainer.servers:CALL_S": 30.0,
    "verl_tlt.trainer.spot:CALL_S": 30.0,
    "verl_tlt.trainer.servers:SLEEP_S": 10.0,
    "verl_tlt.trainer.servers:STAGE_S": 30.0,
}
"""Bounds of the trainer that are minutes for real machines; here steps take seconds."""

SPOT = "verl_tlt.spot_trainer.trainer"
SERVER = "verl_tlt.server.server:TLTvLLMHttpServer"
MICRO_BATCH = "verl_tlt.drafter.train:DrafterTrainer.step_on"


@dataclass(frozen=True)
class Fault:
    name: str
    """As `faults.json` calls it."""
    step: int
    """RL step in which it strikes, or the first later one in which its functions are called, as many steps after the
    faults before it as planned (`waits_for`); 0: while the run starts."""
    targets: tuple[str, ...]
    """Functions that fail, `module:attribute`; each once."""
    action: str
    """Function of `actions`."""
    counter: str
    """Metric that counts it."""
    log: str
    """What one line of the log says."""
    recovers: str
    """Function of `judge`: what works again afterwards."""
    first: int = 1
    """Which of the function's calls in that step and process is the first to fail."""
    times: int = 1
    """How many calls of that process fail."""
    everywhere: bool = False
    """In every process; else in the first one that calls it."""
    sessions: int = 1
    """In so many processes, each in the place of the one before."""
    takes: int = 5
    """RL steps until it can be judged."""
    fallback: str = ""
    """Metric that is above 0 in the next rollout: engines draft nothing there."""
    holds_up: bool = True
    """Where it strikes late, so do those after it. A checkpoint's does not: the next checkpoint is `SAVE_EVERY` steps
    away."""

    def note(self, target: str) -> str:
        """Name of the file that says whom the fault struck in this function."""
        function = target.replace(":", ".").rpartition(".")[2]
        return f"{''.join(c if c.isalnum() else '-' for c in self.name)}-{function}"


FAULTS = (
    Fault("a server raising in tlt_calibrate", 0, (f"{SERVER}.tlt_calibrate",), "fail",
          "tlt/errors_calibration", "calibration failed", "drafts"),
    Fault("spot trainer killed (SIGKILL) in mid-session", 3, (MICRO_BATCH,), "kill",
          "tlt/spot_failures", "the spot trainer failed (session)", "trains", first=3),
    Fault("drafter file truncated between staging and load", 4, (f"{SERVER}._tlt_load",), "truncate",
          "tlt/reload_failures", "is not a complete safetensors file", "serves", fallback="tlt/drafter_off_frac"),
    Fault("NaN in the gradient", 5, (MICRO_BATCH,), "nan_gradient",
          "tlt/skipped_steps", "were left out: not finite", "trains", times=2),
    Fault("spot trainer raising", 6, (MICRO_BATCH,), "fail",
          "tlt/spot_failures", "a fault was injected", "trains", first=3),
    Fault("the balancer losing a replica", 8, ("verl_tlt.trainer.watch:SamplingWatch._look",), "lose_replica",
          "tlt/errors_lost_replica", "the load balancer had lost replica", "joins", first=6),
    Fault("spot trainer stopped (SIGSTOP) past its bound", 9, (MICRO_BATCH,), "stop",
          "tlt/spot_failures", "did not stop within", "trains", first=3),
    Fault("object store full when a drafter is published", 10, (f"{SPOT}:SpotTrainer.export",),
          "no_room_in_the_store", "tlt/spot_failures", "the spot trainer failed (export)", "publishes"),
    Fault("disk full while checkpointing", 10, (f"{SPOT}:save_drafter",), "full_disk",
          "tlt/errors_save", "No space left on device", "saves", holds_up=False),
    Fault("a request acquired between the idle reading and the removal", 11,
          ("verl_tlt.trainer.servers:Servers.leave",), "late_request", "", "", "served_late"),
    Fault("spot trainer exhausting its memory", 12, (MICRO_BATCH,), "exhaust_memory",
          "tlt/spot_failures", "can't allocate memory", "trains", first=3),
    Fault("the capture of hidden states raising", 13, ("verl_tlt.actor.hidden_states:_MicroBatch.slice",), "fail",
          "tlt/errors_hidden_states", "could not be captured", "trains", times=1000, everywhere=True),
    Fault("an export that hangs", 14, (f"{SPOT}:SpotTrainer.export",), "hang",
          "tlt/spot_failures", "the spot trainer failed", "publishes"),
    Fault("NaN in the published weights", 19, (f"{SERVER}.tlt_stage",), "nan_weights",
          "tlt/reload_failures", "holds numbers that are not finite", "serves", fallback="tlt/drafter_off_frac"),
    Fault("a disk with room for the policy alone", 20, (f"{SPOT}:check_room",), "room_for_the_policy",
          "tlt/errors_save", "gets no drafter", "saves", holds_up=False),
    Fault("object store full when hidden states are handed over", 20,
          ("verl_tlt.actor.worker:TLTActorWorker.tlt_take",), "full_store",
          "tlt/errors_hidden_states", "ObjectStoreFullError", "trains"),
    Fault("a server raising in tlt_try_sleep", 21, (f"{SERVER}.tlt_try_sleep",), "fail",
          "tlt/errors_leaving", "did not say whether it sleeps", "trains"),
    Fault("a server raising while it loads the drafter", 21, (f"{SERVER}._tlt_load",), "fail",
          "tlt/reload_failures", "cannot use drafter", "serves", fallback="tlt/drafter_off_frac"),
    Fault("a server raising in tlt_stage", 24, (f"{SERVER}.tlt_stage",), "fail",
          "tlt/errors_publish", "does not take the drafter", "publishes"),
    Fault("a server raising in tlt_stats", 24, (f"{SERVER}.tlt_stats",), "fail",
          "tlt/errors_end_of_sampling", "end of sampling failed", "drafts"),
    Fault("a server raising in tlt_status", 24, (f"{SERVER}.tlt_status",), "fail",
          "tlt/errors_rejoin", "rejoin failed", "serves"),
    Fault("a server raising in tlt_disable_drafting", 24, (f"{SERVER}.tlt_disable_drafting",), "fail",
          "tlt/errors_speculation_control", "speculation control failed", "drafts"),
    Fault("NaN in the drafter that is exported", 26, (f"{SPOT}:SpotTrainer.export",), "nan_parameter",
          "", "numbers that are not finite", "publishes"),
    Fault("spot trainer killed (SIGKILL) while it takes hidden states", 31, (f"{SPOT}:SpotTrainer.add",), "kill",
          "tlt/spot_failures", "the spot trainer failed (hidden states)", "trains"),
    Fault("a process with a sick device", 33, (MICRO_BATCH,), "sicken",
          "tlt/spot_failures", "device-side assert triggered", "trains", first=3),
    Fault("tlt_try_sleep slower than its bound", 36, (f"{SERVER}.tlt_try_sleep",), "answer_late",
          "tlt/errors_leaving", "no answer within 10 s", "trains"),
    Fault("a spot trainer slower than its stop bound in three sessions", 39, (MICRO_BATCH,), "hang",
          "tlt/spot_off", "the drafter is not trained in this run any more", "drafts", first=3, sessions=3,
          takes=18),
)  # fmt: skip
"""Of the long run, by step."""

SCORED_STEPS = 8
WITH_GATE = ("tlt.gate.enable=true",)
STOPPED_IN_SCORING = Fault(
    "spot trainer stopped (SIGSTOP) while it scores", 3, (f"{SPOT}:SpotTrainer._judge",), "stop",
    "tlt/spot_failures", "did not stop within", "trains",
)  # fmt: skip
"""Of a run of its own, with the gate: the long run has none, and nothing is scored there."""

GENERATE = "verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMHttpServer.generate"
SERVER_KILLED = Fault(
    "a rollout server killed", 2, (GENERATE,), "kill", "", "", "as_stock", first=5
)  # fmt: skip
"""Ends a run, with TLT as without it."""
ENGINE_KILLED = Fault(
    "an engine killed while it reloads", 2, ("verl_tlt.vllm_worker.extension:LiveDrafter._copy",), "kill", "",
    "The engine died when it was to load its drafter", "as_stock",
)  # fmt: skip
"""Ends a run in one sentence."""
NAN_LIVE = Fault(
    "a drafter that computes NaN once it is live", 1, ("verl_tlt.vllm_worker.extension:LiveDrafter.load",),
    "nan_live", "", "", "serves",
)  # fmt: skip
"""Leaves NaN in the drafter's KV cache over the next sleep; for runs that are shorter than the long one."""


def waits_for(fault: Fault, planned: Mapping[str, int], faults: Iterable[Fault]) -> dict[str, int]:
    """Notes of the faults that this one follows, with the steps between them; what one metric counts is kept apart.

    Args:
        fault: of the run.
        planned: the step of each fault of the run, by name.
        faults: all that there are.
    """
    gaps: dict[str, int] = {}
    for other in faults:
        gap = planned[fault.name] - planned.get(other.name, planned[fault.name])
        if gap > 0 and (other.holds_up or other.counter == fault.counter):
            gaps.update((other.note(target), gap) for target in other.targets)
    return gaps
