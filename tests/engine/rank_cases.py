"""Layouts of verl's FSDP engine over two processes, run one after the other in one process group.

What needs an accelerator has a stand-in here: flash attention's kernel (Ulysses' exchange around it is verl's own), and
FSDP1's check that the states it broadcasts are on one.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.fsdp
from actor import build_actor, make_batch, make_rows

from tests.toy.assets import SHIPPED_POLICY

LENGTHS = [[(4, 20), (6, 30), (3, 12), (5, 1)], [(3, 9), (8, 41), (7, 7), (2, 26)]]
TOKENS = 104
"""All tokens of a group's sequences, which is the budget of the ranks that compute them."""


@dataclass(frozen=True)
class Case:
    """One layout."""

    policy: str
    """Directory below the root: qwen3, llama."""
    strategy: str = "fsdp2"
    remove_padding: bool = True
    ulysses: int = 1
    lora: str = ""
    """Directory of an adapter below the root."""
    model: Mapping[str, Any] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int = 50
    """Of a micro-batch on one rank."""

    def batch_of(self, rank: int) -> int:
        """Which of `LENGTHS` this rank computes: with Ulysses both compute the same."""
        return rank // self.ulysses


CASES = {
    "fsdp1 padded, checkpointing": Case("llama", "fsdp", False, model={"enable_gradient_checkpointing": True}),
    "fsdp2 lora, checkpointing": Case("qwen3", lora="qwen3-lora", model={"enable_gradient_checkpointing": True}),
    "fsdp2 padded to a bucket": Case("qwen3", engine={"pad_to_length": True, "pad_to_length_bucket": 64}),
    "ulysses fsdp1 lora": Case("llama", "fsdp", ulysses=2, lora="llama-lora", max_tokens=300),
    "ulysses padded to a bucket": Case(
        "llama", ulysses=2, engine={"pad_to_length": True, "pad_to_length_bucket": 64}, max_tokens=40
    ),
}


def build_policies(root: Path) -> None:
    """Tiny random policies (grouped-query attention, 4 layers), and an adapter that changes what each computes; the
    head of `tied` is its embedding."""
    from peft import LoraConfig, get_peft_model

    for seed, (family, name) in enumerate({"qwen3": "Qwen3", "llama": "Llama", "tied": "Qwen3"}.items()):
        torch.manual_seed(seed)
        model = save_policy(root / family, name, tie_word_embeddings=family == "tied")
        lora = LoraConfig(
            task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False
        )
        get_peft_model(model, lora).save_pretrained(root / f"{family}-lora")


def save_policy(path: Path, name: str, **more: Any) -> Any:
    """A random policy of the architecture that transformers calls so; returns the model."""
    import transformers

    config = getattr(transformers, f"{name}Config")(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=256, initializer_range=0.3,
        bos_token_id=1, eos_token_id=2, pad_token_id=0, dtype="float32", **more,
    )  # fmt: skip
    model = getattr(transformers, f"{name}ForCausalLM")(config).float()
    model.save_pretrained(path)
    for file in ("tokenizer.json", "tokenizer_config.json"):  # verl loads one
        shutil.copy(SHIPPED_POLICY / file, path)
    return model


def run_cases(rank: int, port: int, root: str, names: list[str]) -> None:
    """One rank: for each case a few batches' shards and log-probs, left in `<root>/<case>-<rank>.pt`."""
    torch.set_num_threads(1)
    # FSDP1 would check that what it broadcasts lies on an accelerator.
    torch.distributed.fsdp._init_utils._check_module_states_for_sync_module_states = lambda _states: None
    for name in names:
        actor = build_case(CASES[name], Path(root), rank, port)
        rows = make_rows(LENGTHS[CASES[name].batch_of(rank)], seed=CASES[name].batch_of(rank))
        found = {}
        for window in (10_000, 11):
            actor.capture_budget, actor.capture_window = TOKENS, window
            output = actor.infer_batch(make_batch(rows, CASES[name].max_tokens, compute_loss=False))
            found[window] = (actor.capture.take(), actor.capture.errors, output is not None)
        torch.save(found, f"{root}/{name}-{rank}.pt")
    torch.distributed.destroy_process_group()


def build_case(case: Case, root: Path, rank: int, port: int) -> Any:
    """The actor of a case on this rank."""
    lora = {"lora_rank": 4, "lora_alpha": 8, "lora_adapter_path": str(root / case.lora)} if case.lora else {}
    actor = build_actor(
        remove_padding=case.remove_padding, rank=rank, world=2, port=port, policy=root / case.policy,
        model={**case.model, **lora},
        engine={"strategy": case.strategy, "ulysses_sequence_parallel_size": case.ulysses, **case.engine},
    )  # fmt: skip
    if case.ulysses > 1:
        from verl.models.transformers import monkey_patch

        monkey_patch._flash_attention_forward = packed_attention
        actor.engine.module.config._attn_implementation = "flash_attention_2"  # after it was built: no kernel is here
    return actor


def packed_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_args: Any, position_ids: torch.Tensor, **_kwargs: Any
) -> torch.Tensor:
    """Causal attention [1, T, heads, D] within each packed sequence, which begins where its position is 0."""
    document = (position_ids[0] == 0).cumsum(0)
    seen = (document[:, None] == document[None]).tril()
    heads = [x.transpose(1, 2) for x in (query, key, value)]
    out = torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=seen, enable_gqa=True)
    return out.transpose(1, 2)
