"""Everything a run of the toy needs, written once: the policy, the prompts, and where reward and helpers are.

`python -m tests.toy.assets OUT` writes what the demo runs on and prints the paths; the same call again finds them.
"""

import argparse
import dataclasses
import hashlib
import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

from tests.toy import task
from verl_cpu.dtype import Dtype, find_dtype

Width = Literal["small", "half", "wide"]

SHIPPED_POLICY = Path(__file__).parent / "policy"
"""The trained policy; `tests/toy/train.py` of commit f89504ca makes it."""
SHIPPED_DRAFTER = Path(__file__).parent / "drafter"
"""A drafter for the two larger policies, which has seen so little text that it has much to learn in a run.

`python -m demo` of commit 3f59faa8 makes it, with 160 steps of `verl-tlt warmup` on 96 responses; here in bfloat16.
"""

DATA_SOURCE = "toy_addition"
TRAIN_ROWS = 512
"""Training prompts, unless told otherwise."""
FORCED_LENGTHS = 16
"""Lengths per prompt for runs on the same tokens: room for groups of up to 16 samples."""

AUX_LAYERS = (1, 2, 3)
"""Layers of the small policy whose inputs a drafter of the tests reads: the outputs of the first three of four."""


@dataclass(frozen=True)
class Assets:
    """Where a run finds its parts. Paths are absolute; the `pkg://` strings are verl's way to name a module."""

    policy: Path
    """Policy directory in Hugging Face form: `actor_rollout_ref.model.path`."""
    train: Path
    """Training prompts, parquet: `data.train_files`."""
    val: Path
    """Validation prompts, parquet: `data.val_files`."""
    reward: str = "pkg://tests.toy.reward"
    """`reward.custom_reward_function.path`; its function is `compute_score`."""
    agent_loop: Path = Path(__file__).parent / "agent_loop.yaml"
    """`actor_rollout_ref.rollout.agent.agent_loop_config_path`; its loop is `forced_length`."""
    router: Path = Path(__file__).parent / "router.yaml"
    """`actor_rollout_ref.rollout.router_config_path`: the same replica for the same response of a prompt."""


def demo_width(dtype: Dtype) -> Width:
    """The demo's policy: decoding it reads the same number of bytes a token in either dtype."""
    return "wide" if dtype == "bfloat16" else "half"


def build_assets(
    out_dir: str | Path, *, width: Width = "small", train_rows: int = TRAIN_ROWS, val_rows: int = 32
) -> Assets:
    """Write policy and prompts below `out_dir`, or find them there from an equal call before.

    Args:
        out_dir: created if missing; the policies live side by side in it.
        width: the 3.4M policy as it was trained, or the same function in 16M or 30M parameters.
        train_rows: training prompts.
        val_rows: validation prompts, drawn apart from the training prompts.
    """
    out = Path(out_dir).resolve()
    out.mkdir(parents=True, exist_ok=True)
    assets = Assets(out / f"policy-{width}", out / "train.parquet", out / "val.parquet")
    sources = hash_sources()
    ensure(assets.policy, sources, lambda path: _write_policy(path, width))
    for path, split, count in ((assets.train, "train", train_rows), (assets.val, "val", val_rows)):
        write = partial(write_rows, split=split, count=count, row=prompt_row)
        ensure(path, f"{sources} {count}", write)
    return assets


def build_moe_policy(out_dir: str | Path, seed: int = 0) -> Path:
    """A mixture-of-experts policy with random weights below `out_dir`: what it writes is noise, its engine is not.

    For recipes whose policy is a mixture; nothing can be learned from what it scores.
    """
    target = Path(out_dir).resolve() / "policy-moe"
    target.parent.mkdir(parents=True, exist_ok=True)
    ensure(target, f"moe that normalizes {seed}", lambda path: _write_moe_policy(path, seed))
    return target


def _write_moe_policy(path: Path, seed: int) -> None:
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from tests.toy.tokenizer import save_tokenizer

    config = Qwen3MoeConfig(
        vocab_size=len(task.TOKENS), hidden_size=128, intermediate_size=256, moe_intermediate_size=64, num_experts=8,
        num_experts_per_tok=2, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        max_position_embeddings=2048, bos_token_id=1, eos_token_id=2, pad_token_id=0, norm_topk_prob=True,
    )  # fmt: skip
    torch.manual_seed(seed)
    Qwen3MoeForCausalLM(config).save_pretrained(path)
    save_tokenizer(path)


def build_reward_model(out_dir: str | Path, seed: int = 0) -> Path:
    """A discriminative reward model below `out_dir`: the shipped policy's layers and a head with random weights.

    For runs with `reward.reward_model.enable`; what it prefers means nothing, but every text has its own score.
    """
    target = Path(out_dir).resolve() / "reward-model"
    target.parent.mkdir(parents=True, exist_ok=True)
    ensure(target, f"{hash_sources()} reward {seed}", lambda path: _write_reward_model(path, seed))
    return target


def _write_reward_model(path: Path, seed: int) -> None:
    import torch
    from transformers import Qwen3ForSequenceClassification

    from tests.toy.tokenizer import save_tokenizer

    torch.manual_seed(seed)
    model = Qwen3ForSequenceClassification.from_pretrained(SHIPPED_POLICY, num_labels=1, dtype=torch.float32)
    torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(path)
    save_tokenizer(path)


def ensure(target: Path, recipe: str, write: Callable[[Path], None]) -> None:
    """Have `write` make `target` unless the recipe noted beside it is the same; never leaves half a target."""
    note = target.with_name(f".{target.name}.recipe")
    if target.exists() and note.exists() and note.read_text() == recipe:
        return
    note.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".building-") as scratch:
        made = Path(scratch) / target.name
        write(made)
        if target.is_dir():
            shutil.rmtree(target)
        os.replace(made, target)
    note.write_text(recipe)


def hash_sources() -> str:
    """Changes with the shipped policy and with the code that makes the assets."""
    here = Path(__file__).parent
    digest = hashlib.sha256((SHIPPED_POLICY / "model.safetensors").read_bytes())
    for name in ("assets.py", "task.py", "tokenizer.py", "widen.py"):
        digest.update((here / name).read_bytes())
    return digest.hexdigest()


def _write_policy(path: Path, width: Width) -> None:
    if width == "small":
        shutil.copytree(SHIPPED_POLICY, path)
        return
    from tests.toy.widen import HALF_MLP_WIDTH, MLP_WIDTH, widen  # torch takes seconds to import: not on a cached call

    widen(SHIPPED_POLICY, path, MLP_WIDTH if width == "wide" else HALF_MLP_WIDTH)


Row = Callable[[random.Random, str, int], dict[str, Any]]
"""Draws the prompt of a split with that number."""


def write_rows(path: Path, split: str, count: int, row: Row) -> None:
    """Write so many prompts as parquet: others for each split."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = random.Random(f"{split} 0")
    pq.write_table(pa.Table.from_pylist([row(rng, split, i) for i in range(count)]), path)


def prompt_row(rng: random.Random, split: str, index: int) -> dict[str, Any]:
    """One prompt in verl's columns; `forced_lengths` are drawn from the task's own distribution (`tests.toy.agent`)."""
    problem = task.sample_problem(rng)
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": " ".join(task.prompt_tokens(problem))}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": " ".join(task.answer_tokens(problem))},
        "extra_info": {
            "index": index,
            "split": split,
            "digits": problem.digits,
            "forced_lengths": [task.sample_length(problem, rng) for _ in range(FORCED_LENGTHS)],
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.toy.assets", description=__doc__)
    parser.add_argument("out", type=Path, help="directory to write to")
    parser.add_argument("--width", choices=get_args(Width), default=demo_width(find_dtype()))
    args = parser.parse_args()
    assets = build_assets(args.out, width=args.width)
    print(json.dumps(dataclasses.asdict(assets), default=str, indent=2))


if __name__ == "__main__":
    main()
