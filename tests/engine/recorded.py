"""Ray, rollouts of the toy's task with the policy's hidden states, and spot workers to learn from them."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from demo.toy import task
from demo.toy.assets import AUX_LAYERS, SHIPPED_POLICY
from verl_tlt.config import TLTConfig
from verl_tlt.drafter import TrainingSequence, VerifierWeights, to_numpy16
from verl_tlt.messages.training import HeldOutScores, HiddenStateShard, RolloutSampling, SessionResult, VerifierArrays
from verl_tlt.spot_worker.learner import SpotLearner
from verl_tlt.spot_worker.worker import SpotWorker
from verl_tlt.trainer.run_setup import first_drafter

LAYERS = AUX_LAYERS["small"]
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VERL_PLATFORM": "cpu",
    "VERL_ENGINE_DEVICE": "cuda",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",  # a second Ray in a process would leave its reporting thread behind
    "RAY_prestart_worker_first_driver": "0",  # a worker process per CPU would start at once
    "PYTHONPATH": f"{Path(__file__).parent}{os.pathsep}{os.environ['PYTHONPATH']}",  # workers import this module
}
CONFIG = TLTConfig.from_dict(
    {
        "drafter": {"batch_tokens": 384, "learning_rate": 2e-3, "warmup_steps": 5},
        "buffer": {"min_tokens": 300, "held_out": 0.25},
        "spot": {"min_merge_steps": 3},
        "speculation": {"max_draft_length": 3},
        "gate": {"min_tokens": 64},
    }
)


@contextmanager
def ray_cluster(monkeypatch: Any) -> Iterator[None]:
    """A Ray with pretended GPUs, enough for all files that import this: they run in turn, in one cluster (conftest)."""
    for key, value in ENVIRONMENT.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setenv("RAY_ADDRESS", "local")  # whatever cluster somebody left on this machine
    import ray

    if not ray.is_initialized():
        sizes = dict(num_cpus=32, num_gpus=16, object_store_memory=300_000_000)
        for attempt in range(3):  # Ray waits 30 s for its own processes, which is short beside many other jobs
            try:
                ray.init(include_dashboard=False, log_to_driver=False, **sizes)
                break
            except Exception as error:
                ray.shutdown()
                if attempt == 2 or "timed out during startup" not in str(error):
                    raise
    yield


def end_ray() -> None:
    """End the cluster, if there is one."""
    import ray

    if ray.is_initialized():
        ray.shutdown()


def record(count: int, seed: int) -> tuple[list[TrainingSequence], VerifierArrays]:
    """Demonstrations as a spot worker gets them: (sequences, verifier weights)."""
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(SHIPPED_POLICY, dtype=torch.float32).eval()
    last: list[torch.Tensor] = []
    policy.model.norm.register_forward_pre_hook(lambda _module, args: last.append(args[0][0]))
    rng = random.Random(seed)
    sequences = []
    for _ in range(count):
        problem = task.sample_problem(rng, max_digits=6)
        prompt = task.prompt_tokens(problem)
        text = [*prompt, *task.sample_response(problem, rng)][:160]
        tokens = torch.tensor([task.TOKEN_ID[t] for t in text])
        with torch.no_grad():
            states = policy.model(tokens[None], output_hidden_states=True).hidden_states
        aux = torch.cat([states[i][0] for i in LAYERS], dim=-1)
        sequences.append(TrainingSequence(tokens, len(prompt), aux.bfloat16(), last.pop().bfloat16()))
    parts = VerifierWeights.from_policy_dir(SHIPPED_POLICY)
    return sequences, VerifierArrays(**{f.name: to_numpy16(getattr(parts, f.name)) for f in dataclasses.fields(parts)})


def as_shards(sequences: list[TrainingSequence]) -> list[HiddenStateShard]:
    """Whole sequences as a rank that computes all of them sends them."""
    layers = (*LAYERS, LAYERS[-1] + 1)
    return [
        HiddenStateShard(
            row=row, tokens=s.tokens.numpy(), prompt_len=s.prompt_len, prompt=row, start=s.start,
            stretches=((0, len(s)),), wanted=layers, layers=layers,
            states=to_numpy16(torch.stack([*s.aux.chunk(len(LAYERS), dim=-1), s.last])),
        )
        for row, s in enumerate(sequences)
    ]  # fmt: skip


def worker_arguments(resume_from: Path | None = None, config: TLTConfig = CONFIG) -> dict[str, Any]:
    """What the trainer gives every spot worker."""
    return {
        "config": config,
        "policy_dir": str(SHIPPED_POLICY),
        "drafter": first_drafter(config, str(SHIPPED_POLICY), "bfloat16", 1024, resume_from).trainable,
        "sampling": RolloutSampling(temperature=1.0, top_p=1.0, top_k=-1),
        "device": "cpu",
    }


def begin_anew(worker: SpotWorker) -> None:
    """Everything but the buffer as after the start; sessions of one pass."""
    begin_learner_anew(worker.learner)
    set_epochs(worker, 1.0)


def begin_learner_anew(learner: SpotLearner) -> None:
    """Parameters, optimizer and random numbers as after the start, these the same for everybody."""
    learner.revert("initial")
    learner.mark_published()
    learner.trainer.start_over()
    learner.rng = random.Random(0)


def set_epochs(worker: SpotWorker, epochs: float) -> None:
    """How long a session lasts where nobody stops it."""
    config = worker.learner.config
    worker.learner.config = dataclasses.replace(config, spot=dataclasses.replace(config.spot, max_epochs=epochs))


def score_for_gate(learner: SpotLearner, sequences: list[TrainingSequence]) -> HeldOutScores:
    """What the gate would be told of the learner's candidate."""
    found = learner._score_held_out(sequences, 3, lambda: False)
    assert found is not None
    return found


def score(worker: SpotWorker) -> HeldOutScores:
    """The same, on what the worker has held out."""
    return score_for_gate(worker.learner, worker.learner.buffer.held_out())


def drafted(worker: SpotWorker) -> list[int]:
    """The tokens that its drafter drafts."""
    return worker.learner.model.t2d.nonzero()[:, 0].tolist()


def score_alone(worker: SpotWorker) -> None:
    """The next session scores the candidate, and has nothing to train on."""
    worker.learner.versions = dataclasses.replace(worker.learner.versions, to_judge=True)
    set_epochs(worker, 1e-12)


def steps_taken(worker: SpotWorker) -> int:
    """Optimizer steps so far, also during a session."""
    return worker.learner.trainer.steps


def unmerged(worker: SpotWorker) -> tuple[int, int, dict[str, Any]]:
    """(optimizer steps, tokens, change of each parameter) since its last merge."""
    learner = worker.learner
    candidate = learner.versions.candidate
    change = {name: value.numpy() - candidate[name] for name, value in learner.trainer.averages().items()}
    return learner.unmerged_steps, learner.unmerged_tokens, change


def optimizer_steps(worker: SpotWorker) -> tuple[int, float]:
    """(steps taken, sum of the first moments' magnitudes)."""
    moments = worker.learner.trainer.optimizer.state.values()
    return worker.learner.trainer.steps, sum(float(m["exp_avg"].abs().sum()) for m in moments)


def assertion(_batch: object) -> None:
    """What every further call of a process says of a device on which an assertion failed."""
    raise torch.AcceleratorError("CUDA error: device-side assert triggered")


class Odd(SpotWorker):
    """A real spot worker that misbehaves in the way it is told."""

    fault = ""

    async def be(self, fault: str) -> None:
        """Misbehave in the coming sessions: "deaf" to stops, "broken", "dying", "sick" as its device is, or not at all
        ("")."""
        self.fault = fault
        if fault == "sick":
            self.learner.trainer.step_on = assertion

    async def stop(self) -> None:
        """Not heard."""
        if self.fault != "deaf":
            await super().stop()

    async def train(self) -> SessionResult:
        """As told."""
        if self.fault == "broken":
            raise RuntimeError("out of luck")
        if self.fault == "dying":
            threading.Timer(0.2, os._exit, (1,)).start()
            await asyncio.sleep(60)
        return await super().train()
