"""One tiny policy for all tests of the drafter, recorded sequences, and a fresh drafter for each test."""

import pytest
from tiny_policy import drafter_of, make_policy, observe, random_texts

from verl_tlt.drafter import save_drafter


@pytest.fixture(scope="session")
def policy():
    return make_policy()


@pytest.fixture(scope="session")
def policy_dir(policy, tmp_path_factory):
    path = tmp_path_factory.mktemp("policy")
    policy.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def sequences(policy):
    return observe(policy, random_texts((18, 5), (25, 9), (11, 4), (30, 3)))


@pytest.fixture
def drafter(policy):
    return drafter_of(policy, seed=3, larger=6)  # so that every part of the layer matters to the result


@pytest.fixture
def saved(drafter, tmp_path):
    """Its folder."""
    return save_drafter(drafter, tmp_path / "saved", {"policy": "tiny", "rl_steps": 7})
