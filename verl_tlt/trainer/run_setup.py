"""What a TLT run is made of, read from verl's composed config once, on the driver, before any worker exists.

The drafter that a run starts with is resumed, given, or random. It is built here and handed to servers, which need it
before the first weight sync, and to the spot trainer, so that both hold the same one.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import ray
from omegaconf import OmegaConf

from verl_tlt import LONGEST_DRAFT
from verl_tlt.config import TLTConfig, dtype_name
from verl_tlt.drafter.policy import MTP, Fields, draft_vocab_size
from verl_tlt.errors import DrafterError, TLTError
from verl_tlt.idle.planner import MODE_RULES, ModeRule
from verl_tlt.messages.rollout import DrafterFile
from verl_tlt.messages.training import DrafterProvenance, SpotPlan
from verl_tlt.trainer.checkpoints import saved_drafter

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from speculators.models.eagle3 import Eagle3DraftModel

BATCH_TOKENS = 1024
"""Smallest default micro-batch, in tokens."""
MOST_BATCH_TOKENS = 4096
"""Largest default micro-batch, in tokens: a longer one would delay stops and gain nothing."""
LOGIT_BYTES = 20
"""Device bytes of one logit while a session trains or scores (`drafter.session_bytes`)."""
MOST_LOGIT_BYTES = 6 << 30
"""Device bytes that the logits of a default micro-batch may take together."""
TOKENS_PER_STEP = 65_536
"""Default of `tlt.buffer.tokens_per_step`. Three passes over eight steps of them take an H100 about 10 s per billion
operations of a row (40 s for the head of an 8B policy), which is as much as the idle time of most steps."""
OBJECTIVE = "hass"
"""How the drafter is trained: `DrafterTrainer` unrolls three draft positions unless it is told otherwise."""
MEMORY_SHARE = 0.15
"""Part of a node's memory that spot training takes together: drafter and optimizer, the buffer, and the copies of a
step's hidden states that are on their way to it."""
LEAST_BUFFER = 2 << 30
"""Smallest default buffer, in bytes; with less a node's memory is too small for spot training anyway."""
COLD_START_S = 30.0
"""Default of `tlt.spot.cold_start_s` on an accelerator: three passes over two steps' tokens take an H100 10 s for the
head of an 8B policy, and 30 s for that of a 70B one, less than one RL step of a run that lasts hundreds."""
HELD_OUT_PER_STEP = 6
"""Prompts to hold out of each step, so that two steps have more than the seven that the gate needs to judge."""
HELD_OUT = 0.1
"""Smallest default share of prompts to hold out."""
MOST_HELD_OUT = 0.25
"""Largest default share of prompts to hold out: what is held out is not trained on."""


@dataclass(frozen=True)
class FirstDrafter:
    trainable: DrafterFile  # float32, for the spot trainer
    served: DrafterFile  # in the rollout's dtype, for engines
    aux_layers: tuple[int, ...]
    origin: str  # one phrase for the log: where it came from
    tokens_trained: int = 0  # tokens that this run's drafter was trained on before it was resumed
    host_bytes: int = 0  # host memory of the spot trainer with an accelerator, beside its buffer
    token_bytes: int = 0  # of one token's hidden states
    draft_vocab: int = 0
    chosen: bool = True  # which tokens the draft vocabulary has is settled; False: the first rollout is to choose them
    checkpoint: Path | None = None  # directory of the drafter's checkpoint that the run goes on from


@dataclass(frozen=True)
class RunFacts:
    """What the controller has to know of verl's configuration."""

    rule: ModeRule
    requests: int  # of an RL step
    checkpoints: Path  # `trainer.default_local_dir`
    prunes: bool  # whether verl removes the policies of old checkpoints there
    provenance: DrafterProvenance  # where this run's drafters come from; complete but for what training adds
    gpus: int  # number of the trainer's GPUs
    requests_at_once: int | None = None  # most of them that all replicas together have; None: steps overlap
    keeps: int = 0  # with so many policies there verl removes the oldest before it writes the next one; 0: it does not
    cold_start_s: float = 0.0
    name: str = ""
    hardware: str = ""


def prepare(config: DictConfig, base_mode: str) -> tuple[TLTConfig, RunFacts, FirstDrafter, SpotPlan]:
    """Build or load the first drafter, and gather what controller and spot trainer have to know."""
    from verl.utils.fs import copy_to_local

    rollout = config.actor_rollout_ref.rollout
    model = config.actor_rollout_ref.model
    tlt = TLTConfig.from_dict(OmegaConf.to_container(rollout.custom.tlt, resolve=True))
    tokens = tlt.buffer.tokens_per_step or TOKENS_PER_STEP
    # verl may compute log-probabilities several times in an RL step; the actor captures its part each time.
    batches = config.trainer.v1.get(base_mode, {}).get("parameter_sync_step", 1)
    buffer = replace(tlt.buffer, tokens_per_step=max(1, tokens // batches))
    tlt = replace(tlt, buffer=buffer)
    policy_dir = copy_to_local(model.path, use_shm=model.get("use_shm", False))
    context = rollout.max_model_len or rollout.prompt_length + rollout.response_length
    resumed = _resume_dir(config.trainer)
    dtype = dtype_name(rollout.dtype)
    start = first_drafter(tlt, policy_dir, dtype, context + tlt.speculation.max_draft_length, resumed)
    accelerator = config.trainer.device == "cuda"
    window = min(tlt.buffer.window, context)
    plan = SpotPlan(
        policy_dir=policy_dir,
        drafter=start.trainable,
        sampling={name: rollout[name] for name in ("temperature", "top_p", "top_k")},
        dtype=dtype,
        device="cuda" if accelerator else "cpu",
        checkpoint=str(start.checkpoint) if start.checkpoint else None,
        learning_rate=tlt.drafter.learning_rate,
        warmup_steps=tlt.drafter.warmup_steps,
        batch_tokens=tlt.drafter.batch_tokens or batch_tokens(start.draft_vocab, accelerator),
        max_epochs=tlt.spot.max_epochs,
        buffer_bytes=buffer_bytes(tlt, start, node_bytes(), tokens, accelerator),
        min_tokens=tlt.buffer.min_tokens,
        held_out=tlt.buffer.held_out or held_out_share(config.data.train_batch_size, tokens, window),
        window=window,
        gate=tlt.gate.enable,
        max_draft=tlt.speculation.max_draft_length,
    )
    return tlt, _facts(config, tlt, MODE_RULES[base_mode]), start, plan


def node_bytes() -> float:
    """Memory of the smallest node with GPUs, as far as Ray may use it; 0: unknown."""
    if not ray.is_initialized():
        return 0.0
    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return min((resources.get("memory", 0.0) for resources in alive if resources.get("GPU")), default=0.0)


def _facts(config: DictConfig, tlt: TLTConfig, rule: ModeRule) -> RunFacts:
    rollout = config.actor_rollout_ref.rollout
    data = config.data
    trainer = config.trainer
    cluster = ray.cluster_resources() if ray.is_initialized() else {}
    provenance = DrafterProvenance(
        policy=config.actor_rollout_ref.model.path,
        data=str(data.train_files),
        objective=OBJECTIVE,
        temperature=rollout.temperature,
    )
    return RunFacts(
        rule=rule,
        requests=data.train_batch_size * rollout.n,
        requests_at_once=_most_prompts(config) * rollout.n if rule is MODE_RULES["sync"] else None,
        checkpoints=Path(trainer.default_local_dir),
        prunes=bool(trainer.get("max_actor_ckpt_to_keep") or trainer.get("remove_previous_ckpt_in_save")),
        keeps=_kept_policies(config),
        cold_start_s=_cold_start_s(tlt, trainer.device == "cuda"),
        provenance=provenance,
        gpus=trainer.n_gpus_per_node * trainer.nnodes,
        name=f"{trainer.project_name}/{trainer.experiment_name}",
        hardware=hardware_name(cluster, trainer.device == "cuda"),
    )


def _most_prompts(config: DictConfig) -> int:
    """Most prompts whose responses are decoded at once in a step of the mode `sync`, as verl's `ReplayBuffer` has it.

    With DAPO's filter verl sends further prompts in place of groups that it drops.
    """
    filtered = config.algorithm.get("filter_groups") or {}
    batches: int = filtered.get("max_inflight_gen_batches", 1) if filtered.get("enable") else 1
    return batches * int(config.data.train_batch_size)


def _kept_policies(config: DictConfig) -> int:
    """`RunFacts.keeps`, as verl's checkpoint manager has it (`ensure_checkpoint_capacity`)."""
    from verl.trainer.ppo.utils import need_critic

    most = config.trainer.get("max_actor_ckpt_to_keep") or 0
    if most == 1 or config.trainer.get("remove_previous_ckpt_in_save"):
        return 0  # verl keeps its only policy until the next one is written
    if OmegaConf.select(config, "actor_rollout_ref.actor.checkpoint.async_save"):
        return 0
    critics = config.trainer.get("max_critic_ckpt_to_keep") or 0
    if need_critic(config) and not 1 < critics <= most:
        return 0  # verl may keep more critics, or write one before it removes one
    return most


def hardware_name(cluster: Iterable[str], accelerator: bool) -> str:
    """What a run computes on, from the names of Ray's resources; Ray has none for an accelerator it does not know."""
    if not accelerator:
        return f"CPU, {os.cpu_count()} cores"
    prefix = "accelerator_type:"
    kinds = sorted(name.removeprefix(prefix) for name in cluster if name.startswith(prefix))
    return ", ".join(kinds) or "GPUs that Ray has no name for"


def first_drafter(
    config: TLTConfig, policy_dir: str, dtype: str, context: int, resume_from: Path | None
) -> FirstDrafter:
    """Build or load the drafter, an empty file where n-grams draft; a `DrafterError` where a given one does not fit.

    `policy_dir` is local, `dtype` the rollout's, `context` its longest sequence plus the longest draft in tokens,
    `resume_from` the `global_step_N` directory that is resumed.
    """
    from verl_tlt.drafter import host_bytes, to_drafter_file
    from verl_tlt.drafter.build import has_chosen_tokens, policy_width

    if config.speculation.enable and config.speculation.source == "ngram":
        nothing = DrafterFile(0, "{}", b"")
        return FirstDrafter(nothing, nothing, aux_layers=(), origin="n-grams, without a drafter")
    checkpoint = saved_drafter(resume_from)
    model, facts, origin = _first_model(config, policy_dir, context, checkpoint)
    resumed = facts if checkpoint else {}  # the version of a given drafter was another run's
    version = int(resumed.get("version", 0))
    acceptance = tuple(facts.get("acceptance", ()))

    def file(as_dtype: str) -> DrafterFile:
        text, weights = to_drafter_file(model, as_dtype)
        return DrafterFile(version, text, weights, acceptance)

    trainable = file("float32")
    return FirstDrafter(
        trainable=trainable,
        served=file(dtype),
        aux_layers=tuple(model.target_layer_ids),
        origin=origin,
        tokens_trained=int(resumed.get("tokens_trained", 0)),
        host_bytes=host_bytes(model),
        token_bytes=(len(model.target_layer_ids) + 1) * policy_width(model) * 2,
        draft_vocab=model.draft_vocab_size,
        chosen=has_chosen_tokens(model),
        checkpoint=checkpoint,
    )


def _first_model(
    config: TLTConfig, policy_dir: str, context: int, checkpoint: Path | None
) -> tuple[Eagle3DraftModel, Fields, str]:
    """The drafter, the facts saved with it, and where it came from; the one place where the methods differ."""
    from verl_tlt.drafter import load_drafter, load_own_head, provenance

    method = config.drafter.method
    if source := checkpoint or config.drafter.path:
        model = load_drafter(str(source), policy_dir, min_context=context)
        kind = model.config.speculators_model_type
        if kind != method:
            raise DrafterError(f"{source} holds a drafter for tlt.drafter.method={kind}, not {method}.")
        return model, provenance(source), f"checkpoint {source}" if checkpoint else str(source)
    if method == MTP:
        return load_own_head(policy_dir, policy_dir), {}, "the policy's own MTP head"
    # Known without measuring: nothing is accepted, so the engines need not find out.
    facts = {"acceptance": [0.0] * config.speculation.max_draft_length}
    return _random_head(config, policy_dir, context), facts, "a random head"


def _random_head(config: TLTConfig, policy_dir: str, context: int) -> Eagle3DraftModel:
    from verl_tlt.drafter import build_drafter, policy_shape

    shape = policy_shape(policy_dir)
    size = draft_vocab_size(config.drafter.vocab, shape.vocab_size, "tlt.drafter.vocab")
    return build_drafter(
        shape,
        # The policy's own range, not this run's: a resumed run may be longer.
        max_position_embeddings=max(context, shape.max_position_embeddings + LONGEST_DRAFT),
        draft_ids=None if size == shape.vocab_size else size,  # the first rollout chooses which
    )


def _cold_start_s(tlt: TLTConfig, accelerator: bool) -> float:
    seconds = tlt.spot.cold_start_s
    if seconds is None:
        return COLD_START_S if accelerator else 0.0
    return seconds


def batch_tokens(draft_vocab: int, accelerator: bool) -> int:
    """Tokens of a micro-batch where the user sets none: as many as their logits leave room for on an accelerator."""
    rows = BATCH_TOKENS
    while accelerator and rows < MOST_BATCH_TOKENS and 2 * rows * draft_vocab * LOGIT_BYTES <= MOST_LOGIT_BYTES:
        rows *= 2
    return rows


def buffer_bytes(tlt: TLTConfig, start: FirstDrafter, memory: float, tokens: int, accelerator: bool) -> int:
    """Bound of the spot trainer's buffer: the user's, or what is left to it of `MEMORY_SHARE` of a node's `memory`.

    A step's `tokens` are there twice more while they are handed over: in the actor's ranks, and in Ray's object store.
    """
    if tlt.buffer.max_mb:
        return tlt.buffer.max_mb << 20
    if not accelerator:
        return LEAST_BUFFER
    return max(LEAST_BUFFER, int(MEMORY_SHARE * memory) - start.host_bytes - 2 * tokens * start.token_bytes)


def held_out_share(prompts: int, tokens: int, window: int) -> float:
    """Share of prompts held out in a whole run: larger the fewer prompts are captured.

    A step has so many `prompts`, and `tokens` of sequences of up to `window` tokens are captured of it.
    """
    captured = max(1, min(prompts, tokens // window))
    return min(max(HELD_OUT_PER_STEP / captured, HELD_OUT), MOST_HELD_OUT)


def _resume_dir(trainer: DictConfig) -> Path | None:
    """The `global_step_N` directory that verl's `_load_checkpoint` is going to choose."""
    from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path

    if trainer.resume_mode == "resume_path":
        if "global_step_" not in str(trainer.resume_from_path):
            raise TLTError("trainer.resume_from_path must name a global_step_N directory to resume from.")
        return Path(os.path.abspath(trainer.resume_from_path))
    if trainer.resume_mode != "auto":
        return None
    latest = find_latest_ckpt_path(os.path.abspath(trainer.default_local_dir))
    return Path(latest) if latest else None
