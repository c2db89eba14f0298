"""Run by a test, once for each of two ranks: a drafter's head is cut from a policy's, in vLLM's tensor parallelism.

Prints as JSON {"same": whether this rank holds its part of the wanted rows after each load that succeeded, "refused":
what it says of a file that the second rank does not have, and of one that the second rank cannot write}. Arguments:
rank, port.
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import save_file
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from verl_tlt.errors import DrafterError
from verl_tlt.vllm_worker.extension import OFFSETS, LiveDrafter

V, H, KEPT = 200, 8, 70  # vLLM pads both, and its ranks hold other rows of the one than of the other

if __name__ == "__main__":
    rank, port = map(int, sys.argv[1:])
    os.environ["VLLM_DIST_IDENT"] = str(port)  # names what the CPU ranks share
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(2, rank, f"tcp://127.0.0.1:{port}", rank, "gloo")
        initialize_model_parallel(2)
        random = torch.Generator().manual_seed(0)
        head, ids = torch.randn(V, H, generator=random), torch.randperm(V, generator=random)[:KEPT].sort().values
        policy, own, wanted = torch.nn.Module(), ParallelLMHead(KEPT, H), ParallelLMHead(KEPT, H)
        policy.lm_head = ParallelLMHead(V, H)
        policy.lm_head.weight_loader(policy.lm_head.weight, head)
        wanted.weight_loader(wanted.weight, head[ids])
        drafter, offsets = torch.nn.Module(), ids - torch.arange(KEPT)
        drafter.lm_head, drafter.model, drafter.config = own, torch.nn.Module(), SimpleNamespace(vocab_size=V)
        drafter.model.embed_tokens = None  # on another rank of a pipeline
        drafter.register_parameter(OFFSETS, torch.nn.Parameter(torch.zeros_like(offsets), requires_grad=False))
        drafter.load_weights = lambda tensors: drafter.get_parameter(OFFSETS).copy_(dict(tensors)["d2t"])
        live = LiveDrafter.__new__(LiveDrafter)
        live.model, live._policy, live._shards, live._config = drafter, policy, 2, VllmConfig()
        live._kept_buffers, live._own_buffers, live._finite = {}, (), None
        write, same, refused = drafter.load_weights, [], []

        def full(tensors):
            raise RuntimeError("out of memory")

        with tempfile.TemporaryDirectory() as directory:
            file = Path(directory) / "model.safetensors"
            save_file({"d2t": offsets}, file)
            for second, writes in ((file, write), (Path(directory) / "nowhere", write), (file, full), (file, write)):
                own.weight.data.zero_()
                drafter.load_weights = writes if rank == 1 else write
                try:
                    live.load(file if rank == 0 else second)
                    same.append(torch.equal(own.weight, wanted.weight))
                except (DrafterError, RuntimeError) as error:
                    refused.append(str(error).removeprefix(directory))
        print(json.dumps({"same": same, "refused": refused}), flush=True)
