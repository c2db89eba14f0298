"""The timeline as a trace viewer reads it: a small reader that holds to the format, and the run's own numbers in it."""

import json
from collections import defaultdict

import pytest

from verl_tlt.commands.report import chrome_trace
from verl_tlt.commands.report.reader import read_trace
from verl_tlt.commands.report.steps import rl_steps


class Timeline:
    """What a viewer makes of the events; refuses what it would draw wrongly."""

    def __init__(self, text):
        events = json.loads(text)
        for event in events:
            assert event.keys() >= {"ph", "ts", "pid", "tid", "name"} and event["ph"] in "XCMi", event
            numbers = [event[key] for key in ("ts", "pid", "tid", "dur") if key in event]
            assert all(type(number) is int and number >= 0 for number in numbers), event
        tracks = [e for e in events if e["name"] == "thread_name"]
        processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
        self._tracks = {(processes[e["pid"]], e["args"]["name"]): (e["pid"], e["tid"]) for e in tracks}
        self._slices, self.counters = defaultdict(list), defaultdict(list)
        self.instants = [e for e in events if e["ph"] == "i"]
        for event in events:
            if event["ph"] == "X":
                self._slices[event["pid"], event["tid"]].append(event)
            elif event["ph"] == "C":
                self.counters[processes[event["pid"]], event["name"]].append((event["ts"], *event["args"].values()))
        assert all(samples == sorted(samples, key=lambda s: s[0]) for samples in self.counters.values())
        assert all(map(nested, self._slices.values()))

    def track(self, process, track):
        return self._slices[self._tracks[process, track]]


def nested(track):
    """Whether of two slices on a track one holds the other or they are apart."""
    open_until = []
    for event in sorted(track, key=lambda e: (e["ts"], -e["dur"])):
        end = event["ts"] + event["dur"]
        while open_until and open_until[-1] <= event["ts"]:
            open_until.pop()
        if open_until and end > open_until[-1]:
            return False
        open_until.append(end)
    return True


@pytest.fixture(scope="module")
def timeline(made_run, tmp_path_factory):
    path = tmp_path_factory.mktemp("timeline") / "run.json"
    chrome_trace.write_chrome_trace(path, read_trace(made_run.directory))
    return Timeline(path.read_text())


def seconds(event):
    return event["dur"] / 1e6


def test_a_replica_rolls_out_sleeps_and_updates(timeline, made_run):
    for replica in ("replica 0", "replica 1"):
        track = timeline.track(replica, "engine")
        rollouts = [e for e in track if e["name"] == "rollout"]
        wanted = [s + 0.06 for s in made_run.rollout_s.values()]
        assert [seconds(e) for e in rollouts] == pytest.approx(wanted, abs=1e-5)
        assert sum(e["name"] == "sleep" for e in track) == sum(e["name"] == "update_actor" for e in track) == 6
        idle = [s + 0.06 for n, s in made_run.bubble_s.items() if made_run.idle_replica[n].replace("-", " ") == replica]
        assert [seconds(e) for e in track if e["name"] == "bubble"] == pytest.approx(idle, abs=1e-5)


def test_sessions_carry_steps_and_loss(timeline, made_run):
    sessions = [e for r in ("replica 0", "replica 1") for e in timeline.track(r, "sessions")]
    assert {e["args"]["step"] for e in sessions} == {2, 3, 4, 5, 6}
    for event in sessions:
        step = event["args"]["step"]
        assert event["args"]["loss"] == 6.0 / step
        assert seconds(event) == pytest.approx(made_run.bubble_s[step] - 0.30, abs=1e-4)
        assert event["args"]["steps"] > 0 and event["args"]["outcome"] == "stopped"


def test_counters_hold_every_change_of_batch_and_draft_length(timeline, made_run):
    trace = read_trace(made_run.directory)
    steps = rl_steps(trace).values()
    for replica in trace.replicas:
        engine = trace.engine(replica)
        for name in ("batch", "K"):
            wanted = []
            for step in steps:
                part = engine.between(step.start, step.end)
                values = (part.batch if name == "batch" else part.k).tolist()
                wanted += [v for before, v in zip([None, *values], values, strict=False) if v != before]
                wanted.append({"batch": 0, "K": -1}[name])
            assert [value for _, value in timeline.counters[trace.label(replica), name]] == wanted


def test_the_trainer_has_steps_phases_and_what_became_of_the_drafter(timeline, made_run):
    names = [e["name"] for e in timeline.track("trainer", "RL step")]
    assert [n for n in names if n.startswith("step ")] == [f"step {i}" for i in range(1, 7)]
    assert names.count("rollout") == names.count("update_weights") == 6
    (first,) = [e for e in timeline.track("trainer", "RL step") if e["name"] == "step 5"]
    assert first["args"]["tlt/saved_s"] == pytest.approx(made_run.saved_s[5], abs=1e-3)
    assert [e["args"]["version"] for e in timeline.instants] == [1, 2, 3, 4, 5]


def test_a_long_run_keeps_few_samples(made_run, monkeypatch):
    monkeypatch.setattr(chrome_trace, "MOST_SAMPLES", 40)
    events = list(chrome_trace.chrome_events(read_trace(made_run.directory)))
    samples = defaultdict(list)
    for event in events:
        if event["ph"] == "C":
            samples[event["pid"], event["name"]].append(event["args"][event["name"]])
    assert all(len(values) <= 40 + 2 * 6 for values in samples.values())
    assert all(max(values) == 32 for (_, name), values in samples.items() if name == "batch"), "the first of each stays"
    assert all(5 in values for (_, name), values in samples.items() if name == "K")
