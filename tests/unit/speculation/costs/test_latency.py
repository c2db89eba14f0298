"""The latency model: few samples suffice, it extrapolates, forgives stalls, and lets measurements overrule shapes."""

import dataclasses

import numpy as np
import pytest

from benchmarks.simulate.hardware import QWEN3_8B_H100
from verl_tlt.speculation.costs.latency import Cell, LatencyModel
from verl_tlt.speculation.costs.tables import LatencyPoint, LatencyTable
from verl_tlt.speculation.types import OFF

ARMS = (0, 1, 2, 3, 5, 7)


def true(batch, kv, k):
    return QWEN3_8B_H100.seconds(batch, kv, max(k, 0), k)


def off_by(factor):
    return lambda batch, kv, k: factor * true(batch, kv, k)


def table_of(batches, lengths, context=32, samples=4, calibrated=True, cost=true):
    """Points of each batch and draft length; as a calibration measures them, if nothing else is said."""
    loads = [(b, b * context, k) for b in batches for k in lengths]
    return LatencyTable(tuple(LatencyPoint(*load, cost(*load), samples, calibrated) for load in loads))


def calibrated():
    """A model that knows a calibration."""
    return LatencyModel(ARMS, table=table_of((1, 4, 8, 16, 32), (OFF, *ARMS)))


def measure(model, batch, k, steps, rng=None, context=1000, sigma=0.03, cost=true):
    """Steps with log-normal jitter; without `rng` they all take the same."""
    for _ in range(steps):
        model.observe(
            batch, batch * context, k, cost(batch, batch * context, k) * (rng.lognormal(0.0, sigma) if rng else 1.0)
        )


def measured(batches, arms, steps, seed):
    """A model that has measured so many steps of each arm at each batch."""
    model, rng = LatencyModel(ARMS), np.random.default_rng(seed)
    for batch in batches:
        for k in arms:
            measure(model, batch, k, steps, rng)
    return model


@pytest.mark.parametrize(
    ("batches", "arms", "steps"), [((256, 64, 16, 4, 1), (0, 1, 3), 24), ((1, 16, 64), (0, OFF), 8)]
)
def test_it_knows_what_it_measured(batches, arms, steps):
    model = measured(batches, arms, steps, seed=0)
    for batch in batches:
        zero, *truth = (true(batch, batch * 1000, k) for k in arms)
        at_zero, *found = (model.seconds(batch, batch * 1000, k) for k in arms)
        assert found == pytest.approx(truth, rel=0.06)
        assert [s / at_zero for s in found] == pytest.approx([s / zero for s in truth], rel=0.06)


def test_three_arms_at_some_batches_predict_the_others():
    model = measured((128, 32, 8, 2), (0, 1, 3), 10, seed=1)
    for batch, k in ((64, 1), (64, 3), (16, 2), (4, 3), (1, 1), (8, 5), (2, 5)):
        assert model.seconds(batch, batch * 1000, k) == pytest.approx(true(batch, batch * 1000, k), rel=0.15)


def test_it_follows_the_context():
    model, rng = LatencyModel(ARMS), np.random.default_rng(2)
    for context in (300, 600, 1200, 2400):
        measure(model, 64, 0, 12, rng, context=context)
    assert model.seconds(64, 64 * 5000, 0) == pytest.approx(true(64, 64 * 5000, 0), rel=0.15)


def test_latency_rises_with_k_where_nothing_was_measured():
    model = measured((32,), (0, 3), 6, seed=3)
    for batch in (1, 8, 32, 200):
        seconds = model.predict(batch, batch * 1000)
        assert seconds == sorted(seconds)


def test_a_measurement_overrules_the_shape():
    """Full CUDA graphs only for K=3: it is faster than K=1, and the model says so."""
    cliff = {0: 3e-3, 1: 3e-3, 3: 0.0}
    model, rng = LatencyModel((0, 1, 3)), np.random.default_rng(4)
    for k in (0, 1, 3):
        measure(model, 8, k, 8, rng, cost=lambda b, kv, k: true(b, kv, k) + cliff[k])
    assert model.seconds(8, 8000, 3) < model.seconds(8, 8000, 1)


def test_first_use_of_a_shape_and_stalls_do_not_teach():
    model, rng = LatencyModel(ARMS), np.random.default_rng(5)
    measure(model, 16, 0, 20, rng)
    model.observe(16, 16000, 1, 4.0)
    measure(model, 16, 1, 2, rng)
    for _ in range(6):
        measure(model, 16, 1, 1, cost=off_by(6.0))
        measure(model, 16, 1, 9)
    assert model.seconds(16, 16000, 1) == pytest.approx(true(16, 16000, 1), rel=0.06)


def test_one_stall_does_not_condemn_a_draft_length():
    model = measured((16,), (0, 3), 40, seed=4)
    expected = model.seconds(64, 64000, 3)
    model.observe(64, 64000, 3, 4.0 * expected)
    assert model.seconds(64, 64000, 3) < 1.05 * expected
    assert model.uncertainty(64, 64000)[1 + ARMS.index(3)] > 0.04, "it is worth another look"


def test_a_slower_machine_is_slower_for_every_arm_until_that_is_what_the_arm_in_use_costs():
    model, rng = measured((16,), (0, 3), 60, seed=6), np.random.default_rng(6)
    measure(model, 16, 3, 300, rng, cost=off_by(1.3))
    assert model.seconds(16, 16000, 3) == pytest.approx(1.3 * true(16, 16000, 3), rel=0.05)
    assert model.seconds(16, 16000, 0) > 1.15 * true(16, 16000, 0)
    measure(model, 16, 3, 5700, rng, cost=off_by(1.3))  # a pace that no other arm confirms is forgotten
    assert model.seconds(16, 16000, 3) == pytest.approx(1.3 * true(16, 16000, 3), rel=0.05)
    assert model.seconds(16, 16000, 0) == pytest.approx(true(16, 16000, 0), rel=0.1)


def test_a_table_seeds_it_and_is_outvoted():
    doubled = table_of((1, 8, 64), (0, 1, 3), 1000, samples=50, calibrated=False, cost=off_by(2.0))
    model = LatencyModel(ARMS, table=doubled)
    assert model.seconds(8, 8000, 1) == pytest.approx(2.0 * true(8, 8000, 1), rel=0.03)
    measure(model, 8, 1, 150, np.random.default_rng(8))
    assert model.seconds(8, 8000, 1) == pytest.approx(true(8, 8000, 1), rel=0.05)


def test_what_it_learned_survives_as_a_table():
    model = measured((1, 4, 16, 64), (0, 1, 3), 12, seed=9)
    again = LatencyModel(ARMS, table=LatencyTable.from_list(model.to_table().to_list()))
    for batch in (1, 4, 16, 64):
        assert again.seconds(batch, batch * 1000, 1) == pytest.approx(model.seconds(batch, batch * 1000, 1), rel=0.03)


def test_a_calibration_is_kept_as_it_was_and_completed():
    """A busy machine shows in the arm that runs; compared with an old figure of another, it would look worse."""
    calibration = table_of((1, 8), (OFF, 0, 3))
    model = LatencyModel(ARMS, table=calibration)
    for _ in range(2000):
        for context in (32, 2000):
            model.observe(1, context, OFF, 1.5 * true(1, context, OFF))
    stored = model.to_table(calibration)
    assert stored.calibration() == LatencyTable.from_list(stored.to_list()).calibration() == calibration
    rest = [p for p in stored.points if not p.calibrated]
    assert [(p.batch, p.kv_tokens, p.draft_length) for p in rest] == [(1, 2000, OFF)]


@pytest.mark.parametrize(("steps", "beside", "kept"), [(4, True, False), (40, True, True), (4, False, True)])
def test_a_cell_of_a_few_steps_is_not_stored_beside_a_calibration(steps, beside, kept):
    table = calibration = table_of((1, 8), (OFF, 0, 3)) if beside else None
    for _ in range(3):  # runs, of which only the first goes there
        model = LatencyModel(ARMS, table=table)
        measure(model, 4, 2, steps if table is calibration else 0, context=2000, cost=off_by(1.4))
        table = model.to_table(calibration)
        assert kept == any((p.batch, p.draft_length) == (4, 2) for p in table.points)
    if not kept:
        first, last = (LatencyModel(ARMS, table=one) for one in (calibration, table))
        assert last.predict(4, 8000) == first.predict(4, 8000)


def test_a_calibration_of_one_context_says_little_about_longer_ones():
    """What a request costs at 32 tokens of context is no price of its KV tokens."""
    extra = {OFF: 0.0, 0: 0.001, 1: 0.003, 3: 0.006}
    table = table_of(
        (1, 2, 4, 8, 16, 32), extra, samples=8, cost=lambda b, _, k: 0.0135 + 0.0004 * b + extra[k] * (1 + b / 16)
    )
    model = LatencyModel((0, 1, 2, 3), table=table)
    for batch in (1, 4, 32):
        short, long = model.seconds(batch, 32 * batch, OFF), model.seconds(batch, 1000 * batch, OFF)
        assert short <= long < 1.4 * short


def test_a_load_of_nothing_has_a_latency_as_any_other_once_anything_was_measured():
    model = LatencyModel((0, 1, 3))
    assert model.predict(8, 8000) == [0.0] * 4
    model.observe(4, 2000, 0, 0.01)
    assert len(model.predict(0, 0)) == 4 and all(s > 0 for s in model.predict(0, 0))


def test_a_guess_between_measured_lengths_is_worth_a_look_and_gone_with_the_first_measurements():
    model, guess = LatencyModel(ARMS), 1.15 * true(4, 4000, 5)
    points = table_of((4,), (OFF, 0, 1, 7), 1000, calibrated=False).points
    model.seed(LatencyTable((*points, LatencyPoint(4, 4000, 5, guess, samples=0))))
    at = 1 + ARMS.index(5)
    assert model.predict(4, 4000)[at] == pytest.approx(guess, rel=1e-6)
    assert model.uncertainty(4, 4000)[at] >= 0.1 > 0.05 > model.uncertainty(4, 4000)[at + 1]
    assert model.largest_batch(5) == 4, "it may be used"
    measure(model, 4, 5, 3)
    assert model.predict(4, 4000)[at] == pytest.approx(true(4, 4000, 5), rel=0.02)


def test_the_farther_a_load_is_from_what_was_measured_the_less_is_known():
    model = measured((16,), (3,), 24, seed=11)
    arm = 1 + ARMS.index(3)
    for loads in ([(16, 1000), (32, 1000), (64, 1000)], [(16, 1000), (16, 4000), (16, 16000)]):
        vague = [model.uncertainty(batch, batch * context)[arm] for batch, context in loads]
        assert vague == sorted(vague) and vague[0] < 0.5 * vague[1] < vague[1] < vague[2], loads
    assert model.uncertainty(4096, 4096 * 60_000)[arm] == pytest.approx(0.1), "and no less than that"


@pytest.mark.parametrize("samples", [1, 2, 5])
def test_a_stored_measurement_counts_as_so_many(samples):
    zero, arm = LatencyPoint(8, 8000, 0, 0.010, 9), 1 + ARMS.index(3)
    stored, guessed = (LatencyTable((zero, LatencyPoint(8, 8000, 3, 0.020, n))) for n in (samples, 0))
    kept = LatencyModel(ARMS, table=stored).to_table()
    assert next(p.samples for p in kept.points if p.draft_length == 3) == samples
    vague = [LatencyModel(ARMS, table=table).uncertainty(8, 8000)[arm] for table in (stored, guessed)]
    assert vague[0] < vague[1], "a line between two others is no measurement"


@pytest.mark.parametrize("factor", [0.7, 1.4])
def test_what_a_load_costs_more_than_calibrated_is_believed_of_lengths_not_measured_there(factor):
    """Else those look better by as much, and each is tried in turn."""
    model, before = calibrated(), calibrated()
    measure(model, 12, 2, 12, np.random.default_rng(9), context=300, cost=off_by(factor))
    for k in ARMS:
        moved = model.seconds(12, 3600, k) / before.seconds(12, 3600, k)
        assert abs(np.log(moved)) > 0.5 * abs(np.log(factor)) and (moved > 1) == (factor > 1), k
        assert model.seconds(1, 300, k) == pytest.approx(before.seconds(1, 300, k), rel=0.06), "a load far off"


def test_what_one_length_alone_costs_more_is_known_once_another_was_measured_there():
    model, rng = calibrated(), np.random.default_rng(10)
    for k, factor in ((5, 1.4), (2, 1.0)):
        measure(model, 12, k, 24, rng, context=300, cost=off_by(factor))
    for k, factor in ((5, 1.4), (2, 1.0)):
        assert model.seconds(12, 3600, k) == pytest.approx(factor * true(12, 3600, k), rel=0.08)


def test_what_is_believed_of_the_others_is_no_more_than_was_measured_and_survives_as_a_table():
    """The roofline is fitted to what was measured, too: a deviation must not count twice."""
    model, before = calibrated(), calibrated()
    calibration = LatencyTable(tuple(dataclasses.replace(p, calibrated=True) for p in model.to_table().points))
    measure(model, 12, 2, 40, np.random.default_rng(11), context=300, cost=off_by(1.4))
    again = LatencyModel(ARMS, table=model.to_table(calibration))
    for k in ARMS:
        ratios = [one.seconds(12, 3600, k) / before.seconds(12, 3600, k) for one in (model, again)]
        assert 1.2 < ratios[0] < 1.45 and ratios[1] == pytest.approx(ratios[0], rel=0.05), k


def test_an_estimate_does_not_jump_between_two_samples_of_a_cell():
    model = calibrated()
    measure(model, 12, 2, 30, context=300, cost=off_by(1.4))
    for k in (3, 1):
        seconds = []
        for _ in range(12):
            measure(model, 12, k, 1, context=300, cost=off_by(1.2))
            seconds.append(model.seconds(12, 3600, k))
        assert (np.abs(np.diff(np.log(seconds[3:]))) < 0.02).all(), "after the first three"


# ---------------------------------------------------------------------- one cell

SAMPLES = (0.30, 0.34, 0.31, 0.33, 0.29, 0.32)


def fed(samples, prior=0.1, cell=None):
    cell = Cell(3, prior, 0.2, 0.03) if cell is None else cell
    for sample in samples:
        cell.learn(sample, 0.0, 0.0)
    return cell


@pytest.mark.parametrize("before", range(7))
@pytest.mark.parametrize("offset", [0.5, -0.25])
def test_a_shift_restates_everything(before, offset):
    """Against another shape a cell says the same, and goes on as if it had always been so."""
    cell = fed(SAMPLES[:before])
    cell.shift(offset)
    cell, plain = fed([s + offset for s in SAMPLES[before:]], cell=cell), fed(SAMPLES)
    assert (cell.level, cell.prior) == pytest.approx((plain.level + offset, plain.prior + offset))
    assert cell.variance == pytest.approx(plain.variance)


def test_the_first_samples_are_weighed_against_what_the_neighbours_suggest():
    """By the noise of so many: (0.03)^2 of one, a third of it of three that agree, against a prior of (0.2)^2."""
    for count in (1, 3):
        noise, cell = 0.03**2 / count, fed([0.3] * count, prior=0.25)
        trust = 0.2**2 / (0.2**2 + noise)
        assert (cell.level, cell.variance) == pytest.approx((0.25 + trust * 0.05, trust * noise)), count
