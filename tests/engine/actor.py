"""verl's FSDP2 actor on the CPU, built as `ActorRolloutRefWorker.init_model` builds it, without Ray."""

from __future__ import annotations

import os
from typing import Any

import torch

from verl_tlt.toy.assets import AUX_LAYERS, SHIPPED_POLICY

LAYERS = AUX_LAYERS["small"]
VOCAB = 64


def build_actor(worker: str = "tlt", remove_padding: bool = True, rank: int = 0, world: int = 1, port: int = 0) -> Any:
    """A training worker that holds the toy's policy in float32.

    Args:
        worker: "tlt" for ours, with the tap installed and nothing chosen; "stock" for verl's own.
        remove_padding: verl's `use_remove_padding`.
        rank: of this process.
        world: processes in the group.
        port: where the group meets.
    """
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig, TrainingWorkerConfig
    from verl.workers.engine_workers import TrainingWorker

    from verl_tlt.engine.tap import HiddenStateTap
    from verl_tlt.engine.worker import TLTTrainingWorker

    config = TrainingWorkerConfig(
        model_type="language_model",
        model_config=HFModelConfig(
            path=str(SHIPPED_POLICY),
            use_remove_padding=remove_padding,
            enable_gradient_checkpointing=False,
            override_config={"attn_implementation": "sdpa"},
        ),
        engine_config=FSDPEngineConfig(
            strategy="fsdp2",
            use_torch_compile=False,
            model_dtype="fp32",
            mixed_precision={"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
        ),
        optimizer_config=FSDPOptimizerConfig(lr=1e-3, total_training_steps=10),
        checkpoint_config=CheckpointConfig(),
    )
    actor = (TLTTrainingWorker if worker == "tlt" else TrainingWorker)(config)
    actor.reset()
    if worker == "tlt":
        actor.tap = HiddenStateTap(actor.engine, LAYERS, torch.bfloat16)
    return actor


def make_rows(lengths: list[tuple[int, int]], seed: int = 0) -> list[tuple[torch.Tensor, int]]:
    """Random sequences (tokens [prompt + response], prompt length) of the given (prompt, response) lengths."""
    rng = torch.Generator().manual_seed(seed)
    return [(torch.randint(VOCAB, (p + r,), generator=rng), p) for p, r in lengths]


def make_batch(rows: list[tuple[torch.Tensor, int]], max_tokens: int, padded: bool = False, **extra: Any) -> Any:
    """What verl's trainer sends for old log-probs: jagged ids, micro-batches of at most `max_tokens` tokens.

    Args:
        rows: from `make_rows`.
        max_tokens: of one micro-batch.
        padded: response mask as a padded tensor and no responses, verl's older form; else jagged responses.
        extra: more non-tensor fields.
    """
    from verl.utils import tensordict_utils as tu

    def jagged(parts: list[torch.Tensor]) -> torch.Tensor:
        return torch.nested.as_nested_tensor(parts, layout=torch.jagged)

    tokens = [t for t, _ in rows]
    masks = [torch.ones(len(t) - p, dtype=torch.int64) for t, p in rows]
    prompts = [torch.zeros(p, dtype=torch.int64) for _, p in rows]
    tensors = {
        "input_ids": jagged(tokens),
        "position_ids": jagged([torch.arange(len(t)) for t in tokens]),
        "loss_mask": jagged([torch.cat(pair) for pair in zip(prompts, masks, strict=True)]),
    }
    if padded:
        tensors["response_mask"] = torch.nn.utils.rnn.pad_sequence(masks, batch_first=True)
    else:
        tensors["responses"] = jagged([t[p:] for t, p in rows])
    settings = {
        "temperature": 1.0, "use_dynamic_bsz": True, "max_token_len_per_gpu": max_tokens, "calculate_entropy": False,
        **extra,
    }  # fmt: skip
    return tu.get_tensordict(tensors, settings)


def run_rank(rank: int, world: int, port: int, directory: str, lengths: list[list[tuple[int, int]]]) -> None:
    """One rank of a group: taps its own rows whole and leaves what it took in `directory`."""
    torch.set_num_threads(1)
    actor = build_actor(rank=rank, world=world, port=port)
    actor.tap_budget = actor.tap_window = 10_000
    actor.infer_batch(make_batch(make_rows(lengths[rank], seed=rank), 64, compute_loss=False))
    taken = [(s.tokens, s.prompt_len, s.start, s.aux, s.last) for s in actor.tap.take()]
    torch.save(taken, f"{directory}/{rank}.pt")
    torch.distributed.destroy_process_group()
