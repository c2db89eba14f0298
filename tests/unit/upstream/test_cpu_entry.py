"""The CPU platform's entry point leaves other processes alone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("platform", ["nvidia", ""])
def test_a_process_with_an_accelerator_stays_as_it_is(platform):
    code = (
        "import gc, os, sys, verl_cpu.entry\n"
        "print(gc.get_threshold()[0], os.environ.get('VERL_ENGINE_DEVICE'), 'verl' in sys.modules)"
    )
    environment = {k: v for k, v in os.environ.items() if k != "VERL_ENGINE_DEVICE"}
    # The tests' own start of Python, which looks for garbage seldom, stays out.
    environment |= {"VERL_PLATFORM": platform, "VERL_USE_EXTERNAL_PLUGINS": "none", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout.strip().splitlines()[-1:] == ["700 None False"], done.stderr[-2000:]
