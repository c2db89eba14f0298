"""What a TLT run is made of, read from verl's composed config once, on the driver, before any worker exists.

The drafter that a run starts with is resumed, given, or random. It is built here and handed to servers, which need it
before the first weight sync, and to spot workers, so that both hold the same one.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import ray
from omegaconf import OmegaConf

from verl_tlt.config import BATCH_TOKENS, BUFFER_MB, HELD_OUT, BufferConfig, TLTConfig, dtype_name
from verl_tlt.drafter.policy import LONGEST_DRAFT, MTP, DrafterError, Fields, active_share, draft_vocab_size
from verl_tlt.errors import TLTError
from verl_tlt.idle.replica_idle import MODE_RULES, ModeRule
from verl_tlt.idle.tap_budget import STEP_SHARE
from verl_tlt.messages.rollout import DrafterFile
from verl_tlt.messages.training import DrafterProvenance, RolloutSampling
from verl_tlt.trainer.checkpoints import saved_drafter

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from speculators.models.eagle3 import Eagle3DraftModel

MOST_BATCH_TOKENS = 4096
"""Largest default micro-batch, in tokens: a longer one would delay stops and gain nothing."""
LOGIT_BYTES, MOST_LOGIT_BYTES = 20, 6 << 30
"""Device bytes of one logit while a session trains or scores (`drafter.session_bytes`), and of all of them."""
MEMORY_SHARE = 0.15
"""Part of a node's memory that its spot workers take together: buffers, drafters and optimizers, and what the actor's
ranks hold for them while they hand over a step's hidden states."""
FEW_HELD_OUT, MOST_HELD_OUT = 12, 0.25
"""Prompts to hold out of the first two steps, and the largest share of prompts to hold out for that: with fewer than
seven the gate judges nothing, and what is held out is not trained on."""


@dataclass(frozen=True)
class FirstDrafter:
    trainable: DrafterFile  # float32, for spot workers
    served: DrafterFile  # in the rollout's dtype, for engines
    aux_layers: tuple[int, ...]
    origin: str  # one phrase for the log: where it came from
    tokens_trained: int = 0  # tokens that spot workers of this run trained on before it was resumed
    worker_bytes: int = 0  # host memory of a spot worker on an accelerator, beside its buffer
    draft_vocab: int = 0
    chosen: bool = True  # which tokens the draft vocabulary has is settled; False: the first rollout is to choose them
    untrained: bool = False  # the drafter is new: a random head
    checkpoint: Path | None = None  # directory of the drafter's checkpoint that the run goes on from


@dataclass(frozen=True)
class SpotPlan:
    """How spot workers are made: once at the start, and again for one that died."""

    config: TLTConfig
    policy_dir: str  # visible on every node
    drafter: DrafterFile  # the run's first drafter, float32
    sampling: RolloutSampling
    device: str


@dataclass(frozen=True)
class RunFacts:
    """What the controller has to know of verl's configuration."""

    rule: ModeRule
    requests: int
    dtype: str  # the rollout's dtype, in which drafters are published
    checkpoints: Path  # `trainer.default_local_dir`
    prunes: bool  # whether verl removes the policies of old checkpoints there
    provenance: DrafterProvenance  # where this run's drafters come from; complete but for what training adds
    gpus: int  # number of the trainer's GPUs
    rotates: int = 0  # with so many policies of this run there verl removes the oldest before it writes the next one
    shared: bool = False  # the replicas share a machine's processors, so that the work of one slows the others
    active_share: float = 1.0  # share of the policy's weights that one token uses
    name: str = ""
    hardware: str = ""


def prepare(config: DictConfig, base_mode: str) -> tuple[RunFacts, FirstDrafter, SpotPlan]:
    """Build or load the first drafter (`first_drafter`), and gather what controller and fleet have to know."""
    from verl.utils.fs import copy_to_local

    rollout, model = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model
    tlt = TLTConfig.from_dict(OmegaConf.to_container(rollout.custom.tlt, resolve=True))
    policy_dir = copy_to_local(model.path, use_shm=model.get("use_shm", False))
    context = rollout.max_model_len or rollout.prompt_length + rollout.response_length
    resumed, dtype = _resume_dir(config.trainer), dtype_name(rollout.dtype)
    start = first_drafter(tlt, policy_dir, dtype, context + tlt.speculation.longest, resumed)
    accelerator, workers = config.trainer.device == "cuda", config.trainer.n_gpus_per_node
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]] if ray.is_initialized() else []
    # As far as Ray may use it; spot workers are on nodes with GPUs, a small head node may have none.
    node_bytes = min((node.get("memory", 0.0) for node in nodes if node.get("GPU")), default=0.0)
    # The stages of a pipeline, on as many nodes, hold unlike parts of what is captured: one may hold most of it.
    stages = (config.actor_rollout_ref.actor.get("megatron") or {}).get("pipeline_model_parallel_size", 1)
    spread = min(stages, config.trainer.nnodes)
    tlt = with_sizes(tlt, start.draft_vocab, accelerator, node_bytes, workers, start.worker_bytes, spread)
    buffer = replace(tlt.buffer, window=min(tlt.buffer.window, context))
    share = held_out_share(buffer, config.data.train_batch_size, workers * config.trainer.nnodes)
    spot = SpotPlan(
        config=replace(tlt, buffer=replace(buffer, held_out=share)),
        policy_dir=policy_dir,
        drafter=start.trainable,
        sampling=RolloutSampling(rollout.temperature, rollout.top_p, rollout.top_k),
        device="cuda" if accelerator else "cpu",
    )
    return _facts(config, tlt, MODE_RULES[base_mode], active_share(policy_dir)), start, spot


def _facts(config: DictConfig, tlt: TLTConfig, rule: ModeRule, active_share: float) -> RunFacts:
    rollout, data = config.actor_rollout_ref.rollout, config.data
    cluster = ray.cluster_resources() if ray.is_initialized() else {}
    keeps, one = (config.trainer.get(key) for key in ("max_actor_ckpt_to_keep", "remove_previous_ckpt_in_save"))
    last = one or keeps == 1 or OmegaConf.select(config, "actor_rollout_ref.actor.checkpoint.async_save")
    provenance = DrafterProvenance(
        policy=config.actor_rollout_ref.model.path,
        data=str(data.train_files),
        objective=tlt.drafter.objective,
        temperature=rollout.temperature,
    )
    return RunFacts(
        rule=rule,
        requests=data.train_batch_size * rollout.n,
        dtype=dtype_name(rollout.dtype),
        checkpoints=Path(config.trainer.default_local_dir),
        prunes=bool(keeps or one),
        rotates=0 if last else keeps or 0,
        provenance=provenance,
        gpus=config.trainer.n_gpus_per_node * config.trainer.nnodes,
        shared=config.trainer.device == "cpu",
        name=f"{config.trainer.project_name}/{config.trainer.experiment_name}",
        active_share=active_share,
        hardware=hardware_name(cluster, config.trainer.device == "cuda"),
    )


def hardware_name(cluster: Iterable[str], accelerator: bool) -> str:
    """What a run computes on, from the names of Ray's resources; Ray has none for an accelerator it does not know."""
    if not accelerator:
        return f"CPU, {os.cpu_count()} cores"
    kinds = sorted(kind for name in cluster if (kind := name.removeprefix("accelerator_type:")) != name)
    return ", ".join(kinds) or "GPUs that Ray has no name for"


def first_drafter(
    config: TLTConfig, policy_dir: str, dtype: str, context: int, resume_from: Path | None
) -> FirstDrafter:
    """Build or load the drafter; a `DrafterError` where a given one does not fit.

    `policy_dir` is local, `dtype` the rollout's, `context` its longest sequence plus the longest draft in tokens,
    `resume_from` the `global_step_N` directory that is resumed.
    """
    from verl_tlt.drafter import host_bytes, to_drafter_file
    from verl_tlt.drafter.build import has_chosen_tokens

    checkpoint = saved_drafter(resume_from)
    model, facts, origin = _first_model(config, policy_dir, context, checkpoint)
    resumed = facts if checkpoint else {}
    version, acceptance = int(resumed.get("version", 0)), tuple(facts.get("acceptance", ()))

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
        worker_bytes=host_bytes(model),
        draft_vocab=model.draft_vocab_size,
        chosen=has_chosen_tokens(model),
        untrained=not resumed and trainable.untrained,
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
        if (kind := model.config.speculators_model_type) != method:
            raise DrafterError(f"{source} holds a drafter for tlt.drafter.method={kind}, not {method}.")
        return model, provenance(source), f"checkpoint {source}" if checkpoint else str(source)
    if method == MTP:
        return load_own_head(policy_dir, policy_dir), {}, "the policy's own MTP head"
    # Known without measuring: nothing is accepted, so the engines need not find out.
    facts = {"acceptance": [0.0] * config.speculation.longest}
    return _random_head(config, policy_dir, context), facts, "a random head"


def _random_head(config: TLTConfig, policy_dir: str, context: int) -> Eagle3DraftModel:
    from verl_tlt.drafter import build_drafter, policy_shape

    shape = policy_shape(policy_dir)
    size = draft_vocab_size(config.drafter.vocab, shape.vocab_size, "tlt.drafter.vocab")
    return build_drafter(
        shape,
        # The policy's own range, not this run's: a resumed run may be longer.
        max_position_embeddings=max(context, shape.max_position_embeddings + LONGEST_DRAFT),
        seed=config.drafter.seed,
        draft_ids=None if size == shape.vocab_size else size,  # the first rollout chooses which
    )


def with_sizes(
    tlt: TLTConfig, draft_vocab: int, accelerator: bool, node_bytes: float, workers: int, worker_bytes: int,
    spread: int = 1,
) -> TLTConfig:  # fmt: skip
    """The settings with `tlt.drafter.batch_tokens` and `tlt.buffer.max_mb` filled in where the user left them open.

    `node_bytes` is the memory of the smallest node (0: unknown), `workers` the spot workers on a node, each of which
    takes `worker_bytes` beside its buffer; `accelerator`: drafters train on one, not on the host's processor. Most of
    what the actor hands over to the workers of `spread` nodes may be on one.
    """
    rows, mb = BATCH_TOKENS, BUFFER_MB
    if accelerator:
        while rows < MOST_BATCH_TOKENS and 2 * rows * draft_vocab * LOGIT_BYTES <= MOST_LOGIT_BYTES:
            rows *= 2
        share = MEMORY_SHARE * node_bytes / max(1, workers) - worker_bytes
        mb = max(mb, int(share / (1 + spread * STEP_SHARE)) >> 20)
    drafter = replace(tlt.drafter, batch_tokens=tlt.drafter.batch_tokens or rows)
    return replace(tlt, drafter=drafter, buffer=replace(tlt.buffer, max_mb=tlt.buffer.max_mb or mb))


def held_out_share(buffer: BufferConfig, prompts: int, workers: int) -> float:
    """Share of prompts held out in a whole run: the user's, or else larger the fewer prompts are captured.

    A step has so many `prompts`. How many of them are captured depends on the `workers` of all nodes, each of which
    takes `tokens_per_step` of sequences of up to `window` tokens.
    """
    captured = max(1, min(prompts, workers * max(1, buffer.first_tokens // buffer.window)))
    return buffer.held_out or min(max(FEW_HELD_OUT / 2 / captured, HELD_OUT), MOST_HELD_OUT)


def _resume_dir(trainer: DictConfig) -> Path | None:
    """The `global_step_N` directory that verl's `_load_checkpoint` is going to choose."""
    from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path

    if trainer.resume_mode == "resume_path":
        if "global_step_" not in str(trainer.resume_from_path):
            raise TLTError("trainer.resume_from_path must name a global_step_N directory to resume from.")
        return Path(os.path.abspath(trainer.resume_from_path))
    latest = trainer.resume_mode == "auto" and find_latest_ckpt_path(os.path.abspath(trainer.default_local_dir))
    return Path(latest) if latest else None
