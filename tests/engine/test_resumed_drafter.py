"""A checkpoint of a shorter run in the engine of a longer one, with a larger K: it drafts to the end of every response.

The checkpoint is as version 0.1 wrote it: `max_position_embeddings` is the first run's length.
"""

import pytest

from verl_tlt.config import TLTConfig
from verl_tlt.drafter import load_drafter, save_drafter
from verl_tlt.drafter.checkpoint import stage
from verl_tlt.trainer.checkpoints import CHECKPOINT
from verl_tlt.trainer.run_setup import first_drafter

pytestmark = pytest.mark.engine
SHORT, LONG, K = 40, 256, 7


@pytest.fixture
def resumed(models, tmp_path):
    """Directory of what the longer run serves first."""
    model = load_drafter(models["good"], models["target"])
    model.config.transformer_layer_config.max_position_embeddings = SHORT
    save_drafter(model, tmp_path / "global_step_9" / CHECKPOINT, {"version": 3}, policy=models["target"])
    settings = TLTConfig.from_dict({"speculation": {"max_draft_length": K}})
    start = first_drafter(settings, str(models["target"]), "float32", LONG + K, tmp_path / "global_step_9")
    stage(start.served.config, start.served.weights, tmp_path / "served")
    return tmp_path / "served"


def test_it_drafts_beyond_the_length_of_the_run_it_comes_from(engine_of, models, resumed, stock_tokens, monkeypatch):
    monkeypatch.setitem(models, "resumed", resumed)
    with engine_of("resumed", speculation={"max_draft_length": K}, max_model_len=LONG) as engine:
        tables = {
            m.cos_sin_cache.shape[0] for m in engine.runner.drafter.model.modules() if hasattr(m, "cos_sin_cache")
        }
        assert tables == {LONG + K}
        assert engine.generate(8, 96) == stock_tokens["qwen3"]
        drafts, _, accepted, *_ = engine.counters()
    tokens = sum(map(len, stock_tokens["qwen3"]))
    # Each step yields one token and what it accepted: nothing is left over for steps without a draft but the first.
    assert drafts + accepted >= tokens - 2 * len(stock_tokens["qwen3"]) and accepted > drafts
