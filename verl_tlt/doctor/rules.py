"""Can TLT run here? Every rule is a function from facts to findings, each one sentence that names the key or file.

`trainer.plugin=tlt` runs these rules in the driver before Ray starts and refuses on the first bad one; the command
`verl-tlt doctor` prints them as a table. Rules judge, `verl_tlt.doctor.facts` reads: nothing here touches disk or
packages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from verl_tlt.compat.upstream_api import Symbol
from verl_tlt.compat.versions import SUPPORTED, Release, Supported, release
from verl_tlt.config import TLTConfig
from verl_tlt.doctor.facts import Environment, RecipeFacts
from verl_tlt.doctor.models import DRAFTER, POLICY
from verl_tlt.idle.modes import MODES
from verl_tlt.idle.modes import RULES as MODE_RULES

Level = Literal["ok", "warn", "refuse"]

TAPPED = ("fsdp", "fsdp2", "megatron")
"""Actor strategies whose engine has a hidden-state tap; the others can speculate, but not train the drafter."""
UNTAPPED_LAYOUTS = {
    "dynamic_context_parallel": "deals sequences out to ranks anew in every step, which the tap cannot follow",
    "use_megatron_fsdp": "shards layers in a way that the tap was never tried with",
}
"""Keys of `actor.megatron`, where they are set."""


@dataclass(frozen=True)
class Finding:
    """What one rule says about one thing."""

    level: Level
    what: str
    """The key, package or file in question."""
    sentence: str


Rule = Callable[[RecipeFacts, TLTConfig], Iterator[Finding]]


def untapped(strategy: str, megatron: tuple[str, ...]) -> tuple[str, str] | None:
    """Why the drafter cannot learn from such an actor, as (key, beginning of a sentence); None where it can.

    Args:
        strategy: the actor's.
        megatron: keys of `actor.megatron` that are set.
    """
    if strategy not in TAPPED:
        key = "actor_rollout_ref.actor.strategy"
        return key, f"{key}={strategy} has no hidden-state tap (only {', '.join(TAPPED)} have)"
    for name in megatron if strategy == "megatron" else ():
        if name in UNTAPPED_LAYOUTS:
            key = f"actor_rollout_ref.actor.megatron.{name}"
            return key, f"{key}=True {UNTAPPED_LAYOUTS[name]}"
    return None


def examine(environment: Environment, run: RecipeFacts | None, settings: TLTConfig) -> list[Finding]:
    """All findings: is TLT on, the environment, the recipe; without a run only the environment is judged."""
    findings = [] if run is None else [switched_on(run)]
    findings += [judge_version(s, environment.versions.get(s.name)) for s in SUPPORTED]
    if run is not None:
        findings += [finding for rule in RULES for finding in rule(run, settings)]
    return findings


def switched_on(run: RecipeFacts) -> Finding:
    """Whether this recipe trains with TLT at all."""
    what = "trainer.plugin"
    if run.mistaken:
        return Finding("refuse", what, f"TLT is off: {run.mistaken}")
    if run.on:
        return Finding("ok", what, "TLT is on")
    return Finding(
        "warn",
        what,
        "TLT is off: this recipe trains with stock verl until +trainer.plugin=tlt or +tlt=default is added.",
    )


def judge_version(supported: Supported, version: str | None) -> Finding:
    """A package against the releases verl-tlt works with."""
    name = supported.name
    wanted = f"{name} {_text(supported.lowest)} or later"
    if supported.below:
        wanted += f" and below {_text(supported.below)}"
    if version is None:
        return Finding(
            "refuse", name, f"{name} is not installed here, and verl-tlt needs {wanted}: {supported.remedy}."
        )
    found = release(version)
    if found is None:
        return Finding("warn", name, f"{name} does not say its version here; verl-tlt needs {wanted}.")
    if found < supported.lowest or (supported.below and found >= supported.below):
        return Finding(
            "refuse", name, f"{name} {version} is installed, and verl-tlt needs {wanted}: {supported.remedy}."
        )
    if found[:2] > supported.newest_tested[:2]:
        newest = _text(supported.newest_tested)
        return Finding(
            "warn", name, f"{name} {version} is newer than {newest}, the newest that verl-tlt was tested with."
        )
    return Finding("ok", name, f"{name} {version}")


def _text(wanted: Release) -> str:
    return ".".join(map(str, wanted)).removesuffix(".0")


def judge_symbols(package: str, checked: Sequence[tuple[Symbol, str | None]]) -> Iterator[Finding]:
    """What the installed sources of a package lack of what verl-tlt relies on."""
    what = f"{package} symbols"
    wrong = [(symbol, problem) for symbol, problem in checked if problem]
    for symbol, problem in wrong:
        yield Finding("refuse", what, f"{symbol.name}, which verl_tlt/{symbol.used_by} relies on: {problem}.")
    if not wrong:
        yield Finding("ok", what, f"all {len(checked)} that verl-tlt relies on are as expected")


def trainer(run: RecipeFacts, _settings: TLTConfig) -> Iterator[Finding]:
    """The trainer must be verl's v1 trainer in a mode that has a TLT form."""
    what = "trainer.v1.trainer_mode"
    if run.other_trainer:
        yield Finding(
            "refuse",
            run.other_trainer,
            f"the config has a top-level `{run.other_trainer}` node, as verl's experimental trainers do, "
            "and trainer.plugin=tlt works with verl.trainer.main_ppo only.",
        )
    if not run.use_v1:
        yield Finding("refuse", "trainer.use_v1", "trainer.use_v1=False selects the legacy trainer, and TLT needs v1.")
    if run.trainer_mode == "separate_async" and not run.hybrid_engine:
        key = "actor_rollout_ref.hybrid_engine"
        yield Finding(
            "refuse",
            key,
            f"{key}=False leaves no replica on the trainer's devices, and TLT needs one with {what}=separate_async.",
        )
    mode = run.trainer_mode or "null"
    if mode in MODES:
        yield Finding("ok", what, f"{what}={mode}")
    else:
        yield Finding(
            "refuse",
            what,
            f"{what}={mode} has no TLT trainer in this release; it has {', '.join(MODES)}.",
        )


def actor(run: RecipeFacts, settings: TLTConfig) -> Iterator[Finding]:
    """What the actor's engine lets the drafter learn from."""
    what = "actor_rollout_ref.actor.strategy"
    if not settings.spot.enable:
        yield Finding("ok", what, f"{what}={run.strategy}; tlt.spot.enable=False, so the drafter stays as it is loaded")
    elif why := untapped(run.strategy, run.megatron):
        useless = (
            "" if settings.drafter.path else ", which without tlt.drafter.path is random and will not speed up anything"
        )
        yield Finding("warn", why[0], f"{why[1]}, so this run speculates with the drafter as it is loaded{useless}.")
    elif run.bypass_old_log_prob:
        key = "algorithm.rollout_correction.bypass_mode"
        yield Finding(
            "warn",
            key,
            f"{key}=True skips the old-log-prob forward that feeds the drafter, so the drafter is not trained.",
        )
    else:
        yield Finding("ok", what, f"{what}={run.strategy}")


def rollout(run: RecipeFacts, _settings: TLTConfig) -> Iterator[Finding]:
    """The engine must be vLLM, in a form that can speculate, and not configured twice."""
    node = "actor_rollout_ref.rollout"
    problems = []
    if run.rollout != "vllm":
        named = f"{node}.name={run.rollout} is not supported" if run.rollout else f"{node}.name is not set"
        problems.append((f"{node}.name", f"{named}; verl-tlt works with vllm only."))
    if run.disaggregation:
        problems.append(
            (
                f"{node}.disaggregation",
                f"{node}.disaggregation.enabled=True is not supported; verl-tlt needs engines that prefill and decode.",
            )
        )
    if run.data_parallel > 1:
        problems.append(
            (
                f"{node}.data_parallel_size",
                f"{node}.data_parallel_size={run.data_parallel} is not supported: data parallelism inside one engine "
                "would need all its ranks to agree on every draft length; use more replicas.",
            )
        )
    for key in run.refused_sampling:
        problems.append((key, f"{key} is set, and vLLM rejects it together with speculative decoding."))
    for sentence in run.engine_problems:
        problems.append((f"{node}.engine_kwargs", sentence))
    if run.quantized_by:
        problems.append(
            (
                run.quantized_by.partition("=")[0],
                f"{run.quantized_by} lets the rollout compute with other weights than the actor, whose hidden states "
                "teach the drafter, and drafters beside a quantized policy were not tested.",
            )
        )
    if run.mtp_rollout:
        key = "actor_rollout_ref.model.mtp.enable_rollout"
        problems.append((key, f"{key}=True drafts with the policy's own MTP head; use that or TLT, not both."))
    yield from (Finding("refuse", what, sentence) for what, sentence in problems)
    if not problems:
        yield Finding("ok", f"{node}.name", f"{node}.name={run.rollout}")


def files(run: RecipeFacts, settings: TLTConfig) -> Iterator[Finding]:
    """Policy, drafter and data must be there before workers start."""
    if run.remote_driver:
        yield Finding(
            "warn",
            "ray_init.address",
            "Ray is reached through a client, so paths on the cluster were not checked from here.",
        )
        return
    for key, path in run.missing_data:
        yield Finding("refuse", key, f"{key}={path} does not exist on this machine.")
    if not run.missing_data:
        yield Finding("ok", "data.train_files", "data files found")
    supported = f"{POLICY} is a {run.policy.family} model, which drafters are made for"
    given = f"{DRAFTER} is usable"
    none = "no drafter given: it starts from a random head and drafts once that pays"
    for what, look, fine in (
        (POLICY, run.policy, supported),
        (DRAFTER, run.drafter, given if settings.drafter.path else none),
    ):
        if look.problem:
            yield Finding("refuse", what, look.problem)
        else:
            yield Finding("warn", what, look.unseen) if look.unseen else Finding("ok", what, fine)


def bubble(run: RecipeFacts, settings: TLTConfig) -> Iterator[Finding]:
    """Somebody must have time to train the drafter."""
    what = "trainer.n_gpus_per_node"
    rule = MODE_RULES.get(run.trainer_mode)
    if rule is None or rule.idle != "replicas" or not settings.spot.enable:
        return
    if run.replicas > 1:
        yield Finding("ok", what, f"{run.replicas} replicas, so that some can train while others decode")
    else:
        yield Finding(
            "warn",
            what,
            f"{what} and trainer.nnodes make one replica alone, which never waits for another, so nothing will ever be "
            "idle and the drafter is not trained: use more devices, or a smaller "
            "actor_rollout_ref.rollout.tensor_model_parallel_size.",
        )


RULES: tuple[Rule, ...] = (trainer, actor, rollout, files, bubble)
