"""`--recipe`: what a run's script says is taken from it, and what is given by name wins."""

import re

import pytest
from typer.testing import CliRunner

from verl_tlt.commands.cli import app
from verl_tlt.commands.doctor.standalone_engine import run_environment, set_up
from verl_tlt.commands.options import EvaluateOptions
from verl_tlt.commands.warmup import command
from verl_tlt.commands.warmup.engine import generation_job
from verl_tlt.commands.warmup.prompts import read_run

pytest.importorskip("verl")


@pytest.fixture
def script(policy_dir, tmp_path):
    """A recipe whose script works in another directory, and names data beside it."""
    (tmp_path / "data").mkdir()
    for name in ("a", "b"):
        (tmp_path / "data" / f"{name}.jsonl").touch()
    file = tmp_path / "recipe.sh"
    file.write_text(f"""#!/bin/bash
export VLLM_ATTENTION_BACKEND=TORCH_SDPA
cd {tmp_path}
python3 -m verl.trainer.main_ppo data.train_files='[data/a.jsonl,data/b.jsonl]' data.max_prompt_length=40 \\
  data.max_response_length=100 actor_rollout_ref.model.path={policy_dir} actor_rollout_ref.rollout.name=vllm \\
  actor_rollout_ref.rollout.temperature=0.6 actor_rollout_ref.rollout.top_k=-1 actor_rollout_ref.rollout.top_p=0.9 \\
  actor_rollout_ref.rollout.tensor_model_parallel_size=2 actor_rollout_ref.rollout.gpu_memory_utilization=0.31 \\
  actor_rollout_ref.model.trust_remote_code=True +ray_kwargs.ray_init.runtime_env.env_vars.VLLM_USE_V1=1 "$@"
""")
    return file


def options_of(monkeypatch, *words):
    """What `verl-tlt warmup` is asked with these words."""
    asked = []
    monkeypatch.setattr(command, "warmup", lambda options, console: asked.append(options))
    result = CliRunner().invoke(app, ["warmup", "--out", "out", *map(str, words)], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return asked[0]


def test_a_recipe_says_it_all(script, policy_dir, tmp_path, monkeypatch):
    options = options_of(monkeypatch, "--recipe", script)
    assert options.model == policy_dir and [p.name for p in options.prompts] == ["a.jsonl", "b.jsonl"]
    assert all(prompts.parent == tmp_path / "data" for prompts in options.prompts)
    assert (options.temperature, options.top_p, options.top_k, options.response_length) == (0.6, 0.9, 0, 100)
    job = generation_job(options, [(1, 2, 3)])
    setup = set_up(job.recipe, job.changes)
    rollout = setup.rollout
    assert rollout.max_model_len == 103 and rollout.gpu_memory_utilization == 0.31 and rollout.dtype == "bfloat16"
    assert setup.model.trust_remote_code and rollout.tensor_model_parallel_size == 2
    assert run_environment(job.recipe) == {"VLLM_ATTENTION_BACKEND": "TORCH_SDPA", "VLLM_USE_V1": "1"}


def test_a_script_that_cannot_be_read_is_run_where_that_is_asked_for(script, policy_dir, monkeypatch):
    text = script.read_text().replace("cd ", "for T in 6; do :; done\ncd ")
    script.write_text(text.replace("temperature=0.6", "temperature=0.$T"))
    options = options_of(monkeypatch, "--recipe", script, "--run-script")
    assert options.model == policy_dir and options.temperature == 0.6


def test_a_policy_beside_the_user_is_found_from_the_scripts_directory(script, policy_dir, monkeypatch):
    monkeypatch.chdir(policy_dir.parent)
    options = options_of(monkeypatch, "--recipe", script, "--model", policy_dir.name)
    job = generation_job(options, [(1, 2, 3)])
    assert set_up(job.recipe, job.changes).model.path == str(policy_dir)


def test_what_is_given_by_name_wins_even_if_it_is_the_default(script, prompts_file, monkeypatch):
    words = ("--prompts", prompts_file, "--temperature", 1.0, "--response-length", 50)
    options = options_of(monkeypatch, "--recipe", script, "--recipe", "actor_rollout_ref.rollout.top_p=0.8", *words)
    assert options.prompts == [prompts_file] and (options.temperature, options.top_p) == (1.0, 0.8)
    assert options.response_length == 50
    assert read_run(options.recipe).longest_prompt == 40


def test_evaluate_takes_the_same(script, policy_dir, tmp_path):
    options = EvaluateOptions(**EvaluateOptions.completed({"recipe": [str(script)], "drafter": tmp_path}))
    assert options.model == policy_dir and options.temperature == 0.6


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ((), "--model is missing; a --recipe says model and prompts too."),
        (("--model", "m"), "--prompts is missing; a --recipe says model and prompts too."),
        (("--recipe", "nowhere.sh"), "nowhere.sh does not exist."),
        (("--recipe", "data.train_files=hdfs://far/x.parquet"), "is on another file system: give --prompts."),
        (("--recipe", "actor_rollout_ref.rollout.temperature=hot"), "temperature must be a number from 0 to 2"),
        (("--recipe", "actor_rollout_ref.rollout.temperature=-1"), "rollout.temperature must be a number from 0 to"),
        (("--recipe", "actor_rollout_ref.rollout.top_p=1.5"), "top_p must be a number from 1e-06 to 1, not 1.5."),
        (("--recipe", "actor_rollout_ref.rollout.top_k=inf"), "rollout.top_k must be a number from -1 to"),
    ],
)
def test_what_is_missing_or_wrong_is_one_sentence(words, sentence, tmp_path):
    result = CliRunner().invoke(app, ["warmup", "--out", str(tmp_path / "out"), *words], env={"COLUMNS": "200"})
    assert result.exit_code in (1, 2) and sentence in re.sub(r"[\s│]+", " ", result.output), result.output
