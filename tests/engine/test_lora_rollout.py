"""A policy served with a LoRA adapter, and a drafter beside it: drafts are verified against the adapted policy."""

import asyncio

import pytest
from tiny_engine import DoctorsEngine, prompts, sampled

from verl_tlt.commands.doctor.engine_check import check_sleep

pytestmark = pytest.mark.engine
LORA = dict(enable_lora=True, max_lora_rank=8, max_loras=1)


@pytest.fixture(scope="module")
def adapter(models, tmp_path_factory):
    """An adapter that changes what the policy says."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(models["target"])
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=8, target_modules=targets, init_lora_weights=False)
    path = tmp_path_factory.mktemp("adapter")
    get_peft_model(model, config).save_pretrained(path)
    return path


def generate(engine, adapter):
    """Greedy tokens with the adapter on."""
    from vllm.lora.request import LoRARequest

    outputs = engine.llm.generate(
        prompts(6), sampled(40), lora_request=LoRARequest("policy", 1, str(adapter)), use_tqdm=False
    )
    return [list(o.outputs[0].token_ids) for o in outputs]


def test_the_adapted_policy_decides_every_token(engine_of, models, adapter, stock_tokens):
    with engine_of(drafter=None, **LORA) as engine:
        wanted = generate(engine, adapter)
    assert wanted[-1] != stock_tokens[5][:40], "the adapter changes nothing"
    with engine_of("good", policy="policies:longest", enable_sleep_mode=True, **LORA) as engine:
        for _ in range(2):
            loaded = engine.rpc("tlt_load_drafter", str(models["good"] / "model.safetensors"))
            assert loaded is None
            engine.llm.wake_up(tags=["kv_cache"])
            assert "embed_tokens" in engine.live_drafter.shared_modules()
            assert generate(engine, adapter) == wanted
            assert engine.generate(8, 96) == stock_tokens  # and without the adapter
            engine.llm.sleep(level=1)  # verl's, where adapters are sent: the policy stays on the host
            engine.llm.wake_up(tags=["weights"])
        engine.llm.wake_up(tags=["kv_cache"])
        doctors = DoctorsEngine(engine, models["good"], lambda: pytest.fail("the policy stays on the host"))
        assert asyncio.run(check_sleep(doctors)).level == "ok"
        assert generate(engine, adapter) == wanted
