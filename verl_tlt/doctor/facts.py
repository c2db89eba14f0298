"""Everything the doctor looks at, read from a composed verl config, the disk and the environment.

The reading is here and the judging in `verl_tlt.doctor.rules`, so that each rule can be tested on plain values. No key
of verl's config is read outside this folder before Ray starts. Imports neither verl nor vLLM nor torch, and omegaconf
only once there is a config: `verl-tlt doctor` has to work where nothing is installed yet.
"""

from __future__ import annotations

import glob
import math
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from verl_tlt import MODE_PREFIX, flag
from verl_tlt.compat.versions import SUPPORTED, installed, release
from verl_tlt.config import TLTConfig, TLTConfigError
from verl_tlt.doctor.models import Look, look_at_drafter, look_at_policy
from verl_tlt.server.engine_arguments import problems
from verl_tlt.speculation.graph_rules import FULL_GRAPHS, longest_draft

if TYPE_CHECKING:
    from omegaconf import DictConfig

ROLLOUT = "actor_rollout_ref.rollout"
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
    megatron: tuple[str, ...] = ()
    """Switches of `actor.megatron` that are on."""
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
    policy: Look = field(default_factory=lambda: Look("qwen3"))
    drafter: Look = field(default_factory=Look)
    replicas: int = 2
    """That hold rollout engines on the trainer's devices."""
    remote_driver: bool = False
    """The driver talks to Ray through a client: its disk is not the cluster's, so no file was looked at."""


def read_environment() -> Environment:
    """Versions of this interpreter's packages."""
    return Environment(platform.python_version(), {s.name: installed(s.name) for s in SUPPORTED})


def read_settings(config: DictConfig) -> TLTConfig:
    """The `tlt` node as checked settings; all defaults where it is absent, K_max the one for this recipe's engines.

    Raises:
        TLTConfigError: an unknown key or a wrong value, named.
    """
    node = read_mapping(config, "tlt")
    speculation = node.get("speculation", {})
    if isinstance(speculation, dict) and speculation.get("max_draft_length") is None:
        found = release(installed("vllm") or "")
        graphs = _on_gpu(config) and not _enforce_eager(config) and _full_graphs(config)
        if found is not None:
            node["speculation"] = {**speculation, "max_draft_length": longest_draft(found[:2], graphs)}
    return TLTConfig.from_dict(node)


def _on_gpu(config: DictConfig) -> bool:
    return str(select(config, "trainer.device", "cuda")) == "cuda"


def _full_graphs(config: DictConfig) -> bool:
    """Whether engines may capture graphs for every draft length; what Ray hands to them wins."""
    handed = select(config, f"ray_kwargs.ray_init.runtime_env.env_vars.{FULL_GRAPHS}")
    return str(handed if handed is not None else os.environ.get(FULL_GRAPHS)) != "0"


def _enforce_eager(config: DictConfig) -> bool:
    """Whether engines capture no CUDA graphs; what is said to vLLM itself wins."""
    user = read_mapping(config, "actor_rollout_ref.rollout.engine_kwargs.vllm")
    return bool(user.get("enforce_eager", select(config, "actor_rollout_ref.rollout.enforce_eager", False)))


def read_recipe(config: DictConfig, settings: TLTConfig) -> RecipeFacts:
    """Look up every key, and on disk every file, that decides whether TLT can run.

    Raises:
        TLTConfigError: a key of the config cannot be resolved.
    """
    rollout = "actor_rollout_ref.rollout"
    read_mapping(config, f"{rollout}.custom")  # what TLT hands to every process will stand beside it
    read_run_dir(config)
    remote = _is_remote(config)
    policy = str(select(config, "actor_rollout_ref.model.path", ""))
    strategy, megatron = read_actor(config)
    return RecipeFacts(
        on=flag.wanted(config),
        mistaken=flag.mistaken(config),
        trainer_mode=trainer_mode(config),
        use_v1=bool(select(config, "trainer.use_v1", True)),
        other_trainer=next((node for node in ("async_training", "rollout") if node in config), None),
        hybrid_engine=bool(select(config, "actor_rollout_ref.hybrid_engine", True)),
        strategy=strategy,
        megatron=megatron,
        rollout=str(select(config, f"{rollout}.name", "")),
        disaggregation=bool(select(config, f"{rollout}.disaggregation.enabled", False)),
        data_parallel=number(config, f"{rollout}.data_parallel_size", 1),
        refused_sampling=tuple(
            f"{node}.{name}"
            for node in (rollout, f"{rollout}.val_kwargs")
            for name in REFUSED_SAMPLING
            if select(config, f"{node}.{name}")
        ),
        engine_problems=_engine_problems(config, settings),
        quantized_by=_quantized_by(config),
        mtp_rollout=bool(select(config, "actor_rollout_ref.model.mtp.enable", False))
        and bool(select(config, "actor_rollout_ref.model.mtp.enable_rollout", False)),
        bypass_old_log_prob=bool(select(config, "algorithm.rollout_correction.bypass_mode", False)),
        missing_data=() if remote else _missing_data(config),
        policy=Look() if remote else look_at_policy(policy),
        drafter=Look() if remote else look_at_drafter(settings, policy, _context(config)),
        replicas=devices(config, "trainer") // devices_per_replica(config),
        remote_driver=remote,
    )


def read_actor(config: DictConfig) -> tuple[str, tuple[str, ...]]:
    """The actor's strategy, and which switches of its Megatron engine are on."""
    node = "actor_rollout_ref.actor"
    switches = ("dynamic_context_parallel", "use_megatron_fsdp")
    on = tuple(name for name in switches if select(config, f"{node}.megatron.{name}", False))
    return str(select(config, f"{node}.strategy", "")), on


def _context(config: DictConfig) -> int:
    """Longest prompt and response, in tokens."""
    rollout = "actor_rollout_ref.rollout"
    length = sum(number(config, f"{rollout}.{part}", 0) for part in ("prompt_length", "response_length"))
    return number(config, f"{rollout}.max_model_len", length)


def trainer_mode(config: DictConfig) -> str:
    """`trainer.v1.trainer_mode` as the user wrote it, before and after activation."""
    return str(select(config, "trainer.v1.trainer_mode", "")).removeprefix(MODE_PREFIX)


def devices(config: DictConfig, node: str) -> int:
    """Devices that `node` asks for, `trainer` or `actor_rollout_ref.rollout`."""
    return number(config, f"{node}.nnodes", 1) * number(config, f"{node}.n_gpus_per_node", 1)


def devices_per_replica(config: DictConfig) -> int:
    """Devices of one rollout replica, as verl's `LLMServerManager` counts them; 1 at least."""
    kinds = ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size")
    return math.prod(max(1, number(config, f"{ROLLOUT}.{kind}", 1)) for kind in kinds)


def absolute(path: str) -> str:
    """`path` with `~` and the working directory filled in."""
    return os.path.abspath(os.path.expanduser(path))


def select(config: DictConfig, key: str, default: Any = None) -> Any:
    """The value at a dotted key, in plain Python; `default` where it is absent, null or still `???`."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        value = OmegaConf.select(config, key)
        value = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
    except OmegaConfBaseException as error:
        where = error.full_key or key
        raise TLTConfigError(f"{where} cannot be read from the configuration: {_first(error)}") from error
    return default if value is None else value


def number(config: DictConfig, key: str, default: int) -> int:
    """A whole number of 0 or more."""
    value = select(config, key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise TLTConfigError(f"{key} must be a whole number of 0 or more, not {value!r}.")
    return value


def read_mapping(config: DictConfig, key: str) -> dict[str, Any]:
    """The node at a dotted key as plain Python; empty where it is absent.

    Raises:
        TLTConfigError: it is no mapping, or cannot be resolved.
    """
    plain = select(config, key, {})
    if not isinstance(plain, dict):
        raise TLTConfigError(f"{key} must be a mapping, not {plain!r}.")
    return plain


def read_run_dir(config: DictConfig) -> str:
    """Where the run keeps its checkpoints, and TLT its own files where nothing else is said.

    Raises:
        TLTConfigError: the key is not set, or cannot be resolved.
    """
    key = "trainer.default_local_dir"
    if not isinstance(directory := select(config, key), str):
        raise TLTConfigError(f"{key} must be a directory, not {directory!r}.")
    return directory


def _first(error: Exception) -> str:
    """The first line of an error, as the end of a sentence."""
    return str(error).strip().splitlines()[0].rstrip(".") + "."


def _quantized_by(config: DictConfig) -> str | None:
    key = "actor_rollout_ref.rollout.quantization"
    if kind := select(config, key):
        return f"{key}={kind}"
    keys = (f"actor_rollout_ref.actor.{engine}.qat.enable" for engine in ("fsdp_config", "megatron"))
    return next((f"{key}=True" for key in keys if select(config, key)), None)


def _is_remote(config: DictConfig) -> bool:
    address = select(config, "ray_kwargs.ray_init.address") or os.environ.get("RAY_ADDRESS", "")
    return str(address).startswith("ray://")


def _missing_data(config: DictConfig) -> tuple[tuple[str, str], ...]:
    """Data files that verl's own dataset would look for here and not find; a custom dataset reads what it likes."""
    if select(config, "data.custom_cls.path"):
        return ()
    missing = []
    for key in ("data.train_files", "data.val_files"):
        value = select(config, key, [])
        files = [value] if isinstance(value, str) else value
        if not isinstance(files, list):
            raise TLTConfigError(f"{key} must be a file or a list of files, not {value!r}.")
        for path in files:
            if "://" not in str(path) and not glob.glob(os.path.expanduser(str(path))):
                missing.append((key, str(path)))
    return tuple(missing)


def _engine_problems(config: DictConfig, settings: TLTConfig) -> tuple[str, ...]:
    """What `verl_tlt.server.engine_arguments` would refuse when the engines start."""
    if not settings.speculation.enable or installed("vllm") is None:
        return ()
    user = read_mapping(config, "actor_rollout_ref.rollout.engine_kwargs.vllm")
    return tuple(problems(settings, user, _enforce_eager(config)))
