"""A GRPO run of a hybrid policy with a drafter: capture, training in idle time, weight sync, reload, decoding."""

import shutil
import sys
from pathlib import Path

import pytest
from grpo_run import LIMIT_S, TLT, grpo

from tests.toy.assets import SHIPPED_POLICY

sys.path.append(str(Path(__file__).parents[1] / "engine"))
import families

pytestmark = [pytest.mark.e2e, pytest.mark.heavy]

STATE, STEPS = 30.0, 8
"""How much recurrent states count: wrong ones show in what rollout and actor say of a token. And RL steps: a new head
learns such a policy slowly."""
VLLM = "++actor_rollout_ref.rollout.engine_kwargs.vllm"


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5", "qwen3_5_moe"])
def test_a_hybrid_policy_trains_with_a_drafter(family, tmp_path):
    if family.startswith("qwen3_5"):
        pytest.importorskip("torchvision", reason="vLLM's module of Qwen3.5 imports it: run by `make test-vision`")
    families.build_family(policy := tmp_path / "policy", family, vocab=64, state=STATE)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(SHIPPED_POLICY / file, policy)
    run = grpo(
        tmp_path / "run", tmp_path / "assets", STEPS, *TLT,
        f"{VLLM}.mamba_ssm_cache_dtype=float32",
        "actor_rollout_ref.model.use_remove_padding=False",  # states of packed rows need a GPU's kernels
        # Rewards of a random policy are all alike: the entropy moves it, and each sync brings other weights.
        "actor_rollout_ref.actor.entropy_coeff=0.1", "actor_rollout_ref.actor.optim.lr=1e-3",
        # vLLM computes linear attention in bfloat16 alone.
        "++actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=float32",
        POLICY=str(policy), DTYPE="bfloat16",
    )  # fmt: skip
    assert any(session.steps > 0 for session in run.trace.sessions), "no spot training happened"
    for metrics in run.steps.values():
        assert metrics["tlt/draft_length_frac_2"] > 0.5, "nothing was drafted"
        assert metrics["tlt/reload_failures"] == metrics["tlt/spot_failures"] == 0
        assert metrics["training/rollout_probs_diff_mean"] < 0.01
    assert all(reload.ok for reload in run.trace.reloads)
    assert len({reload.version for reload in run.trace.reloads}) >= 2, "no trained drafter was loaded"
    assert run.steps[STEPS]["tlt/accept_length"] > run.steps[1]["tlt/accept_length"] + 0.1
