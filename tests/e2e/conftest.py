"""A GRPO run with two replicas, and its resumption: the first prompt of each batch has one long response, everything
else is short."""

import pytest
from grpo_run import TLT, Run, grpo


@pytest.fixture(scope="session")
def run(tmp_path_factory) -> Run:
    """Five steps from a random head, with a checkpoint after the fourth."""
    base = tmp_path_factory.mktemp("grpo")
    return grpo(base / "run", base / "assets", 5, *TLT, SAVE_FREQ="4")


@pytest.fixture(scope="session")
def resumed(run) -> Run:
    """The same run, continued from its last checkpoint for one more step; its engines run their workers inside."""
    out = run.out.parent / "resumed"
    out.mkdir()
    (out / "checkpoints").symlink_to(run.out / "checkpoints")
    return grpo(out, run.out.parent / "assets", 6, *TLT, SAVE_FREQ="-1", RESUME="auto", EXECUTOR="uni")
