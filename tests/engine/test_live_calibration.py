"""Calibration on a real engine: costs by batch, context and draft length from its own step clock."""

import asyncio
import json

import pytest
from tiny_engine import sampled

from benchmarks.lossless.tiny_policy import V
from verl_tlt.server.calibration import calibrate, loads_of
from verl_tlt.server.engine_calls import ask_scheduler
from verl_tlt.speculation.types import OFF

pytestmark = pytest.mark.engine

MAX_BATCH, ARMS = 8, (0, 1, 2, 3)


class Live:
    """vLLM's asynchronous engine over an in-process one: prompts asked for at the same time become one batch."""

    def __init__(self, engine):
        self.inside, self.waiting, self.sizes, self.errored = engine, [], [], False
        self.engine_core, self.vllm_config = self, engine.scheduler.vllm_config

    async def call_utility_async(self, method, *args):
        return json.loads(json.dumps(getattr(self.inside.core, method)(*args)))

    async def prompt(self, tokens_in, tokens):
        self.waiting.append(({"prompt_token_ids": tokens_in}, sampled(tokens, temperature=1.0)))
        await asyncio.sleep(0)
        if batch := self.waiting:
            self.waiting = []
            self.sizes.append(len(batch))
            self.inside.llm.generate([p for p, _ in batch], [s for _, s in batch], use_tqdm=False)

    async def generate(self, prompt, params, request_id):
        await self.prompt(prompt["prompt_token_ids"], params.max_tokens)
        yield

    async def collective_rpc(self, method, args=()):
        return self.inside.llm.collective_rpc(method, args=args)

    async def reset_prefix_cache(self):
        self.inside.llm.reset_prefix_cache()


@pytest.fixture(scope="module")
def live(engine_of):
    with engine_of("bad", speculation={"policy": "live_table"}, max_num_seqs=MAX_BATCH) as engine:
        yield Live(engine)


async def test_every_arm_is_measured_on_a_live_engine(live):
    passes, engine = [], live.inside
    hook = engine.runner.drafter.model.register_forward_hook(lambda *_: passes.append(engine.scheduler.tlt.drafting))

    table = await calibrate(live, ARMS, loads_of(live, ARMS[-1]), V, budget_s=300.0)
    hook.remove()
    assert table.lengths() == (OFF, *ARMS)
    assert all([b for b, _ in table.by_batch(k)] == [1, 2, 4, 8] for k in table.lengths())
    assert all(0 < p.seconds < 10 for p in table.points)
    assert max(live.sizes) == MAX_BATCH
    assert passes and all(passes)  # none while the OFF arm was measured
    contexts = {(p.batch, p.kv_tokens // p.batch) for p in table.points if p.draft_length == 3}
    assert len(contexts) > 4, "and with a long context at some batches"

    await ask_scheduler(live, "control", points=table.to_list(), acceptance=[0.01, 0.01, 0.01])
    assert engine.scheduler.tlt.drafting
    assert len(engine.scheduler.tlt.policy.table) == MAX_BATCH + 1
