"""From TLT's settings to what vLLM is started with. Pure functions: facts in, keyword arguments out.

What decides here is data about vLLM releases (`research` behind docs/adaptive-speculation.md): which draft lengths have
CUDA graphs, which scheduler base drafts at all, what cannot be combined with a drafter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl_tlt.config import TLTConfig, TLTConfigError
from verl_tlt.control.types import OFF
from verl_tlt.rollout.latency_table import Table, interpolate
from verl_tlt.versions import installed, release

OWN_ARGUMENTS = ("speculative_config", "scheduler_cls", "worker_extension_cls")
GRAPH_ARMS_24 = (0, 1, 3)
"""vLLM 0.24 with CUDA graphs: a FULL graph exists for 1 + K_max = 4 tokens a request, and two can be added."""
GRAPH_ARMS = (0, 1, 3, 7)
"""Later releases: query lengths 1, 2, 4, 8 divide every captured size, so that no batch falls between graphs."""
OLDEST = (0, 24)
V2_DRAFTS_TO_LENGTH = (0, 32)
"""First release whose V2 model runner drafts the K asked for; before it drafts K_max whatever the scheduler says."""
HOPELESS = 0.05
"""A drafter accepted less often than this nowhere pays, whatever a step costs: each draft token costs more than 5 %."""
WORTH = 0.97
"""Drafting must be expected to cut the time of a draining rollout to this share before the drafter runs at all."""


def engine_arms(tlt: TLTConfig, enforce_eager: bool, version: str | None = None) -> tuple[int, ...]:
    """The draft lengths the policy may choose from, ascending, starting with 0.

    Args:
        tlt: all settings.
        enforce_eager: no CUDA graphs, so every length up to K_max costs what it costs; else only lengths with graphs.
        version: vLLM's; null: the installed one.
    """
    s = tlt.speculation
    if s.arms is not None:
        return s.arms
    if enforce_eager:
        return tuple(range(s.max_draft_length + 1))
    graphs = GRAPH_ARMS_24 if _release(version) == OLDEST else GRAPH_ARMS
    return tuple(k for k in graphs if k <= s.max_draft_length)


def speculative_config(drafter_dir: str, draft_length: int) -> dict[str, Any]:
    """VLLM's `speculative_config` for an EAGLE-3 drafter.

    Drafts are sampled: at temperature 1 a greedy draft is accepted with p(argmax) only. `draft_load_config` overrides
    verl's `load_format=dummy`, which would give the drafter random weights and the policy's head.
    """
    return {
        "method": "eagle3",
        "model": drafter_dir,
        "num_speculative_tokens": draft_length,
        "draft_sample_method": "probabilistic",
        "draft_load_config": {"load_format": "auto"},
    }


def engine_kwargs(
    tlt: TLTConfig,
    drafter_dir: str,
    rollout: Any,
    user: Mapping[str, Any],
    *,
    on_cpu: bool | None = None,
    version: str | None = None,
) -> dict[str, Any]:
    """Keyword arguments for vLLM on top of verl's own.

    Args:
        tlt: all settings.
        drafter_dir: directory with config.json and model.safetensors, on this node.
        rollout: verl's rollout config; `enforce_eager` is read.
        user: `rollout.engine_kwargs.vllm`, which wins over verl's values.
        on_cpu: whether vLLM runs on its CPU backend; null: ask vLLM.
        version: vLLM's; null: the installed one.

    Raises:
        TLTConfigError: `user` asks for something that cannot run together with a drafter.
    """
    refuse(user, version)
    arms = engine_arms(tlt, bool(user.get("enforce_eager", rollout.enforce_eager)), version)
    fixed = tlt.speculation.fixed
    if tlt.speculation.policy == "fixed" and fixed is not None and fixed not in arms:
        raise TLTConfigError(f"tlt.speculation.fixed={fixed} is none of the engine's draft lengths {list(arms)}.")
    is_async = async_scheduling(user, _on_cpu() if on_cpu is None else on_cpu)
    speculation = tlt.to_dict()["speculation"]
    return {
        # Longer drafts than the longest arm would only reserve memory and, with CUDA graphs, capture unused widths.
        "speculative_config": speculative_config(drafter_dir, max(1, arms[-1])),
        "scheduler_cls": f"verl_tlt.rollout.scheduler.{'TLTAsyncScheduler' if is_async else 'TLTScheduler'}",
        "async_scheduling": is_async,
        # Part of vLLM's compile-cache key: static values only, the same on every replica.
        "additional_config": {
            **(user.get("additional_config") or {}),
            "tlt": {"speculation": speculation, "arms": list(arms), "seed": tlt.drafter.seed},
        },
    }


def engine_environment(version: str | None = None) -> dict[str, str]:
    """Environment variables the engine's processes need: the model runner that drafts the length it is asked for."""
    return {} if _release(version) >= V2_DRAFTS_TO_LENGTH else {"VLLM_USE_V2_MODEL_RUNNER": "0"}


def async_scheduling(user: Mapping[str, Any], on_cpu: bool) -> bool:
    """Whether vLLM will schedule asynchronously: as the user says, else wherever it can with an EAGLE drafter."""
    asked = user.get("async_scheduling")
    if on_cpu:  # vLLM's CPU platform turns it off whatever is asked
        return False
    executor = user.get("distributed_executor_backend", "mp")  # verl's choice
    return bool(asked) if asked is not None else executor in ("mp", "uni")


def refuse(user: Mapping[str, Any], version: str | None = None) -> None:
    """Raise TLTConfigError, one sentence, for engine arguments that cannot be combined with our speculation."""
    where = "actor_rollout_ref.rollout.engine_kwargs.vllm"
    if _release(version) < OLDEST:
        raise TLTConfigError(
            f"vLLM {version or installed('vllm')} cannot change the draft length per step: install 0.24 or later."
        )
    for key in OWN_ARGUMENTS:
        if user.get(key) is not None:
            raise TLTConfigError(
                f"{where}.{key} is set by verl-tlt itself; remove it, or set tlt.speculation.enable=false."
            )
    if int(user.get("data_parallel_size") or 1) > 1:
        raise TLTConfigError(
            f"{where}.data_parallel_size must be 1: data-parallel ranks inside one engine would choose different draft "
            "lengths and wait for each other forever; use more replicas."
        )
    if user.get("logits_processors"):
        raise TLTConfigError(
            f"{where}.logits_processors cannot be used with a drafter (vLLM refuses them); remove them or set "
            "tlt.speculation.enable=false."
        )
    if user.get("kv_transfer_config"):
        raise TLTConfigError(
            f"{where}.kv_transfer_config (disaggregated prefill) is not supported with a drafter by verl-tlt."
        )


def worth_drafting(acceptance: Sequence[float], latency: Table, policy: str) -> bool:
    """Whether the drafter should run at all in the coming rollout; if not, the engine decodes as stock (arm OFF).

    Expected time of a rollout that spends as long, decoded by stock, at each measured batch (batches are measured
    evenly in log scale, and a long-tailed rollout drains that way), with the best draft length at each batch, against
    OFF. Without measurements, or of an unknown drafter, drafting is tried: the policy finds out in a few steps.

    Args:
        acceptance: conditional acceptance per draft position, from held-out data; empty: unknown.
        latency: seconds by arm and batch, OFF included.
        policy: `tlt.speculation.policy`.
    """
    if policy == "off":
        return False
    if policy == "fixed" or not acceptance:
        return True
    if max(acceptance) < HOPELESS:
        return False
    if OFF not in latency:
        return True
    lengths = accept_lengths(acceptance, max(latency))
    arms = [k for k in latency if k >= 0]
    off = latency[OFF]
    if not arms:
        return True
    shares = [
        # A step with a drafter never takes less than one without; where it was measured so, that was noise.
        min(max(interpolate(latency[k], batch) / seconds, 1.0) / lengths[k] for k in arms)
        for batch, seconds in off
    ]  # time against OFF, one per measured batch
    return sum(shares) / len(shares) < WORTH


def accept_lengths(acceptance: Sequence[float], longest: int) -> list[float]:
    """τ(0..longest) from conditional acceptance per position; positions beyond the known repeat the last one."""
    lengths, chain = [1.0], 1.0
    for i in range(longest):
        chain *= acceptance[min(i, len(acceptance) - 1)]
        lengths.append(lengths[-1] + chain)
    return lengths


def _release(version: str | None) -> tuple[int, int]:
    found = release(version or installed("vllm") or "")
    if found is None:
        raise TLTConfigError("vLLM is not installed here, and verl-tlt speculates with vLLM 0.24 or later.")
    return found[:2]


def _on_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())
