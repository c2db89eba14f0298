"""Speculation control of one engine: who chooses K, what bounds it, and what is summed and written of each step."""

import json
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from verl_tlt.messages import from_plain
from verl_tlt.messages.rollout import EngineStats, ResponseDrafts
from verl_tlt.speculation.acceptance import FIRST_GUESS
from verl_tlt.speculation.costs.tables import LatencyTable
from verl_tlt.speculation.policies import POLICIES, FixedPolicy, make_policy
from verl_tlt.speculation.step_control import Limits, StepControl, StepTrace
from verl_tlt.speculation.step_statistics import DraftsByLength
from verl_tlt.speculation.types import OFF, Load, Policy, Step

LIMITS = Limits((0, 1, 2, 3))
GRAPHS = Limits((0, 1, 3), token_limit=512)
LOAD = Load(4, 100)
UNDRAFTED = dict(verified=0, num_drafts=0, num_accepted_tokens_per_pos=())


class Remembers(Policy):
    def __init__(self, answer=2):
        self.answer, self.seen, self.prepared = answer, [], []
        self.acceptance = self.table = None

    def choose(self, load):
        return self.answer

    def observe(self, step):
        self.seen.append(step)

    def prepare(self, load):
        self.prepared.append(load)

    def set_acceptance(self, conditional):
        self.acceptance = conditional

    def set_latency(self, table):
        self.table = table


def step(**changes):
    values = dict(
        batch=4, kv_tokens=100, drafted=2, verified=2, num_drafts=4, num_accepted_tokens_per_pos=(3, 1),
        num_decode_tokens=8, latency_s=0.02, clean=True,
    ) | changes  # fmt: skip
    return Step(**values, num_draft_tokens=values["num_drafts"] * values["verified"], unix_s=time.time())


def points(table):
    return LatencyTable.calibrated(table).to_list()


def record(control, *steps):
    for s in steps:
        control.record(s)


@pytest.fixture
def control():
    return StepControl(Remembers(), LIMITS)


@pytest.mark.parametrize(
    ("wanted", "batch", "chosen"),
    [(3, 128, 3), (3, 129, 1), (3, 257, 0), (1, 300, 0), (0, 600, 0), (9, 8, 3), (-1, 8, 0)],
)
def test_no_draft_is_longer_than_the_engine_can_have(wanted, batch, chosen):
    policy = FixedPolicy(wanted)
    assert StepControl(policy, GRAPHS).choose(Load(batch, 0)) == chosen
    assert StepControl(policy, Limits((0, 1, 3))).choose(Load(batch, 0)) == max(0, min(wanted, 3)), "without graphs"
    forced = StepControl(FixedPolicy(0), GRAPHS)
    forced.force_k = max(wanted, 0)
    assert forced.choose(Load(batch, 0)) == chosen


@pytest.mark.parametrize("forced", [None, 3])
def test_one_request_that_could_outgrow_the_drafter_stops_it_for_all(forced):
    control = StepControl(FixedPolicy(3 if forced is None else 0), Limits((0, 1, 3), context_limit=61))
    control.force_k = forced
    assert [control.choose(LOAD, longest) for longest in (61, 62)] == [3, 0]


def test_a_policy_is_asked_only_where_it_decides(control):
    control.policy.choose = lambda load: 1 / 0
    assert control.choose(Load(0, 0)) == 0, "nobody decodes"
    control.force_k = 2
    assert control.choose(LOAD) == 2
    control.drafting = False
    assert control.choose(LOAD, longest=10**9) == OFF
    assert control.failure is None


def test_force_and_off_overrule_it_and_the_first_step_after_off_drafts_again(control):
    control.control(force_k=1)
    assert control.choose(LOAD) == 1
    control.control(drafting=False)
    record(control, step(drafted=OFF, **UNDRAFTED))
    assert control.choose(LOAD) == OFF
    assert control.control(drafting=True, force_k=None) == {"drafting": True, "force_k": None}
    assert control.choose(LOAD) == 2


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"force_k": 4}, "force_k must be 0..3"),
        ({"force_k": "2"}, "force_k must be 0..3"),
        ({"pace": 2}, "control does not know pace"),
        ({"points": [{"batch": 0, "kv_tokens": 0, "draft_length": 0, "seconds": 1.0}]}, "points.0.batch must be .* 1"),
    ],
)
def test_a_wrong_setting_is_refused_and_changes_nothing(control, settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        control.control(**settings)
    assert control.choose(Load(1, 1)) == 2


def test_estimates_reach_the_policy(control):
    control.control(acceptance=[0.8, 0.5], points=points({0: [(1, 0.1)], 3: [(1, 0.4)], OFF: [(1, 0.05)]}))
    assert control.policy.table.lengths() == (OFF, 0, 3)
    control.control(acceptance=[])  # "nothing known" must not erase what is known
    assert control.policy.acceptance == [0.8, 0.5]


def test_a_calibration_teaches_costs_and_no_acceptance():
    policy = make_policy("goodput", LIMITS.lengths)
    control = StepControl(policy, LIMITS)
    control.control(force_k=3)
    record(control, *[step(drafted=3, verified=3, num_accepted_tokens_per_pos=(0, 0, 0))] * 50)
    control.control(points=points({0: [(4, 0.01)], 3: [(4, 0.02)]}), force_k=None)
    assert policy.acceptance.conditional[0] == pytest.approx(FIRST_GUESS)
    assert control.stats().num_drafts == 200 and policy.latency.largest_batch(3) == 4
    record(control, *[step(drafted=3, verified=3, num_accepted_tokens_per_pos=(0, 0, 0))] * 50)
    assert policy.acceptance.conditional[0] < 0.1


def test_sums_are_those_of_the_steps_and_reset(control):
    steps = [
        step(accepted=[("a", 2), ("b", 1)], ended=[("a", 12)]),
        step(drafted=0, clean=False, latency_s=0.06),
        step(drafted=0, **UNDRAFTED, num_decode_tokens=4),
        step(drafted=OFF, **UNDRAFTED, num_decode_tokens=4),
    ]
    record(control, *steps)
    stats = control.stats(reset=True)
    assert control.policy.seen == steps
    assert (stats.num_steps, stats.num_passes, stats.num_decode_tokens) == (4, 16, 24)
    assert (stats.num_drafts, stats.num_draft_tokens) == (8, 16)
    assert (stats.num_draft_tokens_per_pos, stats.num_accepted_tokens_per_pos) == ((8, 8), (6, 2))
    assert stats.steps_by_draft_length == {OFF: 1, 0: 1, 2: 2}
    assert stats.tokens_by_batch == {4: 24}
    assert stats.step_times == ((OFF, 4, 0.02), (0, 4, 0.02), (2, 4, 0.02)), "medians of the clean steps alone"
    assert stats.responses == (ResponseDrafts(1, 12, 1, 2),)
    assert from_plain(EngineStats, json.loads(json.dumps(asdict(stats)))) == stats, "nothing is lost on the way"
    assert control.stats().num_steps == 0 and control.stats().responses == ()


def test_the_next_choice_is_prepared_unless_it_is_overruled(control):
    record(control, step())
    assert control.policy.prepared == [LOAD]
    control.control(force_k=1)
    record(control, step())
    assert control.policy.prepared == [LOAD]


def test_the_trace_holds_every_step_once_asked_for(tmp_path):
    trace = StepTrace(tmp_path / "deep" / "engine-0.jsonl")
    control = StepControl(Remembers(), LIMITS, trace)
    record(control, step(), step(drafted=OFF, **UNDRAFTED, clean=False))
    control.flush()
    lines = [json.loads(line) for line in trace.path.read_text().splitlines()]
    assert [line.pop("t") > 1.6e9 for line in lines] == [True, True]
    assert lines[0] == {
        "batch": 4, "kv": 100, "k": 2, "verified": 2, "drafts": 4, "accepted": [3, 1], "produced": 8,
        "latency_s": 0.02, "clean": True,
    }  # fmt: skip
    assert (lines[1]["k"], lines[1]["accepted"], lines[1]["clean"]) == (OFF, [], False)


@pytest.mark.parametrize("in_the_way", [Path.mkdir, lambda path: path.parent.touch()])
def test_a_trace_that_cannot_be_written_ends_alone(tmp_path, in_the_way):
    path = tmp_path / "engine-0.jsonl" if in_the_way is Path.mkdir else tmp_path / "trace" / "engine-0.jsonl"
    in_the_way(path)
    control = StepControl(Remembers(), LIMITS, StepTrace(path))
    record(control, step(), step())
    control.flush()
    assert control.trace.failed
    assert control.stats().num_steps == 2


def test_the_calibration_is_stored_as_it_was_told(control):
    told = {OFF: [(1, 0.010), (8, 0.012)], 0: [(1, 0.011), (8, 0.013)], 3: [(1, 0.02), (8, 0.03)]}
    control.control(points=points(told))
    record(control, *[step(drafted=OFF, **UNDRAFTED, batch=1, kv_tokens=32)] * 50)
    stored = LatencyTable.from_list(control.learned()["points"]).calibration()
    assert {k: stored.by_batch(k) for k in told} == told
    again = StepControl(Remembers(), LIMITS)
    again.control(points=control.learned()["points"])
    assert LatencyTable.from_list(again.learned()["points"]).calibration() == stored


def test_one_that_failed_says_why_in_place_of_figures(control, caplog):
    record(control, step())
    control.fail(ZeroDivisionError("division by zero"))
    assert control.stats() == EngineStats(failure="ZeroDivisionError: division by zero")
    assert [r.getMessage() for r in caplog.records] == [
        "verl-tlt failed in this engine, which decodes with K=0 from here on."
    ]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_that_learns_no_costs_keeps_those_of_earlier_runs(policy):
    control, known = StepControl(make_policy(policy, LIMITS.lengths), LIMITS), points({0: [(1, 0.01)], 3: [(8, 0.02)]})
    control.control(points=[point | {"calibrated": False, "samples": 20} for point in known])
    assert len(control.learned()["points"]) == 2


# ---------------------------------------------------------------------- drafts by the length of their response


def by_length(drafts, accepted=(), ended=()):
    drafts.add(Step(1, 9, 2, 2, accepted=accepted, ended=ended))


def test_drafts_count_for_the_length_their_response_reached():
    drafts = DraftsByLength()
    by_length(drafts, [("short", 0), ("long", 3)])
    by_length(drafts, [("long", 1)], ended=[("short", 10)])
    by_length(drafts, ended=[("undrafted", 10)])
    assert drafts.rows() == (ResponseDrafts(2, 20, 1, 0),)
    by_length(drafts, [("long", 2), ("next", 2)], ended=[("long", 500)])
    assert drafts.rows(reset=True) == (ResponseDrafts(2, 20, 1, 0), ResponseDrafts(1, 500, 3, 6))
    assert drafts.rows() == ()
    by_length(drafts, [("next", 1)], ended=[("next", 64)])
    assert drafts.rows() == (ResponseDrafts(1, 64, 2, 3),), "a reset keeps what is in flight"


def test_a_request_that_ends_without_a_token_is_forgotten():
    drafts = DraftsByLength()
    by_length(drafts, [("a", 2)], ended=[("a", 0)])
    by_length(drafts, ended=[("a", 7)])
    assert drafts.rows() == (ResponseDrafts(1, 7, 0, 0),), "its earlier namesake's draft does not count"


def test_lengths_within_a_twelfth_share_a_row_and_there_are_few_rows():
    drafts = DraftsByLength()
    for tokens in range(1, 32_769):
        by_length(drafts, ended=[("r", tokens)])
    rows = drafts.rows()
    assert sum(row.responses for row in rows) == 32_768
    assert len(rows) <= 8 * 15 + 1
    means = [row.num_tokens / row.responses for row in rows]
    assert means == sorted(means)
