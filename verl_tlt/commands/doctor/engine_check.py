"""`verl-tlt doctor --gpu`: what only the machine itself can tell, measured with a real engine in a few minutes.

The engines run in a child process, for which this module is the main program (`child_engine`).
"""

import asyncio
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from verl_tlt.checks.models import Finding, check_policy
from verl_tlt.checks.recipe import Recipe
from verl_tlt.commands import child_engine
from verl_tlt.commands.doctor.standalone_engine import (
    Setup,
    StandaloneEngine,
    fetch_policy,
    run_environment,
    set_up,
    start,
)
from verl_tlt.config import TLTConfigError
from verl_tlt.errors import TLTError
from verl_tlt.messages import from_plain
from verl_tlt.server.engine_calls import ask_scheduler
from verl_tlt.speculation.costs import SHORT_CONTEXT, LatencyTable
from verl_tlt.speculation.types import OFF

BATCHES = (1, 4, 16, 64)
"""Batches at which stock's engine is timed, and ours with drafting OFF."""
START_S = 1800.0
"""Most seconds of a job, its measuring apart."""
TOO_SLOW = 1.10
"""Ratio to stock's step above which a step without the drafter's pass costs too much."""
_CONTEXT = """
import sys, torch
kept = torch.zeros(1, device="cuda")
torch.cuda.synchronize()
print("ready", flush=True)
sys.stdin.read()
"""
"""A program that has on the device what a spot trainer has between two sessions: nothing but a CUDA context."""


@dataclass(frozen=True)
class EngineJob:
    """The child process's job."""

    recipe: Recipe
    budget_s: float = 60.0
    """Seconds of measuring, engine starts apart."""


@dataclass
class Answer:
    """The child process's answer to an `EngineJob`."""

    findings: list[Finding]
    """A finding per question; of step costs, one per draft length."""
    costs: LatencyTable
    """Seconds of a step at every draft length, OFF included."""
    hardware: str
    """The device that the costs hold for, as vLLM calls it."""


# ---------------------------------------------------------------------- in the child process


async def check(job: EngineJob, directory: Path) -> Answer:
    """Start the recipe's engines and measure all that `job` asks for; `directory` is for drafter and log."""
    setup = set_up(job.recipe)
    if setup.tlt.speculation.source == "ngram":
        return await check_ngrams(setup, directory)
    async with start(setup, directory, drafting=False) as engine:
        stock = await engine.wall_seconds(BATCHES)
    findings = list[Finding]()
    async with start(setup, directory) as engine:
        findings.append(await check_sleep(engine))
        if setup.beside_spot_trainer and setup.device != "cpu":  # the CPU has no device context
            findings.append(await check_waking(engine))
        await engine.every("tlt_set_drafting", False)
        await ask_scheduler(engine.llm, "control", drafting=False)
        off = await engine.wall_seconds(BATCHES)  # soon after stock's: a machine's pace changes within minutes
        costs = await engine.measure_costs(job.budget_s)
        if error := await load_drafter(engine):  # as after a pass that failed
            findings.append(Finding("refuse", "drafter", error))
        if _has_adapter(engine):
            without = "measured without the adapter; a run measures it with the adapter"
            findings.append(Finding("ok", "step cost", without))
    return Answer([*findings, *judge_costs(costs, stock, off)], costs, hardware_name())


async def check_ngrams(setup: Setup, directory: Path) -> Answer:
    """Start the engine of a recipe without a drafter; no step is measured, since drafts would look free."""
    async with start(setup, directory):
        pass  # it starts
    unmeasured = Finding("ok", "step cost", "n-grams match nothing in random prompts, so no cost was measured")
    return Answer([unmeasured], LatencyTable(), hardware_name())


def hardware_name() -> str:
    from vllm.platforms import current_platform

    return str(current_platform.get_device_name())


def _checked(fields: Mapping[str, object], directory: Path) -> dict[str, Any]:
    job = from_plain(EngineJob, fields)
    with job.recipe.place():
        return asdict(asyncio.run(check(job, directory)))


async def load_drafter(engine: StandaloneEngine) -> str | None:
    """Have every worker load the drafter; the first failure, or None where all loaded it."""
    assert engine.drafter is not None
    answers = await engine.every("tlt_load_drafter", str(engine.drafter / "model.safetensors"))
    for failure in answers:
        if failure is not None:
            return str(failure)
    return None


def _has_adapter(engine: StandaloneEngine) -> bool:
    return engine.llm.vllm_config.lora_config is not None


async def check_sleep(engine: StandaloneEngine) -> Finding:
    """Whether the drafter can be loaded again after verl's deepest sleep, where the engine has one.

    With a LoRA adapter that is level 1. The order is verl's: the drafter is loaded while the KV cache is not mapped
    yet.
    """
    what = "drafter after sleep"
    sleeps = engine.llm.model_config.enable_sleep_mode
    if sleeps:
        keeps_policy = _has_adapter(engine)  # verl sends the adapter alone
        await engine.llm.sleep(level=1 if keeps_policy else 2)
        await engine.llm.wake_up(tags=["weights"])
        if not keeps_policy:
            await engine.llm.collective_rpc("reload_weights")  # verl would send the policy's
    begun = time.perf_counter()
    error = await load_drafter(engine)
    seconds = time.perf_counter() - begun
    if sleeps:
        await engine.llm.wake_up(tags=["kv_cache"])
    if error:
        return Finding("refuse", what, f"The drafter could not be loaded again: {error}")
    slept = "after sleep" if sleeps else "(the engine has no sleep mode)"
    return Finding("ok", what, f"it was loaded again {slept} in {seconds:.2f} s")


async def check_waking(engine: StandaloneEngine) -> Finding:
    """Whether the engine wakes up from sleep while another process has a CUDA context on its device."""
    import torch

    what = "waking beside a spot trainer"
    await engine.llm.sleep(level=1)
    before = torch.cuda.mem_get_info()[0]
    other = subprocess.Popen(
        [sys.executable, "-c", _CONTEXT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=sys.stderr
    )
    try:
        assert other.stdout is not None
        opened = other.stdout.readline()
        context_gib = (before - torch.cuda.mem_get_info()[0]) / 2**30
        try:
            await engine.llm.wake_up()
            await engine.generate(range(1, 9), 4)
        except Exception as error:  # whatever vLLM raises here is the finding
            cause = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            asleep = f"With another context of {context_gib:.2f} GiB on the device the engine did not wake"
            remedy = "lower actor_rollout_ref.rollout.gpu_memory_utilization"
            return Finding("refuse", what, f"{asleep}: {cause}; {remedy}.")
        if not opened:
            unopened = "Beside the engine no other process could open a CUDA context, as a spot trainer must"
            return Finding("refuse", what, f"{unopened}: nvidia-smi shows the device's compute mode and memory.")
        free_gib = torch.cuda.mem_get_info()[0] / 2**30
        return Finding("ok", what, f"context {context_gib:.2f} GiB, {free_gib:.2f} GiB free after waking")
    finally:
        other.communicate(timeout=60)  # closes its input, which ends it


def judge_costs(costs: LatencyTable, stock: Mapping[int, float], off: Mapping[int, float]) -> list[Finding]:
    """Findings on the cost of a step by draft length, and with drafting OFF against stock's; seconds by batch."""
    without_drafter = {batch for batch, _ in costs.by_batch(OFF)}
    if not without_drafter or not stock or not off:
        sentence = "The costs of a step could not be measured in this time; --seconds gives it more."
        return [Finding("warn", "step cost", sentence)]
    ratio = mean(off[b] / stock[b] for b in stock)
    milliseconds = ", ".join(f"batch {b}: {1e3 * off[b]:.2f} against {1e3 * stock[b]:.2f} ms" for b in stock)
    sentence = f"{ratio:.2f} times stock's step ({milliseconds})."
    findings = [Finding("ok" if ratio <= TOO_SLOW else "warn", "drafter off against stock", sentence)]
    for k in costs.lengths():
        batches = [batch for batch, _ in costs.by_batch(k) if batch in without_drafter]
        if k == OFF or not batches:
            continue
        ratios = [f"{batch}: {float(costs.seconds(k, batch) / costs.seconds(OFF, batch)):.2f}x" for batch in batches]
        meaning = "the drafter's own pass" if k == 0 else "pays above this accept length"
        sentence = f"at {SHORT_CONTEXT} tokens of context, by batch {', '.join(ratios)}; {meaning}"
        findings.append(Finding("ok", f"K={k} against off", sentence))
    return findings


# ---------------------------------------------------------------------- in the command


def run_job(job: EngineJob) -> Answer:
    """Have a child process do `job`; a `TLTError` where it cannot."""
    import torch

    setup = set_up(job.recipe)
    if setup.device == "cpu":
        child_engine.require_cpu_platform()
    elif not torch.cuda.is_available():
        raise TLTError(f"There is no GPU on this machine, and the recipe has trainer.device={setup.device}.")
    finding = check_policy(setup.model.path, setup.tlt.drafter.method)
    if finding.level != "ok":
        raise TLTConfigError(finding.sentence)
    fetch_policy(setup.model.path)
    with child_engine.scratch() as directory:
        module, environment = "verl_tlt.commands.doctor.engine_check", run_environment(job.recipe)
        answer = child_engine.run_job(module, asdict(job), directory, environment, START_S + job.budget_s)
    return from_plain(Answer, answer)


if __name__ == "__main__":
    child_engine.serve_job(_checked)
