"""The answer, and the number that decides it."""

from dataclasses import replace

import pytest

from verl_tlt.commands.advise.judge import Numbers, judge

GOOD = Numbers(
    gen_s=100.0, rest_s=25.0, overhead_s=0.5, rollout={"low": 1.4, "likely": 1.8, "high": 2.2}, tail_share=0.8,
    bubble_s=20.0, bubble_needed_s=2.5, replicas=8, has_drafter=True, trains=True, response_mean=3000.0,
    tail_break_even=1.4, accept={"low": 1.9, "likely": 2.4, "high": 3.1}, accept_known=False,
)  # fmt: skip
RANDOM, TRAINED = {"has_drafter": False}, "yes, with a trained drafter"
CLOSE = {"rollout": {**GOOD.rollout, "low": 1.02}}


def slow(faster, **changes):
    return {"rollout": dict.fromkeys(GOOD.rollout, faster), **changes}


def test_amdahl():
    assert GOOD.share == 0.8 and GOOD.bound == pytest.approx(5.0)
    assert GOOD.step("likely") == pytest.approx(125 / (100 / 1.8 + 25.5))
    half = replace(GOOD, tool_share=0.5)
    assert half.step("likely") == pytest.approx(125 / (50 + 50 / 1.8 + 25.5))


@pytest.mark.parametrize(
    ("change", "answer", "said"),
    [
        ({}, "yes", "a step is 1.54 (1.29 to 1.76) times as fast. The accept length decides: from 1.40 on"),
        ({}, "yes", "and 1.90 to 3.10 are assumed."),
        ({"accept_known": True}, "yes", "and 1.90 to 3.10 are expected."),
        (RANDOM, TRAINED, "(1.29 to 1.76) times as fast. The accept length decides: from 1.40"),
        ({"measured": False}, "yes", "Most of this is assumed: --metrics of a stock run"),
        ({"gen_s": 5.0, "rest_s": 95.0}, "no", "rollout is 5% of a step; without any duration"),
        ({"gen_s": 10.0, "rest_s": 90.0, "reward_s": 70.0}, "no", "it is reward-bound: reward takes 70.0 s of a step"),
        ({"tool_share": 0.7}, "no", "it is tool-bound: responses wait for tools 70% of their time"),
        (slow(1.01, tail_share=0.05), "no", "its replicas never drain: 5% of their time is at batches below 32"),
        (slow(1.1, gen_s=4.0, rest_s=1.0, response_mean=90.0), "no", "its responses are short: 90 tokens on average"),
        (slow(1.02), "no", "from an accept length of 1.40 on at a batch of 8"),
        ({"replicas": 1, "bubble_s": 0.0, **RANDOM}, "no", "with one replica nobody waits for anybody, and"),
        ({"replicas": 1, "bubble_s": 0.0}, "yes", "1.29"),
        ({"bubble_s": 1.0, **RANDOM}, "no", "replicas wait 1.0 s a step on average, and a session needs 2.5 s"),
        ({"bubble_s": 1.0, **RANDOM}, "no", "so that a cold start is all it learns from; with one from verl-tlt"),
        ({"bubble_s": 1.0, "mode": "separate_async", **RANDOM}, TRAINED, "1.29"),
        ({"trains": False, **RANDOM}, "no", "tlt.spot.enable=false trains nothing; with one from verl-tlt warmup"),
        (CLOSE, "it depends", "from 1.40 on drafts pay at a batch of 8, and 1.9"),
        ({**CLOSE, **RANDOM}, "it depends", "of a trained drafter"),
    ],
)  # fmt: skip
def test_the_answer_names_the_number_that_decides(change, answer, said):
    verdict = judge(replace(GOOD, **change))
    assert verdict.answer == answer and said in verdict.because
    assert verdict.because.endswith(".") and "\n" not in verdict.because
