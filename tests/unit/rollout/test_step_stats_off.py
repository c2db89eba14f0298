"""An engine that runs as stock saves nothing against stock."""

from verl_tlt.control.types import OFF, StepRecord
from verl_tlt.rollout.step_stats import Aggregates


def test_a_step_without_the_drafter_saves_nothing_however_noisy_the_table():
    sums = Aggregates()
    step = StepRecord(
        batch=4, kv_tokens=100, drafted=OFF, verified=0, drafts=0, accepted=(), produced=4, latency_s=0.02, clean=True
    )
    sums.add(step, emitted=4, draft_tokens=0, off_latency=[(4, 0.08)])
    assert sums.to_dict()["saved_s"] == 0.0
    assert sums.to_dict()["compared_s"] == 0.02
