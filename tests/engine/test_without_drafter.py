"""Drafters that an engine cannot start with, or dies of: it is started once more without one, and serves.

Two real servers with real engines. What the checks would refuse is put into the drafters behind them.
"""

import asyncio
import json
from dataclasses import replace

import pytest
import torch
from recorded import ray_cluster
from rollout_servers import ServedPolicy
from safetensors.torch import load, save

from verl_tlt.drafter import VerifierWeights, build_drafter, refresh_verifier_weights, save_drafter

pytestmark = pytest.mark.engine

PARAMS = {"max_tokens": 12, "ignore_eos": True, "temperature": 0.0}


def unservable(drafter):
    """With a config that vLLM refuses."""
    return replace(drafter, config=json.dumps(json.loads(drafter.config) | {"speculators_model_type": "unheard of"}))


def deadly(drafter):
    """With a draft vocabulary that leads out of the policy's: the first draft ends the engine."""
    tensors = load(drafter.weights)
    tensors["d2t"][-1] = 10**6
    return replace(drafter, weights=save(tensors))


class Store:
    """In place of the run's: each server that starts is given another drafter."""

    def __init__(self, drafters):
        self.drafters = drafters

    def latest(self):
        return self.drafters.pop()


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """Two that have started, of which one was given the deadly drafter."""
    with pytest.MonkeyPatch.context() as patch, ray_cluster(patch):
        import ray

        from demo.toy.assets import build_assets

        root = tmp_path_factory.mktemp("broken")
        assets = build_assets(root / "assets", width="small", train_rows=4, val_rows=4)
        drafter = build_drafter(assets.policy, aux_layers=assets.aux_layers, draft_ids=torch.arange(8, 40))
        refresh_verifier_weights(drafter, VerifierWeights.from_policy_dir(assets.policy))
        served = ServedPolicy(assets, {"path": str(save_drafter(drafter, root / "drafter", {}))})
        store = served.store([unservable(served.drafter), deadly(served.drafter)], Store)
        launched = [served.server(rank) for rank in range(2)]
        ray.get([server.launch_server.remote() for server in launched], timeout=300)
        yield launched
        for actor in (*launched, store):
            ray.kill(actor)


def test_engines_go_on_without_the_drafter_they_cannot_have(servers):
    import ray

    def statuses():
        return ray.get([server.tlt_status.remote() for server in servers], timeout=60)

    started = [status.gave_up for status in statuses()]
    assert sorted(started) == [False, True]
    assert all(not costs.points for costs in ray.get([s.tlt_calibrate.remote() for s in servers], timeout=300))
    for gave_up, status in zip(started, statuses(), strict=True):
        assert status.gave_up and not status.ok and not status.drafting
        assert ("does not start with" if gave_up else "died of") in status.error
        assert status.weightless == (not gave_up)

    async def served():
        return await asyncio.gather(*(s.generate.remote([11, 12, 13, 14], dict(PARAMS), "x") for s in servers))

    answers = asyncio.run(asyncio.wait_for(served(), 300))
    assert len(answers[0].token_ids) == 12 and answers[0].token_ids == answers[1].token_ids

    # What the trainer calls in every step has an answer.
    ray.get([s.tlt_disable_drafting.remote(False, True) for s in servers])
    assert all(stats.num_drafts == 0 for stats in ray.get([s.tlt_stats.remote() for s in servers]))
    ray.get([s.clear_kv_cache.remote() for s in servers], timeout=60)  # a weight sync has ended
    assert all(status.gave_up and not status.ok and not status.weightless for status in statuses())
