"""What vLLM is started with, from TLT's settings: engine arguments, environment variables, draft lengths."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from verl_tlt.config import TLTConfig, TLTConfigError
from verl_tlt.speculation import graph_rules
from verl_tlt.upstream.versions import installed, release

if TYPE_CHECKING:
    from verl.workers.config import RolloutConfig
    from vllm.v1.engine.async_llm import AsyncLLM

WHERE = "actor_rollout_ref.rollout.engine_kwargs.vllm"
WORKER_EXTENSION = "verl_tlt.vllm_worker.extension.TLTWorkerExtension"
"""What vLLM mixes into the workers of an engine that speculates."""
OWN_ARGUMENTS = (
    "speculative_config", "spec_method", "spec_model", "spec_tokens", "scheduler_cls", "worker_extension_cls",
)  # fmt: skip
WITHOUT_A_DRAFTER = {
    "reasoning_config": "is for thinking_token_budget, for which every engine that speculates forces other tokens",
    "logits_processors": "cannot be used with a drafter (vLLM refuses it)",
    "return_sampling_mask": "cannot be used with a drafter (vLLM refuses it)",
}
"""Engine arguments that go with no drafter, and why, as the middle of a sentence."""


def graph_mode(user: Mapping[str, Any], enforce_eager: bool) -> str:
    """The `cudagraph_mode` of an engine that verifies drafts, as verl asks for it and vLLM can follow; "NONE": eager.

    There are no FULL graphs with decode context parallelism (verl's `vllm_async_server.py:320`), nor where FlashInfer
    is asked for by name without TensorRT-LLM's kernels (vLLM's `FlashInferMetadataBuilder.get_cudagraph_support`).
    """
    if enforce_eager:
        return "NONE"
    compilation = _mapping(user, "compilation_config")
    attention = _mapping(user, "attention_config")
    mode = str(compilation.get("cudagraph_mode") or "FULL_AND_PIECEWISE").upper()
    backend = str(user.get("attention_backend") or attention.get("backend") or "").upper()
    splits_contexts = _ranks(user, "decode_context_parallel_size") > 1
    if not graph_rules.has_full_graphs(mode):
        return mode
    if splits_contexts and mode == "FULL_AND_PIECEWISE":
        return "PIECEWISE"
    if "FLASHINFER" in backend and "MLA" not in backend and not attention.get("use_trtllm_attention"):
        return "PIECEWISE"
    return mode


def _ranks(user: Mapping[str, Any], key: str) -> int:
    """An engine argument that is a number of ranks; 1 where it is absent."""
    value = user.get(key) or 1
    try:
        return int(value)
    except (TypeError, ValueError):
        raise TLTConfigError(f"{WHERE}.{key} must be a whole number, not {value!r}.") from None


def _mapping(user: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """An engine argument that is a mapping or its JSON; empty where it is absent."""
    value = user.get(key) or {}
    if isinstance(value, str):
        with suppress(ValueError):
            value = json.loads(value)
    if not isinstance(value, Mapping):
        raise TLTConfigError(f"{WHERE}.{key} must be a mapping or its JSON, not {value!r}.")
    return value


def engine_lengths(tlt: TLTConfig, mode: str) -> tuple[int, ...]:
    """The draft lengths the policy may choose from, ascending from 0: with FULL graphs only lengths that have them."""
    longest = tlt.speculation.max_draft_length
    offered = graph_rules.GRAPH_LENGTHS if graph_rules.has_full_graphs(mode) else range(longest + 1)
    return tuple(k for k in offered if k <= longest)


def started_lengths(engine: AsyncLLM) -> tuple[int, ...]:
    return tuple(engine.vllm_config.additional_config["tlt"]["arms"])


def most_requests(engine: AsyncLLM) -> int:
    """Most requests that an engine decodes at once; vLLM's own setting (`engine_kwargs`) has won."""
    return int(engine.vllm_config.scheduler_config.max_num_seqs)


def speculative_config(
    drafter_dir: str, draft_length: int, source: str = "eagle", method: str = "eagle3"
) -> dict[str, Any]:
    """vLLM's `speculative_config`: an EAGLE-3 drafter, the policy's MTP head, or for n-grams a proposer of nothing.

    Drafts are sampled: at temperature 1 a greedy draft is accepted with p(argmax) only. `draft_load_config` overrides
    verl's `load_format=dummy`, which would give random weights. vLLM looks for an MTP head where the policy is.
    Drafts are verified token by token: vLLM's block verification is biased. Its V2 runner draws the same random numbers
    for a position in every step, and in a block they have decided before how many drafts are accepted.
    """
    if source == "ngram":  # the scheduler drafts (engine_core/ngram_drafts.py)
        proposer = "verl_tlt.vllm_worker.drafter_pass.NoProposals"
        return {"method": "custom_class", "model": proposer, "num_speculative_tokens": draft_length}
    return {
        "method": method,
        **({"model": drafter_dir} if method == "eagle3" else {}),
        "num_speculative_tokens": draft_length,
        "draft_sample_method": "probabilistic",
        "draft_load_config": {"load_format": "auto"},
    }


def engine_kwargs(
    tlt: TLTConfig,
    drafter_dir: str,
    rollout: RolloutConfig,
    user: Mapping[str, Any],
    on_cpu: bool | None = None,
    hybrid: bool = False,
) -> dict[str, Any]:
    """Keyword arguments for vLLM on top of verl's own and the user's (`rollout.engine_kwargs.vllm`).

    `on_cpu` is whether vLLM runs on its CPU backend; None: ask vLLM. `hybrid`: `graph_rules.is_hybrid` of the policy.
    `TLTConfigError`: no drafter goes with what `user` asks for.
    """
    eager = user.get("enforce_eager")
    enforce_eager = bool(rollout.enforce_eager if eager is None else eager)
    problem = next(problems(tlt, user, enforce_eager, hybrid), None)
    if problem is not None:
        raise TLTConfigError(problem)
    if on_cpu is None:
        from vllm.platforms import current_platform

        on_cpu = bool(current_platform.is_cpu())
    mode = graph_mode(user, enforce_eager)
    source = tlt.speculation.source
    lengths = engine_lengths(tlt, mode)
    is_async = source == "eagle" and not on_cpu and not hybrid and _asks_async(user)
    # Drafts longer than the policy chooses would only reserve memory and, with CUDA graphs, capture unused widths.
    speculative = speculative_config(drafter_dir, max(1, lengths[-1]), source, tlt.drafter.method)
    if graph_rules.has_full_graphs(mode) and graph_rules.runner_for(_release()) == "V2":
        largest = int(user.get("max_num_seqs") or rollout.max_num_seqs)
        speculative["num_speculative_tokens_per_batch_size"] = graph_rules.draft_length_table(lengths, largest)
    return {
        "speculative_config": speculative,
        "scheduler_cls": f"verl_tlt.engine_core.scheduler.{'TLTAsyncScheduler' if is_async else 'TLTScheduler'}",
        "async_scheduling": is_async,
        **(for_hybrids() if hybrid else {}),
        # Part of vLLM's compile-cache key: static values only, the same on every replica.
        "additional_config": {
            **_mapping(user, "additional_config"),
            "tlt": {"speculation": tlt.to_dict()["speculation"], "arms": list(lengths)},
        },
    }


def _asks_async(user: Mapping[str, Any]) -> bool:
    """Whether vLLM would schedule asynchronously on a GPU: as the user says, or else with these two executors."""
    asked = user.get("async_scheduling")
    if asked is None:
        return user.get("distributed_executor_backend", "mp") in ("mp", "uni")  # "mp" is verl's choice
    return bool(asked)


def for_hybrids() -> dict[str, Any]:
    """vLLM's arguments for drafts of a hybrid policy (`vllm_worker.hybrid_states`)."""
    return {"async_scheduling": False, "enable_prefix_caching": False}


def engine_environment() -> dict[str, str]:
    """Environment variables that choose the model runner which drafts the length it is asked for."""
    return {graph_rules.V2_RUNNER: "0"} if graph_rules.runner_for(_release()) == "V1" else {}


def problems(tlt: TLTConfig, user: Mapping[str, Any], enforce_eager: bool, hybrid: bool = False) -> Iterator[str]:
    """One sentence for each reason why `user` (`rollout.engine_kwargs.vllm`) cannot be combined with speculation.

    The doctor asks before Ray starts (`verl_tlt.checks.rules`), and each engine once more when it is launched. A
    `TLTConfigError` for a value of another kind than its argument's.
    """
    if _release() < graph_rules.OLDEST:
        yield f"vLLM {installed('vllm')} cannot change the draft length per step: install 0.24 or later."
        return
    for key in user:
        if key == "config" or not str(key).isidentifier():
            yield f"{WHERE}.{key} hides arguments from verl-tlt; write each as a key of its own, with underscores."
    for key in OWN_ARGUMENTS:
        if user.get(key) is not None:
            yield f"{WHERE}.{key} is set by verl-tlt itself; remove it, or set tlt.speculation.enable=false."
    for key, why in WITHOUT_A_DRAFTER.items():
        if user.get(key):
            yield f"{WHERE}.{key} {why}; remove it, or set tlt.speculation.enable=false."
    for plugin in entry_points(group="vllm.logits_processors"):
        yield (
            f"vLLM does not apply the installed logits processor {plugin.value} where it speculates: uninstall it, or "
            "set tlt.speculation.enable=false."
        )
    if user.get("kv_transfer_config"):
        yield f"{WHERE}.kv_transfer_config (disaggregated prefill) is not supported with a drafter by verl-tlt."
    if user.get("async_scheduling") and tlt.speculation.source == "ngram":
        yield (
            f"{WHERE}.async_scheduling=True is not possible with tlt.speculation.source=ngram: "
            "n-grams are proposed by the scheduler, and with it no draft passes the scheduler."
        )
    if tlt.drafter.method == "mtp" and tlt.speculation.source == "ngram":
        yield "tlt.speculation.source=ngram drafts without a head: remove it, or tlt.drafter.method=mtp."
    yield from _v2_problems(tlt, hybrid)
    if hybrid:
        yield from _hybrid_problems(tlt, user)
    _mapping(user, "additional_config")
    lengths = engine_lengths(tlt, graph_mode(user, enforce_eager))
    fixed = tlt.speculation.fixed
    if tlt.speculation.policy == "fixed" and fixed is not None and fixed not in lengths:
        yield f"tlt.speculation.fixed={fixed} is none of the engine's draft lengths {list(lengths)}."


def _v2_problems(tlt: TLTConfig, hybrid: bool) -> Iterator[str]:
    """What is drafted on vLLM's V1 model runner only, whose last release is 0.31."""
    if _release() < graph_rules.V2_DRAFTS_FROM:
        return
    unsupported = {
        "tlt.drafter.method=mtp": tlt.drafter.method == "mtp",
        "tlt.speculation.source=ngram": tlt.speculation.source == "ngram",
        "A hybrid policy (linear attention)": hybrid,
    }
    for what, asked in unsupported.items():
        if asked:
            yield (
                f"{what} does not speculate with vLLM {installed('vllm')}: "
                "install vLLM 0.24 to 0.31, or set tlt.speculation.enable=false."
            )


def _hybrid_problems(tlt: TLTConfig, user: Mapping[str, Any]) -> Iterator[str]:
    """Further reasons with a policy that has recurrent states (`vllm_worker.hybrid_states`)."""
    if tlt.speculation.source != "eagle":
        yield "tlt.speculation.source=ngram was not tested with a hybrid policy (linear attention): use eagle."
    if user.get("async_scheduling"):
        yield (
            f"{WHERE}.async_scheduling=True is not possible with a hybrid policy (linear attention): how many drafts "
            "were accepted is then known to the device alone, and a request that sits out a step loses it."
        )


def _release() -> tuple[int, int]:
    numbers = release(installed("vllm") or "")
    if numbers is None:
        raise TLTConfigError("vLLM is not installed here, and verl-tlt speculates with vLLM 0.24 or later.")
    return numbers[:2]
