"""`verl-tlt doctor --gpu` on a real engine, started as a recipe would have it."""

import json
import os
import re
import shutil

import pytest
from cli import cli
from one_row import one_row
from tiny_recipe import tiny_recipe
from word_tokenizer import save_tokenizer

from verl_tlt.commands.doctor import engine_check
from verl_tlt.commands.doctor.engine_check import run_job
from verl_tlt.speculation.types import OFF

pytestmark = pytest.mark.engine


ROLLOUT = "actor_rollout_ref.rollout"


def overrides(models, folder):
    """A recipe's overrides for the tiny policy, which says that it has a million positions."""
    data, policy = one_row(folder / "data.parquet"), shutil.copytree(models["target"], folder / "policy")
    config = json.loads((policy / "config.json").read_text())
    (policy / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1 << 20}))
    save_tokenizer(policy, config["vocab_size"])
    return [
        *tiny_recipe(policy, data),
        "trainer.device=cpu", "actor_rollout_ref.actor.use_dynamic_bsz=True",
        "data.max_prompt_length=64", "data.max_response_length=192",
        # What the user tells vLLM is what an engine decodes at once.
        f"{ROLLOUT}.max_num_seqs=64", f"++{ROLLOUT}.engine_kwargs.vllm.max_num_seqs=2",
        f"{ROLLOUT}.max_num_batched_tokens=512",
        "+trainer.plugin=tlt", "tlt.speculation.max_draft_length=2", f"tlt.drafter.path={models['good']}",
    ]  # fmt: skip


def test_the_doctor_measures_on_this_machine(models, tmp_path, monkeypatch):
    (home := tmp_path / "home").mkdir()
    (recipe := tmp_path / "recipe").mkdir()
    report, answers = home / "r.json", []
    monkeypatch.setattr(engine_check, "run_job", lambda job: answers.append(run_job(job)) or answers[-1])
    # What vLLM knows of a model's class it keeps at home, and asks a process of its own where it does not.
    monkeypatch.setenv("VLLM_CACHE_ROOT", os.environ.get("VLLM_CACHE_ROOT", os.path.expanduser("~/.cache/vllm")))
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # and `uni`: an engine's worker is not one more process
    code, said = cli("doctor", *overrides(models, recipe), "--gpu", "--all", "--out", report)
    assert code == 0, said
    for text in ("it was loaded again after sleep", "times stock's step", "K=2 against off", f"Wrote {report}."):
        assert text in said
    (answer,) = answers
    (beside,) = (found.sentence for found in answer.findings if found.what == "drafter off against stock")
    assert re.search(r"batch 1: [\d.]+ against [\d.]+ ms", beside)
    assert re.findall(r"batch (\d+)", beside) == ["1"], "of 1 and 4, what the engine decodes at once"
    assert list(report.parent.iterdir()) == [report], "nothing is stored beside the report"
    points = json.loads(report.read_text())["points"]
    assert {point["draft_length"] for point in points} == {OFF, 0, 1, 2}
    assert {point["batch"] for point in points} == {1, 2} and all(point["seconds"] > 0 for point in points)
