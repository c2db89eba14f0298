"""The judge of `benchmarks.lossless`: responses that Hugging Face itself draws pass, others do not. No engine."""

import dataclasses
import functools

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from benchmarks.lossless.__main__ import Row, row_of
from benchmarks.lossless.exact import Exact, Sampling
from benchmarks.lossless.judged import FAILS, Judged
from benchmarks.lossless.tiny_policy import SMALL, build_target, spell

PROMPT, TOKENS, DRAWS = [3, 14, 1, 5, 9], 5, 1000
END = 2  # the tokenizer does not spell it
COOL = Sampling(temperature=0.8, top_p=0.9, top_k=6)


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    path = tmp_path_factory.mktemp("policy")
    build_target(path, vocab=SMALL)
    return path


@pytest.fixture(scope="module")
def exact(policy):
    return Exact(policy)


@pytest.fixture(scope="module")
def drawn(exact):
    """[DRAWS, TOKENS] by ancestral sampling, of a sampling."""

    @functools.cache
    def draw(sampling):
        generator = torch.Generator().manual_seed(0)
        outputs = torch.zeros(DRAWS, TOKENS, dtype=torch.long)
        for i in range(TOKENS):
            p = exact.log_probs(PROMPT, outputs[:, : i + 1], sampling)[:, -1].exp()
            outputs[:, i] = torch.multinomial(p, 1, generator=generator)[:, 0]
        return outputs.numpy()

    return draw


def test_what_the_policy_drew_passes_and_what_a_cooler_one_drew_does_not(exact, drawn):
    for sampling in (Sampling(), COOL):
        judged = exact.judge(PROMPT, drawn(sampling), sampling)
        assert judged.places() > FAILS and judged.martingale() > FAILS
        assert len(judged.place) == DRAWS * TOKENS
    judged = exact.judge(PROMPT, drawn(dataclasses.replace(COOL, temperature=0.6)), COOL)
    assert judged.places() < FAILS and judged.martingale() < FAILS


def test_a_token_that_cannot_be_is_seen_and_power_grows_with_what_is_wrong(exact, drawn):
    outputs = drawn(Sampling())
    judged = exact.judge(PROMPT, outputs, COOL)
    assert judged.impossible() and judged.places() == judged.martingale() == 0.0
    right = exact.judge(PROMPT, outputs, Sampling())
    share = [right.power(share) for share in (0.0, 0.02, 0.3)]
    assert share[0] == 0.0 and share[0] <= share[1] <= share[2] == 1.0


def test_tokens_that_are_nearly_sure_pass_after_many_prompts(exact):
    """Their places are random numbers of the judge, which must be others after each prompt."""
    sure, parts = Sampling(temperature=1e-4), []
    for first in range(12):
        prompt, outputs = [*PROMPT, first], np.zeros((40, TOKENS), dtype=int)
        for i in range(TOKENS):
            outputs[:, i] = int(exact.log_probs(prompt, outputs[:1, : i + 1], sure)[0, -1].argmax())
        parts.append(exact.judge(prompt, outputs, sure))
    assert Judged.of_all(parts).places() > FAILS


def test_a_row_passes_by_its_p_values():
    row = Row("e", "s", 1, 1, 0.0, 0.5, 0.5, 1.0, 0.0, 0)
    assert row.passes and not dataclasses.replace(row, p_martingale=1e-5).passes
    assert Judged(*[np.zeros(0)] * 6).p() == 1.0


def test_responses_that_go_on_behind_their_stop_string_are_counted(policy, exact, drawn):
    outputs = drawn(Sampling()).tolist()
    stop = next(token for token in outputs[0] if token != END)

    def row(responses):
        told = [[{"tokens": tokens, "logprobs": [0.0] * len(tokens)} for tokens in responses]]
        found = {"responses": told, "stops": [spell(stop, SMALL)], "accepted": 0.0}
        return row_of(("e", "s"), found, [PROMPT], Sampling(), exact, TOKENS, AutoTokenizer.from_pretrained(policy))

    assert row([tokens[: [*tokens, stop].index(stop) + 1] for tokens in outputs]).wrong_ends == 0
    assert row(outputs).wrong_ends == sum(stop in tokens[:-1] for tokens in outputs) > 10
