"""What a process writes to the trace is what the reader returns."""

import json
import logging
import resource

import numpy as np
import pytest

from verl_tlt.commands.report.reader import TraceError, parse_event, read_trace
from verl_tlt.messages.rollout import DrafterStatus
from verl_tlt.messages.training import SessionResult
from verl_tlt.trace.events import Reload, Session, TraceWriter

PHASE = {"step": 1, "name": "rollout", "start": 1.0, "end": 2.0}


def test_a_record_is_written_and_read_as_it_is(tmp_path):
    session = Session(**vars(SessionResult("stopped", steps=3)), t=1.0, step=1, replica="a", start=0.0, end=1.0)
    status = DrafterStatus(version=2, ok=True, acceptance=(0.5, 0.25))
    reload = Reload(**vars(status), t=2.0, step=1, replica="a")
    writer = TraceWriter(tmp_path, "trainer")
    writer.add(session)
    writer.add(reload)
    trace = read_trace(tmp_path)
    assert repr(trace.sessions) == repr([session]), "its loss is NaN, which equals nothing"
    assert trace.reloads == [reload]


def test_lines_of_older_versions_are_read():
    old = {"kind": "session", "t": 3.0, "step": 1, "replica": "a", "worker": "a", "start": 1.0, "end": 2.0, "steps": 9,
           "tokens": 90, "outcome": "failed", "loss": 2.5, "acc": [0.5], "slowest_s": None,
           "error": "no memory"}  # fmt: skip
    session = parse_event(old)
    assert (session.loss, session.outcome, session.error) == (2.5, "failed", "no memory")
    old = {"kind": "publish", "t": 3.0, "step": 1, "version": 4, "decision": "kept"}
    assert parse_event({**old, "tau": {"served": 2.0, "initial": None}}).tau == {"served": 2.0}


def test_half_a_line_is_skipped_and_the_next_writer_starts_a_new_one(tmp_path):
    for half in ('{"t": 5, "kind": "pha', ""):
        writer = TraceWriter(tmp_path, "trainer")
        writer.emit("phase", **PHASE)
        with writer.path.open("a") as file:
            file.write(half)
    assert (len(read_trace(tmp_path).phases), read_trace(tmp_path).skipped) == (2, 1)


def test_a_full_disk_costs_the_line_that_it_cut(tmp_path):
    writer, (soft, hard) = TraceWriter(tmp_path, "trainer"), resource.getrlimit(resource.RLIMIT_FSIZE)
    writer.emit("phase", **PHASE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (writer.path.stat().st_size + 10, hard))
    try:
        writer.emit("phase", **PHASE)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    writer.emit("phase", **PHASE)
    assert (len(read_trace(tmp_path).phases), read_trace(tmp_path).skipped, writer.failures) == (2, 1, 1)


BROKEN = (
    {"kind": "phaze", "t": 1.0},
    {"kind": "idle", "t": 1.0, "step": 1, "replica": "a", "start": 1.0},
    {"kind": "phase", "t": 1.0, "step": 1},
    {"kind": "phase", "t": 1.0, **PHASE, "start": "soon"},
    {"kind": "load", "t": 1.0, "step": 1, "inflight": {"a": {}}},
)


def test_lines_that_mean_nothing_are_counted(tmp_path):
    older = {"kind": "run", "t": 1.0, "step0": 1, "policy": "p", "drafter": "d"}  # `drafter` is not written any more
    (tmp_path / "trainer.jsonl").write_text("\n".join([*map(json.dumps, (*BROKEN, older)), "half a li", "7", ""]))
    steps = ({"t": 1.0, "batch": 1}, {"t": 1.0, "batch": "x", "k": 0}, {"t": 1.0, "batch": 1, "k": 3}, {"t": "x"})
    (tmp_path / "engine-a.jsonl").write_text("\n".join([*map(json.dumps, steps), "", "half a li"]))
    trace = read_trace(tmp_path)
    assert trace.skipped == len(BROKEN) + 2
    assert trace.phases == [] and trace.engine("a", 0.0, 2.0).k.tolist() == [3] and trace.run.policy == "p"


def test_a_resumed_run_replaces_the_steps_it_repeats(tmp_path):
    clock = iter(range(100, 200))
    driver = TraceWriter(tmp_path, "trainer", lambda: float(next(clock)))
    engine = TraceWriter(tmp_path, "engine-a")
    driver.emit("run", step0=1)
    for step, reward in ((1, 0.1), (2, 0.2), (3, 0.3)):
        driver.emit("step", step=step, metrics={"critic/score/mean": reward})
        engine.write({"t": 100.5 + step, "batch": step, "k": 0})
    driver.emit("run", step0=3)
    driver.emit("step", step=3, metrics={"critic/score/mean": 0.9})
    engine.write({"t": 105.5, "batch": 33, "k": 0})
    trace = read_trace(tmp_path)
    assert [m["critic/score/mean"] for m in trace.steps.values()] == [0.1, 0.2, 0.9]
    assert trace.engine("a", 101.0, 102.5).batch.tolist() == [1, 2]


def test_the_replicas_of_a_resumed_run_are_those_of_the_run_before_it(tmp_path):
    """Their addresses are new, and their engines append to the same files."""
    driver = TraceWriter(tmp_path, "trainer")
    for step, ports in ((1, (1, 2)), (2, (2, 7))):
        names = [f"10.0.0.1:{port}" for port in ports]
        driver.emit("run", step0=step, replicas=names)
        driver.emit("load", step=step, inflight={names[0]: 1, names[1]: 2})
        driver.emit("reload", step=step, replica=names[1], version=0)
    trace = read_trace(tmp_path)
    assert trace.replicas == ["10.0.0.1:2", "10.0.0.1:7"]
    assert [[load.inflight[name] for name in trace.replicas] for load in trace.loads] == [[1, 2], [1, 2]]
    assert [trace.label(reload.replica) for reload in trace.reloads] == ["replica 1", "replica 1"]


def test_numpy_values_and_nan_are_written_as_json_and_what_is_no_number_is_left_out(tmp_path):
    writer = TraceWriter(tmp_path, "trainer")
    metrics = {"a": np.float32(1.5), "b": None, "c": "x", "d": float("nan"), "e": np.arange(2)}
    writer.emit("step", step=np.int64(1), metrics=metrics)
    assert writer.failures == 0
    record = json.loads(writer.path.read_text())
    assert (record["step"], record["metrics"]) == (1, metrics | {"a": 1.5, "d": None, "e": [0, 1]})
    assert parse_event(record).metrics == {"a": 1.5}


def test_failures_are_counted_and_logged_once(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        writer = TraceWriter(tmp_path / "file", "trainer")
        for _ in range(3):
            writer.emit("phase", **PHASE)
    assert writer.failures == 4
    assert len(caplog.records) == 1 and "cannot write the trace" in caplog.text


def test_a_missing_or_empty_directory_is_named(tmp_path):
    for folder in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(TraceError, match=f"{folder} (is not a directory|holds no trace): give the trace directory"):
            read_trace(folder)


def test_replicas_are_numbered_in_the_runs_order_whatever_their_names(tmp_path):
    writer = TraceWriter(tmp_path, "trainer")
    writer.emit("run", step0=1, replicas=["10.0.0.9:1", "10.0.0.1:2"])
    writer.emit("load", step=1, inflight={"10.0.0.1:2": 3, "10.0.0.9:1": 1})
    TraceWriter(tmp_path, "engine-1").write({"t": 0.0, "batch": 1, "k": 0})
    trace = read_trace(tmp_path)
    assert [trace.label(name) for name in ("10.0.0.9:1", "10.0.0.1:2")] == ["replica 0", "replica 1"]
    assert [len(trace.engine(name, 0.0, 1.0).t) for name in ("10.0.0.1:2", "10.0.0.9:1")] == [1, 0]
