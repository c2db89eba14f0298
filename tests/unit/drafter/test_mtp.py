"""A policy's own MTP head as a drafter: chained as vLLM chains it, trained, scored and saved as an EAGLE-3 head is."""

import itertools
import json
from contextlib import contextmanager, suppress

import pytest
import torch
from drafter_bits import fingerprint
from drafter_folders import refusal, set_tensors, sharded
from mtp_policy import SHAPE, head_of, make_mtp_policy, one_by_one, random_head, without_head
from safetensors.torch import load, load_file, save_file
from vllm_by_hand import passes

from verl_tlt.config import TLTConfig
from verl_tlt.drafter import (
    DrafterError,
    DrafterTrainer,
    PolicyStates,
    Text,
    VerifierWeights,
    accept_length,
    acceptance,
    batches,
    check_drafter,
    from_drafter_file,
    load_drafter,
    load_own_head,
    load_policy,
    mtp_write_back,
    pack,
    policy_shape,
    provenance,
    refresh_verifier_weights,
    save_drafter,
    serving_tensors,
    to_drafter_file,
    train_until,
    trainable_parameters,
    write_back,
)
from verl_tlt.drafter.mtp_tensors import head_shapes, mtp_tensors
from verl_tlt.drafter.tensor_file import tensor_files
from verl_tlt.files.disk import replacing
from verl_tlt.trainer.run_setup import first_drafter

K, VOCAB = 4, SHAPE["vocab_size"]
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module", params=["mimo", "qwen3_5", "qwen3_5_moe"])
def family(request):
    return request.param


@pytest.fixture(scope="module")
def policy_dir(family, tmp_path_factory):
    path = tmp_path_factory.mktemp(family)
    make_mtp_policy(path, family)
    return path


@pytest.fixture(scope="module")
def sequences(policy_dir):
    rng = torch.Generator().manual_seed(1)
    texts = [Text(tuple(torch.randint(VOCAB, (n,), generator=rng).tolist()), p) for n, p in ((18, 5), (25, 9), (11, 0))]
    return PolicyStates(load_policy(policy_dir, "cpu"), ())(texts)


@pytest.fixture
def model(policy_dir):
    return head_of(policy_dir)


def head_folder(path, tensors):
    path.mkdir(exist_ok=True)
    save_file(tensors, path / WEIGHTS)
    return path


def draft_by_hand(model, sequence, t):
    """Logits [K, V] of the draft that starts once token t + 1 is known: a pass over all before it, then one token each,
    behind the keys of the passes before."""
    from transformers import DynamicCache

    tokens, states, cache = sequence.tokens, sequence.last[: t + 1].float(), DynamicCache()
    if hasattr(model, "mtp"):  # Qwen3.5's reads the state that the policy's head reads, too
        states = model.verifier_norm(states)
    logits = []
    for k in range(K):
        fed = tokens[1 : t + 2] if k == 0 else tokens[t + 1 + k :][:1]
        positions = sequence.start + (torch.arange(t + 1) if k == 0 else torch.tensor([t + k]))
        both = torch.cat([model.embed_tokens(fed), states], -1)[None]
        rows, columns = len(fed), t + 1 + k
        mask = torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows)
        out = model.layers[0](
            both,
            position_ids=positions[None],
            attention_mask=mask[None, None],
            past_key_values=cache,
            position_embeddings=model.rotary_emb(both, positions[None]),
        )
        states = model.norm(out)[0, -1:]
        logits.append(model.lm_head(states)[0])
    return torch.stack(logits)


@torch.no_grad()
@pytest.mark.parametrize("attention", ["tlt_by_document", "sdpa", "eager"])
def test_a_row_of_a_packed_batch_is_a_draft(policy_dir, sequences, attention):
    file = to_drafter_file(head_of(policy_dir), "float32")
    model, by_hand = from_drafter_file(*file, attention), from_drafter_file(*file, "sdpa")
    for one in (model, by_hand):
        refresh_verifier_weights(one, VerifierWeights.from_policy_dir(policy_dir))
    texts = [sequences[0], sequences[1].window(6, 25), sequences[2]]
    seen, begin = passes(model, pack(texts), K), 0
    tolerance = dict(rtol=2e-2, atol=2e-2) if attention == "eager" else dict(rtol=1e-4, atol=1e-4)  # a mask in 16 bits
    for sequence in texts:
        for t in range(0, sequence.rows - K, 3):
            row = torch.stack([seen[k][0][begin + t] for k in range(K)])
            torch.testing.assert_close(row, draft_by_hand(by_hand, sequence, t), **tolerance)
        begin += sequence.rows


def test_the_embedding_behind_the_first_token_counts_as_zero_in_mimo_alone(model, sequences):
    def first(token):
        tokens = sequences[0].tokens.clone()
        tokens[1] = token
        changed = type(sequences[0])(tokens, 5, sequences[0].aux, sequences[0].last)
        return passes(model, pack([changed]), 1)[0][0][0]

    assert torch.equal(first(3), first(4)) == (not hasattr(model, "mtp"))


def test_it_learns_and_its_acceptance_rises(model, sequences):
    trainer = DrafterTrainer(model, ttt_steps=3, warmup_steps=5)
    before = acceptance(model, sequences, max_draft=K)
    frozen = {n: p.clone() for n, p in model.named_parameters() if not p.requires_grad}
    done = train_until(trainer, batches(itertools.cycle(sequences), 64), lambda: trainer.steps >= 60)
    assert done.steps == 60 and not done.skipped
    assert accept_length(acceptance(model, sequences, max_draft=K)) > accept_length(before) + 0.3
    assert all(torch.equal(dict(model.named_parameters())[n], p) for n, p in frozen.items())
    trainer.rehearse()


def test_it_travels_and_comes_back_from_disk_to_the_bit(model, policy_dir, tmp_path):
    config, weights = to_drafter_file(model, "bfloat16")
    assert load(weights).keys() == trainable_parameters(model).keys() == head_shapes(policy_shape(policy_dir)).keys()
    assert json.loads(config)["speculators_model_type"] == "mtp"
    there = from_drafter_file(config, weights, "sdpa")
    assert fingerprint(serving_tensors(there, torch.bfloat16)) == fingerprint(load(weights))
    saved = save_drafter(model, tmp_path / "head", {"policy": "tiny", "acceptance": [0.5]}, policy=policy_dir)
    check_drafter(saved, policy_dir)
    loaded = load_drafter(saved, policy_dir, min_context=10_000)
    assert fingerprint(serving_tensors(loaded)) == fingerprint(serving_tensors(model))
    assert loaded.config.to_json_string() == model.config.to_json_string()
    assert provenance(saved)["acceptance"] == [0.5]


# ------------------------------------------------------------------ experts


@pytest.mark.parametrize("family", ["qwen3_5_moe"], indirect=True, scope="module")
def test_experts_are_read_one_by_one_too(policy_dir, tmp_path):
    policy = tmp_path / "policy"
    make_mtp_policy(policy, "qwen3_5_moe")
    tensors = load_file(policy / WEIGHTS)
    apart = one_by_one({name: tensors.pop(name) for name in list(tensors) if name.startswith("mtp.")})
    save_file(tensors | apart, policy / WEIGHTS)
    assert mtp_tensors(policy).keys() == apart.keys()
    wanted = serving_tensors(load_own_head(policy_dir, policy_dir))
    found = serving_tensors(load_own_head(policy, policy))
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in found.items())
    head = random_head(policy_dir, 1)
    shard = write_back(head_folder(tmp_path / "head", one_by_one(head)), policy)
    assert load_file(shard).keys() == head.keys(), "in one tensor each"
    assert not any(name.startswith("mtp.") for name in load_file(policy / WEIGHTS)), "and those of before are gone"
    assert fingerprint(serving_tensors(load_own_head(policy, policy))) == fingerprint(head)


# ------------------------------------------------------------------ a run


def run_start(policy, **drafter):
    settings = TLTConfig.from_dict({"drafter": {"method": "mtp", **drafter}})
    return first_drafter(settings, str(policy), "bfloat16", 64, None)


def test_a_run_starts_with_the_policys_own_head(policy_dir, model, tmp_path):
    start = run_start(policy_dir)
    assert (start.aux_layers, start.chosen, start.draft_vocab) == ((), True, VOCAB)
    assert start.origin == "the policy's own MTP head"
    assert fingerprint(load(start.served.weights)) == fingerprint(serving_tensors(model, torch.bfloat16))
    with torch.no_grad():
        model.norm.weight.add_(1)
    saved = save_drafter(model, tmp_path / "head", {}, policy=policy_dir)
    given = run_start(policy_dir, path=str(saved))
    assert fingerprint(load(given.served.weights)) == fingerprint(serving_tensors(model, torch.bfloat16))
    with pytest.raises(DrafterError, match=r"holds a drafter for tlt\.drafter\.method=mtp, not eagle3"):
        run_start(policy_dir, path=str(saved), method="eagle3")


@pytest.mark.parametrize("family", ["qwen3_5_moe"], indirect=True, scope="module")
@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({}, r"model\.safetensors holds no MTP head \("),
        ({"architectures": ["Qwen3ForCausalLM"]}, "names Qwen3ForCausalLM, and method=mtp drafts for"),
        ({"architectures": ["Qwen3_5MoeForCausalLM"], "num_experts": 0}, "Qwen3_5MoeForCausalLM, whose num_experts"),
    ],
)
def test_a_policy_without_a_head_is_one_sentence(policy_dir, tmp_path, changes, sentence):
    fields = json.loads((policy_dir / "config.json").read_text())
    head_folder(tmp_path, {"model.norm.weight": torch.ones(2)})
    (tmp_path / "config.json").write_text(json.dumps({**fields, **changes}))
    with pytest.raises(DrafterError, match=sentence):
        run_start(tmp_path)


@pytest.mark.parametrize("family", ["qwen3_5_moe"], indirect=True, scope="module")
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda t: t.pop(next(iter(t))), "lacks "),
        (lambda t: t.update({f"{next(iter(t))}2": torch.ones(1)}), "holds "),
        (lambda t: t.update({n: x[:-1] for n, x in t.items() if "down_proj" in n}), "but the policy's config asks for"),
        (lambda t: t.update({n: x.to(torch.int32) for n, x in t.items() if "o_proj" in n}), "must hold F32 or F16"),
    ],
)
def test_a_head_of_other_tensors_is_refused(policy_dir, model, tmp_path, change, sentence):
    saved = save_drafter(model, tmp_path / "head", {})
    tensors = load_file(saved / WEIGHTS)
    change(tensors)
    assert sentence in refusal(head_folder(saved, tensors), str(policy_dir))


# ------------------------------------------------------------------ back into the policy's folder


@pytest.mark.parametrize("shards", [1, 3])
def test_a_head_goes_back_into_a_policy_that_was_saved_without(family, policy_dir, tmp_path, shards):
    policy = tmp_path / "policy"
    make_mtp_policy(policy, family)
    own = without_head(policy, shards)
    before = {file: file.read_bytes() for file in policy.glob("*.safetensors")}
    with pytest.raises(DrafterError):
        mtp_tensors(policy)
    shard = write_back(policy_dir, policy)
    assert all(file.read_bytes() == content for file, content in before.items())
    assert {n: at.file for n, at in mtp_tensors(policy).items()} == dict.fromkeys(own, shard)
    assert fingerprint(serving_tensors(load_own_head(policy, policy))) == fingerprint(own)
    VerifierWeights.from_policy_dir(policy)


def all_tensors(policy):
    """The tensors of a policy as its index, or its one file, says where they are."""
    _, owners = tensor_files(policy)
    files = {file: load_file(policy / file) for file in set(owners.values())}
    return {name: files[file][name] for name, file in owners.items()}


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("writes", range(5))
def test_a_policy_is_whole_wherever_writing_a_head_back_ends_and_another_try_completes_it(
    tmp_path, monkeypatch, shards, writes
):
    """In a policy of 16 bits, whose older head is taken out."""
    policy = tmp_path / "policy"
    make_mtp_policy(policy, "mimo", dtype=torch.bfloat16)
    new = random_head(policy, 1)
    before = load_file(policy / WEIGHTS)
    if shards > 1:
        sharded(policy, shards)
    head = head_folder(tmp_path / "head", new)
    new = {name: tensor.bfloat16() for name, tensor in new.items()}
    left = iter(range(writes))

    @contextmanager
    def until_killed(path):
        if next(left, None) is None:
            raise KeyboardInterrupt
        with replacing(path) as file:
            yield file

    with monkeypatch.context() as patch:
        patch.setattr(mtp_write_back, "replacing", until_killed)
        with suppress(KeyboardInterrupt):
            write_back(head, policy)
    found, heads = all_tensors(policy), [{n: before[n] for n in new}, new]
    assert mtp_tensors(policy).keys() == new.keys() and found.keys() == before.keys()
    assert any(all(torch.equal(found[n], t) for n, t in head.items()) for head in heads), "the old head or the new one"
    assert all(torch.equal(found[n], t) for n, t in before.items() if n not in new)
    written = write_back(head, policy)
    held = [name for file in policy.glob("*.safetensors") for name in load_file(file)]
    assert sorted(held) == sorted(before), "every tensor is in one file"
    again = load_file(written)
    assert again.keys() == new.keys() and all(torch.equal(again[n], t) for n, t in new.items())


def test_a_file_of_the_policy_is_not_written_over(tmp_path):
    make_mtp_policy(tmp_path, "mimo")
    (tmp_path / WEIGHTS).rename(tmp_path / mtp_write_back.SHARD)
    owners = dict.fromkeys(load_file(tmp_path / mtp_write_back.SHARD), mtp_write_back.SHARD)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": owners}))
    with pytest.raises(DrafterError, match=r"model-mtp\.safetensors, where .*, holds other tensors of the policy"):
        write_back(tmp_path, tmp_path)
    assert load_file(tmp_path / mtp_write_back.SHARD).keys() == owners.keys()


@pytest.mark.parametrize(
    ("head", "said"),
    [({"hidden_size": 64}, "but the policy's config asks for"), ({}, "holds NaN or infinity")],
)
def test_a_head_that_is_no_good_does_not_go_back(tmp_path, head, said):
    policy, other = tmp_path / "policy", tmp_path / "other"
    make_mtp_policy(policy, "mimo")
    make_mtp_policy(other, "mimo", **head)
    if not head:
        name = "model.mtp_layers.0.input_proj.weight"
        set_tensors(other, {name: load_file(other / WEIGHTS)[name] / 0})
    before = {file: file.read_bytes() for file in policy.iterdir()}
    with pytest.raises(DrafterError, match=said):
        write_back(other, policy)
    assert {file: file.read_bytes() for file in policy.iterdir()} == before
    with pytest.raises(DrafterError, match=r"has no config\.json"):
        write_back(policy, tmp_path / "nothing")
