import random

import pyarrow.parquet as pq
import pytest
import torch
from transformers import Qwen3ForCausalLM

from demo.toy import assets, task


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return tmp_path_factory.mktemp("assets")


@pytest.fixture(scope="module")
def wide(out):
    return assets.build_assets(out, width="wide", train_rows=8, val_rows=4)


def test_rows_have_verls_columns(wide):
    rows = pq.read_table(wide.train).to_pylist()
    assert [len(rows), pq.read_metadata(wide.val).num_rows] == [8, 4]
    for i, row in enumerate(rows):
        assert set(row) == {"data_source", "prompt", "ability", "reward_model", "extra_info"}
        assert [m["role"] for m in row["prompt"]] == ["user"]
        prompt = row["prompt"][0]["content"].split()
        digits = row["extra_info"]["digits"]
        first, second = prompt[2 : 2 + 2 * digits : 2], prompt[3 + 2 * digits : -1 : 2]
        problem = task.Problem(tuple(map(int, first)), tuple(map(int, second)))
        assert row["reward_model"] == {"style": "rule", "ground_truth": " ".join(task.answer_tokens(problem))}
        assert row["extra_info"]["index"] == i and row["extra_info"]["split"] == "train"
        assert len(row["extra_info"]["forced_lengths"]) == assets.FORCED_LENGTHS
        assert max(row["extra_info"]["forced_lengths"]) <= task.MAX_RESPONSE


def test_the_wide_policy_is_the_shipped_one(wide):
    small, big = (
        Qwen3ForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (assets.SHIPPED_POLICY, wide.policy)
    )
    assert 30e6 < big.num_parameters() < 45e6
    rng = random.Random(0)
    problem = task.sample_problem(rng)
    words = task.prompt_tokens(problem) + task.sample_response(problem, rng)
    ids = torch.tensor([[task.TOKEN_ID[w] for w in words]])  # [1, T]
    with torch.no_grad():
        torch.testing.assert_close(small(ids).logits, big(ids).logits, atol=1e-4, rtol=0)


def test_the_half_policy_is_as_many_bytes_in_fp32_as_the_wide_one_in_bf16(out, wide):
    half = assets.build_assets(out, width="half", train_rows=8, val_rows=4)
    small, big = (Qwen3ForCausalLM.from_pretrained(path) for path in (half.policy, wide.policy))
    assert 4 * small.num_parameters() == pytest.approx(2 * big.num_parameters(), rel=0.1)
    assert half.aux_layers == wide.aux_layers


def test_an_equal_call_finds_everything(out, wide):
    stamps = {p: p.stat().st_mtime_ns for p in out.rglob("*")}
    assert assets.build_assets(out, width="wide", train_rows=8, val_rows=4) == wide
    assert stamps == {p: p.stat().st_mtime_ns for p in out.rglob("*")}


def test_another_seed_writes_other_prompts_and_keeps_the_policy(out, wide):
    first, policy = wide.train.read_bytes(), (wide.policy / "model.safetensors").stat().st_mtime_ns
    assets.build_assets(out, width="wide", train_rows=8, val_rows=4, seed=1)
    assert wide.train.read_bytes() != first
    assert (wide.policy / "model.safetensors").stat().st_mtime_ns == policy


def test_an_interrupted_build_is_repeated(tmp_path, monkeypatch):
    def broken(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(assets, "write_rows", broken)
        with pytest.raises(KeyboardInterrupt):
            assets.build_assets(tmp_path, train_rows=2, val_rows=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".policy-small.recipe", "policy-small"]
    assert assets.build_assets(tmp_path, train_rows=2, val_rows=2).train.exists()


@pytest.mark.parametrize("wrong", [{"width": "huge"}, {"val_rows": 0}])
def test_wrong_input_is_refused(tmp_path, wrong):
    with pytest.raises(ValueError, match="must be"):
        assets.build_assets(tmp_path, **wrong)
