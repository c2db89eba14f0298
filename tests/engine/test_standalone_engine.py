"""`verl-tlt calibrate` and `doctor --gpu --cpu` on a real engine, started as a recipe would have it."""

import json
import os
import re
import shutil

import pytest
from one_row import one_row
from typer.testing import CliRunner
from word_tokenizer import save_tokenizer

from verl_tlt.commands.cli import app
from verl_tlt.commands.doctor import engine_check
from verl_tlt.commands.doctor.engine_check import run_job
from verl_tlt.speculation.types import OFF

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def overrides(models, tmp_path_factory):
    """A recipe's overrides for the tiny policy, which says that it has a million positions."""
    tmp_path = tmp_path_factory.mktemp("recipe")
    one_row(tmp_path / "data.parquet")
    policy = shutil.copytree(models["target"], tmp_path / "policy")
    config = json.loads((policy / "config.json").read_text())
    (policy / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1 << 20}))
    save_tokenizer(policy, config["vocab_size"])
    rollout = "actor_rollout_ref.rollout"
    return [
        f"data.train_files={tmp_path / 'data.parquet'}", f"data.val_files={tmp_path / 'data.parquet'}",
        f"actor_rollout_ref.model.path={policy}", f"{rollout}.name=vllm", f"{rollout}.dtype=float32",
        "trainer.device=cpu", f"{rollout}.enforce_eager=True",
        "data.max_prompt_length=64", "data.max_response_length=192",
        f"{rollout}.max_num_seqs=4", f"{rollout}.max_num_batched_tokens=512", f"{rollout}.tensor_model_parallel_size=1",
        f"++{rollout}.engine_kwargs.vllm.distributed_executor_backend=uni",
        "+trainer.plugin=tlt", "tlt.speculation.max_draft_length=2", f"tlt.drafter.path={models['good']}",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def doctor(overrides, tmp_path_factory):
    """What the doctor said, what its child process had answered, and the home in which it kept a table."""
    home, answers = tmp_path_factory.mktemp("home"), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_check, "run_job", lambda job: answers.append(run_job(job)) or answers[-1])
        # What vLLM knows of a model's class it keeps at home, and asks a process of its own where it does not.
        patch.setenv("VLLM_CACHE_ROOT", os.environ.get("VLLM_CACHE_ROOT", os.path.expanduser("~/.cache/vllm")))
        patch.setenv("HOME", str(home))
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # and `uni`: an engine's worker is not one more process
        done = CliRunner().invoke(app, ["doctor", *overrides, "--gpu", "--cpu"], env={"COLUMNS": "200"})
    return done, answers, home


def test_the_doctor_measures_on_this_machine(doctor):
    done, answers, home = doctor
    assert done.exit_code == 0, done.output
    said = (
        "it was loaded again after sleep",
        "weights and buffers are as before",
        "times stock's step",
        "K=2 against off",
        "kept for runs",
    )
    for text in said:
        assert text in done.output
    (answer,) = answers
    (beside,) = (found.sentence for found in answer.findings if found.what == "drafter off against stock")
    assert re.search(r"batch 1: [\d.]+ against [\d.]+ and [\d.]+ ms", beside), "stock is read twice"
    (kept,) = (home / ".cache/verl-tlt/costs").iterdir()
    assert {p["batch"] for p in json.loads(kept.read_text())["points"]} == {1, 2, 4}


def test_calibrate_keeps_the_same_measurements(doctor, overrides, tmp_path, monkeypatch):
    """Its job is the doctor's without sleep and memory, so the engines are not started for it again."""
    asked, (_, (answer,), _) = [], doctor
    monkeypatch.setattr(engine_check, "run_job", lambda job: asked.append(job) or answer)
    done = CliRunner().invoke(
        app, ["calibrate", *overrides, "--cpu", "--seconds", "60", "--out", str(tmp_path / "costs")]
    )
    assert done.exit_code == 0, done.output
    (kept,) = (tmp_path / "costs").iterdir()
    table = json.loads(kept.read_text())
    assert {p["draft_length"] for p in table["points"]} == {OFF, 0, 1, 2}
    assert {p["batch"] for p in table["points"]} == {1, 2, 4} and all(p["seconds"] > 0 for p in table["points"])
    for text in ("no drafter", "batch 4"):
        assert text in done.output
    (job,) = asked
    assert (job.costs_only, job.cpu, job.budget_s) == (True, True, 60.0)
