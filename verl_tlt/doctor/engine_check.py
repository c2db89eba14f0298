"""`verl-tlt doctor --gpu`: what only the machine itself can answer, found out with a real engine in a few minutes.

* Does a drafter survive the sleep that verl puts engines into, and is it the published one again after a reload?
* What does a step cost at K=0 and K>0, by batch, against an engine without any drafter?
* How much memory do CUDA graphs take, with and without a drafter?
* Does the engine still wake up while a spot worker's context stays on the device, and how much is then free?

Stock's engine comes first: it must not inherit the environment by which ours chooses its model runner. What is found
about costs is kept for runs, as `verl-tlt calibrate` does, which asks for the costs alone.

The same runs on a CPU (`--cpu`), where there is no sleep, no graph and no device context; those lines say so.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from verl_tlt.child_engine import LOG
from verl_tlt.doctor.rules import Finding, Level
from verl_tlt.doctor.standalone_engine import EngineJob, Setup, StandaloneEngine, graph_memory_gib, measure_costs, start
from verl_tlt.messages import from_plain
from verl_tlt.messages.rollout import LoadReply
from verl_tlt.server.calibration import cost_key
from verl_tlt.speculation.costs.latency_table import Table, interpolate
from verl_tlt.speculation.types import OFF

BATCHES = (1, 4, 16, 64)
"""At which stock's engine is timed, and ours in OFF."""
DEAR = 1.10
"""A step without the drafter's pass should cost what stock's costs; above this share the difference is reported."""

_CONTEXT = """
import sys, torch
kept = torch.zeros(1, device="cuda")
torch.cuda.synchronize()
print("ready", flush=True)
sys.stdin.read()
"""
"""A spot worker between two sessions: nothing but its CUDA context on the device."""


@dataclass
class Found:
    """What the engines told; a field stays None where the device has no such thing."""

    key: dict[str, str] | None = None
    """`TableKey` of the costs."""
    fingerprint: str = ""
    lost_in_sleep: bool | None = None
    """The drafter's weights were others after waking up."""
    reloaded: str = ""
    reload_s: float = 0.0
    costs: Table | None = None
    stock: dict[int, float] | None = None
    """Seconds between tokens by batch, without a drafter."""
    off: dict[int, float] | None = None
    """The same of the engine with a drafter whose pass is skipped, on the same clock."""
    graph_gib: list[float] | None = None
    """With a drafter, without."""
    context_gib: float | None = None
    free_after_wake_gib: float | None = None
    wake_error: str | None = None


async def check(job: EngineJob, setup: Setup, directory: Path) -> dict[str, Any]:
    """All checks; the fields of `Found`."""
    import torch

    on_gpu = not job.cpu and torch.cuda.is_available()
    found = Found()
    batches = [b for b in BATCHES if b <= int(setup.rollout.max_num_seqs)]
    async with start(setup, directory, drafting=False) as engine:
        found.stock = await engine.wall_seconds(batches)
    async with start(setup, directory) as engine:
        if not job.costs_only:
            await survives(engine, found, on_gpu)
            if on_gpu:
                await wakes_beside_a_context(engine, found)
        found.costs = await measure_costs(engine, job.budget_s)
        if await engine.rpc("tlt_set_drafting", False) is None:
            await engine.channel.call("control", drafting=False)
            found.off = await engine.wall_seconds(batches)
        drafter = None if setup.tlt.speculation.source == "ngram" else engine.drafter
        found.key = asdict(cost_key(setup.policy, setup.rollout, drafter))
    if on_gpu:
        found.graph_gib = graph_memory_gib((directory / LOG).read_text(errors="replace"))[::-1]
    return vars(found)


async def survives(engine: StandaloneEngine, found: Found, on_gpu: bool) -> None:
    """Fingerprint the drafter, put the engine to verl's deepest sleep where it has one, and load the drafter again."""
    assert engine.drafter is not None
    found.fingerprint = await engine.rpc("tlt_fingerprint")
    if on_gpu:
        await engine.llm.sleep(level=2)
        await engine.llm.wake_up(tags=["weights"])
        await engine.llm.collective_rpc("reload_weights")  # verl would send the policy's
        found.lost_in_sleep = await engine.rpc("tlt_fingerprint") != found.fingerprint
        await engine.llm.wake_up(tags=["kv_cache"])
    reply = from_plain(LoadReply, await engine.rpc("tlt_load_drafter", str(engine.drafter / "model.safetensors")))
    found.reloaded, found.reload_s = reply.error or reply.fingerprint, reply.seconds


async def wakes_beside_a_context(engine: StandaloneEngine, found: Found) -> None:
    """Let the engine sleep, open another process's CUDA context on its device, and wake it up again."""
    import torch

    await engine.llm.sleep(level=1)
    before = torch.cuda.mem_get_info()[0]
    other = subprocess.Popen(
        [sys.executable, "-c", _CONTEXT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=sys.stderr
    )
    try:
        assert other.stdout is not None
        other.stdout.readline()
        found.context_gib = (before - torch.cuda.mem_get_info()[0]) / 2**30
        try:
            await engine.llm.wake_up()
            await engine.generate(range(1, 9), 4)
        except Exception as error:  # whatever vLLM raises here is the finding
            found.wake_error = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        found.free_after_wake_gib = torch.cuda.mem_get_info()[0] / 2**30
    finally:
        other.communicate(timeout=60)  # closes its input, which ends it


# ---------------------------------------------------------------------- judging


def judge(found: Found) -> list[Finding]:
    """One finding per question."""
    return [_survival(found), *_costs(found), _graphs(found), _waking(found)]


def _survival(f: Found) -> Finding:
    what = "drafter after sleep"
    if f.reloaded != f.fingerprint or not f.fingerprint:
        return Finding(
            "refuse", what, f"The drafter was not the same after a reload: {f.reloaded or 'no fingerprint'}."
        )
    slept = {
        None: "there is no sleep on this device",
        True: "sleep discarded it",
        False: "sleep kept it",
    }[f.lost_in_sleep]
    return Finding("ok", what, f"{slept}; after a reload ({f.reload_s:.2f} s) the fingerprint is the published one")


def _costs(f: Found) -> list[Finding]:
    if not f.costs or not f.stock or not f.off or OFF not in f.costs:
        return [Finding("warn", "step cost", "The costs of a step could not be measured here; see the engine's log.")]
    findings = []
    share = sum(f.off[b] / f.stock[b] for b in f.stock) / len(f.stock)
    level: Level = "ok" if share <= DEAR else "warn"
    said = ", ".join(f"batch {b}: {1e3 * f.off[b]:.2f} against {1e3 * f.stock[b]:.2f} ms" for b in f.stock)
    findings.append(Finding(level, "drafter off against stock", f"{share:.2f} times stock's step ({said})."))
    for k in sorted(k for k in f.costs if k >= 0):
        parts = []
        for batch, off in f.costs[OFF]:
            ratio = interpolate(f.costs[k], batch) / off
            parts.append(f"{batch}: {ratio:.2f}x")
        meaning = "the drafter's own pass" if k == 0 else "pays above this accept length"
        findings.append(Finding("ok", f"K={k} against off", f"by batch {', '.join(parts)}; {meaning}"))
    return findings


def _graphs(f: Found) -> Finding:
    what = "CUDA graphs"
    if not f.graph_gib:
        return Finding("ok", what, "no graphs are captured here (enforce_eager, or no such device)")
    taken = " GiB with a drafter, ".join(f"{gib:.2f}" for gib in f.graph_gib[:2])
    return Finding("ok", what, f"{taken} GiB" + (" without" if len(f.graph_gib) > 1 else " with a drafter"))


def _waking(f: Found) -> Finding:
    what = "waking beside a spot worker"
    if f.context_gib is None:
        return Finding("ok", what, "no device context on this device")
    if f.wake_error:
        sentence = (
            f"With another context of {f.context_gib:.2f} GiB on the device the engine did not wake: {f.wake_error}"
        )
        return Finding("refuse", what, f"{sentence}; lower actor_rollout_ref.rollout.gpu_memory_utilization.")
    return Finding(
        "ok", what, f"context {f.context_gib:.2f} GiB, {f.free_after_wake_gib or 0.0:.2f} GiB free after waking"
    )


def found_from(answer: dict[str, Any]) -> Found:
    """What the child process wrote, with its integer keys back."""

    def by_batch(node: dict[str, float] | None) -> dict[int, float] | None:
        return None if node is None else {int(k): v for k, v in node.items()}

    costs = answer["costs"] and {int(k): [(int(b), float(s)) for b, s in v] for k, v in answer["costs"].items()}
    return Found(**{**answer, "costs": costs, "stock": by_batch(answer["stock"]), "off": by_batch(answer["off"])})
