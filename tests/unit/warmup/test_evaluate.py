"""`verl-tlt evaluate` without its engine: which prompts it takes, and when two numbers agree."""

import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from drafter_bits import fingerprint
from rich.console import Console

from verl_tlt.commands.options import EvaluateOptions
from verl_tlt.commands.warmup.evaluate import Verdict, choose_prompts, evaluate, report
from verl_tlt.commands.warmup.prompts import read_prompts
from verl_tlt.drafter import build_drafter, load_drafter, save_drafter, serving_tensors
from verl_tlt.drafter.evaluate import DraftCounts
from verl_tlt.errors import DrafterError


def counts(drafts, *accepted):
    return DraftCounts(drafts, np.array(accepted))


def verdict(length, drafts=10**7):
    """Served 1.9 tokens a draft, `length` of them predicted."""
    return Verdict(counts(1.0, length - 1.0, 0.0), counts(drafts, 0.6 * drafts, 0.3 * drafts), 3, 100)


def test_agreement_is_five_percent_of_what_was_served_and_chance():
    assert counts(10, 6, 3).accept.tolist() == [0.6, 0.5] and counts(10, 6, 3).accept_length == 1.9
    assert counts(0, 0, 0).accept_length == 1.0 and counts(0, 0, 0).accept.tolist() == [0.0, 0.0]
    assert verdict(1.99).agrees and verdict(1.81).agrees
    assert not verdict(2.01).agrees and not verdict(1.79).agrees
    # Of N accepted tokens, E[N] = 0.9 and E[N^2] = 1.5.
    assert verdict(1.9, 100).chance == pytest.approx(2 * np.sqrt((1.5 - 0.81) / 100) / 1.9)
    assert verdict(2.1, 100).agrees and not verdict(2.1, 1000).agrees
    assert Verdict(counts(0, 0), counts(0, 0), 0, 0).chance == 0.0
    shown = io.StringIO()
    report(verdict(2.5), Console(file=shown, width=120))
    assert "+31.6 %, more than 5 %" in shown.getvalue() and "1.900" in shown.getvalue()


def options_of(policy_dir, prompts_file, tmp_path, facts, **more):
    """Of an evaluation of a new drafter with these facts."""
    saved = save_drafter(build_drafter(policy_dir, seed=3), tmp_path / "own", facts, policy=policy_dir)
    given = {"model": policy_dir, "prompts": [prompts_file], "response_length": 24, **more}
    return EvaluateOptions(drafter=saved, **given)


def test_of_its_own_prompts_only_held_out_ones_judge_it(policy_dir, prompts_file, prompt_lines, tmp_path):
    known = read_prompts(options_of(policy_dir, prompts_file, tmp_path, {}), tmp_path)
    facts = {"prompts_sha256": known.files_digest, "prompts_digest": known.digest}
    options = options_of(policy_dir, prompts_file, tmp_path, facts)
    assert choose_prompts(options, tmp_path) == [known.all[i] for i in sorted(known.held_out)]
    other = tmp_path / "other.jsonl"
    other.write_text(prompts_file.read_text().replace(prompt_lines[0], "w1 w2"))
    assert len(choose_prompts(replace(options, prompts=[other]), tmp_path)) == 40
    assert len(choose_prompts(replace(options, prompts=[other], limit=7), tmp_path)) == 7
    few = options_of(policy_dir, prompts_file, tmp_path, {**facts, "prompts_limit": 20})
    assert len(choose_prompts(replace(few, prompts=[other]), tmp_path)) == 40, "the limit of other files"
    facts["prompts_digest"] = "of the prompts with tools"
    template = "{{ strftime_now('w8') }} {% for m in messages %}{{ m.content }} {% endfor %}".replace("'", "\\'")
    dated = (f"actor_rollout_ref.model.custom_chat_template='{template}'",)
    with pytest.raises(DrafterError, match="on another day, and the chat template writes the day into each prompt"):
        choose_prompts(options_of(policy_dir, prompts_file, tmp_path, facts, overrides=dated), tmp_path)
    with pytest.raises(DrafterError, match=r"was warmed up with these files, in the form that another run gives them"):
        choose_prompts(options_of(policy_dir, prompts_file, tmp_path, facts), tmp_path)


def test_a_policy_that_is_not_there_is_named_before_the_prompts(policy_dir, prompts_file, tmp_path):
    options = options_of(policy_dir, prompts_file, tmp_path, {}, model=tmp_path / "nowhere")
    with pytest.raises(DrafterError, match=r"nowhere/config\.json does not exist"):
        evaluate(options, Console())


def test_the_engine_is_given_what_the_checks_let_through(policy_dir, prompts_file, tmp_path, monkeypatch):
    options = options_of(policy_dir, prompts_file, tmp_path, {})
    config = options.drafter / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"auto_map": {"AutoConfig": "elsewhere.Config"}}))

    def engine(job, out, tell):
        staged = job.drafting["model"]
        given, saved = (serving_tensors(load_drafter(path, policy_dir)) for path in (staged, options.drafter))
        assert fingerprint(given) == fingerprint(saved)
        assert "elsewhere" not in Path(staged, "config.json").read_text()
        raise InterruptedError

    monkeypatch.setattr("verl_tlt.commands.warmup.engine.generate", engine)
    with pytest.raises(InterruptedError):
        evaluate(options, Console())
