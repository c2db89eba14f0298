"""examples/custom_worker.py as a user runs it: in verl's own worker group."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from ray import cloudpickle
from recorded import ray_cluster

from benchmarks.lossless.tiny_policy import build_target
from verl_tlt.drafter import check_drafter

pytestmark = pytest.mark.engine

EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_worker.py"


@pytest.fixture(scope="module")
def example():
    """The example as Ray treats the script a user runs."""
    spec = importlib.util.spec_from_file_location("custom_worker", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["custom_worker"] = module
    spec.loader.exec_module(module)
    cloudpickle.register_pickle_by_value(module)
    yield module
    cloudpickle.unregister_pickle_by_value(module)
    del sys.modules["custom_worker"]


def test_it_learns_in_a_worker_group_and_saves_a_servable_drafter(example, tmp_path, monkeypatch):
    build_target(tmp_path / "policy")
    with ray_cluster(monkeypatch):
        group = example.start(str(tmp_path / "policy"))
        data = example.made_up_rollouts(500)
        losses = [float(group.learn(data).batch["loss"][0]) for _ in range(6)]
        group.save(str(tmp_path / "drafter"))
    assert torch.tensor(losses).isfinite().all() and losses[-1] < losses[0]
    check_drafter(tmp_path / "drafter", tmp_path / "policy")
