"""The tap on verl's Megatron engine over four processes: joined, the shards are what Hugging Face computes alone."""

from types import SimpleNamespace

import pytest
import torch
from actor import free_port, make_rows, reference, whole_sequences
from megatron_cases import CASES, LENGTHS, RANKS, run_cases
from rank_cases import build_policies

from verl_tlt.actor.adapter import Untapped
from verl_tlt.actor.worker import adapt

pytestmark = pytest.mark.engine
pytest.importorskip("megatron.core")

TOLERANCE = dict(rtol=2**-7, atol=5e-3)  # bfloat16's rounding; sums over ranks are ordered otherwise


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Policies, and what four ranks left for every case."""
    root = tmp_path_factory.mktemp("megatron")
    build_policies(root)
    torch.multiprocessing.spawn(run_cases, (free_port(), str(root), list(CASES)), nprocs=RANKS)
    return root


def load(root, name, window):
    """(group, shards) of every rank."""
    found = [torch.load(root / f"{name}-{rank}.pt", weights_only=False)[window] for rank in range(RANKS)]
    assert not any(errors for _, _, errors in found)
    return [(group, shards) for group, shards, _ in found]


@pytest.fixture(scope="module")
def policies(root):
    from transformers import AutoModelForCausalLM

    return {
        name: AutoModelForCausalLM.from_pretrained(root / name, dtype=torch.float32, attn_implementation="sdpa").eval()
        for name in ("qwen3", "llama")
    }


@pytest.mark.parametrize("window", [10_000, 11])
@pytest.mark.parametrize("name", list(CASES))
def test_joined_shards_are_the_policys_states(root, policies, name, window):
    found, policy = load(root, name, window), policies[CASES[name].policy]
    groups = {group for group, _ in found}
    assert len(groups) * CASES[name].tensor * CASES[name].pipeline * CASES[name].context == RANKS
    for group in groups:
        rows = make_rows(LENGTHS[group], seed=group)
        sequences = whole_sequences(shards for g, shards in found if g == group)
        assert len(sequences) == len(rows)
        for s, (tokens, prompt_len) in zip(sequences, rows, strict=True):
            assert len(s) == min(window, len(tokens))
            stop = s.start + len(s)
            assert torch.equal(s.tokens, tokens[s.start : stop])
            assert s.prompt_len == max(0, prompt_len - s.start)
            aux, last = reference(policy, tokens)
            torch.testing.assert_close(s.aux.float(), aux[s.start : stop], **TOLERANCE)
            torch.testing.assert_close(s.last.float(), last[s.start : stop], **TOLERANCE)


@pytest.mark.parametrize("name", list(CASES))
def test_nothing_is_sent_twice(root, name):
    found = load(root, name, 10_000)
    for group in {group for group, _ in found}:
        sent = sum(shard.states.nbytes for g, shards in found if g == group for shard in shards)
        tokens = sum(p + r for p, r in LENGTHS[group])
        assert sent == tokens * 4 * 64 * 2  # three aux states and the last one, 64 wide, 16 bits


@pytest.mark.parametrize(
    ("engine", "why"),
    [
        ({"dynamic_context_parallel": True}, "dynamic_context_parallel=True"),
        ({"use_megatron_fsdp": True}, "use_megatron_fsdp=True"),
        ({}, "is a Linear, without a decoder"),
    ],
)
def test_what_cannot_be_tapped_says_so(engine, why):
    config = SimpleNamespace(
        **{"strategy": "megatron", "dynamic_context_parallel": False, "use_megatron_fsdp": False, **engine}
    )
    with pytest.raises(Untapped, match=why):
        adapt(SimpleNamespace(engine_config=config, module=[torch.nn.Linear(2, 2)]))
