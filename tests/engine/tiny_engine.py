"""Tiny real models and in-process vLLM engines on the CPU.

The target is a random Qwen3 or Llama whose next token depends mostly on the present one; the good drafter is built by
hand to know just that, so that drafts are accepted often but not always. The bad one is a random head. The `small`
vocabulary is for tests that enumerate every output.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

V, H, LAYERS, HEADS, HEAD_DIM, MLP = 512, 128, 4, 4, 32, 256
SMALL = 16  # tokens in the small vocabulary
SCALED_ROPE = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}  # fmt: skip
"""As Llama 3.1's; so short that a test's positions lie beyond it."""


def build_target(path: Path, family: str = "qwen3", vocab: int = V) -> None:
    """A model of the family with random weights, saved to `path`; `llamatied` has the embedding for a head, and a
    scaled RoPE.
    """
    import transformers

    name = {"qwen3": "Qwen3", "qwen2": "Qwen2", "llama": "Llama", "llamatied": "Llama"}[family]
    tied = family == "llamatied"
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(
        vocab_size=vocab, hidden_size=H, intermediate_size=MLP, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=HEADS, head_dim=HEAD_DIM, max_position_embeddings=1024, tie_word_embeddings=tied,
        bos_token_id=0, eos_token_id=2, pad_token_id=0, dtype="float32",
        **({"rope_parameters": SCALED_ROPE} if tied else {}),
    )  # fmt: skip
    model = getattr(transformers, f"{name}ForCausalLM")(config).float()
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.randn(vocab, H))
        if tied:  # each token's own logit is the largest by far
            model.model.norm.weight.mul_(0.022)
        else:
            model.lm_head.weight.mul_(10.0)
        for layer in model.model.layers:  # how much the context counts beside the present token
            layer.self_attn.o_proj.weight.mul_(2.0)
            layer.mlp.down_proj.weight.mul_(2.0)
    model.save_pretrained(path)


def build_drafter_dir(path: Path, target: Path, informed: bool, **settings: Any) -> None:
    """A drafter of it: one that knows the present token, or a random head."""
    from verl_tlt.drafter import VerifierWeights, build_drafter, refresh_verifier_weights, save_drafter

    model = build_drafter(target, seed=1, **settings)
    refresh_verifier_weights(model, VerifierWeights.from_policy_dir(target))
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


def run_script(name: str, *arguments: Path) -> Any:
    """What a script beside this file prints as JSON, in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "VLLM_LOGGING_LEVEL": "ERROR"}
    command = [sys.executable, str(Path(__file__).with_name(name)), *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(next(line for line in reversed(done.stdout.splitlines()) if line.startswith("{")))


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
        self.patch = pytest.MonkeyPatch()
        """For what a test changes inside; undone before the next test has the engine."""

        worker = self.core.model_executor.driver_worker.worker
        self.runner, self.live_drafter = worker.model_runner, getattr(worker, "tlt_drafter", None)

    def rpc(self, method: str, *args: Any) -> Any:
        """One worker's answer to `collective_rpc`."""
        return self.llm.collective_rpc(method, args=args)[0]

    def counters(self) -> list[int]:
        """VLLM's own: drafts verified, their tokens, those accepted, then by position; empty where nobody drafts."""
        found = {m.name.removeprefix("vllm:spec_decode_num_"): m for m in self.llm.get_metrics()}
        if "drafts" not in found:
            return []
        counts = [found[name].value for name in ("drafts", "draft_tokens", "accepted_tokens")]
        return [*counts, *found["accepted_tokens_per_pos"].values]

    def renew(self, tlt: dict[str, Any] | None, weights: Path | None) -> None:
        """As after a start with these settings (`additional_config["tlt"]`) and this drafter; None: stock vLLM."""
        from vllm.utils.torch_utils import set_random_seed

        assert self.llm.reset_prefix_cache()
        set_random_seed(0)
        if tlt is None:
            return
        from verl_tlt.engine_core.scheduler import load_policy, ngram_drafts

        if not self.scheduler.tlt.drafting:
            assert self.rpc("tlt_set_drafting", True) is None
        loaded = self.rpc("tlt_load_drafter", str(weights))
        assert loaded["ok"], loaded
        scheduler, control = self.scheduler, self.scheduler.tlt
        control.__init__(load_policy(tlt), control.limits, control.trace)
        scheduler.tlt_ngram = ngram_drafts(tlt["speculation"])
        scheduler._tlt_arm = 0

    def put_in_charge(self, policy: str) -> None:
        """Let another policy choose from now on: one of `policies`, else one that the benchmarks know by name."""
        import policies

        from benchmarks.control.policies import named

        own, control = getattr(policies, policy, None), self.scheduler.tlt
        arms = tuple(self.scheduler.vllm_config.additional_config["tlt"]["arms"])
        control.policy = own({}, arms, 0) if own else named(policy, arms)

    def generate(self, count: int, tokens: int, **kwargs: Any) -> list[list[int]]:
        """Tokens of `count` ragged prompts, ragged lengths up to `tokens`."""
        lengths = [max(8, tokens * (i + 1) // count) for i in range(count)]
        params = [sampled(n, **kwargs) for n in lengths]
        return [list(o.outputs[0].token_ids) for o in self.llm.generate(prompts(count), params, use_tqdm=False)]

    def close(self, beside: bool = False) -> None:
        """Free the engine and, where it was not beside another, vLLM's process groups, which they share."""
        with pytest.MonkeyPatch.context() as patch:
            if beside:
                patch.setattr("vllm.v1.engine.core.cleanup_dist_env_and_memory", lambda: None)
            self.core.shutdown()
        del self.llm, self.core, self.scheduler, self.runner, self.live_drafter
        gc.collect()
