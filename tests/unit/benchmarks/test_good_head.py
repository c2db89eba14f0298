"""A drafter that is nearly always right: over a whole drain goodput is within 2 % of the best fixed K."""

import pytest

from benchmarks.control.good_head import jobs_of, race


@pytest.mark.parametrize(
    ("engine", "requests", "acceptance"),
    [("AVX2 CPU", 4, 0.93), ("AVX2 CPU", 4, 0.97), ("bf16 CPU", 16, 0.97)],
)
def test_the_first_drain_of_a_run_is_as_fast_as_with_the_best_fixed_draft_length(engine, requests, acceptance):
    found = race(jobs_of(engine, requests, acceptance))
    assert found["goodput_over_it"][0] > 0.98, found
