"""Run by a test, once for each of two ranks: a drafter's head is cut from a policy's, in vLLM's tensor parallelism.

Prints {"same": whether this rank holds its part of the wanted rows} as JSON. Arguments: rank, port.
"""

import json
import os
import sys
from types import SimpleNamespace

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from verl_tlt.vllm_worker.live_drafter import OFFSETS, LiveDrafter

V, H, KEPT = 200, 8, 70  # vLLM pads both, and its ranks hold other rows of the one than of the other

if __name__ == "__main__":
    rank, port = map(int, sys.argv[1:])
    os.environ["VLLM_DIST_IDENT"] = str(port)  # names what the CPU ranks share
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(2, rank, f"tcp://127.0.0.1:{port}", rank, "gloo")
        initialize_model_parallel(2)
        random = torch.Generator().manual_seed(0)
        head, ids = torch.randn(V, H, generator=random), torch.randperm(V, generator=random)[:KEPT].sort().values
        policy, own, wanted = ParallelLMHead(V, H), ParallelLMHead(KEPT, H), ParallelLMHead(KEPT, H)
        policy.weight_loader(policy.weight, head)
        wanted.weight_loader(wanted.weight, head[ids])
        drafter = torch.nn.Module()
        drafter.lm_head = own
        drafter.register_parameter(OFFSETS, torch.nn.Parameter(ids - torch.arange(KEPT), requires_grad=False))
        live = LiveDrafter.__new__(LiveDrafter)
        live.model, live._policy, live._shards = drafter, SimpleNamespace(lm_head=policy), 2
        live._cut_head()
        print(json.dumps({"same": torch.equal(own.weight, wanted.weight)}), flush=True)
