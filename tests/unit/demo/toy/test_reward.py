import random
import subprocess
import sys

import pytest

from demo.toy.reward import compute_score
from demo.toy.task import Problem, answer_tokens, sample_response
from demo.toy.tokenizer import build_tokenizer

PROBLEM = Problem((7, 4), (5, 2))  # 47 + 25 = 72
TRUTH = "z0 2 z1 7 z2 0"


def score(text):
    return compute_score("toy_addition", text, TRUTH, {"index": 0}, unknown=1)


@pytest.mark.parametrize("end", ["", " <eos> ? 0 1 x0 7", " ? 0 1 x0 7", " = z0 9"])
def test_a_complete_right_answer_counts(end):
    assert " ".join(answer_tokens(PROBLEM)) == TRUTH
    assert score(f"x0 7 y0 5 > z0 2 x1 4 y1 2 : z1 7 = {TRUTH}{end}") == 1.0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x0 7 y0 5 > z0 2 x1 4 y1 2 : z1 7",  # never answers
        "= z0 2 z1 8 z2 0 <eos>",  # a wrong digit
        "= z0 2 z1 7",  # cut off by the length limit
        "= z0 2 z1 7 z2 0 z3 0 <eos>",  # too long
        "= z0 9 z1 7 z2 0 <eos> = z0 2 z1 7 z2 0 <eos>",  # only the first answer counts
    ],
)
def test_anything_else_does_not(text):
    assert score(text) == 0.0


def test_it_reads_what_verl_decodes():
    tokenizer = build_tokenizer()
    ids = tokenizer.convert_tokens_to_ids(sample_response(PROBLEM, random.Random(0), slip=0.0))
    assert score(tokenizer.decode(ids, skip_special_tokens=True)) == 1.0


def test_it_loads_in_a_reward_worker_without_heavy_imports():
    heavy = {"torch", "transformers", "verl", "vllm", "ray"}
    code = f"import sys, demo.toy.reward; assert not {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], timeout=300, check=True)
