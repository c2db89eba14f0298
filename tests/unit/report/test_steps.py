"""A trace by RL step: what belongs together, what it saved, and what ran when."""

import numpy as np
import pytest

from verl_tlt.report.reader import EngineSteps, TraceError, read_trace
from verl_tlt.report.steps import Bubble, most_trained, rl_steps, sampled_engine, sampled_load, saving
from verl_tlt.trace.events import TraceWriter


def engine_steps(*rows):
    """Rows of (finished at, seconds, batch, K)."""
    t, latency, batch, k = (np.array(column) for column in zip(*rows, strict=True))
    none = np.zeros(len(rows), dtype=int)
    return EngineSteps(t.astype(float), batch, none, k, none, none[:, None], none, latency)


def test_waits_inside_engine_steps_are_not_lost_twice():
    metrics = {"tlt/saved_s": 5.0, "tlt/overhead_s": 1.0, "tlt/overhead_control_s": 0.4, "tlt/overhead_stop_s": 0.6}
    found = saving(3, metrics)
    assert (found.saved_s, found.work_s, found.net_s) == pytest.approx((5.0, 0.6, 4.4))
    del metrics["tlt/saved_s"]
    found = saving(3, metrics)
    assert (found.saved_s, found.work_s, found.net_s) == (None, 1.0, None), "nothing else counted the waits"


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
        assert step.metrics is trace.steps[number]
        assert {s.step for s in step.sessions} | {r.step for r in step.reloads} == {number}
    seconds = {n: sum(s.end - s.start for s in step.sessions) for n, step in steps.items()}
    assert most_trained(steps) == max(seconds, key=seconds.get)


def test_a_step_that_samples_twice_has_bubbles_in_both(tmp_path):
    writer = TraceWriter(tmp_path, "driver")
    writer.emit("run", step0=1, replicas=["a"])
    for start, end, idle in ((10.0, 14.0, 13.0), (20.0, 26.0, 22.0)):
        writer.emit("phase", step=1, name="rollout", start=start, end=end)
        writer.emit("idle", step=1, replica="a", start=idle)
    step = rl_steps(read_trace(tmp_path))[1]
    assert (step.start, step.end) == (10.0, 26.0)
    assert step.bubbles == [Bubble("a", 13.0, 14.0), Bubble("a", 22.0, 26.0)]


def test_a_trace_without_a_rollout_says_so(tmp_path):
    TraceWriter(tmp_path, "driver").emit("run", step0=1)
    with pytest.raises(TraceError, match="no finished rollout"):
        rl_steps(read_trace(tmp_path))


def test_what_an_engine_ran_at_a_moment():
    steps = engine_steps((1.0, 0.5, 8, 0), (1.4, 0.4, 6, 2), (5.0, 0.5, 1, 4))
    at = np.array([0.2, 0.7, 1.2, 3.0, 4.8, 5.1])
    batch, k = sampled_engine(steps, at)
    assert batch.tolist() == [0, 8, 6, 0, 1, 0]
    assert k.tolist() == [-2, 0, 2, -2, 4, -2], "before the first, in a long pause and after the last nothing ran"


def test_the_load_at_a_moment(made_run):
    trace = read_trace(made_run.directory)
    step = rl_steps(trace)[2]
    at = np.array([step.start - 1.0, step.start + 0.01, step.start + 0.51])
    samples = [load.inflight["replica-0"] for load in step.loads]
    assert sampled_load(step, "replica-0", at).tolist() == [0, samples[0], samples[5]]
    assert sampled_load(step, "nobody", at).tolist() == [0, 0, 0]
