"""The scheduler under async scheduling: a made worker, in place of a model, accepts drafts at random.

vLLM forces sync scheduling on the CPU, so whole engines have that alone (test_scheduler.py, test_contained.py).
"""

import random
from collections import deque

import pytest
import torch

from verl_tlt.config import TLTConfig

pytestmark = pytest.mark.engine

REQUESTS, PROMPT, IN_FLIGHT = 12, 9, 2


class MadeWorker:
    """Answers scheduled steps as a model runner would: one token and a random number of accepted drafts each."""

    def __init__(self, rng):
        self.rng = rng
        self.widths, self.accepted, self.rows = [], [], 0
        self.seen = {}  # request → prompt tokens computed

    def step(self, output):
        from vllm.v1.outputs import ModelRunnerOutput

        ids, tokens = list(output.num_scheduled_tokens), []
        for request in ids:
            draft = output.scheduled_spec_decode_tokens.get(request, [])
            self.seen[request] = self.seen.get(request, 0) + output.num_scheduled_tokens[request]
            taken = self.rng.randint(0, len(draft))
            tokens.append([7] * (1 + taken) if self.seen[request] >= PROMPT else [])
        self.widths.append({len(d) for d in output.scheduled_spec_decode_tokens.values()})
        return ModelRunnerOutput(
            req_ids=ids, req_id_to_index={r: i for i, r in enumerate(ids)}, sampled_token_ids=tokens
        )


def make_scheduler(models, is_async=True):
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    from verl_tlt.engine_core.scheduler import TLTAsyncScheduler
    from verl_tlt.server.engine_arguments import speculative_config

    tlt = TLTConfig.from_dict({"speculation": {"policy": "fixed"}}).to_dict()
    config = EngineArgs(
        model=str(models["target"]), skip_tokenizer_init=True, dtype="float32", enforce_eager=True, max_model_len=512,
        max_num_seqs=REQUESTS, max_num_batched_tokens=64, enable_prefix_caching=False,
        speculative_config=speculative_config(str(models["good"]), 3),
        additional_config={
            "tlt": {"speculation": tlt["speculation"] | {"policy": "policies:rand"}, "arms": [0, 1, 2, 3]}
        },
    ).create_engine_config()  # fmt: skip
    config.scheduler_config.async_scheduling = is_async  # the CPU platform has just switched it off
    config.cache_config.num_gpu_blocks = 2000
    spec = FullAttentionSpec(block_size=16, num_kv_heads=4, head_size=32, dtype=torch.float32)
    config.cache_config.block_size = 16
    return TLTAsyncScheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(2000, [], [KVCacheGroupSpec(["layer"], spec)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=16,
    )


@pytest.fixture
def scheduler(models):
    made = make_scheduler(models)
    yield made
    made.shutdown()


def test_one_of_the_wrong_kind_refuses_to_start(models):
    """vLLM would start with it, and draft nothing without a word."""
    with pytest.raises(ValueError, match="TLTAsyncScheduler with async_scheduling=False would draft nothing"):
        make_scheduler(models, is_async=False)


def add_requests(scheduler, rng):
    from vllm import SamplingParams
    from vllm.v1.request import Request

    lengths = {f"r{i}": rng.randint(20, 120) for i in range(REQUESTS)}
    for name, tokens in lengths.items():
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        scheduler.add_request(Request(name, [5] * PROMPT, params, None))
    return lengths


def drain(scheduler, worker):
    """Run all requests, as EngineCore.step_with_batch_queue does."""
    got, in_flight = {}, deque()
    while scheduler.has_unfinished_requests() or in_flight:
        room = len(in_flight) < IN_FLIGHT
        output = scheduler.schedule() if room and scheduler.has_unfinished_requests() else None
        if output is not None and output.num_scheduled_tokens:
            scheduler.get_grammar_bitmask(output)
            in_flight.append(output)
            if len(in_flight) < IN_FLIGHT:
                continue
        done = in_flight.popleft()
        for client in scheduler.update_from_output(done, worker.step(done)).values():
            for o in client.outputs:
                got[o.request_id] = got.get(o.request_id, 0) + len(o.new_token_ids)
    return got


def test_after_an_exception_of_ours_nothing_is_drafted_and_every_request_gets_its_tokens(scheduler):
    rng = random.Random(5)
    worker = MadeWorker(rng)
    lengths, choose = add_requests(scheduler, rng), scheduler.tlt.policy.choose

    def choose_and_fail(load):
        if len(worker.widths) > 12:
            raise ArithmeticError("broken by a test")
        return choose(load)

    scheduler.tlt.policy.choose = choose_and_fail
    assert drain(scheduler, worker) == lengths
    assert scheduler.tlt.stats().failure == "ArithmeticError: broken by a test"
    drafted = [bool(widths - {0}) for widths in worker.widths]
    assert any(drafted[:13]) and not any(drafted[16:]) and len(drafted) > 30


def test_a_policy_learns_from_a_step_while_the_next_one_computes(scheduler):
    add_requests(scheduler, random.Random(2))
    worker, policy = MadeWorker(random.Random(2)), scheduler.tlt.policy
    for learned in range(5):
        output = scheduler.schedule()
        scheduler.get_grammar_bitmask(output)
        assert len(policy.steps) == learned
        scheduler.update_from_output(output, worker.step(output))
    assert len(policy.steps) == 4, "an engine step waits for what is learned from it"


def test_what_the_server_asks_for_counts_every_step_that_is_over(scheduler):
    add_requests(scheduler, random.Random(2))
    worker = MadeWorker(random.Random(2))
    for steps in (1, 2):
        output = scheduler.schedule()
        scheduler.get_grammar_bitmask(output)
        scheduler.update_from_output(output, worker.step(output))
        assert scheduler.tlt_call("stats", {})["num_steps"] == steps


def test_every_request_gets_its_tokens_and_every_step_is_counted(scheduler):
    rng = random.Random(3)
    worker = MadeWorker(rng)
    lengths = add_requests(scheduler, rng)
    assert drain(scheduler, worker) == lengths
    policy, stats = scheduler.tlt.policy, scheduler.tlt.stats()
    assert stats.failure is None
    assert stats.num_steps == len(policy.chosen) == len(worker.widths)
    for chosen, verified in zip(policy.chosen, worker.widths[1:], strict=False):
        assert verified <= {chosen}  # the K of a step is the width of the next
    # The first token is the prefill's, in the batch in which the prompt ended.
    assert stats.num_decode_tokens == sum(lengths.values()) - REQUESTS
    assert stats.num_drafts > 100
    assert all(a <= o for a, o in zip(stats.num_accepted_tokens_per_pos, stats.num_draft_tokens_per_pos, strict=True))
    assert list(stats.num_accepted_tokens_per_pos) == sorted(stats.num_accepted_tokens_per_pos, reverse=True)
    clean = [step for step in policy.steps if step.clean]
    assert len(clean) > 5
    for step in clean:
        assert step.verified == step.drafted
        # Less only where a request reached its length in the middle of a draft, or had ended in flight.
        most = step.batch + sum(step.num_accepted_tokens_per_pos)
        assert most - (step.verified + 1) * REQUESTS <= step.num_decode_tokens <= most
    full = [s for s in clean if s.batch == REQUESTS]
    assert any(s.num_decode_tokens == s.batch + sum(s.num_accepted_tokens_per_pos) for s in full)
