"""A race of draft lengths: its loads, what it predicts, its rule, and how it goes on after it was killed."""

import json
from argparse import ArgumentTypeError

import pytest

from benchmarks.control import fixed
from benchmarks.control.drains import ARMS, Drain, over_goodput, predict, verdict
from benchmarks.control.engine import Decoded, Models
from demo.toy.assets import SHIPPED_POLICY
from verl_tlt.speculation.costs.tables import LatencyTable
from verl_tlt.speculation.types import OFF

FREE = (1.0,) * 5
"""Acceptance of a drafter that is always right."""


def costs(token_s, step_s=0.06, drafter_s=0.0):
    """Measured costs of an engine: so much a step, a verified token, and a draft token."""
    rows = {
        k: [(b, step_s + b * (1 + max(k, 0)) * token_s + (k >= 0) * (1 + k) * drafter_s) for b in (1, 8, 64)]
        for k in (OFF, 0, 1, 2, 5)
    }
    return LatencyTable.calibrated(rows).for_lengths(range(6))


@pytest.mark.parametrize("text", ["64:20-60:1x400-600", "4:100", "64:20-60:1x400", "8:5:2x9", "64:own-400"])
def test_a_load_is_read_as_it_is_written(text):
    drain = Drain.parse(text)
    assert str(drain) == text
    if drain.own:
        assert (drain.requests, drain.longest) == (64, 400)
        return
    spans = [drain.tail] * drain.long + [drain.short] * (drain.requests - drain.long)
    for turn in range(20):
        lengths = drain.lengths(turn)
        assert max(lengths) <= drain.longest
        assert all(low <= n <= high for n, (low, high) in zip(lengths, spans, strict=True))
    assert drain.lengths(3) == Drain.parse(text).lengths(3), "the same for every arm and after a restart"


CANNOT = ("", "64", "64:", "0:20", "4:60-20", "4:20:5x100", "4:20:1x9-3", "4:20:1", "4:-3", "4:20 ", "4:own", "4:own-0")


@pytest.mark.parametrize("text", [*CANNOT, "4:own-9:1x20"])
def test_a_load_that_cannot_be_is_refused_in_a_sentence_that_quotes_it(text):
    with pytest.raises(ArgumentTypeError, match="^'" + text):
        Drain.parse(text)


def test_where_tokens_cost_nothing_the_longest_draft_is_right_and_adaptive_predicts_as_much():
    found = predict(costs(0.0), FREE, [[60] * 4], prompt=0)
    assert found["off"] == pytest.approx(60 * 0.06, abs=1e-3) and found["vllm-k5"] == pytest.approx(10 * 0.06, abs=1e-3)
    assert found["goodput"] == found["table"] == pytest.approx(found["vllm-k5"]), "no drain: nothing to adapt to"


def test_with_a_knee_a_drain_is_predicted_to_be_faster_with_adaptive_drafts_than_with_any_k_and_with_none():
    lengths = [Drain.parse("64:20-60:1x400").lengths(turn) for turn in range(3)]
    assert lengths[0] != lengths[1]
    gains = []
    for load in (lengths, [[100] * 4]):
        found = predict(costs(0.004, drafter_s=0.002), (0.8, 0.7, 0.6), load, prompt=10)
        gains.append(found["goodput"] / min(s for arm, s in found.items() if arm not in ("table", "goodput")))
    assert gains[0] < 0.97 and gains[1] == pytest.approx(1.0, rel=0.02), "the latter is the negative control"


def test_a_prompt_costs_what_its_tokens_cost_in_the_largest_step():
    without, with_prompt = (predict(costs(0.004), FREE, [[60] * 4], prompt)["off"] for prompt in (0, 50))
    token = costs(0.004).by_batch(OFF)[-1][1] / 64
    assert with_prompt - without == pytest.approx(4 * 50 * token, abs=2e-3)


def rounds(written=100, **of):
    """Eight rounds in which each arm takes about so long, and goodput `written` tokens in place of 100."""
    took = {arm: of.get(arm.replace("-", "_"), 30.0) for arm in ARMS}
    alone = {arm: 1.0 for arm in ARMS} | {"goodput": written / 100}
    return [{"seconds": {a: s * (1 + 0.01 * (i % 3)) for a, s in took.items()}, "undrafted": alone} for i in range(8)]


@pytest.mark.parametrize(
    ("best", "said"),
    [(22.0, "adaptive beats a fixed K here"), (20.8, "not said"), (20.0, "not said"), (15.0, "not said")],
)
def test_the_rule_asks_for_five_percent_over_the_fastest_fixed_k(best, said):
    over = over_goodput(rounds(goodput=20.0, vllm_k2=best))
    assert over["vllm-k2"][0] == pytest.approx(best / 20, abs=1e-3) and over["off"][0] == pytest.approx(1.5, abs=1e-3)
    sentence = verdict(over, 8)
    assert said in sentence and "K=2" in sentence and "8 rounds" in sentence
    assert "not said" in verdict(over, 7), "too few to be told by"


@pytest.mark.parametrize("written", [50, 100, 200])
def test_an_arm_that_wrote_more_is_not_the_slower_for_it(written):
    over = over_goodput(rounds(written, goodput=20.0 * written / 100, vllm_k2=22.0))
    assert over["vllm-k2"] == pytest.approx([1.1, 1.1, 1.1], abs=1e-3)


def test_the_lower_end_counts_not_the_ratio():
    wide = rounds(goodput=20.0)
    for each, took in zip(wide, [12.0, 34.0, 14.0, 33.0, 11.0, 32.0, 15.0, 31.0], strict=True):
        each["seconds"]["vllm-k3"] = took
    over = over_goodput(wide)
    assert over["vllm-k3"][0] > 1.05 > over["vllm-k3"][1] and "not said" in verdict(over, 8)


TWO = (Drain.parse("3:4-6:1x20"), Drain.parse("2:5"))


class Engine:
    """An engine in name: counts its calls, and dies after so many drains."""

    lives = 0

    def __init__(self, models):
        self.models, self.called, self.decoded = models, [], []
        made.append(self)

    def calibrate(self, budget_s, batches):
        self.called.append("calibrate")
        return costs(0.001)

    def decode(self, work, greedy=False):
        self.called.append("decode")
        Engine.lives -= 1
        if Engine.lives < 0:
            raise RuntimeError("killed")
        self.decoded.append((greedy, [n for _, n in work]))
        return Decoded(1.0, tuple(n for _, n in work))

    def stats(self, name):
        return {"num_decode_tokens": 30, "num_passes": 20, "steps_by_draft_length": {1: 20}}

    def remember(self, prompts):
        self.called.append("remember")

    def sample(self, prompts, longest):
        self.called.append("sample")
        return Decoded(1.0, tuple(min(longest, 2 + 9 * len(prompt)) for prompt in prompts))

    def add_arm(self, name, known):
        self.arms = {*getattr(self, "arms", ()), name}

    def use(self, name):
        assert name in self.arms or name.startswith("vllm-k")


made = []


@pytest.fixture
def models(tmp_path, monkeypatch):
    monkeypatch.setattr(fixed, "Engine", Engine)
    made.clear()
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 8, "num_hidden_layers": 2,
              "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 30, "intermediate_size": 16,
              "max_position_embeddings": 64, "rms_norm_eps": 1e-5}  # fmt: skip
    for name in ("policy", "drafter"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(name.encode())
    (tmp_path / "policy" / "config.json").write_text(json.dumps(config))
    return Models(tmp_path / "policy", tmp_path / "drafter", [0.5, 0.4])


def race(models, turns, lives=10**6, seconds=1e9, loads=TWO):
    Engine.lives, lines = lives, []
    work = models.policy.parent / "work"
    return fixed.against_fixed(models, [[1], [2, 3]], loads, turns, seconds, work, lines.append), lines


def test_rule_and_prediction_are_said_before_the_first_round(models):
    found, lines = race(models, 1)
    assert lines[0].startswith("Rule: ")
    assert lines[1].startswith("3:4-6:1x20: predicted") and "2:5: predicted" in lines[2]
    assert [line.partition(":")[0] for line in lines[3:]] == ["3", "2"] and len(lines) == 5
    assert {*found["loads"]["2:5"]["predicted"]} == {*ARMS}
    rounds = made[0].called[made[0].called.index("remember") :]
    assert rounds.count("remember") == 2 and rounds.count("decode") == 2 * len(ARMS), "prompts are computed untimed"
    assert made[0].models.batch == 3 and made[0].models.context >= 22


def test_where_responses_end_by_themselves_every_arm_samples_its_own(models):
    found, _ = race(models, 2, loads=(Drain.parse("2:own-15"),))
    assert made[0].decoded == [] and made[0].called.count("sample") == 1 + 2 * len(ARMS), "one to predict from"
    of = found["loads"]["2:own-15"]
    for turn in of["rounds"]:
        assert turn["tokens"] == dict.fromkeys(ARMS, 26) and turn["longest"] == dict.fromkeys(ARMS, 15)
        assert turn["undrafted"] == dict.fromkeys(ARMS, of["predicted"]["off"]), "the lengths it was predicted from"
    assert {*of["predicted"]} == {*ARMS}


def test_a_race_that_was_killed_goes_on_after_its_last_whole_round_with_its_first_costs(models):
    with pytest.raises(RuntimeError, match="killed"):
        race(models, 2, lives=len(ARMS) + 3)
    found, lines = race(models, 2)
    assert "calibrate" not in made[1].called and made[1].called.count("decode") == 3 * len(ARMS)
    assert lines[3].startswith("2:5, 1: ")
    assert all(len(load["rounds"]) == 2 and "In 2 rounds" in load["verdict"] for load in found["loads"].values())
    again, _ = race(models, 2)
    assert again == found and len(made) == 2, "nothing is left to do: no engine"


def test_no_round_begins_when_the_time_is_over(models):
    found, _ = race(models, 2, seconds=0.0)
    assert found["loads"] == {} and made[0].called.count("decode") == 0


def test_other_weights_have_a_race_of_their_own(models):
    race(models, 1)
    (models.drafter / "model.safetensors").write_bytes(b"trained on")
    race(models, 1)
    assert len(made) == 2 and "calibrate" in made[1].called


def test_a_given_head_says_its_acceptance_and_prompts_are_read_whole(tmp_path):
    prompts, words = tmp_path / "prompts.jsonl", ["1", "2", "+"] * 30
    with pytest.raises(ValueError, match=r"--drafter .* acceptance"):
        fixed.given_models(tmp_path, tmp_path, prompts)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "provenance.json").write_text(json.dumps({"acceptance": [0.5, 0.25]}))
    prompts.write_text("".join(json.dumps({"prompt": " ".join(text)}) + "\n" for text in (words, words[:5])))
    models, (long, short) = fixed.given_models(SHIPPED_POLICY, tmp_path, prompts)
    assert models.acceptance == [0.5, 0.25] and models.policy == SHIPPED_POLICY
    assert (len(long), len(short)) == (len(words), 5) and long[:5] == short
