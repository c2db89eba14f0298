"""What a run showed, from verl's file logger and from its console."""

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
ROWS = [
    {"val-core/acc": 0.1}, {**STEP, "timing_s/step": 300.0}, STEP, {**STEP, "timing_s/gen": 60.0},
    {**STEP, "timing_s/testing": 50.0},
]  # fmt: skip
"""Of steps 0 to 4: a validation before the first, a slow first one, two plain ones, one with validation."""


@pytest.fixture
def read(tmp_path):
    def read(*lines):
        (path := tmp_path / "metrics.jsonl").write_text("\n".join(lines))
        return replace(read_metrics(path), source="")

    return read


def row(step, **data):
    return json.dumps({"step": step, "data": data})


LINES = [*(row(step, **data) for step, data in enumerate(ROWS)), '{"step": 5, "da']


def test_steps_with_validation_and_the_first_one_are_left_out(read):
    found = read(*LINES)
    assert (found.steps, found.gen_s, found.step_s, found.rest_s) == (2, 70.0, 100.0, 30.0)
    assert (found.response_mean, found.response_max, found.clipped, found.prompt_mean) == (900.0, 4000.0, 0.01, 120.0)
    assert found.reward_s == 2.5 and found.tool_share is None


def test_a_byte_order_mark_and_separators_within_text_lose_no_step(read):
    named = LINES[2].replace('"data"', '"run": "a\u2028b\u0085c", "data"', 1)
    assert read("\ufeff" + LINES[1], named, *LINES[3:]) == read(*LINES)


def test_verls_console_says_the_same(read):
    def printed(data):
        return " - ".join(f"{k}:{np.float64(v)!r}" for k, v in data.items())

    log = [f"(TaskRunner pid=1) step:{i} - {printed(data)} - training/odd:nan" for i, data in enumerate(ROWS)]
    assert read("WARNING something - odd:thing", *log) == read(*LINES)


@pytest.mark.parametrize("prompt", [1e99, -1e9, float("nan")])
def test_numbers_that_no_run_has_are_left_out(prompt, read):
    agents = {f"timing_s/agent_loop/{k}/mean": v for k, v in (("tool_calls", -1.0), ("generate_sequences", 1.0))}
    found = read(row(1, **{**STEP, **agents, "prompt_length/mean": prompt}))
    assert found.tool_share is None and found.prompt_mean is None and found.gen_s == 80.0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no finished training step with timing_s/gen"),
        ("no metrics here", "holds no finished training step"),
        (row(1, **{"timing_s/gen": 1.0}), "holds no finished training step"),
        ('{"step": 1, "data": 5}', "holds no finished training step"),
        (row(1, **STEP | {"response_length/max": 0}), "holds no finished training step"),
        (row(2, **STEP, **{"tlt/saved_s": 10.0}), "is of a run with TLT, of which verl-tlt report tells"),
    ],
)
def test_a_file_without_a_step_of_stock_verl_is_refused(text, said, read):
    with pytest.raises(TLTError, match=said):
        read(text)
