"""The tap on verl's FSDP engines over two processes: what the ranks send is, joined, what the policy computes alone."""

import pytest
import torch
from actor import check_states, free_port, layouts, make_rows, plain_policy, run_ranks, wanted, whole_sequences
from rank_cases import CASES, LENGTHS, build_policies, run_cases

pytestmark = pytest.mark.engine

TOLERANCE = dict(rtol=2**-7, atol=2e-3)  # bfloat16's rounding; sums over ranks are ordered otherwise


@pytest.fixture(scope="module")
def root(request, tmp_path_factory):
    """Policies, and what two ranks left for every case."""
    root = tmp_path_factory.mktemp("taps")
    build_policies(root)
    run_ranks(run_cases, (free_port(), str(root), wanted(request, CASES)), ranks=2)
    return root


def policy_of(case, root):
    """The same policy as a plain Hugging Face model, its adapter merged."""
    from peft import PeftModel

    model = plain_policy(root / case.policy)
    if case.lora:
        model = PeftModel.from_pretrained(model, root / case.lora).merge_and_unload()
    return model.eval()


@pytest.mark.parametrize("window", [10_000, 11])
@pytest.mark.parametrize("name", layouts(CASES))
def test_joined_shards_are_the_policys_states(root, name, window):
    case, policy = CASES[name], policy_of(CASES[name], root)
    found = [torch.load(root / f"{name}-{rank}.pt", weights_only=False)[window] for rank in range(2)]
    assert not any(errors for _, errors, _ in found)
    groups = [[shards for shards, _, _ in found]] if case.ulysses > 1 else [[shards] for shards, _, _ in found]
    for group, ranks in enumerate(groups):
        rows = make_rows(LENGTHS[group], seed=group)
        check_states(whole_sequences(ranks), rows, policy, window, **TOLERANCE)


@pytest.mark.parametrize("name", layouts(CASES, lambda case: case.ulysses > 1))
def test_with_ulysses_each_rank_sends_its_slice_only(root, name):
    found = [torch.load(root / f"{name}-{rank}.pt", weights_only=False)[10_000][0] for rank in range(2)]
    sent = [sum(shard.states.shape[1] for shard in shards) for shards in found]
    assert sum(sent) == sum(p + r for p, r in LENGTHS[0]), "a token was sent twice, or not at all"
    assert min(sent) > 0
    assert any(len(shard.tokens) > shard.states.shape[1] for shard in found[0]), "no sequence was split"
