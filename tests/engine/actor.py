"""verl's FSDP actor on the CPU, built as `ActorRolloutRefWorker.init_model` builds it, without Ray."""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from tests.toy.assets import AUX_LAYERS, SHIPPED_POLICY
from verl_tlt.drafter import TrainingSequence
from verl_tlt.drafter.held_out import digest_of
from verl_tlt.messages.training import HiddenStateShard
from verl_tlt.spot_trainer import sequences

VOCAB = 64
Rows = list[tuple[torch.Tensor, int]]
"""Sequences: tokens [prompt + response], prompt length."""


def build_actor(
    worker: str = "tlt",
    remove_padding: bool = True,
    rank: int = 0,
    world: int = 1,
    port: int = 0,
    policy: Path = SHIPPED_POLICY,
    model: Mapping[str, Any] | None = None,
    engine: Mapping[str, Any] | None = None,
) -> Any:
    """A training worker that holds a policy in float32.

    "tlt" captures hidden states, with nothing chosen yet; "stock" is verl's own.

    `model` and `engine` are more settings of `HFModelConfig` and `FSDPEngineConfig`.
    """
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig, TrainingWorkerConfig
    from verl.workers.engine_workers import TrainingWorker

    from verl_tlt.actor.adapters import adapt
    from verl_tlt.actor.hidden_states import HiddenStateCapture
    from verl_tlt.actor.worker import TLTTrainingWorker

    models = {"enable_gradient_checkpointing": False, "override_config": {"attn_implementation": "sdpa"}}
    precision = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    engines = {"strategy": "fsdp2", "use_torch_compile": False, "model_dtype": "fp32", "mixed_precision": precision}
    config = TrainingWorkerConfig(
        model_type="language_model",
        model_config=HFModelConfig(path=str(policy), use_remove_padding=remove_padding, **models | (model or {})),
        engine_config=FSDPEngineConfig(**engines | (engine or {})),
        optimizer_config=FSDPOptimizerConfig(lr=1e-3, total_training_steps=10),
        checkpoint_config=CheckpointConfig(),
    )
    actor = (TLTTrainingWorker if worker == "tlt" else TrainingWorker)(config)
    actor.reset()
    if worker == "tlt":
        actor.capture = HiddenStateCapture(adapt(actor.engine), AUX_LAYERS, torch.bfloat16)
    return actor


def plain_policy(path: Path = SHIPPED_POLICY) -> Any:
    """The policy in a folder as Hugging Face computes it, in float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa").eval()


def free_port() -> int:
    """A port where a process group can meet."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def run_ranks(work: Callable[..., None], arguments: tuple[Any, ...], ranks: int) -> None:
    """Run `work(rank, *arguments)` in so many processes, forks of one that has imported verl and Megatron already."""
    imported = ["verl.workers.engine_workers", "verl.trainer.config", "peft", "megatron.core", "mbridge"]
    multiprocessing.set_forkserver_preload(imported)
    torch.multiprocessing.start_processes(work, arguments, nprocs=ranks, start_method="forkserver")


def whole_sequences(ranks: Iterable[Iterable[HiddenStateShard]]) -> list[TrainingSequence]:
    """What the spot trainer makes of the shards that the ranks of one group sent; every sequence must be complete."""
    found, missing = sequences.whole_sequences(shard for shards in ranks for shard in shards)
    assert not missing, f"{missing} sequences are incomplete"
    return found


def infer(
    actor: Any, rows: Rows, max_tokens: int = 60, window: int = 10_000, budget: int = 10_000, **batch: Any
) -> tuple[list[TrainingSequence], torch.Tensor]:
    """What the capture of an actor that is a group of its own took of old log-probs, and these, [sum L_b]."""
    actor.capture_budget, actor.capture_window = budget, window
    output = actor.infer_batch(make_batch(rows, max_tokens, compute_loss=False, **batch))
    return whole_sequences([actor.capture.take()]), output["log_probs"].values()


def check_states(
    sequences: list[TrainingSequence], rows: Rows, policy: Any, window: int = 10_000, **tolerance: Any
) -> None:
    """Sequences cut to `window` tokens are `rows`, and their states those that `policy` computes for each row alone."""
    assert len(sequences) == len(rows)
    for s, (tokens, prompt_len) in zip(sequences, rows, strict=True):
        stop = s.start + min(window, len(tokens))
        assert torch.equal(s.tokens, tokens[s.start : stop]) and s.prompt_len == max(0, prompt_len - s.start)
        assert s.prompt == digest_of(tokens[:prompt_len]), "responses to one prompt are known by it"
        assert s.aux.dtype == s.last.dtype == torch.bfloat16
        aux, last = reference(policy, tokens)
        torch.testing.assert_close(s.aux.float(), aux[s.start : stop], **tolerance)
        torch.testing.assert_close(s.last.float(), last[s.start : stop], **tolerance)


def check_log_probs(found: torch.Tensor, tokens: torch.Tensor, policy: Any) -> None:
    """Log-probabilities of the tokens after the first are those that `policy` computes for them alone."""
    with torch.no_grad():
        scores = policy(tokens[None]).logits[0].log_softmax(-1)
    wanted = scores[:-1].gather(1, tokens[1:, None])[:, 0]
    torch.testing.assert_close(found[: len(wanted)].float(), wanted, rtol=1e-4, atol=1e-4)


def make_rows(lengths: list[tuple[int, int]], seed: int = 0) -> Rows:
    """Random sequences (tokens [prompt + response], prompt length) of the given (prompt, response) lengths."""
    rng = torch.Generator().manual_seed(seed)
    return [(torch.randint(VOCAB, (p + r,), generator=rng), p) for p, r in lengths]


def make_batch(
    rows: Rows,
    max_tokens: int,
    padded: bool = False,
    axes: int = 0,
    masks: list[torch.Tensor] | None = None,
    **extra: Any,
) -> Any:
    """What verl's trainer sends for old log-probs: jagged ids, micro-batches of at most `max_tokens` tokens.

    `padded`: response mask as a padded tensor and no responses, verl's older form; else jagged responses. `axes`:
    positions of a token, where a policy also has those of images; 0: one, without an axis of its own. `masks`: which
    tokens of each response the policy sampled; None: all, and the batch does not say so. `extra`: more non-tensor
    fields.
    """
    from verl.utils import tensordict_utils as tu

    def jagged(parts: list[torch.Tensor]) -> torch.Tensor:
        return torch.nested.as_nested_tensor(parts, layout=torch.jagged)

    tokens = [t for t, _ in rows]
    of_all = [torch.ones(len(t) - p, dtype=torch.int64) for t, p in rows]
    prompts = [torch.zeros(p, dtype=torch.int64) for _, p in rows]
    tensors = {
        "input_ids": jagged(tokens),
        "position_ids": jagged([torch.arange(len(t)).expand(*[axes] * bool(axes), -1).clone() for t in tokens]),
        "loss_mask": jagged([torch.cat(pair) for pair in zip(prompts, of_all, strict=True)]),
    }
    if padded:
        tensors["response_mask"] = torch.nn.utils.rnn.pad_sequence(of_all, batch_first=True)
    else:
        tensors["responses"] = jagged([t[p:] for t, p in rows])
    if masks is not None:
        tensors["response_mask"] = jagged(masks)
    settings = {"temperature": 1.0, "use_dynamic_bsz": True, "calculate_entropy": False}
    return tu.get_tensordict(tensors, settings | {"max_token_len_per_gpu": max_tokens} | extra)


def reference(policy: Any, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """States ([L, 3H], [L, H]) of one sequence alone, by Hugging Face's `hidden_states`; the last before the norm."""
    seen: list[torch.Tensor] = []
    hook = policy.model.norm.register_forward_pre_hook(lambda _module, args: seen.append(args[0][0]))
    with torch.no_grad():
        states = policy(tokens[None], output_hidden_states=True).hidden_states
    hook.remove()
    return torch.cat([states[i][0] for i in AUX_LAYERS], dim=-1), seen[0]
