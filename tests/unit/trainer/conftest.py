"""A controller with a fleet of plain objects and a clock of its own, at the end of its set-up."""

import pytest
from fake_clock import FakeClock
from fake_fleet import FakeFleet
from rl_steps import POLL_S, STOP_S, rl_step

from verl_tlt.config import TLTConfig
from verl_tlt.idle.replica_idle import MODE_RULES
from verl_tlt.messages.rollout import DrafterFile
from verl_tlt.messages.training import DrafterProvenance
from verl_tlt.trace.events import TraceWriter
from verl_tlt.trainer.controller import Controller
from verl_tlt.trainer.run_setup import FirstDrafter, RunFacts
from verl_tlt.trainer.step_log import StepLog
from verl_tlt.trainer.watch import PendingWork


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def took(clock):
    """Seconds that a call takes."""

    def measure(call, *args, **named):
        begin = clock.now
        call(*args, **named)
        return clock.now - begin

    return measure


@pytest.fixture
def log(tmp_path):
    return StepLog(TraceWriter(tmp_path, "trainer"))


@pytest.fixture
def run(tmp_path, clock):
    """Build a controller with its fleet, whose attributes are `of_fleet`; both are at the end of their set-up."""
    built = []

    def build(
        names="ab", mode="sync", standalone=(), kind=FakeFleet, of_fleet=None, start=None, prunes=False, shared=False,
        rotates=0, cold_start_s=None, **speculation,
    ):  # fmt: skip
        spot = {"settle_s": 0.0, "poll_s": POLL_S, "stop_timeout_s": STOP_S, "cold_start_s": cold_start_s}
        places = {"trace": {"dir": str(tmp_path / "trace")}, "drafter": {"save_dir": str(tmp_path / "drafter")}}
        tlt = TLTConfig.from_dict(places | {"buffer": {"min_tokens": 100}, "spot": spot, "speculation": speculation})
        fleet = kind(*names, standalone=standalone, clock=clock)
        vars(fleet).update(of_fleet or {})
        facts = RunFacts(
            rule=MODE_RULES[mode], requests=8, dtype="bfloat16", checkpoints=tmp_path / "ckpt", prunes=prunes,
            provenance=DrafterProvenance("policy", "data", "hass", 1.0), gpus=2, shared=shared, rotates=rotates,
        )  # fmt: skip
        file = DrafterFile(0, "{}", b"", (0.0, 0.0, 0.0))
        first = FirstDrafter(file, file, (2, 4, 6), "a test", **start or {})
        log = StepLog(TraceWriter(str(tmp_path / "trace"), "trainer", clock.time), clock)
        controller = Controller(tlt, facts, first, fleet, log, PendingWork)
        controller.before_first_sync(0)
        fleet.sync()
        controller.after_first_sync(0)
        built.append((controller, fleet))
        return controller, fleet

    yield build
    for controller, fleet in built:
        fleet.merge_gate.set()
        controller.updates._pool.shutdown(wait=True)


@pytest.fixture
def filled(run):
    """Build the same after a first RL step, whose hidden states are in the buffers."""

    def build(*args, **settings):
        controller, fleet = run(*args, **settings)
        rl_step(controller, fleet, 1)
        return controller, fleet

    return build
