"""The cold start in whole RL steps with a fleet of plain objects: when it comes, what it costs, and what may fail."""

import pytest
from fake_fleet import FakeFleet
from rl_steps import LOOKS_S, STOP_S, called, fill_buffers, rest_of_step, sampling

from verl_tlt.config import TOKENS_PER_STEP
from verl_tlt.messages.training import SessionResult
from verl_tlt.speculation.acceptance import expected_accept_lengths
from verl_tlt.speculation.costs.tables import LatencyTable
from verl_tlt.speculation.types import OFF
from verl_tlt.trainer.cold_start import FLAT, PORTIONS, STEPS
from verl_tlt.trainer.runtime_switch import write_switch
from verl_tlt.trainer.waits import CallFailed

SECONDS = 8.0
PORTION_S = SECONDS / PORTIONS


class Learning(FakeFleet):
    """What is merged is accepted as often as `acceptance` says next, and what is published is served."""

    acceptance, scores_s = (0.1,), 0.0

    def train(self, name):
        self.began = self.clock.now
        return super().train(name)

    def _end(self, name):
        took = self.clock.now - self.began
        if self.to_judge and took < self.scores_s:  # told to stop before it had all scores
            self.on_device.discard(name)
            self.sessions[name].end(SessionResult("stopped", judged_s=took))
        else:
            super()._end(name)

    def merge(self, names):
        self.merges = getattr(self, "merges", 0) + 1
        self.candidate_acceptance = self.acceptance[min(self.merges, len(self.acceptance)) - 1]
        return super().merge(names)

    def export(self, version, dtype, acceptance):
        self.exported = self.candidate_acceptance
        return super().export(version, dtype, acceptance)

    def keep_as_served(self):
        self.served_acceptance = self.exported
        super().keep_as_served()


@pytest.fixture
def begin(run, clock):
    """A controller after its sampling in the step of the cold start; drafting costs nothing, which is known."""

    def to_there(*, acceptance=(0.1,), cold_start_s=SECONDS):
        fleet = Learning("a", "b", clock=clock)
        fleet.to_judge, fleet.acceptance, fleet.candidate_acceptance, fleet.served_acceptance = False, acceptance, 0, 0
        controller, _ = run(fleet=fleet, untrained=True, cold_start_s=cold_start_s)
        costs = {k: [(1, 0.01), (8, 0.01)] for k in (OFF, 0, 3)}
        controller.speculation.calibrated(LatencyTable.calibrated(costs))
        for step in range(1, STEPS + 1):
            sample(controller, fleet, step)
            controller.cold_start(step, 1000)
            assert called(fleet, "train") == [], "it waits for hidden states"
            rest_of_step(controller, fleet, step)
        sample(controller, fleet, STEPS + 1)
        return controller, fleet

    return to_there


def sample(controller, fleet, step):
    """A sampling phase without a bubble."""
    controller.sample_begin(step)
    controller.sample_end(step, last=True)


@pytest.fixture
def took(took):
    """Seconds that the cold start took."""
    return lambda controller, step=STEPS + 1, steps_left=1000: took(controller.cold_start, step, steps_left)


def test_all_devices_train_at_the_same_time_and_the_coming_rollout_drafts(begin, took):
    controller, fleet = begin(acceptance=(0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8))
    together = []
    stop = fleet.stop
    fleet.stop = lambda name: (together.append(len(fleet.on_device)), stop(name))
    assert fleet.disabled == {"a", "b"}, "nothing to draft with"
    seconds = took(controller)
    assert seconds == pytest.approx(SECONDS, abs=0.5) and max(together) == 2
    assert fleet.on_device == set(), "a guest is on the device when the actor comes"
    metrics = rest_of_step(controller, fleet, STEPS + 1)
    assert metrics["tlt/drafter_version"] == len(fleet.staged) == PORTIONS, "the last portion is judged, too"
    assert fleet.disabled == set(), "it drafts"
    assert metrics["tlt/overhead_cold_start_s"] == pytest.approx(seconds)
    assert metrics["tlt/overhead_s"] >= metrics["tlt/overhead_cold_start_s"]
    assert metrics["tlt/publish_skipped"] == 0 and metrics["tlt/errors"] == metrics["tlt/spot_failures"] == 0
    assert metrics["tlt/spot_steps"] == 2 * 20 * (PORTIONS + 1)
    assert metrics["tlt/bubble_s"] == 0, "RL waits: it is no bubble"


def test_there_is_no_other(begin, took):
    controller, fleet = begin()
    took(controller)
    rest_of_step(controller, fleet, STEPS + 1)
    trained = len(called(fleet, "train"))
    sample(controller, fleet, STEPS + 2)
    assert took(controller, STEPS + 2) == 0.0 and len(called(fleet, "train")) == trained
    assert "tlt/overhead_cold_start_s" not in rest_of_step(controller, fleet, STEPS + 2)


def test_it_ends_when_acceptance_does_not_rise_any_more(begin, took):
    """The second merge and those after it are no better: portions 2 to 4 find that out."""
    controller, _ = begin(acceptance=(0.3,))
    assert took(controller) == pytest.approx(4 * PORTION_S, abs=0.3)


def test_one_that_gets_worse_in_the_end_serves_what_was_good(begin, took):
    controller, fleet = begin(acceptance=(0.3, 0.05))
    took(controller)
    metrics = rest_of_step(controller, fleet, STEPS + 1)
    assert called(fleet, "revert")[0] == ("served",) and [d.version for d in fleet.staged] == [1]
    assert metrics["tlt/publish_skipped"] == 0 and metrics["tlt/drafter_version"] == 1
    assert controller.updates.served.acceptance[0] == pytest.approx(0.3, abs=0.01)


def test_portions_grow_until_their_scores_leave_time_to_train(begin, took):
    controller, fleet = begin(acceptance=(0.1, 0.2))
    fleet.scores_s = 1.5 * PORTION_S
    assert took(controller) <= SECONDS + 0.5
    assert len(called(fleet, "merge")) == 2 and [d.version for d in fleet.staged] == [1]


def test_it_ends_when_drafting_pays_and_more_would_not(begin, took):
    """Of a rollout of a second the first drafter saves half, and a little more of it takes seconds to learn."""
    controller, fleet = begin(acceptance=(0.6, 0.61, 0.62, 0.63))
    assert took(controller, steps_left=100) == pytest.approx(4 * PORTION_S, abs=0.3)
    assert controller.updates.served.acceptance[0] == pytest.approx(0.62, abs=0.01)
    metrics = rest_of_step(controller, fleet, STEPS + 1)
    saves = 1 - 1 / expected_accept_lengths([0.62] * 3, 3)[-1]
    assert metrics["tlt/cold_start_expected_s"] == pytest.approx(100 * saves, rel=0.02), "of rollouts of a second"
    assert metrics["tlt/cold_start_steps"] == 100, "no bubble teaches"
    assert not metrics.keys() & rest_of_step(controller, fleet, STEPS + 2).keys() & {"tlt/cold_start_expected_s"}


@pytest.mark.parametrize(
    "settings",
    [
        {"untrained": False},
        {"cold_start_s": 0.0},
        {"mode": "separate_async"},
        {"enable": False},
        {"policy": "off"},
        {"source": "ngram"},
    ],
    ids=str,
)
def test_a_run_without_reason_for_one_has_none(run, settings, clock):
    """With a drafter, told not to, on devices that rollout does not use, or where nothing would be drafted with it."""
    controller, fleet = run(**{"untrained": True, "cold_start_s": SECONDS} | settings)
    fill_buffers(controller, fleet)
    for step in range(2, STEPS + 2):
        with sampling(controller, fleet, step):
            pass
        start, trained = clock.now, len(called(fleet, "train"))
        controller.cold_start(step, 1000)
        assert clock.now == start and len(called(fleet, "train")) == trained
        rest_of_step(controller, fleet, step)
    assert set(fleet.tap_tokens) == {TOKENS_PER_STEP}


def test_a_run_that_is_too_short_has_none_unless_it_was_told_to(begin, took):
    controller, fleet = begin(cold_start_s=None)  # steps of two seconds
    assert took(controller, steps_left=10) == 0.0 and called(fleet, "train") == []


def test_by_itself_it_takes_a_hundredth_of_what_is_left(begin, took):
    controller, _ = begin(cold_start_s=None, acceptance=(0.2, 0.4, 0.6, 0.8, 0.9))
    assert took(controller, steps_left=1000) == pytest.approx(20.0, abs=0.5)


def test_more_hidden_states_are_captured_for_it(begin):
    _, fleet = begin()
    assert set(fleet.tap_tokens) == {4 * TOKENS_PER_STEP}


def test_one_that_nobody_may_begin_waits_for_a_later_step(begin, took, tmp_path):
    controller, fleet = begin()
    write_switch(tmp_path / "trace", spot=False)
    rest_of_step(controller, fleet, STEPS + 1)
    sample(controller, fleet, STEPS + 2)
    assert took(controller, STEPS + 2) == 0.0
    write_switch(tmp_path / "trace", spot=True)
    rest_of_step(controller, fleet, STEPS + 2)
    sample(controller, fleet, STEPS + 3)
    assert took(controller, STEPS + 3) > 0.0 and called(fleet, "train")


def test_what_a_bubble_has_just_trained_is_merged_first(begin, took):
    controller, fleet = begin()
    rest_of_step(controller, fleet, STEPS + 1)
    with sampling(controller, fleet, STEPS + 2):
        fleet.clock.until(lambda: called(fleet, "train") == [("b",)])
    took(controller, STEPS + 2)
    assert called(fleet, "merge")[:2] == [(("b",),), (("a", "b"),)]


def test_a_worker_that_fails_leaves_it_to_the_others(begin, took):
    controller, fleet = begin()
    fleet.broken["session of b"] = CallFailed("RayTaskError: out of luck")
    took(controller)
    assert called(fleet, "train").count(("b",)) == 1 < called(fleet, "train").count(("a",))
    assert set(called(fleet, "merge")) == {(("a",),)}
    metrics = rest_of_step(controller, fleet, STEPS + 1)
    assert metrics["tlt/spot_failures"] == 1 and metrics["tlt/errors"] == 0


def test_where_everybody_fails_rl_goes_on_at_once(begin, took):
    controller, fleet = begin()
    for name in ("a", "b"):
        fleet.broken[f"session of {name}"] = CallFailed("RayActorError: gone", died=True)
    assert took(controller) <= LOOKS_S
    assert sorted(fleet.restarts) == ["a", "b"]
    metrics = rest_of_step(controller, fleet, STEPS + 1)
    assert metrics["tlt/spot_failures"] == 2 and metrics["tlt/drafter_version"] == 0


def test_one_that_does_not_stop_is_killed_after_its_bound(begin, took):
    controller, fleet = begin(acceptance=[0.05 * i for i in range(1, 20)])
    fleet.deaf = {"b"}
    assert took(controller) <= SECONDS + STOP_S + 0.5
    assert fleet.restarts == ["b"] and fleet.on_device == set()


def test_a_merge_that_is_late_ends_it_and_is_published_with_the_weight_sync(begin, took):
    controller, fleet = begin(cold_start_s=0.8)
    fleet.merge_gate.clear()
    took(controller)
    assert len(called(fleet, "train")) == 2, "one portion"
    fleet.merge_gate.set()
    rest_of_step(controller, fleet, STEPS + 1)
    sample(controller, fleet, STEPS + 2)
    assert controller.updates.under_way is None and controller.guard.counts == {}


@pytest.mark.parametrize("method", ["merge", "stage", "export"])
def test_what_fails_once_costs_itself_and_the_cold_start_goes_on(begin, took, method):
    controller, fleet = begin(acceptance=[0.1 * i for i in range(1, 9)])
    works, failed = getattr(fleet, method), []

    def fail_once(*args):
        if not failed:
            failed.append(method)
            raise CallFailed("RayActorError: gone", died=True)
        return works(*args)

    setattr(fleet, method, fail_once)
    assert took(controller) == pytest.approx(SECONDS, abs=0.5)
    assert len(called(fleet, "merge")) >= PORTIONS - 1 and len(fleet.staged) >= PORTIONS - 2
    metrics = rest_of_step(controller, fleet, STEPS + 1)
    assert controller.guard.counts == {"publish": 1} and metrics["tlt/drafter_version"] == len(fleet.staged)


def test_merges_that_go_on_failing_end_it_and_are_counted(begin, took):
    controller, fleet = begin()
    fleet.broken["merge"] = CallFailed("no answer within 120 s")
    assert took(controller) == pytest.approx(FLAT * PORTION_S, abs=0.3)
    assert rest_of_step(controller, fleet, STEPS + 1)["tlt/errors_publish"] == FLAT


def test_one_in_which_no_worker_comes_as_far_as_a_step_ends_as_soon_as_that_is_seen(begin, took):
    """As on a machine with much else to do: its time is charged, and no merge is tried."""
    controller, fleet = begin()
    fleet._end = lambda name: (fleet.on_device.discard(name), fleet.sessions[name].end(SessionResult("stopped")))
    seconds = took(controller)
    assert seconds == pytest.approx(FLAT * PORTION_S, abs=0.3) and called(fleet, "merge") == []
    metrics = rest_of_step(controller, fleet, STEPS + 1)
    assert metrics["tlt/overhead_cold_start_s"] == pytest.approx(seconds) and metrics["tlt/errors"] == 0


def test_one_whose_workers_may_not_train_any_more_ends_at_once(begin, took):
    """They all died in the portion before, and pause."""
    controller, fleet = begin(acceptance=[0.1 * i for i in range(1, 9)])
    train = fleet.train

    def dies_in_the_second(name):
        if called(fleet, "train").count((name,)) == 1:
            fleet.broken[f"session of {name}"] = CallFailed("RayActorError: gone", died=True)
        return train(name)

    fleet.train = dies_in_the_second
    assert took(controller) <= PORTION_S + LOOKS_S
    assert rest_of_step(controller, fleet, STEPS + 1)["tlt/spot_failures"] == 2
