"""Everything the doctor looks at, read from a composed verl config, the disk and the environment.

The reading is here and the judging in `verl_tlt.doctor.rules`, so that each rule can be tested on plain values. No key
of verl's config is read anywhere else before Ray starts. Imports neither verl nor vLLM nor torch, and omegaconf only
once there is a config: `verl-tlt doctor` has to work where nothing is installed yet.
"""

from __future__ import annotations

import glob
import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from verl_tlt import flag
from verl_tlt.compat.versions import SUPPORTED, installed
from verl_tlt.config import TLTConfig, TLTConfigError
from verl_tlt.server.engine_arguments import problems

if TYPE_CHECKING:
    from omegaconf import DictConfig

REFUSED_SAMPLING = ("min_p", "logit_bias")
"""Sampling settings vLLM rejects while a drafter is configured (`SamplingParams._validate_spec_decode`)."""


@dataclass(frozen=True)
class Environment:
    """What is installed in this interpreter."""

    python: str
    versions: Mapping[str, str | None]
    """By package name of `versions.SUPPORTED`; None where it is missing."""


@dataclass(frozen=True)
class RecipeFacts:
    """What one run asks for. Paths are as the user wrote them; problems name key and file already."""

    on: bool = True
    """Whether it asks for TLT at all."""
    mistaken: str | None = None
    """What was meant for TLT and would do nothing, in one sentence."""
    trainer_mode: str = "sync"
    use_v1: bool = True
    other_trainer: str | None = None
    """A top-level node that only verl's experimental trainers have."""
    hybrid_engine: bool = True
    """Whether the actor's devices hold rollout replicas too."""
    strategy: str = "fsdp2"
    dynamic_context_parallel: bool = False
    """Megatron deals sequences out to ranks anew in every step."""
    rollout: str = "vllm"
    disaggregation: bool = False
    data_parallel: int = 1
    refused_sampling: tuple[str, ...] = ()
    """Full names of `min_p`/`logit_bias` keys that are set."""
    engine_problems: tuple[str, ...] = ()
    """Why the engine's arguments cannot be combined with speculation, one sentence each."""
    quantized_by: str | None = None
    """The key, and its value, by which the rollout computes with other weights than the actor's."""
    mtp_rollout: bool = False
    bypass_old_log_prob: bool = False
    missing_data: tuple[tuple[str, str], ...] = ()
    """(key, path) of data files that are not there."""
    policy_problem: str | None = None
    drafter_problem: str | None = None
    remote_driver: bool = False
    """The driver talks to Ray through a client: its disk is not the cluster's, so no file was looked at."""


def read_environment() -> Environment:
    """Versions of this interpreter's packages."""
    return Environment(platform.python_version(), {s.name: installed(s.name) for s in SUPPORTED})


def read_settings(config: DictConfig) -> TLTConfig:
    """The `tlt` node as checked settings; all defaults where it is absent.

    Raises:
        TLTConfigError: an unknown key or a wrong value, named.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    node = _select(config, "tlt", {})
    try:
        plain = OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
    except OmegaConfBaseException as error:
        raise TLTConfigError(
            f"{error.full_key or 'tlt'} cannot be read from the configuration: {_first(error)}"
        ) from error
    return TLTConfig.from_dict(plain)


def read_recipe(config: DictConfig, settings: TLTConfig) -> RecipeFacts:
    """Look up every key, and on disk every file, that decides whether TLT can run.

    Raises:
        TLTConfigError: a key of the config cannot be resolved.
    """
    rollout = "actor_rollout_ref.rollout"
    remote = _is_remote(config)
    strategy, dynamic_context_parallel = read_actor(config)
    return RecipeFacts(
        on=flag.wanted(config),
        mistaken=flag.mistaken(config),
        trainer_mode=str(_select(config, "trainer.v1.trainer_mode", "sync")).removeprefix("tlt_"),
        use_v1=bool(_select(config, "trainer.use_v1", True)),
        other_trainer=next((node for node in ("async_training", "rollout") if node in config), None),
        hybrid_engine=bool(_select(config, "actor_rollout_ref.hybrid_engine", True)),
        strategy=strategy,
        dynamic_context_parallel=dynamic_context_parallel,
        rollout=str(_select(config, f"{rollout}.name", "")),
        disaggregation=bool(_select(config, f"{rollout}.disaggregation.enabled", False)),
        data_parallel=int(_select(config, f"{rollout}.data_parallel_size", 1)),
        refused_sampling=tuple(
            f"{node}.{name}"
            for node in (rollout, f"{rollout}.val_kwargs")
            for name in REFUSED_SAMPLING
            if _select(config, f"{node}.{name}")
        ),
        engine_problems=_engine_problems(config, settings),
        quantized_by=_quantized_by(config),
        mtp_rollout=bool(_select(config, "actor_rollout_ref.model.mtp.enable", False))
        and bool(_select(config, "actor_rollout_ref.model.mtp.enable_rollout", False)),
        bypass_old_log_prob=bool(_select(config, "algorithm.rollout_correction.bypass_mode", False)),
        missing_data=() if remote else _missing_data(config),
        policy_problem=None if remote else _policy_problem(str(_select(config, "actor_rollout_ref.model.path", ""))),
        drafter_problem=None if remote else _drafter_problem(config, settings),
        remote_driver=remote,
    )


def read_actor(config: DictConfig) -> tuple[str, bool]:
    """The actor's strategy, and whether Megatron deals sequences out to its ranks anew in every step."""
    node = "actor_rollout_ref.actor"
    return str(_select(config, f"{node}.strategy", "")), bool(
        _select(config, f"{node}.megatron.dynamic_context_parallel", False)
    )


def absolute(path: str) -> str:
    """`path` with `~` and the working directory filled in."""
    return os.path.abspath(os.path.expanduser(path))


def _select(config: DictConfig, key: str, default: Any = None) -> Any:
    """The value at a dotted key; `default` where it is absent, null or still `???`."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        value = OmegaConf.select(config, key)
    except OmegaConfBaseException as error:
        raise TLTConfigError(f"{key} cannot be read from the configuration: {_first(error)}") from error
    return default if value is None else value


def _first(error: Exception) -> str:
    """The first line of an error, as the end of a sentence."""
    return str(error).strip().splitlines()[0].rstrip(".") + "."


def _quantized_by(config: DictConfig) -> str | None:
    key = "actor_rollout_ref.rollout.quantization"
    if kind := _select(config, key):
        return f"{key}={kind}"
    keys = (f"actor_rollout_ref.actor.{engine}.qat.enable" for engine in ("fsdp_config", "megatron"))
    return next((f"{key}=True" for key in keys if _select(config, key)), None)


def _is_remote(config: DictConfig) -> bool:
    address = _select(config, "ray_kwargs.ray_init.address") or os.environ.get("RAY_ADDRESS", "")
    return str(address).startswith("ray://")


def _missing_data(config: DictConfig) -> tuple[tuple[str, str], ...]:
    """Data files that verl's own dataset would look for here and not find; a custom dataset reads what it likes."""
    if _select(config, "data.custom_cls.path"):
        return ()
    missing = []
    for key in ("data.train_files", "data.val_files"):
        value = _select(config, key, [])
        for path in [value] if isinstance(value, str) else value:
            if "://" not in str(path) and not glob.glob(os.path.expanduser(str(path))):
                missing.append((key, str(path)))
    return tuple(missing)


def local_policy(path: str) -> str | None:
    """The policy's directory on this disk; None for a Hugging Face name that was not downloaded, or a remote path."""
    if os.path.isdir(os.path.expanduser(path)):
        return os.path.expanduser(path)
    if "://" in path or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", path):
        return None
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(path, "config.json")
    return os.path.dirname(cached) if isinstance(cached, str) else None


def _engine_problems(config: DictConfig, settings: TLTConfig) -> tuple[str, ...]:
    """What `verl_tlt.server.engine_arguments` would refuse when the engines start."""
    if not settings.speculation.enable or installed("vllm") is None:
        return ()
    from omegaconf import OmegaConf

    node = _select(config, "actor_rollout_ref.rollout.engine_kwargs.vllm", {})
    user: dict[str, Any] = OmegaConf.to_container(node) if OmegaConf.is_config(node) else node
    enforce_eager = user.get("enforce_eager", _select(config, "actor_rollout_ref.rollout.enforce_eager", False))
    return tuple(problems(settings, user, bool(enforce_eager)))


def _policy_problem(path: str) -> str | None:
    """Why the policy cannot be used, as far as this disk can tell."""
    key = f"actor_rollout_ref.model.path={path}"
    if not path:
        return "actor_rollout_ref.model.path is not set."
    local = path.startswith(("/", ".", "~")) or path.count("/") > 1
    if "://" in path or (not local and not os.path.exists(path)):
        return None  # a remote path, or a name on the Hugging Face hub
    if not os.path.isdir(os.path.expanduser(path)):
        return f"{key} is not a directory on this machine."
    if not os.path.isfile(os.path.join(os.path.expanduser(path), "config.json")):
        return f"{key} holds no config.json, so it is not a Hugging Face model."
    from verl_tlt.drafter.policy import SUPPORTED as ARCHITECTURES
    from verl_tlt.drafter.policy import DrafterError, policy_shape

    try:
        kind = policy_shape(os.path.expanduser(path)).model_type
    except DrafterError as error:
        return f"actor_rollout_ref.model.path: {error}"
    if kind not in ARCHITECTURES:
        return f"{key} is a {kind} model, and drafters exist for {', '.join(ARCHITECTURES)}."
    return None


def _drafter_problem(config: DictConfig, settings: TLTConfig) -> str | None:
    """Why the drafter the user named, or a new one of these settings, cannot draft for this policy; None if it can."""
    path = settings.drafter.path
    if path is not None and not os.path.isdir(os.path.expanduser(path)):
        return f"tlt.drafter.path={path} is not a directory on this machine."
    policy = local_policy(str(_select(config, "actor_rollout_ref.model.path", "")))
    if policy is None or not os.path.isfile(os.path.join(policy, "config.json")):
        return None  # its config is not here (yet); the trainer checks again after the download
    from verl_tlt.drafter.check import check_drafter
    from verl_tlt.drafter.policy import DrafterError, aux_layers_for, check_aux_layers, policy_shape

    rollout = "actor_rollout_ref.rollout"
    length = int(_select(config, f"{rollout}.prompt_length", 0)) + int(_select(config, f"{rollout}.response_length", 0))
    length = int(_select(config, f"{rollout}.max_model_len", length))
    try:
        if path is not None:
            check_drafter(absolute(path), policy, length + settings.speculation.max_draft_length)
        elif settings.drafter.aux_layers is not None:
            check_aux_layers(settings.drafter.aux_layers, policy_shape(policy).num_layers, "tlt.drafter.aux_layers")
        else:
            aux_layers_for(policy_shape(policy).num_layers)
    except DrafterError as error:
        return str(error) if path is None else f"tlt.drafter.path: {error}"
    return None
