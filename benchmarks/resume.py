"""A job that is killed again and again, and what each of its resumptions goes on with.

    python -m benchmarks.resume --resumptions 20 --out benchmarks/results/resume.json

One chain: the toy's GRPO job with two replicas saves every step; all its processes get SIGKILL at a random moment of a
phase that is drawn in turn, and it is started again with verl's `resume_mode=auto`. What the new job goes on with (its
spot trainer logs its steps, its engines tell versions) is compared with the checkpoint's files, and these with what
the trace of the killed jobs says of that step: the version that the engines served, and optimizer steps that were
trained. All of it must be of the step that verl resumes.

The work folder keeps the chain: called again, the command goes on with it.
"""

import argparse
import json
import math
import random
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.stored import store
from benchmarks.toy_job import CONSTANT, FORCED, QUICK_TO_LEARN, Job, make_assets
from tests.toy.assets import Assets
from verl_tlt.commands.interrupts import interruptible
from verl_tlt.commands.report.reader import RunTrace, read_trace
from verl_tlt.drafter import load_training_state
from verl_tlt.trace.events import Event, LoadSample, Phase, Publish, Reload, RunStarted
from verl_tlt.trainer.checkpoints import CHECKPOINT

OVERRIDES = (
    FORCED,
    "data.train_batch_size=4",
    "data.max_response_length=480",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.rollout.max_model_len=560",
    "trainer.max_actor_ckpt_to_keep=2",
    *QUICK_TO_LEARN,
    f"{CONSTANT}.speculation.calibrate=false",
)
PHASES = ("save", "session", "judged", "publish", "start", "save", "rollout", "sync", "session", "update")
"""Drawn in turn; `start` is a resumption that is killed itself."""
LENGTHS_S = {
    "start": 15.0, "rollout": 2.0, "session": 2.0, "judged": 0.4, "update": 1.0, "save": 0.4, "publish": 0.3,
    "sync": 1.0,
}  # fmt: skip
"""Longest delay after a phase's mark, seconds: about as long as the phase is on two cores."""
LATEST = 3
"""How many steps after its first a job is killed, at most: what is published in one step is saved in the next."""
LIMIT_S = 900.0
WENT_ON = re.compile(r"the spot trainer goes on from \S+ after (\d+) optimizer steps")
STARTS = "TLT starts from"


@dataclass
class Target:
    """When to kill: `delay_s` after the mark of `phase`, in step `later` after the job's first or in one after that."""

    phase: str
    delay_s: float
    later: int = 1
    trained: bool = False
    """A replica has run dry in the present step or before."""

    def mark(self, event: Event, first: int) -> bool:
        """Whether `event` is the mark; `first`: the job's first step, in which nobody can train."""
        if isinstance(event, RunStarted) or event.step < first + self.later:
            return False
        match event:
            case LoadSample():
                loads = list(event.inflight.values())
                dry = len(loads) > 1 and min(loads) == 0 < max(loads)
                self.trained |= dry
                return self.phase == "rollout" or (self.phase == "session" and dry)
            case Phase(name="rollout"):
                return self.phase == "judged" and self.trained
            case Phase(name="old_log_prob"):
                return self.phase == "update"
            case Phase(name="update_actor"):
                return self.phase == "save"
            case Publish():
                return self.phase == "sync"
        return False


def draw(number: int, seed: int) -> Target:
    """The target of kill `number`, from 0 on."""
    phase, rng = PHASES[number % len(PHASES)], random.Random(f"{seed}-{number}")
    return Target(phase, rng.uniform(0.0, LENGTHS_S[phase]), rng.randint(1, LATEST))


@dataclass(frozen=True)
class Saved:
    """What a resumption must go on with: the checkpoint's files."""

    step: int
    version: int
    policy_step: int
    optimizer_steps: int
    """Behind the moments."""


def saved(checkpoints: Path) -> Saved | None:
    """What lies in the checkpoint that verl is going to resume; None: it has no complete drafter."""
    step = int((checkpoints / "latest_checkpointed_iteration.txt").read_text())
    directory = checkpoints / f"global_step_{step}" / CHECKPOINT
    if not directory.is_dir():
        return None
    facts = json.loads((directory / "provenance.json").read_text())
    state = load_training_state(directory)
    assert state is not None
    return Saved(step, facts["version"], facts["policy_step"], state["steps"])


def history(trace: RunTrace, step: int) -> dict[str, Any]:
    """What the jobs so far wrote down of the moment at which `step` was saved; void steps are left out."""
    cold_starts = [phase for phase in trace.phases if phase.name == "cold_start"]

    def lasted(event: Publish) -> bool:
        """A step is saved before its drafter is published, and after its cold start, which publishes, too."""
        kept = min([step] + [run.step0 - 1 for run in trace.runs if run.t > event.t])
        return event.step < kept + any(phase.start <= event.t <= phase.end for phase in cold_starts)

    def trained(job: RunStarted) -> int:
        """Optimizer steps of a job until `step`."""
        until = min((run.t for run in trace.runs if run.t > job.t), default=math.inf)
        return sum(s.steps for s in trace.sessions if s.step <= step and job.t <= s.start < until)

    version = next((p.version for p in reversed(trace.publishes) if lasted(p)), 0)
    steps = sum(trained(job) for job in trace.runs)
    return {"version": version, "steps": steps}


def judge(want: Saved, past: dict[str, Any], step0: int, held: list[int], reloads: list[Reload]) -> dict[str, Any]:
    """Each thing that must be of one and the same step -> whether it is; None: the job was killed before it said so."""
    first = [r.version == want.version for r in reloads if r.step == step0]
    return {
        "step": step0 == want.step + 1 and want.policy_step == want.step,
        "version": want.version == past["version"],
        "engines": all(first) if first else None,
        "optimizer": held == [want.optimizer_steps],
        "optimizer_steps": want.optimizer_steps == past["steps"],
    }  # fmt: skip


def held_by(said: str) -> list[int]:
    """Optimizer steps that a job's spot trainer went on with."""
    return [int(steps) for steps in WENT_ON.findall(said)]


class Chain:
    """The chain in its folder: every link is a start, its judgement, and how it was killed."""

    def __init__(self, work: Path, seed: int) -> None:
        self.work, self.seed = work, seed
        self.run, self.file = work / "run", work / "chain.json"
        self.links: list[dict[str, Any]] = json.loads(self.file.read_text()) if self.file.exists() else []
        self.assets: Assets = make_assets(work / "assets", lambda i: [440 if i % 4 == 0 else 60, 40, 43, 46])

    @property
    def checkpoints(self) -> Path:
        return self.run / "checkpoints"

    def link(self, target: Target | None) -> None:
        """Start (again), judge what it goes on with, and kill it at the target; None: it runs two steps, to its end."""
        tracker = self.checkpoints / "latest_checkpointed_iteration.txt"
        resumes = tracker.exists()
        want = saved(self.checkpoints) if resumes else None
        last = int(tracker.read_text()) if resumes else 0
        past = history(read_trace(self.run / "trace"), last) if want else {}
        began = time.time()
        job = Job(
            self.run, self.assets, last + 2 if target is None else 10_000, OVERRIDES,
            SAVE_FREQ="1", RESUME="auto", VERL_FILE_LOGGER_PATH=str(self.run / f"metrics-{len(self.links)}.jsonl"),
        )  # fmt: skip
        seen: list[Event] = []
        try:
            for event in self._until(job, target):
                seen.append(event)
            died = job.tree.process.poll()
        finally:
            said = job.said()
            job.kill()
        if died is not None and (target is not None or died):
            raise RuntimeError(f"the job ended by itself with exit status {died}; see {job.log}")
        run = next((event for event in seen if isinstance(event, RunStarted)), None)
        found: dict[str, Any] = {
            "resumed_from": last,
            "step0": run.step0 if run else None,
            "killed_in": target.phase if target else None,
            "delay_s": round(target.delay_s, 2) if target else None,
            "saved": int(tracker.read_text()) if tracker.exists() else 0,
            "seconds": round(time.time() - began, 1),
        }
        if resumes and run is not None:  # else it was killed before it had gone on
            found["checks"] = {"it_went_on_with_a_drafter_of_that_step": False}
            if want is not None:
                reloads = [event for event in seen if isinstance(event, Reload)]
                found["checks"] = judge(want, past, run.step0, held_by(said), reloads)
                found["version"] = want.version
                found["optimizer_steps"] = want.optimizer_steps
            found["equal"] = all(value is not False for value in found["checks"].values())
        self.links.append(found)
        self.file.write_text(json.dumps(self.links, indent=1))
        print(json.dumps(found), flush=True)

    def _until(self, job: Job, target: Target | None) -> Iterator[Event]:
        """What the job writes until it is time to kill it."""
        first, looked = 0, 0.0
        if target is not None and target.phase == "start":
            while STARTS not in job.said() and job.tree.process.poll() is None:
                job.processes()
                time.sleep(0.2)
            time.sleep(target.delay_s)
            return
        for event in job.events(LIMIT_S):
            yield event
            if isinstance(event, RunStarted):
                first = event.step0
            if time.monotonic() - looked > 2.0:
                looked = time.monotonic()
                job.processes()
            if target is None:
                continue
            if target.phase == "publish" and isinstance(event, Phase) and event.name == "update_actor":
                if event.step >= first + target.later:
                    self._wait_for(event.step)
                    time.sleep(target.delay_s)
                    return
            elif target.mark(event, first):
                time.sleep(target.delay_s)
                return

    def _wait_for(self, step: int) -> None:
        """Until verl names the step as the one to resume from; a new drafter is published right after that."""
        deadline = time.monotonic() + LIMIT_S
        while int((self.checkpoints / "latest_checkpointed_iteration.txt").read_text() or 0) < step:
            if time.monotonic() > deadline:
                raise TimeoutError(f"step {step} was not saved")
            time.sleep(0.002)


@interruptible()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--resumptions", type=int, default=20, help="those that get as far as to be judged")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, default=Path("demo-out/resume"))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    chain = Chain(args.work.resolve(), args.seed)
    while (judged := sum("equal" in link for link in chain.links)) < args.resumptions:
        # The first link starts anew; the last one ends by itself.
        chain.link(None if judged == args.resumptions - 1 else draw(len(chain.links), args.seed))
    resumed = [link for link in chain.links if "equal" in link]
    left = {path.parent.name for path in chain.checkpoints.glob(f"*/{CHECKPOINT}")}
    kept = {path.parent.name for path in chain.checkpoints.glob("*/actor")}
    result = {
        "kills": sum(link["killed_in"] is not None for link in chain.links),
        "resumed": len(resumed),
        "equal": sum(link["equal"] for link in resumed),
        "of_a_trained_optimizer": sum(link.get("optimizer_steps", 0) > 0 for link in resumed),
        "of_a_published_drafter": sum(link.get("version", 0) > 0 for link in resumed),
        "steps": chain.links[-1]["saved"],
        "drafters_without_a_policy": sorted(left - kept),
        "links": chain.links,
    }
    print(json.dumps({key: value for key, value in result.items() if key != "links"}, indent=1))
    if args.out:
        store(args.out, result)


if __name__ == "__main__":
    main()
