"""A drafter that changes under a running engine: no token changes, and nothing but the drafter is written."""

import pytest
import torch
from drafter_bits import holds, live_fingerprint
from safetensors.torch import load_file, save, save_file
from tiny_engine import prompts, sampled

from benchmarks.lossless.tiny_policy import H
from verl_tlt.drafter.checkpoint import stage
from verl_tlt.vllm_worker.extension import own_buffers

pytestmark = pytest.mark.engine

TOKENS = 96


@pytest.fixture(scope="module")
def engine(engine_of):
    with engine_of("bad", policy="policies:longest") as started:
        yield started


def weights(models, name):
    return str(models[name] / "model.safetensors")


def test_swapped_in_mid_request_it_changes_acceptance_and_no_token(engine, models, stock_tokens):
    control, vllm_engine = engine.scheduler.tlt, engine.llm.llm_engine
    good, bad = (weights(models, name) for name in ("good", "bad"))
    assert engine.rpc("tlt_load_drafter", bad) is None and holds(engine, bad) and not holds(engine, good)
    assert engine.live_drafter.shared_modules() == ("embed_tokens", "lm_head")
    control.stats(reset=True)
    lengths = [max(8, TOKENS * (i + 1) // 8) for i in range(8)]
    for i, (prompt, length) in enumerate(zip(prompts(8), lengths, strict=True)):
        vllm_engine.add_request(str(i), prompt, sampled(length))
    tokens, step = {}, 0
    while vllm_engine.has_unfinished_requests():
        for output in vllm_engine.step():
            if output.finished:
                tokens[int(output.request_id.partition("-")[0])] = list(output.outputs[0].token_ids)
        step += 1
        if step == 20:
            before = control.stats(reset=True)
            assert engine.rpc("tlt_load_drafter", good) is None and holds(engine, good) and not holds(engine, bad)
    after = control.stats()
    assert [tokens[i] for i in range(8)] == stock_tokens
    assert before.num_accepted_tokens_per_pos[0] < 0.1 * before.num_drafts
    assert after.num_accepted_tokens_per_pos[0] > 0.5 * after.num_drafts


def test_the_policys_own_tensors_are_never_written(engine, models, tmp_path):
    policy = engine.runner.get_model()
    before = {n: p.clone() for n, p in policy.named_parameters()}
    tensors = load_file(weights(models, "good"))
    tensors["embed_tokens.weight"] = torch.zeros_like(policy.model.embed_tokens.weight)
    tensors["lm_head.weight"] = torch.zeros_like(policy.lm_head.weight)
    save_file(tensors, tmp_path / "standalone.safetensors")
    assert engine.rpc("tlt_load_drafter", str(tmp_path / "standalone.safetensors")) is None
    assert all(torch.equal(p, before[n]) for n, p in policy.named_parameters())
    assert engine.runner.drafter.model.lm_head is policy.lm_head


def test_buffers_ruined_by_sleep_are_restored_with_the_weights(engine, models):
    """vLLM 0.24 and 0.26 save the policy's buffers before sleep level 2, and not the drafter's."""
    drafter, file = engine.runner.drafter.model, weights(models, "good")
    own = own_buffers(drafter, engine.runner.get_model())
    assert any("cos_sin_cache" in name for name in own)
    assert engine.rpc("tlt_load_drafter", file) is None
    fine, before = live_fingerprint(engine), sum(engine.rollout(TOKENS)[1])
    with torch.no_grad():
        for buffer in own.values():
            buffer.zero_()
    assert live_fingerprint(engine) != fine
    assert sum(engine.rollout(TOKENS)[1]) < 0.7 * before, "what this test is about makes no difference here"
    assert engine.rpc("tlt_load_drafter", file) is None
    assert live_fingerprint(engine) == fine
    assert sum(engine.rollout(TOKENS)[1]) == before


def test_a_file_is_searched_for_nan_once_and_again_when_it_is_staged_anew(engine, models, tmp_path):
    def load(path):
        looked.clear()
        return engine.rpc("tlt_load_drafter", str(path)) is None, len(looked) > 0

    looked, isfinite = [], torch.Tensor.isfinite
    engine.patch.setattr(torch.Tensor, "isfinite", lambda tensor: looked.append(1) or isfinite(tensor))
    stage("{}", (models["good"] / "model.safetensors").read_bytes(), tmp_path / "staged")
    file = tmp_path / "staged" / "model.safetensors"
    assert [load(file) for _ in range(2)] == [(True, True), (True, False)]
    tensors = load_file(file)
    tensors["norm.weight"][0] = float("nan")
    stage("{}", save(tensors), file.parent)
    assert [load(file) for _ in range(2)] == [(False, True), (False, True)]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"fc.weight": None}, "lacks fc.weight, which the served drafter has"),
        (
            {"layers.1.mlp.down_proj.weight": torch.zeros(H, H)},
            "holds layers.1.mlp.down_proj.weight, which the served drafter does not have",
        ),
        ({"fc.weight": torch.zeros(H, H)}, f"fc.weight is [{H}, {H}], the served drafter's is [{H}, {3 * H}]"),
    ],
    ids=["lacks", "surplus", "shape"],
)
def test_a_file_that_does_not_fit_is_refused_and_the_drafter_stays(engine, models, tmp_path, changes, sentence):
    engine.rpc("tlt_load_drafter", weights(models, "good"))
    fine = live_fingerprint(engine)
    tensors = load_file(weights(models, "bad")) | changes
    path = tmp_path / "model.safetensors"
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)
    answer = engine.rpc("tlt_load_drafter", str(path))
    assert sentence in answer
    assert live_fingerprint(engine) == fine
