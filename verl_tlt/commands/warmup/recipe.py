"""What `--recipe` says of the run that a drafter is for: policy, prompts, sampling, and how its engines start."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_tlt.checks.models import POLICY, located
from verl_tlt.checks.recipe import CONFIG, ROLLOUT, Recipe, compose, number, read_mapping, select
from verl_tlt.commands.script.run import read_arguments
from verl_tlt.commands.warmup.prompts import AS_IS, MIN_PROMPTS, PromptForm, Prompts, load_tokenizer, read_prompts
from verl_tlt.config import TLTConfigError
from verl_tlt.drafter import DrafterError, policy_shape

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from verl_tlt.commands.warmup.options import EngineOptions

MODEL = "actor_rollout_ref.model"


@dataclass(frozen=True)
class Run:
    """A recipe, and verl's config as it composes it."""

    recipe: Recipe
    config: DictConfig

    def options(self) -> dict[str, Any]:
        """Fields of the commands' options that the recipe decides."""
        sampling = {name: self._float(name) for name in ("temperature", "top_p")}
        return {
            "model": Path(self._path(str(select(self.config, POLICY, "")))),
            "prompts": self._prompts(),
            "response_length": number(self.config, f"{ROLLOUT}.response_length", 512),
            "top_k": max(0, int(self._float("top_k"))),  # verl's -1: off
            "tensor_parallel": max(1, number(self.config, f"{ROLLOUT}.tensor_model_parallel_size", 1)),
            "method": str(select(self.config, "tlt.drafter.method") or "eagle3"),
            **sampling,
        }

    def form(self) -> PromptForm:
        """How it makes a prompt of a row of its data."""
        template = read_mapping(self.config, "data.apply_chat_template_kwargs")
        if own := select(self.config, f"{MODEL}.custom_chat_template"):
            template["chat_template"] = own
        return PromptForm(str(select(self.config, "data.prompt_key", "prompt")), template)

    def tokenizer(self) -> tuple[str, bool]:
        """Where its tokenizer is, and whether code in its files may run."""
        place = select(self.config, f"{MODEL}.tokenizer_path") or select(self.config, POLICY, "")
        return self._path(str(place)), bool(select(self.config, f"{MODEL}.trust_remote_code", False))

    @property
    def longest_prompt(self) -> int:
        """In tokens; a run leaves longer ones out."""
        return number(self.config, f"{ROLLOUT}.prompt_length", 512)

    @property
    def max_model_len(self) -> int | None:
        """Longest sequence of its engines, where it says one."""
        return number(self.config, f"{ROLLOUT}.max_model_len", 0) or None

    def _prompts(self) -> list[Path]:
        named = select(self.config, "data.train_files", [])
        files = [str(file) for file in (named if isinstance(named, list) else [named])]
        if away := next((file for file in files if "://" in file), None):
            raise TLTConfigError(f"data.train_files={away} is on another file system: give --prompts.")
        return [Path(self._path(file)) for file in files]

    def _path(self, path: str) -> str:
        """A path as the script's own working directory has it; a name on the hub as it is."""
        beside = os.path.join(self.recipe.directory or ".", os.path.expanduser(path))
        return os.path.abspath(beside) if os.path.exists(beside) else located(path)

    def _float(self, name: str) -> float:
        value = select(self.config, f"{ROLLOUT}.{name}", 1.0)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TLTConfigError(f"{ROLLOUT}.{name} must be a number, not {value!r}.")
        return float(value)


def read_for(
    options: EngineOptions,
    sources: Sequence[Path],
    limit: int | None,
    least: int = MIN_PROMPTS,
    form: PromptForm = AS_IS,
) -> Prompts:
    """The prompts that leave room for a response, in the form of the options' recipe, or without one in `form`."""
    positions, run = policy_shape(options.model).max_position_embeddings, read_run(options.recipe)
    if (longest := positions - options.response_length) < 1:
        raise DrafterError(
            f"--response-length {options.response_length} leaves no room for a prompt in the policy's "
            f"max_position_embeddings={positions}."
        )
    if run is None:
        return read_prompts(sources, load_tokenizer(options.model), longest, limit, least, form)
    longest = min(longest, run.longest_prompt, (run.max_model_len or positions) - 1)
    return read_prompts(sources, load_tokenizer(*run.tokenizer()), longest, limit, least, run.form())


def read_run(words: Sequence[str] | None) -> Run | None:
    """The recipe that the words after `--recipe` are; None without any."""
    return _read(tuple(words)) if words else None


@lru_cache(maxsize=1)
def _read(words: tuple[str, ...]) -> Run:
    recipe = read_arguments(words, CONFIG)
    return Run(recipe, compose(recipe.overrides, recipe.config))
