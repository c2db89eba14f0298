"""Layouts of verl's Megatron engine over four processes, run one after the other.

Engine, bridge, schedules, splitting and collectives are verl's, mbridge's and megatron-core's own; CUDA and Transformer
Engine have the stand-ins of the CPU platform (verl_cpu/megatron_*.py).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from actor import make_batch, make_rows
from rank_cases import LENGTHS, TOKENS, save_policy

from tests.toy.assets import AUX_LAYERS

RANKS = 4


@dataclass(frozen=True)
class Case:
    """One layout; what the sizes leave of four ranks is data-parallel."""

    policy: str
    tensor: int = 1
    pipeline: int = 1
    virtual: int | None = None
    context: int = 1
    expert: int = 1
    packed: bool = True
    dtype: str = "float32"
    trained: bool = False
    """It also takes steps of Adam, and loads a checkpoint."""
    engine: Mapping[str, Any] = field(default_factory=dict)
    """More settings of `McoreEngineConfig`."""


WHOLE = {"override_transformer_config": {"sequence_parallel": False}}
"""Ranks of a tensor-parallel group have the same tokens: mbridge does not read `sequence_parallel` of the engine."""

EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True)

CASES = {
    "tensor 2, sequence parallel, pipeline 2": Case("qwen3", tensor=2, pipeline=2),
    "pipeline 2, context 2, padded to a bucket": Case(
        "qwen3", pipeline=2, context=2, engine={"pad_to_length": True, "pad_to_length_bucket": 96}
    ),
    "interleaved pipeline 2": Case("llama", pipeline=2, virtual=2),
    "tensor 2, unpacked": Case("llama", tensor=2, engine=WHOLE, packed=False),
    "tensor 2, sequence parallel, context 2, unpacked": Case("qwen3", tensor=2, context=2, packed=False),
    "tensor 2, sequence parallel, pipeline 2, tied, 16 bits": Case("tied", tensor=2, pipeline=2, dtype="bfloat16"),
    "expert 2, tensor 2, sequence parallel, experts split": Case("moe", expert=2, tensor=2, trained=True),
}


def build_mixture(root: Path) -> None:
    """A tiny random mixture of experts, which weighs those it chose as Qwen3's do."""
    torch.manual_seed(3)
    save_policy(root / "moe", "Qwen3Moe", **EXPERTS)


def run_cases(rank: int, port: int, root: str, names: list[str]) -> None:
    """One rank: for each case what it captured and exported, left in `<root>/<case>-<rank>.pt`."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    from megatron.core import parallel_state

    for name in names:
        actor = build_case(CASES[name], Path(root))
        found = look_at(actor, CASES[name])
        if CASES[name].trained:
            found["trained"] = train(actor, f"{root}/{name}-checkpoint")
        torch.save(found, f"{root}/{name}-{rank}.pt")
        parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def build_case(case: Case, root: Path) -> Any:
    """The actor of a case on this rank, with the capture installed."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import HFModelConfig, McoreEngineConfig, McoreOptimizerConfig, TrainingWorkerConfig

    from verl_tlt.actor.adapters import adapt
    from verl_tlt.actor.hidden_states import HiddenStateCapture
    from verl_tlt.actor.worker import TLTTrainingWorker

    config = TrainingWorkerConfig(
        model_type="language_model",
        model_config=HFModelConfig(path=str(root / case.policy), use_remove_padding=case.packed),
        engine_config=McoreEngineConfig(
            tensor_model_parallel_size=case.tensor, pipeline_model_parallel_size=case.pipeline,
            virtual_pipeline_model_parallel_size=case.virtual, context_parallel_size=case.context,
            expert_model_parallel_size=case.expert, forward_only=not case.trained, vanilla_mbridge=True,
            dtype=case.dtype, **case.engine,
        ),
        optimizer_config=McoreOptimizerConfig(lr=1e-3, total_training_steps=2), checkpoint_config=CheckpointConfig(),
    )  # fmt: skip
    actor = TLTTrainingWorker(config)
    actor.reset()
    actor.capture = HiddenStateCapture(adapt(actor.engine), AUX_LAYERS, torch.bfloat16)
    return actor


def look_at(actor: Any, case: Case) -> dict[Any, Any]:
    """What one rank has: {window: (data-parallel rank, shards, errors)}, log-probs, exported and captured weights."""
    from verl_tlt.actor.verifier_weights import VerifierCapture

    group = actor.engine.get_data_parallel_rank()
    rows = make_rows(LENGTHS[group], seed=group)
    found: dict[Any, Any] = {}
    for window in (10_000, 11):
        actor.capture_budget, actor.capture_window = TOKENS, window
        output = actor.infer_batch(make_batch(rows, 60, compute_loss=False))
        found[window] = (group, actor.capture.take(), actor.capture.errors)
    found["log-probs"] = None if output is None else [row.clone() for row in output["log_probs"].unbind()]
    stored: list[Any] = []
    capture = VerifierCapture(torch.bfloat16, stored.append, actor.model_config.hf_config.tie_word_embeddings)
    params, _ = actor.engine.get_per_tensor_param()
    found["weights"] = {name: tensor.detach().clone() for name, tensor in capture.tee(params)}
    capture.finish()
    found["captured"] = (capture.take().errors, stored)
    return found


def train(actor: Any, checkpoint: str) -> list[dict[str, Any]]:
    """A step, saved; another; the checkpoint loaded: what each step logged, and the weights after each of the three."""
    from verl.utils import tensordict_utils as tu

    def weights() -> dict[str, torch.Tensor]:
        return {name: tensor.detach().clone() for name, tensor in actor.engine.get_per_tensor_param()[0]}

    actor.set_loss_fn(mean_nll)
    found = []
    for step in range(2):
        batch = make_batch(rows_to_learn(), 60, compute_loss=True)
        tu.assign_non_tensor(batch, global_batch_size=len(LENGTHS[0]), update_lr_scheduler=True)
        output = actor.train_batch(batch)
        logged = None if output is None else tu.get(output, "metrics")
        found.append({"logged": logged, "weights": weights()})
        if step == 0:
            actor.engine.save_checkpoint(checkpoint, global_step=1)
    actor.engine.load_checkpoint(checkpoint, del_local_after_load=False)
    return [*found, {"weights": weights()}]


def rows_to_learn() -> list[tuple[torch.Tensor, int]]:
    """As `make_rows` has them, without the padding token: Hugging Face keeps its embedding from learning."""
    return [(tokens.clamp_min(1), prompt_len) for tokens, prompt_len in make_rows(LENGTHS[0])]


def mean_nll(model_output: Any, data: Any, dp_group: Any = None) -> tuple[torch.Tensor, dict[str, Any]]:
    """Mean negative log-likelihood of the responses, as verl's losses are called."""
    response = torch.roll(data["loss_mask"].values(), -1, 0)
    total = -(model_output["log_probs"].values() * response).sum()
    return total / data["batch_num_tokens"] * data["dp_size"], {}
