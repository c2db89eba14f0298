"""A trace by RL step: what belongs to it, and what ran when."""

import numpy as np
import pytest

from verl_tlt.commands.report.reader import read_trace
from verl_tlt.commands.report.steps import NO_STEP, Bubble, most_trained, rl_steps, sampled
from verl_tlt.trace.events import TraceWriter


def test_every_step_holds_what_is_its_own(made_run):
    trace = read_trace(made_run.directory)
    steps = rl_steps(trace)
    assert list(steps) == list(range(1, 7))
    for number, step in steps.items():
        assert step.end - step.start == pytest.approx(made_run.rollout_s[number] + 0.06)
        (bubble,) = step.bubbles
        assert bubble.replica == made_run.idle_replica[number] and bubble.end == step.end
        assert bubble.end - bubble.start == pytest.approx(made_run.bubble_s[number] + 0.06)
        assert [p.name for p in step.after][:3] == ["old_log_prob", "update_actor", "update_weights"]
        assert {s.step for s in step.sessions} <= {number}
    seconds = {n: sum(s.end - s.start for s in step.sessions) for n, step in steps.items()}
    assert most_trained(steps) == max(seconds, key=seconds.get)


def test_a_step_with_two_rollouts_has_bubbles_in_both(tmp_path):
    writer = TraceWriter(tmp_path, "trainer")
    writer.emit("run", step0=1, replicas=["a"])
    for start, end, idle in ((10.0, 14.0, 13.0), (20.0, 26.0, 22.0)):
        writer.emit("phase", step=1, name="rollout", start=start, end=end)
        writer.emit("idle", step=1, replica="a", start=idle)
    step = rl_steps(read_trace(tmp_path))[1]
    assert (step.start, step.end) == (10.0, 26.0)
    assert step.bubbles == [Bubble("a", 13.0, 14.0), Bubble("a", 22.0, 26.0)]


def test_what_a_replica_decoded_at_a_moment(tmp_path):
    driver, engine = TraceWriter(tmp_path, "trainer"), TraceWriter(tmp_path, "engine-a")
    driver.emit("run", step0=1, replicas=["a", "b"])
    driver.emit("phase", step=1, name="rollout", start=0.0, end=6.0)
    driver.emit("load", step=1, inflight={"b": 7})
    for t, latency, batch, k in ((1.0, 0.5, 8, 0), (1.4, 0.4, 6, 2), (5.0, 0.5, 1, 4)):
        engine.write({"t": t, "latency_s": latency, "batch": batch, "k": k})
    trace = read_trace(tmp_path)
    at = np.array([0.2, 0.7, 1.2, 3.0, 4.8, 5.1])
    batch, k = sampled(trace, rl_steps(trace)[1], "a", at)
    assert batch.tolist() == [0, 8, 6, 0, 1, 0]
    assert k.tolist() == [NO_STEP, 0, 2, NO_STEP, 4, NO_STEP], "nothing ran before, after and in a long pause"
    batch, k = sampled(trace, rl_steps(trace)[1], "b", at)
    assert set(batch.tolist()) == {0} and set(k.tolist()) == {NO_STEP}, "the load was written later"
