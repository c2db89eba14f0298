"""Ray, rollouts of the toy's task with the policy's hidden states, and a spot trainer to learn from them."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tests.toy import task
from tests.toy.assets import AUX_LAYERS, SHIPPED_POLICY
from verl_cpu.environment import CPU_RUN
from verl_tlt.config import TLTConfig
from verl_tlt.drafter import TrainingSequence, VerifierWeights, to_numpy16
from verl_tlt.messages.training import HiddenStateShard, SessionResult, SpotPlan, VerifierArrays
from verl_tlt.spot_trainer.worker import SpotTrainerWorker
from verl_tlt.trainer.run_setup import first_drafter

ENVIRONMENT = CPU_RUN | {
    "RAY_enable_metrics_collection": "0",  # a second Ray in a process would leave its reporting thread behind
    "PYTHONPATH": f"{Path(__file__).parent}{os.pathsep}{os.environ['PYTHONPATH']}",  # workers import this module
}
CONFIG = TLTConfig.from_dict({"buffer": {"tokens_per_step": 8192}})


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


def wait_for(condition: Callable[[], bool], seconds: float = 300.0) -> None:
    """Until something has become so."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


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
        aux = torch.cat([states[i][0] for i in AUX_LAYERS], dim=-1)
        sequences.append(TrainingSequence(tokens, len(prompt), aux.bfloat16(), last.pop().bfloat16()))
    parts = VerifierWeights.from_policy_dir(SHIPPED_POLICY)
    return sequences, VerifierArrays(**{f.name: to_numpy16(getattr(parts, f.name)) for f in dataclasses.fields(parts)})


def as_shards(sequences: list[TrainingSequence]) -> list[HiddenStateShard]:
    """Whole sequences as a rank that computes all of them sends them."""
    layers = (*AUX_LAYERS, AUX_LAYERS[-1] + 1)
    return [
        HiddenStateShard(
            row=row, tokens=s.tokens.numpy(), prompt_len=s.prompt_len, prompt=row, start=s.start,
            stretches=((0, len(s)),), wanted=layers, layers=layers,
            states=to_numpy16(torch.stack([*s.aux.chunk(len(AUX_LAYERS), dim=-1), s.last])),
        )
        for row, s in enumerate(sequences)
    ]  # fmt: skip


def plan_of(resume_from: Path | None = None, config: TLTConfig = CONFIG, **changed: Any) -> SpotPlan:
    """What the RL trainer gives the spot trainer."""
    start = first_drafter(config, str(SHIPPED_POLICY), "bfloat16", 1024, resume_from)
    plan = SpotPlan(
        policy_dir=str(SHIPPED_POLICY), drafter=start.trainable, dtype="bfloat16",
        sampling={"temperature": 1.0, "top_p": 1.0, "top_k": -1}, learning_rate=2e-3, warmup_steps=5,
        batch_tokens=384, min_tokens=300, held_out=0.25, max_epochs=2.5, window=1024,
        checkpoint=str(start.checkpoint) if start.checkpoint else None,
    )  # fmt: skip
    return dataclasses.replace(plan, **changed)


def set_epochs(worker: SpotTrainerWorker, epochs: float) -> None:
    """How long a session lasts where nobody stops it."""
    worker.trainer.plan = dataclasses.replace(worker.trainer.plan, max_epochs=epochs)


def sequences_kept(worker):
    return len(worker.trainer.buffer._items)


def served_version(worker: SpotTrainerWorker) -> int:
    """Of the drafter that the engines have."""
    return worker.trainer.version


class Odd(SpotTrainerWorker):
    """A real spot trainer that misbehaves in the way it is told."""

    fault = ""

    async def be(self, fault: str) -> None:
        """Misbehave from now on: "deaf" to stops, "broken", "dying", "crowded" on its device, or not at all ("")."""
        self.fault = fault

    async def stop(self, session: int) -> None:
        """Not heard."""
        if self.fault != "deaf":
            await super().stop(session)

    async def train(self, session: int, device: int) -> SessionResult:
        """As told."""
        if self.fault == "broken":
            raise RuntimeError("out of luck")
        if self.fault == "crowded":
            return SessionResult("failed", error="no room")
        if self.fault == "dying":
            threading.Timer(0.2, os._exit, (1,)).start()
            await asyncio.sleep(60)
        return await super().train(session, device)
