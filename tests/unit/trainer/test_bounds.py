"""Each bound of the trainer's waits, hit once: no answer comes, the step goes on, and who is silent is replaced."""

import contextlib

import pytest
from fake_fleet import FakeCall
from rl_steps import fill_buffers, rest_of_step, sampling

from verl_tlt.trainer import controller, watch


@pytest.fixture
def took(clock):
    """Seconds that a call takes."""

    def measure(call, *args):
        begin = clock.now
        call(*args)
        return clock.now - begin

    return measure


def test_hidden_states_that_never_arrive_hold_up_one_rollout_for_their_bound(run, clock, took):
    run_, fleet = run()
    fleet.hand_over = lambda step, taken: {"a": FakeCall(clock)}
    fill_buffers(run_, fleet)
    assert took(run_.sample_begin, 2) == pytest.approx(controller.BUFFER_S)
    run_.sample_end(2, last=True)
    assert fleet.restarts == ["a"] and run_.guard.counts == {"hand-over": 1}


def test_a_checkpoint_that_is_never_written_replaces_its_worker(run, clock, took):
    run_, fleet = run()
    fill_buffers(run_, fleet)
    fleet.save = lambda directory, provenance: FakeCall(clock)
    saving = contextlib.ExitStack()
    saving.enter_context(run_.saving(1))
    assert took(saving.close) == pytest.approx(controller.SAVE_S)
    assert fleet.restarts == ["a"] and run_.guard.counts == {"save": 1}


def test_the_end_of_the_run_waits_as_long_for_its_drafter(run, clock, took):
    run_, fleet = run()
    fleet.save = lambda directory, provenance: FakeCall(clock)
    assert took(run_.finish, 1) == pytest.approx(controller.SAVE_S)
    assert run_.guard.counts == {"final drafter": 1}


def test_more_prompts_wait_for_a_look_that_hangs_no_longer_than_its_bound(run, clock, took):
    run_, fleet = run(mode="colocate_async")
    fill_buffers(run_, fleet)
    answered = clock.event()
    fleet.try_sleep = lambda name, keep_weights: answered.wait(3600.0)
    with sampling(run_, fleet, 2):
        assert took(run_.more_prompts) == pytest.approx(watch.LOOK_S)
        answered.set()
    assert run_.guard.counts["recall"] == 1


def test_the_end_of_sampling_waits_for_a_look_that_hangs_no_longer_than_its_bound(run, clock, took):
    run_, fleet = run()
    fill_buffers(run_, fleet)
    answered = clock.event()
    fleet.try_sleep = lambda name, keep_weights: answered.wait(3600.0)
    phase = contextlib.ExitStack()
    phase.enter_context(sampling(run_, fleet, 2))
    assert watch.LOOK_S - 1.0 < took(phase.close) <= watch.LOOK_S + 1.0
    answered.set()
    assert rest_of_step(run_, fleet, 2)["tlt/drafter_version"] == 0
    assert fleet.balancer == {"a", "b"} and run_.guard.counts["watch"] == 1


def test_a_session_whose_result_does_not_come_is_over_after_its_bound(run, clock):
    run_, fleet = run()
    fill_buffers(run_, fleet)

    class Announced(FakeCall):
        """It says that it is done, and its result is nowhere."""

        def done(self):
            return True

    fleet.train = lambda name: fleet.calls.append(("train", name)) or Announced(clock)
    with sampling(run_, fleet, 2):
        clock.sleep(watch.ANSWER_S)
        assert [s.error for s in run_._watch.report.sessions] == ["no answer within 1.0 s"]
    assert rest_of_step(run_, fleet, 2)["tlt/spot_failures"] == 1
