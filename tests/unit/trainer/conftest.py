"""A controller with plain objects around it and a clock of its own, at the end of its set-up."""

import pytest
from fake_clock import FakeClock
from fakes import FakeHiddenStates, FakeServers, FakeSpot
from rl_steps import STOP_S, rl_step

from verl_tlt.config import TLTConfig
from verl_tlt.idle.planner import MODE_RULES, PendingWork
from verl_tlt.messages.rollout import DrafterFile
from verl_tlt.messages.training import DrafterProvenance
from verl_tlt.trace.events import TraceWriter
from verl_tlt.trainer.controller import Controller
from verl_tlt.trainer.run_setup import FirstDrafter, RunFacts
from verl_tlt.trainer.step_log import StepLog


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
def run(tmp_path, clock):
    """Build a controller, at the end of its set-up; `refusal`: why hidden states cannot be captured."""

    def build(names="ab", mode="sync", standalone=(), start=None, refusal=None, facts=None, **speculation):
        places = {"trace": {"dir": str(tmp_path / "trace")}, "drafter": {"save_dir": str(tmp_path / "drafter")}}
        tlt = TLTConfig.from_dict(places | {"spot": {"stop_timeout_s": STOP_S}, "speculation": speculation})
        servers = FakeServers(names, clock, standalone)
        hidden_states, spot = FakeHiddenStates(clock, refusal), FakeSpot(servers, clock)
        of_run = {"prunes": False, "gpus": 2, "requests": 8, "checkpoints": tmp_path / "ckpt"}
        provenance = DrafterProvenance("policy", "data", "hass", 1.0)
        run_facts = RunFacts(rule=MODE_RULES[mode], provenance=provenance, **of_run | (facts or {}))
        file = DrafterFile(0, "{}", b"", (0.0, 0.0, 0.0))
        of_start = {"trainable": file, "served": file, "aux_layers": (2, 4, 6), "origin": "a test"}
        first = FirstDrafter(**of_start | (start or {}))
        log = StepLog(TraceWriter(str(tmp_path / "trace"), "trainer", clock.time), clock)
        controller = Controller(tlt, run_facts, first, servers, hidden_states, spot, log, PendingWork)
        controller.before_first_sync(0)
        servers.sync()
        controller.after_first_sync(0)
        return controller

    return build


@pytest.fixture
def filled(run):
    """Build the same after a first RL step, whose hidden states have arrived."""

    def build(*args, **settings):
        controller = run(*args, **settings)
        rl_step(controller, 1)
        return controller

    return build
