"""What the watch knows of work still to come, by verl's own agent loops and replay buffer."""

import re
from types import SimpleNamespace

import pytest
import torch
from verl.trainer.ppo.v1 import replay_buffer
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

from demo.toy.assets import Assets
from verl_tlt.checks.recipe import compose
from verl_tlt.trainer.watch import BufferWatch, takes_turns

LOOPS, DEFAULT = f"agent.agent_loop_config_path={Assets.agent_loop}", "agent.default_agent_loop"


@pytest.fixture
def queue(monkeypatch):
    """What verl's queue holds: status and rewards of each group, by the prompt's uid."""
    groups = {}

    def kv_list():
        prompts = {uid: {"is_prompt": True, "global_steps": 1, "status": of[0]} for uid, of in groups.items()}
        return {"train": prompts | {f"{uid}_{i}_0": {} for uid, of in groups.items() for i in range(len(of[1]))}}

    def kv_batch_get(keys, **_):
        rows = (key.split("_") for key in keys)
        return {"rm_scores": [torch.tensor([groups[uid][1][int(i)]]) for uid, i, _ in rows]}

    def kv_clear(partition_id, keys):
        for key in keys:
            groups.pop(key, None)

    tq = SimpleNamespace(kv_list=kv_list, kv_batch_get=kv_batch_get, kv_clear=kv_clear)
    monkeypatch.setattr(replay_buffer, "tq", tq)
    return groups


def make_buffer(**settings):
    """verl's own, of synchronous sampling."""
    return ReplayBuffer("sync", None, None, "drop", None, poll_interval=0.0, **settings)


@pytest.mark.parametrize(
    ("settings", "row", "more"),
    [
        ([], {}, False),
        (["multi_turn.enable=True"], {}, True),
        ([f"{DEFAULT}=tool_agent"], {}, True),
        ([], {"agent_name": "tool_agent"}, True),
        (["+agent.agent_loop_manager_class=somebodys.Manager"], {}, True),
        ([LOOPS, f"{DEFAULT}=forced_length"], {}, False),
        ([LOOPS, f"{DEFAULT}=toy_tool_agent"], {}, True),
        ([LOOPS, f"{DEFAULT}=nowhere"], {}, True),
        (["agent.agent_loop_config_path=nowhere.yaml"], {}, True),
    ],
)
def test_an_agent_loop_may_send_more_turns_unless_it_is_verls_single_turn(queue, settings, row, more):
    queue["a"] = "running", []
    keys = [re.sub("(?=agent|multi_turn)", "actor_rollout_ref.rollout.", setting, count=1) for setting in settings]
    buffer = make_buffer()
    pending = BufferWatch(buffer, multi_turn=takes_turns(compose(keys, "ppo_trainer"), [row]), wanted=1)
    buffer._sync_metadata_from_transfer_queue()
    assert pending().more is more
