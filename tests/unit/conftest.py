"""A verl config as `main_ppo` would compose it, reduced to what verl-tlt reads, with its files on disk."""

import logging
import os
import sys
from unittest.mock import patch

import pytest
from made_run import MadeRun, make_run
from omegaconf import OmegaConf
from one_row import one_row
from policy_config import write_policy


@pytest.fixture
def variables():
    """Takes back the variables and the places of modules that a user's command leaves in this process."""
    with patch.dict(os.environ), patch.object(sys, "path", [*sys.path]):
        yield


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch):
    """A Ray cluster that runs on this machine is none of a test's."""
    monkeypatch.setenv("RAY_ADDRESS", "local")


@pytest.fixture
def said(monkeypatch, caplog):
    """What TLT logs from here on, whatever was done to this process's loggers before."""
    monkeypatch.setattr(logging.getLogger("verl_tlt"), "propagate", True)
    caplog.set_level(logging.WARNING, logger="verl_tlt")
    return caplog


@pytest.fixture
def recipe(tmp_path):
    """A runnable recipe with the flag set; struct mode as Hydra sets it."""
    policy = write_policy(tmp_path / "policy")
    one_row(tmp_path / "train.parquet")
    config = OmegaConf.create(
        {
            "data": {
                "train_files": str(tmp_path / "train.parquet"),
                "val_files": [str(tmp_path / "train.parquet")],
                "custom_cls": {"path": None},
            },
            "algorithm": {"rollout_correction": {"bypass_mode": False}},
            "actor_rollout_ref": {
                "model": {"path": str(policy), "mtp": {"enable": False, "enable_rollout": False}},
                "actor": {"strategy": "fsdp2"},
                "rollout": {
                    "name": "vllm",
                    "tensor_model_parallel_size": 1,
                    "data_parallel_size": 1,
                    "prompt_length": 64,
                    "response_length": 128,
                    "max_model_len": None,
                    "engine_kwargs": {"vllm": {}},
                    "val_kwargs": {"temperature": 0},
                },
            },
            "ray_kwargs": {"ray_init": {"num_cpus": None}},
            "trainer": {
                "nnodes": 1,
                "n_gpus_per_node": 2,
                "use_v1": True,
                "v1": {"trainer_mode": "sync"},
                "plugin": "tlt",
                "default_local_dir": str(tmp_path / "checkpoints"),
            },
        }
    )
    OmegaConf.set_struct(config, True)
    return config


@pytest.fixture
def overrides(recipe):
    """The words with which `main_ppo` runs such a recipe, without the flag."""
    return [
        *(f"data.{part}_files={recipe.data.train_files}" for part in ("train", "val")),
        "trainer.device=cpu", "actor_rollout_ref.actor.use_dynamic_bsz=true", "actor_rollout_ref.rollout.name=vllm",
        f"actor_rollout_ref.model.path={recipe.actor_rollout_ref.model.path}",
    ]  # fmt: skip


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Puts a folder into a Hugging Face cache, as a download would leave it; no hub can be reached."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)

    def put(name, files):
        model = tmp_path / "hub" / f"models--{name.replace('/', '--')}"
        (model / "refs").mkdir(parents=True)
        (model / "refs" / "main").write_text("abc")
        (model / "snapshots").mkdir()
        (model / "snapshots" / "abc").symlink_to(files)
        return name

    return put


@pytest.fixture(scope="session")
def made_run(tmp_path_factory) -> MadeRun:
    """A finished run of six RL steps; do not write into its directory."""
    return make_run(tmp_path_factory.mktemp("made") / "trace")
