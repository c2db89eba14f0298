"""In-process vLLM engines on the CPU, with the tiny models of `benchmarks.lossless.tiny_policy`."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import policies
import pytest

from benchmarks.lossless.tiny_policy import V


def run_script(name: str, *arguments: Path | str, timeout: float = 600) -> Any:
    """What a script beside this file prints as JSON, in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "VLLM_LOGGING_LEVEL": "ERROR"}
    command = [sys.executable, str(Path(__file__).with_name(name)), *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(next(line for line in reversed(done.stdout.splitlines()) if line.startswith("{")))


def sampled(tokens: int, **kwargs: Any) -> Any:
    """Sampling parameters that run to the full length."""
    from vllm import SamplingParams

    return SamplingParams(max_tokens=tokens, ignore_eos=True, **{"temperature": 0.0, "detokenize": False, **kwargs})


def prompts(count: int) -> list[dict[str, list[int]]]:
    """Ragged prompts, different from each other from the first token on."""
    return [{"prompt_token_ids": [(7 * i + 13 * j) % (V - 10) + 5 for j in range(5 + i)]} for i in range(count)]


class Engine:
    """An in-process vLLM engine, with its insides at hand."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.core = llm.llm_engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.patch = pytest.MonkeyPatch()
        """For what a test changes inside; undone before the next test has the engine."""

        driver = getattr(self.core.model_executor, "driver_worker", None)  # None: ranks are other processes
        self.runner = driver and driver.worker.model_runner
        self.live_drafter = getattr(driver and driver.worker, "tlt_drafter", None)
        self.drafters_pass = getattr(driver and driver.worker, "tlt_pass", None)
        if hasattr(self.scheduler, "tlt"):
            self.scheduler.tlt.control(points=policies.COSTS.to_list())

    def rpc(self, method: str, *args: Any) -> Any:
        """One worker's answer to `collective_rpc`."""
        return self.llm.collective_rpc(method, args=args)[0]

    def end_at_stop_strings(self) -> None:
        """As verl's server does with TLT, until the engine is given back."""
        from vllm.v1.engine.output_processor import OutputProcessor

        from verl_tlt.server.stop_strings import end_at_stop_strings

        self.patch.setattr(OutputProcessor, "process_outputs", OutputProcessor.process_outputs)
        assert end_at_stop_strings(OutputProcessor)

    def counters(self) -> list[int]:
        """VLLM's own: drafts verified, their tokens, those accepted, then by position; empty where nobody drafts."""
        found = {m.name.removeprefix("vllm:spec_decode_num_"): m for m in self.llm.get_metrics()}
        if "drafts" not in found:
            return []
        counts = [found[name].value for name in ("drafts", "draft_tokens", "accepted_tokens")]
        return [*counts, *found["accepted_tokens_per_pos"].values]

    def renew(self, tlt: dict[str, Any] | None, weights: Path | None) -> None:
        """As after a start with these settings (`additional_config["tlt"]`) and this drafter; None: stock vLLM."""
        from vllm.utils.torch_utils import set_random_seed

        assert self.llm.reset_prefix_cache()
        set_random_seed(0)
        if tlt is None:
            return
        from verl_tlt.engine_core.scheduler import load_policy, ngram_drafts

        if not self.scheduler.tlt.drafting:
            assert self.rpc("tlt_set_drafting", True) is None
        loaded = self.rpc("tlt_load_drafter", str(weights))
        assert loaded is None
        scheduler, control = self.scheduler, self.scheduler.tlt
        policy = load_policy(tlt, scheduler.max_num_running_reqs, control.limits)
        control.__init__(policy, control.limits, control.trace)
        control.control(points=policies.COSTS.to_list())
        scheduler.tlt_ngram = ngram_drafts(tlt["speculation"])
        scheduler._tlt_k = 0

    def put_in_charge(self, policy: str) -> None:
        """Let another policy choose from now on: one of `policies`, else one of the package by name."""
        from verl_tlt.speculation.policies import make_policy

        own, control = getattr(policies, policy, None), self.scheduler.tlt
        arms = tuple(self.scheduler.vllm_config.additional_config["tlt"]["arms"])
        largest = self.scheduler.max_num_running_reqs
        control.policy = own(arms, largest) if own else make_policy(policy, arms, largest)
        control.control(points=policies.COSTS.to_list())

    def generate(self, count: int, tokens: int, **kwargs: Any) -> list[list[int]]:
        """Tokens of `count` ragged prompts, ragged lengths up to `tokens`."""
        lengths = [max(8, tokens * (i + 1) // count) for i in range(count)]
        params = [sampled(n, **kwargs) for n in lengths]
        return [list(o.outputs[0].token_ids) for o in self.llm.generate(prompts(count), params, use_tqdm=False)]

    def rollout(self, tokens: int) -> tuple[list[list[int]], tuple[int, ...]]:
        """(tokens of eight greedy requests, how many drafts were accepted by position)."""
        self.scheduler.tlt.stats(reset=True)
        found = self.generate(8, tokens)
        return found, self.scheduler.tlt.stats(reset=True).num_accepted_tokens_per_pos

    def sync(self, drafter: Path, level: int = 2) -> str | None:
        """A weight sync in verl's order, of the same policy and of a drafter's file: what its load answered.

        Sleep, wake the weights, send the policy's, load the drafter (`clear_kv_cache`), wake the KV cache
        (verl/workers/engine_workers.py `update_weights`).
        """
        self.llm.sleep(level=level)
        self.llm.wake_up(tags=["weights"])
        if level == 2:
            self.llm.collective_rpc("reload_weights")  # verl would send the policy's
        answers = self.llm.collective_rpc("tlt_load_drafter", args=(str(drafter),))
        self.llm.wake_up(tags=["kv_cache"])
        assert self.llm.reset_prefix_cache()
        return next((failure for failure in answers if failure is not None), None)

    def close(self, beside: bool = False) -> None:
        """Free the engine and, where it was not beside another, vLLM's process groups, which they share."""
        with pytest.MonkeyPatch.context() as patch:
            if beside:
                patch.setattr("vllm.v1.engine.core.cleanup_dist_env_and_memory", lambda: None)
            self.core.shutdown()
        del self.llm, self.core, self.scheduler, self.runner, self.live_drafter, self.drafters_pass
        gc.collect()


class DoctorsEngine:
    """The engine as `doctor --gpu` has it; `lost` is called after its weights were sent again."""

    def __init__(self, engine, drafter, lost):
        self._engine, self.drafter, self._lost = engine, drafter, lost
        self.llm = self
        self.model_config, self.vllm_config = engine.runner.model_config, engine.runner.vllm_config

    async def every(self, method, *args):
        return [self._engine.rpc(method, *args)]

    async def sleep(self, level):
        self._engine.llm.sleep(level=level)

    async def wake_up(self, tags):
        self._engine.llm.wake_up(tags=tags)

    async def collective_rpc(self, method):
        self._engine.llm.collective_rpc(method)
        self._lost()
