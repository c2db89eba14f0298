"""The CPU platform's entry point changes a process only where it is asked to."""

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize(("platform", "expected"), [("cpu", "50000 cuda"), ("nvidia", "700 None"), ("", "700 None")])
def test_only_on_a_cpu(platform, expected):
    code = (
        "import gc, os, verl_tlt.compat.cpu.entry; print(gc.get_threshold()[0], os.environ.get('VERL_ENGINE_DEVICE'))"
    )
    environment = {k: v for k, v in os.environ.items() if k != "VERL_ENGINE_DEVICE"}
    environment |= {"VERL_PLATFORM": platform, "VERL_USE_EXTERNAL_PLUGINS": "none"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout.strip().splitlines()[-1:] == [expected], done.stderr[-2000:]
