"""The table store: round trip, separate keys, corrupt and foreign files set aside."""

import json
import logging
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from verl_tlt.speculation.costs.latency_table import stock_share
from verl_tlt.speculation.costs.tables import (
    LatencyPoint,
    LatencyTable,
    TableKey,
    load_table,
    save_table,
    stock_points,
    table_path,
)
from verl_tlt.speculation.types import ControlError

KEY = TableKey("NVIDIA H100 80GB HBM3 x4", "Qwen/Qwen2.5-32B bf16", "0.24.0")
TABLE = LatencyTable((LatencyPoint(1, 500, -1, 0.005, 9), LatencyPoint(64, 32000, 3, 0.02, 7)))


def test_round_trip(tmp_path):
    save_table(tmp_path / "deep", KEY, TABLE)
    assert load_table(tmp_path / "deep", KEY) == TABLE


def test_a_recorded_table_of_an_earlier_release_still_loads(tmp_path):
    (recorded,) = (Path(__file__).parents[3] / "data/recorded/costs").glob("*.json")
    shutil.copyfile(recorded, tmp_path / recorded.name)
    key = TableKey(
        "NVIDIA H100 80GB HBM3 x1",
        "policy 0123456789ab bfloat16 graphs of all drafts drafter 1024x32000",
        "0.28.0",
    )
    table = load_table(tmp_path, key)
    assert table is not None
    assert len(table.points) == 18
    assert len(table.calibration().points) == 10
    assert table.arms() == (-1, 0, 1, 2, 3)
    assert {p.samples for p in table.points if p.draft_length == 2} == {0}


def test_nothing_stored(tmp_path):
    assert load_table(tmp_path, KEY) is None
    assert load_table(tmp_path / "missing", KEY) is None


def test_hardware_model_and_version_have_tables_of_their_own(tmp_path):
    save_table(tmp_path, KEY, TABLE)
    for other in (
        TableKey("NVIDIA H100 80GB HBM3 x8", KEY.model, KEY.vllm),
        TableKey(KEY.hardware, "Qwen/Qwen2.5-32B.bf16", KEY.vllm),
        TableKey(KEY.hardware, KEY.model, "0.28.0"),
    ):
        assert load_table(tmp_path, other) is None


def test_a_second_save_replaces_the_first_and_leaves_no_litter(tmp_path):
    save_table(tmp_path, KEY, TABLE)
    save_table(tmp_path, KEY, LatencyTable(TABLE.points[:1]))
    assert load_table(tmp_path, KEY) == LatencyTable(TABLE.points[:1])
    assert len(list(tmp_path.iterdir())) == 1


GOOD = {"schema": 1, "key": {"hardware": KEY.hardware, "model": KEY.model, "vllm": KEY.vllm}, "points": TABLE.to_list()}


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        json.dumps(GOOD)[:-20],
        "\x00\x01",
        json.dumps(GOOD | {"schema": 99}),
        json.dumps(GOOD | {"key": {"hardware": "TPU"}}),
        json.dumps(GOOD | {"points": "none"}),
        json.dumps(GOOD | {"points": [{"batch": 1}]}),
        json.dumps(GOOD | {"points": [GOOD["points"][0] | {"seconds": 0}]}),
        json.dumps(GOOD | {"points": [3]}),
    ],
)
def test_a_corrupt_or_foreign_table_is_set_aside_with_a_warning(tmp_path, content, caplog):
    path = table_path(tmp_path, KEY)
    path.write_text(content)
    with caplog.at_level(logging.WARNING):
        assert load_table(tmp_path, KEY) is None
    assert not path.exists() and path.with_suffix(".corrupt").exists()
    assert str(path) in caplog.text and "learned again" in caplog.text
    save_table(tmp_path, KEY, TABLE)
    assert load_table(tmp_path, KEY) == TABLE


def test_undecodable_bytes_are_set_aside(tmp_path):
    table_path(tmp_path, KEY).write_bytes(b"\xff\xfe\x00{")
    assert load_table(tmp_path, KEY) is None
    assert table_path(tmp_path, KEY).with_suffix(".corrupt").exists()


def test_a_table_is_as_readable_as_any_file_made_here(tmp_path):
    (tmp_path / "other").touch()
    assert save_table(tmp_path, KEY, TABLE).stat().st_mode == (tmp_path / "other").stat().st_mode


def test_a_failed_write_keeps_the_old_table(tmp_path, monkeypatch):
    save_table(tmp_path, KEY, TABLE)

    def broken(*args, **kwargs):
        raise OSError("disk full")

    monkeypatch.setattr(json, "dump", broken)
    with pytest.raises(OSError, match="disk full"):
        save_table(tmp_path, KEY, LatencyTable(()))
    assert load_table(tmp_path, KEY) == TABLE
    assert len(list(tmp_path.iterdir())) == 1


def test_what_stock_takes_is_kept_and_older_tables_are_read(tmp_path):
    stock = stock_points([[8, 0.03, 0.04], [1, 0.01, 0.0125]])
    assert [p.batch for p in stock] == [1, 8]
    path = save_table(tmp_path, KEY, replace(TABLE, stock=stock))
    assert load_table(tmp_path, KEY) == replace(TABLE, stock=stock)
    content = json.loads(path.read_text())
    assert content.pop("schema") == 2 and content.pop("stock")
    path.write_text(json.dumps({**content, "schema": 1}))
    assert load_table(tmp_path, KEY) == TABLE, "written before stock was measured"
    for wrong in ([[0, 1.0, 1.0]], [[1, -1.0, 1.0]], [[1, 1.0]], 3):
        path.write_text(json.dumps({**content, "schema": 2, "stock": wrong}))
        assert load_table(tmp_path, KEY) is None


def test_stock_is_a_share_of_off_between_the_batches_that_were_measured():
    stock = stock_points([(1, 0.8, 1.0), (5, 2.0, 2.0)])
    assert [stock_share(stock, batch) for batch in (1, 3, 5, 500)] == [0.8, 0.9, 1.0, 1.0]
    assert stock_share((), 3) == 1.0


def test_a_table_s_name_is_readable_and_ends_with_a_digest(tmp_path):
    name = table_path(tmp_path, replace(KEY, model="m" * 50)).name
    assert re.fullmatch(r"NVIDIA_H100_80GB_HBM3_x4-m{40}-0\.24\.0-[0-9a-f]{12}\.json", name)


@pytest.mark.parametrize("row", [(0, 1.0, 1.0), (1, 0.0, 1.0), (1, 1.0, 0.0), (1, float("inf"), 1.0)])
def test_stock_that_takes_nothing_is_no_measurement(row):
    with pytest.raises(ControlError, match="out of range"):
        stock_points([row])
