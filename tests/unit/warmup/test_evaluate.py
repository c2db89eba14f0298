"""`verl-tlt evaluate` without its engine: which prompts it takes, and when two numbers agree."""

import io
import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from drafter_bits import fingerprint
from rich.console import Console

from verl_tlt.commands.options import EvaluateOptions
from verl_tlt.commands.warmup.evaluate import Verdict, choose_prompts, evaluate, report
from verl_tlt.commands.warmup.prompts import PromptForm, load_tokenizer, read_prompts
from verl_tlt.drafter import build_drafter, load_drafter, save_drafter, serving_tensors
from verl_tlt.drafter.evaluate import DraftCounts
from verl_tlt.drafter.policy import DrafterError


def counts(drafts, *accepted):
    return DraftCounts(drafts, np.array(accepted))


def verdict(length):
    """Served 1.9 tokens a draft, `length` of them predicted."""
    return Verdict(counts(1.0, length - 1.0, 0.0), counts(10, 6, 3), 3, 100)


def test_agreement_is_five_percent_of_what_was_served():
    assert counts(10, 6, 3).accept.tolist() == [0.6, 0.5] and counts(10, 6, 3).accept_length == 1.9
    assert counts(0, 0, 0).accept_length == 1.0 and counts(0, 0, 0).accept.tolist() == [0.0, 0.0]
    assert verdict(1.99).agrees and verdict(1.81).agrees
    assert not verdict(2.01).agrees and not verdict(1.79).agrees
    shown = io.StringIO()
    report(verdict(2.5), Console(file=shown, width=120))
    assert "+31.6 %, more than 5 %" in shown.getvalue() and "1.900" in shown.getvalue()


def options_of(policy_dir, tmp_path, facts, **more):
    """Of an evaluation of a new drafter with these facts."""
    saved = save_drafter(build_drafter(policy_dir, seed=3), tmp_path / "own", facts, policy=policy_dir)
    return EvaluateOptions(drafter=saved, model=policy_dir, response_length=24, **more)


def test_of_its_own_prompts_only_held_out_ones_judge_it(policy_dir, prompts_file, tmp_path):
    known = read_prompts([prompts_file], load_tokenizer(policy_dir), 100)
    options = options_of(policy_dir, tmp_path, {"prompts": str(prompts_file), "prompts_sha256": known.digest})
    assert choose_prompts(options) == [known.tokens[i] for i in sorted(known.held_out)]
    other = tmp_path / "other.txt"
    other.write_text(prompts_file.read_text() + "\nw1 w2")
    assert len(choose_prompts(replace(options, prompts=[other]))) == 41
    assert len(choose_prompts(replace(options, prompts=[other], limit=7))) == 7


def test_held_out_are_prompts_in_the_form_of_the_warm_up(policy_dir, tmp_path, prompt_lines):
    file = tmp_path / "p.jsonl"
    rows = [json.dumps({"question": [{"role": "user", "content": line}]}) for line in prompt_lines]
    file.write_text("\n".join(rows))
    template = "{{ messages[0].content }} {{ 'w46' if thinking }}"
    form = PromptForm("question", {"chat_template": template, "thinking": True})
    known = read_prompts([file], load_tokenizer(policy_dir), 100, form=form)
    facts = {"prompts": [str(file)], "prompts_sha256": known.digest, "prompt_form": asdict(form)}
    options = options_of(policy_dir, tmp_path, facts)
    for more in ({}, {"prompts_limit": -1}):
        (options.drafter / "provenance.json").write_text(json.dumps(facts | more))
        assert choose_prompts(options) == [known.tokens[i] for i in sorted(known.held_out)]
    assert {prompt[-1] for prompt in choose_prompts(options)} == {46}
    (options.drafter / "provenance.json").write_text(json.dumps(facts | {"prompt_form": {"key": ["question"]}}))
    with pytest.raises(DrafterError, match=r"own: provenance\.json has a `prompt_form` of another kind"):
        choose_prompts(options)


def test_a_policy_that_is_not_there_is_named_before_the_prompts(policy_dir, tmp_path):
    options = replace(options_of(policy_dir, tmp_path, {}), model=tmp_path / "nowhere")
    with pytest.raises(DrafterError, match=r"nowhere/config\.json does not exist"):
        evaluate(options, Console())


def test_without_prompts_it_asks_for_them(policy_dir, tmp_path):
    with pytest.raises(DrafterError, match=r"does not say which prompts it was warmed up with; give --prompts\."):
        choose_prompts(options_of(policy_dir, tmp_path, {}))


def test_the_engine_is_given_what_the_checks_let_through(policy_dir, prompts_file, tmp_path, monkeypatch):
    options = options_of(policy_dir, tmp_path, {}, prompts=[prompts_file])
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
