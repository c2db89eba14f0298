import pytest

from verl_tlt.speculation.costs.latency_table import (
    cheapest_off,
    fill_arms,
    filled_arms,
    for_policy,
    from_stored,
    interpolate,
    parse,
)
from verl_tlt.speculation.costs.tables import LatencyPoint, LatencyTable
from verl_tlt.speculation.types import OFF


def test_a_table_survives_json_keys_and_comes_back_sorted():
    assert parse({"-1": [[4, 0.2], [1, 0.1]], "3": [[2, 0.3]], "1": []}) == {OFF: [(1, 0.1), (4, 0.2)], 3: [(2, 0.3)]}


@pytest.mark.parametrize("point", [[0, 0.1], [1, 0.0], [1, -1.0], [1, float("nan")], [1, float("inf")]])
def test_points_that_cannot_be_are_refused(point):
    with pytest.raises(ValueError, match="arm 1: batch"):
        parse({"1": [point]})


@pytest.mark.parametrize(
    ("batch", "seconds"), [(1, 0.1), (2, 0.1), (3, 0.15), (4, 0.2), (6, 0.4), (8, 0.6), (10, 0.8), (0.5, 0.1)]
)
def test_interpolation_is_linear_flat_below_and_continues_the_last_slope(batch, seconds):
    assert interpolate([(2, 0.1), (4, 0.2), (8, 0.6)], batch) == pytest.approx(seconds)


def test_noise_never_makes_a_larger_batch_cheaper_than_the_largest_measured():
    assert interpolate([(2, 0.3), (4, 0.2)], 100) == 0.2
    assert interpolate([(2, 0.3)], 100) == 0.3


def test_missing_arms_are_linear_in_k_and_off_is_never_made_up():
    table = {0: [(1, 0.1), (8, 0.2)], 1: [(1, 0.2), (8, 0.4)], 5: [(1, 0.6), (8, 1.2)]}
    filled = fill_arms(table, (0, 1, 2, 3, 5, 7, OFF))
    assert set(filled) == {0, 1, 2, 3, 5}
    assert filled[3] == [(1, pytest.approx(0.4)), (8, pytest.approx(0.8))]
    assert filled[1] == table[1]


def test_policies_get_the_same_seconds_with_a_context():
    points = for_policy({OFF: [(4, 0.2)]}).points
    assert [(p.batch, p.draft_length, p.seconds) for p in points] == [(4, OFF, 0.2)]
    assert points[0].kv_tokens > points[0].batch


def test_what_lies_on_a_line_between_measured_lengths_is_told_from_a_measurement():
    measured = {OFF: [(1, 0.1), (8, 0.2)], 0: [(1, 0.11), (8, 0.2)], 1: [(1, 0.2), (8, 0.4)], 7: [(1, 0.5), (8, 1.3)]}
    table = fill_arms(measured, (0, 1, 2, 5, 7))
    assert filled_arms(table) == {2, 5}
    samples = {p.draft_length: p.samples for p in for_policy(table).points}
    assert samples == {OFF: 4, 0: 4, 1: 4, 2: 0, 5: 0, 7: 4}
    again = from_stored(for_policy(table), (0, 1, 2, 5, 7), (1, 8))
    assert filled_arms(again) == {2, 5}, "a stored one is told as well"
    nudged = {**table, 5: [(batch, 1.001 * seconds) for batch, seconds in table[5]]}
    assert filled_arms(nudged) == {2}


def stored(arms, batches=(1, 8, 32)):
    """A calibration, and what a busy machine taught about OFF afterwards."""
    costs = {k: [(b, 0.01 + 1e-4 * b * (k + 2)) for b in batches] for k in arms}
    later = [LatencyPoint(b, b * 300, OFF, 0.05, 500) for b in batches]
    return LatencyTable((*for_policy(costs).points, *later))


def test_what_an_earlier_run_stored_stands_in_for_a_calibration():
    table = from_stored(stored((OFF, 0, 1, 3)), (0, 1, 2, 3), (32, 1, 16))
    assert list(table) == [OFF, 0, 1, 2, 3]
    assert [b for b, _ in table[2]] == [1, 16, 32]
    for arm, row in table.items():
        assert [s for _, s in row] == pytest.approx([0.01 + 1e-4 * b * (arm + 2) for b in (1, 16, 32)])


@pytest.mark.parametrize("arms", [(0, 1, 3), (OFF, 0, 1), (OFF, 1, 3), ()])
def test_a_table_that_lacks_an_end_or_stock_is_no_calibration(arms):
    assert from_stored(stored(arms), (0, 1, 2, 3), (1, 8)) == {}


def test_a_table_without_a_calibration_or_of_smaller_batches_is_none():
    assert from_stored(stored((OFF, 0, 3)), (0, 3), (1, 64)) == {}
    learned = [LatencyPoint(b, b * 300, k, 0.01, 20) for b in (1, 64) for k in (OFF, 0, 3)]
    assert from_stored(LatencyTable(tuple(learned)), (0, 3), (1, 64)) == {}


def test_off_is_never_dearer_than_a_draft_of_nothing():
    table = {OFF: [(1, 0.017), (4, 0.015), (8, 0.016)], 0: [(1, 0.013), (8, 0.017)], 3: [(1, 0.02)]}
    assert cheapest_off(table) == {**table, OFF: [(1, 0.013), (4, 0.015), (8, 0.016)]}
    assert cheapest_off({OFF: [(1, 0.017)]}) == {OFF: [(1, 0.017)]}


def test_a_measurement_that_touches_the_line_at_one_batch_is_no_line():
    measured = {OFF: [(1, 0.1), (8, 0.2)], 0: [(1, 0.1), (8, 0.2)], 7: [(1, 0.8), (8, 1.6)]}
    table = fill_arms(measured, (0, 3, 7))
    (one, on_it), (eight, _) = table[3]
    assert filled_arms(table) == {3}
    assert filled_arms({**table, 3: [(one, on_it), (eight, 0.3)]}) == set()
