import random
import statistics

import pytest

from demo.toy import task


@pytest.fixture(scope="module")
def responses():
    rng = random.Random(3)
    problems = [task.sample_problem(rng) for _ in range(4096)]
    return [(p, task.sample_response(p, rng)) for p in problems]


def test_the_answer_is_the_sum():
    rng = random.Random(0)
    for _ in range(200):
        problem = task.sample_problem(rng)
        a, b = (int("".join(map(str, reversed(digits)))) for digits in (problem.a, problem.b))
        answer = task.answer_tokens(problem)
        assert int("".join(reversed(answer[1::2]))) == a + b
        assert answer[::2] == [f"z{i}" for i in range(problem.digits + 1)]


def test_lengths_have_a_heavy_tail(responses):
    lengths = [len(text) for _, text in responses]
    assert 90 <= statistics.median(lengths) <= 150
    groups = [lengths[i : i + 32] for i in range(0, len(lengths), 32)]
    ratio = statistics.median(max(group) / statistics.median(group) for group in groups)
    assert 6 <= ratio <= 10
    assert 1000 < max(lengths) <= task.MAX_RESPONSE


def test_texts_stay_in_the_vocabulary_and_the_limits(responses):
    assert len(task.TOKENS) == len(task.TOKEN_ID) == 64
    for problem, text in responses:
        assert len(task.prompt_tokens(problem)) <= task.MAX_PROMPT
        assert set(task.prompt_tokens(problem) + text) <= set(task.TOKENS)
    right = statistics.mean(task.is_correct(text, task.answer_tokens(problem)) for problem, text in responses)
    assert 0.85 < right < 0.97, "demonstrations slip now and then"


def test_no_distance_repeats(responses):
    """If the kind of token repeated at a fixed distance, acceptance would depend on where a draft begins."""
    kinds = [[token[0] if token[0] in "xyz" else token.isdigit() for token in text] for _, text in responses[:500]]
    for lag in range(3, 16):
        pairs = [(k[i], k[i + lag]) for k in kinds for i in range(len(k) - lag) if k[i] == "x"]
        assert statistics.mean(a == b for a, b in pairs) < 0.6, lag


def test_a_continued_response_keeps_its_first_answer():
    rng = random.Random(4)
    problem = task.sample_problem(rng, 4)
    text = task.sample_response(problem, rng, slip=0.0, rounds=3)
    assert text.count(task.EOS) == text.count(task.ANSWER) == 3
    assert task.is_correct(text, task.answer_tokens(problem))
    assert task.is_correct([t for t in text if t != task.EOS], task.answer_tokens(problem))
