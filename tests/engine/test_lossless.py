"""Speculation changes no token: greedy outputs are stock vLLM's, whoever chooses K and whatever else goes on."""

import pytest

pytestmark = pytest.mark.engine

TOKENS = 96


@pytest.mark.parametrize(
    ("drafter", "policy"),
    [("good", "policies:cycle"), ("good", "policies:rand"), ("bad", "policies:rand"), ("good", None)],
)
def test_greedy_tokens_are_stock_tokens(engine_of, stock_tokens, drafter, policy):
    speculation = {} if policy else {"policy": "goodput"}
    with engine_of(drafter, policy=policy, speculation=speculation) as engine:
        assert engine.generate(8, TOKENS) == stock_tokens[TOKENS]
        stats = engine.scheduler.tlt.stats()
        assert stats["policy_error"] is None
        if policy:
            assert len([k for k, n in stats["k_steps"].items() if n]) == 4  # every K was used
            assert (sum(stats["accepted"]) > 100) == (drafter == "good")


@pytest.mark.parametrize(
    "pressure",
    [
        {"enable_prefix_caching": True},
        {"max_num_batched_tokens": 16, "max_num_seqs": 8},  # prompts in chunks, and not everybody runs in every step
        {"num_gpu_blocks_override": 6, "block_size": 32, "max_model_len": 160},  # not enough cache: preemptions
    ],
    ids=["prefix-caching", "chunked-prefill", "preemption"],
)
def test_greedy_tokens_under_pressure(engine_of, stock_tokens, pressure):
    with engine_of("good", policy="policies:rand", **pressure) as engine:
        preempt, preempted = engine.scheduler._preempt_request, []
        engine.scheduler._preempt_request = lambda *a, **k: preempted.append(preempt(*a, **k))
        assert engine.generate(8, TOKENS) == stock_tokens[TOKENS]
        assert engine.generate(8, TOKENS) == stock_tokens[TOKENS]
        assert bool(preempted) == ("num_gpu_blocks_override" in pressure)


def test_sampled_drafts_always_keep_their_probabilities(engine_of):
    """A draft verified without its probabilities counts as certain: no longer the target's distribution."""
    with engine_of("good", policy="policies:rand", max_num_batched_tokens=16, max_num_seqs=8) as engine:
        lost = []
        runner, find = engine.runner, engine.runner._get_spec_decode_draft_probs

        def watch(metadata):
            found = find(metadata)
            lost.append(found is None and runner._draft_probs is not None and sum(metadata.num_draft_tokens) > 0)
            return found

        runner._get_spec_decode_draft_probs = watch
        engine.generate(8, TOKENS, temperature=1.0)
        assert len(lost) > 20
        assert not any(lost)


def test_requests_that_reach_the_drafters_limit_only_stop_the_drafting(engine_of):
    with engine_of(None, max_model_len=64) as engine:
        stock = engine.generate(8, 52)
    with engine_of("good", policy="policies:longest", max_model_len=64) as engine:
        assert engine.generate(8, 52) == stock
        steps = engine.scheduler.tlt.policy.steps
        blocked = [i for i, s in enumerate(steps) if s.drafted == 0 and s.batch]
        assert engine.scheduler.tlt.stats()["blocked_steps"] == len(blocked) > 0
        assert not any(steps[i].clean for i in blocked)
        assert all(steps[i + 1].drafts == 0 for i in blocked[:-1])  # vLLM's K_max zeros were not verified


def test_a_wrong_scheduler_base_refuses_to_start(engine_of):
    # vLLM would start, and draft nothing, silently.
    with (
        pytest.raises(ValueError, match="TLTAsyncScheduler with async_scheduling=False would draft nothing"),
        engine_of("good", scheduler_cls="verl_tlt.rollout.scheduler.TLTAsyncScheduler"),
    ):
        pass
