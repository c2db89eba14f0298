"""The drafter's shape follows the policy; its weights follow the seed; its verifier weights follow the policy's."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_policy import FAMILIES, Watched, drafter_of, make_policy, observe, random_texts, verifier_weights
from vllm_by_hand import passes

from verl_tlt.drafter.build import BY_DOCUMENT, build_drafter, drafter_config, halve_frozen, most_frequent
from verl_tlt.drafter.checkpoint import serving_tensors, to_drafter_file
from verl_tlt.drafter.data import align
from verl_tlt.drafter.policy import aux_layers_for, draft_vocab_size
from verl_tlt.drafter.train import trainable_parameters
from verl_tlt.drafter.verifier import VerifierWeights, refresh_verifier_weights
from verl_tlt.errors import DrafterError


@pytest.mark.parametrize(
    ("layers", "expected"),
    [(3, (0, 1, 2)), (4, (1, 2, 3)), (5, (1, 2, 4)), (6, (1, 3, 5)), (7, (2, 3, 4)), (8, (2, 4, 5)), (36, (2, 18, 33))],
)
def test_aux_layers_are_distinct_and_exist(layers, expected):
    assert aux_layers_for(layers) == expected


@pytest.mark.parametrize(
    ("asked", "vocabulary", "size"),
    [(None, 65_536, 65_536), (None, 65_537, 32_768), ("full", 151_936, 151_936), (2, 48, 2), (48, 48, 48)],
)
def test_a_large_vocabulary_is_pruned_unless_told_otherwise(asked, vocabulary, size):
    assert draft_vocab_size(asked, vocabulary, "tlt.drafter.vocab") == size


@pytest.mark.parametrize("asked", [1, 49])
def test_a_draft_vocabulary_that_the_policy_has_not_is_named(asked):
    with pytest.raises(DrafterError, match=rf"tlt\.drafter\.vocab must be 2\.\.48, .*, not {asked}"):
        draft_vocab_size(asked, 48, "tlt.drafter.vocab")


@pytest.mark.parametrize("layers", [(1, 1, 2), (1, 2), (1, 2, 4), (-1, 1, 2)])
def test_aux_layers_the_policy_cannot_give_are_refused(policy, layers):
    with pytest.raises(DrafterError, match="aux_layers"):
        drafter_config(policy.config, aux_layers=layers)


@pytest.mark.parametrize("family", FAMILIES)
def test_one_llama_layer_with_the_policys_heads(family):
    policy = make_policy(family)
    config = drafter_config(policy.config, max_position_embeddings=77)
    layer = config.transformer_layer_config
    assert (layer.model_type, layer.num_hidden_layers, layer.max_position_embeddings) == ("llama", 1, 77)
    assert (layer.num_attention_heads, layer.num_key_value_heads) == (4, 2)
    assert layer.head_dim == (16 if family == "qwen3" else 8)
    assert layer.rope_parameters == policy.config.rope_parameters
    assert config.eagle_aux_hidden_state_layer_ids == [1, 2, 3]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "gemma3"}, "model_type 'gemma3'"),
        ({"model_type": "qwen2", "architectures": ["MiMoForCausalLM"]}, "states of MiMoForCausalLM to no EAGLE-3 head"),
        ({"vocab_size": None}, "'vocab_size'"),
        ({"vocab_size": "many"}, "vocab_size"),
    ],
)
def test_other_policies_are_refused_by_name(policy, change, said):
    fields = {key: value for key, value in {**policy.config.to_dict(), **change}.items() if value is not None}
    with pytest.raises(DrafterError, match=said):
        drafter_config(fields)


def test_the_seed_alone_decides_the_weights(policy):
    torch.manual_seed(5)
    one = trainable_parameters(build_drafter(policy.config, seed=1))
    after = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(after, torch.rand(3))  # the process's random state was left alone
    two = trainable_parameters(build_drafter(policy.config, seed=1))
    other = trainable_parameters(build_drafter(policy.config, seed=2))
    assert all(torch.equal(one[n], two[n]) for n in one)
    assert not torch.equal(one["fc.weight"], other["fc.weight"])
    assert all(p.dtype == torch.float32 for p in one.values())


@pytest.mark.parametrize("tied", [False, True])
def test_verifier_weights_are_read_from_the_shards_that_hold_them_and_no_other(tied, tmp_path):
    policy = make_policy(tie_word_embeddings=tied)
    policy.save_pretrained(tmp_path, max_shard_size="20KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    needed = {index.get(f"{name}.weight") for name in ("model.embed_tokens", "lm_head", "model.norm")}
    for shard in set(index.values()) - needed:
        (tmp_path / shard).write_bytes(b"not read")
    parts, expected = VerifierWeights.from_policy_dir(tmp_path), verifier_weights(policy)
    for name, tensor in vars(parts).items():
        assert torch.equal(tensor, getattr(expected, name)), name
    model = build_drafter(tmp_path)
    refresh_verifier_weights(model, parts)
    assert torch.equal(model.verifier_lm_head.weight, policy.lm_head.weight) and model._attn_impl == BY_DOCUMENT


def test_a_policy_without_one_of_the_tensors_is_named(policy_dir, tmp_path):
    tensors = load_file(policy_dir / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    shutil.copy(policy_dir / "config.json", tmp_path)
    with pytest.raises(DrafterError, match=r"no tensor 'model\.norm\.weight'"):
        VerifierWeights.from_policy_dir(tmp_path)


def test_refresh_refuses_another_policys_tensors(drafter):
    with pytest.raises(DrafterError, match=r"VerifierWeights\.embed is \[50, 32\]"):
        refresh_verifier_weights(drafter, verifier_weights(make_policy(vocab_size=50)))


def test_pruned_vocabulary_maps_ids_and_slices_the_head(policy):
    counts = torch.zeros(48, dtype=torch.int64)
    counts[[40, 3, 7]] = torch.tensor([9, 5, 5])
    kept = most_frequent(counts, 4)
    assert kept.tolist() == [0, 3, 7, 40]  # the tie among unseen tokens goes to the lowest id
    model = drafter_of(policy, draft_ids=kept)
    assert (torch.arange(4) + model.d2t).tolist() == kept.tolist()
    assert model.t2d.nonzero()[:, 0].tolist() == kept.tolist()
    assert torch.equal(model.lm_head.weight, policy.lm_head.weight[kept])
    updated = make_policy(seed=2)
    refresh_verifier_weights(model, verifier_weights(updated))
    assert torch.equal(serving_tensors(model)["lm_head.weight"], updated.lm_head.weight[kept])
    assert torch.equal(model.verifier_lm_head.weight, updated.lm_head.weight[kept])
    with pytest.raises(DrafterError, match="ascending"):
        build_drafter(policy.config, draft_ids=torch.tensor([5, 3]))


def test_embedding_and_head_take_no_memory_before_the_policys_arrive():
    """Every process of a run builds a drafter: at 152k tokens x 3584 three tables in float32 are 6.5 GB in each."""
    policy = {**make_policy().config.to_dict(), "vocab_size": 50_000}
    table, on_host = 50_000 * policy["hidden_size"], []

    def note(name, args, tensor):
        if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
            on_host.append(tensor.untyped_storage().nbytes())

    with Watched(note):
        model = build_drafter(policy)
        halve_frozen(model)
        to_drafter_file(model, "float32")
    assert 0 < max(on_host) < table
    assert model.embed_tokens.weight.isnan().all() and model.lm_head.weight.isnan().all()
    embed, head = torch.rand(2, 50_000, policy["hidden_size"]).bfloat16()
    refresh_verifier_weights(model, VerifierWeights(embed, head, torch.ones(policy["hidden_size"])))
    assert torch.equal(model.embed_tokens.weight, embed)
    assert model.lm_head.weight is model.verifier_lm_head.weight and torch.equal(model.lm_head.weight, head)
    held = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    assert sum(size for size in held.values() if size >= table) == 2 * 2 * table  # both in 16 bits, each once


@pytest.mark.parametrize("kv_heads", [1, 4])
def test_a_new_drafter_knows_the_token_it_stands_at(kv_heads):
    """Another token there moves its first pass twice as far as any token before it does, in a long text too."""
    policy = make_policy(num_key_value_heads=kv_heads)
    drafter = drafter_of(policy, seed=1)
    batch = align(*observe(policy, random_texts((80, 1))))
    row = 60

    def moved(changed):
        """How far the logits of `row` move where the token at another row is replaced."""
        ids = batch.input_ids.clone()
        ids[0, changed] = (ids[0, changed] + 1) % 48
        before, after = (passes(drafter, replace(batch, input_ids=i), 1)[0][0][row] for i in (batch.input_ids, ids))
        return float((after - before).norm())

    assert moved(row) > 2 * max(moved(other) for other in range(row))
