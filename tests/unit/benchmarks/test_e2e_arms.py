"""The arms of the end-to-end benchmark say what they are; their drafters are made from other prompts than it has."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from benchmarks.e2e import head
from benchmarks.e2e.__main__ import schedule
from benchmarks.e2e.arms import LOADS, arms
from tests.toy.assets import build_assets
from verl_tlt.commands.compare.plan import NO_SLEEP, SPECULATIVE, STOCK
from verl_tlt.speculation.costs import LatencyPoint, LatencyTable


@pytest.fixture
def every():
    return arms(Path("/warm"), [[1, 4, 5], [5, 32, 0]])


def parsed(overrides):
    found = OverridesParser.create().parse_overrides(list(overrides))
    return {override.key_or_group: override.value() for override in found}


def engine_config(arm):
    """What the arm gives stock vLLM; None: no speculation of its own."""
    return parsed(arm.overrides).get(SPECULATIVE.lstrip("+"))


def test_every_arm_is_stock_or_says_what_it_changes(every):
    assert next(iter(every)) == STOCK and not every[STOCK].overrides
    assert len({arm.label for arm in every.values()}) == len(every) == 10
    of_vllm = {name: config for name, arm in every.items() if (config := engine_config(arm))}
    assert not any(every[name].tlt for name in of_vllm)
    assert {name: config["num_speculative_tokens"] for name, config in of_vllm.items()} == {
        "vllm-3": 3, "vllm-7": 7, "vllm-table": 7, "vllm-3-lost": 3,
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
    assert {config["model"] for arm in every.values() if (config := engine_config(arm))} == {"/warm"}
    trained = {name for name, arm in every.items() if "tlt.drafter.path=/warm" in arm.overrides}
    assert trained == {"tlt", "tlt-no-spot"}


def test_a_warm_up_has_none_of_the_prompts_that_are_compared_on(tmp_path):
    asked = build_assets(tmp_path, train_rows=head.BENCH_PROMPTS, val_rows=1, seed=head.BENCH_SEED)
    head.other_prompts(tmp_path / "other.parquet", 200, head.BENCH_SEED, head.BENCH_PROMPTS)
    given, compared = (
        [row["prompt"][0]["content"] for row in pq.read_table(file).to_pylist()]
        for file in (tmp_path / "other.parquet", asked.train)
    )
    assert len(set(given)) == 200 and not set(given) & set(compared)


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
