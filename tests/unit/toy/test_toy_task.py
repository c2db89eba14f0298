"""The toy's task: its problems and texts, its tokenizer, its reward, and where its requests go."""

import random
import statistics

import pytest
from transformers import AutoTokenizer

from tests.toy import task
from tests.toy.agent import numbered
from tests.toy.reward import compute_score
from tests.toy.routing import ByNumber
from tests.toy.tokenizer import TOKENIZER_FILES, save_tokenizer

PROBLEM = task.Problem((7, 4), (5, 2))  # 47 + 25 = 72
TRUTH = "z0 2 z1 7 z2 0"


@pytest.fixture(scope="module")
def responses():
    rng = random.Random(3)
    problems = [task.sample_problem(rng) for _ in range(4096)]
    return [(p, task.sample_response(p, rng)) for p in problems]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(directory)
    assert sorted(p.name for p in directory.iterdir()) == sorted(TOKENIZER_FILES)
    return AutoTokenizer.from_pretrained(directory)


def test_the_answer_is_the_sum():
    rng = random.Random(0)
    for _ in range(200):
        problem = task.sample_problem(rng)
        a, b = (int("".join(map(str, reversed(digits)))) for digits in (problem.a, problem.b))
        answer = task.answer_tokens(problem)
        assert int("".join(reversed(answer[1::2]))) == a + b
        assert answer[::2] == [f"z{i}" for i in range(problem.digits + 1)]


def test_texts_stay_in_the_vocabulary_and_the_limits(responses):
    assert len(task.TOKENS) == len(task.TOKEN_ID) == 64
    for problem, text in responses:
        assert len(task.prompt_tokens(problem)) <= task.MAX_PROMPT
        assert set(task.prompt_tokens(problem) + text) <= set(task.TOKENS)
    right = statistics.mean(task.is_correct(text, task.answer_tokens(problem)) for problem, text in responses)
    assert 0.85 < right < 0.97, "demonstrations slip now and then"


def test_texts_survive_the_tokenizers_round_trip(tokenizer, responses):
    for _, words in responses[:20]:
        ids = tokenizer.encode(" ".join(words), add_special_tokens=False)
        assert ids == [task.TOKEN_ID[word] for word in words]
        assert tokenizer.decode(ids) == " ".join(words)


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        *((f"x0 7 y0 5 > z0 2 x1 4 y1 2 : z1 7 = {TRUTH}{end}", 1.0)
          for end in ("", " <eos> ? 0 1 x0 7", " ? 0 1 x0 7", " = z0 9")),
        ("", 0.0),
        ("x0 7 y0 5 > z0 2 x1 4 y1 2 : z1 7", 0.0),  # never answers
        ("= z0 2 z1 8 z2 0 <eos>", 0.0),  # a wrong digit
        ("= z0 2 z1 7", 0.0),  # cut off by the length limit
        ("= z0 2 z1 7 z2 0 z3 0 <eos>", 0.0),  # too long
        ("= z0 9 z1 7 z2 0 <eos> = z0 2 z1 7 z2 0 <eos>", 0.0),  # only the first answer counts
    ],
)  # fmt: skip
def test_a_complete_right_answer_counts(text, reward):
    assert " ".join(task.answer_tokens(PROBLEM)) == TRUTH
    assert compute_score("toy_addition", text, TRUTH, {"index": 0}, unknown=1) == reward


def test_the_reward_reads_what_verl_decodes(tokenizer):
    ids = tokenizer.convert_tokens_to_ids(task.sample_response(PROBLEM, random.Random(0), slip=0.0))
    assert compute_score("toy_addition", tokenizer.decode(ids, skip_special_tokens=True), TRUTH, {}) == 1.0


def route(router, count):
    """Where requests 0, 1, ... go."""
    return [router.acquire_server(numbered(number))[0] for number in range(count)]


def test_requests_go_by_their_number_and_elsewhere_only_while_their_replica_is_away():
    router = ByNumber({"b:1": "first", "a:2": "second"}, {})
    for _ in range(3):
        assert route(router, 5) == ["b:1", "a:2", "b:1", "a:2", "b:1"]
    assert router.get_status()["servers"] == {"b:1": 9, "a:2": 6}
    router.remove_servers(["b:1"])
    assert set(route(router, 4)) == {"a:2"}
    router.add_servers({"b:1": "first"})
    assert route(router, 4) == ["b:1", "a:2", "b:1", "a:2"]
