"""A comparison before anything starts: its arms, where all of them begin, and what each turn is given."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import verl_tlt
from verl_tlt import LONGEST_DRAFT, flag
from verl_tlt.capture import APPEND, environment_for
from verl_tlt.checks.models import DRAFTER, METHOD, Finding, located
from verl_tlt.checks.recipe import Recipe, number, quoted, ray_address, read_run_dir, select, trainer_mode
from verl_tlt.commands.compare.record import STEP, CompareError
from verl_tlt.commands.doctor.command import diagnose, examine_gpus
from verl_tlt.commands.options import key_of
from verl_tlt.config import TLTConfigError
from verl_tlt.drafter.check import drafter_folder
from verl_tlt.flag import CONFIG, MAIN
from verl_tlt.trainer.checkpoints import saved_drafter
from verl_tlt.upstream.versions import installed

if TYPE_CHECKING:
    from omegaconf import DictConfig

STOCK, TLT, NO_SPOT = "stock", "tlt", "tlt-no-spot"
ENGINE = "actor_rollout_ref.rollout"
SPECULATIVE = f"++{ENGINE}.engine_kwargs.vllm.speculative_config"
NO_SLEEP = f"{ENGINE}.free_cache_engine=False"
OWN_LOG = {"VLLM_LOGGING_LEVEL": "INFO", "VLLM_LOG_STATS_INTERVAL": "5"}
"""verl keeps vLLM's log, which has the accept length of its own speculation, at warnings unless told otherwise."""
LATEST = "latest_checkpointed_iteration.txt"
FLAG = f"++{flag.SWITCH}={flag.NAME}"
NO_FLAG = f"++{flag.SWITCH}=null"
NOT_COMPARED = re.compile(
    r"trainer\.(experiment_name|project_name|logger|resume_\w+|\w+_(local|data|hdfs)_dir)|tlt\.(trace\.dir|drafter\.save_dir)"
    r"|hydra\.(run|sweep|job|job_logging)\..*|.*profiler\..*(path|dir)|.*\.env_vars\.WANDB_\w+"
)
"""Settings that may differ between two calls of a comparison: they only say what a turn is called and where it writes.
Where it starts must stay the same (`Plan.asked`)."""
ENV_VARS = "++ray_kwargs.ray_init.runtime_env.env_vars"
NEVER = 10**9


@dataclass(frozen=True)
class Arm:
    """One way to run the recipe: with stock verl, with vLLM's own speculation, with TLT."""

    name: str
    label: str
    """Description of the arm, as it is printed."""
    tlt: bool
    """Whether the arm has TLT's flag; without it the recipe's settings of TLT do nothing."""
    overrides: tuple[str, ...] = ()
    """Overrides after those of the recipe."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of every process of its jobs, besides the recipe's."""

    @property
    def own_speculation(self) -> bool:
        """Whether vLLM's own speculation is on, whose accept length only its log has."""
        return any(override.startswith(SPECULATIVE) for override in self.overrides)


def vllm_arm(name: str, label: str, drafter: str, longest: int) -> Arm:
    """Stock verl whose engines have vLLM's own speculation, K=`longest`, and never sleep.

    The weights of the EAGLE-3 `drafter` are read from its file, though verl fills in the policy's later.
    """
    config = (
        f"{SPECULATIVE}={{method:eagle3,model:{quoted(drafter)},num_speculative_tokens:{longest},"
        f"draft_sample_method:probabilistic,draft_load_config:{{load_format:auto}}}}"
    )
    return Arm(name, label, False, (config, f"{ENGINE}.disable_log_stats=False", NO_SLEEP), OWN_LOG)


def named_arms(names: Sequence[str], drafter: str | None) -> list[Arm]:
    """Stock verl and the arms of these names; a CompareError where there is none, or one lacks the drafter it needs."""
    given = () if drafter is None else (f"++tlt.drafter.path={quoted(drafter)}",)
    known = {
        STOCK: Arm(STOCK, "the recipe with stock verl", False),
        TLT: Arm(TLT, "the recipe with verl-tlt", True, given),
        NO_SPOT: Arm(NO_SPOT, "verl-tlt whose drafter is not trained", True, (*given, "++tlt.spot.enable=false")),
    }
    arms = {STOCK: known[STOCK]}
    for name in filter(None, names):
        if name in known:
            arms[name] = known[name]
            continue
        match = re.fullmatch(r"vllm-([1-9][0-9]?)", name)
        if match is None or int(match[1]) > LONGEST_DRAFT:
            there = f"{', '.join(known)}, vllm-1 to vllm-{LONGEST_DRAFT}"
            raise CompareError(f"There is no arm {name!r}: there are {there}.")
        if drafter is None:
            raise CompareError(f"The arm {name} needs a drafter: name one with --drafter or tlt.drafter.path.")
        label = f"vLLM's own speculation, K={match[1]}; its engines never sleep, since verl's defaults lose the drafter"
        arms[name] = vllm_arm(name, label, drafter, int(match[1]))
    if len(arms) == 1:
        raise CompareError(f"Stock verl is compared with nothing: give another arm, such as --arms {TLT}.")
    return list(arms.values())


@dataclass(frozen=True)
class Plan:
    """Settings that all turns of all arms share."""

    recipe: Recipe
    """The user's recipe, with TLT's flag or without."""
    start: Path | None
    """The checkpoint in which all arms begin; None: the policy of the recipe."""
    steps: int
    """RL steps of a turn."""
    folder: Path
    """Folder in which each arm has a folder of its own."""
    command: tuple[str, ...] = ()
    """The user's own command, which starts `main_ppo`; empty: it is started directly."""
    typed: tuple[str, ...] = ()
    """Overrides that the user gave besides the command."""
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    """Environment in which jobs are started."""
    adjusted: tuple[str, ...] = ()
    """Overrides with which jobs have the same prompts, can go on from a checkpoint, and learn as the real run does."""

    def of_arm(self, arm: Arm) -> Recipe:
        overrides = (*self.recipe.overrides, FLAG if arm.tlt else NO_FLAG, *arm.overrides)
        return dataclasses.replace(self.recipe, overrides=overrides)

    def last_step(self, turn: int) -> int:
        """The RL step that turn number `turn` ends with; -1: the step before the first."""
        first = int(self.start.name.removeprefix(STEP)) if self.start else 0
        return first + self.steps * (turn + 1)

    def checkpoint(self, arm: Arm, turn: int) -> Path | None:
        """The checkpoint that an arm's turn begins with; None: the policy of the recipe."""
        if turn == 0:
            return self.start
        return self.folder / arm.name / f"{STEP}{self.last_step(turn - 1)}"

    def overrides(self, arm: Arm, turn: int, variables: Mapping[str, str] = MappingProxyType({})) -> list[str]:
        """Overrides after those of the recipe; Ray's processes get the `variables`."""
        home = self.folder / arm.name
        begin = self.checkpoint(arm, turn)
        resume = ["trainer.resume_mode=disable"]
        if begin:
            resume = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={quoted(begin)}"]
        own = [f"++tlt.trace.dir={quoted(home / 'trace')}", f"++tlt.drafter.save_dir={quoted(home / 'drafter')}"]
        return [
            FLAG if arm.tlt else NO_FLAG,
            "trainer.rollout_data_dir=null", "trainer.checkpoint_callback_class=null",  # both are the real run's
            *arm.overrides, *resume, *(own if arm.tlt else ()),
            f"trainer.default_local_dir={quoted(home)}", f"hydra.run.dir={quoted(home / 'hydra')}",
            f"trainer.total_training_steps={self.last_step(turn)}", f"trainer.total_epochs={NEVER}",
            f"trainer.save_freq={NEVER}",  # so that only the last step is saved
            "trainer.test_freq=-1", "trainer.val_before_train=False", "trainer.logger=[console,file]",
            "trainer.project_name=verl-tlt-compare", f"trainer.experiment_name={arm.name}",
            "trainer.default_hdfs_dir=null", "trainer.del_local_ckpt_after_load=False", *self.adjusted,
            *(f"{ENV_VARS}.{name}={quoted(value)}" for name, value in variables.items()),
        ]  # fmt: skip

    def job(self, arm: Arm, turn: int, variables: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
        """The command of a turn, and its environment; `variables` are the turn's own."""
        own = {**arm.environment, **variables}
        added = self.overrides(arm, turn, own)
        if self.command:
            environment = environment_for(APPEND, json.dumps([*self.typed, *added]), {**self.environment, **own})
            return list(self.command), environment
        path, name = self.recipe.folder, self.recipe.config
        where = [f"--config-path={path}", f"--config-name={name}"] if path else [f"--config-name={name}"]
        command = [sys.executable, "-m", MAIN, *where, *self.recipe.overrides, *added]
        return command, {**self.environment, **own}

    def asked(self, arms: Sequence[Arm]) -> dict[str, object]:
        """Settings that must stay the same for turns to be comparable. Names may differ: many have a date."""
        words = {"recipe": list(self.recipe.overrides)}
        if self.recipe.folder or self.recipe.config != CONFIG:
            words["recipe"].append(f"--config-name={os.path.join(self.recipe.folder, self.recipe.config)}")
        for arm in arms:
            variables = (f"{name}={value}" for name, value in sorted(arm.environment.items()))
            words[f"arm {arm.name}"] = [*arm.overrides, *variables]
        asked: dict[str, object] = {"--steps": self.steps, "starting checkpoint": str(self.start or "")}
        for what, said in words.items():
            asked[what] = [word for word in said if not NOT_COMPARED.fullmatch(key_of(word))]
        return asked


def make_plan(recipe: Recipe, steps: int, folder: Path, command: Sequence[str] = (), **given: Any) -> Plan:
    """The plan for a recipe, which may have TLT's flag and settings already; `given` are further fields of it."""
    if not command and recipe == Recipe(()):
        raise CompareError("There is no recipe: give your command after --, or the overrides of verl.trainer.main_ppo.")
    with recipe.composed() as config:
        _refuse_partial_checkpoints(config)
        start, adjusted = _start(recipe, config), (*_prompts(config), *_checkpoints(config), *_decay(config))
    return Plan(recipe, start, steps, folder, tuple(command), adjusted=adjusted, **given)


def measured_with(recipe: Recipe) -> dict[str, str]:
    """The releases that jobs run with, and the kind of GPU if they run on this machine's GPUs.

    They must stay the same, as what `Plan.asked` returns.
    """
    found = {name: str(installed(name)) for name in ("verl", "vllm")} | {"verl-tlt": verl_tlt.__version__}
    with recipe.composed() as config:
        if not ray_address(config) and any(gpus.level == "ok" for gpus in examine_gpus(config)):
            from verl_tlt.commands.doctor.engine_check import hardware_name

            found["GPU"] = hardware_name()
    return found


def first_drafter(plan: Plan, arms: Sequence[str], given: str | None) -> str | None:
    """The drafter that all of these arms begin with, by a path or name that every process can read.

    If the checkpoint has a drafter, it is that one, because TLT goes on with it whatever else is given. Else it is the
    `given` one, or the recipe's.
    """
    if given is not None and not given.strip():
        raise CompareError("--drafter is empty: give a folder or a name on the hub, or leave it out.")
    config = plan.recipe.compose(FLAG)
    own = None if select(config, METHOD) == "mtp" else saved_drafter(plan.start)
    if own and given and (TLT in arms or NO_SPOT in arms):
        raise CompareError(
            f"TLT goes on with the drafter in {own}, not with --drafter {given}: leave --drafter out, or remove "
            f"{own.name} from the checkpoints up to {plan.start}."
        )
    if given:
        return located(given)
    with plan.recipe.place():
        path = own or select(config, DRAFTER)
        return located(str(path)) if path else None


def check_arms(plan: Plan, arms: Sequence[Arm], drafter: str | None = None) -> None:
    """Raise a CompareError where the doctor refuses the recipe or the drafter, or Hydra an arm.

    A drafter on the hub is fetched, and a `TLTError` says why it cannot be.
    """
    for arm in arms:
        try:
            plan.recipe.compose(*plan.overrides(arm, 0))
        except TLTConfigError as error:
            raise CompareError(f"Arm {arm.name}: {error}") from error
    tlt_arms = [arm for arm in arms if arm.tlt]
    for arm in tlt_arms:
        refused = _refused(plan.of_arm(arm))
        if refused:
            raise CompareError("\n".join(f"Arm {arm.name}: {finding.sentence}" for finding in refused))
    if drafter is not None and not tlt_arms:
        for finding in _refused(plan.of_arm(Arm(TLT, "", True, (f"++{DRAFTER}={quoted(drafter)}",)))):
            if finding.what == DRAFTER:
                raise CompareError(finding.sentence)
    if drafter is not None:
        drafter_folder(drafter)


def without_drafter(plan: Plan, arms: Sequence[Arm]) -> dict[str, bool]:
    """Names of TLT's arms whose drafter is a random one at first, where none is given, and whether they train it."""
    config = plan.recipe.compose(FLAG)
    needs_none = select(config, METHOD) == "mtp" or select(config, "tlt.speculation.source") == "ngram"
    trains = select(config, "tlt.spot.enable", True) is not False
    return {} if needs_none else {arm.name: trains and arm.name != NO_SPOT for arm in arms if arm.tlt}


def _refused(recipe: Recipe) -> list[Finding]:
    """The doctor's findings that a recipe cannot run, or that its drafter is not here, where jobs will run."""
    return [f for f in diagnose(recipe) if f.level == "refuse" or (f.level == "if" and f.what == DRAFTER)]


def _refuse_partial_checkpoints(config: DictConfig) -> None:
    """Raise a CompareError where checkpoints lack the policy that the next job goes on with: verl loads none then.

    Megatron may also keep the policy in Hugging Face's layout.
    """
    actor = "actor_rollout_ref.actor"
    kinds = ("model", "hf_model") if select(config, f"{actor}.strategy") == "megatron" else ("model",)
    saved, loaded = (select(config, f"{actor}.checkpoint.{name}_contents") for name in ("save", "load"))
    if not isinstance(saved, list) or not isinstance(loaded, list):
        return
    if not any(kind in saved and kind in loaded for kind in kinds):
        given = f"{actor}.checkpoint.save_contents={saved} and load_contents={loaded}"
        raise CompareError(f"{given} lack model, and each job goes on from a checkpoint: add model to both.")


def _prompts(config: DictConfig) -> Iterator[str]:
    """A seed where verl would draw other prompts in each job: some of the data (`RLHFDataset`), without a seed."""
    most = select(config, "data.train_max_samples")
    if isinstance(most, int) and most > 0 and select(config, "data.seed") is None:
        yield "++data.seed=0"


def _checkpoints(config: DictConfig) -> Iterator[str]:
    """Megatron's checkpoints written at once: verl's v1 trainer does not complete asynchronous ones."""
    for node in ("actor_rollout_ref.actor", "critic"):
        if select(config, f"{node}.checkpoint.async_save"):
            yield f"{node}.checkpoint.async_save=False"


def _decay(config: DictConfig) -> Iterator[str]:
    """Megatron's decay steps as in the real run: verl would set them to the steps of a turn.

    Where the real run's steps are not known, the learning rate does not decay; a warmup that is given as a ratio is
    then one of the turn's steps.
    """
    steps = number(config, "trainer.total_training_steps", 0)
    updates = steps * number(config, f"trainer.v1.{trainer_mode(config)}.parameter_sync_step", 1)
    for node in ("actor_rollout_ref.actor", "critic"):
        optim = f"{node}.optim"
        if select(config, f"{node}.strategy") != "megatron":
            continue
        if select(config, f"{optim}.lr_decay_steps") is not None:
            continue
        warmup = select(config, f"{optim}.lr_warmup_steps")
        warmup_in_steps = isinstance(warmup, int) and warmup > 0
        if steps or warmup_in_steps:
            yield f"++{optim}.lr_decay_steps={updates or NEVER}"


def _start(recipe: Recipe, config: DictConfig) -> Path | None:
    """The checkpoint that the recipe would resume from."""
    mode = select(config, "trainer.resume_mode", "auto")
    here = Path(recipe.directory or ".").absolute()
    key = "trainer.resume_from_path" if mode == "resume_path" else "trainer.default_local_dir"
    place = str(select(config, key, ""))
    if mode in ("auto", "resume_path") and ray_address(config) and not os.path.isabs(place):
        instead = "give an absolute path, or trainer.resume_mode=disable to begin with the policy"
        raise CompareError(f"{key}={place} is relative: on a Ray cluster verl looks where Ray was started; {instead}.")
    if mode == "resume_path":
        path = here / os.path.expanduser(place)
    elif mode == "auto":
        latest = here / read_run_dir(config) / LATEST
        if not latest.is_file():
            return None
        path = latest.parent / f"{STEP}{latest.read_text(errors='replace').strip()}"
    else:
        return None
    if not path.is_dir() or not re.fullmatch(rf"{STEP}\d+", path.name):
        raise CompareError(f"The recipe resumes from {path}, which is no checkpoint: a folder {STEP}N of verl's.")
    return path
