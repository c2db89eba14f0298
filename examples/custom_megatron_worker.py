"""verl's own Megatron actor with a drafter beside it, with `verl_tlt.drafter` alone.

    python examples/custom_megatron_worker.py POLICY_DIRECTORY

The states come out of the actor's own forward, and the parts the drafter shares from its live weights, as a weight
sync gathers them. Data-parallel ranks train one drafter: each learns from its own rollouts, then all take the average
change. Each rank holds the whole policy here; where tensor, pipeline or context parallelism split it, a rank sees a
part of the layers or tokens, which verl_tlt/actor/adapters.py shows how to find.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils import tensordict_utils as tu
from verl.workers.engine_workers import TrainingWorker

from verl_tlt.drafter import (
    DrafterTrainer,
    Text,
    VerifierWeights,
    accept_length,
    acceptance,
    batches,
    build_drafter,
    refresh_verifier_weights,
    save_drafter,
    train_until,
)
from verl_tlt.drafter import TrainingSequence as States

PARTS = {"model.embed_tokens.weight": "embed", "lm_head.weight": "lm_head", "model.norm.weight": "norm"}


class DraftingActor(TrainingWorker):
    """verl's training worker, which also holds a drafter."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_drafter(self, policy_dir: str, aux_layers: tuple[int, int, int] | None = None) -> None:
        """Build a drafter with a random head, and watch the layers whose inputs it learns from.

        Args:
            policy_dir: the policy, a Hugging Face directory.
            aux_layers: those layers; None: those of EAGLE-3.
        """
        drafter = build_drafter(policy_dir, aux_layers=aux_layers)
        self.policy_dir, self.trainer = policy_dir, DrafterTrainer(drafter, ttt_steps=3)
        self.layers, self.seen = drafter.target_layer_ids, {}
        self.refresh()
        (chunk,) = self.engine.module  # one for each pipeline stage on this rank
        while not hasattr(chunk, "decoder"):
            chunk = chunk.module
        assert len(chunk.decoder.layers) == chunk.config.num_layers, "each rank is to hold every layer"
        for layer in chunk.decoder.layers:
            layer.register_forward_pre_hook(self._keep(layer.layer_number - 1), with_kwargs=True)
        chunk.decoder.final_layernorm.register_forward_pre_hook(self._keep("last"), with_kwargs=True)

    def _keep(self, name: int | str) -> Callable[..., None]:
        def hook(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.seen[name] = (args[0] if args else kwargs["hidden_states"]).detach()[:, 0]  # [T, 1, H]

        return hook

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def refresh(self) -> None:
        """Give the drafter the actor's embedding, head and final norm; again after every update of the policy."""
        found = {PARTS[n]: t.detach() for n, t in self.engine.get_per_tensor_param()[0] if n in PARTS}
        found.setdefault("lm_head", found["embed"])  # tied
        refresh_verifier_weights(self.trainer.model, VerifierWeights(**found))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def learn(self, shares: Sequence[Sequence[Text]], batch_tokens: int = 512) -> dict[str, float]:
        """Forward this rank's rollouts, learn from them once, and take the average of what all ranks learned.

        Args:
            shares: rollouts for each rank.
            batch_tokens: rows of a packed micro-batch of the drafter.
        """
        states = [self._states(text) for text in shares[self.rank]]
        before = {name: p.detach().clone() for name, p in self.trainer.parameters.items()}
        summary = train_until(self.trainer, batches(states, batch_tokens), lambda: False)
        for name, parameter in self.trainer.parameters.items():
            change = parameter.detach() - before[name]
            torch.distributed.all_reduce(change)
            with torch.no_grad():
                parameter.copy_(before[name] + change / self.world_size)
        tau = accept_length(acceptance(self.trainer.model, states, max_draft=3))
        return {"loss": summary.loss, "accept_length": tau}

    def _states(self, text: Text) -> States:
        """One rollout through the actor, as verl's trainer has old log-probs computed."""
        tokens, length = torch.tensor(text.tokens), len(text.tokens)
        mask = (torch.arange(length) >= text.prompt_len).long()
        rows = {"input_ids": tokens, "position_ids": torch.arange(length), "loss_mask": mask,
                "responses": tokens[text.prompt_len :]}  # fmt: skip
        jagged = {k: torch.nested.as_nested_tensor([row], layout=torch.jagged) for k, row in rows.items()}
        self.infer_batch(tu.get_tensordict(jagged, {
            "temperature": 1.0, "use_dynamic_bsz": True, "max_token_len_per_gpu": length, "calculate_entropy": False,
            "compute_loss": False,
        }))  # fmt: skip
        aux = torch.cat([self.seen[layer][:length] for layer in self.layers], dim=-1)  # [L, 3H]
        return States(tokens, text.prompt_len, aux, self.seen["last"][:length])

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save(self, directory: str) -> str:
        """Write the drafter, servable with `--speculative-config`; all ranks hold the same, rank 0 writes."""
        if self.rank == 0:
            save_drafter(self.trainer.model, directory, {"policy": self.policy_dir, "steps": self.trainer.steps})
        return directory


def start(
    policy_dir: str, aux_layers: tuple[int, int, int] | None = None, workers: int = 1, **engine: Any
) -> RayWorkerGroup:
    """A worker group of verl's with its Megatron actor, data-parallel; `engine`: settings of `McoreEngineConfig`."""
    import ray
    from verl.trainer.config import CheckpointConfig
    from verl.utils.device import get_device_name
    from verl.workers.config import HFModelConfig, McoreEngineConfig, McoreOptimizerConfig, TrainingWorkerConfig

    config = TrainingWorkerConfig(
        model_type="language_model", model_config=HFModelConfig(path=policy_dir),
        engine_config=McoreEngineConfig(**engine), checkpoint_config=CheckpointConfig(),
        optimizer_config=McoreOptimizerConfig(lr=1e-6, total_training_steps=1),
    )  # fmt: skip
    pool = RayResourcePool([workers], use_gpu=torch.cuda.is_available(), max_colocate_count=1)
    actor = RayClassWithInitArgs(ray.remote(DraftingActor), config)
    group = RayWorkerGroup(pool, actor, device_name=get_device_name())
    group.reset()
    group.init_drafter(policy_dir, aux_layers)
    return group


def made_up_rollouts(vocabulary: int, count: int = 8) -> list[Text]:
    """Something that can be learned, eight tokens over and over: put your rollouts here."""
    rng = torch.Generator().manual_seed(0)
    return [Text(tuple(torch.randint(3, vocabulary, (8,), generator=rng).repeat(6).tolist()), 8) for _ in range(count)]


def main(policy_dir: str) -> None:
    """Train for a few rounds on made-up rollouts, and save."""
    import ray
    from transformers import AutoConfig

    ray.init()
    group = start(policy_dir)
    rollouts = made_up_rollouts(AutoConfig.from_pretrained(policy_dir).vocab_size)
    for _ in range(5):
        print(*group.learn([rollouts]))
    print(*group.save(str(Path("drafter").absolute())))


if __name__ == "__main__":
    main(sys.argv[1])
