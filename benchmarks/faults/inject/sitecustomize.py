"""Python imports this in every process whose PYTHONPATH names this folder: faults are armed where a plan is set."""

import os

if os.environ.get("TLT_FAULTS"):
    from benchmarks.faults import injector

    injector.arm()
