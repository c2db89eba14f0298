"""`verl-tlt evaluate` without its engine: which prompts it takes, the prediction, and when two numbers agree."""

import io

import pytest
from rich.console import Console

from verl_tlt.drafter import (
    DrafterError,
    PolicyStates,
    Text,
    VerifierWeights,
    acceptance,
    build_drafter,
    load_policy,
    refresh_verifier_weights,
    save_drafter,
)
from verl_tlt.warmup.engine import Response, SamplingSettings, Served
from verl_tlt.warmup.evaluate import Verdict, _prompts, report, score
from verl_tlt.warmup.prompts import load_tokenizer, read_prompts


@pytest.fixture
def drafter(policy_dir, tmp_path):
    model = build_drafter(policy_dir, seed=3)
    return save_drafter(model, tmp_path / "drafter", {}, policy=policy_dir)


def test_the_prediction_is_that_of_acceptance_on_the_same_text(drafter, policy_dir, prompt_lines, answers):
    prompts = [tuple(int(word[1:]) for word in line.split()) for line in prompt_lines[:6]]
    responses = [Response(i, 0, tuple(answers[i][: 8 + i]), True) for i in range(6)]
    served = Served(20, (5, 2, 1), 1.0)
    verdict = score(drafter, policy_dir, prompts, responses, served, SamplingSettings(temperature=0.7), "cpu", 3)
    model = build_drafter(policy_dir, seed=3)
    refresh_verifier_weights(model, VerifierWeights.from_policy_dir(policy_dir))
    states = PolicyStates(load_policy(policy_dir, "cpu"), model.target_layer_ids)
    sequences = states([Text((*p, *r.tokens), len(p)) for p, r in zip(prompts, responses, strict=True)])
    scores = acceptance(model, sequences, temperature=0.7, max_draft=3)
    drafts, accepted = sum(s.drafts for s in scores), sum(s.accepted for s in scores)
    assert verdict.simulated == pytest.approx(1 + accepted.sum() / drafts, rel=1e-4)
    assert verdict.simulated_accept[0] == pytest.approx(accepted[0] / drafts, rel=1e-4)
    assert (verdict.sequences, verdict.tokens) == (6, sum(8 + i for i in range(6)))


def verdict(simulated, drafts, accepted):
    return Verdict(simulated, (0.5, 0.4), Served(drafts, accepted, 1.0), 3, 100)


def test_agreement_is_five_percent_of_what_was_served():
    assert Served(10, (6, 3), 1.0).accept == [0.6, 0.5]
    assert Served(10, (6, 3), 1.0).accept_length == 1.9
    assert Served(0, (0, 0), 1.0).accept_length == 1.0
    assert verdict(1.99, 10, (6, 3)).agrees and verdict(1.81, 10, (6, 3)).agrees
    assert not verdict(2.01, 10, (6, 3)).agrees and not verdict(1.79, 10, (6, 3)).agrees
    shown = io.StringIO()
    report(verdict(2.5, 10, (6, 3)), Console(file=shown, width=120))
    assert "+31.6 %, more than 5 %" in shown.getvalue() and "1.900" in shown.getvalue()


def test_of_its_own_prompts_only_held_out_ones_judge_it(policy_dir, prompts_file, tmp_path):
    known = read_prompts(prompts_file, load_tokenizer(policy_dir), 100)
    facts = {"prompts": str(prompts_file), "prompts_sha256": known.digest}
    own = save_drafter(build_drafter(policy_dir), tmp_path / "own", facts)
    held = [known.tokens[i] for i in sorted(known.held_out)]
    assert _prompts(own, policy_dir, None, 24, 64) == held
    other = tmp_path / "other.txt"
    other.write_text(prompts_file.read_text() + "\nw1 w2")
    assert len(_prompts(own, policy_dir, other, 24, 64)) == 41
    assert len(_prompts(own, policy_dir, other, 24, 7)) == 7


def test_without_prompts_it_asks_for_them(drafter, policy_dir):
    with pytest.raises(DrafterError, match=r"does not say which prompts it was warmed up with; give --prompts\."):
        _prompts(drafter, policy_dir, None, 24, 64)
