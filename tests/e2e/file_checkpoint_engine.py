"""Weights from the trainer to standalone replicas through a file: what `separate_async` needs where there is no NCCL.

verl's own engines need accelerators; its `custom_backend_module` is the way to bring another one. The actor's first
rank writes all tensors to one file and then a mark; every replica waits for the mark.
"""

import asyncio
import os
import tempfile
from pathlib import Path

import torch
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry


@CheckpointEngineRegistry.register("file")
class FileCheckpointEngine(CheckpointEngine):
    def __init__(self, bucket_size: int, is_master: bool = False) -> None:
        self.is_master = is_master
        self.directory: Path | None = None

    def prepare(self):
        return tempfile.mkdtemp(prefix="weights-", dir="/dev/shm") if self.is_master else None

    @classmethod
    def build_topology(cls, actor_wg_world_size, rollout_world_size, metadata):
        return (
            {"directory": [metadata[0]] * actor_wg_world_size},
            {"directory": [metadata[0]] * rollout_world_size},
        )

    def init_process_group(self, directory: str) -> None:
        self.directory = Path(directory)

    def finalize(self) -> None:
        if self.is_master:
            for path in self.directory.iterdir():
                path.unlink()
            self.directory.rmdir()

    async def send_weights(self, weights, global_steps=None) -> None:
        # Every rank takes part in gathering; the first one keeps what was gathered.
        kept = {name: tensor.detach().cpu().clone() for name, tensor in weights if self.is_master}
        if self.is_master:
            torch.save(kept, self.directory / "weights.part")
            os.replace(self.directory / "weights.part", self.directory / "weights")

    async def receive_weights(self, global_steps=None):
        while not (self.directory / "weights").exists():
            await asyncio.sleep(0.05)
        for name, tensor in torch.load(self.directory / "weights").items():
            yield name, tensor
