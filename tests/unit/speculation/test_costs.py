"""Step costs: between and beyond what was calibrated, and how live steps correct them."""

import json

import pytest
from step_costs import step_costs

from verl_tlt.speculation.costs import SHORT_CONTEXT, LatencyPoint, LatencyTable, LiveCosts
from verl_tlt.speculation.types import OFF, ControlError, Step

BATCHES = (1, 2, 4, 8, 16, 32)


def true_s(batch, k, context=SHORT_CONTEXT):
    """A made engine: a pass of the policy over all tokens, a drafter, and the reading of the context."""
    return 0.010 + 1e-4 * batch * (max(k, 0) + 1) + 0.001 * (k + 1) + 1e-7 * batch * context


def table_of(lengths=(OFF, 0, 1, 3), batches=BATCHES, contexts=(SHORT_CONTEXT,), off_by=lambda batch, k: 1.0):
    return LatencyTable(
        tuple(
            LatencyPoint(b, b * c, k, true_s(b, k, c) * off_by(b, k))
            for k in lengths
            for b in batches
            for c in contexts
        )
    )


def step(batch, k, seconds, context=SHORT_CONTEXT, clean=True):
    return Step(batch, batch * context, k, max(k, 0), latency_s=seconds, clean=clean)


def test_costs_are_linear_between_and_beyond_measured_batches():
    table = table_of()
    assert float(table.seconds(3, 24)) == pytest.approx(true_s(24, 3))
    assert float(table.seconds(OFF, 64)) == pytest.approx(true_s(64, OFF))
    falling = step_costs({0: [(1, 0.02), (8, 0.01)]})
    assert float(falling.seconds(0, 64)) == 0.01, "noise does not make large batches free"
    assert list(table.seconds(0, [1, 2])) == pytest.approx([true_s(1, 0), true_s(2, 0)])
    assert table.lengths() == (OFF, 0, 1, 3) and table.by_batch(1)[0] == (1, pytest.approx(true_s(1, 1)))


def test_a_longer_context_costs_what_it_was_measured_to_cost():
    table = table_of(contexts=(SHORT_CONTEXT, 1000))
    assert float(table.seconds(1, 16, 500)) == pytest.approx(true_s(16, 1, 500))
    assert float(table.seconds(1, 16, 4000)) == pytest.approx(true_s(16, 1, 4000))
    small = table_of(batches=(1, 2), contexts=(SHORT_CONTEXT, 1000)).points
    large = table_of(batches=(8,)).points
    assert float(LatencyTable((*small, *large)).seconds(0, 8, 1000)) == pytest.approx(true_s(8, 0, 1000)), (
        "a token of cache takes as long as at the next smaller batch"
    )


def test_two_contexts_that_are_close_to_each_other_say_nothing_about_the_context():
    """A large batch has no room for a long context, so noise would be the difference."""
    small = table_of(batches=(1, 8), contexts=(SHORT_CONTEXT, 4000)).points
    noisy = [LatencyPoint(256, 256 * c, 0, true_s(256, 0, c) * off) for c, off in ((SHORT_CONTEXT, 1.0), (256, 1.05))]
    assert float(LatencyTable((*small, *noisy)).seconds(0, 256, 3000)) == pytest.approx(true_s(256, 0, 3000))


def test_a_draft_length_counts_near_the_batches_at_which_it_was_measured():
    table = LatencyTable((*table_of((OFF, 0)).points, *table_of((3,), (1, 2, 4, 8)).points))
    assert table.usable(8) == table.usable(15) == [OFF, 0, 3] and table.usable(16) == [OFF, 0]
    assert table.usable(100) == [OFF, 0] and table_of().usable(100) == [OFF, 0, 1, 3]
    cut_short = LatencyTable((*table_of((OFF, 0), (1, 512)).points, *table_of((3,), (1,)).points))
    assert cut_short.usable(100) == [OFF, 0, 3] and cut_short.usable(512) == [OFF, 0]
    gap = LatencyTable((*table_of((OFF, 0), (1, 8, 16, 32, 64)).points, *table_of((3,), (1, 8, 64)).points))
    assert gap.usable(16) == gap.usable(20) == [OFF, 0] and gap.usable(40) == [OFF, 0, 3], "no graph has 64 requests"


def test_a_table_goes_through_json_and_a_wrong_row_is_named():
    table = table_of()
    assert LatencyTable.from_list(json.loads(json.dumps(table.to_list()))) == table
    with pytest.raises(ControlError, match=r"points\.0\.seconds"):
        LatencyTable.from_list([{"batch": 1, "kv_tokens": 32, "draft_length": 0, "seconds": -1.0}])


def test_steps_correct_a_draft_length_that_was_calibrated_wrongly():
    live = LiveCosts(table_of(off_by=lambda batch, k: 0.7 if k == 3 else 1.0), (0, 1, 3), 32)
    for _ in range(600):
        for k in (1, 3):
            live.observe(step(10, k, true_s(10, k)))
    seconds = live.seconds()
    assert seconds[2, 10] / seconds[1, 10] == pytest.approx(true_s(10, 3) / true_s(10, 1), rel=0.06)
    assert seconds[2, 2] == pytest.approx(0.7 * true_s(2, 3), rel=0.01), "another octave's steps tell nothing of it"


def test_a_machine_that_slows_down_is_mostly_not_the_draft_length_in_use():
    live = LiveCosts(table_of(), (0, 1, 3), 32)
    before = live.seconds()
    for _ in range(300):
        live.observe(step(10, 3, 1.5 * true_s(10, 3)))
    after = live.seconds()
    assert after[2, 10] / after[0, 10] < 1.25 * before[2, 10] / before[0, 10]


def test_a_stall_and_unclean_steps_hardly_count():
    live = LiveCosts(table_of(), (0, 1, 3), 32)
    before = live.seconds()
    live.observe(step(10, 3, 100.0))
    for _ in range(50):
        live.observe(step(10, 3, 1.0, clean=False))
    assert live.seconds() == pytest.approx(before, rel=0.13)


def test_a_batch_costs_what_it_does_at_the_context_it_had_last():
    live = LiveCosts(table_of(contexts=(SHORT_CONTEXT, 1000)), (0, 1, 3), 32)
    live.observe(step(30, 0, true_s(30, 0, 100), context=100))
    live.observe(step(2, 0, true_s(2, 0, 3000), context=3000))
    seconds = live.seconds()[0]
    assert seconds[30] == pytest.approx(true_s(30, 0, 100)) and seconds[2] == pytest.approx(
        true_s(2, 0, 3000), rel=0.01
    )
