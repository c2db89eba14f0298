"""`verl-tlt calibrate` and `doctor --gpu --cpu` on a real engine, started as a recipe would have it."""

import json

import pytest
from typer.testing import CliRunner

from verl_tlt.cli import app
from verl_tlt.speculation.types import OFF

pytestmark = pytest.mark.engine


@pytest.fixture
def overrides(models, tmp_path):
    """A recipe's overrides for the tiny policy."""
    (tmp_path / "data.parquet").touch()
    rollout = "actor_rollout_ref.rollout"
    return [
        f"data.train_files={tmp_path / 'data.parquet'}", f"data.val_files={tmp_path / 'data.parquet'}",
        f"actor_rollout_ref.model.path={models['target']}", f"{rollout}.name=vllm", f"{rollout}.dtype=float32",
        f"{rollout}.enforce_eager=True", f"{rollout}.max_model_len=256", f"{rollout}.max_num_seqs=4",
        f"{rollout}.max_num_batched_tokens=512", f"{rollout}.tensor_model_parallel_size=1",
        f"++{rollout}.enable_sleep_mode=False", "+tlt=default", "tlt.speculation.max_draft_length=2",
        f"tlt.drafter.path={models['good']}",
    ]  # fmt: skip


def test_calibrate_measures_and_keeps_a_table(overrides, tmp_path):
    done = CliRunner().invoke(
        app, ["calibrate", *overrides, "--cpu", "--seconds", "60", "--out", str(tmp_path / "costs")]
    )
    assert done.exit_code == 0, done.output
    (kept,) = (tmp_path / "costs").iterdir()
    points = json.loads(kept.read_text())["points"]
    assert {p["draft_length"] for p in points} == {OFF, 0, 1, 2}
    assert {p["batch"] for p in points} == {1, 2, 4} and all(p["seconds"] > 0 for p in points)
    assert "no drafter" in done.output and "batch 4" in done.output


def test_the_doctor_measures_on_this_machine(overrides):
    done = CliRunner().invoke(app, ["doctor", *overrides, "--gpu", "--cpu"], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    for text in ("the fingerprint is the published one", "times stock's step", "K=2 against off", "no graphs"):
        assert text in done.output
