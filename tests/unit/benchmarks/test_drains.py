"""A race of draft lengths: its loads, what it predicts, its rule, and how it goes on after it was killed."""

import json
from argparse import ArgumentTypeError

import pytest

from benchmarks.control import fixed
from benchmarks.control.drains import ADAPTIVE, ARMS, FAR, NEAR, OURS, Drain, StepCosts, over_ours, predict, verdict
from benchmarks.control.engine import Decoded, Models
from verl_tlt.drafter import DrafterError
from verl_tlt.speculation.costs import LatencyTable
from verl_tlt.speculation.types import OFF

FREE = (1.0,) * 7
"""Acceptance of a drafter that is always right."""
LONG_TAIL = [20] * 30 + [200, 240]


def table(token_s, step_s=0.06, drafter_s=0.0, context_s=0.0):
    """Measured costs of an engine: so much a step, a verified token, a draft token, and a request's context."""
    rows = {
        k: [
            (b, step_s + b * ((1 + max(k, 0)) * token_s + context_s) + (k >= 0) * (1 + k) * drafter_s)
            for b in (1, 4, 64)
        ]
        for k in (OFF, *range(8))
    }
    return LatencyTable.calibrated(rows)


def costs(token_s, drafter_s=0.0, context_s=0.0):
    near = table(token_s, drafter_s=drafter_s)
    return StepCosts(near, table(token_s, drafter_s=drafter_s, context_s=context_s))


@pytest.mark.parametrize(("text", "requests"), [("192+4@1000", 196), ("11+1@1000", 12), ("4x400", 4)])
def test_a_load_is_read_as_it_is_written(text, requests):
    drain = Drain.parse(text)
    assert str(drain) == text and drain.requests == requests and drain.equal == ("x" in text)


@pytest.mark.parametrize(
    "text", ["", "64", "64+", "64+2", "64@100", "0+2@100", "4x", "x4", "4x400 ", "-1+2@10", "4+0@9"]
)
def test_a_load_that_cannot_be_is_refused_in_a_sentence_that_quotes_it(text):
    with pytest.raises(ArgumentTypeError) as raised:
        Drain.parse(text)
    assert str(raised.value).startswith(repr(text))


def test_where_tokens_cost_nothing_the_longest_draft_is_right_and_adaptive_predicts_as_much():
    found = {arm: predict(costs(0.0), FREE, [80] * 4, 0, arm) for arm in ARMS}
    assert found["off"] == pytest.approx(80 * 0.06, abs=1e-3)
    assert found["vllm-k7"] == found[OURS] == pytest.approx(10 * 0.06, abs=1e-3)


def test_with_a_knee_a_long_tail_is_predicted_to_gain_from_a_chosen_k_and_equal_requests_are_not():
    gains = []
    for lengths in (LONG_TAIL, [100] * 4):
        found = {arm: predict(costs(0.004, 0.002), (0.8, 0.7, 0.6), lengths, 10, arm) for arm in ARMS}
        gains.append(found[OURS] / min(s for arm, s in found.items() if arm not in ADAPTIVE))
    assert gains[0] < 0.97 and gains[1] == pytest.approx(1.0, rel=0.02), "the latter is the negative control"


def test_context_costs_what_was_measured_at_the_far_one():
    near, far = costs(0.001), costs(0.001, context_s=0.008)
    assert far(1, NEAR, 3) == pytest.approx(near(1, NEAR, 3))
    assert far(1, FAR, 3) - near(1, FAR, 3) == pytest.approx(0.008, rel=1e-3)
    middle = (NEAR + FAR) // 2
    assert far(4, 4 * middle, 0) - near(4, 4 * middle, 0) == pytest.approx(4 * 0.004, rel=0.01)


def rounds(lengths=LONG_TAIL, ours=LONG_TAIL, count=8, **of):
    """Rounds in which each arm takes about as many seconds as it is said to, else 30, and ours wrote other lengths."""
    took = {arm: of.get(arm.replace("-", "_"), 30.0) for arm in ARMS}
    return [
        {
            arm: {"seconds": s * (1 + 0.01 * (i % 3)), "lengths": ours if arm == OURS else lengths}
            for arm, s in took.items()
        }
        for i in range(count)
    ]


def judged(each):
    return over_ours(each, costs(0.001), (0.8,) * 7, 10)["adjusted"]


@pytest.mark.parametrize(
    ("best", "said"), [(22.0, "beats every fixed K here"), (20.8, "not claimed"), (20.0, "not claimed")]
)
def test_the_rule_asks_for_five_percent_over_every_fixed_k(best, said):
    over = judged(rounds(live_table=20.0, vllm_k2=best))
    assert over["vllm-k2"][0] == pytest.approx(best / 20, abs=1e-3) and over["off"][0] == pytest.approx(1.5, abs=1e-3)
    sentence = verdict(over, 8)
    assert said in sentence and "K=2" in sentence and "8 rounds" in sentence
    assert "not claimed" in verdict(over, 7), "too few to be told by"


def test_an_arm_that_sampled_longer_responses_is_not_the_slower_for_it():
    """Ours drew a tail of twice the length and took as much longer as was to be expected."""
    longer, c, a = [20] * 30 + [400, 480], costs(0.001), (0.8,) * 7
    as_long, twice = (predict(c, a, lengths, 10, OURS) for lengths in (LONG_TAIL, longer))
    one = over_ours(rounds(live_table=20.0), c, a, 10)
    other = over_ours(rounds(ours=longer, live_table=20.0 * twice / as_long), c, a, 10)
    assert other["plain"]["vllm-k3"][0] < 0.8 * one["plain"]["vllm-k3"][0]
    assert other["adjusted"]["vllm-k3"][0] == pytest.approx(one["adjusted"]["vllm-k3"][0], rel=0.05)


def test_the_lower_end_counts_not_the_ratio_and_one_fixed_k_is_enough_to_fail():
    wide = rounds(live_table=20.0)
    for each, took in zip(wide, [12.0, 34.0, 14.0, 33.0, 11.0, 32.0, 15.0, 31.0], strict=True):
        each["vllm-k3"]["seconds"] = took
    over = judged(wide)
    assert over["vllm-k3"][0] > 1.05 > over["vllm-k3"][1] and "not claimed" in verdict(over, 8)


TWO = (Drain.parse("2+1@20"), Drain.parse("2x5"))


def ask(drain, turn):
    return [[1] * (2 + i) for i in range(drain.requests)]


class Engine:
    """An engine in name: counts its calls, and dies after so many drains."""

    lives = 0

    def __init__(self, models):
        self.models, self.called, self.decoded = models, [], []
        made.append(self)

    def calibrate(self, budget_s, batches, context):
        self.called.append("calibrate")
        return table(0.001)

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


def race(models, turns, lives=10**6, seconds=1e9):
    Engine.lives, lines = lives, []
    work = models.policy.parent / "work"
    return fixed.against_fixed(models, ask, TWO, turns, seconds, work, lines.append), lines


def test_rule_and_prediction_are_said_before_the_first_round(models):
    found, lines = race(models, 1)
    assert lines[0].startswith("Rule: ")
    assert lines[1].startswith("2+1@20: predicted") and lines[2].startswith("2x5: predicted")
    assert [line.partition(",")[0] for line in lines[3:]] == ["2+1@20", "2x5"]
    assert {*found["loads"]["2x5"]["predicted"]} == {*ARMS}
    in_rounds = made[0].called[made[0].called.index("remember") :]
    assert in_rounds.count("remember") == 2, "prompts are computed untimed"
    assert in_rounds.count("decode") == in_rounds.count("sample") == len(ARMS)
    assert made[0].models.batch == 3 and made[0].models.context >= FAR


def test_every_arm_samples_its_own_responses_but_for_equal_ones(models):
    found, _ = race(models, 2)
    for name, lengths in (("2+1@20", [20, 20, 20]), ("2x5", [5, 5])):
        for each in found["loads"][name]["rounds"]:
            assert {arm: one["lengths"] for arm, one in each.items()} == dict.fromkeys(ARMS, lengths)


def test_a_race_that_was_killed_goes_on_after_its_last_whole_round_with_its_first_costs(models):
    with pytest.raises(RuntimeError, match="killed"):
        race(models, 2, lives=1 + len(ARMS) + 3)
    found, lines = race(models, 2)
    assert "calibrate" not in made[1].called and made[1].called.count("decode") == len(ARMS)
    assert lines[3].startswith("2x5, 2: "), "of the others every round is kept"
    assert all(len(load["rounds"]) == 2 and "In 2 rounds" in load["verdict"] for load in found["loads"].values())
    again, _ = race(models, 2)
    assert again == found and len(made) == 2, "nothing is left to do: no engine"


def test_no_round_begins_when_the_time_is_over(models):
    found, _ = race(models, 2, seconds=0.0)
    assert found["loads"] == {} and "remember" not in made[0].called


def test_other_weights_have_a_race_of_their_own(models):
    race(models, 1)
    (models.drafter / "model.safetensors").write_bytes(b"trained on")
    race(models, 1)
    assert len(made) == 2 and "calibrate" in made[1].called


def test_whole_runs_find_the_costs_of_the_widest_race_of_their_models(models):
    work = models.policy.parent / "work"
    with pytest.raises(
        DrafterError, match=r"no race of these models: run `python -m benchmarks\.control --fixed` first"
    ):
        fixed.recorded_costs(work, models)
    race(models, 1)
    costs, prompt = fixed.recorded_costs(work, models)
    assert prompt == 4 and costs(1, NEAR, OFF) == pytest.approx(table(0.001).by_batch(OFF)[0][1])


def test_what_is_missing_is_named_with_the_command_that_makes_it(tmp_path):
    with pytest.raises(DrafterError, match=r"policy is missing: `python -m benchmarks\.real_policy` makes it"):
        fixed.real_models(tmp_path)
    (tmp_path / "policy").mkdir()
    with pytest.raises(DrafterError, match=r"drafter is missing: `python -m benchmarks\.real_policy\.head` makes it"):
        fixed.real_models(tmp_path)
