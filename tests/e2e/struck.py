"""Some faults of `make test-faults`, at the steps of the resumed run."""

import dataclasses

from benchmarks.faults.plan import FAULTS, NAN_LIVE

STEPS = {
    "the balancer losing a replica": 5,
    NAN_LIVE.name: 5,
    "spot trainer killed (SIGKILL) in mid-session": 6,
}
STRUCK = [dataclasses.replace(fault, step=STEPS[fault.name]) for fault in (*FAULTS, NAN_LIVE) if fault.name in STEPS]
