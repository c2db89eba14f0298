"""What a run showed, from verl's file logger, from its console, and from TLT's trace."""

import json
from dataclasses import replace

import numpy as np
import pytest

from verl_tlt.commands.advise.run_metrics import read_metrics
from verl_tlt.errors import TLTError

STEP = {
    "timing_s/gen": 80.0, "timing_s/step": 100.0, "timing_s/reward": 2.5, "response_length/mean": 900.0,
    "response_length/max": 4000.0, "response_length/clip_ratio": 0.01, "prompt_length/mean": 120.0,
}  # fmt: skip


@pytest.fixture
def jsonl(tmp_path):
    """Four steps: a slow first one, two plain ones, one with validation; half a line at the end."""
    rows = [{**STEP, "timing_s/step": 300.0}, STEP, {**STEP, "timing_s/gen": 60.0}, {**STEP, "timing_s/testing": 50.0}]
    lines = [json.dumps({"step": 0, "data": {"val-core/acc": 0.1}})]
    lines += [json.dumps({"step": i + 1, "data": row}) for i, row in enumerate(rows)]
    path = tmp_path / "metrics.jsonl"
    path.write_text("\n".join(lines) + '\n{"step": 5, "da')
    return path


def test_steps_with_validation_and_the_first_one_are_left_out(jsonl):
    found = read_metrics(jsonl)
    assert (found.steps, found.gen_s, found.step_s, found.rest_s) == (2, 70.0, 100.0, 30.0)
    assert (found.response_mean, found.response_max, found.clipped, found.prompt_mean) == (900.0, 4000.0, 0.01, 120.0)
    assert found.reward_s == 2.5 and found.tool_share is None


def test_a_run_with_tlt_is_refused(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps({"step": 2, "data": {**STEP, "tlt/saved_s": 10.0}}))
    with pytest.raises(TLTError, match=r"is of a run with TLT, of which verl-tlt report tells: give a stock run's"):
        read_metrics(path)


def test_a_byte_order_mark_and_separators_within_text_lose_no_step(jsonl):
    expected, (first, *others) = read_metrics(jsonl), jsonl.read_text().splitlines(keepends=True)[1:]
    named = first.replace('"data"', '"run": "a\u2028b\u0085c", "data"', 1)
    jsonl.write_text("\ufeff" + named + "".join(others))
    assert read_metrics(jsonl) == expected


def test_verls_console_says_the_same(jsonl, tmp_path):
    def printed(row):
        return " - ".join(f"{k}:{np.float64(v)!r}" for k, v in row.items())

    log = ["WARNING something - odd:thing", "(TaskRunner pid=1) step:0 - val-core/acc:0.1"]
    for line in jsonl.read_text().splitlines()[1:5]:
        record = json.loads(line)
        log.append(f"(TaskRunner pid=1) step:{record['step']} - {printed(record['data'])} - training/odd:nan")
    path = tmp_path / "run.log"
    path.write_text("\n".join(log))
    assert replace(read_metrics(path), source="") == replace(read_metrics(jsonl), source="")


@pytest.mark.parametrize("prompt", [1e99, -1e9, float("nan")])
def test_numbers_that_no_run_has_are_left_out(prompt, tmp_path):
    agents = {f"timing_s/agent_loop/{k}/mean": v for k, v in (("tool_calls", -1.0), ("generate_sequences", 1.0))}
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps({"step": 1, "data": {**STEP, **agents, "prompt_length/mean": prompt}}))
    found = read_metrics(path)
    assert found.tool_share is None and found.prompt_mean is None and found.gen_s == 80.0


@pytest.mark.parametrize(
    "text",
    ["", "no metrics here", '{"step": 1, "data": {"timing_s/gen": 1.0}}', '{"step": 1, "data": 5}',
     json.dumps({"step": 1, "data": STEP | {"response_length/max": 0}})],
)  # fmt: skip
def test_a_file_without_a_finished_step_is_one_sentence(text, tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(text)
    with pytest.raises(TLTError, match="holds no finished training step with timing_s/gen"):
        read_metrics(path)
