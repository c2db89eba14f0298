"""One tiny policy for all tests of the drafter, recorded sequences, and a fresh drafter for each test."""

import pytest
import torch
from tiny_policy import VOCAB, drafter_of, make_policy, observe


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
    generator = torch.Generator().manual_seed(1)
    lengths = [(18, 5), (25, 9), (11, 4), (30, 3)]
    return [observe(policy, torch.randint(0, VOCAB, (n,), generator=generator), p) for n, p in lengths]


@pytest.fixture
def drafter(policy):
    model = drafter_of(policy, seed=3)
    with torch.no_grad():  # large enough for every part of the layer to matter to the result
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.ndim == 2:
                parameter.mul_(6)
    return model
