"""Real spot workers in Ray: they learn, stop, merge, judge, publish and resume."""

import asyncio
import os
import time

import numpy as np
import psutil
import pytest
import torch
from recorded import (
    as_shards,
    begin_anew,
    optimizer_steps,
    ray_cluster,
    record,
    score,
    score_alone,
    set_epochs,
    unmerged,
    worker_arguments,
)
from safetensors.torch import load

from verl_tlt.drafter import load_training_state
from verl_tlt.messages.training import DrafterProvenance
from verl_tlt.spot_worker.merge import start_merge
from verl_tlt.spot_worker.worker import NOSET, SpotWorker
from verl_tlt.trainer.servers import DrafterStore

pytestmark = pytest.mark.engine

ray = pytest.importorskip("ray")


@pytest.fixture(scope="module")
def arguments():
    return worker_arguments()


@pytest.fixture(scope="module")
def actors(arguments):
    """Two workers with sequences of their own."""
    with pytest.MonkeyPatch.context() as patch, ray_cluster(patch):
        sequences, weights = record(72, seed=0)
        actors = [ray.remote(SpotWorker).options(num_cpus=0).remote(name, **arguments) for name in ("a", "b")]
        shares = [sequences[::2], sequences[1::2]]
        # Each replica has two ranks, and each rank's capture is an object of its own.
        adds = [
            actor.add.remote(1, [[ray.put(as_shards(share[:20]))], [ray.put(as_shards(share[20:]))]], ray.put(weights))
            for actor, share in zip(actors, shares, strict=True)
        ]
        for stats, share in zip(ray.get(adds, timeout=300), shares, strict=True):
            assert (stats.sequences, stats.incomplete) == (len(share), 0), "a rank's capture was left out"
            assert stats.tokens - stats.train_tokens > 300
        yield actors


def test_it_has_a_device_of_its_own_where_ray_shows_every_process_all_of_them(actors, arguments):
    lent = {"num_gpus": 1, "runtime_env": {"env_vars": {NOSET: "1", "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}}}

    def device(worker=None):
        return os.environ["CUDA_VISIBLE_DEVICES"], *ray.get_runtime_context().get_accelerator_ids()["GPU"]

    taken = ray.remote(Holder).options(**lent).remote()
    spot = ray.remote(SpotWorker).options(num_cpus=0, **lent).remote("c", **arguments)
    (shown, lent_to_it), other = get(spot.__ray_call__.remote(device), taken.__ray_call__.remote(device))
    assert shown == lent_to_it != other[1]
    for actor in (spot, taken):
        ray.kill(actor)


def test_what_was_tuned_once_on_a_node_stays_tuned(actors):
    """For one that replaces another: trying every tile of the loss's kernels would delay a stop."""

    def kept(worker):
        fused = pytest.importorskip("speculators.losses.fused")
        return fused.loss_forward_kernel.cache_results, fused.loss_backward_kernel.cache_results

    assert get(actors[0].__ray_call__.remote(kept)) == (True, True)


class Holder:
    """Has a device, and nothing else to do."""


def test_it_listens_at_the_one_port_that_ray_opens_for_every_actor(actors):
    """On all interfaces. Nothing of ours listens, nor does anything that we import."""
    plain = ray.remote(Holder).options(num_cpus=0).remote()
    store = ray.remote(DrafterStore).options(num_cpus=0).remote(None)
    pids = get(*[a.__ray_call__.remote(lambda _: os.getpid()) for a in (plain, store, *actors)])
    ports = [[c.laddr.ip for c in psutil.Process(pid).net_connections("tcp") if c.status == "LISTEN"] for pid in pids]
    assert len(ports[0]) == 1 and ports == [ports[0]] * len(pids), "as for a plain actor"
    for actor in (plain, store):
        ray.kill(actor)


@pytest.fixture
def pair(actors):
    ray.get([a.__ray_call__.remote(begin_anew) for a in actors])
    return actors


def get(*references):
    results = ray.get(list(references), timeout=300)
    return results if len(results) > 1 else results[0]


def merge(pair):
    """What the trainer does with two sessions."""
    facts, slices = start_merge(pair)
    get(*[a.adopt.remote(*slices) for a in pair])
    return get(facts[0])


def same(left, right):
    return left.keys() == right.keys() and all(np.array_equal(left[name], right[name]) for name in left)


def test_training_raises_held_out_acceptance_and_the_better_drafter_is_what_is_exported(pair):
    get(pair[0].__ray_call__.remote(set_epochs, 2.5))
    first, _ = get(*[a.train.remote() for a in pair])
    assert first.outcome == "exhausted" and first.steps >= 10 and first.skipped == 0
    assert first.epochs == pytest.approx(2.5, abs=0.2)
    get(pair[0].train.remote())
    assert merge(pair).included == ("a", "b")
    ours, theirs = get(*[a.versions.remote() for a in pair])
    assert same(ours.candidate, theirs.candidate)
    for steps, tokens, change in get(*[a.__ray_call__.remote(unmerged) for a in pair]):
        assert steps == tokens == 0 and not any(delta.any() for delta in change.values())
    tau = get(pair[0].__ray_call__.remote(score)).taus()
    assert tau["candidate"] > tau["served"] + 0.2 and tau["served"] == tau["initial"]
    get(pair[0].train.remote())  # ahead of the agreed version
    file = get(pair[0].export.remote(7, "bfloat16", [0.5, 0.25]))
    tensors = load(file.weights)
    assert (file.version, file.acceptance) == (7, (0.5, 0.25))
    for name, value in get(pair[0].versions.remote()).candidate.items():
        assert tensors[name].dtype == torch.bfloat16
        np.testing.assert_allclose(tensors[name].float().numpy(), value, rtol=2**-8)
    get(*[a.mark_published.remote() for a in pair])
    published = get(pair[0].versions.remote())
    get(pair[0].revert.remote("initial"))
    assert same(get(pair[0].versions.remote()).candidate, published.initial)
    assert get(pair[0].__ray_call__.remote(unmerged))[0] == 0


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="runs on Linux, whose scheduling class it is about")
def test_on_a_cpu_a_session_gets_only_the_time_that_engines_leave(pair):
    def classes(worker):
        return worker._session.submit(os.sched_getscheduler, 0).result(), os.sched_getscheduler(0)

    session, calls = get(pair[0].__ray_call__.remote(classes))
    assert session == os.SCHED_IDLE
    assert calls != os.SCHED_IDLE  # `stop` is answered at once


def test_a_stop_costs_one_micro_batch(pair):
    get(pair[0].__ray_call__.remote(set_epochs, 1e9))
    running = pair[0].train.remote()
    time.sleep(1.5)
    assert not ray.wait([running], timeout=0)[0]
    start = time.time()
    get(pair[0].stop.remote())
    answered = time.time() - start
    result = get(running)
    ended = time.time() - start
    assert result.outcome == "stopped" and result.steps > 0
    micro_batch = result.seconds / result.steps
    assert answered < micro_batch + 0.5, "the stop itself waited"
    assert ended < 3 * micro_batch + 0.3  # one micro-batch and 100 ms, with room for a loaded machine


def test_a_checkpoint_continues_candidate_optimizer_and_served(pair, tmp_path):
    get(pair[0].train.remote())
    merge(pair)
    get(pair[0].mark_published.remote())
    trained = get(pair[0].train.remote())
    *_, change = get(pair[0].__ray_call__.remote(unmerged))
    agreed = get(pair[0].versions.remote())
    # The gate may be at work meanwhile; while it scores, the model holds other parameters.
    get(pair[0].__ray_call__.remote(score_alone))
    scoring = pair[0].train.remote()
    directory = tmp_path / "global_step_3" / "tlt_drafter"
    facts = DrafterProvenance("policy", "data", "hass", 1.0, 2, 3, (0.5, 0.4, 0.3), 1234)
    assert get(pair[0].save.remote(str(directory), facts), scoring)[1].scores is not None
    worker = SpotWorker("a", **worker_arguments(resume_from=directory.parent))
    assert same(worker.learner.versions.served, agreed.served)
    assert asyncio.run(worker.resume(str(directory)))
    assert optimizer_steps(worker) == get(pair[0].__ray_call__.remote(optimizer_steps))
    assert worker.learner.trainer.steps >= trained.steps
    for name, base in agreed.candidate.items():
        np.testing.assert_allclose(worker.learner.versions.candidate[name], base + change[name], atol=1e-6)
    assert load_training_state(tmp_path) is None
    assert not asyncio.run(worker.resume(str(tmp_path)))


def test_a_worker_without_verifier_weights_or_data_does_not_train(arguments):
    worker = SpotWorker("new", **arguments)
    assert asyncio.run(worker.train()).steps == 0
    sequences, weights = record(6, seed=1)
    worker.learner.add(1, sequences, None)
    assert asyncio.run(worker.train()).steps == 0
    worker.learner.add(2, [], weights)
    assert asyncio.run(worker.train()).steps > 0
