"""A recipe's script, for the tests of its reader and of the command."""

import pytest

SCRIPT = """#!/usr/bin/env bash
set -xeuo pipefail
DEVICE=$(python3 -c 'import nothing_of_that_name' 2>/dev/null && echo npu || echo {device})
MODEL=$1; shift
DATA=(data.train_files="$FILES" "data.val_files=['$FILES']")
python3 -m verl.trainer.main_ppo --config-path=config \\
    --config-name='ppo_trainer.yaml' "${{DATA[@]}}" trainer.device=$DEVICE \\
    actor_rollout_ref.rollout.name=vllm "actor_rollout_ref.model.path=$MODEL" "$@" 2>&1 | tee log.txt
"""


@pytest.fixture
def script(recipe, tmp_path, monkeypatch):
    """A recipe as people write them: with Python in it, arrays, and arguments of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FILES", str(recipe.data.train_files))
    path = tmp_path / "recipe.sh"
    path.write_text(SCRIPT.format(device="cpu"))
    return path
