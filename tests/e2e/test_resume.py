"""A run of stock verl that goes on with TLT and then without it again: the policy's checkpoints are verl's anyway."""

import json

import pytest
from grpo_run import TLT, grpo

pytestmark = [pytest.mark.e2e, pytest.mark.heavy]


@pytest.fixture(scope="module")
def across(tmp_path_factory):
    """(stock, with TLT, stock again): each goes on from the one before for one more step."""
    base, finished = tmp_path_factory.mktemp("across"), []
    (base / "checkpoints").mkdir()
    for step, overrides in enumerate([(), TLT, ()], start=1):
        out = base / f"run-{step}"
        out.mkdir()
        (out / "checkpoints").symlink_to(base / "checkpoints")
        environment = {"SAVE_FREQ": "1", "RESUME": "auto", "EXECUTOR": "uni", "TLT": "1" if overrides else "0"}
        finished.append(grpo(out, base / "assets", step, *overrides, longest=120, **environment))
    return finished


def test_each_goes_on_where_the_other_ended(across):
    assert [sorted(run.steps) for run in across] == [[1], [2], [3]]
    assert [run.left for run in across] == [[], [], []]


def test_tlt_starts_from_a_new_drafter_and_leaves_it_in_its_checkpoint(across):
    assert "TLT starts from a random head" in across[1].log
    assert across[1].steps[2]["tlt/errors"] == 0.0
    checkpoints = across[1].out / "checkpoints"
    saved = {path.parent.name for path in checkpoints.glob("global_step_*/tlt_drafter")}
    assert saved == {"global_step_2"}
    assert json.loads((checkpoints / "global_step_2/tlt_drafter/provenance.json").read_text())["policy_step"] == 2


def test_stock_goes_on_as_if_the_drafter_were_not_there(across):
    assert not any(name.startswith("tlt/") for name in across[2].steps[3])
