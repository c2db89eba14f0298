"""An exception in our code inside the engine core, or in a drafter's pass, ends speculation and changes no token."""

import logging
from collections import deque
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from verl_tlt.engine_core import scheduler as module
from verl_tlt.engine_core.ngram_drafts import NgramDrafts
from verl_tlt.messages import from_plain
from verl_tlt.messages.rollout import EngineStats
from verl_tlt.speculation.ngram_index import NgramIndex
from verl_tlt.vllm_worker.drafter_pass import contain

pytestmark = pytest.mark.engine

TOKENS, REQUESTS, GOOD_CALLS = 48, 8, 5
CALLS = {
    "a request arrives": (lambda _: module, "verified_inexactly"),
    "before a step is scheduled": (lambda s: s.tlt_stands_in, "is_finished"),
    "the policy's choice": (lambda s: s.tlt.policy, "choose"),
    "after a step was scheduled": (lambda _: module, "EngineStep"),
    "n-grams": (lambda s: s.tlt_ngram, "propose"),
    "what was sampled": (lambda s: s, "_tlt_step_of"),
    "a request ends": (lambda s: s._tlt_in_flight, "each"),
    "what vLLM made of a step": (lambda s: s, "_tlt_finish"),
    "what the policy learns": (lambda s: s.tlt.policy, "observe"),
}
"""By contained method: (what has, in a scheduler, a function that it calls and that raises, its name)."""


class InFlight(deque):
    """Steps in flight, over which a method goes that can be replaced."""

    def __iter__(self):
        return self.each()

    def each(self):
        return super().__iter__()


def equipped(engine):
    """Give the scheduler what only some engines have: n-grams, a request that is verified inexactly."""
    scheduler = engine.scheduler
    scheduler.tlt_stands_in = SimpleNamespace(is_finished=lambda: True)
    engine.patch.setattr(scheduler, "_tlt_inexact", [scheduler.tlt_stands_in])
    engine.patch.setattr(scheduler, "_tlt_in_flight", InFlight())
    engine.patch.setattr(scheduler, "tlt_ngram", NgramDrafts(NgramIndex(1 << 20)))
    return scheduler


def break_after(owner, name, calls, patch):
    """Have this function raise from so many calls on; returns a list with an item for each call."""
    original, seen = getattr(owner, name), []

    def broken(*args, **kwargs):
        seen.append(1)
        if len(seen) > calls:
            raise ArithmeticError("broken by a test")
        return original(*args, **kwargs)

    patch.setattr(owner, name, broken)
    return seen


@contextmanager
def says_once(caplog, module, text):
    """Meanwhile a module of ours says this once, with the exception."""
    logger = logging.getLogger(f"verl_tlt.{module}")
    logger.addHandler(caplog.handler)  # libraries change the level of the root logger's
    try:
        yield
    finally:
        logger.removeHandler(caplog.handler)
    said = {id(record): record for record in caplog.records if text in record.getMessage()}
    assert [record.exc_info is not None for record in said.values()] == [True]


def decodes_as_stock(engine, stock_tokens):
    """Whether its tokens are the first ones of stock vLLM."""
    pairs = zip(engine.generate(REQUESTS, TOKENS), stock_tokens, strict=True)
    return all(tokens == expected[: len(tokens)] for tokens, expected in pairs)


@pytest.mark.parametrize("part", CALLS)
def test_the_engine_decodes_on_as_stock(engine_of, stock_tokens, caplog, part):
    with engine_of("good", policy="policies:rand") as engine:
        scheduler = equipped(engine)
        owner, name = CALLS[part]
        break_after(owner(scheduler), name, 0 if name == "is_finished" else GOOD_CALLS, engine.patch)
        with says_once(caplog, "speculation.step_control", "decodes without drafts for the rest of the run"):
            assert decodes_as_stock(engine, stock_tokens)
            stats = from_plain(EngineStats, engine.core.tlt_call("stats", {"reset": True}))
            assert stats.failure == "ArithmeticError: broken by a test" and not stats.num_steps

            before = engine.counters()
            assert decodes_as_stock(engine, stock_tokens)
            assert engine.counters() == before, "something was drafted"
            engine.core.tlt_call("control", {"drafting": True, "force_k": None, "acceptance": [0.5]})


@pytest.mark.parametrize("part", ["forward", "compute_logits"])
def test_a_drafter_that_raises_in_its_pass_leaves_the_engine_as_stock(engine_of, stock_tokens, models, caplog, part):
    with engine_of("good", policy="policies:rand") as engine:
        engine.patch.setattr(engine.drafters_pass, "failure", "")  # as it is after this test
        calls = break_after(engine.runner.drafter.model, part, GOOD_CALLS, engine.patch)
        with says_once(caplog, "vllm_worker.drafter_pass", "drafts nothing any more"):
            for _ in range(2):
                assert decodes_as_stock(engine, stock_tokens)
        assert len(calls) == GOOD_CALLS + 1, "the pass was tried again"
        reply = engine.rpc("tlt_load_drafter", str(models["good"] / "model.safetensors"))
        assert "ArithmeticError: broken by a test" in reply
        assert engine.rpc("tlt_set_drafting", True) == reply, "verl sends some heads itself"


@pytest.mark.parametrize(("ranks", "ours"), [(2, {"tlt": {}}), (1, {})])
def test_a_failure_is_not_contained_where_other_ranks_wait_or_where_figures_are_counted(ranks, ours):
    runner = SimpleNamespace(drafter=SimpleNamespace(propose=max))
    config = SimpleNamespace(parallel_config=SimpleNamespace(world_size=ranks), additional_config=ours)
    assert contain(runner, config) is None and runner.drafter.propose is max
