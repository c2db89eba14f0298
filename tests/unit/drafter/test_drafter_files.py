"""A drafter's files as others write them, by every way they come in: loaded if vLLM loads them, or one sentence."""

import json

import pytest
import torch
from mtp_policy import make_mtp_policy
from safetensors.torch import load_file, save_file
from test_other_layouts import DV, tensors_of, written
from tiny_policy import VOCAB, verifier_weights
from typer.testing import CliRunner

from verl_tlt.checks.models import check_recipe_drafter
from verl_tlt.commands.cli import app
from verl_tlt.commands.options import WarmupOptions
from verl_tlt.commands.warmup.command import _check as check_warmup
from verl_tlt.config import TLTConfig
from verl_tlt.drafter import (
    DrafterError,
    VerifierWeights,
    check_drafter,
    load_drafter,
    policy_shape,
    provenance,
    refresh_verifier_weights,
    save_drafter,
    serving_tensors,
    write_back,
)
from verl_tlt.drafter.check import tokenizer_hash
from verl_tlt.drafter.tensor_file import tensor_files
from verl_tlt.errors import TLTError
from verl_tlt.trainer.run_setup import first_drafter

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def sharded(path, parts=3):
    """The tensors of a folder's one file in several, with their index."""
    tensors = load_file(path / WEIGHTS)
    (path / WEIGHTS).unlink()
    table = {}
    for part in range(parts):
        name = f"model-{part}.safetensors"
        held = {key: tensors[key] for key in list(tensors)[part::parts]}
        save_file(held, path / name)
        table |= dict.fromkeys(held, name)
    (path / INDEX).write_text(json.dumps({"weight_map": table}))
    return path


@pytest.fixture
def saved(drafter, policy, tmp_path):
    """A head in our own layout."""
    refresh_verifier_weights(drafter, verifier_weights(policy))
    return save_drafter(drafter, tmp_path / "saved", {})


def modelopt(path):
    """A head as ModelOpt exports it: speculators' names, outputs counted in `eagle_config`, no t2d."""
    names = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors_of().items()}
    del names["embed_tokens.weight"], names["t2d"]
    nested = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "use_aux_hidden_state": True, "use_last_layernorm": True}
    return written(path, names, eagle_config=nested)


# ---------------------------------------------------------------------- heads that vLLM loads


def test_without_t2d_it_drafts_the_tokens_that_d2t_names(policy, tmp_path):
    theirs = written(tmp_path / "theirs")
    whole = serving_tensors(load_drafter(theirs, policy.config))
    for path in (written(tmp_path / "less", {k: t for k, t in tensors_of().items() if k != "t2d"}),
                 modelopt(tmp_path / "modelopt")):  # fmt: skip
        less = load_drafter(path, policy.config)
        assert less.t2d.nonzero().flatten().tolist() == list(range(0, 2 * DV, 2))
        assert all(torch.equal(tensor, whole[name]) for name, tensor in serving_tensors(less).items())
        assert less.target_layer_ids == [1, 2, 3]


def test_a_head_in_several_files_is_one_in_one_file(policy, policy_dir, saved, tmp_path):
    for path in (saved, written(tmp_path / "theirs")):
        whole = serving_tensors(load_drafter(path, policy_dir))
        parts = serving_tensors(load_drafter(sharded(path), policy_dir))
        assert whole.keys() == parts.keys() and all(torch.equal(whole[name], parts[name]) for name in whole)
        settings = TLTConfig.from_dict({"drafter": {"path": str(path)}})
        assert check_recipe_drafter(settings, str(policy_dir), 64).level == "ok"
        first_drafter(settings, str(policy_dir), "float32", 64, None)


def test_a_whole_vocabulary_whose_map_moves_tokens_is_refused(policy, tmp_path):
    tensors = tensors_of(VOCAB)
    tensors["d2t"] = torch.arange(VOCAB).flip(0) - torch.arange(VOCAB)  # vLLM would draft by it
    with pytest.raises(DrafterError, match="tokens must ascend within"):
        load_drafter(written(tmp_path, tensors, draft_vocab_size=VOCAB), policy.config)


@pytest.mark.parametrize(
    ("said", "nested", "read"),
    [(None, None, [1, 2, 3]), ([0, 1, 2], None, [0, 1, 2]), ([0, 1, 3], None, [0, 1, 3]),
     (None, [0, 1, 2], [1, 2, 3]), ([1, 2, 3], [0, 1, 2], [1, 2, 3]),
     (None, [1, 2, 3], None), (None, [0, 1, 3], None), ([0, 1, 2], [0, 1, 2], None), ([1, 2, 3], [1, 2, 3], None)],
)  # fmt: skip
def test_layers_that_readers_count_differently_are_not_guessed(policy, tmp_path, said, nested, read):
    key = "eagle_aux_hidden_state_layer_ids"
    written(tmp_path, **({key: said} if said else {}), **({"eagle_config": {key: nested}} if nested else {}))
    if read:
        assert load_drafter(tmp_path, policy.config).target_layer_ids == read
        return
    with pytest.raises(DrafterError, match=rf"eagle_config\.{key}=.* is ambiguous, .*: set {key} to the layers"):
        load_drafter(tmp_path, policy.config)


# ---------------------------------------------------------------------- every way in asks the same


def refusals(drafter, policy_dir, tmp_path):
    """What each way in says of a drafter."""
    settings = TLTConfig.from_dict({"drafter": {"path": str(drafter)}})
    (tmp_path / "prompts.txt").write_text("one\n")
    options = WarmupOptions(
        model=policy_dir, prompts=tmp_path / "prompts.txt", out=tmp_path / "out", drafter=drafter, device="cpu"
    )

    def convert():
        words = ["convert", str(drafter), "--model", str(policy_dir), "--out", str(tmp_path / "converted")]
        result = CliRunner().invoke(app, words)
        assert not (tmp_path / "converted").exists()
        raise TLTError(result.output)

    for way in (
        lambda: check_drafter(drafter, policy_dir),
        lambda: load_drafter(drafter, policy_dir),
        lambda: first_drafter(settings, str(policy_dir), "float32", 64, None),
        lambda: check_warmup(options),
        convert,
    ):
        with pytest.raises(TLTError) as caught:
            way()
        yield " ".join(str(caught.value).split())
    found = check_recipe_drafter(settings, str(policy_dir), 64)
    assert found.level == "refuse"
    yield found.sentence


@pytest.mark.parametrize("how", ["writable", "link to writable", "index writable"])
def test_no_way_in_takes_a_part_that_others_may_write_to(saved, policy_dir, tmp_path, how):
    part = sharded(saved) / "model-1.safetensors"
    if how == "writable":
        part.chmod(0o666)
    elif how == "index writable":
        (saved / INDEX).chmod(0o666)
    else:
        part.rename(tmp_path / "elsewhere").chmod(0o666)
        part.symlink_to(tmp_path / "elsewhere")
    for sentence in refusals(saved, policy_dir, tmp_path):
        assert "may be another user's drafter: everybody may write to" in sentence, sentence


def test_no_way_in_loads_numbers_that_are_not_finite(saved, policy_dir, tmp_path):
    tensors = load_file(saved / WEIGHTS)
    tensors["fc.weight"][0, 0] = torch.nan
    save_file(tensors, saved / WEIGHTS)
    settings = TLTConfig.from_dict({"drafter": {"path": str(saved)}})
    for way in (
        lambda: load_drafter(saved, policy_dir),
        lambda: first_drafter(settings, str(policy_dir), "float32", 64, None),
    ):
        with pytest.raises(DrafterError, match=r"fc\.weight holds NaN or infinity"):
            way()


@pytest.mark.parametrize("wrong", ["nan", "writable"])
def test_a_head_that_is_no_good_is_not_written_back(tmp_path, wrong):
    policy, head = tmp_path / "policy", tmp_path / "head"
    make_mtp_policy(policy, "mimo")
    make_mtp_policy(head, "mimo")
    if wrong == "nan":
        tensors = load_file(head / WEIGHTS)
        tensors["model.mtp_layers.0.input_proj.weight"][0, 0] = torch.inf
        save_file(tensors, head / WEIGHTS)
    else:
        (head / WEIGHTS).chmod(0o666)
    before = {file.name: file.read_bytes() for file in policy.iterdir()}
    with pytest.raises(DrafterError, match=r"holds NaN or infinity|everybody may write"):
        write_back(head, policy)
    assert {file.name: file.read_bytes() for file in policy.iterdir()} == before


@pytest.mark.parametrize(
    "table",
    [{"weight_map": []}, {"weight_map": None}, {"weight_map": 3}, {"weight_map": {}}, {}, {"weight_map": {"a": 3}},
     {"weight_map": {"a": None}}, {"weight_map": {"a": ["b"]}}, {"weight_map": {"a": ".."}},
     {"weight_map": {"a": "config.json"}}, {"weight_map": {"a": "../model.safetensors"}},
     {"weight_map": {"a": "a\0.safetensors"}}, {"weight_map": {"a": "/model.safetensors"}}],
)  # fmt: skip
def test_an_index_of_another_kind_is_a_sentence(saved, policy_dir, tmp_path, table):
    (sharded(saved) / INDEX).write_text(json.dumps(table))
    for sentence in refusals(saved, policy_dir, tmp_path):
        assert INDEX in sentence and "Traceback" not in sentence
    (saved / "config.json").write_text((policy_dir / "config.json").read_text())
    for read in (tensor_files, VerifierWeights.from_policy_dir):
        with pytest.raises(DrafterError, match=INDEX):
            read(saved)


@pytest.mark.parametrize("key", ["version", "tokens_trained", "prompts", "prompts_limit", "acceptance", "policy"])
@pytest.mark.parametrize("value", ["many", [], [1], {"a": 1}, None, 1e300])
def test_facts_of_another_kind_are_left_out(saved, policy_dir, key, value):
    (saved / "provenance.json").write_text(json.dumps({key: value}))
    kept = provenance(saved)
    assert kept.keys() <= {key} and isinstance(kept.get("version", 0), int) and isinstance(kept.get("prompts", ""), str)
    first_drafter(TLTConfig.from_dict({"drafter": {"path": str(saved)}}), str(policy_dir), "float32", 64, None)


@pytest.mark.parametrize(
    "content",
    [{"model": 3}, {"model": {"vocab": 3}}, {"model": {"vocab": [1]}}, {"added_tokens": [1]}, {"added_tokens": 7},
     {"model": {"vocab": {"a": []}}}],
)  # fmt: skip
def test_a_tokenizer_of_another_kind_is_a_sentence(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(DrafterError, match=r"tokenizer\.json is no tokenizer"):
        tokenizer_hash(tmp_path)


# ---------------------------------------------------------------------- policies


def test_a_single_file_comes_before_a_stale_index(policy, policy_dir, tmp_path):
    path = tmp_path / "policy"
    policy.save_pretrained(path)
    (path / INDEX).write_text(json.dumps({"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}))
    assert torch.equal(VerifierWeights.from_policy_dir(path).lm_head, policy.lm_head.weight)


SIZES = ("hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")


@pytest.mark.parametrize("key", SIZES)
@pytest.mark.parametrize("value", [10**18, 0, -1, "many", None, [], {}, 2.5e30])
def test_a_size_that_no_model_has_is_a_sentence(policy, key, value):
    for fields in ({**policy.config.to_dict(), key: value}, {"model_type": "qwen3_vl", "text_config": {key: value}}):
        if value is None and "text_config" in fields:
            continue
        with pytest.raises(DrafterError) as caught:
            policy_shape(fields)
        assert len(str(caught.value)) < 300
