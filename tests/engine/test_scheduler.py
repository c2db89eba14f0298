"""What the scheduler tells the policy, counts and writes down, on real engines."""

import json

import pytest
from step_costs import step_costs

from verl_tlt.messages import from_plain
from verl_tlt.messages.rollout import EngineStats
from verl_tlt.speculation.types import OFF

pytestmark = pytest.mark.engine

TOKENS = 96
SHARED = {"enable_prefix_caching": True}
"""What most tests' engine is like, so that they share one."""


@pytest.fixture(scope="module", autouse=True)
def written(stock_tokens, tmp_path_factory):
    """Every engine here writes a trace: its lines so far. Stock engines, which have none, run before."""
    path = tmp_path_factory.mktemp("trace")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TLT_TRACE_DIR", str(path))
        patch.setenv("TLT_REPLICA", "5")
        file = path / "engine-5.jsonl"
        yield lambda: [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_the_account_is_vllms_own(engine_of, written):
    with engine_of("good", policy="policies:rand", **SHARED) as engine:
        engine.scheduler.tlt.flush(60.0)
        earlier = len(written())
        before = engine.counters()
        outputs = engine.generate(8, TOKENS)
        drafts, draft_tokens, accepted, *per_position = (b - a for a, b in zip(before, engine.counters(), strict=True))
        stats = engine.scheduler.tlt.stats()
        assert stats.num_decode_tokens == sum(map(len, outputs)) - len(outputs)  # the first one is the prefill's
        assert stats.num_drafts == drafts
        assert list(stats.num_accepted_tokens_per_pos) == per_position
        assert sum(stats.num_accepted_tokens_per_pos) == accepted
        assert sum(stats.num_draft_tokens_per_pos) == draft_tokens
        steps = engine.scheduler.tlt.policy.steps
        engine.scheduler.tlt.flush(60.0)
    lines = written()[earlier:]
    assert len(steps) == stats.num_steps
    assert [(line["batch"], line["k"]) for line in lines] == [(step.batch, step.drafted) for step in steps]


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
    with engine_of("good", speculation={"policy": "live_table"}, **SHARED) as engine:
        off = step_costs({OFF: [(1, 0.004), (8, 0.005)]}).to_list()
        engine.core.tlt_call("control", {"force_k": 2, "acceptance": [0.8, 0.7, 0.6], "points": off})
        engine.generate(8, TOKENS)
        stats = from_plain(EngineStats, engine.core.tlt_call("stats", {"reset": True}))
        assert stats.steps_by_draft_length.keys() == {0, 2}
        assert 0.0 < stats.control_s < 0.2 * stats.decode_s
        assert 0.0 < stats.mean_context < TOKENS and stats.undrafted_s > 0.0
        assert from_plain(EngineStats, engine.core.tlt_call("stats", {})).num_steps == 0


def test_off_runs_no_drafter_and_decodes_the_same(engine_of, stock_tokens):
    with engine_of("good", policy="policies:longest", **SHARED) as engine:
        passes, prepared = [], []
        engine.runner.drafter.model.register_forward_hook(lambda *_: passes.append(1))
        prepare = engine.runner.drafter.prepare_next_token_ids_padded
        engine.runner.drafter.prepare_next_token_ids_padded = lambda *a: (prepared.append(1), prepare(*a))[1]

        engine.scheduler.tlt.control(force_k=0)
        assert engine.generate(8, TOKENS) == stock_tokens
        assert len(passes) >= TOKENS and len(prepared) >= TOKENS  # K=0 keeps the drafter's cache in step
        assert engine.scheduler.tlt.stats(reset=True).steps_by_draft_length.keys() == {0}

        engine.llm.reset_prefix_cache()
        passes.clear()
        prepared.clear()
        assert engine.rpc("tlt_set_drafting", False) is None
        engine.scheduler.tlt.control(drafting=False)
        assert engine.generate(8, TOKENS) == stock_tokens
        assert passes == [] and prepared == []
        assert engine.scheduler.tlt.stats(reset=True).steps_by_draft_length.keys() == {OFF}
        assert all(s.drafted == OFF for s in engine.scheduler.tlt.policy.steps[-TOKENS + 5 :])

        engine.llm.reset_prefix_cache()
        assert engine.rpc("tlt_set_drafting", True) is None
        engine.scheduler.tlt.control(drafting=True, force_k=None)
        assert engine.generate(8, TOKENS) == stock_tokens
        stats = engine.scheduler.tlt.stats()
        assert stats.num_accepted_tokens_per_pos[0] > 0.5 * stats.num_drafts
