"""The run that a warm-up or an evaluation is for: its verl config, and the options that it decides."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_tlt.checks.models import POLICY, absolute, located
from verl_tlt.checks.recipe import ROLLOUT, Recipe, number, read_mapping, select
from verl_tlt.config import MOST, TLTConfigError
from verl_tlt.drafter.model_files import elsewhere
from verl_tlt.files.disk import matching

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from verl_tlt.commands.options import EngineOptions

MODEL = "actor_rollout_ref.model"


def decided_options(recipe: Recipe, given: Collection[str] = ()) -> dict[str, Any]:
    """Options of the commands that a recipe decides, by field, without those that are `given`."""
    with recipe.composed() as config:
        decided = {
            "model": None if "model" in given else _policy(config),
            "prompts": [] if "prompts" in given else list(_data_files(config)),
            "response_length": number(config, f"{ROLLOUT}.response_length", 512),
            "temperature": _float(config, "temperature", 0.0, MOST),
            "top_p": _float(config, "top_p", 1e-6, 1.0),
            "top_k": max(0, int(_float(config, "top_k", -1, MOST))),  # verl's -1: off
            "tensor_parallel": number(config, f"{ROLLOUT}.tensor_model_parallel_size", 1),
            "method": str(select(config, "tlt.drafter.method") or "eagle3"),
        }
    return {name: value for name, value in decided.items() if name not in given}


def _policy(config: DictConfig) -> Path:
    """The run's policy: a folder, or a name on the hub."""
    path = str(select(config, POLICY, ""))
    if elsewhere(path):
        raise TLTConfigError(f"{POLICY}={path} is on another file system: copy it here, and give --model.")
    return Path(located(path))


def _data_files(config: DictConfig) -> Iterator[Path]:
    """The run's training data: the files that a pattern names, as verl's dataset reads it."""
    named = select(config, "data.train_files", [])
    files = named if isinstance(named, list) else [named]
    for file in map(str, files):
        if "://" in file:
            raise TLTConfigError(f"data.train_files={file} is on another file system: give --prompts.")
        for found in matching(file) or [file]:
            yield Path(absolute(found))


def composed(options: EngineOptions, changes: dict[str, Any] | None = None) -> AbstractContextManager[DictConfig]:
    """`Recipe.composed` of the run, with the options and `changes` in place of what it says."""
    return options.recipe().composed({**engine_values(options), **(changes or {})})


def engine_values(options: EngineOptions) -> dict[str, Any]:
    """Values of verl's config that the options decide, by their dotted keys."""
    return {
        f"{MODEL}.path": located(str(options.model)),  # the recipe's script may start elsewhere
        f"{MODEL}.mtp.enable_rollout": False,  # the job says what drafts
        f"{ROLLOUT}.name": "vllm",
        f"{ROLLOUT}.temperature": options.temperature,
        f"{ROLLOUT}.top_p": options.top_p,
        f"{ROLLOUT}.top_k": options.top_k or -1,
        f"{ROLLOUT}.seed": options.seed,
        f"{ROLLOUT}.response_length": options.response_length,
        f"{ROLLOUT}.tensor_model_parallel_size": options.tensor_parallel,
    }


def longest_context(options: EngineOptions) -> int | None:
    """Tokens of the longest sequence of the run's engines; None: the run does not say."""
    with composed(options) as config:
        return number(config, f"{ROLLOUT}.max_model_len", 0) or None


def ends_of_responses(options: EngineOptions) -> dict[str, Any]:
    """What the run says of when a response ends, besides the options."""
    with composed(options) as config:
        return {name: select(config, f"{ROLLOUT}.{name}") for name in ("max_model_len", "ignore_eos")}


def processor_options(options: EngineOptions) -> dict[str, Any]:
    """Arguments that the run gives to the policy's processor, which cuts images into patches."""
    with composed(options) as config:
        return read_mapping(config, "data.mm_processor_kwargs")


def _float(config: DictConfig, name: str, least: float, most: float) -> float:
    value = select(config, f"{ROLLOUT}.{name}", 1.0)
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise TLTConfigError(f"{ROLLOUT}.{name} must be a number from {least:g} to {most:g}, not {value!r}.")
    return float(value)
