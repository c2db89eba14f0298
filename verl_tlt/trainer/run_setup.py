"""What a TLT run is made of, read from verl's composed config once, on the driver, before any worker exists."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf, open_dict

from verl_tlt.config import TLTConfig, dtype_name
from verl_tlt.drafter import files_digest, policy_shape
from verl_tlt.idle.modes import RULES
from verl_tlt.messages.training import RolloutSampling
from verl_tlt.trainer.bootstrap import Start, first_drafter
from verl_tlt.trainer.checkpoints import saved_drafter
from verl_tlt.trainer.controller import RunFacts
from verl_tlt.trainer.ray_fleet import SpotPlan
from verl_tlt.trainer.sizes import with_sizes


@dataclass(frozen=True)
class RunSetup:
    """The first drafter, and what controller and fleet are built from."""

    tlt: TLTConfig
    facts: RunFacts
    start: Start
    spot: SpotPlan
    resume_from: Path | None
    """Directory of the drafter's checkpoint that the run goes on from."""


def claim(config: Any, base_mode: str) -> TLTConfig:
    """Give verl's base classes the mode they know, and read TLT's settings from where the flag has put them."""
    with open_dict(config):
        config.trainer.v1.trainer_mode = base_mode
    return TLTConfig.from_dict(OmegaConf.to_container(config.actor_rollout_ref.rollout.custom.tlt, resolve=True))


def prepare(config: Any, tlt: TLTConfig, base_mode: str) -> RunSetup:
    """Build or load the first drafter, and gather what the run's parts have to know.

    Args:
        config: verl's.
        tlt: all settings.
        base_mode: verl's trainer mode.

    Raises:
        DrafterError: the drafter does not fit.
    """
    from verl.utils.fs import copy_to_local

    rollout, model, data = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model, config.data
    policy_dir = copy_to_local(model.path, use_shm=model.get("use_shm", False))
    context = rollout.max_model_len or rollout.prompt_length + rollout.response_length
    checkpoint, dtype = _resume_dir(config.trainer), dtype_name(rollout.dtype)
    start = first_drafter(tlt, policy_dir, dtype, context + tlt.speculation.longest, checkpoint)
    facts = RunFacts(
        rule=RULES[base_mode],
        requests=data.train_batch_size * rollout.n,
        dtype=dtype,
        checkpoints=Path(config.trainer.default_local_dir),
        prunes=bool(config.trainer.get("max_actor_ckpt_to_keep") or config.trainer.get("remove_previous_ckpt_in_save")),
        policy=model.path,
        data=str(data.train_files),
        data_sha256=_data_digest(data.train_files),
        temperature=rollout.temperature,
        gpus=config.trainer.n_gpus_per_node * config.trainer.nnodes,
        shared=config.trainer.device == "cpu",
    )
    accelerator = config.trainer.device == "cuda"
    tlt = with_sizes(
        tlt, policy_shape(policy_dir).vocab_size, accelerator, _node_bytes(), config.trainer.n_gpus_per_node
    )
    spot = SpotPlan(
        config=tlt,
        policy_dir=policy_dir,
        drafter=start.trainable,
        sampling=RolloutSampling(rollout.temperature, rollout.top_p, rollout.top_k),
        device="cuda" if accelerator else "cpu",
    )
    return RunSetup(tlt, facts, start, spot, saved_drafter(checkpoint))


def _node_bytes() -> float:
    """Memory of the smallest node of the cluster, as far as Ray may use it; 0: Ray does not say."""
    import ray

    nodes = ray.nodes() if ray.is_initialized() else []
    return min((node["Resources"].get("memory", 0.0) for node in nodes if node["Alive"]), default=0.0)


def _resume_dir(trainer: Any) -> Path | None:
    """The `global_step_N` directory that verl's `_load_checkpoint` is going to choose."""
    from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path

    if trainer.resume_mode == "auto":
        found = find_latest_ckpt_path(os.path.abspath(trainer.default_local_dir))
        return Path(found) if found else None
    if trainer.resume_mode == "resume_path":
        return Path(os.path.abspath(trainer.resume_from_path))
    return None


def _data_digest(named: Any) -> str | None:
    """Names the training data in the drafter's model card; None where it is not on this disk."""
    files = [Path(str(f)) for f in ([named] if isinstance(named, str) else named)]
    return files_digest(files) if all(f.is_file() for f in files) else None
