"""Each bound of the trainer's waits, hit once: nobody answers, the step goes on, and whoever is silent is replaced."""

import threading
import time

import pytest
from fake_fleet import FakeCall
from rl_steps import called, fill_buffers, rest_of_step, sampling, until

from verl_tlt.trainer import checkpoints as checkpoints_module
from verl_tlt.trainer import controller as controller_module
from verl_tlt.trainer import watch as watch_module

BOUND_S, LATE_S = 0.2, 8.0
"""What is set for the bound, and what a loaded machine may take besides."""


@pytest.fixture
def bounded(monkeypatch):
    """Set a bound; what runs inside must take as long, and little more."""

    class Bounded:
        def __call__(self, module, name):
            monkeypatch.setattr(module, name, BOUND_S)
            return self

        def __enter__(self):
            self.begin = time.monotonic()

        def __exit__(self, *_):
            assert BOUND_S <= time.monotonic() - self.begin < BOUND_S + LATE_S

    return Bounded()


def test_hidden_states_that_never_arrive_hold_up_one_rollout_for_their_bound(run, bounded):
    controller, fleet = run()
    fleet.hand_over = lambda step, taken: {"a": FakeCall()}
    fill_buffers(controller, fleet)
    with bounded(controller_module, "BUFFER_S"):
        controller.sample_begin(2)
    controller.sample_end(2, last=True)
    assert fleet.restarts == ["a"] and controller.guard.counts == {"hand-over": 1}


def test_a_checkpoint_that_is_never_written_replaces_its_worker(run, bounded):
    controller, fleet = run()
    fill_buffers(controller, fleet)
    fleet.save = lambda directory, provenance: FakeCall()
    with bounded(checkpoints_module, "SAVE_S"), controller.saving(1):
        pass
    assert fleet.restarts == ["a"] and controller.guard.counts == {"save": 1}


def test_the_end_of_the_run_waits_as_long_for_its_drafter(run, bounded):
    controller, fleet = run()
    fleet.save = lambda directory, provenance: FakeCall()
    with bounded(controller_module, "SAVE_S"):
        controller.finish(1)
    assert controller.guard.counts == {"final drafter": 1}


def test_more_prompts_wait_for_a_look_that_hangs_no_longer_than_its_bound(run, bounded):
    controller, fleet = run(mode="colocate_async")
    fill_buffers(controller, fleet)
    forever = threading.Event()
    fleet.try_sleep = lambda name, keep_weights: forever.wait(60)
    with sampling(controller, fleet, 2):
        until(lambda: called(fleet, "leave"))
        with bounded(watch_module, "LOOK_S"):
            controller.more_prompts()
        forever.set()
    assert controller.guard.counts["recall"] == 1


def test_a_session_whose_result_does_not_come_is_over_after_its_bound(run, bounded):
    controller, fleet = run()
    fill_buffers(controller, fleet)

    class Announced(FakeCall):
        """It says that it is done, and its result is nowhere."""

        def done(self):
            return True

    fleet.train = lambda name: fleet.calls.append(("train", name)) or Announced()
    with bounded(watch_module, "ANSWER_S"), sampling(controller, fleet, 2):
        until(lambda: controller._watch._report.sessions)
    assert rest_of_step(controller, fleet, 2)["tlt/spot_failures"] == 1
