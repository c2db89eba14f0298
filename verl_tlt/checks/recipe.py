"""A recipe composed as `main_ppo` would compose it, from its overrides, and its keys read with checks.

Whatever cannot be read is a `TLTConfigError` that names the key. Imports neither verl nor vLLM nor torch,
and omegaconf and hydra only once there is a recipe: `verl-tlt doctor` has to work where nothing is installed yet.
"""

from __future__ import annotations

import contextlib
import copy
import difflib
import functools
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_tlt import MODE_PREFIX, flag
from verl_tlt.checks.models import POLICY, absolute
from verl_tlt.config import MOST, TLTConfig, TLTConfigError
from verl_tlt.drafter.model_files import first_line
from verl_tlt.drafter.policy import read_model_config
from verl_tlt.errors import DrafterError
from verl_tlt.upstream.versions import location

if TYPE_CHECKING:
    from omegaconf import DictConfig

ROLLOUT = "actor_rollout_ref.rollout"
RAY_CLUSTER = "ray_current_cluster"


@dataclass(frozen=True)
class Recipe:
    """How `main_ppo` is started."""

    overrides: tuple[str, ...]
    config: str = flag.CONFIG
    """Name of the top-level config in its folder."""
    directory: str | None = field(default=None, compare=False)
    """Working directory in which it is started; None: this process's."""
    folder: str = ""
    """The config's folder, as `config_folder` takes it; empty: verl's own."""

    def place(self) -> contextlib.AbstractContextManager[None]:
        """Run a `with` block in the directory in which the command starts `main_ppo`."""
        return contextlib.chdir(self.directory if self.directory and os.path.isdir(self.directory) else ".")

    def compose(self, *more: str) -> DictConfig:
        """The composed config, with these overrides after the recipe's own."""
        with self.place():
            return compose((*self.overrides, *more), self.config, self.folder)

    @contextlib.contextmanager
    def composed(self, changes: dict[str, Any] | None = None) -> Iterator[DictConfig]:
        """Run a `with` block in `place`, with the composed config; `changes` are other values by their dotted keys."""
        from omegaconf import OmegaConf, open_dict

        with self.place():
            config = self.compose()
            with open_dict(config):
                for key, value in (changes or {}).items():
                    OmegaConf.update(config, key, value, force_add=True)
            yield config


def config_folder(folder: str) -> str:
    """The absolute path of a folder of configs; a relative one is beside verl's `main_ppo`, an empty one verl's own."""
    verl = location("verl")
    if verl is None:
        raise TLTConfigError("verl is not installed here, so its configuration cannot be composed.")
    return os.path.abspath(os.path.join(verl, "trainer", folder or "config"))


def compose(overrides: Sequence[str], config_name: str = flag.CONFIG, folder: str = "") -> DictConfig:
    """The verl config `config_name` in `folder`, which is as `config_folder` takes it, with `overrides`."""
    return copy.deepcopy(_composed(tuple(overrides), config_name, folder))


@functools.lru_cache(maxsize=8)  # a command asks for the same one several times
def _composed(overrides: tuple[str, ...], config_name: str, folder: str) -> DictConfig:
    directory = config_folder(folder)
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    for word in overrides:
        sentence = _misread(word)
        if sentence:
            raise TLTConfigError(sentence)
    try:
        with initialize_config_dir(directory, version_base=None):
            config = hydra_compose(config_name, overrides=flag.joined(overrides))
    except (HydraException, OmegaConfBaseException, YAMLError, UnicodeDecodeError) as error:
        raise TLTConfigError(_not_composed(overrides, config_name, folder, str(error))) from error
    if "actor_rollout_ref" not in config:
        needs = "a config of your own begins with `defaults: [ppo_trainer, _self_]`"
        raise TLTConfigError(f"{config_name} has no actor_rollout_ref, so it is no config of {flag.MAIN}: {needs}.")
    return config


def _not_composed(overrides: tuple[str, ...], config_name: str, folder: str, error: str) -> str:
    """A sentence for Hydra's `error`; of a key that verl does not have, it names the one that was probably meant."""
    reason = " ".join(line.strip() for line in error.splitlines() if line.strip())
    refused = re.search(r"Could not override '([\w.]+)'", reason)  # Hydra goes on to say how to add it
    unknown_key = refused[1] if refused else ""
    values = [word.partition("=")[2] for word in overrides if word.partition("=")[0] == unknown_key]
    others = [word for word in overrides if word.partition("=")[0] != unknown_key]
    if unknown_key and values:
        section, _, name = unknown_key.rpartition(".")
        misspelt_plugin = flag.misspelt({name: values[0]}) if section == "trainer" else None
        if misspelt_plugin:
            return misspelt_plugin
        reason = f"it has no {unknown_key}.{likely_meant(unknown_key, compose(others, config_name, folder))}"
    elif "Could not load 'ppo_" in reason:
        reason += " A config of your own finds verl's by `hydra: {searchpath: [pkg://verl.trainer.config]}`."
    return f"Hydra cannot compose {os.path.join(folder, config_name)} from these overrides: {reason}"


@functools.lru_cache(maxsize=1024)
def _misread(word: str) -> str | None:
    """Why a word of a command line is no override that Hydra can read, and what to write instead; else None."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    key, equals, value = word.partition("=")
    if not word.strip():
        return "An override is empty: look for a space behind a backslash at the end of a line."
    if not equals and not word.startswith("~"):
        return f"{word} is no override, KEY=VALUE. An option with several files is given once for each of them."
    if not value and re.fullmatch(r"[^={}\[\]]+=", word):
        return f"{word} has no value; {word}null and {word}'' say so on purpose."
    if re.match(r"\+*(\w+\.)+\w+=", value):
        return f"{word} has an override as its value: the script takes its first argument for {key} itself."
    try:
        OverridesParser.create().parse_override(word)
    except HydraException as error:
        if value.startswith(("{", "[")) or not re.fullmatch(r"\+*[\w.]+", key):
            quotes = " The keys of a mapping take no quotes." if value.startswith('{"') else ""
            return f"Hydra cannot read {word}: {first_line(error)}.{quotes}"
        home = ", or $HOME in place of ~" if value.startswith("~") else ""
        return f"Hydra cannot read {word}: put its value into quotes inside quotes, {key}='\"...\"'{home}."
    return None


def quoted(value: object) -> str:
    """A value as Hydra reads it, whatever characters it has."""
    from hydra.core.override_parser.types import Quote, QuotedString

    return QuotedString(str(value), Quote.single).with_quotes()


def likely_meant(key: str, config: DictConfig) -> str:
    """A question, after a space, that names the key which was probably meant by one that is not verl's; or nothing."""
    from omegaconf import OmegaConf

    keys = [known for known in _dotted_keys(OmegaConf.to_container(config, resolve=False)) if known != key]
    parent, _, name = key.rpartition(".")
    siblings = [known for known in keys if known.rpartition(".")[0] == parent] if parent else []
    alike = _with_a_name_like(name, siblings, 0.55) or _with_a_name_like(name, keys, 0.8)
    if not alike:
        return ""
    least_nested = min(alike, key=lambda known: known.count("."))
    return f" Did you mean {least_nested}?"


def _with_a_name_like(name: str, keys: Sequence[str], likeness: float) -> list[str]:
    """Those dotted keys whose last part is at least this alike to `name`, on difflib's scale from 0 to 1."""
    near = difflib.get_close_matches(name, {key.rpartition(".")[2] for key in keys}, 3, likeness)
    return [key for key in keys if key.rpartition(".")[2] in near]


def _dotted_keys(node: object) -> Iterator[str]:
    """The dotted keys of a nested mapping, those of its inner nodes included."""
    if not isinstance(node, dict):
        return
    for key, value in node.items():
        yield str(key)
        for below in _dotted_keys(value):
            yield f"{key}.{below}"


# ---------------------------------------------------------------------- reading keys


def select(config: DictConfig, key: str, default: object = None) -> object:
    """The value at a dotted key, in plain Python; `default` where it is absent, null or still `???`."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        value = OmegaConf.select(config, key)
        if OmegaConf.is_config(value):
            value = OmegaConf.to_container(value, resolve=True)
    except OmegaConfBaseException as error:
        where = error.full_key or key
        raise TLTConfigError(f"{where} cannot be read from the configuration: {first_line(error)}.") from error
    return default if value is None else value


def number(config: DictConfig, key: str, default: int) -> int:
    """The whole number at a dotted key; `default` where it is absent or null. verl judges it."""
    value = select(config, key, default)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MOST:
        raise TLTConfigError(f"{key} must be a whole number from 0 to {MOST:,}, not {value!r}.")
    return value


def read_mapping(config: DictConfig, key: str) -> dict[str, object]:
    """The mapping at a dotted key, in plain Python; empty where it is absent."""
    plain = select(config, key, {})
    if not isinstance(plain, dict):
        raise TLTConfigError(f"{key} must be a mapping, not {plain!r}.")
    return plain


def read_run_dir(config: DictConfig) -> str:
    """Where the run keeps its checkpoints, and TLT its own files where nothing else is said."""
    key = "trainer.default_local_dir"
    directory = select(config, key)
    if not isinstance(directory, str):
        raise TLTConfigError(f"{key} must be a directory, not {directory!r}.")
    return directory


def ray_address(config: DictConfig) -> str:
    """Address of the Ray cluster that the run joins, as `ray.init` finds it; empty: Ray starts one for the run."""
    ray_init = "ray_kwargs.ray_init"
    address = str(select(config, f"{ray_init}.address") or "")
    if address in ("", "auto"):
        address = os.environ.get("RAY_ADDRESS") or address
    if address in ("", "auto"):
        folder = select(config, f"{ray_init}._temp_dir")
        file = Path(str(folder), RAY_CLUSTER) if folder else cluster_file(os.environ)
        with contextlib.suppress(OSError):
            address = file.read_text(errors="replace").strip() or address
    return "" if address == "local" else address


def cluster_file(environment: Mapping[str, str]) -> Path:
    """File by which processes with this environment find the Ray cluster that `ray start` started or joined here."""
    base = environment.get("RAY_TMPDIR", environment.get("TMPDIR", "/tmp"))  # as `get_default_system_temp_dir` of Ray
    return Path(base, "ray", RAY_CLUSTER)


def trace_dir(config: DictConfig, settings: TLTConfig) -> str:
    """Absolute path of the trace's folder."""
    return absolute(settings.trace.dir or os.path.join(read_run_dir(config), "tlt_trace"))


def save_dir(config: DictConfig, settings: TLTConfig) -> str:
    """Absolute path of the folder that gets the drafter at the end."""
    return absolute(settings.drafter.save_dir or os.path.join(read_run_dir(config), "tlt_drafter"))


def read_settings(config: DictConfig) -> TLTConfig:
    """The `tlt` node as checked settings; all defaults where it is absent."""
    if select(config, "trainer.tlt") is not None:
        raise TLTConfigError("trainer.tlt is not read: move the tlt node to the top of the config.")
    return TLTConfig.from_user(read_mapping(config, "tlt"))


def policy_fields(config: DictConfig) -> dict[str, Any]:
    """The config of the recipe's policy; empty where it cannot be read, which another rule reports."""
    try:
        return read_model_config(os.path.expanduser(str(select(config, POLICY, ""))))
    except DrafterError:
        return {}


def engine_setting(config: DictConfig, name: str, default: object = None) -> object:
    """A setting of the rollout as its engines have it: vLLM's own (`engine_kwargs`) wins where it is not null."""
    own = read_mapping(config, f"{ROLLOUT}.engine_kwargs.vllm").get(name)
    return select(config, f"{ROLLOUT}.{name}", default) if own is None else own


def enforce_eager(config: DictConfig) -> bool:
    """Whether engines capture no CUDA graphs."""
    return bool(engine_setting(config, "enforce_eager", False))


def engine_dtype(config: DictConfig) -> str:
    """The `dtype` that engines compute in, as vLLM names it; `auto`: the policy's config does not say float16."""
    name = str(engine_setting(config, "dtype", "bfloat16")).lower()
    if name != "auto":
        return name
    fields = policy_fields(config)
    text = fields.get("text_config") or {}
    of_policy = fields.get("dtype") or fields.get("torch_dtype") or text.get("dtype") or text.get("torch_dtype")
    return "float16" if of_policy == "float16" else "auto"


def trainer_mode(config: DictConfig) -> str:
    """`trainer.v1.trainer_mode` as the user wrote it, before and after activation."""
    return str(select(config, "trainer.v1.trainer_mode", "")).removeprefix(MODE_PREFIX)


def device_of(config: DictConfig) -> str:
    """The kind of device that the recipe computes on, such as `cuda` or `cpu`."""
    return str(select(config, "trainer.device", "cuda"))


def devices(config: DictConfig, node: str) -> int:
    """Devices that `node` asks for, `trainer` or `actor_rollout_ref.rollout`."""
    return number(config, f"{node}.nnodes", 1) * number(config, f"{node}.n_gpus_per_node", 1)


def replicas_on(config: DictConfig, node: str) -> int:
    """Rollout replicas on the devices of `node`, as verl's `LLMServerManager` counts them.

    A `TLTConfigError` where there are too few devices for one.
    """
    available = devices(config, node)
    kinds = ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size")
    per_replica = math.prod(max(1, number(config, f"{ROLLOUT}.{kind}", 1)) for kind in kinds)
    if available < per_replica:
        raise TLTConfigError(
            f"{ROLLOUT}.tensor_model_parallel_size and its like ask for {per_replica} GPUs a replica, and "
            f"{node}.nnodes and {node}.n_gpus_per_node give {available}."
        )
    return available // per_replica


def context_tokens(config: DictConfig) -> int:
    """Longest sequence of an engine, in tokens."""
    prompt = number(config, f"{ROLLOUT}.prompt_length", 0)
    response = number(config, f"{ROLLOUT}.response_length", 0)
    return number(config, f"{ROLLOUT}.max_model_len", prompt + response)
