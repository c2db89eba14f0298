"""The drafter study: what is served when, and how arms are compared."""

import pytest

from benchmarks.drafter.serve import Arm, arms
from benchmarks.drafter.study_report import compare, summary


def row(seed, step, arm, *, decoded, seconds=1.0, start="generic"):
    return {"seed": seed, "step": step, "start": start, "arm": arm, "passes": 100, "decoded": decoded,
            "tokens": decoded, "seconds": seconds}  # fmt: skip


def test_two_arms_are_compared_run_by_run():
    rows = [row(0, 0, "online", decoded=300), row(0, 0, "frozen", decoded=200)]
    rows += [row(1, 0, "online", decoded=100), row(1, 0, "frozen", decoded=100)]
    found = compare(rows, "generic", ("online", "frozen"), "accept_length")
    assert found["mean"] == 0.25
    assert found["high"] - found["mean"] == pytest.approx(12.706 * 0.25, abs=1e-3)  # two runs: half their distance


def test_steps_before_the_first_wanted_are_left_out():
    rows = [row(seed, step, arm, decoded=decoded, seconds=decoded / 100)
            for seed in (0, 1) for step, arm, decoded in
            ((0, "online", 100), (70, "online", 300), (0, "frozen", 300), (70, "frozen", 200))]  # fmt: skip
    late = compare(rows, "generic", ("online", "frozen"), "accept_length", first=70)
    assert late == {"mean": 0.5, "low": 0.5, "high": 0.5}
    assert compare(rows, "generic", ("online", "frozen"), "speed")["mean"] == 0.0


def test_every_start_meets_the_engine_without_a_drafter():
    served = [row(seed, step, arm, decoded=200, start=start)
              for seed in (0, 1) for step in (0, 90) for start in ("random", "generic", "in_domain")
              for arm in ("frozen", "online", "extra")]  # fmt: skip
    served += [row(seed, step, "none", decoded=100, seconds=2.0, start="") for seed in (0, 1) for step in (0, 90)]
    found = summary(served, 100)
    assert all(of["online_vs_none_speed_late"]["mean"] == 3.0 for of in found.values())
    assert found["random"]["extra_late"] == found["random"]["extra_first"] == 2.0


def test_an_arm_without_a_drafter_is_off_and_no_others_controller(tmp_path):
    found = list(arms(tmp_path, seed=3, step=20))
    assert found[0] == Arm("", "none", None) and found[0].control == "off"
    assert len({arm.control for arm in found}) == len(found) == 10
    online = next(arm for arm in found if (arm.start, arm.name) == ("generic", "online"))
    assert online.drafter == tmp_path / "variants" / "generic-3" / "step-020"
