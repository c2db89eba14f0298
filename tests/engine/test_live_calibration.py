"""Calibration on a real engine: costs by batch and draft length from its own step clock, kept for the next run."""

import asyncio
import json
import shutil
from functools import partial
from types import SimpleNamespace

import pytest
from tiny_engine import sampled

from benchmarks.lossless.tiny_policy import V
from verl_tlt.config import TLTConfig
from verl_tlt.server.calibration import calibrate, plan_batches
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
    with engine_of("bad", speculation={"policy": "goodput"}, max_num_seqs=MAX_BATCH) as engine:
        yield Live(engine)


async def test_every_arm_is_measured_on_a_live_engine(live):
    passes, engine = [], live.inside
    hook = engine.runner.drafter.model.register_forward_hook(lambda *_: passes.append(engine.scheduler.tlt.drafting))

    table = await calibrate(live, ARMS, plan_batches(MAX_BATCH), V, budget_s=120.0)
    hook.remove()
    assert table.lengths() == (OFF, *ARMS)
    assert all([b for b, _ in table.by_batch(k)] == [1, 2, 4, 8] for k in table.lengths())
    assert all(0 < p.seconds < 10 for p in table.points)
    assert max(live.sizes) == MAX_BATCH
    assert passes and all(passes)  # none while the OFF arm was measured

    await ask_scheduler(live, "control", points=table.to_list(), acceptance=[0.01, 0.01, 0.01])
    assert engine.scheduler.tlt.drafting


def server_of(live, models, root):
    """Our server around the live engine, as it is right after verl started it; Ray has no part in what is tested."""
    from verl_tlt.messages.rollout import DrafterStatus
    from verl_tlt.server.server import TLTvLLMHttpServer

    server = object.__new__(TLTvLLMHttpServer)
    server.tlt = TLTConfig.from_dict({"speculation": {"costs_dir": str(root / "tables")}})
    server.engine, server.replica_rank, server.node_rank = live, 0, 0
    server.config = SimpleNamespace(
        enforce_eager=True, max_num_seqs=MAX_BATCH, dtype="float32", tensor_model_parallel_size=1
    )
    server.model_config = SimpleNamespace(local_path=str(models["target"]), tokenizer=range(V))
    server._tlt_staged, server._tlt_key, server._tlt_served = None, None, DrafterStatus()
    server._tlt_dir = root
    shutil.copytree(models["bad"], root / "drafter", dirs_exist_ok=True)
    return server


async def test_what_a_run_learned_spares_the_next_one_its_calibration(live, models, tmp_path, monkeypatch):
    from verl_tlt.server import server as module

    # However busy the machine is, every load is to be measured here.
    monkeypatch.setattr(module, "calibrate", partial(module.calibrate, budget_s=600.0))
    first = server_of(live, models, tmp_path)
    measured = await first.tlt_calibrate()
    assert measured.lengths() == (OFF, *ARMS) and len(live.sizes) > 20
    await asyncio.gather(*(live.prompt([7, 8, 9], 40) for _ in range(4)))
    await first.tlt_stats()
    (kept,) = (tmp_path / "tables").iterdir()
    assert kept.suffix == ".json" and "dtype float32" in kept.read_text() and "graphs NONE" in kept.read_text()

    live.sizes.clear()
    second = server_of(live, models, tmp_path)
    found = await second.tlt_calibrate()
    assert set(live.sizes) <= {1}, "one request tries the drafter; no batch was decoded to measure"
    assert set(found.points) == set(measured.points), "what was learned since is kept apart"
    model = live.inside.scheduler.tlt.policy.latency
    assert model.seconds(4, 4 * 32, 2) > 0

    kept.write_text(kept.read_text()[:-40])
    third = server_of(live, models, tmp_path)
    await third.tlt_calibrate()
    assert len(live.sizes) > 20, "a corrupt table is measured anew"
    await third.tlt_stats()
    assert json.loads(kept.read_text())["points"], "and replaced"
