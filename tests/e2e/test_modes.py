"""verl's asynchronous trainer modes with TLT, each in one real run: what is idle there trains, and what is served is
what was published."""

import os
from pathlib import Path

import pytest
from grpo_run import BATCH, TLT, Run, grpo

from benchmarks.toy_job import CONSTANT
from tests.toy.assets import Assets
from verl_tlt.trace.events import TRAINER_DEVICE

pytestmark = [pytest.mark.e2e, pytest.mark.heavy]

LONGEST = 320
"""Tokens of a long response: idle time of several seconds beside those of 40 to 85."""

ASYNC = (
    "trainer.v1.sampler.custom_sampler.name=FastPollReplayBufferAsync",
    # Sampling waits for the prompts of the step before: a long response is decoded across two weight syncs.
    "trainer.v1.sampler.max_off_policy_threshold=2",
    "trainer.v1.sampler.max_off_policy_strategy=wait",
    # Smaller than elsewhere: how far older weights are from the actor's is what bounds the log-probs' difference.
    "actor_rollout_ref.actor.optim.lr=1e-6",
    f"{CONSTANT}.speculation.calibrate=false",
)


@pytest.fixture(scope="module")
def colocated(tmp_path_factory) -> Run:
    """Six steps with one prompt more in flight than a step takes; every second step waits for long responses that the
    step before began, and everything else is done by then. The later of them scores what the earlier taught. All long
    responses have the same replica, so the other one is idle."""
    base = tmp_path_factory.mktemp("colocated")
    return grpo(
        base / "run", base / "assets", 6, *TLT, *ASYNC,
        "trainer.v1.trainer_mode=colocate_async", "trainer.v1.colocate_async.num_warmup_batches=0.25",
        f"actor_rollout_ref.rollout.router_config_path={Assets.router}",
        long=lambda index: index % 16 in (0, 10), longest=LONGEST, SAVE_FREQ="-1",
    )  # fmt: skip


def separate_run(base: Path, *more: str) -> Run:
    """Four steps of two updates each: one device trains, another decodes."""
    engine = "actor_rollout_ref.rollout.checkpoint_engine"
    return grpo(
        base / "run", base / "assets", 4, *TLT, *ASYNC,
        "trainer.v1.trainer_mode=separate_async", "trainer.v1.separate_async.num_warmup_batches=1",
        "trainer.v1.separate_async.parameter_sync_step=2", f"actor_rollout_ref.actor.ppo_mini_batch_size={BATCH // 2}",
        # The second update of a step sees what the first one's weights did not write; the very first changes nothing.
        "actor_rollout_ref.actor.optim.lr_warmup_steps=2",
        "actor_rollout_ref.rollout.nnodes=1", "ray_kwargs.ray_init.num_gpus=2",
        f"{engine}.backend=file", f"{engine}.custom_backend_module=file_checkpoint_engine",
        "trainer.test_freq=2", "data.val_max_samples=4", *more,
        long=lambda index: index % 2 == 0, longest=LONGEST, SAVE_FREQ="-1", REPLICAS="1",
        PYTHONPATH=os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
    )  # fmt: skip


@pytest.fixture(scope="module")
def separate(tmp_path_factory) -> Run:
    """Validation uses both devices."""
    return separate_run(tmp_path_factory.mktemp("separate"))


@pytest.fixture(scope="module")
def apart(tmp_path_factory) -> Run:
    """No engine on the device that trains."""
    return separate_run(tmp_path_factory.mktemp("apart"), "actor_rollout_ref.hybrid_engine=False")


def assert_sound(run: Run, steps: int) -> None:
    """What every mode promises."""
    assert sorted(run.steps) == list(range(1, steps + 1))
    assert run.left == [], "processes outlived the run"
    for step, metrics in run.steps.items():
        assert metrics["tlt/errors"] == 0.0, step
        assert metrics["tlt/spot_failures"] == 0.0, step
        assert metrics["tlt/reload_failures"] == 0.0, step
        assert metrics["training/rollout_probs_diff_max"] < 0.02, step  # older weights wrote a part of it
        assert metrics["response_length/min"] >= 80.0, "a response was cut short"
    assert run.steps[steps]["tlt/drafter_version"] >= 1, "nothing was published"
    assert run.steps[1]["training/rollout_probs_diff_max"] < 1e-4
    assert [s for s in run.trace.sessions if s.steps > 0], "nothing was trained"
    assert all(reload.ok for reload in run.trace.reloads)


def test_colocated(colocated):
    assert_sound(colocated, 6)
    # The long response was begun in step 1 and is whole, although a weight sync interrupted it.
    assert colocated.steps[2]["response_length/max"] == LONGEST
    assert {s.step for s in colocated.trace.sessions} <= {2, 3, 4, 5, 6}


def test_colocated_idle_replica_trained_while_the_other_decoded(colocated):
    for session in [s for s in colocated.trace.sessions if s.steps > 0]:
        load = [x for x in colocated.trace.loads if x.step == session.step and x.t <= session.start][-1].inflight
        assert load.get(session.replica, 0) == 0
        assert any(n for name, n in load.items() if name != session.replica)


def test_separate(separate):
    assert_sound(separate, 4)
    # A standalone replica loses its drafter at every sync; the trainer's own wakes up for validation and has it too.
    own = {s.replica for s in separate.trace.sessions}
    assert {r.step for r in separate.trace.reloads if r.replica not in own} == {1, 2, 3, 4}
    validated = {step for step, metrics in separate.steps.items() if "val-core/toy_addition/acc/mean@1" in metrics}
    assert {r.step for r in separate.trace.reloads if r.replica in own} == validated == {2, 4}


def test_separate_trained_on_the_trainers_device_alone(separate):
    trained = {s.replica for s in separate.trace.sessions if s.steps > 0}
    served = {name for load in separate.trace.loads for name, n in load.inflight.items() if n}
    assert len(trained) == 1 and served - trained, "nobody trains on the standalone replica"


def test_separate_with_no_engine_on_the_trainers_device(apart):
    assert_sound(apart, 4)
    assert {s.replica for s in apart.trace.sessions} == {f"{TRAINER_DEVICE} 0"}
    served = {r.replica for r in apart.trace.reloads}
    assert len(served) == 1 and f"{TRAINER_DEVICE} 0" not in served
    assert {r.step for r in apart.trace.reloads} == {1, 2, 3, 4}
