"""Some faults of `make test-faults`, at the steps of the resumed run."""

import dataclasses

from benchmarks.faults.plan import FAULTS

STEPS = {
    "drafter file truncated between staging and load": 6,
    "spot worker killed (SIGKILL) in mid-session": 6,
    "the balancer losing a replica": 7,
}
STRUCK = [dataclasses.replace(fault, step=STEPS[fault.name]) for fault in FAULTS if fault.name in STEPS]
