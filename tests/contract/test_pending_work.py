"""What the watch knows of work still to come, by verl's own agent loops and replay buffer."""

import re
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from verl.trainer.ppo.v1 import replay_buffer
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

from tests.toy.assets import Assets
from verl_tlt.checks.recipe import compose
from verl_tlt.trainer.pending_work import BufferWatch, takes_turns

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


class Rows(list):
    """The part of verl's `RLHFDataset` that is asked: rows, and the frame they are read from."""

    def __init__(self, rows):
        super().__init__(rows)
        self.dataframe = Dataset.from_list(rows)


def make_buffer(**settings):
    """verl's own, of synchronous sampling."""
    return ReplayBuffer("sync", None, None, "drop", None, poll_interval=0.0, **settings)


@pytest.mark.parametrize(
    ("settings", "named", "more"),
    [
        ([], None, False),
        (["multi_turn.enable=True"], None, True),
        ([f"{DEFAULT}=tool_agent"], None, True),
        ([f"{DEFAULT}=tool_agent"], ["single_turn_agent"], False),
        ([], ["single_turn_agent", "tool_agent"], True),
        ([], ["nowhere"], True),
        (["+agent.agent_loop_manager_class=somebodys.Manager"], None, True),
        ([LOOPS, f"{DEFAULT}=forced_length"], None, False),
        ([LOOPS, f"{DEFAULT}=toy_tool_agent"], None, True),
    ],
)
def test_an_agent_loop_may_send_more_turns_unless_it_is_verls_single_turn(queue, settings, named, more):
    queue["a"] = "running", []
    keys = [re.sub("(?=agent|multi_turn)", "actor_rollout_ref.rollout.", setting, count=1) for setting in settings]
    buffer = make_buffer()
    rows = Rows([{"prompt": "p"} | ({"agent_name": name} if name else {}) for name in named or [None]])
    pending = BufferWatch(buffer, multi_turn=takes_turns(compose(keys, "ppo_trainer"), rows), wanted=1)
    buffer._sync_metadata_from_transfer_queue()
    assert pending().more is more


@pytest.mark.parametrize(("metric", "waits"), [("reward", [True, False]), (None, [])], ids=["filtered", "failed"])
def test_verl_asks_for_more_groups_only_while_the_watch_expects_it(queue, metric, waits):
    """Right after its look verl finds that one group has no signal, or failed, and asks for others in its place."""
    asked, waited = [], []
    queue |= {"a": ("finished", [0.0, 1.0]), "b": ("finished", [1.0, 1.0]) if metric else ("failure", [])}
    if metric:
        queue["d"] = "running", []

    def refill(_count):
        asked.append(pending().more)
        queue["c"] = "finished", [0.0, 1.0]

    def wait(_partition, now):
        waited.append(pending().more)
        if len(waited) == 2:
            queue["d"] = "finished", [0.0, 1.0]
        return now

    buffer = make_buffer(
        refill_fn=refill, filter_groups_metric=metric, train_batch_size=4, gen_batch_size=1,
        sync_refill_failed_groups=True,
    )  # fmt: skip
    buffer._wait_for_next_poll = wait
    pending = BufferWatch(buffer, multi_turn=False, wanted=2)
    buffer.sample(1, "train", 2)
    assert (asked, waited, pending().more) == ([True], waits, False)
