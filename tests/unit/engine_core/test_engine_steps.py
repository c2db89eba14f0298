"""Which engine steps say what a draft length costs."""

from types import SimpleNamespace

import pytest

from verl_tlt.engine_core.steps import EngineStep
from verl_tlt.engine_core.verified import count_verified
from verl_tlt.speculation.types import OFF

BATCH = 4


def record(arm=3, **scheduled):
    """The record of a decode-only step in which every draft was verified; `scheduled`: fields of vLLM's output."""
    step = EngineStep(
        output=SimpleNamespace(**scheduled), started_s=1.0, paused_s=0.0, batch=BATCH, kv_tokens=100, arm=arm,
        previous_arm=arm, blocked=False, prefilling=set(), may_lack_drafts=False,
    )  # fmt: skip
    k, names = max(arm, 0), [str(i) for i in range(BATCH)]
    drafts = dict.fromkeys(names, [7] * k) if k else {}
    row_of = {name: row for row, name in enumerate(names)}
    step.verified = count_verified(dict.fromkeys(names, 1 + k), drafts, BATCH * (1 + k), [[7]] * BATCH, row_of, ())
    step.finished_s, step.previous_finished_s = 1.02, 1.0
    records = []
    control = SimpleNamespace(record=lambda step, totals: records.append(step), responses=lambda *_: None)
    step.record_with(control)
    return records[0]


@pytest.mark.parametrize("arm", [OFF, 0, 3])
def test_a_step_as_chosen_is_clean(arm):
    assert record(arm).clean and record(arm, skip_drafts=False).clean


def test_a_step_whose_drafts_vllm_skips_costs_less_than_its_draft_length():
    assert not record(skip_drafts=True).clean
    assert record(arm=0, skip_drafts=True).clean and record(arm=OFF, skip_drafts=True).clean, (
        "nothing was to be drafted"
    )
