"""Two of the recipes, unchanged and scaled down, really run: part of `make recipes-check`, which runs all of them.

The one with a critic is also audited in its second step, and switched off from outside after it.
"""

import importlib.util
import os
import sys
import threading
from pathlib import Path

import pytest

from verl_tlt.trainer.live import write_switch

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(
        not os.environ.get("TLT_RUN_RECIPES"), reason="takes minutes each: `make recipes-check` runs it"
    ),
]

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.fixture(scope="module")
def check():
    """recipes/check.py, which is no package."""
    spec = importlib.util.spec_from_file_location("recipes_check", RECIPES / "check.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def switch_off_after(steps, out, done):
    """Switch speculation off once so many steps are logged: the next one is running by then, the one after obeys."""
    metrics = out / "metrics.jsonl"
    while not done.wait(0.2):
        if metrics.exists() and metrics.read_text().count("\n") >= steps:
            write_switch(out / "trace", speculation=False, spot=False)
            return


def test_conversations_with_a_tool(check, tmp_path):
    steps = check.run(check.RECIPES["grpo_tools_qwen3_4b"], tmp_path / "tools", steps=2)
    assert all(step["num_turns/mean"] > 2 for step in steps), "nobody called the tool"
    assert any(step["tlt/draft_length_frac_2"] > 0.5 for step in steps), "nothing was drafted"


def test_a_critic_an_audit_and_the_switch(check, tmp_path):
    out, done = tmp_path / "ppo", threading.Event()
    switching = threading.Thread(target=switch_off_after, args=(2, out, done))
    switching.start()
    try:
        steps = check.run(
            check.RECIPES["ppo_qwen3_8b"], out, steps=4, extra=["tlt.speculation.audit_every=2"], timeout_s=1000
        )
    finally:
        done.set()
        switching.join()
    off = [step["tlt/drafter_off_frac"] for step in steps]
    assert off[0] == 0.0 == off[2], off
    assert 0.0 < off[1] < 1.0, "in the second step one of the two replicas decodes without the drafter"
    assert off[3] == 1.0, "switched off from the fourth step on"
    assert {step.get("tlt/audit_saved_frac") is None for i, step in enumerate(steps) if i != 1} == {True}
    assert "switched from outside" in (out / "log").read_text()
