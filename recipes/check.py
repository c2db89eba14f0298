"""Checks every recipe as it is written: `python -m recipes.check [NAME ...] [--run] [--out DIR]`.

A stub named `python` records the recipe's arguments. Then Hydra builds the config, and verl and the doctor check it.
That needs no accelerator. With `--run` the recipe then really runs for a few steps on the CPU with the toy policy: the
overrides below are appended to an unchanged recipe as a user would append them.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from verl_cpu.environment import CPU_RUN
from verl_tlt.commands.compare.job import watched
from verl_tlt.errors import TLTError

HERE = Path(__file__).resolve().parent
STEPS = 2
LIMIT_S = 1500.0
"""Seconds after which a run counts as hung: six times what one takes."""
STALL_S = 600.0
"""Seconds without a line of output after which it does, too."""

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
TOY = (
    "data.train_batch_size=4", "data.max_prompt_length=64", "data.max_response_length=192",
    "data.dataloader_num_workers=0", "data.filter_overlong_prompts_workers=1",
    f"{ACTOR}.ppo_mini_batch_size=4", f"{ACTOR}.ppo_max_token_len_per_gpu=2048",
    f"{ROLLOUT}.dtype=float32", f"{ROLLOUT}.tensor_model_parallel_size=1", f"{ROLLOUT}.n_gpus_per_node=2",
    f"{ROLLOUT}.enforce_eager=True", f"{ROLLOUT}.max_model_len=320",
    f"{ROLLOUT}.max_num_seqs=16", f"{ROLLOUT}.max_num_batched_tokens=1024", f"{ROLLOUT}.gpu_memory_utilization=0.1",
    f"{ROLLOUT}.log_prob_max_token_len_per_gpu=2048", f"{ROLLOUT}.agent.num_workers=1",
    f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes=64",
    "reward.num_workers=1", "reward.custom_reward_function.path=pkg://tests.toy.reward",
    "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
    "trainer.logger=[console,file]", "trainer.n_gpus_per_node=2", "trainer.nnodes=1", "trainer.device=cpu",
    "trainer.v1.sampler.custom_sampler.path=pkg://tests.toy.sampler",
    "trainer.v1.sampler.custom_sampler.name=FastPollReplayBuffer",
    "trainer.val_before_train=False", "trainer.save_freq=-1", "trainer.test_freq=-1", "trainer.resume_mode=disable",
    "ray_kwargs.ray_init.num_cpus=16", "++ray_kwargs.ray_init.num_gpus=2",
    "++ray_kwargs.ray_init.include_dashboard=False", "++ray_kwargs.ray_init.object_store_memory=1000000000",
)  # fmt: skip
"""Overrides that shrink a run to two cores. The actor's engine has its own below."""

FSDP = (
    "++actor_rollout_ref.model.override_config.attn_implementation=sdpa",
    "actor_rollout_ref.model.enable_gradient_checkpointing=False",
    f"{ACTOR}.use_torch_compile=False", f"{ACTOR}.fsdp_config.use_torch_compile=False",
    f"{ACTOR}.fsdp_config.model_dtype=fp32", f"++{ACTOR}.fsdp_config.mixed_precision.param_dtype=fp32",
    f"++{ACTOR}.fsdp_config.mixed_precision.reduce_dtype=fp32", f"{ACTOR}.fsdp_config.param_offload=False",
    f"{ACTOR}.fsdp_config.optimizer_offload=False", "actor_rollout_ref.ref.fsdp_config.param_offload=False",
    "actor_rollout_ref.ref.fsdp_config.model_dtype=fp32",
    "++actor_rollout_ref.ref.fsdp_config.mixed_precision.param_dtype=fp32",
    "actor_rollout_ref.ref.use_torch_compile=False", "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=2048",
)  # fmt: skip
"""Overrides for verl's FSDP engine, on two CPU ranks."""

MEGATRON = (
    f"{ACTOR}.megatron.tensor_model_parallel_size=2", f"{ACTOR}.megatron.pipeline_model_parallel_size=1",
    f"{ACTOR}.megatron.dtype=float32", f"{ACTOR}.megatron.vanilla_mbridge=True",
)  # fmt: skip
"""Overrides for verl's Megatron engine. It loads the policy with mbridge, because Megatron-Bridge needs Python 3.12."""

PIPELINE = (
    *MEGATRON, f"{ACTOR}.megatron.tensor_model_parallel_size=1", f"{ACTOR}.megatron.pipeline_model_parallel_size=2",
    f"{ACTOR}.optim.lr_warmup_steps=0",
)  # fmt: skip
"""The same with two pipeline stages. Megatron refuses a warm-up that is longer than the run."""

CONSTANT = "++actor_rollout_ref.rollout.custom.tlt"
"""Prefix of overrides that change internal constants (`verl_tlt.config.constant`)."""
TLT = (
    "tlt.speculation.policy=fixed", "tlt.speculation.fixed=2", f"{CONSTANT}.speculation.calibrate=false",
    f"{CONSTANT}.drafter.batch_tokens=256", f"{CONSTANT}.buffer.min_tokens=200",
)  # fmt: skip
"""TLT, so that in two steps it drafts and trains."""

SHORT = (f"{ROLLOUT}.n=4",)
"""Groups of four."""
DAPO = (
    *SHORT, "reward.reward_kwargs.max_resp_len=192", "reward.reward_kwargs.overlong_buffer_cfg.len=64",
    f"{ACTOR}.ppo_mini_batch_size=2", "trainer.v1.sampler.custom_sampler.path=null", "data.train_batch_size=2",
)  # fmt: skip
CRITIC = (
    f"{ROLLOUT}.n=2", "++critic.model.override_config.attn_implementation=sdpa",
    "critic.model.enable_gradient_checkpointing=False", "critic.fsdp.param_offload=False",
    "critic.fsdp.optimizer_offload=False", "critic.fsdp.model_dtype=fp32", "critic.fsdp.use_torch_compile=False",
    "++critic.fsdp.mixed_precision.param_dtype=fp32", "++critic.fsdp.mixed_precision.reduce_dtype=fp32",
    "critic.ppo_mini_batch_size=4", "critic.ppo_max_token_len_per_gpu=2048",
    "critic.forward_max_token_len_per_gpu=2048",
)  # fmt: skip
TOOLS = (
    *SHORT, f"{ROLLOUT}.multi_turn.format=toy", f"{ROLLOUT}.multi_turn.max_assistant_turns=2",
    f"{ROLLOUT}.agent.agent_loop_config_path={HERE.parent}/tests/toy/agent_loop.yaml",
    f"{ROLLOUT}.agent.default_agent_loop=toy_tool_agent",
    "actor_rollout_ref.model.custom_chat_template=\"{% for m in messages %}{{ m['content'] }} {% endfor %}\"",
)  # fmt: skip


@dataclass(frozen=True)
class Recipe:
    """One shell file and what its scaled-down run needs."""

    script: str
    toy: Sequence[str] = SHORT
    """Appended after all others."""
    engine: Sequence[str] = FSDP
    """What its actor's engine needs: `FSDP`, `MEGATRON` or `PIPELINE`."""
    expect: str = "tlt/accept_length"
    """A metric that the run must have logged beside `tlt/errors` = 0."""
    policy: str = "small"
    """Toy policy: small, or moe."""

    @property
    def name(self) -> str:
        """The file's name without `.sh`."""
        return self.script.removesuffix(".sh")


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("grpo_qwen2.5_7b.sh"),
        Recipe("grpo_deepseek_r1_distill_qwen_7b.sh"),
        Recipe("dapo_qwen2.5_32b.sh", DAPO),
        Recipe("dapo_qwen2.5_32b_megatron.sh", DAPO, engine=PIPELINE),
        Recipe("grpo_llama3.3_70b_megatron.sh", engine=MEGATRON),
        Recipe("grpo_qwen3_8b.sh"),
        Recipe("ppo_qwen3_8b.sh", CRITIC, expect="critic/vf_loss"),
        Recipe("grpo_tools_qwen3_4b.sh", TOOLS, expect="num_turns/mean"),
        Recipe(
            "grpo_lora_qwen3_8b.sh",
            (*SHORT, "actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.model.lora_alpha=16"),
        ),
        Recipe("grpo_qwen3_30b_a3b.sh", policy="moe"),
    )
}


def captured(recipe: Recipe, environment: Mapping[str, str], arguments: Sequence[str] = ()) -> list[str]:
    """The overrides with which an unchanged recipe, given `arguments`, calls `verl.trainer.main_ppo`."""
    with tempfile.TemporaryDirectory() as folder:
        stub = Path(folder, "python")  # stands in for the interpreter, and writes down its arguments
        stub.write_text(f"#!/bin/sh\nprintf '%s\\0' \"$@\" > {folder}/told\n")
        stub.chmod(0o755)
        around = {**os.environ, **environment, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
        subprocess.run(["bash", str(HERE / recipe.script), *arguments], env=around, check=True)
        return Path(folder, "told").read_text().split("\0")[2:-1]


def touch_data(directory: Path) -> None:
    """The data files that recipes name, with a row each."""
    import pyarrow
    from pyarrow import parquet

    for name in ("dapo-math-17k", "aime-2024", "gsm8k/train", "gsm8k/test", "math/train", "math/test"):
        path = directory / f"{name}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(pyarrow.table({"prompt": ["1 + 1 ="]}), path)


def problems(recipe: Recipe, data: Path) -> list[str]:
    """Reasons why Hydra, verl or the doctor refuses the recipe. Empty if none does."""
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    from tests.toy.assets import SHIPPED_POLICY
    from verl_tlt.checks import rules
    from verl_tlt.checks.recipe import compose, read_settings
    from verl_tlt.config import TLTConfigError

    try:
        config = compose(captured(recipe, {"DATA": str(data)}), "ppo_trainer")
        findings = rules.examine(config, read_settings(config))
    except TLTConfigError as error:
        return [str(error)]
    found = [f.sentence for f in findings if f.level == "refuse"]
    if need_critic(config):
        config.critic.model.path = str(SHIPPED_POLICY)  # verl reads it, and the recipe's own is on the hub
    config.trainer.plugin = None  # or else the plugin itself would judge, and rewrite the config
    try:
        validate_config(config, need_reference_policy(config), need_critic(config))
    except Exception as error:  # whatever verl raises is what the user would see
        found.append(f"verl refuses it: {type(error).__name__}: {error}")
    return found


def scaled_down(recipe: Recipe) -> tuple[str, ...]:
    """What is appended to the recipe so that two cores can run it; paths apart."""
    return (*TOY, *recipe.engine, *TLT, *recipe.toy)


def run(recipe: Recipe, out: Path, steps: int = STEPS, extra: Sequence[str] = (), done: int = 0) -> list[dict]:
    """Run the scaled-down recipe on the CPU, or resume it in `out` after `done` steps; verl's metrics by step.

    Raises:
        RuntimeError: the run failed, or did not do what was expected; the end of its log.
        TLTError: the run hangs (`LIMIT_S`, `STALL_S`).
    """
    from tests.toy.assets import build_assets, build_moe_policy

    out.mkdir(parents=True, exist_ok=True)
    assets = build_assets(out / "assets", width="small", train_rows=64, val_rows=8)
    policy = assets.policy if recipe.policy == "small" else build_moe_policy(out / "assets")
    metrics, trace, log = out / "metrics.jsonl", out / "trace", out / "log"
    for old in (metrics, log):
        old.unlink(missing_ok=True)
    overrides = (
        f"hydra.run.dir={out / 'hydra'}", f"data.train_files={assets.train}", f"data.val_files={assets.val}",
        f"actor_rollout_ref.model.path={policy}", f"trainer.total_training_steps={steps}",
        f"trainer.default_local_dir={out / 'checkpoints'}", f"tlt.trace.dir={trace}",
        *(("trainer.resume_mode=auto",) if done else ()),
        *(() if recipe.toy is not CRITIC else (f"critic.model.path={policy}",)),
    )  # fmt: skip
    environment = {
        **os.environ, **CPU_RUN, "VERL_FILE_LOGGER_PATH": str(metrics), "DATA": str(out), "DRAFTER": "null",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")])),  # tests.toy
    }  # fmt: skip
    environment.pop("RAY_ADDRESS", None)  # a cluster of its own
    command = [str(HERE / recipe.script), *scaled_down(recipe), *overrides, *extra]
    began = time.monotonic()

    def look() -> None:
        if time.monotonic() - began > LIMIT_S:
            raise TLTError(f"{recipe.script} is not done after {LIMIT_S:.0f} s; its log is {log}.")

    code = watched(recipe.name, command, environment, log, out, STALL_S, look)
    logged = [json.loads(line)["data"] for line in metrics.read_text().splitlines()] if metrics.exists() else []
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-40:])
    if code or len(logged) != steps - done:
        raise RuntimeError(f"{recipe.script}: exit status {code} after {len(logged)} steps.\n{tail}")
    for key in (recipe.expect, "tlt/accept_length", "tlt/drafter_version"):
        if not any(key in step for step in logged):
            raise RuntimeError(f"{recipe.script}: the run logged no {key}.\n{tail}")
    if any(step["tlt/errors"] for step in logged):
        raise RuntimeError(f"{recipe.script}: TLT contained errors; see {log}.")
    return logged


def main() -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="recipes without .sh; none: all")
    parser.add_argument("--run", action="store_true", help="also run each on the CPU, minutes each")
    parser.add_argument("--out", type=Path, help="folder of the runs and their logs; by default a new one in /tmp")
    arguments = parser.parse_args()
    unknown = set(arguments.names) - RECIPES.keys()
    if unknown:
        parser.error(f"no such recipe: {', '.join(sorted(unknown))}; there are {', '.join(RECIPES)}")
    chosen = [RECIPES[name] for name in arguments.names] or list(RECIPES.values())
    out = None
    if arguments.run:
        out = arguments.out.resolve() if arguments.out else Path(tempfile.mkdtemp(prefix="tlt-recipes-"))
        print(f"The runs and their logs are in {out}.", flush=True)
    with tempfile.TemporaryDirectory() as data:
        touch_data(Path(data))
        failed = sum(not passes(recipe, Path(data), out) for recipe in chosen)
    return 1 if failed else 0


def passes(recipe: Recipe, data: Path, out: Path | None) -> bool:
    """Check a recipe, and run it if there is a folder `out` for runs. Prints what was found."""
    start = time.monotonic()
    found = problems(recipe, data)
    said = "composes, and the doctor passes it"
    if not found and out is not None:
        try:
            logged = run(recipe, out / recipe.name)
            last = {k: f"{logged[-1][k]:.3g}" for k in ("tlt/accept_length", "tlt/drafter_version", "tlt/errors")}
            said += f"; ran {len(logged)} steps: {last}"
        except (RuntimeError, TLTError) as error:
            found = [str(error)]
    verdict = "FAILED: " + "\n  ".join(found) if found else said
    print(f"{recipe.name}: {verdict} ({time.monotonic() - start:.0f} s)", flush=True)
    return not found


if __name__ == "__main__":
    sys.exit(main())
