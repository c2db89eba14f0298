"""The table of step costs: interpolation, what a calibration covers, and the files it is kept in."""

import json
import logging
import os
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from verl_tlt.speculation.costs.tables import LatencyPoint, LatencyTable, TableKey, interpolate, load_table
from verl_tlt.speculation.costs.tables import save_table as save
from verl_tlt.speculation.costs.tables import table_path as path_of
from verl_tlt.speculation.types import OFF

KEY = TableKey("NVIDIA H100 80GB HBM3 x4", "Qwen/Qwen2.5-32B bf16", "0.24.0")
TABLE = LatencyTable((LatencyPoint(1, 500, -1, 0.005, 9), LatencyPoint(64, 32000, 3, 0.02, 7)))


@pytest.mark.parametrize("schema", [1, 2])
def test_round_trip(tmp_path, schema):
    path = save(tmp_path / "deep", KEY, TABLE)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema": schema}))
    assert load_table(tmp_path / "deep", KEY) == TABLE


def test_a_recorded_table_of_an_earlier_release_still_loads(tmp_path):
    (recorded,) = (Path(__file__).parents[3] / "data/recorded/costs").glob("*.json")
    shutil.copyfile(recorded, tmp_path / recorded.name)
    key = TableKey(
        "NVIDIA H100 80GB HBM3 x1", "policy 0123456789ab bfloat16 graphs of all drafts drafter 1024x32000", "0.28.0"
    )
    table = load_table(tmp_path, key)
    assert (len(table.points), len(table.calibration().points)) == (18, 10)
    assert table.lengths() == (-1, 0, 1, 2, 3)
    assert {p.samples for p in table.points if p.draft_length == 2} == {0}


def test_hardware_model_and_version_have_tables_of_their_own(tmp_path):
    assert load_table(tmp_path, KEY) is load_table(tmp_path / "missing", KEY) is None
    save(tmp_path, KEY, TABLE)
    for other in ({"hardware": "NVIDIA H100 80GB HBM3 x8"}, {"model": "Qwen/Qwen2.5-32B.bf16"}, {"vllm": "0.28.0"}):
        assert load_table(tmp_path, replace(KEY, **other)) is None


GOOD = {"schema": 1, "key": asdict(KEY), "points": TABLE.to_list()}
NO_MEASUREMENTS = (
    {"seconds": 0}, {"seconds": -1.0}, {"seconds": float("nan")}, {"seconds": 1e300},
    {"seconds": 1e-300},  # estimates of 0 would divide
    {"batch": 0}, {"batch": 10**400}, {"kv_tokens": 10**400}, {"draft_length": -2},
)  # fmt: skip


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        json.dumps(GOOD)[:-20],
        b"\xff\xfe\x00{",
        json.dumps(GOOD | {"schema": 99}),
        json.dumps(GOOD | {"key": {"hardware": "TPU"}}),
        *(json.dumps(GOOD | {"points": points}) for points in ("none", ["row"], [{"batch": 1}])),
        *(json.dumps(GOOD | {"points": [GOOD["points"][0] | wrong]}) for wrong in NO_MEASUREMENTS),
        json.dumps(GOOD | {"points": GOOD["points"][:1] * 20_000}),
        '{"schema": 1, "key": ' + "[" * 100_000 + "]" * 100_000 + "}",
        '{"schema": 1, "points": ' + "9" * 5000 + "}",
    ],
)
def test_a_corrupt_or_foreign_table_is_left_out_with_a_warning_and_replaced(tmp_path, content, caplog):
    path = path_of(tmp_path, KEY)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with caplog.at_level(logging.WARNING):
        assert load_table(tmp_path, KEY) is None
    assert str(path) in caplog.text and "learned anew" in caplog.text
    save(tmp_path, KEY, TABLE)
    assert load_table(tmp_path, KEY) == TABLE


def test_what_is_no_file_is_left_out_and_not_waited_for(tmp_path):
    path = path_of(tmp_path, KEY)
    path.symlink_to(path)
    assert load_table(tmp_path, KEY) is None
    path.unlink()
    os.mkfifo(path)
    assert load_table(tmp_path, KEY) is None
    save(tmp_path, KEY, TABLE)
    assert load_table(tmp_path, KEY) == TABLE


def test_a_second_save_replaces_the_first_or_fails_and_leaves_no_litter(tmp_path, monkeypatch):
    for table in (LatencyTable(TABLE.points[:1]), TABLE):
        save(tmp_path, KEY, table)
        assert load_table(tmp_path, KEY) == table
    monkeypatch.setattr(os, "replace", Mock(side_effect=OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        save(tmp_path, KEY, LatencyTable(()))
    assert load_table(tmp_path, KEY) == TABLE
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("batch", "seconds"), [(1, 0.1), (2, 0.1), (3, 0.15), (4, 0.2), (6, 0.4), (8, 0.6), (10, 0.8), (0.5, 0.1)]
)
def test_interpolation_is_linear_flat_below_and_continues_a_last_slope_that_rises(batch, seconds):
    assert interpolate([(2, 0.1), (4, 0.2), (8, 0.6)], batch) == pytest.approx(seconds)
    assert interpolate([(2, 0.3), (4, 0.2)], 100) == 0.2 and interpolate([(2, 0.3)], 100) == 0.3


def test_missing_arms_are_linear_in_k_and_off_is_never_made_up():
    measured = {0: [(1, 0.1), (8, 0.2)], 1: [(1, 0.2), (8, 0.4)], 5: [(1, 0.6), (8, 1.2)]}
    table = LatencyTable.calibrated(measured).for_lengths((0, 1, 2, 3, 7))
    assert table.lengths() == (0, 1, 2, 3)
    assert table.by_batch(3) == [(1, pytest.approx(0.4)), (8, pytest.approx(0.8))]
    assert table.by_batch(1) == measured[1]
    assert {p.draft_length: p.samples for p in table.points} == {0: 4, 1: 4, 2: 0, 3: 0}
    assert all(p.calibrated and p.kv_tokens > p.batch for p in table.points)


@pytest.mark.parametrize(
    ("calibrated", "batch", "covered"),
    [
        ((OFF, 0, 1, 3), 32, True), ((OFF, 0, 1, 3), 64, False), ((OFF, 0, 3, 7), 8, True), ((0, 1, 3), 8, False),
        ((OFF, 0, 1), 8, False), ((OFF, 1, 3), 8, False), ((), 8, False),
    ],
)  # fmt: skip
def test_a_stored_calibration_stands_in_where_it_has_off_all_arms_and_the_batch(calibrated, batch, covered):
    costs = LatencyTable.calibrated({k: [(b, 0.01 + 1e-4 * b * (k + 2)) for b in (1, 8, 32)] for k in calibrated})
    learned = [LatencyPoint(b, b * 300, k, 0.05, 500) for b in (1, 64) for k in (OFF, 0, 1, 3)]
    stored = LatencyTable((*costs.points, *learned))
    assert stored.calibration().for_lengths((0, 1, 2, 3)).covers((OFF, 0, 1, 2, 3), batch) == covered
