"""Simulated acceptance against speculative sampling itself, enumerated over every text a three-token policy can say."""

import itertools
from functools import cache

import numpy as np
import pytest
import torch
from tiny_policy import Watched, drafter_of, make_policy, observe, random_texts
from vllm_by_hand import passes

from verl_tlt.drafter import evaluate
from verl_tlt.drafter.build import most_frequent
from verl_tlt.drafter.data import align, windows
from verl_tlt.drafter.evaluate import PROBABILITY_ROWS, accept_length, acceptance
from verl_tlt.errors import DrafterError

V, PROMPT, RESPONSE, K = 3, (0, 2, 1), 4, 2
SEED = 3  # greedy drafts of this head are right sometimes
SETTINGS = [(1.0, 1.0, 0), (0.7, 1.0, 2), (1.3, 0.8, 0), (0.0, 1.0, 0)]


@pytest.fixture(scope="module")
def small():
    """A drafter, every text as a recorded sequence, and the logits of every pass over each."""
    policy = make_policy(vocab_size=V)
    with torch.no_grad():
        policy.lm_head.weight.mul_(0.3)
    drafter = drafter_of(policy, seed=SEED, larger=8)
    texts = [PROMPT + response for response in itertools.product(range(V), repeat=RESPONSE)]
    recorded = observe(policy, [(torch.tensor(text), len(PROMPT)) for text in texts])
    return drafter, dict(zip(texts, recorded, strict=True)), [passes(drafter, align(one), K) for one in recorded]


def naive_probabilities(logits, temperature, top_p=1.0, top_k=0):
    """Temperature, then top-k, then the smallest set whose mass reaches top-p; one list at a time."""
    logits = np.asarray(logits, dtype=np.float64)
    if temperature == 0:
        return np.eye(len(logits))[logits.argmax()]
    p = np.exp(logits / temperature - (logits / temperature).max())
    if top_k:
        p[np.argsort(-p)[top_k:]] = 0
    p /= p.sum()
    kept, mass = np.zeros_like(p), 0.0
    for i in np.argsort(-p):
        if mass >= top_p:
            break
        kept[i], mass = p[i], mass + p[i]
    return kept / kept.sum()


def tables(logits_of, setting):
    """p[prefix] after it, and q[prefix, k]: the drafter's k-th distribution with the draft begun k tokens earlier."""
    temperature, top_p, top_k = setting
    p, q = {}, {}
    for text, seen in logits_of:
        for k, (logits, targets) in enumerate(seen):
            for row in range(len(text) - 1 - k):
                prefix = text[: row + 2 + k]
                q[prefix, k] = naive_probabilities(logits[row], temperature)
                p[prefix] = naive_probabilities(targets[row], temperature, top_p, top_k)
    return p, q


def enumerate_speculative_sampling(p, q, stop):
    """Expected (drafts, accepted by position) of decoding on from a text; drafts count that start before row `stop`."""

    @cache
    def decode(text):
        if len(text) - 2 >= stop:
            return np.zeros(K + 1)
        return np.eye(K + 1)[0] + draft(text, 0)

    def draft(text, k):
        if k == K:
            return sum(p[text][token] * decode((*text, token)) for token in range(V))
        total = np.zeros(K + 1)
        p_now, q_now = p[text], q[text, k]
        for token in range(V):
            if q_now[token] == 0:
                continue
            accepted = min(1.0, p_now[token] / q_now[token])
            if accepted:
                total += q_now[token] * accepted * (np.eye(K + 1)[k + 1] + draft((*text, token), k + 1))
            if accepted < 1:
                rest = np.maximum(p_now - q_now, 0)
                recovered = rest / rest.sum() if rest.sum() > 0 else p_now
                after = sum(recovered[other] * decode((*text, other)) for other in range(V) if recovered[other])
                total += q_now[token] * (1 - accepted) * after
        return total

    return decode


@pytest.mark.parametrize("setting", SETTINGS)
def test_expectation_over_all_texts_is_that_of_speculative_sampling(small, setting):
    drafter, recorded, logits_of = small
    temperature, top_p, top_k = setting
    texts = list(recorded)
    p, q = tables(zip(texts, logits_of, strict=True), setting)
    scores = acceptance(
        drafter, list(recorded.values()), temperature=temperature, top_p=top_p, top_k=top_k, max_draft=K, budget=512
    )
    stop = len(texts[0]) - 1 - K
    decode = enumerate_speculative_sampling(p, q, stop)
    first = {text[len(PROMPT)]: 1.0 / V for text in texts}  # any weights do: both sides start from the same ones
    ours, exact = np.zeros(K + 1), np.zeros(K + 1)
    for token, weight in first.items():
        exact += weight * decode((*PROMPT, token))
    for text, score in zip(texts, scores, strict=True):
        weight = first[text[len(PROMPT)]]
        for i in range(len(PROMPT) + 1, len(text)):
            weight *= p[text[:i]][text[i]]
        ours += weight * np.array([score.drafts, *score.accepted])
    np.testing.assert_allclose(ours, exact, rtol=1e-4)
    assert 1.0 < 1 + exact[1:].sum() / exact[0] < K + 1


@pytest.mark.parametrize("rows", [7, 256])
def test_no_sequence_loses_its_context_to_the_budget(policy, drafter, monkeypatch, rows):
    """However few rows are scored at once, and whatever blocks probabilities are computed in."""
    monkeypatch.setattr(evaluate, "PROBABILITY_ROWS", rows)
    longer = observe(policy, random_texts((90, 3), (60, 3), (8, 3), seed=7))
    whole, small = (acceptance(drafter, longer, max_draft=2, budget=budget) for budget in (512, 10))
    assert [score.positions for score in small] == [sum(map(len, sequence.loss_rows(2))) for sequence in longer]
    for a, b in zip(whole, small, strict=True):
        np.testing.assert_allclose([a.drafts, *a.accepted], [b.drafts, *b.accepted], rtol=1e-4)
    again = acceptance(drafter, longer, max_draft=2, budget=10)
    assert all((a.accepted == b.accepted).all() for a, b in zip(small, again, strict=True))
    pieces = accept_length(acceptance(drafter, windows(longer[0], 10), max_draft=2))
    assert abs(pieces - small[0].accept_length) > 0.01, "this drafter's context matters"


def test_a_long_sequence_has_no_logits_of_the_whole_vocabulary_at_once(policy):
    """`session_bytes` counts on it."""
    size, rows = policy.config.vocab_size, []
    drafter = drafter_of(policy, draft_ids=torch.arange(0, size, 2))
    (long,) = observe(policy, random_texts((700, 3)))

    def note(name, args, tensor):
        if isinstance(tensor, torch.Tensor) and tensor.ndim and tensor.shape[-1] == size:
            rows.append(tensor.numel() // size)

    with Watched(note):
        acceptance(drafter, [long], lm_head=policy.lm_head.weight, max_draft=2)
    assert 0 < max(rows) <= PROBABILITY_ROWS < long.rows


def test_too_short_to_know(drafter, sequences):
    for tokens in (6, 1, 0):
        score = acceptance(drafter, [sequences[0].window(0, tokens)], max_draft=3)[0]
        assert (score.positions, score.drafts, score.accept_length) == (0, 0.0, 1.0)
        assert score.accept.tolist() == [0.0, 0.0, 0.0]


def test_a_pruned_vocabulary_counts_the_mass_it_cannot_propose(policy, sequences):
    counts = torch.zeros(policy.config.vocab_size, dtype=torch.int64)
    for sequence in sequences:
        counts += torch.bincount(sequence.tokens, minlength=len(counts))
    kept = most_frequent(counts, 20)
    drafter = drafter_of(policy, draft_ids=kept)
    with pytest.raises(DrafterError, match="lm_head"):
        acceptance(drafter, sequences)
    pruned = acceptance(drafter, sequences, lm_head=policy.lm_head.weight, max_draft=1)
    inside = torch.isin(torch.arange(len(counts)), kept)
    upper = [
        policy.lm_head(policy.model.norm(s.last)).softmax(-1)[s.prompt_len : len(s) - 1, inside].sum(-1).max()
        for s in sequences
    ]
    for score, bound in zip(pruned, upper, strict=True):
        assert 0 < score.accept[0] <= float(bound) < 1
