import pytest


@pytest.fixture
def policy(recipe):
    """The recipe's policy, a folder."""
    return str(recipe.actor_rollout_ref.model.path)
