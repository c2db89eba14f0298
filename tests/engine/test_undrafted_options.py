"""An option of requests that vLLM computes wrongly where drafts are verified: with TLT it is as without a drafter."""

import pytest
from tiny_engine import prompts, sampled

pytestmark = pytest.mark.engine

PLAIN, ASKING, TOKENS, LONG, BEFORE = 2, 2, 24, 80, 6
OPTION = {"logprob_token_ids": [7, 30, 200]}


def asked(engine, steps=0):
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
        inner.add_request(str(i), text, sampled(TOKENS, **OPTION))
    while inner.has_unfinished_requests():
        step()
    return [found[str(i)] for i in range(len(texts))]


def test_logprobs_of_asked_tokens_are_complete_and_the_others_draft_again(engine_of):
    with engine_of(None) as stock:
        expected = asked(stock)
    with engine_of("good", policy="policies:longest") as engine:
        found = asked(engine, BEFORE)
        stats = engine.scheduler.tlt.stats(reset=True)
    assert [list(out.token_ids) for out in found] == [list(out.token_ids) for out in expected]
    steps = stats.steps_by_draft_length
    assert steps.get(0, 0) >= TOKENS and sum(steps.values()) - steps.get(0, 0) > BEFORE, steps
    for ours, theirs in zip(found[PLAIN:], expected[PLAIN:], strict=True):
        assert len(ours.logprobs) == len(theirs.logprobs) == TOKENS
        for here, there in zip(ours.logprobs, theirs.logprobs, strict=True):
            assert here.keys() == there.keys() >= set(OPTION["logprob_token_ids"])
            assert all(abs(here[t].logprob - there[t].logprob) < 1e-3 for t in here)
