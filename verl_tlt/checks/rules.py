"""Can TLT run here? Rules over a composed verl config, the disk and what is installed, each with its findings.

`trainer.plugin=tlt` runs them in the driver before Ray starts; refusals are printed, and end the run.
`verl-tlt doctor` prints all findings.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from verl_tlt import flag
from verl_tlt.checks.models import METHOD, POLICY, Finding, check_policy, check_recipe_drafter
from verl_tlt.checks.recipe import (
    ROLLOUT,
    context_tokens,
    device_of,
    enforce_eager,
    engine_setting,
    number,
    policy_fields,
    ray_address,
    read_mapping,
    read_run_dir,
    replicas_on,
    save_dir,
    select,
    trace_dir,
    trainer_mode,
)
from verl_tlt.config import TLTConfig, TLTConfigError
from verl_tlt.drafter.check import place_for
from verl_tlt.errors import TLTError
from verl_tlt.files.disk import matching
from verl_tlt.idle.planner import MODE_RULES
from verl_tlt.server.engine_arguments import engine_lengths, graph_mode, problems
from verl_tlt.speculation.graph_rules import is_hybrid, runner_for
from verl_tlt.speculation.policies import make_policy
from verl_tlt.speculation.types import ControlError
from verl_tlt.upstream.versions import SUPPORTED, UNTESTED, Supported, installed, release

if TYPE_CHECKING:
    from omegaconf import DictConfig

ACTOR, MTP = "actor_rollout_ref.actor", "actor_rollout_ref.model.mtp"
QUANTIZES = (
    *(f"{ROLLOUT}.{name}" for name in ("quantization", "engine_kwargs.vllm.quantization")),
    *(f"{ACTOR}.{name}.qat.enable" for name in ("fsdp_config", "megatron")),
)
PLUGINS = "VERL_USE_EXTERNAL_PLUGINS"
DEVICES = ("cuda", "cpu")
"""What `trainer.device` may be; ROCm is "cuda", and the CPU is for tests."""
CAPTURE_STRATEGIES = ("fsdp", "fsdp2", "megatron")
"""Actor strategies whose engine has a hidden-state capture; the others can speculate, but not train the drafter."""
ROUTES_NEED_V2 = (0, 31, 0)
"""From this vLLM on routes of experts (`enable_return_routed_experts`) come from the V2 model runner alone."""
ROUTES_OF_POLICY = (0, 28, 0)
"""From this vLLM on it is known that routes are the policy's alone (vLLM PR 48622)."""
LAYOUTS_WITHOUT_CAPTURE = {
    "dynamic_context_parallel": "moves sequences between ranks in every step, which hidden-state capture cannot follow",
    "use_megatron_fsdp": "shards layers in a way that the hidden-state capture was never tried with",
}
"""Switches of `actor.megatron` with which the hidden-state capture does not work."""


def examine(config: DictConfig, settings: TLTConfig) -> list[Finding]:
    """All findings about a recipe that has TLT; a `TLTConfigError` where a key of the config cannot be resolved."""
    rules = (trainer, actor, rollout, files, idle_time)
    return [finding for rule in rules for finding in rule(config, settings)]


def switched_on(config: DictConfig) -> Finding:
    """Whether this recipe trains with TLT at all; a `TLTConfigError` where what says so cannot be resolved."""
    for key in (flag.SWITCH, "trainer.v1.trainer_mode", flag.NAME):
        select(config, key)  # `flag` would raise the error of OmegaConf
    if sentence := flag.refusal(config):
        return Finding("refuse", flag.SWITCH, f"TLT is off: {sentence}")
    if flag.wanted(config):
        plugins = os.environ.get(PLUGINS, "auto").strip().lower()  # as verl reads it
        if plugins != "auto" and flag.NAME not in {name.strip() for name in plugins.split(",")}:
            unread = f"{PLUGINS}={plugins} keeps verl from loading TLT: unset it, or add {flag.NAME} to it."
            return Finding("refuse", PLUGINS, unread)
        return Finding("ok", flag.SWITCH, "TLT is on")
    stock = "this recipe trains with stock verl until +trainer.plugin=tlt is added"
    return Finding("if", flag.SWITCH, f"TLT is off: {stock}.")


# ---------------------------------------------------------------------- installed packages


def examine_packages() -> list[Finding]:
    """The releases of the packages that verl-tlt relies on."""
    found = [judge_version(s, installed(s.name)) for s in SUPPORTED]
    if installed("verl") and not installed(queue := "transfer_queue"):  # verl has it in an extra alone
        needs = "verl's v1 trainer imports it: pip install 'TransferQueue>=0.1.10'"
        found.append(Finding("refuse", queue, f"{queue} is not installed here, and {needs}."))
    return found


def judge_version(supported: Supported, version: str | None) -> Finding:
    """Compare the installed release of a package with those that verl-tlt was tested with."""
    name = supported.name
    needs = f"verl-tlt was tested with {supported.tested}: {supported.remedy}"
    if version is None:
        return Finding("refuse", name, f"{name} is not installed here; {needs}.")
    if supported.includes(version):
        return Finding("ok", name, f"{name} {version}")
    which = "of an unknown release" if version == "unknown" else version
    here = f"{name} {which} is installed, and {needs}"
    if os.environ.get(UNTESTED) == "1":
        return Finding("warn", name, f"{here}; the run goes on because {UNTESTED}=1.")
    return Finding("refuse", name, f"{here}, or try this release with {UNTESTED}=1 in the environment.")


# ---------------------------------------------------------------------- the recipe


def trainer(config: DictConfig, _settings: TLTConfig) -> Iterator[Finding]:
    """The trainer must be verl's v1 trainer in a mode that has a TLT form."""
    rollout_pool = ("rollout.nnodes", "rollout.n_gpus_per_node")
    if all(select(config, key) is not None for key in rollout_pool):
        other = f"the config has {' and '.join(rollout_pool)}, as those of verl's experimental trainers"
        yield Finding("refuse", "rollout", f"{other}, and trainer.plugin=tlt works with verl.trainer.main_ppo only.")
    device = device_of(config)
    if device not in DEVICES:
        yield Finding(
            "refuse", "trainer.device", f"trainer.device={device} is not supported; verl-tlt needs CUDA or ROCm."
        )
    if not select(config, "trainer.use_v1", True):
        yield Finding("refuse", "trainer.use_v1", "trainer.use_v1=False selects the legacy trainer, and TLT needs v1.")
    key = "trainer.v1.trainer_mode"
    mode = trainer_mode(config) or "null"
    if mode in MODE_RULES:
        yield Finding("ok", key, f"{key}={mode}")
    else:
        known = f"it has {', '.join(MODE_RULES)}"
        yield Finding("refuse", key, f"{key}={mode} has no TLT trainer in this release; {known}.")


def actor(config: DictConfig, settings: TLTConfig) -> Iterator[Finding]:
    """Whether the drafter can learn from the actor's hidden states."""
    key = f"{ACTOR}.strategy"
    strategy = f"{key}={select(config, key, '')}"
    if verl_trains_the_head(config, settings):
        alone = "verl trains the MTP head and sends it with every weight sync; TLT chooses draft lengths"
        yield Finding("warn", f"{MTP}.enable_train", f"{MTP}.enable_train=True: {alone}, and trains nothing.")
    elif drafter_drafts(settings):
        yield _training(config, settings, strategy)
    elif settings.spot.enable and not settings.speculation.enable and (no_capture := why_no_capture(config)):
        cause, why = no_capture
        yield Finding("warn", cause, f"{why}, so nothing is drafted and nothing is trained.")
    else:
        yield Finding("ok", key, f"{strategy}; no drafter drafts")


def _training(config: DictConfig, settings: TLTConfig, strategy: str) -> Finding:
    """Whether the drafter that engines use is trained; `strategy` is the actor's, as KEY=VALUE."""
    given = settings.drafter.path or settings.drafter.method == "mtp"
    random = "Without tlt.drafter.path, or a drafter in the checkpoint, it is random and gives no speed-up."
    key = f"{ACTOR}.strategy"
    if not settings.spot.enable:
        if given:
            return Finding("ok", key, f"{strategy}; tlt.spot.enable=False, so the drafter stays as it is loaded")
        return Finding("warn", "tlt.spot.enable", f"tlt.spot.enable=False: the drafter is never trained. {random}")
    no_capture = why_no_capture(config)
    if no_capture is None:
        return Finding("ok", key, strategy)
    cause, why = no_capture
    untrained = f"{why}, so the drafter stays as it is loaded."
    return Finding("warn", cause, untrained if given else f"{untrained} {random}")


def drafter_drafts(settings: TLTConfig) -> bool:
    """Whether engines draft with a drafter."""
    return settings.speculation.enable and settings.speculation.source != "ngram"


def trains(config: DictConfig, settings: TLTConfig) -> bool:
    """Whether the spot trainer trains a drafter. It also does with speculation turned off, for later runs."""
    drafts_are_ngrams = settings.speculation.enable and settings.speculation.source == "ngram"
    if drafts_are_ngrams or why_no_capture(config) or select(config, "trainer.val_only", False):
        return False
    return settings.spot.enable and not verl_trains_the_head(config, settings)


def trains_beside_engines(config: DictConfig, settings: TLTConfig) -> bool:
    """Whether the spot trainer trains a drafter on devices of engines, and not on the trainer's own."""
    rule = MODE_RULES.get(trainer_mode(config))
    return rule is not None and rule.idle == "replicas" and trains(config, settings)


def verl_trains_the_head(config: DictConfig, settings: TLTConfig) -> bool:
    """Whether the MTP head that drafts is trained by verl, with the policy."""
    on = select(config, f"{MTP}.enable", False) and select(config, f"{MTP}.enable_train", False)
    return settings.drafter.method == "mtp" and bool(on)


def _verls_mtp(config: DictConfig, settings: TLTConfig) -> Iterator[tuple[str, str]]:
    """(key, sentence) for each of verl's own MTP settings that does not go with TLT's."""
    rollout_key = f"{MTP}.enable_rollout"
    train_key = f"{MTP}.enable_train"
    strategy = select(config, f"{ACTOR}.strategy", "")
    head_in_rollout = select(config, f"{MTP}.enable", False) and select(config, rollout_key, False)
    if head_in_rollout and settings.drafter.method != "mtp":
        instead = f"set {METHOD}=mtp, and TLT chooses K for it"
        yield rollout_key, f"{rollout_key}=True drafts with the policy's own MTP head: {instead}."
    if not verl_trains_the_head(config, settings):
        return
    if strategy != "megatron":
        instead = f"without it TLT trains the MTP head under {strategy}"
        yield train_key, f"{train_key}=True trains with Megatron only; {instead}."
    elif not head_in_rollout:
        kept = "only then does verl keep the MTP head while engines sleep"
        yield rollout_key, f"{rollout_key} must be True beside {train_key}=True: {kept}."


def why_no_capture(config: DictConfig) -> tuple[str, str] | None:
    """Why the drafter cannot learn from the actor, as (key, beginning of a sentence); None where it can."""
    key = f"{ACTOR}.strategy"
    strategy = select(config, key, "")
    if strategy not in CAPTURE_STRATEGIES:
        return key, f"{key}={strategy} has no hidden-state capture (only {', '.join(CAPTURE_STRATEGIES)} have)"
    if strategy == "megatron":
        if policy_fields(config).get("vision_config"):
            return key, f"{key}=megatron has no hidden-state capture for a policy that takes images"
        for name, why in LAYOUTS_WITHOUT_CAPTURE.items():
            key = f"{ACTOR}.megatron.{name}"
            if select(config, key, False):
                return key, f"{key}=True {why}"
    key = "algorithm.rollout_correction.bypass_mode"
    if select(config, key, False):
        return key, f"{key}=True skips the old-log-prob forward that feeds the drafter"
    return None


def rollout(config: DictConfig, settings: TLTConfig) -> Iterator[Finding]:
    """The engine must be vLLM, in a form that can speculate, and not configured twice."""
    read_mapping(config, f"{ROLLOUT}.custom")  # TLT's settings are added to it, so it must be a mapping
    wrong = [*_engine(config, settings), *_verls_mtp(config, settings)]
    for key, sentence in wrong:
        yield Finding("refuse", key, sentence)
    if not wrong:
        yield Finding("ok", f"{ROLLOUT}.name", f"{ROLLOUT}.name=vllm")
    if settings.speculation.enable and is_hybrid(policy_fields(config)):
        yield from _hybrid_policy(config, settings)
    if settings.speculation.enable and ":" in settings.speculation.policy:
        yield from _own_policy(config, settings)
    key = f"{ROLLOUT}.full_determinism"
    if select(config, key, False) and settings.speculation.enable:
        other = "draft lengths follow measured times, so two runs draw other tokens of the same distribution"
        yield Finding("warn", key, f"{key}=True does not hold: {other}; tlt.speculation.enable=False decodes as stock.")


def _own_policy(config: DictConfig, settings: TLTConfig) -> Iterator[Finding]:
    """Whether the user's own policy can be imported and built."""
    try:
        make_policy(settings.speculation.policy, draft_lengths(config, settings), 1)
    except ControlError as error:
        yield Finding("if", "tlt.speculation.policy", str(error))


def _hybrid_policy(config: DictConfig, settings: TLTConfig) -> Iterator[Finding]:
    """What drafting costs with a hybrid policy (linear attention)."""
    key = f"{ROLLOUT}.enable_prefix_caching"
    if engine_setting(config, "enable_prefix_caching", False):
        off = f"{key} is turned off, because it was not tested with drafts for a hybrid policy (linear attention)"
        yield Finding("warn", key, f"{off}: each response of a prompt computes the prompt again.")
    key = "tlt.speculation.max_draft_length"
    longest = draft_lengths(config, settings)[-1]
    states = f"with {key}={longest} a request of this hybrid policy takes {1 + longest} recurrent states, not one"
    yield Finding("warn", key, f"{states}: if too few requests fit, make it smaller.")


def draft_lengths(config: DictConfig, settings: TLTConfig) -> tuple[int, ...]:
    """Draft lengths of the engines, which have CUDA graphs for some only; ascending."""
    user = read_mapping(config, f"{ROLLOUT}.engine_kwargs.vllm")
    return engine_lengths(settings, graph_mode(user, enforce_eager(config)))


def _engine(config: DictConfig, settings: TLTConfig) -> Iterator[tuple[str, str]]:
    """(key, sentence) for each reason why the rollout engine cannot speculate."""
    key = f"{ROLLOUT}.name"
    name = select(config, key, "")
    if name != "vllm":
        named = f"{key}={name} is not supported" if name else f"{key} is not set"
        yield key, f"{named}; verl-tlt works with vllm only."
    key = f"{ROLLOUT}.disaggregation"
    if select(config, f"{key}.enabled", False):
        yield key, f"{key}.enabled=True is not supported; verl-tlt needs engines that prefill and decode."
    key = f"{ROLLOUT}.checkpoint_engine.backend"
    backend = select(config, key)
    mode = trainer_mode(config)
    if backend == "delta_sharded":
        why = "it sends only what has changed of the weights, and the drafter's shared parts would stay as they were"
        yield key, f"{key}={backend} is not supported: {why}."
    if backend == "naive" and mode == "separate_async":
        yield key, f"verl does not take {key}=naive with trainer.v1.trainer_mode={mode}: set another, such as nccl."
    if drafter_drafts(settings):
        for key in QUANTIZES:
            value = select(config, key)
            if value:
                why = "the drafter learns from the actor's weights, and the engine has quantized ones"
                instead = "Remove it, or set tlt.speculation.enable=False."
                yield key, f"{key}={value} is not supported with a drafter: {why}. {instead}"
    if settings.speculation.enable:
        yield from _with_drafts(config, settings)


def _with_drafts(config: DictConfig, settings: TLTConfig) -> Iterator[tuple[str, str]]:
    """(key, sentence) for what does not go with engines that speculate."""
    user = read_mapping(config, f"{ROLLOUT}.engine_kwargs.vllm")
    hybrid = is_hybrid(policy_fields(config))
    if installed("vllm"):
        for sentence in problems(settings, user, enforce_eager(config), hybrid):
            yield f"{ROLLOUT}.engine_kwargs", sentence
    agree = "data parallelism inside one engine would need all its ranks to agree on every draft length"
    stages = "in a pipeline vLLM hands no drafts from its last stage to the first"
    for key, why in (
        ("data_parallel_size", agree),
        ("engine_kwargs.vllm.data_parallel_size", agree),
        ("engine_kwargs.vllm.pipeline_parallel_size", stages),
    ):
        ranks = number(config, f"{ROLLOUT}.{key}", 1)
        if ranks > 1:
            instead = f"use more replicas or {ROLLOUT}.tensor_model_parallel_size, or set tlt.speculation.enable=False"
            yield f"{ROLLOUT}.{key}", f"{ROLLOUT}.{key}={ranks} is not supported: {why}; {instead}."
    replay_key = f"{ROLLOUT}.enable_rollout_routing_replay"
    if select(config, replay_key, False):
        yield from _expert_routes(settings, replay_key)
    elif user.get("enable_return_routed_experts"):
        yield from _expert_routes(settings, f"{ROLLOUT}.engine_kwargs.vllm.enable_return_routed_experts")


def _expert_routes(settings: TLTConfig, key: str) -> Iterator[tuple[str, str]]:
    """(key, sentence) for each reason why engines that speculate cannot return the routes that `key` asks for."""
    version = installed("vllm")
    vllm = release(version or "") or (0, 0, 0)
    if vllm >= ROUTES_NEED_V2 and runner_for(vllm[:2]) == "V1":
        why = f"vLLM {version} returns routes of experts from its V2 runner alone, and drafts on V1 here"
        yield key, f"{key}=True: {why}; set tlt.speculation.enable=False, or take vLLM 0.30."
    if vllm < ROUTES_OF_POLICY and settings.drafter.method == "mtp":
        why = f"vLLM {version} may return the routes of the MTP head's experts as the policy's"
        yield key, f"{key}=True with tlt.drafter.method=mtp: {why}; take vLLM 0.28 to 0.30."


def files(config: DictConfig, settings: TLTConfig) -> Iterator[Finding]:
    """The run's folder must be named, and policy, drafter and data be there before workers start."""
    key = "trainer.default_local_dir"
    run_dir = read_run_dir(config)
    if ray_address(config) and not os.path.isabs(run_dir):
        differ = "on a Ray cluster verl takes it from the directory where Ray was started, TLT from this one"
        yield Finding("warn", key, f"{key}={run_dir} is relative: {differ}; give an absolute path.")
    if ray_address(config).startswith("ray://"):  # the driver's disk is not the cluster's
        unchecked = "Ray is reached through a client, so paths on the cluster were not checked from here."
        yield Finding("warn", "ray_init.address", unchecked)
        return
    absent = list(_absent_data(config))
    yield from absent or [Finding("ok", "data.train_files", "data files found")]
    policy = str(select(config, POLICY, ""))
    yield check_policy(policy, settings.drafter.method)
    yield check_recipe_drafter(settings, policy, context_tokens(config))
    yield from _places(config, settings)


def _places(config: DictConfig, settings: TLTConfig) -> Iterator[Finding]:
    """Folders of the user's choice that the run could not write to; at its end it would be too late to say so."""
    trace = trace_dir(config, settings)
    if os.path.exists(trace) and not os.path.isdir(trace):
        yield Finding("refuse", "tlt.trace.dir", f"tlt.trace.dir={trace} is not a folder.")
    if settings.spot.enable:
        key = "tlt.drafter.save_dir"
        try:
            others = (read_run_dir(config), trace)
            place_for(save_dir(config, settings), key, replaces=True, others=others)
        except TLTError as error:
            yield Finding("refuse", key, str(error))


def _absent_data(config: DictConfig) -> Iterator[Finding]:
    """Data files that verl's own dataset would not find on this machine; a custom one reads what it likes."""
    if select(config, "data.custom_cls.path"):
        return
    for key in ("data.train_files", "data.val_files"):
        value = select(config, key, [])
        paths = value if isinstance(value, list) else [value]
        for path in paths:
            if isinstance(path, str) and "://" not in path and not matching(path):
                yield Finding("if", key, f"{key}={path} does not exist on this machine.")


def idle_time(config: DictConfig, settings: TLTConfig) -> Iterator[Finding]:
    """The drafter is trained while one replica waits for another, so there must be another."""
    what = "trainer.n_gpus_per_node"
    if not trains_beside_engines(config, settings):
        return
    try:
        replicas = replicas_on(config, "trainer")
    except TLTConfigError as error:
        yield Finding("refuse", what, str(error))
        return
    if replicas > 1:
        yield Finding("ok", what, f"{replicas} replicas, so that some can train while others decode")
    else:
        alone = f"{what} and trainer.nnodes make one replica alone, which never waits for another"
        remedy = f"use more devices, or a smaller {ROLLOUT}.tensor_model_parallel_size"
        yield Finding("warn", what, f"{alone}, so the drafter is trained in a cold start at most: {remedy}.")
