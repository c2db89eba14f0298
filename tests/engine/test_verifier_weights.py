"""The policy's verifier weights out of verl's real weight sync, LoRA or not: what streams past, under whichever name.

Whoever receives the weights is a stand-in that reads them; in a run that is the process around vLLM.
"""

import asyncio
import gc
from types import SimpleNamespace

import pytest
import torch
from actor import build_actor, free_port
from rank_cases import build_policies

from verl_tlt.actor.verifier_weights import VERIFIER_PARTS, VerifierCapture
from verl_tlt.actor.worker import TLTActorWorker
from verl_tlt.drafter import VerifierWeights, from_numpy16

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("verifier")
    build_policies(root)
    return root


class Receiver:
    """Reads what is sent, as a rollout does before it answers."""

    def __init__(self):
        self.names = []

    async def update_weights(self, weights, **_settings):
        self.names.append([name for name, _ in weights])


@pytest.fixture
def sync(root):
    """`sync(**model settings)`: what was captured of two weight syncs, and the names that the rollout received."""

    def run(**model):
        actor = build_actor(port=free_port(), policy=root / "qwen3", model=model)
        worker = object.__new__(TLTActorWorker)
        worker.actor, worker.rollout = actor, Receiver()
        settings = {"free_cache_engine": False, "checkpoint_engine": SimpleNamespace(backend="naive"), "name": "vllm"}
        worker.config = SimpleNamespace(rollout=Settings(settings))
        worker.peft_merge = bool(model.get("lora", {}).get("merge"))
        worker.layered_summon = worker.base_sync_done = False
        worker._tlt_verifier = capture = VerifierCapture(torch.bfloat16, copied)
        taken = []
        for _ in range(2):
            asyncio.run(worker.update_weights(global_steps=0))
            assert "get_per_tensor_param" not in vars(actor.engine)
            taken.append(capture.take())
        return taken, worker.rollout.names

    yield run
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    gc.collect()


def copied(arrays):
    """What the object store does: by the next sync the arrays are other ones."""
    return {part: from_numpy16(getattr(arrays, part).copy()) for part in VERIFIER_PARTS}


class Settings(dict):
    """verl's config node: attributes and `get`."""

    __getattr__ = dict.__getitem__


LORA = {"lora_rank": 4, "lora_alpha": 8}


@pytest.mark.parametrize(
    ("model", "syncs"),
    [
        pytest.param({}, 2, id="no lora"),
        pytest.param(LORA, 0, id="lora"),
        pytest.param({**LORA, "lora": {"merge": True}}, 2, id="lora merged"),
    ],
)
def test_verifier_weights_are_the_policys(sync, root, model, syncs):
    """Adapters alone do not change them: the spot trainer then reads them from the policy's files."""
    taken, names = sync(**model)
    weights = [found.reference for found in taken if found.reference is not None]
    assert len(weights) == syncs and all(found.errors == 0 for found in taken)
    if not syncs:
        assert all("lora_" in name for name in names[-1]) and not all("lora_" in name for name in names[0])
        return
    wanted = VerifierWeights.from_policy_dir(root / "qwen3")
    for part in VERIFIER_PARTS:
        torch.testing.assert_close(weights[0][part], getattr(wanted, part).bfloat16(), rtol=0, atol=0)
    assert taken[0].seconds > 0
