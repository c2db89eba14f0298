"""The made-up run of `tests/unit/made_run.py`."""

import pytest
from made_run import MadeRun, make_run


@pytest.fixture(scope="session")
def made_run(tmp_path_factory) -> MadeRun:
    """A finished run of six RL steps; do not write into its directory."""
    return make_run(tmp_path_factory.mktemp("made") / "trace")
