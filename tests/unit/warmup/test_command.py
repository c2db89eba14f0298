"""`verl-tlt warmup` without its engine: training, resuming after a kill, what is saved, and what is refused."""

import dataclasses
import re
import resource
import shutil

import numpy as np
import pytest
import torch
from cli import cli
from huggingface_hub import ModelCard
from mtp_policy import make_mtp_policy
from rich.console import Console

from verl_tlt.commands.lock import take_lock
from verl_tlt.commands.serve import serve_command
from verl_tlt.commands.warmup import command, train
from verl_tlt.commands.warmup.card import model_card
from verl_tlt.commands.warmup.command import warmup
from verl_tlt.commands.warmup.evaluate import linked
from verl_tlt.drafter.check import check_drafter
from verl_tlt.drafter.checkpoint import load_drafter, load_own_head, provenance, write_state
from verl_tlt.drafter.evaluate import SequenceScore
from verl_tlt.drafter.mtp_tensors import mtp_tensors
from verl_tlt.errors import TLTError

QUIET = Console(quiet=True)


def begin(options):
    return command.begin(options, command.read_prompts(options, options.work / "images", options.limit))


def run(*words):
    """(exit code, output on one line) of the program."""
    code, said = cli(*words)
    return code, re.sub(r"\s+", " ", said)


def test_from_prompts_to_a_drafter(warm, tmp_path):
    options, said = warm(epochs=3)
    assert "40 prompts x 1 samples = 40 responses of up to 24 tokens" in said
    assert "generate: 40 of 40 responses" in said
    check_drafter(options.out, options.model)
    facts = provenance(options.out)
    assert facts["tau_sim"] > 1.05 and len(facts["acceptance"]) == 3
    assert facts["prompts_used"] == 40 and facts["response_tokens"] == 40 * 24
    assert facts["versions"]["verl_tlt"] and facts["tokenizer"]["tokens"]
    card = (options.out / "README.md").read_text()
    assert "vllm serve policy --speculative-config" in card and "| accept length | " in card and "np." not in card
    assert str(tmp_path) not in card and str(options.model.parent) not in card, "no path of this machine"
    assert f"verl-tlt evaluate {options.out}, with the same recipe, model and prompts" in said
    assert f"+trainer.plugin=tlt tlt.drafter.path={options.out}" in said
    assert f'"model": "{options.out}"' in said, "the command that serves it"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["drafter", "prompts.jsonl"]


def test_the_card_names_a_base_model_that_is_on_the_hub(tmp_path):
    for policy, base in ((tmp_path, None), ("Qwen/Qwen3-4B", "Qwen/Qwen3-4B")):
        text = model_card("eagle3", "my-drafter", policy, {"prompts": ["train.parquet"]})
        data = ModelCard(text).data
        assert data.base_model == base and data.library_name == "speculators" and "eagle3" in data.tags
        assert str(tmp_path) not in text


def test_killed_and_run_again_it_ends_where_it_would_have(warm, settings, answer, monkeypatch):
    straight, _ = warm(epochs=2)

    class Killed(BaseException):
        pass

    def check_and_die(run, check=train.TrainingRun._check_if_due):
        check(run)
        if run.trainer.steps == 5:
            run.save()
            raise Killed

    other = answer(settings(epochs=2, out=straight.out.with_name("other")))
    with monkeypatch.context() as patch:
        patch.setattr(train.TrainingRun, "_check_if_due", check_and_die)
        with pytest.raises(Killed):
            warmup(other, QUIET)
    assert not other.out.exists() and (other.work / command.STATE).is_file()
    warmup(other, QUIET)
    found, expected = (load_drafter(options.out, options.model) for options in (other, straight))
    for (name, a), (_, b) in zip(expected.named_parameters(), found.named_parameters(), strict=True):
        assert torch.equal(a, b) or not a.requires_grad, name
    assert provenance(other.out)["steps_in_all"] == provenance(straight.out)["steps_in_all"]


@pytest.mark.parametrize("state", [{}, {"trainer": {"optimizer": {"state": []}}}])
def test_a_state_of_another_kind_is_named(settings, answer, state):
    wanted = answer(settings())
    with (wanted.work / "responses" / "responses.jsonl").open("a") as file:
        file.write("\n[[")  # cut short: is no response, and counts as none
    begin(wanted)
    write_state(state, wanted.work / command.STATE)
    with pytest.raises(command.DrafterError, match=rf"{command.STATE} is no state of this training"):
        warmup(wanted, QUIET)


def test_stopped_while_it_notes_its_settings_it_goes_on(settings):
    """By a full disk, which leaves of a file what a kill might."""
    wanted = settings()
    prompts = command.read_prompts(wanted, wanted.work / "images", wanted.limit)
    command.begin(wanted, prompts)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        with pytest.raises(OSError, match=r"File too large: '.*run\.json'"):
            command.begin(wanted, prompts)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert begin(wanted) is None


def test_a_second_warm_up_into_the_same_folder_is_refused_at_the_start(settings, answer):
    wanted = answer(settings())
    with take_lock(wanted.work / "lock", "busy"):
        with pytest.raises(TLTError, match=r"Another warm-up is writing to .*drafter\.warmup; give another --out\."):
            warmup(wanted, QUIET)
        assert not (wanted.work / "run.json").exists()
    warmup(wanted, QUIET)
    assert wanted.out.is_dir() and not wanted.work.exists()


def test_what_is_left_of_the_work_is_no_failure(settings, answer, monkeypatch):
    """NFS removes no folder in which a file is open, such as the lock."""
    wanted = answer(settings())

    def remove(folder, *rest, real=shutil.rmtree, **more):
        if folder != wanted.work:
            return real(folder, *rest, **more)
        take_lock(folder / "lock", "the lock is open").close()
        if not more.get("ignore_errors"):
            raise OSError("Directory not empty")

    monkeypatch.setattr(command.shutil, "rmtree", remove)
    assert warmup(wanted, QUIET) == wanted.out


def test_other_settings_do_not_go_on_from_it(settings, answer, warm):
    wanted = answer(settings())
    begin(wanted)
    for other in (settings(seed=1), settings(samples=2), settings(response_length=23)):
        with pytest.raises(
            command.DrafterError, match=r"drafter\.warmup belongs to a run with \w+=\d+, not \d+; remove"
        ):
            warmup(other, QUIET)
    warm(epochs=0.5)  # a longer or shorter budget is no other run


def test_the_same_prompts_from_another_command_go_on_with_the_responses(settings, answer):
    """As with the job's number in its arguments, or less GPU memory for the engine."""
    first = answer(settings())
    begin(first)
    renamed = [*(first.overrides or ()), "trainer.experiment_name=run-2"]
    assert begin(dataclasses.replace(first, overrides=renamed)) is None
    longer = [*renamed, "actor_rollout_ref.rollout.ignore_eos=True"]
    with pytest.raises(command.DrafterError, match=r"belongs to a run with ignore_eos=False, not True; remove"):
        begin(dataclasses.replace(first, overrides=longer))


@pytest.mark.parametrize("change", [{"objective": "hass"}, {"draft_vocab": 12}], ids=str)
def test_with_another_option_of_training_the_responses_are_kept(settings, answer, warm, change):
    """No engine can run in this test: a response that was given up would end it."""
    first = answer(settings())
    begin(first)
    (first.work / command.STATE).write_bytes(b"of the other training")
    (name,) = change
    second, said = warm(**change)
    assert f"was begun with {name}={getattr(first, name)!r}, not {change[name]!r}" in said
    assert provenance(second.out)["responses"] == 40


@pytest.mark.parametrize("budget", [{"epochs": 0.4}, {"max_steps": 4}, {"max_minutes": 1e-9}], ids=str)
def test_every_budget_ends_it(warm, budget):
    options, _ = warm(**{"epochs": 3} | budget)
    assert 0 < provenance(options.out)["steps_in_all"] <= 5


def test_the_best_weights_are_saved_not_the_last(warm, monkeypatch):
    accepted = iter([0.1, 0.4, *[0.2] * 20])
    scored = lambda scores, longest: SequenceScore(1.0, np.array([next(accepted), 0.0, 0.0]), 1)  # noqa: E731
    monkeypatch.setattr(train, "combined_score", scored)
    options, _ = warm()
    facts = provenance(options.out)
    assert facts["tau_sim"] == 1.4 and 0 < facts["steps"] < facts["steps_in_all"]
    assert max(check["tau"] for check in facts["checks"]) == 1.4 and facts["checks"][0]["step"] == 0


def test_a_pruned_vocabulary_holds_the_most_frequent_tokens(warm, answers):
    options, _ = warm(draft_vocab=12)
    model = load_drafter(options.out, options.model)
    counts = torch.bincount(torch.tensor(answers).flatten(), minlength=48)
    kept = model.t2d.nonzero()[:, 0]
    assert len(kept) == 12 and counts[kept].min() >= counts[~model.t2d].max()


@pytest.fixture(scope="module")
def mtp_dir(policy_dir, tmp_path_factory):
    """A Qwen3.5 with the tokenizer of the other policy."""
    path = tmp_path_factory.mktemp("mtp") / "policy"
    make_mtp_policy(path, "qwen3_5")  # transformers has no other tokenizer than Qwen2's for a MiMo
    for file in (*policy_dir.glob("tokenizer*"), policy_dir / "chat_template.jinja"):
        shutil.copy(file, path)
    return path


def test_from_the_policys_own_head_to_one_that_goes_back(mtp_dir, policy_dir, warm, tmp_path):
    options, _ = warm(model=mtp_dir, method="mtp", objective="hass", epochs=2)
    check_drafter(options.out, mtp_dir)
    facts = provenance(options.out)
    assert facts["started from"] == "its release" and facts["tau_sim"] > 1.05
    before = {file.name: file.read_bytes() for file in mtp_dir.iterdir()}
    policy = linked(mtp_dir, tmp_path / "policy")
    code, said = run("write-back", options.out, policy)
    assert code == 0 and "model-mtp.safetensors" in said, said
    assert {at.file.parent for at in mtp_tensors(policy).values()} == {policy}
    load_own_head(policy, policy)
    assert {file.name: file.read_bytes() for file in mtp_dir.iterdir()} == before, "through a link"
    code, said = run("write-back", mtp_dir, policy_dir)
    assert code == 1 and "names Qwen3ForCausalLM, and method=mtp drafts for" in said


def test_a_policy_on_the_hub_is_fetched_before_its_head_is_written_back():
    command = serve_command("mtp", "out", "Org/policy")
    assert command.startswith(
        "hf download Org/policy --local-dir policy && verl-tlt write-back out policy && vllm serve"
    )
    assert "hf download" not in serve_command("mtp", "out", "policy")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--aux-layers", "1,2,9"], "--aux-layers=[1, 2, 9] is outside 0..3, the layers of the policy."),
        (["--aux-layers", "low"], "--aux-layers must be numbers like 2,18,33, not 'low'."),
        (["--objective", "medusa"], "--objective must be eagle, hass, eagle3, not 'medusa'."),
        (["--draft-vocab", "99"], "--draft-vocab must be 2..48, the policy's vocabulary, not 99."),
        (["--response-length", "400"], "--response-length 400 leaves no room for a prompt"),
        (["--method", "medusa"], "--method must be eagle3 or mtp, not 'medusa'."),
        (["--method", "mtp", "--draft-vocab", "12"], "--method mtp brings its own shape: leave out --aux-layers"),
        (["--method", "mtp"], "names Qwen3ForCausalLM, and method=mtp drafts for MiMoForCausalLM"),
        (["--drafter", "nowhere"], "nowhere is not a directory"),
        (["--model", "nowhere"], "nowhere/config.json does not exist."),
        (["--prompts", "nowhere.jsonl"], "--prompts nowhere.jsonl does not exist."),
        (["--out", "."], "--out . exists; give another name, or remove it."),
    ],
)
def test_a_wrong_option_is_one_sentence_and_leaves_nothing(policy_dir, prompts_file, tmp_path, options, sentence):
    given = {"--model": str(policy_dir), "--prompts": str(prompts_file), "--out": str(tmp_path / "drafter")}
    given["--response-length"] = "24"
    given.update(zip(options[::2], options[1::2], strict=True))
    code, said = run("warmup", *(word for pair in given.items() for word in pair))
    assert code == 1 and sentence in said, said
    assert [p.name for p in tmp_path.iterdir()] == ["prompts.jsonl"]


def test_answers_too_short_to_learn_from(settings, answer):
    wanted = answer(settings(), [[3]] * 40)
    with pytest.raises(command.DrafterError, match=r"1\.0 tokens on average, too few to learn from"):
        warmup(wanted, QUIET)
    assert not wanted.out.exists()


def test_a_drafter_that_learned_nothing_is_not_written(warm, settings, monkeypatch):
    monkeypatch.setattr(train.TrainingRun, "__call__", lambda run: run.progress.checks.append({"tau": 1.0}))
    with pytest.raises(command.DrafterError, match=r"drafter was not written: .* not learn"):
        warm()
    assert not settings().out.exists()
