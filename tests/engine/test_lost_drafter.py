"""What stock vLLM does with its drafter in verl's weight sync: the arm `vllm-3-lost` of the end-to-end benchmark."""

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from benchmarks.e2e.arms import arms
from verl_tlt.commands.compare.plan import NO_SLEEP

pytestmark = pytest.mark.engine

TOKENS = 48


def counted(engine, **sampling):
    """Tokens of the same requests, drafts verified, and draft tokens accepted."""
    before = engine.counters()
    tokens = engine.generate(8, TOKENS, **sampling)
    drafts, _, accepted = (now - then for now, then in list(zip(engine.counters(), before, strict=True))[:3])
    return tokens, drafts, accepted


def test_the_lost_arm_loses_its_drafter_in_a_sync_and_says_nothing(engine_of, models):
    lost = arms(models["good"], [])["vllm-3-lost"]
    assert NO_SLEEP not in lost.overrides and not lost.tlt
    config = OverridesParser.create().parse_override(lost.overrides[0])
    with engine_of(None, speculative_config=config.value(), enable_sleep_mode=True) as engine:
        healthy, drafts, accepted = counted(engine)
        assert accepted > drafts / 2
        engine.llm.sleep(level=2)
        engine.llm.wake_up(tags=["weights"])
        engine.llm.collective_rpc("reload_weights")  # the policy's; verl sends them
        engine.llm.wake_up(tags=["kv_cache"])
        assert engine.llm.reset_prefix_cache()
        tokens, drafts, accepted = counted(engine)
        assert accepted < drafts / 20 and tokens == healthy, "token 0 is drafted, which now and then is right"
        tokens, drafts, accepted = counted(engine, temperature=1.0)
        assert accepted < drafts / 20 and all(len(set(response)) > 4 for response in tokens), "NaN is in no token"
