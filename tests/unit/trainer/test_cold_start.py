"""The cold start in whole RL steps with a fleet of plain objects: when it comes, what it costs, and what may fail."""

import pytest
from fake_fleet import FakeFleet
from rl_steps import LOOKS_S, STOP_S, rest_of_step, sampled, training

from verl_tlt.config import TOKENS_PER_STEP
from verl_tlt.messages.training import SessionResult
from verl_tlt.speculation.acceptance import expected_accept_lengths
from verl_tlt.speculation.costs.tables import LatencyTable
from verl_tlt.speculation.types import OFF
from verl_tlt.trainer.cold_start import FLAT, PORTIONS, STEPS
from verl_tlt.trainer.waits import CallFailed

SECONDS = 8.0
PORTION_S = SECONDS / PORTIONS
HERE = STEPS + 1
"""The step of the cold start."""
RISING = [0.1 * i for i in range(1, 9)]
DEAD = CallFailed("RayActorError: gone", died=True)


class Learning(FakeFleet):
    """What is merged is accepted as often as `acceptance` says next, and what is published is served."""

    scores_s, merges = 0.0, 0
    to_judge, candidate_acceptance, served_acceptance = False, 0.0, 0.0

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
        self.merges += 1
        self.candidate_acceptance = self.acceptance[min(self.merges, len(self.acceptance)) - 1]
        return super().merge(names)

    def export(self, version, dtype, acceptance):
        self.exported = self.candidate_acceptance
        return super().export(version, dtype, acceptance)

    def keep_as_served(self):
        self.served_acceptance = self.exported
        super().keep_as_served()


@pytest.fixture
def begin(run):
    """A controller after its sampling in the step of the cold start; drafting costs nothing, which is known."""

    def to_there(acceptance=(0.1,), cold_start_s=SECONDS):
        costs = LatencyTable.calibrated({k: [(1, 0.01), (8, 0.01)] for k in (OFF, 0, 3)})
        untaught, new = {"acceptance": acceptance, "costs": costs}, {"untrained": True}
        controller, fleet = run(kind=Learning, of_fleet=untaught, start=new, cold_start_s=cold_start_s)
        for step in range(1, HERE):
            sampled(controller, step)
            controller.cold_start(step, 1000)
            assert fleet.called("train") == [], "it waits for hidden states"
            rest_of_step(controller, fleet, step)
        sampled(controller, HERE)
        return controller, fleet

    return to_there


@pytest.fixture
def took(took):
    """Seconds that the cold start took."""
    return lambda controller, step=HERE, steps_left=1000: took(controller.cold_start, step, steps_left)


def test_all_devices_train_at_the_same_time_once_and_the_coming_rollout_drafts(begin, took):
    controller, fleet = begin(RISING)
    together = []
    stop = fleet.stop
    fleet.stop = lambda name: (together.append(len(fleet.on_device)), stop(name))
    assert fleet.disabled == {"a", "b"}, "nothing to draft with"
    assert set(fleet.tap_tokens) == {4 * TOKENS_PER_STEP}, "for the cold start"
    seconds = took(controller)
    assert seconds == pytest.approx(SECONDS, abs=0.5) and max(together) == 2
    assert fleet.on_device == set(), "a guest is on the device when the actor comes"
    metrics = rest_of_step(controller, fleet, HERE)
    assert metrics["tlt/drafter_version"] == len(fleet.staged) == PORTIONS, "the last portion is judged, too"
    assert fleet.disabled == set(), "it drafts"
    assert metrics["tlt/overhead_cold_start_s"] == pytest.approx(seconds)
    assert metrics["tlt/overhead_s"] >= metrics["tlt/overhead_cold_start_s"]
    assert metrics["tlt/publish_skipped"] == 0 and metrics["tlt/errors"] == metrics["tlt/spot_failures"] == 0
    assert metrics["tlt/spot_steps"] == 2 * 20 * (PORTIONS + 1)
    assert metrics["tlt/bubble_s"] == 0, "RL waits: it is no bubble"
    trained = len(fleet.called("train"))
    sampled(controller, HERE + 1)
    assert took(controller, HERE + 1) == 0.0 and len(fleet.called("train")) == trained
    assert "tlt/overhead_cold_start_s" not in rest_of_step(controller, fleet, HERE + 1)


# ---------------------------------------------------------------------- whether it comes, and how long it takes


@pytest.mark.parametrize(
    ("new", "settings"),
    [
        (False, {}),
        (True, {"cold_start_s": 0.0}),
        (True, {"mode": "separate_async"}),
        (True, {"enable": False}),
        (True, {"policy": "off"}),
        (True, {"source": "ngram"}),
    ],
)
def test_a_run_without_reason_for_one_has_none(filled, took, new, settings):
    """With a drafter, told not to, on devices that rollout does not use, or where nothing would be drafted with it."""
    controller, fleet = filled(start={"untrained": new}, **{"cold_start_s": SECONDS} | settings)
    for step in range(2, HERE + 1):
        with training(controller, fleet, step):
            pass
        trained = len(fleet.called("train"))
        assert took(controller, step) == 0.0 and len(fleet.called("train")) == trained
        rest_of_step(controller, fleet, step)
    assert set(fleet.tap_tokens) == {TOKENS_PER_STEP}


@pytest.mark.parametrize(("steps_left", "seconds"), [(10, 0.0), (1000, 20.0)])
def test_by_itself_it_takes_a_hundredth_of_what_is_left_where_that_is_enough(begin, took, steps_left, seconds):
    controller, fleet = begin((0.2, 0.4, 0.6, 0.8, 0.9), cold_start_s=None)  # steps of two seconds
    assert took(controller, steps_left=steps_left) == pytest.approx(seconds, abs=0.5)
    assert bool(fleet.called("train")) == bool(seconds)


def test_what_a_bubble_has_just_trained_is_merged_first(begin, took):
    controller, fleet = begin()
    rest_of_step(controller, fleet, HERE)
    with training(controller, fleet, HERE + 1):
        pass
    took(controller, HERE + 1)
    assert fleet.called("merge")[:2] == [(("b",),), (("a", "b"),)]


def test_it_ends_when_acceptance_does_not_rise_any_more(begin, took):
    """The second merge and those after it are no better: portions 2 to 4 find that out."""
    controller, _ = begin((0.3,))
    assert took(controller) == pytest.approx(4 * PORTION_S, abs=0.3)


def test_one_that_gets_worse_in_the_end_serves_what_was_good(begin, took):
    controller, fleet = begin((0.3, 0.05))
    took(controller)
    metrics = rest_of_step(controller, fleet, HERE)
    assert fleet.called("revert")[0] == ("served",) and [d.version for d in fleet.staged] == [1]
    assert metrics["tlt/publish_skipped"] == 0 and metrics["tlt/drafter_version"] == 1
    assert controller.updates.served.acceptance[0] == pytest.approx(0.3, abs=0.01)


def test_portions_grow_until_their_scores_leave_time_to_train(begin, took):
    controller, fleet = begin((0.1, 0.2))
    fleet.scores_s = 1.5 * PORTION_S
    assert took(controller) <= SECONDS + 0.5
    assert len(fleet.called("merge")) == 2 and [d.version for d in fleet.staged] == [1]


def test_it_ends_when_drafting_pays_and_more_would_not(begin, took):
    """Of a rollout of a second the first drafter saves half, and a little more of it takes seconds to learn."""
    controller, fleet = begin((0.6, 0.61, 0.62, 0.63))
    assert took(controller, steps_left=100) == pytest.approx(4 * PORTION_S, abs=0.3)
    assert controller.updates.served.acceptance[0] == pytest.approx(0.62, abs=0.01)
    metrics = rest_of_step(controller, fleet, HERE)
    saves = 1 - 1 / expected_accept_lengths([0.62] * 3, 3)[-1]
    assert metrics["tlt/cold_start_expected_s"] == pytest.approx(100 * saves, rel=0.02), "of rollouts of a second"
    assert metrics["tlt/cold_start_steps"] == 100, "no bubble teaches"
    assert "tlt/cold_start_expected_s" not in rest_of_step(controller, fleet, HERE + 1)


# ---------------------------------------------------------------------- what fails


@pytest.mark.parametrize(("failing", "error"), [("b", CallFailed("RayTaskError: out of luck")), ("ab", DEAD)])
def test_workers_that_fail_leave_it_to_the_others_and_where_all_do_rl_goes_on_at_once(begin, took, failing, error):
    controller, fleet = begin()
    fleet.broken |= {f"session of {name}": error for name in failing}
    seconds, everybody = took(controller), failing == "ab"
    assert seconds > PORTION_S if not everybody else seconds <= LOOKS_S
    assert fleet.called("train").count(("b",)) == 1 and fleet.called("train").count(("a",)) > 1 - everybody
    assert set(fleet.called("merge")) == (set() if everybody else {(("a",),)})
    assert sorted(fleet.restarts) == (["a", "b"] if everybody else [])
    metrics = rest_of_step(controller, fleet, HERE)
    assert metrics["tlt/spot_failures"] == len(failing) and metrics["tlt/errors"] == 0
    assert (metrics["tlt/drafter_version"] == 0) == everybody


def test_one_that_does_not_stop_is_killed_after_its_bound(begin, took):
    controller, fleet = begin([0.05 * i for i in range(1, 20)])
    fleet.deaf = {"b"}
    assert took(controller) <= SECONDS + STOP_S + 0.5
    assert fleet.restarts == ["b"] and fleet.on_device == set()


def test_a_merge_that_is_late_ends_it_and_is_published_with_the_weight_sync(begin, took):
    controller, fleet = begin(cold_start_s=0.8)
    fleet.merge_gate.clear()
    took(controller)
    assert len(fleet.called("train")) == 2, "one portion"
    fleet.merge_gate.set()
    rest_of_step(controller, fleet, HERE)
    sampled(controller, HERE + 1)
    assert controller.updates.under_way is None and controller.guard.counts == {}


@pytest.mark.parametrize("method", ["merge", "stage", "export"])
def test_what_fails_once_costs_itself_and_the_cold_start_goes_on(begin, took, method):
    controller, fleet = begin(RISING)
    works, failed = getattr(fleet, method), []

    def fail_once(*args):
        if not failed:
            failed.append(method)
            raise DEAD
        return works(*args)

    setattr(fleet, method, fail_once)
    assert took(controller) == pytest.approx(SECONDS, abs=0.5)
    assert len(fleet.called("merge")) >= PORTIONS - 1 and len(fleet.staged) >= PORTIONS - 2
    metrics = rest_of_step(controller, fleet, HERE)
    assert controller.guard.counts == {"publish": 1} and metrics["tlt/drafter_version"] == len(fleet.staged)


def test_merges_that_go_on_failing_end_it_and_are_counted(begin, took):
    controller, fleet = begin()
    fleet.broken["merge"] = CallFailed("no answer within 120 s")
    assert took(controller) == pytest.approx(FLAT * PORTION_S, abs=0.3)
    assert rest_of_step(controller, fleet, HERE)["tlt/errors_publish"] == FLAT


def test_one_in_which_no_worker_comes_as_far_as_a_step_ends_as_soon_as_that_is_seen(begin, took):
    """As on a machine with much else to do: its time is charged, and no merge is tried."""
    controller, fleet = begin()
    fleet._end = lambda name: (fleet.on_device.discard(name), fleet.sessions[name].end(SessionResult("stopped")))
    seconds = took(controller)
    assert seconds == pytest.approx(FLAT * PORTION_S, abs=0.3) and fleet.called("merge") == []
    metrics = rest_of_step(controller, fleet, HERE)
    assert metrics["tlt/overhead_cold_start_s"] == pytest.approx(seconds) and metrics["tlt/errors"] == 0


def test_one_whose_workers_may_not_train_any_more_ends_at_once(begin, took):
    """They all died in the portion before, and pause."""
    controller, fleet = begin(RISING)
    train = fleet.train

    def dies_in_the_second(name):
        if (name,) in fleet.called("train"):
            fleet.broken[f"session of {name}"] = DEAD
        return train(name)

    fleet.train = dies_in_the_second
    assert took(controller) <= PORTION_S + LOOKS_S
    assert rest_of_step(controller, fleet, HERE)["tlt/spot_failures"] == 2
