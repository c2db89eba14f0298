import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import pytest

from verl_tlt.messages import from_plain
from verl_tlt.messages.rollout import EngineStats, ResponseDrafts
from verl_tlt.speculation.costs.tables import LatencyTable
from verl_tlt.speculation.policies import FixedPolicy, make_policy
from verl_tlt.speculation.step_control import Limits, StepControl, StepTrace
from verl_tlt.speculation.types import OFF, Load, Policy, Step


@dataclass
class Remembers(Policy):
    answer: int = 2
    seen: list = field(default_factory=list)
    told: dict = field(default_factory=dict)

    def choose(self, load):
        return self.answer

    def observe(self, step):
        self.seen.append(step)

    def set_acceptance(self, conditional):
        self.told["acceptance"] = conditional

    def set_latency(self, table):
        self.told["latency"] = table


def step(**changes):
    values = dict(
        batch=4, kv_tokens=100, drafted=2, verified=2, num_drafts=4, num_accepted_tokens_per_pos=(3, 1),
        num_decode_tokens=8, latency_s=0.02, clean=True,
    ) | changes  # fmt: skip
    return Step(**values, num_draft_tokens=values["num_drafts"] * values["verified"], unix_s=time.time())


LIMITS = Limits((0, 1, 2, 3))
GRAPHS = Limits((0, 1, 3), token_limit=512)
UNDRAFTED = dict(verified=0, num_drafts=0, num_accepted_tokens_per_pos=())


def points(table):
    return LatencyTable.calibrated({k: map(tuple, row) for k, row in table.items()}).to_list()


def record(control, *steps):
    for s in steps:
        control.record(s)


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
    assert [control.choose(Load(4, 100), longest) for longest in (61, 62)] == [3, 0]


def test_a_policy_is_asked_only_where_it_decides():
    policy = Remembers()
    policy.choose = lambda load: 1 / 0
    control = StepControl(policy, GRAPHS)
    assert control.choose(Load(0, 0)) == 0, "nobody decodes"
    control.force_k = 2
    assert control.choose(Load(4, 100)) == 2
    control.drafting = False
    assert control.choose(Load(4, 100), longest=10**9) == OFF
    assert control.policy_error is None


def test_force_and_off_overrule_it():
    control = StepControl(Remembers(), LIMITS)
    control.control(force_k=1)
    assert control.choose(Load(4, 100)) == 1
    control.control(drafting=False)
    assert control.choose(Load(4, 100)) == OFF
    assert control.control(drafting=True, force_k=None) == {"drafting": True, "force_k": None}
    assert control.choose(Load(4, 100)) == 2


def test_the_first_step_after_off_drafts_again():
    control = StepControl(make_policy("fixed", (0, 1, 3)), LIMITS)
    control.control(drafting=False)
    record(control, step(drafted=OFF, **UNDRAFTED))
    control.control(drafting=True)
    assert control.choose(Load(4, 100)) == 3


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"force_k": 4}, "force_k must be 0..3"),
        ({"force_k": "2"}, "force_k must be 0..3"),
        ({"pace": 2}, "control does not know pace"),
        (
            {"points": [{"batch": 0, "kv_tokens": 0, "draft_length": 0, "seconds": 1.0}]},
            "Latency points.0.batch must be greater than or equal to 1, not 0",
        ),
    ],
)
def test_a_wrong_setting_is_refused_and_changes_nothing(settings, sentence):
    control = StepControl(Remembers(), LIMITS)
    with pytest.raises(ValueError, match=sentence):
        control.control(**settings)
    assert control.choose(Load(1, 1)) == 2


def test_estimates_reach_the_policy():
    policy = Remembers()
    control = StepControl(policy, LIMITS)
    control.control(acceptance=[0.8, 0.5], points=points({0: [[1, 0.1]], 3: [[1, 0.4]], -1: [[1, 0.05]]}))
    assert policy.told["acceptance"] == [0.8, 0.5]
    assert policy.told["latency"].lengths() == (OFF, 0, 3)
    control.control(acceptance=[])  # "nothing known" must not erase what is known
    assert policy.told["acceptance"] == [0.8, 0.5]


def test_sums_are_those_of_the_steps_and_reset():
    policy = Remembers()
    control = StepControl(policy, LIMITS)
    steps = [
        step(accepted=[("a", 2), ("b", 1)], ended=[("a", 12)]),
        step(drafted=0, clean=False, latency_s=0.06),
        step(drafted=0, **UNDRAFTED, num_decode_tokens=4),
        step(drafted=OFF, **UNDRAFTED, num_decode_tokens=4),
    ]
    record(control, *steps)
    stats = control.stats(reset=True)
    assert policy.seen == steps
    assert (stats.num_steps, stats.num_passes, stats.num_decode_tokens) == (4, 16, 24)
    assert (stats.num_drafts, stats.num_draft_tokens) == (8, 16)
    assert (stats.num_draft_tokens_per_pos, stats.num_accepted_tokens_per_pos) == ((8, 8), (6, 2))
    assert stats.steps_by_draft_length == {OFF: 1, 0: 1, 2: 2}
    assert stats.tokens_by_batch == {4: 24}
    assert stats.step_times == ((OFF, 4, 0.02), (0, 4, 0.02), (2, 4, 0.02)), "medians of the clean steps alone"
    assert stats.responses == (ResponseDrafts(1, 12, 1, 2),)
    assert from_plain(EngineStats, json.loads(json.dumps(asdict(stats)))) == stats, "nothing is lost on the way"
    assert control.stats().num_steps == 0 and control.stats().responses == ()


def test_the_next_choice_is_prepared_unless_it_is_overruled():
    policy, prepared = Remembers(), []
    policy.prepare = prepared.append
    control = StepControl(policy, LIMITS)
    record(control, step())
    assert prepared == [Load(4, 100)]
    control.control(force_k=1)
    record(control, step())
    assert len(prepared) == 1


@pytest.mark.parametrize("method", ["choose", "observe"])
def test_a_policy_that_raises_costs_speculation_and_is_reported(method):
    policy = Remembers()
    setattr(policy, method, lambda _: 1 / 0)
    control = StepControl(policy, LIMITS)
    record(control, step())
    control.choose(Load(4, 100))
    assert control.choose(Load(4, 100)) == 0
    assert control.stats().policy_error == "ZeroDivisionError: division by zero"
    assert control.stats().num_steps == 1


def test_the_trace_holds_every_step_once_asked_for(tmp_path):
    trace = StepTrace(tmp_path / "deep" / "engine-0.jsonl")
    control = StepControl(Remembers(), LIMITS, trace)
    steps = [step(), step(drafted=OFF, **UNDRAFTED, clean=False)]
    record(control, *steps)
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
    trace = StepTrace(path)
    control = StepControl(Remembers(), LIMITS, trace)
    record(control, step(), step())
    control.flush()
    assert trace.failed
    assert control.stats().num_steps == 2


def test_the_calibration_is_stored_as_it_was_told():
    control = StepControl(Remembers(), LIMITS)
    told = {-1: [[1, 0.010], [8, 0.012]], 0: [[1, 0.011], [8, 0.013]], 3: [[1, 0.02], [8, 0.03]]}
    control.control(points=points(told))
    record(control, *[step(drafted=OFF, **UNDRAFTED, batch=1, kv_tokens=32)] * 50)
    stored = LatencyTable.from_list(control.learned()["points"]).calibration()
    costs = {(p.draft_length, p.batch): p.seconds for p in stored.points}
    assert costs[OFF, 1] == 0.010 and costs[3, 8] == 0.03
    again = StepControl(Remembers(), LIMITS)
    again.control(points=control.learned()["points"])
    assert LatencyTable.from_list(again.learned()["points"]).calibration() == stored


@pytest.mark.parametrize("policy", ["goodput", "table", "fixed", "off"])
def test_a_policy_that_learns_no_costs_keeps_those_of_earlier_runs(policy):
    control, known = StepControl(make_policy(policy, LIMITS.lengths), LIMITS), points({0: [[1, 0.01]], 3: [[8, 0.02]]})
    control.control(points=[point | {"calibrated": False, "samples": 20} for point in known])
    assert len(control.learned()["points"]) == 2


def test_a_drafter_that_broke_is_off_until_it_is_switched_on_again(caplog):
    control = StepControl(Remembers(), LIMITS)
    control.drafter_broke(6)
    control.drafter_broke(3)
    assert control.choose(Load(4, 100)) == OFF
    assert control.stats(reset=True).num_broken_drafts == 9 and control.stats().num_broken_drafts == 0
    (said,) = (r.getMessage() for r in caplog.records)
    assert said.startswith("The drafter's probabilities are not finite: 6 draft tokens"), "the first time"
    control.control(drafting=True)
    assert control.choose(Load(4, 100)) == 2


def test_on_several_ranks_it_drafts_nothing_and_its_pass_goes_on(caplog):
    """What such steps take is not what OFF takes, so they must not be counted as OFF."""
    control = StepControl(Remembers(), LIMITS, ranks=2)
    control.drafter_broke(6)
    control.drafter_broke(3)
    assert control.choose(Load(4, 100)) == 0 and len(caplog.records) == 1
    control.control(drafting=True, force_k=None)
    assert control.choose(Load(4, 100)) == 2


@pytest.mark.parametrize("answer", [None, "3"])
def test_a_policy_that_answers_no_number_costs_speculation_and_not_the_engine(answer):
    control = StepControl(Remembers(answer), LIMITS)
    assert control.choose(Load(4, 100)) == 0 == control.choose(Load(4, 100))
    assert control.policy_error
