"""Calibration on a real engine: costs by batch and draft length come out of its own step clock."""

import asyncio

import pytest
from tiny_engine import V, sampled

from verl_tlt.control.types import OFF
from verl_tlt.rollout.calibrate import measure
from verl_tlt.rollout.channel import ChannelClient

pytestmark = pytest.mark.engine


class Together:
    """Gives an in-process engine, which blocks, the prompts that were asked for at the same time as one batch."""

    def __init__(self, engine):
        self.engine = engine
        self.waiting = []
        self.sizes = []

    async def generate(self, prompt, tokens):
        self.waiting.append(({"prompt_token_ids": prompt}, sampled(tokens, temperature=1.0)))
        await asyncio.sleep(0)
        if batch := self.waiting:
            self.waiting = []
            self.sizes.append(len(batch))
            self.engine.llm.generate([p for p, _ in batch], [s for _, s in batch], use_tqdm=False)


async def test_every_arm_is_measured_on_a_live_engine(engine_of, monkeypatch, tmp_path):
    address = f"ipc://{tmp_path}/c/s.sock"
    monkeypatch.setenv("TLT_CHANNEL", address)
    with engine_of("bad", speculation={"policy": "goodput"}, max_num_seqs=8) as engine:
        passes, together, client = [], Together(engine), ChannelClient(address)
        engine.runner.drafter.model.register_forward_hook(lambda *_: passes.append(engine.scheduler.tlt.drafting))

        async def set_drafting(enabled):
            return engine.rpc("tlt_set_drafting", enabled)["ok"]

        table = await measure(together.generate, set_drafting, client, (0, 1, 2, 3), 8, V, budget_s=120.0)
        assert set(table) == {OFF, 0, 1, 2, 3}
        assert all([b for b, _ in points] == [1, 2, 4, 8] for points in table.values())
        assert all(0 < seconds < 10 for points in table.values() for _, seconds in points)
        assert max(together.sizes) == 8
        assert passes and all(passes)  # none while the OFF arm was measured

        await client.call("control", latency={str(k): v for k, v in table.items()}, acceptance=[0.01, 0.01, 0.01])
        assert (await client.call("stats"))["drafting"]
        client.close()
