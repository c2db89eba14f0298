"""Every family that drafters are built for: its captured states, and a real engine's tokens.

Drafters of them are built and trained in tests/unit/drafter/test_published.py.
"""

import gc
import shutil

import families
import numpy as np
import pytest
import torch
from actor import build_actor, free_port, infer, make_rows
from shared_engines import part_of
from tiny_engine import prompts, sampled

from benchmarks.lossless.tiny_policy import build_drafter_dir
from tests.toy.assets import AUX_LAYERS, SHIPPED_POLICY
from verl_tlt.drafter import VerifierWeights, build_drafter, refresh_verifier_weights
from verl_tlt.drafter.policy import SUPPORTED
from verl_tlt.drafter.verifier import policy_part

pytestmark = pytest.mark.engine

IN_OTHER_TESTS = ("llama", "qwen2", "qwen3")
FAMILIES = [family for family in SUPPORTED if family not in IN_OTHER_TESTS]
SERVED = [
    pytest.param(family, marks=() if family == "qwen3_moe" else pytest.mark.heavy)
    for family in FAMILIES
    if family not in families.HYBRID  # vLLM computes them in 16 bits: test_hybrids.py
]
TOLERANCE = dict(rtol=2**-8, atol=1e-2)  # bfloat16's rounding; batching changes float32 sums by less


@pytest.fixture(scope="module")
def policy_of(models):
    """(a family's tiny policy, its directory), made once; where it is served, with a `good` drafter beside it."""
    made = {}

    def get(family, served=False):
        target, good = (models["target"].parent / part_of(family, part) for part in ("target", "good"))
        if family not in made:
            made[family] = families.build_family(target, family)
            for file in ("tokenizer.json", "tokenizer_config.json"):  # verl loads one
                shutil.copy(SHIPPED_POLICY / file, target)
            models[target.name] = target
        if served and good.name not in models:
            models[good.name] = good
            build_drafter_dir(good, target, informed=True)
        return made[family], target

    return get


def states_and_logits(policy, tokens):
    """Hugging Face's layers + 1 states [1, L, H] and logits [L, V] of a text; verl changes what is around them."""
    output = policy.get_decoder()(input_ids=tokens[None], output_hidden_states=True, use_cache=False)
    return output.hidden_states, policy.get_output_embeddings()(output.last_hidden_state)[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_capture_keeps_the_policys_states(policy_of, family, monkeypatch):
    """And the teacher made of them is the policy."""
    policy, directory = policy_of(family)
    if family == "qwen2_5_vl":  # what verl 0.9.1 does with images does not run with transformers 5
        from verl.models.transformers import qwen2_vl

        text = lambda model, ids, mask, *_images: (model.get_input_embeddings()(ids), mask)  # noqa: E731
        monkeypatch.setattr(qwen2_vl, "_get_input_embeds", text)
    eager = {"override_config": {"attn_implementation": "eager"}}  # which every family has
    actor = build_actor(port=free_port(), policy=directory, remove_padding=False, model=eager)
    rows = make_rows([(3, 21), (12, 4), (5, 40), (7, 1)])
    taken, _ = infer(actor, rows, 1000, axes=4 * (family in families.NESTED))
    shared = [part for name, _ in actor.engine.get_per_tensor_param()[0] if (part := policy_part(name))]
    assert sorted(shared) == ["embed", "lm_head", "norm"], "a weight sync has each once, whatever heads the policy has"
    torch.distributed.destroy_process_group()
    assert not actor.capture.errors and len(taken) == len(rows)
    del actor
    gc.collect()
    model = build_drafter(directory, seed=0)
    refresh_verifier_weights(model, VerifierWeights.from_policy_dir(directory))
    for s, (tokens, _) in zip(taken, rows, strict=True):
        states, logits = states_and_logits(policy, tokens)
        aux = torch.cat([states[i][0] for i in AUX_LAYERS], dim=-1)
        torch.testing.assert_close(s.aux.float(), aux, **TOLERANCE)
        with torch.no_grad():
            teacher = model.verifier_lm_head(model.verifier_norm(s.last.float()))
        torch.testing.assert_close(teacher, logits, rtol=0, atol=2**-6 * logits.abs().max().item())


@pytest.mark.parametrize("family", SERVED)
def test_greedy_tokens_are_stock_tokens(policy_of, engine_of, family):
    """And the states that vLLM hands to the drafter are those that it was trained on."""
    text_only = {}
    if family in families.NESTED:
        pytest.importorskip("torchvision", reason="vLLM and transformers cut images with it: run by `make test-vision`")
        text_only = {"limit_mm_per_prompt": {"image": 0, "video": 0}}
    policy, _ = policy_of(family, served=True)
    with engine_of(drafter=None, family=family, **text_only) as engine:
        stock = engine.generate(8, 96)
    with engine_of("good", family=family, **text_only) as engine:
        prompt, seen = prompts(8)[7], []
        drafter = engine.runner.drafter.model
        combine = drafter.combine_hidden_states

        def watch(states):
            seen.append(states.clone())  # [tokens, 3 H]
            return combine(states)

        engine.patch.setattr(drafter, "combine_hidden_states", watch)
        engine.llm.generate([prompt], [sampled(2)], use_tqdm=False)
        states, _ = states_and_logits(policy, torch.tensor(prompt["prompt_token_ids"]))
        wanted = torch.cat([states[i][0] for i in AUX_LAYERS], dim=-1)
        torch.testing.assert_close(seen[0][: len(wanted)].float(), wanted, rtol=1e-3, atol=1e-3)
        for control in ("rand", "live_table"):
            engine.put_in_charge(control)
            assert engine.generate(8, 96) == stock, control
            stats = engine.scheduler.tlt.stats(reset=True)
            assert stats.failure is None
            assert sum(stats.num_accepted_tokens_per_pos) > 100
        head = drafter.lm_head.weight.clone()
        engine.live_drafter._write_head(engine.live_drafter._policys_rows())  # nothing is pruned here
        assert torch.equal(drafter.lm_head.weight, head)


@pytest.fixture
def routes_told(monkeypatch):
    """Have the kernels of vLLM's CPU backend tell which experts they chose, as those of GPUs do, and 0.30's here."""
    experts = pytest.importorskip("vllm.model_executor.layers.fused_moe.experts.cpu_moe").CPUUnquantizedExperts
    if not experts.is_monolithic():
        return
    select = experts._select_experts

    def select_and_tell(self, *args):
        weights, chosen = select(self, *args)
        if self.routing_replay_capture_fn is not None:
            self.routing_replay_capture_fn(chosen)
        return weights, chosen

    monkeypatch.setattr(experts, "_select_experts", select_and_tell)
    monkeypatch.setattr(experts, "supports_routing_replay_capture", lambda _: True)


def test_each_token_has_the_experts_that_it_has_without_drafts(policy_of, engine_of, routes_told):
    """`rollout.enable_rollout_routing_replay`: rows of rejected drafts are cut, with stop strings too."""
    policy_of("qwen3_moe", served=True)
    mixture = {"family": "qwen3_moe", "enable_return_routed_experts": True}
    ends = {"stop": ["a text that nobody says"], "detokenize": True}

    def routes(engine, **asked):
        params = [sampled(20 + 5 * i, **asked) for i in range(8)]
        outputs = [o.outputs[0] for o in engine.llm.generate(prompts(8), params, use_tqdm=False)]
        return [(list(o.token_ids), np.sort(o.routed_experts, -1)) for o in outputs]

    with engine_of(drafter=None, **mixture) as engine:
        stock = routes(engine)
    assert [len(chosen) for _, chosen in stock] == [5 + i + 20 + 5 * i - 1 for i in range(8)], "all but the last token"
    assert len(np.unique(np.concatenate([chosen for _, chosen in stock]))) > 2
    with engine_of("good", **mixture) as engine:
        engine.end_at_stop_strings()
        for control, asked in (("longest", {}), ("rand", {}), ("longest", ends)):
            engine.put_in_charge(control)
            found = routes(engine, **asked)
            stats = engine.scheduler.tlt.stats(reset=True)
            accepted, drafted = sum(stats.num_accepted_tokens_per_pos), sum(stats.num_draft_tokens_per_pos)
            assert 50 < accepted < drafted - 50, (control, accepted, drafted)
            for (tokens, chosen), (expected, theirs) in zip(found, stock, strict=True):
                assert tokens == expected and np.array_equal(chosen, theirs), control
