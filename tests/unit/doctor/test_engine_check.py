"""What `doctor --gpu` asks an engine, and says of its answers."""

import json
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from unittest.mock import AsyncMock

import pytest
import torch
from step_costs import step_costs

from verl_tlt.checks.models import Finding
from verl_tlt.checks.recipe import Recipe
from verl_tlt.commands import child_engine
from verl_tlt.commands.doctor import engine_check
from verl_tlt.commands.doctor.command import write_report
from verl_tlt.commands.doctor.engine_check import Answer, EngineJob, check, check_waking, judge_costs, run_job
from verl_tlt.config import TLTConfigError
from verl_tlt.speculation.costs import LatencyPoint, LatencyTable
from verl_tlt.speculation.types import OFF

COSTS = step_costs({OFF: [(1, 0.010), (4, 0.020)], 0: [(1, 0.012), (4, 0.022)], 3: [(1, 0.015), (4, 0.040)]})
STOCK, CLOSE = {1: 0.010, 4: 0.020}, {1: 0.0101, 4: 0.0202}


def test_a_good_machine_and_its_report(tmp_path):
    answer = Answer(judge_costs(COSTS, STOCK, CLOSE), COSTS, "H100")
    findings = {finding.what: finding for finding in answer.findings}
    assert {f.level for f in findings.values()} == {"ok"}
    assert answer.findings[0].sentence.startswith("1.01 times stock's step")
    assert (
        "batch 1: 10.10 against 10.00 ms, batch 4: 20.20 against 20.00 ms"
        in findings["drafter off against stock"].sentence
    )
    # It must be accepted that often.
    assert "at 32 tokens of context, by batch 1: 1.50x, 4: 2.00x" in findings["K=3 against off"].sentence
    write_report(tmp_path / "new" / "report.json", answer)
    written = json.loads((tmp_path / "new" / "report.json").read_text())
    assert written["hardware"] == "H100" and written["findings"] == [asdict(finding) for finding in answer.findings]


@pytest.mark.parametrize(
    ("costs", "off", "level", "said"),
    [
        (COSTS, {1: 0.02, 4: 0.03}, "warn", "1.75 times stock's step"),
        (COSTS, {1: 0.0112, 4: 0.0224}, "warn", "1.12 times stock's step"),
        (COSTS, {1: 0.0108, 4: 0.0216}, "ok", "1.08 times stock's step"),
        (COSTS, {}, "warn", "could not be measured"),
        (LatencyTable(), CLOSE, "warn", "could not be measured"),
    ],
)
def test_a_step_without_drafts_is_compared_with_stocks(costs, off, level, said):
    first, *_ = judge_costs(costs, STOCK, off)
    assert first.level == level and said in first.sentence


def test_a_draft_length_is_judged_at_its_own_batches_and_at_one_context():
    rows = [(1, 32, OFF, 0.01), (1, 1032, OFF, 0.02), (4, 532, OFF, 0.04), (4, 32, 3, 0.03)]
    points = [LatencyPoint(batch, batch * context, k, seconds) for batch, context, k, seconds in rows]
    found = judge_costs(LatencyTable(tuple(points)), STOCK, CLOSE)[-1]
    assert found.what == "K=3 against off" and "by batch 4: 1.50x; pays" in found.sentence


def test_a_long_measurement_has_its_time_and_a_policy_that_is_not_here_is_named(recipe, policy, monkeypatch):
    limits, key = [], "actor_rollout_ref.model.path"
    answer = asdict(Answer([], COSTS, "H100"))
    monkeypatch.setattr(child_engine, "run_job", lambda *asked: limits.append(asked[-1]) or answer)
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    run_job(EngineJob(Recipe((f"{key}={policy}", "trainer.device=cpu")), budget_s=3600.0))
    assert limits[0] > 3600.0
    with pytest.raises(TLTConfigError, match=rf"{key}=/nowhere/policy is not a directory on this machine"):
        run_job(EngineJob(Recipe((f"{key}=/nowhere/policy", "+trainer.plugin=tlt", "trainer.device=cpu"))))


@pytest.fixture
def engine():
    """One that answers everything; its calls and starts are noted."""
    engine = AsyncMock(drafter=Path("drafter"), starts=[])
    engine.llm = engine
    engine.vllm_config.lora_config = None
    engine.every.return_value = [None]
    engine.wall_seconds.return_value = {1: 0.01}
    engine.measure_costs.return_value = COSTS
    return engine


async def test_a_second_process_without_a_context_is_refused_and_the_engine_wakes(engine, monkeypatch):
    """That process is a real one, which sees no device; no GPU is needed here."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**30, 2**31))
    found = await check_waking(engine)
    assert found.level == "refuse" and "no other process could open a CUDA context" in found.sentence
    calls = [name for name, *_ in engine.method_calls]
    assert calls == ["sleep", "wake_up", "generate"], "the questions that follow need an engine that is awake"


@pytest.fixture
def asked(engine, policy, tmp_path, monkeypatch):
    """Asks that engine for all findings about a recipe with these overrides."""

    @asynccontextmanager
    async def start(setup, directory, drafting=True):
        engine.starts.append("drafting" if drafting else "stock")
        yield engine

    monkeypatch.setattr(engine_check, "start", start)
    monkeypatch.setattr(engine_check, "ask_scheduler", AsyncMock())
    monkeypatch.setattr(engine_check, "hardware_name", lambda: "H100")
    words = (f"actor_rollout_ref.model.path={policy}", "+trainer.plugin=tlt", "trainer.device=cpu")
    return lambda *more: check(EngineJob(Recipe((*words, *more))), tmp_path)


@pytest.mark.parametrize(
    ("words", "wakes"),
    [
        (["trainer.device=cuda"], True),
        (["trainer.device=cpu"], False),
        (["trainer.device=cuda", "trainer.v1.trainer_mode=separate_async"], False),
        (["trainer.device=cuda", "tlt.spot.enable=false"], False),
        (["trainer.device=cuda", "tlt.speculation.source=ngram"], False),
    ],
)
async def test_an_engine_wakes_beside_a_context_where_a_spot_trainer_may_sit_beside_it(
    asked, monkeypatch, words, wakes
):
    monkeypatch.setattr(engine_check, "check_waking", AsyncMock(return_value=Finding("ok", "waking", "it woke")))
    assert ("waking" in {finding.what for finding in (await asked(*words)).findings}) == wakes


@pytest.mark.parametrize(
    ("source", "starts", "loads"), [("eagle", ["stock", "drafting"], 2), ("ngram", ["drafting"], 0)]
)
async def test_a_drafter_is_loaded_after_sleep_and_after_the_costs_where_there_is_one(
    engine, asked, source, starts, loads
):
    answer = await asked(f"tlt.speculation.source={source}")
    loaded = [call for call in engine.every.await_args_list if call.args[0] == "tlt_load_drafter"]
    assert len(loaded) == loads and {finding.level for finding in answer.findings} == {"ok"}
    assert engine.starts == starts, "nothing of stock's is used where no step is measured"
    assert bool(answer.costs.points) == bool(loads), "n-grams in random prompts would look free"
    assert any(finding.what == "drafter after sleep" for finding in answer.findings) == bool(loads)


async def test_a_drafter_that_is_not_loaded_a_second_time_is_refused(engine, asked):
    loads = iter([None, "out of memory"])

    async def every(method, *_):
        return [next(loads)] if method == "tlt_load_drafter" else [None]

    engine.every.side_effect = every
    (found,) = [finding for finding in (await asked()).findings if finding.level != "ok"]
    assert (found.level, found.what, found.sentence) == ("refuse", "drafter", "out of memory")
