"""`verl-tlt doctor --gpu` on a real engine, started as a recipe would have it."""

import json
import os
import re
import shutil

import pytest
from cli import cli
from one_row import one_row
from word_tokenizer import save_tokenizer

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
        "trainer.device=cpu", "actor_rollout_ref.actor.use_dynamic_bsz=True", f"{rollout}.enforce_eager=True",
        "data.max_prompt_length=64", "data.max_response_length=192",
        # What the user tells vLLM is what an engine decodes at once.
        f"{rollout}.max_num_seqs=64", f"++{rollout}.engine_kwargs.vllm.max_num_seqs=2",
        f"{rollout}.max_num_batched_tokens=512", f"{rollout}.tensor_model_parallel_size=1",
        f"++{rollout}.engine_kwargs.vllm.distributed_executor_backend=uni",
        "+trainer.plugin=tlt", "tlt.speculation.max_draft_length=2", f"tlt.drafter.path={models['good']}",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def doctor(overrides, tmp_path_factory):
    """What the doctor said, what its child process had answered, and its report."""
    home, answers = tmp_path_factory.mktemp("home"), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_check, "run_job", lambda job: answers.append(run_job(job)) or answers[-1])
        # What vLLM knows of a model's class it keeps at home, and asks a process of its own where it does not.
        patch.setenv("VLLM_CACHE_ROOT", os.environ.get("VLLM_CACHE_ROOT", os.path.expanduser("~/.cache/vllm")))
        patch.setenv("HOME", str(home))
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # and `uni`: an engine's worker is not one more process
        done = cli("doctor", *overrides, "--gpu", "--all", "--out", home / "r.json")
    return done, answers, home / "r.json"


def test_the_doctor_measures_on_this_machine(doctor):
    (code, said), answers, report = doctor
    assert code == 0, said
    for text in ("it was loaded again after sleep", "times stock's step", "K=2 against off", f"Wrote {report}."):
        assert text in said
    (answer,) = answers
    (beside,) = (found.sentence for found in answer.findings if found.what == "drafter off against stock")
    assert re.search(r"batch 1: [\d.]+ against [\d.]+ and [\d.]+ ms", beside), "stock is read twice"
    assert re.findall(r"batch (\d+)", beside) == ["1"], "of 1 and 4, what the engine decodes at once"
    assert list(report.parent.iterdir()) == [report], "nothing is stored beside the report"
    points = json.loads(report.read_text())["points"]
    assert {point["draft_length"] for point in points} == {OFF, 0, 1, 2}
    assert {point["batch"] for point in points} == {1, 2} and all(point["seconds"] > 0 for point in points)
