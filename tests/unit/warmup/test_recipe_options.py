"""Options of a warm-up: what the user's run says is taken from it, and what is given by name wins."""

import json
import os
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from cli import cli

from verl_tlt.checks.recipe import Recipe
from verl_tlt.commands.doctor.standalone_engine import run_environment, set_up
from verl_tlt.commands.options import RunOptions
from verl_tlt.commands.warmup import command
from verl_tlt.commands.warmup.engine import generation_job
from verl_tlt.commands.warmup.prompts import Prompt
from verl_tlt.commands.warmup.run import decided_options

pytest.importorskip("verl")
pytestmark = pytest.mark.usefixtures("variables")


@pytest.fixture
def overrides(policy_dir, tmp_path):
    """A run, and files of data."""
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").touch()
    rollout = (
        "name=vllm", "temperature=0.6", "top_k=-1", "top_p=0.9", "tensor_model_parallel_size=2",
        "gpu_memory_utilization=0.31",
    )  # fmt: skip
    return [
        f"data.train_files=[{tmp_path}/a.jsonl,{tmp_path}/b.jsonl]", "data.max_prompt_length=40",
        "data.max_response_length=100", f"actor_rollout_ref.model.path={policy_dir}",
        "actor_rollout_ref.model.trust_remote_code=True", "+ray_kwargs.ray_init.runtime_env.env_vars.VLLM_USE_V1=1",
        *(f"actor_rollout_ref.rollout.{setting}" for setting in rollout),
    ]  # fmt: skip


def options_of(monkeypatch, *words):
    """What `verl-tlt warmup` is asked with these words."""
    asked = []
    monkeypatch.setattr(command, "warmup", lambda options, console: asked.append(options))
    code, said = cli("warmup", "--out", "out", *words)
    assert code == 0, said
    return asked[0]


def test_a_run_says_it_all(overrides, policy_dir, monkeypatch):
    options = options_of(monkeypatch, *overrides)
    assert options.model == policy_dir and [p.name for p in options.prompts] == ["a.jsonl", "b.jsonl"]
    assert (options.temperature, options.top_p, options.top_k, options.response_length) == (0.6, 0.9, 0, 100)
    job = generation_job(options, [Prompt((1, 2, 3))])
    setup = set_up(job.recipe, job.changes)
    rollout = setup.rollout
    assert rollout.max_model_len == 103 and rollout.gpu_memory_utilization == 0.31 and rollout.dtype == "bfloat16"
    assert setup.model.trust_remote_code and rollout.tensor_model_parallel_size == 2
    assert run_environment(job.recipe) == {"VLLM_USE_V1": "1"}


def test_a_command_says_it_too_and_its_paths_begin_where_it_starts_verl(overrides, policy_dir, tmp_path, monkeypatch):
    data = "data.train_files=[data/a.jsonl]"
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.jsonl").touch()
    words = shlex.join([sys.executable, "-m", "verl.trainer.main_ppo", *overrides, data])
    command = f"export VLLM_ATTENTION_BACKEND=TORCH_SDPA; cd {tmp_path}; {words}"
    options = options_of(monkeypatch, "--", "bash", "-c", command)
    assert options.model == policy_dir and options.prompts == [tmp_path / "data" / "a.jsonl"]
    assert os.environ["VLLM_ATTENTION_BACKEND"] == "TORCH_SDPA"
    monkeypatch.chdir(policy_dir.parent)
    own = replace(options, model=Path(policy_dir.name))
    job = generation_job(own, [Prompt((1, 2, 3))])
    assert set_up(job.recipe, job.changes).model.path == str(policy_dir), "a policy beside the user"


def test_what_is_given_by_name_wins_even_if_it_is_the_default(overrides, policy_dir, tmp_path, monkeypatch):
    """A policy and data of the run that are on another file system are no matter then."""
    monkeypatch.setenv("HOME", str(tmp_path))
    more = (
        "data.train_files=hdfs://far/x.parquet",
        "actor_rollout_ref.model.path=hdfs://far/q",
        "actor_rollout_ref.rollout.top_p=0.8",
    )
    words = (f"--model={policy_dir}", "--prompts=~/mine.jsonl", "--temperature", 1.0, "--response-length", 50)
    options = options_of(monkeypatch, *overrides, *more, *words)
    assert (options.model, options.prompts) == (policy_dir, [tmp_path / "mine.jsonl"])
    assert (options.temperature, options.top_p, options.response_length) == (1.0, 0.8, 50)


def test_overrides_beside_a_model_leave_the_commands_own_defaults(policy_dir, monkeypatch):
    rollout = "actor_rollout_ref.rollout"
    more = [f"{rollout}={{temperature:0.7}}", f"{rollout}.gpu_memory_utilization=0.6", "data.max_prompt_length=30"]
    options = options_of(monkeypatch, f"--model={policy_dir}", "--prompts=p", "data.prompt_key=question", *more)
    assert (options.temperature, options.tensor_parallel, options.response_length) == (0.7, 1, 1024)
    job = generation_job(options, [Prompt((1, 2, 3))])
    found = set_up(job.recipe, job.changes).rollout
    assert (found.gpu_memory_utilization, found.tensor_model_parallel_size) == (0.6, 1)
    assert found.prompt_length == 30
    without = generation_job(replace(options, overrides=[]), [Prompt((1, 2, 3))])
    longest = json.loads((policy_dir / "config.json").read_text())["max_position_embeddings"]
    assert set_up(without.recipe, without.changes).rollout.prompt_length == longest


@pytest.mark.parametrize(
    ("override", "is_run"),
    [
        ("actor_rollout_ref.model.path=/m", True),
        ("++actor_rollout_ref={model:{path:/m}}", True),
        ("actor_rollout_ref.model={tokenizer_path:/t}", False),
        ("data.train_files=x", False),
    ],
)
def test_overrides_are_a_run_if_they_name_a_policy(override, is_run):
    assert RunOptions(overrides=[override]).has_policy() == is_run


def test_an_engine_gets_the_folder_of_a_policy_on_the_hub(policy_dir, cache, monkeypatch):
    """By its name vLLM 0.24 asks for all files of the repository, of which only some were fetched."""
    options = options_of(monkeypatch, f"--model={cache('Org/policy', policy_dir)}", "--prompts=p")
    job = generation_job(options, [Prompt((1, 2, 3))])
    assert Path(set_up(job.recipe, job.changes).model.path).resolve() == policy_dir.resolve()


def test_data_may_be_a_pattern_and_lie_where_the_command_starts(overrides, tmp_path):
    found = decided_options(Recipe((*overrides, "data.train_files=[?.jsonl,none/x.parquet]"), directory=str(tmp_path)))
    assert found["prompts"] == [tmp_path / "a.jsonl", tmp_path / "b.jsonl", tmp_path / "none" / "x.parquet"]


def test_without_a_folder_to_write_it_is_asked_for(overrides):
    assert cli("warmup", *overrides)[1].startswith("--out is missing")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ("actor_rollout_ref.model.path=hdfs://nn/q",),
            "=hdfs://nn/q is on another file system: copy it here, and",
        ),
        (("--model", "hdfs://nn/q", "--prompts", "p"), "hdfs://nn/q is on another file system: copy it here"),
        (("--model", "POLICY", "--prompts", "p", "--drafter", "s3://b/d"), "s3://b/d is on another file system: copy"),
        ((), "--model is missing: give it, or your run's command after --, which says it too."),
        (("--model", "POLICY", "--prompts", "p", "--epochs", "inf"), "--epochs inf needs --max-steps or --max-min"),
        (("--model", "POLICY", "--cache-gb", "inf"), "Invalid value for '--cache-gb'"),
        (("--model", "POLICY"), "--prompts is missing: give it, or your run's command after --"),
        (("--model", "POLICY", "data.train_files=hdfs://far/x.parquet"), "is on another file system: give --prompts."),
        (
            ("--model", "POLICY", "actor_rollout_ref.rollout.temperature=hot"),
            "temperature must be a number from 0 to 2",
        ),
        (
            ("--model", "POLICY", "actor_rollout_ref.rollout.top_p=1.5"),
            "top_p must be a number from 1e-06 to 1, not 1.5.",
        ),
    ],
)
def test_what_is_missing_or_wrong_is_one_sentence(words, sentence, policy_dir, tmp_path):
    words = [word.replace("POLICY", str(policy_dir)) for word in words]
    code, said = cli("warmup", "--out", tmp_path / "out", *words)
    assert code in (1, 2) and sentence in re.sub(r"[\s│]+", " ", said), said
