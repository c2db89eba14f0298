"""verl's engines over several processes: what ranks capture, compute and send is what Hugging Face has alone.

FSDP over two ranks, and Megatron over four. One file, since the ranks of both are forks of one process that imports
verl and megatron-core.
"""

import copy

import megatron_cases
import pytest
import rank_cases
import torch
from actor import check_log_probs, check_states, free_port, make_rows, plain_policy, run_ranks, whole_sequences
from megatron_cases import RANKS, build_mixture, rows_to_learn
from rank_cases import LENGTHS, build_policies
from safetensors.torch import load_file

from verl_tlt.drafter import from_numpy16

pytestmark = pytest.mark.engine

FSDP, CASES = rank_cases.CASES, megatron_cases.CASES
TOLERANCE = dict(rtol=2**-7, atol=2e-3)  # bfloat16's rounding; sums over ranks are ordered otherwise
OF_MEGATRON = dict(rtol=2**-7, atol=5e-3)
EXACT = [name for name, case in CASES.items() if case.dtype == "float32"]
"""Cases that compute as the reference does; a random policy in 16 bits soon computes something else."""


@pytest.fixture(scope="module")
def fsdp(tmp_path_factory):
    """Policies, and what two ranks left for every layout."""
    root = tmp_path_factory.mktemp("fsdp")
    build_policies(root)
    run_ranks(rank_cases.run_cases, (free_port(), str(root), list(FSDP)), ranks=2)
    return root


def fsdp_policy(case, root):
    """The same policy as a plain Hugging Face model, its adapter merged."""
    from peft import PeftModel

    model = plain_policy(root / case.policy)
    if case.lora:
        model = PeftModel.from_pretrained(model, root / case.lora).merge_and_unload()
    return model.eval()


@pytest.mark.parametrize("window", [10_000, 11])
@pytest.mark.parametrize("name", FSDP)
def test_joined_shards_of_fsdp_are_the_policys_states(fsdp, name, window):
    case, policy = FSDP[name], fsdp_policy(FSDP[name], fsdp)
    found = [torch.load(fsdp / f"{name}-{rank}.pt", weights_only=False)[window] for rank in range(2)]
    assert not any(errors for _, errors, _ in found)
    groups = [[shards for shards, _, _ in found]] if case.ulysses > 1 else [[shards] for shards, _, _ in found]
    for group, ranks in enumerate(groups):
        rows = make_rows(LENGTHS[group], seed=group)
        check_states(whole_sequences(ranks), rows, policy, window, **TOLERANCE)


@pytest.mark.parametrize("name", [name for name, case in FSDP.items() if case.ulysses > 1])
def test_with_ulysses_each_rank_sends_its_slice_only(fsdp, name):
    found = [torch.load(fsdp / f"{name}-{rank}.pt", weights_only=False)[10_000][0] for rank in range(2)]
    sent = [sum(shard.states.shape[1] for shard in shards) for shards in found]
    assert sum(sent) == sum(p + r for p, r in LENGTHS[0]), "a token was sent twice, or not at all"
    assert min(sent) > 0
    assert any(len(shard.tokens) > shard.states.shape[1] for shard in found[0]), "no sequence was split"


# ---------------------------------------------------------------------- Megatron


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Policies, and what four ranks left for every layout."""
    pytest.importorskip("megatron.core")
    root = tmp_path_factory.mktemp("megatron")
    build_policies(root)
    build_mixture(root)
    run_ranks(megatron_cases.run_cases, (free_port(), str(root), list(CASES)), RANKS)
    return root


def load(root, name, window):
    """(group, shards) of every rank."""
    found = [ranks[window] for ranks in look(root, name)]
    assert not any(errors for _, _, errors in found)
    return [(group, shards) for group, shards, _ in found]


def look(root, name):
    """What every rank left of a case."""
    return [torch.load(root / f"{name}-{rank}.pt", weights_only=False) for rank in range(RANKS)]


@pytest.fixture(scope="module")
def policies(root):
    return {name: plain_policy(root / name) for name in ("qwen3", "llama", "tied", "moe")}


@pytest.mark.parametrize("window", [10_000, 11])
@pytest.mark.parametrize("name", EXACT)
def test_joined_shards_of_megatron_are_the_policys_states(root, policies, name, window):
    found, policy = load(root, name, window), policies[CASES[name].policy]
    groups = {group for group, _ in found}
    assert len(groups) * CASES[name].tensor * CASES[name].pipeline * CASES[name].context == RANKS
    for group in groups:
        rows = make_rows(LENGTHS[group], seed=group)
        check_states(whole_sequences(shards for g, shards in found if g == group), rows, policy, window, **OF_MEGATRON)


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_sent_twice(root, name):
    found = load(root, name, 10_000)
    for group in {group for group, _ in found}:
        sent = sum(shard.states.nbytes for g, shards in found if g == group for shard in shards)
        tokens = sum(p + r for p, r in LENGTHS[group])
        assert sent == tokens * 4 * 64 * 2  # three aux states and the last one, 64 wide, 16 bits


@pytest.mark.parametrize("name", EXACT)
def test_log_probs_are_the_policys(root, policies, name):
    policy, answered = policies[CASES[name].policy], 0
    for rank in look(root, name):
        group = rank[11][0]
        for (tokens, _), got in zip(make_rows(LENGTHS[group], seed=group), rank["log-probs"] or (), strict=False):
            check_log_probs(got, tokens, policy)
            answered += 1
    assert answered == sum(len(LENGTHS[group]) for group in {rank[11][0] for rank in look(root, name)})


@pytest.mark.parametrize("name", CASES)
def test_every_rank_sends_the_policys_own_tensors(root, name):
    """By name, whole, unfused, once each, without padding of the vocabulary; so a policy's own file could be sent."""
    case = CASES[name]
    stored = load_file(root / case.policy / "model.safetensors")
    for rank in look(root, name):
        assert rank["weights"].keys() == stored.keys()
        for key, tensor in stored.items():
            sent = rank["weights"][key]
            assert sent.dtype == getattr(torch, case.dtype) and torch.equal(sent, tensor.to(sent.dtype)), key


@pytest.mark.parametrize("name", CASES)
def test_embedding_head_and_norm_are_captured_as_they_stream_past(root, policies, name):
    """On every rank, although embedding, norm and head are on different stages; a tied head is the embedding."""
    policy = policies[CASES[name].policy]
    parts = {"embed": policy.model.embed_tokens, "lm_head": policy.lm_head, "norm": policy.model.norm}
    for rank in look(root, name):
        errors, (arrays,) = rank["captured"]
        assert errors == 0
        for part, module in parts.items():
            assert torch.equal(from_numpy16(getattr(arrays, part)), module.weight.to(torch.bfloat16)), part


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.trained])
def test_a_step_is_torchs_and_a_checkpoint_brings_it_back(root, policies, name):
    policy = copy.deepcopy(policies[CASES[name].policy])
    for tokens, prompt_len in rows_to_learn():
        scores = policy(tokens[None]).logits[0].log_softmax(-1)[prompt_len - 1 : -1]
        loss = -scores.gather(1, tokens[prompt_len:, None]).sum() / sum(response for _, response in LENGTHS[0])
        loss.backward()
    gradient = torch.nn.utils.get_total_norm([p.grad for p in policy.parameters()]).item()
    for rank in look(root, name):
        first, second, loaded = rank["trained"]
        if first["logged"] is not None:
            assert first["logged"]["grad_norm"] == pytest.approx(gradient, rel=1e-3)
            assert second["logged"]["loss"] < first["logged"]["loss"]
        for key, tensor in first["weights"].items():
            assert torch.equal(loaded["weights"][key], tensor), key
        assert not torch.equal(first["weights"]["lm_head.weight"], second["weights"]["lm_head.weight"])
    assert any(rank["trained"][0]["logged"] is not None for rank in look(root, name))
