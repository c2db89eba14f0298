"""The arms of the end-to-end benchmark, and what it measures before them."""

from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser

from benchmarks.e2e.__main__ import calibrate, schedule
from benchmarks.e2e.arms import arms
from verl_tlt.compare.arms import SPECULATIVE, STOCK, vllm_arm
from verl_tlt.speculation.costs.tables import LatencyPoint, LatencyTable, TableKey, save_table


def test_what_was_calibrated_stays_whatever_the_arms_learn(tmp_path):
    calibrated = tmp_path / "calibrated"
    calibrated.mkdir()
    (calibrated / "warm.json").write_text("measured")
    for _ in range(2):
        found, costs = calibrate(tmp_path, None, None)
        (costs / "warm.json").write_text("learned")
        (costs / "fresh.json").write_text("learned")
    assert [path.read_text() for path in found.iterdir()] == ["measured"]
    assert sorted(path.read_text() for path in costs.iterdir()) == ["learned", "learned"]


def test_every_arm_is_stock_or_says_what_it_changes(tmp_path):
    every = arms(Path("/d"), [[1, 4, 5], [5, 32, 0]], tmp_path)
    assert len(every) == 9 and next(iter(every)) == STOCK and not every[STOCK].overrides
    parsed = OverridesParser.create().parse_overrides([o for arm in every.values() for o in arm.overrides])
    of_vllm = [o.value() for o in parsed if o.key_or_group in SPECULATIVE]
    assert [config["num_speculative_tokens"] for config in of_vllm] == [1, 3, 7, 7]
    assert of_vllm[-1]["num_speculative_tokens_per_batch_size"] == [[1, 4, 5], [5, 32, 0]]
    assert of_vllm[0] == OverridesParser.create().parse_override(vllm_arm("", "", "/d", 1).overrides[0]).value()
    assert not any(arm.tlt for arm in every.values() if arm.own_speculation)


def test_vllms_table_drafts_less_where_batches_are_large(tmp_path):
    seconds = {-1: 0.010, 0: 0.011, 3: 0.013, 7: 0.016}
    points = [
        LatencyPoint(batch, 100 * batch, k, s * (1 + batch * (k + 1) / 60), calibrated=True)
        for k, s in seconds.items()
        for batch in (1, 4, 16, 32)
    ]
    save_table(tmp_path, TableKey("cpu", "toy", "0"), LatencyTable(tuple(points)))
    table = schedule(tmp_path, [0.8] * 7)
    assert table[0][0] == 1 and table[-1][1] == 32 and table[0][2] > table[-1][2]
