"""What the scheduler tells the policy, counts and writes down, on real engines."""

import json

import pytest
from tiny_engine import prompts, sampled

from verl_tlt.messages import from_plain
from verl_tlt.messages.rollout import EngineStats
from verl_tlt.speculation.costs.tables import LatencyTable
from verl_tlt.speculation.types import OFF

pytestmark = pytest.mark.engine

TOKENS = 96
SHARED = {"enable_prefix_caching": True}
"""What most tests' engine is like, so that they share one."""


@pytest.fixture(scope="module", autouse=True)
def written(tmp_path_factory):
    """Every engine here writes a trace: its lines so far."""
    path = tmp_path_factory.mktemp("trace")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TLT_TRACE_DIR", str(path))
        patch.setenv("TLT_REPLICA", "5")
        file = path / "engine-5.jsonl"
        yield lambda: [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_the_account_is_vllms_own(engine_of, written):
    with engine_of("good", policy="policies:rand", **SHARED) as engine:
        earlier = len(written())
        before = engine.counters()
        outputs = engine.generate(8, TOKENS)
        drafts, draft_tokens, accepted, *per_position = (b - a for a, b in zip(before, engine.counters(), strict=True))
        stats = engine.scheduler.tlt.stats()
        assert stats.num_generation_tokens == sum(map(len, outputs))
        assert stats.num_decode_tokens == stats.num_generation_tokens - len(outputs)  # the first one is the prefill's
        assert (stats.num_drafts, stats.num_draft_tokens) == (drafts, draft_tokens)
        assert list(stats.num_accepted_tokens_per_pos) == per_position
        assert sum(stats.num_accepted_tokens_per_pos) == accepted
        assert sum(stats.num_draft_tokens_per_pos) == draft_tokens
        of_responses = [sum(column) for column in zip(*stats.responses, strict=True)]
        assert of_responses == [len(outputs), stats.num_generation_tokens, drafts, accepted]
        steps = engine.scheduler.tlt.policy.steps
    lines = written()[earlier:]
    assert len(lines) == len(steps) == stats.num_steps
    assert sum(line["produced"] for line in lines) == stats.num_decode_tokens


def test_drafts_are_counted_by_the_length_of_their_response(engine_of):
    with engine_of("good", policy="policies:longest", **SHARED) as engine:
        for name, prompt, tokens in zip(("short", "long"), prompts(2), (8, TOKENS), strict=True):
            engine.llm.llm_engine.add_request(name, prompt, sampled(tokens))
        while engine.llm.llm_engine.has_unfinished_requests():
            engine.llm.llm_engine.step()
        stats = engine.scheduler.tlt.stats()
    short, long = stats.responses
    assert (short.responses, short.num_tokens, long.responses, long.num_tokens) == (1, 8, 1, TOKENS)
    # Each draft gives what was accepted and one token more; the last one's surplus is cut at the request's end.
    assert 8 - 3 <= short.num_drafts + short.num_accepted_tokens <= 8 + 3
    assert TOKENS - 3 <= long.num_drafts + long.num_accepted_tokens <= TOKENS + 3


def test_only_steady_decode_steps_teach(engine_of):
    with engine_of("good", policy="policies:up_to_four", **SHARED) as engine:
        engine.generate(8, TOKENS)
        steps = engine.scheduler.tlt.policy.steps
    assert not steps[0].clean  # the prefill
    assert all(s.verified == s.drafted for s in steps if s.clean)
    assert all(s.num_drafts in (0, s.batch) for s in steps if s.clean)
    switch = next(i for i, s in enumerate(steps) if s.drafted > 0 and s.batch)
    assert not steps[switch].clean  # drafts three, verifies none
    assert [(s.verified, s.drafted) for s in steps[switch - 1 : switch + 2]] == [(0, 0), (0, 3), (3, 3)]
    # The others teach, but for those a busy machine held up (a pause before them).
    assert sum(s.clean for s in steps) > 0.6 * len(steps)


def test_the_server_can_ask_a_running_engine(engine_of):
    with engine_of("good", speculation={"policy": "goodput"}, **SHARED) as engine:
        off = LatencyTable.calibrated({OFF: [(1, 0.004), (8, 0.005)]}).to_list()
        engine.core.tlt_call("control", {"force_k": 2, "acceptance": [0.8, 0.7, 0.6], "points": off})
        engine.generate(8, TOKENS)
        stats = from_plain(EngineStats, engine.core.tlt_call("stats", {"reset": True}))
        assert stats.steps_by_draft_length.keys() == {0, 2}
        assert 0.0 < stats.control_s < 0.2 * sum(interval.end - interval.start for interval in stats.load_intervals)
        assert stats.num_ngram_drafts is None
        assert from_plain(EngineStats, engine.core.tlt_call("stats", {})).num_steps == 0


def test_off_runs_no_drafter_and_decodes_the_same(engine_of, stock_tokens):
    with engine_of("good", policy="policies:longest", **SHARED) as engine:
        passes, prepared = [], []
        engine.runner.drafter.model.register_forward_hook(lambda *_: passes.append(1))
        prepare = engine.runner.drafter.prepare_next_token_ids_padded
        engine.runner.drafter.prepare_next_token_ids_padded = lambda *a: (prepared.append(1), prepare(*a))[1]

        engine.scheduler.tlt.control(force_k=0)
        assert engine.generate(8, TOKENS) == stock_tokens["qwen3"]
        assert len(passes) >= TOKENS and len(prepared) >= TOKENS  # K=0 keeps the drafter's cache in step
        assert engine.scheduler.tlt.stats(reset=True).steps_by_draft_length.keys() == {0}

        engine.llm.reset_prefix_cache()
        passes.clear()
        prepared.clear()
        assert engine.rpc("tlt_set_drafting", False) is None
        engine.scheduler.tlt.control(drafting=False)
        assert engine.generate(8, TOKENS) == stock_tokens["qwen3"]
        assert passes == [] and prepared == []
        assert engine.scheduler.tlt.stats(reset=True).steps_by_draft_length.keys() == {OFF}
        assert all(s.drafted == OFF for s in engine.scheduler.tlt.policy.steps[-TOKENS + 5 :])

        engine.llm.reset_prefix_cache()
        assert engine.rpc("tlt_set_drafting", True) is None
        engine.scheduler.tlt.control(drafting=True, force_k=None)
        assert engine.generate(8, TOKENS) == stock_tokens["qwen3"]
        stats = engine.scheduler.tlt.stats()
        assert stats.num_accepted_tokens_per_pos[0] > 0.5 * stats.num_drafts


def test_a_forced_draft_length_takes_the_steps_that_vllms_own_table_takes(engine_of, monkeypatch):
    """Whatever else their seconds say: the two verify the same drafts in the same steps."""
    from vllm.v1.core.sched.scheduler import Scheduler

    with engine_of("good", policy="policies:rand", **SHARED) as engine:
        scheduler, executor, steps = engine.scheduler, engine.core.model_executor, []
        execute, longest = executor.execute_model, engine.scheduler.tlt.limits.lengths[-1]

        def counted(output, *args, **kwargs):
            if output.num_scheduled_tokens:
                scheduled, drafts = output.num_scheduled_tokens, output.scheduled_spec_decode_tokens
                steps.append((sorted(scheduled.values()), sorted(map(len, drafts.values()))))
            return execute(output, *args, **kwargs)

        def run():
            engine.llm.reset_prefix_cache()
            steps.clear()
            return engine.generate(8, TOKENS), list(steps)

        monkeypatch.setattr(executor, "execute_model", counted)
        with monkeypatch.context() as patch:
            patch.setattr(scheduler, "__class__", Scheduler)
            patch.setattr(scheduler, "dynamic_sd_lookup", [longest] * 65)
            theirs = run()
        scheduler.tlt.control(force_k=longest)
        ours = run()
        scheduler.tlt.control(force_k=None)
    assert ours == theirs and ours[1][-1][1], "drafts were verified to the end"


def test_a_prefill_that_joins_does_not_flip_the_draft_length(engine_of):
    with engine_of("good", policy="policies:up_to_four", max_num_batched_tokens=48, max_num_seqs=8) as engine:
        vllm_engine, policy = engine.llm.llm_engine, engine.scheduler.tlt.policy
        for i, prompt in enumerate(prompts(4)):
            vllm_engine.add_request(f"early-{i}", prompt, sampled(120))
        for _ in range(8):
            vllm_engine.step()
        steady = len(policy.loads)
        # 32 tokens a step are left beside the four drafting requests, so this prompt takes several steps.
        vllm_engine.add_request("late", {"prompt_token_ids": list(range(5, 205))}, sampled(8))
        vllm_engine.step()
        late = engine.scheduler.running[-1]
        while late.is_prefill_chunk:
            vllm_engine.step()
        during = slice(steady, len(policy.loads))
        assert len(policy.loads) - steady >= 4
        assert {load.batch for load in policy.loads[during]} == {4}
        assert set(policy.chosen[during]) == {3}
        vllm_engine.step()
        assert (policy.loads[-1].batch, policy.chosen[-1]) == (5, 0)
        mixed = policy.steps[steady : len(policy.steps) - 1]
        assert all(s.batch == 4 and not s.clean for s in mixed)
        assert all(s.num_decode_tokens <= 16 for s in mixed)  # the late request's first token is not theirs
        engine.llm.llm_engine.abort_request([f"early-{i}" for i in range(4)] + ["late"], internal=False)


def test_the_account_does_not_need_log_statistics(engine_of):
    with engine_of("good", policy="policies:longest", disable_log_stats=True) as engine:
        outputs = engine.generate(8, TOKENS)
        stats = engine.scheduler.tlt.stats()
        assert stats.num_generation_tokens == sum(map(len, outputs))
        assert sum(stats.num_accepted_tokens_per_pos) > 0.5 * stats.num_drafts
