"""Options of the commands: fields of dataclasses, from which the command line is made."""

import dataclasses
import inspect
import os
import re
import shlex
import sys
import typing
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from typer import Argument, Context, Option
from typer.core import TyperCommand
from typer.models import OptionInfo

from verl_tlt.errors import TLTError
from verl_tlt.files.disk import expanded
from verl_tlt.flag import CONFIG, MAIN
from verl_tlt.upstream.versions import look_first_in, require

if TYPE_CHECKING:
    from verl_tlt.checks.recipe import Recipe

LEAST = 1e-9
"""Minimum of an option that must be above 0: typer has no exclusive limits."""
UNLIMITED = float("inf")
MOST_SEED = (1 << 32) - 1
GPU_MEMORY = 0.85
"""Share of each GPU's memory that an engine takes where no run says one."""
COMMAND = "command"
"""Field of the options, and key of the context, with the words after `--`."""
_PROGRAM = re.compile(
    r"([^=]*/)?(bash|sh|python[\d.]*|torchrun|srun|uv|nohup|env|docker|podman|kubectl|ssh|sudo|tmux|sbatch|ray)"
    rf"|[^=]*\.sh|{re.escape(MAIN)}"
)
"""Words that begin a command of the user's own."""
_VARIABLE = re.compile(r"[A-Za-z_]\w*=")
"""The begin of a variable that a shell would set."""
T = TypeVar("T")


def key_of(override: str) -> str:
    """The key that an override sets, without Hydra's signs."""
    return override.lstrip("+~").partition("=")[0]


ConfigName = Annotated[str, Option(help="Name of verl's Hydra config.")]


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The run that a command is about: verl's overrides, a composed config, or a command after `--`."""

    overrides: Annotated[
        list[str] | None, Argument(help="verl's overrides; or `-- COMMAND` for a command that starts verl.")
    ] = None
    config: Annotated[Path | None, Option(help="verl's composed config (*.yaml), as `--cfg job` prints it.")] = None
    config_name: ConfigName = CONFIG
    yes: Annotated[
        bool,
        Option("--yes", help="Run the script even if it ends jobs, changes files or installs packages."),
    ] = False
    command: tuple[str, ...] = ()
    """The words after `--`, which no option takes."""

    def names_a_run(self) -> bool:
        return bool(self.overrides or self.config or self.command)

    def has_policy(self) -> bool:
        """Whether this is a run with a policy, and not only overrides beside `--model`."""
        from verl_tlt.checks.models import POLICY

        words = [(key_of(word), word.partition("=")[2]) for word in self.overrides or ()]
        named = any(
            key == POLICY or (POLICY.startswith(f"{key}.") and re.search(r"\bpath *:", value)) for key, value in words
        )
        return bool(self.config or self.command or self.config_name != CONFIG or named)

    def recipe(self) -> "Recipe":
        """How the run starts `main_ppo`; a command after `--` is run until it does, once in this process."""
        if self.config is not None and self.command:
            raise TLTError("--config and a command after -- name two runs: give one of them.")
        if not self.names_a_run() and self.config_name != CONFIG:
            raise TLTError(f"--config-name {self.config_name} needs overrides: give at least one of your recipe.")
        words = tuple(self.overrides or ())
        return _read_recipe(self.command, words, self.config, self.config_name, self.yes)


@lru_cache(maxsize=1)
def _read_recipe(
    command: tuple[str, ...], overrides: tuple[str, ...], config: Path | None, config_name: str, yes: bool
) -> "Recipe":
    from verl_tlt.checks.recipe import Recipe

    if command:
        from verl_tlt.commands.capture import capture

        recipe = capture(command, yes)
        recipe = dataclasses.replace(recipe, overrides=(*recipe.overrides, *overrides))
    elif config is not None:
        if not config.is_file():
            raise TLTError(f"--config {config} is not a file.")
        if config.suffix != ".yaml":
            raise TLTError(f"--config {config}: Hydra reads files that end in .yaml; rename it.")
        recipe = Recipe(overrides, config.stem, folder=os.path.abspath(config.parent))
    else:
        recipe = Recipe(overrides, config_name)
    _look_where_the_run_does(recipe)
    return recipe


def _look_where_the_run_does(recipe: "Recipe") -> None:
    """Have this process find modules in the folders in which `python -m verl.trainer.main_ppo` would find them."""
    directory = recipe.directory or os.getcwd()
    python_path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    folders = [directory, *(os.path.join(directory, folder) for folder in python_path if folder)]
    look_first_in(folders)
    sys.path += [folder for folder in folders if folder not in sys.path]  # last: what is imported already stays


@dataclass(frozen=True, kw_only=True)
class DoctorOptions(RunOptions):
    gpu: Annotated[bool, Option("--gpu", help="Start the recipe's engine here and measure it, for minutes.")] = False
    seconds: Annotated[float, Option(min=1, max=86400, help="With --gpu: seconds spent measuring step times.")] = 60.0
    out: Annotated[Path, Option(help="With --gpu: file of the report.")] = Path("tlt-doctor.json")
    all: Annotated[bool, Option("--all", help="List what is fine too.")] = False


@dataclass(frozen=True, kw_only=True)
class AdviseOptions:
    metrics: Annotated[
        list[Path], Argument(help="Metrics of a run with stock verl: file logger, console log, or W&B's CSV.")
    ]
    drafter: Annotated[Path | None, Option(help="Drafter of verl-tlt warmup or of a run; needs --costs.")] = None
    costs: Annotated[Path | None, Option(help="Step times: the report of verl-tlt doctor --gpu.")] = None


@dataclass(frozen=True, kw_only=True)
class CompareOptions(RunOptions):
    arms: Annotated[str, Option(help="Beside stock, by commas: tlt, tlt-no-spot, vllm-K.")] = "tlt"
    rounds: Annotated[int, Option(min=1, help="Jobs of each arm.")] = 3
    steps: Annotated[int, Option(min=2, help="RL steps of a job, of which the first does not count.")] = 6
    out: Annotated[Path, Option(help="Output folder; what is there is continued.")] = Path("compare-out")
    drafter: Annotated[str | None, Option(help="Drafter of TLT and vllm-K, a folder or a name on the hub.")] = None
    metrics: Annotated[Path | None, Option(help="Metrics of an earlier run, to predict how long this takes.")] = None
    stall_minutes: Annotated[float, Option(min=LEAST, help="End a job that is silent for so long.")] = 60.0


@dataclass(frozen=True, kw_only=True)
class EngineOptions(RunOptions):
    """The policy, how it samples, and its engine."""

    model: Annotated[Path, Option(help="The policy's Hugging Face directory, or its name on the hub.")]
    draft_length: Annotated[int, Option(min=1, max=16, help="Draft length at which the accept length is measured.")] = 3
    tensor_parallel: Annotated[int, Option(min=1, help="GPUs of vLLM's engine.")] = 1
    response_length: Annotated[int, Option(min=1, help="Longest response, in tokens.")] = 1024
    temperature: Annotated[float, Option(min=0, max=100, help="The rollout's temperature.")] = 1.0
    top_p: Annotated[float, Option(min=1e-6, max=1, help="The rollout's top_p.")] = 1.0
    top_k: Annotated[int, Option(min=0, help="The rollout's top_k; 0 disables it.")] = 0
    seed: Annotated[int, Option(min=0, max=MOST_SEED, help="Seed of sampling, weights and training order.")] = 0

    def recipe(self) -> "Recipe":
        """How the run starts `main_ppo`; overrides beside `--model` change the command's defaults, not verl's."""
        recipe = super().recipe()
        return recipe if self.has_policy() else _with_own_defaults(recipe, self.model)

    @classmethod
    def completed(cls, given: dict[str, Any]) -> dict[str, Any]:
        """The values that the user gave, by name, with those that the user's run decides."""
        from verl_tlt.commands.warmup.run import decided_options

        fields = dataclasses.fields(cls)
        run = RunOptions(**{f.name: given[f.name] for f in dataclasses.fields(RunOptions) if f.name in given})
        recipe = run.recipe()
        require("torch", "transformers", "verl", "vllm")  # where a command after -- starts verl
        if not run.has_policy() and "model" in given:
            recipe = _with_own_defaults(recipe, given["model"])
        decided, names = decided_options(recipe, given), {f.name for f in fields}
        if not run.has_policy():
            decided.pop("model", None)  # verl's default is nobody's policy
        given = {name: value for name, value in decided.items() if name in names} | given
        missing = [f.name for f in fields if f.default is dataclasses.MISSING and not given.get(f.name)]
        if not missing:
            return given
        if missing[0] == "out":
            raise TLTError("--out is missing: give the folder that the drafter is written to.")
        raise TLTError(f"--{missing[0]} is missing: give it, or your run's command after --, which says it too.")


def _with_own_defaults(recipe: "Recipe", policy: Path) -> "Recipe":
    """The recipe of a command with this policy and no run, with defaults that suit one engine alone."""
    import torch

    from verl_tlt.checks.recipe import ROLLOUT
    from verl_tlt.drafter.policy import policy_shape

    defaults = (
        "data.train_files=[]",
        f"data.max_prompt_length={policy_shape(policy).max_position_embeddings}",
        f"data.max_response_length={EngineOptions.response_length}",
        f"{ROLLOUT}.tensor_model_parallel_size={EngineOptions.tensor_parallel}",
        f"{ROLLOUT}.dtype=auto",
        f"{ROLLOUT}.gpu_memory_utilization={GPU_MEMORY}",
        f"{ROLLOUT}.enforce_eager={not torch.cuda.is_available()}",
    )
    return dataclasses.replace(recipe, overrides=(*defaults, *recipe.overrides))


@dataclass(frozen=True, kw_only=True)
class WarmupOptions(EngineOptions):
    """A drafter's training on responses, which ends with whichever part of its budget is used up first."""

    prompts: Annotated[list[Path], Option(help="Files of prompts as verl reads them: .parquet, .jsonl, .json.")]
    out: Annotated[Path, Option(help="Folder to write; OUT.warmup beside it has work in progress.")]
    method: Annotated[str, Option(help="eagle3: a new head; mtp: the policy's own MTP head.")] = "eagle3"
    drafter: Annotated[Path | None, Option(help="Directory or hub name of a drafter to continue from.")] = None
    aux_layers: Annotated[str | None, Option(help="Layers whose hidden states are read, such as 2,18,33.")] = None
    intermediate_size: Annotated[
        int | None, Option(min=1, help="MLP width of the new drafter; default: the policy's.")
    ] = None
    draft_vocab: Annotated[
        int | None, Option(min=2, help="Draft vocabulary; by default 32768, or all of up to 65536.")
    ] = None
    samples: Annotated[int, Option(min=1, help="Responses per prompt.")] = 1
    limit: Annotated[int, Option(min=1, help="Most prompts.")] = 4096
    objective: Annotated[str, Option(help="eagle, hass or eagle3: train 1, 3 or 7 draft positions.")] = "hass"
    epochs: Annotated[float, Option(min=LEAST, help="Most passes over the responses.")] = 4.0
    max_steps: Annotated[float, Option(min=1, help="Most optimizer steps.")] = UNLIMITED
    max_minutes: Annotated[float, Option(min=LEAST, help="Most minutes of training, without the checks.")] = UNLIMITED
    batch_tokens: Annotated[int, Option(min=1, help="Tokens of a packed micro-batch.")] = 2048
    learning_rate: Annotated[float, Option(min=LEAST, max=1, help="AdamW's peak learning rate.")] = 1e-3
    cache_gb: Annotated[
        float, Option(min=0, max=1e6, help="Host memory for hidden states; what exceeds it is recomputed.")
    ] = 8.0

    @property
    def work(self) -> Path:
        return self.out.with_name(self.out.name + ".warmup")


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(EngineOptions):
    drafter: Annotated[Path, Argument(help="The drafter's directory, or its name on the hub.")]
    prompts: Annotated[list[Path], Option(help="Files of prompts as verl reads them: .parquet, .jsonl, .json.")]
    limit: Annotated[int, Option(min=1, help="Most prompts.")] = 64


class CommandAfterDashes(TyperCommand):
    """A command of ours that takes the user's own command after `--`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Take the words after `--` aside, before typer sees them."""
        end = args.index("--") if "--" in args else len(args)
        self._refuse_command_without_dashes(ctx.info_name, args, end)
        if args[end:] == ["--"]:
            raise TLTError(f"No command stands after the dashes: verl-tlt {ctx.info_name} ... -- bash recipe.sh")
        ctx.meta[COMMAND] = tuple(args[end + 1 :])
        return super().parse_args(ctx, args[:end])

    def _refuse_command_without_dashes(self, name: str, args: list[str], end: int) -> None:
        """Raise a `TLTError` where the words before `end` have the user's own command, and show where `--` belongs."""
        options = {word for option in self.params if not getattr(option, "is_flag", True) for word in option.opts}
        places = [i for i in range(end) if i == 0 or args[i - 1] not in options]  # of words that are no option's value
        programs = [i for i in places if _PROGRAM.fullmatch(args[i])]
        if not programs:
            return
        plain_words = [i for i in places if not args[i].startswith("-") and "=" not in args[i]]
        begin = plain_words[0] if plain_words else programs[0]
        variables = [word for word in args[:begin] if _VARIABLE.match(word)]
        ours = [word for word in args[:begin] if word not in variables]
        words = shlex.join([*variables, "verl-tlt", name, *ours, "--", *args[begin:]])
        raise TLTError(f"A command of your own stands after two dashes: {words}")


def takes_options(options: type[T]) -> Callable[[Callable[[T], None]], Callable[..., None]]:
    """Make a typer command of a function that takes `options`; each of their fields is an option or an argument.

    If the class has a method `completed`, it gets the values that the user gave, by name, and may add others.
    """
    completed = getattr(options, "completed", None)
    parameters = [inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=Context)]
    for field in inspect.signature(options, eval_str=True).parameters.values():
        if field.name == COMMAND:
            continue
        info = typing.get_args(field.annotation)[1]
        fillable = completed and field.default is field.empty and isinstance(info, OptionInfo)
        parameters.append(field.replace(default=None) if fillable else field)
    parameters.sort(key=lambda parameter: parameter.default is not parameter.empty)  # required ones first

    def decorate(function: Callable[[T], None]) -> Callable[..., None]:
        def command(context: Context, **given: Any) -> None:
            defaults = [name for name in given if _is_default(context, name)]
            values = {name: _with_home(value) for name, value in given.items()}
            if words := context.meta.get(COMMAND):
                values[COMMAND] = words
            if completed:
                values = completed({name: value for name, value in values.items() if name not in defaults})
            function(options(**values))

        command.__name__ = function.__name__
        command.__doc__ = function.__doc__
        command.__annotations__ = {}
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return command

    return decorate


def _is_default(context: Context, name: str) -> bool:
    """Whether the user did not give this option."""
    return getattr(context.get_parameter_source(name), "name", "") == "DEFAULT"


def _with_home(value: Any) -> Any:
    """A value with `~` filled in where it is a path, which shells leave as it is in `--out=~/x`."""
    if isinstance(value, list):
        return [_with_home(each) for each in value]
    return expanded(value) if isinstance(value, Path) else value
