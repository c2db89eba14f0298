"""The arms of the end-to-end benchmark say what they are; their drafters are made from other prompts than it has."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from benchmarks.e2e import heads
from benchmarks.e2e.__main__ import drafters, portable, read_options, schedule
from benchmarks.e2e.arms import LOADS, Heads, arms
from demo.toy.assets import build_assets
from verl_tlt.commands.compare.plan import NO_SLEEP, SPECULATIVE, STOCK
from verl_tlt.speculation.costs import LatencyPoint, LatencyTable

PLACES = Heads(Path("/warm"), Path("/stale"), Path("/random"))
REPLICAS = 2


@pytest.fixture
def every(tmp_path):
    return arms(PLACES, [[1, 4, 5], [5, 32, 0]])


def test_a_run_without_a_drafter_may_be_left_to_its_own_rule(every, tmp_path):
    assert "tlt.spot.cold_start_s=60" in every["tlt-fresh"].overrides and "60 s at most" in every["tlt-fresh"].label
    by_rule = arms(PLACES, [], "null")["tlt-fresh"]
    assert "tlt.spot.cold_start_s=null" in by_rule.overrides and "if that pays" in by_rule.label


def parsed(overrides):
    found = OverridesParser.create().parse_overrides(list(overrides))
    return {override.key_or_group: override.value() for override in found}


def engine_config(arm):
    """What the arm gives stock vLLM; None: no speculation of its own."""
    return parsed(arm.overrides).get(SPECULATIVE.lstrip("+"))


def test_every_arm_is_stock_or_says_what_it_changes(every):
    assert next(iter(every)) == STOCK and not every[STOCK].overrides
    assert len({arm.label for arm in every.values()}) == len(every) == 13
    of_vllm = {name: config for name, arm in every.items() if (config := engine_config(arm))}
    assert not any(every[name].tlt for name in of_vllm)
    assert {name: config["num_speculative_tokens"] for name, config in of_vllm.items()} == {
        "vllm-1": 1, "vllm-3": 3, "vllm-7": 7, "vllm-table": 7, "vllm-3-lost": 3, "vllm-3-stale": 3, "vllm-3-random": 3,
    }  # fmt: skip
    assert of_vllm["vllm-table"]["num_speculative_tokens_per_batch_size"] == [[1, 4, 5], [5, 32, 0]]


def test_only_an_arm_whose_engines_never_sleep_keeps_its_drafter_and_says_so(every):
    for name, arm in every.items():
        kept = NO_SLEEP in arm.overrides
        assert kept == (engine_config(arm) is not None and name != "vllm-3-lost"), name
        assert kept == ("never sleep" in arm.label), name
    assert "issue 52479" in every["vllm-3-lost"].label
    assert engine_config(every["vllm-3-lost"])["draft_sample_method"] == "greedy", "NaN would reach the tokens"


def test_the_drafters_are_those_that_the_names_say(every):
    found = {name: config["model"] for name, arm in every.items() if (config := engine_config(arm))}
    assert found.pop("vllm-3-stale") == "/stale" and found.pop("vllm-3-random") == "/random"
    assert set(found.values()) == {"/warm"} and "tlt.drafter.path=/warm" in every["tlt"].overrides


def test_a_warm_up_has_none_of_the_prompts_that_are_compared_on(tmp_path):
    asked = build_assets(tmp_path, train_rows=heads.BENCH_PROMPTS, val_rows=1, seed=heads.BENCH_SEED)
    heads.other_prompts(tmp_path / "other.parquet", 200, heads.BENCH_SEED, heads.BENCH_PROMPTS)
    given, compared = (
        [row["prompt"][0]["content"] for row in pq.read_table(file).to_pylist()]
        for file in (tmp_path / "other.parquet", asked.train)
    )
    assert len(set(given)) == 200 and not set(given) & set(compared)


@pytest.mark.heavy
def test_the_stale_drafter_is_made_for_a_policy_as_far_away_as_runs_move(tmp_path):
    told = heads._earlier_policy(tmp_path / "policy")
    assert told["kl_per_token"] == pytest.approx(heads.MOVED, rel=0.25)
    assert (tmp_path / "policy" / "model.safetensors").exists()


def test_a_drafter_that_is_there_is_not_made_again(tmp_path):
    home = heads.home_of(tmp_path, heads.WARM)
    home.mkdir(parents=True)
    (home / heads.RECORD).write_text(json.dumps({"acceptance": [0.9, 0.8], "seconds": 500}))
    found = heads.prepare(tmp_path, heads.WARM)
    assert found.drafter == home / "drafter" and found.acceptance == [0.9, 0.8] and found.facts["seconds"] == 500
    known = arms(Heads(*(heads.home_of(tmp_path, name) / "drafter" for name in heads.NAMES)), [])
    assert drafters(tmp_path, [known[STOCK], known["tlt"]]) == {heads.WARM: found.facts}, "the others are not needed"


def test_the_large_load_begins_with_many_requests_in_every_engine():
    large = LOADS["large"]
    assert large.responses >= 96 and large.requests >= large.responses // REPLICAS >= 48
    given = parsed(large.overrides)
    assert given["data.train_batch_size"] == given["actor_rollout_ref.actor.ppo_mini_batch_size"] == large.prompts


def test_a_result_names_no_folder_of_the_machine(tmp_path):
    work = tmp_path / "demo-out" / "e2e"
    kept = portable({"overrides": [f"a={work / 'costs'}", f"b={tmp_path / 'file'}"]}, {"WORK": work, "CLONE": tmp_path})
    assert json.loads(kept) == {"overrides": ["a=WORK/costs", "b=CLONE/file"]}


def test_vllms_table_drafts_less_where_batches_are_large(tmp_path):
    seconds = {-1: 0.010, 0: 0.011, 3: 0.013, 7: 0.016}
    points = [
        LatencyPoint(batch, 100 * batch, k, s * (1 + batch * (k + 1) / 60))
        for k, s in seconds.items()
        for batch in (1, 4, 16, 32)
    ]
    (tmp_path / "report.json").write_text(json.dumps({"points": LatencyTable(tuple(points)).to_list()}))
    table = schedule(tmp_path, [0.8] * 7, LOADS["small"].requests)
    assert table[0][0] == 1 and table[-1][1] == 32 and table[0][2] > table[-1][2]


def test_given_lengths_are_of_the_toy_alone(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["e2e", "--policy", "real", "--forced"])
    with pytest.raises(SystemExit):
        read_options()
    assert "--forced is of the toy" in capsys.readouterr().err
