"""What the end-to-end benchmark measures before its arms."""

from benchmarks.e2e.__main__ import calibrate, schedule
from benchmarks.e2e.arms import LOADS
from verl_tlt.speculation.costs.tables import LatencyPoint, LatencyTable, TableKey, save_table


def test_what_was_calibrated_stays_whatever_the_arms_learn(tmp_path):
    calibrated = tmp_path / "calibrated"
    calibrated.mkdir()
    (calibrated / "warm.json").write_text("measured")
    for _ in range(2):
        found, costs = calibrate(tmp_path, None, LOADS["small"])
        (costs / "warm.json").write_text("learned")
        (costs / "fresh.json").write_text("learned")
    assert [path.read_text() for path in found.iterdir()] == ["measured"]
    assert sorted(path.read_text() for path in costs.iterdir()) == ["learned", "learned"]


def test_vllms_table_drafts_less_where_batches_are_large(tmp_path):
    seconds = {-1: 0.010, 0: 0.011, 3: 0.013, 7: 0.016}
    points = [
        LatencyPoint(batch, 100 * batch, k, s * (1 + batch * (k + 1) / 60), calibrated=True)
        for k, s in seconds.items()
        for batch in (1, 4, 16, 32)
    ]
    save_table(tmp_path, TableKey("cpu", "toy", "0"), LatencyTable(tuple(points)))
    table = schedule(tmp_path, [0.8] * 7, LOADS["small"].requests)
    assert table[0][0] == 1 and table[-1][1] == 32 and table[0][2] > table[-1][2]
