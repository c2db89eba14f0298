"""What a step's log holds, without a trainer."""

from verl_tlt.trace.events import TraceWriter
from verl_tlt.trainer.step_log import StepLog

COUNTERS = {
    "steps": 4, "emitted": 6, "produced": 6, "rows": 4, "drafts": 4, "accepted": [2], "k_steps": {"1": 4},
    "busy_s": 0.4,
}  # fmt: skip


def test_statistics_that_could_not_be_had_are_counted_and_the_others_kept(tmp_path):
    log = StepLog(TraceWriter(tmp_path, "driver"))
    answers = {
        "whole": COUNTERS,
        "without n-grams": {**COUNTERS, "error": "the channel is closed"},
        "silent": {"error": "the channel is closed"},
        "speculation off": {},
    }
    assert log.engine_stats(answers) == 2
    metrics = log.finish(1, {}, errors=2)
    assert metrics["tlt/errors"] == 2.0
    assert metrics["tlt/accept_length"] == 1.5, "6 tokens in 4 rows, of the two replicas that answered"
