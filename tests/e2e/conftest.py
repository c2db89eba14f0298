"""A GRPO run with two replicas, and its resumption: the first prompt of each batch has one long response, everything
else is short."""

import pytest
from grpo_run import TLT, Run, grpo


@pytest.fixture(scope="session")
def run(tmp_path_factory) -> Run:
    """Four steps from a random head, with a checkpoint after the last."""
    base = tmp_path_factory.mktemp("grpo")
    return grpo(base / "run", base / "assets", 4, *TLT, SAVE_FREQ="4")


@pytest.fixture(scope="session")
def resumed(run) -> Run:
    """The same run, continued from its checkpoint for one more step; its engines run their workers inside, and what a
    step costs is known from the run before."""
    out = run.out.parent / "resumed"
    out.mkdir()
    (out / "checkpoints").symlink_to(run.out / "checkpoints")
    tables = f"tlt.speculation.costs_dir={run.out}/tables"
    return grpo(out, run.out.parent / "assets", 5, *TLT, tables, SAVE_FREQ="-1", RESUME="auto", EXECUTOR="uni")
