"""What the demo's recipe asks verl for: a `python` that only prints its arguments stands in for the interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from demo.command import RECIPE
from demo.machine import find_dtype
from demo.toy.assets import demo_width

ACTOR_DTYPE = "+actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype"
ROLLOUT = "actor_rollout_ref.rollout"
EXECUTOR = f"++{ROLLOUT}.engine_kwargs.vllm.distributed_executor_backend"


@pytest.fixture
def ask(tmp_path):
    """Run the recipe with environment variables; returns the overrides that verl would get, by key."""
    stub = tmp_path / "bin" / "python"
    stub.parent.mkdir()
    stub.write_text(
        f'#!/bin/sh\n[ "$1" = -m ] || exec {sys.executable} "$@"\n'
        'echo "multiprocessing=${VLLM_ENABLE_V1_MULTIPROCESSING:-unset}"\nprintf "%s\\n" "$@"\n'
    )
    stub.chmod(0o755)

    def run(**environment: str) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if name not in ("DTYPE", "EXECUTOR", "POLICY")}
        env = {**kept, "PATH": f"{stub.parent}{os.pathsep}{os.environ['PATH']}", "OUT": str(tmp_path / "out")}
        printed = subprocess.run([str(RECIPE)], env=env | environment, capture_output=True, text=True, check=True)
        return dict(line.split("=", 1) for line in printed.stdout.splitlines() if "=" in line)

    return run


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_variable_sets_the_dtype_of_rollout_update_and_policy(ask, dtype):
    asked = ask(DTYPE=dtype)
    assert asked[ACTOR_DTYPE] == asked[f"{ROLLOUT}.dtype"] == dtype
    assert Path(asked["actor_rollout_ref.model.path"]).name == f"policy-{demo_width(dtype)}"


def test_left_alone_the_recipe_takes_this_machines_dtype(ask):
    assert ask()[f"{ROLLOUT}.dtype"] == find_dtype()


def test_vllm_may_keep_an_engines_worker_in_its_process_only_where_it_is_told_so(ask):
    alone, apart = ask(), ask(EXECUTOR="mp")
    assert [alone[EXECUTOR], alone["multiprocessing"]] == ["uni", "0"]
    assert [apart[EXECUTOR], apart["multiprocessing"]] == ["mp", "unset"]


def test_it_starts_from_a_drafter_where_it_is_told_so(ask):
    assert [one["tlt.drafter.path"] for one in (ask(), ask(DRAFTER="/a/drafter"))] == ["null", "/a/drafter"]
