"""The average is the weighted one, in any order, and nothing broken gets into it."""

import itertools

import numpy as np
import pytest

from verl_tlt.messages.training import Contribution
from verl_tlt.spot_worker.merge import merge


def contribution(worker, tokens=100, steps=10, seed=0, **arrays):
    rng = np.random.default_rng(seed)
    delta = arrays or {"fc": rng.normal(size=(4, 3)).astype(np.float32), "norm": rng.normal(size=5).astype(np.float32)}
    return Contribution(worker, tokens, steps, delta)


def several(count=5):
    return [contribution(f"w{i}", tokens=10 * (i + 1) ** 2, seed=i) for i in range(count)]


@pytest.mark.parametrize("count", range(1, 9))
def test_the_average_is_weighted_by_tokens_and_goes_as_far_as_the_longest_session(count):
    parts = several(count)
    merged = merge(parts, min_steps=8)
    weights = [c.tokens for c in parts]
    for name in ("fc", "norm"):
        expected = np.average([c.delta[name].astype(np.float64) for c in parts], axis=0, weights=weights)
        expected *= max(weights) * sum(weights) / sum(w * w for w in weights)
        np.testing.assert_allclose(merged.delta[name], expected, rtol=1e-5, atol=1e-6)
        assert merged.delta[name].dtype == np.float32
    assert merged.tokens == sum(weights)
    assert merged.included == tuple(c.worker for c in parts)
    assert merged.excluded == {}


def test_sessions_that_agree_on_the_progress_per_token_give_it_for_the_longest():
    parts = [contribution(f"w{i}", tokens=t, fc=np.float32([2.0, -1.0]) * t) for i, t in enumerate((30, 400, 100))]
    np.testing.assert_allclose(merge(parts, min_steps=1).delta["fc"], np.float32([2.0, -1.0]) * 400, rtol=1e-6)


def test_equal_sessions_give_the_plain_average():
    parts = [contribution(f"w{i}", seed=i) for i in range(4)]
    expected = np.mean([c.delta["fc"] for c in parts], axis=0)
    np.testing.assert_allclose(merge(parts, min_steps=1).delta["fc"], expected, rtol=1e-5)


def test_the_order_of_arrival_changes_no_bit():
    parts = several(4)
    first = merge(parts, min_steps=1)
    for order in itertools.permutations(parts):
        again = merge(order, min_steps=1)
        assert all(np.array_equal(again.delta[n], first.delta[n]) for n in first.delta)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (contribution("bad", steps=7), "7 optimizer steps, fewer than 8"),
        (contribution("bad", tokens=0), "no tokens"),
        (Contribution("bad", 100, 10, {}), "empty"),
        (contribution("bad", fc=np.full((4, 3), np.nan), norm=np.zeros(5)), "fc is not finite"),
        (contribution("bad", fc=np.zeros((4, 3)), norm=np.array([0, 0, np.inf, 0, 0])), "norm is not finite"),
    ],
)
@pytest.mark.parametrize("name", ["a", "w2x", "z"])
def test_a_bad_contribution_is_named_and_changes_nothing(bad, reason, name):
    parts = several(4)
    clean = merge(parts, min_steps=8)
    merged = merge([*parts, Contribution(name, bad.tokens, bad.steps, bad.delta)], min_steps=8)
    assert list(merged.excluded) == [name]
    assert reason in merged.excluded[name]
    assert merged.included == clean.included
    assert merged.tokens == clean.tokens
    for tensor in clean.delta:  # the tree may have another shape, the average not
        np.testing.assert_allclose(merged.delta[tensor], clean.delta[tensor], rtol=1e-5, atol=1e-7)


def test_exactly_as_many_steps_as_are_needed_are_enough():
    merged = merge([contribution("a", steps=8), contribution("b", steps=7)], min_steps=8)
    assert merged.included == ("a",) and list(merged.excluded) == ["b"]


def test_nothing_usable_gives_no_delta():
    merged = merge([contribution("a", steps=1), contribution("b", tokens=0)], min_steps=8)
    assert merged.delta is None
    assert set(merged.excluded) == {"a", "b"}
    assert merge([], min_steps=8).delta is None


def test_read_only_inputs_stay_untouched():
    parts = several(3)
    for c in parts:
        for value in c.delta.values():
            value.flags.writeable = False
    before = [{n: v.copy() for n, v in c.delta.items()} for c in parts]
    merge(parts, min_steps=1)
    for c, old in zip(parts, before, strict=True):
        assert all(np.array_equal(c.delta[n], old[n]) for n in old)


def test_huge_and_tiny_weights_stay_finite():
    big, small = (
        contribution("a", tokens=10**12, fc=np.float32([3e38])),
        contribution("b", tokens=1, fc=np.float32([1.0])),
    )
    np.testing.assert_allclose(merge([big, small], min_steps=1).delta["fc"], [3e38], rtol=1e-6)


def test_mismatched_deltas_and_duplicates_are_refused():
    a, b = contribution("a", fc=np.zeros(3)), contribution("b", fc=np.zeros(4))
    with pytest.raises(ValueError, match="a and b differ in fc"):
        merge([a, b], min_steps=1)
    with pytest.raises(ValueError, match="once per merge"):
        merge([a, a], min_steps=1)
