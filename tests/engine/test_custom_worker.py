"""examples/custom_worker.py and custom_megatron_worker.py as a user runs them: in verl's own worker groups."""

import importlib.util
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from ray import cloudpickle
from recorded import ray_cluster

from benchmarks.lossless.tiny_policy import build_target
from tests.toy.assets import SHIPPED_POLICY
from verl_tlt.drafter import check_drafter

pytestmark = pytest.mark.engine

EXAMPLES = Path(__file__).parents[2] / "examples"


@contextmanager
def script(name):
    """An example as Ray treats the script a user runs."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    cloudpickle.register_pickle_by_value(module)
    yield module
    cloudpickle.unregister_pickle_by_value(module)
    del sys.modules[name]


@pytest.fixture(scope="module")
def example():
    with script("custom_worker") as module:
        yield module


def test_it_learns_in_a_worker_group_and_saves_a_servable_drafter(example, tmp_path, monkeypatch):
    build_target(tmp_path / "policy")
    with ray_cluster(monkeypatch):
        group = example.start(str(tmp_path / "policy"))
        data = example.made_up_rollouts(500)
        losses = [float(group.learn(data).batch["loss"][0]) for _ in range(6)]
        group.save(str(tmp_path / "drafter"))
    assert torch.tensor(losses).isfinite().all() and losses[-1] < losses[0]
    check_drafter(tmp_path / "drafter", tmp_path / "policy")


def test_a_megatron_actor_trains_a_drafter_and_saves_one_that_can_be_served(tmp_path, monkeypatch):
    pytest.importorskip("mbridge")
    policy = str(SHIPPED_POLICY)
    with ray_cluster(monkeypatch), script("custom_megatron_worker") as example:
        group = example.start(policy, (1, 2, 3), vanilla_mbridge=True, dtype="float32")
        rollouts = example.made_up_rollouts(64)
        said = [group.learn([rollouts])[0] for _ in range(4)]
        group.save(str(tmp_path / "drafter"))
    assert said[-1]["loss"] < said[0]["loss"]
    check_drafter(tmp_path / "drafter", policy)
