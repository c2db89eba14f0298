"""A controller with a fleet of plain objects and a clock of its own, at the end of its set-up."""

import pytest
from fake_clock import FakeClock
from fake_fleet import FakeFleet
from rl_steps import FIRST, POLL_S, STOP_S, fill_buffers

from verl_tlt.config import TLTConfig
from verl_tlt.idle.replica_idle import MODE_RULES
from verl_tlt.messages.training import DrafterProvenance
from verl_tlt.trace.events import TraceWriter
from verl_tlt.trainer.controller import Controller
from verl_tlt.trainer.run_setup import FirstDrafter, RunFacts
from verl_tlt.trainer.runtime_switch import TRACE_FILE
from verl_tlt.trainer.step_log import StepLog
from verl_tlt.trainer.watch import PendingWork


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def took(clock):
    """Seconds that a call takes."""

    def measure(call, *args):
        begin = clock.now
        call(*args)
        return clock.now - begin

    return measure


@pytest.fixture
def run_dir(tmp_path):
    """A run's trace directory."""
    path = tmp_path / "checkpoints" / "tlt_trace"
    path.mkdir(parents=True)
    (path / TRACE_FILE).touch()
    return path


@pytest.fixture
def run(tmp_path, clock):
    """Build a controller with its fleet; both are at the end of their set-up."""
    built = []

    def build(
        mode="sync",
        names=("a", "b"),
        standalone=(),
        resume_from=None,
        fleet=None,
        prunes=False,
        shared=False,
        draft_vocab=0,
        untrained=False,
        cold_start_s=None,
        **speculation,
    ):
        tlt = TLTConfig.from_dict(
            {
                "trace": {"dir": str(tmp_path / "trace")},
                "drafter": {"save_dir": str(tmp_path / "drafter")},
                "buffer": {"min_tokens": 100},
                "spot": {"settle_s": 0.0, "poll_s": POLL_S, "stop_timeout_s": STOP_S, "cold_start_s": cold_start_s},
                "speculation": speculation,
            }
        )
        fleet = fleet or FakeFleet(*names, standalone=standalone, clock=clock)
        facts = RunFacts(
            rule=MODE_RULES[mode], requests=8, dtype="bfloat16", checkpoints=tmp_path / "ckpt", prunes=prunes,
            provenance=DrafterProvenance("policy", "data", None, "hass", 1.0), gpus=2, shared=shared,
        )  # fmt: skip
        start = FirstDrafter(
            FIRST, FIRST, (2, 4, 6), "a test", draft_vocab=draft_vocab, chosen=draft_vocab == 0, untrained=untrained,
            checkpoint=resume_from,
        )  # fmt: skip
        log = StepLog(TraceWriter(str(tmp_path / "trace"), "trainer", clock.time), clock)
        controller = Controller(tlt, facts, start, fleet, log, PendingWork)
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

    def build(**settings):
        controller, fleet = run(**settings)
        fill_buffers(controller, fleet)
        return controller, fleet

    return build
