"""The same rollout in every run, whatever happens in it: what decides an update is recorded once and replayed.

Engines decode as ever, so that every part of TLT works as ever; but what they sampled depends on which requests share a
batch, and is put aside: the first run writes each response to a file, later ones train on that. Together with an order
of the batch that does not depend on who finished first, two runs' updates can then be compared to the bit.
"""

import json
import os
from pathlib import Path
from typing import Any

import transfer_queue as tq
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput

from tests.toy.agent import ForcedLengthAgentLoop
from tests.toy.sampler import FastPollReplayBuffer

DIRECTORY = "TLT_FAULTS_RECORDED"
"""Environment variable: where the responses are."""


class ReplayAgentLoop(ForcedLengthAgentLoop):
    """Responses of forced length, made by the engines and replaced by the recorded ones."""

    async def run(self, sampling_params: dict[str, Any], priority: int = 0, **kwargs: Any) -> AgentLoopOutput:
        output = await super().run(sampling_params, priority=priority, **kwargs)
        path = Path(os.environ[DIRECTORY]) / f"{kwargs['extra_info']['index']}-{kwargs['session_id']}.json"
        if not path.exists():
            scratch = path.with_suffix(f".{os.getpid()}")
            scratch.write_text(json.dumps([output.response_ids, output.response_logprobs]))
            scratch.replace(path)
        ids, logprobs = json.loads(path.read_text())
        if len(ids) != len(output.response_ids):
            raise ValueError(f"{path} holds {len(ids)} tokens, and {len(output.response_ids)} were decoded.")
        return output.model_copy(update={"response_ids": ids, "response_logprobs": logprobs})


class OrderedReplayBuffer(FastPollReplayBuffer):
    """A batch in the order of its prompts; verl's own is that of random ids."""

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[Any, dict[str, Any]]:
        batch, metrics = super().sample(global_steps, partition_id, batch_size)
        index = tq.kv_batch_get(keys=batch.keys, partition_id=partition_id, select_fields=["index"])["index"]
        sample = [key.split("_")[1:] for key in batch.keys]
        batch.reorder(sorted(range(len(batch.keys)), key=lambda i: (int(index[i]), *map(int, sample[i]))))
        return batch, metrics
