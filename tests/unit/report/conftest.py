"""A run of 64 replicas, for what must stay legible and small."""

import pytest
from made_run import make_run


@pytest.fixture(scope="session")
def many_replicas(tmp_path_factory):
    """Three RL steps; do not write into its directory."""
    return make_run(tmp_path_factory.mktemp("many") / "trace", steps=3, replicas=64)
