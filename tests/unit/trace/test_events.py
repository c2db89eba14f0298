"""What a part writes is what a reader gets back, whatever happened to the writer in between."""

import json
import logging
import threading

import numpy as np
import pytest

from verl_tlt.report.reader import TraceError, parse_event, read_trace
from verl_tlt.trace.events import EVENT_TYPES, TraceWriter, required_fields

PHASE = {"step": 1, "name": "rollout", "start": 1.0, "end": 2.0}


def test_round_trip_of_a_whole_run(made_run):
    trace = read_trace(made_run.directory)
    assert trace.skipped == 0
    assert list(trace.steps) == list(range(1, made_run.steps + 1))
    assert trace.replicas == ["replica-0", "replica-1"]
    for step, seconds in made_run.rollout_s.items():
        phase = trace.phase(step, "rollout")
        assert phase.end - phase.start == pytest.approx(seconds + 0.06)
        assert trace.steps[step]["tlt/accept_length"] == pytest.approx(made_run.accept_length[step])
    assert {s.step for s in trace.sessions} == set(range(2, made_run.steps + 1))
    assert [trace.label(name) for name in trace.replicas] == ["replica 0", "replica 1"]


def test_engine_steps_come_back_as_columns(made_run):
    trace = read_trace(made_run.directory)
    rollout = trace.phase(5, "rollout")
    engines = {name: steps.between(rollout.start, rollout.end) for name, steps in trace.engines.items()}
    drafts = sum(e.drafts.sum() for e in engines.values())
    accepted = sum(e.accepted.sum() for e in engines.values())
    assert 1 + accepted / drafts == pytest.approx(made_run.accept_length[5])
    assert engines["replica-0"].accepted.shape == (len(engines["replica-0"].t), 5)


def test_half_a_line_is_skipped_and_the_next_writer_starts_a_new_one(tmp_path):
    TraceWriter(tmp_path, "trainer").emit("phase", **PHASE)
    with (tmp_path / "trainer.jsonl").open("a") as file:
        file.write('{"t": 5, "kind": "pha')
    assert (len(read_trace(tmp_path).phases), read_trace(tmp_path).skipped) == (1, 1)
    TraceWriter(tmp_path, "trainer").emit("phase", **PHASE)
    assert (len(read_trace(tmp_path).phases), read_trace(tmp_path).skipped) == (2, 1)


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
    assert trace.engines["a"].batch.tolist() == [1, 2, 33]
    assert trace.run.step0 == 3


def test_numpy_values_and_nan_are_written_as_json(tmp_path):
    writer = TraceWriter(tmp_path, "trainer")
    writer.emit("step", step=np.int64(1), metrics={"a": np.float32(0.5), "b": float("nan"), "c": np.arange(2)})
    assert writer.failures == 0
    record = json.loads((tmp_path / "trainer.jsonl").read_text())
    assert (record["step"], record["metrics"]) == (1, {"a": 0.5, "b": None, "c": [0, 1]})


def test_failures_are_counted_and_logged_once(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        writer = TraceWriter(tmp_path / "file", "trainer")
        for _ in range(3):
            writer.emit("phase", **PHASE)
    assert writer.failures == 4
    assert len(caplog.records) == 1 and "cannot write the trace" in caplog.text


@pytest.mark.parametrize(
    ("kind", "fields", "word"), [("phaze", {}, "phaze"), ("phase", {"step": 1}, "end, name, start")]
)
def test_an_event_no_reader_understands_is_counted(tmp_path, caplog, kind, fields, word):
    writer = TraceWriter(tmp_path, "trainer")
    with caplog.at_level(logging.WARNING):
        writer.emit(kind, **fields)
    assert writer.failures == 1 and word in caplog.text
    with pytest.raises(TraceError):
        read_trace(tmp_path)


def test_threads_share_a_writer(tmp_path):
    writer = TraceWriter(tmp_path, "trainer")

    def emit(step):
        for _ in range(200):
            writer.emit("step", step=step, metrics={"x" * 200: 1.0})

    threads = [threading.Thread(target=emit, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = (tmp_path / "trainer.jsonl").read_text().splitlines()
    assert len(lines) == 800 and all(json.loads(line) for line in lines)


@pytest.mark.parametrize("kind", sorted(EVENT_TYPES))
def test_every_kind_is_read_with_its_required_fields_alone(kind):
    cls = EVENT_TYPES[kind]
    record = dict.fromkeys(required_fields(cls), 1) | {"kind": kind, "t": 0.0}
    event = parse_event(record | {"something_new": 1})
    assert type(event) is cls
    assert parse_event({"kind": kind}) is None


def test_a_missing_or_empty_directory_is_named(tmp_path):
    with pytest.raises(TraceError, match="nowhere is not a directory"):
        read_trace(tmp_path / "nowhere")
    with pytest.raises(TraceError, match="holds no trace"):
        read_trace(tmp_path)


def test_replicas_are_numbered_in_the_runs_order_whatever_their_names(tmp_path):
    writer = TraceWriter(tmp_path, "trainer")
    writer.emit("run", step0=1, replicas=["10.0.0.9:1", "10.0.0.1:2"])
    writer.emit("load", step=1, inflight={"10.0.0.1:2": 3, "10.0.0.9:1": 1})
    TraceWriter(tmp_path, "engine-1").write({"t": 0.0, "batch": 1, "k": 0})
    trace = read_trace(tmp_path)
    assert [trace.label(name) for name in ("10.0.0.9:1", "10.0.0.1:2")] == ["replica 0", "replica 1"]
    assert [trace.label(name) for name in trace.engines] == ["replica 1"]
