"""Warm-up, engine and `verl-tlt convert` with a pretrained language model.

It has 49,152 tokens, a byte-level tokenizer and a chat template.
"""

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from drafter_bits import fingerprint
from safetensors.torch import load_file
from transformers import AutoTokenizer

from benchmarks.gpu.parts import of_clone
from benchmarks.lossless.__main__ import row_of
from benchmarks.lossless.exact import Exact, Sampling
from benchmarks.real_policy.collatz import compute_score
from benchmarks.real_policy.head import DRAFT_VOCAB, head_facts
from benchmarks.real_policy.job import LONGEST_PROMPT, LONGEST_RESPONSE, PLACE
from verl_cpu.environment import CPU_ENGINE
from verl_tlt.commands.child_engine import run_job
from verl_tlt.commands.options import EvaluateOptions
from verl_tlt.commands.warmup.evaluate import AGREE
from verl_tlt.commands.warmup.prompts import read_prompts

pytestmark = pytest.mark.timeout(1800)
GREEDY, DRAWN, TOKENS, DRAWS = "greedy", "drawn", 12, 160
TIED = 2e-3
"""Log-probabilities so near to each other are tied: the kernels differ by less than a tenth of that, in float32."""


@pytest.fixture(scope="module")
def prompts(assets, drafter, tmp_path_factory):
    options = EvaluateOptions(model=assets.policy, drafter=drafter, prompts=[assets.val], response_length=1)
    found = read_prompts(options, tmp_path_factory.mktemp("images"), limit=16).all
    return [list(prompt.tokens) for prompt in found if len(prompt.tokens) <= LONGEST_PROMPT]


@pytest.fixture(scope="module")
def engines(assets, drafter, prompts, tmp_path_factory):
    """What vLLM decodes without drafts, and under verl-tlt with any K from 0 to 5 in any step, by setting."""
    found = {}
    settings = {GREEDY: asdict(Sampling(temperature=0.0)), DRAWN: asdict(Sampling())}
    arguments = {
        "model": str(assets.policy), "dtype": "float32", "seed": 0, "enforce_eager": True, "max_num_seqs": 32,
        "max_model_len": LONGEST_PROMPT + 2 * TOKENS, "logprobs_mode": "processed_logprobs", "disable_log_stats": False,
    }  # fmt: skip
    for name, head in (("stock", None), ("tlt", str(drafter))):
        job = {
            "arguments": arguments, "drafter": head, "draft_length": 5, "tlt": head is not None, "stops": {},
            "prompts": prompts[:4], "draws": DRAWS // 4, "tokens": TOKENS,
            "settings": settings if head else {GREEDY: settings[GREEDY]},
        }  # fmt: skip
        found[name] = run_job("benchmarks.lossless.child", job, tmp_path_factory.mktemp(name), of_clone(CPU_ENGINE))
    return found


def test_the_warm_up_learns_from_answers_to_the_chat_template(warmed, assets):
    head, facts = warmed
    weights, config = load_file(head / "model.safetensors"), json.loads((head / "config.json").read_text())
    assert config["draft_vocab_size"] == DRAFT_VOCAB == int(weights["t2d"].sum()) < len(weights["t2d"]) == 49_152
    assert facts["responses"] == 48 and facts["steps"] == int(facts["options"][-1]) and facts["accept_length"] >= 1.0
    # The turn's end token ended responses, and the draft vocabulary has it.
    assert facts["response_tokens"] < 48 * LONGEST_RESPONSE / 2
    tokenizer = AutoTokenizer.from_pretrained(assets.policy)
    assert tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert weights["t2d"][tokenizer.eos_token_id]
    row = pq.read_table(assets.train).to_pylist()[0]
    text = tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True)
    assert text.startswith("<|im_start|>system\n") and text.endswith("<|im_end|>\n<|im_start|>assistant\n")
    answer = row["reward_model"]["ground_truth"]
    assert compute_score("", f"Below 100 after {answer}.", answer) == 1


def test_what_is_simulated_is_what_vllm_serves(warmed):
    _, facts = warmed
    made = head_facts(PLACE) or facts
    simulated, served = (made[f"accept_length_{how}"] for how in ("simulated", "served"))
    assert all(abs(simulated[k] / served[k] - 1) <= AGREE for k in served)


def test_greedy_tokens_are_those_without_drafts_or_tied(engines, assets, prompts):
    exact, differ = Exact(assets.policy), 0
    for prompt, stock, ours in zip(prompts, *(engines[n][GREEDY]["responses"] for n in ("stock", "tlt")), strict=False):
        for one, other in zip(stock, ours, strict=True):
            a, b = one["tokens"], other["tokens"]
            at = next((i for i, pair in enumerate(zip(a, b, strict=True)) if pair[0] != pair[1]), None)
            if at is not None:
                differ += 1
                pair = [exact.of_tokens(prompt, [*a[:at], token], None)[-1] for token in (a[at], b[at])]
                assert abs(pair[0] - pair[1]) < TIED, f"{a[at]} and {b[at]} at token {at} are not tied: {pair}"
    assert engines["tlt"][GREEDY]["accepted"] > 0
    assert differ < 4


def test_drawn_tokens_have_the_policys_distribution(engines, assets, prompts):
    found = engines["tlt"][DRAWN]
    row = row_of(("tlt", DRAWN), found, prompts[:4], Sampling(), Exact(assets.policy), TOKENS, None)
    assert row.passes, row
    assert row.accepted > 0 and row.logprob_error < 0.01


def test_converted_it_drafts_with_the_same_weights(drafter, assets, tmp_path):
    for source, target in ((drafter, "once"), (tmp_path / "once", "twice")):
        words = ["convert", str(source), "--model", str(assets.policy), "--out", str(tmp_path / target)]
        subprocess.run([str(Path(sys.executable).parent / "verl-tlt"), *words], check=True)
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("once", "twice"))
    assert fingerprint(first) == fingerprint(second)
    theirs = load_file(drafter / "model.safetensors")
    assert all(torch.equal(first[name].float(), theirs[name].float()) for name in theirs)
    assert np.isfinite(sum(float(value.float().sum()) for value in first.values()))
