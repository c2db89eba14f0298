"""From the actor to the buffer, through verl's worker group and Ray: what a rank hands over, and what arrives."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from actor import build_actor, free_port, make_batch, make_rows
from recorded import CONFIG, plan_of, ray_cluster

from tests.toy.assets import AUX_LAYERS
from verl_tlt.actor.worker import TLTActorWorker
from verl_tlt.drafter import VerifierWeights

pytestmark = pytest.mark.engine

ray = pytest.importorskip("ray")

LENGTHS = [(3, 21), (12, 4), (5, 40), (7, 1), (2, 33), (9, 16)]


class Worker(TLTActorWorker):
    """One rank that holds the toy's policy as `init_model` would leave it, without a rollout."""

    def __init__(self):
        self._rank = 0
        self.actor = build_actor(port=free_port())  # with a capture of its own, which nobody arms
        self.config = SimpleNamespace(rollout=SimpleNamespace(dtype="bfloat16"))

    def compute(self):
        """An old-log-prob forward after a weight sync."""
        for _ in self._tlt_verifier.tee(self.actor.engine.get_per_tensor_param()[0]):
            pass
        self._tlt_verifier.finish()
        self.actor.infer_batch(make_batch(make_rows(LENGTHS), 60, compute_loss=False))


@pytest.fixture(scope="module")
def group():
    with pytest.MonkeyPatch.context() as patch, ray_cluster(patch):
        from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

        pool = RayResourcePool([1], use_gpu=False, max_colocate_count=1)
        yield RayWorkerGroup(pool, RayClassWithInitArgs(ray.remote(Worker)))


def test_what_the_actor_captures_fills_the_spot_trainers_buffer(group):
    from verl_tlt.spot_trainer.worker import SpotTrainerWorker

    (ready,) = ray.get(group.tlt_setup(CONFIG, list(AUX_LAYERS), True))
    assert (ready.group, ready.refusal) == (0, None) and ready.node == ray.get_runtime_context().get_node_id()
    group.execute_all_sync("compute")
    (taken,) = ray.get(group.tlt_take(True))
    assert taken.errors == 0 and taken.seconds > 0 and taken.sync_seconds > 0
    wanted = VerifierWeights.from_policy_dir(plan_of().policy_dir)
    for name, array in vars(ray.get(taken.verifier_weights)).items():
        assert array.nbytes == 2 * getattr(wanted, name).numel(), f"{name} in 16 bits"
    said = torch.cat([ids[p:] for ids, p in make_rows(LENGTHS)])
    assert np.array_equal(taken.token_counts, torch.bincount(said, minlength=len(wanted.embed)).numpy())
    assert [shard.row for shard in ray.get(taken.shards)] == [0, 1, 2, 3, 4, 5]
    spot = ray.remote(SpotTrainerWorker).options(num_cpus=0).remote(plan_of(), {})
    stats = ray.get(spot.add.remote(1, [[taken.shards]], taken.verifier_weights, None), timeout=300)
    kept = ray.get(spot.__ray_call__.remote(lambda one: [len(i.sequence) for i in one.trainer.buffer._items]))
    assert (kept, stats.incomplete) == ([p + r for p, r in LENGTHS], 0)
    head = ray.get(spot.__ray_call__.remote(lambda one: one.trainer.model.verifier_lm_head.weight.detach().clone()))
    torch.testing.assert_close(head, wanted.lm_head.bfloat16().to(head.dtype), rtol=0, atol=0)
    (again,) = ray.get(group.tlt_take())
    assert (ray.get(again.shards), again.verifier_weights) == ([], None), "nothing is handed over twice"
    assert again.token_counts is None, "the trainer has them"
    ray.get(group.tlt_stop())
    with pytest.raises(ray.exceptions.RayTaskError, match="assert capture is not None"):
        ray.get(group.tlt_take())
