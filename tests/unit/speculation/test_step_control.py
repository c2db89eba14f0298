"""Speculation control of one engine: who chooses K, what bounds it, and what is summed and written of each step."""

import json
import math
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from step_costs import step_costs

from verl_tlt.commands.report.reader import read_trace
from verl_tlt.messages import from_plain
from verl_tlt.messages.rollout import EngineStats
from verl_tlt.speculation import step_control
from verl_tlt.speculation.limits import Limits, context_limit
from verl_tlt.speculation.policies import PROBES, FixedPolicy
from verl_tlt.speculation.step_control import StepControl, StepTrace
from verl_tlt.speculation.step_statistics import FEWEST_UNDRAFTED, Decoded, Undrafted, undrafted_s
from verl_tlt.speculation.types import OFF, Policy, Step

LIMITS = Limits((0, 1, 2, 3))
GRAPHS = Limits((0, 1, 3), token_limit=512, rows=2048)
UNDRAFTED = dict(verified=0, num_drafts=0, num_accepted_tokens_per_pos=())


class Remembers(Policy):
    def __init__(self, answer=2):
        self.answer, self.seen = answer, []
        self.acceptance = self.table = None

    def choose(self, batch):
        return self.answer

    def observe(self, step):
        self.seen.append(step)

    def set_acceptance(self, conditional):
        self.acceptance = conditional

    def set_costs(self, table):
        self.table = table


def step(**changes):
    values = dict(
        batch=4, kv_tokens=100, drafted=2, verified=2, num_drafts=4, num_accepted_tokens_per_pos=(3, 1),
        num_decode_tokens=8, latency_s=0.02, clean=True,
    ) | changes  # fmt: skip
    return Step(**values, num_draft_tokens=values["num_drafts"] * values["verified"], unix_s=time.time())


def points(table):
    return step_costs(table).to_list()


def record(control, *steps):
    for s in steps:
        control.record(s)


@pytest.fixture
def control():
    return StepControl(Remembers(), LIMITS)


@pytest.mark.parametrize(
    ("wanted", "batch", "chosen"),
    [(3, 128, 3), (3, 129, 1), (3, 257, 0), (1, 300, 0), (0, 600, 0), (3, 513, 1), (3, 1024, 1), (9, 8, 3), (-1, 8, 0)],
)
def test_no_draft_is_longer_than_the_engine_can_have(wanted, batch, chosen):
    policy = FixedPolicy(wanted)
    assert StepControl(policy, GRAPHS).choose(batch) == chosen
    assert StepControl(policy, Limits((0, 1, 3))).choose(batch) == max(0, min(wanted, 3)), "without graphs"
    forced = StepControl(FixedPolicy(0), GRAPHS)
    forced.force_k = max(wanted, 0)
    assert forced.choose(batch) == chosen


@pytest.mark.parametrize("wanted", [2, 1.5])
def test_a_policy_of_ones_own_gets_a_draft_length_that_the_engine_has(wanted):
    assert StepControl(FixedPolicy(wanted), Limits((0, 1, 3))).choose(8) == 1


def test_force_and_off_overrule_it_and_the_first_step_after_off_drafts_again(control):
    control.control(force_k=1)
    assert control.choose(4) == 1
    control.control(drafting=False)
    record(control, step(drafted=OFF, **UNDRAFTED))
    assert control.choose(4) == OFF
    assert control.control(drafting=True, force_k=None) == {"drafting": True, "force_k": None}
    assert control.choose(4) == 2


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"force_k": 4}, "force_k must be null or one of"),
        ({"force_k": "2"}, "force_k must be null or one of"),
        ({"pace": 2}, "control does not know pace"),
        ({"points": [{"batch": 0, "kv_tokens": 0, "draft_length": 0, "seconds": 1.0}]}, "points.0.batch must be .* 1"),
    ],
)
def test_a_wrong_setting_is_refused_and_changes_nothing(control, settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        control.control(**settings)
    assert control.choose(1) == 2


def test_estimates_reach_the_policy(control):
    control.control(acceptance=[0.8, 0.5], points=points({0: [(1, 0.1)], 3: [(1, 0.4)], OFF: [(1, 0.05)]}))
    assert control.policy.table.lengths() == (OFF, 0, 3)
    control.control(acceptance=None)
    assert control.policy.acceptance == [0.8, 0.5]
    control.control(acceptance=[])
    assert control.policy.acceptance == [], "another drafter, of which nothing is known"


def test_sums_are_those_of_the_steps_and_reset(control):
    steps = [
        step(),
        step(drafted=0, clean=False, latency_s=0.06),
        step(drafted=0, **UNDRAFTED, num_decode_tokens=4),
        step(drafted=OFF, **UNDRAFTED, num_decode_tokens=4),
    ]
    record(control, *steps)
    stats = control.stats(reset=True)
    assert control.policy.seen == steps
    assert (stats.num_steps, stats.num_decode_tokens, stats.num_drafts) == (4, 24, 8)
    assert (stats.num_draft_tokens_per_pos, stats.num_accepted_tokens_per_pos) == ((8, 8), (6, 2))
    assert stats.steps_by_draft_length == {OFF: 1, 0: 1, 2: 2}
    assert stats.tokens_by_batch == {4: 24}
    assert stats.step_times == ((OFF, 4, 0.02), (0, 4, 0.02), (2, 4, 0.02)), "medians of the clean steps alone"
    assert stats.mean_context == 25.0 and stats.decode_s == pytest.approx(0.12)
    assert from_plain(EngineStats, json.loads(json.dumps(asdict(stats)))) == stats, "nothing is lost on the way"
    assert control.stats().num_steps == 0


def test_the_trace_holds_every_step_once_asked_for(tmp_path):
    trace = StepTrace(tmp_path / "deep" / "engine-0.jsonl")
    control = StepControl(Remembers(), LIMITS, trace)
    record(control, step(), step(drafted=OFF, **UNDRAFTED, clean=False))
    control.flush(60.0)
    lines = [json.loads(line) for line in trace.path.read_text().splitlines()]
    assert [line.pop("t") > 1.6e9 for line in lines] == [True, True]
    assert lines == [{"batch": 4, "k": 2, "latency_s": 0.02}, {"batch": 4, "k": OFF, "latency_s": 0.02}]


def test_a_full_trace_begins_anew_and_the_report_reads_the_file_before_it_too(tmp_path, monkeypatch):
    trace = StepTrace(tmp_path / "engine-0.jsonl")
    for n in range(3):
        monkeypatch.setattr(step_control, "MOST_BYTES", 1 if n < 2 else 1 << 20)
        trace.add(replace(step(), unix_s=1e9 + n, drafted=n))
        trace.flush(60.0)
    assert read_trace(tmp_path).engine("0", 0.0, math.inf).k.tolist() == [1, 2], "of the older files one stays"


def test_a_disk_that_hangs_holds_up_no_step_and_lacks_what_did_not_fit(tmp_path, monkeypatch, caplog):
    goes_on, opened = threading.Event(), Path.open
    monkeypatch.setattr(Path, "open", lambda *given, **more: goes_on.wait(60) and opened(*given, **more))
    caplog.set_level("WARNING", "verl_tlt")
    monkeypatch.setattr(step_control, "UNWRITTEN", 2)
    control = StepControl(Remembers(), LIMITS, StepTrace(tmp_path / "engine-0.jsonl"))
    begun = time.monotonic()
    for n in range(9):
        record(control, replace(step(), unix_s=1e9 + n))
    control.flush(0.2)
    assert time.monotonic() - begun < 5.0
    assert caplog.text.count("The disk is too slow: some engine steps are missing") == 1
    goes_on.set()
    control.flush(60.0)
    assert 2 <= len(control.trace.path.read_text().splitlines()) < 9


def test_a_clock_that_is_set_back_holds_up_no_trace(tmp_path):
    """Without being told to, the thread writes what came before."""
    trace = StepTrace(tmp_path / "engine-0.jsonl")
    control = StepControl(Remembers(), LIMITS, trace)
    for unix_s in (2e9, 1e9):
        record(control, replace(step(), unix_s=unix_s))
    deadline = time.monotonic() + 60.0
    while not (trace.path.exists() and len(trace.path.read_text().splitlines()) >= 2):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("in_the_way", [Path.mkdir, lambda path: path.parent.touch()])
def test_a_trace_that_cannot_be_written_ends_alone(tmp_path, in_the_way):
    path = tmp_path / "engine-0.jsonl" if in_the_way is Path.mkdir else tmp_path / "trace" / "engine-0.jsonl"
    in_the_way(path)
    control = StepControl(Remembers(), LIMITS, StepTrace(path))
    record(control, step(), step())
    control.flush(60.0)
    assert control.trace.failed
    assert control.stats().num_steps == 2


def test_forced_steps_are_summed_and_teach_the_policy_nothing(control):
    control.control(force_k=2)
    record(control, step())
    assert control.policy.seen == [] and control.stats().num_drafts == 4


# ---------------------------------------------------------------------- what it would have taken without drafts

COSTS = {OFF: [(4, 0.010), (8, 0.012)], 0: [(4, 0.011), (8, 0.013)], 2: [(4, 0.015), (8, 0.02)]}


def test_a_slower_machine_would_have_been_slower_without_drafts_too(control):
    control.control(points=points(COSTS))
    record(control, *[step(latency_s=0.030)] * 10, step(latency_s=0.030, clean=False))
    stats = control.stats()
    assert stats.undrafted_s == pytest.approx(22 * 2 * 0.010), "by the pace of the clean steps"


def test_drafts_that_cost_more_than_calibrated_save_less(control):
    """Steps without drafts, which are as fast as calibrated, say that it is not the machine."""
    control.control(points=points(COSTS))
    undrafted = step(drafted=0, **UNDRAFTED, num_decode_tokens=4, latency_s=0.011)
    stalled = replace(undrafted, latency_s=0.1)
    record(control, *[step(latency_s=0.030)] * 10, *[undrafted] * (FEWEST_UNDRAFTED - 1), stalled)
    stats = control.stats(reset=True)
    assert stats.undrafted_s == pytest.approx((20 + FEWEST_UNDRAFTED) * 0.010)
    assert stats.undrafted_s < stats.decode_s
    record(control, *[step(latency_s=0.030)] * 10)
    assert control.stats(reset=True).undrafted_s == pytest.approx(20 * 0.010), "few in a rollout count in the next, too"
    control.control(points=points(COSTS))
    record(control, *[step(latency_s=0.030)] * 10)
    assert control.stats().undrafted_s == pytest.approx(20 * 0.020), "a new calibration begins anew"


def test_the_pace_is_that_of_steps_without_drafts_at_such_batches():
    """In the tail a session may train beside the engine."""
    costs = step_costs({OFF: [(1, 0.01), (8, 0.01)], 2: [(1, 0.02), (8, 0.02)]})
    known = [Undrafted(OFF, batch, 32.0, 0.01 * pace) for batch, pace in ((1, 1.5), (8, 1.0)) for _ in range(16)]
    cells = [Decoded(2, batch, seconds=1.0, tokens=100 * batch, kv_tokens=320 * batch, steps=10) for batch in (1, 8, 4)]
    assert [undrafted_s([cell], costs, known) for cell in cells] == pytest.approx([1.5, 1.0, 1.25])


def test_a_trial_without_drafts_tells_the_pace():
    assert 2 * (PROBES - 1) >= FEWEST_UNDRAFTED, "the first step of a trial verifies drafts"


def test_steps_that_were_off_count_as_they_are_and_without_a_calibration_all_do(control):
    off = step(drafted=OFF, **UNDRAFTED, num_decode_tokens=4, latency_s=0.05)
    record(control, step())
    assert control.stats(reset=True).undrafted_s == pytest.approx(0.02)
    control.control(points=points(COSTS))
    record(control, off, off)
    assert control.stats().undrafted_s == pytest.approx(0.10)


def test_nothing_is_saved_by_off_that_was_calibrated_slower_than_a_step_with_the_drafter(control):
    control.control(points=points(COSTS | {OFF: [(4, 0.030), (8, 0.030)]}))
    undrafted = step(drafted=0, **UNDRAFTED, num_decode_tokens=4, latency_s=0.011)
    record(control, *[undrafted] * 10)
    stats = control.stats()
    assert stats.undrafted_s == pytest.approx(stats.decode_s) == pytest.approx(0.11)


def test_prefills_are_left_out(control):
    control.control(points=points(COSTS))
    record(control, step(decode_only=False, clean=False))
    stats = control.stats()
    assert (stats.decode_s, stats.undrafted_s) == (0.0, 0.0) and stats.num_steps == 1


@pytest.mark.parametrize(("behind", "longest"), [(2, 1), (2, 7), (3, 3)])
def test_drafts_end_before_the_drafters_positions_do_and_not_much_earlier(behind, longest):
    """Every draft is accepted whole, so that each step adds as many tokens as it can."""
    positions, each = 200, longest + 1
    ends = []
    for first in range(20, 20 + each):
        starts = range(first, positions, each)  # tokens of context by step
        known = zip(starts, starts[behind:], strict=False)
        drafted = [start for before, start in known if before <= context_limit(positions, longest, behind)]
        ends.append(drafted[-1] + each + longest)  # what this step verifies, and the draft after it
    assert positions - each <= max(ends) <= positions
