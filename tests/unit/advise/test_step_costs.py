"""Step costs from data sheets beside what others measured on GPUs: the range of guesses holds it."""

import pytest

from verl_tlt.commands.advise.hardware import GPUS, find_shape, step_cost
from verl_tlt.commands.advise.scenario import SETTINGS
from verl_tlt.speculation.types import OFF

PAPER = "arxiv.org/abs/2511.16665, Table 2: tokens a second without drafts"
OTHERS = "github.com/tenstorrent/tt-inference-server/issues"
MEASURED = [
    ("Qwen2.5-7.6B", "H100", 1, 1e3 / 164.65, PAPER),
    ("Qwen2.5-7.6B", "A100", 1, 1e3 / 92.83, PAPER),
    ("Qwen2.5-7.6B", "B200", 1, 1e3 / 259.71, PAPER),
    ("Qwen2.5-72.7B", "H100", 2, 30.9, f"{OTHERS}/143"),
    ("Qwen3-1.7B", "A100", 1, 4.6, f"{OTHERS}/340"),
]
"""Policy with its exact size, GPUs, milliseconds of a step that decodes one request, and where that was said."""


@pytest.mark.parametrize(
    ("policy", "gpu", "devices", "measured_ms", "source"), MEASURED, ids=[row[0] + row[1] for row in MEASURED]
)
def test_a_step_of_one_request_is_in_the_range(policy, gpu, devices, measured_ms, source):
    shape, _ = find_shape(policy)
    low, likely, high = (
        1e3 * step_cost(shape, GPUS[gpu], devices, False, SETTINGS[name].step).seconds(1, 128, OFF)
        for name in ("low", "likely", "high")
    )
    assert low <= measured_ms <= high and likely == pytest.approx(measured_ms, rel=0.25), source


def test_a_pass_of_the_drafter_is_in_the_range():
    """The paper's Fig. 13, 32B on 4 H100, 16 tokens verified: each further pass adds 6.3 % of a plain step."""
    accept = {4: 4.63, 6: 5.71, 8: 6.34, 10: 6.80, 12: 7.02, 16: 7.25}
    speed = {4: 2.71, 6: 3.09, 8: 3.19, 10: 3.22, 12: 3.12, 16: 2.94}
    steps = {depth: accept[depth] / speed[depth] for depth in accept}  # in plain steps
    measured = (steps[16] - steps[4]) / 12
    shape, _ = find_shape("Qwen2.5-32.8B")
    shares = []
    for name in ("high", "likely", "low"):
        cost = step_cost(shape, GPUS["H100"], 4, False, SETTINGS[name].step)
        one_more = cost.seconds(1, 128, 7) - cost.seconds(1, 128, 6)
        shares.append(one_more / cost.seconds(1, 128, OFF))
    assert shares[0] < measured < shares[2], shares
