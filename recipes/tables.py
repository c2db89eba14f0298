"""The tables of README.md, from the recipes as they are: `python -m recipes.tables` writes them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from recipes import check, memory
from verl_tlt.checks.recipe import compose, select

if TYPE_CHECKING:
    from omegaconf import DictConfig

PAGE = check.HERE / "README.md"
VERL = "https://github.com/verl-project/verl/blob/v0.9.0/examples"
DAPO = "https://github.com/verl-project/verl-recipe/blob/main/dapo/run_dapo_qwen2.5_32b.sh"
R, A = memory.ROLLOUT, memory.ACTOR


@dataclass(frozen=True)
class Original:
    """verl's own script for the same algorithm and policy, and where the recipe has other values."""

    name: str
    url: str
    differs: Mapping[str, tuple[object, str]]
    """By key: the value there, and why it is another here."""


LONG = "long responses have the tail that this project is about"
GROUPS = "groups of 8, as in the other recipes"
SMALL = "responses are longer: fewer of them make a step of about as many tokens"
SINGLE = "one GPU holds the policy, and more replicas have more bubbles"
ROOM = "longer responses need more KV cache, and everything else is offloaded meanwhile"
FORWARD = "a forward pass keeps no activations"
OFFLOAD = "makes room for the KV cache"
SELDOM = "with long responses each takes minutes"
FSDP2 = ("fsdp", "verl's newer engine; TLT reads both")
DATASET = "problems that need long responses"
ORIGINALS = {
    "dapo_qwen2.5_32b": Original("DAPO's run_dapo_qwen2.5_32b.sh", DAPO, {
        "trainer.nnodes": (16, "what more readers have"),
        "data.train_batch_size": (512, "half the GPUs; with mini-batches of 32 a step has 8 updates, there 16"),
        "data.gen_batch_size": (1536, "verl's V1 trainer asks for groups one by one as others are filtered out"),
        "algorithm.filter_groups.max_num_gen_batches": (10, "verl's V1 trainer ignores it, and says so"),
        f"{R}.max_num_seqs": (1024, "what the KV cache holds (verl's default of that time is there)"),
        f"{R}.log_prob_max_token_len_per_gpu": (22528, FORWARD),
        "trainer.save_freq": (5, SELDOM), "trainer.test_freq": (5, SELDOM),
        f"{A}.strategy": FSDP2,
        f"{A}.ulysses_sequence_parallel_size": (8, "the same tokens per GPU, fewer exchanges"),
    }),
    "grpo_qwen3_8b": Original("run_qwen3_8b_fsdp.sh", f"{VERL}/grpo_trainer/run_qwen3_8b_fsdp.sh", {
        "data.train_files": ("gsm8k, math", DATASET),
        "data.train_batch_size": (1024, SMALL), f"{A}.ppo_mini_batch_size": (256, "half the batch"),
        "data.max_prompt_length": (1024, "DAPO's"), "data.max_response_length": (2048, LONG), f"{R}.n": (5, GROUPS),
        f"{R}.tensor_model_parallel_size": (2, SINGLE), f"{R}.gpu_memory_utilization": (0.6, ROOM),
        f"{A}.fsdp_config.param_offload": (False, OFFLOAD), f"{A}.strategy": FSDP2,
        f"{R}.log_prob_max_token_len_per_gpu": (24576, FORWARD), "trainer.test_freq": (5, SELDOM),
        "trainer.total_epochs": (15, "the file repeats its problems 100 times"),
    }),
    "ppo_qwen3_8b": Original("run_qwen3_8b_fsdp.sh", f"{VERL}/ppo_trainer/run_qwen3_8b_fsdp.sh", {
        "data.train_batch_size": (1024, SMALL), f"{A}.ppo_mini_batch_size": (256, "a quarter of the batch, as there"),
        "data.max_response_length": (2048, LONG), f"{R}.tensor_model_parallel_size": (2, SINGLE),
        f"{R}.gpu_memory_utilization": (0.6, ROOM), f"{A}.fsdp_config.param_offload": (False, OFFLOAD),
        "critic.fsdp.param_offload": (False, OFFLOAD), f"{A}.strategy": FSDP2,
        f"{R}.log_prob_max_token_len_per_gpu": (24576, FORWARD), "trainer.test_freq": (5, SELDOM),
    }),
    "grpo_qwen3_30b_a3b": Original("run_qwen3_30b_a3b_fsdp.sh", f"{VERL}/grpo_trainer/run_qwen3_30b_a3b_fsdp.sh", {
        "trainer.nnodes": (1, "four replicas in place of two"), "data.train_files": ("gsm8k, math", DATASET),
        "data.train_batch_size": (512, SMALL), f"{A}.ppo_mini_batch_size": (128, "half the batch"),
        "data.max_response_length": (4096, LONG), f"{A}.use_kl_loss": (True, "no reference policy beside 30B"),
        f"{A}.ppo_max_token_len_per_gpu": (32768, "the longest sequence, once"), "trainer.test_freq": (5, SELDOM),
        "trainer.total_epochs": (15, "the file repeats its problems 100 times"),
    }),
    "grpo_lora_qwen3_8b": Original("run_qwen3_8b_fsdp.sh", f"{VERL}/tuning/lora/run_qwen3_8b_fsdp.sh", {
        "trainer.n_gpus_per_node": (2, "a whole node"), "data.train_batch_size": (64, "four times the GPUs"),
        f"{A}.ppo_mini_batch_size": (32, "half the batch, as there"), "data.max_response_length": (1024, LONG),
        f"{R}.n": (5, GROUPS), f"{R}.tensor_model_parallel_size": (2, SINGLE),
        f"{R}.gpu_memory_utilization": (0.6, "longer responses need more KV cache"),
        f"{A}.ppo_max_token_len_per_gpu": (12288, "longer sequences"),
        f"{R}.log_prob_max_token_len_per_gpu": (12288, FORWARD), f"{A}.strategy": FSDP2,
        "trainer.test_freq": (5, SELDOM),
    }),
}  # fmt: skip
"""By recipe; the others have no script of verl's for the same policy."""


def memory_table(configs: Mapping[str, DictConfig]) -> Iterator[str]:
    """One row for each recipe."""
    yield f"| Recipe | {' | '.join(memory.COLUMNS)} |"
    yield f"|{'---|' * (1 + len(memory.COLUMNS))}"
    for name, config in configs.items():
        yield f"| `{name}` | {' | '.join(memory.row(config))} |"


def differences(configs: Mapping[str, DictConfig]) -> Iterator[str]:
    """The tables of what differs from verl's scripts."""
    for name, original in ORIGINALS.items():
        yield f"\n`{name}` and [{original.name}]({original.url}):\n"
        yield "| Key | There | Here | Why |"
        yield "|---|---|---|---|"
        for key, (there, why) in original.differs.items():
            yield f"| `{key.removeprefix('actor_rollout_ref.')}` | {there} | {here(configs[name], key)} | {why} |"


def here(config: DictConfig, key: str) -> object:
    """The recipe's own value; of data files their names."""
    value = select(config, key)
    return Path(str(value)).stem if key == "data.train_files" else value


def composed() -> dict[str, DictConfig]:
    """The config of every recipe as it is written."""
    with tempfile.TemporaryDirectory(prefix="tlt-recipes-") as folder:
        check.touch_data(Path(folder))
        return {
            name: compose(check.captured(recipe, {"DATA": folder}), "ppo_trainer")
            for name, recipe in check.RECIPES.items()
        }


def render(page: str, configs: Mapping[str, DictConfig]) -> str:
    """The page with its tables made anew."""
    for name, rows in (("memory", memory_table(configs)), ("differences", differences(configs))):
        table = "\n".join(rows).strip()
        before, _, rest = page.partition(f"<!-- {name} -->\n")
        page = f"{before}<!-- {name} -->\n{table}\n<!-- end -->{rest.partition('<!-- end -->')[2]}"
    return page


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(), composed()))
