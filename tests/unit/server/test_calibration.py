"""What a calibration measures, in which order, and that it leaves the engine as it was."""

import asyncio
from dataclasses import asdict
from types import SimpleNamespace

import pytest

from verl_tlt.messages.rollout import EngineStats, StepTime
from verl_tlt.server import calibration
from verl_tlt.server.calibration import (
    LEAST_STEPS,
    LONG_TOKENS,
    STEPS,
    CalibrationLoad,
    calibrate,
    draft_once,
    plan_loads,
)
from verl_tlt.speculation.costs import SHORT_CONTEXT
from verl_tlt.speculation.types import OFF


class MadeEngine:
    """Costs a + b·batch + c·K + d·context a step, drafter pass 2 ms; answers what vLLM and the scheduler are asked."""

    def __init__(self):
        self.engine_core, self.errored = self, False
        self.scheduler_config = SimpleNamespace(max_num_batched_tokens=128)
        cache = SimpleNamespace(enable_prefix_caching=True)
        self.vllm_config = SimpleNamespace(scheduler_config=self.scheduler_config, cache_config=cache)
        self.drafting, self.force_k = True, None
        self.latency, self.tokens, self.prompts, self.running, self.adapters = {}, 0, [], 0, set()

    async def generate(self, prompt, params, request_id, lora_request=None):
        self.running += 1
        self.adapters.add(lora_request)
        self.tokens += params.max_tokens
        self.prompts.append(len(prompt["prompt_token_ids"]))
        await asyncio.sleep(0)
        arm = self.force_k if self.drafting else OFF
        context = len(prompt["prompt_token_ids"]) + STEPS * (max(arm, 0) + 1) / 2  # as if all drafts were accepted
        self.latency[arm, self.running] = self.seconds(arm, self.running, context)
        yield

    def seconds(self, arm, batch, context=SHORT_CONTEXT):
        return 0.010 + 0.001 * batch + 1e-6 * batch * context + (0 if arm == OFF else 0.002 + 0.003 * arm)

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


def run(engine, arms=(0, 1, 2, 3), max_batch=8, longest=1000, budget_s=3600.0, limit_s=3600.0):
    return asyncio.run(calibrate(engine, arms, plan_loads(max_batch, longest, 100_000), 100, budget_s, limit_s))


def test_every_draft_length_is_measured_at_every_batch_and_two_contexts():
    engine = MadeEngine()
    table = run(engine)
    assert table.lengths() == (OFF, 0, 1, 2, 3)
    for arm in table.lengths():
        assert [b for b, _ in table.by_batch(arm)] == [1, 2, 4, 8]
        for batch, context in ((2, SHORT_CONTEXT), (6, SHORT_CONTEXT), (1, 500), (8, 1000)):
            assert float(table.seconds(arm, batch, context)) == pytest.approx(
                engine.seconds(arm, batch, context), rel=0.02
            )
    assert engine.drafting and engine.force_k is None, "left as it was found"


def test_every_request_has_the_adapter_of_the_policy():
    for adapter in (None, "adapter"):
        engine = MadeEngine()
        asyncio.run(calibrate(engine, (0, 1), plan_loads(2, 100, 1000), 100, lora=adapter))
        assert engine.adapters == {adapter}


class EngineOfManySteps(MadeEngine):
    """Answers requests until they are aborted, the last `late` rounds after the others; its clock counts outputs."""

    def __init__(self, output_s=0.0, batch=1, late=0):
        super().__init__()
        self.output_s, self.batch, self.late, self.outputs = output_s, batch, late, []

    def monotonic(self):
        return self.output_s * sum(self.outputs)

    async def generate(self, prompt, params, request_id, lora_request=None):
        async for _ in super().generate(prompt, params, request_id):
            pass
        self.outputs.append(0)
        mine = len(self.outputs) - 1
        for _ in range(self.late if len(self.outputs) % self.batch == 0 else 0):
            await asyncio.sleep(0)
        for _ in range(params.max_tokens):
            self.outputs[mine] += 1
            yield
            await asyncio.sleep(0)


@pytest.mark.parametrize(("batch", "late"), [(1, 0), (8, 0), (8, 2)])
def test_requests_end_when_enough_steps_of_the_whole_batch_were_seen(batch, late):
    engine = EngineOfManySteps(batch=batch, late=late)
    asyncio.run(calibrate(engine, (0,), [CalibrationLoad(batch, SHORT_CONTEXT)], 100, 3600.0))
    of_last = engine.outputs[3 * batch - 1 :: batch]
    assert of_last == [2 + STEPS] * 2, "after the two of the first use"
    assert set(engine.outputs[2 * batch :]) <= {2 + STEPS + late, 3 + STEPS + late, 2 + STEPS}


def test_where_steps_are_slow_fewer_are_taken_and_every_load_is_reached(monkeypatch):
    engine = EngineOfManySteps(output_s=0.01)
    monkeypatch.setattr(calibration, "time", engine)
    table = run(engine, arms=(1,), max_batch=8, longest=SHORT_CONTEXT, budget_s=2.0)
    assert {p.batch for p in table.points} == {1, 2, 4, 8}
    assert min(engine.outputs) < 2 + STEPS <= max(engine.outputs)
    assert min(engine.outputs) >= 2 + LEAST_STEPS


class EngineWithSlowPrompts(MadeEngine):
    """Its clock counts the tokens of long prompts, which it computes once while drafting stays on or off."""

    computed, seconds_passed = 0, 0.0

    def monotonic(self):
        return self.seconds_passed

    async def generate(self, prompt, params, request_id, lora_request=None):
        remembers = self.vllm_config.cache_config.enable_prefix_caching
        if not remembers or (params.max_tokens == 1 and self.computed < len(prompt["prompt_token_ids"])):
            self.seconds_passed += 1e-3 * len(prompt["prompt_token_ids"])
        async for output in super().generate(prompt, params, request_id):
            yield output
        if params.max_tokens > 1:
            self.computed = len(prompt["prompt_token_ids"])

    async def reset_prefix_cache(self):
        self.computed = 0


@pytest.mark.parametrize(
    ("remembers", "budget_s", "longest"),
    [(True, 60.0, 1000), (True, 10.0, 500), (True, 4.0, 125), (False, 20.0, 320)],
)
def test_where_prompts_are_slow_contexts_are_as_long_as_the_time_allows(monkeypatch, remembers, budget_s, longest):
    engine = EngineWithSlowPrompts()
    engine.vllm_config.cache_config.enable_prefix_caching = remembers
    monkeypatch.setattr(calibration, "time", engine)
    table = run(engine, arms=(0, 1), budget_s=budget_s)
    assert {p.batch for p in table.points} == {1, 2, 4, 8} and engine.seconds_passed <= budget_s
    assert max(p.kv_tokens for p in table.points if p.batch == 8) == pytest.approx(8 * longest, rel=0.2)


async def test_the_first_drafts_leave_the_engine_as_it_was():
    engine = MadeEngine()
    await draft_once(engine, 3, 100, "adapter")
    assert engine.adapters == {"adapter"}
    assert engine.tokens and engine.drafting and engine.force_k is None


def test_out_of_time_it_keeps_what_it_has_and_restores_the_engine():
    engine = MadeEngine()
    table = run(engine, budget_s=0.0, limit_s=0.0)
    assert table.lengths() == (OFF, 0, 1, 2, 3) and {p.batch for p in table.points} == {1}
    assert engine.force_k is None


def test_after_its_budget_it_measures_every_batch_but_no_long_context(monkeypatch):
    engine = EngineWithSlowPrompts()
    monkeypatch.setattr(calibration, "time", engine)
    table = run(engine, budget_s=0.0, limit_s=3600.0)
    assert {(p.batch, p.kv_tokens // p.batch) for p in table.points} == {(b, SHORT_CONTEXT) for b in (1, 2, 4, 8)}


def test_a_failing_measurement_restores_the_engine():
    engine = MadeEngine()

    async def fail(*_, **__):
        raise RuntimeError("engine died")
        yield

    engine.generate = fail
    with pytest.raises(RuntimeError, match="engine died"):
        run(engine)
    assert engine.drafting and engine.force_k is None


def test_a_draft_length_without_a_clean_step_has_no_point():
    engine = MadeEngine()
    answer = engine.call_utility_async

    async def without_three(method, operation, arguments):
        if engine.force_k == 3:
            engine.latency = {}
        return await answer(method, operation, arguments)

    engine.call_utility_async = without_three
    assert run(engine).lengths() == (OFF, 0, 1, 2)


def test_the_ends_of_the_range_are_measured_first():
    short = [CalibrationLoad(batch, SHORT_CONTEXT) for batch in (1, 6, 2, 4)]
    long = [CalibrationLoad(batch, 1000) for batch in (1, 6)]
    assert plan_loads(6, 1000, 100_000) == [*short[:2], long[0], *short[2:], long[1]]
    assert plan_loads(1, 1000, 100_000) == [short[0], long[0]]


@pytest.mark.parametrize(
    ("max_num_seqs", "longest", "cache_tokens", "long"),
    [
        (64, 4096, 10**6, {1: 4096, 8: 4096, 64: LONG_TOKENS // 64}),
        (64, 4096, 2000, {1: 1000, 8: 125}),
        (8, 50, 100_000, {}),
    ],
)
def test_long_contexts_fit_the_cache_and_the_time(max_num_seqs, longest, cache_tokens, long):
    loads = plan_loads(max_num_seqs, longest, cache_tokens)
    assert {load.batch: load.context for load in loads if load.context > SHORT_CONTEXT} == long
