"""The toy's policy as it is trained and saved, what widening keeps, and the files of the demo."""

import pyarrow.parquet as pq
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.toy import assets, task
from tests.toy.tokenizer import save_tokenizer
from tests.toy.widen import widen

TOKENS = torch.randint(5, 50, (4, 40), generator=torch.Generator().manual_seed(1))  # [B, T]


@pytest.fixture
def pair(tmp_path):
    """(a small policy, the same widened, the layers that a drafter of the latter taps)."""
    torch.manual_seed(0)
    config = Qwen3Config(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=4, head_dim=16,
                         num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=False)  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "small")
    save_tokenizer(tmp_path / "small")
    made = widen(tmp_path / "small", tmp_path / "wide", mlp_width=160)
    small, wide = (Qwen3ForCausalLM.from_pretrained(tmp_path / name) for name in ("small", "wide"))
    assert made.parameters == wide.num_parameters() > 2 * small.num_parameters()
    return small, wide, made.aux_layers


@torch.no_grad()
def test_outputs_are_the_same_and_the_tapped_inputs_are_outputs_of_real_layers(pair):
    small, wide, aux_layers = pair
    states, wider = (policy(TOKENS, output_hidden_states=True).hidden_states for policy in (small, wide))
    taps = [wider[i] for i in aux_layers]
    assert torch.equal(taps[0], states[2]) and torch.equal(taps[1], states[3])
    assert not torch.equal(taps[2], taps[1])
    assert all(0 < i < wide.config.num_hidden_layers for i in aux_layers)
    for dtype in (torch.float32, torch.bfloat16):
        assert (small.to(dtype)(TOKENS).logits - wide.to(dtype)(TOKENS).logits).abs().max() == 0.0


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return tmp_path_factory.mktemp("assets")


def built(out, width="wide", **changes):
    return assets.build_assets(out, **{"width": width, "train_rows": 8, "val_rows": 4} | changes)


@pytest.fixture(scope="module")
def wide(out):
    return built(out)


def test_rows_have_verls_columns(wide):
    rows = pq.read_table(wide.train).to_pylist()
    assert [len(rows), pq.read_metadata(wide.val).num_rows] == [8, 4]
    for i, row in enumerate(rows):
        assert set(row) == {"data_source", "prompt", "ability", "reward_model", "extra_info"}
        assert [m["role"] for m in row["prompt"]] == ["user"]
        prompt, extra = row["prompt"][0]["content"].split(), row["extra_info"]
        digits = extra["digits"]
        first, second = prompt[2 : 2 + 2 * digits : 2], prompt[3 + 2 * digits : -1 : 2]
        problem = task.Problem(tuple(map(int, first)), tuple(map(int, second)))
        assert row["reward_model"] == {"style": "rule", "ground_truth": " ".join(task.answer_tokens(problem))}
        assert (extra["index"], extra["split"]) == (i, "train")
        assert len(extra["forced_lengths"]) == assets.FORCED_LENGTHS
        assert max(extra["forced_lengths"]) <= task.MAX_RESPONSE


def test_an_equal_call_finds_everything_and_another_seed_writes_other_prompts(out, wide):
    stamps = {p: p.stat().st_mtime_ns for p in out.rglob("*")}
    first, weights = wide.train.read_bytes(), wide.policy / "model.safetensors"
    assert built(out) == wide
    assert stamps == {p: p.stat().st_mtime_ns for p in out.rglob("*")}
    built(out, seed=1)
    assert wide.train.read_bytes() != first and weights.stat().st_mtime_ns == stamps[weights]
