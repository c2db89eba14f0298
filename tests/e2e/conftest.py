"""A GRPO run with two replicas, and its resumption: the first prompt of each batch has one long response, everything
else is short."""

import os
from pathlib import Path

import pytest
from grpo_run import TLT, Run, grpo
from struck import STRUCK

from benchmarks.faults.run import arm
from benchmarks.toy_job import CONSTANT

COLD_START = "tlt.spot.cold_start_s=20"
STARTUP = Path(__file__).parents[1] / "startup"


@pytest.fixture(scope="session")
def run(tmp_path_factory) -> Run:
    """Four steps from a random head, with a cold start and with a checkpoint after the last."""
    base = tmp_path_factory.mktemp("grpo")
    return grpo(base / "run", base / "assets", 4, *TLT, COLD_START, SAVE_FREQ="4")


@pytest.fixture(scope="session")
def resumed(run) -> Run:
    """The same run, continued from its checkpoint for three more steps, in which faults strike; its engines run their
    workers inside."""
    out = run.out.parent / "resumed"
    out.mkdir()
    (out / "checkpoints").symlink_to(run.out / "checkpoints")
    (armed := out.parent / "armed").mkdir()
    faults = arm(armed, STRUCK)
    faults["PYTHONPATH"] = f"{STARTUP}{os.pathsep}{faults['PYTHONPATH']}"
    options = (*TLT, COLD_START, f"{CONSTANT}.speculation.calibrate=false")  # the first run has had both
    return grpo(out, out.parent / "assets", 7, *options, SAVE_FREQ="-1", RESUME="auto", EXECUTOR="uni", **faults)
