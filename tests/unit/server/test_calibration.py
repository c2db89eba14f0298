import asyncio
from dataclasses import asdict

import pytest

from verl_tlt.messages.rollout import EngineStats, StepTime
from verl_tlt.server.calibration import calibrate, draft_once, plan_batches, plan_lengths
from verl_tlt.speculation.types import OFF


class MadeEngine:
    """Costs a + b·batch + c·K a step, drafter pass 2 ms; answers what vLLM's client and the scheduler are asked."""

    def __init__(self):
        self.engine_core, self.errored = self, False
        self.drafting, self.force_k = True, None
        self.running, self.latency, self.tokens = 0, {}, 0

    async def generate(self, prompt, params, request_id):
        self.running += 1
        self.tokens += params.max_tokens
        await asyncio.sleep(0)
        arm = self.force_k if self.drafting else OFF
        self.latency[arm, self.running] = self.seconds(arm, self.running)
        yield

    def seconds(self, arm, batch):
        return 0.010 + 0.001 * batch + (0 if arm == OFF else 0.002 + 0.003 * arm)

    async def collective_rpc(self, method, args):
        self.drafting = args[0]
        return [None]

    async def reset_prefix_cache(self):
        pass

    async def call_utility_async(self, method, operation, arguments):
        if operation == "control":
            assert arguments["drafting"] == self.drafting
            self.force_k = arguments["force_k"]
            return {}
        times = tuple(StepTime(k, b, s) for (k, b), s in self.latency.items())
        self.running, self.latency = 0, {}
        return asdict(EngineStats(step_times=times))


def run(engine, arms=(0, 1, 2, 3), max_batch=8, budget_s=60.0):
    return asyncio.run(calibrate(engine, arms, plan_batches(max_batch), 100, budget_s))


def test_the_table_has_every_arm_and_the_stock_like_one():
    engine = MadeEngine()
    table = run(engine, arms=(0, 1, 2, 3, 4))
    assert table.lengths() == (OFF, 0, 1, 2, 3, 4)
    for arm in table.lengths():
        assert table.by_batch(arm) == [(b, pytest.approx(engine.seconds(arm, b))) for b in (1, 2, 4, 8)]
    assert {p.draft_length for p in table.points if p.samples == 0} == {3}, "the one that is interpolated"
    assert engine.drafting and engine.force_k is None, "left as it was found"


def test_where_off_always_stalled_it_costs_what_k_0_costs():
    engine = MadeEngine()
    usual = engine.seconds
    engine.seconds = lambda arm, batch: usual(arm, batch) * (3 if (arm, batch) == (OFF, 2) else 1)
    table = run(engine)
    assert dict(table.by_batch(OFF))[2] == dict(table.by_batch(0))[2] == pytest.approx(usual(0, 2))
    assert dict(table.by_batch(OFF))[4] == pytest.approx(usual(OFF, 4))


async def test_the_first_drafts_leave_the_engine_as_it_was():
    engine = MadeEngine()
    await draft_once(engine, 3, 100)
    assert engine.tokens and engine.drafting and engine.force_k is None


def test_out_of_time_it_keeps_what_it_has_and_restores_the_engine():
    engine = MadeEngine()
    table = run(engine, budget_s=0.0)
    assert table.lengths() == (OFF, 0, 1, 2, 3) and {p.batch for p in table.points} == {1}
    assert engine.force_k is None


def test_a_failing_probe_restores_the_engine():
    engine = MadeEngine()

    async def fail(prompt, params, request_id):
        raise RuntimeError("engine died")
        yield

    engine.generate = fail
    with pytest.raises(RuntimeError, match="engine died"):
        run(engine)
    assert engine.drafting and engine.force_k is None


def test_a_cold_start_and_a_stall_do_not_stay_in_the_table():
    """The first uses of every arm take four times as long, and so does one probe in the first round."""
    engine = MadeEngine()
    usual, calls = engine.seconds, []

    def seconds(arm, batch):
        calls.append((arm, batch))
        slow = len(calls) < 40 or (arm == OFF and batch == 4 and calls.count((arm, batch)) <= 4)
        return usual(arm, batch) * (4 if slow else 1)

    engine.seconds = seconds
    assert dict(run(engine).by_batch(OFF))[4] == pytest.approx(usual(OFF, 4))
    arms = [arm for arm, batch in calls if batch == 1]
    assert len({*arms[:4]}) > 1, "arms are measured beside each other, not one after the other"


def test_the_work_is_bounded():
    engine = MadeEngine()
    run(engine, arms=tuple(range(8)), max_batch=256)
    assert engine.tokens < 11000  # 2 rounds of 5 arms and 6 batches up to 32, at most 34 tokens each, and warming up


@pytest.mark.parametrize(
    ("arms", "measured"),
    [
        ((0,), [OFF, 0]),
        ((0, 1), [OFF, 0, 1]),
        ((0, 3), [OFF, 0, 3]),
        ((0, 1, 3, 7), [OFF, 0, 7, 1, 3]),
        (tuple(range(8)), [OFF, 0, 7, 1, 3]),
    ],
)
def test_four_lengths_carry_the_line_and_an_engine_with_graphs_has_no_others(arms, measured):
    assert plan_lengths(arms) == measured


@pytest.mark.parametrize(("largest", "batches"), [(1, [1]), (3, [1, 2]), (64, [1, 32, 16, 8, 4, 2])])
def test_batches_span_the_range_first(largest, batches):
    assert plan_batches(largest) == batches
