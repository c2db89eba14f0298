"""A real server whose drafter's file is cut short before a reload, and whose engine is killed in the next one."""

import asyncio
import time
from dataclasses import replace

import pytest
from recorded import ray_cluster
from rollout_servers import ServedPolicy

from benchmarks.faults.plan import ENGINE_KILLED, FAULTS
from benchmarks.faults.run import arm, fired
from verl_tlt.drafter import VerifierWeights, build_drafter, refresh_verifier_weights, save_drafter

pytestmark = pytest.mark.engine

TRUNCATED = replace(next(fault for fault in FAULTS if fault.action == "truncate"), step=1)
KILLED = replace(ENGINE_KILLED, step=2)
SOON_S = 120.0
"""Seconds for calls that once waited forever; they take one or two on a free machine."""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server with its engine, and a function that has a fault strike the next reload."""
    with pytest.MonkeyPatch.context() as patch, ray_cluster(patch):
        import ray

        from tests.toy.assets import build_assets

        root = tmp_path_factory.mktemp("dead")
        assets = build_assets(root / "assets", width="small", train_rows=4, val_rows=4)
        drafter = build_drafter(assets.policy, aux_layers=assets.aux_layers)
        refresh_verifier_weights(drafter, VerifierWeights.from_policy_dir(assets.policy))
        served = ServedPolicy(assets, {"path": str(save_drafter(drafter, root / "drafter", {}))})
        store, armed = served.store(served.drafter), root / "armed"
        armed.mkdir()
        launched = served.server(0, arm(armed, (TRUNCATED, KILLED)))

        def begin(fault):
            (armed / "step").write_text(str(fault.step))
            return lambda: fired(armed)

        ray.get(launched.launch_server.remote(), timeout=600)
        ray.get(launched.clear_kv_cache.remote(), timeout=120)
        yield launched, begin
        for actor in (launched, store):
            ray.kill(actor)


def test_a_file_that_is_cut_short_costs_one_rollouts_drafts(server):
    import ray

    server, begin = server
    assert ray.get(server.tlt_status.remote(), timeout=60).ok
    struck = begin(TRUNCATED)
    ray.get(server.clear_kv_cache.remote(), timeout=SOON_S)
    status = ray.get(server.tlt_status.remote(), timeout=60)
    assert len(struck()) == 1
    assert not status.ok and not status.drafting and TRUNCATED.log in status.error
    sampling = {"max_tokens": 8, "ignore_eos": True}
    output = asyncio.run(_generated(server, sampling))
    assert len(output.token_ids) == 8, "the engine lives"
    ray.get(server.clear_kv_cache.remote(), timeout=SOON_S)
    assert ray.get(server.tlt_status.remote(), timeout=60).ok, "what lay there was written again"


async def _generated(server, sampling):
    return await server.generate.remote([11, 12, 13, 14], dict(sampling), "x")


def test_an_engine_that_is_killed_while_it_reloads_ends_the_weight_sync_in_one_sentence(server):
    import ray

    server, begin = server
    struck, start = begin(KILLED), time.monotonic()
    with pytest.raises(ray.exceptions.RayTaskError, match=KILLED.log):
        ray.get(server.clear_kv_cache.remote(), timeout=SOON_S)
    assert len(struck()) == 2
    # What verl and the trainer may ask next.
    for call in (server.wake_up, server.sleep, server.tlt_try_sleep, server.clear_kv_cache, server.resume_generation):
        with pytest.raises(ray.exceptions.RayTaskError):
            ray.get(call.remote(), timeout=SOON_S)
    assert ray.get(server.tlt_stats.remote(), timeout=SOON_S).failure
    ray.get(server.tlt_status.remote(), timeout=SOON_S)
    ray.get(server.tlt_close.remote(), timeout=SOON_S)
    assert time.monotonic() - start < 4 * SOON_S
