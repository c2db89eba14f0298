"""`verl-tlt evaluate` without its engine: which prompts it takes, and when two numbers agree."""

import io
import json
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from verl_tlt.commands.options import EvaluateOptions, WarmupOptions
from verl_tlt.commands.warmup.command import _save
from verl_tlt.commands.warmup.evaluate import Verdict, choose_prompts, evaluate, report
from verl_tlt.commands.warmup.prompts import PromptForm, load_tokenizer, read_prompts
from verl_tlt.drafter import DrafterError, build_drafter, fingerprint, load_drafter, save_drafter, serving_tensors
from verl_tlt.drafter.evaluate import DraftCounts


@pytest.fixture
def drafter(policy_dir, tmp_path):
    model = build_drafter(policy_dir, seed=3)
    return save_drafter(model, tmp_path / "drafter", {}, policy=policy_dir)


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


def test_of_its_own_prompts_only_held_out_ones_judge_it(policy_dir, prompts_file, tmp_path):
    known = read_prompts([prompts_file], load_tokenizer(policy_dir), 100)
    facts = {"prompts": str(prompts_file), "prompts_sha256": known.digest}
    own = save_drafter(build_drafter(policy_dir), tmp_path / "own", facts)
    held = [known.tokens[i] for i in sorted(known.held_out)]
    options = EvaluateOptions(drafter=own, model=policy_dir, response_length=24)
    assert choose_prompts(options) == held
    other = tmp_path / "other.txt"
    other.write_text(prompts_file.read_text() + "\nw1 w2")
    assert len(choose_prompts(replace(options, prompts=[other]))) == 41
    assert len(choose_prompts(replace(options, prompts=[other], limit=7))) == 7


def test_held_out_are_prompts_in_the_form_of_the_warm_up(policy_dir, tmp_path, prompt_lines):
    rows = [json.dumps({"question": [{"role": "user", "content": line}]}) for line in prompt_lines]
    (tmp_path / "p.jsonl").write_text("\n".join(rows))
    template = "{{ messages[0].content }} {{ 'w46' if thinking }}"
    form = PromptForm("question", {"chat_template": template, "thinking": True})
    known = read_prompts([tmp_path / "p.jsonl"], load_tokenizer(policy_dir), 100, form=form)
    facts = {"prompts": [str(tmp_path / "p.jsonl")], "prompts_sha256": known.digest, "prompt_form": asdict(form)}
    own = save_drafter(build_drafter(policy_dir), tmp_path / "own", facts)
    options = EvaluateOptions(drafter=own, model=policy_dir, response_length=24)
    assert choose_prompts(options) == [known.tokens[i] for i in sorted(known.held_out)]
    assert {prompt[-1] for prompt in choose_prompts(options)} == {46}
    (own / "provenance.json").write_text(json.dumps(facts | {"prompts_limit": -1}))
    assert choose_prompts(options) == [known.tokens[i] for i in sorted(known.held_out)]
    (own / "provenance.json").write_text(json.dumps(facts | {"prompt_form": {"key": ["question"]}}))
    with pytest.raises(DrafterError, match=r"own: provenance\.json has a `prompt_form` of another kind"):
        choose_prompts(options)


def test_without_prompts_it_asks_for_them(drafter, policy_dir):
    with pytest.raises(DrafterError, match=r"does not say which prompts it was warmed up with; give --prompts\."):
        choose_prompts(EvaluateOptions(drafter=drafter, model=policy_dir))


def test_the_engine_is_given_what_the_checks_let_through(drafter, policy_dir, prompts_file, monkeypatch):
    config = json.loads((drafter / "config.json").read_text())
    (drafter / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoConfig": "elsewhere.Config"}}))

    def engine(job, out, tell):
        given = load_drafter(job.drafter, policy_dir)
        assert fingerprint(serving_tensors(given)) == fingerprint(serving_tensors(load_drafter(drafter, policy_dir)))
        assert "elsewhere" not in Path(job.drafter, "config.json").read_text()
        raise InterruptedError

    monkeypatch.setattr("verl_tlt.commands.warmup.engine.generate", engine)
    options = EvaluateOptions(drafter=drafter, model=policy_dir, prompts=[prompts_file], response_length=24)
    with pytest.raises(InterruptedError):
        evaluate(options, Console())


def test_a_drafter_that_learned_nothing_is_not_written(policy_dir, prompts_file, tmp_path):
    options = WarmupOptions(model=policy_dir, prompts=[prompts_file], out=tmp_path / "out")
    untrained = SimpleNamespace(progress=SimpleNamespace(tokens=0))
    with pytest.raises(DrafterError, match=r"out was not written: .* not learn"):
        _save(options, None, [], untrained)
    assert not options.out.exists()
