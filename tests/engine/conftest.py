"""Tiny real models and in-process vLLM engines on the CPU.

The target is a random Qwen3 whose next token depends mostly on the present one; the good drafter is built by hand to
know just that, so that drafts are accepted often but not always. The bad one is a random head.
"""

from __future__ import annotations

import os
import sys

os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    OMP_NUM_THREADS="1",
    HF_HUB_OFFLINE="1",
    VERL_PLATFORM="cpu",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="WARNING",
)

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

V, H, LAYERS, HEADS, HEAD_DIM, MLP = 512, 128, 4, 4, 32, 256
K_MAX = 3


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> dict[str, Path]:
    """Directories: `target`, `good` and `bad` (drafters of it)."""
    root = tmp_path_factory.mktemp("models")
    _build_target(root / "target")
    _build_drafter(root / "good", root / "target", informed=True)
    _build_drafter(root / "bad", root / "target", informed=False)
    return {path.name: path for path in root.iterdir()}


def _build_target(path: Path) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=V, hidden_size=H, intermediate_size=MLP, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=HEADS, head_dim=HEAD_DIM, max_position_embeddings=1024, tie_word_embeddings=False,
        bos_token_id=0, eos_token_id=2, pad_token_id=0, dtype="float32",
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).float()
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.randn(V, H))
        model.lm_head.weight.mul_(10.0)
        for layer in model.model.layers:  # how much the context counts beside the present token
            layer.self_attn.o_proj.weight.mul_(2.0)
            layer.mlp.down_proj.weight.mul_(2.0)
    model.save_pretrained(path)


def _build_drafter(path: Path, target: Path, informed: bool) -> None:
    from verl_tlt.drafter import FrozenParts, build_drafter, refresh_frozen, save_drafter

    model = build_drafter(target, seed=1)
    refresh_frozen(model, FrozenParts.from_policy_dir(target))
    if informed:
        with torch.no_grad():
            _pass_the_token_through(model)
    save_drafter(model, path, {"made for": "tests"})


def _pass_the_token_through(model: torch.nn.Module) -> None:
    """Make the drafter's output the embedding of the present token: attention to itself, nothing else."""
    weights = dict(model.named_parameters())
    attention = "layers.0.self_attn."
    for name, scale in (("q", 4.0), ("k", 4.0), ("v", 1.0)):
        weight = weights[f"{attention}{name}_proj.weight"]  # [H, 2H]: embedding, then hidden state
        weight.zero_()
        weight[:, :H] = scale * torch.eye(H)
    weights[f"{attention}o_proj.weight"].copy_(8.0 * torch.eye(H))
    weights["layers.0.mlp.down_proj.weight"].zero_()
    weights["fc.weight"].mul_(0.1)


def sampled(tokens: int, **kwargs: Any) -> Any:
    """Sampling parameters that run to the full length."""
    from vllm import SamplingParams

    return SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False, **{"temperature": 0.0, **kwargs})


def prompts(count: int) -> list[dict[str, list[int]]]:
    """Ragged prompts, different from each other from the first token on."""
    return [{"prompt_token_ids": [(7 * i + 13 * j) % (V - 10) + 5 for j in range(5 + i)]} for i in range(count)]


class Engine:
    """An in-process vLLM engine, with its insides at hand."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.core = llm.llm_engine.engine_core.engine_core
        self.scheduler = self.core.scheduler

    @property
    def runner(self) -> Any:
        """The worker's model runner."""
        return self.core.model_executor.driver_worker.worker.model_runner

    def rpc(self, method: str, *args: Any) -> Any:
        """One worker's answer to `collective_rpc`."""
        return self.llm.collective_rpc(method, args=args)[0]

    def generate(self, count: int, tokens: int, **kwargs: Any) -> list[list[int]]:
        """Tokens of `count` ragged prompts, ragged lengths up to `tokens`."""
        lengths = [max(8, tokens * (i + 1) // count) for i in range(count)]
        params = [sampled(n, **kwargs) for n in lengths]
        return [list(o.outputs[0].token_ids) for o in self.llm.generate(prompts(count), params, use_tqdm=False)]

    def close(self) -> None:
        """Free the engine and vLLM's process-wide state, for the next one."""
        from vllm.distributed import cleanup_dist_env_and_memory

        self.core.shutdown()
        del self.llm, self.core, self.scheduler
        cleanup_dist_env_and_memory()
        gc.collect()


@pytest.fixture(scope="session")
def engine_of(models) -> Callable[..., Any]:
    """Context manager: `with engine_of("good", policy="module:function", ...) as engine`; drafter None: stock vLLM."""
    pytest.importorskip("vllm")
    from verl.workers.rollout.vllm_rollout import utils

    utils.set_death_signal = lambda: None  # it would end pytest itself when pytest's parent is the container's init

    @contextmanager
    def start(
        drafter: str | None = "good",
        policy: str | None = None,
        speculation: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Iterator[Engine]:
        from vllm import LLM

        from verl_tlt.config import TLTConfig
        from verl_tlt.rollout.settings import engine_kwargs

        arguments: dict[str, Any] = dict(
            model=str(models["target"]), skip_tokenizer_init=True, dtype="float32", enforce_eager=True, seed=0,
            max_model_len=512, max_num_seqs=32, enable_prefix_caching=False, distributed_executor_backend="uni",
            disable_log_stats=False,
        )  # fmt: skip
        if drafter is not None:
            settings = {"max_draft_length": K_MAX, "policy": "fixed", **(speculation or {})}
            tlt = TLTConfig.from_dict({"speculation": settings})
            ours = engine_kwargs(tlt, str(models[drafter]), SimpleNamespace(enforce_eager=True), {})
            if policy:
                ours["additional_config"]["tlt"]["policy_factory"] = policy
            arguments |= {**ours, "worker_extension_cls": "verl_tlt.rollout.extension.TLTWorkerExtension"}
        engine = Engine(LLM(**(arguments | kwargs)))
        try:
            yield engine
        finally:
            engine.close()

    return start


@pytest.fixture(scope="session")
def stock_tokens(engine_of) -> dict[int, list[list[int]]]:
    """What stock vLLM decodes greedily, by longest length, for `Engine.generate(8, length)`."""
    with engine_of(drafter=None) as engine:
        return {tokens: engine.generate(8, tokens) for tokens in (96,)}


sys.path.insert(0, str(Path(__file__).parent))  # policies.py, named in additional_config
