"""Speculation changes no token: greedy outputs are stock vLLM's, whoever chooses K and whatever else goes on."""

import pytest
from tiny_engine import prompts, sampled

pytestmark = pytest.mark.engine

TOKENS = 96
CONTROLS = ("fixed", "rand", "live_table")


@pytest.fixture(scope="module")
def stock(engine_of, stock_tokens):
    """What stock vLLM decodes, by family."""
    with engine_of(drafter=None, family="llama") as engine:
        return {"qwen3": stock_tokens, "llama": engine.generate(8, TOKENS)}


@pytest.mark.parametrize(("family", "drafter"), [("llama", "good"), ("qwen3", "bad"), ("qwen3", "good")])
def test_greedy_tokens_are_stock_tokens(engine_of, stock, family, drafter):
    with engine_of(drafter, family=family) as engine:
        for policy in CONTROLS:
            engine.put_in_charge(policy)
            assert engine.generate(8, TOKENS) == stock[family]
            stats = engine.scheduler.tlt.stats(reset=True)
            assert stats.failure is None
            if policy == "rand":
                assert len([k for k, n in stats.steps_by_draft_length.items() if n]) == 4  # every K was used
                assert (sum(stats.num_accepted_tokens_per_pos) > 100) == (drafter == "good")


PLAIN, ASKING, LONG, BEFORE = 2, 2, 80, 6
OPTION = {"logprob_token_ids": [7, 30, 200]}
"""Of requests; vLLM computes it wrongly where drafts are verified."""


def with_option(engine, steps=0):
    """Outputs of requests without and with the option; those with it come when the others have run for some steps."""
    inner, found = engine.llm.llm_engine, {}

    def step():
        found.update((out.request_id, out.outputs[0]) for out in inner.step() if out.finished)

    texts = prompts(PLAIN + ASKING)
    for i, text in enumerate(texts[:PLAIN]):
        inner.add_request(str(i), text, sampled(LONG))
    for _ in range(steps):
        step()
    for i, text in enumerate(texts[PLAIN:], PLAIN):
        inner.add_request(str(i), text, sampled(24, **OPTION))
    while inner.has_unfinished_requests():
        step()
    return [found[str(i)] for i in range(len(texts))]


def test_logprobs_of_asked_tokens_are_complete_and_the_others_draft_again(engine_of):
    from vllm import SamplingParams

    if not hasattr(SamplingParams, "logprob_token_ids"):
        pytest.skip("runs where requests can ask for the log-probabilities of tokens, in later releases of vLLM")
    with engine_of("good", policy="policies:longest") as engine:
        found = with_option(engine, BEFORE)
        steps = engine.scheduler.tlt.stats(reset=True).steps_by_draft_length
    with engine_of(None) as stock:
        expected = with_option(stock)
    assert [list(out.token_ids) for out in found] == [list(out.token_ids) for out in expected]
    assert steps.get(0, 0) >= 24 and sum(steps.values()) - steps.get(0, 0) > BEFORE, steps
    for ours, theirs in zip(found[PLAIN:], expected[PLAIN:], strict=True):
        assert len(ours.logprobs) == len(theirs.logprobs) == 24
        for here, there in zip(ours.logprobs, theirs.logprobs, strict=True):
            assert here.keys() == there.keys() >= set(OPTION["logprob_token_ids"])
            assert all(abs(here[t].logprob - there[t].logprob) < 1e-3 for t in here)


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_greedy_tokens_with_ngrams_are_stock_tokens(engine_of, stock, family):
    with engine_of("good", family=family, speculation={"source": "ngram"}) as engine:
        trust, verified = engine.scheduler.tlt_ngram.index.trust, []
        learn = trust.learn
        engine.patch.setattr(trust, "learn", lambda matched, hit: verified.append(hit) or learn(matched, hit))
        for policy in ("fixed", "rand", "live_table"):
            engine.put_in_charge(policy)
            assert engine.generate(8, TOKENS) == stock[family]
        assert sum(verified) > 100  # from the second time on each response has been heard before
        assert sum(verified) > 0.9 * len(verified)
        assert engine.scheduler.tlt.stats().failure is None


PRESSURE = {
    "enable_prefix_caching": True,
    "num_gpu_blocks_override": 6,  # not enough cache for all: preemptions
    "block_size": 32,
    "max_model_len": 160,
    "max_num_batched_tokens": 16,  # prompts in chunks, and not everybody runs in every step
    "max_num_seqs": 8,
}


def test_greedy_tokens_under_pressure(engine_of, stock_tokens):
    with engine_of("good", policy="policies:rand", **PRESSURE) as engine:
        preempt, preempted = engine.scheduler._preempt_request, []
        engine.patch.setattr(engine.scheduler, "_preempt_request", lambda *a, **k: preempted.append(preempt(*a, **k)))
        assert engine.generate(8, TOKENS) == stock_tokens
        assert engine.generate(8, TOKENS) == stock_tokens
        assert preempted


def test_without_our_precaution_a_draft_loses_its_probabilities(engine_of, lost_probabilities):
    """It would count as certain: as exact, but accepted far less often. The fixture watches vLLM's log for it."""
    with engine_of("good", policy="policies:rand", **PRESSURE) as engine:
        drop, dropped = engine.scheduler._tlt_drop_stale_drafts, []

        def watch(scheduled):
            dropped.extend(r for r in engine.scheduler.running if r.spec_token_ids and r.request_id not in scheduled)
            drop(scheduled)

        engine.patch.setattr(engine.scheduler, "_tlt_drop_stale_drafts", watch)
        for _ in range(2):
            engine.generate(8, TOKENS, temperature=1.0)
        assert dropped and not lost_probabilities
        engine.patch.setattr(engine.scheduler, "_tlt_drop_stale_drafts", lambda _scheduled: None)
        for _ in range(6):  # which request loses its draft is a matter of chance
            engine.generate(8, TOKENS, temperature=1.0)
            if lost_probabilities:
                break
    assert lost_probabilities
    lost_probabilities.clear()


def test_requests_that_reach_the_drafters_limit_only_stop_the_drafting(engine_of, stock_tokens):
    with engine_of("good", policy="policies:longest", max_model_len=64) as engine:
        shorter = [tokens[: max(8, 52 * (i + 1) // 8)] for i, tokens in enumerate(stock_tokens)]
        assert engine.generate(8, 52) == shorter
        steps = engine.scheduler.tlt.policy.steps
        blocked = [i for i, s in enumerate(steps) if s.drafted == 0 and s.batch]
        assert blocked and not any(steps[i].clean for i in blocked)
        assert all(steps[i + 1].num_drafts == 0 for i in blocked[:-1])  # vLLM's K_max zeros were not verified
