"""GRPO of the real policy with two replicas: a kill after a saved step, and what the resumed run goes on with."""

import json
from dataclasses import replace

import pytest

from benchmarks.real_policy.job import real_overrides
from benchmarks.resume import held_by, saved
from benchmarks.toy_job import CONSTANT, FORCED, Job, force_lengths
from tests.toy.assets import Assets
from verl_tlt.commands.report.reader import read_trace

pytestmark = pytest.mark.timeout(3000)
KILLED, STEPS = 3, 5
"""The resumed run has nothing to train on in its first step, merges in its second, and publishes in its third."""
OVERRIDES = (
    FORCED,
    f"actor_rollout_ref.rollout.router_config_path={Assets.router}",
    "+ray_kwargs.ray_init.address=local",
    "data.train_batch_size=2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "tlt.speculation.policy=fixed",
    "tlt.speculation.fixed=2",
    f"{CONSTANT}.speculation.calibrate=false",
    "tlt.drafter.vocab=8192",
    f"{CONSTANT}.buffer.min_tokens=100",
    "tlt.gate.enable=false",  # so few prompts: none of them is held out
    "tlt.spot.cold_start_s=0",
)


def lengths(index: int) -> list[int]:
    """One of a prompt's responses is long, on the first replica: in every step the second one runs dry."""
    return [96 if sample < 2 and (index + sample) % 2 == 0 else 16 for sample in range(4)]


@pytest.fixture(scope="module")
def run(assets, tmp_path_factory):
    """(trace, metrics by step, what the resumed job said, what was saved): killed in a step, then resumed."""
    folder, metrics = tmp_path_factory.mktemp("real"), {}
    force_lengths(assets.train, folder / "train.parquet", lengths)
    assets, out = replace(assets, train=folder / "train.parquet"), folder / "run"
    options = (*real_overrides(assets), *OVERRIDES)
    for number, until in enumerate((KILLED, None)):
        file = out / f"metrics-{number}.jsonl"
        environment = {"SAVE_FREQ": "1", "RESUME": "auto", "TLT": "1", "VERL_FILE_LOGGER_PATH": str(file)}
        job = Job(out, assets, STEPS, options, **environment)
        held = saved(out / "checkpoints") if until is None else None
        try:
            for event in job.events(900.0):
                job.processes()
                if until and getattr(event, "step", 0) == until:
                    break
            died = job.tree.process.poll()
        finally:
            said = job.said()
            job.kill()
        assert (died == 0) if until is None else (died is None), said[-2000:]
        if file.exists():
            metrics |= {row["step"]: row["data"] for row in map(json.loads, file.read_text().splitlines())}
    return read_trace(out / "trace"), metrics, said, held


def test_it_went_on_after_the_kill_with_what_was_saved(run):
    _, metrics, said, held = run
    assert sorted(metrics)[-1] == STEPS and held is not None
    assert held_by(said) == [held.optimizer_steps]


def test_a_bubble_trained_the_drafter_and_it_was_published(run):
    trace, _, _, _ = run
    assert any(session.steps > 0 for session in trace.sessions)
    assert any(publish.version > 0 for publish in trace.publishes)
    served = {reload.version for reload in trace.reloads if reload.ok}
    assert max(served) == max(publish.version for publish in trace.publishes)


def test_the_policy_is_trained_on_what_was_sampled(run):
    _, metrics, _, _ = run
    last = metrics[STEPS]
    assert last["tlt/errors"] == 0
    assert last["training/rollout_probs_diff_mean"] < 0.01
