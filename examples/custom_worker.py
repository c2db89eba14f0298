"""A verl worker of your own that trains the drafter inside its own actor, with `verl_tlt.drafter` alone.

    python examples/custom_worker.py POLICY_DIRECTORY

The worker sees what any verl worker sees: a `DataProto` of left-padded prompts and right-padded responses. It runs its
policy over them, learns, and saves a drafter that stock vLLM serves. (Your worker can capture hidden states in a
forward pass that it runs anyway, as `verl_tlt/actor/hidden_states.py` does.)
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from verl import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

from verl_tlt.drafter import (
    DrafterTrainer,
    PolicyStates,
    Text,
    VerifierWeights,
    accept_length,
    acceptance,
    batches,
    build_drafter,
    load_policy,
    refresh_verifier_weights,
    save_drafter,
    train_until,
)


class DrafterWorker(Worker):
    """Holds a policy and its drafter.

    Args:
        policy_dir: the policy, a Hugging Face directory.
        batch_tokens: rows of a packed micro-batch.
    """

    def __init__(self, policy_dir: str, batch_tokens: int = 512) -> None:
        super().__init__()
        self.policy_dir, self.batch_tokens = policy_dir, batch_tokens

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the policy and build a drafter with a random head."""
        device = "cuda" if torch.cuda.is_available() else "cpu"
        drafter = build_drafter(self.policy_dir, device=device)
        refresh_verifier_weights(
            drafter, VerifierWeights.from_policy_dir(self.policy_dir)
        )  # again after every policy update
        self.states = PolicyStates(load_policy(self.policy_dir, device), drafter.target_layer_ids)
        self.trainer = DrafterTrainer(drafter, ttt_steps=3)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def learn(self, data: DataProto) -> DataProto:
        """Learn from rollouts once; every row comes back with the accept length reached on its share of the data.

        Args:
            data: `input_ids` and `attention_mask` [B, P + R], `responses` [B, R].
        """
        sequences = self.states([self._text(row) for row in data])
        summary = train_until(self.trainer, batches(sequences, self.batch_tokens), lambda: False)
        tau = accept_length(acceptance(self.trainer.model, sequences, max_draft=3))
        shape = (len(data),)
        return DataProto.from_single_dict(
            {"loss": torch.full(shape, summary.loss), "accept_length": torch.full(shape, tau)}
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save(self, directory: str) -> str:
        """Write the drafter, servable with `--speculative-config`; all ranks hold one of their own, rank 0 writes."""
        if self.rank == 0:
            save_drafter(self.trainer.model, directory, {"policy": self.policy_dir, "steps": self.trainer.steps})
        return directory

    def _text(self, row: object) -> Text:
        """One row without its padding on either side: positions restart at the first real token."""
        batch = row.batch  # type: ignore[attr-defined]
        real = batch["attention_mask"].bool()
        response = int(real[-len(batch["responses"]) :].sum())
        tokens = batch["input_ids"][real].tolist()
        return Text(tuple(tokens), len(tokens) - response)


def start(policy_dir: str, workers: int = 1) -> RayWorkerGroup:
    """A worker group of verl's, one worker per accelerator or per CPU slot."""
    import ray

    pool = RayResourcePool([workers], use_gpu=torch.cuda.is_available(), max_colocate_count=1)
    group = RayWorkerGroup(pool, RayClassWithInitArgs(ray.remote(DrafterWorker), policy_dir=policy_dir))
    group.init_model()
    return group


def made_up_rollouts(vocabulary: int, count: int = 8, prompt: int = 6, response: int = 24) -> DataProto:
    """Random tokens in verl's layout, prompts left-padded: put your rollouts here."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, vocabulary, (count, prompt + response), generator=generator)  # [B, P + R]
    mask = torch.ones_like(ids)
    for i in range(count):
        mask[i, : i % prompt] = 0  # prompts of different lengths
        mask[i, prompt + response - i :] = 0  # and responses
    return DataProto.from_single_dict({"input_ids": ids * mask, "attention_mask": mask, "responses": ids[:, prompt:]})


def main(policy_dir: str) -> None:
    """Train for a few rounds on made-up rollouts, and save."""
    import ray
    from transformers import AutoConfig

    ray.init()
    group = start(policy_dir)
    data = made_up_rollouts(AutoConfig.from_pretrained(policy_dir).vocab_size)
    for _ in range(5):
        result = group.learn(data)
        print({name: float(result.batch[name][0]) for name in ("loss", "accept_length")})
    print(*group.save(str(Path("drafter").absolute())))


if __name__ == "__main__":
    main(sys.argv[1])
