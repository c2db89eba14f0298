"""Engines that vLLM compiles: what it traced once, without guards, goes on to be what drafter and policy are.

vLLM compiles both models in its profiling run and drops Dynamo's guards: a module, shape or attribute that is another
one later goes unnoticed, or fails. Its CPU backend does so too where it is let, and with VLLM_CPU_CI_ENV runs Dynamo's
graphs without inductor, which takes seconds. What of a GPU that stands for is in benchmarks/gpu/README.md.
"""

import shutil
from pathlib import Path

import families
import pytest
import torch
from test_lora_rollout import LORA
from vllm import envs

from benchmarks.lossless.tiny_policy import V, build_drafter_dir

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(shutil.which("g++") is None, reason="runs where g++ is installed, which torch.compile needs"),
]
TOKENS = 48


@pytest.fixture
def compiles(monkeypatch, tmp_path):
    """Engines that are started meanwhile compile; by default without inductor."""
    monkeypatch.delenv("TORCH_COMPILE_DISABLE")
    monkeypatch.setenv("VLLM_CPU_CI_ENV", "1")
    # What vLLM knows of its models it keeps there too, and asks a process of its own where it does not.
    (known := Path(envs.VLLM_CACHE_ROOT) / "modelinfos").mkdir(parents=True, exist_ok=True)
    (tmp_path / "modelinfos").symlink_to(known)
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    torch._dynamo.reset()
    with torch._dynamo.config.patch(disable=False):  # monkeypatch would leave the setting removed
        yield monkeypatch
    torch._dynamo.reset()


@pytest.fixture
def start(engine_of, compiles):
    """An engine that has compiled both of its models, and sleeps."""

    def of(drafter, **more):
        return engine_of(drafter, policy="policies:longest", enforce_eager=False, enable_sleep_mode=True, **more)

    return of


def compiled(worker):
    """Which models of a worker were compiled, policy and drafter."""
    models = worker.model_runner.get_model(), worker.model_runner.drafter.model
    return [any(getattr(part, "compiled", False) for part in model.modules()) for model in models]


def serves_through_reloads(engine, models, good, bad=None, levels=(1, 2)):
    """Whether it drafts and decodes the same after each sync, another drafter's between two; returns the tokens."""
    assert all(all(of) for of in engine.llm.collective_rpc(compiled)), "nothing here is about compiled models"
    file = models[good] / "model.safetensors"
    assert engine.sync(file, levels[0]) is None
    first = engine.rollout(TOKENS)
    assert sum(first[1]) > 20
    for level in levels:
        if bad is not None:
            assert engine.sync(models[bad] / "model.safetensors", level) is None
            tokens, accepted = engine.rollout(TOKENS)
            assert tokens == first[0] and sum(accepted) < 0.2 * sum(first[1])
        assert engine.sync(file, level) is None
        assert engine.rollout(TOKENS) == first
    return first[0]


@pytest.fixture
def stock(stock_tokens):
    """What an engine without a drafter decodes, not compiled."""
    return [tokens[: max(8, TOKENS * (i + 1) // 8)] for i, tokens in enumerate(stock_tokens)]


def with_lora(patch):
    """Have vLLM's CPU backend compile with LoRA too, as its GPU backend does."""
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def check_without_lora(vllm_config):
        lora, vllm_config.lora_config = vllm_config.lora_config, None
        check(vllm_config)
        vllm_config.lora_config = lora

    patch.setattr(CpuPlatform, "check_and_update_config", staticmethod(check_without_lora))


def test_lora(stock, start, compiles, models):
    """Without an adapter: vLLM does not compile for a CPU with LoRA, and where it is made to, adapters do nothing."""
    with_lora(compiles)
    with start("good", **LORA) as engine:
        assert serves_through_reloads(engine, models, "good", levels=(1,)) == stock


@pytest.mark.heavy
def test_plain_with_inductor(stock, start, compiles, models):
    compiles.setenv("VLLM_CPU_CI_ENV", "0")
    with start("good") as engine:
        assert serves_through_reloads(engine, models, "good", "bad") == stock


@pytest.mark.heavy
def test_two_ranks(stock, start, compiles, models):
    compiles.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # `compiled` is called in other processes
    with start("good", tensor_parallel_size=2, distributed_executor_backend="mp") as engine:
        assert serves_through_reloads(engine, models, "good", "bad") == stock


@pytest.mark.heavy
def test_a_pruned_head(stock, start, models, tmp_path):
    """Half of the tokens can be drafted; the head's rows are those of the policy that is live at each reload."""
    for name, informed in (("half", True), ("half-bad", False)):
        models[name] = tmp_path / name
        build_drafter_dir(models[name], models["target"], informed=informed, draft_ids=torch.arange(0, V, 2))
    with start("half") as engine:
        assert serves_through_reloads(engine, models, "half", "half-bad") == stock


@pytest.mark.heavy
def test_a_hybrid(engine_of, start, models, tmp_path):
    """A policy with linear attention, in 16 bits: vLLM's CPU backend has its kernels in no other precision."""
    names = {part: f"compiled-qwen3_next-{part}" for part in ("target", "good", "bad")}
    models.update({name: tmp_path / name for name in names.values()})
    families.build_family(models[names["target"]], "qwen3_next")
    for part in ("good", "bad"):
        build_drafter_dir(models[names[part]], models[names["target"]], informed=part == "good")
    with start("good", family="compiled-qwen3_next", dtype="bfloat16", mamba_ssm_cache_dtype="float32") as engine:
        serves_through_reloads(engine, models, names["good"], names["bad"])
